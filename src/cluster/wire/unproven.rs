//! The connections whose peers have not proved yet that they know the cluster's secret.

use std::{collections::VecDeque, sync::Mutex};

use metrics::counter;
use tokio_util::sync::CancellationToken;

use crate::{model::limits::PEERS_UNPROVEN_MAX, tasks::lock};

/// At most [`PEERS_UNPROVEN_MAX`] connections, the oldest first.
#[derive(Default)]
pub(super) struct Unproven(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    next: u64,
    /// Each with a number and a signal to close.
    connections: VecDeque<(u64, CancellationToken)>,
}

/// A connection among them, until this is dropped.
pub(super) struct Stranger<'a> {
    number: u64,
    all: &'a Unproven,
    evicted: CancellationToken,
}

impl Unproven {
    /// Counts a connection. If there are too many, the oldest is told to close.
    pub(super) fn admit(&self) -> Stranger<'_> {
        let evicted = CancellationToken::new();
        let mut waiting = lock(&self.0);
        let number = waiting.next;
        waiting.next += 1;
        waiting.connections.push_back((number, evicted.clone()));
        if waiting.connections.len() > PEERS_UNPROVEN_MAX
            && let Some((_, oldest)) = waiting.connections.pop_front()
        {
            oldest.cancel();
            counter!("chat_peer_refused_total").increment(1);
            crate::seldom::seldom!(
                WARN,
                "too many connections to cluster.listen do not prove that they know the secret"
            );
        }
        Stranger {
            number,
            all: self,
            evicted,
        }
    }
}

impl Stranger<'_> {
    /// Completes when the connection is to close, because there are too many newer ones.
    pub(super) async fn evicted(&self) {
        self.evicted.cancelled().await;
    }
}

impl Drop for Stranger<'_> {
    fn drop(&mut self) {
        lock(&self.all.0)
            .connections
            .retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn the_oldest_makes_room() {
        let all = Unproven::default();
        let first = all.admit();
        let mut later: Vec<_> = (1..PEERS_UNPROVEN_MAX).map(|_| all.admit()).collect();
        assert!(first.evicted().now_or_never().is_none());
        let newest = all.admit();
        assert!(first.evicted().now_or_never().is_some());
        drop(first);
        // One that leaves makes room too.
        drop(later.remove(0));
        let _one_more = all.admit();
        assert!(later[0].evicted().now_or_never().is_none());
        assert!(newest.evicted().now_or_never().is_none());
    }
}
