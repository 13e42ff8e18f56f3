//! The simulated world: gateways, network, store and clients.

mod changing;
mod checker;
mod clients;
mod gateways;
mod held;
mod network;
mod order;
mod pushing;
mod receiving;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use chat_gateway::{
    fanout::Subscriber,
    model::{ConversationId, Kind, Seq, SessionId, UserId},
    protocol::Codec,
    store::simulated::{Faults, Simulated},
};
use checker::{Checker, Secrets};
pub(super) use clients::{Device, contiguous, create, events};
pub(super) use gateways::Gateway;
pub(super) use held::{ClientRule, expected};
use network::Wire;
use pushing::Pushed;
pub(super) use pushing::SLEEPER;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use receiving::Arrivals;
use tokio::sync::Notify;

use crate::simulation::seen::Seen;

pub(super) const USERS: usize = 4;
/// Number of one more user, who is added to conversations and removed again.
pub(super) const VISITOR: usize = USERS;
/// The conversations: a group, a dm of the first two users, a channel.
const KINDS: [Kind; 3] = [Kind::Group, Kind::Dm, Kind::Channel];

/// What follows the conversations.
#[derive(Clone, Copy, Default)]
pub(super) struct Consuming {
    pub(super) webhook: bool,
    /// Whether a user sleeps, to whom messages are pushed.
    pub(super) pushing: bool,
    /// Whether the limits of webhooks are those of the default settings. Small ones show more in a short time.
    pub(super) large: bool,
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
    /// Whether clients neither connect nor read, and nothing is evicted.
    resting: AtomicBool,
    /// Wakes those who rested. The order is always the same, unlike that of a `watch`.
    rested: Notify,
    /// Acknowledged messages.
    pub(super) messages: Mutex<usize>,
    /// Messages and changes that are requested and neither acknowledged nor given up.
    pub(super) waiting: Mutex<usize>,
    /// Whether users change messages.
    pub(super) changing: bool,
    /// Acknowledged changes.
    pub(super) changes: Mutex<usize>,
    /// The acknowledged messages of each conversation, with their senders.
    pub(super) texts: Mutex<[Vec<(Seq, usize)>; 3]>,
    /// What clients asked for and were told of changes.
    pub(super) seen: Mutex<[Seen; 3]>,
    /// The rule that clients break on purpose.
    pub(super) broken: Option<ClientRule>,
    pub(super) consuming: Consuming,
    pub(super) arrivals: Arrivals,
    pub(super) pushed: Pushed,
}

impl World {
    pub(super) fn new(
        seed: u64,
        faults: Faults,
        evicting: bool,
        changing: bool,
        broken: Option<ClientRule>,
        consuming: Consuming,
    ) -> Arc<Self> {
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
            open_max: match (evicting && seed.is_multiple_of(2), consuming.large) {
                (_, true) => 1_000,
                (true, _) => 1,
                (false, _) => 10,
            },
            sending: AtomicBool::new(false),
            churning: AtomicBool::new(false),
            resting: AtomicBool::new(false),
            rested: Notify::new(),
            messages: Mutex::default(),
            waiting: Mutex::default(),
            changing,
            changes: Mutex::default(),
            texts: Mutex::default(),
            seen: Mutex::default(),
            broken,
            consuming,
            arrivals: Arrivals::new(seed),
            pushed: Pushed::default(),
        })
    }

    /// Lets everyone rest who opens or closes conversations, or lets them go on.
    pub(super) fn rest(&self, rests: bool) {
        self.resting.store(rests, Ordering::Relaxed);
        if !rests {
            self.rested.notify_waiters();
        }
    }

    /// Waits while everyone rests.
    async fn rested(&self) {
        while self.resting.load(Ordering::Relaxed) {
            self.rested.notified().await;
        }
    }

    pub(super) fn below(&self, most: usize) -> usize {
        self.random.lock().unwrap().random_range(0..most)
    }

    pub(super) fn millis(&self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.random.lock().unwrap().random_range(from..=to))
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
