//! One peer: what is to be sent to it, numbered, kept until it is acknowledged, and sent again after a reconnect; so a
//! broken connection loses nothing and doubles nothing. No I/O.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::{Bytes, BytesMut};
use metrics::counter;
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

use super::{
    lock,
    message::{
        ANSWER_BYTES_MAX, Answer, Ask, Batch, Interest, MESSAGE_BYTES_MAX, Message, ResumePoint,
        decode, encode,
    },
};
use crate::{
    chat::Error,
    model::{Epoch, GatewayId, Topic},
};

/// Bytes queued for one peer. Above it nothing that can be done without is queued, and operations are refused.
pub(super) const QUEUE_BYTES_MAX: usize = 32 << 20;
/// Bytes queued for one peer of what must arrive. So many wait only for a peer that cannot be reached, or does not keep
/// up: at this number its link is given up, and one of the two leaves the ring, as when they cannot speak to each other.
/// What this gateway's sockets are interested in does not count once: it is as long as it is.
const BACKLOG_BYTES_MAX: usize = 128 << 20;
/// What a queued message weighs besides its bytes.
const QUEUED_BYTES: usize = 96;
/// Topics that nobody is interested in any more, and whose home or owner is to be told when there is room.
const ENDED_MAX: usize = 100_000;
/// Of these, told at once.
const ENDED_AT_ONCE: usize = 1_000;
/// Operations forwarded to one peer and not answered.
pub(super) const ASKS_MAX: usize = 16_384;
/// Bytes of one batch, about.
const BATCH_BYTES: usize = 256 << 10;

/// Says so when its last clone is dropped: each gateway concerned has dealt with a publication, or is gone.
pub(super) struct Token {
    done: Option<Box<dyn FnOnce(bool) + Send + Sync>>,
    refused: AtomicBool,
}

impl Token {
    /// `done` learns whether it was taken, or refused by one that is not the home.
    pub(super) fn new(done: impl FnOnce(bool) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            done: Some(Box::new(done)),
            refused: AtomicBool::new(false),
        })
    }

    pub(super) fn refuse(&self) {
        self.refused.store(true, Ordering::Release);
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(!self.refused.load(Ordering::Acquire));
        }
    }
}

/// Why a peer was not asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallError {
    /// Nobody knows whether it was done.
    Lost,
    Full,
    /// The question is too long for one message.
    TooLong,
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Lost => Self::Closed,
            CallError::Full => Self::BUSY,
            CallError::TooLong => Self::TooLarge {
                what: "bytes of a request to another gateway".into(),
                max: MESSAGE_BYTES_MAX,
            },
        }
    }
}

/// Why a connection is of no use: one of the two has forgotten the other meanwhile, and numbers from the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stale {
    /// This link is of an older time: it must be replaced.
    Mine,
    Theirs,
}

pub(super) struct Link {
    pub peer: GatewayId,
    /// The id of the stream of messages to the peer. Their numbers count within it.
    stream_id: u64,
    state: Mutex<State>,
    /// Fires when there is something to send.
    pub wake: Notify,
    /// Held by the one connection that is in use.
    pub connection: tokio::sync::Mutex<()>,
    /// Fires when the peer is gone for good.
    pub closed: CancellationToken,
    /// Fires when too much waited: until the peer or this gateway is out of the ring, the two don't speak any more.
    pub given_up: CancellationToken,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Queued>,
    bytes: usize,
    /// The number of the queue's first message, less one: everything up to it is acknowledged.
    acknowledged: u64,
    /// The last one sent on this connection.
    sent: u64,
    /// The id of the peer's stream, once connected.
    peer: Option<u64>,
    /// The last one that came from the peer and was dealt with.
    received: u64,
    owes_acknowledgement: bool,
    asks: BTreeMap<u64, Waiting>,
    next_ask: u64,
    connected: bool,
    peer_takes_parts: bool,
    /// Bytes of the interests announced last, and as of which version.
    announced: (Epoch, usize),
    /// What nobody here is interested in any more, to be told when there is room.
    ended: BTreeSet<Topic>,
    /// Of what is not sent any more, since the link was given up: done when the peer is gone.
    undone: Vec<Arc<Token>>,
}

impl State {
    fn push(&mut self, queued: Queued) {
        self.bytes += queued.weight();
        self.queue.push_back(queued);
    }

    /// Queues some of what has ended, if there is room. True if it did.
    fn tell_ended(&mut self) -> bool {
        if self.ended.is_empty() || self.bytes > QUEUE_BYTES_MAX / 2 {
            return false;
        }
        for _ in 0..ENDED_AT_ONCE.min(self.ended.len()) {
            if let Some(topic) = self.ended.pop_first() {
                let bytes = uninterested(topic);
                self.push(Queued { bytes, token: None });
            }
        }
        true
    }
}

fn uninterested(topic: Topic) -> Bytes {
    encode(&Message::Uninterested { topic })
}

/// Waits for an answer.
struct Waiting {
    reply: oneshot::Sender<Answer>,
    /// What has come of a long one.
    parts: Vec<Bytes>,
}

struct Queued {
    bytes: Bytes,
    token: Option<Arc<Token>>,
}

impl Queued {
    fn weight(&self) -> usize {
        self.bytes.len() + QUEUED_BYTES
    }
}

impl Link {
    pub(super) fn new(peer: GatewayId) -> Self {
        Self {
            peer,
            stream_id: rand::random(),
            state: Mutex::default(),
            wake: Notify::new(),
            connection: tokio::sync::Mutex::default(),
            closed: CancellationToken::new(),
            given_up: CancellationToken::new(),
        }
    }

    /// Queues a message that must arrive. The token is kept until the peer has dealt with it.
    pub(super) fn send(&self, bytes: Bytes, token: Option<Arc<Token>>) {
        if bytes.len() > MESSAGE_BYTES_MAX {
            // Never: see there. Sent, it would break each connection that is made.
            counter!("chat_peer_messages_too_long_total").increment(1);
            tracing::error!(peer = %self.peer, bytes = bytes.len(), "a message is too long for a peer");
            self.state().undone.extend(token); // It was not done.
            return;
        }
        let mut state = self.state();
        if self.is_closed() {
            drop(state);
            drop(token); // Not under the lock: whoever waits for it may send.
            return;
        }
        if self.is_given_up() {
            state.undone.extend(token);
            return;
        }
        state.push(Queued { bytes, token });
        let given_up =
            (state.bytes > BACKLOG_BYTES_MAX + state.announced.1).then(|| self.give_up(&mut state));
        drop(state);
        drop(given_up);
        self.wake.notify_one();
    }

    /// As `send`, for what the sockets here are interested in as of a version.
    pub(super) fn announce(&self, version: Epoch, topics: Vec<Interest>) {
        {
            let mut state = self.state();
            if !state.ended.is_empty() {
                for interest in &topics {
                    state.ended.remove(&interest.topic);
                }
            }
        }
        self.send_announced(version, encode(&Message::Interests { version, topics }));
    }

    fn send_announced(&self, version: Epoch, bytes: Bytes) {
        {
            let mut state = self.state();
            if state.announced.0 != version {
                state.announced = (version, 0);
            }
            state.announced.1 += bytes.len() + QUEUED_BYTES;
        }
        self.send(bytes, None);
    }

    /// Says that nobody here is interested in a topic any more: at once, or when there is room, unless somebody is again
    /// by then.
    pub(super) fn uninterested(&self, topic: &Topic) {
        {
            let mut state = self.state();
            if self.is_closed() || self.is_given_up() {
                return;
            }
            if state.bytes > QUEUE_BYTES_MAX {
                // One that is not told brings what nobody here takes, until the next version. But a user would seem to
                // be online, and costs its client a connection.
                if state.ended.len() < ENDED_MAX || matches!(topic, Topic::User(_)) {
                    state.ended.insert(topic.clone());
                }
                return;
            }
            state.ended.remove(topic);
        }
        self.send(uninterested(topic.clone()), None);
    }

    /// Nothing is sent any more, and nothing counts as done before the peer is gone: its sockets may still be there.
    fn give_up(&self, state: &mut State) -> impl Drop + use<> {
        counter!("chat_peer_links_given_up_total").increment(1);
        tracing::error!(peer = %self.peer, bytes = state.bytes, "too much waits for a peer");
        let queue = std::mem::take(&mut state.queue);
        state
            .undone
            .extend(queue.into_iter().filter_map(|queued| queued.token));
        state.bytes = 0;
        state.ended.clear();
        self.given_up.cancel();
        std::mem::take(&mut state.asks)
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.is_cancelled()
    }

    /// As `send`, for what can be done without.
    pub(super) fn send_if_room(&self, bytes: Bytes) {
        if !self.is_full() {
            self.send(bytes, None);
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.is_given_up() || self.state().bytes > QUEUE_BYTES_MAX
    }

    /// Asks the peer; the order of calls is the order in which the peer begins.
    pub(super) fn ask(
        self: &Arc<Self>,
        ask: Ask,
    ) -> impl Future<Output = Result<Answer, CallError>> + use<> {
        let asked = self.begin_ask(ask);
        let link = self.clone();
        async move {
            let (id, answer) = asked?;
            let _forget = Forget(link, id);
            answer.await.map_err(|_| CallError::Lost)
        }
    }

    fn begin_ask(&self, ask: Ask) -> Result<(u64, oneshot::Receiver<Answer>), CallError> {
        let (reply, answer) = oneshot::channel();
        let id = {
            let mut state = self.state();
            if self.is_closed() {
                return Err(CallError::Lost);
            }
            let full = state.bytes > QUEUE_BYTES_MAX || state.asks.len() >= ASKS_MAX;
            if full || self.is_given_up() {
                return Err(CallError::Full);
            }
            state.next_ask += 1;
            let id = state.next_ask;
            let parts = Vec::new();
            state.asks.insert(id, Waiting { reply, parts });
            id
        };
        let interest = ask.interest();
        let bytes = encode(&Message::Ask { id, ask });
        if bytes.len() > MESSAGE_BYTES_MAX {
            self.state().asks.remove(&id);
            return Err(CallError::TooLong);
        }
        if let Some((topic, _)) = interest {
            self.state().ended.remove(&topic);
        }
        self.send(bytes, None);
        Ok((id, answer))
    }

    pub(super) fn answered(&self, id: u64, answer: Answer) {
        let asked = self.state().asks.remove(&id);
        if let Some(asked) = asked {
            drop(asked.reply.send(answer));
        }
    }

    /// The answer cannot be read: nobody knows what it says.
    pub(super) fn unanswered(&self, id: u64) {
        let asked = self.state().asks.remove(&id);
        drop(asked);
    }

    /// Some of an answer has come.
    pub(super) fn answered_in_part(&self, id: u64, part: Bytes, last: bool) {
        let asked = {
            let mut state = self.state();
            let Some(asked) = state.asks.get_mut(&id) else {
                return; // Whoever asked has given up.
            };
            asked.parts.push(part);
            let bytes: usize = asked.parts.iter().map(Bytes::len).sum();
            if !last && bytes <= ANSWER_BYTES_MAX {
                return;
            }
            state.asks.remove(&id)
        };
        let Some(Waiting { reply, parts }) = asked else {
            return;
        };
        match decode(&parts.concat()) {
            Ok(Message::Answer { answer, .. }) if last => drop(reply.send(answer)),
            // Lost, and nothing else: the link is fine.
            Ok(_) | Err(_) => tracing::error!(peer = %self.peer, "a long answer cannot be read"),
        }
    }

    pub(super) fn takes_parts(&self) -> bool {
        self.state().peer_takes_parts
    }

    /// From where this end goes on.
    pub(super) fn resume_point(&self) -> ResumePoint {
        let state = self.state();
        ResumePoint {
            stream_id: self.stream_id,
            peer: state.peer,
            received: state.received,
            takes_parts: true,
        }
    }

    /// A new connection: the peer says from where it goes on.
    pub(super) fn connected(&self, theirs: ResumePoint) -> Result<(), Stale> {
        if self
            .state()
            .peer
            .is_some_and(|known| known != theirs.stream_id)
        {
            return Err(Stale::Mine);
        }
        if theirs.peer.is_some_and(|known| known != self.stream_id) {
            return Err(Stale::Theirs);
        }
        self.acknowledge(theirs.received);
        let mut state = self.state();
        state.peer = Some(theirs.stream_id);
        state.sent = state.acknowledged;
        state.connected = true;
        state.peer_takes_parts = theirs.takes_parts;
        Ok(())
    }

    pub(super) fn disconnected(&self) {
        self.state().connected = false;
    }

    /// The next frame, if there is anything to say.
    pub(super) fn next_batch(&self, even_if_empty: bool) -> Option<Bytes> {
        let mut state = self.state();
        let skip = usize::try_from(state.sent - state.acknowledged).unwrap_or(usize::MAX);
        let mut body = BytesMut::new();
        let mut messages = 0;
        for queued in state.queue.iter().skip(skip) {
            if messages > 0 && body.len() + queued.bytes.len() > BATCH_BYTES {
                break;
            }
            body.extend_from_slice(&queued.bytes);
            messages += 1;
        }
        if messages == 0 && !state.owes_acknowledgement && !even_if_empty {
            return None;
        }
        let batch = Batch {
            first: state.sent + 1,
            acknowledged: state.received,
            messages,
        };
        state.sent += u64::from(messages);
        state.owes_acknowledgement = false;
        let mut frame = BytesMut::from(&encode(&batch)[..]);
        frame.unsplit(body);
        Some(frame.freeze())
    }

    /// What of a batch is new, with the number of each.
    pub(super) fn new_in<T>(&self, first: u64, messages: Vec<T>) -> Option<Vec<(u64, T)>> {
        let received = self.state().received;
        if first > received + 1 {
            return None; // Something is missing: this peer must connect again.
        }
        let numbered = (first..).zip(messages);
        Some(numbered.filter(|(n, _)| *n > received).collect())
    }

    /// Everything up to this number is dealt with.
    pub(super) fn dealt_with(&self, number: u64) {
        let mut state = self.state();
        state.received = state.received.max(number);
        state.owes_acknowledgement = true;
        drop(state);
        self.wake.notify_one();
    }

    pub(super) fn acknowledge(&self, number: u64) {
        let mut done = Vec::new();
        let mut state = self.state();
        while state.acknowledged < number
            && let Some(queued) = state.queue.pop_front()
        {
            state.acknowledged += 1;
            state.bytes -= queued.weight();
            done.push(queued);
        }
        let more = state.tell_ended();
        drop(state);
        if more {
            self.wake.notify_one();
        }
        drop(done); // Not under the lock: whoever waits for them may send.
    }

    /// The peer is gone for good: nothing is waited for any more.
    pub(super) fn close(&self) {
        let over = {
            let mut state = self.state();
            self.closed.cancel();
            state.bytes = 0;
            state.ended.clear();
            state.acknowledged = state.sent.max(state.acknowledged) + state.queue.len() as u64;
            state.sent = state.acknowledged;
            (
                std::mem::take(&mut state.queue),
                std::mem::take(&mut state.asks),
                std::mem::take(&mut state.undone),
            )
        };
        drop(over);
        self.wake.notify_one();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// Whether everything sent was dealt with.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state();
        state.queue.is_empty()
            && state.ended.is_empty()
            && (self.is_closed() || !self.is_given_up())
    }

    pub(super) fn is_connected(&self) -> bool {
        self.state().connected
    }

    pub(super) fn queued(&self) -> (usize, usize) {
        let state = self.state();
        (state.queue.len(), state.bytes)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Whoever asked has given up.
struct Forget(Arc<Link>, u64);

impl Drop for Forget {
    fn drop(&mut self) {
        self.0.state().asks.remove(&self.1);
    }
}

#[cfg(test)]
mod tests;
