//! Requests over HTTP that may last as long as a session. They end when the sessions of their user are closed.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use tokio_util::sync::CancellationToken;

use super::lock;
use crate::model::UserId;

/// The long requests of all users. There are as many as there are places for them.
#[derive(Clone, Debug, Default)]
pub(super) struct LongRequests(Arc<Mutex<HashMap<UserId, Running>>>);

/// The long requests of one user.
#[derive(Debug, Default)]
struct Running {
    count: usize,
    closed: CancellationToken,
}

/// A long request of a user, until it is dropped.
#[derive(Debug)]
pub struct LongRequest {
    user: UserId,
    all: LongRequests,
    closed: CancellationToken,
}

impl LongRequests {
    pub(super) fn begin(&self, user: &UserId) -> LongRequest {
        let mut all = lock(&self.0);
        let running = all.entry(user.clone()).or_default();
        running.count += 1;
        LongRequest {
            user: user.clone(),
            all: self.clone(),
            closed: running.closed.clone(),
        }
    }

    /// Ends the requests of a user.
    pub(super) fn close(&self, user: &UserId) {
        let mut all = lock(&self.0);
        if let Some(running) = all.remove(user) {
            running.closed.cancel();
        }
    }
}

impl LongRequest {
    /// Waits until the sessions of the user are closed.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }
}

impl Drop for LongRequest {
    fn drop(&mut self) {
        let mut all = lock(&self.all.0);
        // `close` has removed those that it ended. Later ones of the same user are others.
        if self.closed.is_cancelled() {
            return;
        }
        if let Some(running) = all.get_mut(&self.user) {
            running.count -= 1;
            if running.count == 0 {
                all.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn requests_end_with_the_sessions_of_their_user() {
        let all = LongRequests::default();
        let [alice, bob] = ["alice", "bob"].map(|name| UserId::new(name).unwrap());
        let (first, second, other) = (all.begin(&alice), all.begin(&alice), all.begin(&bob));
        all.close(&alice);
        first.closed().await;
        second.closed().await;
        assert!(other.closed().now_or_never().is_none());
        let later = all.begin(&alice);
        drop((first, second));
        assert!(later.closed().now_or_never().is_none());
        drop((later, other));
        assert!(lock(&all.0).is_empty());
    }
}
