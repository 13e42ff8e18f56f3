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
    /// `what` names what is counted: `bytes of a body`.
    #[error("too large: {what}: at most {max}")]
    TooLarge { what: Cow<'static, str>, max: usize },
    /// Outcome unknown: send again with the same client id and `retry`.
    #[error("unavailable: {}", told(reason))]
    Unavailable { reason: Cow<'static, str> },
}

/// What gateways tell each other by this text, those of earlier versions too, so it does not change.
const MOVED_REASON: &str = "another gateway owns the conversation";

/// The reason as people read it. A gateway that is alone has no other that could own the conversation.
fn told(reason: &str) -> &str {
    match reason {
        MOVED_REASON => "the conversation is being closed or moved; try again",
        reason => reason,
    }
}

impl Error {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::Invalid(text.into())
    }

    /// In the middle of it the conversation was lost.
    pub(crate) const CLOSED: Self = Self::unavailable("the conversation is moving");
    /// Nothing was begun: the owner closes the conversation, or another gateway owns it or is about to.
    pub(crate) const MOVED: Self = Self::unavailable(MOVED_REASON);
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
            Error::MOVED.to_string(),
            "unavailable: the conversation is being closed or moved; try again"
        );
        assert_eq!(
            Error::BUSY.to_string(),
            "unavailable: too many operations are waiting"
        );
    }
}
