//! What gateways say to each other, in MessagePack with names, so that two versions of the program understand each other.

use std::borrow::Cow;

use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::places::InboxPlace;
use crate::{
    chat::{Error, Operation, Outcome, Publication},
    model::{ConversationId, Epoch, GatewayId, Seq, Topic, UserId},
    protocol::PresenceItem,
    store::{InboxRow, RingRow},
};

/// Gateways of another one refuse each other.
pub(super) const PROTOCOL: u32 = 2;

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
            | Self::Head(Err(error)) => *error == Error::MOVED,
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
    pub standing: Standing,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Welcome {
    pub standing: Standing,
}

/// From where two gateways go on.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Standing {
    /// The sender's numbering; a gateway that has forgotten the other one begins a new one.
    pub numbering: u64,
    /// The other's, as the sender knows it.
    pub peer: Option<u64>,
    /// The number of the last message received in it.
    pub received: u64,
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

/// A batch's start and its messages.
pub(super) fn decode_batch(bytes: &[u8]) -> Result<(Batch, Vec<Message>), Unreadable> {
    let unreadable = |e: rmp_serde::decode::Error| Unreadable(e.to_string().into());
    let mut decoder = rmp_serde::Deserializer::new(bytes);
    let batch = Batch::deserialize(&mut decoder).map_err(unreadable)?;
    let messages = (0..batch.messages).map(|_| Message::deserialize(&mut decoder));
    let messages = messages.collect::<Result<_, _>>().map_err(unreadable)?;
    Ok((batch, messages))
}
