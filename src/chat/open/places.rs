//! The places of the table: the conversations that have one, those that wait for one, and the order of their last use.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, atomic::Ordering},
};

use foldhash::quality::RandomState;
use metrics::counter;
use tokio::sync::Semaphore;

use super::{Error, Held, UserId};
use crate::model::limits::{OPENING_MAX, OPENING_OF_USER_MAX, USER_OPENING_DIVISOR};

/// Places that one search for the least recently used one looks at. It moves those whose last use is newer than
/// recorded.
const LOOKED_AT_MAX: usize = 256;

#[derive(Default)]
pub(super) struct State {
    pub(super) places: HashMap<u64, Taken, RandomState>,
    pub(super) by_use: Order,
    pub(super) users: HashMap<UserId, User, RandomState>,
    /// The number of conversations that wait for a place.
    pub(super) opening: usize,
    /// The number of conversations that came when no place was free, and may not be loaded yet.
    pub(super) waiting: usize,
    /// The number of conversations that were told to retire and are not gone yet.
    pub(super) retiring: usize,
    /// The weight of the retiring conversations when they were told to retire.
    pub(super) retiring_bytes: usize,
    /// The last number given to a conversation.
    pub(super) numbers: u64,
}

/// Places by recorded last use, then by number. The real last use may be newer.
pub(super) type Order = BTreeSet<(u64, u64)>;

/// One conversation that has a place or waits for one.
pub(super) struct Taken {
    pub(super) held: Arc<Held>,
    /// The user whose request opened it.
    pub(super) user: Option<UserId>,
    /// The recorded last use: its key in the order of all conversations, and in that of its user's.
    pub(super) at: [u64; 2],
    pub(super) has_place: bool,
    /// Whether it is counted in [`State::waiting`].
    pub(super) waits: bool,
    /// Its weight when it was told to retire. `None` if it was not.
    pub(super) retiring: Option<usize>,
}

/// A user whose requests opened conversations.
pub(super) struct User {
    /// A permit for each open conversation of the user.
    pub(super) permits: Arc<Semaphore>,
    pub(super) by_use: Order,
    /// The number of the user's conversations, including those that wait.
    pub(super) places: usize,
    /// The user's part of [`State::opening`].
    pub(super) opening: usize,
    /// The user's part of [`State::waiting`].
    pub(super) waiting: usize,
    /// The user's part of [`State::retiring`].
    pub(super) retiring: usize,
}

impl State {
    /// Returns the permits of a user, who may have `max` conversations open and some more waiting.
    pub(super) fn user(&mut self, user: &UserId, max: usize) -> Result<Arc<Semaphore>, Error> {
        let Some(known) = self.users.get(user) else {
            let permits = Arc::new(Semaphore::new(max));
            let new = User {
                permits: permits.clone(),
                by_use: Order::new(),
                places: 0,
                opening: 0,
                waiting: 0,
                retiring: 0,
            };
            self.users.insert(user.clone(), new);
            return Ok(permits);
        };
        if known.places >= max + OPENING_OF_USER_MAX {
            let text = "too many conversations are open because of you";
            return Err(Error::unavailable(text));
        }
        Ok(known.permits.clone())
    }

    /// Returns whether one more conversation of `user` may wait. A user may take a part of the places that are left, so
    /// that a few users who open very much leave some for all others.
    pub(super) fn may_wait(&self, user: Option<&UserId>) -> bool {
        let left = OPENING_MAX.saturating_sub(self.waiting);
        let part = (left / USER_OPENING_DIVISOR).clamp(1, OPENING_OF_USER_MAX);
        let user = user.and_then(|user| self.users.get(user));
        left > 0 && user.is_none_or(|user| user.waiting < part)
    }

    /// Adds a conversation, which waits for a place.
    pub(super) fn came(&mut self, held: &Arc<Held>, user: Option<&UserId>) {
        self.opening += 1;
        self.waiting += 1;
        if let Some(user) = user.and_then(|user| self.users.get_mut(user)) {
            user.places += 1;
            user.opening += 1;
            user.waiting += 1;
        }
        let taken = Taken {
            held: held.clone(),
            user: user.cloned(),
            at: [0; 2],
            has_place: false,
            waits: true,
            retiring: None,
        };
        self.places.insert(held.number, taken);
    }

    pub(super) fn placed(&mut self, number: u64) {
        let Some(taken) = self.places.get_mut(&number) else {
            return;
        };
        if !std::mem::replace(&mut taken.has_place, true) {
            self.opening -= 1;
            if let Some(user) = taken.user.as_ref().and_then(|u| self.users.get_mut(u)) {
                user.opening -= 1;
            }
        }
    }

    /// Records that a conversation may be loaded, so it is not counted in [`Self::waiting`] any more.
    pub(super) fn admitted(&mut self, number: u64) {
        let Some(taken) = self.places.get_mut(&number) else {
            return;
        };
        if std::mem::take(&mut taken.waits) {
            self.waiting -= 1;
            if let Some(user) = taken.user.as_ref().and_then(|u| self.users.get_mut(u)) {
                user.waiting -= 1;
            }
        }
    }

    /// Records that a conversation is loaded. From now on it may be evicted. Before, it could not close at once, and
    /// its load would wait for its own weight.
    pub(super) fn loaded(&mut self, held: &Held) {
        let Some(taken) = self.places.get_mut(&held.number) else {
            return;
        };
        let used = held.used_at.load(Ordering::Relaxed);
        taken.at = [used; 2];
        self.by_use.insert((used, held.number));
        let Some(name) = taken.user.clone() else {
            return;
        };
        let Some(user) = self.users.get_mut(&name) else {
            return;
        };
        user.by_use.insert((used, held.number));
        // When another conversation of this user began to wait, there may have been none to evict.
        if user.opening > user.retiring && user.permits.available_permits() == 0 {
            self.evict(Some(&name), u64::MAX);
        }
    }

    /// Evicts conversations for those that began to wait when there was none to evict.
    pub(super) fn evict_for_waiting(&mut self) {
        while self.opening > self.retiring && self.evict(None, u64::MAX) {}
    }

    /// Evicts one conversation for each that waits, even if others retire for them already, because those may be busy
    /// for long.
    pub(super) fn evict_for_waiting_anew(&mut self) {
        for _ in 0..self.opening {
            if !self.evict(None, u64::MAX) {
                break;
            }
        }
        let waiting: Vec<UserId> = self
            .users
            .iter()
            .filter(|(_, user)| user.opening > 0 && user.permits.available_permits() == 0)
            .map(|(name, _)| name.clone())
            .collect();
        for user in waiting {
            self.evict(Some(&user), u64::MAX);
        }
    }

    /// Forgets a user of whom no conversation is open or waits.
    pub(super) fn forget_unless_open(&mut self, user: &UserId) {
        if self.users.get(user).is_some_and(|user| user.places == 0) {
            self.users.remove(user);
        }
    }

    pub(super) fn gone(&mut self, number: u64) {
        let Some(taken) = self.places.remove(&number) else {
            return;
        };
        self.by_use.remove(&(taken.at[0], number));
        self.opening -= usize::from(!taken.has_place);
        self.waiting -= usize::from(taken.waits);
        if let Some(bytes) = taken.retiring {
            self.retiring -= 1;
            self.retiring_bytes -= bytes;
        }
        if let Some(name) = taken.user
            && let Some(user) = self.users.get_mut(&name)
        {
            user.by_use.remove(&(taken.at[1], number));
            user.opening -= usize::from(!taken.has_place);
            user.waiting -= usize::from(taken.waits);
            user.retiring -= usize::from(taken.retiring.is_some());
            user.places -= 1;
            if user.places == 0 {
                self.users.remove(&name);
            }
        }
    }

    /// Tells the least recently used conversation, of all or of a user, to retire if it was not used since `before`.
    /// Returns true if it did.
    pub(super) fn evict(&mut self, user: Option<&UserId>, before: u64) -> bool {
        let Some(number) = self.coldest(user, before) else {
            return false;
        };
        let Some(taken) = self.places.get_mut(&number) else {
            return false;
        };
        let bytes = taken.held.bytes.load(Ordering::Relaxed);
        taken.retiring = Some(bytes);
        taken.held.retire.cancel();
        self.by_use.remove(&(taken.at[0], number));
        if let Some(user) = taken.user.as_ref().and_then(|u| self.users.get_mut(u)) {
            user.by_use.remove(&(taken.at[1], number));
            user.retiring += 1;
        }
        self.retiring += 1;
        self.retiring_bytes += bytes;
        counter!("chat_conversations_evicted_total").increment(1);
        true
    }

    /// Finds the least recently used conversation, of all or of a user, if it was not used since `before`.
    fn coldest(&mut self, of: Option<&UserId>, before: u64) -> Option<u64> {
        let order = match of {
            None => &mut self.by_use,
            Some(user) => &mut self.users.get_mut(user)?.by_use,
        };
        let mut best = None;
        for _ in 0..LOOKED_AT_MAX {
            let Some(&(at, number)) = order.first() else {
                break;
            };
            let taken = self.places.get_mut(&number)?;
            let used = taken.held.used_at.load(Ordering::Relaxed);
            if best.is_none_or(|best| (used, number) < best) {
                best = Some((used, number));
            }
            if used <= at {
                break;
            }
            order.pop_first();
            order.insert((used, number));
            taken.at[usize::from(of.is_some())] = used;
        }
        let (used, number) = best?;
        (used < before).then_some(number)
    }
}
