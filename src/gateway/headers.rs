//! Refuses requests in which a header occurs twice that may occur once.

use axum::{extract::Request, http::header, middleware::Next, response::Response};

use super::{
    listener::METHOD_OVERRIDE,
    reply::refused,
    service::{INVALID_REQUEST, challenged},
};
use crate::protocol::ErrorCode;

/// The headers of which the gateway reads one value. Of two it would choose one, and a proxy in front of it might have
/// checked the other.
static SINGLE: [header::HeaderName; 16] = [
    header::AUTHORIZATION,
    header::CONTENT_TYPE,
    header::HOST,
    header::IF_RANGE,
    header::ORIGIN,
    header::RANGE,
    header::SEC_WEBSOCKET_KEY,
    header::SEC_WEBSOCKET_VERSION,
    header::HeaderName::from_static("access-control-request-method"),
    header::HeaderName::from_static("chat-user"),
    header::HeaderName::from_static("sec-fetch-site"),
    header::HeaderName::from_static("tus-resumable"),
    header::HeaderName::from_static("upload-length"),
    header::HeaderName::from_static("upload-metadata"),
    header::HeaderName::from_static("upload-offset"),
    header::HeaderName::from_static(METHOD_OVERRIDE),
];

/// Answers a request with 400 if one of [`SINGLE`] occurs more than once.
pub(super) async fn single(request: Request, next: Next) -> Response {
    let headers = request.headers();
    // Most requests have no header twice.
    if headers.len() > headers.keys_len() {
        let is_repeated =
            |name: &&header::HeaderName| headers.get_all(*name).iter().nth(1).is_some();
        if let Some(name) = SINGLE.iter().find(is_repeated) {
            let text = format!("the header {name} occurs more than once");
            let refused = refused(ErrorCode::BadRequest, text);
            return if name == header::AUTHORIZATION {
                challenged(refused, INVALID_REQUEST)
            } else {
                refused
            };
        }
    }
    next.run(request).await
}
