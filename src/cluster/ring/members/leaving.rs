//! How a member leaves gracefully: the new version is made first and adopted last.

use std::{future::Future, sync::atomic::Ordering};

use tokio::time::{Instant, timeout};

use super::{LEASE, MembershipAgent};
use crate::store::RingRow;

impl MembershipAgent {
    /// Leaves the ring. The others are told only when `let_go` has ended. Until then this gateway acts under the version
    /// before, so that no conversation pauses while the new version is made.
    pub async fn leave(&self, let_go: impl Future<Output = ()>) {
        let next = self.propose_leaving().await;
        let_go.await;
        if let Some(next) = next {
            self.leaving.store(false, Ordering::Release);
            self.learn(&next, None);
            return;
        }
        self.lease.end_at(Instant::now());
        let row = self.row();
        if self.store.is_shared() && row.members == [self.me] {
            // An empty ring tells the next gateway that it need not wait for a lease to end.
            drop(timeout(LEASE, self.propose(&row, &[])).await);
        }
    }

    /// Gives the ring back to the members that this process replaced when it became the only one. Their crash repair is left to
    /// the next gateway, as if this process had never run.
    pub async fn give_back(&self) {
        self.lease.end_at(Instant::now());
        let row = self.row();
        if row.members == [self.me] {
            drop(timeout(LEASE, self.propose(&row, self.gone())).await);
        }
    }

    /// Makes a version without this gateway, and does not adopt it yet. Returns `None` if no other gateway is a member, or
    /// the version could not be made.
    async fn propose_leaving(&self) -> Option<RingRow> {
        if !self.store.is_shared() || !self.lease.holds(Instant::now()) {
            return None;
        }
        self.leaving.store(true, Ordering::Release);
        for _ in 0..5 {
            let row = self.row();
            let others = row.members.iter().copied().filter(|&m| m != self.me);
            let next = row.next(others.collect());
            if next.members.is_empty() || next.members.len() == row.members.len() {
                break;
            }
            let proposed = self.store.propose_ring(Some(&row), &next);
            match timeout(LEASE, proposed).await {
                Ok(Ok(true)) => return Some(next),
                Ok(Ok(false)) => {}
                Ok(Err(_)) | Err(_) => {
                    tracing::info!(
                        "could not leave the ring; the others wait until the lease of this gateway has ended"
                    );
                    break;
                }
            }
            // Another gateway was faster.
            match timeout(LEASE, self.store.ring()).await {
                Ok(Ok(Some(made))) if !made.members.contains(&self.me) => return Some(made),
                Ok(Ok(Some(made))) => self.learn(&made, None),
                _ => break,
            }
        }
        self.leaving.store(false, Ordering::Release);
        None
    }
}
