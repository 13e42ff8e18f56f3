//! The common part of all HTTP requests: extractors and responses. Every error has the same JSON body.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, RequestExt as _,
    body::HttpBody as _,
    extract::{FromRequest, FromRequestParts, rejection::JsonRejection},
    http::{StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::Gateway;
use crate::{
    model::{ConversationId, limits::LAST_REQUEST},
    protocol::{Answer, ErrorCode, Refusal},
};

/// The time for a request's body, counted from the end of its head.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The facts of a response that the audit log records.
#[derive(Clone, Copy)]
pub(super) struct Said {
    pub(super) error: Option<ErrorCode>,
    pub(super) conversation: Option<ConversationId>,
}

pub(super) fn refused(code: ErrorCode, message: impl Into<String>) -> Response {
    respond(Answer::Error(Refusal {
        code,
        message: message.into(),
        retry_after_ms: None,
    }))
}

/// Refuses a request because the gateway drains. It can be repeated on another one, or after the restart.
pub(super) fn stopping() -> Response {
    respond(Answer::Error(Refusal {
        code: ErrorCode::Unavailable,
        message: "the gateway is stopping".into(),
        retry_after_ms: Some(1_000),
    }))
}

/// Marks the answer to a request whose body was not read to its end. The connection closes after it.
pub(super) fn unread(response: Response) -> Response {
    ([(header::CONNECTION, "close")], response).into_response()
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
        Answer::Created {
            existed,
            conversation,
        } => {
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
        // The limit of the route shortens the body that the head announces.
        let announced = request.body().size_hint().lower();
        let request = request.with_limited_body();
        let limit = request.body().size_hint().lower();
        if limit < announced {
            let text = format!("a body has at most {limit} bytes");
            return Err(unread(refused(ErrorCode::TooLarge, text)));
        }
        let body = timeout(BODY_TIMEOUT, Json::<T>::from_request(request, gateway));
        let body = tokio::select! {
            body = body => body,
            // Nothing has begun, so the client can repeat the request elsewhere.
            () = gateway.tasks.drained_for(LAST_REQUEST) => {
                return Err(unread(stopping()));
            }
        };
        match body {
            Ok(Ok(Json(body))) => Ok(Self(body)),
            Ok(Err(rejection)) => Err(match &rejection {
                JsonRejection::BytesRejection(_) => {
                    let code = match rejection.status() {
                        StatusCode::PAYLOAD_TOO_LARGE => ErrorCode::TooLarge,
                        // It broke off, or its chunks are malformed.
                        _ => ErrorCode::BadRequest,
                    };
                    unread(refused(code, rejection.body_text()))
                }
                JsonRejection::MissingJsonContentType(_) => refused_with(
                    rejection.status(),
                    ErrorCode::BadRequest,
                    rejection.body_text(),
                ),
                _ => refused(ErrorCode::BadRequest, rejection.body_text()),
            }),
            Err(_) => {
                let seconds = BODY_TIMEOUT.as_secs();
                let text = format!("the body did not come within {seconds} s");
                let late = refused_with(StatusCode::REQUEST_TIMEOUT, ErrorCode::BadRequest, text);
                Err(unread(late))
            }
        }
    }
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
            .map_err(|e| refused(ErrorCode::BadRequest, e.body_text()))
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
            .map_err(|e| refused(ErrorCode::BadRequest, e.body_text()))
    }
}
