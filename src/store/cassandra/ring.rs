//! The columns of the ring, and of levels.

use scylla::DeserializeRow;
use uuid::Uuid;

use super::columns::unsigned;
use crate::{
    model::{GatewayId, Level},
    store::RingRow,
};

/// The columns of the ring's row.
#[derive(DeserializeRow)]
pub(super) struct RingColumns {
    version: i64,
    members: Option<Vec<Uuid>>,
    /// The id of the change that made this version.
    pub change: Option<Uuid>,
    level: Option<i32>,
}

impl RingColumns {
    pub(super) fn row(self) -> RingRow {
        RingRow {
            version: unsigned(self.version),
            members: self.members.into_iter().flatten().map(GatewayId).collect(),
            level: level_of(self.level),
        }
    }
}

pub(super) fn level_column(level: Level) -> i32 {
    i32::try_from(level).unwrap_or(i32::MAX)
}

pub(super) fn level_of(column: Option<i32>) -> Level {
    column.map_or(0, |level| Level::try_from(level).unwrap_or_default())
}
