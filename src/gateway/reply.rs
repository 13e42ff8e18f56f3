//! The common part of all HTTP requests: extractors and responses. Every error has the same JSON body.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, RequestExt as _,
    body::{Bytes, HttpBody as _},
    extract::{FromRequest, FromRequestParts},
    http::{HeaderMap, Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::Gateway;
use crate::{
    model::{ConversationId, limits::LAST_REQUEST},
    protocol::{Answer, Created, ErrorCode, Refusal, body},
};

const WRONG_PATH: &str = "a part of the path is not what it must be: conversations and files are UUIDs, seqs are whole numbers, and \
                          users have 1 to 64 bytes without white space, percent-encoded";

/// The time for a request's body, counted from the end of its head.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// After how long a request may be repeated, if nobody knows better.
const RETRY_MS: u64 = 1_000;

/// The facts of a response that the audit log records.
#[derive(Clone, Copy)]
pub(super) struct Said {
    pub(super) error: Option<ErrorCode>,
    pub(super) conversation: Option<ConversationId>,
}

/// The method by which a request was handled, if a header replaced it.
#[derive(Clone)]
pub(super) struct Acted(pub(super) Method);

pub(super) fn refused(code: ErrorCode, message: impl Into<String>) -> Response {
    let is_passing = [ErrorCode::RateLimited, ErrorCode::Unavailable].contains(&code);
    respond(Answer::Error(Refusal {
        code,
        message: message.into(),
        retry_after_ms: is_passing.then_some(RETRY_MS),
    }))
}

/// Refuses a request because the gateway drains. It can be repeated on another one, or after the restart.
pub(super) fn stopping() -> Response {
    refused(ErrorCode::Unavailable, "the gateway is stopping")
}

/// Returns an error like [`refused`], with a status that is more precise than that of the code.
pub(super) fn refused_with(status: StatusCode, code: ErrorCode, message: String) -> Response {
    let mut response = refused(code, message);
    *response.status_mut() = status;
    response
}

/// Converts an answer to an HTTP response with the same fields and a matching status.
pub(super) fn respond(answer: Answer) -> Response {
    let mut said = Said {
        error: None,
        conversation: None,
    };
    let (status, retry_after_s) = match &answer {
        Answer::Error(refusal) => {
            said.error = Some(refusal.code);
            let status = StatusCode::from_u16(refusal.code.http_status());
            let after = refusal
                .retry_after_ms
                .map(|ms| ms.div_ceil(1000).to_string());
            (status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), after)
        }
        Answer::Created(Created {
            existed,
            conversation,
        }) => {
            said.conversation = Some(*conversation);
            let status = if *existed {
                StatusCode::OK
            } else {
                StatusCode::CREATED
            };
            (status, None)
        }
        _ => (StatusCode::OK, None),
    };
    let retry_after = retry_after_s.map(|s| [(header::RETRY_AFTER, s)]);
    let mut response = (status, retry_after, Json(answer)).into_response();
    response.extensions_mut().insert(said);
    response
}

/// An extractor for a JSON body. Its errors have the same form as all others.
pub(super) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<Arc<Gateway>> for Body<T> {
    type Rejection = Response;

    async fn from_request(
        request: axum::extract::Request,
        gateway: &Arc<Gateway>,
    ) -> Result<Self, Response> {
        let bytes = json(request, gateway).await?;
        body(&bytes)
            .map(Self)
            .map_err(|text| refused(ErrorCode::BadRequest, text))
    }
}

/// Returns the bytes of a JSON body.
pub(super) async fn json(
    request: axum::extract::Request,
    gateway: &Arc<Gateway>,
) -> Result<Bytes, Response> {
    if !is_json(request.headers()) {
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        let text = "the body must be JSON, with content-type: application/json".into();
        return Err(refused_with(status, ErrorCode::BadRequest, text));
    }
    // The limit of the route shortens the body that the head announces.
    let announced = request.body().size_hint().lower();
    let request = request.with_limited_body();
    let limit = request.body().size_hint().lower();
    if limit < announced {
        let text = format!("a body has at most {limit} bytes");
        return Err(refused(ErrorCode::TooLarge, text));
    }
    let bytes = timeout(BODY_TIMEOUT, Bytes::from_request(request, gateway));
    let bytes = tokio::select! {
        bytes = bytes => bytes,
        // Nothing has begun, so the client can repeat the request elsewhere.
        () = gateway.tasks.drained_for(LAST_REQUEST) => {
            return Err(stopping());
        }
    };
    match bytes {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(rejection)) => {
            let code = match rejection.status() {
                StatusCode::PAYLOAD_TOO_LARGE => ErrorCode::TooLarge,
                // It broke off, or its chunks are malformed.
                _ => ErrorCode::BadRequest,
            };
            Err(refused(code, rejection.body_text()))
        }
        Err(_) => {
            let seconds = BODY_TIMEOUT.as_secs();
            let text = format!("the body did not come within {seconds} s");
            let status = StatusCode::REQUEST_TIMEOUT;
            Err(refused_with(status, ErrorCode::BadRequest, text))
        }
    }
}

/// Whether a body is said to be JSON.
fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()?.split(';').next());
    kind.is_some_and(|kind| {
        let kind = kind.trim().to_ascii_lowercase();
        kind == "application/json" || kind.starts_with("application/") && kind.ends_with("+json")
    })
}

/// Says in plain words which parameter of a query is wrong.
fn parameter(text: &str) -> String {
    let text = text.trim_start_matches("Failed to deserialize query string: ");
    let words = [
        ("invalid digit found in string", "must be a whole number"),
        (
            "cannot parse integer from empty string",
            "must be a whole number",
        ),
        ("number too large to fit in target type", "is too large"),
        (
            "provided string was not `true` or `false`",
            "must be true or false",
        ),
    ];
    let found = words.iter().find_map(|(of_rust, plain)| {
        let name = text.strip_suffix(of_rust)?;
        Some(format!("{name}{plain}"))
    });
    found.unwrap_or_else(|| text.to_owned())
}

pub(super) fn wrong_path() -> Response {
    refused(ErrorCode::BadRequest, WRONG_PATH)
}

/// axum's extractor of that name, with the gateway's JSON error.
pub(super) struct Path<T>(pub(super) T);

impl<T: DeserializeOwned + Send> FromRequestParts<Arc<Gateway>> for Path<T> {
    type Rejection = Response;

    async fn from_request_parts(
        parts: &mut Parts,
        gateway: &Arc<Gateway>,
    ) -> Result<Self, Response> {
        let path = axum::extract::Path::from_request_parts(parts, gateway).await;
        path.map(|axum::extract::Path(path)| Self(path))
            .map_err(|_| wrong_path())
    }
}

/// axum's extractor of that name, with the gateway's JSON error.
pub(super) struct Query<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequestParts<Arc<Gateway>> for Query<T> {
    type Rejection = Response;

    async fn from_request_parts(
        parts: &mut Parts,
        gateway: &Arc<Gateway>,
    ) -> Result<Self, Response> {
        let query = axum::extract::Query::from_request_parts(parts, gateway).await;
        query
            .map(|axum::extract::Query(query)| Self(query))
            .map_err(|e| refused(ErrorCode::BadRequest, parameter(&e.body_text())))
    }
}
