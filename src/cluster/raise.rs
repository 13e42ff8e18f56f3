//! Raises the version of the ring beyond every epoch that may be stored: after a restore, or in another datacenter.

use crate::{
    model::{Epoch, LEVEL_MAX},
    store::{self, RingRow, Store},
};

/// By how much the version rises: more than a ring changes between a backup and its restore, and little beside the
/// 400,000 versions that ScyllaDB allows (docs/storage.md, Versions).
pub(super) const RAISE_BY: Epoch = 1 << 14;
/// The highest version, because the version is the upper half of the write timestamps of some rows.
const VERSION_MAX: Epoch = (1 << 31) - RAISE_BY;
/// The number of attempts, if the ring changes during each of them.
const ATTEMPTS: usize = 10;

/// The reason why the version did not rise.
#[derive(Debug, thiserror::Error)]
pub enum NotRaised {
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
        let before = store.ring().await?;
        // Of a restore without the ring.
        let nobody = || RingRow {
            version: 0,
            members: Vec::new(),
            level: LEVEL_MAX,
        };
        let row = before.clone().unwrap_or_else(nobody);
        if row.version + RAISE_BY > VERSION_MAX {
            return Err(NotRaised::TooHigh(row.version));
        }
        let next = row.beyond(row.version + RAISE_BY - 1);
        if store.propose_ring(before.as_ref(), &next).await? {
            return Ok((row.version, next.version));
        }
    }
    Err(NotRaised::Unsteady)
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
        assert_eq!(raise_ring(&store).await.unwrap(), (0, RAISE_BY));
        let before = store.ring().await.unwrap();
        let members = vec![GatewayId(uuid::Uuid::from_u128(1))];
        let next = before.as_ref().unwrap().next(members.clone());
        assert!(store.propose_ring(before.as_ref(), &next).await.unwrap());
        let raised = raise_ring(&store).await.unwrap();
        assert_eq!(raised, (RAISE_BY + 1, 2 * RAISE_BY + 1));
        assert_eq!(store.ring().await.unwrap().unwrap().members, members);

        let before = store.ring().await.unwrap();
        let last = before.as_ref().unwrap().beyond(VERSION_MAX - RAISE_BY);
        assert!(store.propose_ring(before.as_ref(), &last).await.unwrap());
        let refused = raise_ring(&store).await;
        assert!(matches!(refused, Err(NotRaised::TooHigh(_))), "{refused:?}");
    }
}
