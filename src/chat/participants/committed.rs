//! The committed state of a conversation, which replies may contain. `Participants` is ahead of it by the entries in
//! flight. So the state before each of these is kept until the entry is committed.

use std::{collections::VecDeque, ops::Bound, sync::Arc};

use super::{Participants, checks::refusal, users_of};
use crate::{
    chat::{
        error::Error,
        publish::{Audience, Recipients},
    },
    model::{Content, Details, Entry, Kind, Participant, Seq, SystemChange, UserId},
};

/// The position of a new dm among the uncommitted changes. It has no entry.
const DM_CREATION: Seq = 0;

/// The state before each change in flight, oldest first. The limit of entries in flight bounds it.
#[derive(Debug, Default)]
pub(super) struct Uncommitted(VecDeque<Before>);

/// The state that one change replaced.
#[derive(Debug)]
struct Before {
    /// The seq of the entry that makes the change.
    seq: Seq,
    /// The details and the number of participants. `None` if the conversation did not exist.
    details: Option<(Details, u64)>,
    /// The users whom it changes. `None` for a user who was not known.
    users: Vec<(UserId, Option<Participant>)>,
}

/// A conversation as of the newest committed entry.
pub(in crate::chat) struct Committed<'a> {
    participants: &'a Participants,
    pub details: &'a Details,
    pub count: u64,
}

impl Participants {
    /// Keeps the state before an entry. It is called before `apply`, for each entry that is appended.
    pub(in crate::chat) fn propose(&mut self, entry: &Entry) {
        let Content::System(change) = &entry.content else {
            return;
        };
        let created = matches!(change, SystemChange::Created { .. });
        let before = |user: UserId| {
            let participant = self.known.get(&user).cloned();
            (user, participant)
        };
        let users = users_of(entry).into_iter().map(before).collect();
        self.uncommitted.0.push_back(Before {
            seq: entry.seq,
            details: (!created).then(|| (self.details.clone(), self.count)),
            users,
        });
    }

    /// As [`Self::propose`], for a new dm whose rows are not stored yet.
    pub(in crate::chat) fn propose_dm(&mut self) {
        self.uncommitted.0.push_back(Before {
            seq: DM_CREATION,
            details: None,
            users: Vec::new(),
        });
    }

    /// Notes that an entry is committed. Returns whether that changes the committed state.
    pub(in crate::chat) fn commit(&mut self, seq: Seq) -> bool {
        let is_oldest = |before: &mut Before| before.seq == seq;
        self.uncommitted.0.pop_front_if(is_oldest).is_some()
    }

    /// Notes that the rows of a new dm are stored. Returns whether that changes the committed state.
    pub(in crate::chat) fn commit_dm(&mut self) -> bool {
        self.commit(DM_CREATION)
    }

    /// The committed state. `None` while the creation is not committed.
    pub(in crate::chat) fn committed(&self) -> Option<Committed<'_>> {
        let (details, count) = match self.uncommitted.0.front() {
            None => (&self.details, self.count),
            Some(before) => {
                let (details, count) = before.details.as_ref()?;
                (details, *count)
            }
        };
        Some(Committed {
            participants: self,
            details,
            count,
        })
    }

    /// Whether `user` is allowed an operation only by a change that is not committed yet. `inside` is true for operations
    /// that only participants may do.
    pub(in crate::chat) fn awaits_commit(&self, user: &UserId, inside: bool) -> bool {
        if self.uncommitted.0.is_empty() {
            return false;
        }
        let may = |row: Option<&Participant>, details: &Details| {
            row.is_some() || (!inside && is_open(details))
        };
        let committed = self.committed();
        may(self.get(user), &self.details)
            && !committed.is_some_and(|c| may(c.get(user), c.details))
    }

    /// Raises the watermarks of a user. Returns whether the read and the delivered one were raised.
    pub(in crate::chat) fn raise(
        &mut self,
        user: &UserId,
        read: Seq,
        delivered: Seq,
    ) -> (bool, bool) {
        let before = self.uncommitted.0.iter_mut().flat_map(|b| &mut b.users);
        let before = before.filter(|(other, _)| other == user);
        for participant in before.filter_map(|(_, before)| before.as_mut()) {
            raise(participant, read, delivered);
        }
        // The watermarks of a channel's user who is not in memory are unknown, so they count as raised.
        let known = self.known.get_mut(user);
        known.map_or((true, true), |known| raise(known, read, delivered))
    }

    /// The audience of a receipt or typing event: only committed participants get it.
    pub(in crate::chat) fn audience_committed(&mut self) -> Option<Audience> {
        if self.uncommitted.0.is_empty() || self.is_channel() {
            return Some(self.audience());
        }
        let committed = self.committed()?;
        let users = committed.after(None);
        Some(Audience::Members(Arc::new(Recipients {
            kind: committed.details.kind,
            name: committed.details.name.clone(),
            users: users.map(|p| (p.user.clone(), p.joined_seq)).collect(),
        })))
    }
}

impl<'a> Committed<'a> {
    /// A present or former participant.
    fn row(&self, user: &UserId) -> Option<&'a Participant> {
        let uncommitted = self.participants.uncommitted.0.iter();
        // The oldest change has the user as they were before all changes in flight.
        let mut before = uncommitted.flat_map(|before| &before.users);
        match before.find(|(other, _)| other == user) {
            Some((_, before)) => before.as_ref(),
            None => self.participants.known.get(user),
        }
    }

    /// A present participant.
    pub(in crate::chat) fn get(&self, user: &UserId) -> Option<&'a Participant> {
        self.row(user).filter(|p| p.is_in())
    }

    /// The present participants after a user, by id.
    pub(in crate::chat) fn after(
        &self,
        after: Option<&UserId>,
    ) -> impl Iterator<Item = &'a Participant> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let users = self
            .participants
            .known
            .range::<UserId, _>((from, Bound::Unbounded));
        users.filter_map(|(user, _)| self.get(user))
    }

    /// # Errors
    /// When `user` may not read the conversation.
    pub(in crate::chat) fn check_reading(&self, user: &UserId) -> Result<(), Error> {
        if is_open(self.details) {
            return Ok(());
        }
        self.check_in(user)
    }

    /// # Errors
    /// When `user` is not a participant.
    pub(in crate::chat) fn check_in(&self, user: &UserId) -> Result<(), Error> {
        match self.row(user) {
            Some(row) if row.is_in() => Ok(()),
            row => Err(refusal(row, self.details)),
        }
    }
}

/// Whether anyone may read the conversation.
fn is_open(details: &Details) -> bool {
    details.kind == Kind::Channel && details.public
}

/// Raises the watermarks of one participant. Returns whether the read and the delivered one were raised.
fn raise(participant: &mut Participant, read: Seq, delivered: Seq) -> (bool, bool) {
    let raised = (
        read > participant.read_seq,
        delivered > participant.delivered_seq,
    );
    participant.read_seq = participant.read_seq.max(read);
    participant.delivered_seq = participant.delivered_seq.max(delivered);
    raised
}
