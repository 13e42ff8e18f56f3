//! Presence: a user is online while any gateway has a session of the user. The user's home knows these gateways.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use metrics::gauge;

use super::{
    interests::Interests,
    local_sockets::LocalSockets,
    lock,
    message::{Delivered, PeerMessage, encode},
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
    sockets: Arc<LocalSockets>,
    peers: Option<Arc<Peers>>,
    interests: Arc<Interests>,
    /// The times at which users were last seen, which are not stored yet.
    seen: Mutex<BTreeMap<UserId, Millis>>,
    /// The number of users who are online. It is locked while a change is noted and sent, so that watchers receive changes
    /// in order.
    online: Mutex<usize>,
}

impl Presence {
    pub(super) fn new(
        me: GatewayId,
        store: Arc<dyn Store>,
        sockets: Arc<LocalSockets>,
        peers: Option<Arc<Peers>>,
        interests: Arc<Interests>,
    ) -> Self {
        Self {
            me,
            store,
            sockets,
            peers,
            interests,
            seen: Mutex::default(),
            online: Mutex::default(),
        }
    }

    /// Notes that a gateway has a session of `user`.
    pub(super) fn came(&self, user: &UserId, gateway: GatewayId, version: Epoch) {
        let mut online = lock(&self.online);
        let topic = Topic::User(user.clone());
        if self.interests.note(&topic, gateway, version) {
            *online += 1;
            gauge!("chat_users_online").set(*online as f64);
            self.tell(user, None);
            // If that gateway is killed, nothing newer is known.
            self.saw(user, clock::wall());
        }
    }

    /// Notes that a gateway has no session of `user` any more.
    pub(super) fn went(&self, user: &UserId, gateway: GatewayId) {
        let mut online = lock(&self.online);
        let topic = Topic::User(user.clone());
        if self.interests.forget(&topic, gateway) {
            self.gone(user, &mut online);
        }
    }

    /// Notes that the gateways with sessions of `user` are gone.
    pub(super) fn vanished(&self, user: &UserId) {
        self.gone(user, &mut lock(&self.online));
    }

    fn gone(&self, user: &UserId, online: &mut usize) {
        *online = online.saturating_sub(1);
        gauge!("chat_users_online").set(*online as f64);
        let now = clock::wall();
        self.tell(user, Some(now));
        self.saw(user, now);
    }

    /// Counts the users anew, because this gateway is no longer the home of some.
    pub(super) fn count(&self) {
        let users = self.interests.topics(|t| matches!(t, Topic::User(_)));
        let mut online = lock(&self.online);
        *online = users.len();
        gauge!("chat_users_online").set(*online as f64);
    }

    /// Reads the presence of a user.
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

    /// Sends the presence of a user to all who watch it, because this gateway has become the home.
    pub(super) fn tell_again(&self, watched: &UserId) {
        let _in_order = lock(&self.online);
        let online = self.interests.any(&Topic::User(watched.clone()));
        self.tell(watched, (!online).then(clock::wall));
    }

    /// Sends the presence of a user to all who watch it. `last_seen` is `None` while the user is online.
    fn tell(&self, user: &UserId, last_seen: Option<Millis>) {
        let topic = Topic::Presence(user.clone());
        let item = PresenceItem {
            user: user.clone(),
            online: last_seen.is_none(),
            last_seen,
        };
        if let Some(peers) = &self.peers {
            let told = PeerMessage::Deliver(Delivered::Presence(item.clone()));
            for gateway in self.interests.of(&topic) {
                if gateway != self.me {
                    peers.send_if_room(gateway, encode(&told));
                }
            }
        }
        if self.sockets.hub().subscribers(&topic) > 0 {
            self.sockets.deliver(Delivered::Presence(item));
        }
    }

    fn saw(&self, user: &UserId, at: Millis) {
        lock(&self.seen).insert(user.clone(), at);
    }

    /// Stores the times at which users were last seen. It is called every few seconds. A crash forgets newer times.
    pub(super) async fn flush(&self) {
        let seen: Vec<_> = lock(&self.seen)
            .iter()
            .map(|(user, at)| (user.clone(), *at))
            .collect();
        if seen.is_empty() {
            return;
        }
        if let Err(error) = self.store.set_last_seen(&seen).await {
            tracing::warn!(%error, "could not store when users were last seen; trying again");
            return;
        }
        // Users who were seen again meanwhile stay for the next time.
        let mut pending = lock(&self.seen);
        for (user, at) in seen {
            if pending.get(&user) == Some(&at) {
                pending.remove(&user);
            }
        }
    }
}
