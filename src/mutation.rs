//! Deliberate violations of rules, with which tests show that their checkers find them. A violation applies to one
//! thread, on which the whole simulation runs. Tests also let owners die between two steps. Only tests use this.

use std::{cell::Cell, panic::resume_unwind};

use crate::tasks::Process;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// A deposed owner continues.
    Lease,
    /// The rows of all owners have the same key.
    Epoch,
    /// An owner writes below an epoch that is stored.
    EpochAbove,
    /// The writer of rows without a seq writes below a version that is stored.
    VersionAbove,
    /// The rank of an entry is the time of its gateway alone.
    RankAbove,
    /// A gateway does not tell the others which ranks it knows.
    RankTold,
    /// A new process does not know the ranks that earlier ones gave.
    RankReserved,
    /// A takeover serves uncertain entries without writing them again.
    Settle,
    /// A takeover counts the rows of an owner whose settle came to some replicas only, and there in part.
    SettleWhole,
    /// A takeover does not store the effects of uncertain entries again.
    Apply,
    /// A new owner serves at once instead of waiting until the old one has ended.
    TakeoverWait,
    /// A new home answers for its users before it knows their sessions.
    Hold,
    /// A home is sent publications before it is told of the version that makes it the home.
    RingFirst,
    /// A home acknowledges before the gateways with the user's sockets have.
    EndToEnd,
    /// A change of a user's membership is published once, and not again by a takeover.
    Place,
    /// A home that was not the home for a while trusts what it remembers of its users.
    Remember,
    /// The writer of rows without a seq does not check that it still is their writer.
    Version,
    /// A removal is acknowledged before the gateways of the user's sockets have.
    Private,
    /// A session that requests to see a channel receives events before it is known to be allowed.
    Asking,
    /// A connecting session subscribes to channels from which its user was removed meanwhile.
    Removed,
    /// A session panics when it refreshes its token.
    SessionPanic,
    /// The embedded store cannot read stored timestamps.
    Read,
    /// A message that is published again after its deletion is shown in inboxes and notifications.
    FaceDeleted,
    /// A change is acknowledged before its effects are stored.
    ChangeEffects,
    /// A takeover does not store the effects of unsettled changes again.
    ChangeReapply,
    /// A takeover serves unsettled changes without writing them again.
    ChangeSettle,
    /// The text of a deleted message is not erased.
    Erase,
    /// An edit or deletion leaves the inbox rows as they are.
    InboxCorrection,
    /// A repeated edit is accepted, although the content changed since.
    BaseRev,
    /// A read mark is stored with the number of all messages instead of those up to it.
    ReadTexts,
    /// The rows of changes of all owners have the same key.
    ChangeEpoch,
    /// Pages show changes whose effects are not stored yet.
    ChangeApplied,
    /// A cached page is used although one of its entries has changed.
    ChangeCache,
    /// A deletion does not reach the inbox rows of the participants.
    DeletedSeqs,
    /// A takeover does not know which entries were deleted before.
    DeletedKept,
    /// A takeover does not publish the changes that it settled.
    ChangePublish,
    /// A gateway that wants a channel again does not tell its subscribers which rev the channel has.
    Subscribe,
    /// The owner of a conversation panics at an operation.
    Panic,
    /// A consumer's first offset is not stored before the first append.
    ConsumerFirst,
    /// A conversation in which a consumer is behind gets no lagging row.
    ConsumerFound,
    /// A conversation is closed while a consumer is behind, and no lagging row names it.
    ConsumerClose,
    /// A consumer's offset is raised before its events are accepted.
    ConsumerOffset,
    /// A consumer gets changes before the entries that they change.
    ConsumerOrder,
    /// The offset of pushing is raised although a home has not decided.
    PushOffset,
    /// Each gateway counts the uploads that begin there, instead of the home of the user.
    UploadHome,
    /// A file is found unused although a late row of an earlier owner may bring back a message with it.
    Fence,
    /// A message is committed although its references to files may not be stored.
    ReferencesAppend,
    /// A takeover does not write the references of the messages that it settles.
    ReferencesSettle,
    /// A deposed owner says that a file is unused.
    EraseLease,
    /// A gateway may write to a bucket long after it began to look at a file.
    WriteWindow,
}

/// A step of a change's way, after which a test lets the owner die.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The owner has appended the change in memory.
    Appended,
    /// One or two replicas of a simulated store have the row of the change.
    RowOnSomeReplicas,
    /// The store has the row of the change.
    RowWritten,
    /// The lease held after that, so the change is committed.
    Committed,
    /// The store has the states of the changed entries, and nothing else of the effects.
    StatesWritten,
    /// The store also has the rows of who reacted.
    ReactorsWritten,
    /// The store also has the corrected inbox rows.
    InboxWritten,
    /// The store has all rows of the effects. No text is erased.
    EffectsWritten,
    /// The texts of deleted entries are erased.
    Erased,
    /// The owner shows the change.
    Applied,
    /// The change is acknowledged.
    Acknowledged,
    /// The change is published.
    Published,
    /// The publication was delivered, and the rev is queued for the inbox rows.
    Delivered,
    /// A new owner has read what a previous one left.
    TakeoverRead,
    /// The uncertain rows are written again.
    TakeoverSettled,
    /// The rows of their effects are written again.
    TakeoverApplied,
    /// The texts that they delete are erased again.
    TakeoverErased,
    /// The changes are published again.
    TakeoverPublished,
}

impl Step {
    pub const ALL: [Self; 18] = [
        Self::Appended,
        Self::RowOnSomeReplicas,
        Self::RowWritten,
        Self::Committed,
        Self::StatesWritten,
        Self::ReactorsWritten,
        Self::InboxWritten,
        Self::EffectsWritten,
        Self::Erased,
        Self::Applied,
        Self::Acknowledged,
        Self::Published,
        Self::Delivered,
        Self::TakeoverRead,
        Self::TakeoverSettled,
        Self::TakeoverApplied,
        Self::TakeoverErased,
        Self::TakeoverPublished,
    ];
}

thread_local! {
    static FATAL: Cell<Option<Step>> = const { Cell::new(None) };
    static BROKEN: Cell<Option<Mutation>> = const { Cell::new(None) };
}

/// Violates a rule on this thread, or none.
pub fn break_rule(mutation: Option<Mutation>) {
    BROKEN.set(mutation);
}

pub(crate) fn broken(mutation: Mutation) -> bool {
    BROKEN.get() == Some(mutation)
}

/// Lets the owner die that first takes this step on this thread.
pub fn die_after(step: Option<Step>) {
    FATAL.set(step);
}

/// Whether the owner is to die after this step. It does once.
pub(crate) fn is_fatal(step: Step) -> bool {
    FATAL.get() == Some(step) && FATAL.replace(None).is_some()
}

/// Notes a step of the owner. If it is to die after this one, its process is killed, and this does not return.
pub(crate) fn took(step: Step) {
    if is_fatal(step) {
        die();
    }
}

/// Kills the process of this task, and leaves the task.
pub(crate) fn die() -> ! {
    Process::kill_current();
    resume_unwind(Box::new("the owner dies here"))
}
