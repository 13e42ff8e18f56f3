//! The concurrent map from topics to local sockets. Its locks are held only to queue frames, or to write to a few
//! sockets; passes write to many.

mod subscriptions;

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicUsize, Ordering},
};

use dashmap::{DashMap, mapref::entry::Entry};
use foldhash::quality::RandomState;
use indexmap::IndexMap;
use metrics::{Counter, counter};
use tokio::{task::yield_now, time::Instant};

pub use self::subscriptions::TooMany;
use super::{
    encoded::Encoded,
    lock,
    pace::Pace,
    passes::{Fate, Pass, Passes, Sockets},
    requests::{LongRequest, LongRequests},
    subscriber::Subscriber,
};
use crate::{
    model::{SessionId, Topic, UserId},
    protocol::CloseCode,
    tasks::{Tasks, contain},
};

/// Sockets of a topic up to which the publisher writes its frames, while the map is locked. Above this size a pass does.
const AT_ONCE_MAX: usize = 4;

/// Sockets that a pass writes to before other tasks have their turn: a few milliseconds. A turn costs two or three switches
/// between threads.
const PASS_SOCKETS_AT_ONCE: usize = 512;
/// The subscribers of a topic, and the time that writing to all of them takes.
#[derive(Default)]
struct Subscribers {
    /// The subscribed sessions. The map is dense, because each publication walks it.
    sessions: Sockets,
    /// A copy of `sessions`, to be walked without locking the map. It is made when it is needed.
    shared: OnceLock<Arc<Sockets>>,
    /// Sessions that request to see a channel. They count as interested, but receive nothing yet.
    asking: Option<Box<Sockets>>,
    pace: Pace,
}

impl Subscribers {
    /// Creates an empty list with capacity for one: most topics have one subscriber, the session of their user.
    fn of_one() -> Self {
        Self {
            sessions: IndexMap::with_capacity(1),
            ..Self::default()
        }
    }

    fn shared(&self) -> Arc<Sockets> {
        let all = || Arc::new(self.sessions.clone());
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
    passes: Passes,
    /// [`AT_ONCE_MAX`], or less in a simulation.
    at_once_max: usize,
    sessions: AtomicUsize,
    requests: LongRequests,
    frames_queued: Counter,
    frames_sent: Counter,
    events_held: Counter,
    began: Instant,
    tasks: Tasks,
}

impl Default for Hub {
    fn default() -> Self {
        Self::new(Tasks::default())
    }
}

impl Hub {
    #[must_use]
    pub fn new(tasks: Tasks) -> Self {
        Self {
            topics: DashMap::default(),
            passes: Passes::default(),
            at_once_max: AT_ONCE_MAX,
            sessions: AtomicUsize::new(0),
            frames_queued: counter!("chat_frames_queued_total"),
            frames_sent: counter!("chat_frames_sent_total"),
            events_held: counter!("chat_events_held_total"),
            requests: LongRequests::default(),
            began: Instant::now(),
            tasks,
        }
    }

    /// Makes passes over the sockets of small topics too, for a simulation with few sockets.
    #[doc(hidden)]
    #[must_use]
    pub fn with_small_passes(mut self) -> Self {
        self.at_once_max = 1;
        self
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

    /// Returns whether a user has sessions on this gateway, and all of them are away.
    #[must_use]
    pub fn is_away(&self, user: &UserId) -> bool {
        let sessions = self.topics.get(&Topic::User(user.clone()));
        sessions.is_some_and(|s| {
            !s.sessions.is_empty() && s.sessions.values().all(|session| session.is_away())
        })
    }

    /// Writes an event to each subscriber of the topic, or queues it. In a topic with many sockets, a pass does that; see
    /// [`Passes`]. Events keep the order of the calls, which must not be concurrent.
    pub fn deliver(self: &Arc<Self>, topic: &Topic, event: &Encoded) {
        let is_under_way = self.passes.is_under_way(topic);
        let Some(subscribers) = self.topics.get(topic) else {
            return;
        };
        if subscribers.sessions.len() <= self.at_once_max && !is_under_way {
            return self.send(&subscribers, event);
        }
        drop(subscribers);
        match self.passes.add(topic, event) {
            Fate::Waits => self.events_held.increment(1),
            Fate::First => {
                let (hub, topic) = (self.clone(), topic.clone());
                self.tasks.spawn(async move {
                    let mut over = None;
                    while contain("a pass", "events", hub.make_passes(&topic, over))
                        .await
                        .is_none()
                    {
                        // A panic may lose a pass. The clients see the gap and fetch it.
                        over = hub.passes.pass(&topic);
                    }
                });
            }
            Fate::Full => {
                self.events_held.increment(1);
                let pass = self.passes.pass(topic);
                if let Some(pass) = &pass {
                    // The publisher must not be held up for long.
                    self.count(if pass.len() > PASS_SOCKETS_AT_ONCE {
                        pass.queue()
                    } else {
                        pass.write(0..pass.len())
                    });
                }
                self.begin(topic, pass.as_ref());
            }
        }
    }

    /// Makes passes over the sockets of a topic until no event waits, beginning with the one after `over`.
    async fn make_passes(&self, topic: &Topic, mut over: Option<Arc<Pass>>) {
        while let Some(pass) = self.begin(topic, over.as_ref()) {
            for from in (0..pass.len()).step_by(PASS_SOCKETS_AT_ONCE) {
                self.count(pass.write(from..from + PASS_SOCKETS_AT_ONCE));
                yield_now().await;
            }
            over = Some(pass);
        }
    }

    /// Begins a pass after one that is over; see [`Passes::begin`].
    fn begin(&self, topic: &Topic, over: Option<&Arc<Pass>>) -> Option<Arc<Pass>> {
        self.passes.begin(topic, over, || {
            let subscribers = self.topics.get(topic);
            subscribers.map(|s| s.shared()).unwrap_or_default()
        })
    }

    /// Counts events that were written, and others that were queued.
    fn count(&self, (written, queued): (u64, u64)) {
        self.frames_sent.increment(written);
        self.frames_queued.increment(queued);
    }

    /// Writes or queues an event for each subscriber. All of them share one buffer per codec.
    fn send(&self, subscribers: &Subscribers, event: &Encoded) {
        let count = subscribers.sessions.len();
        let began = self.now_us();
        if !subscribers.pace.record_and_decide(began) {
            for Subscriber { outbox, .. } in subscribers.sessions.values().map(|s| &**s) {
                outbox.push(event.frame(outbox.codec()).clone());
            }
            self.frames_queued.increment(count as u64 * event.count());
            subscribers.pace.queued(self.now_us());
            return;
        }
        let write = |subscriber: &&Arc<Subscriber>| {
            let outbox = &subscriber.outbox;
            outbox.write_or_push(event.frame(outbox.codec()))
        };
        let written = subscribers.sessions.values().filter(write).count();
        subscribers.pace.wrote(began, self.now_us());
        let events = |sockets: usize| sockets as u64 * event.count();
        self.count((events(written), events(count - written)));
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or_default()
    }

    /// Notes a request that ends when the sessions of its user are closed.
    #[must_use]
    pub fn begin_request(&self, user: &UserId) -> LongRequest {
        self.requests.begin(user)
    }

    /// Closes all sessions of a user on this gateway, and ends long requests. Returns the number of sessions.
    pub fn disconnect(&self, user: &UserId, code: CloseCode) -> usize {
        self.requests.close(user);
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
        protocol::{Codec, Event, PresenceItem},
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

    /// Returns a topic with subscribers, one more than a pass writes to at once, and its hub.
    fn large() -> (Arc<Hub>, Topic, Vec<Arc<Subscriber>>) {
        let hub = Arc::new(Hub::default());
        let topic = Topic::Channel(ConversationId::random());
        let all: Vec<_> = (0..=PASS_SOCKETS_AT_ONCE as u64).map(subscriber).collect();
        for subscriber in &all {
            hub.subscribe(&topic, subscriber);
        }
        (hub, topic, all)
    }

    /// Takes everything queued. Returns how many frames each write contains.
    fn counts(subscriber: &Subscriber) -> Vec<u64> {
        let mut frames = VecDeque::new();
        let taken = subscriber.outbox.take(&mut frames).now_or_never();
        assert!(taken.is_none_or(|taken| taken.is_ok()));
        subscriber.outbox.flushed();
        frames.iter().map(Frame::count).collect()
    }

    /// Lets a pass begin and write to all but the last subscriber.
    async fn write_to_most(hub: &Hub, topic: &Topic) {
        while hub.passes.pass(topic).is_none() {
            yield_now().await;
        }
    }

    /// Waits until no pass is under way.
    async fn over(hub: &Hub, topic: &Topic) {
        while hub.passes.passing(topic).is_some() {
            yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_comes_during_a_pass_is_the_next_pass() {
        let (hub, topic, all) = large();
        let (first, last) = (&all[0], &all[PASS_SOCKETS_AT_ONCE]);
        hub.deliver(&topic, &event(true));
        write_to_most(&hub, &topic).await;
        assert_eq!((counts(first), counts(last)), (vec![1], vec![]));
        hub.deliver(&topic, &event(true));
        hub.deliver(&topic, &event(true));
        over(&hub, &topic).await;
        assert_eq!((counts(first), counts(last)), (vec![2], vec![1, 2]));
        hub.deliver(&topic, &event(true));
        over(&hub, &topic).await;
        assert_eq!((counts(first), counts(last)), (vec![1], vec![1]));
    }

    #[tokio::test]
    async fn much_does_not_wait_for_the_pass() {
        let (hub, topic, all) = large();
        for _ in 0..1_000 {
            hub.deliver(&topic, &event(true));
        }
        let gone: u64 = counts(&all[0]).iter().sum();
        assert!((500..1_000).contains(&gone), "{gone}");
        over(&hub, &topic).await;
        assert_eq!(gone + counts(&all[0]).iter().sum::<u64>(), 1_000);
    }

    #[tokio::test]
    async fn who_leaves_during_a_pass_gets_what_was_published_before_once() {
        let (hub, topic, all) = large();
        let (first, last) = (&all[0], &all[PASS_SOCKETS_AT_ONCE]);
        hub.deliver(&topic, &event(true));
        write_to_most(&hub, &topic).await;
        hub.deliver(&topic, &event(true));
        hub.removed(&topic, first);
        hub.removed(&topic, last);
        assert_eq!((counts(first), counts(last)), (vec![1, 1], vec![1, 1]));
        hub.removed(&topic, last);
        hub.deliver(&topic, &event(false));
        over(&hub, &topic).await;
        let nothing: [u64; 0] = [];
        assert_eq!(counts(first), nothing);
        assert_eq!(counts(last), nothing);
        assert_eq!(counts(&all[1]), [1, 2]);
    }

    #[tokio::test]
    async fn who_comes_back_during_a_pass_gets_what_is_published_then() {
        let (hub, topic, all) = large();
        let last = &all[PASS_SOCKETS_AT_ONCE];
        hub.deliver(&topic, &event(true));
        write_to_most(&hub, &topic).await;
        hub.removed(&topic, last);
        hub.subscribe(&topic, last);
        hub.deliver(&topic, &event(true));
        over(&hub, &topic).await;
        assert_eq!(counts(last), [1, 1]);
    }

    #[tokio::test]
    async fn a_topic_that_becomes_small_keeps_its_order() {
        let (hub, topic, all) = large();
        hub.deliver(&topic, &event(true));
        for one in &all[1..] {
            hub.removed(&topic, one);
        }
        hub.deliver(&topic, &event(false));
        over(&hub, &topic).await;
        let mut frames = VecDeque::new();
        all[0].outbox.take(&mut frames).await.unwrap();
        let text = frames.iter().flat_map(|frame| frame.bytes().to_vec());
        let text = String::from_utf8_lossy(&text.collect::<Vec<_>>()).into_owned();
        let (before, after) = text.split_once("true").unwrap();
        assert!(!before.contains("false") && after.contains("false"));
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
