//! The ring's members. A gateway on the embedded store is its ring's only one: each start is a new version,
//! so that the epochs in the log's keys tell one process from the next.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use tokio::time::{Instant, sleep};

use super::ring::Ring;
use crate::{
    chat::Lease,
    model::GatewayId,
    store::{self, RingRow, Store},
};

/// Between two tries to become a member.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// This gateway's place in the ring.
pub struct Members {
    me: GatewayId,
    ring: Arc<ArcSwap<Ring>>,
    lease: Lease,
    gone: Vec<GatewayId>,
}

impl Members {
    /// Makes this process the ring's only member, under a version of its own.
    ///
    /// # Errors
    /// When the store cannot be read or written.
    pub async fn alone(store: &dyn Store) -> store::Result<Self> {
        let me = GatewayId(uuid::Uuid::new_v4());
        loop {
            let before = store.ring().await?;
            let expected = before.as_ref().map(|ring| ring.version);
            let next = RingRow {
                version: expected.unwrap_or_default() + 1,
                members: vec![me],
            };
            if store.propose_ring(expected, &next).await? {
                tracing::info!(gateway = %me, version = next.version, "ring version adopted");
                metrics::gauge!("chat_ring_version").set(next.version as f64);
                let lease = Lease::unbounded(next.version);
                let ring = Ring::new(next.version, next.members);
                let gone = before.map(|ring| ring.members).unwrap_or_default();
                return Ok(Self {
                    me,
                    ring: Arc::new(ArcSwap::from_pointee(ring)),
                    lease,
                    gone,
                });
            }
            sleep(RETRY_AFTER).await;
        }
    }

    #[must_use]
    pub fn me(&self) -> GatewayId {
        self.me
    }

    /// Replaced as a whole when the version changes; read without a lock.
    #[must_use]
    pub fn ring(&self) -> Arc<ArcSwap<Ring>> {
        self.ring.clone()
    }

    #[must_use]
    pub fn lease(&self) -> Lease {
        self.lease.clone()
    }

    /// Members of the version before, whose conversations may need repair.
    #[must_use]
    pub fn gone(&self) -> &[GatewayId] {
        &self.gone
    }

    /// Stops acting as an owner, at once.
    pub fn leave(&self) {
        self.lease.end_at(Instant::now());
    }
}
