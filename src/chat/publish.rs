//! The publications of a conversation's owner and their audiences. [`Publish`] is the port through which they leave.

use std::{any::Any, collections::HashSet, fmt, sync::Arc};

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::{
    model::{
        AttachmentId, ContentState, ConversationId, Cursor, DeletedSeqs, Details, Entry,
        FileNotice, Kind, Newest, Reactions, Rev, Seq, UserId, weight::ALLOCATION_BYTES,
    },
    store::InboxSummary,
};

/// A publication of a conversation's owner: its content, its receivers, and the guarantee that it is delivered.
#[derive(Debug, Clone)]
pub struct Publication {
    pub conversation: ConversationId,
    /// The position in the conversation that a receiver has reached with it. Zero for receipts, typing and files, which
    /// have no position.
    pub at: Cursor,
    pub audience: Audience,
    pub guarantee: Guarantee,
    pub body: Body,
}

/// The receivers of a publication.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Audience {
    /// Each participant of a dm or group, by name: fan-out on write.
    Members(Arc<Recipients>),
    /// Every session that is subscribed to the channel: fan-out on read.
    Channel,
    /// One user's own sessions.
    User(UserId),
}

/// The guarantee with which a publication is delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guarantee {
    /// The owner learns when every gateway concerned has the publication, and publishes it again if it never learns
    /// that.
    Confirmed,
    /// The owner does not wait. A gateway that misses the publication catches up later, or does without it.
    BestEffort,
}

/// The content of a publication.
#[derive(Debug, Clone)]
pub enum Body {
    /// A committed entry.
    Entry(Arc<Entry>),
    /// The membership of each user of the audience, as of the entry at the publication's position.
    Membership(Arc<MembershipNotice>),
    Receipt(Arc<Receipt>),
    /// Entries that changed, up to the rev of the publication's position.
    Changed(Arc<Changed>),
    /// The user of the audience added or removed a reaction. It is for their own sessions.
    Reacted(Arc<Reacted>),
    /// The gateway has looked at a file that the user of the audience uploaded.
    File(Arc<FileNotice>),
    /// This user is typing.
    Typing(UserId),
    /// The user of the audience has read a channel up to the publication's position, because they sent that entry. It
    /// concerns their inbox only, and has the number of messages up to it.
    Read(u64),
}

/// A user's membership in a conversation, after a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MembershipNotice {
    pub change: MembershipChange,
    pub details: Details,
}

/// The kind of a membership change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MembershipChange {
    Added,
    Removed,
    /// The user stays, but the conversation's details changed.
    Updated,
}

/// Entries that changed in (after, rev], where rev is that of the publication's position. Without items it only says which
/// rev was reached, and who lacks changes asks for them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changed {
    pub after: Rev,
    pub items: Vec<ChangedItem>,
    /// The newest entry of a dm or group as inboxes show it, if it changed.
    pub newest: Option<Arc<Newest>>,
    /// The deleted entries of the conversation, if some were deleted.
    pub deleted: Option<Arc<DeletedSeqs>>,
}

/// The fields of an entry that changed, as they are after its newest change in (after, rev].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedItem {
    pub seq: Seq,
    /// The rev of that change, even if the entry has a newer one by now (rule [item-rev]).
    pub rev: Rev,
    pub content: Option<ContentState>,
    pub reactions: Option<Reactions>,
    /// The change of the reactions, if it was one.
    pub by: Option<ReactedBy>,
    /// The own reactions of the user who asks, if the reactions changed.
    #[serde(default)]
    pub mine: Option<Vec<String>>,
}

#[cfg(test)]
impl ChangedItem {
    /// An edit of the entry with this seq, with a body of so many bytes.
    pub(crate) fn edited(seq: Seq, rev: Rev, bytes: usize) -> Self {
        let content = ContentState {
            rev,
            by: UserId::new("bob").unwrap(),
            at: 9,
            content: Some(crate::model::EditedContent {
                body: "x".repeat(bytes),
                attachments: Vec::new(),
            }),
            edits: vec![rev],
        };
        Self {
            seq,
            rev,
            content: Some(content),
            reactions: None,
            by: None,
            mine: None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReactedBy {
    pub user: UserId,
    pub emoji: String,
    pub on: bool,
}

/// A reaction that a user added or removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reacted {
    pub seq: Seq,
    pub emoji: String,
    pub on: bool,
    pub rev: Rev,
}

/// The watermarks of a user that rose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    pub user: UserId,
    pub read_seq: Option<Seq>,
    pub delivered_seq: Option<Seq>,
    /// Whether it was delivered to a session that is away.
    pub away: bool,
}

/// The participants of a dm or group as of one entry, or some of them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Recipients {
    pub kind: Kind,
    /// The name of the conversation. A dm has one only if the other participant is not among `users`.
    pub name: Option<String>,
    /// The users, each with the seq of the entry by which they joined.
    pub users: Vec<(UserId, Seq)>,
}

impl Recipients {
    /// Returns the bytes that a list in an `Arc` holds, without the names of its users, which all lists share.
    #[must_use]
    pub fn weight(&self) -> usize {
        size_of::<Self>() + ALLOCATION_BYTES + self.users.len() * size_of::<(UserId, Seq)>()
    }

    /// Returns the inbox summary for `user`, who joined at `joined_seq`.
    #[must_use]
    pub fn summary(&self, user: &UserId, joined_seq: Seq, newest: &Newest) -> InboxSummary {
        InboxSummary {
            seq: newest.last.seq,
            kind: self.kind,
            name: self.name_for(user),
            joined_seq,
            last: Some(newest.last.clone()),
            changes: newest.changes,
            texts: newest.texts,
        }
    }

    /// Returns the name of the conversation as `user` sees it: a dm has the name of the other participant.
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

    /// Returns the same list with only those users that `keep` accepts.
    fn only(&self, keep: impl Fn(&UserId) -> bool) -> Self {
        let users = self.users.iter().filter(|(user, _)| keep(user));
        let users: Vec<_> = users.cloned().collect();
        // A dm is named after the other participant, who may be left out here.
        let name = match (self.kind, users.first()) {
            (Kind::Dm, Some((user, _))) => self.name_for(user),
            _ => self.name.clone(),
        };
        Self {
            kind: self.kind,
            name,
            users,
        }
    }
}

impl Audience {
    /// Iterates over the users that the audience names. A channel's audience names nobody.
    pub fn users(&self) -> impl Iterator<Item = &UserId> {
        let (members, user) = match self {
            Self::Members(members) => (members.users.as_slice(), None),
            Self::User(user) => (&[][..], Some(user)),
            Self::Channel => (&[][..], None),
        };
        members.iter().map(|(user, _)| user).chain(user)
    }
}

impl Publication {
    /// Returns the publication of a committed entry. A channel's entry is confirmed only if it ends somebody's right to read
    /// what follows.
    #[must_use]
    pub fn entry(conversation: ConversationId, entry: Arc<Entry>, audience: Audience) -> Self {
        let confirmed = !matches!(audience, Audience::Channel) || entry.content.makes_private();
        Self {
            conversation,
            at: Cursor(entry.seq, 0),
            audience,
            guarantee: if confirmed {
                Guarantee::Confirmed
            } else {
                Guarantee::BestEffort
            },
            body: Body::Entry(entry),
        }
    }

    /// Returns the publication of the membership of each user of the audience, as of the entry `seq`.
    #[must_use]
    pub fn membership(
        conversation: ConversationId,
        seq: Seq,
        notice: Arc<MembershipNotice>,
        audience: Audience,
    ) -> Self {
        let guarantee = match audience {
            Audience::Members(_) | Audience::User(_) => Guarantee::Confirmed,
            Audience::Channel => Guarantee::BestEffort,
        };
        Self {
            conversation,
            at: Cursor(seq, 0),
            audience,
            guarantee,
            body: Body::Membership(notice),
        }
    }

    /// Returns the publication of watermarks that rose.
    #[must_use]
    pub fn receipt(conversation: ConversationId, receipt: Receipt, audience: Audience) -> Self {
        Self {
            conversation,
            at: Cursor::default(),
            audience,
            guarantee: Guarantee::BestEffort,
            body: Body::Receipt(Arc::new(receipt)),
        }
    }

    /// Returns the publication of entries that changed. `is_confirmed` is false in channels and large groups.
    #[must_use]
    pub fn changed(
        conversation: ConversationId,
        at: Cursor,
        changed: Arc<Changed>,
        audience: Audience,
        is_confirmed: bool,
    ) -> Self {
        Self {
            conversation,
            at,
            audience,
            guarantee: if is_confirmed {
                Guarantee::Confirmed
            } else {
                Guarantee::BestEffort
            },
            body: Body::Changed(changed),
        }
    }

    /// Returns the publication, for a user's own sessions, that they reacted.
    #[must_use]
    pub fn reacted(conversation: ConversationId, reacted: Reacted, user: UserId) -> Self {
        Self {
            conversation,
            at: Cursor(0, reacted.rev),
            audience: Audience::User(user),
            guarantee: Guarantee::BestEffort,
            body: Body::Reacted(Arc::new(reacted)),
        }
    }

    /// Returns the publication, for a user's own sessions, of what became of a file that they uploaded.
    #[must_use]
    pub fn file(conversation: ConversationId, notice: FileNotice, uploader: UserId) -> Self {
        Self {
            conversation,
            at: Cursor::default(),
            audience: Audience::User(uploader),
            guarantee: Guarantee::BestEffort,
            body: Body::File(Arc::new(notice)),
        }
    }

    /// Returns the publication that `user` is typing.
    #[must_use]
    pub fn typing(conversation: ConversationId, user: UserId, audience: Audience) -> Self {
        Self {
            conversation,
            at: Cursor::default(),
            audience,
            guarantee: Guarantee::BestEffort,
            body: Body::Typing(user),
        }
    }

    /// Returns the publication that `user` has read a channel up to `at`.
    #[must_use]
    pub fn read(channel: ConversationId, at: Cursor, user: UserId, texts: u64) -> Self {
        Self {
            conversation: channel,
            at,
            audience: Audience::User(user),
            guarantee: Guarantee::BestEffort,
            body: Body::Read(texts),
        }
    }

    /// Returns the publication of the read mark that the sender gets by sending this entry. `None` if this is no entry.
    #[must_use]
    pub fn read_by_sender(&self) -> Option<Self> {
        let Body::Entry(entry) = &self.body else {
            return None;
        };
        Some(Self::read(
            self.conversation,
            self.at,
            entry.sender.clone(),
            entry.texts,
        ))
    }

    /// Returns the same publication for some of the users it names.
    #[must_use]
    pub fn to(&self, users: &[UserId]) -> Self {
        let mut publication = self.clone();
        if let Audience::Members(members) = &mut publication.audience
            && members.users.len() != users.len()
        {
            let users: HashSet<&UserId> = users.iter().collect();
            *members = Arc::new(members.only(|user| users.contains(user)));
        }
        publication
    }
}

/// Names the publication in the log.
impl fmt::Display for Publication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            conversation,
            at: Cursor(seq, _),
            audience,
            ..
        } = self;
        let users: Vec<&UserId> = audience.users().collect();
        match &self.body {
            Body::Entry(_) => write!(f, "{conversation} {seq} {users:?}"),
            Body::Membership(_) => write!(f, "{conversation} membership {seq} {users:?}"),
            Body::Receipt(_) => f.write_str("receipt"),
            Body::Changed(changed) => {
                write!(
                    f,
                    "{conversation} changes {}..{} {users:?}",
                    changed.after, self.at.1
                )
            }
            Body::Reacted(_) => f.write_str("reacted"),
            Body::File(notice) => write!(f, "{conversation} file {}", notice.file),
            Body::Typing(_) => f.write_str("typing"),
            Body::Read(_) => write!(f, "{conversation} read {seq} {users:?}"),
        }
    }
}

/// The state of a publication's delivery when `publish` returns.
#[derive(Debug)]
pub enum Confirmation {
    /// Nobody needs to wait: it was delivered, or nobody learns when.
    Immediate,
    /// Fires when every gateway concerned has queued it for its sockets. It never fires if this gateway loses the
    /// conversation first.
    Pending(oneshot::Receiver<RedeliveryGuard>),
}

/// Keeps a publication outstanding: if a user's home changes, the new home gets it too. It is dropped when the inbox
/// rows that follow from the publication are queued with the [`super::InboxWriter`].
pub struct RedeliveryGuard(pub Arc<dyn Any + Send + Sync>);

impl fmt::Debug for RedeliveryGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RedeliveryGuard")
    }
}

/// The receiver of all publications. Because of it, `chat` knows no sockets and no peers.
///
/// Publications of one conversation arrive in the order of these calls.
pub trait Publish: Send + Sync + 'static {
    fn publish(&self, publication: Publication) -> Confirmation;

    /// Tells that a message no longer has a file, so that the file can be erased soon. If this is lost, a sweep finds it.
    fn drop_file(&self, _: ConversationId, _: AttachmentId) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Many publications are outstanding at once, and each is moved several times on its way.
    #[test]
    fn the_envelope_stays_small() {
        assert!(
            size_of::<Publication>() <= 112,
            "{}",
            size_of::<Publication>()
        );
    }
}
