//! The public port: the WebSocket, and the same requests over HTTP for back ends. Their bearer token has `role:
//! service`; the header `chat-user` names the user for whom they act.

pub(super) mod changes;
pub(super) mod devices;

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, Uri},
    middleware,
    response::{IntoResponse, Response},
    routing::{delete, get, post, put},
};
use serde::Deserialize;
use serde_json::json;
use utoipa::{IntoParams, ToSchema};

use super::{
    Gateway, bodies,
    development::{TokenRequest, token},
    headers,
    reply::{Body, Path, Query, refused, refused_with, respond},
    requests,
    service::{
        ConversationsRead, ConversationsWrite, MessagesRead, MessagesWrite, PresenceRead, Service,
        SessionsClose, audit,
    },
    upgrade::upgrade,
};
use crate::{
    model::{
        Attachment, ClientId, ConversationId, Posting, Role, Seq, UserId, limits::ATTACHMENTS_MAX,
    },
    protocol::{
        Create, ErrorCode, HistoryRequest, InboxRequest, Mark, Named, NamedUser,
        ParticipantsRequest, PublicRequest, Refusal, Request, Send, SetRole, Update,
        objects_at_most,
    },
};

/// Returns the routes of the public port. `others` are added, and an unknown path is answered the same way.
pub(super) fn routes(gateway: Arc<Gateway>, others: Router) -> Router {
    Router::new()
        .route("/v1/inbox", get(inbox))
        .route("/v1/public", get(public))
        .route("/v1/users/{user}/presence", get(presence))
        .route("/v1/users/{user}/sessions", delete(disconnect))
        .route("/v1/conversations", post(create))
        .route(
            "/v1/conversations/{conversation}",
            get(conversation).patch(update),
        )
        .route(
            "/v1/conversations/{conversation}/messages",
            get(history).post(send),
        )
        .route(
            "/v1/conversations/{conversation}/participants",
            get(participants).post(add),
        )
        .route(
            "/v1/conversations/{conversation}/participants/{user}",
            delete(remove),
        )
        .route(
            "/v1/conversations/{conversation}/participants/{user}/role",
            put(set_role),
        )
        .route("/v1/conversations/{conversation}/join", post(join))
        .route("/v1/conversations/{conversation}/leave", post(leave))
        .route("/v1/conversations/{conversation}/read", post(read))
        .route(
            "/v1/conversations/{conversation}/delivered",
            post(delivered),
        )
        .merge(changes::routes())
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
type Of = Path<ConversationId>;

async fn ask(gateway: &Gateway, acting: UserId, request: Request) -> Response {
    let answer = requests::handle(gateway, acting, request).await;
    respond(answer.unwrap_or(crate::protocol::Answer::Ok(Default::default())))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct InboxQuery {
    limit: Option<usize>,
    /// The `next` of the previous page.
    before: Option<String>,
}

/// Lists the user's conversations, newest first.
#[utoipa::path(get, path = "/v1/inbox", params(InboxQuery), security(("service" = ["messages:read"])),
    responses((status = 200, body = bodies::InboxPage), (status = "default", body = Refusal)))]
pub(super) async fn inbox(
    State(gateway): At,
    service: Service<MessagesRead>,
    Query(query): Query<InboxQuery>,
) -> Response {
    let InboxQuery { limit, before } = query;
    ask(
        &gateway,
        service.acting,
        Request::Inbox(InboxRequest { limit, before }),
    )
    .await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct PublicQuery {
    limit: Option<usize>,
    /// The `next` of the previous page.
    #[param(value_type = Option<String>)]
    after: Option<ConversationId>,
}

/// Lists public groups and channels.
#[utoipa::path(get, path = "/v1/public", params(PublicQuery), security(("service" = ["conversations:read"])),
    responses((status = 200, body = bodies::PublicPage), (status = "default", body = Refusal)))]
pub(super) async fn public(
    State(gateway): At,
    service: Service<ConversationsRead>,
    Query(query): Query<PublicQuery>,
) -> Response {
    let PublicQuery { limit, after } = query;
    ask(
        &gateway,
        service.acting,
        Request::Public(PublicRequest { after, limit }),
    )
    .await
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
    match gateway.router.presence(&user).await {
        Ok(item) => Json(item).into_response(),
        Err(error) => respond(requests::refused(&error)),
    }
}

/// Closes all connections of a user (4502). Their tokens stay valid, so revoke those first.
#[utoipa::path(delete, path = "/v1/users/{user}/sessions", params(("user" = String, Path)),
    security(("service" = ["sessions:close"])),
    responses((status = 200, body = bodies::Disconnected), (status = "default", body = Refusal)))]
pub(super) async fn disconnect(
    State(gateway): At,
    _: Service<SessionsClose>,
    Path(user): Path<UserId>,
) -> Response {
    match gateway.router.disconnect(&user).await {
        Ok(closed) => Json(json!({"closed": closed})).into_response(),
        Err(error) => respond(requests::refused(&error)),
    }
}

/// Creates a conversation, or returns the existing one.
#[utoipa::path(post, path = "/v1/conversations", request_body = Create, security(("service" = ["conversations:write"])),
    responses((status = 201, body = bodies::Created), (status = 200, body = bodies::Created),
        (status = "default", body = Refusal)))]
pub(super) async fn create(
    State(gateway): At,
    service: Service<ConversationsWrite>,
    Body(create): Body<Create>,
) -> Response {
    ask(&gateway, service.acting, Request::Create(create)).await
}

/// Returns the details of a conversation and its numbers of participants and messages.
#[utoipa::path(get, path = "/v1/conversations/{conversation}", params(("conversation" = uuid::Uuid, Path)),
    security(("service" = ["conversations:read"])),
    responses((status = 200, body = crate::protocol::ConversationAnswer), (status = "default", body = Refusal)))]
pub(super) async fn conversation(
    State(gateway): At,
    service: Service<ConversationsRead>,
    Path(conversation): Of,
) -> Response {
    ask(
        &gateway,
        service.acting,
        Request::Conversation(Named { conversation }),
    )
    .await
}

#[derive(Deserialize, ToSchema)]
pub(super) struct UpdateBody {
    name: Option<String>,
    posting: Option<Posting>,
    public: Option<bool>,
}

/// Changes the name, who may post, or whether the conversation is public.
#[utoipa::path(patch, path = "/v1/conversations/{conversation}", request_body = UpdateBody,
    params(("conversation" = uuid::Uuid, Path)), security(("service" = ["conversations:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn update(
    State(gateway): At,
    service: Service<ConversationsWrite>,
    Path(conversation): Of,
    Body(UpdateBody {
        name,
        posting,
        public,
    }): Body<UpdateBody>,
) -> Response {
    let update = Update {
        conversation,
        name,
        posting,
        public,
    };
    ask(&gateway, service.acting, Request::Update(update)).await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct HistoryQuery {
    before: Option<Seq>,
    after: Option<Seq>,
    around: Option<Seq>,
    limit: Option<usize>,
}

/// Returns a page of the history, oldest first.
#[utoipa::path(get, path = "/v1/conversations/{conversation}/messages",
    params(("conversation" = uuid::Uuid, Path), HistoryQuery), security(("service" = ["messages:read"])),
    responses((status = 200, body = crate::protocol::HistoryPage), (status = "default", body = Refusal)))]
pub(super) async fn history(
    State(gateway): At,
    service: Service<MessagesRead>,
    Path(conversation): Of,
    Query(HistoryQuery {
        before,
        after,
        around,
        limit,
    }): Query<HistoryQuery>,
) -> Response {
    let request = HistoryRequest {
        conversation,
        before,
        after,
        around,
        limit,
    };
    ask(&gateway, service.acting, Request::History(request)).await
}

#[derive(Deserialize, ToSchema)]
pub(super) struct SendBody {
    #[schema(value_type = String, format = Uuid)]
    client_id: ClientId,
    body: String,
    #[serde(default, deserialize_with = "objects_at_most::<_, _, ATTACHMENTS_MAX>")]
    attachments: Vec<Attachment>,
    #[serde(default)]
    reply_to: Option<Seq>,
    #[serde(default)]
    retry: bool,
}

/// Sends a message. It is stored durably before the answer.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/messages", request_body = SendBody,
    params(("conversation" = uuid::Uuid, Path)), security(("service" = ["messages:write"])),
    responses((status = 200, body = crate::protocol::Sent), (status = "default", body = Refusal)))]
pub(super) async fn send(
    State(gateway): At,
    service: Service<MessagesWrite>,
    Path(conversation): Of,
    Body(SendBody {
        client_id,
        body,
        attachments,
        reply_to,
        retry,
    }): Body<SendBody>,
) -> Response {
    let send = Send {
        conversation,
        client_id,
        body,
        attachments,
        reply_to,
        retry,
    };
    ask(&gateway, service.acting, Request::Send(send)).await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ParticipantsQuery {
    limit: Option<usize>,
    /// The `next` of the previous page.
    #[param(value_type = Option<String>)]
    after: Option<UserId>,
}

/// Lists the participants with their roles and watermarks.
#[utoipa::path(get, path = "/v1/conversations/{conversation}/participants",
    params(("conversation" = uuid::Uuid, Path), ParticipantsQuery), security(("service" = ["conversations:read"])),
    responses((status = 200, body = bodies::ParticipantsPage), (status = "default", body = Refusal)))]
pub(super) async fn participants(
    State(gateway): At,
    service: Service<ConversationsRead>,
    Path(conversation): Of,
    Query(ParticipantsQuery { limit, after }): Query<ParticipantsQuery>,
) -> Response {
    let request = ParticipantsRequest {
        conversation,
        after,
        limit,
    };
    ask(&gateway, service.acting, Request::Participants(request)).await
}

/// Adds a user.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/participants", request_body = TokenRequest,
    params(("conversation" = uuid::Uuid, Path)), security(("service" = ["conversations:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn add(
    State(gateway): At,
    service: Service<ConversationsWrite>,
    Path(conversation): Of,
    Body(TokenRequest { user }): Body<TokenRequest>,
) -> Response {
    ask(
        &gateway,
        service.acting,
        Request::Add(NamedUser { conversation, user }),
    )
    .await
}

/// Removes a user.
#[utoipa::path(delete, path = "/v1/conversations/{conversation}/participants/{user}",
    params(("conversation" = uuid::Uuid, Path), ("user" = String, Path)), security(("service" = ["conversations:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn remove(
    State(gateway): At,
    service: Service<ConversationsWrite>,
    Path((conversation, user)): Path<(ConversationId, UserId)>,
) -> Response {
    ask(
        &gateway,
        service.acting,
        Request::Remove(NamedUser { conversation, user }),
    )
    .await
}

#[derive(Deserialize, ToSchema)]
pub(super) struct RoleBody {
    role: Role,
}

/// Changes the role of a participant.
#[utoipa::path(put, path = "/v1/conversations/{conversation}/participants/{user}/role", request_body = RoleBody,
    params(("conversation" = uuid::Uuid, Path), ("user" = String, Path)), security(("service" = ["conversations:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn set_role(
    State(gateway): At,
    service: Service<ConversationsWrite>,
    Path((conversation, user)): Path<(ConversationId, UserId)>,
    Body(RoleBody { role }): Body<RoleBody>,
) -> Response {
    ask(
        &gateway,
        service.acting,
        Request::SetRole(SetRole {
            conversation,
            user,
            role,
        }),
    )
    .await
}

/// Adds the acting user to a public conversation.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/join", params(("conversation" = uuid::Uuid, Path)),
    security(("service" = ["conversations:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn join(
    State(gateway): At,
    service: Service<ConversationsWrite>,
    Path(conversation): Of,
) -> Response {
    ask(
        &gateway,
        service.acting,
        Request::Join(Named { conversation }),
    )
    .await
}

/// Removes the acting user from the conversation.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/leave", params(("conversation" = uuid::Uuid, Path)),
    security(("service" = ["conversations:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn leave(
    State(gateway): At,
    service: Service<ConversationsWrite>,
    Path(conversation): Of,
) -> Response {
    ask(
        &gateway,
        service.acting,
        Request::Leave(Named { conversation }),
    )
    .await
}

#[derive(Deserialize, ToSchema)]
pub(super) struct MarkBody {
    seq: Seq,
}

/// Marks everything up to `seq` as read by the acting user.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/read", request_body = MarkBody,
    params(("conversation" = uuid::Uuid, Path)), security(("service" = ["messages:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn read(
    State(gateway): At,
    service: Service<MessagesWrite>,
    Path(conversation): Of,
    Body(MarkBody { seq }): Body<MarkBody>,
) -> Response {
    ask(
        &gateway,
        service.acting,
        Request::Read(Mark {
            conversation,
            seq,
            away: false,
        }),
    )
    .await
}

/// Marks everything up to `seq` as delivered to the acting user.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/delivered", request_body = MarkBody,
    params(("conversation" = uuid::Uuid, Path)), security(("service" = ["messages:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn delivered(
    State(gateway): At,
    service: Service<MessagesWrite>,
    Path(conversation): Of,
    Body(MarkBody { seq }): Body<MarkBody>,
) -> Response {
    ask(
        &gateway,
        service.acting,
        Request::Delivered(Mark {
            conversation,
            seq,
            away: false,
        }),
    )
    .await
}
