//! The least rate at which the body of an upload must come. Without one, a client could hold its place for ever with a
//! byte now and then.

use std::time::Duration;

use tokio::time::Instant;

use crate::model::limits::{UPLOAD_BYTES_PER_SECOND_MIN, UPLOAD_WINDOW};

/// Bytes that must come within a window.
const WINDOW_BYTES: u64 = UPLOAD_BYTES_PER_SECOND_MIN * UPLOAD_WINDOW.as_secs();

/// The bytes of one window of a body.
#[derive(Debug)]
pub struct Pace {
    ends: Instant,
    bytes: u64,
}

impl Pace {
    /// Begins the first window.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            ends: now + UPLOAD_WINDOW,
            bytes: 0,
        }
    }

    /// Counts bytes that have come.
    pub fn add(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// Returns when the window ends.
    #[must_use]
    pub fn ends(&self) -> Instant {
        self.ends
    }

    /// Returns whether enough has come, and begins the next window if this one is over.
    pub fn is_kept(&mut self, now: Instant) -> bool {
        if now < self.ends {
            return true;
        }
        let is_kept = self.bytes >= WINDOW_BYTES;
        *self = Self::new(now);
        is_kept
    }
}

const _: () = assert!(UPLOAD_WINDOW.as_nanos() >= Duration::from_secs(1).as_nanos());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_window_has_enough_bytes_or_is_the_last() {
        let began = Instant::now();
        let mut pace = Pace::new(began);
        pace.add(3);
        assert!(pace.is_kept(began + UPLOAD_WINDOW / 2));
        pace.add(usize::try_from(WINDOW_BYTES).unwrap() - 3);
        let second = began + UPLOAD_WINDOW;
        assert!(pace.is_kept(second));
        // What came in one window does not count in the next.
        assert_eq!(pace.ends(), second + UPLOAD_WINDOW);
        pace.add(usize::try_from(WINDOW_BYTES).unwrap() - 1);
        assert!(!pace.is_kept(second + UPLOAD_WINDOW));
    }
}
