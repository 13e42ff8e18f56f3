//! One peer: what is to be sent to it, numbered, kept until it is acknowledged, and sent again after a reconnect; so a
//! broken connection loses nothing and doubles nothing. No I/O.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::{Bytes, BytesMut};
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

use super::{
    lock,
    message::{Answer, Ask, Batch, Message, Standing, encode},
};
use crate::model::GatewayId;

/// Bytes queued for one peer. Above it nothing that can be done without is queued, and operations are refused; what
/// must arrive is bounded by the entries that owners may have in flight.
pub(super) const QUEUE_BYTES_MAX: usize = 32 << 20;
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
pub(super) enum Unasked {
    /// Nobody knows whether it was done.
    Lost,
    Full,
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
    /// The name of the numbering of what is sent.
    numbering: u64,
    state: Mutex<State>,
    /// Fires when there is something to send.
    pub wake: Notify,
    /// Held by the one connection that is in use.
    pub connection: tokio::sync::Mutex<()>,
    /// Fires when the peer is gone for good.
    pub closed: CancellationToken,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Queued>,
    bytes: usize,
    /// The number of the queue's first message, less one: everything up to it is acknowledged.
    acknowledged: u64,
    /// The last one sent on this connection.
    sent: u64,
    /// The peer's numbering, once connected.
    peer: Option<u64>,
    /// The last one that came from the peer and was dealt with.
    received: u64,
    owes_acknowledgement: bool,
    asks: BTreeMap<u64, oneshot::Sender<Answer>>,
    next_ask: u64,
    connected: bool,
}

struct Queued {
    bytes: Bytes,
    _token: Option<Arc<Token>>,
}

impl Link {
    pub(super) fn new(peer: GatewayId) -> Self {
        Self {
            peer,
            numbering: rand::random(),
            state: Mutex::default(),
            wake: Notify::new(),
            connection: tokio::sync::Mutex::default(),
            closed: CancellationToken::new(),
        }
    }

    /// Queues a message that must arrive. The token is kept until the peer has dealt with it.
    pub(super) fn send(&self, bytes: Bytes, token: Option<Arc<Token>>) {
        let mut state = self.state();
        if self.is_closed() {
            drop(state);
            drop(token); // Not under the lock: whoever waits for it may send.
            return;
        }
        state.bytes += bytes.len();
        state.queue.push_back(Queued {
            bytes,
            _token: token,
        });
        drop(state);
        self.wake.notify_one();
    }

    /// As `send`, for what can be done without.
    pub(super) fn send_if_room(&self, bytes: Bytes) {
        if !self.is_full() {
            self.send(bytes, None);
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.state().bytes > QUEUE_BYTES_MAX
    }

    /// Asks the peer; the order of calls is the order in which the peer begins.
    pub(super) fn ask(
        self: &Arc<Self>,
        ask: Ask,
    ) -> impl Future<Output = Result<Answer, Unasked>> + use<> {
        let asked = self.begin_ask(ask);
        let link = self.clone();
        async move {
            let (id, answer) = asked?;
            let _forget = Forget(link, id);
            answer.await.map_err(|_| Unasked::Lost)
        }
    }

    fn begin_ask(&self, ask: Ask) -> Result<(u64, oneshot::Receiver<Answer>), Unasked> {
        let (reply, answer) = oneshot::channel();
        let id = {
            let mut state = self.state();
            if self.is_closed() {
                return Err(Unasked::Lost);
            }
            if state.bytes > QUEUE_BYTES_MAX || state.asks.len() >= ASKS_MAX {
                return Err(Unasked::Full);
            }
            state.next_ask += 1;
            let id = state.next_ask;
            state.asks.insert(id, reply);
            id
        };
        self.send(encode(&Message::Ask { id, ask }), None);
        Ok((id, answer))
    }

    pub(super) fn answered(&self, id: u64, answer: Answer) {
        let asked = self.state().asks.remove(&id);
        if let Some(asked) = asked {
            drop(asked.send(answer));
        }
    }

    /// From where this end goes on.
    pub(super) fn standing(&self) -> Standing {
        let state = self.state();
        Standing {
            numbering: self.numbering,
            peer: state.peer,
            received: state.received,
        }
    }

    /// A new connection: the peer says from where it goes on.
    pub(super) fn connected(&self, theirs: Standing) -> Result<(), Stale> {
        if self
            .state()
            .peer
            .is_some_and(|known| known != theirs.numbering)
        {
            return Err(Stale::Mine);
        }
        if theirs.peer.is_some_and(|known| known != self.numbering) {
            return Err(Stale::Theirs);
        }
        self.acknowledge(theirs.received);
        let mut state = self.state();
        state.peer = Some(theirs.numbering);
        state.sent = state.acknowledged;
        state.connected = true;
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
    pub(super) fn new_in(&self, first: u64, messages: Vec<Message>) -> Option<Vec<(u64, Message)>> {
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
            state.bytes -= queued.bytes.len();
            done.push(queued);
        }
        drop(state);
        drop(done); // Not under the lock: whoever waits for them may send.
    }

    /// The peer is gone for good: nothing is waited for any more.
    pub(super) fn close(&self) {
        let (queue, asks) = {
            let mut state = self.state();
            self.closed.cancel();
            state.bytes = 0;
            state.acknowledged = state.sent.max(state.acknowledged) + state.queue.len() as u64;
            state.sent = state.acknowledged;
            (
                std::mem::take(&mut state.queue),
                std::mem::take(&mut state.asks),
            )
        };
        drop((queue, asks));
        self.wake.notify_one();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// Whether everything sent was dealt with.
    pub(super) fn is_idle(&self) -> bool {
        self.state().queue.is_empty()
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
mod tests {
    use super::*;

    fn sent(link: &Link) -> u64 {
        link.send(Bytes::from_static(b"x"), None);
        link.next_batch(false);
        link.state().sent
    }

    fn connect(a: &Link, b: &Link) -> (Result<(), Stale>, Result<(), Stale>) {
        let (from_a, from_b) = (a.standing(), b.standing());
        (a.connected(from_b), b.connected(from_a))
    }

    #[test]
    fn what_was_not_acknowledged_is_sent_again() {
        let (a, b) = (
            Link::new(GatewayId(uuid::Uuid::nil())),
            Link::new(GatewayId(uuid::Uuid::nil())),
        );
        assert_eq!(connect(&a, &b), (Ok(()), Ok(())));
        assert_eq!((sent(&a), sent(&a)), (1, 2));
        b.dealt_with(1);
        assert_eq!(connect(&a, &b), (Ok(()), Ok(())));
        assert!(a.next_batch(false).is_some() && !a.is_idle());
        b.dealt_with(2);
        assert_eq!(connect(&a, &b), (Ok(()), Ok(())));
        assert!(a.is_idle());
    }

    #[test]
    fn one_that_was_forgotten_begins_again() {
        let (a, b) = (
            Link::new(GatewayId(uuid::Uuid::nil())),
            Link::new(GatewayId(uuid::Uuid::nil())),
        );
        assert_eq!(connect(&a, &b), (Ok(()), Ok(())));
        sent(&a);
        b.dealt_with(1);
        let b = Link::new(GatewayId(uuid::Uuid::nil())); // It has forgotten `a`.
        assert_eq!(connect(&a, &b), (Err(Stale::Mine), Err(Stale::Theirs)));
        let a = Link::new(GatewayId(uuid::Uuid::nil()));
        assert_eq!(connect(&a, &b), (Ok(()), Ok(())));
    }
}
