//! The requests of tus for one upload, by their method.

use std::sync::Arc;

use axum::{
    Extension,
    extract::{Request, State},
    handler::Handler as _,
    http::{Method, StatusCode, header},
    response::{IntoResponse as _, Response},
};

use super::{
    append::append,
    upload::{check_version, give_up, offset, options, with_tus},
};
use crate::{
    gateway::{
        Gateway,
        listener::METHOD_OVERRIDE,
        reply::{Acted, refused_with},
    },
    protocol::ErrorCode,
};

/// Handles a request of tus for an upload, whose method `X-HTTP-Method-Override` may replace: some networks let only `GET`
/// and `POST` pass.
pub(super) async fn one(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let headers = request.headers();
    let method = match headers.get(METHOD_OVERRIDE) {
        Some(method) => Method::from_bytes(method.as_bytes()).ok(),
        None => Some(request.method().clone()),
    };
    let is_options = method == Some(Method::OPTIONS);
    // Those of a bucket send none, and what is asked in `OPTIONS` decides nothing.
    if headers.contains_key("tus-resumable")
        && !is_options
        && let Err(response) = check_version(headers)
    {
        return with_tus(response);
    }
    let acted = method.clone().map(Acted).map(Extension);
    let has_tus = gateway
        .files
        .as_ref()
        .is_some_and(|files| files.storage.directory().is_some());
    let response = match method {
        Some(Method::GET | Method::HEAD) => offset.call(request, gateway).await,
        Some(Method::PATCH) => append.call(request, gateway).await,
        Some(Method::DELETE) => give_up.call(request, gateway).await,
        Some(Method::OPTIONS) => options.call(request, gateway).await,
        _ => {
            let refusal = "the methods of an upload are HEAD, PATCH and DELETE".to_owned();
            let status = StatusCode::METHOD_NOT_ALLOWED;
            let response = refused_with(status, ErrorCode::BadRequest, refusal);
            ([(header::ALLOW, "HEAD, PATCH, DELETE, OPTIONS")], response).into_response()
        }
    };
    let response = (acted, response).into_response();
    if has_tus {
        with_tus(response)
    } else {
        response
    }
}
