//! Why an operation on a conversation failed.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::store;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Error {
    /// The client asks for something that makes no sense.
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    Forbidden(Cow<'static, str>),
    /// There is none, or none that this user may know of.
    #[error("no such conversation")]
    UnknownConversation,
    #[error("{0}")]
    Conflict(Cow<'static, str>),
    #[error("{what} may have at most {max}")]
    TooLarge { what: Cow<'static, str>, max: usize },
    /// Outcome unknown: send again with the same client id and `retry`.
    #[error("unavailable: {reason}")]
    Unavailable { reason: Cow<'static, str> },
}

impl Error {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::Invalid(text.into())
    }

    /// In the middle of it the conversation was lost.
    pub(crate) const CLOSED: Self = Self::unavailable("the conversation is moving");
    /// Nothing was begun: another gateway owns the conversation, or is about to.
    pub(crate) const MOVED: Self = Self::unavailable("another gateway owns the conversation");
    /// The owner panicked while it handled this. The router does not repeat it: it could be the reason.
    pub(crate) const BROKEN: Self = Self::unavailable("an internal error");
    pub(crate) const BUSY: Self = Self::unavailable("too many operations are waiting");

    pub(crate) const fn unavailable(reason: &'static str) -> Self {
        Self::Unavailable {
            reason: Cow::Borrowed(reason),
        }
    }
}

/// To the asker every fault of the store is the same; the log has the details.
impl From<store::Error> for Error {
    fn from(error: store::Error) -> Self {
        match error {
            store::Error::Unavailable { .. } => Self::unavailable("the store did not answer"),
            store::Error::Poisoned { .. } => Self::unavailable("the store refuses writes"),
            store::Error::Corrupt { .. } => Self::unavailable("stored data is damaged"),
        }
    }
}
