//! The public port: the WebSocket, and the same requests over HTTP for back ends (bearer token with
//! `role: service`; the header `chat-user` says for whom).

use std::{net::SocketAddr, sync::Arc};

use axum::{
    Json, Router,
    extract::{ConnectInfo, FromRequestParts, Path, Query, State, rejection::JsonRejection},
    http::{HeaderMap, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::{delete, get, post, put},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::json;
use utoipa::{IntoParams, ToSchema};

use super::{Gateway, openapi, page, requests, upgrade::upgrade};
use crate::{
    clock,
    model::{Attachment, ClientId, ConversationId, Posting, Role, Seq, UserId},
    protocol::{
        Answer, Create, ErrorCode, HistoryRequest, InboxRequest, Mark, Named, NamedUser,
        ParticipantsRequest, PublicRequest, Refusal, Request, Send, SetRole, Update,
    },
};

/// Seconds that a development token from `POST /v1/tokens` is valid.
const DEVELOPMENT_TOKEN_S: u64 = 3600;

pub(super) fn routes(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route("/v1/ws", get(upgrade))
        .route("/v1/tokens", post(token))
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
        .route("/openapi.json", get(async || Json(openapi::document())))
        .fallback(async || {
            refused(
                ErrorCode::NotFound,
                "no such route: see /openapi.json".into(),
            )
        })
        .layer(axum::extract::DefaultBodyLimit::max(
            gateway.limits.frame_bytes,
        ))
        .with_state(gateway)
        .merge(page::routes())
}

fn refused(code: ErrorCode, message: String) -> Response {
    respond(Answer::Error(Refusal {
        code,
        message,
        retry_after_ms: None,
    }))
}

/// An answer as an HTTP response: the same fields, and the status that fits.
fn respond(answer: Answer) -> Response {
    let (status, retry_after_s) = match &answer {
        Answer::Error(refusal) => {
            let status = StatusCode::from_u16(refusal.code.http_status());
            let after = refusal
                .retry_after_ms
                .map(|ms| ms.div_ceil(1000).to_string());
            (status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), after)
        }
        Answer::Created { existed: false, .. } => (StatusCode::CREATED, None),
        _ => (StatusCode::OK, None),
    };
    let retry_after = retry_after_s.map(|s| [(header::RETRY_AFTER, s)]);
    (status, retry_after, Json(answer)).into_response()
}

/// A back end, and the user it acts for.
pub(super) struct Service {
    acting: UserId,
}

impl FromRequestParts<Arc<Gateway>> for Service {
    type Rejection = Response;

    async fn from_request_parts(
        parts: &mut Parts,
        gateway: &Arc<Gateway>,
    ) -> Result<Self, Response> {
        let headers = &parts.headers;
        let unauthorized = |text: &str| refused(ErrorCode::Unauthorized, text.into());
        let token = headers
            .get(header::AUTHORIZATION)
            .and_then(|v| v.to_str().ok())
            .and_then(|v| v.strip_prefix("Bearer "));
        let Some(token) = token else {
            return Err(unauthorized("a bearer token is missing"));
        };
        let identity = match gateway.tokens.check(token.trim()) {
            Ok(identity) => identity,
            Err(error) => return Err(unauthorized(&error.to_string())),
        };
        if !identity.service {
            let text = "only tokens with role service may use HTTP";
            return Err(refused(ErrorCode::Forbidden, text.into()));
        }
        let acting = match headers
            .get("chat-user")
            .map(|v| v.to_str().unwrap_or_default())
        {
            None => identity.user,
            Some(user) => UserId::new(user)
                .map_err(|e| refused(ErrorCode::BadRequest, format!("chat-user: {e}")))?,
        };
        Ok(Self { acting })
    }
}

/// A JSON body whose mistakes are answered like everything else.
pub(super) struct Body<T>(T);

impl<T: DeserializeOwned> axum::extract::FromRequest<Arc<Gateway>> for Body<T> {
    type Rejection = Response;

    async fn from_request(
        request: axum::extract::Request,
        gateway: &Arc<Gateway>,
    ) -> Result<Self, Response> {
        match Json::<T>::from_request(request, gateway).await {
            Ok(Json(body)) => Ok(Self(body)),
            Err(rejection) => {
                let large = matches!(&rejection, JsonRejection::BytesRejection(_));
                let code = if large {
                    ErrorCode::TooLarge
                } else {
                    ErrorCode::BadRequest
                };
                Err(refused(code, rejection.body_text()))
            }
        }
    }
}

type At = State<Arc<Gateway>>;
type Of = Path<ConversationId>;

async fn ask(gateway: &Gateway, service: Service, request: Request) -> Response {
    let answer = requests::handle(gateway, service.acting, request).await;
    respond(answer.unwrap_or(Answer::Ok(Default::default())))
}

#[derive(Deserialize, ToSchema)]
pub(super) struct TokenRequest {
    #[schema(value_type = String)]
    user: UserId,
}

#[derive(Serialize, ToSchema)]
pub(super) struct TokenAnswer {
    token: String,
    /// Milliseconds since 1970.
    expires_at: i64,
}

/// A token for anyone: only in development, only from this machine.
#[utoipa::path(post, path = "/v1/tokens", request_body = TokenRequest,
    responses((status = 200, body = TokenAnswer), (status = 404, body = Refusal)))]
pub(super) async fn token(
    State(gateway): At,
    ConnectInfo(address): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    Body(request): Body<TokenRequest>,
) -> Response {
    // A page of another origin must not fetch tokens: such a request is never simple, and is refused here.
    let same_origin = headers
        .get("sec-fetch-site")
        .is_none_or(|site| site == "same-origin");
    if !gateway.tokens.development() || !address.ip().is_loopback() || !same_origin {
        return refused(
            ErrorCode::NotFound,
            "tokens come from your own back end".into(),
        );
    }
    match gateway
        .tokens
        .sign(&request.user, None, DEVELOPMENT_TOKEN_S)
    {
        Ok(token) => {
            let seconds = i64::try_from(DEVELOPMENT_TOKEN_S).unwrap_or_default();
            let expires_at = clock::wall() + seconds * 1000;
            Json(TokenAnswer { token, expires_at }).into_response()
        }
        Err(error) => refused(ErrorCode::Internal, error.to_string()),
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct InboxQuery {
    limit: Option<usize>,
    /// `next` of the page before.
    before: Option<String>,
}

/// The user's conversations, newest first.
#[utoipa::path(get, path = "/v1/inbox", params(InboxQuery), security(("service" = [])),
    responses((status = 200, body = openapi::InboxPage), (status = "default", body = Refusal)))]
pub(super) async fn inbox(
    State(gateway): At,
    service: Service,
    Query(query): Query<InboxQuery>,
) -> Response {
    let InboxQuery { limit, before } = query;
    ask(
        &gateway,
        service,
        Request::Inbox(InboxRequest { limit, before }),
    )
    .await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct PublicQuery {
    limit: Option<usize>,
    /// `next` of the page before.
    #[param(value_type = Option<String>)]
    after: Option<ConversationId>,
}

/// Public groups and channels.
#[utoipa::path(get, path = "/v1/public", params(PublicQuery), security(("service" = [])),
    responses((status = 200, body = openapi::PublicPage), (status = "default", body = Refusal)))]
pub(super) async fn public(
    State(gateway): At,
    service: Service,
    Query(query): Query<PublicQuery>,
) -> Response {
    let PublicQuery { limit, after } = query;
    ask(
        &gateway,
        service,
        Request::Public(PublicRequest { after, limit }),
    )
    .await
}

/// Whether a user is online, and when last.
#[utoipa::path(get, path = "/v1/users/{user}/presence", params(("user" = String, Path)),
    security(("service" = [])),
    responses((status = 200, body = crate::protocol::PresenceItem), (status = "default", body = Refusal)))]
pub(super) async fn presence(State(gateway): At, _: Service, Path(user): Path<UserId>) -> Response {
    match gateway.router.presence(&user).await {
        Ok(item) => Json(item).into_response(),
        Err(error) => respond(requests::refused(&error)),
    }
}

/// Closes all connections of a user (4502). Their tokens stay valid: revoke those first.
#[utoipa::path(delete, path = "/v1/users/{user}/sessions", params(("user" = String, Path)),
    security(("service" = [])),
    responses((status = 200, body = openapi::Disconnected), (status = "default", body = Refusal)))]
pub(super) async fn disconnect(
    State(gateway): At,
    _: Service,
    Path(user): Path<UserId>,
) -> Response {
    match gateway.router.disconnect(&user).await {
        Ok(closed) => Json(json!({"closed": closed})).into_response(),
        Err(error) => respond(requests::refused(&error)),
    }
}

/// Makes a conversation, or finds it.
#[utoipa::path(post, path = "/v1/conversations", request_body = Create, security(("service" = [])),
    responses((status = 201, body = openapi::Created), (status = 200, body = openapi::Created),
        (status = "default", body = Refusal)))]
pub(super) async fn create(
    State(gateway): At,
    service: Service,
    Body(create): Body<Create>,
) -> Response {
    ask(&gateway, service, Request::Create(create)).await
}

/// Details, number of participants and of messages.
#[utoipa::path(get, path = "/v1/conversations/{conversation}", params(("conversation" = uuid::Uuid, Path)),
    security(("service" = [])),
    responses((status = 200, body = crate::protocol::ConversationAnswer), (status = "default", body = Refusal)))]
pub(super) async fn conversation(
    State(gateway): At,
    service: Service,
    Path(conversation): Of,
) -> Response {
    ask(
        &gateway,
        service,
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

/// Renames, or changes who may post or find it.
#[utoipa::path(patch, path = "/v1/conversations/{conversation}", request_body = UpdateBody,
    params(("conversation" = uuid::Uuid, Path)), security(("service" = [])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn update(
    State(gateway): At,
    service: Service,
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
    ask(&gateway, service, Request::Update(update)).await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct HistoryQuery {
    before: Option<Seq>,
    after: Option<Seq>,
    around: Option<Seq>,
    limit: Option<usize>,
}

/// A page of the log, oldest first.
#[utoipa::path(get, path = "/v1/conversations/{conversation}/messages",
    params(("conversation" = uuid::Uuid, Path), HistoryQuery), security(("service" = [])),
    responses((status = 200, body = crate::protocol::HistoryPage), (status = "default", body = Refusal)))]
pub(super) async fn history(
    State(gateway): At,
    service: Service,
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
    ask(&gateway, service, Request::History(request)).await
}

#[derive(Deserialize, ToSchema)]
pub(super) struct SendBody {
    #[schema(value_type = String, format = Uuid)]
    client_id: ClientId,
    body: String,
    #[serde(default)]
    attachments: Vec<Attachment>,
    #[serde(default)]
    reply_to: Option<Seq>,
    #[serde(default)]
    retry: bool,
}

/// Sends a message. Durable when answered.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/messages", request_body = SendBody,
    params(("conversation" = uuid::Uuid, Path)), security(("service" = [])),
    responses((status = 200, body = crate::protocol::Sent), (status = "default", body = Refusal)))]
pub(super) async fn send(
    State(gateway): At,
    service: Service,
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
    ask(&gateway, service, Request::Send(send)).await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ParticipantsQuery {
    limit: Option<usize>,
    /// `next` of the page before.
    #[param(value_type = Option<String>)]
    after: Option<UserId>,
}

/// Who is in it, with role and watermarks.
#[utoipa::path(get, path = "/v1/conversations/{conversation}/participants",
    params(("conversation" = uuid::Uuid, Path), ParticipantsQuery), security(("service" = [])),
    responses((status = 200, body = openapi::ParticipantsPage), (status = "default", body = Refusal)))]
pub(super) async fn participants(
    State(gateway): At,
    service: Service,
    Path(conversation): Of,
    Query(ParticipantsQuery { limit, after }): Query<ParticipantsQuery>,
) -> Response {
    let request = ParticipantsRequest {
        conversation,
        after,
        limit,
    };
    ask(&gateway, service, Request::Participants(request)).await
}

/// Adds a user.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/participants", request_body = TokenRequest,
    params(("conversation" = uuid::Uuid, Path)), security(("service" = [])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn add(
    State(gateway): At,
    service: Service,
    Path(conversation): Of,
    Body(TokenRequest { user }): Body<TokenRequest>,
) -> Response {
    ask(
        &gateway,
        service,
        Request::Add(NamedUser { conversation, user }),
    )
    .await
}

/// Removes a user.
#[utoipa::path(delete, path = "/v1/conversations/{conversation}/participants/{user}",
    params(("conversation" = uuid::Uuid, Path), ("user" = String, Path)), security(("service" = [])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn remove(
    State(gateway): At,
    service: Service,
    Path((conversation, user)): Path<(ConversationId, UserId)>,
) -> Response {
    ask(
        &gateway,
        service,
        Request::Remove(NamedUser { conversation, user }),
    )
    .await
}

#[derive(Deserialize, ToSchema)]
pub(super) struct RoleBody {
    role: Role,
}

/// Gives a participant another role.
#[utoipa::path(put, path = "/v1/conversations/{conversation}/participants/{user}/role", request_body = RoleBody,
    params(("conversation" = uuid::Uuid, Path), ("user" = String, Path)), security(("service" = [])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn set_role(
    State(gateway): At,
    service: Service,
    Path((conversation, user)): Path<(ConversationId, UserId)>,
    Body(RoleBody { role }): Body<RoleBody>,
) -> Response {
    ask(
        &gateway,
        service,
        Request::SetRole(SetRole {
            conversation,
            user,
            role,
        }),
    )
    .await
}

/// The acting user joins a public conversation.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/join", params(("conversation" = uuid::Uuid, Path)),
    security(("service" = [])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn join(State(gateway): At, service: Service, Path(conversation): Of) -> Response {
    ask(&gateway, service, Request::Join(Named { conversation })).await
}

/// The acting user leaves.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/leave", params(("conversation" = uuid::Uuid, Path)),
    security(("service" = [])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn leave(
    State(gateway): At,
    service: Service,
    Path(conversation): Of,
) -> Response {
    ask(&gateway, service, Request::Leave(Named { conversation })).await
}

#[derive(Deserialize, ToSchema)]
pub(super) struct MarkBody {
    seq: Seq,
}

/// The acting user has read everything up to `seq`.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/read", request_body = MarkBody,
    params(("conversation" = uuid::Uuid, Path)), security(("service" = [])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn read(
    State(gateway): At,
    service: Service,
    Path(conversation): Of,
    Body(MarkBody { seq }): Body<MarkBody>,
) -> Response {
    ask(&gateway, service, Request::Read(Mark { conversation, seq })).await
}

/// The acting user has received everything up to `seq`.
#[utoipa::path(post, path = "/v1/conversations/{conversation}/delivered", request_body = MarkBody,
    params(("conversation" = uuid::Uuid, Path)), security(("service" = [])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(super) async fn delivered(
    State(gateway): At,
    service: Service,
    Path(conversation): Of,
    Body(MarkBody { seq }): Body<MarkBody>,
) -> Response {
    ask(
        &gateway,
        service,
        Request::Delivered(Mark { conversation, seq }),
    )
    .await
}
