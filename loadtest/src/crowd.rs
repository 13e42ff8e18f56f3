//! Many subscribers in one thread: reads all their sockets, and counts what comes one by one: lost, doubled,
//! out of order, and how late.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use mio::{Events, Interest, Poll, Token};

use crate::client::{Frame, Frames, pong_frame};

/// Before the numbers in a message's body.
const MARK: &[u8] = br#""body":"n"#;
/// Latencies past this are counted as this.
const LATENCY_US_MAX: u64 = 60_000_000;

struct Subscriber {
    stream: mio::net::TcpStream,
    frames: Frames,
    next: u64,
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
    /// The first message's frame, as a sample.
    pub(crate) sample: Option<String>,
}

#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Counts {
    pub(crate) delivered: u64,
    pub(crate) doubled: u64,
    /// A later one came before an earlier one, or the earlier one never came.
    pub(crate) gaps: u64,
    pub(crate) closed: u64,
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
            });
        }
        Ok(Self {
            poll,
            events: Events::with_capacity(1024),
            buffer: vec![0; 256 << 10],
            subscribers,
            epoch,
            counts: Counts::default(),
            latency: vec![Histogram::new_with_max(LATENCY_US_MAX, 3)?; servers],
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
            sample,
            ..
        } = self;
        for event in events.iter() {
            let Subscriber {
                stream,
                frames,
                next,
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
                            Frame::Text(text) => {
                                if let Some((number, at_us)) = numbers(text) {
                                    counts.note(next, number);
                                    let late =
                                        now_us.saturating_sub(at_us).clamp(1, LATENCY_US_MAX);
                                    latency[server].saturating_record(late);
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
        Ok(())
    }
}

impl Counts {
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

/// The number and the due time that `body` put into a message.
fn numbers(frame: &[u8]) -> Option<(u64, u64)> {
    let at = frame.windows(MARK.len()).position(|w| w == MARK)? + MARK.len();
    let number = digits(frame.get(at..at + 12)?)?;
    let due = digits(frame.get(at + 13..at + 29)?)?;
    Some((number, due))
}

fn digits(bytes: &[u8]) -> Option<u64> {
    bytes.iter().try_fold(0, |n, b| {
        b.is_ascii_digit().then(|| n * 10 + u64::from(b - b'0'))
    })
}
