//! Who is in a conversation and who may do what. No I/O: `check_*` refuse, `apply` changes, and the owner
//! stores what `apply` returns.

mod committed;

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

pub(super) use self::committed::Committed;
use self::committed::Uncommitted;
use super::{
    error::Error,
    operation::{Creation, Operation},
    publish::{Audience, Recipients},
};
use crate::{
    model::{
        Content, ConversationId, Details, Entry, Kind, Participant, Posting, Role, Seq,
        SystemChange, UserId,
        limits::{CHANNEL_PARTICIPANTS_KNOWN_MAX, NAME_BYTES_MAX, USER_ID_BYTES_MAX},
        weight::ALLOCATION_BYTES,
    },
    store::{Applied, ConversationRow, InboxSummary, InboxWrite, ParticipantRow},
};

/// A conversation's details and participants as of the newest entry appended: what comes next is judged by that. What
/// may be told of it is `committed()`.
#[derive(Debug)]
pub(super) struct Participants {
    conversation: ConversationId,
    pub details: Details,
    pub count: u64,
    /// The newest entry that `details` and `count` include.
    applied_seq: Seq,
    /// All of a dm's or group's; of a channel, those that were asked about.
    known: BTreeMap<UserId, Participant>,
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

    /// A new dm. It has no entry; whoever of the two comes first creates it for both.
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

    /// What a log begins with that nobody has applied yet.
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

    /// Bytes held: of each participant, and of the list that publications share.
    pub(super) fn weight(&self) -> usize {
        const PARTICIPANT_BYTES: usize =
            size_of::<(UserId, Participant)>() + ALLOCATION_BYTES + USER_ID_BYTES_MAX;
        let listed = self.audience.as_ref().map_or(0, |members| members.weight());
        self.known.len() * PARTICIPANT_BYTES + listed
    }

    pub(super) fn is_channel(&self) -> bool {
        self.details.kind == Kind::Channel
    }

    /// Whether the store need not be asked about `user`.
    pub(super) fn knows(&self, user: &UserId) -> bool {
        !self.is_channel() || self.known.contains_key(user)
    }

    /// What the store says about a channel's user, or that they never were in it.
    pub(super) fn learn(&mut self, user: &UserId, row: Option<ParticipantRow>) {
        let participant = row.map_or_else(|| stranger(user), |r| r.participant);
        self.known.entry(user.clone()).or_insert(participant);
    }

    pub(super) fn knows_too_many(&self) -> bool {
        self.is_channel() && self.known.len() > CHANNEL_PARTICIPANTS_KNOWN_MAX
    }

    /// Only when nothing is in flight: what is known may not be stored yet. Strangers go first, so that they push nobody
    /// out who is in the channel.
    pub(super) fn forget_known(&mut self) {
        if self.is_channel() {
            self.known.retain(|_, participant| participant.is_in());
            if self.known.len() > CHANNEL_PARTICIPANTS_KNOWN_MAX / 2 {
                self.known.clear();
            }
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Participant> {
        self.known.values().filter(|p| p.is_in())
    }

    pub(super) fn get(&self, user: &UserId) -> Option<&Participant> {
        self.known.get(user).filter(|p| p.is_in())
    }

    /// To whom an entry appended now is published. Shared by all entries between two changes.
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

    /// # Errors
    /// When `user` is not in it.
    pub(super) fn check_in(&self, user: &UserId) -> Result<&Participant, Error> {
        self.get(user).ok_or_else(|| self.refusal(user))
    }

    fn refusal(&self, user: &UserId) -> Error {
        refusal(self.known.get(user), &self.details)
    }

    pub(super) fn check_posting(&self, user: &UserId) -> Result<(), Error> {
        let participant = self.check_in(user)?;
        if self.details.posting == Posting::Admins && participant.role < Role::Admin {
            return Err(Error::Forbidden("only admins may post here".into()));
        }
        Ok(())
    }

    /// What a membership operation does, or `Err(Ok(seq))` when it was done before, at `seq`.
    pub(super) fn check_change(
        &self,
        actor: &UserId,
        operation: &Operation,
        group_participants_max: usize,
    ) -> Result<SystemChange, Result<Seq, Error>> {
        let refuse = |text| Err(Err(Error::Forbidden(Cow::Borrowed(text))));
        if let Operation::Join = operation {
            if let Some(me) = self.get(actor) {
                return Err(Ok(me.joined_seq));
            }
            if !self.details.public {
                return Err(Err(self.refusal(actor)));
            }
            self.check_room(group_participants_max).map_err(Err)?;
            return Ok(SystemChange::Joined);
        }
        let me = self.check_in(actor).map_err(Err)?;
        if self.details.kind == Kind::Dm {
            return refuse("a dm has its two users, for good");
        }
        match operation {
            Operation::Leave => {
                self.check_owner_stays(me).map_err(Err)?;
                Ok(SystemChange::Left)
            }
            Operation::Add { user } => {
                if let Some(there) = self.get(user) {
                    return Err(Ok(there.joined_seq));
                }
                if me.role < Role::Admin {
                    return refuse("only admins may add participants");
                }
                self.check_room(group_participants_max).map_err(Err)?;
                Ok(SystemChange::Added { user: user.clone() })
            }
            Operation::Remove { user } => {
                let Some(them) = self.get(user) else {
                    return match self.known.get(user).and_then(left) {
                        Some(left) => Err(Ok(left)),
                        None => Err(Err(Error::invalid(format!("{user} is not a participant")))),
                    };
                };
                if me.role < Role::Admin || (them.role >= me.role && me.user != them.user) {
                    return refuse(
                        "only admins may remove participants, and only those below them",
                    );
                }
                self.check_owner_stays(them).map_err(Err)?;
                Ok(SystemChange::Removed { user: user.clone() })
            }
            Operation::SetRole { user, role } => {
                let Some(them) = self.get(user) else {
                    return Err(Err(Error::invalid(format!("{user} is not a participant"))));
                };
                if me.role < Role::Owner {
                    return refuse("only owners may change roles");
                }
                if *role < Role::Owner {
                    self.check_owner_stays(them).map_err(Err)?;
                }
                Ok(SystemChange::RoleSet {
                    user: user.clone(),
                    role: *role,
                })
            }
            Operation::Update {
                name,
                posting,
                public,
            } => {
                if me.role < Role::Admin {
                    return refuse("only admins may change the conversation");
                }
                check_name(name.as_deref()).map_err(Err)?;
                if name.is_none() && posting.is_none() && public.is_none() {
                    return Err(Err(Error::invalid("nothing to update")));
                }
                Ok(SystemChange::Updated {
                    name: name.clone(),
                    posting: *posting,
                    public: *public,
                })
            }
            other => Err(Err(Error::invalid(format!(
                "not a membership change: {other:?}"
            )))),
        }
    }

    fn check_room(&self, group_participants_max: usize) -> Result<(), Error> {
        if self.details.kind == Kind::Group && self.count >= group_participants_max as u64 {
            return Err(Error::TooLarge {
                what: "participants of a group".into(),
                max: group_participants_max,
            });
        }
        Ok(())
    }

    /// A conversation keeps an owner while it has participants. A channel's creator is asked, not its
    /// unbounded list: only the last known owner may not go.
    fn check_owner_stays(&self, leaving: &Participant) -> Result<(), Error> {
        if leaving.role < Role::Owner || self.count <= 1 {
            return Ok(());
        }
        let others = self
            .all()
            .filter(|p| p.role == Role::Owner && p.user != leaving.user)
            .count();
        if others == 0 {
            return Err(Error::Conflict(
                "the last owner must make another one first".into(),
            ));
        }
        Ok(())
    }

    /// Changes this according to an entry, and returns the rows that follow from it. Applying an entry
    /// again changes nothing.
    pub(super) fn apply(&mut self, entry: &Entry) -> Option<Applied> {
        let Content::System(change) = &entry.content else {
            return None;
        };
        let seq = entry.seq;
        if seq > self.applied_seq {
            self.applied_seq = seq;
            self.count = match change {
                SystemChange::Created { participants, .. } => participants.len() as u64,
                SystemChange::Added { .. } | SystemChange::Joined => self.count + 1,
                SystemChange::Removed { .. } | SystemChange::Left => self.count.saturating_sub(1),
                SystemChange::RoleSet { .. } | SystemChange::Updated { .. } => self.count,
            };
        }
        let mut changed: Vec<UserId> = Vec::new();
        match change {
            SystemChange::Created { participants, .. } => {
                for user in participants {
                    let owner = *user == entry.sender;
                    let role = if owner { Role::Owner } else { Role::Member };
                    self.known
                        .insert(user.clone(), Participant::joining(user.clone(), role, seq));
                }
                changed.extend(participants.iter().cloned());
            }
            SystemChange::Added { user } => changed.extend(self.enter(user, seq)),
            SystemChange::Joined => changed.extend(self.enter(&entry.sender, seq)),
            SystemChange::Removed { user } => changed.extend(self.exit(user, seq)),
            SystemChange::Left => changed.extend(self.exit(&entry.sender, seq)),
            SystemChange::RoleSet { user, role } => {
                if let Some(them) = self.known.get_mut(user) {
                    them.role = *role;
                    changed.push(user.clone());
                }
            }
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
            }
        }
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

    /// The rows of a dm that has just been made.
    pub(super) fn founded(&self) -> Applied {
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

    fn inbox_write(&self, user: &UserId, entry: &Entry) -> Option<InboxWrite> {
        let participant = self.known.get(user)?;
        let present = participant.is_in();
        let last = (!self.is_channel()).then(|| entry.last());
        let summary = InboxSummary {
            seq: entry.seq,
            kind: self.details.kind,
            name: self.details.name.clone(),
            joined_seq: participant.joined_seq,
            last,
        };
        Some(InboxWrite {
            user: user.clone(),
            conversation: self.conversation,
            kind: self.details.kind,
            summary: present.then_some(summary),
            read_seq: present.then_some(participant.read_seq),
            left_seq: participant.left_seq.filter(|_| !present),
        })
    }

    fn enter(&mut self, user: &UserId, seq: Seq) -> Option<UserId> {
        let entry = self
            .known
            .entry(user.clone())
            .or_insert_with(|| stranger(user));
        if entry.joined_seq >= seq {
            return Some(user.clone());
        }
        let (read, delivered) = (entry.read_seq, entry.delivered_seq);
        *entry = Participant {
            read_seq: read.max(seq),
            delivered_seq: delivered.max(seq),
            left_seq: entry.left_seq,
            ..Participant::joining(user.clone(), Role::Member, seq)
        };
        Some(user.clone())
    }

    fn exit(&mut self, user: &UserId, seq: Seq) -> Option<UserId> {
        let entry = self.known.get_mut(user)?;
        if entry.left_seq.is_none_or(|left| left < seq) {
            entry.left_seq = Some(seq);
        }
        Some(user.clone())
    }
}

/// Whoever was in it, or could join, may know that it exists; nobody else.
fn refusal(row: Option<&Participant>, details: &Details) -> Error {
    if row.and_then(left).is_some() {
        Error::Forbidden("no longer a participant".into())
    } else if details.public {
        Error::Forbidden("not a participant: join first".into())
    } else {
        Error::UnknownConversation
    }
}

/// When a former participant left.
fn left(participant: &Participant) -> Option<Seq> {
    participant.left_seq.filter(|&seq| seq > 0)
}

/// Somebody who never was in it.
fn stranger(user: &UserId) -> Participant {
    // Left before joining: `is_in` is false, and no `left_seq` of theirs is ever shown.
    Participant {
        left_seq: Some(0),
        ..Participant::joining(user.clone(), Role::Member, 0)
    }
}

/// # Errors
/// When a group or channel cannot be made like this.
pub(super) fn check_creation(
    creator: &UserId,
    creation: &Creation,
    group_participants_max: usize,
) -> Result<SystemChange, Error> {
    check_name(creation.name.as_deref())?;
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
        name: creation.name.clone(),
        posting: creation.posting,
        public: creation.public,
        participants,
    })
}

fn check_name(name: Option<&str>) -> Result<(), Error> {
    let Some(name) = name else { return Ok(()) };
    if name.len() > NAME_BYTES_MAX {
        return Err(Error::TooLarge {
            what: "bytes of a name".into(),
            max: NAME_BYTES_MAX,
        });
    }
    if name.trim().is_empty() || name.chars().any(char::is_control) {
        return Err(Error::invalid(
            "a name is not blank and has no control characters",
        ));
    }
    Ok(())
}

/// The users whose place an entry changes.
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
