//! A channel under test: its servers, its subscribers, and the connection that publishes numbered messages to them, paced
//! or saturated. Checks that all messages are acknowledged and delivered.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::{
    client::{Client, Frame, Frames, is_reply, send_frame},
    crowd::{Counts, Crowd, body},
    report::Report,
    server::{Server, Watches},
};

/// Time before each measurement that does not count.
pub(crate) const WARM_UP: Duration = Duration::from_secs(1);
/// Time without a new delivery after which no more is expected.
const QUIET: Duration = Duration::from_secs(5);

type Compose<'a> = Box<dyn Fn(&str) -> Vec<u8> + 'a>;

/// A channel on one server, or on several with the subscribers spread over them.
pub(crate) struct Channel<'a> {
    pub(crate) servers: Vec<Server>,
    pub(crate) crowd: Crowd,
    /// The id of the conversation, on gateways.
    pub(crate) id: String,
    publisher: Publisher,
    /// The frame that publishes a body.
    compose: Compose<'a>,
    /// Bytes of a body.
    size: usize,
    /// The number of the next message.
    pub(crate) number: u64,
    watches: Watches,
    pub(crate) progress: ProgressBar,
}

impl<'a> Channel<'a> {
    pub(crate) fn new(
        servers: Vec<Server>,
        crowd: Crowd,
        publisher: Publisher,
        compose: impl Fn(&str) -> Vec<u8> + 'a,
        size: usize,
    ) -> Self {
        Self {
            watches: Watches::of(&servers),
            servers,
            crowd,
            id: String::new(),
            publisher,
            compose: Box::new(compose),
            size,
            number: 0,
            progress: spinner(),
        }
    }

    /// Creates a public channel with this many subscribers, spread over the gateways.
    pub(crate) fn public(
        servers: Vec<Server>,
        subscribers: usize,
        size: usize,
    ) -> anyhow::Result<Self> {
        let owner = || Client::connect(&servers[0].address, "publisher", 0);
        let create = json!({"type": "create", "kind": "channel", "name": "load", "public": true});
        let channel = owner()?.create(create)?;
        let mut crowd = Crowd::new(servers.len())?;
        crowd.connect(subscribers, |number| {
            let address = &servers[number % servers.len()].address;
            let mut client = Client::connect(address, &format!("u{number}"), number)?;
            client.ask(json!({"type": "subscribe", "conversation": channel}))?;
            Ok(client)
        })?;
        let publisher = Publisher::new(owner()?, true)?;
        Ok(Self::on(servers, channel, crowd, publisher, size))
    }

    /// A conversation with these subscribers.
    pub(crate) fn on(
        servers: Vec<Server>,
        id: String,
        crowd: Crowd,
        publisher: Publisher,
        size: usize,
    ) -> Self {
        let conversation = id.clone();
        let compose = move |body: &str| send_frame(&conversation, body);
        Self {
            id,
            ..Self::new(servers, crowd, publisher, compose, size)
        }
    }

    /// Publishes a message.
    pub(crate) fn publish(&mut self, due: Duration) -> anyhow::Result<()> {
        let frame = (self.compose)(&body(self.number, due, self.size));
        self.number += 1;
        Ok(self.publisher.stream.write_all(&frame)?)
    }

    /// Publishes messages for a moment, and forgets their latency.
    pub(crate) fn warm_up(&mut self, rate: f64) -> anyhow::Result<()> {
        self.paced(rate, WARM_UP)?;
        self.crowd.forget_latency();
        Ok(())
    }

    /// Publishes messages at a rate. Each is sent when it is due, even if the server is late, and its latency counts
    /// from then.
    pub(crate) fn paced(&mut self, rate: f64, length: Duration) -> anyhow::Result<()> {
        let (epoch, each) = (self.crowd.epoch, Duration::from_secs_f64(1.0 / rate));
        let begin = epoch.elapsed();
        let mut due = begin;
        while due < begin + length {
            while epoch.elapsed() < due {
                let left = due.saturating_sub(epoch.elapsed());
                self.crowd.read(left.min(Duration::from_millis(5)))?;
            }
            self.publish(due)?;
            due += each;
            self.show();
        }
        self.settle()
    }

    /// Publishes as fast as possible, with at most `window` messages in flight.
    pub(crate) fn saturated(&mut self, window: u64, length: Duration) -> anyhow::Result<()> {
        let epoch = self.crowd.epoch;
        let begin = epoch.elapsed();
        while epoch.elapsed() < begin + length {
            let arrived = self.crowd.counts.delivered / self.crowd.len() as u64;
            for _ in 0..window.saturating_sub(self.number - arrived) {
                self.publish(epoch.elapsed())?;
            }
            self.crowd.read(Duration::from_millis(1))?;
            self.show();
        }
        self.settle()
    }

    /// Clears the line of the progress, before something is printed.
    pub(crate) fn clear(&mut self) {
        self.progress.finish_and_clear();
        self.progress = spinner();
    }

    fn show(&self) {
        let delivered = self.crowd.counts.delivered;
        self.progress.set_message(format!("{delivered} deliveries"));
        self.progress.tick();
    }

    /// Waits until all messages have arrived everywhere, or nothing has arrived for `QUIET`.
    pub(crate) fn settle(&mut self) -> anyhow::Result<()> {
        self.settle_while(QUIET, |_| Ok(false))
    }

    /// Like `settle`, with another quiet time, and calls `meanwhile` again and again. Its `true` counts like a delivery.
    pub(crate) fn settle_while(
        &mut self,
        quiet: Duration,
        mut meanwhile: impl FnMut(&mut Self) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let sent = self.number * self.crowd.len() as u64;
        let mut last = (Instant::now(), self.crowd.counts.delivered);
        while self.crowd.counts.delivered < sent && last.0.elapsed() < quiet {
            self.crowd.read(Duration::from_millis(2))?;
            if meanwhile(self)? || self.crowd.counts.delivered > last.1 {
                last = (Instant::now(), self.crowd.counts.delivered);
            }
        }
        Ok(())
    }

    /// Checks that every message was acknowledged and reached everyone once and in order, and draws what was sampled.
    pub(crate) fn finish(self, report: &mut Report, name: &str) -> anyhow::Result<()> {
        let Self {
            crowd,
            number,
            watches,
            ..
        } = self;
        crowd.draw(report, name);
        watches.draw(report, name);
        let Counts {
            delivered,
            doubled,
            gaps,
            closed,
            ..
        } = crowd.counts;
        let lost = crowd.counts.lost(number * crowd.len() as u64);
        println!(
            "  {delivered} delivered, {lost} lost, {doubled} duplicated, {gaps} out of order, {closed} connections closed"
        );
        for case in crowd.lacking(number) {
            println!("  {case}");
        }
        report.must(
            lost + doubled + gaps + closed == 0,
            format!("{name}: deliveries were lost, duplicated or out of order"),
        );
        self.publisher.finish(number)
    }
}

pub(crate) fn spinner() -> ProgressBar {
    let progress = ProgressBar::new_spinner();
    progress.set_style(
        ProgressStyle::with_template("{spinner} {elapsed} {msg}")
            .unwrap_or(ProgressStyle::default_spinner()),
    );
    progress
}

/// A connection that sends messages. A thread reads the replies.
pub(crate) struct Publisher {
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
    /// `acknowledged` says whether the server answers each message.
    pub(crate) fn new(client: Client, acknowledged: bool) -> anyhow::Result<Self> {
        let stream = client.into_stream();
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
