//! The level of a cluster: a number of the stored format and of the messages between gateways.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// A level. Gateways that support less cannot read what a level adds, so nothing of it is written or sent before the
/// ring has that level. Rows and messages without a level mean level 0, the level of all builds before the first one
/// that states a level.
pub type Level = u32;

/// The first level that is stated. The ring's row and the heartbeats have a level, and builds that know no level cannot
/// read the ring's row. Nothing else differs from level 0.
pub const LEVEL_STATED: Level = 1;

/// The level of messages that change: edits, deletions, reactions, and unread counts without system entries.
pub const LEVEL_CHANGES: Level = 2;

/// The level of uploaded files.
pub const LEVEL_FILES: Level = 3;

/// The level of consumers: their offsets, devices, and the settings of conversations.
pub const LEVEL_CONSUMERS: Level = 4;

/// The highest level that this build supports.
pub const LEVEL_MAX: Level = LEVEL_CONSUMERS;

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
