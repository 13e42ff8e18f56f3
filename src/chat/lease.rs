//! The right to act as an owner, until a moment on the monotonic clock.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use arc_swap::ArcSwap;
use tokio::time::{Duration, Instant};

use crate::model::Epoch;

const FOREVER: u64 = u64::MAX;

/// This gateway's present term. Cheap to clone; all clones see a new term at once.
#[derive(Clone, Debug)]
pub struct Lease(Arc<ArcSwap<Term>>);

/// One unbroken time of being an owner, under one epoch. Once it has ended it never comes back: a write of it
/// may still land, and must never share its key with another one's.
#[derive(Debug)]
pub struct Term {
    epoch: Epoch,
    base: Instant,
    /// Milliseconds after `base`.
    ends: AtomicU64,
}

impl Lease {
    /// For a store that only this process can use, so that nobody else can take over.
    #[must_use]
    pub fn unbounded(epoch: Epoch) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(Term {
            epoch,
            base: Instant::now(),
            ends: AtomicU64::new(FOREVER),
        })))
    }

    #[must_use]
    pub fn until(epoch: Epoch, end: Instant) -> Self {
        let lease = Self::unbounded(epoch);
        lease.end_at(end);
        lease
    }

    /// Whoever acts under it keeps it, and asks it before and after each act.
    #[must_use]
    pub fn term(&self) -> Arc<Term> {
        self.0.load_full()
    }

    /// Begins a term under a newer epoch; the one before ends.
    pub fn begin(&self, epoch: Epoch, end: Instant) {
        self.end_at(Instant::now());
        self.0.store(Self::until(epoch, end).term());
    }

    /// Moves the end of the present term. False, and nothing, if it has ended.
    #[must_use]
    pub fn extend(&self, end: Instant) -> bool {
        let holds = self.term().holds(Instant::now());
        if holds {
            self.end_at(end);
        }
        holds
    }

    /// The present term ends at `end`, or has ended.
    pub fn end_at(&self, end: Instant) {
        self.term().end_at(end);
    }
}

impl Term {
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    #[must_use]
    pub fn holds(&self, now: Instant) -> bool {
        let ends = self.ends.load(Ordering::Acquire);
        ends == FOREVER || now < self.base + Duration::from_millis(ends)
    }

    fn end_at(&self, end: Instant) {
        let after = end.saturating_duration_since(self.base).as_millis();
        self.ends.store(
            u64::try_from(after).unwrap_or(FOREVER - 1),
            Ordering::Release,
        );
    }
}
