//! Raises the version of the ring beyond every epoch that may be stored: after a restore, or in another datacenter.

use crate::{
    model::{Epoch, limits::RING_RAISE},
    store::{self, RingRow, Store},
};

/// The highest version, because the version is the upper half of the write timestamps of some rows.
const VERSION_MAX: Epoch = (1 << 31) - RING_RAISE;
/// The number of attempts, if the ring changes during each of them.
const ATTEMPTS: usize = 10;

/// The reason why the version did not rise.
#[derive(Debug, thiserror::Error)]
pub enum NotRaised {
    #[error(
        "no gateway has ever run on this store, so there is nothing to raise. Restore the ring with the other tables"
    )]
    Empty,
    #[error("the ring has version {0}, and the highest one is {VERSION_MAX}")]
    TooHigh(Epoch),
    #[error("the ring changed {ATTEMPTS} times meanwhile. Run this command again")]
    Unsteady,
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// Raises the version of the ring, and returns the versions before and after. Gateways that run lose nothing: they take
/// over their conversations anew, which takes as long as after a version that they have missed.
///
/// # Errors
/// The reason why the version stays as it is.
pub async fn raise_ring(store: &dyn Store) -> Result<(Epoch, Epoch), NotRaised> {
    for _ in 0..ATTEMPTS {
        let row = store.ring().await?.ok_or(NotRaised::Empty)?;
        let next = raised(&row, row.version);
        if next.version > VERSION_MAX {
            return Err(NotRaised::TooHigh(row.version));
        }
        if store.propose_ring(Some(&row), &next).await? {
            return Ok((row.version, next.version));
        }
    }
    Err(NotRaised::Unsteady)
}

/// Returns a version far beyond an epoch that is stored, with the same members. Not the next one: others may be stored that
/// are a little higher, and an epoch that is used again looks like the owner's own.
pub(crate) fn raised(row: &RingRow, stored: Epoch) -> RingRow {
    let mut next = row.next(row.members.clone());
    next.version = row.version.max(stored) + RING_RAISE;
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::GatewayId,
        store::simulated::{Faults, Simulated},
    };

    #[tokio::test(start_paused = true)]
    async fn the_version_rises_and_the_members_stay() {
        let store = Simulated::new(1, Faults::NONE);
        let empty = raise_ring(&store).await;
        assert!(matches!(empty, Err(NotRaised::Empty)), "{empty:?}");
        let members = vec![GatewayId(uuid::Uuid::from_u128(1))];
        let first = RingRow::first(members.clone());
        assert!(store.propose_ring(None, &first).await.unwrap());
        let versions = raise_ring(&store).await.unwrap();
        assert_eq!(versions, (1, RING_RAISE + 1));
        let before = store.ring().await.unwrap().unwrap();
        assert_eq!(before.members, members);
        let last = raised(&before, VERSION_MAX - RING_RAISE);
        assert!(store.propose_ring(Some(&before), &last).await.unwrap());
        let refused = raise_ring(&store).await;
        assert!(matches!(refused, Err(NotRaised::TooHigh(_))), "{refused:?}");
    }
}
