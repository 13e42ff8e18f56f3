//! What follows from an entry once it is committed.

use super::{
    super::{
        participants::Participants,
        publish::{Audience, MembershipChange, Recipients},
    },
    Reply,
};
use crate::{
    model::{Content, Entry, SystemChange, UserId},
    store::Applied,
};

/// What is to happen when an entry is committed.
pub(super) struct Waiting {
    /// With whether it is a repetition.
    pub replies: Vec<(Reply, bool)>,
    pub applied: Option<Applied>,
    pub audience: Audience,
    pub place: Option<(MembershipChange, Audience)>,
}

impl Waiting {
    /// What follows from an entry once it is committed. A membership entry changes `participants` now.
    pub(super) fn of(participants: &mut Participants, entry: &Entry) -> Self {
        let Content::System(change) = &entry.content else {
            let audience = participants.audience();
            let first_of_dm = entry.seq == 1;
            return Self {
                replies: Vec::new(),
                applied: None,
                place: first_of_dm.then(|| (MembershipChange::Added, audience.clone())),
                audience,
            };
        };
        // Who is removed still hears of it.
        let before = participants.audience();
        let applied = participants.apply(entry);
        let after = participants.audience();
        let one = |user: &UserId| Audience::User(user.clone());
        let (audience, place) = match change {
            SystemChange::Removed { user } => {
                (before, Some((MembershipChange::Removed, one(user))))
            }
            SystemChange::Left => (
                before,
                Some((MembershipChange::Removed, one(&entry.sender))),
            ),
            SystemChange::Added { user } => (after, Some((MembershipChange::Added, one(user)))),
            SystemChange::Joined => (after, Some((MembershipChange::Added, one(&entry.sender)))),
            SystemChange::Created {
                kind,
                name,
                participants,
                ..
            } => {
                let users = participants.iter().map(|user| (user.clone(), entry.seq));
                let members = Recipients {
                    kind: *kind,
                    name: name.clone(),
                    users: users.collect(),
                };
                let added = Audience::Members(members.into());
                (after, Some((MembershipChange::Added, added)))
            }
            SystemChange::Updated { .. } => {
                (after.clone(), Some((MembershipChange::Updated, after)))
            }
            SystemChange::RoleSet { .. } => (after, None),
        };
        Self {
            replies: Vec::new(),
            applied,
            audience,
            place,
        }
    }
}
