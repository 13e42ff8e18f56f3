//! The link to one peer. Its messages are numbered, kept until they are acknowledged, and sent again after a reconnect. So
//! a broken connection neither loses nor repeats a message. There is no I/O.

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
    message::{
        ANSWER_BYTES_MAX, Batch, Interest, MESSAGE_BYTES_MAX, PeerMessage, ResumePoint, decode,
        encode,
    },
    question::{Answered, AnyQuestion},
};
use crate::{
    chat::{Error, RankClock},
    model::{Epoch, GatewayId, Topic},
    mutation::{Mutation, broken},
    tasks::lock,
};

/// Bytes queued for one peer above which optional messages are dropped, and operations are refused.
pub(super) const QUEUE_BYTES_MAX: usize = 32 << 20;
/// Bytes queued for one peer of messages that must arrive. So many wait only for a peer that cannot be reached or does not
/// keep up. Above this its link is given up, and one of the two gateways leaves the ring, as if they could not reach each
/// other. The interests of this gateway's sockets, announced for the newest version, do not count.
const BACKLOG_BYTES_MAX: usize = 128 << 20;
/// The bytes that a queued message takes besides its own.
const QUEUED_BYTES: usize = 96;
/// Topics whose last subscriber left, and whose home or owner is told when there is room.
const ENDED_MAX: usize = 100_000;
/// The number of them that are told at once.
const ENDED_AT_ONCE: usize = 1_000;
/// Operations in progress at one peer.
pub(super) const ASKS_MAX: usize = 16_384;
/// The approximate bytes of one batch.
const BATCH_BYTES: usize = 256 << 10;

/// Calls back when its last clone is dropped: then each gateway concerned has acknowledged the message, or is gone.
pub(crate) struct Token {
    done: Option<Box<dyn FnOnce(bool) + Send + Sync>>,
    refused: AtomicBool,
}

impl Token {
    /// `done` gets false if a gateway refused the message because it is not the home.
    pub(crate) fn new(done: impl FnOnce(bool) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            done: Some(Box::new(done)),
            refused: AtomicBool::new(false),
        })
    }

    pub(crate) fn refuse(&self) {
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

/// The reason why a peer did not answer a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallError {
    /// The outcome is unknown.
    Lost,
    Full,
    /// The request is too long for one message.
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

/// The reason why a connection cannot be used: one of the two gateways forgot the other and began a new stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stale {
    /// The peer began a new stream, so this link must be replaced.
    Mine,
    /// This gateway began a new stream.
    Theirs,
}

/// A link to one peer.
pub(crate) struct Link {
    pub peer: GatewayId,
    /// The id of the stream of messages to the peer. Their numbers count within it.
    stream_id: u64,
    /// Rule [rank-told]: each batch has the highest rank that this gateway knows.
    ranks: RankClock,
    state: Mutex<State>,
    /// Wakes the writer when there is something to send.
    pub wake: Notify,
    /// Locked by the connection that is in use.
    pub connection: tokio::sync::Mutex<()>,
    /// Cancelled when the peer is gone permanently.
    pub closed: CancellationToken,
    /// Cancelled when too much waited. The two gateways do not connect again until one of them has left the ring.
    pub given_up: CancellationToken,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Queued>,
    bytes: usize,
    /// The number up to which everything is acknowledged: one less than that of the queue's first message.
    acknowledged: u64,
    /// The number of the last message that was sent on this connection.
    sent: u64,
    /// The id of the peer's stream, once connected.
    peer: Option<u64>,
    /// The number of the last message of the peer that was handled.
    received: u64,
    owes_acknowledgement: bool,
    asks: BTreeMap<u64, Waiting>,
    next_ask: u64,
    connected: bool,
    /// The version for which interests were announced last, and their bytes.
    announced: (Epoch, usize),
    /// Topics whose last subscriber left, to be told when there is room.
    ended: BTreeSet<Topic>,
    /// The tokens of messages that are not sent, because the link was given up. They are dropped when the peer is gone.
    undone: Vec<Arc<Token>>,
}

impl State {
    fn push(&mut self, queued: Queued) {
        self.bytes += queued.weight();
        self.queue.push_back(queued);
    }

    /// Queues some of the topics that have ended, if there is room. Returns whether it did.
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
    encode(&PeerMessage::Uninterested { topic })
}

/// A request that waits for its answer.
struct Waiting {
    reply: oneshot::Sender<Answered>,
    /// The parts of a long answer that have arrived.
    parts: Vec<Bytes>,
}

/// A message in the queue.
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
    pub(crate) fn new(peer: GatewayId) -> Self {
        Self {
            peer,
            stream_id: rand::random(),
            ranks: RankClock::default(),
            state: Mutex::default(),
            wake: Notify::new(),
            connection: tokio::sync::Mutex::default(),
            closed: CancellationToken::new(),
            given_up: CancellationToken::new(),
        }
    }

    /// Tells the peer the ranks of this clock.
    pub(super) fn telling(self, ranks: RankClock) -> Self {
        Self { ranks, ..self }
    }

    /// Queues a message that must arrive. Its token is kept until the peer acknowledges the message.
    pub(crate) fn send(&self, bytes: Bytes, token: Option<Arc<Token>>) {
        if bytes.len() > MESSAGE_BYTES_MAX {
            // The table at that limit excludes this. If it were sent, it would break each new connection.
            counter!("chat_peer_messages_too_long_total").increment(1);
            tracing::error!(peer = %self.peer, bytes = bytes.len(), "a message is too long for a peer");
            self.state().undone.extend(token);
            return;
        }
        let mut state = self.state();
        if self.is_closed() {
            drop(state);
            drop(token); // Without the lock, because its callback may send.
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

    /// Queues interests of the sockets here, for a version.
    pub(crate) fn announce(&self, version: Epoch, topics: Vec<Interest>) {
        {
            let mut state = self.state();
            if !state.ended.is_empty() {
                for interest in &topics {
                    state.ended.remove(&interest.topic);
                }
            }
        }
        self.send_announced(version, encode(&PeerMessage::Interests { version, topics }));
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

    /// Tells the peer that the last subscriber of a topic left: at once, or when there is room, unless a socket has
    /// subscribed again by then.
    pub(crate) fn uninterested(&self, topic: &Topic) {
        {
            let mut state = self.state();
            if self.is_closed() || self.is_given_up() {
                return;
            }
            if state.bytes > QUEUE_BYTES_MAX {
                // If a channel or presence is not told, its events come and are ignored until the next version. A user
                // is always told, because otherwise the user would seem to be online.
                if state.ended.len() < ENDED_MAX || matches!(topic, Topic::User(_)) {
                    state.ended.insert(topic.clone());
                }
                return;
            }
            state.ended.remove(topic);
        }
        self.send(uninterested(topic.clone()), None);
    }

    /// Gives the link up: nothing is sent any more. Nothing counts as delivered before the peer is gone, because its sockets
    /// may still be there.
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

    /// Queues an optional message, unless the queue is full.
    pub(crate) fn send_if_room(&self, bytes: Bytes) {
        if !self.is_full() {
            self.send(bytes, None);
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.is_given_up() || self.state().bytes > QUEUE_BYTES_MAX
    }

    /// Sends a request. The peer begins requests in the order of these calls.
    pub(crate) fn ask(
        self: &Arc<Self>,
        ask: AnyQuestion,
    ) -> impl Future<Output = Result<Answered, CallError>> + use<> {
        let asked = self.begin_ask(ask);
        let link = self.clone();
        async move {
            let (id, answer) = asked?;
            let _forget = Forget(link, id);
            answer.await.map_err(|_| CallError::Lost)
        }
    }

    fn begin_ask(&self, ask: AnyQuestion) -> Result<(u64, oneshot::Receiver<Answered>), CallError> {
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
        let bytes = encode(&PeerMessage::Ask { id, ask });
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

    /// Takes an answer of the peer.
    pub(crate) fn answered(&self, id: u64, answer: Answered) {
        let asked = self.state().asks.remove(&id);
        if let Some(asked) = asked {
            drop(asked.reply.send(answer));
        }
    }

    /// Ends a request whose answer cannot be read, with an unknown outcome.
    pub(super) fn unanswered(&self, id: u64) {
        let asked = self.state().asks.remove(&id);
        drop(asked);
    }

    /// Takes a part of an answer.
    pub(super) fn answered_in_part(&self, id: u64, part: Bytes, last: bool) {
        let asked = {
            let mut state = self.state();
            let Some(asked) = state.asks.get_mut(&id) else {
                return; // The caller has given up.
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
            Ok(PeerMessage::Answer { answer, .. }) if last => drop(reply.send(answer)),
            // Only this answer is lost; the link continues.
            Ok(_) | Err(_) => tracing::error!(peer = %self.peer, "a long answer cannot be read"),
        }
    }

    /// Returns the point from which this end continues.
    pub(super) fn resume_point(&self) -> ResumePoint {
        let state = self.state();
        ResumePoint {
            stream_id: self.stream_id,
            peer: state.peer,
            received: state.received,
        }
    }

    /// Begins a new connection, from the peer's resume point.
    pub(crate) fn connected(&self, theirs: ResumePoint) -> Result<(), Stale> {
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
        Ok(())
    }

    pub(super) fn disconnected(&self) {
        self.state().connected = false;
    }

    /// Returns the next frame, if there is anything to send. It tells the peer the highest rank that this gateway knows.
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
        let is_told = !broken(Mutation::RankTold);
        let rank = if is_told { self.ranks.highest() } else { 0 };
        let batch = Batch {
            first: state.sent + 1,
            acknowledged: state.received,
            messages,
            rank,
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

    /// Notes that everything up to this number was handled.
    pub(crate) fn handled(&self, number: u64) {
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
        drop(done); // Without the lock, because callbacks of tokens may send.
    }

    /// Closes the link, because the peer is gone permanently. Nothing waits for it any more.
    pub(crate) fn close(&self) {
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

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// Whether everything that was sent is acknowledged.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state();
        state.queue.is_empty()
            && state.ended.is_empty()
            && (self.is_closed() || !self.is_given_up())
    }

    pub(super) fn is_connected(&self) -> bool {
        self.state().connected
    }

    pub(crate) fn queued(&self) -> (usize, usize) {
        let state = self.state();
        (state.queue.len(), state.bytes)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Forgets a request when its caller gives up.
struct Forget(Arc<Link>, u64);

impl Drop for Forget {
    fn drop(&mut self) {
        self.0.state().asks.remove(&self.1);
    }
}

#[cfg(test)]
mod tests;
