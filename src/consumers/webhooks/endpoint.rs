//! Decides what one gateway sends to a webhook, and when: which conversations, how many events of them, and the pauses after
//! failures. This file is pure: it neither sends nor reads the time.
//!
//! A failure is either the endpoint's or the event's own. As long as nobody knows, it counts as the endpoint's: everything
//! pauses, and then one event of another conversation is sent as a probe. If the probe succeeds, the earlier failure was the
//! event's own.

mod work;

use std::{collections::HashMap, time::Duration};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::time::Instant;
use work::Works;

use crate::{
    consumers::http::{Failure, RETRY_AFTER_MAX, Response},
    model::{ConversationId, limits::WEBHOOK_BATCH_BYTES_MAX},
};

const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause of an endpoint after failures, unless it asks for more with `Retry-After`.
pub const PAUSE_MAX: Duration = Duration::from_secs(600);
/// The pauses between the attempts for an event that fails by itself: ten attempts in 75 hours.
pub const ATTEMPT_PAUSES_S: [u64; 9] =
    [5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400];
const ATTEMPTS_MAX: u8 = ATTEMPT_PAUSES_S.len() as u8 + 1;
/// If so many conversations in a row are rejected, and nothing is accepted in between, the endpoint itself is at fault.
const REJECTED_IN_A_ROW: usize = 20;

/// What a webhook allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Events in one request.
    pub batch: usize,
    /// Requests at once.
    pub connections: usize,
}

/// A request that was assigned and is not answered yet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RequestId(u64);

/// What to do now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Next {
    Send(Assignment),
    /// Nothing until then, unless a conversation is woken or a request answered.
    WaitUntil(Instant),
    /// Nothing until a conversation is woken or a request answered.
    Idle,
    Disabled,
}

/// A request to send. Its events are read first, see [`Endpoint::loaded`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Assignment {
    pub request: RequestId,
    pub conversations: Vec<ConversationId>,
    /// Events of all conversations together.
    pub events_max: usize,
    /// Bytes of all events together, unless the first event is larger.
    pub bytes_max: usize,
    /// Whether it only finds out whether the endpoint is up again.
    pub probe: bool,
}

/// What a receiver answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Accepted,
    /// Probably the endpoint failed: no answer, or a status that asks to come again.
    Unavailable {
        status: Option<u16>,
        retry_after: Option<Duration>,
    },
    /// Probably the event is not accepted.
    Rejected(u16),
    /// The receiver wants no more events.
    Gone,
}

impl From<&Result<Response, Failure>> for Outcome {
    fn from(answer: &Result<Response, Failure>) -> Self {
        let Ok(answer) = answer else {
            return Self::Unavailable {
                status: None,
                retry_after: None,
            };
        };
        match answer.status {
            200..=299 => Self::Accepted,
            410 => Self::Gone,
            status @ (408 | 425 | 429 | 500..=599) => Self::Unavailable {
                status: Some(status),
                retry_after: answer.retry_after,
            },
            status => Self::Rejected(status),
        }
    }
}

/// What follows from an answer.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Effects {
    /// The conversations whose events in the request were accepted.
    pub accepted: Vec<ConversationId>,
    /// The conversations whose next event is to be skipped. Each must be woken again when that is stored.
    pub skipped: Vec<Skipped>,
    /// The conversations whose next event failed by itself, each with the time of the next attempt.
    pub blocked: Vec<(ConversationId, Instant)>,
    /// Whether the receiver wants no more events.
    pub disabled: bool,
}

/// An event that failed too often.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Skipped {
    pub conversation: ConversationId,
    /// The last status. `None` if there was no answer.
    pub status: Option<u16>,
}

#[derive(Debug)]
struct Flight {
    conversations: Vec<ConversationId>,
    /// The number of events, once they are read.
    events: usize,
    probe: bool,
}

#[derive(Debug)]
struct Pause {
    step: Duration,
    until: Instant,
    /// Whether a probe is being sent.
    probing: bool,
}

/// One webhook on one gateway.
#[derive(Debug)]
pub struct Endpoint {
    limits: Limits,
    works: Works,
    flights: HashMap<RequestId, Flight>,
    last_request: u64,
    pause: Option<Pause>,
    /// The conversations that were rejected since the last success, at most [`REJECTED_IN_A_ROW`].
    rejected: Vec<ConversationId>,
    successes: u64,
    disabled: bool,
    random: StdRng,
}

impl Endpoint {
    /// Makes an endpoint without work. `seed` makes its pauses differ from those of other gateways.
    #[must_use]
    pub fn new(limits: Limits, seed: u64) -> Self {
        Self {
            limits,
            works: Works::default(),
            flights: HashMap::new(),
            last_request: 0,
            pause: None,
            rejected: Vec::new(),
            successes: 0,
            disabled: false,
            random: StdRng::seed_from_u64(seed),
        }
    }

    /// Notes that a conversation may have events to send. Returns false if there are too many conversations, and this one
    /// must be found again later.
    pub fn wake(&mut self, conversation: ConversationId) -> bool {
        self.works.wake(conversation)
    }

    /// Forgets a conversation that this gateway does not follow any more. A request in flight ends as usual.
    pub fn forget(&mut self, conversation: ConversationId) {
        self.works.forget(conversation);
    }

    pub fn disable(&mut self) {
        self.disabled = true;
    }

    /// Sends again, and at once.
    pub fn enable(&mut self) {
        self.disabled = false;
        self.pause = None;
        self.rejected.clear();
        // What failed before says nothing about the receiver as it is now.
        drop(self.works.take_suspects());
    }

    /// Returns when the next probe is sent. `None` if the endpoint is up as far as is known.
    #[must_use]
    pub fn paused_until(&self) -> Option<Instant> {
        self.pause.as_ref().map(|pause| pause.until)
    }

    /// Returns whether nothing more need be found that could be sent.
    #[must_use]
    pub fn is_down(&self, now: Instant) -> bool {
        let is_paused =
            |pause: &Pause| now < pause.until || pause.probing || self.works.waiting() > 0;
        self.disabled || self.pause.as_ref().is_some_and(is_paused)
    }

    #[must_use]
    pub fn is_disabled(&self) -> bool {
        self.disabled
    }

    /// Returns whether a conversation waits, is blocked or is being sent.
    #[must_use]
    pub fn knows(&self, conversation: ConversationId) -> bool {
        self.works.get(conversation).is_some()
    }

    /// Returns the number of conversations that wait, are blocked or are being sent.
    #[must_use]
    pub fn known(&self) -> usize {
        self.works.len()
    }

    /// Returns whether nothing can be sent before a request ends.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.flights.len() >= self.limits.connections
    }

    /// Returns what to do now. An assignment occupies a connection until it is answered.
    pub fn next(&mut self, now: Instant) -> Next {
        if self.disabled {
            return Next::Disabled;
        }
        self.works.unblock(now);
        if self.is_busy() {
            return Next::Idle;
        }
        if self.works.waiting() == 0 {
            // When the pause is over, the endpoint is not down any more: a scan may find something to probe it with.
            let paused = self.paused_until().filter(|until| now < *until);
            let until = paused.into_iter().chain(self.works.blocked_until()).min();
            return until.map_or(Next::Idle, Next::WaitUntil);
        }
        match &mut self.pause {
            None => Next::Send(self.assign()),
            Some(pause) if pause.probing => Next::Idle,
            Some(pause) if now < pause.until => Next::WaitUntil(pause.until),
            Some(pause) => {
                pause.probing = true;
                let conversations = self.works.take_other().into_iter().collect();
                Next::Send(self.begin(conversations, 1, true))
            }
        }
    }

    /// Assigns the conversations that wait evenly to the free connections. So one event that comes alone is sent alone, and
    /// batches are as large as the endpoint is slow.
    fn assign(&mut self) -> Assignment {
        let free = self.limits.connections - self.flights.len();
        let share = self.works.waiting().div_ceil(free);
        let (conversations, events) = self.works.take(share, self.limits.batch);
        self.begin(conversations, events, false)
    }

    fn begin(
        &mut self,
        conversations: Vec<ConversationId>,
        events_max: usize,
        probe: bool,
    ) -> Assignment {
        self.last_request += 1;
        let request = RequestId(self.last_request);
        let flight = Flight {
            conversations: conversations.clone(),
            events: 0,
            probe,
        };
        self.flights.insert(request, flight);
        Assignment {
            request,
            conversations,
            events_max,
            bytes_max: WEBHOOK_BATCH_BYTES_MAX,
            probe,
        }
    }

    /// Notes how many events of each conversation the request has. Conversations with 0 have nothing to send; those that are
    /// not listed had no room, and are sent next. Returns whether there is anything to send; if not, the request is over.
    pub fn loaded(&mut self, request: RequestId, events: &[(ConversationId, usize)]) -> bool {
        let Some(flight) = self.flights.get_mut(&request) else {
            return false;
        };
        let counts: HashMap<_, _> = events.iter().copied().collect();
        flight.events = counts.values().sum();
        let conversations = std::mem::take(&mut flight.conversations);
        for conversation in conversations.into_iter().rev() {
            match counts.get(&conversation) {
                Some(0) => self.works.finish(conversation),
                Some(_) => flight.conversations.push(conversation),
                None => self.works.put_back(conversation),
            }
        }
        flight.conversations.reverse();
        let is_empty = flight.conversations.is_empty();
        if is_empty {
            self.end(request);
        }
        !is_empty
    }

    /// Takes the answer to a request.
    pub fn answered(&mut self, request: RequestId, outcome: Outcome, now: Instant) -> Effects {
        let mut effects = Effects::default();
        let Some(flight) = self.end(request) else {
            return effects;
        };
        match outcome {
            Outcome::Accepted => self.accepted(flight, now, &mut effects),
            Outcome::Unavailable {
                status,
                retry_after,
            } => {
                self.works.note_status(&flight.conversations, status);
                match self.own_failure_again(&flight) {
                    Some(conversation) => self.own_failure(conversation, now, &mut effects),
                    None => self.unavailable(&flight, retry_after.unwrap_or_default(), now),
                }
            }
            Outcome::Rejected(status) => {
                self.works.note_status(&flight.conversations, Some(status));
                self.rejected(&flight, now, &mut effects);
            }
            Outcome::Gone => {
                self.disabled = true;
                effects.disabled = true;
                for conversation in flight.conversations.into_iter().rev() {
                    self.works.put_back(conversation);
                }
            }
        }
        effects
    }

    fn end(&mut self, request: RequestId) -> Option<Flight> {
        let flight = self.flights.remove(&request)?;
        if let Some(pause) = &mut self.pause
            && flight.probe
        {
            pause.probing = false;
        }
        Some(flight)
    }

    fn accepted(&mut self, flight: Flight, now: Instant, effects: &mut Effects) {
        self.successes += 1;
        self.rejected.clear();
        for conversation in &flight.conversations {
            self.works.accepted(*conversation, self.limits.batch);
        }
        effects.accepted = flight.conversations;
        // Another request in flight may have been accepted before the endpoint failed.
        if flight.probe {
            self.pause = None;
            self.judge(now, effects);
        }
    }

    /// The endpoint works. So what failed before failed by itself; of a batch, it is not known yet which event.
    fn judge(&mut self, now: Instant, effects: &mut Effects) {
        for (conversation, events) in self.works.take_suspects() {
            if events > 1 {
                self.works.halve(conversation, events);
            } else {
                self.own_failure(conversation, now, effects);
            }
        }
    }

    /// Returns the conversation of a request if its one event failed by itself before, and others were accepted since then.
    /// So it probably failed by itself again, and others need not wait.
    fn own_failure_again(&self, flight: &Flight) -> Option<ConversationId> {
        let conversation = *flight.conversations.first()?;
        let work = self.works.get(conversation)?;
        let again = work.attempts > 0 && work.successes < self.successes;
        (again && flight.events == 1 && self.pause.is_none()).then_some(conversation)
    }

    fn own_failure(&mut self, conversation: ConversationId, now: Instant, effects: &mut Effects) {
        let successes = self.successes;
        let Some(work) = self.works.get_mut(conversation) else {
            return;
        };
        if work.attempts == 0 || work.successes < successes {
            work.attempts += 1;
            work.tries = 0;
        } else {
            // Nothing else was accepted meanwhile, so it may be the endpoint. It is tried on.
            work.tries = work.tries.saturating_add(1);
        }
        work.successes = successes;
        work.cap = 1;
        if work.attempts >= ATTEMPTS_MAX {
            let status = work.status();
            self.works.remove(conversation);
            effects.skipped.push(Skipped {
                conversation,
                status,
            });
            return;
        }
        let pause = pause_after(work.attempts, work.tries);
        if self.works.block(conversation, now + pause) {
            effects.blocked.push((conversation, now + pause));
        }
    }

    /// Pauses the endpoint. Requests that fail at the same time count as one failure.
    fn unavailable(&mut self, flight: &Flight, retry_after: Duration, now: Instant) {
        let step = match &self.pause {
            None => PAUSE_MIN,
            Some(pause) if flight.probe => PAUSE_MAX.min(2 * pause.step),
            Some(pause) => pause.step,
        };
        let retry_at = now + retry_after.min(RETRY_AFTER_MAX);
        let until = match &self.pause {
            Some(pause) if !flight.probe => pause.until,
            _ => now + step.mul_f64(self.random.random::<f64>()),
        };
        let probing = self.pause.as_ref().is_some_and(|pause| pause.probing);
        self.pause = Some(Pause {
            step,
            until: until.max(retry_at),
            probing,
        });
        for conversation in &flight.conversations {
            self.works.suspect(*conversation, flight.events);
        }
    }

    fn rejected(&mut self, flight: &Flight, now: Instant, effects: &mut Effects) {
        if flight.events > 1 {
            for conversation in flight.conversations.iter().rev() {
                self.works.put_back(*conversation);
                self.works.halve(*conversation, flight.events);
            }
            return;
        }
        let Some(conversation) = flight.conversations.first() else {
            return;
        };
        if self.rejected.len() < REJECTED_IN_A_ROW && !self.rejected.contains(conversation) {
            self.rejected.push(*conversation);
        }
        if self.pause.is_some() || self.rejected.len() >= REJECTED_IN_A_ROW {
            self.unavailable(flight, Duration::ZERO, now);
        } else {
            self.own_failure(*conversation, now, effects);
        }
    }
}

/// Returns the pause after the failed attempt with this number, or after further ones of which nobody knows whose failures
/// they were.
fn pause_after(attempts: u8, tries: u8) -> Duration {
    let planned = ATTEMPT_PAUSES_S.get(usize::from(attempts).saturating_sub(1));
    let planned = Duration::from_secs(planned.copied().unwrap_or_default());
    if tries == 0 {
        return planned;
    }
    let shortest = Duration::from_secs(ATTEMPT_PAUSES_S[0]);
    PAUSE_MAX.min(shortest * (1 << tries.min(10)))
}

#[cfg(test)]
mod tests;
