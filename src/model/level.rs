//! The level of a cluster: a number of the stored format and of the messages between gateways.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// A level. Gateways that support less cannot read what a level adds, so nothing of it is written or sent before the
/// ring has that level. The first one is 1.
pub type Level = u32;

/// The highest level that this build supports.
pub const LEVEL_MAX: Level = 1;

/// The level of the ring that this gateway has read last. It never falls. Clones share the value.
#[derive(Clone, Debug, Default)]
pub struct CurrentLevel(Arc<AtomicU32>);

impl CurrentLevel {
    /// Returns a level that was read.
    #[must_use]
    pub fn of(level: Level) -> Self {
        Self(Arc::new(AtomicU32::new(level)))
    }

    /// Returns the level. It is one atomic read.
    #[must_use]
    pub fn get(&self) -> Level {
        self.0.load(Ordering::Acquire)
    }

    /// Raises the level. A lower one changes nothing.
    pub fn raise(&self, level: Level) {
        self.0.fetch_max(level, Ordering::AcqRel);
    }
}
