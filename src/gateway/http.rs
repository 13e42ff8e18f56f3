//! The public port: the WebSocket, and the same requests over HTTP for back ends. Their bearer token has `role:
//! service`; the header `chat-user` names the user for whom they act.

pub(super) mod deletion;
pub(super) mod devices;

use std::sync::{Arc, LazyLock};

use axum::{
    Json, Router,
    extract::{FromRequestParts as _, RawPathParams, State},
    http::{StatusCode, Uri},
    middleware,
    response::{IntoResponse, Response},
    routing::{MethodFilter, delete, get, on, post},
};
use serde::Serialize;
use url::form_urlencoded;
use utoipa::ToSchema;

use super::{
    Gateway,
    development::token,
    headers,
    reply::{Path, json, refused, refused_with, respond, wrong_path},
    requests,
    service::{self, PresenceRead, Service, SessionsClose, audit},
    upgrade::upgrade,
};
use crate::{
    model::{ConversationId, Seq, UserId},
    protocol::{ErrorCode, Given, Method, Refusal, Request, Rest, Route},
};

/// Returns the routes of the public port. `others` are added, and an unknown path is answered the same way.
pub(super) fn routes(gateway: Arc<Gateway>, others: Router) -> Router {
    Router::new()
        .merge(of_requests())
        .route("/v1/users/{user}/presence", get(presence))
        .route("/v1/users/{user}/sessions", delete(disconnect))
        .merge(deletion::routes())
        .merge(super::consumers::routes())
        .merge(super::files::routes(&gateway))
        .merge(devices::routes(&gateway))
        .route_layer(middleware::from_fn(audit))
        .route("/v1/ws", get(upgrade))
        .route("/v1/tokens", post(token))
        .fallback(no_route)
        .layer(axum::extract::DefaultBodyLimit::max(
            gateway.limits.frame_bytes,
        ))
        .with_state(gateway)
        .merge(others)
        .method_not_allowed_fallback(async || {
            let text = "this route has no such method: see /openapi.json";
            let status = StatusCode::METHOD_NOT_ALLOWED;
            refused_with(status, ErrorCode::BadRequest, text.into())
        })
        .layer(middleware::from_fn(headers::single))
}

async fn no_route(uri: Uri) -> Response {
    let is_below_root = uri.path().len() > 1;
    let text = if is_below_root && uri.path().ends_with('/') {
        "no such route: no path ends with /; see /openapi.json"
    } else {
        "no such route: see /openapi.json"
    };
    refused(ErrorCode::NotFound, text)
}

type At = State<Arc<Gateway>>;

async fn ask(gateway: &Gateway, acting: UserId, request: Request) -> Response {
    let answer = requests::handle(gateway, acting, request).await;
    respond(answer.unwrap_or(crate::protocol::Answer::Ok(Default::default())))
}

/// Returns the routes of the requests in the table of requests.
fn of_requests() -> Router<Arc<Gateway>> {
    static ROUTES: LazyLock<Vec<Route>> = LazyLock::new(Request::routes);
    ROUTES.iter().fold(Router::new(), |routes, route| {
        let served = async move |State(gateway): At, request: axum::extract::Request| {
            served(route, gateway, request)
                .await
                .unwrap_or_else(|refused| refused)
        };
        let method = match route.method {
            Method::Get => MethodFilter::GET,
            Method::Put => MethodFilter::PUT,
            Method::Post => MethodFilter::POST,
            Method::Patch => MethodFilter::PATCH,
            Method::Delete => MethodFilter::DELETE,
        };
        routes.route(route.path, on(method, served))
    })
}

/// Answers a request of a back end.
async fn served(
    route: &Route,
    gateway: Arc<Gateway>,
    request: axum::extract::Request,
) -> Result<Response, Response> {
    let (mut parts, body) = request.into_parts();
    let acting = service::admitted(&parts, &gateway, route.scope)?;
    let path = RawPathParams::from_request_parts(&mut parts, &()).await;
    let path = path.map_err(|_| wrong_path())?;
    let path: Vec<_> = path
        .iter()
        .map(|(name, word)| (name.to_owned(), word.to_owned()))
        .collect();
    if !path.iter().all(|(name, word)| is_right(name, word)) {
        return Err(wrong_path());
    }
    let bytes;
    let rest = if route.body.is_some() {
        bytes = json(axum::extract::Request::from_parts(parts, body), &gateway).await?;
        Rest::Body(&bytes)
    } else {
        let query = parts.uri.query().filter(|_| route.method == Method::Get);
        Rest::Query(
            form_urlencoded::parse(query.unwrap_or_default().as_bytes())
                .into_owned()
                .collect(),
        )
    };
    let read = (route.read)(&Given { path: &path, rest });
    let request = read.map_err(|text| refused(ErrorCode::BadRequest, text))?;
    Ok(ask(&gateway, acting, request).await)
}

/// Whether a part of a path is what its name stands for.
fn is_right(name: &str, word: &str) -> bool {
    match name {
        "conversation" => word.parse::<ConversationId>().is_ok(),
        "user" => word.parse::<UserId>().is_ok(),
        "seq" => word.parse::<Seq>().is_ok(),
        _ => true,
    }
}

/// Returns whether a user is online, and when they last were.
#[utoipa::path(get, path = "/v1/users/{user}/presence", params(("user" = String, Path)),
    security(("service" = ["presence:read"])),
    responses((status = 200, body = crate::protocol::PresenceItem), (status = "default", body = Refusal)))]
pub(super) async fn presence(
    State(gateway): At,
    _: Service<PresenceRead>,
    Path(user): Path<UserId>,
) -> Response {
    match gateway.users.presence(&user).await {
        Ok(item) => Json(item).into_response(),
        Err(error) => respond(requests::refused(&error)),
    }
}

/// Closes all connections of a user (4502). Their tokens stay valid, so revoke those first.
#[utoipa::path(delete, path = "/v1/users/{user}/sessions", params(("user" = String, Path)),
    security(("service" = ["sessions:close"])),
    responses((status = 200, body = Disconnected), (status = "default", body = Refusal)))]
pub(super) async fn disconnect(
    State(gateway): At,
    _: Service<SessionsClose>,
    Path(user): Path<UserId>,
) -> Response {
    match gateway.users.disconnect(&user).await {
        Ok(closed) => Json(Disconnected { closed }).into_response(),
        Err(error) => respond(requests::refused(&error)),
    }
}

#[derive(Serialize, ToSchema)]
pub(super) struct Disconnected {
    closed: usize,
}

#[cfg(test)]
mod tests;
