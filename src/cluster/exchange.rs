//! The meeting point of a gateway's parts with its peers and the ring: what comes from peers, what a new version of the
//! ring asks for, and what must be done again and again to keep up.

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

use crate::{
    chat::{Conversations, InboxWriter},
    cluster::{
        delivery::Delivery,
        home::Home,
        inward::{channels::Channels, here::Here, router::Router},
        ring::members::MembershipAgent,
        wire::peers::Peers,
    },
    model::{ConversationId, Cursor, GatewayId},
    store::Store,
    tasks::Tasks,
};

/// The topics in one `Interests` message.
pub(super) const TOPICS_AT_ONCE: usize = 1_000;
/// The time between two tries of what could not be done.
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// The conversations or channels that are repaired or caught up with at the same time.
const REPAIRS_AT_ONCE: usize = 32;

pub struct Exchange {
    me: GatewayId,
    members: Arc<MembershipAgent>,
    peers: Arc<Peers>,
    home: Arc<Home>,
    delivery: Arc<Delivery>,
    here: Arc<Here>,
    router: Arc<Router>,
    channels: Arc<Channels>,
    conversations: Conversations,
    inbox: Arc<InboxWriter>,
    store: Arc<dyn Store>,
    tasks: Tasks,
    /// The newest version of the ring for which the others know that this gateway has adopted it.
    told: AtomicU64,
    /// The channels of which a gateway may have missed entries, and the position that it has reached.
    behind: Mutex<Vec<(ConversationId, GatewayId, Cursor)>>,
    /// The gateways that are leaving. They are listened to until they have left, or their lease has ended.
    leaving: Mutex<BTreeSet<GatewayId>>,
    /// The members without a link, each with the time since when.
    cut_off: Mutex<BTreeMap<GatewayId, Instant>>,
}

impl Exchange {
    pub(super) fn new(
        members: Arc<MembershipAgent>,
        peers: Arc<Peers>,
        delivery: Arc<Delivery>,
        here: Arc<Here>,
        router: Arc<Router>,
        channels: Arc<Channels>,
        inbox: Arc<InboxWriter>,
    ) -> Arc<Self> {
        Arc::new(Self {
            me: members.me(),
            told: AtomicU64::new(0),
            members,
            peers,
            home: here.home.clone(),
            delivery,
            router,
            channels,
            conversations: here.conversations.clone(),
            inbox,
            store: here.store.clone(),
            tasks: here.tasks.clone(),
            here,
            behind: Mutex::default(),
            leaving: Mutex::default(),
            cut_off: Mutex::default(),
        })
    }

    /// Begins to listen to peers and to tell them of the ring, in tasks.
    pub(super) fn start(self: &Arc<Self>) {
        let this = Arc::downgrade(self);
        self.members.give(self.conversations.clone(), this.clone());
        self.peers.start(this);
        let (telling, keeping, repairing) = (self.clone(), self.clone(), self.clone());
        self.tasks.keep(move || telling.clone().tell_versions());
        self.tasks.keep(move || keeping.clone().keep_up());
        self.tasks.keep(move || repairing.clone().repair());
    }

    /// Waits until every member has a link, and this gateway may serve what it owns.
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

    /// Does again and again what may have become possible or necessary meanwhile.
    async fn keep_up(self: Arc<Self>) {
        loop {
            self.know_peers();
            self.remove_unreachable().await;
            self.finish();
            self.delivery.send_refused();
            self.channels.tell_waiting();
            self.catch_up().await;
            drop(timeout(RETRY_AFTER, self.here.sockets.more_untold.notified()).await);
        }
    }
}
