//! What all people share, and what the log of a conversation has in the end.

use std::{
    sync::{Mutex, atomic::AtomicBool},
    time::{Duration, Instant},
};

use serde_json::Value;

/// Time until a failed connection is retried.
pub(super) const RETRY_AFTER: Duration = Duration::from_millis(50);

/// The people of a run: their number, their conversations, and how often they do something.
pub(crate) struct Cast {
    pub(crate) users: usize,
    /// Messages per second of each user; with `every_request` messages and other requests.
    pub(crate) rate: f64,
    /// Participants of a group, and groups of each user.
    pub(crate) participants: usize,
    pub(crate) seed: u64,
    /// Whether people also make all other kinds of requests, and leave and come back.
    pub(crate) every_request: bool,
}

/// State shared by all people.
pub(super) struct World {
    pub(super) cast: Cast,
    pub(super) epoch: Instant,
    /// Addresses of the gateways. A gateway that is down keeps its last address.
    pub(super) addresses: Mutex<Vec<String>>,
    /// The conversations whose messages are checked. The last one is a channel with everyone, the others are groups.
    pub(super) groups: Vec<String>,
    /// Public conversations that people join and leave: a group and a channel. None without `every_request`.
    pub(super) lobbies: Vec<String>,
    pub(super) writing: AtomicBool,
    pub(super) over: AtomicBool,
}

impl World {
    /// The conversations that are checked, and those that people join and leave.
    pub(super) fn conversations(&self) -> impl Iterator<Item = &String> {
        self.groups.iter().chain(&self.lobbies)
    }

    /// Whether a message is in a conversation that only other requests use.
    pub(super) fn is_aside(&self, message: &Value) -> bool {
        self.cast.every_request
            && message["conversation"]
                .as_str()
                .is_some_and(|id| !self.groups.iter().any(|group| group == id))
    }
}

/// The name of a user.
pub(super) fn name(number: usize) -> String {
    format!("user-{number:04}")
}
