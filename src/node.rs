//! A gateway process: builds the modules bottom-up, starts them, and stops them in reverse. Only this file knows all of
//! them.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use metrics_exporter_prometheus::PrometheusHandle;
use tokio::{
    net::TcpListener,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::{
    auth::Tokens,
    chat::{Conversations, Error},
    cluster::{Cluster, HandedOver, MembershipAgent, NotJoined, PeerSettings, WebSockets},
    config::{Config, FilesKind, StoreKind},
    consumers::{
        self, Consumers, Control, Webhook, http, push,
        webhooks::{endpoint::Limits, receiver::HttpReceiver},
    },
    fanout::Hub,
    gateway::{self, Gateway},
    model::{ConsumerName, GatewayId},
    seldom,
    store::{Store, cassandra::Cassandra, embedded::Embedded},
    tasks::Tasks,
};

/// The interval between sweeps of the store.
const SWEEP_EVERY: Duration = Duration::from_secs(300);
/// The interval of upkeep: metrics, expired rates.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// The time for which a starting gateway waits for the others before it serves clients.
const SETTLED_WITHIN: Duration = Duration::from_secs(5);
/// The time in which clients leave a gateway that was removed from the ring.
const REMOVED_GRACE: Duration = Duration::from_secs(2);
/// The time for which a leaving gateway waits until the others acknowledge its last messages.
const SAID_WITHIN: Duration = Duration::from_secs(2);
/// The time for which a leaving gateway waits until others have finished conversations that did not close in time. The others
/// end their links to it after about that time. What is left they find by its activity rows, as after a crash.
const HANDED_OVER_WITHIN: Duration = Duration::from_secs(3);
/// The pause before a step of the start is retried.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// The time between two attempts to repair conversations that are damaged.
const REPAIR_EVERY: Duration = Duration::from_mins(10);

/// A running gateway.
pub struct Node {
    pub client_address: SocketAddr,
    pub internal_address: SocketAddr,
    store: Arc<dyn Store>,
    members: Arc<MembershipAgent>,
    removed: CancellationToken,
    cluster: Cluster,
    gateway: Arc<Gateway>,
    drain: crate::config::Drain,
    /// The tasks of sessions and listeners, which end first.
    edge: Tasks,
    /// The tasks of conversations, which end when no session is left.
    core: Tasks,
    /// The tasks that support the others.
    upkeep: Tasks,
}

impl Node {
    /// Starts a gateway. Clients can connect when it returns.
    ///
    /// # Errors
    /// The reason why it cannot start, for the operator.
    pub async fn start(config: &Config, metrics: PrometheusHandle) -> anyhow::Result<Self> {
        let (edge, core, upkeep) = (Tasks::default(), Tasks::default(), Tasks::default());
        // Each step needs only the steps above it. Accepting clients comes last.
        let tokens = Tokens::new(config)?;
        let hosts = config.internal.hosts.clone();
        let admin = Arc::new(gateway::Admin::new(metrics.clone(), hosts));
        let internal_address = serve_operators(config, &admin, &upkeep)?;
        let store = open_store(config, &upkeep).await?;
        let peer_settings = peer_settings(config)?;
        let advertise = config.cluster.advertise.clone().unwrap_or_default();
        let members = Arc::new(join(&store, peer_settings.as_ref(), &advertise).await?);
        tell_operator(config);
        let (hub, push) = (Arc::new(Hub::new(upkeep.clone())), push_services(config)?);
        let consumers = consumers(config, members.me(), &store, push.clone());
        let cluster = Cluster::new(
            &members,
            &store,
            &hub,
            peer_settings,
            config.conversations().operation_timeout,
            config.memory(),
            &upkeep,
            |publish, inbox, lease| {
                let (me, store) = (members.me(), store.clone());
                let mut settings = config.conversations();
                settings.consumers = consumers.port();
                Conversations::new(me, store, publish, inbox, lease, settings, core.clone())
            },
        );
        cluster.inbox.recall_ranks().await?;
        let parts = open_files(config, &store, &cluster, [&edge, &core, &upkeep])?;
        let control = control(&consumers, &cluster, &store, &upkeep);
        let gateway = Gateway::new(config, &cluster, hub, tokens, edge.clone(), parts, control);
        let gateway = Arc::new(gateway.with_push(push));
        let removed = CancellationToken::new();
        // Before another version of the ring is known, so that each part of the cluster adopts it.
        cluster.start();
        upkeep.spawn_until_drained(keep_membership(members.clone(), removed.clone()));
        keep_running(&upkeep, &cluster, &gateway, &store, metrics);
        let left = repair(&cluster.conversations, &*store, members.gone()).await?;
        upkeep.spawn_until_drained(repair_later(cluster.conversations.clone(), left));
        if !cluster.ready(SETTLED_WITHIN).await {
            tracing::warn!("not all gateways of the ring are reachable yet");
        }

        let client_address = serve_clients(config, &gateway, &edge)?;
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

    /// Completes if other gateways have removed this one from the ring. It can serve nothing after that.
    pub async fn removed(&self) {
        self.removed.cancelled().await;
    }

    /// Stops gracefully: readiness ends, clients are told and leave, their requests are completed, and everything is
    /// stored. Returns true if everything was stored in time, or another gateway takes over what was not.
    pub async fn stop(self) -> bool {
        let removed = self.removed.is_cancelled();
        // A removed gateway can complete nothing: it only tells its clients.
        let (edge_grace, grace) = match self.drain.grace() {
            grace if removed => (grace.min(REMOVED_GRACE), grace.min(REMOVED_GRACE)),
            grace => (grace / 2, grace),
        };
        let ends = Instant::now() + grace;
        let left = || ends.saturating_duration_since(Instant::now());
        self.edge.drain();
        // Rule [drain-core]: conversations, inbox rows and offsets have half of the time for themselves, whatever a client
        // does. What is left of the edge then is cut.
        if !self.edge.finished(edge_grace).await {
            tracing::info!("some requests did not end in half of drain.grace_ms, and were cut");
        }
        self.edge.abandon();
        let let_go = self.cluster.leave(&self.members, ends).await;
        // Another start continues the inspection of a file.
        self.core.drain();
        let tasks = self.core.finished(left()).await;
        if !(let_go && tasks) {
            tracing::warn!(let_go, tasks, "some of these did not end in time (false)");
        }
        let wait = left().min(HANDED_OVER_WITHIN);
        let handed_over = self.cluster.hand_over(&self.members, wait).await;
        match handed_over {
            HandedOver::All => {}
            HandedOver::ToRepair => tracing::warn!(
                "some conversations were not handed over in time; another gateway repairs them as after a crash"
            ),
            HandedOver::ToNobody => tracing::warn!(
                "no other gateway took over some conversations; the next one that starts repairs them"
            ),
        }
        self.gateway.flush_presence().await;
        // The activity rows stay if a conversation was lost and is not repaired: the repair after a crash needs them.
        let finished = let_go && tasks && handed_over != HandedOver::ToNobody;
        let nothing_left = finished && self.cluster.conversations.is_finished();
        if nothing_left && self.store.healthy().is_ok() && !removed {
            let forgotten = self.store.forget_activity(self.members.me()).await;
            if let Err(error) = forgotten {
                tracing::warn!(%error, "could not delete the activity rows; the next start repairs more than needed");
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
                tracing::error!(%error, "could not close the store cleanly");
                false
            }
        }
    }
}

/// Opens the configured store. Its tasks run in `tasks`.
///
/// # Errors
/// The reason why the store cannot be used.
pub async fn open_store(config: &Config, tasks: &Tasks) -> anyhow::Result<Arc<dyn Store>> {
    match config.store.kind {
        StoreKind::Embedded => {
            let embedded = config.store.embedded.clone();
            let open = move || Embedded::open(&embedded.path, embedded.cache_mib << 20);
            Ok(Arc::new(tokio::task::spawn_blocking(open).await??))
        }
        StoreKind::Cassandra => {
            let settings = config.store.cassandra.settings();
            Ok(Arc::new(Box::pin(Cassandra::open(&settings, tasks)).await?))
        }
    }
}

/// Opens the uploaded files, and starts to erase those that no message has.
fn open_files(
    config: &Config,
    store: &Arc<dyn Store>,
    cluster: &Cluster,
    [edge, core, upkeep]: [&Tasks; 3],
) -> anyhow::Result<(Option<Arc<gateway::Files>>, gateway::Eraser)> {
    let (publish, core) = (cluster.publish(), core.clone());
    let files = gateway::Files::open(config, store.clone(), publish, core, edge.clone());
    let setting = match config.attachments.store {
        FilesKind::S3 => "attachments.s3",
        FilesKind::Local | FilesKind::Off => "attachments.path",
    };
    let files = files.map_err(|e| anyhow::anyhow!("{setting}: {e}"))?;
    let (eraser, dropped) = gateway::Eraser::new();
    if let Some(files) = &files {
        let place = (files.clone(), cluster.router.clone());
        let erasing = gateway::Eraser::run(place, dropped);
        upkeep.spawn_until_drained(erasing);
        let checked = files.clone();
        upkeep.spawn_until_drained(async move { checked.check().await });
    }
    let told = eraser.clone();
    cluster.on_dropped_file(move |conversation, file| told.drop_file(conversation, file));
    Ok((files, eraser))
}

/// Builds the consumers of the log.
fn consumers(
    config: &Config,
    me: GatewayId,
    store: &Arc<dyn Store>,
    providers: Option<Arc<push::Providers>>,
) -> Arc<Consumers> {
    let settings = consumers::Settings {
        offset_flush: Duration::from_secs(config.consumers.offset_flush_s),
        lagging_after: Duration::from_secs(config.consumers.lagging_after_s),
        catch_up: config.consumers.catch_up,
    };
    let client = Arc::new(http::Client::default());
    let webhooks = config.webhooks().into_iter().map(|settings| Webhook {
        name: ConsumerName::webhook(&settings.name),
        filter: settings.filter.clone(),
        limits: Limits {
            batch: settings.batch,
            connections: settings.connections,
        },
        receiver: Arc::new(HttpReceiver {
            client: client.clone(),
            settings: Arc::new(settings),
        }),
    });
    let push = providers.map(|notifier| consumers::Push {
        notifier,
        grace: Duration::from_secs(config.push.grace_s),
        ttl: Duration::from_secs(config.push.ttl_s),
    });
    let webhooks = webhooks.collect();
    Arc::new(Consumers::new(me, store.clone(), settings, webhooks, push))
}

/// Reads the keys of the push services. `None` if none is configured.
fn push_services(config: &Config) -> anyhow::Result<Option<Arc<push::Providers>>> {
    let settings = config.push.settings();
    let keys = push::Keys::read(&settings)?;
    let post = Arc::new(push::Https::new(config.push.allow.clone()));
    let providers = push::Providers::new(settings, keys, post);
    Ok((!providers.is_empty()).then(|| Arc::new(providers)))
}

/// Tells the operator what follows from some settings.
fn tell_operator(config: &Config) {
    tracing::info!(
        mib = config.memory().mib(),
        "memory for conversations, inboxes and history"
    );
}

/// Starts the consumers. `None` if there are none.
fn control(
    consumers: &Arc<Consumers>,
    cluster: &Cluster,
    store: &Arc<dyn Store>,
    upkeep: &Tasks,
) -> Option<Arc<Control>> {
    consumers.port()?;
    let states = consumers.start(cluster, store, upkeep, rand::random());
    Some(Arc::new(Control {
        consumers: consumers.clone(),
        states,
        store: store.clone(),
    }))
}

fn bind(setting: &str, listen: SocketAddr) -> anyhow::Result<TcpListener> {
    gateway::bind(listen).map_err(|e| anyhow::anyhow!("{setting} {listen}: {e}"))
}

/// Opens the port of the clients and returns its address.
fn serve_clients(
    config: &Config,
    gateway: &Arc<Gateway>,
    edge: &Tasks,
) -> anyhow::Result<SocketAddr> {
    let listener = bind("client.listen", config.client.listen)?;
    let address = listener.local_addr()?;
    let (routes, admission) = (gateway.public(), gateway.admission.clone());
    let (tasks, leave_within) = (edge.clone(), config.drain.leave_within());
    let serving = gateway::serve(listener, routes, admission, tasks, leave_within);
    edge.spawn(serving);
    Ok(address)
}

/// Opens the internal port and returns its address. The port answers from the start to the end, so that it can say what
/// is missing.
fn serve_operators(
    config: &Config,
    admin: &Arc<gateway::Admin>,
    upkeep: &Tasks,
) -> anyhow::Result<SocketAddr> {
    let listener = bind("internal.listen", config.internal.listen)?;
    let address = listener.local_addr()?;
    let operators = Arc::new(gateway::Admission::internal());
    let (routes, tasks) = (admin.routes(), upkeep.clone());
    let serving = gateway::serve(listener, routes, operators, tasks, Duration::ZERO);
    upkeep.spawn(serving);
    Ok(address)
}

/// Starts the tasks that support the others for as long as the gateway runs.
fn keep_running(
    upkeep: &Tasks,
    cluster: &Cluster,
    gateway: &Arc<Gateway>,
    store: &Arc<dyn Store>,
    metrics: PrometheusHandle,
) {
    let flushing = cluster.inbox.clone();
    upkeep.keep(move || {
        let flushing = flushing.clone();
        async move { flushing.run().await }
    });
    let (home, current) = (cluster.home.clone(), cluster.inbox.clone());
    upkeep.keep(move || {
        let (home, inbox) = (home.clone(), current.clone());
        async move { home.rotate_overlay(&inbox).await }
    });
    let (kept, measured) = (gateway.clone(), store.clone());
    upkeep.keep(move || keep_up(kept.clone(), measured.clone(), metrics.clone()));
    let swept = store.clone();
    upkeep.keep(move || sweep(swept.clone()));
}

/// Returns the connection settings for other gateways. `None` without a cluster.
fn peer_settings(config: &Config) -> anyhow::Result<Option<PeerSettings>> {
    if !config.cluster.enabled {
        return Ok(None);
    }
    let listener = bind("cluster.listen", config.cluster.listen)?;
    Ok(Some(PeerSettings {
        secret: config.cluster.secret.clone().unwrap_or_default(),
        network: Arc::new(WebSockets::new(listener)),
    }))
}

/// Joins the ring: with an address for the other gateways in a cluster, or alone. It waits while a shared store is
/// unreachable.
async fn join(
    store: &Arc<dyn Store>,
    peer_settings: Option<&PeerSettings>,
    advertise: &str,
) -> anyhow::Result<MembershipAgent> {
    loop {
        let joined = match peer_settings {
            Some(PeerSettings { network, .. }) => {
                let me = GatewayId(uuid::Uuid::now_v7());
                MembershipAgent::join(store.clone(), me, advertise.into(), &**network).await
            }
            None => MembershipAgent::alone(store.clone()).await,
        };
        match joined {
            Err(NotJoined::Store(error)) if store.is_shared() => {
                tracing::warn!(%error, "could not join the ring; trying again");
                sleep(RETRY_AFTER).await;
            }
            joined => return Ok(joined?),
        }
    }
}

/// Repairs the inbox rows of gateways that crashed, as nothing is served before. Returns the gateways that wrote to
/// conversations that are damaged now.
async fn repair(
    conversations: &Conversations,
    store: &dyn Store,
    gone: &[GatewayId],
) -> anyhow::Result<Vec<GatewayId>> {
    let mut left = Vec::new();
    for &gone in gone {
        if !until_repaired(store.is_shared(), || conversations.repair(gone)).await? {
            left.push(gone);
        }
    }
    Ok(left)
}

/// Repeats a repair while a shared store is unreachable or a store is slow.
async fn until_repaired<F>(is_shared: bool, repair: impl Fn() -> F) -> Result<bool, Error>
where
    F: Future<Output = Result<bool, Error>>,
{
    loop {
        match repair().await {
            Err(error) if is_shared || error == Error::TOO_LATE => {
                tracing::warn!(%error, "could not complete the repair after a crash; trying again");
                sleep(RETRY_AFTER).await;
            }
            repaired => return repaired,
        }
    }
}

/// Repairs what was damaged, if it comes back.
async fn repair_later(conversations: Conversations, mut left: Vec<GatewayId>) {
    while let Some(&gone) = left.first() {
        sleep(REPAIR_EVERY).await;
        match conversations.repair(gone).await {
            Ok(true) => drop(left.remove(0)),
            _ => left.rotate_left(1),
        }
    }
}

async fn keep_membership(members: Arc<MembershipAgent>, removed: CancellationToken) {
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
            tracing::warn!(%error, "could not sweep the store; trying again at the next sweep");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    async fn repaired(is_shared: bool, outcomes: &[Result<bool, Error>]) -> Result<bool, Error> {
        let left = RefCell::new(outcomes.iter().cloned());
        until_repaired(is_shared, || async {
            left.borrow_mut().next().expect("an outcome")
        })
        .await
    }

    #[tokio::test(start_paused = true)]
    async fn a_repair_waits_for_a_slow_store() {
        let late = Err(Error::TOO_LATE);
        assert_eq!(
            repaired(false, &[late.clone(), late, Ok(true)]).await,
            Ok(true)
        );
        let broken = Err(Error::BROKEN);
        assert_eq!(repaired(false, &[broken.clone(), Ok(true)]).await, broken);
        assert_eq!(repaired(true, &[broken, Ok(false)]).await, Ok(false));
    }
}
