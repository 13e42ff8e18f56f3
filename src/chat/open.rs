//! Which conversations may be open: how many, how many because of one user, and how much all of them weigh. Where there
//! is no room, the coldest is evicted, and whoever opens another one waits until it has gone.

mod loads;
mod places;

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use metrics::gauge;
use tokio::{
    select,
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

pub(super) use self::loads::Loading;
use self::{loads::Loads, places::State};
use super::error::Error;
use crate::{
    model::{
        UserId,
        limits::{USER_OPEN_MIN, USER_OPEN_PART},
    },
    tasks::lock,
};

/// Between two looks of the keeper, if nothing wakes it.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// So many looks without a use, and a conversation is evicted as soon as its place could be needed soon.
const COLD_LOOKS: usize = 10;
/// Of 10: above this much of a bound, what is cold is evicted.
const SOON_FULL: usize = 9;
/// Evicted at one look because their places could be needed soon: each costs the store a write.
const EVICTED_AT_ONCE: usize = 1_000;
/// By so much may an owner's weight differ from what is counted for it.
const WEIGHED_BYTES: usize = 4 << 10;

/// The conversations that are open here: how many, and what they weigh.
pub(super) struct Table {
    open_max: usize,
    user_max: usize,
    bytes_max: usize,
    /// A permit for each that is open and not about to open.
    room: Arc<Semaphore>,
    /// Which of them are loaded now.
    loads: Loads,
    /// What all of them weigh.
    bytes: AtomicUsize,
    /// Goes on with each opening and each look. A use is noted as of it: so the coldest is known without a clock.
    now: AtomicU64,
    /// The weight is above its bound.
    pressed: Notify,
    /// A place or weight has become free.
    freed: Notify,
    state: Mutex<State>,
}

/// What the table knows of one conversation; its handle, its owner and the table share it.
pub(super) struct Held {
    number: u64,
    table: Arc<Table>,
    used_at: AtomicU64,
    bytes: AtomicUsize,
    retire: CancellationToken,
}

/// The right to be open. Given back when it is dropped.
pub(super) struct Room {
    _of_user: Option<OwnedSemaphorePermit>,
    _of_all: OwnedSemaphorePermit,
}

impl Held {
    /// Somebody asks the conversation something. Of the hot path: one read, and seldom a write.
    pub(super) fn used(&self) {
        let now = self.table.now.load(Ordering::Relaxed);
        if self.used_at.load(Ordering::Relaxed) != now {
            self.used_at.store(now, Ordering::Relaxed);
        }
    }

    /// What its owner, who alone says that, weighs by now. Of the hot path: mostly a comparison.
    pub(super) fn weighs(&self, bytes: usize) {
        let before = self.bytes.load(Ordering::Relaxed);
        if before.abs_diff(bytes) < WEIGHED_BYTES {
            return;
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        let grown = bytes.wrapping_sub(before);
        let all = self.table.bytes.fetch_add(grown, Ordering::Relaxed);
        if bytes > before && all.wrapping_add(grown) > self.table.bytes_max {
            self.table.pressed.notify_one();
        }
    }

    /// See [`Table::room`].
    pub(super) async fn room(&self) -> Room {
        self.table.room(self).await
    }

    /// See [`Table::loading`].
    pub(super) async fn loading(self: &Arc<Self>, patience: Duration) -> Loading {
        self.table.loading(self, patience).await
    }

    /// The conversation is loaded, and weighed: from now on it may be evicted.
    pub(super) fn loaded(&self) {
        self.table.loaded(self);
    }

    /// The conversation has gone, or never opened.
    pub(super) fn end(&self) {
        self.table.end(self);
    }

    /// Fires when the conversation is to be closed as soon as nothing of it is under way.
    pub(super) fn retired(&self) -> CancellationToken {
        self.retire.clone()
    }
}

impl Table {
    pub(super) fn new(open_max: usize, bytes_max: usize) -> Arc<Self> {
        Arc::new(Self {
            open_max,
            user_max: (open_max / USER_OPEN_PART).max(USER_OPEN_MIN),
            bytes_max,
            room: Arc::new(Semaphore::new(open_max.min(Semaphore::MAX_PERMITS))),
            loads: Loads::new(),
            bytes: AtomicUsize::new(0),
            now: AtomicU64::new(0),
            pressed: Notify::new(),
            freed: Notify::new(),
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Notes that a conversation opens because of `user`, or by this gateway's own doing. Without room, if there is none
    /// at once: it is to be waited for.
    ///
    /// # Errors
    /// When too many wait already.
    pub(super) fn begin(
        self: &Arc<Self>,
        user: Option<&UserId>,
    ) -> Result<(Arc<Held>, Option<Room>), Error> {
        let mut state = self.state();
        let of_user = match user {
            Some(user) => Some(state.user(user, self.user_max)?),
            None => None,
        };
        let room = self.room_at_once(of_user);
        if room.is_none() && !state.may_wait(user) {
            if let Some(user) = user {
                state.forget_unless_open(user);
            }
            return Err(Error::unavailable("too many conversations are open"));
        }
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        state.numbers += 1;
        let held = Arc::new(Held {
            number: state.numbers,
            table: self.clone(),
            used_at: AtomicU64::new(now),
            bytes: AtomicUsize::new(0),
            retire: CancellationToken::new(),
        });
        state.came(&held, user);
        if room.is_some() {
            state.placed(held.number);
            state.admitted(held.number);
        }
        gauge!("chat_conversations_open").set(state.places.len() as f64);
        Ok((held, room))
    }

    fn room_at_once(&self, of_user: Option<Arc<Semaphore>>) -> Option<Room> {
        if self.bytes() > self.bytes_max {
            return None;
        }
        let of_user = match of_user {
            Some(room) => Some(room.try_acquire_owned().ok()?),
            None => None,
        };
        Some(Room {
            _of_user: of_user,
            _of_all: self.room.clone().try_acquire_owned().ok()?,
        })
    }

    /// Evicts what must go, and waits until it has gone.
    async fn room(&self, held: &Held) -> Room {
        let user = {
            let state = self.state();
            let taken = state.places.get(&held.number);
            let user = taken.and_then(|taken| taken.user.clone());
            user.and_then(|user| Some((state.users.get(&user)?.room.clone(), user)))
        };
        let of_user = match user {
            Some((room, user)) => Some(self.permit(room, Some(&user)).await),
            None => None,
        };
        let of_all = self.permit(self.room.clone(), None).await;
        self.state().placed(held.number);
        Room {
            _of_user: of_user,
            _of_all: of_all,
        }
    }

    /// Waits until one more conversation may be loaded: few are loaded at once, and none while all weigh too much and
    /// something can be evicted.
    async fn loading(&self, held: &Arc<Held>, patience: Duration) -> Loading {
        let loading = Loading::begin(held, patience).await;
        while self.bytes() > self.bytes_max {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            // Where nothing can be evicted, nobody need wait for it.
            if !self.relieve(self.bytes_max) {
                break;
            }
            freed.await;
        }
        self.state().admitted(held.number);
        loading
    }

    fn loaded(&self, held: &Held) {
        let mut state = self.state();
        state.loaded(held);
        if self.room.available_permits() == 0 {
            state.evict_for_waiting();
        }
    }

    async fn permit(&self, room: Arc<Semaphore>, user: Option<&UserId>) -> OwnedSemaphorePermit {
        loop {
            if let Ok(permit) = room.clone().try_acquire_owned() {
                return permit;
            }
            self.state().evict(user, u64::MAX);
            // The semaphore is never closed.
            if let Ok(permit) = room.clone().acquire_owned().await {
                return permit;
            }
        }
    }

    fn end(&self, held: &Held) {
        let bytes = held.bytes.swap(0, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        let open = {
            let mut state = self.state();
            state.gone(held.number);
            state.places.len()
        };
        gauge!("chat_conversations_open").set(open as f64);
        self.freed.notify_waiters();
    }

    /// Evicts the coldest until what is left weighs no more than `bytes`. True if something is about to go.
    fn relieve(&self, bytes: usize) -> bool {
        let mut state = self.state();
        for _ in 0..EVICTED_AT_ONCE {
            let left = self.bytes().saturating_sub(state.retiring_bytes);
            if left <= bytes || !state.evict(None, u64::MAX) {
                break;
            }
        }
        state.retiring > 0
    }

    /// Evicts the coldest one now, if there is one.
    pub(super) fn evict_one(&self) -> bool {
        self.state().evict(None, u64::MAX)
    }

    /// Looks after all of this; for a task.
    pub(super) async fn keep(&self) {
        let mut looks = VecDeque::new();
        let mut look_at = Instant::now() + LOOK_EVERY;
        loop {
            select! {
                biased;
                () = sleep_until(look_at) => {
                    look_at = Instant::now() + LOOK_EVERY;
                    looks.push_back(self.now.fetch_add(1, Ordering::Relaxed) + 1);
                    if looks.len() > COLD_LOOKS {
                        looks.pop_front();
                    }
                    let cold = if looks.len() == COLD_LOOKS { looks.front() } else { None };
                    self.look(cold.copied().unwrap_or_default());
                }
                () = self.pressed.notified() => {}
            }
            if self.bytes() > self.bytes_max {
                self.relieve(self.bytes_max / 10 * SOON_FULL);
            }
        }
    }

    /// Evicts, while places or weight are scarce, what was not used since `cold`; and for those who wait because what
    /// they evicted is still busy, others.
    fn look(&self, cold: u64) {
        let (soon, heavy) = (
            self.open_max / 10 * SOON_FULL,
            self.bytes_max / 10 * SOON_FULL,
        );
        let mut state = self.state();
        for _ in 0..EVICTED_AT_ONCE {
            let places = state.places.len() - state.opening - state.retiring;
            let bytes = self.bytes().saturating_sub(state.retiring_bytes);
            if (places <= soon && bytes <= heavy) || !state.evict(None, cold) {
                break;
            }
        }
        if self.room.available_permits() == 0 {
            state.evict_for_waiting_anew();
        }
        gauge!("chat_conversations_open_bytes").set(self.bytes() as f64);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::time::sleep;

    use super::*;
    use crate::model::limits::{OPENING_MAX, OPENING_OF_USER_MAX};

    fn user(name: &str) -> UserId {
        UserId::new(name).unwrap()
    }

    fn open(table: &Arc<Table>, name: &str) -> (Arc<Held>, Room) {
        let (held, room) = table.begin(Some(&user(name))).unwrap();
        held.weighs(10_000);
        held.loaded();
        (held, room.expect("there is room"))
    }

    fn is_retired(held: &Held) -> bool {
        held.retired().is_cancelled()
    }

    fn close((held, room): (Arc<Held>, Room)) {
        drop(room);
        held.end();
    }

    #[tokio::test(start_paused = true)]
    async fn where_all_places_are_taken_the_coldest_goes() {
        let table = Table::new(3, usize::MAX);
        let mut all: Vec<_> = ["a", "b", "c"]
            .iter()
            .map(|name| open(&table, name))
            .collect();
        all[0].0.used();
        // One that was given up leaves nothing.
        table.begin(Some(&user("b"))).unwrap().0.end();
        let (held, none) = table.begin(Some(&user("d"))).unwrap();
        assert!(none.is_none());
        let mut room = Box::pin(held.room());
        assert!((&mut room).now_or_never().is_none());
        let retired: Vec<bool> = all.iter().map(|(held, _)| is_retired(held)).collect();
        assert_eq!(retired, [false, true, false], "the first was used since");
        close(all.remove(1));
        assert!(room.now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn who_finds_nothing_to_evict_has_what_comes_next_evicted() {
        let table = Table::new(1, usize::MAX);
        let first = open(&table, "a");
        let (second, _) = table.begin(Some(&user("b"))).unwrap();
        let (third, _) = table.begin(Some(&user("c"))).unwrap();
        let (mut next, mut last) = (Box::pin(second.room()), Box::pin(third.room()));
        assert!((&mut next).now_or_never().is_none() && (&mut last).now_or_never().is_none());
        close(first);
        let room = next.now_or_never().expect("its turn");
        second.loaded();
        assert!(is_retired(&second), "the third waits");
        drop(room);
        second.end();
        assert!(last.now_or_never().is_some());
        assert!(!is_retired(&third));
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_their_share_gives_up_their_own() {
        let table = Table::new(1_000, usize::MAX);
        let others = open(&table, "bob");
        let mut mine: Vec<_> = (0..USER_OPEN_MIN).map(|_| open(&table, "alice")).collect();
        let mut waiting = Vec::new();
        for _ in 0..OPENING_OF_USER_MAX {
            let (held, none) = table.begin(Some(&user("alice"))).unwrap();
            assert!(none.is_none());
            waiting.push(held);
        }
        assert!(table.begin(Some(&user("alice"))).is_err());
        assert!(table.begin(None).unwrap().1.is_some(), "others have room");
        let mut room = Box::pin(waiting[0].room());
        assert!((&mut room).now_or_never().is_none());
        assert!(is_retired(&mine[0].0) && !is_retired(&others.0));
        close(mine.remove(0));
        assert!(room.now_or_never().is_some());
        waiting.iter().for_each(|held| held.end());
        mine.drain(..).for_each(close);
        close(others);
        assert!(table.state().users.is_empty());
        assert_eq!(table.bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_who_wait_for_much_leave_something_for_others() {
        let table = Table::new(1, usize::MAX);
        let first = open(&table, "first");
        let wait = |name: &str| {
            let begun = table.begin(Some(&user(name))).ok();
            begun.map(|(held, room)| assert!(room.is_none(), "{} has room", held.number))
        };
        let mut waiting = Vec::new();
        for n in 0..OPENING_MAX / OPENING_OF_USER_MAX {
            let name = format!("greedy-{n}");
            let waits = (0..2 * OPENING_OF_USER_MAX).map_while(|_| wait(&name));
            waiting.push(waits.count());
        }
        assert_eq!(waiting[0], OPENING_OF_USER_MAX);
        assert!((0..500).all(|n| wait(&format!("modest-{n}")).is_some()));
        close(first);
    }

    #[tokio::test(start_paused = true)]
    async fn where_all_weigh_too_much_the_coldest_go() {
        let table = Table::new(1_000, 100_000);
        let mut all: Vec<_> = (0..10).map(|_| open(&table, "alice")).collect();
        all[3].0.weighs(50_000);
        let (held, none) = table.begin(Some(&user("bob"))).unwrap();
        assert!(none.is_none());
        let _room = held.room().now_or_never().expect("a place");
        let mut loading = Box::pin(held.loading(LOOK_EVERY));
        assert!((&mut loading).now_or_never().is_none());
        let retired = all.iter().filter(|(held, _)| is_retired(held)).count();
        assert_eq!(retired, 4, "40 KB are 40 KB too much");
        all.drain(..4).for_each(close);
        assert!(loading.now_or_never().is_some());
        // What grows without another one wakes the keeper.
        let keeping = table.clone();
        let keep =
            async move { tokio::time::timeout(Duration::from_millis(1), keeping.keep()).await };
        all[5].0.weighs(150_000);
        assert!(keep.await.is_err());
        assert!(all.iter().all(|(held, _)| is_retired(held)));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_cold_goes_before_places_are_scarce() {
        let table = Table::new(100, usize::MAX);
        let all: Vec<_> = (0..95).map(|n| open(&table, &format!("{n}"))).collect();
        let keeping = table.clone();
        let keep = keeping.keep();
        let used = async {
            for _ in 0..15 {
                all[..10].iter().for_each(|(held, _)| held.used());
                sleep(LOOK_EVERY).await;
            }
        };
        select! { () = keep => {}, () = used => {} }
        let retired: Vec<_> = (0..95).filter(|&n| is_retired(&all[n].0)).collect();
        assert_eq!(
            retired,
            [10, 11, 12, 13, 14],
            "down to 90, and none that is used"
        );
    }
}
