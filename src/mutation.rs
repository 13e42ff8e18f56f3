//! Deliberate violations of rules, with which tests show that their checkers find them. A violation applies to one
//! thread, on which the whole simulation runs. Only tests use this.

use std::cell::Cell;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// A deposed owner continues.
    Lease,
    /// The rows of all owners have the same key.
    Epoch,
    /// A takeover serves uncertain entries without writing them again.
    Settle,
    /// A takeover does not store the effects of uncertain entries again.
    Apply,
    /// A new owner serves at once instead of waiting until the old one has ended.
    TakeoverWait,
    /// A new home answers for its users before it knows their sessions.
    Hold,
    /// A home acknowledges before the gateways with the user's sockets have.
    EndToEnd,
    /// A change of a user's membership is published once, and not again by a takeover.
    Place,
    /// A home that was not the home for a while trusts what it remembers of its users.
    Remember,
    /// A removal is acknowledged before the gateways of the user's sockets have.
    Private,
    /// A session that requests to see a channel receives events before it is known to be allowed.
    Asking,
    /// A connecting session subscribes to channels from which its user was removed meanwhile.
    Follow,
    /// A session panics when it refreshes its token.
    SessionPanic,
    /// The embedded store cannot read stored timestamps.
    Read,
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
    /// A gateway that follows a channel again does not tell its subscribers which rev the channel has.
    Subscribe,
    /// The owner of a conversation panics at an operation.
    Panic,
}

thread_local! {
    static BROKEN: Cell<Option<Mutation>> = const { Cell::new(None) };
}

/// Violates a rule on this thread, or none.
pub fn break_rule(mutation: Option<Mutation>) {
    BROKEN.set(mutation);
}

pub(crate) fn broken(mutation: Mutation) -> bool {
    BROKEN.get() == Some(mutation)
}
