//! Publishes numbered messages to a crowd, paced or saturated, and checks that all are acknowledged and delivered.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use anyhow::bail;
use indicatif::ProgressBar;

use crate::{
    client::{Frame, Frames, is_reply},
    crowd::{Counts, Crowd, body},
    report::Report,
};

/// Time without a new delivery after which no more is expected.
const QUIET: Duration = Duration::from_secs(5);

/// Waits until all `sent` messages have arrived everywhere, or nothing has arrived for `QUIET`.
pub(crate) fn settle(crowd: &mut Crowd, sent: u64) -> anyhow::Result<()> {
    settle_while(crowd, sent, QUIET, |_| Ok(false))
}

/// Like `settle`, with another quiet time, and calls `meanwhile` again and again. Its `true` counts like a delivery.
pub(crate) fn settle_while(
    crowd: &mut Crowd,
    sent: u64,
    quiet: Duration,
    mut meanwhile: impl FnMut(&mut Crowd) -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let mut last = (Instant::now(), crowd.counts.delivered);
    while crowd.counts.delivered < sent * crowd.len() as u64 && last.0.elapsed() < quiet {
        crowd.read(Duration::from_millis(2))?;
        if meanwhile(crowd)? || crowd.counts.delivered > last.1 {
            last = (Instant::now(), crowd.counts.delivered);
        }
    }
    Ok(())
}

type Compose<'a> = Box<dyn Fn(&str) -> Vec<u8> + 'a>;

/// Publishes numbered messages to a crowd.
pub(crate) struct Source<'a> {
    publisher: Publisher,
    /// The frame that publishes a body.
    compose: Compose<'a>,
    /// Bytes of a body.
    size: usize,
    /// The number of the next message.
    pub(crate) number: u64,
    epoch: Instant,
}

impl<'a> Source<'a> {
    pub(crate) fn new(
        publisher: TcpStream,
        acknowledged: bool,
        compose: impl Fn(&str) -> Vec<u8> + 'a,
        size: usize,
        epoch: Instant,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            publisher: Publisher::new(publisher, acknowledged)?,
            compose: Box::new(compose),
            size,
            number: 0,
            epoch,
        })
    }

    /// Publishes a message.
    pub(crate) fn publish(&mut self, due: Duration) -> anyhow::Result<()> {
        let frame = (self.compose)(&body(self.number, due, self.size));
        self.number += 1;
        Ok(self.publisher.stream.write_all(&frame)?)
    }

    /// Publishes messages at a rate. Each is sent when it is due, even if the server is late, and its latency counts
    /// from then.
    pub(crate) fn paced(
        &mut self,
        crowd: &mut Crowd,
        rate: f64,
        length: Duration,
        progress: &ProgressBar,
    ) -> anyhow::Result<()> {
        let each = Duration::from_secs_f64(1.0 / rate);
        let begin = self.epoch.elapsed();
        let mut due = begin;
        while due < begin + length {
            while self.epoch.elapsed() < due {
                let left = due.saturating_sub(self.epoch.elapsed());
                crowd.read(left.min(Duration::from_millis(5)))?;
            }
            self.publish(due)?;
            due += each;
            progress.set_message(format!("{} deliveries", crowd.counts.delivered));
            progress.tick();
        }
        settle(crowd, self.number)
    }

    /// Publishes as fast as possible, with at most `window` messages in flight.
    pub(crate) fn saturated(
        &mut self,
        crowd: &mut Crowd,
        window: u64,
        length: Duration,
        progress: &ProgressBar,
    ) -> anyhow::Result<()> {
        let begin = self.epoch.elapsed();
        while self.epoch.elapsed() < begin + length {
            let arrived = crowd.counts.delivered / crowd.len() as u64;
            for _ in 0..window.saturating_sub(self.number - arrived) {
                self.publish(self.epoch.elapsed())?;
            }
            crowd.read(Duration::from_millis(1))?;
            progress.set_message(format!("{} deliveries", crowd.counts.delivered));
            progress.tick();
        }
        settle(crowd, self.number)
    }

    /// Checks that every message was acknowledged and reached everyone once and in order.
    pub(crate) fn finish(
        self,
        crowd: &Crowd,
        report: &mut Report,
        name: &str,
    ) -> anyhow::Result<()> {
        let Counts {
            delivered,
            doubled,
            gaps,
            closed,
            ..
        } = crowd.counts;
        let lost = crowd.counts.lost(self.number * crowd.len() as u64);
        println!(
            "  {delivered} delivered, {lost} lost, {doubled} duplicated, {gaps} out of order, {closed} connections closed"
        );
        for case in crowd.lacking(self.number) {
            println!("  {case}");
        }
        report.must(
            lost + doubled + gaps + closed == 0,
            format!("{name}: deliveries were lost, duplicated or out of order"),
        );
        self.publisher.finish(self.number)
    }
}

/// A connection that sends messages. A thread reads the replies.
struct Publisher {
    stream: TcpStream,
    replies: Option<std::thread::JoinHandle<Replies>>,
    /// The number of replies. It is set when nothing more is sent.
    expected: Arc<OnceLock<u64>>,
}

/// The replies to a publisher.
#[derive(Default)]
struct Replies {
    sent: u64,
    refused: Vec<anyhow::Error>,
}

/// Time without a reply after which no more is expected.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// Time-out of one read.
const READ_WITHIN: Duration = Duration::from_millis(100);

impl Publisher {
    fn new(stream: TcpStream, acknowledged: bool) -> anyhow::Result<Self> {
        stream.set_read_timeout(Some(READ_WITHIN))?;
        let (reading, expected) = (stream.try_clone()?, Arc::new(OnceLock::new()));
        let ends = expected.clone();
        let replies = acknowledged.then(|| std::thread::spawn(move || replies(reading, &ends)));
        Ok(Self {
            stream,
            replies,
            expected,
        })
    }

    /// Checks that every message was acknowledged.
    fn finish(mut self, sent: u64) -> anyhow::Result<()> {
        let Some(replies) = self.replies.take() else {
            return Ok(());
        };
        self.expected.get_or_init(|| sent);
        let Ok(Replies {
            sent: acknowledged,
            refused,
        }) = replies.join()
        else {
            bail!("the thread that reads replies panicked")
        };
        println!("  {acknowledged} of {sent} messages acknowledged");
        if let Some(why) = refused.first() {
            bail!(
                "{} messages were refused, the first one: {why}",
                refused.len()
            );
        }
        if acknowledged != sent {
            bail!("{} messages were not acknowledged", sent - acknowledged);
        }
        Ok(())
    }
}

/// Reads replies until all have arrived or no more are expected.
fn replies(mut reading: TcpStream, expected: &OnceLock<u64>) -> Replies {
    let (mut frames, mut buffer, mut replies) =
        (Frames::default(), vec![0; 64 << 10], Replies::default());
    let mut last = Instant::now();
    loop {
        match reading.read(&mut buffer) {
            Ok(0) => return replies,
            Ok(count) => {
                last = Instant::now();
                frames.feed(&buffer[..count], |frame| {
                    let Frame::Content(text) = frame else { return };
                    match is_reply(text) {
                        Ok(reply) => replies.sent += u64::from(reply),
                        Err(refused) => replies.refused.push(refused),
                    }
                });
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return replies,
        }
        let answered = replies.sent + replies.refused.len() as u64;
        if let Some(&expected) = expected.get()
            && (answered >= expected || last.elapsed() > ANSWERED_WITHIN)
        {
            return replies;
        }
    }
}
