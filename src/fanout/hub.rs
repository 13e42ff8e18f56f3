//! Topic → local sockets: the concurrent map. No lock is held longer than it takes to push, or to write to a few sockets.

use std::{
    collections::HashSet,
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
    subscriptions::{Reason, Subscriptions, TooMany},
};
use crate::{
    model::{SessionId, Topic, UserId, limits::REMOVED_WHILE_CONNECTING_MAX},
    protocol::{CloseCode, Codec},
    tasks::Tasks,
};

/// One session, as far as publications are concerned. Behind an `Arc`'s two counts, what every frame needs of the outbox
/// is in the same 64 bytes: of a large topic's subscribers, the nearest caches do not hold all.
#[derive(Debug)]
#[repr(C)]
pub struct Subscriber {
    pub outbox: Outbox,
    pub session: SessionId,
    pub user: UserId,
    /// `None` once it has left, so that nothing subscribes it again.
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

    /// Subscribes a session, unless it has left, because of who its user is: a channel's participant, or the user of a
    /// topic of their own. Twice is harmless. A spectator becomes a participant.
    pub fn subscribe(&self, topic: &Topic, subscriber: &Arc<Subscriber>) {
        if let Some(subscriptions) = &mut *lock(&subscriber.subscriptions) {
            subscriptions.not_removed(topic);
            self.insert(topic, subscriber, subscriptions, Reason::Participant);
        }
    }

    /// Subscribes a session that connects to the channels its user is in, but for those that the user was removed from
    /// since it was registered: that news may have come before this.
    pub fn follow(&self, channels: &[Topic], subscriber: &Arc<Subscriber>) {
        if let Some(subscriptions) = &mut *lock(&subscriber.subscriptions) {
            let removed = subscriptions.removed.take().unwrap_or_default();
            for topic in channels.iter().filter(|topic| !removed.contains(topic)) {
                self.insert(topic, subscriber, subscriptions, Reason::Participant);
            }
        }
    }

    /// Subscribes a session that asked for it: a spectator of a channel, or somebody who watches users. All of the topics,
    /// which are of one kind, or none.
    ///
    /// # Errors
    /// If the session would have asked for more than `max` topics of this kind.
    pub fn request(
        &self,
        topics: &[Topic],
        subscriber: &Arc<Subscriber>,
        max: usize,
    ) -> Result<(), TooMany> {
        let mut subscriptions = lock(&subscriber.subscriptions);
        let Some(subscriptions) = &mut *subscriptions else {
            return Ok(());
        };
        let missing: HashSet<&Topic> = topics
            .iter()
            .filter(|topic| !self.is_subscribed(topic, subscriber.session))
            .collect();
        let requested = topics.first().map_or(0, |t| *subscriptions.requested(t));
        if requested + missing.len() > max {
            return Err(TooMany);
        }
        for topic in missing {
            self.insert(topic, subscriber, subscriptions, Reason::Asking);
        }
        Ok(())
    }

    /// A request for these topics succeeded. False if one of the subscriptions has ended meanwhile.
    #[must_use]
    pub fn confirm(&self, topics: &[Topic], subscriber: &Subscriber) -> bool {
        let mut subscriptions = lock(&subscriber.subscriptions);
        let Some(subscriptions) = &mut *subscriptions else {
            return false;
        };
        let mut missing: HashSet<&Topic> = topics.iter().collect();
        for subscription in &mut subscriptions.list {
            if missing.remove(&subscription.topic) && subscription.reason == Reason::Asking {
                subscription.reason = Reason::Asked;
            }
        }
        missing.is_empty()
    }

    /// Ends what a request began that failed, unless another one for the same succeeded. Returns what has ended.
    pub fn give_up(&self, topics: &[Topic], subscriber: &Subscriber) -> Vec<Topic> {
        self.end(topics, subscriber, |reason| reason == Reason::Asking)
    }

    /// Ends what a session asked for; not what it has as a participant. Returns what has ended.
    pub fn end_requested(&self, topics: &[Topic], subscriber: &Subscriber) -> Vec<Topic> {
        self.end(topics, subscriber, |reason| reason != Reason::Participant)
    }

    /// Its user is no longer in the channel.
    pub fn removed(&self, channel: &Topic, subscriber: &Subscriber) {
        let mut subscriptions = lock(&subscriber.subscriptions);
        let Some(subscriptions) = &mut *subscriptions else {
            return;
        };
        let channel = std::slice::from_ref(channel);
        if self
            .end_of(subscriptions, channel, subscriber, |_| true)
            .is_empty()
            && let Some(removed) = &mut subscriptions.removed
        {
            if removed.len() < REMOVED_WHILE_CONNECTING_MAX {
                removed.extend_from_slice(channel);
            } else {
                subscriber.outbox.close(CloseCode::GoingAway);
            }
        }
    }

    /// Ends the subscriptions of everyone who is not in the channel; returns these sessions.
    pub fn end_spectators(&self, channel: &Topic) -> Vec<Arc<Subscriber>> {
        let sessions = self.topics.get(channel).map(|s| s.shared());
        let mut spectators = sessions.map_or_else(Vec::new, |sessions| sessions.to_vec());
        spectators.retain(|session| {
            let ended = self.end_requested(std::slice::from_ref(channel), session);
            !ended.is_empty()
        });
        spectators
    }

    fn is_subscribed(&self, topic: &Topic, session: SessionId) -> bool {
        let subscribers = self.topics.get(topic);
        subscribers.is_some_and(|subscribers| subscribers.sessions.contains_key(&session))
    }

    fn insert(
        &self,
        topic: &Topic,
        subscriber: &Arc<Subscriber>,
        subscriptions: &mut Subscriptions,
        reason: Reason,
    ) {
        let entry = self.topics.entry(topic.clone());
        let mut subscribers = entry.or_insert_with(Subscribers::of_one);
        subscribers.shared.take();
        let known = subscribers
            .sessions
            .insert(subscriber.session, subscriber.clone());
        drop(subscribers);
        match known {
            None => subscriptions.add(topic.clone(), reason),
            Some(_) => subscriptions.promote(topic, reason),
        }
    }

    fn end(
        &self,
        topics: &[Topic],
        subscriber: &Subscriber,
        which: impl Fn(Reason) -> bool,
    ) -> Vec<Topic> {
        match &mut *lock(&subscriber.subscriptions) {
            Some(subscriptions) => self.end_of(subscriptions, topics, subscriber, which),
            None => Vec::new(),
        }
    }

    /// Ends those of these subscriptions that the session has for such a reason.
    fn end_of(
        &self,
        subscriptions: &mut Subscriptions,
        topics: &[Topic],
        subscriber: &Subscriber,
        which: impl Fn(Reason) -> bool,
    ) -> Vec<Topic> {
        let ended = subscriptions.end(topics, which);
        for topic in &ended {
            let flushing = self.coalescing.flushing(topic);
            let _flushing = flushing.as_ref().map(|flushing| lock(flushing));
            // It was published while this session was subscribed.
            let outbox = &subscriber.outbox;
            if let Some(held) = self.coalescing.held(topic, outbox.codec()) {
                outbox.push(held);
            }
            self.remove(topic, subscriber.session);
        }
        ended
    }

    /// Ends all subscriptions of a session; returns their topics.
    pub fn leave(&self, subscriber: &Subscriber) -> Vec<Topic> {
        let subscriptions = lock(&subscriber.subscriptions).take();
        let subscriptions = subscriptions.map_or_else(Vec::new, |s| s.list);
        let topics: Vec<Topic> = subscriptions.into_iter().map(|s| s.topic).collect();
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
                let later = self.clone().flush_later(topic.clone(), left, flushing);
                self.tasks.spawn(later);
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
        hub.leave(&gone);
        hub.subscribe(&topic, &gone);
        assert_eq!(hub.subscribers(&topic), 2);
        hub.deliver(&topic, &event(true));
        let (mut to_one, mut to_other) = (VecDeque::new(), VecDeque::new());
        one.outbox.take(&mut to_one).await.unwrap();
        other.outbox.take(&mut to_other).await.unwrap();
        let pointers = [to_one, to_other].map(|frames| frames[0].bytes().as_ptr());
        assert_eq!(pointers[0], pointers[1], "the bytes are shared, not copied");
        hub.removed(&topic, &one);
        hub.leave(&other);
        assert!(hub.topics.is_empty());
    }

    /// The news that a user was removed from a channel may come before their session has followed the channels that the
    /// user was in.
    #[tokio::test]
    async fn who_is_removed_while_connecting_follows_nothing() {
        let hub = Arc::new(Hub::default());
        let [gone, back, stays] = [(); 3].map(|()| Topic::Channel(ConversationId::random()));
        let one = subscriber(1);
        hub.removed(&gone, &one);
        hub.removed(&back, &one);
        hub.subscribe(&back, &one);
        hub.follow(&[gone.clone(), back.clone(), stays.clone()], &one);
        let counts = [&gone, &back, &stays].map(|topic| hub.subscribers(topic));
        assert_eq!(counts, [0, 1, 1]);
        // Once connected, it is subscribed or not: there is nothing to remember.
        hub.removed(&gone, &one);
        hub.subscribe(&gone, &one);
        assert_eq!(hub.subscribers(&gone), 1);
    }

    #[tokio::test]
    async fn a_request_that_fails_ends_only_what_it_began() {
        let hub = Arc::new(Hub::default());
        let [one, other] = [(); 2].map(|()| Topic::Channel(ConversationId::random()));
        let session = subscriber(1);
        let request = |topic: &Topic| hub.request(std::slice::from_ref(topic), &session, 1);
        assert_eq!(request(&one), Ok(()));
        assert_eq!(request(&one), Ok(()), "twice is one place");
        assert_eq!(request(&other), Err(TooMany));
        assert!(hub.confirm(std::slice::from_ref(&one), &session));
        assert!(hub.give_up(std::slice::from_ref(&one), &session).is_empty());
        assert_eq!(hub.subscribers(&one), 1, "the other request succeeded");
        assert_eq!(hub.end_spectators(&one).len(), 1);
        assert_eq!(request(&other), Ok(()));
        assert_eq!(hub.give_up(std::slice::from_ref(&other), &session).len(), 1);
        assert!(!hub.confirm(std::slice::from_ref(&other), &session));
        hub.subscribe(&one, &session);
        assert!(hub.end_spectators(&one).is_empty());
    }
}
