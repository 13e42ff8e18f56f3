//! Where everything that comes from peers goes, and what a new version of the ring means here.

mod catch_up;
mod handover;
mod inbound;
mod reachability;
mod recovery;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, atomic::AtomicU64},
    time::Duration,
};

use tokio::time::{Instant, timeout};

use super::{delivery::Delivery, home::Home, members::Members, peers::Peers, router::Router};
use crate::{
    chat::{Conversations, InboxWriter},
    model::{ConversationId, GatewayId, Seq},
    store::Store,
    tasks::Tasks,
};

/// Topics in one frame.
pub(super) const TOPICS_AT_ONCE: usize = 1_000;
/// Between two tries of what could not be done.
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// Conversations repaired at once.
const REPAIRS_AT_ONCE: usize = 32;

pub struct Exchange {
    me: GatewayId,
    members: Arc<Members>,
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
        members: Arc<Members>,
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
    pub(super) async fn settled(&self) {
        let mut news = self.members.news();
        while !(self.members.may_begin()
            && self.members.lease().holds(Instant::now())
            && self.home.is_complete()
            && self
                .peers
                .are_connected(self.members.ring().load().members()))
        {
            let _ = timeout(RETRY_AFTER, news.changed()).await;
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
}
