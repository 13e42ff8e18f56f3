//! Where everything that comes from peers goes, and what a new version of the ring means here.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt, stream};
use metrics::counter;
use tokio::time::{Instant, sleep, timeout};

use super::{
    answers::Asked,
    delivery::Delivery,
    home::Home,
    link::Token,
    lock,
    members::{Adopt, MembershipAgent},
    membership::Learned,
    message::{Ask, Delivered, Interest, Message, encode},
    peers::{Peers, Receive},
    router::Router,
    status::BEAT_SEEN,
    view::View,
};
use crate::{
    chat::{Audience, Conversations, Error, InboxWriter, Operation, Outcome, Page, Publication},
    model::{ConversationId, Epoch, GatewayId, Seq, Topic, UserId, limits::RESUME_ENTRIES_MAX},
    store::Store,
    tasks::Tasks,
};

/// Topics in one frame.
pub(super) const TOPICS_AT_ONCE: usize = 1_000;
/// Bytes of entries sent to a gateway that has missed them; more is a `resync`.
const CATCH_UP_BYTES_MAX: usize = 4 << 20;
/// Between two tries of what could not be done.
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// Between two looks for gateways that are gone and not repaired.
const REPAIR_EVERY: Duration = Duration::from_secs(10);
/// A member without a link for so long, or twice as long if it is the older one, is removed.
const CUT_OFF_MAX: Duration = Duration::from_secs(4);
/// Conversations repaired at once.
const REPAIRS_AT_ONCE: usize = 32;

pub struct Exchange {
    me: GatewayId,
    members: Arc<MembershipAgent>,
    peers: Arc<Peers>,
    home: Arc<Home>,
    delivery: Arc<Delivery>,
    router: Arc<Router>,
    conversations: Conversations,
    inbox: Arc<InboxWriter>,
    store: Arc<dyn Store>,
    tasks: Tasks,
    /// The version that the others were told of as adopted.
    told: AtomicU64,
    /// Channels that a gateway is to catch up with, and from where.
    behind: Mutex<Vec<(ConversationId, GatewayId, Seq)>>,
    /// Those that said that they leave: listened to until they have, or their lease has ended.
    leaving: Mutex<BTreeSet<GatewayId>>,
    /// Members without a link, and since when.
    cut_off: Mutex<BTreeMap<GatewayId, Instant>>,
}

impl Exchange {
    #[expect(
        clippy::too_many_arguments,
        reason = "the one place where all of them meet"
    )]
    pub(super) fn new(
        members: Arc<MembershipAgent>,
        peers: Arc<Peers>,
        home: Arc<Home>,
        delivery: Arc<Delivery>,
        router: Arc<Router>,
        conversations: Conversations,
        inbox: Arc<InboxWriter>,
        store: Arc<dyn Store>,
        tasks: Tasks,
    ) -> Arc<Self> {
        Arc::new(Self {
            me: members.me(),
            told: AtomicU64::new(0),
            members,
            peers,
            home,
            delivery,
            router,
            conversations,
            inbox,
            store,
            tasks,
            behind: Mutex::default(),
            leaving: Mutex::default(),
            cut_off: Mutex::default(),
        })
    }

    /// Begins to listen to peers and to follow the ring; for tasks.
    pub(super) fn start(self: &Arc<Self>) {
        let this = Arc::downgrade(self);
        self.members.give(self.conversations.clone(), this.clone());
        self.peers.start(this);
        let (following, keeping, repairing) = (self.clone(), self.clone(), self.clone());
        self.tasks.keep(move || following.clone().follow_ring());
        self.tasks.keep(move || keeping.clone().keep_up());
        self.tasks.keep(move || repairing.clone().repair());
    }

    /// Until every member can be spoken to, and what this gateway owns may be begun.
    pub(super) async fn ready(&self) {
        let mut changes = self.members.view_changes();
        while !(self.members.may_begin()
            && self.members.lease().holds(Instant::now())
            && self.home.is_complete()
            && self
                .peers
                .are_connected(self.members.ring().load().members()))
        {
            let _ = timeout(RETRY_AFTER, changes.changed()).await;
        }
    }

    /// Tells the others that this gateway leaves.
    pub(super) fn leaving(&self) {
        let others = self.members.concerned();
        self.peers.broadcast(&others, &Message::Leaving);
    }

    /// Who said that it leaves has left, or can do nothing any more.
    fn forget_left(&self, left: impl Fn(GatewayId) -> bool) {
        let left: Vec<_> = lock(&self.leaving).extract_if(.., |g| left(*g)).collect();
        for gateway in left {
            self.peers.forget(gateway);
        }
    }

    /// Until everything said to the others was dealt with, after this gateway has left.
    pub(super) async fn said(&self) {
        let version = self.members.ring().load().version();
        while self.told.load(Ordering::Acquire) < version
            || !self.peers.are_idle(&self.members.concerned())
        {
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Tells of each version that is adopted, in the order of the rules.
    async fn follow_ring(self: Arc<Self>) {
        let mut changes = self.members.view_changes();
        loop {
            let version = changes.version();
            if version > self.told.load(Ordering::Acquire) {
                self.tell_adopted(version).await;
                if self.members.ring().load().version() == version {
                    self.told.store(version, Ordering::Release);
                }
                continue;
            }
            changes.changed().await;
        }
    }

    async fn tell_adopted(&self, version: Epoch) {
        let row = self.members.row();
        let concerned = self.members.concerned();
        self.know_peers();
        self.peers.broadcast(&concerned, &Message::Ring(row));
        self.members.let_go().await;
        self.peers
            .broadcast(&concerned, &Message::Adopted { version });
        // Rule [flush]: whatever was published to an old home is in the rows before a new one speaks for anyone.
        let newer = || self.members.ring().load().version() > version;
        while !self.inbox.flush().await {
            if newer() {
                return;
            }
            sleep(RETRY_AFTER).await;
        }
        self.announce(version);
    }

    /// Tells every topic's home or owner that sockets here are interested in it.
    fn announce(&self, version: Epoch) {
        let ring = self.members.ring().load_full();
        if ring.version() != version {
            return;
        }
        let edge = self.router.edge();
        edge.telling(|| {
            let mut told: BTreeMap<GatewayId, Vec<Interest>> =
                ring.members().iter().map(|&m| (m, Vec::new())).collect();
            for interest in edge.interests() {
                let place = ring.responsible(&interest.topic);
                if let (Topic::Channel(channel), None) = (&interest.topic, interest.passed) {
                    edge.follow_later(*channel, None);
                }
                if let Some(told) = place.and_then(|place| told.get_mut(&place)) {
                    told.push(interest);
                }
            }
            for (gateway, topics) in told {
                if gateway == self.me {
                    self.interested(gateway, &topics, version);
                    continue;
                }
                for topics in topics.chunks(TOPICS_AT_ONCE) {
                    self.peers.announce(gateway, version, topics.to_vec());
                }
                let announced = encode(&Message::Announced { version });
                self.peers.send(gateway, announced, None);
            }
        });
        self.announced(self.me, version);
    }

    /// A member has said everything.
    fn announced(&self, member: GatewayId, version: Epoch) {
        tracing::trace!(me = %self.me, %member, version, "that was all");
        self.home.announced(member, version);
        self.members.wake();
    }

    fn interested(&self, gateway: GatewayId, topics: &[Interest], version: Epoch) {
        tracing::trace!(me = %self.me, %gateway, version, ?topics, "announced");
        for interest in topics {
            self.home.interested(gateway, interest, version);
            if let (Topic::Channel(channel), Some(passed)) = (&interest.topic, interest.passed) {
                lock(&self.behind).push((*channel, gateway, passed));
            }
        }
    }

    async fn keep_up(self: Arc<Self>) {
        loop {
            self.know_peers();
            self.remove_unreachable().await;
            self.finish();
            if self.delivery.has_refused() {
                self.delivery.reroute();
            }
            self.router.follow_pending();
            self.catch_up().await;
            drop(timeout(RETRY_AFTER, self.router.edge().following.notified()).await);
        }
    }

    fn know_peers(&self) {
        let (concerned, addresses) = (self.members.concerned(), self.members.addresses());
        self.peers.know(&concerned, &addresses);
        self.forget_left(|gateway| self.members.is_over(gateway));
    }

    /// A member that lives, but cannot be spoken to, holds up all that goes through it. Of the two, the one that reaches
    /// most of the ring goes on; between equals, the older one. Who was removed joins again when it reaches everyone.
    async fn remove_unreachable(&self) {
        let ring = self.members.ring().load_full();
        let members = ring.members();
        let unreachable = {
            let mut cut_off = lock(&self.cut_off);
            let now = Instant::now();
            let since = |&peer: &GatewayId| (peer, cut_off.get(&peer).copied().unwrap_or(now));
            let apart = members.iter();
            let apart = apart.filter(|&&peer| !self.peers.are_connected(&[peer]));
            let apart = apart.map(since).collect();
            *cut_off = apart;
            let reached = 2 * (members.len() - cut_off.len());
            let oldest = members.iter().min() == Some(&self.me);
            if reached < members.len() || (reached == members.len() && !oldest) {
                return;
            }
            let patience = |peer| CUT_OFF_MAX * if self.me < peer { 1 } else { 2 };
            let unreachable = cut_off
                .iter()
                .filter(|(peer, since)| now - **since > patience(**peer));
            unreachable.map(|(&peer, _)| peer).collect::<Vec<_>>()
        };
        if !unreachable.is_empty() {
            self.members
                .remove(&unreachable, "it cannot be reached")
                .await;
        }
    }

    /// What was lost in the middle of something is finished by whoever owns it now.
    fn finish(self: &Arc<Self>) {
        for conversation in self.conversations.take_unfinished() {
            let exchange = self.clone();
            self.tasks.spawn_until_drained(async move {
                let ask = exchange
                    .router
                    .ask(conversation, UserId::gateway(), Operation::Details);
                // Whatever the answer: asking loads it.
                let answered = !ask.await.is_err_and(|error| error.is_unavailable());
                exchange.conversations.asked(conversation, answered);
            });
        }
    }

    /// Rule 7: who has missed something of a channel gets it from its owner.
    async fn catch_up(&self) {
        let behind = std::mem::take(&mut *lock(&self.behind));
        let again = stream::iter(behind)
            .map(|(channel, gateway, passed)| async move {
                let done = self.catch_up_with(channel, gateway, passed).await;
                (!done).then_some((channel, gateway, passed))
            })
            .buffer_unordered(REPAIRS_AT_ONCE)
            .filter_map(async |again| again)
            .collect::<Vec<_>>()
            .await;
        lock(&self.behind).extend(again);
    }

    async fn catch_up_with(
        &self,
        channel: ConversationId,
        gateway: GatewayId,
        passed: Seq,
    ) -> bool {
        if self.members.ring().load().owner(channel) != Some(self.me) {
            return true; // Its new owner is told by the gateway itself.
        }
        if gateway != self.me && !self.peers.has_room(gateway) {
            return false;
        }
        let limit = usize::try_from(RESUME_ENTRIES_MAX).unwrap_or(usize::MAX);
        let operation = Operation::CatchUp {
            after: passed,
            limit,
        };
        match self
            .router
            .ask_here(channel, UserId::gateway(), operation)
            .await
        {
            Ok(Outcome::History(page)) => {
                let is_whole = page.reaches_head(passed);
                let Page { entries, head } = page;
                let entry = |entry| {
                    Delivered::Publication(Publication::Entry {
                        conversation: channel,
                        entry,
                        audience: Audience::Channel,
                    })
                };
                let entries: Vec<_> = entries.into_iter().map(entry).collect();
                let too_many = head - passed.min(head) > RESUME_ENTRIES_MAX;
                if too_many || !is_whole || encoded_bytes(&entries) > CATCH_UP_BYTES_MAX {
                    self.deliver(gateway, &Delivered::Resync { channel, head });
                } else if gateway != self.me && !self.peers.has_room(gateway) {
                    return false; // Others have taken the room meanwhile.
                } else {
                    entries
                        .iter()
                        .for_each(|entry| self.deliver(gateway, entry));
                }
                true
            }
            Err(error) if error.is_unavailable() => false,
            Ok(_) | Err(_) => true,
        }
    }

    /// Something for the sockets here.
    fn take(&self, delivered: Delivered) {
        if let Delivered::Resync { channel, .. } = delivered {
            let router = self.router.clone();
            self.tasks
                .spawn_until_drained(async move { router.check_spectators(channel).await });
        }
        self.router.edge().deliver(delivered);
    }

    fn deliver(&self, gateway: GatewayId, delivered: &Delivered) {
        if gateway == self.me {
            self.take(delivered.clone());
        } else {
            let bytes = encode(&Message::Deliver(delivered.clone()));
            self.peers.send(gateway, bytes, None);
        }
    }

    /// Repairs what gateways that are gone have left. Each of them is one member's business, whoever that is now.
    async fn repair(self: Arc<Self>) {
        let mut changes = self.members.view_changes();
        let mut version = 0;
        loop {
            let now = changes.version();
            let looked_at = Instant::now();
            if let Err(error) = self.repair_gone().await {
                tracing::warn!(%error, "crash repair could not finish; trying again");
                sleep(RETRY_AFTER * 5).await;
                continue;
            }
            version = version.max(now);
            // At once when the ring changes, and now and then.
            while changes.version() <= version && looked_at.elapsed() < REPAIR_EVERY {
                let _ = timeout(REPAIR_EVERY, changes.changed()).await;
            }
        }
    }

    async fn repair_gone(&self) -> Result<(), Error> {
        let ring = self.members.ring().load_full();
        let members = ring.members();
        let mut gone = self.store.active_gateways().await?;
        gone.retain(|gateway| !members.contains(gateway));
        gone.retain(|gateway| ring.owner(ConversationId(gateway.0)) == Some(self.me));
        for gateway in gone {
            if self.lives(gateway).await? {
                continue;
            }
            let touched = self.store.activity(gateway).await?;
            tracing::info!(%gateway, conversations = touched.len(), "crash repair began");
            let repairs = touched.into_iter().map(|conversation| {
                let repair = self
                    .router
                    .ask(conversation, UserId::gateway(), Operation::Repair);
                async move {
                    match repair.await {
                        Err(error) if error.is_unavailable() => Err(error),
                        _ => Ok(()),
                    }
                }
            });
            let mut repairs = stream::iter(repairs).buffer_unordered(REPAIRS_AT_ONCE);
            while let Some(repaired) = repairs.next().await {
                repaired?;
                counter!("chat_conversations_repaired_total").increment(1);
            }
            self.store.forget_activity(gateway).await?;
            tracing::info!(%gateway, "crash repair ended");
        }
        Ok(())
    }

    /// Not a member, but its heart beats: it is about to join, or it leaves in good order.
    async fn lives(&self, gateway: GatewayId) -> Result<bool, Error> {
        let before = self.store.heartbeat(gateway).await?;
        if before.is_none() {
            return Ok(false);
        }
        sleep(BEAT_SEEN).await;
        Ok(self.store.heartbeat(gateway).await? != before)
    }

    fn asked(&self, from: GatewayId, id: u64, ask: Ask) -> Asked {
        counter!("chat_operations_forwarded_total").increment(1);
        // Noted at once: what comes after this on the link is from a gateway that is interested.
        self.router.note(from, &ask);
        let (refuse, router) = (ask.refuse(), self.router.clone());
        Asked {
            id,
            refuse,
            answer: Box::pin(async move { router.answer_here(ask).await }),
        }
    }
}

/// Bytes of these between gateways, as far as that matters.
fn encoded_bytes(entries: &[Delivered]) -> usize {
    let mut bytes = 0;
    for entry in entries {
        bytes += encode(entry).len();
        if bytes > CATCH_UP_BYTES_MAX {
            break;
        }
    }
    bytes
}

impl Receive for Exchange {
    fn receive(&self, from: GatewayId, message: Message) -> Option<Asked> {
        match message {
            Message::Ask { id, ask } => return Some(self.asked(from, id, ask)),
            Message::Answer { .. } | Message::AnswerPart { .. } => {}
            Message::Publish { part, publication } => {
                let peers = self.peers.clone();
                let done = Token::new(move |taken| {
                    peers.send(from, encode(&Message::Published { part, taken }), None);
                });
                self.home.publication(publication, done);
            }
            Message::Published { part, taken } => self.delivery.published(part, from, taken),
            Message::Sent { user, channel, seq } => self.home.sent(user, channel, seq),
            Message::Deliver(delivered) => {
                if let Delivered::Publication(publication) = &delivered {
                    tracing::trace!(me = %self.me, %from, publication = %super::home::named(publication), "delivered");
                }
                self.take(delivered);
            }
            Message::Interests { version, topics } => {
                self.interested(from, &topics, version);
            }
            Message::Announced { version } => self.announced(from, version),
            Message::Uninterested { topic } => {
                tracing::trace!(me = %self.me, %from, ?topic, "uninterested");
                self.home.uninterested(from, &topic);
            }
            Message::Adopted { version } => {
                self.members.peer_adopted(from, version);
                let ring = self.members.ring().load_full();
                let left = ring.version() <= version && !ring.members().contains(&from);
                self.forget_left(|gateway| left && gateway == from);
            }
            Message::Leaving => {
                lock(&self.leaving).insert(from);
            }
            Message::Ring(row) => self.members.learn(&row, None),
        }
        None
    }
}

impl Adopt for Exchange {
    fn adopt(&self, before: &View, after: &View, learned: Learned) {
        self.home.adopt(after, learned);
        self.delivery.reroute();
        let gone = before
            .members()
            .iter()
            .filter(|g| !after.members().contains(g));
        let leaving = lock(&self.leaving).clone();
        for &gateway in gone.filter(|&&g| g != self.me && !leaving.contains(&g)) {
            self.peers.forget(gateway);
        }
    }
}
