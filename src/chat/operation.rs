//! The operations on a conversation, and their outcomes.

mod range;

use std::sync::Arc;

pub use range::LogRange;
use serde::{Deserialize, Serialize};
use uuid::{Uuid, uuid};

use super::{error::Error, publish::ChangedItem};
use crate::model::{
    Attachment, AttachmentId, ClientId, ConsumerName, ConversationId, DeletedSeqs, Details, Draft,
    EditedContent, Entry, EntryState, Kind, Last, MessageId, Millis, Participant, Posting, Rank,
    Rev, Role, Seq, UserId,
};

/// An operation on one conversation with a typed output. The enums [`Operation`] and [`Outcome`] are its form in mailboxes
/// and between gateways.
pub trait Ask: Into<Operation> {
    type Output;

    /// Returns the output of this operation. `None` if the outcome belongs to another one.
    fn output(outcome: Outcome) -> Option<Self::Output>;
}

/// An operation whose kind is known only at run time.
impl Ask for Operation {
    type Output = Outcome;

    fn output(outcome: Outcome) -> Option<Outcome> {
        Some(outcome)
    }
}

/// Returns the typed output of an operation that was asked as `A`.
pub(crate) fn output<A: Ask>(asked: Result<Outcome, Error>) -> Result<A::Output, Error> {
    A::output(asked?).ok_or_else(unexpected::<A>)
}

fn unexpected<A>() -> Error {
    let operation = std::any::type_name::<A>();
    debug_assert!(
        false,
        "{operation} was answered with the outcome of another operation"
    );
    crate::seldom::seldom!(
        ERROR,
        "an operation returned the outcome of another one",
        operation
    );
    Error::unavailable("an internal error")
}

/// Makes [`Operation`]: its variants, the type with which callers ask each (a variant with content is asked with that
/// content), and that type's [`Ask`], from the output and the outcomes it is made of. After these, each row says what is known of
/// the operation:
///
/// - `reads` or `writes`: whether it changes nothing and publishes nothing;
/// - `asker`: whether the answer depends on the user who asks: `always`, `never`, or if the conversation is `private`;
/// - `waits`: what must be committed before it is handled, see [`Waits`];
/// - `again`: whether it may be repeated after an unknown outcome (`yes`, `no`), or with what;
/// - `about`: the user whom it changes, if that is not the one who asks.
macro_rules! operations {
    ($(
        $(#[$doc:meta])*
        $ask:ident => $variant:ident $(($content:ty))? $({ $($field:ident: $type:ty),* })?
            -> $output:ty: $($outcome:pat => $value:expr),+;
            $does:ident, asker $asker:ident, waits $waits:ident, again $again:tt $(, about $about:ident)?;
    )*) => {
        /// An operation on one conversation, by one user. The conversation's owner answers operations in order.
        #[derive(Debug, Clone, Serialize, Deserialize)]
        pub enum Operation {
            $($(#[$doc])* $variant $(($content))? $({ $($field: $type),* })?,)*
        }

        impl Operation {
            /// Returns whether the operation changes nothing and publishes nothing.
            pub(in crate::chat) fn only_reads(&self) -> bool {
                match self {
                    $(Self::$variant { .. } => operations!(@reads $does),)*
                }
            }

            /// Returns whether the answer depends on the user who asks. It does not where anyone may read, and for gateways,
            /// which are not participants.
            pub(in crate::chat) fn depends_on_actor(&self, details: &Details) -> bool {
                match self {
                    $(Self::$variant { .. } => operations!(@asker $asker details),)*
                }
            }

            /// Returns what must be committed before the operation is handled.
            pub(in crate::chat) fn waits(&self) -> Waits {
                match self {
                    $(Self::$variant { .. } => Waits::$waits,)*
                }
            }

            /// Returns the operation to retry with after an unknown outcome. `None` if a retry could apply it twice.
            #[must_use]
            pub fn again(&self) -> Option<Self> {
                match self {
                    $(Self::$variant { .. } => operations!(@again $again self),)*
                }
            }

            /// Returns the user whom the operation changes, if that is not the one who asks.
            pub(in crate::chat) fn subject(&self) -> Option<&UserId> {
                match self {
                    $($(Self::$variant { $about, .. } => Some($about),)?)*
                    _ => None,
                }
            }
        }

        $(
            operations!(@type $ask => $variant $(($content))? $({ $($field: $type),* })?);

            impl Ask for $ask {
                type Output = $output;

                fn output(outcome: Outcome) -> Option<$output> {
                    match outcome {
                        $($outcome => Some($value),)+
                        _ => None,
                    }
                }
            }
        )*
    };
    (@reads reads) => { true };
    (@reads writes) => { false };
    (@asker always $details:ident) => { true };
    (@asker never $details:ident) => { false };
    (@asker private $details:ident) => { !$details.public };
    (@again yes $operation:ident) => { Some($operation.clone()) };
    (@again no $operation:ident) => { None };
    (@again $with:ident $operation:ident) => { $with($operation) };
    (@type $ask:ident => $variant:ident($content:ty)) => {
        impl From<$ask> for Operation {
            fn from(content: $ask) -> Self {
                Self::$variant(content)
            }
        }
    };
    (@type $ask:ident => $variant:ident) => {
        #[derive(Debug, Clone, Copy)]
        pub struct $ask;

        impl From<$ask> for Operation {
            fn from($ask: $ask) -> Self {
                Self::$variant
            }
        }
    };
    (@type $ask:ident => $variant:ident { $($field:ident: $type:ty),* }) => {
        #[derive(Debug, Clone)]
        pub struct $ask {
            $(pub $field: $type,)*
        }

        impl From<$ask> for Operation {
            fn from($ask { $($field),* }: $ask) -> Self {
                Self::$variant { $($field),* }
            }
        }
    };
}

/// What must be committed before an operation is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::chat) enum Waits {
    /// Nothing: changes are checked against what is appended.
    Nothing,
    /// The creation, and its rows.
    Creation,
    /// The rows of a dm. Otherwise a crash in between would leave a log without a conversation.
    Dm,
    /// What lets the asker read: their membership, or that anyone may.
    Reading,
    /// The asker's membership.
    Membership,
    /// Nothing, but the log of changes must have room.
    Room,
}

operations! {
    // The creation of a group or channel is its first entry.
    Creation => Create(Creation) -> Created:
        Outcome::Created { existed } => Created { existed }, Outcome::Changed { .. } => Created { existed: false };
        writes, asker always, waits Creation, again no;
    GetDetails => Details -> DetailsView: Outcome::Details(view) => view;
        reads, asker always, waits Reading, again yes;
    GetParticipants => Participants { after: Option<UserId>, limit: usize } -> ParticipantsPage:
        Outcome::Participants(page) => page;
        reads, asker always, waits Reading, again yes;
    AddParticipant => Add { user: UserId } -> Seq: Outcome::Changed { seq } => seq;
        writes, asker always, waits Nothing, again no, about user;
    RemoveParticipant => Remove { user: UserId } -> Seq: Outcome::Changed { seq } => seq;
        writes, asker always, waits Nothing, again no, about user;
    Join => Join -> Seq: Outcome::Changed { seq } => seq;
        writes, asker always, waits Nothing, again no;
    Leave => Leave -> Seq: Outcome::Changed { seq } => seq;
        writes, asker always, waits Nothing, again no;
    SetRole => SetRole { user: UserId, role: Role } -> Seq: Outcome::Changed { seq } => seq;
        writes, asker always, waits Nothing, again no, about user;
    Update => Update { name: Option<String>, posting: Option<Posting>, public: Option<bool> } -> Seq:
        Outcome::Changed { seq } => seq;
        writes, asker always, waits Nothing, again no;
    Draft => Send(Draft) -> SendAck: Outcome::Sent(sent) => sent;
        writes, asker always, waits Dm, again as_retry;
    GetHistory => History { range: LogRange, limit: usize } -> Page: Outcome::History(page) => page;
        reads, asker private, waits Reading, again yes;
    MarkRead => Read { seq: Seq } -> (): Outcome::Done => ();
        writes, asker always, waits Membership, again yes;
    MarkDelivered => Delivered(MarkDelivered) -> (): Outcome::Done => ();
        writes, asker always, waits Membership, again yes;
    ShowTyping => Typing -> (): Outcome::Done => ();
        writes, asker always, waits Membership, again yes;
    /// Reads the newest entry, for users who may read the conversation.
    GetHead => Head -> Head: Outcome::Head(head) => *head;
        reads, asker private, waits Reading, again yes;
    /// Reads the entries after one, for a gateway that lacks them. It never comes from a client.
    CatchUp => CatchUp { after: Seq, limit: usize } -> Page: Outcome::History(page) => page;
        reads, asker never, waits Reading, again yes;
    EditMessage => Edit(EditMessage) -> Rev: Outcome::Revised { rev } => rev;
        writes, asker always, waits Room, again unless_newer;
    DeleteMessages => Delete(DeleteMessages) -> Rev: Outcome::Revised { rev } => rev;
        writes, asker always, waits Room, again yes;
    React => React(React) -> Rev: Outcome::Revised { rev } => rev;
        writes, asker always, waits Room, again yes;
    GetReactors => Reactors(GetReactors) -> Reactors: Outcome::Reactors(reactors) => reactors;
        reads, asker private, waits Reading, again yes;
    /// Reads the changes after a rev, for a user who may read the conversation.
    GetChanges => Changes { after: Rev, limit: usize } -> Changes: Outcome::Changes(changes) => changes;
        reads, asker private, waits Reading, again yes;
    /// Reads the changes after a rev, for a gateway that lacks them. It never comes from a client.
    CatchUpChanges => CatchUpChanges { after: Rev, limit: usize } -> Changes: Outcome::Changes(changes) => changes;
        reads, asker never, waits Reading, again yes;
    /// Returns which of these files a message has, for a user who may read the conversation.
    GetFiles => Files { files: Vec<AttachmentId> } -> Vec<AttachmentId>: Outcome::Files(files) => files;
        reads, asker private, waits Reading, again yes;
    /// Returns whether a message has the file. If none has, no later message may have it (rule [erase-twice]). It never
    /// comes from a client.
    CheckFile => CheckFile { file: AttachmentId } -> FileUse: Outcome::FileUse(found) => found;
        writes, asker never, waits Nothing, again yes;
    /// Sets the state of a consumer. The owner of [`state_of`] the consumer is its only writer (rule [version]). It never
    /// comes from a client.
    SetConsumer => SetConsumer { consumer: ConsumerName, enabled: bool, reason: Option<String> } -> ():
        Outcome::Done => ();
        writes, asker never, waits Nothing, again yes;
    /// Loads the conversation, so that its owner finishes the work of the previous one. It never comes from a client.
    Load => Load -> (): Outcome::Done => ();
        reads, asker never, waits Nothing, again yes;
    /// Repairs the conversation after a crash. The gateway of the owner does it with many operations, so no owner gets
    /// this one. It never comes from a client.
    Repair => Repair -> (): Outcome::Done => ();
        writes, asker never, waits Nothing, again yes;
}

/// Says that a message may have been sent before.
fn as_retry(operation: &Operation) -> Option<Operation> {
    let Operation::Send(draft) = operation else {
        return None;
    };
    let draft = Draft {
        retry: true,
        ..draft.clone()
    };
    Some(Operation::Send(draft))
}

/// A repeated edit without `base_rev` could undo a newer one.
fn unless_newer(operation: &Operation) -> Option<Operation> {
    let is_sure = matches!(operation, Operation::Edit(edit) if edit.base_rev.is_some());
    is_sure.then(|| operation.clone())
}

/// A conversation to be created.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Creation {
    pub kind: Kind,
    /// The participants besides the creator.
    pub participants: Vec<UserId>,
    pub name: Option<String>,
    pub public: bool,
    pub posting: Posting,
    /// The time at which an imported conversation was created. `None` means now.
    pub at: Option<Millis>,
}

/// A delivered mark of a user.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct MarkDelivered {
    pub seq: Seq,
    /// Whether the session is away, so that its user has not seen anything.
    pub away: bool,
}

/// A new content of a message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EditMessage {
    pub seq: Seq,
    pub content: NewContent,
    /// The rev of the content that the editor has seen. If the content changed after it, the edit is refused
    /// (rule [base-rev]).
    pub base_rev: Option<Rev>,
    /// The time at which an imported message was edited. `None` means now.
    pub at: Option<Millis>,
}

/// What an edit makes of a message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NewContent {
    pub body: String,
    /// All attachments that the message has afterwards. `None` keeps those that it has.
    pub attachments: Option<Vec<Attachment>>,
}

impl From<EditedContent> for NewContent {
    fn from(EditedContent { body, attachments }: EditedContent) -> Self {
        Self {
            body,
            attachments: Some(attachments),
        }
    }
}

/// The deletion of messages.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeleteMessages {
    pub seqs: Vec<Seq>,
    /// Whether a back end may delete the messages of others.
    pub as_moderator: bool,
    /// The time of an imported deletion. `None` means now.
    pub at: Option<Millis>,
}

/// A reaction that a user adds or removes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct React {
    pub seq: Seq,
    pub emoji: String,
    /// Whether it is added.
    pub on: bool,
    /// The time of an imported reaction. `None` means now.
    pub at: Option<Millis>,
}

/// A page of the users who reacted to an entry.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GetReactors {
    pub seq: Seq,
    /// `None` means all emoji.
    pub emoji: Option<String>,
    /// The `next` of the previous page.
    pub after: Option<String>,
    pub limit: usize,
}

/// The outcome of an operation, in mailboxes and between gateways.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Outcome {
    Created {
        existed: bool,
    },
    Details(DetailsView),
    Participants(ParticipantsPage),
    /// A change of the membership or details is the entry with this seq.
    Changed {
        seq: Seq,
    },
    Sent(SendAck),
    History(Page),
    Head(Box<Head>),
    Done,
    /// The newest rev of an entry's change, or of the conversation if nothing changed.
    Revised {
        rev: Rev,
    },
    Reactors(Reactors),
    Changes(Changes),
    /// The files that messages have.
    Files(Vec<AttachmentId>),
    FileUse(FileUse),
}

/// Returns the conversation whose owner is the only writer of a consumer's state. It never exists.
#[must_use]
pub fn state_of(consumer: &ConsumerName) -> ConversationId {
    const NAMESPACE: Uuid = uuid!("0b6f7a52-2d1e-4c57-9f43-6a1b0f2d8e11");
    ConversationId(Uuid::new_v5(&NAMESPACE, consumer.as_str().as_bytes()))
}

/// Whether messages have a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileUse {
    Used,
    Unused,
    /// A message that is being sent may have it (rule [busy-later]).
    Busy,
}

/// The result of creating a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Created {
    /// Whether the conversation existed before, with this user in it.
    pub existed: bool,
}

/// A conversation as one user sees it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DetailsView {
    pub details: Details,
    pub participant_count: u64,
    pub head: Seq,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rev: Rev,
    /// The number of people's messages that are not deleted.
    pub message_count: u64,
    /// The role of that user. `None` if the user is not a participant.
    pub role: Option<Role>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ParticipantsPage {
    pub items: Vec<Listed>,
    /// The user after whom the next page begins.
    pub next: Option<UserId>,
}

/// A participant as another one sees them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Listed {
    pub user: UserId,
    pub role: Role,
    pub joined_seq: Seq,
    /// The user's delivered and read marks, if the user who asks may know them: a channel shows them only to the user
    /// themselves.
    pub marks: Option<(Seq, Seq)>,
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
            // An entry that was read was delivered too.
            marks: with_marks.then_some((*delivered_seq.max(read_seq), *read_seq)),
        }
    }
}

/// The acknowledgement of a message.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct SendAck {
    pub seq: Seq,
    pub message_id: MessageId,
    pub at: Millis,
    /// Whether the message was committed before. This repeats its first acknowledgement.
    pub duplicate: bool,
}

impl SendAck {
    pub(super) fn of(entry: &Entry, duplicate: bool) -> Self {
        Self {
            seq: entry.seq,
            message_id: entry.message_id,
            at: entry.at,
            duplicate,
        }
    }
}

/// A page of the log, oldest entry first.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Page {
    pub entries: Vec<Arc<Entry>>,
    pub head: Seq,
    /// The rev that the states are at least as new as.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rev: Rev,
    /// The states of those entries that changed, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub states: Vec<(Seq, Arc<EntryState>)>,
    /// The reactions of the user who asks, for entries with reactions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mine: Vec<(Seq, Vec<String>)>,
}

/// The users who reacted to an entry. There are none if it was deleted.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Reactors {
    pub items: Vec<Reactor>,
    pub next: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Reactor {
    pub user: UserId,
    pub emoji: String,
    pub at: Millis,
}

/// The entries that changed in (after, rev].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Changes {
    pub after: Rev,
    pub rev: Rev,
    pub items: Vec<ChangedItem>,
    /// Whether there are later changes.
    pub more: bool,
    /// Whether too many changes are missing. The client drops what it knows of changes and reads its pages again.
    pub reset: bool,
}

impl Page {
    /// Returns the state of an entry of the page, if the entry changed.
    #[must_use]
    pub fn state(&self, seq: Seq) -> Option<&EntryState> {
        let place = self.states.binary_search_by_key(&seq, |(seq, _)| *seq);
        Some(&self.states[place.ok()?].1)
    }

    /// Returns whether a page of the entries after `after` reaches the head.
    #[must_use]
    pub fn reaches_head(&self, after: Seq) -> bool {
        let last = self.entries.last().map_or(after, |last| last.seq);
        last >= self.head
    }
}

/// The newest entry of a conversation.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Head {
    pub details: Details,
    pub head: Seq,
    pub last: Option<Last>,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rev: Rev,
    /// [`Entry::texts`] of the newest entry.
    pub texts: u64,
    /// The deleted entries of the conversation.
    #[serde(default, skip_serializing_if = "DeletedSeqs::is_empty")]
    pub deleted: DeletedSeqs,
}

impl Head {
    /// Returns the rank of the newest entry.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.last.as_ref().map_or(0, |last| last.message_id.rank())
    }
}

// Serde passes a reference.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(rev: &Rev) -> bool {
    *rev == 0
}

/// Returns a client id for a system entry, which nobody sends twice.
pub(super) fn fresh_client_id() -> ClientId {
    ClientId(ConversationId::random().0)
}

#[cfg(test)]
mod tests;
