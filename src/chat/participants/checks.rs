//! Checks whether a user may do what an operation asks for. Nothing here changes anything.

use std::{borrow::Cow, collections::HashSet};

use super::{Participants, left};
use crate::{
    chat::{
        error::Error,
        operation::{Creation, Operation},
    },
    model::{
        Details, Kind, Participant, Posting, Role, Seq, SystemChange, UserId,
        limits::NAME_BYTES_MAX, text,
    },
};

/// A change of membership or details that its actor may make.
#[derive(Debug)]
pub(in crate::chat) enum CheckedChange {
    New(SystemChange),
    /// The entry with this seq made the change already.
    DoneBefore(Seq),
}

impl From<SystemChange> for CheckedChange {
    fn from(change: SystemChange) -> Self {
        Self::New(change)
    }
}

impl Participants {
    /// Returns the participant.
    ///
    /// # Errors
    /// When `user` is not a participant.
    pub(in crate::chat) fn check_in(&self, user: &UserId) -> Result<&Participant, Error> {
        self.get(user).ok_or_else(|| self.refusal(user))
    }

    fn refusal(&self, user: &UserId) -> Error {
        refusal(self.known.get(user), &self.details)
    }

    /// # Errors
    /// When `user` may not send or edit messages.
    pub(in crate::chat) fn check_posting(&self, user: &UserId) -> Result<(), Error> {
        let participant = self.check_in(user)?;
        if !self.details.posting.allows(participant.role) {
            return Err(forbidden("only admins may post here"));
        }
        Ok(())
    }

    /// Returns the change that an operation asks for.
    ///
    /// # Errors
    /// When `actor` may not make the change, or it is impossible.
    pub(in crate::chat) fn check_change(
        &self,
        actor: &UserId,
        operation: &Operation,
        group_participants_max: usize,
    ) -> Result<CheckedChange, Error> {
        if let Operation::Join = operation {
            return self.check_joining(actor, group_participants_max);
        }
        let me = self.check_in(actor)?;
        if self.details.kind == Kind::Dm {
            return Err(forbidden("a dm has its two users, for good"));
        }
        match operation {
            Operation::Leave => {
                self.check_owner_stays(me)?;
                Ok(SystemChange::Left.into())
            }
            Operation::Add { user } => self.check_adding(me, user, group_participants_max),
            Operation::Remove { user } => self.check_removing(me, user),
            Operation::SetRole { user, role } => self.check_role(me, user, *role),
            Operation::Update {
                name,
                posting,
                public,
            } => check_update(me, name.as_deref(), *posting, *public),
            other => Err(Error::invalid(format!(
                "not a membership change: {other:?}"
            ))),
        }
    }

    fn check_joining(
        &self,
        actor: &UserId,
        group_participants_max: usize,
    ) -> Result<CheckedChange, Error> {
        if let Some(me) = self.get(actor) {
            return Ok(CheckedChange::DoneBefore(me.joined_seq));
        }
        if !self.details.public {
            return Err(self.refusal(actor));
        }
        self.check_size(group_participants_max)?;
        Ok(SystemChange::Joined.into())
    }

    fn check_adding(
        &self,
        me: &Participant,
        user: &UserId,
        group_participants_max: usize,
    ) -> Result<CheckedChange, Error> {
        if let Some(there) = self.get(user) {
            return Ok(CheckedChange::DoneBefore(there.joined_seq));
        }
        if me.role < Role::Admin {
            return Err(forbidden("only admins may add participants"));
        }
        self.check_size(group_participants_max)?;
        Ok(SystemChange::Added { user: user.clone() }.into())
    }

    fn check_removing(&self, me: &Participant, user: &UserId) -> Result<CheckedChange, Error> {
        let Some(them) = self.get(user) else {
            return match self.known.get(user).and_then(left) {
                Some(left) => Ok(CheckedChange::DoneBefore(left)),
                None => Err(not_a_participant(user)),
            };
        };
        if me.role < Role::Admin || (them.role >= me.role && me.user != them.user) {
            return Err(forbidden(
                "only admins may remove participants, and only those below them",
            ));
        }
        self.check_owner_stays(them)?;
        Ok(SystemChange::Removed { user: user.clone() }.into())
    }

    fn check_role(
        &self,
        me: &Participant,
        user: &UserId,
        role: Role,
    ) -> Result<CheckedChange, Error> {
        let them = self.get(user).ok_or_else(|| not_a_participant(user))?;
        if me.role < Role::Owner {
            return Err(forbidden("only owners may change roles"));
        }
        if role < Role::Owner {
            self.check_other_owner(them)?;
        }
        let user = user.clone();
        Ok(SystemChange::RoleSet { user, role }.into())
    }

    fn check_size(&self, group_participants_max: usize) -> Result<(), Error> {
        if self.details.kind == Kind::Group && self.count >= group_participants_max as u64 {
            return Err(Error::TooLarge {
                what: "participants of a group".into(),
                max: group_participants_max,
            });
        }
        Ok(())
    }

    /// Checks that an owner remains while there are participants.
    fn check_owner_stays(&self, leaving: &Participant) -> Result<(), Error> {
        if self.count <= 1 {
            return Ok(());
        }
        self.check_other_owner(leaving)
    }

    /// Checks that somebody else is owner, if this participant is. Of a channel only the owners in memory count, because its
    /// list of participants has no bound.
    fn check_other_owner(&self, than: &Participant) -> Result<(), Error> {
        if than.role < Role::Owner {
            return Ok(());
        }
        let others = self
            .all()
            .filter(|p| p.role == Role::Owner && p.user != than.user)
            .count();
        if others == 0 {
            return Err(Error::Conflict(
                "the last owner must make another one first".into(),
            ));
        }
        Ok(())
    }
}

fn check_update(
    me: &Participant,
    name: Option<&str>,
    posting: Option<Posting>,
    public: Option<bool>,
) -> Result<CheckedChange, Error> {
    if me.role < Role::Admin {
        return Err(forbidden("only admins may change the conversation"));
    }
    let name = checked_name(name)?;
    if name.is_none() && posting.is_none() && public.is_none() {
        return Err(Error::invalid("nothing to update"));
    }
    let change = SystemChange::Updated {
        name,
        posting,
        public,
    };
    Ok(change.into())
}

/// Returns the first change of a new group or channel.
///
/// # Errors
/// When the name or the number of participants is not allowed.
pub(in crate::chat) fn check_creation(
    creator: &UserId,
    creation: &Creation,
    group_participants_max: usize,
) -> Result<SystemChange, Error> {
    let name = checked_name(creation.name.as_deref())?;
    // A channel may grow without bound, but its first entry may not.
    let too_large = Err(Error::TooLarge {
        what: "participants at creation".into(),
        max: group_participants_max,
    });
    if creation.participants.len() > group_participants_max {
        return too_large;
    }
    let mut there = HashSet::from([creator]);
    let others = creation.participants.iter().filter(|u| there.insert(u));
    let participants: Vec<UserId> = [creator].into_iter().chain(others).cloned().collect();
    if participants.len() > group_participants_max {
        return too_large;
    }
    Ok(SystemChange::Created {
        kind: creation.kind,
        name,
        posting: creation.posting,
        public: creation.public,
        participants,
    })
}

/// Returns the name of a conversation in its stored form.
fn checked_name(name: Option<&str>) -> Result<Option<String>, Error> {
    let Some(name) = name else { return Ok(None) };
    let too_large = || Error::TooLarge {
        what: "bytes of a name".into(),
        max: NAME_BYTES_MAX,
    };
    if name.len() > NAME_BYTES_MAX {
        return Err(too_large());
    }
    let name = text::name(name).map_err(|wrong| Error::invalid(format!("a name {wrong}")))?;
    // The stored form of some letters is longer.
    (name.len() <= NAME_BYTES_MAX)
        .then_some(Some(name))
        .ok_or_else(too_large)
}

fn forbidden(reason: &'static str) -> Error {
    Error::Forbidden(Cow::Borrowed(reason))
}

fn not_a_participant(user: &UserId) -> Error {
    Error::invalid(format!("{user} is not a participant"))
}

/// The error for a user who is not a participant. Only former participants, and users who could join, learn that the
/// conversation exists.
pub(super) fn refusal(row: Option<&Participant>, details: &Details) -> Error {
    if row.and_then(left).is_some() {
        Error::Forbidden("no longer a participant".into())
    } else if details.public {
        Error::Forbidden("not a participant: join first".into())
    } else {
        Error::UnknownConversation
    }
}
