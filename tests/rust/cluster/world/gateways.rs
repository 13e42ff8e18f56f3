//! The gateways: how they start, crash, pause, leave, and are cut off.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use chat_gateway::{
    chat::{Conversations, Settings},
    cluster::{Cluster, MembershipAgent, PeerSettings},
    fanout::Hub,
    memory::Memory,
    model::GatewayId,
    store::Store,
    tasks::{Process, Tasks},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, timeout},
};
use uuid::Uuid;

use super::{
    World,
    network::{FRAMES_MAX, Port},
    spawn,
};

/// Time limit of a client's request.
const PATIENCE: Duration = Duration::from_secs(3);

/// The parts of a gateway that serves.
type Up = (Arc<Cluster>, Arc<MembershipAgent>, Arc<Hub>);

/// One gateway process.
pub(crate) struct Gateway {
    pub(crate) number: u128,
    pub(crate) address: String,
    process: Process,
    pub(crate) tasks: Tasks,
    /// Whether it is cut off from the store.
    cut: Arc<AtomicBool>,
    /// Set once it serves, and taken when it leaves.
    pub(super) up: Mutex<Option<Up>>,
    /// Whether its process has ended.
    pub(crate) over: AtomicBool,
}

impl Gateway {
    pub(crate) fn is_up(&self) -> bool {
        !self.over.load(Ordering::Relaxed) && self.up.lock().unwrap().is_some()
    }

    /// Joins the ring and serves, as `node.rs` does.
    async fn serve(self: Arc<Self>, world: Arc<World>, store: Arc<dyn Store>, network: Arc<Port>) {
        let members = self.join(&store, &network).await;
        let consumers = world.consumers(members.me(), &store);
        let tasks = self.tasks.clone();
        let hub = Arc::new(Hub::new(tasks.clone()).with_small_passes());
        let mut settings = settings(world.open_max);
        settings.consumers = consumers.port();
        let speaking = PeerSettings {
            secret: "the same in all of them, 32 bytes".into(),
            network,
        };
        let cluster = Cluster::new(
            &members,
            &store,
            &hub,
            Some(speaking),
            settings.operation_timeout,
            settings.memory,
            &tasks,
            |publish, inbox, lease| {
                let me = members.me();
                Conversations::new(
                    me,
                    store.clone(),
                    publish,
                    inbox,
                    lease,
                    settings,
                    tasks.clone(),
                )
            },
        );
        let cluster = Arc::new(cluster);
        while cluster.inbox.recall_ranks().await.is_err() {
            sleep(Duration::from_millis(100)).await;
        }
        let seed = u64::try_from(self.number).unwrap();
        consumers.start(&cluster, &store, &tasks, seed);
        let flushing = cluster.inbox.clone();
        tasks.spawn(async move { flushing.run().await });
        cluster.start();
        let (keeping, over) = (members.clone(), self.clone());
        tasks.spawn(async move {
            keeping.keep().await;
            over.over.store(true, Ordering::Relaxed);
            over.process.kill();
        });
        cluster.ready(Duration::from_secs(5)).await;
        *self.up.lock().unwrap() = Some((cluster, members, hub));
    }

    async fn join(&self, store: &Arc<dyn Store>, network: &Port) -> Arc<MembershipAgent> {
        // Ids of real gateways grow with time too.
        let me = GatewayId(Uuid::from_u128(
            (self.number << 64) + self.number * 0x9e37_79b9_7f4a_7c15,
        ));
        loop {
            match MembershipAgent::join(store.clone(), me, self.address.clone(), network).await {
                Ok(members) => return Arc::new(members),
                Err(_) => sleep(Duration::from_millis(200)).await,
            }
        }
    }

    pub(crate) fn cluster(&self) -> Option<Arc<Cluster>> {
        let up = self.up.lock().unwrap();
        up.as_ref().map(|(cluster, ..)| cluster.clone())
    }

    /// Runs a request inside the process. `None` if the process dies or does not answer within `PATIENCE`.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        ask: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        self.ask_within(PATIENCE, ask).await
    }

    pub(crate) async fn ask_within<T: Send + 'static>(
        &self,
        patience: Duration,
        ask: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let asked = async move { drop(reply.send(ask.await)) };
        self.tasks.spawn(asked);
        timeout(patience, answer).await.ok()?.ok()
    }
}

fn settings(open_max: usize) -> Settings {
    Settings {
        body_bytes_max: 1000,
        group_participants_max: 100,
        conversations_per_user_max: None,
        idle: Duration::from_secs(300),
        operation_timeout: Duration::from_secs(2),
        open_max,
        memory: Memory::of_mib(64),
        page_bytes_max: 1 << 20,
        edit_window: None,
        reactions_coalesce: Duration::from_millis(250),
        consumers: None,
    }
}

impl World {
    /// Starts a gateway.
    pub(crate) fn start(self: &Arc<Self>) -> Arc<Gateway> {
        let number = self.gateways.lock().unwrap().len() as u128 + 1;
        let address = format!("gateway-{number}:7400");
        let (listener, accepted) = mpsc::channel(FRAMES_MAX);
        self.wire
            .lock()
            .unwrap()
            .listeners
            .insert(address.clone(), listener);
        let store = self.store.share();
        let process = Process::default();
        let gateway = Arc::new(Gateway {
            number,
            address: address.clone(),
            tasks: Tasks::of(process.clone()),
            process,
            cut: store.cut(),
            up: Mutex::default(),
            over: AtomicBool::new(false),
        });
        self.gateways.lock().unwrap().push(gateway.clone());
        let network = Arc::new(Port {
            wire: self.wire.clone(),
            address: address.clone(),
            accepted: tokio::sync::Mutex::new(accepted),
        });
        let (starting, world) = (gateway.clone(), self.clone());
        gateway
            .tasks
            .spawn(async move { starting.serve(world, Arc::new(store), network).await });
        gateway
    }

    /// Starts so many gateways, and waits until so many serve.
    pub(crate) async fn start_all(self: &Arc<Self>, number: usize) {
        for _ in 0..number {
            self.start();
        }
        while self.serving().len() < number {
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Number of gateways whose process has not ended.
    pub(crate) fn live(&self) -> usize {
        let gateways = self.gateways.lock().unwrap();
        let live = gateways.iter().filter(|g| !g.over.load(Ordering::Relaxed));
        live.count()
    }

    pub(crate) fn serving(&self) -> Vec<Arc<Gateway>> {
        let gateways = self.gateways.lock().unwrap();
        gateways.iter().filter(|g| g.is_up()).cloned().collect()
    }

    pub(crate) fn some_gateway(&self) -> Option<Arc<Gateway>> {
        let serving = self.serving();
        (!serving.is_empty()).then(|| serving[self.below(serving.len())].clone())
    }

    pub(crate) fn kill(&self, gateway: &Gateway) {
        tracing::trace!(gateway = gateway.number, "killed");
        gateway.over.store(true, Ordering::Relaxed);
        gateway.process.kill();
        self.wire.lock().unwrap().listeners.remove(&gateway.address);
    }

    /// Makes gateways crash, pause, leave and join, and cuts them off.
    pub(crate) async fn churn(self: Arc<Self>) {
        loop {
            sleep(self.millis(20, 2_500)).await;
            if !self.churning.load(Ordering::Relaxed) {
                continue;
            }
            let all: Vec<Arc<Gateway>> = {
                let gateways = self.gateways.lock().unwrap();
                let live = gateways.iter().filter(|g| !g.over.load(Ordering::Relaxed));
                live.cloned().collect()
            };
            let serving = self.serving();
            let many = serving.len() > 2;
            if all.len() < 3 {
                self.start();
                continue;
            }
            let one = all[self.below(all.len())].clone();
            match self.below(100) {
                0..14 if all.len() < 5 => drop(self.start()),
                14..32 if many => self.kill(&one),
                32..50 => self.pause(one),
                50..65 => {
                    let other = all[self.below(all.len())].clone();
                    self.cut_link(&one, &other);
                }
                65..80 => self.cut_off(one),
                80..95 if many && one.is_up() => self.let_leave(&one),
                _ => {}
            }
        }
    }

    fn pause(self: &Arc<Self>, gateway: Arc<Gateway>) {
        let (world, pause) = (self.clone(), self.millis(300, 6_000));
        tracing::trace!(gateway = gateway.number, ?pause, "paused");
        gateway.process.pause();
        spawn(async move {
            sleep(pause).await;
            gateway.process.resume();
            drop(world);
        });
    }

    /// Cuts the link between two gateways for a time.
    fn cut_link(self: &Arc<Self>, one: &Gateway, other: &Gateway) {
        let (world, time) = (self.clone(), self.millis(100, 6_000));
        let pair = (one.address.clone(), other.address.clone());
        self.wire.lock().unwrap().cut.insert(pair.clone());
        spawn(async move {
            sleep(time).await;
            let mut wire = world.wire.lock().unwrap();
            wire.cut.remove(&pair);
            wire.healed.notify_waiters();
        });
    }

    /// Cuts a gateway off from the store for a time.
    fn cut_off(&self, gateway: Arc<Gateway>) {
        let time = self.millis(100, 6_000);
        tracing::trace!(gateway = gateway.number, ?time, "cut off from the store");
        gateway.cut.store(true, Ordering::Relaxed);
        spawn(async move {
            sleep(time).await;
            gateway.cut.store(false, Ordering::Relaxed);
        });
    }

    /// Lets a gateway leave in good order. As in `Node::stop`, its clients leave first.
    pub(crate) fn let_leave(self: &Arc<Self>, gateway: &Arc<Gateway>) {
        let Some((cluster, members, _)) = gateway.up.lock().unwrap().take() else {
            return;
        };
        let (world, leaving) = (self.clone(), gateway.clone());
        gateway.tasks.spawn(async move {
            sleep(Duration::from_millis(300)).await;
            let ends = Instant::now() + Duration::from_secs(2);
            cluster.leave(&members, ends).await;
            cluster.said(Duration::from_secs(2)).await;
            world.kill(&leaving);
        });
    }
}
