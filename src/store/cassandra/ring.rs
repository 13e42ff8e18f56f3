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
    /// The id of the change that made this version, below level 1.
    proposal: Option<Uuid>,
    /// The id of the change that made this version, from level 1 on.
    change: Option<Uuid>,
    level: Option<i32>,
}

impl RingColumns {
    /// Returns the id of the change that made this version. A build without a level leaves a `change` as it is, but it
    /// can write only below level 1, where `change` is null.
    pub(super) fn made_by(&self) -> Option<Uuid> {
        self.change.or(self.proposal)
    }

    pub(super) fn row(self) -> RingRow {
        RingRow {
            version: unsigned(self.version),
            members: self.members.into_iter().flatten().map(GatewayId).collect(),
            level: level_of(self.level),
        }
    }
}

/// Returns the column of a level. Level 0 is null, as in rows of builds that know no level.
pub(super) fn level_column(level: Level) -> Option<i32> {
    (level > 0).then(|| i32::try_from(level).unwrap_or(i32::MAX))
}

pub(super) fn level_of(column: Option<i32>) -> Level {
    column.map_or(0, |level| Level::try_from(level).unwrap_or_default())
}
