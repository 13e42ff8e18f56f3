//! What back ends may ask of consumers: their state, tests, and the events that they skipped.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::{
    Gateway,
    reply::{Body, Path, Query, refused, respond},
    requests,
    service::{ConsumersRead, ConsumersWrite, Service},
};
use crate::{
    clock,
    consumers::{Control, SkippedAfter, Status},
    model::{ConsumerName, ConversationId},
    protocol::{ErrorCode, Refusal},
    store::EventAt,
};

pub(super) fn routes() -> Router<Arc<Gateway>> {
    Router::new()
        .route("/v1/consumers", get(list))
        .route("/v1/consumers/{name}/test", post(test))
        .route("/v1/consumers/{name}/enable", post(enable))
        .route("/v1/consumers/{name}/disable", post(disable))
        .route(
            "/v1/consumers/{name}/replay",
            post(replay).layer(DefaultBodyLimit::max(REPLAY_BYTES_MAX)),
        )
        .route("/v1/consumers/{name}/skipped", get(skipped))
}

/// Conversations of one replay, and the bytes of the request that names them.
const REPLAYED_MAX: usize = 1_000;
const REPLAY_BYTES_MAX: usize = REPLAYED_MAX * 128;

type At = State<Arc<Gateway>>;

#[derive(Serialize, ToSchema)]
pub(super) struct ConsumersPage {
    items: Vec<ConsumerItem>,
}

/// A consumer. What follows `paused` is about the gateway that answers.
#[derive(Serialize, ToSchema)]
pub(super) struct ConsumerItem {
    name: String,
    enabled: bool,
    /// Why it is disabled.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Whether nothing is sent at the moment, because requests fail. It is tried again soon.
    paused: bool,
    /// How the latest request failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Open conversations with something that is not delivered.
    waiting: usize,
    /// The age of the oldest event that is not delivered, in seconds.
    oldest_seconds: f64,
    /// The replays that have not ended.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    replays: Vec<String>,
}

impl From<Status> for ConsumerItem {
    fn from(status: Status) -> Self {
        let age = status.oldest.map_or(0, |at| (clock::wall() - at).max(0));
        Self {
            name: shown(&status.name),
            enabled: status.enabled,
            reason: status.reason,
            paused: status.paused,
            error: status.error,
            waiting: status.waiting,
            #[expect(clippy::cast_precision_loss, reason = "an age of some days at most")]
            oldest_seconds: age as f64 / 1_000.0,
            replays: status.replays.iter().map(shown).collect(),
        }
    }
}

/// The name by which operators know a consumer.
fn shown(name: &ConsumerName) -> String {
    let name = name.as_str();
    name.strip_prefix("webhook:").unwrap_or(name).to_owned()
}

/// Finds a consumer.
#[expect(clippy::result_large_err, reason = "a response either way")]
fn find<'a>(gateway: &'a Gateway, name: &str) -> Result<(&'a Control, ConsumerName), Response> {
    let control = gateway.consumers.as_deref();
    let found = control.and_then(|control| Some((control, control.named(name)?)));
    found.ok_or_else(|| refused(ErrorCode::NotFound, "no webhook has this name"))
}

fn failed(error: &crate::store::Error) -> Response {
    respond(requests::refused(&error.clone().into()))
}

/// Lists the consumers with their states.
#[utoipa::path(get, path = "/v1/consumers", security(("service" = ["consumers:read"])),
    responses((status = 200, body = ConsumersPage), (status = "default", body = Refusal)))]
pub(super) async fn list(State(gateway): At, _: Service<ConsumersRead>) -> Response {
    let Some(control) = &gateway.consumers else {
        return Json(ConsumersPage { items: Vec::new() }).into_response();
    };
    match control.list().await {
        Ok(found) => {
            let items = found.into_iter().map(ConsumerItem::from).collect();
            Json(ConsumersPage { items }).into_response()
        }
        Err(error) => failed(&error),
    }
}

#[derive(Serialize, ToSchema)]
pub(super) struct TestResult {
    accepted: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Sends the event `webhook.test` to a webhook, and returns whether it was accepted.
#[utoipa::path(post, path = "/v1/consumers/{name}/test", params(("name" = String, Path)),
    security(("service" = ["consumers:write"])),
    responses((status = 200, body = TestResult), (status = "default", body = Refusal)))]
pub(super) async fn test(
    State(gateway): At,
    _: Service<ConsumersWrite>,
    Path(name): Path<String>,
) -> Response {
    let (control, consumer) = match find(&gateway, &name) {
        Ok(found) => found,
        Err(refusal) => return refusal,
    };
    match control.test(&consumer).await {
        Some(tested) => Json(TestResult {
            accepted: tested.accepted,
            error: tested.error,
        })
        .into_response(),
        None => refused(ErrorCode::NotFound, "this consumer cannot be tested"),
    }
}

/// Enables a consumer. It continues where it was.
#[utoipa::path(post, path = "/v1/consumers/{name}/enable", params(("name" = String, Path)),
    security(("service" = ["consumers:write"])),
    responses((status = 204), (status = "default", body = Refusal)))]
pub(super) async fn enable(
    State(gateway): At,
    _: Service<ConsumersWrite>,
    Path(name): Path<String>,
) -> Response {
    set(&gateway, &name, true).await
}

/// Disables a consumer. Nothing is lost: it continues where it was when it is enabled.
#[utoipa::path(post, path = "/v1/consumers/{name}/disable", params(("name" = String, Path)),
    security(("service" = ["consumers:write"])),
    responses((status = 204), (status = "default", body = Refusal)))]
pub(super) async fn disable(
    State(gateway): At,
    _: Service<ConsumersWrite>,
    Path(name): Path<String>,
) -> Response {
    set(&gateway, &name, false).await
}

async fn set(gateway: &Gateway, name: &str, enabled: bool) -> Response {
    let (control, consumer) = match find(gateway, name) {
        Ok(found) => found,
        Err(refusal) => return refusal,
    };
    match control.set_enabled(&consumer, enabled).await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => respond(requests::refused(&error)),
    }
}

#[derive(Deserialize, ToSchema)]
pub(super) struct Replay {
    /// At most 1,000.
    conversations: Vec<ReplayFrom>,
}

#[derive(Deserialize, ToSchema)]
pub(super) struct ReplayFrom {
    #[schema(value_type = uuid::Uuid)]
    conversation: ConversationId,
    /// The first entry that is sent again.
    seq: u64,
}

#[derive(Serialize, ToSchema)]
pub(super) struct ReplayStarted {
    replay: String,
    /// The conversations that have something to send.
    conversations: usize,
}

/// Sends the messages and system entries of some conversations to a webhook again, from an entry to the present head.
#[utoipa::path(post, path = "/v1/consumers/{name}/replay", request_body = Replay, params(("name" = String, Path)),
    security(("service" = ["consumers:write"])),
    responses((status = 202, body = ReplayStarted), (status = "default", body = Refusal)))]
pub(super) async fn replay(
    State(gateway): At,
    _: Service<ConsumersWrite>,
    Path(name): Path<String>,
    Body(replay): Body<Replay>,
) -> Response {
    let (control, consumer) = match find(&gateway, &name) {
        Ok(found) => found,
        Err(refusal) => return refusal,
    };
    if replay.conversations.is_empty() || replay.conversations.len() > REPLAYED_MAX {
        return refused(ErrorCode::BadRequest, "name 1 to 1,000 conversations");
    }
    let from = replay.conversations.into_iter();
    let from = from.map(|from| (from.conversation, from.seq)).collect();
    match control.replay(&consumer, from).await {
        Ok((replay, conversations)) => {
            let started = ReplayStarted {
                replay: shown(&replay),
                conversations,
            };
            (StatusCode::ACCEPTED, Json(started)).into_response()
        }
        Err(error) => respond(requests::refused(&error)),
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct SkippedQuery {
    /// The `next` of the previous page.
    after: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct SkippedPage {
    items: Vec<SkippedItem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

/// An event that was skipped: that of an entry, with `seq`, or of a change, with `rev`.
#[derive(Serialize, ToSchema)]
pub(super) struct SkippedItem {
    #[schema(value_type = uuid::Uuid)]
    conversation: ConversationId,
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rev: Option<u64>,
    /// The status of the last answer. None if there was no answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    /// The day on which it was skipped, in days since 1970.
    day: u32,
}

/// Lists the events that a consumer skipped in the last 30 days.
#[utoipa::path(get, path = "/v1/consumers/{name}/skipped", params(("name" = String, Path), SkippedQuery),
    security(("service" = ["consumers:read"])),
    responses((status = 200, body = SkippedPage), (status = "default", body = Refusal)))]
pub(super) async fn skipped(
    State(gateway): At,
    _: Service<ConsumersRead>,
    Path(name): Path<String>,
    Query(query): Query<SkippedQuery>,
) -> Response {
    let (control, consumer) = match find(&gateway, &name) {
        Ok(found) => found,
        Err(refusal) => return refusal,
    };
    let after = match query.after.as_deref().map(parse) {
        Some(None) => return refused(ErrorCode::BadRequest, "`after` is no position"),
        Some(after) => after,
        None => None,
    };
    match control.skipped(&consumer, after).await {
        Ok((rows, next)) => {
            let items = rows.into_iter().map(|(day, row)| SkippedItem {
                conversation: row.conversation,
                seq: match row.at {
                    EventAt::Entry(seq) => Some(seq),
                    EventAt::Change(_) => None,
                },
                rev: match row.at {
                    EventAt::Change(rev) => Some(rev),
                    EventAt::Entry(_) => None,
                },
                status: row.status,
                day,
            });
            let page = SkippedPage {
                items: items.collect(),
                next: next.map(text),
            };
            Json(page).into_response()
        }
        Err(error) => failed(&error),
    }
}

/// The text of a position: day, shard, conversation, `s` or `r`, number.
fn text(after: SkippedAfter) -> String {
    let SkippedAfter { day, shard, event } = after;
    match event {
        None => format!("{day}.{shard}"),
        Some((conversation, EventAt::Entry(seq))) => {
            format!("{day}.{shard}.{conversation}.s.{seq}")
        }
        Some((conversation, EventAt::Change(rev))) => {
            format!("{day}.{shard}.{conversation}.r.{rev}")
        }
    }
}

fn parse(text: &str) -> Option<SkippedAfter> {
    let mut parts = text.split('.');
    let (day, shard) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let event = match parts.next() {
        None => None,
        Some(conversation) => {
            let conversation = conversation.parse().ok()?;
            let (which, number) = (parts.next()?, parts.next()?.parse().ok()?);
            let at = match which {
                "s" => EventAt::Entry(number),
                "r" => EventAt::Change(number),
                _ => return None,
            };
            Some((conversation, at))
        }
    };
    parts
        .next()
        .is_none()
        .then_some(SkippedAfter { day, shard, event })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_the_same_after_it_was_a_text() {
        let conversation = ConversationId(uuid::Uuid::from_u128(7));
        for event in [
            None,
            Some((conversation, EventAt::Entry(3))),
            Some((conversation, EventAt::Change(4))),
        ] {
            let after = SkippedAfter {
                day: 20_000,
                shard: 255,
                event,
            };
            assert_eq!(parse(&text(after)), Some(after));
        }
        for wrong in ["", "1", "1.256", "1.2.x", "1.2.3.s.4.5"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
