//! The messages between gateways, in MessagePack with field names, so that two versions of the program understand each
//! other.

mod publication;

use std::borrow::Cow;

use bytes::Bytes;
use serde::{
    Deserialize, Serialize,
    de::{DeserializeOwned, IgnoredAny},
};

use super::{
    memberships::{InboxOrder, InboxRef, Position},
    network::FRAME_BYTES_MAX,
    pushes::ToNotify,
};
use crate::{
    chat::{Error, Operation, Outcome, Publication},
    model::{
        ConversationId, Cursor, Device, Epoch, GatewayId, Rank, Rev, Seq, SettingsChange, Topic,
        UploadBegun, UploadLimits, UserId,
    },
    msgpack::{self, Decoder},
    protocol::{DeviceItem, PresenceItem},
    store::{InboxRow, InboxSettings, RingRow},
};

/// The version of the protocol. Gateways with different ones refuse each other.
pub(super) const PROTOCOL: u32 = 2;

/// The bytes of a batch's start, at most: four numbers and their names.
const BATCH_START_BYTES_MAX: usize = 128;
/// The bytes of one message, at most: with the start of its batch it fits into a frame. Only answers may be longer; they
/// are sent in parts. All other messages are bounded by their contents:
///
/// | message | largest | bytes |
/// |---|---|---|
/// | `PeerRequest` | a creation with 10,000 users of 64 bytes | 0.7 MB |
/// | `Publish`, `Deliver` | the same, to these 10,000 users with the seq of their joining | 1.5 MB |
/// | `Publish`, `Deliver` | a body of 64 KiB and ten links, to 10,000 users | 0.9 MB |
/// | `Publish`, `Deliver` | changed items of `CHANGED_BYTES_MAX`, to 10,000 users | 1.1 MB |
/// | `Interests` | 1,000 topics | 0.2 MB |
/// | `AnswerPart` | `PART_BYTES` | 1 MB |
/// | `Ring` | some gateways of 16 bytes | |
/// | `PeerRequest::Inbox` | the ids of a page of 500 conversations | 10 KB |
/// | `PeerRequest::Devices` | a token of 4 KiB | 5 KB |
/// | all others | one user, one conversation | 1 KB |
///
/// A test builds the largest ones.
pub(super) const MESSAGE_BYTES_MAX: usize = FRAME_BYTES_MAX - BATCH_START_BYTES_MAX;
/// The bytes of one part of a longer answer.
pub(super) const PART_BYTES: usize = 1 << 20;
/// The bytes of all parts of an answer, at most: 500 entries of 64 KiB with ten links of 4 KiB, or an inbox of more than
/// 100,000 rows.
pub(super) const ANSWER_BYTES_MAX: usize = 64 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum PeerMessage {
    Ask {
        id: u64,
        ask: PeerRequest,
    },
    Answer {
        id: u64,
        answer: PeerResponse,
    },
    /// Some bytes of an encoded `Answer`, in order. Only to a gateway that takes parts: see [`ResumePoint`].
    AnswerPart {
        id: u64,
        #[serde(with = "raw")]
        bytes: Bytes,
        last: bool,
    },
    /// A publication, from a conversation's owner to the home of all users it names. `part` is its number there, or zero if
    /// the owner needs no `Published`.
    Publish {
        part: u64,
        #[serde(with = "publication")]
        publication: Publication,
    },
    /// The answer: every gateway concerned has queued the publication for its sockets. If it was not `taken`, this is not
    /// the home of these users.
    Published {
        part: u64,
        taken: bool,
    },
    /// What the sender of a channel's entry has read, from the channel's owner to the sender's home.
    #[serde(rename = "Sent")]
    ReadBySender {
        user: UserId,
        channel: ConversationId,
        seq: Seq,
        /// The [`texts`](crate::model::Entry::texts) of the entry, from the level of changes on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        texts: Option<u64>,
    },
    /// Something for the sockets of the receiver.
    Deliver(Delivered),
    /// Some of the topics in which the sockets of the sender are interested, as of this version.
    Interests {
        version: Epoch,
        topics: Vec<Interest>,
    },
    /// All interests of the sender have been announced for this version.
    Announced {
        version: Epoch,
    },
    /// No socket of the sender is interested in the topic any more.
    Uninterested {
        topic: Topic,
    },
    /// Whether all sessions of the user at the sender are away, for the user's home. From the level of consumers on.
    Away {
        user: UserId,
        away: bool,
    },
    /// The sender no longer acts under an older version.
    Adopted {
        version: Epoch,
    },
    /// A version of the ring.
    Ring(RingRow),
    /// The sender is leaving: it will not be in the next version, and acts under this one until it says `Adopted`.
    Leaving,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "EncodedInterest", into = "EncodedInterest")]
pub(super) struct Interest {
    pub topic: Topic,
    /// The position up to which a channel has been delivered to the sockets of the sender.
    pub passed: Option<Cursor>,
    /// Whether all sessions of a user at the sender are away.
    pub away: bool,
}

/// The encoding of an [`Interest`]. Earlier builds know the topic and the seq only, and ignore the rest.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Interest")]
struct EncodedInterest {
    topic: Topic,
    passed: Option<Seq>,
    #[serde(default, skip_serializing_if = "is_zero")]
    rev: Rev,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    away: bool,
}

fn is_zero(rev: &Rev) -> bool {
    *rev == 0
}

impl From<Interest> for EncodedInterest {
    fn from(interest: Interest) -> Self {
        let Interest {
            topic,
            passed,
            away,
        } = interest;
        Self {
            topic,
            passed: passed.map(|Cursor(seq, _)| seq),
            rev: passed.map_or(0, |Cursor(_, rev)| rev),
            away,
        }
    }
}

impl From<EncodedInterest> for Interest {
    fn from(encoded: EncodedInterest) -> Self {
        let EncodedInterest {
            topic,
            passed,
            rev,
            away,
        } = encoded;
        Self {
            topic,
            passed: passed.map(|seq| Cursor(seq, rev)),
            away,
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Delivered {
    Publication(#[serde(with = "publication")] Publication),
    Presence(PresenceItem),
    /// More entries are missing than can be sent again, so the channel's subscribers must read it up to `head`.
    Resync {
        channel: ConversationId,
        head: Seq,
    },
    /// What a user has set for a conversation. From the level of consumers on.
    Settings {
        user: UserId,
        conversation: ConversationId,
        settings: InboxSettings,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum PeerRequest {
    /// An operation, for a conversation's owner.
    Operation {
        conversation: ConversationId,
        actor: UserId,
        operation: Operation,
    },
    /// A user's home learns that a session has come. The answer is the conversations that the user is in.
    Register { user: UserId, version: Epoch },
    /// A user's inbox, or a part of it, read by their home. Gateways of earlier builds ignore `part` and answer all rows.
    Inbox {
        user: UserId,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        part: Option<InboxPart>,
    },
    /// A user's presence now, and from now on when it changes. For the user's home.
    Watch { user: UserId, version: Epoch },
    /// A user's presence, for the user's home.
    Presence { user: UserId },
    /// A channel's entries and changes from now on, for its owner. The answer is the channel's position.
    Follow {
        channel: ConversationId,
        version: Epoch,
    },
    /// Any gateway closes its sessions of the user.
    Disconnect { user: UserId },
    /// A user's devices, for the user's home. From the level of consumers on, as all that follow.
    Devices { user: UserId, ask: DevicesAsk },
    /// A user becomes the owner of a token, or is no longer its owner. For the gateway of the token.
    Token {
        hash: [u8; 32],
        user: UserId,
        device: String,
        claims: bool,
    },
    /// What a user sets for a conversation, for the user's home.
    Settings {
        user: UserId,
        conversation: ConversationId,
        change: SettingsChange,
    },
    /// A user begins to upload so many bytes. For the user's home. A gateway of an earlier build cannot read it, and answers an
    /// outcome.
    BeginUpload {
        user: UserId,
        bytes: u64,
        limits: UploadLimits,
    },
    /// Users are to be notified of messages. For their home, which answers at once for whom it has not decided yet.
    Push {
        conversation: ConversationId,
        users: ToNotify,
    },
}

/// What is asked about the devices of a user.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum DevicesAsk {
    List,
    /// Registers a device. The home gives it its version.
    Set(Device),
    Remove {
        device: String,
    },
}

/// A part of a user's inbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum InboxPart {
    /// The conversations from which the page before a position is chosen. The answer is an [`InboxOrder`].
    Order {
        before: Option<Position>,
        limit: usize,
    },
    /// The rows of some conversations.
    Rows(Vec<ConversationId>),
}

/// A function that makes the answer that refuses a question.
pub(super) type Refuse = fn(Error) -> PeerResponse;

impl PeerRequest {
    /// Returns the topic in which the asking gateway is interested from now on, and the version of the ring as of which.
    pub(super) fn interest(&self) -> Option<(Topic, Epoch)> {
        match self {
            Self::Register { user, version } => Some((Topic::User(user.clone()), *version)),
            Self::Watch { user, version } => Some((Topic::Presence(user.clone()), *version)),
            Self::Follow { channel, version } => Some((Topic::Channel(*channel), *version)),
            Self::Operation { .. }
            | Self::Inbox { .. }
            | Self::Presence { .. }
            | Self::Disconnect { .. }
            | Self::Devices { .. }
            | Self::Token { .. }
            | Self::Settings { .. }
            | Self::BeginUpload { .. }
            | Self::Push { .. } => None,
        }
    }

    /// Returns how the question is refused.
    pub(super) fn refuse(&self) -> Refuse {
        match self {
            // `Disconnected` has no form for a refusal.
            Self::Operation { .. }
            | Self::Disconnect { .. }
            | Self::Devices { .. }
            | Self::Token { .. }
            // An answer of another kind decides nothing.
            | Self::Push { .. } => |error| PeerResponse::Outcome(Err(error)),
            Self::Settings { .. } => |error| PeerResponse::Settings(Err(error)),
            Self::BeginUpload { .. } => |error| PeerResponse::Upload(Err(error)),
            Self::Register { .. } => |error| PeerResponse::Places(Err(error)),
            Self::Inbox { .. } => |error| PeerResponse::Inbox(Err(error)),
            Self::Watch { .. } | Self::Presence { .. } => {
                |error| PeerResponse::Presence(Err(error))
            }
            Self::Follow { .. } => |error| PeerResponse::Head(Err(error)),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum PeerResponse {
    Outcome(Result<Outcome, Error>),
    Inbox(Result<Vec<InboxRow>, Error>),
    /// The answer to [`InboxPart::Order`], which gateways of earlier builds do not ask.
    InboxOrder(InboxOrder),
    Places(Result<Vec<InboxRef>, Error>),
    Presence(Result<PresenceItem, Error>),
    /// The position of a channel without changes. All builds understand it.
    Head(Result<Seq, Error>),
    Disconnected(usize),
    /// The position of a channel with changes. There are none below [`LEVEL_CHANGES`](crate::model::LEVEL_CHANGES), so
    /// every gateway that gets it understands it.
    Position(Cursor),
    /// The answer to [`DevicesAsk::List`]. The other answers about devices are outcomes.
    Devices(Vec<DeviceItem>),
    Settings(Result<InboxSettings, Error>),
    Upload(Result<UploadBegun, Error>),
    /// The users for whom nothing is decided yet.
    Push(Vec<UserId>),
}

impl PeerResponse {
    /// Whether nothing was done, because another gateway must be asked.
    pub(super) fn is_moved(&self) -> bool {
        match self {
            Self::Outcome(Err(error))
            | Self::Inbox(Err(error))
            | Self::Places(Err(error))
            | Self::Presence(Err(error))
            | Self::Head(Err(error))
            | Self::Settings(Err(error))
            | Self::Upload(Err(error)) => *error == Error::Moved,
            Self::Outcome(Ok(_))
            | Self::Inbox(Ok(_))
            | Self::InboxOrder(_)
            | Self::Places(Ok(_))
            | Self::Presence(Ok(_))
            | Self::Head(Ok(_))
            | Self::Position(_)
            | Self::Disconnected(_)
            | Self::Devices(_)
            | Self::Push(_)
            | Self::Settings(Ok(_))
            | Self::Upload(Ok(_)) => false,
        }
    }

    /// Returns the answer to [`PeerRequest::Follow`], in a form that the asking gateway understands.
    pub(super) fn position(position: Result<Cursor, Error>) -> Self {
        match position {
            Ok(position) if position.1 > 0 => Self::Position(position),
            position => Self::Head(position.map(|Cursor(seq, _)| seq)),
        }
    }
}

/// The start of the handshake, in which each gateway proves over both nonces that it knows the secret.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub protocol: u32,
    pub from: GatewayId,
    pub to: GatewayId,
    pub nonce: [u8; 32],
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Challenge {
    pub nonce: [u8; 32],
    pub proof: [u8; 32],
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Response {
    pub proof: [u8; 32],
    #[serde(rename = "standing")]
    pub resume_point: ResumePoint,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Welcome {
    #[serde(rename = "standing")]
    pub resume_point: ResumePoint,
}

/// The point from which a gateway continues after a reconnect.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct ResumePoint {
    /// The id of the sender's stream of messages. A gateway that has forgotten the other one begins a new stream.
    #[serde(rename = "numbering")]
    pub stream_id: u64,
    /// The id of the other's stream, as the sender knows it.
    pub peer: Option<u64>,
    /// The number of the last message of that stream that was received.
    pub received: u64,
    /// Whether the sender understands answers in parts. Earlier versions of the program do not say so.
    #[serde(default)]
    pub takes_parts: bool,
}

/// The start of a batch; its messages follow, one after the other.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Batch {
    /// The number of the first message in it.
    pub first: u64,
    /// The messages up to this number were received and handled.
    pub acknowledged: u64,
    pub messages: u32,
    /// The highest rank that the sender knows. Zero from gateways of earlier builds.
    #[serde(default)]
    pub rank: Rank,
}

/// Encodes bytes as bytes instead of a list of numbers.
mod raw {
    use std::fmt;

    use bytes::Bytes;
    use serde::{Deserializer, Serializer, de::Visitor};

    pub(super) fn serialize<S: Serializer>(bytes: &Bytes, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Bytes, D::Error> {
        struct Raw;

        impl Visitor<'_> for Raw {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(Bytes::copy_from_slice(bytes))
            }

            fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Bytes, E> {
                Ok(bytes.into())
            }
        }

        from.deserialize_bytes(Raw)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("a peer's message cannot be read: {0}")]
pub(super) struct Unreadable(Cow<'static, str>);

pub(super) fn encode<T: Serialize>(value: &T) -> Bytes {
    match rmp_serde::to_vec_named(value) {
        Ok(bytes) => bytes.into(),
        Err(error) => {
            debug_assert!(false, "{error}");
            Bytes::new()
        }
    }
}

pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Unreadable> {
    msgpack::from_slice(bytes).map_err(unreadable)
}

/// A message of a batch that this gateway cannot read, because a newer build has added or changed it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unknown {
    pub error: String,
    /// The kind and number of the message, if it is a question or an answer.
    pub id: Option<Numbered>,
}

/// The start of a message, which every version of the program can read.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) enum Numbered {
    Ask { id: u64 },
    Answer { id: u64 },
    AnswerPart { id: u64 },
}

/// Reads a batch's start and its messages. A message that cannot be read is skipped, as long as its encoding is sound.
pub(super) fn decode_batch(
    bytes: &[u8],
) -> Result<(Batch, Vec<Result<PeerMessage, Unknown>>), Unreadable> {
    let mut decoder = Decoder::new(bytes);
    let batch = Batch::deserialize(&mut decoder).map_err(unreadable)?;
    let messages = (0..batch.messages).map(|_| PeerMessage::deserialize(&mut decoder).map(Ok));
    let messages = match messages.collect::<Result<_, _>>() {
        Ok(messages) => messages,
        Err(_) => decode_each(batch.messages, bytes)?,
    };
    Ok((batch, messages))
}

/// Reads the messages of a batch one by one, to skip those that cannot be read. This is slower, and a batch has such
/// messages only while gateways of several builds run.
fn decode_each(
    messages: u32,
    bytes: &[u8],
) -> Result<Vec<Result<PeerMessage, Unknown>>, Unreadable> {
    let mut ends = Decoder::new(bytes);
    IgnoredAny::deserialize(&mut ends).map_err(unreadable)?;
    let mut decoded = Vec::new();
    for _ in 0..messages {
        let message = ends.rest();
        IgnoredAny::deserialize(&mut ends).map_err(unreadable)?;
        let read = msgpack::from_slice(message);
        decoded.push(read.map_err(|error: msgpack::Error| Unknown {
            error: error.to_string(),
            id: msgpack::from_slice(message).ok(),
        }));
    }
    Ok(decoded)
}

fn unreadable(error: msgpack::Error) -> Unreadable {
    Unreadable(error.to_string().into())
}

#[cfg(test)]
mod tests;
