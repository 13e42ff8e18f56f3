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
    network::FRAME_BYTES_MAX,
    question::{Answered, AnyQuestion},
};
use crate::{
    chat::Publication,
    model::{ConversationId, Cursor, Epoch, GatewayId, Rank, Seq, Topic, UserId},
    msgpack::{self, Decoder},
    protocol::PresenceItem,
    store::{InboxSettings, RingRow},
};

/// The version of the protocol. Gateways with different ones refuse each other.
pub(super) const PROTOCOL: u32 = 3;

/// The bytes of a batch's start, at most: four numbers and their names.
const BATCH_START_BYTES_MAX: usize = 128;
/// The bytes of one message, at most: with the start of its batch it fits into a frame. Only answers may be longer; they
/// are sent in parts. All other messages are bounded by their contents:
///
/// | message | largest | bytes |
/// |---|---|---|
/// | `AnyQuestion` | a creation with 10,000 users of 64 bytes | 0.7 MB |
/// | `Publish`, `Deliver` | the same, to these 10,000 users with the seq of their joining | 1.5 MB |
/// | `Publish`, `Deliver` | a body of 64 KiB and ten links, to 10,000 users | 0.9 MB |
/// | `Publish`, `Deliver` | changed items of `CHANGED_BYTES_MAX`, to 10,000 users | 1.1 MB |
/// | `Interests` | 1,000 topics | 0.2 MB |
/// | `AnswerPart` | `PART_BYTES` | 1 MB |
/// | `Ring` | some gateways of 16 bytes | |
/// | `ReadInbox` | the ids of a page of 500 conversations | 10 KB |
/// | `SetDevice` | a token of 4 KiB | 5 KB |
/// | `Push` | 10,000 users of 64 bytes, each with a seq | 0.8 MB |
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
pub(crate) enum PeerMessage {
    Ask {
        id: u64,
        ask: AnyQuestion,
    },
    Answer {
        id: u64,
        answer: Answered,
    },
    /// Some bytes of an encoded `Answer`, in order.
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
    ReadBySender {
        user: UserId,
        channel: ConversationId,
        seq: Seq,
        /// The [`texts`](crate::model::Entry::texts) of the entry.
        texts: u64,
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
    /// Whether all sessions of the user at the sender are away, for the user's home.
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
pub(crate) struct Interest {
    pub topic: Topic,
    /// The position up to which a channel has been delivered to the sockets of the sender.
    pub passed: Option<Cursor>,
    /// Whether all sessions of a user at the sender are away.
    pub away: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Delivered {
    Publication(#[serde(with = "publication")] Publication),
    Presence(PresenceItem),
    /// More entries are missing than can be sent again, so the channel's subscribers must read it up to `head`.
    Resync {
        channel: ConversationId,
        head: Seq,
    },
    /// What a user has set for a conversation.
    Settings {
        user: UserId,
        conversation: ConversationId,
        settings: InboxSettings,
    },
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
    pub resume_point: ResumePoint,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Welcome {
    pub resume_point: ResumePoint,
}

/// The point from which a gateway continues after a reconnect.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct ResumePoint {
    /// The id of the sender's stream of messages. A gateway that has forgotten the other one begins a new stream.
    pub stream_id: u64,
    /// The id of the other's stream, as the sender knows it.
    pub peer: Option<u64>,
    /// The number of the last message of that stream that was received.
    pub received: u64,
}

/// The start of a batch; its messages follow, one after the other.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Batch {
    /// The number of the first message in it.
    pub first: u64,
    /// The messages up to this number were received and handled.
    pub acknowledged: u64,
    pub messages: u32,
    /// The highest rank that the sender knows.
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

pub(crate) fn encode<T: Serialize>(value: &T) -> Bytes {
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
