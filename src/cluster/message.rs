//! What gateways say to each other, in MessagePack with names, so that two versions of the program understand each other.

use std::borrow::Cow;

use bytes::Bytes;
use serde::{
    Deserialize, Serialize,
    de::{DeserializeOwned, IgnoredAny},
};

use super::{network::FRAME_BYTES_MAX, places::InboxPlace};
use crate::{
    chat::{Error, Operation, Outcome, Publication},
    model::{ConversationId, Epoch, GatewayId, Seq, Topic, UserId},
    protocol::PresenceItem,
    store::{InboxRow, RingRow},
};

/// Gateways of another one refuse each other.
pub(super) const PROTOCOL: u32 = 2;

/// Bytes of a batch's start, at most: three numbers and their names.
const BATCH_START_BYTES_MAX: usize = 128;
/// Bytes of one message: with the start of its batch it fits into a frame. Only answers may be longer, and those go in
/// parts. All else is bounded by what it is made of:
///
/// | message | largest | bytes |
/// |---|---|---|
/// | `Ask` | a creation with 10,000 users of 64 bytes | 0.7 MB |
/// | `Publish`, `Deliver` | the same, to these 10,000 users and when each joined | 1.5 MB |
/// | `Publish`, `Deliver` | a body of 64 KiB and ten links, to 10,000 users | 0.9 MB |
/// | `Interests` | 1,000 topics | 0.2 MB |
/// | `AnswerPart` | `PART_BYTES` | 1 MB |
/// | `Ring` | some gateways of 16 bytes | |
/// | all others | one user, one conversation | 1 KB |
///
/// A test builds the largest ones.
pub(super) const MESSAGE_BYTES_MAX: usize = FRAME_BYTES_MAX - BATCH_START_BYTES_MAX;
/// Bytes of one part of a longer answer.
pub(super) const PART_BYTES: usize = 1 << 20;
/// Bytes of one answer, all its parts together: 500 entries of 64 KiB with ten links of 4 KiB, or an inbox of more than
/// 100,000 rows.
pub(super) const ANSWER_BYTES_MAX: usize = 64 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    Ask {
        id: u64,
        ask: Ask,
    },
    Answer {
        id: u64,
        answer: Answer,
    },
    /// Some bytes of an encoded `Answer`, in order. Only to a gateway that takes parts: see [`ResumePoint`].
    AnswerPart {
        id: u64,
        #[serde(with = "raw")]
        bytes: Bytes,
        last: bool,
    },
    /// From a conversation's owner to the home of all users it names.
    Publish {
        part: u64,
        publication: Publication,
    },
    /// Back: every gateway concerned has put it into its sockets' queues; or, not taken, this is not their home.
    Published {
        part: u64,
        taken: bool,
    },
    /// From a channel's owner to its sender's home: they have read what came before.
    Sent {
        user: UserId,
        channel: ConversationId,
        seq: Seq,
    },
    /// To a gateway with sockets.
    Deliver(Delivered),
    /// Some of what the sender's sockets are interested in, as of this version.
    Interests {
        version: Epoch,
        topics: Vec<Interest>,
    },
    /// That was all, for this version.
    Announced {
        version: Epoch,
    },
    Uninterested {
        topic: Topic,
    },
    /// The sender acts under no older version any more.
    Adopted {
        version: Epoch,
    },
    /// News of a version of the ring.
    Ring(RingRow),
    /// The sender will not be in the next version, and goes on under this one until it says that it has adopted that.
    Leaving,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Interest {
    pub topic: Topic,
    /// Of a channel: up to where its entries have been passed on.
    pub passed: Option<Seq>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Delivered {
    Publication(Publication),
    Presence(PresenceItem),
    /// More than can be sent again: whoever is in the channel must read it.
    Resync {
        channel: ConversationId,
        head: Seq,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Of a conversation's owner.
    Operation {
        conversation: ConversationId,
        actor: UserId,
        operation: Operation,
    },
    /// Of a user's home: a session has come; answered with the user's places.
    Register {
        user: UserId,
        version: Epoch,
    },
    Inbox {
        user: UserId,
    },
    /// As `Presence`, and from now on when it changes.
    Watch {
        user: UserId,
        version: Epoch,
    },
    Presence {
        user: UserId,
    },
    /// Of a channel's owner: its entries from now on; answered with the head.
    Follow {
        channel: ConversationId,
        version: Epoch,
    },
    /// Of any gateway: close the user's sessions.
    Disconnect {
        user: UserId,
    },
}

/// Makes the answer that refuses a question.
pub(super) type Refuse = fn(Error) -> Answer;

impl Ask {
    /// The topic in which whoever asks is interested from now on, as of a version.
    pub(super) fn interest(&self) -> Option<(Topic, Epoch)> {
        match self {
            Self::Register { user, version } => Some((Topic::User(user.clone()), *version)),
            Self::Watch { user, version } => Some((Topic::Presence(user.clone()), *version)),
            Self::Follow { channel, version } => Some((Topic::Channel(*channel), *version)),
            Self::Operation { .. }
            | Self::Inbox { .. }
            | Self::Presence { .. }
            | Self::Disconnect { .. } => None,
        }
    }

    pub(super) fn refuse(&self) -> Refuse {
        match self {
            // `Disconnected` cannot say that it was refused.
            Self::Operation { .. } | Self::Disconnect { .. } => |error| Answer::Outcome(Err(error)),
            Self::Register { .. } => |error| Answer::Places(Err(error)),
            Self::Inbox { .. } => |error| Answer::Inbox(Err(error)),
            Self::Watch { .. } | Self::Presence { .. } => |error| Answer::Presence(Err(error)),
            Self::Follow { .. } => |error| Answer::Head(Err(error)),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Outcome(Result<Outcome, Error>),
    Inbox(Result<Vec<InboxRow>, Error>),
    Places(Result<Vec<InboxPlace>, Error>),
    Presence(Result<PresenceItem, Error>),
    Head(Result<Seq, Error>),
    Disconnected(usize),
}

impl Answer {
    /// Nothing was done: it was the wrong one that was asked.
    pub(super) fn is_moved(&self) -> bool {
        match self {
            Self::Outcome(Err(error))
            | Self::Inbox(Err(error))
            | Self::Places(Err(error))
            | Self::Presence(Err(error))
            | Self::Head(Err(error)) => *error == Error::Moved,
            Self::Outcome(Ok(_))
            | Self::Inbox(Ok(_))
            | Self::Places(Ok(_))
            | Self::Presence(Ok(_))
            | Self::Head(Ok(_))
            | Self::Disconnected(_) => false,
        }
    }
}

/// How two gateways come to trust each other: each proves that it knows the secret, over both nonces.
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
    /// The sender understands answers in parts. Versions of the program before there were any do not say so.
    #[serde(default)]
    pub takes_parts: bool,
}

/// The start of a batch; its messages follow, one after the other.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Batch {
    /// The number of its first message.
    pub first: u64,
    /// Everything up to this number was received and dealt with.
    pub acknowledged: u64,
    pub messages: u32,
}

/// Bytes as bytes, and not as a list of numbers.
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
    rmp_serde::from_slice(bytes).map_err(|e| Unreadable(e.to_string().into()))
}

/// A message of a batch that this gateway cannot read: an older build has no such message, or a newer one changed it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unknown {
    pub error: String,
    /// The number of the message, if it is a question or an answer.
    pub id: Option<Numbered>,
}

/// As much of a message as every version of the program can read.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) enum Numbered {
    Ask { id: u64 },
    Answer { id: u64 },
    AnswerPart { id: u64 },
}

/// Reads a batch's start and its messages. One that cannot be read is passed over: only the encoding must be sound.
pub(super) fn decode_batch(
    bytes: &[u8],
) -> Result<(Batch, Vec<Result<Message, Unknown>>), Unreadable> {
    let unreadable = |e: rmp_serde::decode::Error| Unreadable(e.to_string().into());
    let mut decoder = rmp_serde::Deserializer::new(bytes);
    let batch = Batch::deserialize(&mut decoder).map_err(unreadable)?;
    let mut messages = Vec::new();
    for _ in 0..batch.messages {
        let from = *decoder.get_ref();
        messages.push(match Message::deserialize(&mut decoder) {
            Ok(message) => Ok(message),
            Err(error) => {
                decoder = rmp_serde::Deserializer::new(from);
                IgnoredAny::deserialize(&mut decoder).map_err(unreadable)?;
                Err(Unknown {
                    error: error.to_string(),
                    id: Numbered::deserialize(&mut rmp_serde::Deserializer::new(from)).ok(),
                })
            }
        });
    }
    Ok((batch, messages))
}

#[cfg(test)]
mod tests;
