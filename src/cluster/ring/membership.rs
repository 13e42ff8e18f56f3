//! The rules of membership: who is a member, until when this gateway may act, and when it may serve keys that another
//! gateway owned. There is no I/O: `learn` takes what was read. `tests/models/model_ring.py` proves these rules.

use std::collections::{HashMap, VecDeque};

use tokio::time::{Duration, Instant};

use super::view::View;
use crate::{
    model::{ConversationId, Epoch, GatewayId, LEVEL_MAX, Level},
    mutation::{Mutation, broken},
    store::RingRow,
};

/// The time for which a read of the ring's row gives the right to act, from the start of the heartbeat before it.
pub const LEASE: Duration = Duration::from_secs(2);
/// The margin for clocks: those of two machines may run at rates that differ by a tenth.
pub(super) const MARGIN: Duration = Duration::from_millis(200);
/// The time after which a member whose heartbeat has not moved may be removed.
pub(super) const SILENCE: Duration = Duration::from_millis(1_500);

/// The change that a row of the ring made, which was read or came from a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learned {
    /// The version is older or the same, so nothing changed.
    Nothing,
    /// The next version. Keys that are owned under both versions are served without a pause.
    Next,
    /// A later version: some between were missed, so all keys count as newly owned.
    Skipped,
}

/// One gateway's knowledge of the ring.
#[derive(Debug)]
pub struct Membership {
    me: GatewayId,
    ring: View,
    /// The highest level of all versions that were read.
    level: Level,
    /// The time at which `ring` was learned.
    since: Instant,
    /// Earlier versions with the time at which each was learned, oldest first. Those from before the last lease's time are
    /// forgotten.
    before: VecDeque<(Instant, View)>,
    lease_until: Option<Instant>,
    /// The newest version that each peer has announced as adopted.
    adopted: HashMap<GatewayId, Epoch>,
    heard: HashMap<GatewayId, Heard>,
    /// Whether the first known version had no members, and none had been removed shortly before.
    begins_free: bool,
    broken: Option<Rule>,
}

/// A gateway's heartbeat.
#[derive(Debug, Clone, Copy)]
struct Heard {
    counter: u64,
    /// The time at which this counter was first seen.
    moved_at: Instant,
    /// The time at which the newest read of it began.
    read_at: Instant,
}

/// A rule that a test breaks on purpose.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// A gateway waits for all members of a lease's time, not only for those of the version before.
    Recent,
    /// A gateway that missed a version owns everything anew.
    Skip,
    /// A heartbeat proves the end of a lease only if it was read after the newer version was seen.
    Reread,
}

impl Membership {
    /// Begins with the first version that was read.
    #[must_use]
    pub fn new(me: GatewayId, first: &RingRow, now: Instant) -> Self {
        Self {
            me,
            ring: View::new(first.version, first.members.clone()),
            level: first.level,
            since: now,
            before: VecDeque::new(),
            lease_until: None,
            adopted: HashMap::new(),
            heard: HashMap::new(),
            begins_free: false,
            broken: None,
        }
    }

    /// Notes that the last member, which was alone, left the ring gracefully.
    #[must_use]
    pub fn free(self) -> Self {
        Self {
            begins_free: true,
            ..self
        }
    }

    #[doc(hidden)]
    #[must_use]
    pub fn without(mut self, rule: Option<Rule>) -> Self {
        self.broken = rule;
        self
    }

    #[must_use]
    pub fn ring(&self) -> &View {
        &self.ring
    }

    /// Returns the newest version that was read. [level] Its level never falls, even if a peer that knows no levels sent
    /// the version.
    #[must_use]
    pub fn row(&self) -> RingRow {
        RingRow {
            version: self.ring.version(),
            members: self.ring.members().to_vec(),
            level: self.level,
        }
    }

    #[must_use]
    pub fn is_member(&self) -> bool {
        self.ring.members().contains(&self.me)
    }

    /// Learns a row of the ring. `read_at` is the start of the heartbeat before the read; a row from a peer has none, and renews no lease.
    pub fn learn(&mut self, row: &RingRow, read_at: Option<Instant>, now: Instant) -> Learned {
        self.level = self.level.max(row.level);
        let known = self.ring.version();
        let learned = match row.version {
            version if version <= known => Learned::Nothing,
            version if version == known + 1 || self.broken == Some(Rule::Skip) => Learned::Next,
            _ => Learned::Skipped,
        };
        if learned != Learned::Nothing {
            let next = View::new(row.version, row.members.clone());
            let before = std::mem::replace(&mut self.ring, next);
            self.before.push_back((self.since, before));
            self.since = now;
            // The newest of the versions from before the last lease's time was still current in it, so it stays.
            while self
                .before
                .get(1)
                .is_some_and(|(at, _)| *at + LEASE + MARGIN < now)
            {
                self.before.pop_front();
            }
            let rings = self.before.iter().map(|(_, ring)| ring);
            let rings: Vec<&View> = rings.chain([&self.ring]).collect();
            self.heard
                .retain(|gateway, _| rings.iter().any(|r| r.members().contains(gateway)));
        }
        if let Some(read_at) = read_at
            && row.version == self.ring.version()
        {
            let until = read_at + LEASE;
            self.lease_until = self.lease_until.max(Some(until));
        }
        learned
    }

    /// Returns the end of the lease, until which this gateway may act as an owner.
    #[must_use]
    pub fn lease_until(&self) -> Option<Instant> {
        self.lease_until.filter(|_| self.is_member())
    }

    /// Notes that a peer has adopted `version`, so it acts under no older one.
    pub fn adopted(&mut self, peer: GatewayId, version: Epoch) {
        let known = self.adopted.entry(peer).or_default();
        *known = version.max(*known);
    }

    /// Whether newly owned keys may be served now, because no gateway can still act under an older version.
    #[must_use]
    pub fn may_begin(&self, now: Instant) -> bool {
        if broken(Mutation::TakeoverWait) {
            return true;
        }
        if self.is_settled(now) {
            return true;
        }
        let Some((first_at, first)) = self.before.front() else {
            return self.begins_free || self.ring.version() <= 1;
        };
        let recent = |at: Instant| at + LEASE + MARGIN >= now;
        if self.broken != Some(Rule::Recent) && !self.knows_all(first, *first_at, now) {
            return false; // A gateway that does not know all versions of a lease's time waits for that time.
        }
        // Each version was current until the next one was learned.
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
        concerned.all(|member| {
            self.adopted.get(member).copied() >= Some(self.ring.version())
                || self.has_ended(*member, now)
        })
    }

    /// Whether this gateway may begin to own a conversation, because no other gateway can still own it.
    #[must_use]
    pub fn may_own(&self, conversation: ConversationId, now: Instant) -> bool {
        let mine = |ring: &View| ring.owner(conversation) == Some(self.me);
        let all_mine = || {
            let mut before = self.before.iter().map(|(_, ring)| ring);
            let first = self.before.front();
            first.is_some_and(|(at, ring)| self.knows_all(ring, *at, now)) && before.all(mine)
        };
        mine(&self.ring) && (self.may_begin(now) || all_mine())
    }

    /// Whether no version of the last lease's time is unknown.
    fn knows_all(&self, first: &View, first_at: Instant, now: Instant) -> bool {
        let versions = self.before.iter().map(|(_, ring)| ring.version());
        let from_before = first_at + LEASE + MARGIN < now || first.version() <= 1;
        from_before && versions.eq(first.version()..self.ring.version())
    }

    /// Whether a gateway's lease under an older version has certainly ended. A gateway renews its lease by a heartbeat and
    /// then a read of the ring. So if an old heartbeat is read after the newer version was seen, no lease was renewed since
    /// that heartbeat.
    fn has_ended(&self, gateway: GatewayId, now: Instant) -> bool {
        self.heard.get(&gateway).is_some_and(|heard| {
            heard.moved_at + LEASE + MARGIN < now
                && (heard.read_at > self.since || self.broken == Some(Rule::Reread))
        })
    }

    /// Notes a gateway's heartbeat, from a read that began at `read_at`.
    pub fn heard(&mut self, gateway: GatewayId, counter: u64, read_at: Instant, now: Instant) {
        let new = Heard {
            counter,
            moved_at: now,
            read_at,
        };
        let known = self.heard.entry(gateway).or_insert(new);
        if known.counter == counter {
            known.read_at = known.read_at.max(read_at);
        } else if known.counter < counter {
            *known = new;
        }
    }

    /// Notes that heartbeats could not be read for a while, so that no gateway counts as silent because of that.
    pub fn was_deaf(&mut self, now: Instant) {
        for heard in self.heard.values_mut() {
            heard.moved_at = now;
        }
    }

    /// Returns the other members of this version and of the earlier ones that are kept.
    #[must_use]
    pub fn concerned(&self) -> Vec<GatewayId> {
        let mut all: Vec<GatewayId> = self
            .before
            .iter()
            .flat_map(|(_, ring)| ring.members())
            .chain(self.ring.members())
            .copied()
            .filter(|&member| member != self.me)
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Whether a gateway is not a member, and its lease has certainly ended.
    #[must_use]
    pub fn is_over(&self, gateway: GatewayId, now: Instant) -> bool {
        !self.ring.members().contains(&gateway) && self.is_settled(now)
    }

    /// Whether this version is known for so long that every lease under an older one has ended.
    fn is_settled(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) > LEASE + MARGIN
    }

    /// Returns the time at which this version was learned.
    #[must_use]
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Returns the members that have been silent for too long.
    #[must_use]
    pub fn silent(&self, now: Instant) -> Vec<GatewayId> {
        let others = self.ring.members().iter().filter(|&&m| m != self.me);
        let silent = others.filter(|member| {
            let moved = self.heard.get(member).map_or(self.since, |h| h.moved_at);
            now.saturating_duration_since(moved) > SILENCE
        });
        silent.copied().collect()
    }
}

/// Returns the version that raises the level, if all its members support `level`. `supported` is what they announced. It
/// is a version of its own: so if another gateway joins meanwhile, the proposal fails.
///
/// # Errors
/// The members that support less, or have announced nothing.
pub fn raised(
    row: &RingRow,
    level: Level,
    supported: &dyn Fn(GatewayId) -> Option<Level>,
) -> Result<RingRow, Vec<(GatewayId, Option<Level>)>> {
    let announced = row.members.iter().map(|&m| (m, supported(m)));
    let behind: Vec<_> = announced
        .filter(|&(_, supports)| supports < Some(level))
        .collect();
    if !behind.is_empty() {
        return Err(behind);
    }
    let level = level.max(row.level);
    Ok(RingRow {
        level,
        ..row.next(row.members.clone())
    })
}

/// Whether this build may be a member of the ring. [level] What a higher level adds it could not read.
///
/// # Errors
/// The level of the ring.
pub fn may_join(row: &RingRow) -> Result<(), Level> {
    if row.level > LEVEL_MAX {
        return Err(row.level);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::time::Duration;
    use uuid::Uuid;

    use super::*;

    /// Otherwise everything that waits for a gateway that left, and died before it announced that, would wait until the
    /// ring changes again.
    #[test]
    fn a_gateway_that_has_left_is_over_once_its_lease_is() {
        let [me, other] = [1, 2].map(|id| GatewayId(Uuid::from_u128(id)));
        let row = |version, members: &[GatewayId]| RingRow {
            version,
            members: members.to_vec(),
            level: 0,
        };
        let began = Instant::now();
        let mut membership = Membership::new(me, &row(1, &[me, other]), began);
        membership.learn(&row(2, &[me]), None, began);
        let over = began + LEASE + MARGIN + Duration::from_millis(1);
        assert!(!membership.is_over(other, began + LEASE) && !membership.is_over(me, over));
        assert!(membership.is_over(other, over));
        // Its link stays known and closed, so that it cannot connect again unless it is in the ring.
        assert_eq!(membership.concerned(), [other]);
    }

    #[test]
    fn a_level_is_not_lost_if_a_peer_does_not_send_it() {
        let me = GatewayId(Uuid::from_u128(1));
        let row = |version, level| RingRow {
            version,
            members: vec![me],
            level,
        };
        let now = Instant::now();
        let mut membership = Membership::new(me, &row(1, 1), now);
        membership.learn(&row(2, 0), None, now);
        assert_eq!(membership.row(), row(2, 1));
        membership.learn(&row(2, 2), Some(now), now);
        assert_eq!(membership.row(), row(2, 2), "the store knows the level");
    }

    #[test]
    fn a_level_rises_only_if_all_members_support_it() {
        let [one, two] = [1, 2].map(|id| GatewayId(Uuid::from_u128(id)));
        let row = RingRow {
            version: 4,
            members: vec![one, two],
            level: 1,
        };
        let supported = |of_two| move |member| if member == one { Some(3) } else { of_two };
        assert_eq!(raised(&row, 3, &supported(None)), Err(vec![(two, None)]));
        assert_eq!(
            raised(&row, 3, &supported(Some(2))),
            Err(vec![(two, Some(2))])
        );
        let next = raised(&row, 2, &supported(Some(2))).unwrap();
        assert_eq!((next.version, next.level), (5, 2));
        assert_eq!(next.members, row.members);
    }

    #[test]
    fn a_build_joins_no_ring_above_its_level() {
        let row = |level| RingRow {
            version: 1,
            members: Vec::new(),
            level,
        };
        assert_eq!(may_join(&row(0)), Ok(()));
        assert_eq!(may_join(&row(LEVEL_MAX)), Ok(()));
        assert_eq!(may_join(&row(LEVEL_MAX + 1)), Err(LEVEL_MAX + 1));
    }
}
