//! This gateway's membership, kept alive: reads the ring row, writes the heartbeat, watches those of the others, and
//! grants the [`Lease`] accordingly. The rules are in `membership.rs`; here is the I/O around them.
//!
//! With the embedded store nobody else can be there: each start is a new version, so that the epochs in the log's keys
//! tell one process from the next, and the lease has no end.

mod joining;
mod leaving;

pub use joining::NotJoined;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use futures_util::{
    future::join_all,
    stream::{FuturesUnordered, StreamExt},
};
use metrics::{counter, gauge};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::{
    lock,
    membership::{LEASE, Learned, Membership, SILENCE, may_join},
    view::View,
    view_changes::{ViewChanges, ViewListener},
};
use crate::{
    chat::{Conversations, Lease, Owns},
    model::{ConversationId, CurrentLevel, Epoch, GatewayId, LEVEL_MAX},
    store::{self, Heartbeat, RingRow, Store},
};

/// Between two renewals of the lease.
const RENEW_EVERY: Duration = Duration::from_millis(500);
/// Between two looks at the others' heartbeats.
const LISTEN_EVERY: Duration = Duration::from_millis(250);
/// Between two tries to become a member.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// Follows the ring, at once and in order.
pub(super) trait Adopt: Send + Sync {
    fn adopt(&self, before: &View, after: &View, learned: Learned);
}

/// This gateway's place in the ring.
pub struct MembershipAgent {
    me: GatewayId,
    /// Where peers reach this gateway; empty: it wants none.
    address: String,
    store: Arc<dyn Store>,
    lease: Lease,
    rules: Arc<Mutex<Membership>>,
    ring: Arc<ArcSwap<View>>,
    level: CurrentLevel,
    /// The version adopted; also touched when something may have become possible.
    changes: Arc<ViewChanges>,
    addresses: Mutex<BTreeMap<GatewayId, String>>,
    beats: AtomicU64,
    /// What must be let go of when a version takes it away, and who else follows the ring. Held while a version is
    /// taken in, so that they are taken in one after the other.
    followers: Mutex<Followers>,
    /// Conversations lost, until each has let go.
    losing: Mutex<Vec<CancellationToken>>,
    removed: CancellationToken,
    /// A version without this gateway is only taken in when it has let go of everything.
    leaving: AtomicBool,
    gone: Vec<GatewayId>,
}

/// Who follows knows this, so this does not keep it.
type Followers = Option<(Conversations, Weak<dyn Adopt>)>;

impl MembershipAgent {
    fn new(
        me: GatewayId,
        address: String,
        store: Arc<dyn Store>,
        lease: Lease,
        rules: Membership,
        gone: Vec<GatewayId>,
    ) -> Self {
        let ring = rules.ring().clone();
        log_adoption(me, &ring, "known");
        let level = CurrentLevel::default();
        level.raise(rules.row().level);
        gauge!("chat_cluster_level").set(f64::from(level.get()));
        Self {
            me,
            address,
            store,
            lease,
            changes: ViewChanges::new(ring.version()),
            ring: Arc::new(ArcSwap::from_pointee(ring)),
            level,
            rules: Arc::new(Mutex::new(rules)),
            addresses: Mutex::default(),
            beats: AtomicU64::new(0),
            followers: Mutex::default(),
            losing: Mutex::default(),
            removed: CancellationToken::new(),
            leaving: AtomicBool::new(false),
            gone,
        }
    }

    /// From now on these are told of each version.
    pub(super) fn give(&self, conversations: Conversations, adopt: Weak<dyn Adopt>) {
        *lock(&self.followers) = Some((conversations, adopt));
    }

    /// Keeps the membership; returns when another gateway has removed this one.
    pub async fn keep(&self) {
        if !self.store.is_shared() {
            std::future::pending::<()>().await;
        }
        tokio::select! {
            biased;
            () = self.renew() => {}
            () = self.listen() => {}
            () = self.removed.cancelled() => {}
        }
    }

    async fn renew(&self) {
        loop {
            let began = Instant::now();
            if let Err(error) = timeout(LEASE, self.renew_once())
                .await
                .unwrap_or(Err(late()))
            {
                counter!("chat_ring_renewals_failed_total").increment(1);
                tracing::warn!(%error, "the lease could not be renewed");
            }
            gauge!("chat_ring_lease_seconds").set(self.lease.left(Instant::now()).as_secs_f64());
            sleep_until(began + RENEW_EVERY).await;
        }
    }

    /// A heartbeat, and after it a read of the ring: who sees an old heartbeat after a new version knows thereby that
    /// no lease was renewed since.
    async fn renew_once(&self) -> store::Result<()> {
        let began = Instant::now();
        self.beat().await?;
        let Some(row) = self.store.ring().await? else {
            return Ok(());
        };
        self.learn(&row, Some(began));
        if may_join(&row).is_err() {
            return Ok(()); // The lease has ended, see `learn_level`.
        }
        let until = began + LEASE;
        let (version, member, may_begin) = {
            let rules = self.rules();
            let may_begin = rules.may_begin(Instant::now());
            (rules.ring().version(), rules.is_member(), may_begin)
        };
        if !member || row.version != version || self.lease.extend(until) {
            return Ok(());
        }
        if version > self.lease.epoch() {
            tracing::info!(gateway = %self.me, version, may_begin, "a lease begins");
            self.lease.begin(version, until, Some(self.owns()));
            self.wake();
            return Ok(());
        }
        // What was in flight when the lease ended may still land, under the old epoch: hence a new one.
        tracing::warn!(gateway = %self.me, version, "the lease had ended; proposing a new version");
        self.propose(&row, &row.members).await
    }

    async fn beat(&self) -> store::Result<()> {
        let beat = Heartbeat {
            address: self.address.clone(),
            counter: self.beats.fetch_add(1, Ordering::Relaxed) + 1,
            level: LEVEL_MAX,
        };
        self.store.beat(self.me, &beat).await
    }

    async fn read_ring(&self) -> store::Result<()> {
        let began = Instant::now();
        if let Some(row) = self.store.ring().await? {
            self.learn(&row, Some(began));
        }
        Ok(())
    }

    /// Watches the others' heartbeats, and removes who is silent.
    async fn listen(&self) {
        let mut heard_at = Instant::now();
        loop {
            let began = Instant::now();
            let concerned = self.rules().concerned();
            let read = concerned.iter().map(|&g| self.store.heartbeat(g));
            let beats = timeout(LEASE, join_all(read)).await.unwrap_or_default();
            let heard = !concerned.is_empty() && beats.iter().any(Result::is_ok);
            let now = Instant::now();
            let mut silent = Vec::new();
            {
                let mut rules = self.rules();
                for (&gateway, beat) in concerned.iter().zip(beats) {
                    if let Ok(Some(beat)) = beat {
                        rules.heard(gateway, beat.counter, began, now);
                        lock(&self.addresses).insert(gateway, beat.address);
                    }
                }
                if concerned.is_empty() || heard {
                    if now.saturating_duration_since(heard_at) > SILENCE {
                        rules.was_deaf(now);
                    }
                    heard_at = now;
                    silent = rules.silent(now);
                }
                let members = rules.concerned();
                lock(&self.addresses).retain(|gateway, _| members.contains(gateway));
            }
            if !silent.is_empty() {
                self.remove(&silent, "silent for too long").await;
            }
            self.wake();
            sleep_until(began + LISTEN_EVERY).await;
        }
    }

    /// Proposes a version without these.
    pub(super) async fn remove(&self, gateways: &[GatewayId], reason: &str) {
        if !self.lease.holds(Instant::now()) {
            return;
        }
        tracing::warn!(?gateways, reason, "removing");
        let row = self.row();
        let members = row.members.iter().copied();
        let others: Vec<GatewayId> = members.filter(|m| !gateways.contains(m)).collect();
        if let Err(error) = self.propose(&row, &others).await {
            tracing::warn!(%error, "a gateway could not be removed yet");
        }
    }

    async fn propose(&self, before: &RingRow, members: &[GatewayId]) -> store::Result<()> {
        if may_join(before).is_err() {
            return Ok(()); // This gateway ends, see `learn_level`.
        }
        let next = before.next(members.to_vec());
        if self.store.propose_ring(Some(before), &next).await? {
            self.learn(&next, None);
        }
        Ok(())
    }

    /// Takes in a version of the ring, from the store or from a peer.
    pub(super) fn learn(&self, row: &RingRow, read_at: Option<Instant>) {
        if self.leaving.load(Ordering::Acquire) && !row.members.contains(&self.me) {
            return;
        }
        let followers = lock(&self.followers);
        let now = Instant::now();
        let (before, after, learned) = {
            let mut rules = self.rules();
            let before = rules.ring().clone();
            let learned = rules.learn(row, read_at, now);
            self.learn_level(&rules.row(), now);
            if learned == Learned::Nothing {
                return;
            }
            (before, rules.ring().clone(), learned)
        };
        log_adoption(self.me, &after, "adopted");
        let is_member = after.members().contains(&self.me);
        let was_member = before.members().contains(&self.me);
        self.ring.store(Arc::new(after.clone()));
        if !is_member {
            self.lease.end_at(now);
        } else if self.lease.holds(now) {
            self.lease.go_on(after.version(), Some(self.owns()));
        }
        // Whatever is opened from here on is judged by the new version. What was open before stays only if it goes on.
        if let Some((conversations, adopt)) = &*followers {
            let mine = |ring: &View, id| ring.owner(id) == Some(self.me);
            let lost = conversations.release(|id| {
                learned == Learned::Next && is_member && mine(&before, id) && mine(&after, id)
            });
            counter!("chat_conversations_lost_total").increment(lost.len() as u64);
            lock(&self.losing).extend(lost);
            if let Some(adopt) = adopt.upgrade() {
                adopt.adopt(&before, &after, learned);
            }
        }
        drop(followers);
        if was_member && !is_member {
            tracing::warn!(gateway = %self.me, version = after.version(), "removed from the ring");
            self.removed.cancel();
        }
        self.changes.adopted(after.version());
    }

    /// Takes in the level of the ring. If this build does not support it, which only a write by hand can cause, this gateway
    /// ends as if it had been removed, and then does not start.
    fn learn_level(&self, row: &RingRow, now: Instant) {
        let before = self.level.get();
        if row.level > before {
            self.level.raise(row.level);
            gauge!("chat_cluster_level").set(f64::from(row.level));
            tracing::info!(gateway = %self.me, level = row.level, "the level of the ring rose");
        }
        if may_join(row).is_err() {
            tracing::error!(
                level = row.level,
                "this build does not support the level of the ring"
            );
            self.lease.end_at(now);
            self.removed.cancel();
        }
    }

    /// Waits until everything that was lost is let go of.
    pub(super) async fn let_go(&self) {
        let lost = std::mem::take(&mut *lock(&self.losing));
        let mut going: FuturesUnordered<_> =
            lost.iter().map(CancellationToken::cancelled).collect();
        while going.next().await.is_some() {}
    }

    /// A peer says that it acts under no version older than this.
    pub(super) fn peer_adopted(&self, peer: GatewayId, version: Epoch) {
        self.rules().adopted(peer, version);
        self.wake();
    }

    fn owns(&self) -> Owns {
        let rules = self.rules.clone();
        Arc::new(move |id: ConversationId| lock(&rules).may_own(id, Instant::now()))
    }

    /// Something may have become possible.
    pub(super) fn wake(&self) {
        self.changes.tell();
    }

    /// Gateways that something must be told of a new version.
    pub(super) fn concerned(&self) -> Vec<GatewayId> {
        self.rules().concerned()
    }

    /// Whether a gateway that is no member can certainly do nothing any more.
    pub(super) fn is_over(&self, gateway: GatewayId) -> bool {
        self.rules().is_over(gateway, Instant::now())
    }

    /// Changes when a version is adopted; touched when something may have become possible.
    pub(super) fn view_changes(&self) -> ViewListener {
        self.changes.listen()
    }

    /// Whether nobody can act under an older version any more.
    #[must_use]
    pub fn may_begin(&self) -> bool {
        self.rules().may_begin(Instant::now())
    }

    #[must_use]
    pub fn me(&self) -> GatewayId {
        self.me
    }

    /// Replaced as a whole when the version changes; read without a lock.
    #[must_use]
    pub fn ring(&self) -> Arc<ArcSwap<View>> {
        self.ring.clone()
    }

    pub(super) fn row(&self) -> RingRow {
        self.rules().row()
    }

    /// Returns the level of the ring, which rises while the gateway runs.
    #[must_use]
    pub fn level(&self) -> CurrentLevel {
        self.level.clone()
    }

    /// Where the gateways are that this one has to do with.
    pub(super) fn addresses(&self) -> BTreeMap<GatewayId, String> {
        lock(&self.addresses).clone()
    }

    #[must_use]
    pub fn lease(&self) -> Lease {
        self.lease.clone()
    }

    /// Returns the members of the version before this gateway's, if it is alone: their conversations may need repair.
    #[must_use]
    pub fn gone(&self) -> &[GatewayId] {
        &self.gone
    }

    fn rules(&self) -> MutexGuard<'_, Membership> {
        lock(&self.rules)
    }
}

fn late() -> store::Error {
    store::Error::Unavailable {
        operation: "renew",
        reason: "it took longer than a lease".into(),
    }
}

fn log_adoption(me: GatewayId, ring: &View, what: &'static str) {
    let (version, members) = (ring.version(), ring.members());
    tracing::info!(gateway = %me, version, ?members, "ring version {what}");
    gauge!("chat_ring_version").set(version as f64);
    gauge!("chat_ring_members").set(members.len() as f64);
}
