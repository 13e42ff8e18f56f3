//! Who owns what, and the way there. `Router` carries requests inward, to a conversation's owner or a
//! user's home; `Delivery` carries publications outward, to the sockets concerned. They meet in `node.rs`
//! and nowhere else.
//!
//! With the embedded store the ring has one member and every hop is a function call.

mod answers;
mod channels;
mod delivery;
mod edge;
mod exchange;
mod finalize;
mod home;
mod inbox;
mod interests;
mod link;
mod members;
mod membership;
mod message;
mod network;
mod news;
mod overlay;
mod peers;
mod places;
mod presence;
mod router;
mod status;
mod view;

use std::{sync::Arc, time::Duration};

pub use delivery::Delivery;
pub use edge::Edge;
pub use exchange::Exchange;
pub use finalize::{Finalized, NotFinalized, finalize};
pub use home::Home;
pub use inbox::Inbox;
pub use members::{Members, NotJoined};
pub use membership::{LEASE, Learned, Membership, Rule, may_join, raised};
pub use network::{Connection, Frames, Network, ToPeer, WebSockets};
pub use places::InboxPlace;
pub use router::Router;
pub use status::{Status, StatusOf, status};
pub use view::View;

use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::{
    chat::{Conversations, InboxWriter, Lease, Publish},
    fanout::Hub,
    memory::Memory,
    model::{CurrentLevel, Level},
    store::Store,
    tasks::{Tasks, lock},
};

/// What is still in flight in a conversation when its owner leaves has so long to end; then the next owner ends it.
const LET_GO_WITHIN: Duration = Duration::from_millis(250);
/// Between two tries to write the inbox when leaving.
const FLUSH_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// How this gateway speaks to others.
pub struct Speaking {
    /// What all of them know, and nobody else.
    pub secret: String,
    pub network: Arc<dyn Network>,
}

/// This gateway's part of a cluster, or all of it.
pub struct Cluster {
    pub router: Arc<Router>,
    pub home: Arc<Home>,
    pub conversations: Conversations,
    pub inbox: Arc<InboxWriter>,
    level: CurrentLevel,
    exchange: Option<Arc<Exchange>>,
}

impl Cluster {
    #[expect(
        clippy::too_many_arguments,
        reason = "each is another part of the gateway"
    )]
    /// Builds it. `open` makes the conversations, with what they publish to, and the right to own them.
    pub fn new(
        members: &Arc<Members>,
        store: &Arc<dyn Store>,
        hub: &Arc<Hub>,
        speaking: Option<Speaking>,
        operation_timeout: Duration,
        memory: Memory,
        tasks: &Tasks,
        open: impl FnOnce(Arc<dyn Publish>, Arc<InboxWriter>, Lease) -> Conversations,
    ) -> Self {
        let me = members.me();
        let ring = members.ring();
        let edge = Arc::new(Edge::new(hub.clone()));
        let interests = Arc::new(interests::Interests::default());
        let peers =
            speaking.map(|s| peers::Peers::new(me, &s.secret, s.network.clone(), tasks.clone()));
        let home = Arc::new(Home::new(
            me,
            store.clone(),
            edge.clone(),
            peers.clone(),
            interests.clone(),
            ring.load().as_ref().clone(),
            memory,
        ));
        let delivery = Delivery::new(
            me,
            ring.clone(),
            edge.clone(),
            home.clone(),
            interests,
            peers.clone(),
        );
        let inbox = Arc::new(InboxWriter::new(store.clone(), memory));
        let conversations = open(delivery.clone(), inbox.clone(), members.lease());
        let others = peers.clone().map(|peers| router::Cluster {
            members: members.clone(),
            peers,
        });
        let router = Arc::new(Router::new(
            me,
            ring,
            store.clone(),
            conversations.clone(),
            home.clone(),
            edge,
            others,
            operation_timeout,
            tasks.clone(),
        ));
        let exchange = peers.map(|peers| {
            Exchange::new(
                members.clone(),
                peers,
                home.clone(),
                delivery,
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
            exchange,
        }
    }

    /// Returns the level of the ring. What a higher level adds is refused with `unavailable`, "not before all gateways are
    /// upgraded".
    #[must_use]
    pub fn level(&self) -> Level {
        self.level.get()
    }

    /// Begins to speak to the others.
    pub fn start(&self) {
        if let Some(exchange) = &self.exchange {
            exchange.start();
        }
    }

    /// Until the others can be spoken to, and may own what is theirs by now, or for `limit`.
    pub async fn settled(&self, limit: Duration) -> bool {
        match &self.exchange {
            Some(exchange) => timeout(limit, exchange.settled()).await.is_ok(),
            None => true,
        }
    }

    /// Lets go of everything and leaves the ring. True if that was done by `ends`.
    pub async fn leave(&self, members: &Members, ends: Instant) -> bool {
        if let Some(exchange) = &self.exchange {
            exchange.leaving();
        }
        let mut done = false;
        let let_go = async {
            // Another one may be dead, and what was given to it is done only when that is known.
            let closed_by = match &self.exchange {
                Some(_) => ends.min(Instant::now() + LET_GO_WITHIN),
                None => ends,
            };
            let closed = timeout_at(closed_by, self.conversations.close())
                .await
                .is_ok();
            // Rule [flush]: a row is written before somebody else speaks for its user.
            let flushed = timeout_at(ends, async {
                while !self.inbox.flush().await {
                    sleep(FLUSH_AGAIN_AFTER).await;
                }
            });
            done = flushed.await.is_ok() && closed;
        };
        members.leave(let_go).await;
        done
    }

    /// Waits until the others have what this gateway has said, for `limit` at most. To be called after leaving.
    pub async fn said(&self, limit: Duration) {
        if let Some(exchange) = &self.exchange {
            drop(timeout(limit, exchange.said()).await);
        }
    }
}
