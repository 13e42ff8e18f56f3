//! One gateway process: builds the rooms bottom-up, starts them, and stops them in reverse. The only file
//! that knows all of them.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use metrics_exporter_prometheus::PrometheusHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    auth::Tokens,
    chat::{Conversations, InboxWriter},
    cluster::{Delivery, Home, Members, Router},
    config::{Config, StoreKind},
    fanout::Hub,
    gateway::{self, Gateway},
    store::{Store, embedded::Embedded},
    tasks::Tasks,
};

/// Between two sweeps of the store.
const SWEEP_EVERY: Duration = Duration::from_secs(300);
/// Between two rounds of upkeep: metrics, forgotten addresses.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// A gateway that is up.
pub struct Node {
    pub client_address: SocketAddr,
    pub internal_address: SocketAddr,
    store: Arc<dyn Store>,
    members: Members,
    conversations: Conversations,
    inbox: Arc<InboxWriter>,
    gateway: Arc<Gateway>,
    drain: crate::config::Drain,
    /// Sessions and listeners; they end first.
    edge: Tasks,
    /// Conversations; they end when no session is left to ask them anything.
    core: Tasks,
    /// What only supports the others.
    upkeep: Tasks,
}

impl Node {
    /// Starts a gateway. When it returns, clients can connect.
    ///
    /// # Errors
    /// Whatever keeps it from starting, in words for the operator.
    pub async fn start(config: &Config, metrics: PrometheusHandle) -> anyhow::Result<Self> {
        let (edge, core, upkeep) = (Tasks::default(), Tasks::default(), Tasks::default());
        // Read from top to bottom: each line needs only lines above it; receiving starts last.
        let tokens = Tokens::new(config)?;
        let store = open_store(config).await?;
        let members = Members::alone(&*store).await?;
        let hub = Arc::new(Hub::default());
        let home = Arc::new(Home::new(store.clone()));
        let delivery = Arc::new(Delivery::new(hub.clone(), home.clone()));
        let inbox = Arc::new(InboxWriter::new(store.clone()));
        let conversations = Conversations::new(
            members.me(),
            store.clone(),
            delivery,
            inbox.clone(),
            members.lease(),
            config.conversations(),
            core.clone(),
        );
        for &gone in members.gone() {
            conversations.repair(gone).await?;
        }
        let router = Router::new(
            members.me(),
            members.ring(),
            store.clone(),
            conversations.clone(),
            home.clone(),
            hub.clone(),
        );
        let gateway = Arc::new(Gateway::new(
            config,
            router,
            hub,
            tokens,
            edge.clone(),
            metrics.clone(),
        ));

        let flushing = inbox.clone();
        upkeep.spawn(until_drained(upkeep.clone(), async move {
            flushing.run().await
        }));
        upkeep.spawn(until_drained(upkeep.clone(), turn_overlay(home)));
        upkeep.spawn(until_drained(
            upkeep.clone(),
            keep_up(gateway.clone(), metrics),
        ));
        upkeep.spawn(until_drained(upkeep.clone(), sweep(store.clone())));

        let client = gateway::bind(config.client.listen)
            .map_err(|e| anyhow::anyhow!("client.listen {}: {e}", config.client.listen))?;
        let internal = gateway::bind(config.internal.listen)
            .map_err(|e| anyhow::anyhow!("internal.listen {}: {e}", config.internal.listen))?;
        let (client_address, internal_address) = (client.local_addr()?, internal.local_addr()?);
        // The internal port answers until the very end, so that a drain can be watched.
        upkeep.spawn(gateway::serve(internal, gateway.internal(), upkeep.clone()));
        edge.spawn(gateway::serve(
            gateway::WithoutDelay(client),
            gateway.public(),
            edge.clone(),
        ));
        Ok(Self {
            client_address,
            internal_address,
            store,
            members,
            conversations,
            inbox,
            gateway,
            drain: config.drain.clone(),
            edge,
            core,
            upkeep,
        })
    }

    /// Stops gracefully: readiness goes, clients are told and leave, what they asked for is finished,
    /// everything is stored. True if all of that ended in time.
    pub async fn stop(self) -> bool {
        let ends = Instant::now() + Duration::from_millis(self.drain.grace_ms);
        let left = || ends.saturating_duration_since(Instant::now());
        self.edge.drain();
        let mut finished = self.edge.finished(left()).await;
        self.conversations.close();
        finished &= self.core.finished(left()).await;
        finished &= timeout(left(), async {
            while !self.inbox.flush().await && self.store.healthy().is_ok() {
                sleep(Duration::from_millis(100)).await;
            }
        })
        .await
        .is_ok();
        self.gateway.flush_presence().await;
        if finished && self.store.healthy().is_ok() {
            // Nothing is left for crash repair.
            let forgotten = self.store.forget_activity(self.members.me()).await;
            if let Err(error) = forgotten {
                tracing::warn!(%error, "activity was not forgotten; the next start repairs what needs none");
            }
        }
        self.members.leave();
        self.upkeep.drain();
        self.upkeep.finished(Duration::from_secs(2)).await;
        match self.store.close().await {
            Ok(()) => finished,
            Err(error) => {
                tracing::error!(%error, "the store was not closed cleanly");
                false
            }
        }
    }
}

/// Opens the store that the configuration names.
///
/// # Errors
/// When it cannot be used.
pub async fn open_store(config: &Config) -> anyhow::Result<Arc<dyn Store>> {
    match config.store.kind {
        StoreKind::Embedded => {
            let embedded = config.store.embedded.clone();
            let open = move || Embedded::open(&embedded.path, embedded.cache_mib << 20);
            Ok(Arc::new(tokio::task::spawn_blocking(open).await??))
        }
    }
}

async fn until_drained(tasks: Tasks, work: impl Future<Output = ()>) {
    tokio::select! {
        () = work => {}
        () = tasks.draining() => {}
    }
}

async fn turn_overlay(home: Arc<Home>) {
    loop {
        sleep(crate::cluster::OVERLAY).await;
        home.turn();
    }
}

async fn keep_up(gateway: Arc<Gateway>, metrics: PrometheusHandle) {
    loop {
        sleep(UPKEEP_EVERY).await;
        metrics.run_upkeep();
        gateway.forget_addresses();
        gateway.flush_presence().await;
    }
}

async fn sweep(store: Arc<dyn Store>) {
    loop {
        sleep(SWEEP_EVERY).await;
        if let Err(error) = store.sweep().await {
            tracing::warn!(%error, "a sweep of the store failed; the next one tries again");
        }
    }
}
