//! Raises the level of the ring once all its members support a higher one: the end of an upgrade.

use std::{collections::HashMap, time::Duration};

use tokio::time::sleep;

use super::membership::{LEASE, MARGIN, may_join, raised};
use crate::{
    model::{GatewayId, LEVEL_MAX, Level},
    store::{self, Store},
};

/// The number of attempts, if the ring changes during each of them.
const ATTEMPTS: usize = 10;
/// The pause between two attempts.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// The result of [`finalize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finalized {
    /// The level rose.
    Raised { from: Level, members: usize },
    /// The ring had this level already.
    Already,
}

/// The reason why a level did not rise.
#[derive(Debug, thiserror::Error)]
pub enum NotFinalized {
    #[error(
        "no gateway has ever run on this store, so there is nothing to finalize. Its first gateway gives it the highest level"
    )]
    Empty,
    #[error(
        "the ring has level {0}, and this build supports levels up to {LEVEL_MAX}. Use the build that the gateways run"
    )]
    Newer(Level),
    #[error(
        "the level stays {level}: not all gateways support level {LEVEL_MAX}.{}\nReplace these gateways by this build, or stop \
         them, and run this command again",
        listed(.behind)
    )]
    Behind {
        level: Level,
        /// The members that support less, or of which the store has no heartbeat.
        behind: Vec<(GatewayId, Option<Level>)>,
    },
    #[error(
        "the ring changed {ATTEMPTS} times meanwhile. Run this command again when no gateway starts or stops"
    )]
    Unsteady,
    #[error(transparent)]
    Store(#[from] store::Error),
}

fn listed(behind: &[(GatewayId, Option<Level>)]) -> String {
    let line = |(gateway, supports): &(GatewayId, Option<Level>)| match supports {
        Some(level) => format!("\n  {gateway} supports level {level}"),
        None => format!("\n  {gateway} has not been heard of"),
    };
    behind.iter().map(line).collect()
}

/// Raises the level of the ring to the highest one that this build supports. [level] It rises only if all members
/// support it. The check needs only the store, so no gateway has to answer.
///
/// # Errors
/// The reason why the level stays as it is.
pub async fn finalize(store: &dyn Store) -> Result<Finalized, NotFinalized> {
    for _ in 0..ATTEMPTS {
        let row = store.ring().await?.ok_or(NotFinalized::Empty)?;
        may_join(&row).map_err(NotFinalized::Newer)?;
        if row.level == LEVEL_MAX {
            return Ok(Finalized::Already);
        }
        let mut supported = HashMap::new();
        for &member in &row.members {
            if let Some(beat) = store.heartbeat(member).await? {
                supported.insert(member, beat.level);
            }
        }
        let supports = |member| supported.get(&member).copied();
        let next = raised(&row, LEVEL_MAX, &supports).map_err(|behind| NotFinalized::Behind {
            level: row.level,
            behind,
        })?;
        // A gateway that this version of the ring removed may act until its lease has ended, and its build may be older.
        sleep(LEASE + MARGIN).await;
        if store.propose_ring(Some(&row), &next).await? {
            let (from, members) = (row.level, row.members.len());
            return Ok(Finalized::Raised { from, members });
        }
        sleep(RETRY_AFTER).await;
    }
    Err(NotFinalized::Unsteady)
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::store::{
        Heartbeat, RingRow,
        simulated::{Faults, Simulated},
    };

    async fn ring(store: &Simulated, level: Level, members: &[GatewayId]) {
        let before = store.ring().await.unwrap();
        let next = RingRow {
            version: before.as_ref().map_or(0, |row| row.version) + 1,
            members: members.to_vec(),
            level,
        };
        assert!(store.propose_ring(before.as_ref(), &next).await.unwrap());
    }

    async fn beat(store: &Simulated, gateway: GatewayId, level: Level) {
        let beat = Heartbeat {
            address: String::new(),
            counter: 1,
            level,
        };
        store.beat(gateway, &beat).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_level_rises_when_the_last_member_supports_it() {
        let store = Simulated::new(1, Faults::NONE);
        let empty = finalize(&store).await;
        assert!(matches!(empty, Err(NotFinalized::Empty)));
        let [old, new, silent] = [1, 2, 3].map(|id| GatewayId(uuid::Uuid::from_u128(id)));
        ring(&store, 0, &[old, new, silent]).await;
        beat(&store, old, 0).await;
        beat(&store, new, LEVEL_MAX).await;
        let error = finalize(&store).await.unwrap_err();
        let NotFinalized::Behind { level: 0, behind } = &error else {
            panic!("{error}");
        };
        assert_eq!(behind, &[(old, Some(0)), (silent, None)]);
        let text = error.to_string();
        assert!(text.contains(&format!("{old} supports level 0")), "{text}");
        assert!(
            text.contains(&format!("{silent} has not been heard of")),
            "{text}"
        );
        assert!(!text.contains(&new.to_string()), "{text}");
        assert_eq!(store.ring().await.unwrap().unwrap().level, 0);

        ring(&store, 0, &[new]).await;
        let begin = Instant::now();
        let raised = finalize(&store).await.unwrap();
        assert!(
            begin.elapsed() >= LEASE + MARGIN,
            "a removed gateway may still act"
        );
        let (from, members) = (0, 1);
        assert_eq!(raised, Finalized::Raised { from, members });
        let row = store.ring().await.unwrap().unwrap();
        assert_eq!(
            (row.version, row.level, row.members),
            (3, LEVEL_MAX, vec![new])
        );
        assert_eq!(finalize(&store).await.unwrap(), Finalized::Already);
    }

    #[tokio::test]
    async fn an_earlier_build_does_not_finalize() {
        let store = Simulated::new(1, Faults::NONE);
        ring(&store, LEVEL_MAX + 1, &[]).await;
        let error = finalize(&store).await.unwrap_err();
        assert!(matches!(error, NotFinalized::Newer(level) if level == LEVEL_MAX + 1));
    }
}
