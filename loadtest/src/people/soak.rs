//! Lets people talk at a human pace for a long time, with every kind of request, and kills gateways now and then. Shows
//! memory, descriptors, disk and latency over time, and fails if memory or disk grows without need.

use std::{
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use hdrhistogram::Histogram;

use crate::{
    Common,
    crowd::channel::spinner,
    data::Data,
    latency::latencies,
    people::chaos::{Cast, Talk},
    report::Report,
    server::{Server, total_cpu, total_descriptors, total_kib},
    spread::Spread,
    trend::Trend,
};

#[derive(Args)]
pub(crate) struct Options {
    /// Length of the run
    #[arg(long, default_value_t = 60.0)]
    minutes: f64,
    /// Users, each on a connection of their own
    #[arg(long, default_value_t = 40)]
    users: usize,
    /// Messages and other requests per second of each user; two of five are messages that are checked in the end
    #[arg(long, default_value_t = 0.5)]
    rate: f64,
    /// Participants of a group, and groups of each user
    #[arg(long, default_value_t = 5)]
    participants: usize,
    /// Times `kill -9`, in the first eighth of the run; each takes the next gateway in turn
    #[arg(long, default_value_t = 3)]
    kills: usize,
    /// Gateways, over one store; more than one needs --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
    /// Goal: MiB per hour by which the memory of the gateways may rise, or by the noise if that is more
    #[arg(long, default_value_t = 4.0)]
    memory_slope: f64,
    /// Goal: bytes on disk of each message and change, in the embedded store after compaction
    #[arg(long, default_value_t = 512.0)]
    bytes_per_message: f64,
    /// Seed of what each user writes and requests, and where
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Goal for the descriptors: how many more there may be after an hour, or the noise if that is more. Files of the store come and go.
const DESCRIPTORS_SLOPE_MAX: f64 = 4.0;
/// Number of samples of a run.
const SAMPLES: u32 = 120;
/// One sample of this many is printed.
const SAMPLES_PER_ROW: usize = 10;
/// Shortest time between two samples.
const SAMPLE_EVERY_MIN: Duration = Duration::from_millis(250);
const HOUR: f64 = 3600.0;
/// Caches that are full early.
const SMALL_CACHES: &str = "memory.mib = 16\nstore.embedded.cache_mib = 8\n";

/// The run so far.
struct Soak<'a> {
    common: &'a Common,
    options: &'a Options,
    data: &'a Data,
    servers: Vec<Server>,
    talk: Talk,
    begin: Instant,
    length: Duration,
    lines: Lines,
    /// Acknowledgements of the last sample.
    before: Histogram<u64>,
    /// From the start of a killed gateway until it is ready.
    starts: Histogram<u64>,
    /// Disk and stored messages when the store was compacted after the last kill.
    compacted: Option<Stored>,
}

/// Samples over time, in seconds.
#[derive(Default)]
struct Lines {
    memory_mib: Vec<(f64, f64)>,
    descriptors: Vec<(f64, f64)>,
    disk_mib: Vec<(f64, f64)>,
    /// From due to acknowledged, of the messages since the last sample.
    p99_ms: Vec<(f64, f64)>,
}

/// What is on disk, and how many messages and changes that are.
#[derive(Default)]
struct Stored {
    mib: f64,
    messages: u64,
}

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("soak", &common.outputs);
    let mut data = Data::new(common)?;
    data.more_settings = SMALL_CACHES.to_owned();
    let servers = Server::gateways(common, &data, options.gateways)?;
    let cast = Cast {
        users: options.users,
        rate: options.rate,
        participants: options.participants,
        seed: options.seed,
        every_request: true,
    };
    let mut soak = Soak {
        common,
        options,
        data: &data,
        talk: Talk::begin(&servers, cast)?,
        servers,
        begin: Instant::now(),
        length: Duration::from_secs_f64(options.minutes * 60.0),
        lines: Lines::default(),
        before: latencies()?,
        starts: latencies()?,
        compacted: None,
    };
    let cores = soak.live()?;
    soak.end(cores, &mut report)?;
    report.finish()
}

impl Soak<'_> {
    /// Kills and samples until the end. Returns the cores that the gateways used in the second half.
    fn live(&mut self) -> anyhow::Result<f64> {
        let progress = spinner();
        let each = (self.length / SAMPLES).max(SAMPLE_EVERY_MIN);
        let (mut killed, mut cpu) = (0, None);
        let mut next = each;
        while next <= self.length {
            thread::sleep(next.saturating_sub(self.begin.elapsed()));
            self.sample()?;
            let kills = self.options.kills;
            let due = self
                .length
                .mul_f64((killed + 1) as f64 / (8 * kills.max(1)) as f64);
            if killed < kills && next >= due {
                killed += 1;
                self.kill(killed)?;
            }
            if cpu.is_none() && next >= self.length / 2 {
                cpu = Some((Instant::now(), total_cpu(&self.servers)?));
            }
            // Samples that a slow start left out are not made up for.
            while next <= self.begin.elapsed() {
                next += each;
            }
            progress.set_message(self.lines.newest());
            progress.tick();
            if self.lines.memory_mib.len().is_multiple_of(SAMPLES_PER_ROW) {
                progress.suspend(|| println!("  {}", self.lines.newest()));
            }
        }
        progress.finish_and_clear();
        let (since, before) = cpu.unwrap_or((self.begin, Duration::ZERO));
        let used = total_cpu(&self.servers)?.saturating_sub(before);
        Ok(used.as_secs_f64() / since.elapsed().as_secs_f64())
    }

    /// Adds the present values. An error if a gateway ended by itself.
    fn sample(&mut self) -> anyhow::Result<()> {
        let now = self.begin.elapsed().as_secs_f64();
        let all = self.talk.acknowledgements()?;
        let mut new = all.clone();
        new.subtract(&self.before)?;
        self.before = all;
        let lines = &mut self.lines;
        if !new.is_empty() {
            let p99 = new.value_at_quantile(0.99) as f64 / 1e3;
            lines.p99_ms.push((now, p99));
        }
        let memory = total_kib(&self.servers)? / 1024.0;
        lines.memory_mib.push((now, memory));
        let descriptors = total_descriptors(&self.servers)?;
        lines.descriptors.push((now, descriptors as f64));
        if let Some(mib) = self.data.disk_mib() {
            lines.disk_mib.push((now, mib));
        }
        Ok(())
    }

    /// Kills a gateway and starts it again. After the last kill the embedded store is compacted before.
    fn kill(&mut self, number: usize) -> anyhow::Result<()> {
        let gateway = (number - 1) % self.servers.len();
        self.servers[gateway].kill()?;
        if number == self.options.kills {
            self.compacted = self.compact()?;
        }
        let begin = Instant::now();
        let several = self.servers.len() > 1;
        self.servers[gateway] = Server::one(self.common, self.data, several)?;
        let ready = begin.elapsed().as_micros() as u64;
        self.starts.saturating_record(ready);
        self.talk.follow(gateway, &self.servers[gateway]);
        Ok(())
    }

    /// Compacts the embedded store, if that is used. Returns what its tables have on disk then: a compaction may leave a
    /// journal of filler.
    fn compact(&self) -> anyhow::Result<Option<Stored>> {
        if self.data.cluster.is_some() {
            return Ok(None);
        }
        Server::compact(self.common, self.data)?;
        Ok(Some(Stored {
            mib: self.data.tables_mib(),
            messages: self.talk.stored(),
        }))
    }

    /// Checks the logs, and what was sampled.
    fn end(mut self, cores: f64, report: &mut Report) -> anyhow::Result<()> {
        self.talk.end(&self.servers[0].address, report)?;
        report.figure("kills", self.starts.len() as f64, "");
        if self.options.kills > 0 {
            report.latency("from start to ready", &self.starts);
        }
        report.figure("CPU of the gateways, second half", cores, "cores");
        for server in &self.servers {
            server.drain()?;
        }
        let (before, after) = (self.compacted.take(), self.compact()?);
        let lines = std::mem::take(&mut self.lines);
        // Before, what is filled once looks like a leak.
        let is_long = self.length.as_secs_f64() >= HOUR;
        let memory = is_long.then_some(self.options.memory_slope);
        let descriptors = is_long.then_some(DESCRIPTORS_SLOPE_MAX);
        self.tell("memory", "MiB", lines.memory_mib, memory, report);
        self.tell("descriptors", "", lines.descriptors, descriptors, report);
        self.tell("p99", "ms", lines.p99_ms, None, report);
        if self.data.cluster.is_none() {
            self.tell("disk", "MiB", lines.disk_mib, None, report);
        }
        if let Some(after) = after {
            let before = before.unwrap_or_default();
            report.figure("disk in the end, compacted", after.mib, "MiB");
            report.figure("messages and changes stored", after.messages as f64, "");
            let bytes = (after.mib - before.mib) * f64::from(1 << 20);
            report.at_most(
                "disk of each since the last kill, compacted",
                bytes / (after.messages - before.messages) as f64,
                self.options.bytes_per_message,
                "bytes",
            );
        }
        Ok(())
    }

    /// Reports the median and the slope of a value in the second half, and draws it.
    fn tell(
        &self,
        name: &str,
        unit: &str,
        points: Vec<(f64, f64)>,
        goal: Option<f64>,
        report: &mut Report,
    ) {
        let half = self.length.as_secs_f64() / 2.0;
        let later: Vec<_> = points
            .iter()
            .copied()
            .filter(|(at, _)| *at >= half)
            .collect();
        let median = Spread::of(later.iter().map(|(_, value)| *value).collect()).median;
        let trend = Trend::of(&later);
        let (slope, noise) = (trend.slope * HOUR, trend.spread / half * HOUR);
        let per_hour = format!("{unit}/h");
        report.figure(&format!("{name}, median"), median, unit);
        report.figure(&format!("{name}, noise"), noise, &per_hour);
        let slope_of = format!("{name}, slope");
        match goal {
            Some(goal) => report.at_most(&slope_of, slope, goal.max(noise), &per_hour),
            None => report.figure(&slope_of, slope, &per_hour),
        }
        report.over_time(name, unit, "all gateways together", points);
    }
}

impl Lines {
    /// The newest samples, as text.
    fn newest(&self) -> String {
        let last = |line: &[(f64, f64)]| line.last().copied().unwrap_or_default();
        let (at, memory) = last(&self.memory_mib);
        format!(
            "{:7.2} min: {memory:7.1} MiB of memory, {:4} descriptors, {:7.1} MiB on disk, p99 {:.1} ms",
            at / 60.0,
            last(&self.descriptors).1,
            last(&self.disk_mib).1,
            last(&self.p99_ms).1
        )
    }
}
