//! The names of consumers, which follow the logs of all conversations.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

/// The name of a consumer: `webhook:<name>`, `push`, or `webhook:<name>:<id>` for a replay. It is part of stored keys.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ConsumerName(Arc<str>);

impl ConsumerName {
    #[must_use]
    pub fn push() -> Self {
        Self("push".into())
    }

    /// Returns the name of the consumer of a webhook.
    #[must_use]
    pub fn webhook(name: &str) -> Self {
        Self(format!("webhook:{name}").into())
    }

    /// Returns a name that was stored.
    #[must_use]
    pub fn stored(name: &str) -> Self {
        Self(name.into())
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ConsumerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ConsumerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
