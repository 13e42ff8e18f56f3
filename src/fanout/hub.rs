//! The concurrent map from topics to local sockets. Its locks are held only to queue frames, or to write to a few
//! sockets.

mod subscriptions;

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
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

use self::subscriptions::Subscriptions;
pub use self::subscriptions::TooMany;
use super::{
    coalescing::{Coalesce, Coalescing, Fate, Flushing},
    encoded::Encoded,
    lock,
    outbox::Outbox,
    pace::Pace,
};
use crate::{
    model::{SessionId, Topic, UserId},
    protocol::{CloseCode, Codec},
    tasks::{Tasks, contain},
};

/// A session as the receiver of publications. With the layout of [`Outbox`], everything that each frame needs is in the
/// first 64 bytes after the two counters of an `Arc`, because the subscribers of a large topic do not fit into the
/// nearest caches.
#[derive(Debug)]
#[repr(C)]
pub struct Subscriber {
    pub outbox: Outbox,
    pub session: SessionId,
    pub user: UserId,
    /// `None` once the session has left, so that nothing subscribes it again.
    subscriptions: Mutex<Option<Subscriptions>>,
}

impl Subscriber {
    #[must_use]
    pub fn new(session: SessionId, user: UserId, codec: Codec, outbox_bytes_max: usize) -> Self {
        let outbox = Outbox::new(codec, outbox_bytes_max);
        Self {
            session,
            user,
            outbox,
            subscriptions: Mutex::new(Some(Subscriptions::new())),
        }
    }
}

/// Sockets of a topic up to which frames are written at once. Above this size frames are queued for the sessions to
/// write, so that publishing stays fast.
const AT_ONCE_MAX: usize = 2_000;
/// Sockets of a topic up to which frames are written while the map is locked. Above this size they are written to from
/// a copy of the list.
const HELD_MAX: usize = 4;
type Sessions = IndexMap<SessionId, Arc<Subscriber>>;

/// The subscribers of a topic, and the time that writing to all of them takes.
#[derive(Default)]
struct Subscribers {
    /// The subscribed sessions. The map is dense, because each publication walks it.
    sessions: Sessions,
    /// A copy of `sessions`, to be walked without locking the map. It is made when it is needed.
    shared: OnceLock<Arc<[Arc<Subscriber>]>>,
    /// Sessions that request to see a channel. They count as interested, but receive nothing yet.
    asking: Option<Box<Sessions>>,
    pace: Pace,
    /// Whether the topic was once large enough for coalescing, so that events may wait.
    coalesced: AtomicBool,
}

impl Subscribers {
    /// Creates an empty list with capacity for one: most topics have one subscriber, the session of their user.
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

    fn asks(&self, session: SessionId) -> bool {
        let asking = self.asking.as_ref();
        asking.is_some_and(|asking| asking.contains_key(&session))
    }

    /// Ends the request of a session. Returns true if it had one.
    fn asks_no_more(&mut self, session: SessionId) -> bool {
        let Some(asking) = &mut self.asking else {
            return false;
        };
        let asked = asking.swap_remove(&session).is_some();
        if asking.is_empty() {
            self.asking = None;
        }
        asked
    }

    /// Returns all sessions that are subscribed or request to be.
    fn everyone(&self) -> Vec<Arc<Subscriber>> {
        let asking = self.asking.iter().flat_map(|asking| asking.values());
        self.sessions.values().chain(asking).cloned().collect()
    }

    /// Returns the number of sessions that are subscribed or request to be.
    fn count(&self) -> usize {
        self.sessions.len() + self.asking.as_ref().map_or(0, |asking| asking.len())
    }
}

/// The subscriptions of all sessions of this gateway.
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

/// A hub without coalescing.
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

    /// Returns all topics that a session is subscribed to.
    #[must_use]
    pub fn topics(&self) -> Vec<Topic> {
        self.topics.iter().map(|t| t.key().clone()).collect()
    }

    fn remove(&self, topic: &Topic, session: SessionId) {
        if let Entry::Occupied(mut subscribers) = self.topics.entry(topic.clone()) {
            subscribers.get_mut().shared.take();
            subscribers.get_mut().sessions.swap_remove(&session);
            subscribers.get_mut().asks_no_more(session);
            if subscribers.get().count() == 0 {
                subscribers.remove();
            }
        }
    }

    /// Returns the number of sessions that are subscribed to the topic or request to be.
    #[must_use]
    pub fn subscribers(&self, topic: &Topic) -> usize {
        self.topics.get(topic).map_or(0, |s| s.count())
    }

    /// Returns the sessions of a user on this gateway.
    #[must_use]
    pub fn sessions_of(&self, user: &UserId) -> Vec<Arc<Subscriber>> {
        let sessions = self.topics.get(&Topic::User(user.clone()));
        sessions.map_or_else(Vec::new, |s| s.sessions.values().cloned().collect())
    }

    /// Writes an event to each subscriber of the topic, or queues it; with coalescing, it does so later and together
    /// with others. Events keep the order of the calls, which must not be concurrent.
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
                    // A panic loses only the events that this flush had taken. Clients see the gap and fetch them.
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

    /// Flushes the waiting events of a topic after each window, until a window ends without any.
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

    /// Writes or queues an event for each subscriber. All of them share one buffer per codec.
    fn send(&self, topic: &Topic, subscribers: Ref<'_, Topic, Subscribers>, event: &Encoded) {
        let count = subscribers.sessions.len();
        let began = self.now_us();
        if count > AT_ONCE_MAX || !subscribers.pace.record_and_decide(began) {
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

    /// Closes all sessions of a user on this gateway. Returns their number.
    pub fn disconnect(&self, user: &UserId, code: CloseCode) -> usize {
        let sessions = self.sessions_of(user);
        for session in &sessions {
            session.outbox.close(code);
        }
        sessions.len()
    }

    /// Counts a session until the returned value is dropped.
    #[must_use]
    pub fn admit(self: &Arc<Self>) -> Admitted {
        self.sessions.fetch_add(1, Ordering::AcqRel);
        Admitted(self.clone())
    }

    #[must_use]
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Acquire)
    }
}

/// A counted session.
pub struct Admitted(Arc<Hub>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.sessions.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::VecDeque;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::{
        fanout::Frame,
        model::ConversationId,
        protocol::{Event, PresenceItem},
    };

    pub(in crate::fanout) fn subscriber(session: u64) -> Arc<Subscriber> {
        let user = UserId::new("alice").unwrap();
        Arc::new(Subscriber::new(
            SessionId(session),
            user,
            Codec::Json,
            1 << 20,
        ))
    }

    fn event(online: bool) -> Encoded {
        let user = UserId::new("bob").unwrap();
        Encoded::new(Event::Presence(PresenceItem {
            user,
            online,
            last_seen: None,
        }))
    }

    /// Returns a topic with two subscribers, and a hub that coalesces for 2 ms with two sockets and not at all with
    /// one.
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

    /// Takes everything queued. Returns how many frames each write contains.
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
        hub.removed(&topic, &other);
        assert_eq!(counts(&other), [2]);
        hub.removed(&topic, &other);
        assert_eq!(counts(&other), [0; 0], "it is subscribed no more");
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
        hub.left(&hub.leave(&gone), &gone);
        hub.subscribe(&topic, &gone);
        assert_eq!(hub.subscribers(&topic), 2);
        hub.deliver(&topic, &event(true));
        let (mut to_one, mut to_other) = (VecDeque::new(), VecDeque::new());
        one.outbox.take(&mut to_one).await.unwrap();
        other.outbox.take(&mut to_other).await.unwrap();
        let pointers = [to_one, to_other].map(|frames| frames[0].bytes().as_ptr());
        assert_eq!(pointers[0], pointers[1], "the bytes are shared, not copied");
        hub.removed(&topic, &one);
        hub.left(&hub.leave(&other), &other);
        assert!(hub.topics.is_empty());
    }
}
