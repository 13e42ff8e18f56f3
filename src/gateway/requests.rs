//! The index of the protocol: maps each request to a call and its result to an answer, for sessions and HTTP alike.

mod changes;
mod devices;
mod files;

use std::{collections::HashMap, sync::Arc};

pub(super) use files::urls;
use futures_util::{
    FutureExt, TryFutureExt,
    future::{Either, ready},
};
use metrics::{Counter, Histogram, counter, histogram};
use tokio::time::Instant;

use super::{
    Gateway,
    pages::{Shown, cut_to_fit},
};
use crate::{
    chat::{self, Creation, LogRange},
    fanout::Subscriber,
    model::{
        Content, ConversationId, Draft, Kind, Seq, UserId,
        limits::{PAGE_ENTRIES_DEFAULT, PAGE_ENTRIES_MAX, PAGE_ITEMS_MAX},
    },
    protocol::{
        Answer, ConversationAnswer, Create, Created, ErrorCode, HistoryPage, HistoryRequest,
        InboxPage, InboxRequest, Okay, ParticipantItem, ParticipantsPage, ParticipantsRequest,
        PublicItem, PublicPage, PublicRequest, Refusal, Request, Send, Sent,
    },
};

/// The metrics of messages. Those of other requests are looked up by name.
pub(super) struct Metrics {
    sent: Counter,
    send_seconds: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            sent: answered("send", "ok"),
            send_seconds: histogram!("chat_send_seconds"),
        }
    }
}

fn answered(name: &'static str, result: &'static str) -> Counter {
    counter!("chat_requests_total", "type" => name, "result" => result)
}

/// Items of a page if the client names no number.
const PAGE_ITEMS_DEFAULT: usize = 50;

/// Answers a request. `None` if it has no reply.
pub(super) fn handle(
    gateway: &Gateway,
    user: UserId,
    request: Request,
) -> impl Future<Output = Option<Answer>> {
    let name = request.name();
    let quiet = matches!(request, Request::Typing(_));
    let answer = answer(gateway, user, request);
    answer.map(move |answer| {
        let answer = answer.unwrap_or_else(|error| refused(&error));
        match &answer {
            Answer::Sent(_) => gateway.metrics.sent.increment(1),
            Answer::Error(refusal) => answered(name, code_label(refusal.code)).increment(1),
            _ => answered(name, "ok").increment(1),
        }
        (!quiet || matches!(answer, Answer::Error(_))).then_some(answer)
    })
}

/// Calls the function of a request. Only messages, which are by far the most frequent, are not boxed: so their future
/// does not reserve room for those of other requests.
fn answer(
    gateway: &Gateway,
    user: UserId,
    request: Request,
) -> impl Future<Output = Result<Answer, chat::Error>> {
    let invalid = |text: &str| ready(Err(chat::Error::invalid(text))).boxed();
    Either::Right(match request {
        Request::Send(request) => return Either::Left(send(gateway, user, request)),
        Request::Inbox(request) => inbox(gateway, user, request).boxed(),
        Request::Create(request) => create(gateway, user, request).boxed(),
        Request::Conversation(named) => details(gateway, user, named.conversation).boxed(),
        Request::Participants(request) => participants(gateway, user, request).boxed(),
        Request::History(request) => history(gateway, user, request).boxed(),
        Request::Public(request) => public(gateway, request).boxed(),
        Request::Add(r) => {
            let add = chat::AddParticipant { user: r.user };
            change(gateway, user, r.conversation, add).boxed()
        }
        Request::Remove(r) => {
            let remove = chat::RemoveParticipant { user: r.user };
            change(gateway, user, r.conversation, remove).boxed()
        }
        Request::Join(r) => change(gateway, user, r.conversation, chat::Join).boxed(),
        Request::Leave(r) => change(gateway, user, r.conversation, chat::Leave).boxed(),
        Request::SetRole(r) => {
            let (named, role) = (r.user, r.role);
            let set_role = chat::SetRole { user: named, role };
            change(gateway, user, r.conversation, set_role).boxed()
        }
        Request::Update(r) => {
            let (conversation, update) = update(r);
            change(gateway, user, conversation, update).boxed()
        }
        Request::Read(r) => {
            let read = chat::MarkRead { seq: r.seq };
            tell(gateway, user, r.conversation, read).boxed()
        }
        Request::Delivered(r) => {
            let (seq, away) = (r.seq, r.away);
            let delivered = chat::MarkDelivered { seq, away };
            tell(gateway, user, r.conversation, delivered).boxed()
        }
        Request::Typing(r) => tell(gateway, user, r.conversation, chat::ShowTyping).boxed(),
        Request::Edit(r) => changes::edit(gateway, user, r),
        Request::Delete(r) => changes::delete(gateway, user, r),
        Request::React(r) => changes::react(gateway, user, r, true),
        Request::Unreact(r) => changes::react(gateway, user, r, false),
        Request::Reactions(r) => changes::reactions(gateway, user, r).boxed(),
        Request::AttachmentUrls(r) => files::attachment_urls(gateway, user, r.ids).boxed(),
        Request::Changes(r) => changes::changes(gateway, user, r).boxed(),
        request @ (Request::DeviceSet(_)
        | Request::DeviceRemove(_)
        | Request::Devices
        | Request::SettingsSet(_)) => devices::answer(gateway, user, request).boxed(),
        Request::Connect(_)
        | Request::Cursors(_)
        | Request::Refresh(_)
        | Request::Watch(_)
        | Request::Unwatch(_)
        | Request::Subscribe(_)
        | Request::Unsubscribe(_)
        | Request::Away(_)
        | Request::Ping => invalid("only on a WebSocket"),
    })
}

fn update(r: crate::protocol::Update) -> (ConversationId, chat::Update) {
    let update = chat::Update {
        name: r.name,
        posting: r.posting,
        public: r.public,
    };
    (r.conversation, update)
}

async fn inbox(gateway: &Gateway, user: UserId, r: InboxRequest) -> Result<Answer, chat::Error> {
    let limit = items(r.limit)?;
    let page = gateway
        .users
        .inbox(&user, r.before.as_deref(), limit)
        .await?;
    Ok(Answer::Inbox(InboxPage {
        items: page.items,
        next: page.next,
    }))
}

async fn create(gateway: &Gateway, user: UserId, r: Create) -> Result<Answer, chat::Error> {
    let invalid = |text: &str| Err(chat::Error::Invalid(text.into()));
    if r.participants.len() > gateway.limits.group_participants {
        return Err(chat::Error::TooLarge {
            what: "participants that one request names".into(),
            max: gateway.limits.group_participants,
        });
    }
    let conversation = match (r.kind, r.conversation) {
        (Kind::Dm, chosen) => {
            let mut others: Vec<_> = r.participants.iter().filter(|u| **u != user).collect();
            others.dedup();
            if others.len() > 1 || r.participants.is_empty() {
                return invalid("a dm has one other participant (or only oneself)");
            }
            let id = ConversationId::dm(&user, others.first().copied().unwrap_or(&user));
            if chosen.is_some_and(|chosen| chosen != id) {
                return invalid("a dm's id is computed from its users");
            }
            if r.name.is_some() || r.public {
                return invalid("a dm has no name, and is not public");
            }
            id
        }
        (Kind::Group | Kind::Channel, None) => ConversationId::random(),
        (Kind::Group | Kind::Channel, Some(id)) if id.may_be_chosen() => id,
        (Kind::Group | Kind::Channel, Some(_)) => {
            return invalid("conversation must be a UUID of version 4 or 7");
        }
    };
    let creation = Creation {
        kind: r.kind,
        participants: r.participants,
        name: r.name,
        public: r.public,
        posting: r.posting,
        at: None,
    };
    let created = gateway.router.ask(conversation, user, creation).await?;
    Ok(Answer::Created(Created {
        conversation,
        existed: created.existed,
    }))
}

async fn details(
    gateway: &Gateway,
    user: UserId,
    conversation: ConversationId,
) -> Result<Answer, chat::Error> {
    let asked = gateway.router.ask(conversation, user, chat::GetDetails);
    let view = asked.await?;
    Ok(Answer::Conversation(Box::new(ConversationAnswer {
        conversation,
        details: view.details,
        participant_count: view.participant_count,
        message_count: view.message_count,
        head: view.head,
        rev: view.rev,
        role: view.role,
    })))
}

async fn participants(
    gateway: &Gateway,
    user: UserId,
    r: ParticipantsRequest,
) -> Result<Answer, chat::Error> {
    let asked = chat::GetParticipants {
        after: r.after,
        limit: items(r.limit)?,
    };
    let page = gateway.router.ask(r.conversation, user, asked).await?;
    let item = |p: chat::Listed| {
        let marks = p.marks;
        ParticipantItem {
            user: p.user,
            role: p.role,
            joined_seq: p.joined_seq,
            delivered_seq: marks.map(|(delivered, _)| delivered),
            read_seq: marks.map(|(_, read)| read),
        }
    };
    Ok(Answer::Participants(ParticipantsPage {
        items: page.items.into_iter().map(item).collect(),
        next: page.next,
    }))
}

/// Changes a conversation. The answer contains the seq of the entry that records the change.
async fn change<A: chat::Ask<Output = Seq>>(
    gateway: &Gateway,
    user: UserId,
    conversation: ConversationId,
    change: A,
) -> Result<Answer, chat::Error> {
    let seq = gateway.router.ask(conversation, user, change).await?;
    Ok(Answer::Ok(Okay {
        seq: Some(seq),
        ..Okay::default()
    }))
}

/// Sends a conversation an operation that creates no entry.
async fn tell<A: chat::Ask<Output = ()>>(
    gateway: &Gateway,
    user: UserId,
    conversation: ConversationId,
    told: A,
) -> Result<Answer, chat::Error> {
    gateway.router.ask(conversation, user, told).await?;
    Ok(Answer::Ok(Okay::default()))
}

fn send(
    gateway: &Gateway,
    user: UserId,
    r: Send,
) -> impl Future<Output = Result<Answer, chat::Error>> {
    let Send {
        conversation,
        client_id,
        body,
        attachments,
        reply_to,
        retry,
    } = r;
    let content = Content::Text {
        body,
        attachments,
        reply_to,
    };
    let draft = Draft {
        sender: user,
        client_id,
        content,
        at: None,
        retry,
    };
    let began = Instant::now();
    let sent = gateway.router.send(conversation, draft);
    sent.map_ok(move |sent| {
        let seconds = began.elapsed().as_secs_f64();
        gateway.metrics.send_seconds.record(seconds);
        let chat::SendAck {
            seq,
            message_id,
            at,
            duplicate,
        } = sent;
        Answer::Sent(Sent {
            seq,
            message_id,
            at,
            duplicate,
        })
    })
}

async fn history(
    gateway: &Gateway,
    user: UserId,
    r: HistoryRequest,
) -> Result<Answer, chat::Error> {
    let range = match (r.before, r.after, r.around) {
        (None, None, None) => LogRange::Newest,
        (Some(seq), None, None) => LogRange::Before(seq),
        (None, Some(seq), None) => LogRange::After(seq),
        (None, None, Some(seq)) => LogRange::Around(seq),
        _ => {
            return Err(chat::Error::Invalid(
                "one of before, after and around".into(),
            ));
        }
    };
    let limit = r.limit.unwrap_or(PAGE_ENTRIES_DEFAULT);
    if limit == 0 {
        return Err(chat::Error::Invalid("limit must be at least 1".into()));
    }
    let asked = chat::GetHistory {
        range,
        limit: limit.min(PAGE_ENTRIES_MAX),
    };
    let page = gateway.router.ask(r.conversation, user, asked).await?;
    let mut states: HashMap<_, _> = page.states.into_iter().collect();
    let mut mine: HashMap<_, _> = page.mine.into_iter().collect();
    let shown = page.entries.into_iter().map(|entry| Shown {
        state: states.remove(&entry.seq),
        mine: mine.remove(&entry.seq),
        entry,
    });
    let mut shown = shown.collect();
    cut_to_fit(&mut shown, range, gateway.limits.page_bytes());
    let messages = shown.into_iter().map(|shown| shown.message(r.conversation));
    Ok(Answer::History(HistoryPage {
        messages: messages.collect(),
        rev: page.rev,
        head: page.head,
    }))
}

async fn public(gateway: &Gateway, r: PublicRequest) -> Result<Answer, chat::Error> {
    let limit = items(r.limit)?;
    let page = gateway.router.public(r.after, limit).await?;
    let item = |r: crate::store::PublicRow| PublicItem {
        conversation: r.conversation,
        kind: r.kind,
        name: r.name,
        created_at: r.created_at,
    };
    Ok(Answer::Public(PublicPage {
        items: page.rows.into_iter().map(item).collect(),
        next: page.next,
    }))
}

/// Subscribes a session to the presence of users. Returns their presence now.
pub(super) async fn watch(
    gateway: &Gateway,
    session: &Arc<Subscriber>,
    users: &[UserId],
) -> Answer {
    match gateway.users.watch(session, users).await {
        Ok(items) => Answer::Presence { items },
        Err(error) => refused(&error),
    }
}

fn items(limit: Option<usize>) -> Result<usize, chat::Error> {
    match limit.unwrap_or(PAGE_ITEMS_DEFAULT) {
        0 => Err(chat::Error::Invalid("limit must be at least 1".into())),
        limit => Ok(limit.min(PAGE_ITEMS_MAX)),
    }
}

pub(super) fn refusal(code: ErrorCode, message: String) -> Answer {
    Answer::Error(Refusal {
        code,
        message,
        retry_after_ms: None,
    })
}

/// The time after which a client should retry if the gateway is unavailable.
const RETRY_UNAVAILABLE_MS: u64 = 200;

pub(super) fn refused(error: &chat::Error) -> Answer {
    let code = code(error);
    let retry_after_ms = (code == ErrorCode::Unavailable).then_some(RETRY_UNAVAILABLE_MS);
    Answer::Error(Refusal {
        code,
        message: error.to_string(),
        retry_after_ms,
    })
}

fn code(error: &chat::Error) -> ErrorCode {
    match error {
        chat::Error::Invalid(_) => ErrorCode::BadRequest,
        chat::Error::Forbidden(_) => ErrorCode::Forbidden,
        chat::Error::UnknownConversation => ErrorCode::NotFound,
        chat::Error::Conflict(_) => ErrorCode::Conflict,
        chat::Error::TooLarge { .. } => ErrorCode::TooLarge,
        // The outcome may be unknown, so the client retries with the same client id.
        chat::Error::Moved | chat::Error::Closed | chat::Error::Unavailable { .. } => {
            ErrorCode::Unavailable
        }
    }
}

pub(super) fn code_label(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::BadRequest => "bad_request",
        ErrorCode::Unauthorized => "unauthorized",
        ErrorCode::Forbidden => "forbidden",
        ErrorCode::NotFound => "not_found",
        ErrorCode::Conflict => "conflict",
        ErrorCode::TooLarge => "too_large",
        ErrorCode::RateLimited => "rate_limited",
        ErrorCode::Unavailable => "unavailable",
        ErrorCode::Internal => "internal",
    }
}
