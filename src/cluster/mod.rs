//! Who owns what, and the way there. `Router` carries requests inward, to a conversation's owner or a
//! user's home; `Delivery` carries publications outward, to the sockets concerned. They meet only in [`Cluster::new`],
//! which builds both, and in [`Exchange`], which hands the messages of peers to them.
//!
//! With the embedded store the ring has one member and every hop is a function call.

mod answers;
mod attention;
mod changed;
mod channel_progress;
mod channels;
mod delivery;
mod devices;
mod exchange;
mod finalize;
mod home;
mod inbox;
mod interests;
mod link;
mod local;
mod local_sockets;
mod members;
mod membership;
mod memberships;
mod message;
mod network;
mod overlay;
mod peers;
mod presence;
mod pushes;
mod pushing;
mod raise;
mod registrations;
mod router;
mod sessions;
mod settings;
mod status;
mod unproven;
mod upload_counts;
mod uploads;
mod view;
mod view_changes;

use std::{sync::Arc, time::Duration};

pub use attention::Attention;
pub use changed::{changed_event, missed, state_of};
pub use delivery::Delivery;
pub use exchange::Exchange;
pub use finalize::{Finalized, NotFinalized, finalize};
pub use home::Home;
pub use inbox::Inbox;
pub use local_sockets::LocalSockets;
pub use members::{MembershipAgent, NotJoined};
pub use membership::{LEASE, Learned, Membership, Rule, may_join, raised};
pub use memberships::InboxRef;
pub use network::{Connection, Frames, Network, ToPeer, WebSockets};
pub use pushes::{Pushes, ToNotify};
pub use raise::{NotRaised, raise_ring};
pub use router::Router;
pub use status::{Status, StatusOf, status};
use tokio::time::{Instant, sleep, timeout, timeout_at};
pub use view::View;

use crate::{
    chat::{Conversations, InboxWriter, Lease, Publish},
    fanout::Hub,
    memory::Memory,
    model::{AttachmentId, ConversationId, CurrentLevel, Level},
    store::Store,
    tasks::{Tasks, lock, read, write},
};

/// The time in which writes and publications in progress may end when this gateway leaves. Then the next owner does it.
const LET_GO_WITHIN: Duration = Duration::from_millis(250);
/// The pause between two attempts to write the inbox when leaving.
const FLUSH_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// The settings for connections to other gateways.
pub struct PeerSettings {
    /// The secret that all gateways of the cluster know.
    pub secret: String,
    pub network: Arc<dyn Network>,
}

/// This gateway's part of a cluster, or all of it if there is no other gateway.
pub struct Cluster {
    pub router: Arc<Router>,
    pub home: Arc<Home>,
    pub conversations: Conversations,
    pub inbox: Arc<InboxWriter>,
    level: CurrentLevel,
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
        let interests = Arc::new(interests::Interests::default());
        let inbox = Arc::new(InboxWriter::new(store.clone(), memory));
        let ranks = inbox.ranks();
        let peers = peer_settings.map(|s| {
            let network = s.network.clone();
            peers::Peers::new(me, &s.secret, network, ranks.clone(), tasks.clone())
        });
        let view = ring.load().as_ref().clone();
        let (here, others, known) = (sockets.clone(), peers.clone(), interests.clone());
        let home = Home::new(me, store.clone(), here, others, known, view.clone(), memory);
        let home = Arc::new(home);
        let (here, at_home, others) = (sockets.clone(), home.clone(), peers.clone());
        let delivery = Delivery::new(me, view, here, at_home, interests, others);
        let conversations = open(delivery.clone(), inbox.clone(), members.lease());
        let agent = members.clone();
        let others = peers.clone().map(|peers| router::Others {
            members: agent,
            peers,
        });
        let router = Arc::new(Router::new(
            me,
            ring,
            store.clone(),
            conversations.clone(),
            home.clone(),
            sockets,
            others,
            members.level(),
            operation_timeout,
            tasks.clone(),
        ));
        let exchange = peers.map(|peers| {
            Exchange::new(
                members.clone(),
                peers,
                home.clone(),
                delivery.clone(),
                router.clone(),
                conversations.clone(),
                inbox.clone(),
                store.clone(),
                tasks.clone(),
            )
        });
        Self {
            router,
            home,
            conversations,
            inbox,
            level: members.level(),
            delivery,
            exchange,
        }
    }

    /// Returns the level of the ring. What a higher level adds is refused with `unavailable`, "not before all gateways are
    /// upgraded".
    #[must_use]
    pub fn level(&self) -> Level {
        self.level.get()
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
            // Another gateway may be dead, and its publications count as delivered only when that is known.
            let closed_by = match &self.exchange {
                Some(_) => ends.min(Instant::now() + LET_GO_WITHIN),
                None => ends,
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

    /// Waits until other gateways have finished the conversations that did not close in time, for `limit` at most. Returns
    /// whether they have.
    pub async fn handed_over(&self, limit: Duration) -> bool {
        match &self.exchange {
            Some(_) => timeout(limit, self.conversations.wait_until_finished())
                .await
                .is_ok(),
            None => true,
        }
    }

    /// Waits until the others have acknowledged the last messages, for `limit` at most. To be called after leaving.
    pub async fn said(&self, limit: Duration) {
        if let Some(exchange) = &self.exchange {
            drop(timeout(limit, exchange.said()).await);
        }
    }
}
