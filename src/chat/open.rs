//! Limits the open conversations: their number, the number because of one user, and their weight. At a limit the least
//! recently used conversation is evicted, and the request that opens another one waits until it has gone.

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
        limits::{USER_OPEN_DIVISOR, USER_OPEN_MIN},
    },
    tasks::lock,
};

/// The interval at which the keeper looks for conversations to evict.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Looks without a use after which a conversation is cold: it is evicted when its place could be needed soon.
const COLD_LOOKS: usize = 10;
/// Tenths of a limit above which cold conversations are evicted.
const SOON_FULL_TENTHS: usize = 9;
/// Cold conversations that are evicted at one look. Each costs the store a write.
const EVICTED_AT_ONCE: usize = 1_000;
/// Bytes by which an owner's weight may differ from the counted weight.
const WEIGHED_BYTES: usize = 4 << 10;

/// The open conversations of this gateway, with their weight.
pub(super) struct Table {
    open_max: usize,
    user_max: usize,
    bytes_max: usize,
    /// A permit for each open conversation. Those that wait to be opened have none.
    permits: Arc<Semaphore>,
    /// The conversations that are being loaded.
    loads: Loads,
    /// The weight of all open conversations.
    bytes: AtomicUsize,
    /// A counter of openings and looks. Each use is recorded with its value, so the least recent use is known without a
    /// clock.
    now: AtomicU64,
    /// Fires when the weight is above its limit.
    pressed: Notify,
    /// Fires when a conversation has gone.
    freed: Notify,
    state: Mutex<State>,
}

/// The table's record of one conversation. The table, the handle and the owner share it.
pub(super) struct Held {
    number: u64,
    table: Arc<Table>,
    used_at: AtomicU64,
    bytes: AtomicUsize,
    retire: CancellationToken,
}

/// The permit to have one conversation open. It is given back when it is dropped.
pub(super) struct OpenPermit {
    _of_user: Option<OwnedSemaphorePermit>,
    _of_all: OwnedSemaphorePermit,
}

impl Held {
    /// Records a use of the conversation. It is called for each operation, and mostly only compares two numbers.
    pub(super) fn used(&self) {
        let now = self.table.now.load(Ordering::Relaxed);
        if self.used_at.load(Ordering::Relaxed) != now {
            self.used_at.store(now, Ordering::Relaxed);
        }
    }

    /// Records the weight of the owner, which alone calls this. It is called often, and mostly only compares two
    /// numbers.
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

    /// Waits for a permit: see [`Table::permit`].
    pub(super) async fn permit(&self) -> OpenPermit {
        self.table.permit(self).await
    }

    /// Waits for the turn to load: see [`Table::loading`].
    pub(super) async fn loading(self: &Arc<Self>, patience: Duration) -> Loading {
        self.table.loading(self, patience).await
    }

    /// Records that the conversation is loaded and weighed. From now on it may be evicted.
    pub(super) fn loaded(&self) {
        self.table.loaded(self);
    }

    /// Records that the conversation has gone, or was never opened.
    pub(super) fn end(&self) {
        self.table.end(self);
    }

    /// Returns the token that fires when the conversation must close as soon as nothing of it is in progress.
    pub(super) fn retired(&self) -> CancellationToken {
        self.retire.clone()
    }
}

impl Table {
    pub(super) fn new(open_max: usize, bytes_max: usize) -> Arc<Self> {
        Arc::new(Self {
            open_max,
            user_max: (open_max / USER_OPEN_DIVISOR).max(USER_OPEN_MIN),
            bytes_max,
            permits: Arc::new(Semaphore::new(open_max.min(Semaphore::MAX_PERMITS))),
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

    /// Records that a conversation opens because of a request of `user`, or of this gateway itself. Returns no permit
    /// if there is none at once; the caller then waits for one with [`Held::permit`].
    ///
    /// # Errors
    /// `Unavailable` if too many conversations wait already.
    pub(super) fn begin(
        self: &Arc<Self>,
        user: Option<&UserId>,
    ) -> Result<(Arc<Held>, Option<OpenPermit>), Error> {
        let mut state = self.state();
        let of_user = match user {
            Some(user) => Some(state.user(user, self.user_max)?),
            None => None,
        };
        let permit = self.permit_at_once(of_user);
        if permit.is_none() && !state.may_wait(user) {
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
        if permit.is_some() {
            state.placed(held.number);
            state.admitted(held.number);
        }
        gauge!("chat_conversations_open").set(state.places.len() as f64);
        Ok((held, permit))
    }

    fn permit_at_once(&self, of_user: Option<Arc<Semaphore>>) -> Option<OpenPermit> {
        if self.bytes() > self.bytes_max {
            return None;
        }
        let of_user = match of_user {
            Some(permits) => Some(permits.try_acquire_owned().ok()?),
            None => None,
        };
        Some(OpenPermit {
            _of_user: of_user,
            _of_all: self.permits.clone().try_acquire_owned().ok()?,
        })
    }

    /// Waits for a permit. It evicts a conversation for it if there is none.
    async fn permit(&self, held: &Held) -> OpenPermit {
        let user = {
            let state = self.state();
            let taken = state.places.get(&held.number);
            let user = taken.and_then(|taken| taken.user.clone());
            user.and_then(|user| Some((state.users.get(&user)?.permits.clone(), user)))
        };
        let of_user = match user {
            Some((permits, user)) => Some(self.acquire(permits, Some(&user)).await),
            None => None,
        };
        let of_all = self.acquire(self.permits.clone(), None).await;
        self.state().placed(held.number);
        OpenPermit {
            _of_user: of_user,
            _of_all: of_all,
        }
    }

    /// Waits until one more conversation may be loaded: few are loaded at once, and none while the weight is above its
    /// limit and something can be evicted.
    async fn loading(&self, held: &Arc<Held>, patience: Duration) -> Loading {
        let loading = Loading::begin(held, patience).await;
        while self.bytes() > self.bytes_max {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            // If nothing can be evicted, waiting would not help.
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
        if self.permits.available_permits() == 0 {
            state.evict_for_waiting();
        }
    }

    async fn acquire(
        &self,
        permits: Arc<Semaphore>,
        user: Option<&UserId>,
    ) -> OwnedSemaphorePermit {
        loop {
            if let Ok(permit) = permits.clone().try_acquire_owned() {
                return permit;
            }
            self.state().evict(user, u64::MAX);
            // The semaphore is never closed.
            if let Ok(permit) = permits.clone().acquire_owned().await {
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

    /// Evicts the least recently used conversations until the others weigh no more than `bytes`. Returns true if some
    /// are about to close.
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

    /// Evicts the least recently used conversation, if there is one that may be evicted.
    pub(super) fn evict_one(&self) -> bool {
        self.state().evict(None, u64::MAX)
    }

    /// Evicts conversations before their places are needed. It never returns.
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
                self.relieve(self.bytes_max / 10 * SOON_FULL_TENTHS);
            }
        }
    }

    /// Evicts the conversations that were not used since `cold`, while places or weight are scarce. It also evicts others
    /// for those that wait because an evicted conversation is still busy.
    fn look(&self, cold: u64) {
        let (soon, heavy) = (
            self.open_max / 10 * SOON_FULL_TENTHS,
            self.bytes_max / 10 * SOON_FULL_TENTHS,
        );
        let mut state = self.state();
        for _ in 0..EVICTED_AT_ONCE {
            let places = state.places.len() - state.opening - state.retiring;
            let bytes = self.bytes().saturating_sub(state.retiring_bytes);
            if (places <= soon && bytes <= heavy) || !state.evict(None, cold) {
                break;
            }
        }
        if self.permits.available_permits() == 0 {
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

    fn open(table: &Arc<Table>, name: &str) -> (Arc<Held>, OpenPermit) {
        let (held, permit) = table.begin(Some(&user(name))).unwrap();
        held.weighs(10_000);
        held.loaded();
        (held, permit.expect("there is one"))
    }

    fn is_retired(held: &Held) -> bool {
        held.retired().is_cancelled()
    }

    fn close((held, permit): (Arc<Held>, OpenPermit)) {
        drop(permit);
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
        // A conversation that was given up keeps no place.
        table.begin(Some(&user("b"))).unwrap().0.end();
        let (held, none) = table.begin(Some(&user("d"))).unwrap();
        assert!(none.is_none());
        let mut room = Box::pin(held.permit());
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
        let (mut next, mut last) = (Box::pin(second.permit()), Box::pin(third.permit()));
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
        let mut room = Box::pin(waiting[0].permit());
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
        let _room = held.permit().now_or_never().expect("a place");
        let mut loading = Box::pin(held.loading(LOOK_EVERY));
        assert!((&mut loading).now_or_never().is_none());
        let retired = all.iter().filter(|(held, _)| is_retired(held)).count();
        assert_eq!(retired, 4, "40 KB are 40 KB too much");
        all.drain(..4).for_each(close);
        assert!(loading.now_or_never().is_some());
        // A conversation that grows wakes the keeper, even if no other one waits.
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
