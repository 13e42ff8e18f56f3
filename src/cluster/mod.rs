//! Who owns what, and the way there. `Router` carries requests inward, to a conversation's owner or a
//! user's home; `Users` and `Channels` ask through it. `Delivery` carries publications outward, to the sockets concerned.
//! They meet only in [`Cluster::new`], which builds all of them, and in [`Exchange`], which hands the messages of peers to
//! them.
//!
//! With the embedded store the ring has one member and every hop is a function call.

mod delivery;
mod exchange;
mod home;
mod inward;
mod ring;
mod sockets;
mod wire;

use std::{sync::Arc, time::Duration};

pub use delivery::Delivery;
pub use exchange::Exchange;
pub use home::{Home, attention::Attention, pushes::Pushes};
pub use inward::{channels::Channels, inbox::Inbox, router::Router, users::Users};
use inward::{
    gateways::{Gateways, Others},
    here::Here,
};
pub use ring::{
    finalize::{Finalized, NotFinalized, finalize},
    members::{MembershipAgent, NotJoined},
    membership::{LEASE, Learned, Membership, Rule, may_join, raised},
    raise::{NotRaised, raise_ring},
    status::{Status, StatusOf, status},
    view::View,
};
use sockets::interests::Interests;
pub use sockets::{
    events::{changed_event, missed, state_of},
    local_sockets::LocalSockets,
};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use wire::peers::Peers;
pub use wire::{
    network::{Connection, Frames, Network, ToPeer, WebSockets},
    question::{InboxRef, ToNotify},
};

use crate::{
    chat::{Conversations, InboxWriter, Lease, Publish},
    fanout::Hub,
    memory::Memory,
    model::{AttachmentId, ConversationId},
    store::Store,
    tasks::Tasks,
};

/// The time in which writes and publications in progress may end when this gateway leaves. Then the next owner does it.
const LET_GO_WITHIN: Duration = Duration::from_millis(250);
/// The pause between two attempts to write the inbox when leaving.
const FLUSH_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// What became of the conversations that a leaving gateway could not close in time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum HandedOver {
    /// Their next owners have finished them.
    All,
    /// Another gateway finishes them by this one's activity rows, as after a crash.
    ToRepair,
    /// No other gateway was connected. The next one that starts finishes them.
    ToNobody,
}

/// The settings for connections to other gateways.
pub struct PeerSettings {
    /// The secret that all gateways of the cluster know.
    pub secret: String,
    pub network: Arc<dyn Network>,
}

/// This gateway's part of a cluster, or all of it if there is no other gateway.
pub struct Cluster {
    pub router: Arc<Router>,
    pub users: Arc<Users>,
    pub channels: Arc<Channels>,
    pub home: Arc<Home>,
    pub conversations: Conversations,
    pub inbox: Arc<InboxWriter>,
    delivery: Arc<Delivery>,
    exchange: Option<Arc<Exchange>>,
}

impl Cluster {
    #[expect(
        clippy::too_many_arguments,
        reason = "each is another part of the gateway"
    )]
    /// Builds all parts. `open` makes the conversations: they publish through the first argument and own under the lease.
    pub fn new(
        members: &Arc<MembershipAgent>,
        store: &Arc<dyn Store>,
        hub: &Arc<Hub>,
        peer_settings: Option<PeerSettings>,
        operation_timeout: Duration,
        memory: Memory,
        tasks: &Tasks,
        open: impl FnOnce(Arc<dyn Publish>, Arc<InboxWriter>, Lease) -> Conversations,
    ) -> Self {
        let me = members.me();
        let ring = members.ring();
        let sockets = Arc::new(LocalSockets::new(hub.clone()));
        let interests = Arc::new(Interests::default());
        let inbox = Arc::new(InboxWriter::new(store.clone(), memory));
        let ranks = inbox.ranks();
        let peers = peer_settings.map(|s| {
            let network = s.network.clone();
            Peers::new(me, &s.secret, network, ranks.clone(), tasks.clone())
        });
        let view = ring.load().as_ref().clone();
        let (here, others, known) = (sockets.clone(), peers.clone(), interests.clone());
        let home = Home::new(me, store.clone(), here, others, known, view.clone(), memory);
        let home = Arc::new(home);
        let (here, at_home, others) = (sockets.clone(), home.clone(), peers.clone());
        let delivery = Delivery::new(me, view, here, at_home, interests, others);
        let conversations = open(delivery.clone(), inbox.clone(), members.lease());
        let agent = members.clone();
        let others = peers.clone().map(|peers| Others {
            members: agent,
            peers,
        });
        let (at_home, here) = (home.clone(), sockets.clone());
        let gateways = Gateways::new(me, ring, others, operation_timeout, at_home, here);
        let here = Arc::new(Here {
            gateways: Arc::new(gateways),
            store: store.clone(),
            conversations: conversations.clone(),
            home: home.clone(),
            sockets,
            tasks: tasks.clone(),
        });
        let router = Arc::new(Router::new(here.clone()));
        let users = Arc::new(Users::new(router.clone()));
        let channels = Arc::new(Channels::new(router.clone()));
        let exchange = peers.map(|peers| {
            Exchange::new(
                members.clone(),
                peers,
                delivery.clone(),
                here,
                router.clone(),
                channels.clone(),
                inbox.clone(),
            )
        });
        Self {
            router,
            users,
            channels,
            home,
            conversations,
            inbox,
            delivery,
            exchange,
        }
    }

    /// Returns the port through which publications leave, for those that no conversation's owner makes.
    #[must_use]
    pub fn publish(&self) -> Arc<dyn Publish> {
        self.delivery.clone()
    }

    /// Sets what is told of files that messages no longer have.
    pub fn on_dropped_file(
        &self,
        tell: impl Fn(ConversationId, AttachmentId) + Send + Sync + 'static,
    ) {
        self.delivery.on_dropped_file(Box::new(tell));
    }

    /// Connects to the other gateways.
    pub fn start(&self) {
        if let Some(exchange) = &self.exchange {
            exchange.start();
        }
    }

    /// Waits until all other gateways are connected and everything may be owned, for `limit` at most. Returns whether that
    /// is so.
    pub async fn ready(&self, limit: Duration) -> bool {
        match &self.exchange {
            Some(exchange) => timeout(limit, exchange.ready()).await.is_ok(),
            None => true,
        }
    }

    /// Closes all conversations, writes the inbox rows and leaves the ring. Returns whether the rows were written by `ends`.
    /// Conversations that took too long have ended, and their next owners finish them: see
    /// [`Conversations::wait_until_finished`].
    pub async fn leave(&self, members: &MembershipAgent, ends: Instant) -> bool {
        if let Some(exchange) = &self.exchange {
            exchange.leaving();
        }
        let mut done = false;
        let let_go = async {
            // Another gateway may be dead, and publications to it count as delivered only when that is known.
            let closed_by = if members.others().is_empty() {
                ends
            } else {
                ends.min(Instant::now() + LET_GO_WITHIN)
            };
            drop(timeout_at(closed_by, self.conversations.close()).await);
            // Rule [flush]: a row is written before another home answers for its user.
            let flushed = timeout_at(ends, async {
                while !self.inbox.flush().await {
                    sleep(FLUSH_AGAIN_AFTER).await;
                }
            });
            done = flushed.await.is_ok();
        };
        members.leave(let_go).await;
        done
    }

    /// Waits until other gateways, if there are any, have finished the conversations that did not close in time, for `limit` at
    /// most.
    pub async fn hand_over(&self, members: &MembershipAgent, limit: Duration) -> HandedOver {
        let Some(exchange) = &self.exchange else {
            return HandedOver::All;
        };
        // Afterwards the others have ended their links to this gateway.
        let has_successor = exchange.has_successor();
        if !members.others().is_empty() {
            drop(timeout(limit, self.conversations.wait_until_finished()).await);
        }
        if self.conversations.is_finished() {
            HandedOver::All
        } else if has_successor {
            HandedOver::ToRepair
        } else {
            HandedOver::ToNobody
        }
    }

    /// Waits until the others have acknowledged the last messages, for `limit` at most. To be called after leaving.
    pub async fn said(&self, limit: Duration) {
        if let Some(exchange) = &self.exchange {
            drop(timeout(limit, exchange.said()).await);
        }
    }
}
