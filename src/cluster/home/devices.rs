//! The devices that homes remember, and the locks of those who write rows without a seq.
//!
//! A user's home is the only writer of the user's devices and settings. The owner of a token is written by the gateway that
//! the ring names for the token, not by the homes of its users: two homes have counters of their own, so between them the
//! later write could have the lower version, and the earlier user would keep the token.

use std::sync::Arc;

use quick_cache::{Weighter, sync::Cache};
use tokio::sync::{Mutex, OwnedMutexGuard};
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    chat::Versions,
    model::{Device, UserId, limits::USER_ID_BYTES_MAX, weight::ALLOCATION_BYTES},
};

/// Locks of users and tokens, so that the writes of one are made one after the other.
const LOCKS: usize = 256;
/// The weight of a user without devices: the cache's slot and key, and an empty list.
const USER_BYTES: usize =
    size_of::<(UserId, Arc<[Device]>)>() + 3 * ALLOCATION_BYTES + USER_ID_BYTES_MAX + 64;
/// The users for which the cache makes room when it is created.
const USERS_EXPECTED_MAX: usize = 100_000;

/// What a gateway needs to write rows without a seq, and the devices that it has read or written last.
pub(crate) struct Devices {
    known: Cache<UserId, Arc<[Device]>, ByBytes>,
    pub(crate) versions: Versions,
    users: Locks,
    tokens: Locks,
}

#[derive(Clone)]
struct ByBytes;

impl Weighter<UserId, Arc<[Device]>> for ByBytes {
    fn weight(&self, _: &UserId, devices: &Arc<[Device]>) -> u64 {
        let bytes = |device: &Device| {
            size_of::<Device>()
                + 2 * ALLOCATION_BYTES
                + device.id.capacity()
                + device.token.capacity()
        };
        (USER_BYTES + devices.iter().map(bytes).sum::<usize>()) as u64
    }
}

impl Devices {
    pub(crate) fn new(bytes_max: usize) -> Self {
        let users = (bytes_max / USER_BYTES / 2).min(USERS_EXPECTED_MAX);
        Self {
            known: Cache::with_weighter(users, bytes_max as u64, ByBytes),
            versions: Versions::default(),
            users: Locks::default(),
            tokens: Locks::default(),
        }
    }

    pub(crate) fn of(&self, user: &UserId) -> Option<Arc<[Device]>> {
        self.known.get(user)
    }

    pub(super) fn remember(&self, user: &UserId, devices: Arc<[Device]>) {
        self.known.insert(user.clone(), devices);
    }

    pub(crate) fn forget(&self, user: &UserId) {
        self.known.remove(user);
    }

    /// Forgets all other users.
    pub(crate) fn retain(&self, stays: impl Fn(&UserId) -> bool) {
        self.known.retain(|user, _| stays(user));
    }

    /// Waits until nobody else writes the user's rows. They are read and written while the lock is held.
    pub(crate) async fn lock_user(&self, user: &UserId) -> OwnedMutexGuard<()> {
        self.users.lock(user.as_str().as_bytes()).await
    }

    /// Waits until nobody else writes the owner of the token.
    pub(crate) async fn lock_token(&self, hash: &[u8; 32]) -> OwnedMutexGuard<()> {
        self.tokens.lock(hash).await
    }
}

/// Locks of keys, some of which share one.
pub(super) struct Locks(Vec<Arc<Mutex<()>>>);

impl Default for Locks {
    fn default() -> Self {
        Self((0..LOCKS).map(|_| Arc::default()).collect())
    }
}

impl Locks {
    pub(crate) async fn lock(&self, key: &[u8]) -> OwnedMutexGuard<()> {
        let index = xxh3_64(key) as usize % self.0.len();
        self.0[index].clone().lock_owned().await
    }
}
