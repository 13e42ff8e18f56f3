//! The simulated world: gateways, network, store and clients.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io::{self, Cursor},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use chat_gateway::{
    chat::{Conversations, Creation, LogRange, Operation, Outcome, Settings},
    cluster::{Cluster, Connection, MembershipAgent, Network, PeerSettings},
    fanout::{Coalesce, Hub, Subscriber},
    memory::Memory,
    model::{
        ClientId, Content, ConversationId, Draft, GatewayId, Kind, Posting, Seq, SessionId, UserId,
    },
    protocol::Codec,
    store::{
        Store,
        simulated::{Faults, Simulated},
    },
    tasks::{Process, Tasks},
};
use futures_util::{FutureExt, future::BoxFuture, sink, stream};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{
    sync::{Notify, mpsc, oneshot},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_tungstenite::tungstenite::protocol::frame::FrameSocket;
use uuid::Uuid;

pub(super) const USERS: usize = 4;
/// Number of one more user, who is added to conversations and removed again.
pub(super) const VISITOR: usize = USERS;
/// The conversations: a group, a dm of the first two users, a channel.
const KINDS: [Kind; 3] = [Kind::Group, Kind::Dm, Kind::Channel];
/// Time limit of a client's request.
const PATIENCE: Duration = Duration::from_secs(3);
/// Frames in flight in one direction. A connection with more breaks.
const FRAMES_MAX: usize = 100_000;
/// Bytes of one frame, as in `network.rs`. A connection breaks at a longer one.
const FRAME_BYTES_MAX: usize = 16 << 20;

/// The parts of a gateway that serves.
type Up = (Arc<Cluster>, Arc<MembershipAgent>, Arc<Hub>);

/// The network between the gateways, in memory.
#[derive(Default)]
pub(super) struct Wire {
    listeners: BTreeMap<String, mpsc::Sender<Connection>>,
    /// Pairs of addresses between which nothing arrives.
    pub(super) cut: BTreeSet<(String, String)>,
    /// Notified when a cut ends.
    pub(super) healed: Arc<Notify>,
    random: Option<StdRng>,
    /// Number of connections that broke at a frame that was too long.
    pub(super) too_long: usize,
}

/// A connection between two gateways.
#[derive(Clone)]
struct Line {
    wire: Arc<Mutex<Wire>>,
    from: String,
    to: String,
}

impl Line {
    fn is_cut(&self) -> bool {
        let wire = self.wire.lock().unwrap();
        wire.cut.contains(&(self.from.clone(), self.to.clone()))
            || wire.cut.contains(&(self.to.clone(), self.from.clone()))
    }

    /// Waits until the two gateways are not cut off from each other.
    async fn whole(&self) {
        loop {
            let healed = self.wire.lock().unwrap().healed.clone();
            let healed = healed.notified();
            if !self.is_cut() {
                return;
            }
            healed.await;
        }
    }

    fn delay(&self) -> Duration {
        let mut wire = self.wire.lock().unwrap();
        let random = wire.random.as_mut().unwrap();
        Duration::from_millis([0, 1, 1, 3, 3, 10, 50, 300][random.random_range(0..8)])
    }

    /// One direction of the connection. It keeps the order and delays each frame.
    fn pipe(
        self,
    ) -> (
        mpsc::Sender<(Instant, Bytes)>,
        chat_gateway::cluster::Frames,
    ) {
        let (send, receive) = mpsc::channel::<(Instant, Bytes)>(FRAMES_MAX);
        let frames = stream::unfold((receive, self), |(mut receive, line)| async move {
            let (at, bytes) = receive.recv().await?;
            sleep_until(at).await;
            line.whole().await;
            if bytes.len() > FRAME_BYTES_MAX {
                line.wire.lock().unwrap().too_long += 1;
                return Some((Err(io::ErrorKind::InvalidData.into()), (receive, line)));
            }
            Some((Ok(bytes), (receive, line)))
        });
        (send, Box::pin(frames))
    }

    /// The two ends of the connection.
    fn ends(self) -> (Connection, Connection) {
        let back = Self {
            from: self.to.clone(),
            to: self.from.clone(),
            wire: self.wire.clone(),
        };
        let (to_there, there) = self.clone().pipe();
        let (to_here, here) = back.clone().pipe();
        let end = |line: Self, send, receive| Connection {
            send: Box::pin(sink::unfold(
                (send, Instant::now(), line),
                |(send, last, line): (mpsc::Sender<(Instant, Bytes)>, Instant, Self), bytes| async move {
                    let at = last.max(Instant::now() + line.delay());
                    send.try_send((at, bytes))
                        .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
                    Ok((send, at, line))
                },
            )),
            receive,
        };
        (end(self, to_there, here), end(back, to_here, there))
    }
}

/// The network as one gateway sees it.
struct Port {
    wire: Arc<Mutex<Wire>>,
    address: String,
    accepted: tokio::sync::Mutex<mpsc::Receiver<Connection>>,
}

#[async_trait]
impl Network for Port {
    async fn connect(&self, address: &str) -> io::Result<Connection> {
        let line = Line {
            wire: self.wire.clone(),
            from: self.address.clone(),
            to: address.to_owned(),
        };
        sleep(line.delay()).await;
        timeout(Duration::from_secs(2), line.whole()).await?;
        let listener = self.wire.lock().unwrap().listeners.get(address).cloned();
        let listener = listener.ok_or(io::ErrorKind::ConnectionRefused)?;
        let (here, there) = line.ends();
        listener
            .try_send(there)
            .map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused))?;
        Ok(here)
    }

    async fn accept(&self) -> io::Result<BoxFuture<'static, io::Result<Connection>>> {
        match self.accepted.lock().await.recv().await {
            Some(connection) => Ok(async move { Ok(connection) }.boxed()),
            None => std::future::pending().await,
        }
    }

    fn close(&self) {}
}

/// One gateway process.
pub(super) struct Gateway {
    pub(super) number: u128,
    pub(super) address: String,
    process: Process,
    tasks: Tasks,
    /// Whether it is cut off from the store.
    cut: Arc<AtomicBool>,
    /// Set once it serves, and taken when it leaves.
    up: Mutex<Option<Up>>,
    /// Whether its process has ended.
    pub(super) over: AtomicBool,
}

impl Gateway {
    fn is_up(&self) -> bool {
        !self.over.load(Ordering::Relaxed) && self.up.lock().unwrap().is_some()
    }

    pub(super) fn cluster(&self) -> Option<Arc<Cluster>> {
        let up = self.up.lock().unwrap();
        up.as_ref().map(|(cluster, ..)| cluster.clone())
    }

    /// Runs a request inside the process. `None` if the process dies or does not answer within `PATIENCE`.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        ask: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let asked = async move { drop(reply.send(ask.await)) };
        self.tasks.spawn(asked);
        timeout(PATIENCE, answer).await.ok()?.ok()
    }
}

/// What clients saw, and what was wrong with it.
#[derive(Default)]
pub(super) struct Checker {
    pub(super) acknowledged: BTreeMap<ClientId, (usize, Seq)>,
    /// For each conversation, the sequence that every history must be a prefix of.
    canon: [Vec<ClientId>; 3],
    pub(super) findings: Vec<String>,
}

impl Checker {
    pub(super) fn find(&mut self, text: String) {
        self.findings.push(text);
    }

    fn acknowledge(&mut self, conversation: usize, client: ClientId, seq: Seq) {
        let first = *self
            .acknowledged
            .entry(client)
            .or_insert((conversation, seq));
        if first != (conversation, seq) {
            self.find(format!("{client} acknowledged at {first:?} and at {seq}"));
        }
    }

    /// Checks entries that a client saw.
    fn saw(&mut self, conversation: usize, entries: impl Iterator<Item = (Seq, ClientId)>) {
        for (seq, client) in entries {
            let index = usize::try_from(seq - 1).unwrap();
            let canon = &mut self.canon[conversation];
            match canon.get(index).copied() {
                Some(known) if known != client => {
                    self.find(format!(
                        "conversation {conversation}: {seq} was {known}, now {client}"
                    ));
                }
                None if index == canon.len() => canon.push(client),
                // A live entry after a gap is compared once its predecessors have been read.
                Some(_) | None => {}
            }
        }
    }
}

/// Messages of the channel that the visitor must not see.
#[derive(Default)]
pub(super) struct Secrets {
    /// Whether the visitor can be in the channel, and whether the channel can be public.
    rights: [bool; 2],
    /// Messages sent while neither was possible, as far as acknowledgements tell.
    sent: BTreeSet<ClientId>,
    /// Those of them that the visitor has seen. A change with an unknown outcome may have allowed it; the log decides.
    pub(super) seen: BTreeSet<Seq>,
}

impl Secrets {
    /// Notes that one of the two rights may be given from now on.
    fn visible(&mut self, right: usize) {
        self.rights[right] = true;
        self.sent.clear();
    }

    /// Notes that the end of one of the two rights is acknowledged.
    fn hidden(&mut self, right: usize) {
        self.rights[right] = false;
    }

    /// Notes a message that is about to be sent.
    fn sends(&mut self, client: ClientId) {
        if self.rights == [false; 2] {
            self.sent.insert(client);
        }
    }
}

/// The gateways, the network, the store, and what the clients share.
pub(super) struct World {
    pub(super) secrets: Mutex<Secrets>,
    pub(super) random: Mutex<StdRng>,
    pub(super) store: Simulated,
    pub(super) wire: Arc<Mutex<Wire>>,
    pub(super) gateways: Mutex<Vec<Arc<Gateway>>>,
    pub(super) conversations: [ConversationId; 3],
    pub(super) checker: Mutex<Checker>,
    /// Whether conversations are evicted at random moments.
    evicting: bool,
    /// Conversations that one gateway keeps open.
    open_max: usize,
    /// Whether clients send messages.
    pub(super) sending: AtomicBool,
    /// Whether gateways crash, pause, leave, join and are cut off.
    pub(super) churning: AtomicBool,
    /// Acknowledged messages.
    pub(super) messages: Mutex<usize>,
    /// Messages that are sent and neither acknowledged nor given up.
    pub(super) waiting: Mutex<usize>,
}

impl World {
    pub(super) fn new(seed: u64, faults: Faults, evicting: bool) -> Arc<Self> {
        let mut random = StdRng::seed_from_u64(seed);
        let conversations = KINDS.map(|kind| {
            let bytes: u128 = random.random();
            match kind {
                Kind::Dm => ConversationId::dm(&user(0), &user(1)),
                Kind::Group | Kind::Channel => ConversationId(
                    uuid::Builder::from_u128(bytes)
                        .with_version(uuid::Version::Random)
                        .into_uuid(),
                ),
            }
        });
        let wire = Wire {
            random: Some(StdRng::seed_from_u64(seed ^ 1)),
            ..Wire::default()
        };
        Arc::new(World {
            secrets: Mutex::default(),
            random: Mutex::new(random),
            store: Simulated::new(seed, faults),
            wire: Arc::new(Mutex::new(wire)),
            gateways: Mutex::default(),
            conversations,
            checker: Mutex::default(),
            evicting,
            open_max: if evicting && seed.is_multiple_of(2) {
                1
            } else {
                10
            },
            sending: AtomicBool::new(false),
            churning: AtomicBool::new(false),
            messages: Mutex::default(),
            waiting: Mutex::default(),
        })
    }

    pub(super) fn below(&self, most: usize) -> usize {
        self.random.lock().unwrap().random_range(0..most)
    }

    pub(super) fn millis(&self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.random.lock().unwrap().random_range(from..=to))
    }

    /// Starts a gateway.
    pub(super) fn start(self: &Arc<Self>) {
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
        let (starting, open_max) = (gateway.clone(), self.open_max);
        gateway.tasks.spawn(async move {
            let store: Arc<dyn Store> = Arc::new(store);
            // Ids of real gateways grow with time too.
            let me = GatewayId(Uuid::from_u128(
                (number << 64) + number * 0x9e37_79b9_7f4a_7c15,
            ));
            let members = loop {
                match MembershipAgent::join(store.clone(), me, address.clone(), &*network).await {
                    Ok(members) => break Arc::new(members),
                    Err(_) => sleep(Duration::from_millis(200)).await,
                }
            };
            let tasks = starting.tasks.clone();
            let coalesce = Coalesce {
                per_socket: Duration::from_millis(20),
                max: Duration::from_millis(25),
            };
            let hub = Arc::new(Hub::new(coalesce, tasks.clone()));
            let settings = Settings {
                body_bytes_max: 1000,
                group_participants_max: 100,
                idle: Duration::from_secs(300),
                operation_timeout: Duration::from_secs(2),
                open_max,
                memory: Memory::of_mib(64),
                page_bytes_max: 1 << 20,
            };
            let peer_settings = PeerSettings {
                secret: "the same in all of them, 32 bytes".into(),
                network,
            };
            let cluster = Cluster::new(
                &members,
                &store,
                &hub,
                Some(peer_settings),
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
            let flushing = cluster.inbox.clone();
            tasks.spawn(async move { flushing.run().await });
            cluster.start();
            let (keeping, over) = (members.clone(), starting.clone());
            tasks.spawn(async move {
                keeping.keep().await;
                over.over.store(true, Ordering::Relaxed);
                over.process.kill();
            });
            cluster.ready(Duration::from_secs(5)).await;
            *starting.up.lock().unwrap() = Some((cluster, members, hub));
        });
    }

    /// Number of gateways whose process has not ended.
    pub(super) fn live(&self) -> usize {
        let gateways = self.gateways.lock().unwrap();
        let live = gateways.iter().filter(|g| !g.over.load(Ordering::Relaxed));
        live.count()
    }

    pub(super) fn serving(&self) -> Vec<Arc<Gateway>> {
        let gateways = self.gateways.lock().unwrap();
        gateways.iter().filter(|g| g.is_up()).cloned().collect()
    }

    pub(super) fn some_gateway(&self) -> Option<Arc<Gateway>> {
        let serving = self.serving();
        (!serving.is_empty()).then(|| serving[self.below(serving.len())].clone())
    }

    fn kill(&self, gateway: &Gateway) {
        gateway.over.store(true, Ordering::Relaxed);
        gateway.process.kill();
        self.wire.lock().unwrap().listeners.remove(&gateway.address);
    }

    /// Makes gateways crash, pause, leave and join, and cuts them off.
    pub(super) async fn churn(self: Arc<Self>) {
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
                0..14 if all.len() < 5 => self.start(),
                14..32 if many => self.kill(&one),
                32..50 => {
                    let (world, pause) = (self.clone(), self.millis(300, 6_000));
                    one.process.pause();
                    spawn(async move {
                        sleep(pause).await;
                        one.process.resume();
                        drop(world);
                    });
                }
                50..65 => {
                    let other = all[self.below(all.len())].clone();
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
                65..80 => {
                    let time = self.millis(100, 6_000);
                    one.cut.store(true, Ordering::Relaxed);
                    spawn(async move {
                        sleep(time).await;
                        one.cut.store(false, Ordering::Relaxed);
                    });
                }
                80..95 if many && one.is_up() => {
                    // As in `Node::stop`, the clients leave first.
                    let up = one.up.lock().unwrap().take();
                    let Some((cluster, members, _)) = up else {
                        continue;
                    };
                    let (world, leaving) = (self.clone(), one.clone());
                    one.tasks.spawn(async move {
                        sleep(Duration::from_millis(300)).await;
                        let ends = Instant::now() + Duration::from_secs(2);
                        cluster.leave(&members, ends).await;
                        cluster.said(Duration::from_secs(2)).await;
                        world.kill(&leaving);
                    });
                }
                _ => {}
            }
        }
    }

    /// Sends messages, and repeats each until it is acknowledged or given up.
    pub(super) async fn send(self: Arc<Self>, sender: usize) {
        loop {
            sleep(self.millis(5, 700)).await;
            if !self.sending.load(Ordering::Relaxed) {
                continue;
            }
            let conversation = match self.below(6) {
                0..3 => 0,
                3..5 if sender < 2 => 1,
                _ => 2,
            };
            let client_id = ClientId(Uuid::from_u128(self.random.lock().unwrap().random()));
            if KINDS[conversation] == Kind::Channel {
                self.secrets.lock().unwrap().sends(client_id);
            }
            let mut retry = false;
            *self.waiting.lock().unwrap() += 1;
            loop {
                let draft = Draft {
                    sender: user(sender),
                    client_id,
                    content: Content::text("x"),
                    at: None,
                    retry,
                };
                retry = true;
                let id = self.conversations[conversation];
                let Some(gateway) = self.some_gateway() else {
                    sleep(Duration::from_millis(100)).await;
                    continue;
                };
                let Some(cluster) = gateway.cluster() else {
                    continue;
                };
                let sent = gateway.ask(async move { cluster.router.send(id, draft).await });
                if let Some(Ok(sent)) = sent.await {
                    *self.messages.lock().unwrap() += 1;
                    self.checker
                        .lock()
                        .unwrap()
                        .acknowledge(conversation, client_id, sent.seq);
                    break;
                }
                sleep(self.millis(10, 300)).await;
                if self.below(20) == 0 {
                    break;
                }
            }
            *self.waiting.lock().unwrap() -= 1;
        }
    }

    /// Reads the entries after `after`, and the head, through some gateway.
    pub(super) async fn history(
        &self,
        conversation: usize,
        after: Seq,
    ) -> Option<(Vec<(Seq, ClientId)>, Seq)> {
        let gateway = self.some_gateway()?;
        let cluster = gateway.cluster()?;
        let (id, operation) = (
            self.conversations[conversation],
            Operation::History {
                range: LogRange::After(after),
                limit: 10_000,
            },
        );
        let asked = gateway.ask(async move { cluster.router.ask(id, user(0), operation).await });
        match asked.await {
            Some(Ok(Outcome::History(page))) => {
                let entries: Vec<_> = page.entries.iter().map(|e| (e.seq, e.client_id)).collect();
                self.checker
                    .lock()
                    .unwrap()
                    .saw(conversation, entries.iter().copied());
                Some((entries, page.head))
            }
            _ => None,
        }
    }

    /// Adds the visitor to the group and the channel and removes them again, and makes both public and private again.
    pub(super) async fn visit(self: Arc<Self>) {
        loop {
            sleep(self.millis(20, 1_000)).await;
            let Some(gateway) = self.some_gateway() else {
                continue;
            };
            let Some(cluster) = gateway.cluster() else {
                continue;
            };
            if !self.sending.load(Ordering::Relaxed) {
                continue;
            }
            let which = self.below(2) * 2;
            let id = self.conversations[which];
            let user_id = user(VISITOR);
            let public = |public| Operation::Update {
                name: None,
                posting: None,
                public: Some(public),
            };
            let is_channel = KINDS[which] == Kind::Channel;
            let (operation, right, gives) = match self.below(4) {
                0 => (Operation::Add { user: user_id }, 0, true),
                1 => (Operation::Remove { user: user_id }, 0, false),
                2 => (public(true), 1, true),
                _ => (public(false), 1, false),
            };
            if is_channel && gives {
                self.secrets.lock().unwrap().visible(right);
            }
            let asked = gateway
                .ask(async move { cluster.router.ask(id, user(0), operation).await })
                .await;
            if is_channel && !gives && matches!(asked, Some(Ok(_))) {
                self.secrets.lock().unwrap().hidden(right);
            }
        }
    }

    /// Connects the visitor now and then, and subscribes to the channel if that is allowed. The visitor must see
    /// nothing that was sent after that ended.
    pub(super) async fn look(self: Arc<Self>) {
        for session in 0.. {
            sleep(self.millis(20, 600)).await;
            let Some(gateway) = self.some_gateway() else {
                continue;
            };
            let Some(cluster) = gateway.cluster() else {
                continue;
            };
            let channel = self.conversations[2];
            let visitor = visitor(session * 10 + VISITOR as u64);
            let (router, registering) = (cluster.router.clone(), visitor.clone());
            let (pause, looks) = (self.millis(0, 100), self.below(2) == 0);
            let followed = gateway.ask(async move {
                let places = router.register(&registering).await.ok()?;
                sleep(pause).await;
                if places.iter().any(|place| place.conversation == channel) {
                    router.follow(&registering, &[channel]).await;
                } else {
                    router.follow(&registering, &[]).await;
                }
                if looks {
                    drop(router.subscribe(&registering, channel).await);
                }
                Some(())
            });
            if let Some(Some(())) = followed.await {
                let ends = Instant::now() + self.millis(0, 3_000);
                while Instant::now() < ends && gateway.is_up() {
                    self.sees(&visitor);
                    sleep(Duration::from_millis(5)).await;
                }
            }
            gateway
                .ask(async move { cluster.router.leave(&visitor) })
                .await;
        }
    }

    /// Reads the frames that the visitor was sent, and notes secrets among them.
    fn sees(&self, visitor: &Subscriber) {
        let mut frames = VecDeque::new();
        if visitor.outbox.take(&mut frames).now_or_never().is_none() {
            return;
        }
        visitor.outbox.flushed();
        let bytes = frames.drain(..).flat_map(|frame| frame.bytes().to_vec());
        let mut wire = FrameSocket::new(Cursor::new(bytes.collect::<Vec<_>>()));
        while let Some(read) = wire.read(None).unwrap() {
            let event: serde_json::Value = serde_json::from_slice(read.payload()).unwrap();
            let client = event["client_id"].as_str().and_then(|id| id.parse().ok());
            if let Some(client) = client
                && self.secrets.lock().unwrap().sent.contains(&client)
            {
                let seq = event["seq"].as_u64().unwrap();
                self.secrets.lock().unwrap().seen.insert(seq);
            }
        }
    }

    /// Evicts conversations at random moments.
    pub(super) async fn evict(self: Arc<Self>) {
        if !self.evicting {
            return;
        }
        loop {
            sleep(self.millis(1, 300)).await;
            if let Some(cluster) = self.some_gateway().and_then(|gateway| gateway.cluster()) {
                cluster.conversations.evict_one();
            }
        }
    }

    /// Reads histories at random moments.
    pub(super) async fn read(self: Arc<Self>) {
        loop {
            sleep(self.millis(50, 900)).await;
            self.history(self.below(3), 0).await;
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the tasks of the simulation belong to no gateway"
)]
pub(super) fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(future);
}

pub(super) fn user(number: usize) -> UserId {
    UserId::new(&format!("user-{number}")).unwrap()
}

/// A session of the visitor.
pub(super) fn visitor(session: u64) -> Arc<Subscriber> {
    let session = SessionId(session);
    let subscriber = Subscriber::new(session, user(VISITOR), Codec::Json, 1 << 22);
    Arc::new(subscriber)
}

/// A client of one user. It connects, registers, reads what it missed, and listens.
pub(super) struct Device {
    pub(super) user: usize,
    /// For each conversation, the seqs that it has.
    pub(super) got: Mutex<[BTreeSet<Seq>; 3]>,
    pub(super) connected: Mutex<Option<Arc<Gateway>>>,
    pub(super) reconnect: Notify,
}

impl Device {
    /// Whether the user is a participant: all users of the group and the channel, the first two of the dm.
    pub(super) fn is_in(&self, conversation: usize) -> bool {
        conversation != 1 || self.user < 2
    }

    pub(super) async fn live(self: Arc<Self>, world: Arc<World>) {
        let mut session = 0;
        loop {
            sleep(world.millis(10, 800)).await;
            session += 1;
            let Some(gateway) = world.some_gateway() else {
                continue;
            };
            let up = gateway.up.lock().unwrap().clone();
            let Some((cluster, ..)) = up else { continue };
            let id = SessionId(session * 10 + self.user as u64);
            let subscriber = Arc::new(Subscriber::new(id, user(self.user), Codec::Json, 1 << 22));
            let (registering, router) = (subscriber.clone(), cluster.router.clone());
            let channel = world.conversations[2];
            let registered = gateway.ask(async move {
                let places = router.register(&registering).await.ok()?;
                if places.iter().any(|place| place.conversation == channel) {
                    router.follow(&registering, &[channel]).await;
                }
                Some(places)
            });
            let Some(Some(mut places)) = registered.await else {
                let (leaving, router) = (subscriber.clone(), cluster.router.clone());
                gateway.ask(async move { router.leave(&leaving) }).await;
                continue;
            };
            *self.connected.lock().unwrap() = Some(gateway.clone());
            places.sort_unstable_by_key(|place| place.conversation);
            // It reads up to what its inbox says, and the channel up to what the owner says.
            let mut to_read: VecDeque<(usize, Seq)> = VecDeque::new();
            for place in places {
                let conversation = world
                    .conversations
                    .iter()
                    .position(|c| *c == place.conversation);
                if let (Some(conversation), Some(last)) = (conversation, place.last_seq) {
                    to_read.push_back((conversation, last));
                }
            }
            to_read.push_back((2, Seq::MAX));
            self.listen(&world, &gateway, &subscriber, to_read).await;
            *self.connected.lock().unwrap() = None;
            let (leaving, router) = (subscriber.clone(), cluster.router.clone());
            gateway.tasks.spawn(async move { router.leave(&leaving) });
        }
    }

    async fn listen(
        &self,
        world: &World,
        gateway: &Gateway,
        subscriber: &Subscriber,
        mut to_read: VecDeque<(usize, Seq)>,
    ) {
        let mut frames = VecDeque::new();
        loop {
            // Missed messages are read from any gateway, again and again until that succeeds.
            if let Some((conversation, upto)) = to_read.pop_front() {
                let have = contiguous(&self.got.lock().unwrap()[conversation]);
                if have < upto {
                    match world.history(conversation, have).await {
                        Some((entries, _)) => {
                            let seqs = entries.iter().map(|(seq, _)| *seq);
                            self.got.lock().unwrap()[conversation].extend(seqs);
                        }
                        None => {
                            to_read.push_back((conversation, upto));
                            sleep(Duration::from_millis(100)).await;
                        }
                    }
                }
            }
            let wait = if to_read.is_empty() { 500 } else { 1 };
            let taken = tokio::select! {
                biased;
                () = self.reconnect.notified() => return,
                taken = subscriber.outbox.take(&mut frames) => Some(taken),
                () = sleep(Duration::from_millis(wait)) => None,
            };
            if gateway.over.load(Ordering::Relaxed) || gateway.up.lock().unwrap().is_none() {
                return; // The connection broke, or the client was told to reconnect.
            }
            match taken {
                Some(Ok(())) => {}
                Some(Err(_)) => return,
                None => continue,
            }
            let bytes = frames.drain(..).flat_map(|frame| frame.bytes().to_vec());
            let mut wire = FrameSocket::new(Cursor::new(bytes.collect::<Vec<_>>()));
            while let Some(read) = wire.read(None).unwrap() {
                let event: serde_json::Value = serde_json::from_slice(read.payload()).unwrap();
                let id = event["conversation"].as_str().unwrap_or_default();
                let position = world.conversations.iter().position(|c| c.to_string() == id);
                let Some(conversation) = position else {
                    continue;
                };
                match event["type"].as_str() {
                    Some("message") => {
                        let seq = event["seq"].as_u64().unwrap();
                        let client: ClientId =
                            event["client_id"].as_str().unwrap().parse().unwrap();
                        world
                            .checker
                            .lock()
                            .unwrap()
                            .saw(conversation, std::iter::once((seq, client)));
                        self.got.lock().unwrap()[conversation].insert(seq);
                        if contiguous(&self.got.lock().unwrap()[conversation]) < seq {
                            to_read.push_back((conversation, seq));
                        }
                    }
                    Some("resync") => {
                        to_read.push_back((conversation, event["head"].as_u64().unwrap()));
                    }
                    _ => {}
                }
            }
        }
    }
}

/// The seq up to which nothing is missing.
pub(super) fn contiguous(got: &BTreeSet<Seq>) -> Seq {
    let mut last = 0;
    for &seq in got {
        if seq != last + 1 {
            break;
        }
        last = seq;
    }
    last
}

/// Creates the conversations.
pub(super) async fn create(world: &Arc<World>) {
    for (conversation, kind) in KINDS.into_iter().enumerate() {
        let users = if kind == Kind::Dm { 2 } else { USERS };
        loop {
            let creation = Creation {
                kind,
                participants: (1..users).map(user).collect(),
                name: (kind != Kind::Dm).then(|| "here".into()),
                public: false,
                posting: Posting::Everyone,
                at: None,
            };
            let id = world.conversations[conversation];
            if let Some(gateway) = world.some_gateway()
                && let Some(cluster) = gateway.cluster()
            {
                let create = Operation::Create(creation);
                let asked =
                    gateway.ask(async move { cluster.router.ask(id, user(0), create).await });
                if let Some(Ok(Outcome::Created { .. })) = asked.await {
                    break;
                }
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
}
