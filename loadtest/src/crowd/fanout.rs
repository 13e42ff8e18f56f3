//! Measures one channel with many subscribers. The paced part shows what a delivery costs when messages come one by
//! one, the saturated part how far the cost falls when the server can write queued messages together.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::Args;
use hdrhistogram::Histogram;
use serde_json::Value;

use crate::{
    Common,
    client::{Client, text_frame},
    crowd::{
        Crowd,
        channel::{Channel, Publisher, WARM_UP},
    },
    data::Data,
    latency::quantile_ms,
    report::Report,
    server::{Server, other_build, total_cpu},
};

// Another scenario flattens these options, where a second clap group with this name would be an error.
#[derive(Args, Clone)]
#[group(skip)]
pub(crate) struct Options {
    /// Subscribers of the channel
    #[arg(long, default_value_t = 1000)]
    pub(crate) subscribers: usize,
    /// Messages per second of the paced part
    #[arg(long, default_value_t = 60.0)]
    rate: f64,
    /// Bytes of a body
    #[arg(long, default_value_t = 200)]
    pub(crate) size: usize,
    /// Seconds of each part, after a warm-up
    #[arg(long, default_value_t = 15)]
    seconds: u64,
    /// Messages in flight in the saturated part; each of several numbers has a part of its own [default: 256; of peers: 32,128]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..))]
    window: Vec<u64>,
    /// Gateways to measure as well, over one store, with the subscribers spread over them; more than one needs
    /// --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
    /// Program of another build to measure as well, to see what a change costs
    #[arg(long)]
    beside: Option<PathBuf>,
}

/// Goal for the CPU of a paced delivery, gateway / raw loop.
const PACED_RATIO_MAX: f64 = 1.2;
/// Goal for the median latency of a paced delivery, gateway / raw loop.
const PACED_P50_RATIO_MAX: f64 = 1.25;
/// Messages in flight in the saturated part, if none are given.
const WINDOW: u64 = 256;
/// Number of pieces in which each part is measured.
const ROUNDS: u32 = 8;
/// The cost of one part.
pub(crate) struct Part {
    /// Microseconds of CPU of each delivery, all servers together.
    pub(crate) cpu_us: f64,
    /// Deliveries per second.
    pub(crate) per_second: f64,
    /// Frames between gateways for each message.
    pub(crate) peer_frames: f64,
}

/// The costs of all parts.
pub(crate) struct Parts {
    pub(crate) paced: Part,
    /// Latency of the paced messages, in milliseconds.
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    /// One for each number of messages in flight.
    pub(crate) saturated: Vec<Part>,
}

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let options = &options.with_windows(&[WINDOW]);
    let mut report = Report::new("fanout", &common.outputs);
    if common.alone {
        alone(common, options, &mut report)?;
        return report.finish();
    }
    println!(
        "gateway, which stores every message, and raw epoll loop, which stores nothing and makes one write() per delivery:"
    );
    let data = Data::new(common)?;
    let mut gateway = Subject::gateways("gateway", vec![Server::gateway(common, &data)?], options)?;
    let mut raw = Subject::raw(&gateway.sample()?, options)?;
    let mut several = match options.gateways {
        0 | 1 => None,
        count => {
            let data = Data::new(common)?;
            let servers = Server::gateways(common, &data, count)?;
            let several = Subject::gateways("gateways", servers, options)?;
            Some((several, data))
        }
    };
    let mut beside = match &options.beside {
        None => None,
        Some(program) => {
            let common = Common {
                gateway: Some(other_build("--beside", program)?),
                ..common.clone()
            };
            let data = Data::new(&common)?;
            let servers = vec![Server::gateway(&common, &data)?];
            let beside = Subject::gateways("beside", servers, options)?;
            Some((beside, data))
        }
    };
    let mut all: Vec<&mut Subject<'_>> = vec![&mut gateway, &mut raw];
    all.extend(several.iter_mut().map(|(subject, _)| subject));
    all.extend(beside.iter_mut().map(|(subject, _)| subject));
    compare(&mut all, options, &mut report)?;
    let p50: Vec<f64> = several.iter().flat_map(|(s, _)| s.p50_ms.clone()).collect();
    let gateway = gateway.finish(&mut report)?;
    let raw = raw.finish(&mut report)?;
    let together = several
        .map(|(s, _data)| s.finish(&mut report))
        .transpose()?;
    let beside = beside.map(|(s, _data)| s.finish(&mut report)).transpose()?;

    println!("ratios:");
    beside_raw(&gateway, &raw, options, &mut report);
    if let Some(other) = beside {
        beside_another_build(&gateway, &other, options, &mut report);
    }
    if let Some(together) = together {
        beside_several(&gateway, &together, &p50, &mut report);
    }
    report.finish()
}

impl Options {
    /// The options with these numbers of messages in flight if none are given.
    pub(crate) fn with_windows(&self, windows: &[u64]) -> Self {
        let mut options = self.clone();
        if options.window.is_empty() {
            options.window = windows.to_vec();
        }
        options
    }

    /// The numbers of messages in flight.
    pub(crate) fn windows(&self) -> impl Iterator<Item = u64> {
        self.window.iter().copied()
    }

    /// The names of the saturated parts.
    pub(crate) fn part_names(&self) -> impl Iterator<Item = String> {
        self.window
            .iter()
            .map(|window| format!("{window} in flight"))
    }

    /// The saturated parts of two subjects, with their names.
    pub(crate) fn saturated<'a>(
        &'a self,
        one: &'a Parts,
        other: &'a Parts,
    ) -> impl Iterator<Item = (String, &'a Part, &'a Part)> {
        let both = one.saturated.iter().zip(&other.saturated);
        let named = self.part_names().zip(both);
        named.map(|(name, (one, other))| (name, one, other))
    }
}

/// Compares the paced parts, for which there are goals.
pub(crate) fn paced_beside_raw(gateway: &Parts, raw: &Parts, report: &mut Report) {
    report.speed_at_most(
        "paced CPU, gateway / raw",
        gateway.paced.cpu_us / raw.paced.cpu_us,
        PACED_RATIO_MAX,
        "",
    );
    report.speed_at_most(
        "paced latency p50, gateway / raw",
        gateway.p50_ms / raw.p50_ms,
        PACED_P50_RATIO_MAX,
        "",
    );
    report.figure(
        "paced latency p99, gateway / raw",
        gateway.p99_ms / raw.p99_ms,
        "",
    );
}

fn beside_raw(gateway: &Parts, raw: &Parts, options: &Options, report: &mut Report) {
    paced_beside_raw(gateway, raw, report);
    for (part, gateway, raw) in options.saturated(gateway, raw) {
        report.figure(
            &format!("{part} CPU, gateway / raw"),
            gateway.cpu_us / raw.cpu_us,
            "",
        );
        report.figure(
            &format!("{part} deliveries, gateway / raw"),
            gateway.per_second / raw.per_second,
            "",
        );
    }
}

/// `p50` has the median latency through each of the gateways.
fn beside_several(gateway: &Parts, together: &Parts, p50: &[f64], report: &mut Report) {
    report.figure(
        "paced CPU, gateways / gateway",
        together.paced.cpu_us / gateway.paced.cpu_us,
        "",
    );
    // Subscribers on the owner's gateway get messages without a hop, all others with one.
    let at = |fold: fn(f64, f64) -> f64| p50.iter().copied().reduce(fold);
    if let (Some(least), Some(most)) = (at(f64::min), at(f64::max)) {
        report.figure("latency of the hop, p50", most - least, "ms");
    }
}

fn beside_another_build(gateway: &Parts, other: &Parts, options: &Options, report: &mut Report) {
    report.figure(
        "paced CPU, gateway / beside",
        gateway.paced.cpu_us / other.paced.cpu_us,
        "",
    );
    for (part, gateway, other) in options.saturated(gateway, other) {
        report.figure(
            &format!("{part} CPU, gateway / beside"),
            gateway.cpu_us / other.cpu_us,
            "",
        );
    }
}

/// Measures one gateway alone.
pub(crate) fn alone(common: &Common, options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let data = Data::new(common)?;
    let servers = vec![Server::gateway(common, &data)?];
    let mut gateway = Subject::gateways("gateway", servers, options)?;
    compare(&mut [&mut gateway], options, report)?;
    gateway.finish(report).map(drop)
}

/// The gateway's event with another body, which every server must deliver.
pub(crate) fn event_with(event: &Value, body: &str) -> String {
    let mut event = event.clone();
    event["body"] = body.into();
    event.to_string()
}

/// A channel, and what its deliveries have cost so far.
pub(crate) struct Subject<'a> {
    name: &'static str,
    channel: Channel<'a>,
    paced: Sum,
    /// Latency of the paced messages.
    latency: Histogram<u64>,
    /// One for each number of messages in flight.
    saturated: Vec<Sum>,
    /// Median latency of the paced messages through each server.
    p50_ms: Vec<f64>,
}

impl<'a> Subject<'a> {
    /// Makes a subject and warms it up.
    pub(crate) fn new(
        name: &'static str,
        mut channel: Channel<'a>,
        options: &Options,
    ) -> anyhow::Result<Self> {
        channel.warm_up(options.rate)?;
        Ok(Self {
            name,
            channel,
            paced: Sum::default(),
            latency: Histogram::new(3)?,
            saturated: options.window.iter().map(|_| Sum::default()).collect(),
            p50_ms: Vec::new(),
        })
    }

    /// One channel on these gateways, with the subscribers spread over them.
    pub(crate) fn gateways(
        name: &'static str,
        servers: Vec<Server>,
        options: &Options,
    ) -> anyhow::Result<Self> {
        let channel = Channel::public(servers, options.subscribers, options.size)?;
        Self::new(name, channel, options)
    }

    /// The raw loop, which sends the same bytes as the gateway.
    pub(crate) fn raw(sample: &str, options: &Options) -> anyhow::Result<Self> {
        let server = Server::raw()?;
        let mut crowd = Crowd::new(1)?;
        crowd.connect(options.subscribers, |number| {
            Client::connect_raw(&server.address, number)
        })?;
        let publisher = Publisher::new(Client::open(&server.address, "/publish", 0)?, false)?;
        let event: Value = serde_json::from_str(sample)?;
        let compose = move |body: &str| text_frame(&event_with(&event, body));
        let channel = Channel::new(vec![server], crowd, publisher, compose, options.size);
        Self::new("raw", channel, options)
    }

    /// The first message that arrived.
    pub(crate) fn sample(&self) -> anyhow::Result<String> {
        let sample = self.channel.crowd.sample.clone();
        sample.context("no message arrived in the warm-up")
    }

    fn pace(&mut self, rate: f64, length: Duration) -> anyhow::Result<()> {
        self.channel.crowd.look_again();
        let before = Before::new(&self.channel)?;
        self.channel.paced(rate, length)?;
        self.paced.add(&before, &self.channel)
    }

    /// Measures a piece of the saturated part with this place in the list.
    fn saturate(&mut self, place: usize, window: u64, length: Duration) -> anyhow::Result<()> {
        self.channel.crowd.look_again();
        self.channel.saturated(window, WARM_UP / ROUNDS)?;
        let before = Before::new(&self.channel)?;
        self.channel.saturated(window, length)?;
        self.saturated[place].add(&before, &self.channel)
    }

    fn tell_paced(&mut self, report: &mut Report) -> anyhow::Result<()> {
        let (name, paced) = (self.name, self.paced.part(&self.channel));
        let p50 = |latency: &Histogram<u64>| quantile_ms(latency, 0.5);
        self.p50_ms = self.channel.crowd.latency.iter().map(p50).collect();
        for latency in &self.channel.crowd.latency {
            self.latency.add(latency)?;
        }
        report.figure(
            &format!("{name}, paced: CPU per delivery"),
            paced.cpu_us,
            "µs",
        );
        self.channel
            .crowd
            .tell_latency(report, &format!("{name}, paced: latency"));
        if self.channel.servers.len() > 1 {
            report.figure(
                &format!("{name}, paced: peer frames per message"),
                paced.peer_frames,
                "",
            );
        }
        Ok(())
    }

    fn tell_saturated(&self, options: &Options, report: &mut Report) {
        let name = self.name;
        for (part, sum) in options.part_names().zip(&self.saturated) {
            let cost = sum.part(&self.channel);
            report.figure(
                &format!("{name}, {part}: CPU per delivery"),
                cost.cpu_us,
                "µs",
            );
            report.figure(
                &format!("{name}, {part}: deliveries per second"),
                cost.per_second,
                "/s",
            );
            if self.channel.servers.len() > 1 {
                report.figure(
                    &format!("{name}, {part}: peer frames per message"),
                    cost.peer_frames,
                    "",
                );
            }
        }
    }

    /// Returns the costs of all parts, and checks that every delivery was right.
    pub(crate) fn finish(self, report: &mut Report) -> anyhow::Result<Parts> {
        let at = |quantile| quantile_ms(&self.latency, quantile);
        let parts = Parts {
            paced: self.paced.part(&self.channel),
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            saturated: self
                .saturated
                .iter()
                .map(|sum| sum.part(&self.channel))
                .collect(),
        };
        self.channel.finish(report, self.name)?;
        Ok(parts)
    }
}

/// Measures all subjects in turn and in several rounds, so that other work on the machine affects all alike.
pub(crate) fn compare(
    subjects: &mut [&mut Subject<'_>],
    options: &Options,
    report: &mut Report,
) -> anyhow::Result<()> {
    let length = Duration::from_secs(options.seconds) / ROUNDS;
    for _ in 0..ROUNDS {
        for subject in &mut *subjects {
            let paced = subject.pace(options.rate, length);
            paced.with_context(|| format!("{}, paced", subject.name))?;
        }
        subjects.reverse();
    }
    clear(subjects);
    subjects.iter_mut().try_for_each(|s| s.tell_paced(report))?;
    for (place, window) in options.window.iter().enumerate() {
        for _ in 0..ROUNDS {
            for subject in &mut *subjects {
                let saturated = subject.saturate(place, *window, length);
                saturated.with_context(|| format!("{}, {window} in flight", subject.name))?;
            }
            subjects.reverse();
        }
    }
    clear(subjects);
    subjects
        .iter()
        .for_each(|s| s.tell_saturated(options, report));
    Ok(())
}

fn clear(subjects: &mut [&mut Subject<'_>]) {
    for subject in subjects {
        subject.channel.clear();
    }
}

/// The counters at the beginning of a measurement.
pub(crate) struct Before {
    cpu: Duration,
    peer_frames: f64,
    delivered: u64,
    at: Instant,
}

impl Before {
    pub(crate) fn new(Channel { servers, crowd, .. }: &Channel<'_>) -> anyhow::Result<Self> {
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

    pub(crate) fn part(&self, channel: &Channel<'_>) -> anyhow::Result<Part> {
        let mut sum = Sum::default();
        sum.add(self, channel)?;
        Ok(sum.part(channel))
    }
}

/// The sums of all rounds.
#[derive(Default)]
struct Sum {
    cpu: Duration,
    time: Duration,
    peer_frames: f64,
    delivered: u64,
}

impl Sum {
    fn add(&mut self, before: &Before, channel: &Channel<'_>) -> anyhow::Result<()> {
        let now = Before::new(channel)?;
        self.cpu += now.cpu - before.cpu;
        self.time += now.at - before.at;
        self.peer_frames += now.peer_frames - before.peer_frames;
        self.delivered += now.delivered - before.delivered;
        Ok(())
    }

    fn part(&self, channel: &Channel<'_>) -> Part {
        let delivered = self.delivered as f64;
        Part {
            cpu_us: self.cpu.as_secs_f64() * 1e6 / delivered,
            per_second: delivered / self.time.as_secs_f64(),
            peer_frames: self.peer_frames * channel.crowd.len() as f64 / delivered,
        }
    }
}
