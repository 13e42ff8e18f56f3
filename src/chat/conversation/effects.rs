//! The effects of a committed entry. They are decided when the entry is appended, from the state of that moment.
//! `publishing.rs` carries them out, also those of the entries that a takeover settles.

use std::sync::Arc;

use super::{
    super::{
        client_ids::Origin,
        log::Pending,
        operation::{Outcome, SendAck},
        participants::Participants,
        publish::{Audience, Body, MembershipChange, MembershipNotice, Publication, Recipients},
    },
    OwnerReply, Reply,
};
use crate::{
    model::{Content, ConversationId, Entry, SystemChange, UserId},
    store::Applied,
};

/// The effects of an entry, which are carried out when it is committed.
#[derive(Default)]
pub(in crate::chat) struct Effects {
    /// The rows that are stored before the entry is acknowledged. They are boxed, because messages have none.
    pub rows: Option<Box<Applied>>,
    /// The publications, in their order. One of them is the entry itself.
    pub publications: [Option<Publication>; 2],
}

/// An entry that is not settled yet.
pub(in crate::chat) struct PendingEntry {
    pub entry: Arc<Entry>,
    pub effects: Effects,
    /// The users whose inbox shows the entry. `None` for channels.
    pub recipients: Option<Arc<Recipients>>,
    /// Number of effects that must be done before the replies are sent.
    pub awaited: u32,
    /// The first is the reply to the request that made the entry, the others are replies to its repetitions. After a
    /// takeover there are only repetitions.
    pub replies: Vec<Reply>,
}

impl Pending for PendingEntry {
    type Record = Entry;

    fn record(&self) -> &Arc<Entry> {
        &self.entry
    }

    fn position(entry: &Entry) -> u64 {
        entry.seq
    }

    fn is_same(a: &Entry, b: &Entry) -> bool {
        a.message_id == b.message_id
    }

    // `take_over` ends the log before the second entry with the same origin.
    fn origin(entry: &Entry) -> Option<Origin> {
        Some((entry.sender.clone(), entry.client_id))
    }

    fn weight(entry: &Entry) -> usize {
        entry.weight()
    }
}

impl PendingEntry {
    /// An entry with its effects. A membership entry changes `participants` now.
    pub(super) fn new(
        conversation: ConversationId,
        participants: &mut Participants,
        entry: Arc<Entry>,
    ) -> Self {
        let (audience, rows, membership) = match &entry.content {
            Content::Text { .. } => {
                let audience = participants.audience();
                let first_of_dm = entry.seq == 1;
                let added = first_of_dm.then(|| (MembershipChange::Added, audience.clone()));
                (audience, None, added)
            }
            Content::System(change) => changed(participants, &entry, change),
        };
        let notice = membership.map(|(change, audience)| {
            let details = participants.details.clone();
            let notice = Arc::new(MembershipNotice { change, details });
            let notice = Publication::membership(conversation, entry.seq, notice, audience);
            (change, notice)
        });
        let recipients = match &audience {
            Audience::Members(members) => Some(members.clone()),
            Audience::Channel | Audience::User(_) => None,
        };
        let itself = Publication::entry(conversation, entry.clone(), audience);
        let publications = match notice {
            None => [Some(itself), None],
            // Users who are added learn of the conversation before they get its entries.
            Some((MembershipChange::Added, notice)) => [Some(notice), Some(itself)],
            Some((MembershipChange::Removed | MembershipChange::Updated, notice)) => {
                [Some(itself), Some(notice)]
            }
        };
        Self {
            entry,
            effects: Effects {
                rows: rows.map(Box::new),
                publications,
            },
            recipients,
            awaited: 0,
            replies: Vec::new(),
        }
    }

    /// An entry without effects, because its conversation does not exist.
    pub(super) fn without_effects(entry: Arc<Entry>) -> Self {
        Self {
            entry,
            effects: Effects::default(),
            recipients: None,
            awaited: 0,
            replies: Vec::new(),
        }
    }

    /// Erases the text of the entry, which was deleted, also where it waits to be published.
    pub(super) fn erase(&mut self) {
        self.entry = Arc::new(self.entry.erased());
        for publication in self.effects.publications.iter_mut().flatten() {
            if let Body::Entry(entry) = &mut publication.body {
                *entry = self.entry.clone();
            }
        }
    }

    /// Acknowledges the entry: sends all its replies.
    pub(super) fn answer(&mut self) {
        for (number, reply) in self.replies.drain(..).enumerate() {
            let outcome = match self.entry.content {
                Content::Text { .. } => Outcome::Sent(SendAck::of(&self.entry, number > 0)),
                Content::System(_) => Outcome::Changed {
                    seq: self.entry.seq,
                },
            };
            drop(reply.send(Ok(OwnerReply::Ready(outcome))));
        }
    }
}

/// A change of membership, with the users who are notified.
type Membership = Option<(MembershipChange, Audience)>;

/// Applies a change to `participants`. Returns the audience of its entry, the rows that it changes, and the notice of
/// membership that follows.
fn changed(
    participants: &mut Participants,
    entry: &Entry,
    change: &SystemChange,
) -> (Audience, Option<Applied>, Membership) {
    // Removed users still receive the entry that removes them.
    let before = participants.audience();
    let rows = participants.apply(entry);
    let after = participants.audience();
    let one = |user: &UserId| Audience::User(user.clone());
    let (audience, membership) = match change {
        SystemChange::Removed { user } => (before, Some((MembershipChange::Removed, one(user)))),
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
        SystemChange::Updated { .. } => (after.clone(), Some((MembershipChange::Updated, after))),
        SystemChange::RoleSet { .. } => (after, None),
    };
    (audience, rows, membership)
}
