//! The way out of a conversation: what is committed goes to its audience. The one port of this room.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::{
    model::{ConversationId, Details, Entry, Kind, Seq, UserId, weight::ALLOCATION_BYTES},
    store::InboxFace,
};

/// Who is to hear of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Audience {
    /// Each participant of a dm or group, by name: fan-out on write.
    Members(Arc<Members>),
    /// Whoever is subscribed to the channel: fan-out on read.
    Channel,
    /// One user's own sessions.
    User(UserId),
}

/// The participants of a dm or group as of one entry.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Members {
    pub kind: Kind,
    /// Of a dm, only where the other one is not among `users`.
    pub name: Option<String>,
    /// With the seq at which each joined.
    pub users: Vec<(UserId, Seq)>,
}

impl Members {
    /// Bytes held by a list in an `Arc`, without its users' names, which all lists share.
    #[must_use]
    pub fn weight(&self) -> usize {
        size_of::<Self>() + ALLOCATION_BYTES + self.users.len() * size_of::<(UserId, Seq)>()
    }

    /// What the inbox of `user`, who joined at `joined_seq`, shows once `entry` is the newest.
    #[must_use]
    pub fn face(&self, user: &UserId, joined_seq: Seq, last: &crate::model::Last) -> InboxFace {
        InboxFace {
            seq: last.seq,
            kind: self.kind,
            name: self.name_for(user),
            joined_seq,
            last: Some(last.clone()),
        }
    }

    /// A dm is named after the other one.
    #[must_use]
    pub fn name_for(&self, user: &UserId) -> Option<String> {
        match self.kind {
            Kind::Dm if self.name.is_some() => self.name.clone(),
            Kind::Dm => {
                let mut others = self
                    .users
                    .iter()
                    .map(|(other, _)| other)
                    .filter(|o| *o != user);
                Some(others.next().unwrap_or(user).to_string())
            }
            Kind::Group | Kind::Channel => self.name.clone(),
        }
    }
}

/// What a user's place in a conversation has become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    Added,
    Removed,
    Updated,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Publication {
    /// A committed entry. Only `Log::commit` makes one.
    Entry {
        conversation: ConversationId,
        entry: Arc<Entry>,
        audience: Audience,
    },
    Receipt {
        conversation: ConversationId,
        user: UserId,
        read_seq: Option<Seq>,
        delivered_seq: Option<Seq>,
        audience: Audience,
    },
    Typing {
        conversation: ConversationId,
        user: UserId,
        audience: Audience,
    },
    /// The place of each of the audience, as of entry `seq`.
    Place {
        conversation: ConversationId,
        seq: Seq,
        place: Place,
        details: Details,
        audience: Audience,
    },
}

impl Publication {
    #[must_use]
    pub fn audience(&self) -> &Audience {
        match self {
            Self::Entry { audience, .. }
            | Self::Receipt { audience, .. }
            | Self::Typing { audience, .. }
            | Self::Place { audience, .. } => audience,
        }
    }
}

/// How far a publication has got when `publish` returns.
#[derive(Debug)]
pub enum Handed {
    /// Every gateway concerned has queued it for its sockets.
    Done,
    /// Fires when they have; never, if this gateway loses the conversation first.
    Waiting(oneshot::Receiver<InHand>),
}

/// A publication that is given to the new home too if a user's home changes. To be dropped when what follows from it is
/// with the [`super::InboxWriter`].
pub struct InHand(pub Arc<dyn std::any::Any + Send + Sync>);

impl std::fmt::Debug for InHand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InHand")
    }
}

/// Where publications go. `chat` knows nothing of sockets or peers.
///
/// Publications of one conversation arrive in the order of these calls.
pub trait Publish: Send + Sync + 'static {
    fn publish(&self, publication: Publication) -> Handed;
}
