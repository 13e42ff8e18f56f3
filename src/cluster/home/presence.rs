//! Presence: a user is online while any gateway has a session of the user. The user's home knows these gateways.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, OnceLock, Weak},
    time::Duration,
};

use metrics::gauge;

use super::{
    attention::{Attention, Attentions},
    pushes::Pushes,
};
use crate::{
    clock,
    cluster::{
        sockets::{interests::Interests, local_sockets::LocalSockets},
        wire::{
            message::{Delivered, PeerMessage, encode},
            peers::Peers,
        },
    },
    model::{Epoch, GatewayId, Millis, Topic, UserId},
    protocol::PresenceItem,
    store::Store,
    tasks::lock,
};

/// By how much the clocks of gateways may differ before a stored time in the future is taken for an error.
const CLOCKS_DIFFER_MAX: Millis = 60_000;

/// Returns a stored time as it is shown: nothing from the future. A gateway whose clock was fast may have stored one, and
/// the stored time only rises.
fn possible(seen: Millis, now: Millis) -> Option<Millis> {
    (seen <= now.saturating_add(CLOCKS_DIFFER_MAX)).then_some(seen.min(now))
}

pub(crate) struct Presence {
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
    attentions: Attentions,
    /// Decides whether devices of users are notified. Its own task keeps it alive.
    pushes: OnceLock<Weak<dyn Pushes>>,
}

impl Presence {
    pub(crate) fn new(
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
            attentions: Attentions::default(),
            pushes: OnceLock::new(),
        }
    }

    /// Notes that a gateway has a session of `user`, and whether all its sessions of the user are away.
    pub(crate) fn came(&self, user: &UserId, gateway: GatewayId, version: Epoch, away: bool) {
        let mut online = lock(&self.online);
        let topic = Topic::User(user.clone());
        let before = self.attention_now(user);
        if self.interests.note(&topic, gateway, version) {
            *online += 1;
            gauge!("chat_users_online").set(*online as f64);
            self.tell(user, None);
            // If that gateway is killed, nothing newer is known.
            self.saw(user, clock::wall());
        }
        self.attentions.set_away(user, gateway, away);
        self.note_attention(user, before);
    }

    /// Notes whether all sessions of a user at a gateway are away. A gateway without sessions of the user is ignored: it
    /// says so again with its next interest.
    pub(crate) fn away(&self, user: &UserId, gateway: GatewayId, away: bool) {
        let _in_order = lock(&self.online);
        let gateways = self.interests.of(&Topic::User(user.clone()));
        if gateways.contains(&gateway) {
            let before = self.attention_now(user);
            self.attentions.set_away(user, gateway, away);
            self.note_attention(user, before);
        }
    }

    /// Notes that a gateway has no session of `user` any more.
    pub(super) fn went(&self, user: &UserId, gateway: GatewayId) {
        let mut online = lock(&self.online);
        let topic = Topic::User(user.clone());
        let before = self.attention_now(user);
        if self.interests.forget(&topic, gateway) {
            self.gone(user, &mut online);
        }
        self.attentions.set_away(user, gateway, false);
        self.note_attention(user, before);
    }

    /// Notes that the gateways with sessions of `user` are gone.
    pub(super) fn vanished(&self, user: &UserId) {
        self.gone(user, &mut lock(&self.online));
        self.attentions.vanished(user);
        self.looked(user);
    }

    /// Returns whether a user looks, and for how long, at least, that has been so.
    pub(crate) fn attention(&self, user: &UserId) -> (Attention, Duration) {
        let _in_order = lock(&self.online);
        (self.attention_now(user), self.attentions.lasted(user))
    }

    fn attention_now(&self, user: &UserId) -> Attention {
        let gateways = self.interests.of(&Topic::User(user.clone()));
        self.attentions.of(user, &gateways)
    }

    fn note_attention(&self, user: &UserId, before: Attention) {
        if self.attention_now(user) != before {
            self.attentions.changed(user);
            self.looked(user);
        }
    }

    pub(crate) fn on_push(&self, pushes: &Arc<dyn Pushes>) {
        let _ = self.pushes.set(Arc::downgrade(pushes));
    }

    pub(crate) fn pushes(&self) -> Option<Arc<dyn Pushes>> {
        self.pushes.get()?.upgrade()
    }

    fn looked(&self, user: &UserId) {
        if let Some(pushes) = self.pushes() {
            pushes.looked(user);
        }
    }

    /// Notes that the ring changed, and that users without a session are another gateway's unless they `stay`.
    pub(crate) fn adopted(&self, stays: impl Fn(&UserId) -> bool) {
        let _in_order = lock(&self.online);
        let has_session = |user: &UserId| self.interests.any(&Topic::User(user.clone()));
        self.attentions
            .adopted(|user| stays(user) || has_session(user));
    }

    /// Notes that from now on, all sessions of the users whose home this gateway is are known.
    pub(super) fn complete(&self) {
        self.attentions.complete();
    }

    fn gone(&self, user: &UserId, online: &mut usize) {
        *online = online.saturating_sub(1);
        gauge!("chat_users_online").set(*online as f64);
        let now = clock::wall();
        self.tell(user, Some(now));
        self.saw(user, now);
    }

    /// Counts the users anew, because this gateway is no longer the home of some.
    pub(crate) fn count(&self) {
        let users = self.interests.topics(|t| matches!(t, Topic::User(_)));
        let mut online = lock(&self.online);
        *online = users.len();
        gauge!("chat_users_online").set(*online as f64);
    }

    /// Reads the presence of a user.
    pub(crate) async fn of(&self, user: &UserId) -> crate::store::Result<PresenceItem> {
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
        let last_seen = last_seen.and_then(|at| possible(at, clock::wall()));
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
    pub(crate) async fn flush(&self) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_was_seen_in_the_future() {
        let now = 1_800_000_000_000;
        assert_eq!(possible(now - 5, now), Some(now - 5));
        assert_eq!(possible(now + CLOCKS_DIFFER_MAX, now), Some(now));
        assert_eq!(possible(now + 7_200_000, now), None);
        assert_eq!(possible(Millis::MAX, Millis::MAX), Some(Millis::MAX));
    }
}
