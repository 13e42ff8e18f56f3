//! The ring's members. A gateway on its own is its ring's only one: each start is a new version, so that the
//! epochs in the log's keys tell one process from the next.
//!
//! Where other processes could use the same store, the ring row is read again and again: the lease lasts [`LEASE`]
//! from the start of the last read that returned the own version. A process that finds another version was
//! deposed; one that could not read in time has lost its lease, and begins again under a new version.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::{
    membership::{LEASE, MARGIN},
    ring::Ring,
};
use crate::{
    chat::Lease,
    model::{Epoch, GatewayId},
    store::{self, Heartbeat, RingRow, Store},
};

/// Between two reads.
const READ_EVERY: Duration = Duration::from_millis(500);
/// Between two tries to become a member.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// Who beats every [`READ_EVERY`] has been seen to beat by then.
const BEAT_SEEN: Duration = Duration::from_millis(1_300);

/// This gateway's place in the ring.
pub struct Members {
    me: GatewayId,
    store: Arc<dyn Store>,
    ring: Arc<ArcSwap<Ring>>,
    lease: Lease,
    gone: Vec<GatewayId>,
    beats: AtomicU64,
}

/// Why this process is no member.
#[derive(Debug, thiserror::Error)]
pub enum NotJoined {
    #[error("gateway {0} is running on this store")]
    Taken(GatewayId),
    #[error("another gateway took this store while this one was starting")]
    Overtaken,
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// Another process has taken the ring.
#[derive(Debug, thiserror::Error)]
#[error(
    "another gateway has taken over (ring version {theirs}, here {ours}); only one at a time may use this store"
)]
pub struct Deposed {
    ours: Epoch,
    theirs: Epoch,
}

impl Members {
    /// Makes this process the ring's only member, under a version of its own.
    ///
    /// # Errors
    /// When the store cannot be read or written, or another gateway is using it.
    pub async fn alone(store: Arc<dyn Store>) -> Result<Self, NotJoined> {
        let me = GatewayId(uuid::Uuid::new_v4());
        if store.is_shared()
            && let Some(other) = someone_alive(&*store).await?
        {
            return Err(NotJoined::Taken(other));
        }
        let (version, before) = take(&*store, me).await?;
        let gone = before.map(|ring| ring.members).unwrap_or_default();
        let lease = if store.is_shared() {
            if !gone.is_empty() {
                tracing::info!(
                    "waiting until a gateway that may still be there has lost its lease"
                );
                sleep(LEASE + MARGIN).await;
            }
            let end = confirmed(&*store, version).await?;
            Lease::until(version, end.ok_or(NotJoined::Overtaken)?)
        } else {
            Lease::unbounded(version)
        };
        let ring = Arc::new(ArcSwap::from_pointee(Ring::new(version, vec![me])));
        Ok(Self {
            me,
            store,
            ring,
            lease,
            gone,
            beats: AtomicU64::new(0),
        })
    }

    /// Keeps the lease; returns when another process has taken over.
    pub async fn keep(&self) -> Deposed {
        if !self.store.is_shared() {
            std::future::pending::<()>().await;
        }
        loop {
            let began = Instant::now();
            let ours = self.ring.load().version();
            let beat = Heartbeat {
                address: String::new(),
                counter: self.beats.fetch_add(1, Ordering::Relaxed) + 1,
            };
            let (ring, beaten) = tokio::join!(
                timeout(LEASE, self.store.ring()),
                timeout(LEASE, self.store.beat(self.me, &beat)),
            );
            if !matches!(beaten, Ok(Ok(()))) {
                tracing::warn!("no heartbeat could be written");
            }
            match ring {
                Ok(Ok(Some(ring))) if ring.version == ours => {
                    if !self.lease.extend(began + LEASE)
                        && let Err(error) = self.begin_again().await
                    {
                        tracing::warn!(%error, "the lease had ended, and no new one could be had yet");
                    }
                }
                Ok(Ok(ring)) => {
                    self.lease.end_at(Instant::now());
                    let theirs = ring.map_or(0, |ring| ring.version);
                    return Deposed { ours, theirs };
                }
                Ok(Err(error)) => tracing::warn!(%error, "the ring could not be read"),
                Err(_) => tracing::warn!("the ring could not be read in time"),
            }
            sleep_until(began + READ_EVERY).await;
        }
    }

    /// What was in flight when the lease ended may still land, under the old epoch: hence a new one.
    async fn begin_again(&self) -> store::Result<()> {
        let ours = self.ring.load().version();
        let next = RingRow {
            version: ours + 1,
            members: vec![self.me],
        };
        if !self.store.propose_ring(Some(ours), &next).await? {
            return Ok(()); // The next read tells why.
        }
        adopted(self.me, next.version);
        self.ring
            .store(Arc::new(Ring::new(next.version, next.members)));
        if let Some(end) = confirmed(&*self.store, next.version).await? {
            self.lease.begin(next.version, end);
        }
        Ok(())
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

    /// Stops acting as an owner, at once, and tells the next process that it need not wait.
    pub async fn leave(&self) {
        let held = self.lease.term().holds(Instant::now());
        self.lease.end_at(Instant::now());
        if !self.store.is_shared() || !held {
            return;
        }
        let ours = self.ring.load().version();
        let nobody = RingRow {
            version: ours + 1,
            members: Vec::new(),
        };
        let left = timeout(LEASE, self.store.propose_ring(Some(ours), &nobody)).await;
        if !matches!(left, Ok(Ok(true))) {
            tracing::info!("left without a word: the next gateway waits for this one's lease");
        }
    }
}

/// A member whose heart beats.
async fn someone_alive(store: &dyn Store) -> store::Result<Option<GatewayId>> {
    let members = store.ring().await?.map(|ring| ring.members);
    for member in members.unwrap_or_default() {
        let before = store.heartbeat(member).await?;
        sleep(BEAT_SEEN).await;
        if store.heartbeat(member).await? != before {
            return Ok(Some(member));
        }
    }
    Ok(None)
}

/// Until when a read that begins now gives the right to act under `version`; none if it is not the ring's any more.
async fn confirmed(store: &dyn Store, version: Epoch) -> store::Result<Option<Instant>> {
    let began = Instant::now();
    let ring = store.ring().await?;
    Ok(ring
        .filter(|ring| ring.version == version)
        .map(|_| began + LEASE))
}

/// Takes the next version for `me`; returns it, and the ring before.
async fn take(store: &dyn Store, me: GatewayId) -> store::Result<(Epoch, Option<RingRow>)> {
    loop {
        let before = store.ring().await?;
        let expected = before.as_ref().map(|ring| ring.version);
        let next = RingRow {
            version: expected.unwrap_or_default() + 1,
            members: vec![me],
        };
        if store.propose_ring(expected, &next).await? {
            adopted(me, next.version);
            return Ok((next.version, before));
        }
        sleep(RETRY_AFTER).await;
    }
}

fn adopted(me: GatewayId, version: Epoch) {
    tracing::info!(gateway = %me, version, "ring version adopted");
    metrics::gauge!("chat_ring_version").set(version as f64);
}
