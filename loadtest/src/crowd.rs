//! Many subscribers in one thread: reads all their sockets, and counts what comes one by one: lost, doubled,
//! out of order, and how late.

use std::{
    collections::HashMap,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use memchr::memmem;
use mio::{Events, Interest, Poll, Token};

use crate::{
    client::{Frame, Frames, pong_frame},
    report::Report,
};

/// Before the numbers in a message's body.
const MARK: &[u8] = br#""body":"n"#;
/// In the reply that says that a message is stored.
const SENT: &[u8] = br#""type":"sent""#;
/// Latencies past this are counted as this.
const LATENCY_US_MAX: u64 = 60_000_000;

/// A histogram of microseconds.
pub(crate) fn latencies() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new_with_max(LATENCY_US_MAX, 3)?)
}

struct Subscriber {
    stream: mio::net::TcpStream,
    frames: Frames,
    next: u64,
    /// Of each conversation, where they are counted by their seq.
    places: Option<HashMap<[u8; 36], u64>>,
}

pub(crate) struct Crowd {
    poll: Poll,
    events: Events,
    buffer: Vec<u8>,
    subscribers: Vec<Subscriber>,
    epoch: Instant,
    pub(crate) counts: Counts,
    /// From the moment a message should have been sent to its arrival, in microseconds; by the server that the
    /// subscriber is connected to: the first one to the first, and so on in turn.
    pub(crate) latency: Vec<Histogram<u64>>,
    /// The same a quarter of a second at a time, since the epoch.
    pub(crate) moments: Vec<Moment>,
    moment: Histogram<u64>,
    /// The first message's frame, as a sample.
    pub(crate) sample: Option<String>,
}

pub(crate) struct Moment {
    /// Its end, in seconds.
    pub(crate) at: f64,
    pub(crate) per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
}

const MOMENT_S: f64 = 0.25;

#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Counts {
    pub(crate) delivered: u64,
    pub(crate) doubled: u64,
    /// A later one came before an earlier one, or the earlier one never came.
    pub(crate) gaps: u64,
    pub(crate) closed: u64,
    /// Own messages, as stored.
    pub(crate) acknowledged: u64,
}

/// The body of message `number`, of `size` bytes, which should be sent at `at`.
pub(crate) fn body(number: u64, at: Duration, size: usize) -> String {
    let mut body = format!("n{number:012}t{:016}.", at.as_micros());
    while body.len() < size {
        body.push('x');
    }
    body
}

impl Crowd {
    /// # Errors
    /// When the sockets cannot be watched.
    pub(crate) fn new(
        streams: Vec<TcpStream>,
        servers: usize,
        epoch: Instant,
    ) -> anyhow::Result<Self> {
        let poll = Poll::new()?;
        let mut subscribers = Vec::with_capacity(streams.len());
        for (index, stream) in streams.into_iter().enumerate() {
            stream.set_nonblocking(true)?;
            let mut stream = mio::net::TcpStream::from_std(stream);
            poll.registry()
                .register(&mut stream, Token(index), Interest::READABLE)?;
            subscribers.push(Subscriber {
                stream,
                frames: Frames::default(),
                next: 0,
                places: None,
            });
        }
        Ok(Self {
            poll,
            events: Events::with_capacity(1024),
            buffer: vec![0; 256 << 10],
            subscribers,
            epoch,
            counts: Counts::default(),
            latency: vec![latencies()?; servers],
            moments: Vec::new(),
            moment: Histogram::new_with_max(LATENCY_US_MAX, 2)?,
            sample: None,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.subscribers.len()
    }

    /// Reads whatever comes within `wait`.
    pub(crate) fn read(&mut self, wait: Duration) -> anyhow::Result<()> {
        self.poll.poll(&mut self.events, Some(wait)).or_else(|e| {
            if e.kind() == ErrorKind::Interrupted {
                Ok(())
            } else {
                Err(e)
            }
        })?;
        let Self {
            events,
            buffer,
            subscribers,
            epoch,
            counts,
            latency,
            moment,
            sample,
            ..
        } = self;
        for event in events.iter() {
            let Subscriber {
                stream,
                frames,
                next,
                places,
            } = &mut subscribers[event.token().0];
            let server = event.token().0 % latency.len();
            let now_us = epoch.elapsed().as_micros() as u64;
            loop {
                match stream.read(buffer) {
                    Ok(0) => {
                        counts.closed += 1;
                        break;
                    }
                    Ok(count) => {
                        let mut pings = 0;
                        frames.feed(&buffer[..count], |frame| match frame {
                            Frame::Content(text) => {
                                // Some servers put several messages into one frame.
                                let mut events = numbers(text).peekable();
                                if places.is_some() && events.peek().is_none() {
                                    counts.acknowledged +=
                                        u64::from(memmem::find(text, SENT).is_some());
                                }
                                for (number, at_us) in events {
                                    match places {
                                        None => counts.note(next, number),
                                        Some(places) => counts.note_place(places, text),
                                    }
                                    let late =
                                        now_us.saturating_sub(at_us).clamp(1, LATENCY_US_MAX);
                                    latency[server].saturating_record(late);
                                    moment.saturating_record(late);
                                    if sample.is_none() {
                                        *sample = Some(String::from_utf8_lossy(text).into_owned());
                                    }
                                }
                            }
                            Frame::Ping => pings += 1,
                            Frame::Close(_) | Frame::Other => {}
                        });
                        for _ in 0..pings {
                            // A tiny frame on a socket that is read: there is room for it.
                            let _ = stream.write(pong_frame());
                        }
                        if count < buffer.len() {
                            break;
                        }
                    }
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(_) => {
                        counts.closed += 1;
                        break;
                    }
                }
            }
        }
        self.end_moment();
        Ok(())
    }

    /// Messages are counted by their seq, in many conversations.
    pub(crate) fn by_conversation(mut self) -> Self {
        for subscriber in &mut self.subscribers {
            subscriber.places = Some(HashMap::new());
        }
        self
    }

    /// Says something as one of them.
    pub(crate) fn send(&mut self, number: usize, frame: &[u8]) -> anyhow::Result<()> {
        Ok(self.subscribers[number].stream.write_all(frame)?)
    }

    /// The last so many subscribers do not read any more. They count no longer.
    pub(crate) fn stop_reading(&mut self, count: usize) -> anyhow::Result<Vec<TcpStream>> {
        let mut stopped = Vec::new();
        for mut subscriber in self.subscribers.drain(self.subscribers.len() - count..) {
            self.poll.registry().deregister(&mut subscriber.stream)?;
            self.counts.delivered -= subscriber.next;
            stopped.push(TcpStream::from(subscriber.stream));
        }
        Ok(stopped)
    }

    /// All connections end, without a word. Their places stay.
    pub(crate) fn drop_all(&mut self) {
        for subscriber in &mut self.subscribers {
            let _ = self.poll.registry().deregister(&mut subscriber.stream);
            let _ = subscriber.stream.shutdown(Shutdown::Both);
        }
    }

    /// A dropped one is here again, and goes on where it was.
    pub(crate) fn come_back(&mut self, number: usize, stream: TcpStream) -> anyhow::Result<()> {
        stream.set_nonblocking(true)?;
        let subscriber = &mut self.subscribers[number];
        subscriber.stream = mio::net::TcpStream::from_std(stream);
        subscriber.frames = Frames::default();
        let registry = self.poll.registry();
        registry.register(&mut subscriber.stream, Token(number), Interest::READABLE)?;
        Ok(())
    }

    /// What was measured so far does not count.
    pub(crate) fn forget_latency(&mut self) {
        self.latency.iter_mut().for_each(Histogram::reset);
    }

    /// Of each server, if there are several.
    pub(crate) fn tell_latency(&self, report: &mut Report, name: &str) {
        for (server, latency) in (1..).zip(&self.latency) {
            if self.latency.len() > 1 {
                report.latency(&format!("{name} at {server}"), latency);
            } else {
                report.latency(name, latency);
            }
        }
    }

    /// Draws how it went.
    pub(crate) fn draw(&self, report: &mut Report, name: &str) {
        let line =
            |value: fn(&Moment) -> f64| self.moments.iter().map(|m| (m.at, value(m))).collect();
        report.over_time("deliveries per second", "/s", name, line(|m| m.per_second));
        report.over_time("latency p50 over time", "ms", name, line(|m| m.p50_ms));
        report.over_time("latency p99 over time", "ms", name, line(|m| m.p99_ms));
    }

    fn end_moment(&mut self) {
        let now = self.epoch.elapsed().as_secs_f64();
        let length = now - self.moments.last().map_or(0.0, |moment| moment.at);
        if length < MOMENT_S {
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

impl Counts {
    /// By its seq within its conversation. The first one that is seen may have any.
    fn note_place(&mut self, places: &mut HashMap<[u8; 36], u64>, frame: &[u8]) {
        let after = |mark: &[u8]| memmem::find(frame, mark).map(|at| &frame[at + mark.len()..]);
        let conversation = after(b"\"conversation\":\"").and_then(|rest| rest.first_chunk());
        let seq = after(b"\"seq\":").and_then(|rest| {
            let end = rest.iter().position(|b| !b.is_ascii_digit())?;
            digits(&rest[..end])
        });
        if let (Some(conversation), Some(seq)) = (conversation, seq) {
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

/// The numbers and the due times that `body` put into messages.
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

fn digits(bytes: &[u8]) -> Option<u64> {
    bytes.iter().try_fold(0, |n, b| {
        b.is_ascii_digit().then(|| n * 10 + u64::from(b - b'0'))
    })
}
