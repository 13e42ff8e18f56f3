//! One channel, many subscribers. Paced: what a delivery costs when each is a wake-up and a write. Saturated:
//! how far the cost falls when the server may gather what is queued.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::bail;
use clap::Args;
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use crate::{
    Common,
    client::{Client, Frame, Frames, send_frame, text_frame},
    crowd::{Counts, Crowd, body},
    data::Data,
    report::Report,
    server::{Server, total_cpu},
};

#[derive(Args)]
pub(crate) struct Options {
    #[arg(long, default_value_t = 1000)]
    pub(crate) subscribers: usize,
    /// Messages per second of the paced part
    #[arg(long, default_value_t = 60.0)]
    rate: f64,
    /// Bytes of a body
    #[arg(long, default_value_t = 200)]
    size: usize,
    /// Seconds of each part, after a warm-up
    #[arg(long, default_value_t = 15)]
    seconds: u64,
    /// Messages that may be under way in the saturated part
    #[arg(long, default_value_t = 256)]
    window: u64,
    /// Measures so many gateways too, over one store, with the subscribers spread over them; needs --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
}

/// Of all goals: how much more CPU than the raw loop a paced delivery may cost.
pub(crate) const PACED_RATIO_MAX: f64 = 1.1;
/// Not measured.
pub(crate) const WARM_UP: Duration = Duration::from_secs(1);

pub(crate) struct Part {
    pub(crate) cpu_us: f64,
    pub(crate) per_second: f64,
    /// Half of the messages arrived within so long, through each server.
    pub(crate) p50_ms: Vec<f64>,
    /// Frames between gateways for each message.
    pub(crate) peer_frames: f64,
}

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("fanout", &common.outputs);
    println!("gateway, every message stored:");
    let data = Data::new(common)?;
    let server = Server::gateway(common, &data)?;
    let (paced, saturated, sample) = gateways(vec![server], options, &mut report, "gateway")?;
    if options.gateways > 1 {
        println!("{} gateways:", options.gateways);
        let data = Data::new(common)?;
        let servers = Server::gateways(common, &data, options.gateways)?;
        let (together, _, _) = gateways(servers, options, &mut report, "gateways")?;
        report.figure(
            "paced CPU, gateways / gateway",
            together.cpu_us / paced.cpu_us,
            "",
        );
        // The owner's subscribers get it without a hop.
        let at = |fold: fn(f64, f64) -> f64| together.p50_ms.iter().copied().reduce(fold);
        if let (Some(least), Some(most)) = (at(f64::min), at(f64::max)) {
            report.figure("latency of the hop, p50", most - least, "ms");
        }
    }

    println!("raw epoll loop, one write() per delivery, nothing stored:");
    let (raw_paced, raw_saturated) = raw(&sample, options, &mut report)?;

    println!("ratios:");
    report.at_most(
        "paced CPU, gateway / raw",
        paced.cpu_us / raw_paced.cpu_us,
        PACED_RATIO_MAX,
        "",
    );
    report.figure(
        "saturated CPU, gateway / raw",
        saturated.cpu_us / raw_saturated.cpu_us,
        "",
    );
    report.figure(
        "saturated deliveries, gateway / raw",
        saturated.per_second / raw_saturated.per_second,
        "",
    );
    report.finish()
}

/// The raw loop, with the same bytes on the wire as the gateway's.
pub(crate) fn raw(
    sample: &str,
    options: &Options,
    report: &mut Report,
) -> anyhow::Result<(Part, Part)> {
    let server = Server::raw()?;
    let mut crowd = Crowd::new(1)?;
    for number in 0..options.subscribers {
        crowd.join(Client::connect_raw(&server.address, number)?.into_stream())?;
    }
    let publisher = Client::open(&server.address, "/publish", 0)?.into_stream();
    let event: Value = serde_json::from_str(sample)?;
    let subject = Subject {
        name: "raw",
        servers: vec![server],
        crowd,
        publisher,
        acknowledged: false,
        compose: &|body| text_frame(&event_with(&event, body)),
    };
    let (paced, saturated, _) = measure(subject, options, report)?;
    Ok((paced, saturated))
}

/// The gateway's event with another body: what every server is to deliver.
pub(crate) fn event_with(event: &Value, body: &str) -> String {
    let mut event = event.clone();
    event["body"] = body.into();
    event.to_string()
}

/// One channel on these, with the subscribers spread over them.
pub(crate) fn gateways(
    servers: Vec<Server>,
    options: &Options,
    report: &mut Report,
    name: &'static str,
) -> anyhow::Result<(Part, Part, String)> {
    let (publisher, channel, crowd) = public_channel(&servers, options.subscribers)?;
    let subject = Subject {
        name,
        servers,
        crowd,
        publisher,
        acknowledged: true,
        compose: &|body| send_frame(&channel, body),
    };
    let (paced, saturated, sample) = measure(subject, options, report)?;
    let Some(sample) = sample else {
        bail!("no message arrived")
    };
    Ok((paced, saturated, sample))
}

/// A channel with so many who look into it, spread over the servers: who publishes, its id, and who is subscribed.
pub(crate) fn public_channel(
    servers: &[Server],
    subscribers: usize,
) -> anyhow::Result<(TcpStream, String, Crowd)> {
    let owner = || Client::connect(&servers[0].address, "publisher", 0);
    let create = json!({"type": "create", "kind": "channel", "name": "load", "public": true});
    let channel = owner()?.create(create)?;
    let mut crowd = Crowd::new(servers.len())?;
    let connecting = ProgressBar::new(subscribers as u64);
    for number in 0..subscribers {
        let address = &servers[number % servers.len()].address;
        let mut client = Client::connect(address, &format!("u{number}"), number)?;
        client.ask(json!({"type": "subscribe", "conversation": channel}))?;
        crowd.join(client.into_stream())?;
        connecting.inc(1);
    }
    connecting.finish_and_clear();
    Ok((owner()?.into_stream(), channel, crowd))
}

/// Who fans out, to whom, and how it is told to.
pub(crate) struct Subject<'a> {
    pub(crate) name: &'static str,
    pub(crate) servers: Vec<Server>,
    pub(crate) crowd: Crowd,
    pub(crate) publisher: TcpStream,
    /// It says of each message that it is stored.
    pub(crate) acknowledged: bool,
    /// The frame that publishes this body.
    pub(crate) compose: &'a dyn Fn(&str) -> Vec<u8>,
}

pub(crate) fn measure(
    subject: Subject<'_>,
    options: &Options,
    report: &mut Report,
) -> anyhow::Result<(Part, Part, Option<String>)> {
    let Subject {
        name,
        servers,
        mut crowd,
        publisher,
        acknowledged,
        compose,
    } = subject;
    let servers = &servers[..];
    let watches: Vec<_> = servers.iter().map(Server::watch).collect();
    let mut source = Source::new(publisher, acknowledged, compose, options.size, crowd.epoch)?;
    let length = Duration::from_secs(options.seconds);

    let progress = spinner();
    source.paced(&mut crowd, options.rate, WARM_UP, &progress)?;
    crowd.forget_latency();
    let before = Before::new(servers, &crowd)?;
    source.paced(&mut crowd, options.rate, length, &progress)?;
    let paced = before.part(servers, &crowd)?;
    progress.finish_and_clear();
    report.figure(
        &format!("{name}, paced: CPU per delivery"),
        paced.cpu_us,
        "µs",
    );
    crowd.tell_latency(report, &format!("{name}, paced: latency"));
    if servers.len() > 1 {
        report.figure(
            &format!("{name}, paced: peer frames per message"),
            paced.peer_frames,
            "",
        );
    }

    let progress = spinner();
    source.saturated(&mut crowd, options.window, WARM_UP, &progress)?;
    let before = Before::new(servers, &crowd)?;
    source.saturated(&mut crowd, options.window, length, &progress)?;
    let saturated = before.part(servers, &crowd)?;
    progress.finish_and_clear();
    report.figure(
        &format!("{name}, saturated: CPU per delivery"),
        saturated.cpu_us,
        "µs",
    );
    report.figure(
        &format!("{name}, saturated: deliveries per second"),
        saturated.per_second,
        "/s",
    );
    if servers.len() > 1 {
        report.figure(
            &format!("{name}, saturated: peer frames per message"),
            saturated.peer_frames,
            "",
        );
    }
    crowd.draw(report, name);
    for (number, watch) in (1..).zip(watches) {
        let which = if servers.len() > 1 {
            format!("{name} {number}")
        } else {
            name.to_owned()
        };
        watch.stop().draw(report, &which);
    }
    source.finish(&crowd, report, name)?;
    Ok((paced, saturated, crowd.sample))
}

pub(crate) fn spinner() -> ProgressBar {
    let progress = ProgressBar::new_spinner();
    progress.set_style(
        ProgressStyle::with_template("{spinner} {elapsed} {msg}")
            .unwrap_or(ProgressStyle::default_spinner()),
    );
    progress
}

/// Waits until all that was sent has arrived, or nothing arrives any more.
pub(crate) fn settle(crowd: &mut Crowd, sent: u64) -> anyhow::Result<()> {
    const QUIET: Duration = Duration::from_secs(5);
    let mut last = (Instant::now(), crowd.counts.delivered);
    while crowd.counts.delivered < sent * crowd.len() as u64 && last.0.elapsed() < QUIET {
        crowd.read(Duration::from_millis(2))?;
        if crowd.counts.delivered > last.1 {
            last = (Instant::now(), crowd.counts.delivered);
        }
    }
    Ok(())
}

/// How things stood when a part began.
pub(crate) struct Before {
    cpu: Duration,
    peer_frames: f64,
    delivered: u64,
    at: Instant,
}

impl Before {
    pub(crate) fn new(servers: &[Server], crowd: &Crowd) -> anyhow::Result<Self> {
        let mut now = Self {
            cpu: total_cpu(servers)?,
            peer_frames: 0.0,
            delivered: crowd.counts.delivered,
            at: Instant::now(),
        };
        for server in servers {
            if servers.len() > 1 {
                let metrics = server.metrics()?;
                now.peer_frames += metrics
                    .get("chat_peer_frames_sent_total")
                    .copied()
                    .unwrap_or_default();
            }
        }
        Ok(now)
    }

    pub(crate) fn part(&self, servers: &[Server], crowd: &Crowd) -> anyhow::Result<Part> {
        let now = Self::new(servers, crowd)?;
        let delivered = (now.delivered - self.delivered) as f64;
        let messages = delivered / crowd.len() as f64;
        let p50 = |latency: &Histogram<u64>| latency.value_at_quantile(0.5) as f64 / 1000.0;
        Ok(Part {
            cpu_us: (now.cpu - self.cpu).as_secs_f64() * 1e6 / delivered,
            per_second: delivered / (now.at - self.at).as_secs_f64(),
            p50_ms: crowd.latency.iter().map(p50).collect(),
            peer_frames: (now.peer_frames - self.peer_frames) / messages,
        })
    }
}

/// Publishes numbered messages to a crowd.
pub(crate) struct Source<'a> {
    publisher: Publisher,
    compose: &'a dyn Fn(&str) -> Vec<u8>,
    /// Bytes of a body.
    size: usize,
    /// Of the next message.
    pub(crate) number: u64,
    epoch: Instant,
}

impl<'a> Source<'a> {
    pub(crate) fn new(
        publisher: TcpStream,
        acknowledged: bool,
        compose: &'a dyn Fn(&str) -> Vec<u8>,
        size: usize,
        epoch: Instant,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            publisher: Publisher::new(publisher, acknowledged)?,
            compose,
            size,
            number: 0,
            epoch,
        })
    }

    pub(crate) fn publish(&mut self, due: Duration) -> anyhow::Result<()> {
        let frame = (self.compose)(&body(self.number, due, self.size));
        self.number += 1;
        Ok(self.publisher.stream.write_all(&frame)?)
    }

    /// Sent when due, however late the server is; late is counted from when it was due.
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

    /// As many as may be under way.
    fn saturated(
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

    /// Every message must have been acknowledged, and have reached everyone once and in order.
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
            "  {delivered} delivered, {lost} lost, {doubled} doubled, {gaps} out of order, {closed} closed"
        );
        for case in crowd.lacking(self.number) {
            println!("  {case}");
        }
        report.must(
            lost + doubled + gaps + closed == 0,
            format!("{name}: a delivery went wrong"),
        );
        self.publisher.finish(self.number)
    }
}

/// Sends, and reads what comes back in a thread of its own.
struct Publisher {
    stream: TcpStream,
    replies: Option<std::thread::JoinHandle<Replies>>,
    over: Arc<AtomicBool>,
}

#[derive(Default)]
struct Replies {
    sent: u64,
    refused: Vec<String>,
}

/// Answers that have not come after so long without any do not come.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

impl Publisher {
    fn new(stream: TcpStream, acknowledged: bool) -> anyhow::Result<Self> {
        stream.set_read_timeout(Some(ANSWERED_WITHIN))?;
        let (reading, over) = (stream.try_clone()?, Arc::new(AtomicBool::new(false)));
        let ends = over.clone();
        let replies = acknowledged.then(|| std::thread::spawn(move || replies(reading, &ends)));
        Ok(Self {
            stream,
            replies,
            over,
        })
    }

    /// Every message must have been acknowledged.
    fn finish(mut self, sent: u64) -> anyhow::Result<()> {
        let Some(replies) = self.replies.take() else {
            return Ok(());
        };
        self.over.store(true, Ordering::Relaxed);
        let Ok(Replies {
            sent: acknowledged,
            refused,
        }) = replies.join()
        else {
            bail!("the publisher's reader failed")
        };
        println!("  {acknowledged} of {sent} messages acknowledged as stored");
        if let Some(why) = refused.first() {
            bail!("{} messages were refused: {why}", refused.len());
        }
        if acknowledged != sent {
            bail!("{} messages were not acknowledged", sent - acknowledged);
        }
        Ok(())
    }
}

/// What comes back, until nothing does any more and it is over.
fn replies(mut reading: TcpStream, over: &AtomicBool) -> Replies {
    let (mut frames, mut buffer, mut replies) =
        (Frames::default(), vec![0; 64 << 10], Replies::default());
    loop {
        match reading.read(&mut buffer) {
            Ok(0) => return replies,
            Ok(count) => frames.feed(&buffer[..count], |frame| {
                let Frame::Content(text) = frame else { return };
                let is = |mark: &[u8]| text.windows(mark.len()).any(|w| w == mark);
                if is(br#""type":"sent""#) {
                    replies.sent += 1;
                } else if is(br#""type":"error""#) {
                    replies.refused.push(String::from_utf8_lossy(text).into());
                }
            }),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if over.load(Ordering::Relaxed) {
                    return replies;
                }
            }
            Err(_) => return replies,
        }
    }
}
