//! The events that webhooks send: what a committed entry or change is to other systems. The fields are those of the
//! protocol. A deleted message has no text, whatever it had when it was sent.

use std::{fmt::Write as _, str::FromStr};

use aws_lc_rs::digest;
use bytes::Bytes;
use jiff::Timestamp;
use serde::Serialize;

use crate::{
    model::{
        Change, ChangeOp, Content, ContentState, ConversationId, Entry, EntryState, Kind, Millis,
        Rev, Seq, SystemChange, UserId,
    },
    protocol::{Deleted, Item, Message, ReactionBy},
};

/// Bytes of an event in a batch besides its id and data, about.
const EVENT_BYTES: usize = 100;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventType {
    MessageCreated,
    MessageUpdated,
    MessageDeleted,
    MessageReacted,
    ConversationCreated,
    ConversationUpdated,
    MemberAdded,
    MemberRemoved,
    MemberJoined,
    MemberLeft,
    MemberRoleSet,
    /// An operator tests the webhook. It is sent whatever the webhook lists.
    Test,
}

impl EventType {
    /// The types that a webhook can list.
    pub const ALL: [Self; 11] = [
        Self::MessageCreated,
        Self::MessageUpdated,
        Self::MessageDeleted,
        Self::MessageReacted,
        Self::ConversationCreated,
        Self::ConversationUpdated,
        Self::MemberAdded,
        Self::MemberRemoved,
        Self::MemberJoined,
        Self::MemberLeft,
        Self::MemberRoleSet,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::MessageCreated => "message.created",
            Self::MessageUpdated => "message.updated",
            Self::MessageDeleted => "message.deleted",
            Self::MessageReacted => "message.reacted",
            Self::ConversationCreated => "conversation.created",
            Self::ConversationUpdated => "conversation.updated",
            Self::MemberAdded => "member.added",
            Self::MemberRemoved => "member.removed",
            Self::MemberJoined => "member.joined",
            Self::MemberLeft => "member.left",
            Self::MemberRoleSet => "member.role_set",
            Self::Test => "webhook.test",
        }
    }

    fn of_entry(entry: &Entry) -> Self {
        match &entry.content {
            Content::Text { .. } => Self::MessageCreated,
            Content::System(change) => match change {
                SystemChange::Created { .. } => Self::ConversationCreated,
                SystemChange::Updated { .. } => Self::ConversationUpdated,
                SystemChange::Added { .. } => Self::MemberAdded,
                SystemChange::Removed { .. } => Self::MemberRemoved,
                SystemChange::Joined => Self::MemberJoined,
                SystemChange::Left => Self::MemberLeft,
                SystemChange::RoleSet { .. } => Self::MemberRoleSet,
            },
        }
    }

    fn of_change(change: &Change) -> Self {
        match change.op {
            ChangeOp::Edit { .. } => Self::MessageUpdated,
            ChangeOp::Delete { .. } => Self::MessageDeleted,
            ChangeOp::React { .. } => Self::MessageReacted,
        }
    }
}

impl FromStr for EventType {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let found = Self::ALL.into_iter().find(|event| event.name() == text);
        found.ok_or(())
    }
}

/// The events that a webhook gets.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Filter {
    /// If empty, all but `message.reacted`.
    pub events: Vec<EventType>,
    /// If empty, all.
    pub kinds: Vec<Kind>,
}

impl Filter {
    #[must_use]
    pub fn allows(&self, event: EventType, kind: Kind) -> bool {
        let is_listed = self.events.contains(&event);
        let is_default = self.events.is_empty() && event != EventType::MessageReacted;
        (is_listed || is_default) && self.allows_kind(kind)
    }

    /// Returns whether any event of a conversation of this kind may be sent.
    #[must_use]
    pub fn allows_kind(&self, kind: Kind) -> bool {
        self.kinds.is_empty() || self.kinds.contains(&kind)
    }
}

/// The conversation of an event, and whether the event is sent again by a replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    pub conversation: ConversationId,
    pub kind: Kind,
    pub replayed: bool,
}

/// An event to send.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// The same whenever the event is sent: the message id, or the conversation and the rev of a change.
    pub id: String,
    pub event: EventType,
    pub at: Millis,
    /// JSON.
    data: String,
}

#[derive(Serialize)]
struct EntryData {
    #[serde(flatten)]
    message: Message,
    #[serde(flatten)]
    origin: OriginData,
}

#[derive(Serialize)]
struct ItemData {
    conversation: ConversationId,
    #[serde(flatten)]
    item: Item,
    /// The user who edited the message. Only its sender may.
    #[serde(skip_serializing_if = "Option::is_none")]
    sender: Option<UserId>,
    #[serde(flatten)]
    origin: OriginData,
}

#[derive(Serialize)]
struct DeletedData {
    conversation: ConversationId,
    seqs: Vec<Seq>,
    rev: Rev,
    deleted: Deleted,
    #[serde(flatten)]
    origin: OriginData,
}

#[derive(Serialize)]
struct OriginData {
    conversation_kind: Kind,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    replayed: bool,
}

impl From<Origin> for OriginData {
    fn from(origin: Origin) -> Self {
        Self {
            conversation_kind: origin.kind,
            replayed: origin.replayed,
        }
    }
}

impl Event {
    /// Returns the event of a committed entry, with its text and reactions after the changes in `state`. `None` if the
    /// webhook does not get it.
    #[must_use]
    pub fn of_entry(
        origin: Origin,
        filter: &Filter,
        entry: &Entry,
        state: Option<&EntryState>,
    ) -> Option<Self> {
        let event = EventType::of_entry(entry);
        if !filter.allows(event, origin.kind) {
            return None;
        }
        let data = EntryData {
            message: Message::of(origin.conversation, entry.clone(), state, None),
            origin: origin.into(),
        };
        let id = entry.message_id.to_string();
        Some(Self::new(id, event, entry.at, &data))
    }

    /// Returns the event of a committed change. `None` if the webhook does not get it, or the change was lost. If the text of an
    /// edit was erased, the event has none, and the event of the deletion follows.
    #[must_use]
    pub fn of_change(origin: Origin, filter: &Filter, change: &Change) -> Option<Self> {
        let event = EventType::of_change(change);
        if !filter.allows(event, origin.kind) || change.is_lost() {
            return None;
        }
        let id = format!("{}:{}", origin.conversation, change.rev);
        Some(match item(change) {
            Some(item) => {
                let is_edit = event == EventType::MessageUpdated;
                let data = ItemData {
                    conversation: origin.conversation,
                    item,
                    sender: is_edit.then(|| change.by.clone()),
                    origin: origin.into(),
                };
                Self::new(id, event, change.at, &data)
            }
            None => {
                let data = DeletedData {
                    conversation: origin.conversation,
                    seqs: change.seqs().collect(),
                    rev: change.rev,
                    deleted: Deleted {
                        by: change.by.clone(),
                        at: change.at,
                    },
                    origin: origin.into(),
                };
                Self::new(id, event, change.at, &data)
            }
        })
    }

    /// Returns an event by which an operator tests a webhook.
    #[must_use]
    pub fn test(id: String, at: Millis) -> Self {
        Self::new(id, EventType::Test, at, &serde_json::Map::new())
    }

    fn new(id: String, event: EventType, at: Millis, data: &impl Serialize) -> Self {
        // Maps with keys that are texts, and no own way to serialise: it cannot fail.
        let data = serde_json::to_string(data).unwrap_or_default();
        Self {
            id,
            event,
            at,
            data,
        }
    }

    /// Returns the approximate bytes of the event in a batch.
    #[must_use]
    pub fn bytes(&self) -> usize {
        EVENT_BYTES + self.id.len() + self.data.len()
    }

    /// Writes the fields after the id. None of the texts but the data needs escapes.
    fn write_fields(&self, json: &mut String) {
        let (event, at) = (self.event.name(), timestamp(self.at));
        let data = &self.data;
        // Writing to a text cannot fail.
        let _ = write!(
            json,
            r#""type":"{event}","timestamp":"{at}","data":{data}}}"#
        );
    }
}

/// Returns the changed fields of the one message that an edit or a reaction changes. `None` if it is a deletion.
fn item(change: &Change) -> Option<Item> {
    let (seq, reactions, by) = match &change.op {
        ChangeOp::Edit { seq, .. } => (*seq, None, None),
        ChangeOp::React {
            seq,
            emoji,
            on,
            reactions,
        } => {
            let by = ReactionBy {
                user: change.by.clone(),
                emoji: emoji.clone(),
                on: *on,
            };
            (*seq, Some(reactions.clone()), Some(by))
        }
        ChangeOp::Delete { .. } => return None,
    };
    let edited: Option<ContentState> = change.states().pop().and_then(|(_, state)| state.content);
    let edited_at = edited.as_ref().map(|state| state.at);
    let content = edited.and_then(|state| state.content);
    let (body, attachments) = content.map(|new| (new.body, new.attachments)).unzip();
    Some(Item {
        seq,
        rev: change.rev,
        body,
        attachments,
        edited_at,
        deleted: None,
        reactions,
        by,
        mine: None,
    })
}

fn timestamp(at: Millis) -> String {
    let at = Timestamp::from_millisecond(at).unwrap_or(Timestamp::UNIX_EPOCH);
    format!("{at:.3}")
}

/// The body of a request, and its `webhook-id`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Payload {
    pub id: String,
    pub body: Bytes,
}

/// Returns the request that sends these events: the event itself if it is one, or else a batch. `None` if there are none.
/// The same events are always the same request.
#[must_use]
pub fn payload(events: &[Event]) -> Option<Payload> {
    match events {
        [] => None,
        [event] => {
            let mut body = String::with_capacity(event.bytes());
            body.push('{');
            event.write_fields(&mut body);
            let id = event.id.clone();
            Some(Payload {
                id,
                body: body.into(),
            })
        }
        [.., newest] => Some(batch(events, newest.at)),
    }
}

fn batch(events: &[Event], at: Millis) -> Payload {
    let bytes = events.iter().map(Event::bytes).sum::<usize>();
    let mut body = String::with_capacity(EVENT_BYTES + bytes);
    let mut hash = digest::Context::new(&digest::SHA256);
    let at = timestamp(at);
    let _ = write!(
        body,
        r#"{{"type":"batch","timestamp":"{at}","data":{{"events":["#
    );
    for (i, event) in events.iter().enumerate() {
        hash.update(event.id.as_bytes());
        hash.update(b"\n");
        let comma = if i == 0 { "" } else { "," };
        let id = &event.id;
        let _ = write!(body, r#"{comma}{{"id":"{id}","#);
        event.write_fields(&mut body);
    }
    body.push_str("]}}");
    let mut id = "batch:".to_owned();
    for byte in &hash.finish().as_ref()[..16] {
        let _ = write!(id, "{byte:02x}");
    }
    Payload {
        id,
        body: body.into(),
    }
}

#[cfg(test)]
mod tests;
