//! Why an operation on a conversation failed.

use crate::store;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The client asks for something that makes no sense.
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    Forbidden(&'static str),
    /// There is none, or none that this user may know of.
    #[error("no such conversation")]
    UnknownConversation,
    #[error("{0}")]
    Conflict(&'static str),
    #[error("{what} may have at most {max}")]
    TooLarge { what: &'static str, max: usize },
    /// Outcome unknown: send again with the same client id and `retry`.
    #[error("unavailable: {reason}")]
    Unavailable { reason: &'static str },
}

impl Error {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::Invalid(text.into())
    }

    pub(crate) const CLOSED: Self = Self::Unavailable {
        reason: "the conversation is moving",
    };
    pub(crate) const BUSY: Self = Self::Unavailable {
        reason: "too many operations are waiting",
    };
}

/// To the asker every fault of the store is the same; the log has the details.
impl From<store::Error> for Error {
    fn from(error: store::Error) -> Self {
        match error {
            store::Error::Unavailable { .. } => Self::Unavailable {
                reason: "the store did not answer",
            },
            store::Error::Poisoned { .. } => Self::Unavailable {
                reason: "the store refuses writes",
            },
            store::Error::Corrupt { .. } => Self::Unavailable {
                reason: "stored data is damaged",
            },
        }
    }
}
