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

use super::{error::Error, versions::Versions};
use crate::{
    model::{ConversationId, Epoch, limits::RING_RAISE},
    mutation::{Mutation, broken},
    store::Version,
};

const FOREVER: u64 = u64::MAX;

/// A function that returns whether this gateway may own a conversation now.
pub type Owns = Arc<dyn Fn(ConversationId) -> bool + Send + Sync>;

/// The current right of this gateway to act as an owner. Clones share it, so a change applies to all of them at once.
#[derive(Clone, Debug)]
pub struct Lease {
    grant: Arc<ArcSwap<Grant>>,
    newer: Arc<Newer>,
}

/// The highest epoch that was found in what is stored although it was above the owner's. The ring must go beyond it.
#[derive(Debug, Default)]
struct Newer(AtomicU64);

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
    newer: Arc<Newer>,
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
        let grant = Grant { epoch, until, owns };
        Self {
            grant: Arc::new(ArcSwap::from_pointee(grant)),
            newer: Arc::default(),
        }
    }

    /// Returns the right to own a conversation from now on. `None` while another gateway may still own it.
    #[must_use]
    pub fn ownership(&self, conversation: ConversationId) -> Option<Ownership> {
        let grant = self.grant.load();
        let owned = grant.owns.as_ref().is_none_or(|owns| owns(conversation));
        owned.then(|| Ownership {
            epoch: grant.epoch,
            until: grant.until.clone(),
            revoked: CancellationToken::new(),
            newer: self.newer.clone(),
        })
    }

    #[must_use]
    pub fn owns(&self, conversation: ConversationId) -> bool {
        let grant = self.grant.load();
        grant.owns.as_ref().is_none_or(|owns| owns(conversation))
    }

    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.grant.load().epoch
    }

    /// Checks that what is stored was not written under a later version of the ring, as rule [epoch-above] does for the log:
    /// what replaces it would have a lower version, and be lost without a word.
    ///
    /// # Errors
    /// `Moved` if only the writer is behind. Otherwise the ring must go beyond that version first.
    pub(super) fn check_above(&self, stored: Version, epoch: Epoch) -> Result<(), Error> {
        let stored = Versions::ring_of(stored);
        if stored <= epoch || broken(Mutation::VersionAbove) {
            return Ok(());
        }
        let now = self.epoch();
        if stored <= now {
            return Err(Error::Moved);
        }
        self.newer.found(stored, now);
        Err(Error::OLDER_RING)
    }

    /// Returns the highest epoch that was found in what is stored although it was above that of the ring. The ring must go
    /// beyond it.
    #[must_use]
    pub fn newer(&self) -> Epoch {
        self.newer.0.load(Ordering::Acquire)
    }

    /// Ends the lease, and begins one under a newer epoch.
    pub fn begin(&self, epoch: Epoch, end: Instant, owns: Option<Owns>) {
        self.end_at(Instant::now());
        let until = Until::at(Some(end));
        self.grant.store(Arc::new(Grant { epoch, until, owns }));
    }

    /// Continues the lease without a pause. Conversations that are opened from now on have the newer epoch.
    pub fn go_on(&self, epoch: Epoch, owns: Option<Owns>) {
        let until = self.grant.load().until.clone();
        self.grant.store(Arc::new(Grant { epoch, until, owns }));
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
        self.grant.load().until.end_at(end);
    }

    #[must_use]
    pub fn holds(&self, now: Instant) -> bool {
        self.grant.load().until.holds(now)
    }

    /// Returns how long the lease still holds.
    #[must_use]
    pub fn left(&self, now: Instant) -> Duration {
        let grant = self.grant.load();
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

impl Newer {
    /// Notes an epoch above one's own.
    fn found(&self, epoch: Epoch, own: Epoch) {
        if epoch - own > RING_RAISE {
            crate::seldom::seldom!(
                ERROR,
                "what is stored has an epoch far above the ring's: it is damaged, or `cluster raise-ring` must be run",
                epoch,
                own
            );
            return;
        }
        self.0.fetch_max(epoch, Ordering::AcqRel);
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

    /// Checks that an epoch in the log is not above this one.
    ///
    /// # Errors
    /// The ring must go beyond it first.
    pub(super) fn check_above(&self, stored: Epoch) -> Result<(), Error> {
        if stored <= self.epoch || broken(Mutation::EpochAbove) {
            return Ok(());
        }
        self.newer.found(stored, self.epoch);
        Err(Error::OLDER_RING)
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
