//! Who is online: kept by a user's home, which knows of each of the user's sessions.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use dashmap::DashMap;
use metrics::gauge;

use crate::{
    clock,
    fanout::{Encoded, Hub},
    model::{Millis, Topic, UserId},
    protocol::{Event, PresenceItem},
    store::Store,
};

pub struct Presence {
    store: Arc<dyn Store>,
    hub: Arc<Hub>,
    /// Sessions of each user who is online.
    online: DashMap<UserId, usize>,
    /// When users were seen, until the next flush.
    seen: Mutex<HashMap<UserId, Millis>>,
}

impl Presence {
    #[must_use]
    pub fn new(store: Arc<dyn Store>, hub: Arc<Hub>) -> Self {
        Self {
            store,
            hub,
            online: DashMap::new(),
            seen: Mutex::default(),
        }
    }

    /// A session of `user` has come.
    pub(super) fn came(&self, user: &UserId) {
        let first = {
            let mut sessions = self.online.entry(user.clone()).or_insert(0);
            *sessions += 1;
            let first = *sessions == 1;
            if first {
                // Under the entry's lock, so that watchers hear of coming and going in order.
                self.tell(PresenceItem {
                    user: user.clone(),
                    online: true,
                    last_seen: None,
                });
            }
            first
        };
        if first {
            // A gateway that is killed could not say goodbye: then this is when the user was last seen.
            self.saw(user, clock::wall());
        }
    }

    /// A session of `user` has gone.
    pub(super) fn went(&self, user: &UserId) {
        let now = clock::wall();
        let last = self.online.remove_if_mut(user, |_, sessions| {
            *sessions = sessions.saturating_sub(1);
            if *sessions == 0 {
                let last_seen = Some(now);
                self.tell(PresenceItem {
                    user: user.clone(),
                    online: false,
                    last_seen,
                });
            }
            *sessions == 0
        });
        if last.is_some() {
            self.saw(user, now);
        }
    }

    pub(super) async fn of(&self, user: &UserId) -> crate::store::Result<PresenceItem> {
        let user = user.clone();
        if self.online.contains_key(&user) {
            return Ok(PresenceItem {
                user,
                online: true,
                last_seen: None,
            });
        }
        let pending = self.seen().get(&user).copied();
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

    fn tell(&self, item: PresenceItem) {
        let topic = Topic::Presence(item.user.clone());
        if self.hub.subscribers(&topic) > 0 {
            self.hub
                .deliver(&topic, &Encoded::new(Event::Presence(item)));
        }
    }

    fn saw(&self, user: &UserId, at: Millis) {
        gauge!("chat_users_online").set(self.online.len() as f64);
        self.seen().insert(user.clone(), at);
    }

    /// Stores when users were last seen. To be called every few seconds: a crash forgets what came since.
    pub(super) async fn flush(&self) {
        let seen: Vec<_> = self
            .seen()
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
        let mut pending = self.seen();
        for (user, at) in seen {
            if pending.get(&user) == Some(&at) {
                pending.remove(&user);
            }
        }
    }

    fn seen(&self) -> MutexGuard<'_, HashMap<UserId, Millis>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
