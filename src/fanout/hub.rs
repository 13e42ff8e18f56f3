//! Topic → local sockets: the concurrent map. No lock is held longer than it takes to push, or to write to a few sockets.

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use dashmap::{
    DashMap,
    mapref::{entry::Entry, one::Ref},
};
use foldhash::quality::RandomState;
use indexmap::IndexMap;
use metrics::{Counter, counter};
use tokio::time::{Instant, sleep};

use super::{
    coalescing::{Coalesce, Coalescing, Fate, Flushing},
    encoded::Encoded,
    lock,
    outbox::Outbox,
};
use crate::{
    model::{SessionId, Topic, UserId},
    protocol::{CloseCode, Codec},
    tasks::{Tasks, contain},
};

/// One session, as far as publications are concerned. Behind an `Arc`'s two counts, what every frame needs of the outbox
/// is in the same 64 bytes: of a large topic's subscribers, the nearest caches do not hold all.
#[derive(Debug)]
#[repr(C)]
pub struct Subscriber {
    pub outbox: Outbox,
    pub session: SessionId,
    pub user: UserId,
    /// What it is subscribed to; `None` once it has left, so that nothing subscribes it again.
    topics: Mutex<Option<Vec<Topic>>>,
}

impl Subscriber {
    #[must_use]
    pub fn new(session: SessionId, user: UserId, codec: Codec, outbox_bytes_max: usize) -> Self {
        let outbox = Outbox::new(codec, outbox_bytes_max);
        Self {
            session,
            user,
            outbox,
            topics: Mutex::new(Some(Vec::new())),
        }
    }
}

/// Of larger topics frames are queued: whoever publishes is not to be held up by so many writes.
const AT_ONCE_MAX: usize = 2_000;
/// Of smaller topics the map is held while they are written to.
const HELD_MAX: usize = 4;
/// Each queued frame shortens what is remembered of the time that writing took by this part of it.
const FORGET: u64 = 256;
/// The last rest is this part of the average: after two or three frames close together the next is queued.
const MEMORY: u64 = 4;
/// As long as it takes at least to write to a few sockets and to wake a session: entries that were committed together
/// are queued, and go out together.
const TOOK_US_MIN: u64 = 100;

/// Who is subscribed to a topic, and how long it takes to write to all of them.
#[derive(Default)]
struct Subscribers {
    /// Dense, because it is walked for every message; by session, because sessions leave.
    sessions: IndexMap<SessionId, Arc<Subscriber>>,
    /// The same, to be walked without holding the map; made when it is needed.
    shared: OnceLock<Arc<[Arc<Subscriber>]>>,
    pace: Pace,
    /// It was large once: something may be held back.
    coalesced: AtomicBool,
}

impl Subscribers {
    /// With room for one: what most topics have, their user's own.
    fn of_one() -> Self {
        Self {
            sessions: IndexMap::with_capacity(1),
            ..Self::default()
        }
    }

    fn shared(&self) -> Arc<[Arc<Subscriber>]> {
        let all = || self.sessions.values().cloned().collect();
        self.shared.get_or_init(all).clone()
    }
}

/// Whether the sockets of a topic are written to at once, or frames are queued for them. Writing at once saves a
/// wake-up for each; queueing lets a session write many frames in one go. So as long as there is rest between one
/// frame and the next, on average for at least half as long as all the writes take, frames are written at once.
struct Pace {
    /// Of the last frame's last write or push. Microseconds, as the next.
    ended_us: AtomicU64,
    /// How long the last frame took that was written at once.
    took_us: AtomicU64,
    /// Rests beside that time, at most as long each; a moving average. Thousandths.
    rest: AtomicU64,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            ended_us: AtomicU64::default(),
            took_us: AtomicU64::default(),
            rest: AtomicU64::new(1_000),
        }
    }
}

impl Pace {
    /// How long it is since the last frame.
    fn since_us(&self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.ended_us.load(Ordering::Relaxed))
    }

    fn rests(&self, now_us: u64) -> bool {
        let took = self.took_us.load(Ordering::Relaxed).max(TOOK_US_MIN);
        let rest = self.since_us(now_us).min(took) * 1_000 / took;
        let average = (self.rest.load(Ordering::Relaxed) * (MEMORY - 1) + rest) / MEMORY;
        self.rest.store(average, Ordering::Relaxed);
        average >= 500
    }

    fn wrote(&self, began_us: u64, now_us: u64) {
        self.took_us.store(now_us - began_us, Ordering::Relaxed);
        self.ended_us.store(now_us, Ordering::Relaxed);
    }

    /// One that took long once, because it was interrupted, is forgotten bit by bit.
    fn queued(&self, now_us: u64) {
        let took = self.took_us.load(Ordering::Relaxed);
        self.took_us.store(took - took / FORGET, Ordering::Relaxed);
        self.ended_us.store(now_us, Ordering::Relaxed);
    }
}

/// All subscriptions of this gateway's sessions.
pub struct Hub {
    topics: DashMap<Topic, Subscribers, RandomState>,
    coalescing: Coalescing,
    sessions: AtomicUsize,
    frames_queued: Counter,
    frames_sent: Counter,
    events_held: Counter,
    began: Instant,
    tasks: Tasks,
}

/// Holds nothing back.
impl Default for Hub {
    fn default() -> Self {
        Self::new(Coalesce::default(), Tasks::default())
    }
}

impl Hub {
    #[must_use]
    pub fn new(coalesce: Coalesce, tasks: Tasks) -> Self {
        Self {
            topics: DashMap::default(),
            coalescing: Coalescing::new(coalesce),
            sessions: AtomicUsize::new(0),
            frames_queued: counter!("chat_frames_queued_total"),
            frames_sent: counter!("chat_frames_sent_total"),
            events_held: counter!("chat_events_held_total"),
            began: Instant::now(),
            tasks,
        }
    }

    /// Subscribes a session, unless it has left. Once is enough, twice is harmless.
    pub fn subscribe(&self, topic: &Topic, subscriber: &Arc<Subscriber>) {
        let mut topics = lock(&subscriber.topics);
        let Some(topics) = &mut *topics else { return };
        let entry = self.topics.entry(topic.clone());
        let mut subscribers = entry.or_insert_with(Subscribers::of_one);
        subscribers.shared.take();
        if subscribers
            .sessions
            .insert(subscriber.session, subscriber.clone())
            .is_none()
        {
            if topics.is_empty() {
                topics.reserve_exact(1);
            }
            topics.push(topic.clone());
        }
    }

    pub fn unsubscribe(&self, topic: &Topic, subscriber: &Subscriber) {
        let mut topics = lock(&subscriber.topics);
        let Some(topics) = &mut *topics else { return };
        let flushing = self.coalescing.flushing(topic);
        let _flushing = flushing.as_ref().map(|flushing| lock(flushing));
        // It was published while this session was subscribed.
        let outbox = &subscriber.outbox;
        if let Some(held) = self.coalescing.held(topic, outbox.codec()) {
            outbox.push(held);
        }
        topics.retain(|t| t != topic);
        self.remove(topic, subscriber.session);
    }

    /// Ends all subscriptions of a session; returns them.
    pub fn leave(&self, subscriber: &Subscriber) -> Vec<Topic> {
        let topics = lock(&subscriber.topics).take().unwrap_or_default();
        for topic in &topics {
            self.remove(topic, subscriber.session);
        }
        topics
    }

    /// Everything that any session is subscribed to.
    #[must_use]
    pub fn topics(&self) -> Vec<Topic> {
        self.topics.iter().map(|t| t.key().clone()).collect()
    }

    fn remove(&self, topic: &Topic, session: SessionId) {
        if let Entry::Occupied(mut subscribers) = self.topics.entry(topic.clone()) {
            subscribers.get_mut().shared.take();
            subscribers.get_mut().sessions.swap_remove(&session);
            if subscribers.get().sessions.is_empty() {
                subscribers.remove();
            }
        }
    }

    #[must_use]
    pub fn subscribers(&self, topic: &Topic) -> usize {
        self.topics.get(topic).map_or(0, |s| s.sessions.len())
    }

    /// The sessions of a user here.
    #[must_use]
    pub fn sessions_of(&self, user: &UserId) -> Vec<Arc<Subscriber>> {
        let sessions = self.topics.get(&Topic::User(user.clone()));
        sessions.map_or_else(Vec::new, |s| s.sessions.values().cloned().collect())
    }

    /// Writes an event to every subscriber of the topic, or queues it: now, or in a moment together with others. Events
    /// keep the order of these calls, one after the other.
    pub fn deliver(self: &Arc<Self>, topic: &Topic, event: &Encoded) {
        let Some(subscribers) = self.topics.get(topic) else {
            return;
        };
        let window = self.coalescing.when.window(subscribers.sessions.len());
        if window.is_none() && !subscribers.coalesced.load(Ordering::Relaxed) {
            return self.send(topic, subscribers, event);
        }
        subscribers.coalesced.store(true, Ordering::Relaxed);
        let since = Duration::from_micros(subscribers.pace.since_us(self.now_us()));
        drop(subscribers);
        let left = window.and_then(|window| window.checked_sub(since));
        match self.coalescing.hold(topic, event, left.is_some()) {
            Fate::Now => return self.send_to(topic, event),
            Fate::Held => {}
            Fate::First(flushing) => {
                let left = left.unwrap_or_default();
                let (hub, topic) = (self.clone(), topic.clone());
                self.tasks.spawn(async move {
                    let later = || {
                        hub.clone()
                            .flush_later(topic.clone(), left, flushing.clone())
                    };
                    // After a panic, what it had taken is missing, as a gap shows; what comes next is not.
                    while contain("a flush", "held-back events", later())
                        .await
                        .is_none()
                    {}
                });
            }
            Fate::Full(flushing) => self.flush(topic, &flushing),
        }
        self.events_held.increment(1);
    }

    /// Flushes what is held back of a topic, window by window, until there was none in one.
    async fn flush_later(self: Arc<Self>, topic: Topic, left: Duration, flushing: Flushing) {
        let mut window = left;
        loop {
            sleep(window).await;
            self.flush(&topic, &flushing);
            if self.coalescing.ended(&topic) {
                return;
            }
            let sockets = self.subscribers(&topic);
            window = self.coalescing.when.window(sockets).unwrap_or_default();
        }
    }

    fn flush(&self, topic: &Topic, flushing: &Flushing) {
        let _flushing = lock(flushing);
        if let Some(events) = self.coalescing.take(topic) {
            self.send_to(topic, &events);
        }
    }

    fn send_to(&self, topic: &Topic, event: &Encoded) {
        if let Some(subscribers) = self.topics.get(topic) {
            self.send(topic, subscribers, event);
        }
    }

    /// One buffer, shared by all.
    fn send(&self, topic: &Topic, subscribers: Ref<'_, Topic, Subscribers>, event: &Encoded) {
        let count = subscribers.sessions.len();
        let began = self.now_us();
        if count > AT_ONCE_MAX || !subscribers.pace.rests(began) {
            for Subscriber { outbox, .. } in subscribers.sessions.values().map(|s| &**s) {
                outbox.push(event.frame(outbox.codec()).clone());
            }
            self.frames_queued.increment(count as u64 * event.count());
            subscribers.pace.queued(self.now_us());
            return;
        }
        let write = |subscriber: &Arc<Subscriber>| {
            let outbox = &subscriber.outbox;
            outbox.write_or_push(event.frame(outbox.codec()))
        };
        let written = if count <= HELD_MAX {
            let written = subscribers.sessions.values().filter(|s| write(s)).count();
            subscribers.pace.wrote(began, self.now_us());
            written
        } else {
            let sessions = subscribers.shared();
            drop(subscribers);
            let written = sessions.iter().filter(|s| write(s)).count();
            if let Some(subscribers) = self.topics.get(topic) {
                subscribers.pace.wrote(began, self.now_us());
            }
            written
        };
        self.frames_sent.increment(written as u64 * event.count());
        let queued = (count - written) as u64 * event.count();
        self.frames_queued.increment(queued);
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or_default()
    }

    /// Closes all sessions of a user here; returns how many.
    pub fn disconnect(&self, user: &UserId, code: CloseCode) -> usize {
        let sessions = self.sessions_of(user);
        for session in &sessions {
            session.outbox.close(code);
        }
        sessions.len()
    }

    /// Counts a socket in; `None` when there are `max` already. Counted out when the place is dropped.
    pub fn admit(self: &Arc<Self>, max: usize) -> Option<Admitted> {
        let admitted = self
            .sessions
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
                (n < max).then_some(n + 1)
            });
        admitted.is_ok().then(|| Admitted(self.clone()))
    }

    #[must_use]
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Acquire)
    }
}

/// A socket's place among those allowed.
pub struct Admitted(Arc<Hub>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.sessions.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::{
        fanout::Frame,
        model::ConversationId,
        protocol::{Event, PresenceItem},
    };

    fn subscriber(session: u64) -> Arc<Subscriber> {
        let user = UserId::new("alice").unwrap();
        Arc::new(Subscriber::new(
            SessionId(session),
            user,
            Codec::Json,
            1 << 20,
        ))
    }

    /// Of frames that each take 1 ms, and come so long after the last one has ended: which are written at once?
    fn written_at_once(rests_us: impl IntoIterator<Item = u64>) -> Vec<bool> {
        let (pace, mut now) = (Pace::default(), 0);
        let at_once = |rest_us| {
            now += rest_us;
            let at_once = pace.rests(now);
            if at_once {
                pace.wrote(now, now + 1_000);
                now += 1_000;
            } else {
                pace.queued(now);
            }
            at_once
        };
        rests_us.into_iter().map(at_once).collect()
    }

    #[test]
    fn a_frame_that_comes_early_once_is_written_at_once_a_rush_is_queued() {
        assert!(
            written_at_once([600; 100])
                .into_iter()
                .all(|at_once| at_once)
        );
        let sometimes = (0..100).map(|n| if n % 3 == 0 { 0 } else { 2_000 });
        assert!(
            written_at_once(sometimes)
                .into_iter()
                .all(|at_once| at_once)
        );
        let rush = written_at_once([2_000].into_iter().chain([100; 20]));
        assert!(rush[..3].iter().all(|at_once| *at_once));
        assert!(rush[4..].iter().all(|at_once| !at_once));
        let after = written_at_once([100; 20].into_iter().chain([2_000; 4]));
        assert_eq!(after[20..], [false, false, true, true]);
    }

    fn event(online: bool) -> Encoded {
        let user = UserId::new("bob").unwrap();
        Encoded::new(Event::Presence(PresenceItem {
            user,
            online,
            last_seen: None,
        }))
    }

    /// A hub that holds back for 2 ms what goes to two sockets, and nothing that goes to one; a topic with two.
    fn coalescing() -> (Arc<Hub>, Topic, [Arc<Subscriber>; 2]) {
        let coalesce = Coalesce {
            per_socket: Duration::from_micros(999),
            max: Duration::from_millis(25),
        };
        let hub = Arc::new(Hub::new(coalesce, Tasks::default()));
        let topic = Topic::Channel(ConversationId::random());
        let both = [subscriber(1), subscriber(2)];
        for subscriber in &both {
            hub.subscribe(&topic, subscriber);
        }
        (hub, topic, both)
    }

    /// Of all that is queued, how many frames go out together each time.
    fn counts(subscriber: &Subscriber) -> Vec<u64> {
        let mut frames = VecDeque::new();
        let taken = subscriber.outbox.take(&mut frames).now_or_never();
        assert!(taken.is_none_or(|taken| taken.is_ok()));
        subscriber.outbox.flushed();
        frames.iter().map(Frame::count).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_too_soon_goes_out_together_when_it_is_time() {
        let (hub, topic, [one, other]) = coalescing();
        sleep(Duration::from_secs(1)).await;
        for _ in 0..3 {
            hub.deliver(&topic, &event(true));
        }
        assert_eq!(counts(&one), [1], "after a rest, nothing waits");
        sleep(Duration::from_millis(1)).await;
        assert_eq!(counts(&one), [0; 0]);
        sleep(Duration::from_millis(2)).await;
        assert_eq!(counts(&one), [2]);
        hub.deliver(&topic, &event(true));
        assert_eq!(counts(&one), [0; 0]);
        assert!(hub.coalescing.flushing(&topic).is_some());
        sleep(Duration::from_secs(1)).await;
        assert!(hub.coalescing.flushing(&topic).is_none(), "nothing is kept");
        hub.deliver(&topic, &event(true));
        assert_eq!(counts(&one), [1, 1]);
        assert_eq!(counts(&other), [1, 2, 1, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn much_does_not_wait() {
        let (hub, topic, [one, _]) = coalescing();
        for _ in 0..1_000 {
            hub.deliver(&topic, &event(true));
        }
        let gone: u64 = counts(&one).iter().sum();
        assert!((700..1_000).contains(&gone));
        sleep(Duration::from_millis(3)).await;
        assert_eq!(gone + counts(&one).iter().sum::<u64>(), 1_000);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_held_back_is_for_all_that_were_subscribed_and_in_order() {
        let (hub, topic, [one, other]) = coalescing();
        hub.deliver(&topic, &event(true));
        hub.deliver(&topic, &event(true));
        hub.unsubscribe(&topic, &other);
        assert_eq!(counts(&other), [2]);
        hub.deliver(&topic, &event(false));
        assert_eq!(
            counts(&one),
            [0; 0],
            "it is small now, and waits all the same"
        );
        sleep(Duration::from_millis(3)).await;
        hub.deliver(&topic, &event(true));
        let mut frames = VecDeque::new();
        one.outbox.take(&mut frames).await.unwrap();
        let all = frames.iter().flat_map(|frame| frame.bytes().to_vec());
        let all = String::from_utf8_lossy(&all.collect::<Vec<_>>()).into_owned();
        let (before, after) = all.split_once("false").unwrap();
        assert_eq!(before.matches("true").count(), 2, "{all}");
        assert_eq!(after.matches("true").count(), 1, "{all}");
        assert_eq!(counts(&other), [0; 0]);
    }

    #[tokio::test]
    async fn one_buffer_goes_to_all_and_none_to_who_has_left() {
        let hub = Arc::new(Hub::default());
        let topic = Topic::Channel(ConversationId::random());
        let (one, other, gone) = (subscriber(1), subscriber(2), subscriber(3));
        for subscriber in [&one, &other, &gone, &one] {
            hub.subscribe(&topic, subscriber);
        }
        hub.leave(&gone);
        hub.subscribe(&topic, &gone);
        assert_eq!(hub.subscribers(&topic), 2);
        hub.deliver(&topic, &event(true));
        let (mut to_one, mut to_other) = (VecDeque::new(), VecDeque::new());
        one.outbox.take(&mut to_one).await.unwrap();
        other.outbox.take(&mut to_other).await.unwrap();
        let pointers = [to_one, to_other].map(|frames| frames[0].bytes().as_ptr());
        assert_eq!(pointers[0], pointers[1], "the bytes are shared, not copied");
        hub.unsubscribe(&topic, &one);
        hub.leave(&other);
        assert!(hub.topics.is_empty());
    }
}
