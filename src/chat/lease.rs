//! The right to act as an owner, until a moment on the monotonic clock.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tokio::time::{Duration, Instant};

use crate::model::Epoch;

const FOREVER: u64 = u64::MAX;

/// Under which epoch this gateway owns, and how long. Cheap to clone; all clones see an extension at once.
#[derive(Clone, Debug)]
pub struct Lease {
    epoch: Epoch,
    base: Instant,
    /// Milliseconds after `base`.
    ends: Arc<AtomicU64>,
}

impl Lease {
    /// For a ring of one, where nobody else can take over.
    #[must_use]
    pub fn unbounded(epoch: Epoch) -> Self {
        Self {
            epoch,
            base: Instant::now(),
            ends: Arc::new(AtomicU64::new(FOREVER)),
        }
    }

    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    #[must_use]
    pub fn holds(&self, now: Instant) -> bool {
        let ends = self.ends.load(Ordering::Acquire);
        ends == FOREVER || now < self.base + Duration::from_millis(ends)
    }

    /// It ends at `end`, or has ended.
    pub fn end_at(&self, end: Instant) {
        let after = end.saturating_duration_since(self.base).as_millis();
        self.ends.store(
            u64::try_from(after).unwrap_or(FOREVER - 1),
            Ordering::Release,
        );
    }
}
