//! The participants of a conversation. It has no I/O: `checks.rs` refuses operations, `apply` makes changes, and the
//! owner stores the rows that `apply` returns.

mod checks;
mod committed;

use std::{collections::BTreeMap, sync::Arc};

use self::committed::Uncommitted;
pub(super) use self::{
    checks::{CheckedChange, check_creation},
    committed::Committed,
};
use super::publish::{Audience, Recipients};
use crate::{
    model::{
        Content, ConversationId, Details, Entry, Kind, Participant, Role, Seq, SystemChange,
        UserId,
        limits::{CHANNEL_PARTICIPANTS_KNOWN_MAX, USER_ID_BYTES_MAX},
        weight::ALLOCATION_BYTES,
    },
    store::{Applied, ConversationRow, InboxSummary, InboxWrite, ParticipantRow},
};

/// The details and participants of a conversation as of the newest appended entry. The next operation is checked against
/// them. Replies contain only the [`Self::committed`] state.
#[derive(Debug)]
pub(super) struct Participants {
    conversation: ConversationId,
    pub details: Details,
    /// Number of participants.
    pub count: u64,
    /// The seq of the newest entry that `details` and `count` include.
    applied_seq: Seq,
    /// The participants in memory, present and former: all of a dm or group, but only those of a channel that were looked
    /// up. A stranger who was looked up is here too.
    known: BTreeMap<UserId, Participant>,
    /// The present participants, which publications share. `None` after a change.
    audience: Option<Arc<Recipients>>,
    uncommitted: Uncommitted,
}

impl Participants {
    pub(super) fn new(
        conversation: ConversationId,
        row: ConversationRow,
        known: Vec<ParticipantRow>,
    ) -> Self {
        let known = known
            .into_iter()
            .map(|r| (r.participant.user.clone(), r.participant))
            .collect();
        let ConversationRow {
            details,
            participant_count: count,
            seq: applied_seq,
        } = row;
        Self {
            conversation,
            details,
            count,
            applied_seq,
            known,
            audience: None,
            uncommitted: Uncommitted::default(),
        }
    }

    /// A new dm. It has no entry. The first of the two users who asks creates it for both.
    pub(super) fn dm(conversation: ConversationId, details: Details, users: &[UserId]) -> Self {
        let join = |u: &UserId| (u.clone(), Participant::joining(u.clone(), Role::Member, 0));
        let known: BTreeMap<_, _> = users.iter().map(join).collect();
        let count = known.len() as u64;
        Self {
            conversation,
            details,
            count,
            applied_seq: 0,
            known,
            audience: None,
            uncommitted: Uncommitted::default(),
        }
    }

    /// The conversation that the first entry of a log creates, before the entry is applied.
    pub(super) fn of_first_entry(conversation: ConversationId, entry: &Entry) -> Option<Self> {
        let Content::System(SystemChange::Created {
            kind,
            name,
            posting,
            public,
            ..
        }) = &entry.content
        else {
            return None;
        };
        let details = Details {
            kind: *kind,
            name: name.clone(),
            created_at: entry.at,
            created_by: entry.sender.clone(),
            posting: *posting,
            public: *public,
        };
        let (known, audience) = (BTreeMap::new(), None);
        Some(Self {
            conversation,
            details,
            count: 0,
            applied_seq: 0,
            known,
            audience,
            uncommitted: Uncommitted::default(),
        })
    }

    /// Bytes of memory held by the participants, and by the list that publications share.
    pub(super) fn weight(&self) -> usize {
        const PARTICIPANT_BYTES: usize =
            size_of::<(UserId, Participant)>() + ALLOCATION_BYTES + USER_ID_BYTES_MAX;
        let listed = self.audience.as_ref().map_or(0, |members| members.weight());
        self.known.len() * PARTICIPANT_BYTES + listed
    }

    pub(super) fn is_channel(&self) -> bool {
        self.details.kind == Kind::Channel
    }

    /// Whether no lookup of `user` is needed.
    pub(super) fn knows(&self, user: &UserId) -> bool {
        !self.is_channel() || self.known.contains_key(user)
    }

    /// Remembers the row of a channel's user. Without a row the user was never in the channel.
    pub(super) fn learn(&mut self, user: &UserId, row: Option<ParticipantRow>) {
        let participant = row.map_or_else(|| stranger(user), |r| r.participant);
        self.known.entry(user.clone()).or_insert(participant);
    }

    /// Whether so many users of a channel are known that some should be forgotten.
    pub(super) fn has_too_many_known(&self) -> bool {
        self.is_channel() && self.known.len() > CHANNEL_PARTICIPANTS_KNOWN_MAX
    }

    /// Forgets known users of a channel. It may be called only when the log is settled, because their rows may not be
    /// stored before. Strangers and former participants are forgotten first, so that they do not displace participants.
    pub(super) fn forget_known(&mut self) {
        if self.is_channel() {
            self.known.retain(|_, participant| participant.is_in());
            if self.known.len() > CHANNEL_PARTICIPANTS_KNOWN_MAX / 2 {
                self.known.clear();
            }
        }
    }

    /// The present participants that are known.
    fn all(&self) -> impl Iterator<Item = &Participant> {
        self.known.values().filter(|p| p.is_in())
    }

    /// A present participant.
    pub(super) fn get(&self, user: &UserId) -> Option<&Participant> {
        self.known.get(user).filter(|p| p.is_in())
    }

    /// Whether `user` is or was a participant. Of a channel only if they are known.
    pub(super) fn was_in(&self, user: &UserId) -> bool {
        let known = self.known.get(user);
        known.is_some_and(|known| known.is_in() || left(known).is_some())
    }

    /// The present participants that are known.
    pub(super) fn users(&self) -> Vec<UserId> {
        self.all()
            .map(|participant| participant.user.clone())
            .collect()
    }

    /// The audience of an entry that is appended now. All entries between two changes share it.
    pub(super) fn audience(&mut self) -> Audience {
        if self.is_channel() {
            return Audience::Channel;
        }
        let Self {
            known,
            details,
            audience,
            ..
        } = self;
        let members = audience.get_or_insert_with(|| {
            let present = known.values().filter(|p| p.is_in());
            Arc::new(Recipients {
                kind: details.kind,
                name: details.name.clone(),
                users: present.map(|p| (p.user.clone(), p.joined_seq)).collect(),
            })
        });
        Audience::Members(members.clone())
    }

    /// Applies an appended entry, and returns the rows that follow from it. Applying an entry again changes nothing.
    pub(super) fn apply(&mut self, entry: &Entry) -> Option<Applied> {
        let Content::System(change) = &entry.content else {
            return None;
        };
        let seq = entry.seq;
        if seq > self.applied_seq {
            self.applied_seq = seq;
            self.count = self.count_after(change);
        }
        let changed = self.apply_change(entry, change);
        self.audience = None;
        let mut inbox = Vec::new();
        if !matches!(change, SystemChange::RoleSet { .. }) {
            inbox.extend(changed.iter().filter_map(|u| self.inbox_write(u, entry)));
        }
        let participants = changed
            .iter()
            .filter_map(|u| self.known.get(u))
            .map(|p| ParticipantRow {
                participant: p.clone(),
                seq,
            })
            .collect();
        let conversation = self.row(seq);
        Some(Applied {
            conversation,
            participants,
            inbox,
        })
    }

    fn count_after(&self, change: &SystemChange) -> u64 {
        match change {
            SystemChange::Created { participants, .. } => participants.len() as u64,
            SystemChange::Added { .. } | SystemChange::Joined => self.count + 1,
            SystemChange::Removed { .. } | SystemChange::Left => self.count.saturating_sub(1),
            SystemChange::RoleSet { .. } | SystemChange::Updated { .. } => self.count,
        }
    }

    /// Applies a change to the details and the participants in memory. Returns the users whose row changes.
    fn apply_change(&mut self, entry: &Entry, change: &SystemChange) -> Vec<UserId> {
        let seq = entry.seq;
        let user = match change {
            SystemChange::Created { participants, .. } => {
                for user in participants {
                    let owner = *user == entry.sender;
                    let role = if owner { Role::Owner } else { Role::Member };
                    self.known
                        .insert(user.clone(), Participant::joining(user.clone(), role, seq));
                }
                return participants.clone();
            }
            SystemChange::Added { user } => Some(self.enter(user, seq)),
            SystemChange::Joined => Some(self.enter(&entry.sender, seq)),
            SystemChange::Removed { user } => self.exit(user, seq),
            SystemChange::Left => self.exit(&entry.sender, seq),
            SystemChange::RoleSet { user, role } => self.known.get_mut(user).map(|them| {
                them.role = *role;
                user.clone()
            }),
            SystemChange::Updated {
                name,
                posting,
                public,
            } => {
                if let Some(name) = name {
                    self.details.name = Some(name.clone());
                }
                self.details.posting = posting.unwrap_or(self.details.posting);
                self.details.public = public.unwrap_or(self.details.public);
                None
            }
        };
        user.into_iter().collect()
    }

    /// The rows of a new dm.
    pub(super) fn dm_rows(&self) -> Applied {
        let row = |p: &Participant| ParticipantRow {
            participant: p.clone(),
            seq: 0,
        };
        let participants = self.known.values().map(row).collect();
        Applied {
            conversation: self.row(0),
            participants,
            inbox: Vec::new(),
        }
    }

    fn row(&self, seq: Seq) -> ConversationRow {
        let (details, participant_count) = (self.details.clone(), self.count);
        ConversationRow {
            details,
            participant_count,
            seq,
        }
    }

    /// The change of a user's inbox that follows from an entry.
    fn inbox_write(&self, user: &UserId, entry: &Entry) -> Option<InboxWrite> {
        let participant = self.known.get(user)?;
        let present = participant.is_in();
        // The row of a former participant loses its preview, because deletions do not correct it any more.
        let is_shown = present || !self.is_channel();
        let last = (present && !self.is_channel()).then(|| entry.last());
        let summary = InboxSummary {
            seq: entry.seq,
            kind: self.details.kind,
            name: self.details.name.clone(),
            joined_seq: participant.joined_seq,
            last,
            changes: 0,
            texts: entry.texts,
        };
        // Who joins has read everything before. A higher mark was stored with the texts up to it.
        let is_own = participant.read_seq == entry.seq;
        let read_seq = (present && is_own).then_some(participant.read_seq);
        Some(InboxWrite {
            summary: is_shown.then_some(summary),
            read_seq,
            read_texts: entry.texts,
            left_seq: participant.left_seq.filter(|_| !present),
            ..InboxWrite::of(user.clone(), self.conversation, self.details.kind)
        })
    }

    /// Makes `user` a participant. Returns the user, whose row changes.
    fn enter(&mut self, user: &UserId, seq: Seq) -> UserId {
        let entry = self
            .known
            .entry(user.clone())
            .or_insert_with(|| stranger(user));
        if entry.joined_seq < seq {
            let (read, delivered) = (entry.read_seq, entry.delivered_seq);
            *entry = Participant {
                read_seq: read.max(seq),
                delivered_seq: delivered.max(seq),
                left_seq: entry.left_seq,
                ..Participant::joining(user.clone(), Role::Member, seq)
            };
        }
        user.clone()
    }

    /// Makes `user` a former participant. Returns the user, whose row changes, if they are known.
    fn exit(&mut self, user: &UserId, seq: Seq) -> Option<UserId> {
        let entry = self.known.get_mut(user)?;
        if entry.left_seq.is_none_or(|left| left < seq) {
            entry.left_seq = Some(seq);
        }
        Some(user.clone())
    }
}

/// The seq at which a former participant left.
fn left(participant: &Participant) -> Option<Seq> {
    participant.left_seq.filter(|&seq| seq > 0)
}

/// A user who was never in the conversation.
fn stranger(user: &UserId) -> Participant {
    // A stranger left before joining: `is_in` is false, and this `left_seq` is never shown.
    Participant {
        left_seq: Some(0),
        ..Participant::joining(user.clone(), Role::Member, 0)
    }
}

/// The users whose membership or role an entry changes, except those of a creation.
pub(super) fn users_of(entry: &Entry) -> Vec<UserId> {
    match &entry.content {
        Content::System(
            SystemChange::Added { user }
            | SystemChange::Removed { user }
            | SystemChange::RoleSet { user, .. },
        ) => vec![user.clone()],
        Content::System(SystemChange::Joined | SystemChange::Left) => vec![entry.sender.clone()],
        Content::System(SystemChange::Created { .. } | SystemChange::Updated { .. })
        | Content::Text { .. } => Vec::new(),
    }
}
