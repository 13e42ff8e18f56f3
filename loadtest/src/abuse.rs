//! Measures what hostile sessions cost ordinary users, and how much memory they make a gateway with default limits use.
//! Pieces with and without hostile sessions alternate in one run, and their medians are compared.

mod attacks;
mod bombs;
mod held;
mod hostile;
mod sessions;

use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use held::{Most, decoders};
use indicatif::ProgressBar;
use sessions::{Hostiles, address, orders};

use crate::{
    Common,
    abuse::{
        attacks::PICTURE_BOMBS,
        hostile::{BEGIN, LEAVE, STOP},
    },
    client::Client,
    crowd::channel::{WARM_UP, spinner},
    data::Data,
    latency::Quantiles,
    people::{self, Kind, People, Waits},
    report::Report,
    server::{self, Server, Watches, total_cpu, total_descriptors, total_kib},
    spread::Spread,
};

/// The scenarios of this folder.
#[derive(Subcommand)]
pub(crate) enum Scenario {
    /// Measure what hostile sessions cost ordinary users, and how much memory they make the gateway use
    Abuse(Options),
    /// Run the hostile sessions, in a separate process
    #[command(hide = true)]
    Hostile,
}

impl Scenario {
    pub(crate) fn run(&self, common: &Common) -> anyhow::Result<bool> {
        match self {
            Self::Abuse(options) => run(common, options),
            Self::Hostile => hostile::serve().map(|()| true),
        }
    }
}

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    people: people::Options,
    /// Hostile sessions; each has its own user
    #[arg(long, default_value_t = 20)]
    hostile: usize,
    /// Source addresses that the hostile sessions use in turn
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=250))]
    addresses: u8,
    /// Pieces with hostile sessions, and as many without; --seconds is the length of each
    #[arg(long, default_value_t = 6)]
    rounds: usize,
    /// Milliseconds after which a hostile session changes to the next kind of misuse
    #[arg(long, default_value_t = 500)]
    turn: u64,
    /// Run only this kind of misuse, given by the name that a run prints
    #[arg(long)]
    only: Option<String>,
    /// MiB by which the memory of a gateway may grow: 512 for `memory.mib`, the rest for the store's cache and the
    /// queues of sockets
    #[arg(long, default_value_t = 768.0)]
    memory_mib: f64,
    /// Descriptors that a gateway may open for each hostile session
    #[arg(long, default_value_t = 128)]
    descriptors: usize,
    /// Seconds within which the gateway must close connections that clients left open
    #[arg(long, default_value_t = 45)]
    closed_within: u64,
}

/// Goal for the users' 99th percentile, with hostile sessions / without.
const RATIO_MAX: f64 = 1.5;
/// Descriptors that come and go without clients: files of the store.
const DESCRIPTORS_SLACK: usize = 24;
/// Time within which the gateway accepts new connections.
const ACCEPTED_WITHIN: Duration = Duration::from_secs(1);
/// Minimum time between two pieces, so that the work one leaves behind does not count for the next.
const CALM: Duration = Duration::from_secs(1);
/// Maximum number of times that `CALM` is waited for.
const CALMS_MAX: usize = 60;
/// CPU below which a gateway has finished the work of the previous piece.
const QUIET_CORES: f64 = 0.1;
/// Time between two samples of memory and descriptors.
const LOOK: Duration = Duration::from_millis(250);
/// Time between two samples of the processes that decode pictures, which can be short.
const DECODERS_LOOK: Duration = Duration::from_millis(50);
/// Memory of all processes that decode pictures for one gateway with default settings, in MiB: `image_threads` × 768.
const DECODERS_MIB: f64 = 768.0;
/// Default of `attachments.image_threads`.
const DECODERS: usize = 1;

/// What ordinary users waited for in each piece, and the CPU of all pieces.
#[derive(Default)]
struct Cost {
    waits: Vec<Waits>,
    cpu: Cpu,
    time: Duration,
}

/// CPU time of the processes on this machine.
#[derive(Default, Clone, Copy)]
struct Cpu {
    gateway: Duration,
    people: Duration,
    hostile: Duration,
}

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("abuse", &common.outputs);
    let mut data = Data::new(common)?;
    data.default_limits = true;
    // So that the addresses of files are valid for the whole run.
    data.more_settings = "attachments.url_window_s = 3600\n".to_owned();
    let servers = Server::gateways(common, &data, options.people.gateways)?;
    // Each user connects from an address of their own, as in reality.
    let connect = |server: &str, user: &str, number: usize| {
        Client::connect_as(server, user, address(65, number))
    };
    let mut people = People::gather(&servers, &options.people, Kind::Mixed, connect)?;
    people.time_replies()?;
    let mut hostiles = Hostiles::start(orders(&servers, options)?)?;
    let watches = Watches::of(&servers);
    let mut run = Run {
        servers: &servers,
        options,
        people,
        progress: spinner(),
    };
    run.people.talk(WARM_UP, &run.progress)?;
    run.people.settle()?;
    let quiet = run.calm(f64::INFINITY)?;
    let before = total_descriptors(&servers)?;
    let held = held::watch(&servers);
    let pieces = run.pieces(&mut hostiles, quiet)?;
    // The gateway must close the connections that the hostile sessions leave open.
    let done = hostiles.ask(LEAVE)?;
    let opened = run.more_descriptors(before, ACCEPTED_WITHIN, |more| more > DESCRIPTORS_SLACK)?;
    let closed_within = Duration::from_secs(options.closed_within);
    let left = run.more_descriptors(before, closed_within, |more| more <= DESCRIPTORS_SLACK)?;
    run.people.settle()?;
    run.progress.finish_and_clear();
    run.people.judge(&mut report);
    run.people.judge_replies(&mut report);
    let most = held.stop()?;
    done.tell(&mut report, options);
    let judged = options.people.gateways == 1 && common.cassandra.is_empty();
    compare(&mut report, &pieces.without, &pieces.with, judged);
    report.at_most(
        "memory, most above the first piece without",
        (most.memory_kib - pieces.memory_kib) / 1024.0,
        options.memory_mib * servers.len() as f64,
        "MiB",
    );
    judge_decoders(&servers, options, &most, &mut report)?;
    judge_descriptors(
        &Descriptors {
            before,
            most: most.descriptors,
            opened,
            left,
        },
        options,
        &mut report,
    );
    watches.draw(&mut report, "gateway");
    report.finish()
}

/// A run in progress.
struct Run<'a> {
    servers: &'a [Server],
    options: &'a Options,
    people: People,
    progress: ProgressBar,
}

/// The measurements of all pieces.
#[derive(Default)]
struct Pieces {
    without: Cost,
    with: Cost,
    /// Memory of the gateways after the first piece without hostile sessions.
    memory_kib: f64,
}

/// Open descriptors of the gateways.
struct Descriptors {
    /// Before the first piece.
    before: usize,
    /// The maximum of the run.
    most: usize,
    /// Beyond `before`, once the hostile sessions had opened connections to leave them open.
    opened: usize,
    /// Beyond `before`, in the end.
    left: usize,
}

impl Run<'_> {
    /// Lets people talk until the gateways decode no picture and need about as little CPU as `quiet`, in cores. Returns the last
    /// measurement.
    fn calm(&mut self, quiet: f64) -> anyhow::Result<f64> {
        let mut cores = 0.0;
        for _ in 0..CALMS_MAX {
            let (before, begin) = (total_cpu(self.servers)?, Instant::now());
            self.people.talk(CALM, &self.progress)?;
            self.people.settle()?;
            let used = total_cpu(self.servers)?.saturating_sub(before);
            cores = used.as_secs_f64() / begin.elapsed().as_secs_f64();
            let mut decoders = self.servers.iter().flat_map(|server| decoders(server.id()));
            if cores <= quiet.max(QUIET_CORES) * 1.5 && decoders.next().is_none() {
                break;
            }
        }
        Ok(cores)
    }

    /// Measures the pieces with and without hostile sessions in turn.
    fn pieces(&mut self, hostiles: &mut Hostiles, quiet: f64) -> anyhow::Result<Pieces> {
        let mut pieces = Pieces::default();
        for round in 0..self.options.rounds {
            // The order alternates, so that drift affects both kinds of pieces alike.
            for hostile in [round % 2 == 1, round % 2 == 0] {
                // The same messages in both. A message to everyone's channel, of which a piece has few, is 1 % of the
                // deliveries, so their p99 depends on the number of these.
                self.people.begin_part(1 + round as u64);
                if hostile {
                    self.piece(&mut pieces.with, Some(&mut *hostiles))?;
                    hostiles.ask(STOP)?;
                } else {
                    self.piece(&mut pieces.without, None)?;
                }
                if pieces.memory_kib == 0.0 {
                    pieces.memory_kib = total_kib(self.servers)?;
                }
                self.calm(quiet)?;
            }
        }
        Ok(pieces)
    }

    /// Measures one piece, with or without hostile sessions. It ends when every message has arrived, and the wait
    /// counts.
    fn piece(&mut self, cost: &mut Cost, hostiles: Option<&mut Hostiles>) -> anyhow::Result<()> {
        let hostile_cpu = match hostiles {
            Some(hostiles) => {
                hostiles.say(BEGIN)?;
                Some(hostiles.id)
            }
            None => None,
        };
        let (people, servers) = (&mut self.people, self.servers);
        people.warm_up(WARM_UP / 2, &self.progress)?;
        let look = || {
            anyhow::Ok(Cpu {
                gateway: total_cpu(servers)?,
                people: server::cpu(std::process::id())?,
                hostile: hostile_cpu.map_or(Ok(Duration::ZERO), server::cpu)?,
            })
        };
        let (before, begin) = (look()?, Instant::now());
        let length = Duration::from_secs(self.options.people.seconds);
        people.talk(length, &self.progress)?;
        people.settle()?;
        let after = look()?;
        cost.time += begin.elapsed();
        // The total can fall: a thread that has ended no longer counts.
        cost.cpu.gateway += after.gateway.saturating_sub(before.gateway);
        cost.cpu.people += after.people.saturating_sub(before.people);
        cost.cpu.hostile += after.hostile.saturating_sub(before.hostile);
        cost.waits.push(people.waits()?);
        Ok(())
    }

    /// Waits until `enough` is true or `within` is over. Returns the number of open descriptors beyond `before`.
    fn more_descriptors(
        &mut self,
        before: usize,
        within: Duration,
        enough: impl Fn(usize) -> bool,
    ) -> anyhow::Result<usize> {
        let end = Instant::now() + within;
        loop {
            let more = total_descriptors(self.servers)?.saturating_sub(before);
            if enough(more) || Instant::now() > end {
                return Ok(more);
            }
            self.people.talk(LOOK, &self.progress)?;
        }
    }
}

/// Judges the memory of the processes that decode pictures, and tells what came of the pictures.
fn judge_decoders(
    servers: &[Server],
    options: &Options,
    most: &Most,
    report: &mut Report,
) -> anyhow::Result<()> {
    let count = servers.len();
    report.at_most(
        "memory of the picture decoders, most",
        most.decoders_kib / 1024.0,
        DECODERS_MIB * count as f64,
        "MiB",
    );
    report.at_most(
        "picture decoders at once, most",
        most.decoders as f64,
        (DECODERS * count) as f64,
        "",
    );
    let mut all = 0.0;
    for outcome in ["shown", "refused", "failed"] {
        let name = format!("chat_pictures_total{{outcome=\"{outcome}\"}}");
        let pictures = servers
            .iter()
            .map(|server| Ok(server.metrics()?.get(&name).copied().unwrap_or(0.0)))
            .sum::<anyhow::Result<f64>>()?;
        report.figure(&format!("pictures {outcome}"), pictures, "");
        all += pictures;
    }
    // Without decoded pictures their memory would prove nothing.
    let sent = options
        .only
        .as_deref()
        .is_none_or(|kind| kind == PICTURE_BOMBS);
    report.must(
        all > 0.0 || !sent || count > 1,
        "no picture was decoded".to_owned(),
    );
    Ok(())
}

fn judge_descriptors(descriptors: &Descriptors, options: &Options, report: &mut Report) {
    let Descriptors {
        before,
        most,
        opened,
        left,
    } = *descriptors;
    report.figure("descriptors, before", before as f64, "");
    report.at_most(
        "descriptors, most above that",
        most.saturating_sub(before) as f64,
        (options.descriptors * options.hostile + DESCRIPTORS_SLACK) as f64,
        "",
    );
    // Without open connections the next figure would prove nothing.
    report.at_least(
        "descriptors, left open at first",
        opened as f64,
        (DESCRIPTORS_SLACK + 1) as f64,
        "",
    );
    report.at_most(
        "descriptors, left open in the end",
        left as f64,
        DESCRIPTORS_SLACK as f64,
        "",
    );
}

fn compare(report: &mut Report, without: &Cost, with: &Cost, judged: bool) {
    type Of = fn(&Waits) -> &Quantiles;
    let measures: [(&str, Of, bool); 3] = [
        ("acknowledged", |waits| &waits.acknowledged, true),
        ("delivered", |waits| &waits.delivered, true),
        ("ping answered", |waits| &waits.pong, false),
    ];
    for (name, of, goal) in measures {
        let all = |cost: &Cost, value: fn(&Quantiles) -> f64| -> Vec<f64> {
            cost.waits.iter().map(|waits| value(of(waits))).collect()
        };
        for (which, value) in [
            ("p50", (|q| q.p50) as fn(&Quantiles) -> f64),
            ("p99", |q| q.p99),
        ] {
            for (kind, cost) in [("without", without), ("with", with)] {
                let name = format!("{name} {which} {kind}");
                Spread::of(all(cost, value)).tell(report, &name, "ms");
            }
        }
        let ratios = Spread::ratios(&all(with, |q| q.p99), &all(without, |q| q.p99));
        let name = format!("{name} p99, with / without");
        ratios.tell(report, &format!("{name}, each round"), "");
        if goal && judged {
            report.speed_at_most(&name, ratios.median, RATIO_MAX, "");
        }
    }
    for (which, cost) in [("without", without), ("with", with)] {
        let cores = |cpu: Duration| cpu.as_secs_f64() / cost.time.as_secs_f64();
        report.figure(
            &format!("CPU of the gateway, {which}"),
            cores(cost.cpu.gateway),
            "cores",
        );
        report.figure(
            &format!("CPU of the people, {which}"),
            cores(cost.cpu.people),
            "cores",
        );
    }
    let cores = with.cpu.hostile.as_secs_f64() / with.time.as_secs_f64();
    report.figure("CPU of the hostile sessions", cores, "cores");
}
