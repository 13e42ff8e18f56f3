//! Tests of what is checked before a conversation's owner is asked: scopes, paths, queries and bodies.

use axum::{
    body::{Body, to_bytes},
    http::{Request, header},
};
use serde_json::{Value, json};
use tower_service::Service as _;

use super::*;
use crate::{
    config::{Algorithm, Config, Key},
    gateway::{fixture, openapi},
    protocol,
    store::{
        Store,
        simulated::{Faults, Simulated},
    },
};

const AT: &str = "/v1/conversations/0199c0de-0000-4000-8000-000000000001";

struct Fixture {
    gateway: Arc<Gateway>,
}

impl Fixture {
    async fn new() -> Self {
        let mut config = Config::default();
        config.auth.keys = vec![Key {
            algorithm: Algorithm::HS256,
            kid: None,
            secret: Some("a secret of more than 32 bytes, for tests".into()),
            public_key_file: None,
        }];
        let store: Arc<dyn Store> = Arc::new(Simulated::new(1, Faults::NONE));
        let gateway = Arc::new(fixture::gateway(&config, store).await);
        Self { gateway }
    }

    /// Asks with a token of this scope. Returns the status and the body.
    async fn asked(&self, scope: &str, method: &str, path: &str, body: Value) -> (u16, Value) {
        let service = UserId::new("backend").unwrap();
        let token = self.gateway.tokens.sign(&service, Some(scope), 60).unwrap();
        let at = if path.starts_with("/v1") { "" } else { AT };
        let request = Request::builder()
            .method(method)
            .uri(format!("{at}{path}"))
            .header(header::AUTHORIZATION, format!("Bearer {token}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body.to_string()))
            .unwrap();
        let response = self.gateway.public().call(request).await.unwrap();
        let status = response.status().as_u16();
        let bytes = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, serde_json::from_slice(&bytes).unwrap_or_default())
    }
}

/// Requests of all routes here that are valid, each with the scope it requires.
fn valid() -> Vec<(&'static str, &'static str, &'static str, Value)> {
    let nothing = Value::Null;
    vec![
        (
            "messages:write",
            "PATCH",
            "/messages/4",
            json!({"body": "new"}),
        ),
        ("messages:write", "DELETE", "/messages/4", nothing.clone()),
        (
            "messages:write",
            "DELETE",
            "/messages/4?moderator=false",
            nothing.clone(),
        ),
        (
            "messages:moderate",
            "DELETE",
            "/messages/4?moderator=true",
            nothing.clone(),
        ),
        (
            "messages:write",
            "POST",
            "/messages/delete",
            json!({"seqs": [4]}),
        ),
        (
            "messages:moderate",
            "POST",
            "/messages/delete?moderator=true",
            json!({"seqs": [4]}),
        ),
        (
            "messages:write",
            "PUT",
            "/messages/4/reactions/%F0%9F%91%8D",
            nothing.clone(),
        ),
        (
            "messages:write",
            "DELETE",
            "/messages/4/reactions/a%2Fb",
            nothing.clone(),
        ),
        (
            "messages:read",
            "GET",
            "/messages/4/reactions?emoji=%F0%9F%91%8D&limit=3",
            nothing.clone(),
        ),
        (
            "messages:read",
            "GET",
            "/changes?after=0&limit=10",
            nothing.clone(),
        ),
    ]
}

#[tokio::test(start_paused = true)]
async fn each_route_requires_its_scope() {
    let fixture = Fixture::new().await;
    let scopes = ["messages:read", "messages:write", "messages:moderate"];
    for (required, method, path, body) in valid() {
        for scope in scopes {
            let (status, answer) = fixture.asked(scope, method, path, body.clone()).await;
            let what = format!("{method} {path} with {scope}: {status} {answer}");
            if scope == required {
                // The conversation does not exist.
                assert!(![200, 400, 403, 405].contains(&status), "{what}");
            } else {
                assert_eq!(
                    (status, &answer["code"]),
                    (403, &"forbidden".into()),
                    "{what}"
                );
                assert!(answer["message"].to_string().contains(required), "{what}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn who_lacks_a_scope_is_refused_before_anything_is_read() {
    let fixture = Fixture::new().await;
    for route in protocol::Request::routes() {
        let path = route
            .path
            .replace("{conversation}", "x")
            .replace("{seq}", "x");
        let path = path.replace("{user}", "x").replace("{emoji}", "x");
        let method = format!("{:?}", route.method).to_ascii_uppercase();
        let (status, answer) = fixture
            .asked("consumers:read", &method, &path, json!(7))
            .await;
        let what = format!("{method} {path}: {answer}");
        assert_eq!(
            (status, &answer["code"]),
            (403, &"forbidden".into()),
            "{what}"
        );
        assert!(
            answer["message"].to_string().contains(route.scope),
            "{what}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn head_reads_the_query_as_get_does() {
    let fixture = Fixture::new().await;
    for method in ["GET", "HEAD"] {
        let (status, _) = fixture
            .asked("messages:read", method, "/v1/inbox?limit=x", Value::Null)
            .await;
        assert_eq!(status, 400, "{method}");
        let (status, _) = fixture
            .asked("messages:read", method, "/v1/inbox?limit=1", Value::Null)
            .await;
        assert_eq!(status, 200, "{method}");
    }
}

#[tokio::test(start_paused = true)]
#[expect(clippy::too_many_lines, reason = "a table: one request of each kind")]
async fn mistakes_are_json_errors() {
    let fixture = Fixture::new().await;
    let many = json!({"seqs": vec![1; 257]});
    for (method, path, body, status, code) in [
        (
            "PATCH",
            "/messages/0",
            json!({"body": "a"}),
            400,
            "bad_request",
        ),
        (
            "PATCH",
            "/messages/x",
            json!({"body": "a"}),
            400,
            "bad_request",
        ),
        ("PATCH", "/messages/4", json!({}), 400, "bad_request"),
        ("DELETE", "/messages/0", json!(null), 400, "bad_request"),
        (
            "DELETE",
            "/messages/4?moderator=x",
            json!(null),
            400,
            "bad_request",
        ),
        (
            "POST",
            "/messages/delete",
            json!({"seqs": []}),
            400,
            "bad_request",
        ),
        (
            "POST",
            "/messages/delete",
            json!({"seqs": [0]}),
            400,
            "bad_request",
        ),
        ("POST", "/messages/delete", many, 413, "too_large"),
        (
            "PUT",
            "/messages/4/reactions/a%20b",
            json!(null),
            400,
            "bad_request",
        ),
        (
            "PUT",
            "/messages/4/reactions/%FF",
            json!(null),
            400,
            "bad_request",
        ),
        (
            "GET",
            "/messages/4/reactions?limit=0",
            json!(null),
            400,
            "bad_request",
        ),
        (
            "GET",
            "/messages/4/reactions?emoji=",
            json!(null),
            400,
            "bad_request",
        ),
        ("GET", "/changes", json!(null), 400, "bad_request"),
        ("GET", "/changes?after=-1", json!(null), 400, "bad_request"),
        (
            "GET",
            "/changes?after=1&limit=0",
            json!(null),
            400,
            "bad_request",
        ),
        ("PUT", "/changes", json!(null), 405, "bad_request"),
    ] {
        let scope = "messages:read messages:write messages:moderate";
        let (is, answer) = fixture.asked(scope, method, path, body).await;
        let what = format!("{method} {path}: {answer}");
        assert_eq!((is, &answer["code"]), (status, &code.into()), "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stranger_with_a_wrong_query_is_not_told_of_the_query() {
    let fixture = Fixture::new().await;
    let request = Request::delete(format!("{AT}/messages/4?moderator=x"));
    let request = request.body(Body::empty()).unwrap();
    let response = fixture.gateway.public().call(request).await.unwrap();
    assert_eq!(response.status(), 401);
}

#[test]
fn all_routes_are_documented() {
    let document = serde_json::to_value(openapi::document()).unwrap();
    let paths = document["paths"].as_object().unwrap();
    let named = |end: &str| format!("/v1/conversations/{{conversation}}{end}");
    for (end, methods) in [
        ("/messages/{seq}", &["patch", "delete"][..]),
        ("/messages/delete", &["post"]),
        ("/messages/{seq}/reactions", &["get"]),
        ("/messages/{seq}/reactions/{emoji}", &["put", "delete"]),
        ("/changes", &["get"]),
    ] {
        let path = paths[&named(end)].as_object().unwrap();
        for method in methods {
            assert!(path[*method]["security"].is_array(), "{method} {end}");
        }
        assert_eq!(path.len(), methods.len());
    }
}
