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

    /// Whether this is the consumer that notifies devices.
    #[must_use]
    pub fn is_push(&self) -> bool {
        &*self.0 == "push"
    }

    /// Returns the name of the consumer of a webhook.
    #[must_use]
    pub fn webhook(name: &str) -> Self {
        Self(format!("webhook:{name}").into())
    }

    /// Returns the name of a replay of this webhook. The id must be a new one.
    #[must_use]
    pub fn replay(&self, id: uuid::Uuid) -> Self {
        Self(format!("{self}:{id}").into())
    }

    /// Whether this is a replay: `webhook:<name>:<id>`. The names of webhooks have no colon.
    #[must_use]
    pub fn is_replay(&self) -> bool {
        self.0.matches(':').count() == 2
    }

    /// Whether this is a replay of this webhook.
    #[must_use]
    pub fn is_replay_of(&self, webhook: &Self) -> bool {
        let name = self.0.rsplit_once(':').map(|(name, _)| name);
        self.is_replay() && name == Some(webhook.as_str())
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
