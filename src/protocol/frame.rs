//! Requests, replies and events, as described in `docs/protocol.md`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    changed::{ChangedEvent, Changes, ReactorItem},
    codes::ErrorCode,
    device::{DeviceList, SettingsEvent, Switch},
    file::FileUrl,
    message::Message,
};
use crate::model::{
    ConversationId, Details, FileNotice, Kind, Last, MessageId, Millis, Rev, Role, Seq, UserId,
};

/// The answer to a request. [`Reply`] adds the request's id.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Answer {
    Connected(Box<Connected>),
    Refreshed { expires_at: Millis },
    Inbox(InboxPage),
    Created(Created),
    Conversation(Box<ConversationAnswer>),
    Participants(ParticipantsPage),
    Ok(Okay),
    Sent(Sent),
    History(HistoryPage),
    Reactions(ReactionsPage),
    Changes(Changes),
    AttachmentUrls { items: Vec<FileUrl> },
    Devices(DeviceList),
    Presence { items: Vec<PresenceItem> },
    Public(PublicPage),
    Pong { time: Millis },
    Error(Refusal),
}

#[derive(Debug, Serialize, ToSchema)]
pub struct InboxPage {
    pub items: Vec<InboxItem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct Created {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    pub existed: bool,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ParticipantsPage {
    pub items: Vec<ParticipantItem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub next: Option<UserId>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ReactionsPage {
    pub items: Vec<ReactorItem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct PublicPage {
    pub items: Vec<PublicItem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = Uuid)]
    pub next: Option<ConversationId>,
}

#[derive(Debug, Serialize)]
pub struct Reply {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    #[serde(flatten)]
    pub answer: Answer,
}

/// The optional fields of an `ok`.
#[derive(Debug, Default, Clone, Copy, Serialize, ToSchema)]
pub struct Okay {
    /// The seq of the entry that a membership change or update created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seq: Option<Seq>,
    /// The newest seq of the conversation that was subscribed to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head: Option<Seq>,
    /// The rev of a change of messages, or the newest rev of the conversation that was subscribed to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rev: Option<Rev>,
    /// The version of the settings that were set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Refusal {
    pub code: ErrorCode,
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

#[derive(Debug, Serialize)]
pub struct Connected {
    pub user: UserId,
    pub session: String,
    pub gateway: String,
    pub expires_at: Millis,
    pub ping_interval_ms: u64,
    pub limits: Limits,
    pub time: Millis,
}

/// The limits that the client must respect.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Limits {
    pub frame_bytes: usize,
    pub body_bytes: usize,
    pub attachments: usize,
    pub group_participants: usize,
    pub page_entries: usize,
    pub requests_per_second: u32,
    pub requests_burst: u32,
    pub watched_users: usize,
    pub cursors: usize,
    /// The seconds in which a message may be edited. 0 means for ever.
    pub edit_window_s: u64,
    /// Different emoji among the reactions to one message.
    pub reactions: usize,
    /// Messages that one request deletes.
    pub delete_seqs: usize,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct InboxItem {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    pub kind: Kind,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub last_seq: Seq,
    pub rev: Rev,
    pub last_message: Option<Last>,
    pub read_seq: Seq,
    pub unread: u64,
    pub joined_seq: Seq,
    /// The version of the user's settings for the conversation. Absent if nothing was ever set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settings_version: Option<u64>,
    /// The time until which the conversation is muted. It may have passed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muted_until: Option<Millis>,
    /// Whether messages are pushed to the user's devices. Absent if nothing was ever set; that is the same as `on`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub push: Option<Switch>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ConversationAnswer {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    #[serde(flatten)]
    pub details: Details,
    pub participant_count: u64,
    /// The number of people's messages that are not deleted.
    pub message_count: u64,
    /// The newest seq, which counts system entries and deleted messages too.
    pub head: Seq,
    /// The rev of the newest change.
    pub rev: Rev,
    /// The role of the requesting user. Absent if the user is not a participant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ParticipantItem {
    #[schema(value_type = String)]
    pub user: UserId,
    pub role: Role,
    pub joined_seq: Seq,
    /// In a channel, this and `read_seq` are present only for the requesting user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delivered_seq: Option<Seq>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_seq: Option<Seq>,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Sent {
    pub seq: Seq,
    #[schema(value_type = String, format = Uuid)]
    pub message_id: MessageId,
    pub at: Millis,
    /// Whether the message was stored before; the other fields are then those of the stored message.
    pub duplicate: bool,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct HistoryPage {
    /// The entries, oldest first.
    pub messages: Vec<Message>,
    /// The rev that the fields of changed messages are at least as new as.
    pub rev: Rev,
    /// The newest seq of the conversation.
    pub head: Seq,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct PresenceItem {
    #[schema(value_type = String)]
    pub user: UserId,
    pub online: bool,
    /// The last known time at which the user was connected. Absent while online.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<Millis>,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct PublicItem {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    pub kind: Kind,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub created_at: Millis,
}

/// A frame that the gateway sends without a request.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    Message(Box<Message>),
    Receipt {
        conversation: ConversationId,
        user: UserId,
        #[serde(skip_serializing_if = "Option::is_none")]
        read_seq: Option<Seq>,
        #[serde(skip_serializing_if = "Option::is_none")]
        delivered_seq: Option<Seq>,
    },
    Typing {
        conversation: ConversationId,
        user: UserId,
    },
    Presence(PresenceItem),
    /// Messages changed.
    Changed(ChangedEvent),
    /// The user added or removed a reaction. Only the user's own sessions get it.
    Reacted {
        conversation: ConversationId,
        seq: Seq,
        emoji: String,
        on: bool,
        rev: Rev,
    },
    /// The gateway has looked at a file that the user uploaded. Only the user's own sessions get it.
    Attachment(FileNotice),
    /// The user's membership in a conversation, or its details, changed.
    Conversation(ConversationEvent),
    /// The user changed what they set for a conversation. Only the user's own sessions get it.
    Settings(SettingsEvent),
    Resync {
        conversation: ConversationId,
        head: Seq,
    },
    Reconnect {
        after_ms: u64,
    },
    Error(Refusal),
}

#[derive(Debug, Clone, Serialize)]
pub struct ConversationEvent {
    pub conversation: ConversationId,
    pub change: ConversationChange,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub details: Option<Details>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ConversationChange {
    Added,
    Removed,
    Updated,
}
