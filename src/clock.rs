//! The wall clock, for times that people see: `at`, `last_seen`, token expiry. Nothing is ordered by it.

use std::{
    cell::Cell,
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::time::Instant;

use crate::model::{MessageId, Millis};

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
}

impl Simulated {
    fn now(self) -> Millis {
        let passed = Millis::try_from(self.began.elapsed().as_millis()).unwrap_or(Millis::MAX);
        let turn = self.seed.wrapping_add(passed.unsigned_abs() / 1000);
        let wrong = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        1_800_000_000_000 + passed + Millis::try_from(wrong % 10_000).unwrap_or_default()
    }
}

/// Simulates the wall clock on this thread. It follows tokio's paused time, with an error of up to ten seconds that
/// changes every second.
pub fn simulate(seed: u64) {
    let began = Instant::now();
    SIMULATED.set(Some(Simulated { began, seed }));
}

/// Returns a time UUID for a message stored at `at`. Its random node and sequence make it unique, not the clock.
#[must_use]
pub fn message_id(at: Millis) -> MessageId {
    let at = u64::try_from(at).unwrap_or_default();
    let random: u128 = rand::random();
    let node: [u8; 6] = std::array::from_fn(|i| random.to_le_bytes()[i]);
    let nanos = u32::try_from(at % 1000).unwrap_or_default() * 1_000_000;
    // The ticks below the clock's millisecond, of 100 ns each, are random too.
    let ticks = u32::try_from((random >> 64) % 10_000).unwrap_or_default() * 100;
    let counter = u16::try_from((random >> 100) & 0x3fff).unwrap_or_default();
    let time = uuid::Timestamp::from_unix_time(at / 1000, nanos + ticks, u128::from(counter), 14);
    MessageId(uuid::Uuid::new_v1(time, &node))
}
