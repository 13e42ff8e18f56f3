//! Keeps this gateway's membership: reads the ring's row, writes the heartbeat, watches those of the others, and grants the
//! [`Lease`] accordingly. The rules are in `membership.rs`; this is the I/O around them.
//!
//! On the embedded store there is no other gateway. Each start makes a new version, so that the epochs in the log's keys
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
    membership::{LEASE, Learned, Membership, SILENCE, may_join},
    raise::raised,
    view::View,
    view_changes::{ViewChanges, ViewListener},
};
use crate::{
    chat::{Conversations, Lease, Owns},
    model::{ConversationId, CurrentLevel, Epoch, GatewayId, LEVEL_MAX},
    store::{self, Heartbeat, RingRow, Store},
    tasks::lock,
};

/// The interval between renewals of the lease.
const RENEW_EVERY: Duration = Duration::from_millis(500);
/// The interval between reads of the others' heartbeats.
const LISTEN_EVERY: Duration = Duration::from_millis(250);
/// The pause between attempts to become a member.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// A listener of the ring. It is told of each version at once, in order.
pub(crate) trait Adopt: Send + Sync {
    fn adopt(&self, before: &View, after: &View, learned: Learned);
}

/// Keeps this gateway in the ring.
pub struct MembershipAgent {
    me: GatewayId,
    /// The address at which peers reach this gateway. Empty if it takes no peers.
    address: String,
    store: Arc<dyn Store>,
    lease: Lease,
    rules: Arc<Mutex<Membership>>,
    ring: Arc<ArcSwap<View>>,
    level: CurrentLevel,
    /// The version adopted last. It also wakes tasks when something may have become possible.
    changes: Arc<ViewChanges>,
    addresses: Mutex<BTreeMap<GatewayId, String>>,
    beats: AtomicU64,
    /// The conversations, some of which end when a version moves them, and the other listener of the ring. It is locked
    /// while a version is adopted, so that versions are adopted one after the other.
    listeners: Mutex<Listeners>,
    /// A token for each conversation that was lost. It is cancelled when the owner has stopped.
    losing: Mutex<Vec<CancellationToken>>,
    removed: CancellationToken,
    /// Whether this gateway leaves. Then it adopts a version without itself only when all conversations are closed.
    leaving: AtomicBool,
    gone: Vec<GatewayId>,
}

/// The listener is weak, because it refers to the agent.
type Listeners = Option<(Conversations, Weak<dyn Adopt>)>;

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
            listeners: Mutex::default(),
            losing: Mutex::default(),
            removed: CancellationToken::new(),
            leaving: AtomicBool::new(false),
            gone,
        }
    }

    /// Sets the listeners, which are told of each version from now on.
    pub(crate) fn give(&self, conversations: Conversations, adopt: Weak<dyn Adopt>) {
        *lock(&self.listeners) = Some((conversations, adopt));
    }

    /// Keeps the membership. Returns when another gateway has removed this one.
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

    /// Renews the lease. Then it raises the ring, if something that is stored has a newer epoch: rule [epoch-above].
    async fn renew_once(&self) -> store::Result<()> {
        self.renew_lease().await?;
        let (row, newer) = (self.row(), self.lease.newer());
        if newer <= row.version || may_join(&row).is_err() {
            return Ok(());
        }
        tracing::error!(
            gateway = %self.me, version = row.version, stored = newer,
            "the ring is older than what is stored, as after a restore; raising it"
        );
        counter!("chat_ring_raised_total").increment(1);
        self.propose_row(&row, raised(&row, newer)).await
    }

    /// Writes a heartbeat, and then reads the ring. In this order, a gateway that reads an old heartbeat after it saw a new
    /// version knows that no lease was renewed since that heartbeat.
    async fn renew_lease(&self) -> store::Result<()> {
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
        // Writes that were in progress when the lease ended may still land, so the next ones need a new epoch.
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

    /// Watches the others' heartbeats, and removes gateways that are silent.
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

    /// Proposes a version without these gateways.
    pub(crate) async fn remove(&self, gateways: &[GatewayId], reason: &str) {
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
        self.propose_row(before, before.next(members.to_vec()))
            .await
    }

    async fn propose_row(&self, before: &RingRow, next: RingRow) -> store::Result<()> {
        if may_join(before).is_err() {
            return Ok(()); // This gateway ends, see `learn_level`.
        }
        if self.store.propose_ring(Some(before), &next).await? {
            self.learn(&next, None);
        }
        Ok(())
    }

    /// Adopts a version of the ring, which was read from the store at `read_at` or came from a peer.
    pub(crate) fn learn(&self, row: &RingRow, read_at: Option<Instant>) {
        if self.leaving.load(Ordering::Acquire) && !row.members.contains(&self.me) {
            return;
        }
        let listeners = lock(&self.listeners);
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
        // Conversations that are opened from here on are checked against the new version. An open one stays only if this
        // gateway owns it under both.
        if let Some((conversations, adopt)) = &*listeners {
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
        drop(listeners);
        if was_member && !is_member {
            tracing::warn!(gateway = %self.me, version = after.version(), "removed from the ring");
            self.removed.cancel();
        }
        self.changes.adopted(after.version());
    }

    /// Adopts the level of the ring. If this build does not support it, this gateway ends as if it had been removed, and then does
    /// not start. The reason is a write by hand, or that the level rose while this gateway was paused outside the ring.
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

    /// Waits until the owners of all lost conversations have stopped.
    pub(crate) async fn let_go(&self) {
        let lost = std::mem::take(&mut *lock(&self.losing));
        let mut going: FuturesUnordered<_> =
            lost.iter().map(CancellationToken::cancelled).collect();
        while going.next().await.is_some() {}
    }

    /// Notes that a peer acts under no version older than this.
    pub(crate) fn peer_adopted(&self, peer: GatewayId, version: Epoch) {
        self.rules().adopted(peer, version);
        self.wake();
    }

    fn owns(&self) -> Owns {
        let rules = self.rules.clone();
        Arc::new(move |id: ConversationId| lock(&rules).may_own(id, Instant::now()))
    }

    /// Wakes the tasks that wait for the ring, because something may have become possible.
    pub(crate) fn wake(&self) {
        self.changes.tell();
    }

    /// Returns the gateways that must be told of a new version.
    pub(crate) fn concerned(&self) -> Vec<GatewayId> {
        self.rules().concerned()
    }

    /// Whether a gateway is not a member, and its lease has certainly ended.
    pub(crate) fn is_over(&self, gateway: GatewayId) -> bool {
        self.rules().is_over(gateway, Instant::now())
    }

    /// Returns a listener that wakes when a version is adopted, or when something may have become possible.
    pub(crate) fn view_changes(&self) -> ViewListener {
        self.changes.listen()
    }

    /// Whether no gateway can still act under an older version.
    #[must_use]
    pub fn may_begin(&self) -> bool {
        self.rules().may_begin(Instant::now())
    }

    #[must_use]
    pub fn me(&self) -> GatewayId {
        self.me
    }

    /// Returns the current view of the ring, which is replaced as a whole and is read without a lock.
    #[must_use]
    pub fn ring(&self) -> Arc<ArcSwap<View>> {
        self.ring.clone()
    }

    pub(crate) fn row(&self) -> RingRow {
        self.rules().row()
    }

    /// Returns the members of the ring besides this gateway.
    pub(crate) fn others(&self) -> Vec<GatewayId> {
        let mut members = self.row().members;
        members.retain(|&member| member != self.me);
        members
    }

    /// Returns the level of the ring, which rises while the gateway runs.
    #[must_use]
    pub fn level(&self) -> CurrentLevel {
        self.level.clone()
    }

    /// Returns the addresses of the gateways that this one watches.
    pub(crate) fn addresses(&self) -> BTreeMap<GatewayId, String> {
        lock(&self.addresses).clone()
    }

    #[must_use]
    pub fn lease(&self) -> Lease {
        self.lease.clone()
    }

    /// Returns the members of the version before, and others that were not repaired, if this gateway is alone. Their
    /// conversations may need repair.
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
