//! The wall clock, for times that people see: `at`, `last_seen`, token expiry. Nothing is ordered by it alone: inboxes are
//! in the order of ranks, which `chat/ranks.rs` gives.

use std::{
    cell::Cell,
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::time::Instant;
use uuid::Uuid;

use crate::model::{MessageId, Millis, Rank};

/// Returns the time in milliseconds since 1970, UTC.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the one place that asks")]
pub fn wall() -> Millis {
    if let Some(simulated) = SIMULATED.get() {
        return simulated.now();
    }
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Millis::try_from(since.as_millis()).unwrap_or(Millis::MAX)
}

/// Returns the days since 1970, UTC.
#[must_use]
pub fn today() -> u32 {
    u32::try_from(wall() / 86_400_000).unwrap_or_default()
}

/// Returns the minutes since 1970, UTC.
#[must_use]
pub fn minute() -> u32 {
    u32::try_from(wall() / 60_000).unwrap_or_default()
}

thread_local! {
    static SIMULATED: Cell<Option<Simulated>> = const { Cell::new(None) };
}

#[derive(Clone, Copy)]
struct Simulated {
    began: Instant,
    seed: u64,
    /// By how much the clock is wrong on purpose.
    ahead: Millis,
}

impl Simulated {
    fn now(self) -> Millis {
        let passed = Millis::try_from(self.began.elapsed().as_millis()).unwrap_or(Millis::MAX);
        let turn = self.seed.wrapping_add(passed.unsigned_abs() / 1000);
        let wrong = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        1_800_000_000_000
            + self.ahead
            + passed
            + Millis::try_from(wrong % 10_000).unwrap_or_default()
    }
}

/// Simulates the wall clock on this thread. It follows tokio's paused time, with an error of up to ten seconds that
/// changes every second.
pub fn simulate(seed: u64) {
    let began = Instant::now();
    let ahead = 0;
    SIMULATED.set(Some(Simulated { began, seed, ahead }));
}

/// Sets the simulated wall clock ahead by this time, or back with zero.
pub fn set_ahead(ahead: Millis) {
    SIMULATED.set(SIMULATED.get().map(|clock| Simulated { ahead, ..clock }));
}

/// The ranks between 1582 and 1970: see [`Rank`].
const RANKS_BEFORE_1970: Rank = 122_192_928_000_000_000;
/// The ranks in a millisecond.
const RANKS_PER_MS: Rank = 10_000;

/// Returns the lowest rank of a millisecond.
#[must_use]
pub fn rank(at: Millis) -> Rank {
    let at = u64::try_from(at).unwrap_or_default();
    at.saturating_mul(RANKS_PER_MS)
        .saturating_add(RANKS_BEFORE_1970)
}

/// Returns the millisecond of a rank.
#[must_use]
pub fn time_of(rank: Rank) -> Millis {
    let passed = rank.saturating_sub(RANKS_BEFORE_1970) / RANKS_PER_MS;
    Millis::try_from(passed).unwrap_or(Millis::MAX)
}

/// Returns a time UUID for a message of this time. It is for messages whose rank was not given by the clock of ranks.
#[must_use]
pub fn message_id(at: Millis) -> MessageId {
    message_id_at(rank(at).saturating_add(rand::random_range(0..RANKS_PER_MS)))
}

/// Returns a time UUID with this rank. Its random node and sequence make it unique, not the clock.
#[must_use]
pub fn message_id_at(rank: Rank) -> MessageId {
    with_rank(rank, rand::random())
}

/// Returns the time UUID with this rank that another UUID makes unique: always the same.
#[must_use]
pub fn message_id_of(rank: Rank, unique: Uuid) -> MessageId {
    let (_, low) = unique.as_u64_pair();
    with_rank(rank, low)
}

fn with_rank(rank: Rank, random: u64) -> MessageId {
    let node: [u8; 6] = std::array::from_fn(|i| random.to_le_bytes()[i]);
    let counter = u16::try_from(random >> 50).unwrap_or_default();
    let time = uuid::Timestamp::from_gregorian_time(rank, counter);
    MessageId(Uuid::new_v1(time, &node))
}
