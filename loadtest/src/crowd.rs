//! Many subscribers in one thread. It reads all their sockets and checks every message: lost, duplicated, out of order,
//! and how late.

pub(crate) mod channel;
mod fanout;
mod idle;
pub(crate) mod live;
mod peers;
mod raw;
mod slow;
mod storm;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    fmt::Write as _,
    io::Write,
    net::{Shutdown, TcpStream},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use indicatif::ProgressBar;
use memchr::memmem;
use socket2::SockRef;

use clap::Subcommand;

use crate::{
    Common,
    client::{Client, SENT, digits, history_frame, seq},
    latency::{LATENCY_US_MAX, latencies},
    replies::Replies,
    report::Report,
    sockets::{Socket, Sockets},
};

/// The scenarios of this folder.
#[derive(Subcommand)]
pub(crate) enum Scenario {
    /// Measure fan-out: one channel with many subscribers, paced and as fast as possible
    Fanout(fanout::Options),
    /// Measure what subscribers that stop reading cost the server and the other subscribers
    SlowReaders(slow::Options),
    /// Drop all clients at once and reconnect them with their cursors while messages flow
    ReconnectStorm(storm::Options),
    /// Measure idle connections: the memory and CPU of each
    Idle(idle::Options),
    /// Compare fan-out and idle connections with NATS, Socket.IO and the raw loop; installs them
    Peers(peers::Options),
    /// Run the raw epoll loop, in a separate process
    #[command(hide = true)]
    RawServer,
}

impl Scenario {
    pub(crate) fn run(&self, common: &Common) -> anyhow::Result<bool> {
        match self {
            Self::Fanout(options) => fanout::run(common, options),
            Self::SlowReaders(options) => slow::run(common, options),
            Self::ReconnectStorm(options) => storm::run(common, options),
            Self::Idle(options) => idle::run(common, options),
            Self::Peers(options) => peers::run(common, options),
            Self::RawServer => raw::serve().map(|()| true),
        }
    }
}

/// Text before the numbers in a message's body.
const MARK: &[u8] = br#""body":"n"#;
/// Beginning of the event that tells a client to read what it lacks.
const RESYNC: &[u8] = br#"{"type":"resync""#;
/// Beginning of the error for that read.
const REFUSED: &[u8] = br#"{"id":2,"type":"error""#;
/// Time until a refused client tries again.
pub(crate) const BACK_OFF: Duration = Duration::from_secs(1);
/// Beginning of the reply to that read.
const HISTORY: &[u8] = br#"{"id":2,"type":"history""#;
const CONVERSATION: &[u8] = br#""conversation":""#;

/// The messages that a subscriber has.
#[derive(Default)]
struct Has {
    /// The number of the first message that it lacks.
    next: u64,
    reading: Option<Reading>,
    /// The next seq of each conversation, if messages are counted by seq.
    places: Option<HashMap<[u8; 36], u64>>,
}

/// A subscriber was told to read what it lacks. Messages that arrive before it has read them are kept.
struct Reading {
    conversation: String,
    later: BTreeSet<u64>,
}

impl Reading {
    fn of(conversation: &str) -> Self {
        Self {
            conversation: conversation.to_owned(),
            later: BTreeSet::new(),
        }
    }
}

/// The subscribers and what they have received.
pub(crate) struct Crowd {
    subscribers: Sockets<Has>,
    /// The moment from which all times count.
    pub(crate) epoch: Instant,
    pub(crate) counts: Counts,
    /// Microseconds from due to delivered, for each server. Subscribers are connected to the servers in turn.
    pub(crate) latency: Vec<Histogram<u64>>,
    /// Latencies of replies, if they are measured.
    pub(crate) replies: Option<Replies>,
    /// Throughput and latency in each quarter of a second since the epoch.
    pub(crate) moments: Vec<Moment>,
    moment: Histogram<u64>,
    moment_began: f64,
    /// The frame of the first message.
    pub(crate) sample: Option<String>,
    /// The seq of message 0.
    first_seq: u64,
    /// Subscribers whose connection the server ended, and when.
    gone: VecDeque<(Instant, usize)>,
    /// Subscribers that must read what they lack, and when.
    to_read: VecDeque<(Instant, usize)>,
}

/// Throughput and latency in a quarter of a second.
pub(crate) struct Moment {
    /// Its end, in seconds since the epoch.
    pub(crate) at: f64,
    pub(crate) per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
}

const MOMENT_S: f64 = 0.25;
/// After this many joins the sockets are read. Without that, pings would stay unanswered and connections would be
/// closed.
const JOINED_UNREAD: usize = 16;

/// Counts of all subscribers together.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Counts {
    pub(crate) delivered: u64,
    pub(crate) doubled: u64,
    /// Messages that came after a later one, or never.
    pub(crate) gaps: u64,
    pub(crate) closed: u64,
    /// `resync` events. A client then reads one page.
    pub(crate) resyncs: u64,
    /// Acknowledgements of the subscribers' own messages.
    pub(crate) acknowledged: u64,
}

/// The body of message `number`, which is due at `at`. It has `size` bytes.
pub(crate) fn body(number: u64, at: Duration, size: usize) -> String {
    let mut body = String::with_capacity(size);
    // Writing to a string cannot fail.
    let _ = write!(body, "n{number:012}t{:016}.", at.as_micros());
    body.push_str(&"x".repeat(size.saturating_sub(body.len())));
    body
}

impl Crowd {
    /// An empty crowd for this many servers.
    pub(crate) fn new(servers: usize) -> anyhow::Result<Self> {
        Ok(Self {
            subscribers: Sockets::new()?,
            epoch: Instant::now(),
            counts: Counts::default(),
            latency: vec![latencies()?; servers],
            replies: None,
            moments: Vec::new(),
            moment: Histogram::new_with_max(LATENCY_US_MAX, 2)?,
            moment_began: 0.0,
            sample: None,
            first_seq: 0,
            gone: VecDeque::new(),
            to_read: VecDeque::new(),
        })
    }

    /// Adds a connected subscriber.
    pub(crate) fn join(&mut self, stream: TcpStream) -> anyhow::Result<()> {
        self.subscribers.join(stream, Has::default())?;
        if self.len().is_multiple_of(JOINED_UNREAD) {
            self.read(Duration::ZERO)?;
        }
        Ok(())
    }

    /// Adds this many connections, one after the other.
    pub(crate) fn connect(
        &mut self,
        count: usize,
        connect: impl Fn(usize) -> anyhow::Result<Client>,
    ) -> anyhow::Result<()> {
        let connecting = ProgressBar::new(count as u64);
        for number in 0..count {
            self.join(connect(number)?.into_stream())?;
            connecting.inc(1);
        }
        connecting.finish_and_clear();
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.subscribers.all.len()
    }

    /// Reads what arrives within `wait`, and makes the requests that are due.
    pub(crate) fn read(&mut self, wait: Duration) -> anyhow::Result<()> {
        self.ask_for_missing();
        let mut seen = Seen {
            now_us: 0,
            counts: &mut self.counts,
            latency: &mut self.latency,
            replies: &mut self.replies,
            moment: &mut self.moment,
            sample: &mut self.sample,
            first_seq: &mut self.first_seq,
            to_read: &mut self.to_read,
        };
        let epoch = self.epoch;
        let ended = self.subscribers.read(wait, |now, number, has, text| {
            seen.now_us = (now - epoch).as_micros() as u64;
            seen.take(number, has, text);
            None
        })?;
        for number in ended {
            self.counts.closed += 1;
            self.gone.push_back((Instant::now(), number));
        }
        self.end_moment();
        Ok(())
    }

    /// Sends the reads that are due.
    fn ask_for_missing(&mut self) {
        while let Some(&(at, number)) = self.to_read.front()
            && at <= Instant::now()
        {
            self.to_read.pop_front();
            let after = self.cursor(number);
            let Socket { stream, state, .. } = &mut self.subscribers.all[number];
            if let Some(Reading { conversation, .. }) = &state.reading {
                // A failed write means that the connection ended, which the next read reports.
                let _ = stream.write(&history_frame(conversation, after));
            }
        }
    }

    /// Counts messages by their seq in each conversation, instead of by their numbers.
    pub(crate) fn by_conversation(mut self) -> Self {
        for subscriber in &mut self.subscribers.all {
            subscriber.state.places = Some(HashMap::new());
        }
        self
    }

    /// Sets the kernel's receive buffer of the last `count` subscribers.
    pub(crate) fn shrink_buffers(&self, count: usize, bytes: usize) -> anyhow::Result<()> {
        for subscriber in &self.subscribers.all[self.len() - count..] {
            SockRef::from(&subscriber.stream).set_recv_buffer_size(bytes)?;
        }
        Ok(())
    }

    /// Sends a frame as subscriber `number`.
    pub(crate) fn send(&mut self, number: usize, frame: &[u8]) -> anyhow::Result<()> {
        Ok(self.subscribers.all[number].stream.write_all(frame)?)
    }

    /// Sends a request as subscriber `number`. The latency of the reply with this id counts from `due`.
    pub(crate) fn ask(
        &mut self,
        number: usize,
        id: u32,
        due: Duration,
        frame: &[u8],
    ) -> anyhow::Result<()> {
        if let Some(replies) = &mut self.replies {
            replies.expect(id, due);
        }
        self.send(number, frame)
    }

    /// Removes the last `count` subscribers and their counts. Returns their sockets, which nobody reads.
    pub(crate) fn stop_reading(&mut self, count: usize) -> Vec<TcpStream> {
        let begin = self.len() - count;
        (begin..self.len()).for_each(|number| self.subscribers.leave(number));
        let stopped = self.subscribers.all.drain(begin..);
        stopped
            .map(|subscriber| {
                self.counts.delivered -= subscriber.state.next;
                TcpStream::from(subscriber.stream)
            })
            .collect()
    }

    /// Ends all connections without a close frame. The subscribers keep their counts.
    pub(crate) fn drop_all(&mut self) {
        for number in 0..self.len() {
            self.subscribers.leave(number);
            let _ = self.subscribers.all[number].stream.shutdown(Shutdown::Both);
        }
    }

    /// Takes a subscriber whose connection ended at least `ago` ago. That end no longer counts as closed.
    pub(crate) fn gone(&mut self, ago: Duration) -> Option<usize> {
        let &(at, number) = self.gone.front()?;
        (at.elapsed() >= ago).then(|| {
            self.gone.pop_front();
            self.counts.closed -= 1;
            number
        })
    }

    /// The seq of the newest message that subscriber `number` has.
    pub(crate) fn cursor(&self, number: usize) -> u64 {
        (self.first_seq + self.subscribers.all[number].state.next).saturating_sub(1)
    }

    /// Gives subscriber `number` a new connection. It continues where it was.
    pub(crate) fn come_back(&mut self, number: usize, stream: TcpStream) -> anyhow::Result<()> {
        self.subscribers.all[number].state.reading = None;
        self.subscribers.replace(number, stream)
    }

    /// Describes who lacks messages: the number of subscribers at each server that have the same number of messages. At
    /// most `TOLD_MAX` cases.
    pub(crate) fn lacking(&self, sent: u64) -> Vec<String> {
        const TOLD_MAX: usize = 10;
        let mut cases: BTreeMap<(usize, u64), usize> = BTreeMap::new();
        for (number, subscriber) in self.subscribers.all.iter().enumerate() {
            if subscriber.state.next < sent {
                let case = (number % self.latency.len(), subscriber.state.next);
                *cases.entry(case).or_default() += 1;
            }
        }
        let told = cases.into_iter().take(TOLD_MAX);
        told.map(|((server, next), count)| {
            format!(
                "{count} subscribers at server {} have {next} of {sent} messages",
                server + 1
            )
        })
        .collect()
    }

    /// Forgets the latencies so far.
    pub(crate) fn forget_latency(&mut self) {
        self.latency.iter_mut().for_each(Histogram::reset);
    }

    /// Reports the latency of each server.
    pub(crate) fn tell_latency(&self, report: &mut Report, name: &str) {
        for (server, latency) in (1..).zip(&self.latency) {
            if self.latency.len() > 1 {
                report.latency(&format!("{name} at {server}"), latency);
            } else {
                report.latency(name, latency);
            }
        }
    }

    /// Adds throughput and latency over time to the report.
    pub(crate) fn draw(&self, report: &mut Report, name: &str) {
        let line =
            |value: fn(&Moment) -> f64| self.moments.iter().map(|m| (m.at, value(m))).collect();
        report.over_time("deliveries per second", "/s", name, line(|m| m.per_second));
        report.over_time("latency p50 over time", "ms", name, line(|m| m.p50_ms));
        report.over_time("latency p99 over time", "ms", name, line(|m| m.p99_ms));
    }

    /// Begins a new moment, so that the time since the last read is not drawn.
    pub(crate) fn look_again(&mut self) {
        self.moment_began = self.epoch.elapsed().as_secs_f64();
        self.moment.reset();
    }

    fn end_moment(&mut self) {
        let now = self.epoch.elapsed().as_secs_f64();
        let length = now - self.moment_began;
        if length < MOMENT_S {
            return;
        }
        self.moment_began = now;
        if self.sample.is_none() {
            return;
        }
        let ms = |quantile| self.moment.value_at_quantile(quantile) as f64 / 1000.0;
        let (p50_ms, p99_ms) = (ms(0.5), ms(0.99));
        self.moments.push(Moment {
            at: now,
            per_second: self.moment.len() as f64 / length,
            p50_ms,
            p99_ms,
        });
        self.moment.reset();
    }
}

/// The counts of a crowd while it reads.
struct Seen<'a> {
    now_us: u64,
    counts: &'a mut Counts,
    latency: &'a mut [Histogram<u64>],
    replies: &'a mut Option<Replies>,
    moment: &'a mut Histogram<u64>,
    sample: &'a mut Option<String>,
    first_seq: &'a mut u64,
    to_read: &'a mut VecDeque<(Instant, usize)>,
}

impl Seen<'_> {
    /// Handles a frame for subscriber `number`.
    fn take(&mut self, number: usize, has: &mut Has, text: &[u8]) {
        if text.starts_with(RESYNC) {
            self.counts.resyncs += 1;
            has.reading.get_or_insert_with(|| {
                self.to_read.push_back((Instant::now(), number));
                Reading::of(conversation(text).unwrap_or_default())
            });
        } else if text.starts_with(REFUSED) {
            let later = Instant::now() + BACK_OFF;
            self.to_read.push_back((later, number));
        } else if text.starts_with(HISTORY) {
            let later = has.reading.take().map(|r| r.later).unwrap_or_default();
            for number in numbers(text).map(|(number, _)| number).chain(later) {
                if number >= has.next {
                    self.counts.note(&mut has.next, number);
                }
            }
        } else {
            self.messages(number, has, text);
        }
    }

    /// Counts the messages of a frame. Some servers put several into one.
    fn messages(&mut self, subscriber: usize, has: &mut Has, text: &[u8]) {
        let server = subscriber % self.latency.len();
        let mut messages = numbers(text).peekable();
        if has.places.is_some() && messages.peek().is_none() {
            self.counts.acknowledged += u64::from(memmem::find(text, SENT).is_some());
            if let Some(replies) = self.replies {
                replies.note(text, self.now_us);
            }
        }
        for (number, at_us) in messages {
            match (&mut has.places, &mut has.reading) {
                (None, None) => self.counts.note(&mut has.next, number),
                (None, Some(reading)) => drop(reading.later.insert(number)),
                (Some(places), _) => self.counts.note_place(places, text),
            }
            let late = self.now_us.saturating_sub(at_us).clamp(1, LATENCY_US_MAX);
            self.latency[server].saturating_record(late);
            self.moment.saturating_record(late);
            if self.sample.is_none() {
                *self.sample = Some(String::from_utf8_lossy(text).into_owned());
                *self.first_seq = seq(text).unwrap_or_default().saturating_sub(number);
            }
        }
    }
}

impl Counts {
    /// Counts a message by its seq in its conversation. The first message of a conversation may have any seq.
    fn note_place(&mut self, places: &mut HashMap<[u8; 36], u64>, frame: &[u8]) {
        if let (Some(conversation), Some(seq)) = (conversation(frame), seq(frame))
            && let Some(conversation) = conversation.as_bytes().first_chunk()
        {
            self.note(places.entry(*conversation).or_insert(seq), seq);
        }
    }

    fn note(&mut self, next: &mut u64, number: u64) {
        if number < *next {
            self.doubled += 1;
        } else {
            self.delivered += 1;
            self.gaps += number - *next;
            *next = number + 1;
        }
    }

    pub(crate) fn lost(&self, expected: u64) -> u64 {
        expected.saturating_sub(self.delivered)
    }
}

/// The conversation of a frame.
fn conversation(frame: &[u8]) -> Option<&str> {
    let begin = memmem::find(frame, CONVERSATION)? + CONVERSATION.len();
    std::str::from_utf8(frame.get(begin..begin + 36)?).ok()
}

/// The numbers and due times, in microseconds, that `body` put into the messages of a frame.
fn numbers(frame: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let rest = &frame[from..];
        let at = memmem::find(rest, MARK)? + MARK.len();
        let number = digits(rest.get(at..at + 12)?)?;
        let due = digits(rest.get(at + 13..at + 29)?)?;
        from += at + 29;
        Some((number, due))
    })
}
