//! What clients do, and what they see.

use std::{
    collections::{BTreeSet, VecDeque},
    io::Cursor,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use chat_gateway::{
    chat::{Creation, LogRange, Operation, Outcome, Page},
    cluster::InboxRef,
    fanout::{Frame, Subscriber},
    model::{ClientId, Content, Draft, Kind, Posting, Seq, SessionId},
    protocol::Codec,
};
use futures_util::FutureExt;
use rand::RngExt;
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};
use tokio_tungstenite::tungstenite::protocol::frame::FrameHeader;
use uuid::Uuid;

use super::{
    KINDS, SLEEPER, USERS, VISITOR, World,
    gateways::Gateway,
    held::{ClientRule, Held},
    order::Newest,
    user, visitor,
};

/// Takes the frames that a session was sent, and returns their events.
pub(in crate::cluster) fn events(frames: &mut VecDeque<Frame>) -> Vec<serde_json::Value> {
    let bytes: Vec<u8> = frames
        .drain(..)
        .flat_map(|frame| frame.bytes().to_vec())
        .collect();
    let mut wire = Cursor::new(bytes.as_slice());
    let next = || {
        let (_, length) = FrameHeader::parse(&mut wire).unwrap()?;
        let from = usize::try_from(wire.position()).unwrap();
        wire.set_position(wire.position() + length);
        Some(&bytes[from..from + usize::try_from(length).unwrap()])
    };
    std::iter::from_fn(next)
        .map(|payload| serde_json::from_slice(payload).unwrap())
        .collect()
}

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
                    content: Content::text(format!("<{client_id}>")),
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
                    self.texts.lock().unwrap()[conversation].push((sent.seq, sender));
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

    /// Reads the page of the entries after `after` through some gateway.
    pub(crate) async fn history(&self, conversation: usize, after: Seq) -> Option<Page> {
        let operation = Operation::History {
            range: LogRange::After(after),
            limit: 10_000,
        };
        let floor = self.seen.lock().unwrap()[conversation].newest;
        match self.ask(conversation, user(0), operation).await {
            Some(Ok(Outcome::History(page))) => {
                let entries = page.entries.iter().map(|e| (e.seq, e.client_id));
                self.checker.lock().unwrap().saw(conversation, entries);
                self.seen.lock().unwrap()[conversation].page(floor, &page);
                Some(page)
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
            self.rested().await;
            let Some(gateway) = self.some_gateway() else {
                continue;
            };
            let Some(cluster) = gateway.cluster() else {
                continue;
            };
            let channel = self.conversations[2];
            let visitor = visitor(session * 10 + VISITOR as u64);
            let (there, registering) = (cluster.clone(), visitor.clone());
            let (pause, looks) = (self.millis(0, 100), self.below(2) == 0);
            let subscribed = gateway.ask(async move {
                let places = there.users.register(&registering).await.ok()?;
                sleep(pause).await;
                if places.iter().any(|place| place.conversation == channel) {
                    there.channels.subscribe_own(&registering, &[channel]).await;
                } else {
                    there.channels.subscribe_own(&registering, &[]).await;
                }
                if looks {
                    drop(there.channels.subscribe(&registering, channel).await);
                }
                Some(())
            });
            if let Some(Some(())) = subscribed.await {
                let ends = Instant::now() + self.millis(0, 3_000);
                while Instant::now() < ends && gateway.is_up() {
                    self.sees(&visitor);
                    sleep(Duration::from_millis(5)).await;
                }
            }
            gateway
                .ask(async move { cluster.users.leave(&visitor) })
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
        for event in events(&mut frames) {
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
            self.rested().await;
            if let Some(cluster) = self.some_gateway().and_then(|gateway| gateway.cluster()) {
                cluster.conversations.evict_one();
            }
        }
    }

    /// Reads histories at random moments.
    pub(crate) async fn read(self: Arc<Self>) {
        loop {
            sleep(self.millis(50, 900)).await;
            self.rested().await;
            self.history(self.below(3), 0).await;
        }
    }
}

/// A client of one user. It connects, registers, reads what it missed, and listens.
pub(crate) struct Device {
    pub(crate) user: usize,
    /// For each conversation, the seqs that it has.
    pub(crate) got: Mutex<[BTreeSet<Seq>; 3]>,
    /// For each conversation, its messages with their changes.
    pub(crate) held: Mutex<[Held; 3]>,
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
            world.rested().await;
            session += 1;
            let Some(gateway) = world.some_gateway() else {
                continue;
            };
            let up = gateway.up.lock().unwrap().clone();
            let Some((cluster, ..)) = up else { continue };
            let id = SessionId(session * 10 + self.user as u64);
            let subscriber = Arc::new(Subscriber::new(id, user(self.user), Codec::Json, 1 << 22));
            let (registering, there) = (subscriber.clone(), cluster.clone());
            let channel = world.conversations[2];
            let registered = gateway.ask(async move {
                let places = there.users.register(&registering).await.ok()?;
                if places.iter().any(|place| place.conversation == channel) {
                    there.channels.subscribe_own(&registering, &[channel]).await;
                }
                Some(places)
            });
            let Some(Some(mut places)) = registered.await else {
                let leaving = subscriber.clone();
                gateway
                    .ask(async move { cluster.users.leave(&leaving) })
                    .await;
                continue;
            };
            *self.connected.lock().unwrap() = Some(gateway.clone());
            places.sort_unstable_by_key(|place| place.conversation);
            let missed = self.missed(&world, &places);
            self.listen(&world, &gateway, &subscriber, missed).await;
            *self.connected.lock().unwrap() = None;
            let leaving = subscriber;
            gateway
                .tasks
                .spawn(async move { cluster.users.leave(&leaving) });
        }
    }

    /// What the user missed while they were not connected, as far as their inbox says, and of the channel as far as the
    /// owner will say.
    fn missed(&self, world: &World, places: &[InboxRef]) -> Missed {
        let mut missed = Missed::default();
        for place in places {
            let position = |id| world.conversations.iter().position(|c| *c == id);
            let Some(conversation) = position(place.conversation) else {
                continue;
            };
            if let Some(last) = place.last_seq {
                missed.newest.knows(conversation, last);
                missed.to_read.push_back((conversation, last));
            }
            let cursor = self.held.lock().unwrap()[conversation].cursor;
            if self.held.lock().unwrap()[conversation].lacks_dropped() {
                missed.to_read.push_back((conversation, 0));
            }
            if place.rev > cursor && world.broken != Some(ClientRule::Resume) {
                missed.to_ask.insert(conversation);
            }
        }
        missed.to_read.push_back((2, Seq::MAX));
        // The inbox may lack a conversation whose first entry was published, and whose owner died before its rows were stored.
        for conversation in (0..3).filter(|c| self.is_in(*c)) {
            let is_read = missed.to_read.iter().any(|(of, _)| *of == conversation);
            if self.held.lock().unwrap()[conversation].lacks_dropped() && !is_read {
                missed.to_read.push_back((conversation, 0));
            }
        }
        if world.changing && world.broken != Some(ClientRule::Resume) {
            missed.to_ask.insert(2);
        }
        missed
    }

    async fn listen(
        &self,
        world: &World,
        gateway: &Gateway,
        subscriber: &Subscriber,
        mut missed: Missed,
    ) {
        let mut frames = VecDeque::new();
        loop {
            self.read_missed(world, &mut missed).await;
            let wait = missed.wait();
            let taken = tokio::select! {
                biased;
                () = self.reconnect.notified() => return,
                taken = subscriber.outbox.take(&mut frames) => Some(taken),
                () = sleep(wait) => None,
            };
            if gateway.over.load(Ordering::Relaxed) || gateway.up.lock().unwrap().is_none() {
                return; // The connection broke, or the client was told to reconnect.
            }
            match taken {
                Some(Ok(())) => {}
                Some(Err(_)) => return,
                None => continue,
            }
            for event in events(&mut frames) {
                self.sees(world, &event, &mut missed);
            }
        }
    }

    /// Reads some of what the user missed, from any gateway.
    async fn read_missed(&self, world: &World, missed: &mut Missed) {
        if !missed.to_read.is_empty() || !missed.to_ask.is_empty() {
            world.rested().await;
        }
        if let Some((_, conversation, page)) = missed.late.take_if(|(at, ..)| *at <= Instant::now())
        {
            self.take_page(world, conversation, &page, missed);
        }
        if world.changing && world.sending.load(Ordering::Relaxed) && world.below(20) == 0 {
            self.drop_messages(world, missed);
        }
        if let Some((conversation, upto)) = missed.to_read.pop_front()
            && !self.catch_up(world, conversation, upto, missed).await
        {
            missed.to_read.push_back((conversation, upto));
            sleep(Duration::from_millis(100)).await;
        }
        if let Some(conversation) = missed.to_ask.pop_first()
            && !self.ask_changes(world, conversation).await
        {
            missed.to_ask.insert(conversation);
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Drops messages of a conversation, and reads them again.
    fn drop_messages(&self, world: &World, missed: &mut Missed) {
        let conversation = world.below(3);
        let upto = contiguous(&self.got.lock().unwrap()[conversation]);
        let held = &mut self.held.lock().unwrap()[conversation];
        if upto > 0 && !held.lacks_dropped() && missed.late.is_none() {
            held.drop_upto(upto);
            missed.to_read.push_back((conversation, 0));
        }
    }

    /// Reads the messages up to `upto` that the user missed, or those that the client dropped. Returns false if it must be
    /// repeated.
    async fn catch_up(
        &self,
        world: &World,
        conversation: usize,
        upto: Seq,
        missed: &mut Missed,
    ) -> bool {
        let have = contiguous(&self.got.lock().unwrap()[conversation]);
        let after = if self.held.lock().unwrap()[conversation].lacks_dropped() {
            0
        } else if have < upto {
            have
        } else {
            return true;
        };
        let Some(page) = world.history(conversation, after).await else {
            return false;
        };
        // Events that come before the page may be of changes that the page lacks.
        if world.changing && missed.late.is_none() && world.below(2) == 0 {
            let at = Instant::now() + world.millis(0, 400);
            missed.late = Some((at, conversation, page));
        } else {
            self.take_page(world, conversation, &page, missed);
        }
        true
    }

    fn take_page(&self, world: &World, conversation: usize, page: &Page, missed: &mut Missed) {
        let seqs = page.entries.iter().map(|entry| entry.seq);
        self.got.lock().unwrap()[conversation].extend(seqs);
        if let Some(last) = page.entries.last() {
            missed.newest.knows(conversation, last.seq);
        }
        let mut held = self.held.lock().unwrap();
        if held[conversation].page(page, world.broken) {
            missed.to_ask.insert(conversation);
        }
    }

    /// Asks for the changes after the cursor. Returns false if it must be repeated.
    async fn ask_changes(&self, world: &World, conversation: usize) -> bool {
        let after = self.held.lock().unwrap()[conversation].cursor;
        let floor = world.seen.lock().unwrap()[conversation].newest;
        let operation = Operation::Changes { after, limit: 20 };
        let asked = world.ask(conversation, user(self.user), operation);
        let Some(Ok(Outcome::Changes(changes))) = asked.await else {
            return false;
        };
        world.seen.lock().unwrap()[conversation].answered(floor, changes.clone());
        !self.held.lock().unwrap()[conversation].answered(changes)
    }

    /// Notes the message or the changes of an event, and what the user missed if something before it is missing.
    fn sees(&self, world: &World, event: &serde_json::Value, missed: &mut Missed) {
        let id = event["conversation"].as_str().unwrap_or_default();
        let position = world.conversations.iter().position(|c| c.to_string() == id);
        let Some(conversation) = position else { return };
        match event["type"].as_str() {
            Some("message") => {
                let seq = event["seq"].as_u64().unwrap();
                let client: ClientId = event["client_id"].as_str().unwrap().parse().unwrap();
                let mut checker = world.checker.lock().unwrap();
                checker.saw(conversation, std::iter::once((seq, client)));
                // In a channel a new owner sends what a gateway has missed beside what is newer.
                if let Err(newest) = missed.newest.live(conversation, seq)
                    && KINDS[conversation] != Kind::Channel
                {
                    let user = self.user;
                    checker.find(format!(
                        "a session of user {user} in conversation {conversation}: live events jumped from {newest} to {seq}"
                    ));
                }
                drop(checker);
                self.held.lock().unwrap()[conversation].message(event);
                let mut got = self.got.lock().unwrap();
                got[conversation].insert(seq);
                if contiguous(&got[conversation]) < seq {
                    missed.to_read.push_back((conversation, seq));
                }
            }
            Some("changed") => {
                let mut held = self.held.lock().unwrap();
                if held[conversation].changed(event, world.broken) {
                    missed.to_ask.insert(conversation);
                }
            }
            Some("resync") => {
                let head = event["head"].as_u64().unwrap();
                missed.newest.knows(conversation, head);
                missed.to_read.push_back((conversation, head));
            }
            _ => {}
        }
    }
}

/// What a client must read.
#[derive(Default)]
struct Missed {
    /// The conversations with missing messages, and up to which seq they are read.
    to_read: VecDeque<(usize, Seq)>,
    /// The conversations with missing changes.
    to_ask: BTreeSet<usize>,
    /// A page that arrives at this time, of this conversation.
    late: Option<(Instant, usize, Page)>,
    newest: Newest,
}

impl Missed {
    /// The longest time to wait for events before something is read.
    fn wait(&self) -> Duration {
        let late = self.late.as_ref().map(|(at, ..)| *at - Instant::now());
        let wait = if self.to_read.is_empty() && self.to_ask.is_empty() {
            Duration::from_millis(500)
        } else {
            Duration::from_millis(1)
        };
        late.map_or(wait, |late| late.min(wait))
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
        let sleeper = (kind == Kind::Group && world.consuming.pushing).then_some(SLEEPER);
        loop {
            let creation = Creation {
                kind,
                participants: (1..users).chain(sleeper).map(user).collect(),
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
