//! What can be asked of a conversation, and what it answers.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::model::{
    ClientId, ConversationId, Details, Draft, Entry, Kind, Last, MessageId, Millis, Participant,
    Posting, Role, Seq, UserId,
};

/// An operation on one conversation, by one user. Answered by the conversation's owner, in order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Operation {
    Create(Creation),
    Details,
    Participants {
        after: Option<UserId>,
        limit: usize,
    },
    Add {
        user: UserId,
    },
    Remove {
        user: UserId,
    },
    Join,
    Leave,
    SetRole {
        user: UserId,
        role: Role,
    },
    Update {
        name: Option<String>,
        posting: Option<Posting>,
        public: Option<bool>,
    },
    Send(Draft),
    History {
        range: LogRange,
        limit: usize,
    },
    Read {
        seq: Seq,
    },
    Delivered {
        seq: Seq,
    },
    Typing,
    /// The newest entry, for who may see it: participants, and anyone of a public channel.
    Head,
    /// Entries after one, for a gateway that has missed them; never from a client.
    CatchUp {
        after: Seq,
        limit: usize,
    },
    /// Its inbox rows are written again, where a gateway that is gone may have left them unwritten; never from a client.
    Repair,
}

impl Operation {
    /// Whether it changes nothing and tells nobody.
    pub(super) fn only_reads(&self) -> bool {
        matches!(
            self,
            Self::Details
                | Self::Participants { .. }
                | Self::History { .. }
                | Self::Head
                | Self::CatchUp { .. }
        )
    }

    /// Whether it matters who asks: what anyone may read is read for anyone, and gateways are not participants.
    pub(super) fn depends_on_actor(&self, details: &Details) -> bool {
        match self {
            Self::History { .. } | Self::Head => !details.public,
            Self::CatchUp { .. } | Self::Repair => false,
            _ => true,
        }
    }

    /// The user it is about, besides the one who asks.
    pub(super) fn subject(&self) -> Option<&UserId> {
        match self {
            Self::Add { user } | Self::Remove { user } | Self::SetRole { user, .. } => Some(user),
            Self::Create(_)
            | Self::Details
            | Self::Participants { .. }
            | Self::Join
            | Self::Leave
            | Self::Update { .. }
            | Self::Send(_)
            | Self::History { .. }
            | Self::Read { .. }
            | Self::Delivered { .. }
            | Self::Typing
            | Self::Head
            | Self::CatchUp { .. }
            | Self::Repair => None,
        }
    }

    /// The same to be asked again when nobody knows whether it was done; none if that could do it twice.
    #[must_use]
    pub fn again(&self) -> Option<Self> {
        match self {
            Self::Send(draft) => Some(Self::Send(Draft {
                retry: true,
                ..draft.clone()
            })),
            Self::Details
            | Self::Participants { .. }
            | Self::History { .. }
            | Self::Read { .. }
            | Self::Delivered { .. }
            | Self::Typing
            | Self::Head
            | Self::CatchUp { .. }
            | Self::Repair => Some(self.clone()),
            Self::Create(_)
            | Self::Add { .. }
            | Self::Remove { .. }
            | Self::Join
            | Self::Leave
            | Self::SetRole { .. }
            | Self::Update { .. } => None,
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Creation {
    pub kind: Kind,
    /// Besides the creator; of a dm, the other one.
    pub participants: Vec<UserId>,
    pub name: Option<String>,
    pub public: bool,
    pub posting: Posting,
    /// When it was made, if that is not now: an imported conversation.
    pub at: Option<Millis>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogRange {
    Newest,
    Before(Seq),
    After(Seq),
    Around(Seq),
}

impl LogRange {
    /// The first and the last seq of the page, of a log whose newest entry is `head`. Empty if first > last.
    #[must_use]
    pub fn within(self, head: Seq, limit: usize) -> (Seq, Seq) {
        let limit = limit as Seq;
        let newest_up_to = |to: Seq| (to.saturating_sub(limit) + 1, to);
        match self {
            Self::Newest => newest_up_to(head),
            Self::Before(seq) => newest_up_to(seq.saturating_sub(1).min(head)),
            Self::After(seq) => (seq.saturating_add(1), seq.saturating_add(limit).min(head)),
            Self::Around(seq) => {
                let to = seq.saturating_add(limit / 2).min(head);
                newest_up_to(to.max(limit.min(head)))
            }
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Outcome {
    Created {
        existed: bool,
    },
    Details(DetailsView),
    Participants(ParticipantsPage),
    /// A membership change or an update, at this place in the log.
    Changed {
        seq: Seq,
    },
    Sent(Sent),
    History(Page),
    Head(Head),
    Done,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DetailsView {
    pub details: Details,
    pub participant_count: u64,
    pub head: Seq,
    pub role: Option<Role>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ParticipantsPage {
    pub items: Vec<Listed>,
    pub next: Option<UserId>,
}

/// A participant as shown to another one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Listed {
    pub user: UserId,
    pub role: Role,
    pub joined_seq: Seq,
    delivered_seq: Seq,
    read_seq: Seq,
    /// Of a channel's users, only oneself is told how far one has got: the two above say nothing. They are numbers all the
    /// same, because gateways of the version before understand nothing else.
    #[serde(default)]
    without_marks: bool,
}

impl Listed {
    pub(super) fn of(participant: &Participant, with_marks: bool) -> Self {
        let Participant {
            user,
            role,
            joined_seq,
            left_seq: _,
            delivered_seq,
            read_seq,
        } = participant;
        Self {
            user: user.clone(),
            role: *role,
            joined_seq: *joined_seq,
            // What is read has been delivered.
            delivered_seq: if with_marks {
                *delivered_seq.max(read_seq)
            } else {
                0
            },
            read_seq: if with_marks { *read_seq } else { 0 },
            without_marks: !with_marks,
        }
    }

    /// Up to where messages were delivered to them, and read, if whoever asks may know.
    #[must_use]
    pub fn marks(&self) -> Option<(Seq, Seq)> {
        (!self.without_marks).then_some((self.delivered_seq, self.read_seq))
    }
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Sent {
    pub seq: Seq,
    pub message_id: MessageId,
    pub at: Millis,
    pub duplicate: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Page {
    pub entries: Vec<Arc<Entry>>,
    pub head: Seq,
}

impl Page {
    /// Whether it has everything that follows `after`, up to the head.
    #[must_use]
    pub fn reaches_head(&self, after: Seq) -> bool {
        let last = self.entries.last().map_or(after, |last| last.seq);
        last >= self.head
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Head {
    pub details: Details,
    pub head: Seq,
    pub last: Option<Last>,
}

/// A system entry's client id: nobody sends it twice.
pub(super) fn fresh_client_id() -> ClientId {
    ClientId(ConversationId::random().0)
}

#[cfg(test)]
mod tests;
