//! What may be told of a conversation: what is committed. `Participants` is ahead of that by the entries in flight, so
//! what each of them changes is kept as it was before, until it is committed.

use std::{collections::VecDeque, ops::Bound, sync::Arc};

use super::{Participants, refusal, users_of};
use crate::{
    chat::{
        error::Error,
        publish::{Audience, Recipients},
    },
    model::{Content, Details, Entry, Kind, Participant, Seq, SystemChange, UserId},
};

/// Of a dm, that is not stored yet: it has no entry.
const FOUNDING: Seq = 0;

/// What the changes in flight change: never more than there may be entries in flight.
#[derive(Debug, Default)]
pub(super) struct Uncommitted(VecDeque<Before>);

#[derive(Debug)]
struct Before {
    /// Of the entry that changes it.
    seq: Seq,
    /// With the number of participants. None: there was no conversation.
    details: Option<(Details, u64)>,
    /// Whose place it changes. None: nothing was known of them.
    users: Vec<(UserId, Option<Participant>)>,
}

/// A conversation as of the newest entry committed.
pub(in crate::chat) struct Committed<'a> {
    participants: &'a Participants,
    pub details: &'a Details,
    pub count: u64,
}

impl Participants {
    /// To be called before `apply`, of an entry that is not committed.
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

    /// As `propose`, of a dm that is not stored yet.
    pub(in crate::chat) fn propose_founding(&mut self) {
        self.uncommitted.0.push_back(Before {
            seq: FOUNDING,
            details: None,
            users: Vec::new(),
        });
    }

    /// The entry is committed. True if something may be told now that could not be before.
    pub(in crate::chat) fn commit(&mut self, seq: Seq) -> bool {
        let it = |before: &mut Before| before.seq == seq;
        self.uncommitted.0.pop_front_if(it).is_some()
    }

    /// The dm is stored.
    pub(in crate::chat) fn commit_founding(&mut self) -> bool {
        self.commit(FOUNDING)
    }

    /// None while the conversation is only being made.
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

    /// Whether what is in flight lets `user` do what they may not do yet. `inside`: what only participants may do.
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

    /// Raises the watermarks of a user to what is stored; says which of them that raised.
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
        // Of a channel's user who is forgotten, nobody knows.
        let known = self.known.get_mut(user);
        known.map_or((true, true), |known| raise(known, read, delivered))
    }

    /// To whom a passing event is told: nobody of it who is not certainly there.
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
    /// Present or former.
    fn row(&self, user: &UserId) -> Option<&'a Participant> {
        let uncommitted = self.participants.uncommitted.0.iter();
        // The oldest has them as they were before all of it.
        let mut before = uncommitted.flat_map(|before| &before.users);
        match before.find(|(other, _)| other == user) {
            Some((_, before)) => before.as_ref(),
            None => self.participants.known.get(user),
        }
    }

    pub(in crate::chat) fn get(&self, user: &UserId) -> Option<&'a Participant> {
        self.row(user).filter(|p| p.is_in())
    }

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
    /// When `user` may not know what is in the conversation.
    pub(in crate::chat) fn check_reading(&self, user: &UserId) -> Result<(), Error> {
        if is_open(self.details) {
            return Ok(());
        }
        self.check_in(user)
    }

    /// # Errors
    /// When `user` is not in it.
    pub(in crate::chat) fn check_in(&self, user: &UserId) -> Result<(), Error> {
        match self.row(user) {
            Some(row) if row.is_in() => Ok(()),
            row => Err(refusal(row, self.details)),
        }
    }
}

/// Whether anyone may read it.
fn is_open(details: &Details) -> bool {
    details.kind == Kind::Channel && details.public
}

fn raise(participant: &mut Participant, read: Seq, delivered: Seq) -> (bool, bool) {
    let raised = (
        read > participant.read_seq,
        delivered > participant.delivered_seq,
    );
    participant.read_seq = participant.read_seq.max(read);
    participant.delivered_seq = participant.delivered_seq.max(delivered);
    raised
}
