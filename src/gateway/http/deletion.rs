//! The routes of deletions: by the sender of a message, or as a moderator.

use std::sync::Arc;

use axum::{
    Router,
    extract::{FromRequestParts, State},
    http::request::Parts,
    response::Response,
    routing::{delete as deleting, post},
};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use super::{At, ask};
use crate::{
    gateway::{
        Gateway,
        reply::{Body, Path, Query},
        service::{MessagesModerate, MessagesWrite, Service},
    },
    model::{ConversationId, Seq, UserId, limits::DELETE_SEQS_MAX},
    protocol::{Delete, Refusal, Request, at_most},
};

pub(super) fn routes() -> Router<Arc<Gateway>> {
    Router::new()
        .route(
            "/v1/conversations/{conversation}/messages/{seq}",
            deleting(delete_one),
        )
        .route(
            "/v1/conversations/{conversation}/messages/delete",
            post(delete),
        )
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::gateway) struct DeleteQuery {
    /// Whether messages of anyone are deleted. This requires the scope `messages:moderate` instead of `messages:write`.
    #[serde(default)]
    moderator: bool,
}

/// A back end that may delete messages: those that the acting user may delete, or all as moderator.
pub(in crate::gateway) struct Deleter {
    acting: UserId,
    as_moderator: bool,
}

impl FromRequestParts<Arc<Gateway>> for Deleter {
    type Rejection = Response;

    async fn from_request_parts(
        parts: &mut Parts,
        gateway: &Arc<Gateway>,
    ) -> Result<Self, Response> {
        let query = Query::<DeleteQuery>::from_request_parts(parts, gateway).await;
        let as_moderator = matches!(query, Ok(Query(DeleteQuery { moderator: true })));
        let acting = if as_moderator {
            let service = Service::<MessagesModerate>::from_request_parts(parts, gateway);
            service.await?.acting
        } else {
            let service = Service::<MessagesWrite>::from_request_parts(parts, gateway);
            service.await?.acting
        };
        // A stranger gets 401 even if the query is wrong.
        query?;
        Ok(Self {
            acting,
            as_moderator,
        })
    }
}

impl Deleter {
    async fn delete(
        self,
        gateway: &Gateway,
        conversation: ConversationId,
        seqs: Vec<Seq>,
    ) -> Response {
        let delete = Delete {
            conversation,
            seqs,
            as_moderator: self.as_moderator,
        };
        ask(gateway, self.acting, Request::Delete(delete)).await
    }
}

/// Deletes a message.
#[utoipa::path(delete, path = "/v1/conversations/{conversation}/messages/{seq}",
    params(("conversation" = uuid::Uuid, Path), ("seq" = u64, Path), DeleteQuery),
    security(("service" = ["messages:write"]), ("service" = ["messages:moderate"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(in crate::gateway) async fn delete_one(
    State(gateway): At,
    deleter: Deleter,
    Path((conversation, seq)): Path<(ConversationId, Seq)>,
) -> Response {
    deleter.delete(&gateway, conversation, vec![seq]).await
}

#[derive(Deserialize, ToSchema)]
pub(in crate::gateway) struct DeleteBody {
    /// 1 to 256 messages.
    #[serde(deserialize_with = "at_most::<_, _, DELETE_SEQS_MAX>")]
    seqs: Vec<Seq>,
}

/// Deletes up to 256 messages.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/messages/delete", request_body = DeleteBody,
    params(("conversation" = uuid::Uuid, Path), DeleteQuery),
    security(("service" = ["messages:write"]), ("service" = ["messages:moderate"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(in crate::gateway) async fn delete(
    State(gateway): At,
    deleter: Deleter,
    Path(conversation): Path<ConversationId>,
    Body(DeleteBody { seqs }): Body<DeleteBody>,
) -> Response {
    deleter.delete(&gateway, conversation, seqs).await
}
