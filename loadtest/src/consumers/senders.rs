//! Users who send messages at a steady rate, each to conversations of their own. They reconnect, and repeat messages whose
//! outcome is unknown, until each is acknowledged.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde_json::{Value, json};
use uuid::Uuid;

use super::arrivals::Acknowledged;
use crate::{
    client::{self, Client},
    server::Server,
};

/// Senders, if there are enough conversations.
const SENDERS: usize = 4;
/// Messages of one sender in flight.
const WINDOW: usize = 256;
/// Bytes of a body.
const BODY_BYTES: usize = 100;
/// The time until a failed connection or a refused message is retried.
const RETRY_AFTER: Duration = Duration::from_millis(20);
/// The longest wait for a frame, so that a sender sees when it is to end.
const WAIT_MAX: Duration = Duration::from_millis(50);
/// The shortest wait for a frame that a socket can have.
const WAIT_MIN: Duration = Duration::from_millis(1);
/// The time within which every message must be acknowledged once nothing new is sent.
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);

/// All senders, each in a thread.
pub(super) struct Senders {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    unanswered: Vec<Arc<AtomicU64>>,
}

struct Shared {
    /// Addresses of the gateways. A gateway that is down keeps its last address.
    addresses: Mutex<Vec<String>>,
    acknowledged: Mutex<Vec<Acknowledged>>,
    /// The first reply that is not as documented.
    wrong: Mutex<Option<String>>,
    is_sending: AtomicBool,
    is_over: AtomicBool,
}

/// What all senders did.
pub(super) struct Sent {
    pub(super) acknowledged: Vec<Acknowledged>,
    /// Messages that were never acknowledged.
    pub(super) unanswered: u64,
    pub(super) wrong: Option<String>,
}

/// Users, each with the conversations that they created.
pub(super) struct Conversations(Vec<Vec<Uuid>>);

impl Conversations {
    /// Creates groups of two, of which only one user is ever connected.
    pub(super) fn create(server: &Server, count: usize) -> anyhow::Result<Self> {
        let mut users = vec![Vec::new(); SENDERS.min(count)];
        for (number, conversations) in users.iter_mut().enumerate() {
            let mut user = Client::connect(&server.address, &name(number), number)?;
            for _ in (number..count).step_by(SENDERS) {
                let create = json!({"type": "create", "kind": "group", "participants": ["reader"]});
                conversations.push(user.create_patiently(create)?.parse()?);
            }
        }
        Ok(Self(users))
    }
}

fn name(sender: usize) -> String {
    format!("sender-{sender}")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Senders {
    /// Begins to send this many messages per second, to the conversations in turn.
    pub(super) fn begin(servers: &[Server], conversations: Conversations, rate: f64) -> Self {
        let shared = Arc::new(Shared {
            addresses: Mutex::new(servers.iter().map(|s| s.address.clone()).collect()),
            acknowledged: Mutex::default(),
            wrong: Mutex::default(),
            is_sending: AtomicBool::new(true),
            is_over: AtomicBool::new(false),
        });
        let Conversations(users) = conversations;
        let unanswered: Vec<_> = users.iter().map(|_| Arc::default()).collect();
        let each = Duration::from_secs_f64(users.len() as f64 / rate);
        let start = |(number, conversations)| {
            let mut sender = Sender {
                number,
                conversations,
                each,
                due: Instant::now(),
                sent: 0,
                in_flight: HashMap::new(),
                again: Vec::new(),
                retry_at: Instant::now(),
                connections: 0,
                shared: shared.clone(),
                unanswered: Arc::clone(&unanswered[number]),
            };
            thread::spawn(move || sender.live())
        };
        let threads = users.into_iter().enumerate().map(start).collect();
        Self {
            shared,
            threads,
            unanswered,
        }
    }

    /// From now on this is the gateway with this number.
    pub(super) fn follow(&self, number: usize, server: &Server) {
        lock(&self.shared.addresses)[number].clone_from(&server.address);
    }

    /// The number of messages that were acknowledged so far.
    pub(super) fn acknowledged(&self) -> usize {
        lock(&self.shared.acknowledged).len()
    }

    /// Sends nothing new, and waits until everything is acknowledged.
    pub(super) fn end(self) -> Sent {
        self.shared.is_sending.store(false, Ordering::Relaxed);
        let until = Instant::now() + ANSWERED_WITHIN;
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < until {
            thread::sleep(Duration::from_millis(10));
        }
        self.shared.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads {
            drop(thread.join());
        }
        let unanswered = self.unanswered.iter();
        Sent {
            acknowledged: std::mem::take(&mut *lock(&self.shared.acknowledged)),
            unanswered: unanswered.map(|n| n.load(Ordering::Relaxed)).sum(),
            wrong: lock(&self.shared.wrong).take(),
        }
    }
}

/// A message that is not acknowledged yet.
#[derive(Clone, Copy)]
struct Message {
    conversation: Uuid,
    client_id: Uuid,
}

/// One user.
struct Sender {
    number: usize,
    conversations: Vec<Uuid>,
    /// The time between two messages.
    each: Duration,
    /// When the next message is due.
    due: Instant,
    sent: usize,
    /// The messages in flight, by the id of the request.
    in_flight: HashMap<u32, Message>,
    /// The messages to send again, from `retry_at` on.
    again: Vec<Message>,
    retry_at: Instant,
    connections: usize,
    shared: Arc<Shared>,
    unanswered: Arc<AtomicU64>,
}

impl Sender {
    fn live(&mut self) {
        while !self.is_done() {
            // An error ends the connection, which is what a kill does.
            if self.connected().is_err() {
                self.again.extend(self.in_flight.drain().map(|(_, m)| m));
                thread::sleep(RETRY_AFTER);
            }
        }
        let unanswered = self.again.len() + self.in_flight.len();
        self.unanswered.store(unanswered as u64, Ordering::Relaxed);
    }

    fn is_done(&self) -> bool {
        let is_answered = self.again.is_empty() && self.in_flight.is_empty();
        self.shared.is_over.load(Ordering::Relaxed)
            || (is_answered && !self.shared.is_sending.load(Ordering::Relaxed))
    }

    /// Sends and reads on one connection, to the gateways in turn.
    fn connected(&mut self) -> anyhow::Result<()> {
        let address = {
            let addresses = lock(&self.shared.addresses);
            addresses[(self.number + self.connections) % addresses.len()].clone()
        };
        self.connections += 1;
        let mut client = Client::connect(&address, &name(self.number), self.number)?;
        while !self.is_done() {
            self.send_due(&mut client)?;
            let wait = self.due.saturating_duration_since(Instant::now());
            if let Some(frame) = client.next_within(wait.clamp(WAIT_MIN, WAIT_MAX))? {
                self.take(&frame)?;
            }
        }
        Ok(())
    }

    /// Sends what is to be sent again, and the new messages that are due.
    fn send_due(&mut self, client: &mut Client) -> anyhow::Result<()> {
        let now = Instant::now();
        if now >= self.retry_at && !self.again.is_empty() {
            self.retry_at = now + RETRY_AFTER;
            while self.in_flight.len() < WINDOW
                && let Some(message) = self.again.pop()
            {
                self.send(client, message, true)?;
            }
        }
        while self.shared.is_sending.load(Ordering::Relaxed)
            && self.due <= now
            && self.in_flight.len() < WINDOW
        {
            let message = Message {
                conversation: self.conversations[self.sent % self.conversations.len()],
                client_id: client::client_id(),
            };
            self.due += self.each;
            self.sent += 1;
            self.send(client, message, false)?;
        }
        Ok(())
    }

    fn send(&mut self, client: &mut Client, message: Message, retry: bool) -> anyhow::Result<()> {
        let request = json!({"type": "send", "conversation": message.conversation,
            "client_id": message.client_id, "body": "x".repeat(BODY_BYTES), "retry": retry});
        match client.begin(request) {
            Ok(number) => drop(self.in_flight.insert(number, message)),
            Err(error) => {
                // A failed send may have arrived.
                self.again.push(message);
                return Err(error);
            }
        }
        Ok(())
    }

    fn take(&mut self, frame: &Value) -> anyhow::Result<()> {
        let number = frame["id"].as_u64().and_then(|id| u32::try_from(id).ok());
        let Some(message) = number.and_then(|number| self.in_flight.remove(&number)) else {
            return Ok(());
        };
        if frame["type"] == "sent" {
            let id = frame["message_id"].as_str().context("no message_id")?;
            lock(&self.shared.acknowledged).push(Acknowledged {
                conversation: message.conversation,
                seq: frame["seq"].as_u64().context("no seq")?,
                id: id.parse()?,
            });
        } else if frame["code"] == "unavailable" {
            self.again.push(message);
        } else {
            lock(&self.shared.wrong).get_or_insert_with(|| frame.to_string());
        }
        Ok(())
    }
}
