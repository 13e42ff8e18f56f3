//! Whether the sockets of a topic are written to at once, or frames are queued for them.

use std::sync::atomic::{AtomicU64, Ordering};

/// Each queued frame shortens what is remembered of the time that writing took by this part of it.
const FORGET: u64 = 256;
/// The last rest is this part of the average: after two or three frames close together the next is queued.
const MEMORY: u64 = 4;
/// As long as it takes at least to write to a few sockets and to wake a session: entries that were committed together
/// are queued, and go out together.
const TOOK_US_MIN: u64 = 100;

/// Whether the sockets of a topic are written to at once, or frames are queued for them. Writing at once saves a
/// wake-up for each; queueing lets a session write many frames in one go. So as long as there is rest between one
/// frame and the next, on average for at least half as long as all the writes take, frames are written at once.
pub(super) struct Pace {
    /// Of the last frame's last write or push. Microseconds, as the next.
    ended_us: AtomicU64,
    /// How long the last frame took that was written at once.
    took_us: AtomicU64,
    /// Rests beside that time, at most as long each; a moving average. Thousandths.
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
    /// How long it is since the last frame.
    pub(super) fn since_us(&self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.ended_us.load(Ordering::Relaxed))
    }

    pub(super) fn rests(&self, now_us: u64) -> bool {
        let took = self.took_us.load(Ordering::Relaxed).max(TOOK_US_MIN);
        let rest = self.since_us(now_us).min(took) * 1_000 / took;
        let average = (self.rest.load(Ordering::Relaxed) * (MEMORY - 1) + rest) / MEMORY;
        self.rest.store(average, Ordering::Relaxed);
        average >= 500
    }

    pub(super) fn wrote(&self, began_us: u64, now_us: u64) {
        self.took_us.store(now_us - began_us, Ordering::Relaxed);
        self.ended_us.store(now_us, Ordering::Relaxed);
    }

    /// One that took long once, because it was interrupted, is forgotten bit by bit.
    pub(super) fn queued(&self, now_us: u64) {
        let took = self.took_us.load(Ordering::Relaxed);
        self.took_us.store(took - took / FORGET, Ordering::Relaxed);
        self.ended_us.store(now_us, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of frames that each take 1 ms, and come so long after the last one has ended: which are written at once?
    fn written_at_once(rests_us: impl IntoIterator<Item = u64>) -> Vec<bool> {
        let (pace, mut now) = (Pace::default(), 0);
        let at_once = |rest_us| {
            now += rest_us;
            let at_once = pace.rests(now);
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
