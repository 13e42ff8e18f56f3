//! The conversations that this gateway follows for its consumers, and what the store must know of them.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Bound,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use tokio::{
    sync::Notify,
    task::yield_now,
    time::{Instant, sleep},
};

use crate::{
    chat::{self, Following, ToStore},
    clock,
    model::{ConsumerName, ConversationId, GatewayId, Kind, Millis},
    store::{self, Activity, Store},
    tasks::lock,
};

/// The time between two looks at what must be stored.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The time for which rows to remove are gathered.
const CLEAR_AFTER: Duration = Duration::from_millis(20);
/// Open conversations in a page. The progress of less than two pages is stored at once.
const PAGE: usize = 1_000;
/// Writes of lagging rows that are in progress at once.
const WRITES_AT_ONCE: usize = 64;

/// The part of the configuration that following uses.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The time between two writes of an offset.
    pub offset_flush: Duration,
    /// The time after which a conversation counts as lagging.
    pub lagging_after: Duration,
    /// Lagging conversations of one consumer that are caught up with at once.
    pub catch_up: usize,
}

/// A consumer as this gateway serves it: the conversations that have something for it.
pub struct Line {
    pub name: ConsumerName,
    /// The kinds of conversation that it reads.
    kinds: Vec<Kind>,
    /// Each open conversation is here once, or twice after a panic, so their number bounds it.
    woken: Mutex<VecDeque<Arc<Following>>>,
    notify: Notify,
    /// Whether what is woken waits until something else ends, so that nobody need be notified.
    is_busy: AtomicBool,
    /// Whether the consumer can take events now. While it cannot, no lagging conversation is opened for it.
    is_down: AtomicBool,
    is_up_again: AtomicBool,
    /// Not before its state was read: an operator may have disabled it.
    is_enabled: AtomicBool,
    /// Whether this gateway has disabled the consumer, and the store does not know it yet.
    holds_state: AtomicBool,
    /// The latest error, for operators.
    error: Mutex<Option<String>>,
}

impl Line {
    #[must_use]
    pub fn new(name: ConsumerName, kinds: Vec<Kind>) -> Self {
        Self {
            name,
            kinds,
            woken: Mutex::default(),
            notify: Notify::new(),
            is_busy: false.into(),
            is_down: false.into(),
            is_up_again: false.into(),
            is_enabled: false.into(),
            holds_state: false.into(),
            error: Mutex::default(),
        }
    }

    /// Takes the conversations that were woken since the last call. From now on the line is not busy.
    pub fn take_woken(&self) -> VecDeque<Arc<Following>> {
        let mut woken = lock(&self.woken);
        self.is_busy.store(false, Ordering::Relaxed);
        std::mem::take(&mut *woken)
    }

    /// Notes that the conversations woken from now on are taken when something else has ended: until the next call of
    /// `take_woken`, [`Self::woken`] does not complete for them.
    pub fn set_busy(&self) {
        self.is_busy.store(true, Ordering::Relaxed);
    }

    fn wake(&self, following: &Arc<Following>) {
        let mut woken = lock(&self.woken);
        woken.push_back(following.clone());
        // Read under the lock: whoever set it has taken what was there before, and takes this too.
        let is_busy = self.is_busy.load(Ordering::Relaxed);
        drop(woken);
        if !is_busy {
            self.notify.notify_one();
        }
    }

    /// Completes when a conversation was woken.
    pub async fn woken(&self) {
        self.notify.notified().await;
    }

    /// Notes whether the consumer can take events.
    pub fn set_down(&self, is_down: bool) {
        let was_down = self.is_down.swap(is_down, Ordering::Relaxed);
        if was_down && !is_down {
            self.is_up_again.store(true, Ordering::Relaxed);
        }
    }

    #[must_use]
    pub fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Relaxed)
    }

    pub(super) fn set_enabled(&self, is_enabled: bool) {
        if self.is_enabled.swap(is_enabled, Ordering::Relaxed) != is_enabled {
            self.notify.notify_one();
        }
    }

    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.is_enabled.load(Ordering::Relaxed)
    }

    pub(super) fn hold_state(&self, holds: bool) {
        self.holds_state.store(holds, Ordering::Relaxed);
    }

    pub(super) fn holds_state(&self) -> bool {
        self.holds_state.load(Ordering::Relaxed)
    }

    /// Notes how the latest request ended.
    pub(super) fn note_error(&self, error: Option<String>) {
        *lock(&self.error) = error;
    }

    #[must_use]
    pub fn error(&self) -> Option<String> {
        lock(&self.error).clone()
    }

    /// Returns whether the consumer can take events again, since the last call.
    pub(super) fn take_is_up(&self) -> bool {
        self.is_up_again.swap(false, Ordering::Relaxed)
    }
}

/// Logs that the progress of conversations could not be stored.
fn failed(error: &store::Error, conversations: Vec<ConversationId>) -> Vec<ConversationId> {
    crate::seldom::seldom!(WARN, "the progress of consumers could not be stored; it is tried again", %error);
    conversations
}

/// What must be stored of a conversation.
type Progress = (Arc<Following>, ToStore);

/// Follows the conversations that this gateway owns.
pub struct Follower {
    gateway: GatewayId,
    store: Arc<dyn Store>,
    pub settings: Settings,
    pub lines: Vec<Arc<Line>>,
    open: Mutex<BTreeMap<ConversationId, Arc<Following>>>,
    /// Conversations that caught up. Each is here once for each of its rows at most.
    caught_up: Mutex<Vec<Arc<Following>>>,
    has_caught_up: Notify,
    /// Conversations that ended while something of them was not stored. They are loaded again.
    lost: Mutex<BTreeSet<ConversationId>>,
}

impl Follower {
    #[must_use]
    pub fn new(
        gateway: GatewayId,
        store: Arc<dyn Store>,
        settings: Settings,
        lines: Vec<Arc<Line>>,
    ) -> Self {
        Self {
            gateway,
            store,
            settings,
            lines,
            open: Mutex::default(),
            caught_up: Mutex::default(),
            has_caught_up: Notify::new(),
            lost: Mutex::default(),
        }
    }

    fn line(&self, consumer: &ConsumerName) -> Option<&Arc<Line>> {
        self.lines.iter().find(|line| line.name == *consumer)
    }

    /// Takes the conversations that must be loaded again.
    pub(super) fn take_lost(&self) -> BTreeSet<ConversationId> {
        std::mem::take(&mut *lock(&self.lost))
    }

    /// Asks again later for a conversation that could not be loaded.
    pub(super) fn lose(&self, conversation: ConversationId) {
        lock(&self.lost).insert(conversation);
    }

    /// Returns what a consumer has not delivered in the conversations that are open here: their number, and the time of
    /// the oldest event.
    pub async fn behind(&self, consumer: &ConsumerName) -> (usize, Option<Millis>) {
        let (mut count, mut oldest) = (0, None);
        let mut after = None;
        while let Some(page) = self.page_after(&mut after).await {
            for at in page.iter().filter_map(|open| open.oldest(consumer)) {
                count += 1;
                oldest = Some(oldest.map_or(at, |oldest: Millis| oldest.min(at)));
            }
        }
        (count, oldest)
    }

    /// Returns the open conversations that follow `after`, and moves it. `None` if there are no more. The others of this
    /// gateway run between two pages, because 100,000 conversations are looked at for tens of milliseconds.
    async fn page_after(&self, after: &mut Option<ConversationId>) -> Option<Vec<Arc<Following>>> {
        if after.is_some() {
            yield_now().await;
        }
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let page: Vec<_> = lock(&self.open)
            .range((from, Bound::Unbounded))
            .take(PAGE)
            .map(|(_, following)| following.clone())
            .collect();
        *after = Some(page.last()?.conversation);
        Some(page)
    }

    /// Tells a consumer again of everything that it has not delivered. It has forgotten what it was told.
    pub(super) async fn tell_again(&self, line: &Line) {
        drop(line.take_woken());
        let mut after = None;
        while let Some(page) = self.page_after(&mut after).await {
            for open in page {
                open.tell_again(&line.name);
            }
        }
    }

    /// Removes the rows of conversations that caught up, so that the scan goes on with others.
    pub async fn keep_clearing(self: Arc<Self>) {
        loop {
            self.has_caught_up.notified().await;
            // What catches up at the same time is stored together.
            sleep(CLEAR_AFTER).await;
            let caught_up = std::mem::take(&mut *lock(&self.caught_up));
            let mut part = Vec::new();
            for following in &caught_up {
                let mut progress = following.to_store(None);
                progress.lagging.clear();
                part.push((following.clone(), progress));
            }
            // A row that could not be removed is found by a scan.
            self.store_part(&part).await;
        }
    }

    /// Stores offsets and lagging rows, again and again.
    pub async fn keep_stored(self: Arc<Self>) {
        let mut flushed = Instant::now();
        let look_every = LOOK_EVERY
            .min(self.settings.offset_flush)
            .min(self.settings.lagging_after);
        loop {
            sleep(look_every).await;
            let with_offsets = flushed.elapsed() >= self.settings.offset_flush;
            if with_offsets {
                flushed = Instant::now();
            }
            self.store_progress(with_offsets).await;
        }
    }

    /// Stores what must be stored now.
    async fn store_progress(&self, with_offsets: bool) {
        let before = Instant::now().checked_sub(self.settings.lagging_after);
        let (mut after, mut part) = (None, Vec::new());
        while let Some(page) = self.page_after(&mut after).await {
            part.extend(page.into_iter().filter_map(|following| {
                let mut to_store = match before {
                    Some(before) => following.to_store(Some(before)),
                    None => ToStore::default(),
                };
                if !with_offsets {
                    to_store.offsets.clear();
                    to_store.caught_up.clear();
                }
                (!to_store.is_empty()).then_some((following, to_store))
            }));
            if part.len() >= PAGE {
                self.store_or_stay_active(std::mem::take(&mut part)).await;
            }
        }
        self.store_or_stay_active(part).await;
    }

    /// Rule [found-repeat]: as long as no row says that a conversation lags, its activity names it.
    async fn store_or_stay_active(&self, part: Vec<Progress>) {
        let failed = self.store_part(&part).await;
        self.stay_active(&failed).await;
    }

    /// Returns the conversations of which not everything could be stored.
    async fn store_part(&self, part: &[Progress]) -> Vec<ConversationId> {
        let all = || part.iter().map(|(following, _)| following.conversation);
        let offsets: Vec<_> = part.iter().flat_map(|(_, p)| p.offsets.clone()).collect();
        if !offsets.is_empty()
            && let Err(error) = self.store.set_offsets(&offsets).await
        {
            return failed(&error, all().collect());
        }
        let (mut rows, mut left) = (FuturesUnordered::new(), Vec::new());
        let mut next = part.iter();
        loop {
            while rows.len() < WRITES_AT_ONCE
                && let Some((following, progress)) = next.next()
            {
                let stored = following.store_rows(progress, &*self.store);
                rows.push(stored.map(move |stored| (following.conversation, stored)));
            }
            match rows.next().await {
                Some((_, Ok(()))) => {}
                Some((id, Err(error))) => left.extend(failed(&error, vec![id])),
                None => return left,
            }
        }
    }

    async fn stay_active(&self, conversations: &[ConversationId]) {
        let activity = Activity {
            gateway: self.gateway,
            minute: clock::minute(),
        };
        for id in conversations {
            if let Err(error) = self.store.append(*id, &[], Some(activity)).await {
                failed(&error, vec![*id]);
            }
        }
    }

    /// Stores an offset of a conversation that was closed meanwhile, so that its next owner repeats less.
    pub(super) async fn store_offset(&self, following: &Following, consumer: &ConsumerName) {
        if let Some(offset) = following.offset(consumer) {
            let offset = [(following.conversation, consumer.clone(), offset)];
            if let Err(error) = self.store.set_offsets(&offset).await {
                tracing::debug!(%error, "the offset of a closed conversation could not be stored");
            }
        }
    }
}

impl chat::Consumers for Follower {
    fn names(&self) -> Vec<ConsumerName> {
        self.lines.iter().map(|line| line.name.clone()).collect()
    }

    fn wants(&self, consumer: &ConsumerName, kind: Kind) -> bool {
        self.line(consumer)
            .is_some_and(|line| line.kinds.contains(&kind))
    }

    fn opened(&self, following: &Arc<Following>) {
        lock(&self.open).insert(following.conversation, following.clone());
    }

    fn wake(&self, consumer: &ConsumerName, following: &Arc<Following>) {
        if let Some(line) = self.line(consumer) {
            line.wake(following);
        }
    }

    fn caught_up(&self, following: &Arc<Following>) {
        lock(&self.caught_up).push(following.clone());
        self.has_caught_up.notify_one();
    }

    fn closed(&self, following: &Arc<Following>) {
        let mut open = lock(&self.open);
        if open
            .get(&following.conversation)
            .is_some_and(|open| Arc::ptr_eq(open, following))
        {
            open.remove(&following.conversation);
        }
        drop(open);
        if !following.is_stored() {
            self.lose(following.conversation);
        }
    }
}
