//! Requests, replies and events, as described in `docs/protocol.md`.

use std::collections::HashMap;

use serde::{
    Deserialize, Serialize,
    de::{DeserializeOwned, IgnoredAny},
};
use utoipa::ToSchema;

use super::{
    changed::{ChangedEvent, Changes, ReactorItem},
    codes::ErrorCode,
    device::{Away, DeviceList, DeviceSet, NamedDevice, SettingsEvent, SettingsSet, Switch},
    file::{AttachmentUrls, FileUrl},
    list::{at_most, given_objects_at_most, objects_at_most},
    message::Message,
};
use crate::model::{
    Attachment, ClientId, ConversationId, Cursor, Details, FileNotice, Kind, Last, MessageId,
    Millis, Posting, Rev, Role, Seq, UserId,
    limits::{ATTACHMENTS_MAX, DELETE_SEQS_MAX, GROUP_PARTICIPANTS_MAX, WATCHED_MAX},
};

/// A frame from a client, with a valid header.
#[derive(Debug)]
pub struct Incoming {
    /// The id that the client chose. The reply repeats it.
    pub id: Option<u64>,
    /// The request, or the reason why it is invalid.
    pub request: Result<Request, String>,
}

/// An encoded request, whose type is known.
pub(super) trait EncodedRequest: Copy {
    /// Decodes the fields of the request.
    ///
    /// # Errors
    /// The text that says what is wrong with them.
    fn read<T: DeserializeOwned>(self) -> Result<T, String>;
}

/// Makes [`Request`] from the table of requests: its decoder, and the names of requests in metrics.
macro_rules! requests {
    ($($name:literal => $request:ident $(($fields:ty))?,)*) => {
        #[derive(Debug)]
        pub enum Request {
            $($request $(($fields))?,)*
        }

        impl Request {
            /// Decodes the request with this `type`. `None` if there is no such request.
            pub(super) fn decode(name: &str, encoded: impl EncodedRequest) -> Option<Result<Self, String>> {
                Some(match name {
                    $($name => requests!(@decode encoded, $request $(($fields))?),)*
                    _ => return None,
                })
            }

            /// Returns the `type` of the request, for metrics.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$request { .. } => $name,)*
                }
            }
        }
    };
    (@decode $encoded:ident, $request:ident($fields:ty)) => {
        $encoded.read::<$fields>().map(Self::$request)
    };
    (@decode $encoded:ident, $request:ident) => {
        $encoded.read::<IgnoredAny>().map(|_| Self::$request)
    };
}

requests! {
    "connect" => Connect(Connect),
    "cursors" => Cursors(Cursors),
    "refresh" => Refresh(Refresh),
    "inbox" => Inbox(InboxRequest),
    "create" => Create(Create),
    "conversation" => Conversation(Named),
    "participants" => Participants(ParticipantsRequest),
    "add" => Add(NamedUser),
    "remove" => Remove(NamedUser),
    "join" => Join(Named),
    "leave" => Leave(Named),
    "set_role" => SetRole(SetRole),
    "update" => Update(Update),
    "send" => Send(Send),
    "history" => History(HistoryRequest),
    "read" => Read(Mark),
    "delivered" => Delivered(Mark),
    "typing" => Typing(Named),
    "watch" => Watch(Users),
    "unwatch" => Unwatch(Users),
    "subscribe" => Subscribe(Subscribe),
    "unsubscribe" => Unsubscribe(Named),
    "public" => Public(PublicRequest),
    "ping" => Ping,
    "edit" => Edit(Edit),
    "delete" => Delete(Delete),
    "react" => React(Reaction),
    "unreact" => Unreact(Reaction),
    "reactions" => Reactions(ReactionsRequest),
    "changes" => Changes(ChangesRequest),
    "attachment_urls" => AttachmentUrls(AttachmentUrls),
    "device_set" => DeviceSet(DeviceSet),
    "device_remove" => DeviceRemove(NamedDevice),
    "devices" => Devices,
    "away" => Away(Away),
    "settings_set" => SettingsSet(SettingsSet),
}

#[derive(Debug, Deserialize)]
pub struct Connect {
    pub token: String,
    /// The name of the client's device, for logs.
    #[serde(default)]
    pub device: Option<String>,
    #[serde(default)]
    pub cursors: Option<HashMap<ConversationId, Cursor>>,
    /// Whether more cursors follow in `cursors` frames.
    #[serde(default)]
    pub more: bool,
}

/// More cursors of a `connect`.
#[derive(Debug, Deserialize)]
pub struct Cursors {
    pub cursors: HashMap<ConversationId, Cursor>,
    #[serde(default)]
    pub more: bool,
}

#[derive(Debug, Deserialize)]
pub struct Refresh {
    pub token: String,
}

#[derive(Debug, Default, Deserialize)]
pub struct InboxRequest {
    #[serde(default)]
    pub limit: Option<usize>,
    /// The `next` of the previous page.
    #[serde(default)]
    pub before: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct Create {
    pub kind: Kind,
    #[serde(default, deserialize_with = "at_most::<_, _, GROUP_PARTICIPANTS_MAX>")]
    #[schema(value_type = Vec<String>)]
    pub participants: Vec<UserId>,
    #[serde(default)]
    pub name: Option<String>,
    /// The id of a group or channel, if the client chooses it (UUID version 4 or 7). It makes a repeated creation
    /// idempotent.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = Uuid)]
    pub conversation: Option<ConversationId>,
    #[serde(default)]
    pub public: bool,
    #[serde(default)]
    pub posting: Posting,
}

#[derive(Debug, Deserialize)]
pub struct Named {
    pub conversation: ConversationId,
}

#[derive(Debug, Deserialize)]
pub struct NamedUser {
    pub conversation: ConversationId,
    pub user: UserId,
}

#[derive(Debug, Deserialize)]
pub struct SetRole {
    pub conversation: ConversationId,
    pub user: UserId,
    pub role: Role,
}

#[derive(Debug, Deserialize)]
pub struct Update {
    pub conversation: ConversationId,
    #[serde(default)]
    pub name: Option<String>,
    #[serde(default)]
    pub posting: Option<Posting>,
    #[serde(default)]
    pub public: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub struct ParticipantsRequest {
    pub conversation: ConversationId,
    /// The `next` of the previous page.
    #[serde(default)]
    pub after: Option<UserId>,
    #[serde(default)]
    pub limit: Option<usize>,
}

#[derive(Debug, Deserialize)]
pub struct Send {
    pub conversation: ConversationId,
    pub client_id: ClientId,
    pub body: String,
    #[serde(default, deserialize_with = "objects_at_most::<_, _, ATTACHMENTS_MAX>")]
    pub attachments: Vec<Attachment>,
    #[serde(default)]
    pub reply_to: Option<Seq>,
    #[serde(default)]
    pub retry: bool,
}

#[derive(Debug, Deserialize)]
pub struct HistoryRequest {
    pub conversation: ConversationId,
    #[serde(default)]
    pub before: Option<Seq>,
    #[serde(default)]
    pub after: Option<Seq>,
    #[serde(default)]
    pub around: Option<Seq>,
    #[serde(default)]
    pub limit: Option<usize>,
}

#[derive(Debug, Deserialize)]
pub struct Edit {
    pub conversation: ConversationId,
    pub seq: Seq,
    pub body: String,
    /// All attachments that the message has afterwards. `None` keeps those that it has.
    #[serde(
        default,
        deserialize_with = "given_objects_at_most::<_, _, ATTACHMENTS_MAX>"
    )]
    pub attachments: Option<Vec<Attachment>>,
    /// The rev of the content that the client has seen.
    #[serde(default)]
    pub base_rev: Option<Rev>,
}

#[derive(Debug, Deserialize)]
pub struct Delete {
    pub conversation: ConversationId,
    #[serde(deserialize_with = "at_most::<_, _, DELETE_SEQS_MAX>")]
    pub seqs: Vec<Seq>,
    /// Whether a back end deletes the messages of others. It is never part of a frame.
    #[serde(skip)]
    pub as_moderator: bool,
}

#[derive(Debug, Deserialize)]
pub struct Reaction {
    pub conversation: ConversationId,
    pub seq: Seq,
    pub emoji: String,
}

#[derive(Debug, Deserialize)]
pub struct ReactionsRequest {
    pub conversation: ConversationId,
    pub seq: Seq,
    #[serde(default)]
    pub emoji: Option<String>,
    /// The `next` of the previous page.
    #[serde(default)]
    pub after: Option<String>,
    #[serde(default)]
    pub limit: Option<usize>,
}

#[derive(Debug, Deserialize)]
pub struct ChangesRequest {
    pub conversation: ConversationId,
    pub after: Rev,
    #[serde(default)]
    pub limit: Option<usize>,
}

#[derive(Debug, Deserialize)]
pub struct Mark {
    pub conversation: ConversationId,
    pub seq: Seq,
    /// Whether the session of the request is away. It is never part of a frame.
    #[serde(skip)]
    pub away: bool,
}

#[derive(Debug, Deserialize)]
pub struct Users {
    #[serde(deserialize_with = "at_most::<_, _, WATCHED_MAX>")]
    pub users: Vec<UserId>,
}

#[derive(Debug, Deserialize)]
pub struct Subscribe {
    pub conversation: ConversationId,
    #[serde(default)]
    pub after: Option<Seq>,
    /// The rev up to which the client has all changes.
    #[serde(default)]
    pub rev: Option<Rev>,
}

#[derive(Debug, Default, Deserialize)]
pub struct PublicRequest {
    #[serde(default)]
    pub after: Option<ConversationId>,
    #[serde(default)]
    pub limit: Option<usize>,
}

/// The answer to a request. [`Reply`] adds the request's id.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Answer {
    Connected(Box<Connected>),
    Refreshed {
        expires_at: Millis,
    },
    Inbox {
        items: Vec<InboxItem>,
        #[serde(skip_serializing_if = "Option::is_none")]
        next: Option<String>,
    },
    Created {
        conversation: ConversationId,
        existed: bool,
    },
    Conversation(Box<ConversationAnswer>),
    Participants {
        items: Vec<ParticipantItem>,
        #[serde(skip_serializing_if = "Option::is_none")]
        next: Option<UserId>,
    },
    Ok(Okay),
    Sent(Sent),
    History(HistoryPage),
    Reactions {
        items: Vec<ReactorItem>,
        #[serde(skip_serializing_if = "Option::is_none")]
        next: Option<String>,
    },
    Changes(Changes),
    AttachmentUrls {
        items: Vec<FileUrl>,
    },
    Devices(DeviceList),
    Presence {
        items: Vec<PresenceItem>,
    },
    Public {
        items: Vec<PublicItem>,
        #[serde(skip_serializing_if = "Option::is_none")]
        next: Option<ConversationId>,
    },
    Pong {
        time: Millis,
    },
    Error(Refusal),
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
