//! The errors of operations on conversations.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::store;

/// The reason why an operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Error {
    /// The request is not valid.
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    Forbidden(Cow<'static, str>),
    /// There is no such conversation, or the user may not know of it.
    #[error("no such conversation")]
    UnknownConversation,
    #[error("{0}")]
    Conflict(Cow<'static, str>),
    /// A limit is exceeded. `what` names the counted things, such as "bytes of a body".
    #[error("too large: {what}: at most {max}")]
    TooLarge { what: Cow<'static, str>, max: usize },
    /// Nothing was begun: the owner closes the conversation, or another gateway owns it or is about to own it. Any request
    /// may be repeated after it.
    #[error("unavailable: the conversation is being closed or moved; try again")]
    Moved,
    /// The owner, or the link to it, was lost while the request was in progress. The outcome is unknown. The text does
    /// not say so, but it stays as it is, because clients know it.
    #[error("unavailable: the conversation is moving")]
    Closed,
    /// The outcome is unknown. The client sends again with the same client id and `retry`.
    #[error("unavailable: {reason}")]
    Unavailable { reason: Cow<'static, str> },
}

impl Error {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::Invalid(text.into())
    }

    /// The error if the owner panicked while it handled the request. The request is not repeated, because it
    /// could be the reason.
    pub(crate) const BROKEN: Self = Self::unavailable("an internal error");
    /// The error for a feature that the level of the ring does not have yet: see docs/cluster.md.
    pub(crate) const NOT_UPGRADED: Self = Self::unavailable("not before all gateways are upgraded");
    /// The error of rule [epoch-above].
    pub(crate) const OLDER_RING: Self = Self::unavailable("the ring is older than what is stored");
    /// The error if the time of an operation is over. The operation may still be carried out.
    pub const TOO_LATE: Self = Self::unavailable("it took too long");
    pub(crate) const BUSY: Self = Self::unavailable("too many operations are waiting");
    /// The error if the log of a conversation lacks entries. It stays until they come back, or until the log is mended.
    pub(crate) const DAMAGED: Self = Self::unavailable("the log is damaged");
    /// The error if the log of changes lacks some.
    pub(crate) const DAMAGED_CHANGES: Self = Self::unavailable("the log of changes is damaged");
    /// The error if the store cannot read a row, or a part of a log that must be there.
    const DAMAGED_ROWS: Self = Self::unavailable("stored data is damaged");

    pub(crate) const fn unavailable(reason: &'static str) -> Self {
        Self::Unavailable {
            reason: Cow::Borrowed(reason),
        }
    }

    /// Returns whether the same request may succeed later.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Moved | Self::Closed | Self::Unavailable { .. })
    }

    /// Returns whether the same request will probably fail again: something is lost that was stored, or it ends the owner.
    #[must_use]
    pub(crate) fn is_lasting(&self) -> bool {
        [
            Self::DAMAGED,
            Self::DAMAGED_CHANGES,
            Self::DAMAGED_ROWS,
            Self::BROKEN,
        ]
        .contains(self)
    }
}

/// Users learn only that the store failed. The log has the details.
impl From<store::Error> for Error {
    fn from(error: store::Error) -> Self {
        match error {
            store::Error::Unavailable { .. } | store::Error::Unusable { .. } => {
                Self::unavailable("the store did not answer")
            }
            store::Error::Poisoned { .. } => Self::unavailable("the store refuses writes"),
            store::Error::Corrupt { .. } => Self::DAMAGED_ROWS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_read_says_what_happened() {
        let error = Error::TooLarge {
            what: "bytes of a body".into(),
            max: 16_384,
        };
        assert_eq!(
            error.to_string(),
            "too large: bytes of a body: at most 16384"
        );
        assert_eq!(
            Error::Moved.to_string(),
            "unavailable: the conversation is being closed or moved; try again"
        );
        assert_eq!(
            Error::BUSY.to_string(),
            "unavailable: too many operations are waiting"
        );
    }
}
