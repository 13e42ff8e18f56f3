//! One gateway process: builds the rooms bottom-up, starts them, and stops them in reverse. The only file
//! that knows all of them.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use metrics_exporter_prometheus::PrometheusHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    auth::Tokens,
    chat::{Conversations, InboxWriter},
    cluster::{Delivery, Home, Members, NotJoined, Router},
    config::{Config, StoreKind},
    fanout::Hub,
    gateway::{self, Gateway},
    model::GatewayId,
    store::{Store, cassandra::Cassandra, embedded::Embedded},
    tasks::Tasks,
};

/// Between two sweeps of the store.
const SWEEP_EVERY: Duration = Duration::from_secs(300);
/// Between two rounds of upkeep: metrics, forgotten addresses.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// Between two tries of what must succeed before anyone is served.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A gateway that is up.
pub struct Node {
    pub client_address: SocketAddr,
    pub internal_address: SocketAddr,
    store: Arc<dyn Store>,
    members: Arc<Members>,
    deposed: CancellationToken,
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
        let admin = Arc::new(gateway::Admin::new(metrics.clone()));
        let internal = gateway::bind(config.internal.listen)
            .map_err(|e| anyhow::anyhow!("internal.listen {}: {e}", config.internal.listen))?;
        let internal_address = internal.local_addr()?;
        // The internal port answers from the beginning, to say what is still missing, until the very end.
        upkeep.spawn(gateway::serve(internal, admin.routes(), upkeep.clone()));
        let store = open_store(config, &upkeep).await?;
        let members = Arc::new(join(&store).await?);
        let deposed = CancellationToken::new();
        upkeep.spawn(until_drained(
            upkeep.clone(),
            keep_lease(members.clone(), deposed.clone()),
        ));
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
            repair(&conversations, &*store, gone).await?;
        }
        let router = Router::new(
            members.me(),
            members.ring(),
            store.clone(),
            conversations.clone(),
            home.clone(),
            hub.clone(),
        );
        let gateway = Arc::new(Gateway::new(config, router, hub, tokens, edge.clone()));

        let flushing = inbox.clone();
        upkeep.spawn(until_drained(upkeep.clone(), async move {
            flushing.run().await
        }));
        upkeep.spawn(until_drained(
            upkeep.clone(),
            turn_overlay(home, inbox.clone()),
        ));
        upkeep.spawn(until_drained(
            upkeep.clone(),
            keep_up(gateway.clone(), store.clone(), metrics),
        ));
        upkeep.spawn(until_drained(upkeep.clone(), sweep(store.clone())));

        let client = gateway::bind(config.client.listen)
            .map_err(|e| anyhow::anyhow!("client.listen {}: {e}", config.client.listen))?;
        let client_address = client.local_addr()?;
        edge.spawn(gateway::serve(
            gateway::WithoutDelay(client),
            gateway.public(),
            edge.clone(),
        ));
        admin.ready(gateway.clone());
        Ok(Self {
            client_address,
            internal_address,
            store,
            members,
            deposed,
            conversations,
            inbox,
            gateway,
            drain: config.drain.clone(),
            edge,
            core,
            upkeep,
        })
    }

    /// Fires if another process takes over the store: then nothing can be served here any more.
    pub async fn deposed(&self) {
        self.deposed.cancelled().await;
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
        self.members.leave().await;
        self.upkeep.drain();
        let closed = self.store.close().await;
        self.upkeep.finished(Duration::from_secs(2)).await;
        match closed {
            Ok(()) => finished,
            Err(error) => {
                tracing::error!(%error, "the store was not closed cleanly");
                false
            }
        }
    }
}

/// Opens the store that the configuration names. What it runs lives in `tasks`.
///
/// # Errors
/// When it cannot be used.
pub async fn open_store(config: &Config, tasks: &Tasks) -> anyhow::Result<Arc<dyn Store>> {
    match config.store.kind {
        StoreKind::Embedded => {
            let embedded = config.store.embedded.clone();
            let open = move || Embedded::open(&embedded.path, embedded.cache_mib << 20);
            Ok(Arc::new(tokio::task::spawn_blocking(open).await??))
        }
        StoreKind::Cassandra => {
            let settings = config.store.cassandra.settings();
            Ok(Arc::new(Cassandra::open(&settings, tasks).await?))
        }
    }
}

/// Becomes a member. A store over the network may be out of reach for a while: that mends by itself.
async fn join(store: &Arc<dyn Store>) -> anyhow::Result<Members> {
    loop {
        match Members::alone(store.clone()).await {
            Err(NotJoined::Store(error)) if store.is_shared() => {
                tracing::warn!(%error, "the ring could not be joined; trying again");
                sleep(RETRY_AFTER).await;
            }
            joined => return Ok(joined?),
        }
    }
}

/// As [`join`]; nobody is served before.
async fn repair(
    conversations: &Conversations,
    store: &dyn Store,
    gone: GatewayId,
) -> anyhow::Result<()> {
    while let Err(error) = conversations.repair(gone).await {
        if !store.is_shared() {
            return Err(error.into());
        }
        tracing::warn!(%error, "crash repair could not finish; trying again");
        sleep(RETRY_AFTER).await;
    }
    Ok(())
}

async fn until_drained(tasks: Tasks, work: impl Future<Output = ()>) {
    tokio::select! {
        () = work => {}
        () = tasks.draining() => {}
    }
}

/// Publications are laid over the stored inbox until it has them.
async fn turn_overlay(home: Arc<Home>, inbox: Arc<InboxWriter>) {
    loop {
        sleep(crate::cluster::OVERLAY).await;
        if inbox.is_current() {
            home.turn();
        }
    }
}

async fn keep_lease(members: Arc<Members>, deposed: CancellationToken) {
    let error = members.keep().await;
    tracing::error!(%error, "this gateway stops");
    deposed.cancel();
}

async fn keep_up(gateway: Arc<Gateway>, store: Arc<dyn Store>, metrics: PrometheusHandle) {
    loop {
        sleep(UPKEEP_EVERY).await;
        store.measure();
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
