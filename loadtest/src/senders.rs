//! Users who send messages, at a steady rate or as fast as they are acknowledged, each to conversations of their own. They
//! reconnect, and repeat messages whose outcome is unknown, until each is acknowledged.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    client::{self, Client},
    server::Server,
    worker::lock,
};

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

/// A user who sends messages to these conversations in turn.
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) conversations: Vec<Uuid>,
}

/// How fast messages are sent.
#[derive(Clone, Copy)]
pub(crate) struct Pace {
    /// Messages per second of all senders together. Without one, each sender fills its window.
    pub(crate) rate: Option<f64>,
    /// Messages of one sender in flight.
    pub(crate) window: usize,
}

/// A message that the gateway acknowledged.
pub(crate) struct Acknowledged {
    pub(crate) conversation: Uuid,
    pub(crate) seq: u64,
    /// The message id, which is the id of the event too.
    pub(crate) id: Uuid,
    pub(crate) client_id: Uuid,
}

/// All senders, each in a thread.
pub(crate) struct Senders {
    shared: Arc<Shared>,
    /// Each returns the number of messages that were never acknowledged.
    threads: Vec<JoinHandle<u64>>,
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
pub(crate) struct Sent {
    pub(crate) acknowledged: Vec<Acknowledged>,
    /// Messages that were never acknowledged.
    pub(crate) unanswered: u64,
    pub(crate) wrong: Option<String>,
}

impl Senders {
    /// Begins to send.
    pub(crate) fn begin(servers: &[Server], users: Vec<User>, pace: Pace) -> Self {
        let shared = Arc::new(Shared {
            addresses: Mutex::new(servers.iter().map(|s| s.address.clone()).collect()),
            acknowledged: Mutex::default(),
            wrong: Mutex::default(),
            is_sending: AtomicBool::new(true),
            is_over: AtomicBool::new(false),
        });
        let each = |rate| Duration::from_secs_f64(users.len() as f64 / rate);
        let each = pace.rate.map_or(Duration::ZERO, each);
        let start = |(number, user)| {
            let mut sender = Sender {
                number,
                user,
                window: pace.window,
                each,
                due: Instant::now(),
                sent: 0,
                in_flight: HashMap::new(),
                again: Vec::new(),
                retry_at: Instant::now(),
                connections: 0,
                shared: shared.clone(),
            };
            thread::spawn(move || sender.live())
        };
        let threads = users.into_iter().enumerate().map(start).collect();
        Self { shared, threads }
    }

    /// From now on this is the gateway with this number.
    pub(crate) fn follow(&self, number: usize, server: &Server) {
        lock(&self.shared.addresses)[number].clone_from(&server.address);
    }

    /// The number of messages that were acknowledged so far.
    pub(crate) fn acknowledged(&self) -> usize {
        lock(&self.shared.acknowledged).len()
    }

    /// Sends nothing new, and waits until everything is acknowledged.
    pub(crate) fn end(self) -> Sent {
        self.shared.is_sending.store(false, Ordering::Relaxed);
        let until = Instant::now() + ANSWERED_WITHIN;
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < until {
            thread::sleep(Duration::from_millis(10));
        }
        self.shared.is_over.store(true, Ordering::Relaxed);
        let left = |thread: JoinHandle<u64>| thread.join().unwrap_or(1);
        let unanswered = self.threads.into_iter().map(left).sum();
        Sent {
            acknowledged: std::mem::take(&mut *lock(&self.shared.acknowledged)),
            unanswered,
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
    user: User,
    window: usize,
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
}

impl Sender {
    /// Sends until the end. Returns the number of messages that were never acknowledged.
    fn live(&mut self) -> u64 {
        while !self.is_done() {
            // An error ends the connection, which is what a kill does.
            if self.connected().is_err() {
                self.again.extend(self.in_flight.drain().map(|(_, m)| m));
                thread::sleep(RETRY_AFTER);
            }
        }
        (self.again.len() + self.in_flight.len()) as u64
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
        let mut client = Client::connect(&address, &self.user.name, self.number)?;
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
            while self.in_flight.len() < self.window
                && let Some(message) = self.again.pop()
            {
                self.send(client, message, true)?;
            }
        }
        while self.shared.is_sending.load(Ordering::Relaxed)
            && self.due <= now
            && self.in_flight.len() < self.window
        {
            let conversations = &self.user.conversations;
            let message = Message {
                conversation: conversations[self.sent % conversations.len()],
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
        let id = frame["message_id"].as_str().and_then(|id| id.parse().ok());
        if let ("sent", Some(seq), Some(id)) = (
            frame["type"].as_str().unwrap_or_default(),
            frame["seq"].as_u64(),
            id,
        ) {
            lock(&self.shared.acknowledged).push(Acknowledged {
                conversation: message.conversation,
                seq,
                id,
                client_id: message.client_id,
            });
        } else if frame["code"] == "unavailable" {
            self.again.push(message);
        } else {
            lock(&self.shared.wrong).get_or_insert_with(|| frame.to_string());
        }
        Ok(())
    }
}
