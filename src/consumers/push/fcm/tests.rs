use serde_json::json;
use tokio::time::advance;

use super::{
    super::{
        Content, Notification,
        fixtures::{Recorder, account_json, message as notification, rsa_pem, silent, token_part},
    },
    *,
};

fn fcm() -> Fcm {
    let account = account_json(&rsa_pem()).to_string();
    let settings = FcmSettings {
        key_file: PathBuf::new(),
        url: "https://fcm.example.org".parse().unwrap(),
    };
    Fcm::new(settings, ServiceAccount::parse(account.as_bytes()).unwrap())
}

fn payload(notification: &Notification, content: Content) -> Payload {
    Payload::new(notification, content, now_s() + 100)
}

fn grant(post: &Recorder, token: &str) {
    post.answer(
        200,
        &json!({"access_token": token, "expires_in": 3_600}).to_string(),
    );
}

fn error(status: u16, general: &str, code: Option<&str>) -> (u16, String) {
    let kind = "type.googleapis.com/google.firebase.fcm.v1.FcmError";
    let details = code.map(|code| json!([{"@type": kind, "errorCode": code}]));
    let details = details.unwrap_or(json!([]));
    let error = json!({"code": status, "status": general, "message": "text", "details": details});
    (status, json!({ "error": error }).to_string())
}

#[tokio::test(start_paused = true)]
async fn a_message_has_an_access_token_for_a_signed_assertion() {
    let (fcm, post) = (fcm(), Recorder::default());
    let payload = payload(&notification(Some("Lunch"), "See you"), Content::Full);
    grant(&post, "access-1");
    assert_eq!(fcm.send(&post, "device", &payload).await, Sent::Done);
    assert_eq!(fcm.send(&post, "device", &payload).await, Sent::Done);
    let [asked, sent, again] = &post.take()[..] else {
        panic!("one request for a token and two messages")
    };
    assert_eq!(asked.url.as_str(), "https://oauth2.googleapis.com/token");
    let body = std::str::from_utf8(&asked.body).unwrap();
    let assertion = body
        .strip_prefix("grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Ajwt-bearer&assertion=")
        .unwrap();
    assert_eq!(
        token_part(assertion, 0),
        json!({"alg": "RS256", "kid": "k1", "typ": "JWT"})
    );
    let claims = token_part(assertion, 1);
    assert_eq!(claims["iss"], "push@chat-1.iam.gserviceaccount.com");
    assert_eq!(claims["aud"], "https://oauth2.googleapis.com/token");
    assert_eq!(
        claims["scope"],
        "https://www.googleapis.com/auth/firebase.messaging"
    );
    let lasts = claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap();
    assert_eq!(lasts, 3_600);
    let address = "https://fcm.example.org/v1/projects/chat-1/messages:send";
    for request in [sent, again] {
        assert_eq!(request.url.as_str(), address);
        assert_eq!(request.header("authorization"), Some("Bearer access-1"));
    }
}

#[test]
fn a_message_is_shown_by_the_system_or_by_the_app() {
    let group = notification(Some("Lunch"), "See you");
    let conversation = group.conversation.to_string();
    let full = message("device", &payload(&group, Content::Full));
    let shown = json!({"title": "Lunch", "body": "bob: See you"});
    assert_eq!(full["message"]["notification"], shown);
    assert_eq!(full["message"]["token"], "device");
    let android = &full["message"]["android"];
    assert_eq!(android["notification"], json!({"tag": conversation}));
    assert_eq!(android["collapse_key"], conversation);
    assert_eq!(android["priority"], "HIGH");
    let ttl = android["ttl"].as_str().unwrap();
    assert!(["99s", "100s"].contains(&ttl), "{ttl}");
    let data = full["message"]["data"]["chat"].as_str().unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["body"], "See you");

    let dm = message(
        "device",
        &payload(&notification(None, "See you"), Content::Full),
    );
    let shown = json!({"title": "bob", "body": "See you"});
    assert_eq!(dm["message"]["notification"], shown);

    for silent in [
        payload(&group, Content::None),
        payload(&silent(), Content::Full),
    ] {
        let message = message("device", &silent);
        assert!(message["message"].get("notification").is_none());
        assert!(message["message"]["android"].get("notification").is_none());
        let expected = if silent.clear { "NORMAL" } else { "HIGH" };
        assert_eq!(message["message"]["android"]["priority"], expected);
        assert!(!message.to_string().contains("See you"));
    }
}

#[test]
fn the_longest_message_is_within_the_limit_of_fcm() {
    for text in ["\"", "\u{1}", "漢", "\\", "x"] {
        let mut long = notification(Some(&text.repeat(256)), &text.repeat(16_384));
        let message_of = long.message.as_mut().unwrap();
        message_of.sender = crate::model::UserId::new(&"\"".repeat(64)).unwrap();
        let message = message("device", &payload(&long, Content::Full));
        let bytes = message["message"]["data"].to_string().len()
            + message["message"]["notification"].to_string().len();
        assert!(bytes <= 4_096, "{text:?}: {bytes}");
    }
}

#[tokio::test(start_paused = true)]
async fn each_error_has_its_result() {
    let (fcm, post) = (fcm(), Recorder::default());
    let payload = payload(&notification(None, "hello"), Content::Full);
    grant(&post, "access-1");
    let wait = Sent::Later(Some(Duration::from_secs(7)));
    let refused = |text: &str| Sent::Refused(text.into());
    for ((status, body), expected) in [
        (error(404, "NOT_FOUND", Some("UNREGISTERED")), Sent::Gone),
        (
            error(403, "PERMISSION_DENIED", Some("SENDER_ID_MISMATCH")),
            Sent::Gone,
        ),
        (error(503, "UNAVAILABLE", Some("UNAVAILABLE")), wait.clone()),
        (error(500, "INTERNAL", Some("INTERNAL")), wait.clone()),
        (
            error(429, "RESOURCE_EXHAUSTED", Some("QUOTA_EXCEEDED")),
            wait.clone(),
        ),
        (error(403, "PERMISSION_DENIED", None), wait.clone()),
        (
            error(401, "UNAUTHENTICATED", Some("THIRD_PARTY_AUTH_ERROR")),
            wait.clone(),
        ),
        ((502, "<html>".into()), wait.clone()),
        // The project is wrong, not the device.
        (
            error(404, "NOT_FOUND", None),
            refused("status 404 NOT_FOUND"),
        ),
        (
            error(400, "INVALID_ARGUMENT", Some("INVALID_ARGUMENT")),
            refused("status 400 INVALID_ARGUMENT"),
        ),
        ((302, String::new()), refused("status 302 ")),
    ] {
        post.answer_later(status, &body, Some(7));
        assert_eq!(
            fcm.send(&post, "device", &payload).await,
            expected,
            "{body}"
        );
    }
    for failure in [
        Failure::Timeout,
        Failure::Network("x".into()),
        Failure::Refused("x".into()),
    ] {
        post.fail(failure);
        assert_eq!(fcm.send(&post, "device", &payload).await, Sent::Later(None));
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_access_token_is_replaced_once() {
    let (fcm, post) = (fcm(), Recorder::default());
    let payload = payload(&notification(None, "hello"), Content::Full);
    let (status, body) = error(401, "UNAUTHENTICATED", None);
    grant(&post, "access-1");
    post.answer(status, &body);
    grant(&post, "access-2");
    assert_eq!(fcm.send(&post, "device", &payload).await, Sent::Done);
    let requests = post.take();
    assert_eq!(requests.len(), 4);
    assert_eq!(requests[3].header("authorization"), Some("Bearer access-2"));

    post.answer(status, &body);
    grant(&post, "access-3");
    post.answer(status, &body);
    assert_eq!(fcm.send(&post, "device", &payload).await, Sent::Later(None));
    assert_eq!(post.take().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn one_access_token_is_requested_for_all_and_before_it_ends() {
    let (fcm, post) = (fcm(), Recorder::default());
    let payload = payload(&notification(None, "hello"), Content::Full);
    grant(&post, "access-1");
    let sent = futures_util::future::join_all((0..10).map(|_| fcm.send(&post, "d", &payload)));
    assert!(sent.await.iter().all(|sent| *sent == Sent::Done));
    assert_eq!(post.take().len(), 1 + 10);
    advance(Duration::from_secs(3_299)).await;
    fcm.send(&post, "d", &payload).await;
    assert_eq!(post.take().len(), 1);
    advance(Duration::from_secs(2)).await;
    grant(&post, "access-2");
    fcm.send(&post, "d", &payload).await;
    assert_eq!(post.take().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn without_an_access_token_there_is_a_pause() {
    let (fcm, post) = (fcm(), Recorder::default());
    let payload = payload(&notification(None, "hello"), Content::Full);
    let send = || fcm.send(&post, "device", &payload);
    post.answer(400, r#"{"error": "invalid_grant"}"#);
    assert_eq!(send().await, Sent::Later(Some(PAUSE)));
    assert_eq!(send().await, Sent::Later(Some(PAUSE)));
    assert_eq!(post.take().len(), 1);
    advance(PAUSE).await;
    post.answer_later(503, "", Some(60));
    assert_eq!(send().await, Sent::Later(Some(Duration::from_secs(60))));
    advance(Duration::from_secs(60)).await;
    post.fail(Failure::Timeout);
    assert_eq!(send().await, Sent::Later(Some(PAUSE)));
    advance(PAUSE).await;
    grant(&post, "access-1");
    assert_eq!(send().await, Sent::Done);
}
