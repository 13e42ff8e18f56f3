//! The versions of rows that have no seq: the states of consumers, devices, their tokens, and the settings of
//! conversations (rule [version]).

use std::sync::Mutex;

use crate::{model::Epoch, store::Version, tasks::lock};

/// The bits of a version that count the writes under one version of the ring.
const COUNTER_BITS: u32 = 32;

/// Gives a version to each write of this gateway. The ring makes one gateway the only writer of a row, and it never gives
/// the same version twice: so of two writes of a row the later one has the higher version, also if the writer changes.
#[derive(Debug, Default)]
pub struct Versions(Mutex<Last>);

#[derive(Debug, Default)]
struct Last {
    ring: Epoch,
    counter: u32,
}

impl Versions {
    /// Returns the version of the ring under which a version was given.
    #[must_use]
    pub fn ring_of(version: Version) -> Epoch {
        version >> COUNTER_BITS
    }

    /// Returns the next version under a version of the ring. `None` if a later one was used already, or if there are no more.
    pub fn next(&self, ring: Epoch) -> Option<Version> {
        let mut last = lock(&self.0);
        if ring > last.ring {
            *last = Last { ring, counter: 0 };
        }
        if ring < last.ring {
            return None;
        }
        last.counter = last.counter.checked_add(1)?;
        Some((ring << COUNTER_BITS) | Version::from(last.counter))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_write_has_a_higher_version() {
        let versions = Versions::default();
        let given = [7, 7, 8, 8, 9].map(|ring| versions.next(ring).unwrap());
        assert!(given.is_sorted_by(|a, b| a < b), "{given:?}");
        assert_eq!(given[0], (7 << 32) + 1);
        assert_eq!(versions.next(8), None, "it began before the ring changed");
        lock(&versions.0).counter = u32::MAX - 1;
        assert_eq!(versions.next(9), Some((10 << 32) - 1));
        assert_eq!(versions.next(9), None, "the next one would be of ring 10");
        assert_eq!(versions.next(10), Some((10 << 32) + 1));
    }
}
