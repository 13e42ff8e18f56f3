//! Who is a member, until when this gateway may act, and when it may begin to own what another one owned.
//! No I/O: `learn` takes what was read, the rest answers questions. `tests/models/model_ring.py` proves these rules.

use std::collections::{HashMap, VecDeque};

use tokio::time::{Duration, Instant};

use super::ring::Ring;
use crate::{
    model::{Epoch, GatewayId},
    store::RingRow,
};

/// How long a read of the ring row gives the right to act, from the read's start.
pub const LEASE: Duration = Duration::from_secs(2);
/// Clocks of two machines may run at rates that differ by a tenth.
pub(super) const MARGIN: Duration = Duration::from_millis(200);
/// A member whose heartbeat has not moved for so long may be removed.
pub(super) const SILENCE: Duration = Duration::from_millis(1_500);

/// What a read of the ring row, or news from a peer, has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learned {
    /// An older version, or the same one.
    Nothing,
    /// The version after the one before: what is owned under both goes on without pause.
    Next,
    /// Versions between were missed: everything is newly owned.
    Skipped,
}

/// One gateway's knowledge of the ring.
#[derive(Debug)]
pub struct Membership {
    me: GatewayId,
    ring: Ring,
    /// When `ring` was learned.
    since: Instant,
    /// Versions before, with the moment each was learned, oldest first; older than a lease are forgotten.
    before: VecDeque<(Instant, Ring)>,
    lease_until: Option<Instant>,
    /// The newest version that each peer says it has adopted.
    adopted: HashMap<GatewayId, Epoch>,
    /// Each member's heartbeat, and when it was last seen to move.
    heard: HashMap<GatewayId, (u64, Instant)>,
    broken: Option<Rule>,
}

/// What a test breaks on purpose.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// All members of a lease's time are waited for, not only those of the version before.
    Recent,
    /// Who missed a version owns everything anew.
    Skip,
}

impl Membership {
    /// Begins with the first version that it read.
    #[must_use]
    pub fn new(me: GatewayId, first: &RingRow, now: Instant) -> Self {
        Self {
            me,
            ring: Ring::new(first.version, first.members.clone()),
            since: now,
            before: VecDeque::new(),
            lease_until: None,
            adopted: HashMap::new(),
            heard: HashMap::new(),
            broken: None,
        }
    }

    #[doc(hidden)]
    #[must_use]
    pub fn without(mut self, rule: Option<Rule>) -> Self {
        self.broken = rule;
        self
    }

    #[must_use]
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    #[must_use]
    pub fn is_member(&self) -> bool {
        self.ring.members().contains(&self.me)
    }

    /// Takes in a ring row. `read_at` is when a read of the row began; news from a peer has none, and gives no lease.
    pub fn learn(&mut self, row: &RingRow, read_at: Option<Instant>, now: Instant) -> Learned {
        let known = self.ring.version();
        let learned = match row.version {
            version if version <= known => Learned::Nothing,
            version if version == known + 1 || self.broken == Some(Rule::Skip) => Learned::Next,
            _ => Learned::Skipped,
        };
        if learned != Learned::Nothing {
            let next = Ring::new(row.version, row.members.clone());
            let before = std::mem::replace(&mut self.ring, next);
            self.before.push_back((self.since, before));
            self.since = now;
            // The newest one from before the last lease's time was current in it.
            while self
                .before
                .get(1)
                .is_some_and(|(at, _)| *at + LEASE + MARGIN < now)
            {
                self.before.pop_front();
            }
            let members = self.ring.members();
            self.heard.retain(|gateway, _| members.contains(gateway));
        }
        if let Some(read_at) = read_at
            && row.version == self.ring.version()
        {
            let until = read_at + LEASE;
            self.lease_until = self.lease_until.max(Some(until));
        }
        learned
    }

    /// Until when this gateway may act as an owner.
    #[must_use]
    pub fn lease_until(&self) -> Option<Instant> {
        self.lease_until.filter(|_| self.is_member())
    }

    /// A peer says that it has adopted `version`: it acts under no older one any more.
    pub fn adopted(&mut self, peer: GatewayId, version: Epoch) {
        let known = self.adopted.entry(peer).or_default();
        *known = version.max(*known);
    }

    /// Whether something newly owned may be served now: nobody can still act under an older version.
    #[must_use]
    pub fn may_begin(&self, now: Instant) -> bool {
        if now.saturating_duration_since(self.since) > LEASE + MARGIN {
            return true;
        }
        let Some((first_at, first)) = self.before.front() else {
            return false;
        };
        let recent = |at: Instant| at + LEASE + MARGIN >= now;
        if self.broken != Some(Rule::Recent) {
            let knows_all = !recent(*first_at) || first.version() <= 1;
            let versions = self.before.iter().map(|(_, ring)| ring.version());
            if !knows_all || !versions.eq(first.version()..self.ring.version()) {
                return false; // Who knows not every version of a lease's time waits that time.
            }
        }
        // Each was current until the next one was learned.
        let ends = self.before.iter().skip(1).map(|(at, _)| *at);
        let ends = ends.chain([self.since]);
        let last = self.before.len() - 1;
        let mut concerned = self
            .before
            .iter()
            .zip(ends)
            .enumerate()
            .filter(|&(index, (_, end))| match self.broken {
                Some(Rule::Recent) => index == last,
                _ => recent(end),
            })
            .flat_map(|(_, ((_, ring), _))| ring.members())
            .filter(|&&member| member != self.me);
        concerned.all(|member| self.adopted.get(member).copied() >= Some(self.ring.version()))
    }

    /// A member's heartbeat was read.
    pub fn heard(&mut self, member: GatewayId, counter: u64, now: Instant) {
        let known = self.heard.entry(member).or_insert((counter, now));
        if known.0 != counter {
            *known = (counter, now);
        }
    }

    /// A member that has been silent for too long.
    #[must_use]
    pub fn silent(&self, now: Instant) -> Option<GatewayId> {
        let long = |at: Instant| now.saturating_duration_since(at) > SILENCE;
        let others = self.ring.members().iter().filter(|&&m| m != self.me);
        let mut silent = others.filter(|member| {
            let moved = self.heard.get(member).map_or(self.since, |(_, at)| *at);
            long(moved) && long(self.since)
        });
        silent.next().copied()
    }
}
