//! One channel, many subscribers. Paced: what a delivery costs when each is a wake-up and a write. Saturated:
//! how far the cost falls when the server may gather what is queued.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use anyhow::bail;
use clap::Args;
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    Common,
    client::{Client, Frame, Frames, text_frame},
    crowd::{Counts, Crowd, body},
    data::Data,
    report::Report,
    server::Server,
};

#[derive(Args)]
pub(crate) struct Options {
    #[arg(long, default_value_t = 1000)]
    subscribers: usize,
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
const PACED_RATIO_MAX: f64 = 1.1;

struct Part {
    cpu_us: f64,
    per_second: f64,
    /// Half of the messages arrived within so long, through each server.
    p50_ms: Vec<f64>,
    /// Frames between gateways for each message.
    peer_frames: f64,
}

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("fanout", !common.no_goals);
    println!("gateway, every message stored:");
    let data = Data::new(common)?;
    let server = Server::gateway(common, &data)?;
    let (paced, saturated, sample) = gateways(&[server], options, &mut report, "gateway")?;
    if options.gateways > 1 {
        println!("{} gateways:", options.gateways);
        let data = Data::new(common)?;
        let servers = Server::gateways(common, &data, options.gateways)?;
        let (together, _, _) = gateways(&servers, options, &mut report, "gateways")?;
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
    let server = Server::raw()?;
    let mut streams = Vec::new();
    for number in 0..options.subscribers {
        let mut client = Client::open(&server.address, "/", number)?;
        client.ask(json!({"type": "connect"}))?;
        streams.push(client.into_stream());
    }
    let publisher = Client::open(&server.address, "/publish", 0)?.into_stream();
    // The same bytes on the wire as the gateway's.
    let Some(sample) = sample else {
        bail!("no message arrived")
    };
    let event: Value = serde_json::from_str(&sample)?;
    let compose = |body: &str| {
        let mut event = event.clone();
        event["body"] = body.into();
        text_frame(&event.to_string())
    };
    let (raw_paced, raw_saturated, _) = measure(
        &[server],
        streams,
        publisher,
        false,
        &compose,
        options,
        &mut report,
        "raw",
    )?;

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
    report.finish(common.json.as_deref())
}

/// One channel on these, with the subscribers spread over them.
fn gateways(
    servers: &[Server],
    options: &Options,
    report: &mut Report,
    name: &str,
) -> anyhow::Result<(Part, Part, Option<String>)> {
    let mut owner = Client::connect(&servers[0].address, "publisher", 0)?;
    let create = json!({"type": "create", "kind": "channel", "name": "load", "public": true});
    let channel = owner.ask(create)?["conversation"].clone();
    let mut streams = Vec::new();
    for number in 0..options.subscribers {
        let address = &servers[number % servers.len()].address;
        let mut client = Client::connect(address, &format!("u{number}"), number)?;
        client.ask(json!({"type": "subscribe", "conversation": channel}))?;
        streams.push(client.into_stream());
    }
    let compose = |body: &str| {
        let frame = json!({"type": "send", "id": 1, "conversation": channel, "client_id": Uuid::new_v4(), "body": body});
        text_frame(&frame.to_string())
    };
    measure(
        servers,
        streams,
        owner.into_stream(),
        true,
        &compose,
        options,
        report,
        name,
    )
}

#[expect(
    clippy::too_many_arguments,
    reason = "the two servers differ in all of them"
)]
fn measure(
    servers: &[Server],
    streams: Vec<TcpStream>,
    publisher: TcpStream,
    acknowledged: bool,
    compose: &dyn Fn(&str) -> Vec<u8>,
    options: &Options,
    report: &mut Report,
    name: &str,
) -> anyhow::Result<(Part, Part, Option<String>)> {
    let epoch = Instant::now();
    let mut crowd = Crowd::new(streams, servers.len(), epoch)?;
    let mut publisher = Publisher::new(publisher, acknowledged)?;
    let length = Duration::from_secs(options.seconds);
    let warm_up = Duration::from_secs(1);
    let each = Duration::from_secs_f64(1.0 / options.rate);
    let mut number = 0;

    // Paced: sent when due, however late the server is; late is counted from when it was due.
    let mut paced =
        |crowd: &mut Crowd, number: &mut u64, length: Duration, progress: &ProgressBar| {
            let begin = epoch.elapsed();
            let mut due = begin;
            while due < begin + length {
                while epoch.elapsed() < due {
                    crowd.read(
                        due.saturating_sub(epoch.elapsed())
                            .min(Duration::from_millis(5)),
                    )?;
                }
                publisher.send(&compose(&body(*number, due, options.size)))?;
                *number += 1;
                due += each;
                progress.set_message(format!("{} deliveries", crowd.counts.delivered));
                progress.tick();
            }
            settle(crowd, *number)
        };
    let progress = spinner();
    paced(&mut crowd, &mut number, warm_up, &progress)?;
    for latency in &mut crowd.latency {
        latency.reset();
    }
    let before = Before::new(servers, &crowd)?;
    paced(&mut crowd, &mut number, length, &progress)?;
    let part = before.part(servers, &crowd)?;
    progress.finish_and_clear();
    report.figure(
        &format!("{name}, paced: CPU per delivery"),
        part.cpu_us,
        "µs",
    );
    for (server, latency) in crowd.latency.iter().enumerate() {
        let which = if servers.len() > 1 {
            format!(" at {}", server + 1)
        } else {
            String::new()
        };
        report.latency(&format!("{name}, paced: latency{which}"), latency);
    }
    if servers.len() > 1 {
        report.figure(
            &format!("{name}, paced: peer frames per message"),
            part.peer_frames,
            "",
        );
    }
    let paced_part = part;

    // Saturated: as many as may be under way.
    let subscribers = crowd.len() as u64;
    let mut saturated =
        |crowd: &mut Crowd, number: &mut u64, length: Duration, progress: &ProgressBar| {
            let begin = epoch.elapsed();
            while epoch.elapsed() < begin + length {
                let arrived = crowd.counts.delivered / subscribers;
                for _ in 0..options.window.saturating_sub(*number - arrived) {
                    publisher.send(&compose(&body(*number, epoch.elapsed(), options.size)))?;
                    *number += 1;
                }
                crowd.read(Duration::from_millis(1))?;
                progress.set_message(format!("{} deliveries", crowd.counts.delivered));
                progress.tick();
            }
            settle(crowd, *number)
        };
    let progress = spinner();
    saturated(&mut crowd, &mut number, warm_up, &progress)?;
    let before = Before::new(servers, &crowd)?;
    saturated(&mut crowd, &mut number, length, &progress)?;
    let part = before.part(servers, &crowd)?;
    progress.finish_and_clear();
    report.figure(
        &format!("{name}, saturated: CPU per delivery"),
        part.cpu_us,
        "µs",
    );
    report.figure(
        &format!("{name}, saturated: deliveries per second"),
        part.per_second,
        "/s",
    );
    if servers.len() > 1 {
        report.figure(
            &format!("{name}, saturated: peer frames per message"),
            part.peer_frames,
            "",
        );
    }

    let Counts {
        doubled,
        gaps,
        closed,
        ..
    } = crowd.counts;
    let lost = crowd.counts.lost(number * subscribers);
    println!(
        "  {} delivered, {lost} lost, {doubled} doubled, {gaps} out of order, {closed} closed",
        crowd.counts.delivered
    );
    report.must(
        lost + doubled + gaps + closed == 0,
        format!("{name}: a delivery went wrong"),
    );
    publisher.finish(number)?;
    Ok((paced_part, part, crowd.sample))
}

fn spinner() -> ProgressBar {
    let progress = ProgressBar::new_spinner();
    progress.set_style(
        ProgressStyle::with_template("{spinner} {elapsed} {msg}")
            .unwrap_or(ProgressStyle::default_spinner()),
    );
    progress
}

/// Waits until all that was sent has arrived, or nothing arrives any more.
fn settle(crowd: &mut Crowd, sent: u64) -> anyhow::Result<()> {
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
struct Before {
    cpu: Duration,
    peer_frames: f64,
    delivered: u64,
    at: Instant,
}

impl Before {
    fn new(servers: &[Server], crowd: &Crowd) -> anyhow::Result<Self> {
        let mut now = Self {
            cpu: Duration::ZERO,
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
            now.cpu += server.cpu()?;
        }
        Ok(now)
    }

    fn part(&self, servers: &[Server], crowd: &Crowd) -> anyhow::Result<Part> {
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

/// Sends, and reads what comes back in a thread of its own.
struct Publisher {
    stream: TcpStream,
    replies: Option<std::thread::JoinHandle<(u64, TcpStream)>>,
}

impl Publisher {
    fn new(stream: TcpStream, acknowledged: bool) -> anyhow::Result<Self> {
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        let mut reading = stream.try_clone()?;
        let replies = acknowledged.then(|| {
            std::thread::spawn(move || {
                let (mut frames, mut buffer, mut sent) = (Frames::default(), vec![0; 64 << 10], 0);
                while let Ok(count) = reading.read(&mut buffer) {
                    if count == 0 {
                        break;
                    }
                    frames.feed(&buffer[..count], |frame| {
                        if let Frame::Text(text) = frame
                            && text.windows(13).any(|w| w == br#""type":"sent""#)
                        {
                            sent += 1;
                        }
                    });
                }
                (sent, reading)
            })
        });
        Ok(Self { stream, replies })
    }

    fn send(&mut self, frame: &[u8]) -> anyhow::Result<()> {
        Ok(self.stream.write_all(frame)?)
    }

    /// Every message must have been acknowledged.
    fn finish(mut self, sent: u64) -> anyhow::Result<()> {
        let Some(replies) = self.replies.take() else {
            return Ok(());
        };
        let Ok((acknowledged, _)) = replies.join() else {
            bail!("the publisher's reader failed")
        };
        println!("  {acknowledged} of {sent} messages acknowledged as stored");
        if acknowledged != sent {
            bail!("{} messages were not acknowledged", sent - acknowledged);
        }
        Ok(())
    }
}
