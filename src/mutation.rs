//! Rules of the cluster that a test breaks on purpose, to see that its checker finds it. For this thread only, which is
//! all that a simulation runs on; nothing but tests ever sets it.

use std::cell::Cell;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Who is deposed goes on.
    Lease,
    /// Rows of all owners have the same key.
    Epoch,
    /// Uncertain entries are served without being written again.
    Settle,
    /// Rows that follow from uncertain entries are not stored again by a takeover.
    Apply,
    /// What is newly owned is served at once.
    TakeoverWait,
    /// A new home speaks for its users before it knows where they are.
    Hold,
    /// A home says done before the gateways with sockets have.
    EndToEnd,
    /// What a user's place has become is told once, and not again by a takeover.
    Place,
    /// A home that was another one's meanwhile believes what it remembers of its users.
    Remember,
    /// A removal is acknowledged before the user's sockets are known to have heard of it.
    Private,
    /// A session that asks to look into a channel is sent its events before it is known to be allowed to.
    Asking,
    /// A session that connects follows channels that its user was removed from meanwhile.
    Follow,
    /// A session panics when it refreshes its token.
    SessionPanic,
    /// The embedded store cannot read what is there.
    Read,
    /// The owner of a conversation panics when it is asked something.
    Panic,
}

thread_local! {
    static BROKEN: Cell<Option<Mutation>> = const { Cell::new(None) };
}

/// Breaks a rule on this thread, or none.
pub fn break_rule(mutation: Option<Mutation>) {
    BROKEN.set(mutation);
}

pub(crate) fn broken(mutation: Mutation) -> bool {
    BROKEN.get() == Some(mutation)
}
