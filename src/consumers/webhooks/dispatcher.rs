//! Sends what happened in the conversations of this gateway to one webhook. [`Endpoint`] decides what and when.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use metrics::{Counter, counter};
use tokio::time::{Instant, sleep};

use super::{
    endpoint::{Assignment, Effects, Endpoint, Limits, Next, Outcome, RequestId, Skipped},
    events::{Event, Filter, Origin},
};
use crate::{
    chat::{Conversations, Following},
    clock,
    consumers::{
        follower::{Follower, Line},
        reading::{self, Happened},
        states::States,
    },
    model::{ConsumerName, ConversationId, Cursor, Millis},
    store::{EventAt, SkippedRow, Store},
    tasks::{contain, wait_until},
};

/// The pause before a conversation that could not be read is read again.
const READ_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// The same after a panic.
const PANICKED_AGAIN_AFTER: Duration = Duration::from_secs(60);
/// The pause before a skipped event is stored again, if the store failed.
const STORE_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Events of a conversation that are read at once: at least so many, because the webhook may not want most, and at most.
const READ: (usize, usize) = (32, 256);
/// Closed conversations are forgotten this often, and at once when more are known than twice those left the last time and this
/// many.
const FORGET_EVERY: Duration = Duration::from_secs(60);
const FORGET_ABOVE: usize = 1_000;
/// Reads in a row without an event that the webhook wants. Then others have their turn.
const READS_MAX: usize = 8;

/// The other end of a webhook.
#[async_trait]
pub trait Receiver: Send + Sync + 'static {
    /// Sends events in their order, in one request. Returns the outcome, and the error for operators if there is one.
    async fn deliver(&self, events: &[Event]) -> (Outcome, Option<String>);
}

/// A webhook to run.
#[derive(Clone)]
pub struct Webhook {
    pub name: ConsumerName,
    pub filter: Filter,
    pub limits: Limits,
    pub receiver: Arc<dyn Receiver>,
}

/// What a webhook's dispatcher uses.
#[derive(Clone)]
pub struct Dependencies {
    pub follower: Arc<Follower>,
    pub line: Arc<Line>,
    pub conversations: Conversations,
    pub store: Arc<dyn Store>,
    pub states: Arc<States>,
    pub receiver: Arc<dyn Receiver>,
    pub filter: Filter,
}

/// The events of one conversation in a request.
struct Portion {
    following: Arc<Following>,
    events: Vec<Event>,
    /// The offset after the first event, and after all.
    first: (Cursor, EventAt),
    upto: Cursor,
    at: Millis,
}

/// What was read for a request.
#[derive(Default)]
struct Loaded {
    /// The number of events of each conversation that was read.
    counts: Vec<(ConversationId, usize)>,
    portions: Vec<Portion>,
    /// The conversations that must be read again, each after a pause.
    unread: Vec<(Arc<Following>, Duration)>,
}

/// What a request had.
struct Sent {
    portions: Vec<Portion>,
    /// The events of all portions, which have none any more.
    events: usize,
}

/// The end of a step of a request.
enum Step {
    Loaded(RequestId, Loaded),
    Answered(RequestId, Sent, Outcome),
    /// A skipped event is stored, or the offset of a closed conversation.
    Stored(Arc<Following>),
}

pub struct Dispatcher {
    with: Dependencies,
    endpoint: Endpoint,
    /// The open ones of the conversations that the endpoint knows, and some that were closed lately.
    known: HashMap<ConversationId, Arc<Following>>,
    /// When closed ones are forgotten next, and the number of known ones above which they are forgotten at once.
    forget_at: Instant,
    forget_above: usize,
    steps: FuturesUnordered<BoxFuture<'static, Step>>,
    counters: Counters,
}

struct Counters {
    delivered: Counter,
    failed: Counter,
    skipped: Counter,
}

impl Counters {
    fn new(consumer: &ConsumerName) -> Self {
        let events = |result: &'static str| {
            let name = consumer.as_str().to_owned();
            counter!("chat_consumer_events_total", "consumer" => name, "result" => result)
        };
        Self {
            delivered: events("delivered"),
            failed: events("failed"),
            skipped: events("skipped"),
        }
    }
}

impl Dispatcher {
    #[must_use]
    pub fn new(with: Dependencies, limits: Limits, seed: u64) -> Self {
        Self {
            counters: Counters::new(&with.line.name),
            with,
            endpoint: Endpoint::new(limits, seed),
            known: HashMap::new(),
            forget_at: Instant::now() + FORGET_EVERY,
            forget_above: FORGET_ABOVE,
            steps: FuturesUnordered::new(),
        }
    }

    pub async fn run(mut self) {
        let line = self.with.line.clone();
        // After a panic. At the first start no conversation is open.
        self.with.follower.tell_again(&line).await;
        loop {
            self.take_woken();
            self.apply_state();
            let until = self.begin_requests();
            let until = until.into_iter().chain(self.forget_closed()).min();
            line.set_down(self.endpoint.is_down(Instant::now()));
            if self.endpoint.is_busy() {
                line.set_busy();
            }
            tokio::select! {
                biased;
                Some(step) = self.steps.next(), if !self.steps.is_empty() => {
                    // What was woken meanwhile has its turn before what has more.
                    self.take_woken();
                    self.ended(step);
                }
                () = line.woken() => {}
                () = wait_until(until) => {}
            }
        }
    }

    fn take_woken(&mut self) {
        for following in self.with.line.take_woken() {
            let conversation = following.conversation;
            let known = self.known.get(&conversation);
            if known.is_none_or(|known| !Arc::ptr_eq(known, &following)) {
                // It is new, or was elsewhere meanwhile, so its next event may be another one.
                self.endpoint.forget(conversation);
            }
            if self.endpoint.wake(conversation) {
                self.known.insert(conversation, following);
            } else {
                // The scan of lagging rows finds it again.
                following.rest(&self.with.line.name);
            }
        }
    }

    /// Forgets what closed conversations weigh: while a webhook is down, many are closed, and nothing can be read of them. The
    /// endpoint still knows them, and the scan of lagging rows opens them again, afresh. Returns when to forget next.
    fn forget_closed(&mut self) -> Option<Instant> {
        let now = Instant::now();
        if now >= self.forget_at || self.known.len() > self.forget_above {
            self.known.retain(|_, following| !following.is_closed());
            self.forget_at = now + FORGET_EVERY;
            self.forget_above = 2 * self.known.len() + FORGET_ABOVE;
        }
        (!self.known.is_empty()).then_some(self.forget_at)
    }

    fn apply_state(&mut self) {
        let is_enabled = self.with.line.is_enabled();
        if is_enabled && self.endpoint.is_disabled() {
            self.endpoint.enable();
        } else if !is_enabled {
            self.endpoint.disable();
        }
    }

    /// Begins all requests that may begin now. Returns when the next one may, if that is known.
    fn begin_requests(&mut self) -> Option<Instant> {
        loop {
            match self.endpoint.next(Instant::now()) {
                Next::Send(assignment) => self.load(assignment),
                Next::WaitUntil(until) => return Some(until),
                Next::Idle | Next::Disabled => return None,
            }
        }
    }

    fn load(&mut self, assignment: Assignment) {
        let known = |id: &ConversationId| (*id, self.known.get(id).cloned());
        let conversations: Vec<_> = assignment.conversations.iter().map(known).collect();
        let with = self.with.clone();
        let loading = async move {
            let loaded = load(&with, &assignment, conversations).await;
            Step::Loaded(assignment.request, loaded)
        };
        self.steps.push(loading.boxed());
    }

    fn ended(&mut self, step: Step) {
        match step {
            Step::Loaded(request, loaded) => self.loaded(request, loaded),
            Step::Answered(request, sent, outcome) => self.answered(request, &sent, outcome),
            Step::Stored(following) => self.go_on(&following),
        }
    }

    fn loaded(&mut self, request: RequestId, loaded: Loaded) {
        let Loaded {
            counts,
            mut portions,
            unread,
        } = loaded;
        let sends = self.endpoint.loaded(request, &counts);
        for (conversation, _) in counts {
            if !self.endpoint.knows(conversation) {
                self.known.remove(&conversation);
            }
        }
        for (following, pause) in unread {
            let again = sleep(pause).map(|()| Step::Stored(following));
            self.steps.push(again.boxed());
        }
        if !sends {
            return;
        }
        let (receiver, line) = (self.with.receiver.clone(), self.with.line.clone());
        let sending = async move {
            let of = |portion: &mut Portion| std::mem::take(&mut portion.events);
            let events: Vec<Event> = portions.iter_mut().flat_map(of).collect();
            let delivered = contain(
                "a request of a webhook",
                &line.name,
                receiver.deliver(&events),
            );
            // If another conversation's event is delivered then, the failure was the event's own.
            let failed = Outcome::Unavailable {
                status: None,
                retry_after: None,
            };
            let panicked = || (failed, Some("panicked, see the log of the gateway".into()));
            let (outcome, error) = delivered.await.unwrap_or_else(panicked);
            line.note_error(error);
            let events = events.len();
            Step::Answered(request, Sent { portions, events }, outcome)
        };
        self.steps.push(sending.boxed());
    }

    fn answered(&mut self, request: RequestId, sent: &Sent, outcome: Outcome) {
        if outcome == Outcome::Accepted {
            for portion in &sent.portions {
                self.delivered(&portion.following, portion.upto, portion.at);
                // Before the endpoint takes the answer, so that it keeps what it knows of the conversation.
                self.go_on(&portion.following);
            }
        }
        let effects = self.endpoint.answered(request, outcome, Instant::now());
        let Effects {
            accepted,
            skipped,
            blocked: _,
            disabled,
        } = effects;
        let counter = match outcome {
            Outcome::Accepted => &self.counters.delivered,
            _ => &self.counters.failed,
        };
        counter.increment(sent.events as u64);
        for conversation in accepted {
            if !self.endpoint.knows(conversation) {
                self.known.remove(&conversation);
            }
        }
        for skipped in skipped {
            self.skip(skipped, &sent.portions);
        }
        if disabled {
            self.with.states.receiver_is_gone(&self.with.line);
        }
    }

    /// Wakes a conversation again if it has more. If not, it is told of the next event.
    fn go_on(&mut self, following: &Arc<Following>) {
        let conversation = following.conversation;
        let has_more = following.work(&self.with.line.name).is_some();
        if has_more && self.endpoint.wake(conversation) {
            self.known.insert(conversation, following.clone());
        } else if has_more {
            following.rest(&self.with.line.name);
        } else if !self.endpoint.knows(conversation) {
            let known = self.known.remove(&conversation);
            // It was opened again while the event of an earlier owner was sent or skipped, and is told of nothing until it rests.
            if let Some(newer) = known.filter(|known| !Arc::ptr_eq(known, following)) {
                self.go_on(&newer);
            }
        }
    }

    /// Rule [offset]: the offset is raised after the events were accepted.
    fn delivered(&self, following: &Arc<Following>, upto: Cursor, at: Millis) {
        following.delivered(&self.with.line.name, upto, at);
        if following.is_closed() {
            let (with, following) = (self.with.clone(), following.clone());
            self.steps.push(
                async move {
                    let consumer = &with.line.name;
                    with.follower.store_offset(&following, consumer).await;
                    Step::Stored(following)
                }
                .boxed(),
            );
        }
    }

    /// Stores that an event was skipped, and then goes on after it.
    fn skip(&mut self, skipped: Skipped, portions: &[Portion]) {
        let same = |portion: &&Portion| portion.following.conversation == skipped.conversation;
        let portion = portions.iter().find(same);
        let known = self.known.get(&skipped.conversation).cloned();
        let (with, counter) = (self.with.clone(), self.counters.skipped.clone());
        let Some(following) = portion.map(|p| p.following.clone()).or(known) else {
            return;
        };
        let first = portion.map(|portion| (portion.first, portion.at));
        self.steps.push(
            async move {
                let first = match first {
                    Some(first) => Some(first),
                    // It failed with other events, and is judged only now.
                    None => {
                        let first = first_of(&with, &following);
                        contain("a webhook", skipped.conversation, first)
                            .await
                            .flatten()
                    }
                };
                if let Some(((upto, event), at)) = first {
                    let row = SkippedRow {
                        conversation: following.conversation,
                        at: event,
                        status: skipped.status,
                    };
                    let consumer = &with.line.name;
                    while let Err(error) =
                        with.store.add_skipped(consumer, clock::today(), &row).await
                    {
                        crate::seldom::seldom!(WARN, "a skipped event could not be stored", %error);
                        sleep(STORE_AGAIN_AFTER).await;
                    }
                    counter.increment(1);
                    following.delivered(consumer, upto, at);
                }
                Step::Stored(following)
            }
            .boxed(),
        );
    }
}

/// The position of the first event after the offset of a conversation.
async fn first_of(
    with: &Dependencies,
    following: &Arc<Following>,
) -> Option<((Cursor, EventAt), Millis)> {
    let portion = read_portion(with, following, 1, usize::MAX).await.ok()??;
    Some((portion.first, portion.at))
}

/// Reads the events of a request: from its conversations in their order, as long as there is room.
async fn load(
    with: &Dependencies,
    assignment: &Assignment,
    conversations: Vec<(ConversationId, Option<Arc<Following>>)>,
) -> Loaded {
    let mut loaded = Loaded::default();
    let (mut events, mut bytes) = (assignment.events_max, assignment.bytes_max);
    for (conversation, following) in conversations {
        if events == 0 {
            break;
        }
        let Some(following) = following else {
            loaded.counts.push((conversation, 0));
            continue;
        };
        let reading = read_portion(with, &following, events, bytes);
        let read = contain("a webhook", conversation, reading).await;
        let Some(read) = read else {
            loaded.counts.push((conversation, 0));
            loaded.unread.push((following, PANICKED_AGAIN_AFTER));
            continue;
        };
        match read {
            Ok(Some(portion)) => {
                let size: usize = portion.events.iter().map(Event::bytes).sum();
                if size > bytes && !loaded.portions.is_empty() {
                    // It does not fit, and is sent next.
                    break;
                }
                loaded.counts.push((conversation, portion.events.len()));
                events -= portion.events.len();
                bytes = bytes.saturating_sub(size);
                loaded.portions.push(portion);
            }
            Ok(None) => loaded.counts.push((conversation, 0)),
            Err(error) => {
                // Others go on meanwhile. If it was closed, its next owner goes on with it.
                loaded.counts.push((conversation, 0));
                tracing::debug!(%conversation, %error, "the events of a conversation could not be read");
                loaded.unread.push((following, READ_AGAIN_AFTER));
            }
        }
    }
    loaded
}

/// Reads at most `limit` events of a conversation, of `bytes` at most but the first. `None` if there are none. What the
/// webhook does not want is skipped at once.
async fn read_portion(
    with: &Dependencies,
    following: &Arc<Following>,
    limit: usize,
    bytes: usize,
) -> Result<Option<Portion>, crate::chat::Error> {
    let consumer = &with.line.name;
    for _ in 0..READS_MAX {
        let Some(work) = following.work(consumer) else {
            return Ok(None);
        };
        let limit_read = limit.clamp(READ.0, READ.1);
        let read = reading::read(&with.conversations, following, work, limit_read).await?;
        let Some(kind) = following.kind() else {
            following.rest(consumer);
            return Ok(None);
        };
        let origin = Origin {
            conversation: following.conversation,
            kind,
            replayed: false,
        };
        let (portion, passed) = gather(with, origin, following, read, (limit, bytes));
        match (portion, passed) {
            (Some(portion), _) => return Ok(Some(portion)),
            (None, Some((upto, at))) => following.delivered(consumer, upto, at),
            // Nothing was read although there should be something: the owner was lost.
            (None, None) => return Err(crate::chat::Error::Closed),
        }
    }
    Err(crate::chat::Error::unavailable("nothing was wanted yet"))
}

/// Makes the events of what was read: at most so many, of so many bytes but the first. Returns the offset up to which nothing
/// is left out, and the time there.
fn gather(
    with: &Dependencies,
    origin: Origin,
    following: &Arc<Following>,
    read: Vec<reading::Next>,
    (limit, bytes): (usize, usize),
) -> (Option<Portion>, Option<(Cursor, Millis)>) {
    let mut portion: Option<Portion> = None;
    let mut size = 0;
    let mut passed = None;
    for next in read {
        let (event, at) = match &next.happened {
            Happened::Entry(entry, state) => (
                Event::of_entry(origin, &with.filter, entry, state.as_deref()),
                EventAt::Entry(entry.seq),
            ),
            Happened::Change(change) => (
                Event::of_change(origin, &with.filter, change),
                EventAt::Change(change.rev),
            ),
        };
        if let Some(event) = &event {
            if portion.as_ref().is_some_and(|p| p.events.len() == limit) {
                break;
            }
            size += event.bytes();
            if size > bytes && portion.is_some() {
                break;
            }
        }
        passed = Some((next.upto, next.at));
        let Some(event) = event else {
            if let Some(portion) = &mut portion {
                portion.upto = next.upto;
            }
            continue;
        };
        let portion = portion.get_or_insert_with(|| Portion {
            following: following.clone(),
            events: Vec::new(),
            first: (next.upto, at),
            upto: next.upto,
            at: next.at,
        });
        portion.events.push(event);
        (portion.upto, portion.at) = (next.upto, next.at);
    }
    (portion, passed)
}
