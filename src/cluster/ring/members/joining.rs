//! How a gateway becomes a member of the ring, or its only one.

use std::sync::Arc;

use tokio::time::{Instant, sleep, sleep_until};

use super::{MembershipAgent, RETRY_AFTER};
use crate::{
    chat::Lease,
    cluster::{
        ring::{
            membership::{LEASE, MARGIN, Membership, SILENCE, may_join},
            status::someone_alive,
        },
        wire::network::Network,
    },
    model::{GatewayId, LEVEL_MAX, Level},
    store::{self, RingRow, Store},
};

/// The reason why this process is not a member.
#[derive(Debug, thiserror::Error)]
pub enum NotJoined {
    #[error("gateway {0} is running on this store")]
    Taken(GatewayId),
    #[error("gateway {0} is running on this store alone: it has no cluster.enabled")]
    TakenAlone(GatewayId),
    #[error("another gateway took this store while this one was starting")]
    Overtaken,
    #[error(
        "the store has level {0}, and this build supports levels up to {LEVEL_MAX}, so it cannot read everything that is \
         stored. A newer build has raised the level, and it never falls. Start a build that supports level {0}"
    )]
    Level(Level),
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl MembershipAgent {
    /// Makes this process the ring's only member, under a version of its own. It may act as soon as this returns.
    ///
    /// # Errors
    /// When the store cannot be read or written, or another gateway is using it.
    pub async fn alone(store: Arc<dyn Store>) -> Result<Self, NotJoined> {
        let me = GatewayId(uuid::Uuid::now_v7());
        if !store.is_shared() {
            // [level] No other gateway uses the store, so the level rises by itself.
            let (row, before) = Self::propose_alone(&*store, me, Some(LEVEL_MAX)).await?;
            let rules = Membership::new(me, &row, Instant::now());
            let lease = Lease::unbounded(row.version);
            let gone = unrepaired(&*store, members_of(before)).await?;
            return Ok(Self::new(me, String::new(), store, lease, rules, gone));
        }
        if let Some((other, _)) = someone_alive(&*store).await? {
            return Err(NotJoined::Taken(other));
        }
        let (row, before) = Self::propose_alone(&*store, me, None).await?;
        let gone = members_of(before);
        let mut rules = Membership::new(me, &row, Instant::now());
        if gone.is_empty() {
            rules = rules.free();
        } else {
            tracing::info!("waiting until a gateway that may still be there has lost its lease");
        }
        let gone = unrepaired(&*store, gone).await?;
        let members = Self::new(me, String::new(), store, Lease::none(), rules, gone);
        members.renew_until_owner().await?;
        Ok(members)
    }

    /// Becomes one of the ring's members.
    ///
    /// # Errors
    /// When the store cannot be read or written, or a gateway without a cluster is using it.
    pub async fn join(
        store: Arc<dyn Store>,
        me: GatewayId,
        address: String,
        network: &dyn Network,
    ) -> Result<Self, NotJoined> {
        let alone = someone_alive(&*store).await?;
        if let Some((other, _)) = alone.filter(|(_, address)| address.is_empty()) {
            return Err(NotJoined::TakenAlone(other));
        }
        let first = store.ring().await?;
        let fresh = first.is_none();
        if let Some(first) = &first {
            may_join(first).map_err(NotJoined::Level)?;
        }
        let nobody = RingRow {
            version: 0,
            members: Vec::new(),
            level: 0,
        };
        let began = Instant::now();
        let rules = Membership::new(me, &first.unwrap_or(nobody), began);
        let members = Self::new(me, address, store, Lease::none(), rules, Vec::new());
        // A gateway that knows all versions of a lease's time can take over as soon as it has joined. So it watches first.
        // A failed read does no harm: a missed version shows by its number.
        while !fresh && began.elapsed() <= LEASE + MARGIN {
            if let Err(error) = members.beat().await.and(members.read_ring().await) {
                tracing::info!(%error, "the ring could not be read");
            }
            sleep(RETRY_AFTER).await;
        }
        while let Err(error) = members.enter(network).await {
            let NotJoined::Store(error) = error else {
                return Err(error);
            };
            tracing::info!(%error, "the ring could not be joined yet");
            sleep(RETRY_AFTER).await;
        }
        Ok(members)
    }

    /// Proposes versions with this gateway until one is made. After an unknown outcome, the next read shows it.
    async fn enter(&self, network: &dyn Network) -> Result<(), NotJoined> {
        self.beat().await?;
        loop {
            self.read_ring().await?;
            let row = self.row();
            may_join(&row).map_err(NotJoined::Level)?;
            if row.members.contains(&self.me) {
                return Ok(());
            }
            for &member in &row.members {
                self.reach(member, network).await?;
            }
            let with_me: Vec<GatewayId> = row.members.iter().copied().chain([self.me]).collect();
            if row.version > 0 {
                self.propose(&row, &with_me).await?;
            } else {
                let first = RingRow::first(with_me);
                if self.store.propose_ring(None, &first).await? {
                    self.learn(&first, None);
                }
            }
        }
    }

    /// Checks that a member can be reached, as a gateway that joins must reach all of them. A dead member does not count.
    async fn reach(&self, member: GatewayId, network: &dyn Network) -> store::Result<()> {
        let Some(beat) = self.store.heartbeat(member).await? else {
            return Ok(());
        };
        if network.connect(&beat.address).await.is_ok() {
            return Ok(());
        }
        sleep(SILENCE).await;
        let still = self.store.heartbeat(member).await?;
        if still.is_none_or(|still| still.counter == beat.counter) {
            return Ok(());
        }
        Err(store::Error::Unavailable {
            operation: "join",
            reason: format!("gateway {member} at {} cannot be reached", beat.address),
        })
    }

    /// Proposes a version with only this gateway, until one is made. Returns it and the one before.
    async fn propose_alone(
        store: &dyn Store,
        me: GatewayId,
        level: Option<Level>,
    ) -> Result<(RingRow, Option<RingRow>), NotJoined> {
        loop {
            let before = store.ring().await?;
            let mut row = match &before {
                Some(before) => before.next(vec![me]),
                None => RingRow::first(vec![me]),
            };
            may_join(&row).map_err(NotJoined::Level)?;
            row.level = row.level.max(level.unwrap_or_default());
            if store.propose_ring(before.as_ref(), &row).await? {
                return Ok((row, before));
            }
            sleep(RETRY_AFTER).await;
        }
    }

    /// Renews the lease until this gateway may act for everything.
    async fn renew_until_owner(&self) -> Result<(), NotJoined> {
        loop {
            let began = Instant::now();
            self.renew_once().await?;
            if self.removed.is_cancelled() {
                return Err(NotJoined::Overtaken);
            }
            if self.rules().may_begin(Instant::now()) && self.lease.holds(Instant::now()) {
                return Ok(());
            }
            sleep_until(began + RETRY_AFTER).await;
        }
    }
}

fn members_of(ring: Option<RingRow>) -> Vec<GatewayId> {
    ring.map(|ring| ring.members).unwrap_or_default()
}

/// Adds all other gateways that left notes for crash repair: a process that repaired for them may have ended before it was done.
async fn unrepaired(
    store: &dyn Store,
    mut gone: Vec<GatewayId>,
) -> Result<Vec<GatewayId>, NotJoined> {
    let active = store.active_gateways().await?;
    let others: Vec<_> = active.into_iter().filter(|id| !gone.contains(id)).collect();
    gone.extend(others);
    Ok(gone)
}

#[cfg(test)]
mod tests {
    use std::io;

    use futures_util::future::BoxFuture;
    use tokio::time::Duration;

    use super::*;
    use crate::{
        cluster::{
            ring::finalize::{Finalized, finalize},
            wire::network::Connection,
        },
        store::{
            embedded::Embedded,
            simulated::{Faults, Simulated},
        },
    };

    struct NoNetwork;

    #[async_trait::async_trait]
    impl Network for NoNetwork {
        async fn connect(&self, _: &str) -> io::Result<Connection> {
            Err(io::ErrorKind::NotConnected.into())
        }

        async fn accept(&self) -> io::Result<BoxFuture<'static, io::Result<Connection>>> {
            Err(io::ErrorKind::NotConnected.into())
        }

        fn close(&self) {}
    }

    async fn ring(store: &dyn Store, level: Level) -> RingRow {
        let before = store.ring().await.unwrap();
        let next = RingRow {
            version: before.as_ref().map_or(0, |row| row.version) + 1,
            members: Vec::new(),
            level,
        };
        assert!(store.propose_ring(before.as_ref(), &next).await.unwrap());
        next
    }

    #[tokio::test]
    async fn a_directory_is_raised_by_itself_and_refused_above_the_level_of_the_build() {
        let directory = tempfile::tempdir().unwrap();
        let open = || Arc::new(Embedded::open(directory.path(), 1 << 20).unwrap());
        let store = open();
        ring(&*store, 0).await;
        let members = MembershipAgent::alone(store.clone()).await.unwrap();
        assert_eq!(members.level().get(), LEVEL_MAX);
        assert_eq!(store.ring().await.unwrap().unwrap().level, LEVEL_MAX);
        let above = ring(&*store, LEVEL_MAX + 1).await;
        drop(members);
        store.close().await.unwrap();
        drop(store);

        let store = open();
        let Err(error) = MembershipAgent::alone(store.clone()).await else {
            panic!("it starts");
        };
        assert!(matches!(error, NotJoined::Level(level) if level == LEVEL_MAX + 1));
        let text = error.to_string();
        assert!(
            text.starts_with("the store has level 2, and this build supports levels up to 1"),
            "{text}"
        );
        assert_eq!(
            store.ring().await.unwrap(),
            Some(above),
            "nothing was written"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_gateway_does_not_join_above_its_level() {
        let store = Arc::new(Simulated::new(1, Faults::NONE));
        let above = ring(&*store, LEVEL_MAX + 1).await;
        let me = GatewayId(uuid::Uuid::from_u128(1));
        let joined = MembershipAgent::join(store.clone(), me, "here".into(), &NoNetwork).await;
        assert!(matches!(joined, Err(NotJoined::Level(_))));
        let alone = MembershipAgent::alone(store.clone()).await;
        assert!(matches!(alone, Err(NotJoined::Level(_))));
        assert_eq!(
            store.ring().await.unwrap(),
            Some(above),
            "nothing was written"
        );
        assert_eq!(store.heartbeat(me).await.unwrap(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_store_begins_with_the_highest_level() {
        let store = Arc::new(Simulated::new(1, Faults::NONE));
        let me = GatewayId(uuid::Uuid::from_u128(1));
        let joined = MembershipAgent::join(store.clone(), me, "here".into(), &NoNetwork).await;
        assert_eq!(joined.unwrap().level().get(), LEVEL_MAX);
        let row = store.ring().await.unwrap().unwrap();
        assert_eq!(row, RingRow::first(vec![me]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_level_rises_while_a_gateway_runs_and_ends_one_that_does_not_support_it() {
        let store = Arc::new(Simulated::new(1, Faults::NONE));
        ring(&*store, 0).await;
        let members = MembershipAgent::alone(store.clone()).await.unwrap();
        assert_eq!(
            members.level().get(),
            0,
            "on a store that is shared it does not rise by itself"
        );
        let epoch = members.lease().epoch();
        let finalized = finalize(&*store).await.unwrap();
        let (from, count) = (0, 1);
        assert_eq!(
            finalized,
            Finalized::Raised {
                from,
                members: count
            }
        );
        members.renew_once().await.unwrap();
        assert_eq!(members.level().get(), LEVEL_MAX);
        assert!(members.lease().holds(Instant::now()) && members.lease().epoch() == epoch + 1);

        let row = store.ring().await.unwrap().unwrap();
        let above = RingRow {
            level: LEVEL_MAX + 1,
            ..row.next(row.members.clone())
        };
        assert!(store.propose_ring(Some(&row), &above).await.unwrap());
        members.renew_once().await.unwrap();
        assert!(!members.lease().holds(Instant::now()));
        tokio::time::timeout(Duration::from_secs(1), members.keep())
            .await
            .unwrap();
        members.leave(async {}).await;
        assert_eq!(
            store.ring().await.unwrap(),
            Some(above),
            "it proposes nothing any more"
        );
    }
}
