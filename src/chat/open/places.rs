//! The places of the table: who has one, who waits for one, and which was not used for longest.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, atomic::Ordering},
};

use foldhash::quality::RandomState;
use metrics::counter;
use tokio::sync::Semaphore;

use super::{Error, Held, UserId};
use crate::model::limits::{OPENING_MAX, OPENING_OF_USER_MAX, OPENING_PART};

/// Places looked at to find the coldest: those whose last use was newer than known are put in order meanwhile.
const LOOKED_AT_MAX: usize = 256;

#[derive(Default)]
pub(super) struct State {
    pub(super) places: HashMap<u64, Taken, RandomState>,
    pub(super) by_use: Order,
    pub(super) users: HashMap<UserId, User, RandomState>,
    /// Wait for a place.
    pub(super) opening: usize,
    /// There was no room for these when they came, and they may not be loaded yet.
    pub(super) waiting: usize,
    /// Told to retire and not gone yet: how many, and what they weighed.
    pub(super) retiring: usize,
    pub(super) retiring_bytes: usize,
    pub(super) numbers: u64,
}

/// By the last use that is known, and then by number. The last use itself may be newer.
pub(super) type Order = BTreeSet<(u64, u64)>;

pub(super) struct Taken {
    pub(super) held: Arc<Held>,
    pub(super) user: Option<UserId>,
    /// Where it is in the order of all and in its user's.
    pub(super) at: [u64; 2],
    pub(super) has_place: bool,
    /// It is one of [`State::waiting`].
    pub(super) waits: bool,
    /// What it weighed when it was told to retire.
    pub(super) retiring: Option<usize>,
}

/// Whose requests opened conversations.
pub(super) struct User {
    pub(super) room: Arc<Semaphore>,
    pub(super) by_use: Order,
    pub(super) places: usize,
    /// How many of `places` wait for a place, wait for room or for their load, and are told to retire.
    pub(super) opening: usize,
    pub(super) waiting: usize,
    pub(super) retiring: usize,
}

impl State {
    /// The room of a user, who has at most `max` places and may wait for some more.
    pub(super) fn user(&mut self, user: &UserId, max: usize) -> Result<Arc<Semaphore>, Error> {
        let Some(known) = self.users.get(user) else {
            let room = Arc::new(Semaphore::new(max));
            let new = User {
                room: room.clone(),
                by_use: Order::new(),
                places: 0,
                opening: 0,
                waiting: 0,
                retiring: 0,
            };
            self.users.insert(user.clone(), new);
            return Ok(room);
        };
        if known.places >= max + OPENING_OF_USER_MAX {
            let text = "too many conversations are open because of you";
            return Err(Error::unavailable(text));
        }
        Ok(known.room.clone())
    }

    /// Whether one more may wait, because of `user`. The fewer may still wait, the smaller is each user's part of them, so
    /// that a few users who open very much leave something for everybody else.
    pub(super) fn may_wait(&self, user: Option<&UserId>) -> bool {
        let left = OPENING_MAX.saturating_sub(self.waiting);
        let part = (left / OPENING_PART).clamp(1, OPENING_OF_USER_MAX);
        let user = user.and_then(|user| self.users.get(user));
        left > 0 && user.is_none_or(|user| user.waiting < part)
    }

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

    /// It has a place.
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

    /// It may be loaded, or waits for its turn without being one of those that wait for room.
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

    /// It is loaded. Only from now on it can be evicted: before, it could not go at once, and whoever waits for its
    /// weight would hold up its load.
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
        // The user may have had nothing to evict either when they began to wait.
        if user.opening > user.retiring && user.room.available_permits() == 0 {
            self.evict(Some(&name), u64::MAX);
        }
    }

    /// When those who wait began to, there may have been none left to evict.
    pub(super) fn evict_for_waiting(&mut self) {
        while self.opening > self.retiring && self.evict(None, u64::MAX) {}
    }

    /// As `evict_for_waiting`, once in a while: those that retire may be busy for long, so others go for all that wait.
    pub(super) fn evict_for_waiting_anew(&mut self) {
        for _ in 0..self.opening {
            if !self.evict(None, u64::MAX) {
                break;
            }
        }
        let waiting: Vec<UserId> = self
            .users
            .iter()
            .filter(|(_, user)| user.opening > 0 && user.room.available_permits() == 0)
            .map(|(name, _)| name.clone())
            .collect();
        for user in waiting {
            self.evict(Some(&user), u64::MAX);
        }
    }

    /// A user for whom nothing was opened after all.
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

    /// Tells the coldest one of all, or of a user, to retire, if it was not used since `before`.
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
