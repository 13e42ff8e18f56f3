//! The choice between writing frames to a topic's sockets at once and queueing them.

use std::sync::atomic::{AtomicU64, Ordering};

/// The part of `took_us` by which each queued frame reduces it: one in this many.
const TOOK_DECAY_DIVISOR: u64 = 256;
/// The weight of the latest pause in the average: one part in this many. After two or three frames in quick succession,
/// frames are queued.
const AVERAGE_DIVISOR: u64 = 4;
/// The least duration of a write, in microseconds: about that of writing to a few sockets and waking a session. Entries
/// that were committed together are therefore queued, and leave together.
const TOOK_US_MIN: u64 = 100;

/// The choice between writing frames to a topic's sockets at once and queueing them. A write at once saves waking each
/// session; queueing lets a session write many frames in one call. Frames are written at once while the pauses between
/// them are on average at least half as long as the writes to all sockets.
pub(super) struct Pace {
    /// The time of the last write or push, in microseconds.
    ended_us: AtomicU64,
    /// The duration of the last frame's writes, in microseconds.
    took_us: AtomicU64,
    /// A moving average of the pauses, in thousandths of `took_us`. Each counts as 1000 at most.
    rest: AtomicU64,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            ended_us: AtomicU64::default(),
            took_us: AtomicU64::default(),
            rest: AtomicU64::new(1_000),
        }
    }
}

impl Pace {
    /// Returns the time since the last frame, in microseconds.
    fn since_us(&self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.ended_us.load(Ordering::Relaxed))
    }

    /// Records the pause before a frame. Returns true if the frame should be written at once, false if it should be
    /// queued.
    pub(super) fn record_and_decide(&self, now_us: u64) -> bool {
        let took = self.took_us.load(Ordering::Relaxed).max(TOOK_US_MIN);
        let rest = self.since_us(now_us).min(took) * 1_000 / took;
        let average =
            (self.rest.load(Ordering::Relaxed) * (AVERAGE_DIVISOR - 1) + rest) / AVERAGE_DIVISOR;
        self.rest.store(average, Ordering::Relaxed);
        average >= 500
    }

    pub(super) fn wrote(&self, began_us: u64, now_us: u64) {
        self.took_us.store(now_us - began_us, Ordering::Relaxed);
        self.ended_us.store(now_us, Ordering::Relaxed);
    }

    /// Records that a frame was queued. It reduces `took_us` slowly, so that one interrupted write has no lasting
    /// effect.
    pub(super) fn queued(&self, now_us: u64) {
        let took = self.took_us.load(Ordering::Relaxed);
        self.took_us
            .store(took - took / TOOK_DECAY_DIVISOR, Ordering::Relaxed);
        self.ended_us.store(now_us, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns which frames are written at once, if each takes 1 ms and follows the last one after one of these pauses.
    fn written_at_once(rests_us: impl IntoIterator<Item = u64>) -> Vec<bool> {
        let (pace, mut now) = (Pace::default(), 0);
        let at_once = |rest_us| {
            now += rest_us;
            let at_once = pace.record_and_decide(now);
            if at_once {
                pace.wrote(now, now + 1_000);
                now += 1_000;
            } else {
                pace.queued(now);
            }
            at_once
        };
        rests_us.into_iter().map(at_once).collect()
    }

    #[test]
    fn a_frame_that_comes_early_once_is_written_at_once_a_rush_is_queued() {
        assert!(
            written_at_once([600; 100])
                .into_iter()
                .all(|at_once| at_once)
        );
        let sometimes = (0..100).map(|n| if n % 3 == 0 { 0 } else { 2_000 });
        assert!(
            written_at_once(sometimes)
                .into_iter()
                .all(|at_once| at_once)
        );
        let rush = written_at_once([2_000].into_iter().chain([100; 20]));
        assert!(rush[..3].iter().all(|at_once| *at_once));
        assert!(rush[4..].iter().all(|at_once| !at_once));
        let after = written_at_once([100; 20].into_iter().chain([2_000; 4]));
        assert_eq!(after[20..], [false, false, true, true]);
    }
}
