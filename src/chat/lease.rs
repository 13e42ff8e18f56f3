//! The lease: the right of a gateway to act as an owner, until a moment on the monotonic clock.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    model::{ConversationId, Epoch},
    mutation::{Mutation, broken},
};

const FOREVER: u64 = u64::MAX;

/// A function that returns whether this gateway may own a conversation now.
pub type Owns = Arc<dyn Fn(ConversationId) -> bool + Send + Sync>;

/// The current right of this gateway to act as an owner. Clones share it, so a change applies to all of them at once.
#[derive(Clone, Debug)]
pub struct Lease(Arc<ArcSwap<Grant>>);

struct Grant {
    epoch: Epoch,
    until: Arc<Until>,
    /// The conversations that this gateway may own. `None` if it may own all.
    owns: Option<Owns>,
}

/// The end of an unbroken time as an owner. Once it has passed, it is never extended: a write of that time may still
/// land, and no other write may have the same key.
#[derive(Debug)]
struct Until {
    base: Instant,
    /// Milliseconds after `base`.
    ends: AtomicU64,
}

/// The right to own one conversation. Its owner checks it after each write and before each answer.
#[derive(Debug)]
pub struct Ownership {
    epoch: Epoch,
    until: Arc<Until>,
    revoked: CancellationToken,
}

impl Lease {
    /// Returns a lease without an end, for a store that only this process can use.
    #[must_use]
    pub fn unbounded(epoch: Epoch) -> Self {
        Self::granted(epoch, Until::at(None), None)
    }

    /// Returns a lease for all conversations, until `end`.
    #[must_use]
    pub fn until(epoch: Epoch, end: Instant) -> Self {
        Self::granted(epoch, Until::at(Some(end)), None)
    }

    /// Returns a lease that has ended and allows nothing.
    #[must_use]
    pub fn none() -> Self {
        Self::granted(
            0,
            Until::at(Some(Instant::now())),
            Some(Arc::new(|_| false)),
        )
    }

    fn granted(epoch: Epoch, until: Arc<Until>, owns: Option<Owns>) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(Grant {
            epoch,
            until,
            owns,
        })))
    }

    /// Returns the right to own a conversation from now on. `None` while another gateway may still own it.
    #[must_use]
    pub fn ownership(&self, conversation: ConversationId) -> Option<Ownership> {
        let grant = self.0.load();
        let owned = grant.owns.as_ref().is_none_or(|owns| owns(conversation));
        owned.then(|| Ownership {
            epoch: grant.epoch,
            until: grant.until.clone(),
            revoked: CancellationToken::new(),
        })
    }

    #[must_use]
    pub fn owns(&self, conversation: ConversationId) -> bool {
        let grant = self.0.load();
        grant.owns.as_ref().is_none_or(|owns| owns(conversation))
    }

    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.0.load().epoch
    }

    /// Ends the lease, and begins one under a newer epoch.
    pub fn begin(&self, epoch: Epoch, end: Instant, owns: Option<Owns>) {
        self.end_at(Instant::now());
        let until = Until::at(Some(end));
        self.0.store(Arc::new(Grant { epoch, until, owns }));
    }

    /// Continues the lease without a pause. Conversations that are opened from now on have the newer epoch.
    pub fn go_on(&self, epoch: Epoch, owns: Option<Owns>) {
        let until = self.0.load().until.clone();
        self.0.store(Arc::new(Grant { epoch, until, owns }));
    }

    /// Moves the end of the lease. Returns false and changes nothing if it has ended.
    #[must_use]
    pub fn extend(&self, end: Instant) -> bool {
        let holds = self.holds(Instant::now());
        if holds {
            self.end_at(end);
        }
        holds
    }

    /// Sets the end of the lease.
    pub fn end_at(&self, end: Instant) {
        self.0.load().until.end_at(end);
    }

    #[must_use]
    pub fn holds(&self, now: Instant) -> bool {
        self.0.load().until.holds(now)
    }

    /// Returns how long the lease still holds.
    #[must_use]
    pub fn left(&self, now: Instant) -> Duration {
        let grant = self.0.load();
        let ends = grant.until.ends.load(Ordering::Acquire);
        (grant.until.base + Duration::from_millis(ends.min(1 << 40))).saturating_duration_since(now)
    }
}

impl fmt::Debug for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { epoch, until, .. } = self;
        write!(f, "Grant {{ epoch: {epoch}, until: {until:?} }}")
    }
}

impl Until {
    fn at(end: Option<Instant>) -> Arc<Self> {
        let until = Self {
            base: Instant::now(),
            ends: AtomicU64::new(FOREVER),
        };
        if let Some(end) = end {
            until.end_at(end);
        }
        Arc::new(until)
    }

    fn holds(&self, now: Instant) -> bool {
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

impl Ownership {
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    #[must_use]
    pub fn holds(&self, now: Instant) -> bool {
        (!self.revoked.is_cancelled() && self.until.holds(now)) || broken(Mutation::Lease)
    }

    /// Ends the ownership, because another gateway will own the conversation.
    pub(super) fn revoke(&self) {
        self.revoked.cancel();
    }

    /// Returns a token that is cancelled when the ownership is revoked.
    pub(super) fn revoked(&self) -> CancellationToken {
        self.revoked.clone()
    }
}
