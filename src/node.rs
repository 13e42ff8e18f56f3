//! One gateway process: builds the rooms bottom-up, starts them, and stops them in reverse. The only file
//! that knows all of them.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use metrics_exporter_prometheus::PrometheusHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::{
    auth::Tokens,
    chat::Conversations,
    cluster::{Cluster, Members, NotJoined, Speaking, WebSockets},
    config::{Config, StoreKind},
    fanout::Hub,
    gateway::{self, Gateway},
    model::GatewayId,
    seldom,
    store::{Store, cassandra::Cassandra, embedded::Embedded},
    tasks::Tasks,
};

/// Between two sweeps of the store.
const SWEEP_EVERY: Duration = Duration::from_secs(300);
/// Between two rounds of upkeep: metrics, forgotten addresses.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// How long a gateway waits for the others before it serves clients.
const SETTLED_WITHIN: Duration = Duration::from_secs(5);
/// For clients to leave a gateway that was removed.
const REMOVED_GRACE: Duration = Duration::from_secs(2);
/// How long a gateway that leaves waits until the others have heard it.
const SAID_WITHIN: Duration = Duration::from_secs(2);
/// Between two tries of what must succeed before anyone is served.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A gateway that is up.
pub struct Node {
    pub client_address: SocketAddr,
    pub internal_address: SocketAddr,
    store: Arc<dyn Store>,
    members: Arc<Members>,
    removed: CancellationToken,
    cluster: Cluster,
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
        let operators = Arc::new(gateway::Admission::internal());
        let routes = admin.routes();
        upkeep.spawn(gateway::serve(internal, routes, operators, upkeep.clone()));
        let store = open_store(config, &upkeep).await?;
        let speaking = speaking(config)?;
        let advertise = config.cluster.advertise.clone().unwrap_or_default();
        let members = Arc::new(join(&store, speaking.as_ref(), &advertise).await?);
        tracing::info!(
            mib = config.memory().mib(),
            "memory for conversations, inboxes and history"
        );
        let hub = Arc::new(Hub::new(config.fanout.coalesce(), upkeep.clone()));
        let cluster = Cluster::new(
            &members,
            &store,
            &hub,
            speaking,
            config.conversations().operation_timeout,
            config.memory(),
            &upkeep,
            |publish, inbox, lease| {
                let (me, store) = (members.me(), store.clone());
                let settings = config.conversations();
                Conversations::new(me, store, publish, inbox, lease, settings, core.clone())
            },
        );
        let (router, inbox) = (cluster.router.clone(), cluster.inbox.clone());
        let gateway = Arc::new(Gateway::new(config, router, hub, tokens, edge.clone()));
        let removed = CancellationToken::new();
        let flushing = inbox.clone();
        upkeep.spawn_until_drained(keep_membership(members.clone(), removed.clone()));
        upkeep.keep(move || {
            let flushing = flushing.clone();
            async move { flushing.run().await }
        });
        let (home, current) = (cluster.home.clone(), inbox.clone());
        upkeep.keep(move || {
            let (home, inbox) = (home.clone(), current.clone());
            async move { home.turn_overlays(&inbox).await }
        });
        let (kept, measured) = (gateway.clone(), store.clone());
        upkeep.keep(move || keep_up(kept.clone(), measured.clone(), metrics.clone()));
        let swept = store.clone();
        upkeep.keep(move || sweep(swept.clone()));
        cluster.start();
        for &gone in members.gone() {
            repair(&cluster.conversations, &*store, gone).await?;
        }
        if !cluster.settled(SETTLED_WITHIN).await {
            tracing::warn!("not every gateway of the ring can be reached yet");
        }

        let client = gateway::bind(config.client.listen)
            .map_err(|e| anyhow::anyhow!("client.listen {}: {e}", config.client.listen))?;
        let client_address = client.local_addr()?;
        let (routes, admission) = (gateway.public(), gateway.admission.clone());
        edge.spawn(gateway::serve(client, routes, admission, edge.clone()));
        admin.ready(gateway.clone());
        Ok(Self {
            client_address,
            internal_address,
            store,
            members,
            removed,
            cluster,
            gateway,
            drain: config.drain.clone(),
            edge,
            core,
            upkeep,
        })
    }

    /// Fires if other gateways have removed this one from the ring: then nothing can be served here any more.
    pub async fn removed(&self) {
        self.removed.cancelled().await;
    }

    /// Stops gracefully: readiness goes, clients are told and leave, what they asked for is finished,
    /// everything is stored. True if all of that ended in time.
    pub async fn stop(self) -> bool {
        let grace = Duration::from_millis(self.drain.grace_ms);
        let removed = self.removed.is_cancelled();
        // Who was removed can finish nothing any more: clients are told, and that is all.
        let ends = Instant::now()
            + if removed {
                grace.min(REMOVED_GRACE)
            } else {
                grace
            };
        let left = || ends.saturating_duration_since(Instant::now());
        self.edge.drain();
        let sessions = self.edge.finished(left()).await;
        let let_go = self.cluster.leave(&self.members, ends).await;
        let tasks = self.core.finished(left()).await;
        let finished = sessions && let_go && tasks;
        if !finished {
            tracing::warn!(sessions, let_go, tasks, "not all of these ended in time");
        }
        self.gateway.flush_presence().await;
        // What was lost in the middle of something, and nobody has finished yet, is left for crash repair.
        let nothing_left = finished && self.cluster.conversations.is_finished();
        if nothing_left && self.store.healthy().is_ok() && !removed {
            let forgotten = self.store.forget_activity(self.members.me()).await;
            if let Err(error) = forgotten {
                tracing::warn!(%error, "activity was not forgotten; the next start repairs what needs none");
            }
        }
        if !removed {
            self.cluster.said(SAID_WITHIN).await;
        }
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

/// How this gateway speaks to others, if it is to.
fn speaking(config: &Config) -> anyhow::Result<Option<Speaking>> {
    if !config.cluster.enabled {
        return Ok(None);
    }
    let listen = config.cluster.listen;
    let listener =
        gateway::bind(listen).map_err(|e| anyhow::anyhow!("cluster.listen {listen}: {e}"))?;
    Ok(Some(Speaking {
        secret: config.cluster.secret.clone().unwrap_or_default(),
        network: Arc::new(WebSockets::new(listener)),
    }))
}

/// Becomes a member: of a cluster with the address where the others reach it, or alone. A store over the network may
/// be out of reach for a while: that mends by itself.
async fn join(
    store: &Arc<dyn Store>,
    speaking: Option<&Speaking>,
    advertise: &str,
) -> anyhow::Result<Members> {
    loop {
        let joined = match speaking {
            Some(Speaking { network, .. }) => {
                let me = GatewayId(uuid::Uuid::now_v7());
                Members::join(store.clone(), me, advertise.into(), &**network).await
            }
            None => Members::alone(store.clone()).await,
        };
        match joined {
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

async fn keep_membership(members: Arc<Members>, removed: CancellationToken) {
    members.keep().await;
    removed.cancel();
}

async fn keep_up(gateway: Arc<Gateway>, store: Arc<dyn Store>, metrics: PrometheusHandle) {
    loop {
        sleep(UPKEEP_EVERY).await;
        store.measure();
        metrics.run_upkeep();
        gateway.keep_up();
        seldom::tell();
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
