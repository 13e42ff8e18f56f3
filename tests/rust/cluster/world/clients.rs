//! What clients do, and what they see.

use std::{
    collections::{BTreeSet, VecDeque},
    io::Cursor,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use chat_gateway::{
    chat::{Creation, LogRange, Operation, Outcome},
    fanout::Subscriber,
    model::{ClientId, Content, Draft, Kind, Posting, Seq, SessionId},
    protocol::Codec,
};
use futures_util::FutureExt;
use rand::RngExt;
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};
use tokio_tungstenite::tungstenite::protocol::frame::FrameSocket;
use uuid::Uuid;

use super::{KINDS, USERS, VISITOR, World, gateways::Gateway, user, visitor};

impl World {
    /// Sends messages, and repeats each until it is acknowledged or given up.
    pub(crate) async fn send(self: Arc<Self>, sender: usize) {
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
    pub(crate) async fn history(
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
    pub(crate) async fn visit(self: Arc<Self>) {
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
    pub(crate) async fn look(self: Arc<Self>) {
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
    pub(crate) async fn evict(self: Arc<Self>) {
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
    pub(crate) async fn read(self: Arc<Self>) {
        loop {
            sleep(self.millis(50, 900)).await;
            self.history(self.below(3), 0).await;
        }
    }
}

/// A client of one user. It connects, registers, reads what it missed, and listens.
pub(crate) struct Device {
    pub(crate) user: usize,
    /// For each conversation, the seqs that it has.
    pub(crate) got: Mutex<[BTreeSet<Seq>; 3]>,
    pub(crate) connected: Mutex<Option<Arc<Gateway>>>,
    pub(crate) reconnect: Notify,
}

impl Device {
    /// Whether the user is a participant: all users of the group and the channel, the first two of the dm.
    pub(crate) fn is_in(&self, conversation: usize) -> bool {
        conversation != 1 || self.user < 2
    }

    pub(crate) async fn live(self: Arc<Self>, world: Arc<World>) {
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
            if let Some((conversation, upto)) = to_read.pop_front()
                && !self.catch_up(world, conversation, upto).await
            {
                to_read.push_back((conversation, upto));
                sleep(Duration::from_millis(100)).await;
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
                to_read.extend(self.sees(world, &event));
            }
        }
    }

    /// Reads the messages up to `upto` that the user missed, from any gateway. Returns false if it must be repeated.
    async fn catch_up(&self, world: &World, conversation: usize, upto: Seq) -> bool {
        let have = contiguous(&self.got.lock().unwrap()[conversation]);
        if have >= upto {
            return true;
        }
        let Some((entries, _)) = world.history(conversation, have).await else {
            return false;
        };
        let seqs = entries.iter().map(|(seq, _)| *seq);
        self.got.lock().unwrap()[conversation].extend(seqs);
        true
    }

    /// Notes the message of an event. Returns the conversation to read, and up to which seq, if messages before it are
    /// missing.
    fn sees(&self, world: &World, event: &serde_json::Value) -> Option<(usize, Seq)> {
        let id = event["conversation"].as_str().unwrap_or_default();
        let position = world.conversations.iter().position(|c| c.to_string() == id);
        let conversation = position?;
        match event["type"].as_str() {
            Some("message") => {
                let seq = event["seq"].as_u64().unwrap();
                let client: ClientId = event["client_id"].as_str().unwrap().parse().unwrap();
                world
                    .checker
                    .lock()
                    .unwrap()
                    .saw(conversation, std::iter::once((seq, client)));
                let mut got = self.got.lock().unwrap();
                got[conversation].insert(seq);
                (contiguous(&got[conversation]) < seq).then_some((conversation, seq))
            }
            Some("resync") => Some((conversation, event["head"].as_u64().unwrap())),
            _ => None,
        }
    }
}

/// The seq up to which nothing is missing.
pub(crate) fn contiguous(got: &BTreeSet<Seq>) -> Seq {
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
pub(crate) async fn create(world: &Arc<World>) {
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
