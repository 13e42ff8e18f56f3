//! Users who react over HTTP, through a back end that acts for them. Each reaction is sent when it is due, even if the
//! gateway is late, and its latency counts from then.

use std::{
    collections::VecDeque,
    fmt::Write as _,
    io::{ErrorKind, Read as _, Write as _},
    net::SocketAddr,
    ops::Range,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use hdrhistogram::Histogram;
use memchr::memmem;
use mio::{Events, Interest, Poll, Token, net::TcpStream};

use crate::{
    client::digits,
    latency::{LATENCY_US_MAX, latencies},
    server::{Server, service_token},
    store::celebrity::fan,
};

/// The emoji of the reactions.
pub(super) const EMOJI: [&str; 6] = ["👍", "❤️", "😂", "😮", "😢", "🙏"];
/// Connections of the back end, each with one request in progress.
const CONNECTIONS: usize = 128;
/// One reaction in this many is requested twice, as by a client that retries. The second time changes nothing.
const REPEAT_EVERY: u64 = 50;
/// Time without an answer after which no more is expected.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest wait for an event.
const WAIT_MAX: Duration = Duration::from_millis(5);
/// Bytes of the longest response.
const RESPONSE_MAX: usize = 64 << 10;

const HEAD_END: &[u8] = b"\r\n\r\n";
const LENGTH: &[u8] = b"content-length: ";
const REV: &[u8] = br#""rev":"#;

/// The message that gets reactions, and the users who react.
pub(super) struct Plan {
    addresses: Vec<SocketAddr>,
    token: String,
    pub(super) conversation: String,
    pub(super) seq: u64,
    /// Users who may react, numbered as by `fan`.
    users: u64,
}

impl Plan {
    pub(super) fn new(
        servers: &[Server],
        conversation: String,
        seq: u64,
        users: usize,
    ) -> anyhow::Result<Self> {
        let addresses = servers.iter().map(|server| server.address.parse());
        Ok(Self {
            addresses: addresses.collect::<Result<_, _>>()?,
            token: service_token("messages:write")?,
            conversation,
            seq,
            users: users as u64,
        })
    }

    /// The maximum number of different reactions.
    pub(super) fn capacity(&self) -> u64 {
        self.users * EMOJI.len() as u64
    }

    pub(super) fn users(&self) -> u64 {
        self.users
    }

    /// The user and the emoji of reaction `number`. No two reactions have the same ones.
    pub(super) fn reaction(&self, number: u64) -> (String, &'static str) {
        let (user, turn) = (number % self.users, number / self.users);
        let emoji = (user + turn) % EMOJI.len() as u64;
        (fan(user as usize), EMOJI[emoji as usize])
    }

    fn request(&self, number: u64) -> Vec<u8> {
        let (user, emoji) = self.reaction(number);
        let Self {
            conversation,
            seq,
            token,
            ..
        } = self;
        let mut text = format!("PUT /v1/conversations/{conversation}/messages/{seq}/reactions/");
        for byte in emoji.bytes() {
            // Writing to a string cannot fail.
            let _ = write!(text, "%{byte:02X}");
        }
        let _ = write!(
            text,
            " HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\nchat-user: {user}\r\n\
             content-length: 0\r\n\r\n"
        );
        text.into_bytes()
    }
}

/// The answers to a piece's reactions.
pub(super) struct Answers {
    /// Reactions that were acknowledged.
    pub(super) acknowledged: u64,
    /// Numbers of the reactions that were refused.
    pub(super) refused: Vec<u64>,
    /// The first refusal.
    pub(super) refusal: Option<String>,
    /// The highest rev of an acknowledgement.
    pub(super) rev: u64,
    /// Microseconds from due to acknowledged.
    pub(super) latency: Histogram<u64>,
    /// Time from the first reaction to the last answer.
    pub(super) time: Duration,
}

/// A thread that sends a piece's reactions.
pub(super) struct Reactors {
    thread: JoinHandle<anyhow::Result<Answers>>,
}

impl Reactors {
    /// Connects, and sends the reactions with these numbers at a rate.
    pub(super) fn start(plan: Arc<Plan>, numbers: Range<u64>, rate: f64) -> anyhow::Result<Self> {
        let backend = Backend::connect(plan, numbers, rate)?;
        let thread = thread::spawn(move || backend.run());
        Ok(Self { thread })
    }

    pub(super) fn are_done(&self) -> bool {
        self.thread.is_finished()
    }

    pub(super) fn finish(self) -> anyhow::Result<Answers> {
        let joined = self.thread.join();
        joined.map_err(|_| anyhow!("the thread that reacts panicked"))?
    }
}

struct Connection {
    stream: TcpStream,
    received: Vec<u8>,
    asked: Option<Asked>,
}

/// A request in progress.
struct Asked {
    number: u64,
    due: Duration,
    /// Whether it repeats a request that was acknowledged.
    again: bool,
}

/// The back end's connections, and the reactions to send.
struct Backend {
    plan: Arc<Plan>,
    first: u64,
    count: u64,
    /// Time between two reactions.
    each: Duration,
    poll: Poll,
    connections: Vec<Connection>,
    /// Connections without a request in progress. They take turns: the gateway closes one that is idle for long.
    idle: VecDeque<usize>,
    begun: u64,
    begin: Instant,
    last_answer: Instant,
    answers: Answers,
}

impl Backend {
    fn connect(plan: Arc<Plan>, numbers: Range<u64>, rate: f64) -> anyhow::Result<Self> {
        let poll = Poll::new()?;
        let mut connections = Vec::new();
        for number in 0..CONNECTIONS {
            let address = plan.addresses[number % plan.addresses.len()];
            let stream = std::net::TcpStream::connect_timeout(&address, PATIENCE)?;
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            let mut stream = TcpStream::from_std(stream);
            let registry = poll.registry();
            registry.register(&mut stream, Token(number), Interest::READABLE)?;
            connections.push(Connection {
                stream,
                received: Vec::new(),
                asked: None,
            });
        }
        let now = Instant::now();
        Ok(Self {
            plan,
            first: numbers.start,
            count: numbers.end - numbers.start,
            each: Duration::from_secs_f64(1.0 / rate),
            poll,
            idle: (0..connections.len()).collect(),
            connections,
            begun: 0,
            begin: now,
            last_answer: now,
            answers: Answers {
                acknowledged: 0,
                refused: Vec::new(),
                refusal: None,
                rev: 0,
                latency: latencies()?,
                time: Duration::ZERO,
            },
        })
    }

    fn run(mut self) -> anyhow::Result<Answers> {
        let mut events = Events::with_capacity(CONNECTIONS);
        let mut buffer = vec![0; RESPONSE_MAX];
        self.begin = Instant::now();
        self.last_answer = self.begin;
        while self.begun < self.count || self.idle.len() < self.connections.len() {
            self.ask_due()?;
            let next = self.due(self.begun).saturating_sub(self.begin.elapsed());
            let polled = self.poll.poll(&mut events, Some(next.min(WAIT_MAX)));
            polled.or_else(|e| match e.kind() {
                ErrorKind::Interrupted => Ok(()),
                _ => Err(e),
            })?;
            for event in &events {
                self.read(event.token().0, &mut buffer)?;
            }
            ensure!(
                self.last_answer.elapsed() < PATIENCE,
                "the gateway has answered {} of {} reactions, and none for {} s",
                self.answers.acknowledged,
                self.begun,
                PATIENCE.as_secs()
            );
        }
        self.answers.time = self.begin.elapsed();
        Ok(self.answers)
    }

    /// When the reaction at this place is due, since the begin.
    fn due(&self, place: u64) -> Duration {
        Duration::from_secs_f64(self.each.as_secs_f64() * place as f64)
    }

    /// Sends the reactions that are due, as far as there are connections.
    fn ask_due(&mut self) -> anyhow::Result<()> {
        while self.begun < self.count
            && self.due(self.begun) <= self.begin.elapsed()
            && let Some(connection) = self.idle.pop_front()
        {
            if self.idle.len() + 1 == self.connections.len() {
                // Nothing was in progress before, so nothing was answered.
                self.last_answer = Instant::now();
            }
            let asked = Asked {
                number: self.first + self.begun,
                due: self.due(self.begun),
                again: false,
            };
            self.begun += 1;
            self.ask(connection, asked)?;
        }
        Ok(())
    }

    fn ask(&mut self, connection: usize, asked: Asked) -> anyhow::Result<()> {
        let connection = &mut self.connections[connection];
        // The socket's buffer has room for the only request in progress.
        let request = self.plan.request(asked.number);
        connection.stream.write_all(&request)?;
        connection.asked = Some(asked);
        Ok(())
    }

    fn read(&mut self, number: usize, buffer: &mut [u8]) -> anyhow::Result<()> {
        loop {
            let connection = &mut self.connections[number];
            match connection.stream.read(buffer) {
                Ok(0) => bail!("the gateway closed a connection of the back end"),
                Ok(count) => connection.received.extend_from_slice(&buffer[..count]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
            let connection = &mut self.connections[number];
            ensure!(
                connection.received.len() <= RESPONSE_MAX,
                "a response is too long"
            );
            if let Some((status, body)) = response(&connection.received)? {
                let body = body.to_vec();
                connection.received.clear();
                let asked = connection.asked.take().context("an answer to no request")?;
                self.answered(number, asked, status, &body)?;
            }
        }
    }

    fn answered(
        &mut self,
        connection: usize,
        asked: Asked,
        status: u64,
        body: &[u8],
    ) -> anyhow::Result<()> {
        self.last_answer = Instant::now();
        let late = self.begin.elapsed().saturating_sub(asked.due);
        let answers = &mut self.answers;
        match rev(body).filter(|_| status == 200) {
            Some(rev) => answers.rev = answers.rev.max(rev),
            None => {
                answers.refused.push(asked.number);
                answers
                    .refusal
                    .get_or_insert_with(|| format!("{status} {}", String::from_utf8_lossy(body)));
                self.idle.push_back(connection);
                return Ok(());
            }
        }
        if asked.again {
            self.idle.push_back(connection);
            return Ok(());
        }
        answers.acknowledged += 1;
        let late_us = (late.as_micros() as u64).clamp(1, LATENCY_US_MAX);
        answers.latency.saturating_record(late_us);
        if asked.number.is_multiple_of(REPEAT_EVERY) {
            let again = Asked {
                again: true,
                ..asked
            };
            return self.ask(connection, again);
        }
        self.idle.push_back(connection);
        Ok(())
    }
}

/// The status and the body of a response, once it is complete.
fn response(received: &[u8]) -> anyhow::Result<Option<(u64, &[u8])>> {
    let Some(end) = memmem::find(received, HEAD_END) else {
        return Ok(None);
    };
    let head = &received[..end];
    let status = head.get(9..12).and_then(digits);
    let status = status.context("a response has no status")?;
    let length = number_after(head, LENGTH).context("a response has no content-length")?;
    let body = received.get(end + HEAD_END.len()..).unwrap_or_default();
    Ok((body.len() as u64 >= length).then_some((status, body)))
}

fn rev(body: &[u8]) -> Option<u64> {
    number_after(body, REV)
}

/// The number after this text.
fn number_after(text: &[u8], name: &[u8]) -> Option<u64> {
    let rest = &text[memmem::find(text, name)? + name.len()..];
    let end = rest
        .iter()
        .position(|b| !b.is_ascii_digit())
        .unwrap_or(rest.len());
    digits(&rest[..end]).filter(|_| end > 0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_reactions_are_the_same() {
        let plan = Plan {
            addresses: Vec::new(),
            token: String::new(),
            conversation: String::new(),
            seq: 1,
            users: 7,
        };
        let all: HashSet<_> = (0..plan.capacity()).map(|n| plan.reaction(n)).collect();
        assert_eq!(all.len() as u64, plan.capacity());
        let request = String::from_utf8(plan.request(0)).unwrap();
        assert!(request.contains("/reactions/%F0%9F%91%8D HTTP/1.1"));
        assert!(request.contains("chat-user: fan-000000\r\n"));
    }

    #[test]
    fn a_response_is_read_when_it_is_complete() {
        let whole = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{\"rev\":17}";
        for end in 0..whole.len() {
            assert!(response(&whole[..end]).unwrap().is_none());
        }
        let (status, body) = response(whole).unwrap().unwrap();
        assert_eq!((status, rev(body)), (200, Some(17)));
        assert_eq!(rev(b"{}"), None);
        assert_eq!(rev(br#"{"rev":}"#), None);
    }
}
