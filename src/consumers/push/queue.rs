//! The messages for which a home has not decided yet whether to notify their users, and when each decision is due. This file
//! is pure.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use foldhash::quality::RandomState;
use tokio::time::{Duration, Instant};

use crate::model::{ConversationId, Seq, UserId};

/// Messages that wait for a decision, of all users together. Of more, the owners ask again.
const WAITING_MAX: usize = 100_000;
/// Conversations of one user that wait. Of more, the owners ask again, so no user takes the places of others.
const WAITING_OF_USER_MAX: usize = 32;
/// The time between two rounds of notifications to a user. What comes meanwhile waits, and the newest message is sent.
pub(super) const NOTIFY_EVERY: Duration = Duration::from_secs(3);
/// Positions that are remembered of one kind: about 20 MiB.
const POSITIONS_MAX: usize = 100_000;
/// The time for which silent notifications are gathered.
const CLEAR_AFTER: Duration = Duration::from_secs(1);

/// Something that a user's devices may be told about one conversation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Waiting {
    /// The newest message for the user.
    pub(super) seq: Seq,
    /// Since when it waits, and since when anything of the conversation does.
    pub(super) since: Instant,
    pub(super) first: Instant,
    /// The devices to which nothing is to be sent before a time, because their push service does not take it.
    pub(super) held: Vec<(String, Instant)>,
    /// When it was asked for last. Whoever asks no more has another home, or has given it up.
    pub(super) asked: Instant,
    /// The devices that have it already, and how often the others could not be reached.
    pub(super) sent: Vec<String>,
    pub(super) tries: u32,
    /// The user has read everything elsewhere, so the notification is to disappear.
    pub(super) is_silent: bool,
}

#[derive(Debug)]
struct User {
    waiting: BTreeMap<ConversationId, Waiting>,
    /// When the next decision is due. It is in [`Queue::due`] unless one is made.
    due: Instant,
    is_taken: bool,
    /// Whether something happened while a decision was made.
    is_stale: bool,
    /// The next round of notifications does not begin before this time.
    not_before: Instant,
}

/// What waits for the decisions of this home.
#[derive(Default)]
pub(super) struct Queue {
    users: HashMap<UserId, User, RandomState>,
    due: BTreeSet<(Instant, UserId)>,
    waiting: usize,
}

/// The end of a decision.
#[derive(Debug, Default)]
pub(super) struct Decided {
    /// What needs no notification any more, or has been sent, with its seq.
    pub(super) done: Vec<Done>,
    /// What could not be sent to all devices, with those that have it.
    pub(super) sent: Vec<SentToSome>,
    /// When to decide again about the rest.
    pub(super) again: Option<Instant>,
    /// Whether the inbox was read.
    pub(super) has_looked: bool,
}

/// A message that not all devices have got.
#[derive(Debug)]
pub(super) struct SentToSome {
    pub(super) conversation: ConversationId,
    pub(super) seq: Seq,
    /// The devices that have it, or never will.
    pub(super) devices: Vec<String>,
    pub(super) held: Vec<(String, Instant)>,
    /// Whether the others were tried, and did not get it.
    pub(super) has_tried: bool,
}

/// The end of what waited.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) conversation: ConversationId,
    pub(super) seq: Seq,
    pub(super) is_silent: bool,
}

impl Waiting {
    fn new(seq: Seq, now: Instant) -> Self {
        Self {
            seq,
            since: now,
            first: now,
            held: Vec::new(),
            asked: now,
            sent: Vec::new(),
            tries: 0,
            is_silent: false,
        }
    }
}

/// The newest positions of users in conversations, as long as there is room. The oldest are forgotten.
#[derive(Default)]
pub(super) struct Positions {
    known: HashMap<(UserId, ConversationId), (Seq, u64), RandomState>,
    /// In the order in which they were noted. Some have been noted again since.
    order: VecDeque<(u64, (UserId, ConversationId))>,
    count: u64,
}

impl Positions {
    pub(super) fn get(&self, user: &UserId, conversation: ConversationId) -> Option<Seq> {
        // A clone of a name is a counter.
        let known = self.known.get(&(user.clone(), conversation))?;
        Some(known.0)
    }

    /// Raises a position.
    pub(super) fn raise(&mut self, user: &UserId, conversation: ConversationId, seq: Seq) {
        let key = (user.clone(), conversation);
        if self.known.get(&key).is_some_and(|(known, _)| *known >= seq) {
            return;
        }
        self.count += 1;
        self.known.insert(key.clone(), (seq, self.count));
        self.order.push_back((self.count, key));
        while self.order.len() > POSITIONS_MAX
            && let Some((number, key)) = self.order.pop_front()
        {
            if self
                .known
                .get(&key)
                .is_some_and(|(_, known)| *known == number)
            {
                self.known.remove(&key);
            }
        }
    }

    /// Takes back that a position was raised from this one.
    pub(super) fn restore(
        &mut self,
        user: &UserId,
        conversation: ConversationId,
        before: Option<Seq>,
    ) {
        self.remove(user, conversation);
        if let Some(before) = before {
            self.raise(user, conversation, before);
        }
    }

    pub(super) fn remove(&mut self, user: &UserId, conversation: ConversationId) {
        self.known.remove(&(user.clone(), conversation));
    }
}

impl Decided {
    /// Looks at what is left at this time, or earlier.
    pub(super) fn repeat(&mut self, at: Instant) {
        self.again = self.again.min(Some(at)).or(Some(at));
    }
}

impl Queue {
    /// Adds a message for a user. Returns false if too much waits.
    pub(super) fn add(
        &mut self,
        user: &UserId,
        conversation: ConversationId,
        seq: Seq,
        now: Instant,
    ) -> bool {
        let known = self.users.get_mut(user);
        let waiting = known.and_then(|user| user.waiting.get_mut(&conversation));
        if let Some(waiting) = waiting {
            waiting.asked = now;
            if seq > waiting.seq || waiting.is_silent {
                waiting.seq = seq.max(waiting.seq);
                waiting.since = now;
                waiting.is_silent = false;
                waiting.sent.clear();
                waiting.tries = 0;
                self.changed(user, now);
            }
            return true;
        }
        self.insert(user, conversation, Waiting::new(seq, now), now)
    }

    /// Adds that a user has read a conversation elsewhere. Returns false if that is not kept, because too much waits.
    pub(super) fn add_silent(
        &mut self,
        user: &UserId,
        conversation: ConversationId,
        seq: Seq,
        now: Instant,
    ) -> bool {
        let known = self.users.get(user);
        if known.is_some_and(|user| user.waiting.contains_key(&conversation)) {
            return false;
        }
        let silent = Waiting {
            is_silent: true,
            ..Waiting::new(seq, now)
        };
        self.insert(user, conversation, silent, now + CLEAR_AFTER)
    }

    fn insert(
        &mut self,
        user: &UserId,
        conversation: ConversationId,
        waiting: Waiting,
        due: Instant,
    ) -> bool {
        let of_user = self.users.get(user).map_or(0, |user| user.waiting.len());
        if self.waiting >= WAITING_MAX || of_user >= WAITING_OF_USER_MAX {
            return false;
        }
        self.waiting += 1;
        let known = self.users.entry(user.clone());
        let known = known.or_insert_with(|| User {
            waiting: BTreeMap::new(),
            due,
            is_taken: false,
            is_stale: false,
            not_before: due,
        });
        known.waiting.insert(conversation, waiting);
        self.due
            .extend((!known.is_taken).then(|| (known.due, user.clone())));
        self.changed(user, due);
        true
    }

    /// Notes that something changed for a user, so that a decision is due, but not too soon after the last one.
    pub(super) fn changed(&mut self, user: &UserId, now: Instant) {
        let Some(known) = self.users.get_mut(user) else {
            return;
        };
        let earlier = now.max(known.not_before);
        if known.is_taken {
            known.is_stale = true;
        } else if earlier < known.due {
            self.due.remove(&(known.due, user.clone()));
            self.due.insert((earlier, user.clone()));
            known.due = earlier;
        }
    }

    /// Removes what waits for a user in a conversation up to a message.
    pub(super) fn settle(&mut self, user: &UserId, conversation: ConversationId, upto: Seq) {
        self.remove_if(user, conversation, |w| w.seq <= upto && !w.is_silent);
    }

    /// Removes a message or a silent notification about which nothing is decided.
    pub(super) fn drop_waiting(&mut self, user: &UserId, conversation: ConversationId, seq: Seq) {
        self.remove_if(user, conversation, |waiting| waiting.seq <= seq);
    }

    fn remove_if(
        &mut self,
        user: &UserId,
        conversation: ConversationId,
        is_over: impl Fn(&Waiting) -> bool,
    ) {
        if let Some(known) = self.users.get_mut(user)
            && known.waiting.get(&conversation).is_some_and(is_over)
        {
            known.waiting.remove(&conversation);
            self.waiting -= 1;
            self.forget_if_idle(user);
        }
    }

    /// Lets a user be forgotten for whom nothing waits, once the next round may begin.
    fn forget_if_idle(&mut self, user: &UserId) {
        if let Some(known) = self.users.get_mut(user)
            && known.waiting.is_empty()
            && !known.is_taken
        {
            self.due.remove(&(known.due, user.clone()));
            known.due = known.not_before;
            self.due.insert((known.due, user.clone()));
        }
    }

    /// Returns when the next decision is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first().map(|(due, _)| *due)
    }

    /// Takes a user about whom a decision is due. [`Self::decided`] must follow.
    pub(super) fn take(
        &mut self,
        now: Instant,
    ) -> Option<(UserId, Vec<(ConversationId, Waiting)>)> {
        while self.next()? <= now {
            let (_, user) = self.due.pop_first()?;
            let known = self.users.get_mut(&user)?;
            if known.waiting.is_empty() {
                self.users.remove(&user);
                continue;
            }
            (known.is_taken, known.is_stale) = (true, false);
            let waiting = known.waiting.iter().map(|(id, w)| (*id, w.clone()));
            return Some((user, waiting.collect()));
        }
        None
    }

    /// Makes decisions due again that have begun and will never end, because what made them panicked.
    pub(super) fn give_back(&mut self, now: Instant) {
        for (user, known) in &mut self.users {
            if std::mem::take(&mut known.is_taken) {
                known.due = now.max(known.not_before);
                self.due.insert((known.due, user.clone()));
            }
        }
    }

    /// Ends a decision.
    pub(super) fn decided(&mut self, user: &UserId, decided: Decided, now: Instant) {
        for done in decided.done {
            // A silent notification may have taken the place of a message meanwhile, or the other way round.
            let is_done = |w: &Waiting| w.seq <= done.seq && w.is_silent == done.is_silent;
            self.remove_if(user, done.conversation, is_done);
        }
        let Some(known) = self.users.get_mut(user) else {
            return;
        };
        for sent in decided.sent {
            let waiting = known.waiting.get_mut(&sent.conversation);
            if let Some(waiting) = waiting.filter(|waiting| !waiting.is_silent) {
                waiting.held = sent.held;
                // A newer message has been sent to nobody.
                if waiting.seq <= sent.seq {
                    waiting.sent = sent.devices;
                    waiting.tries += u32::from(sent.has_tried);
                }
            }
        }
        if decided.has_looked {
            known.not_before = now + NOTIFY_EVERY;
        }
        // A user to whom something was sent stays until the next round may begin.
        if known.waiting.is_empty() && known.not_before <= now {
            self.users.remove(user);
            return;
        }
        let again = decided.again.filter(|_| !known.is_stale).unwrap_or(now);
        known.due = again.max(known.not_before);
        known.is_taken = false;
        self.due.insert((known.due, user.clone()));
    }

    /// Returns how many messages wait.
    pub(super) fn len(&self) -> usize {
        self.waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(number: usize) -> UserId {
        UserId::new(&format!("user-{number}")).unwrap()
    }

    fn conversation(number: u128) -> ConversationId {
        ConversationId(uuid::Uuid::from_u128(number))
    }

    /// A queue in which a decision is made about message 5 for Alice, in conversation 1.
    fn taken() -> (Queue, UserId, Instant) {
        let (mut queue, alice, now) = (Queue::default(), user(1), Instant::now());
        queue.add(&alice, conversation(1), 5, now);
        queue.take(now).unwrap();
        (queue, alice, now)
    }

    fn done(number: u128, seq: Seq) -> Decided {
        Decided {
            done: vec![Done {
                conversation: conversation(number),
                seq,
                is_silent: false,
            }],
            has_looked: true,
            ..Decided::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_message_of_a_conversation_waits_once_and_not_too_soon_after_the_last() {
        let (mut queue, start) = (Queue::default(), Instant::now());
        let alice = user(1);
        assert!(queue.add(&alice, conversation(1), 5, start));
        let (taken, waiting) = queue.take(start).unwrap();
        assert_eq!(
            (taken, waiting.len(), waiting[0].1.seq),
            (alice.clone(), 1, 5)
        );
        assert!(queue.take(start).is_none(), "only one decision at a time");
        // A newer one comes meanwhile, so the older decision does not end it.
        assert!(queue.add(&alice, conversation(1), 6, start));
        queue.decided(&alice, done(1, 5), start);
        assert_eq!(queue.next(), Some(start + NOTIFY_EVERY));
        assert!(queue.take(start).is_none());
        let later = start + NOTIFY_EVERY;
        assert_eq!(queue.take(later).unwrap().1[0].1.seq, 6);
        queue.decided(&alice, done(1, 6), later);
        assert_eq!(queue.len(), 0);
        // The next one, too, waits for its turn.
        assert!(queue.add(&alice, conversation(2), 1, later));
        assert_eq!(queue.next(), Some(later + NOTIFY_EVERY));
        let last = later + NOTIFY_EVERY;
        assert!(queue.take(last).is_some());
        queue.decided(&alice, done(2, 1), last);
        assert!(queue.take(last + NOTIFY_EVERY).is_none());
        assert!(queue.users.is_empty() && queue.due.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_read_is_settled_and_a_change_makes_a_decision_due() {
        let (mut queue, alice, start) = taken();
        let again = Some(start + Duration::from_secs(60));
        let waits = Decided {
            again,
            ..Decided::default()
        };
        queue.decided(&alice, waits, start);
        assert_eq!(queue.next(), again);
        let now = start + Duration::from_secs(1);
        queue.changed(&alice, now);
        assert_eq!(queue.next(), Some(now));
        queue.settle(&alice, conversation(1), 4);
        assert_eq!(queue.len(), 1);
        queue.settle(&alice, conversation(1), 5);
        assert_eq!(queue.len(), 0);
        assert!(queue.take(now).is_none());
        assert!(queue.users.is_empty() && queue.due.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_decision_that_never_ends_is_made_again() {
        let (mut queue, alice, now) = taken();
        assert!(queue.take(now).is_none());
        queue.give_back(now);
        assert_eq!(queue.take(now).unwrap().0, alice);
        queue.decided(&alice, done(1, 5), now);
        queue.give_back(now);
        assert_eq!(queue.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_replaces_a_silent_notification_and_not_the_other_way_round() {
        let (mut queue, start) = (Queue::default(), Instant::now());
        let alice = user(1);
        queue.add_silent(&alice, conversation(1), 5, start);
        assert_eq!(queue.next(), Some(start + CLEAR_AFTER));
        queue.add(&alice, conversation(1), 6, start);
        queue.add_silent(&alice, conversation(1), 6, start);
        let (_, waiting) = queue.take(start + CLEAR_AFTER).unwrap();
        assert_eq!((waiting[0].1.seq, waiting[0].1.is_silent), (6, false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_newer_message_is_sent_to_all_devices() {
        let (mut queue, alice, now) = taken();
        queue.add(&alice, conversation(1), 6, now);
        let pause = now + Duration::from_secs(30);
        let mut decided = Decided {
            sent: vec![SentToSome {
                conversation: conversation(1),
                seq: 5,
                devices: vec!["a".into()],
                held: vec![("b".into(), pause)],
                has_tried: true,
            }],
            has_looked: true,
            ..Decided::default()
        };
        decided.repeat(pause);
        queue.decided(&alice, decided, now);
        let (_, waiting) = queue.take(now + NOTIFY_EVERY).unwrap();
        assert!(waiting[0].1.sent.is_empty() && waiting[0].1.tries == 0);
        assert_eq!(waiting[0].1.held, [("b".into(), pause)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_notification_that_comes_meanwhile_is_kept() {
        let (mut queue, alice, now) = taken();
        queue.settle(&alice, conversation(1), 5);
        assert!(queue.add_silent(&alice, conversation(1), 5, now));
        queue.decided(&alice, done(1, 5), now);
        let (_, waiting) = queue.take(now + NOTIFY_EVERY).unwrap();
        assert!(waiting[0].1.is_silent);
    }

    #[test]
    fn the_oldest_positions_are_forgotten() {
        let mut positions = Positions::default();
        for number in 0..POSITIONS_MAX {
            positions.raise(&user(number), conversation(1), 5);
        }
        positions.raise(&user(0), conversation(1), 6);
        positions.raise(&user(0), conversation(1), 3);
        positions.raise(&user(POSITIONS_MAX), conversation(1), 5);
        assert_eq!(positions.get(&user(0), conversation(1)), Some(6));
        assert_eq!(positions.get(&user(1), conversation(1)), None);
        assert_eq!(positions.get(&user(2), conversation(1)), Some(5));
        assert!(positions.known.len() <= POSITIONS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_is_bounded() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for number in 0..WAITING_OF_USER_MAX {
            assert!(queue.add(&user(1), conversation(number as u128), 1, now));
        }
        assert!(!queue.add(&user(1), conversation(99), 1, now));
        let mut queue = Queue::default();
        for number in 0..WAITING_MAX {
            assert!(queue.add(&user(number), conversation(1), 1, now));
        }
        assert!(!queue.add(&user(WAITING_MAX), conversation(1), 1, now));
        // A newer message takes no more room.
        assert!(queue.add(&user(0), conversation(1), 2, now));
        queue.settle(&user(0), conversation(1), 2);
        assert!(queue.add(&user(WAITING_MAX), conversation(1), 1, now));
    }
}
