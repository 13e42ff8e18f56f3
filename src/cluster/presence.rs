//! Who is online: known by a user's home, which knows every gateway that has a session of theirs.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use metrics::gauge;

use super::{
    edge::Edge,
    interests::Interests,
    lock,
    message::{Delivered, Message, encode},
    peers::Peers,
};
use crate::{
    clock,
    model::{Epoch, GatewayId, Millis, Topic, UserId},
    protocol::PresenceItem,
    store::Store,
};

pub(super) struct Presence {
    me: GatewayId,
    store: Arc<dyn Store>,
    edge: Arc<Edge>,
    peers: Option<Arc<Peers>>,
    interests: Arc<Interests>,
    /// When users were seen, until the next flush.
    seen: Mutex<BTreeMap<UserId, Millis>>,
    /// The number of users online. Held while one comes or goes and watchers are told, so that they hear of both in order.
    interest_order: Mutex<usize>,
}

impl Presence {
    pub(super) fn new(
        me: GatewayId,
        store: Arc<dyn Store>,
        edge: Arc<Edge>,
        peers: Option<Arc<Peers>>,
        interests: Arc<Interests>,
    ) -> Self {
        Self {
            me,
            store,
            edge,
            peers,
            interests,
            seen: Mutex::default(),
            interest_order: Mutex::default(),
        }
    }

    /// A gateway has a session of `user`.
    pub(super) fn came(&self, user: &UserId, gateway: GatewayId, version: Epoch) {
        let mut online = lock(&self.interest_order);
        let topic = Topic::User(user.clone());
        if self.interests.note(&topic, gateway, version) {
            *online += 1;
            gauge!("chat_users_online").set(*online as f64);
            self.tell(user, None);
            // A gateway that is killed could not say goodbye: then this is when the user was last seen.
            self.saw(user, clock::wall());
        }
    }

    /// A gateway has no session of `user` any more.
    pub(super) fn went(&self, user: &UserId, gateway: GatewayId) {
        let mut online = lock(&self.interest_order);
        let topic = Topic::User(user.clone());
        if self.interests.forget(&topic, gateway) {
            self.gone(user, &mut online);
        }
    }

    /// Nobody is interested in this user any more, as gateways are gone.
    pub(super) fn vanished(&self, user: &UserId) {
        self.gone(user, &mut lock(&self.interest_order));
    }

    fn gone(&self, user: &UserId, online: &mut usize) {
        *online = online.saturating_sub(1);
        gauge!("chat_users_online").set(*online as f64);
        let now = clock::wall();
        self.tell(user, Some(now));
        self.saw(user, now);
    }

    /// Users of whom this gateway is the home no more are not counted here.
    pub(super) fn count(&self) {
        let users = self.interests.topics(|t| matches!(t, Topic::User(_)));
        let mut online = lock(&self.interest_order);
        *online = users.len();
        gauge!("chat_users_online").set(*online as f64);
    }

    pub(super) async fn of(&self, user: &UserId) -> crate::store::Result<PresenceItem> {
        let user = user.clone();
        if self.interests.any(&Topic::User(user.clone())) {
            return Ok(PresenceItem {
                user,
                online: true,
                last_seen: None,
            });
        }
        let pending = lock(&self.seen).get(&user).copied();
        let last_seen = match pending {
            Some(at) => Some(at),
            None => self.store.last_seen(&user).await?,
        };
        Ok(PresenceItem {
            user,
            online: false,
            last_seen,
        })
    }

    /// Tells everyone who watches how it is, after this gateway has become the home.
    pub(super) fn tell_again(&self, watched: &UserId) {
        let _order = lock(&self.interest_order);
        let online = self.interests.any(&Topic::User(watched.clone()));
        self.tell(watched, (!online).then(clock::wall));
    }

    fn tell(&self, user: &UserId, last_seen: Option<Millis>) {
        let topic = Topic::Presence(user.clone());
        let item = PresenceItem {
            user: user.clone(),
            online: last_seen.is_none(),
            last_seen,
        };
        if let Some(peers) = &self.peers {
            let told = Message::Deliver(Delivered::Presence(item.clone()));
            for gateway in self.interests.of(&topic) {
                if gateway != self.me {
                    peers.send_if_room(gateway, encode(&told));
                }
            }
        }
        if self.edge.hub().subscribers(&topic) > 0 {
            self.edge.deliver(Delivered::Presence(item));
        }
    }

    fn saw(&self, user: &UserId, at: Millis) {
        lock(&self.seen).insert(user.clone(), at);
    }

    /// Stores when users were last seen. To be called every few seconds: a crash forgets what came since.
    pub(super) async fn flush(&self) {
        let seen: Vec<_> = lock(&self.seen)
            .iter()
            .map(|(user, at)| (user.clone(), *at))
            .collect();
        if seen.is_empty() {
            return;
        }
        if let Err(error) = self.store.set_last_seen(&seen).await {
            tracing::warn!(%error, "last seen was not stored; it will be tried again");
            return;
        }
        // Whoever was seen again meanwhile stays for the next time.
        let mut pending = lock(&self.seen);
        for (user, at) in seen {
            if pending.get(&user) == Some(&at) {
                pending.remove(&user);
            }
        }
    }
}
