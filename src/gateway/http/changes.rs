//! The routes that change messages, and that read their changes and reactions.

use std::sync::Arc;

use axum::{
    Router,
    extract::{FromRequestParts, State},
    http::request::Parts,
    response::Response,
    routing::{get, patch, post, put},
};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use super::{At, ask};
use crate::{
    gateway::{
        Gateway, bodies,
        reply::{Body, Path, Query},
        service::{MessagesModerate, MessagesRead, MessagesWrite, Service},
    },
    model::{
        Attachment, ConversationId, Rev, Seq, UserId,
        limits::{ATTACHMENTS_MAX, DELETE_SEQS_MAX},
    },
    protocol::{
        ChangesRequest, Delete, Edit, Reaction, ReactionsRequest, Refusal, Request, at_most,
        given_objects_at_most,
    },
};

type OfMessage = Path<(ConversationId, Seq)>;
type OfReaction = Path<(ConversationId, Seq, String)>;

pub(super) fn routes() -> Router<Arc<Gateway>> {
    Router::new()
        .route(
            "/v1/conversations/{conversation}/messages/{seq}",
            patch(edit).delete(delete_one),
        )
        .route(
            "/v1/conversations/{conversation}/messages/delete",
            post(delete),
        )
        .route(
            "/v1/conversations/{conversation}/messages/{seq}/reactions",
            get(reactions),
        )
        .route(
            "/v1/conversations/{conversation}/messages/{seq}/reactions/{emoji}",
            put(react).delete(unreact),
        )
        .route("/v1/conversations/{conversation}/changes", get(changes))
}

#[derive(Deserialize, ToSchema)]
pub(in crate::gateway) struct EditBody {
    body: String,
    /// All attachments that the message has afterwards. Without this field it keeps those that it has; an empty list removes
    /// them.
    #[serde(
        default,
        deserialize_with = "given_objects_at_most::<_, _, ATTACHMENTS_MAX>"
    )]
    attachments: Option<Vec<Attachment>>,
    /// The rev of the content that the caller has seen. If the content changed after it, the edit is refused.
    #[serde(default)]
    base_rev: Option<Rev>,
}

/// Replaces the body of a message of the acting user, and its attachments if the request names them.
#[utoipa::path(patch, path = "/v1/conversations/{conversation}/messages/{seq}", request_body = EditBody,
    params(("conversation" = uuid::Uuid, Path), ("seq" = u64, Path)), security(("service" = ["messages:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(in crate::gateway) async fn edit(
    State(gateway): At,
    service: Service<MessagesWrite>,
    Path((conversation, seq)): OfMessage,
    Body(EditBody {
        body,
        attachments,
        base_rev,
    }): Body<EditBody>,
) -> Response {
    let edit = Edit {
        conversation,
        seq,
        body,
        attachments,
        base_rev,
    };
    ask(&gateway, service.acting, Request::Edit(edit)).await
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
    Path((conversation, seq)): OfMessage,
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

/// Adds a reaction of the acting user.
#[utoipa::path(put, path = "/v1/conversations/{conversation}/messages/{seq}/reactions/{emoji}",
    params(("conversation" = uuid::Uuid, Path), ("seq" = u64, Path), ("emoji" = String, Path)),
    security(("service" = ["messages:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(in crate::gateway) async fn react(
    State(gateway): At,
    service: Service<MessagesWrite>,
    Path((conversation, seq, emoji)): OfReaction,
) -> Response {
    let reaction = Reaction {
        conversation,
        seq,
        emoji,
    };
    ask(&gateway, service.acting, Request::React(reaction)).await
}

/// Removes a reaction of the acting user.
#[utoipa::path(delete, path = "/v1/conversations/{conversation}/messages/{seq}/reactions/{emoji}",
    params(("conversation" = uuid::Uuid, Path), ("seq" = u64, Path), ("emoji" = String, Path)),
    security(("service" = ["messages:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(in crate::gateway) async fn unreact(
    State(gateway): At,
    service: Service<MessagesWrite>,
    Path((conversation, seq, emoji)): OfReaction,
) -> Response {
    let reaction = Reaction {
        conversation,
        seq,
        emoji,
    };
    ask(&gateway, service.acting, Request::Unreact(reaction)).await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::gateway) struct ReactionsQuery {
    /// Only the users of this emoji.
    emoji: Option<String>,
    /// The `next` of the previous page.
    after: Option<String>,
    limit: Option<usize>,
}

/// Lists the users who reacted to a message.
#[utoipa::path(get, path = "/v1/conversations/{conversation}/messages/{seq}/reactions",
    params(("conversation" = uuid::Uuid, Path), ("seq" = u64, Path), ReactionsQuery),
    security(("service" = ["messages:read"])),
    responses((status = 200, body = bodies::ReactionsPage), (status = "default", body = Refusal)))]
pub(in crate::gateway) async fn reactions(
    State(gateway): At,
    service: Service<MessagesRead>,
    Path((conversation, seq)): OfMessage,
    Query(ReactionsQuery {
        emoji,
        after,
        limit,
    }): Query<ReactionsQuery>,
) -> Response {
    let request = ReactionsRequest {
        conversation,
        seq,
        emoji,
        after,
        limit,
    };
    ask(&gateway, service.acting, Request::Reactions(request)).await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::gateway) struct ChangesQuery {
    /// The rev up to which the caller has all changes.
    after: Rev,
    /// Revs of one page, at most 256.
    limit: Option<usize>,
}

/// Lists the messages that changed after a rev.
#[utoipa::path(get, path = "/v1/conversations/{conversation}/changes",
    params(("conversation" = uuid::Uuid, Path), ChangesQuery), security(("service" = ["messages:read"])),
    responses((status = 200, body = crate::protocol::Changes), (status = "default", body = Refusal)))]
pub(in crate::gateway) async fn changes(
    State(gateway): At,
    service: Service<MessagesRead>,
    Path(conversation): Path<ConversationId>,
    Query(ChangesQuery { after, limit }): Query<ChangesQuery>,
) -> Response {
    let request = ChangesRequest {
        conversation,
        after,
        limit,
    };
    ask(&gateway, service.acting, Request::Changes(request)).await
}

#[cfg(test)]
mod tests;
