//! Simulates `tests/models/model_ring.py` with the real rules. Gateways join, leave, crash, pause and are removed,
//! reads of the ring row are slow, and announcements of versions arrive late. The test checks that once a gateway has
//! acted for a key under a version, no other gateway acts for that key under an older one.
//!
//! The gateways are of three builds, which support level 1, 2 or 3. Operators finalize at
//! any moment. The test checks that no gateway acts, or is a member, above the level that it supports, and that the level
//! never falls.
//!
//! Every choice comes from the seed. `RING_SEEDS=10000 cargo test --release --test all ring` runs more seeds.

use std::collections::{BTreeMap, BinaryHeap};

use chat_gateway::{
    cluster::{LEASE, Learned, Membership, Rule, raised},
    model::{ConversationId, Epoch, GatewayId, Level},
    store::RingRow,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::time::{Duration, Instant};
use uuid::Uuid;

use crate::broken::{find, require};

/// Between two reads of the ring.
const POLL: Duration = Duration::from_millis(500);
/// Between two reads of the others' heartbeats.
const LISTEN: Duration = Duration::from_millis(250);
/// Between two acts for a key.
const SERVE: Duration = Duration::from_millis(30);
const KEYS: usize = 12;

/// The rule that is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// A newly owned key is served at once.
    Wait,
    /// A lease begins at the end of the read instead of its start.
    Start,
    /// The ring is read before the heartbeat is written.
    Beat,
    Rule(Rule),
    /// The level rises without asking what the members support.
    Unasked,
    /// The level rises without a new version, so a gateway that joins meanwhile is not noticed.
    Unversioned,
    /// A gateway joins a ring above the level that it supports.
    Join,
}

type Step = Box<dyn FnOnce(&mut World)>;

struct Event(Instant, u64, Step);

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.1 == other.1
    }
}
impl Eq for Event {}
impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.0, other.1).cmp(&(self.0, self.1))
    }
}

struct Gateway {
    id: GatewayId,
    /// The highest level that it supports.
    supports: Level,
    membership: Option<Membership>,
    /// The keys that it serves.
    ready: [bool; KEYS],
    dead: bool,
    leaving: bool,
    paused_until: Instant,
    /// Heartbeats written.
    beats: u64,
}

struct World {
    random: StdRng,
    /// What concerns levels has its own source, so that the other choices of a seed stay the same.
    levels: StdRng,
    /// Decides when a version goes beyond an epoch that is stored, so that versions are left out.
    raises: StdRng,
    began: Instant,
    now: Instant,
    events: BinaryHeap<Event>,
    number: u64,
    ring: RingRow,
    gateways: Vec<Gateway>,
    keys: [ConversationId; KEYS],
    /// For each key the newest version that a gateway acted under, and that gateway.
    acted: BTreeMap<usize, (Epoch, GatewayId)>,
    broken: Broken,
    findings: Vec<String>,
    checks: u64,
}

impl World {
    fn new(seed: u64, broken: Broken) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let now = Instant::now();
        let first = GatewayId(Uuid::from_u128(1));
        let keys = std::array::from_fn(|_| ConversationId(Uuid::from_u128(random.random())));
        let mut world = Self {
            random,
            levels: StdRng::seed_from_u64(seed),
            raises: StdRng::seed_from_u64(!seed),
            began: now,
            now,
            events: BinaryHeap::new(),
            number: 0,
            ring: RingRow {
                version: 1,
                members: vec![first],
                level: 1,
            },
            gateways: Vec::new(),
            keys,
            acted: BTreeMap::new(),
            broken,
            findings: Vec::new(),
            checks: 0,
        };
        for _ in 0..3 {
            world.spawn();
        }
        world.after(Duration::from_secs(3), Self::churn);
        world.after(Duration::from_secs(5), Self::operate);
        world
    }

    fn after(&mut self, delay: Duration, step: impl FnOnce(&mut Self) + 'static) {
        self.number += 1;
        let event = Event(self.now + delay, self.number, Box::new(step));
        self.events.push(event);
    }

    fn run(&mut self, length: Duration) {
        let end = self.now + length;
        while let Some(Event(at, _, step)) = self.events.pop() {
            if at > end {
                return;
            }
            self.now = at;
            step(self);
        }
    }

    fn below(&mut self, most: usize) -> usize {
        self.random.random_range(0..most)
    }

    fn delay(&mut self) -> Duration {
        Duration::from_millis([2, 5, 5, 20, 20, 100, 400, 1200][self.below(8)])
    }

    fn spawn(&mut self) {
        let g = self.gateways.len();
        // Later gateways are of later builds, mostly.
        let newest = (self.now - self.began).as_secs() / 15;
        let supports = 1 + self.levels.random_range(0..=newest.min(2)) as Level;
        self.gateways.push(Gateway {
            id: GatewayId(Uuid::from_u128(g as u128 + 1)),
            supports,
            membership: None,
            ready: [false; KEYS],
            dead: false,
            leaving: false,
            paused_until: self.now,
            beats: 0,
        });
        let delay = self.delay();
        self.after(delay, move |w| w.poll(g));
        self.after(delay, move |w| w.listen(g));
        self.after(Duration::from_millis(10), move |w| w.serve(g));
    }

    fn churn(&mut self) {
        let live: Vec<usize> = (0..self.gateways.len())
            .filter(|&g| !self.gateways[g].dead)
            .collect();
        let one = live[self.below(live.len())];
        match self.below(100) {
            0..35 if live.len() < 6 => self.spawn(),
            35..42 if live.len() > 2 => self.gateways[one].dead = true,
            42..65 => {
                let pause = Duration::from_millis(self.random.random_range(300..6_000));
                self.gateways[one].paused_until = self.now + pause;
            }
            65..80 if live.len() > 1 => self.leave(one),
            _ => {}
        }
        let next = Duration::from_millis([50, 300, 1_000, 3_000, 6_000][self.below(5)]);
        self.after(next, Self::churn);
    }

    /// Somebody tries to raise the level to 2 or 3.
    fn operate(&mut self) {
        let level = self.levels.random_range(2..=3);
        self.finalize(level);
        let next = Duration::from_millis([50, 1_000, 4_000][self.levels.random_range(0..3)]);
        self.after(next, Self::operate);
    }

    fn finalize(&mut self, level: Level) {
        let row = self.ring.clone();
        if row.level >= level {
            return;
        }
        let unasked = self.broken == Broken::Unasked;
        let supports = |id: GatewayId| {
            let member = self.gateways.iter().find(|g| g.id == id);
            member.map(|g| if unasked { level } else { g.supports })
        };
        let Ok(next) = raised(&row, level, &supports) else {
            return;
        };
        let there = Duration::from_millis(self.levels.random_range(2..1_500));
        self.after(there, move |w| {
            if w.broken == Broken::Unversioned {
                w.ring.level = level;
            } else if w.ring.version == row.version {
                w.change(next);
            }
        });
    }

    /// Makes a version and announces it.
    fn change(&mut self, row: RingRow) {
        if row.level < self.ring.level {
            let (from, to) = (self.ring.level, row.level);
            self.findings
                .push(format!("the level falls from {from} to {to}"));
        }
        for gateway in &self.gateways {
            if row.members.contains(&gateway.id) && row.level > gateway.supports {
                let (id, supports, level) = (gateway.id, gateway.supports, row.level);
                self.findings.push(format!(
                    "{id} supports level {supports} and is a member at level {level}"
                ));
            }
        }
        self.ring = row;
        for g in 0..self.gateways.len() {
            let (row, delay) = (self.ring.clone(), self.delay());
            self.after(delay, move |w| w.news(g, row));
        }
    }

    /// Whether the gateway can run a step now. If it is paused, the step is scheduled for when it wakes.
    fn runs(&mut self, g: usize, again: fn(&mut Self, usize)) -> bool {
        let Gateway {
            dead, paused_until, ..
        } = self.gateways[g];
        if !dead && paused_until > self.now {
            self.after(paused_until - self.now, move |w| again(w, g));
        }
        !dead && paused_until <= self.now
    }

    /// Reads the others' heartbeats.
    fn listen(&mut self, g: usize) {
        if !self.runs(g, Self::listen) {
            return;
        }
        let began = self.now;
        let there = self.delay();
        self.after(there, move |w| {
            let beats: Vec<_> = w.gateways.iter().map(|o| (o.id, o.beats)).collect();
            let back = w.delay();
            w.after(back, move |w| w.hear(g, beats, began));
        });
    }

    fn hear(&mut self, g: usize, beats: Vec<(GatewayId, u64)>, began: Instant) {
        let (now, paused_until) = (self.now, self.gateways[g].paused_until);
        if paused_until > now {
            self.after(paused_until - now, move |w| w.hear(g, beats, began));
            return;
        }
        if let Some(membership) = &mut self.gateways[g].membership {
            let concerned = membership.concerned();
            for (other, counter) in beats {
                if concerned.contains(&other) {
                    membership.heard(other, counter, began, now);
                }
            }
        }
        self.after(LISTEN, move |w| w.listen(g));
    }

    /// Writes the heartbeat and then reads the ring. Together they renew the lease.
    fn poll(&mut self, g: usize) {
        if !self.runs(g, Self::poll) {
            return;
        }
        let began = self.now;
        let (beat_there, beat_back) = (self.delay(), self.delay());
        self.after(beat_there, move |w| w.gateways[g].beats += 1);
        let before = match self.broken {
            Broken::Beat => Duration::ZERO,
            _ => beat_there + beat_back,
        };
        let there = self.delay();
        self.after(before, move |w| {
            if w.gateways[g].dead {
                return;
            }
            // A paused process sends the read when it wakes.
            let asleep = w.gateways[g].paused_until.saturating_duration_since(w.now);
            w.after(asleep + there, move |w| {
                let row = w.ring.clone();
                let back = w.delay();
                w.after(back, move |w| w.read(g, row, began));
            });
        });
    }

    fn read(&mut self, g: usize, row: RingRow, began: Instant) {
        let paused_until = self.gateways[g].paused_until;
        if self.gateways[g].dead {
            return;
        }
        if paused_until > self.now {
            self.after(paused_until - self.now, move |w| w.read(g, row, began));
            return;
        }
        let counts_from = if self.broken == Broken::Start {
            self.now
        } else {
            began
        };
        self.learn(g, &row, Some(counts_from));
        let gateway = &mut self.gateways[g];
        let Some(membership) = &mut gateway.membership else {
            return;
        };
        let (id, supports, row) = (gateway.id, gateway.supports, membership.row());
        let members = membership.ring().members().to_vec();
        if !membership.is_member() && !gateway.leaving {
            // `may_join`, with the level of this gateway.
            let may_join = row.level <= supports || self.broken == Broken::Join;
            let joined = members.iter().copied().chain([id]).collect();
            if self.below(10) < 7 && may_join {
                self.propose(row, joined);
            }
        } else {
            let silent = membership.silent(self.now);
            if !silent.is_empty() && self.below(2) == 0 {
                self.propose(
                    row,
                    members
                        .into_iter()
                        .filter(|m| !silent.contains(m))
                        .collect(),
                );
            }
        }
        self.after(POLL, move |w| w.poll(g));
    }

    fn leave(&mut self, g: usize) {
        let gateway = &mut self.gateways[g];
        gateway.leaving = true;
        let Some(membership) = &gateway.membership else {
            return;
        };
        let (id, ring, row) = (gateway.id, membership.ring().clone(), membership.row());
        if ring.members().contains(&id) && ring.members().len() > 1 {
            let others = ring
                .members()
                .iter()
                .copied()
                .filter(|&m| m != id)
                .collect();
            self.propose(row, others);
        }
    }

    /// Proposes the version after `before`.
    fn propose(&mut self, before: RingRow, members: Vec<GatewayId>) {
        let there = self.delay();
        self.after(there, move |w| {
            let mut next = before.next(members);
            if w.broken == Broken::Nothing && w.raises.random_bool(0.1) {
                next.version += w.raises.random_range(1..8);
            }
            if w.ring.version == before.version {
                w.change(next);
            }
        });
    }

    /// Takes in a version that a peer announced, which renews no lease.
    fn news(&mut self, g: usize, row: RingRow) {
        let Gateway {
            dead, paused_until, ..
        } = self.gateways[g];
        if !dead && paused_until > self.now {
            self.after(paused_until - self.now, move |w| w.news(g, row));
        } else if !dead {
            self.learn(g, &row, None);
        }
    }

    fn learn(&mut self, g: usize, row: &RingRow, read_at: Option<Instant>) {
        let (now, broken) = (self.now, self.broken);
        let gateway = &mut self.gateways[g];
        let id = gateway.id;
        let Some(membership) = &mut gateway.membership else {
            let rule = match broken {
                Broken::Rule(rule) => Some(rule),
                _ => None,
            };
            let mut membership = Membership::new(id, row, now).without(rule);
            membership.learn(row, read_at, now);
            gateway.membership = Some(membership);
            return;
        };
        let before = membership.ring().clone();
        let learned = membership.learn(row, read_at, now);
        if learned == Learned::Nothing {
            return;
        }
        let after = membership.ring();
        for (ready, key) in gateway.ready.iter_mut().zip(&self.keys) {
            let stays = before.owner(*key) == Some(id) && after.owner(*key) == Some(id);
            *ready &= learned == Learned::Next && stays;
        }
        let version = after.version();
        for other in 0..self.gateways.len() {
            let delay = self.delay();
            self.after(delay, move |w| {
                if !w.gateways[other].dead
                    && let Some(membership) = &mut w.gateways[other].membership
                {
                    membership.adopted(id, version);
                }
            });
        }
    }

    /// Acts for every key that the gateway owns, and checks that no other has acted under a newer version.
    fn serve(&mut self, g: usize) {
        if !self.runs(g, Self::serve) {
            return;
        }
        let (now, broken) = (self.now, self.broken);
        let gateway = &mut self.gateways[g];
        if let Some(membership) = &gateway.membership
            && membership.lease_until().is_some_and(|until| now < until)
        {
            let version = membership.ring().version();
            let (level, supports) = (membership.row().level, gateway.supports);
            if level > supports {
                self.findings.push(format!(
                    "{} supports level {supports} and acts at level {level}",
                    gateway.id
                ));
            }
            for (k, key) in self.keys.iter().enumerate() {
                if membership.ring().owner(*key) != Some(gateway.id) {
                    continue;
                }
                gateway.ready[k] |= broken == Broken::Wait || membership.may_own(*key, now);
                if !gateway.ready[k] {
                    continue;
                }
                self.checks += 1;
                let newest = self.acted.entry(k).or_insert((version, gateway.id));
                if newest.0 > version && newest.1 != gateway.id {
                    self.findings.push(format!(
                        "key {k}: {} acts under {version}, but {} has acted under {}",
                        gateway.id, newest.1, newest.0
                    ));
                }
                *newest = (*newest).max((version, gateway.id));
            }
        }
        self.after(SERVE, move |w| w.serve(g));
    }
}

fn simulate(seed: u64, broken: Broken) -> World {
    let mut world = World::new(seed, broken);
    world.run(Duration::from_secs(60));
    world
}

#[test]
fn no_two_gateways_act_for_one_conversation() {
    let seeds = std::env::var("RING_SEEDS")
        .ok()
        .and_then(|text| text.parse().ok());
    let (mut checks, mut versions, mut raised) = (0, 0, [0; 3]);
    for seed in 0..seeds.unwrap_or(300) {
        let world = simulate(seed, Broken::Nothing);
        checks += world.checks;
        versions += world.ring.version;
        raised[world.ring.level as usize - 1] += 1;
        assert!(
            world.findings.is_empty(),
            "seed {seed}: {:?}",
            world.findings[0]
        );
    }
    println!(
        "{checks} acts under a lease of {LEASE:?}, {versions} ring versions, last levels {raised:?}"
    );
    assert!(raised.iter().all(|&runs| runs > 10), "{raised:?}");
    assert!(
        checks > 100_000 && versions > 1_000,
        "too few acts or versions to prove anything: {checks}, {versions}"
    );
}

#[test]
fn each_broken_rule_of_the_ring_is_found() {
    let rules = [
        Broken::Wait,
        Broken::Start,
        Broken::Beat,
        Broken::Rule(Rule::Recent),
        Broken::Rule(Rule::Skip),
        Broken::Rule(Rule::Reread),
        Broken::Unasked,
        Broken::Unversioned,
        Broken::Join,
    ];
    require(rules.map(|broken| {
        let kinds: &[&str] = match broken {
            Broken::Unasked | Broken::Join => {
                &[" and acts at level ", " and is a member at level "]
            }
            // The next version, which is made of the one before it, has the level of before.
            Broken::Unversioned => &["the level falls from "],
            Broken::Nothing | Broken::Wait | Broken::Start | Broken::Beat | Broken::Rule(_) => {
                &[" has acted under "]
            }
        };
        find(broken, 0..4_000, kinds, |seed, is_broken| {
            let rule = if is_broken { broken } else { Broken::Nothing };
            simulate(seed, rule).findings
        })
    }));
}
