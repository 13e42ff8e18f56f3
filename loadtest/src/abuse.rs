//! Measures what hostile sessions cost ordinary users, and how much memory they make a gateway with default limits use.
//! Pieces with and without hostile sessions alternate in one run, and their medians are compared.

use std::{
    io::{BufRead, BufReader, Write as _},
    net::{IpAddr, Ipv4Addr},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle, sleep},
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::Args;
use hdrhistogram::Histogram;
use indicatif::ProgressBar;
use serde_json::json;

use crate::{
    Common,
    attacks::{Hostile, KINDS, LINKED, linked},
    client::Client,
    crowd::latencies,
    data::Data,
    ending,
    fanout::{WARM_UP, spinner},
    hostile::{BEGIN, Done, LEAVE, Orders, STOP},
    people::{self, Kind, People},
    replies::Replies,
    report::Report,
    server::{self, Server, token, total_cpu},
    spread::Spread,
};

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
/// Longest time between two acts of a hostile session. Above it, the run proves nothing.
const IDLE_MS_MAX: u64 = 1_000;
/// Time after which a kind of misuse must have had at least one act.
const LONG_MS: u64 = 10_000;
/// Descriptors that come and go without clients: files of the store.
const DESCRIPTORS_SLACK: usize = 24;
/// Time within which the gateway accepts new connections.
const ACCEPTED_WITHIN: Duration = Duration::from_secs(1);
/// Minimum time between two pieces, so that the work one leaves behind does not count for the next.
const CALM: Duration = Duration::from_secs(1);
/// Maximum number of times that `CALM` is waited for.
const CALMS_MAX: usize = 20;
/// CPU below which a gateway has finished the work of the previous piece.
const QUIET_CORES: f64 = 0.1;
/// Time between two samples of memory and descriptors.
const LOOK: Duration = Duration::from_millis(250);

/// Waiting times of ordinary users in each piece, in milliseconds, and the CPU of all pieces.
#[derive(Default)]
struct Waits {
    acknowledged: Vec<Quantiles>,
    delivered: Vec<Quantiles>,
    pong: Vec<Quantiles>,
    cpu: Cpu,
    time: Duration,
}

struct Quantiles {
    p50: f64,
    p99: f64,
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
    let servers = Server::gateways(common, &data, options.people.gateways)?;
    // Each user connects from an address of their own, as in reality.
    let connect = |server: &str, user: &str, number: usize| {
        Client::connect_as(server, user, address(65, number))
    };
    let mut people = People::gather(&servers, &options.people, Kind::Mixed, connect)?;
    people.crowd.replies = Some(Replies::new()?);
    let mut hostiles = Hostiles::start(orders(&servers, options)?)?;
    let watches: Vec<_> = servers.iter().map(Server::watch).collect();
    let progress = spinner();
    people.talk(WARM_UP, &progress)?;
    people.settle()?;
    let quiet = calm(&mut people, &servers, f64::INFINITY, &progress)?;
    let descriptors = descriptors(&servers)?;
    let mut memory_kib = 0.0;
    let held = Held::watch(&servers);
    let (mut without, mut with) = (Waits::default(), Waits::default());
    for round in 0..options.rounds {
        // The order alternates, so that drift affects both kinds of pieces alike.
        for hostile in [round % 2 == 1, round % 2 == 0] {
            let waits = if hostile { &mut with } else { &mut without };
            let begun = hostile.then_some(&mut hostiles);
            piece(waits, &mut people, &servers, begun, options, &progress)?;
            if hostile {
                hostiles.ask(STOP)?;
            }
            if memory_kib == 0.0 {
                memory_kib = total_kib(&servers)?;
            }
            calm(&mut people, &servers, quiet, &progress)?;
        }
    }
    // The gateway must close the connections that the hostile sessions leave open.
    let done = hostiles.ask(LEAVE)?;
    let mut more_than_before = |within, enough: fn(usize) -> bool| {
        more_descriptors(
            &servers,
            descriptors,
            within,
            enough,
            &mut people,
            &progress,
        )
    };
    let opened = more_than_before(ACCEPTED_WITHIN, |more| more > DESCRIPTORS_SLACK)?;
    let closed_within = Duration::from_secs(options.closed_within);
    let left = more_than_before(closed_within, |more| more <= DESCRIPTORS_SLACK)?;
    people.settle()?;
    progress.finish_and_clear();
    people.judge(&mut report);
    if let Some(replies) = &people.crowd.replies {
        let first = replies.refusal.as_deref().unwrap_or_default();
        report.must(
            replies.refused == 0,
            format!(
                "{} requests of ordinary users were refused, the first with: {first}",
                replies.refused
            ),
        );
    }
    let most = held.stop();
    done.tell(&mut report);
    let judged = options.people.gateways == 1 && common.cassandra.is_empty();
    compare(&mut report, &without, &with, judged);
    let count = servers.len() as f64;
    report.at_most(
        "memory, most above the first piece without",
        (most.memory_kib - memory_kib) / 1024.0,
        options.memory_mib * count,
        "MiB",
    );
    report.figure("descriptors, before", descriptors as f64, "");
    report.at_most(
        "descriptors, most above that",
        most.descriptors.saturating_sub(descriptors) as f64,
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
    for (number, watch) in (1..).zip(watches) {
        watch.stop().draw(&mut report, &format!("gateway {number}"));
    }
    report.finish()
}

/// Lets people talk until the gateways need about as little CPU as `quiet`, in cores. Returns the last measurement.
fn calm(
    people: &mut People,
    servers: &[Server],
    quiet: f64,
    progress: &ProgressBar,
) -> anyhow::Result<f64> {
    let mut cores = 0.0;
    for _ in 0..CALMS_MAX {
        let (before, begin) = (total_cpu(servers)?, Instant::now());
        people.talk(CALM, progress)?;
        people.settle()?;
        let used = total_cpu(servers)?.saturating_sub(before);
        cores = used.as_secs_f64() / begin.elapsed().as_secs_f64();
        if cores <= quiet.max(QUIET_CORES) * 1.5 {
            break;
        }
    }
    Ok(cores)
}

/// Measures one piece, with or without hostile sessions. It ends when every message has arrived, and the wait counts.
fn piece(
    waits: &mut Waits,
    people: &mut People,
    servers: &[Server],
    hostiles: Option<&mut Hostiles>,
    options: &Options,
    progress: &ProgressBar,
) -> anyhow::Result<()> {
    let hostile_cpu = match hostiles {
        Some(hostiles) => {
            hostiles.say(BEGIN)?;
            Some(hostiles.id)
        }
        None => None,
    };
    people.talk(WARM_UP / 2, progress)?;
    people.crowd.forget_latency();
    people.crowd.replies.iter_mut().for_each(Replies::forget);
    let look = || {
        anyhow::Ok(Cpu {
            gateway: total_cpu(servers)?,
            people: server::cpu(std::process::id())?,
            hostile: hostile_cpu.map_or(Ok(Duration::ZERO), server::cpu)?,
        })
    };
    let (before, begin) = (look()?, Instant::now());
    people.talk(Duration::from_secs(options.people.seconds), progress)?;
    people.settle()?;
    let after = look()?;
    waits.time += begin.elapsed();
    // The total can fall: a thread that has ended no longer counts.
    waits.cpu.gateway += after.gateway.saturating_sub(before.gateway);
    waits.cpu.people += after.people.saturating_sub(before.people);
    waits.cpu.hostile += after.hostile.saturating_sub(before.hostile);
    let mut delivered = latencies()?;
    for latency in &people.crowd.latency {
        delivered.add(latency)?;
    }
    waits.delivered.push(Quantiles::of(&delivered));
    if let Some(replies) = &people.crowd.replies {
        waits.acknowledged.push(Quantiles::of(&replies.sent));
        waits.pong.push(Quantiles::of(&replies.pong));
    }
    Ok(())
}

impl Quantiles {
    fn of(latency: &Histogram<u64>) -> Self {
        let ms = |quantile| latency.value_at_quantile(quantile) as f64 / 1000.0;
        Self {
            p50: ms(0.5),
            p99: ms(0.99),
        }
    }
}

fn compare(report: &mut Report, without: &Waits, with: &Waits, judged: bool) {
    type Of = fn(&Waits) -> &Vec<Quantiles>;
    let measures: [(&str, Of, bool); 3] = [
        ("acknowledged", |waits| &waits.acknowledged, true),
        ("delivered", |waits| &waits.delivered, true),
        ("ping answered", |waits| &waits.pong, false),
    ];
    for (name, of, goal) in measures {
        let tell =
            |report: &mut Report, which: &str, waits: &Waits, value: fn(&Quantiles) -> f64| {
                let spread = Spread::of(of(waits).iter().map(value).collect());
                spread.tell(report, &format!("{name} {which}"), "ms");
                spread.median
            };
        tell(report, "p50 without", without, |q| q.p50);
        tell(report, "p50 with", with, |q| q.p50);
        let alone = tell(report, "p99 without", without, |q| q.p99);
        let beside = tell(report, "p99 with", with, |q| q.p99);
        let ratio = format!("{name} p99, with / without");
        if goal && judged {
            report.at_most(&ratio, beside / alone, RATIO_MAX, "");
        } else {
            report.figure(&ratio, beside / alone, "");
        }
    }
    for (which, waits) in [("without", without), ("with", with)] {
        let cores = |cpu: Duration| cpu.as_secs_f64() / waits.time.as_secs_f64();
        report.figure(
            &format!("CPU of the gateway, {which}"),
            cores(waits.cpu.gateway),
            "cores",
        );
        report.figure(
            &format!("CPU of the people, {which}"),
            cores(waits.cpu.people),
            "cores",
        );
    }
    let cores = with.cpu.hostile.as_secs_f64() / with.time.as_secs_f64();
    report.figure("CPU of the hostile sessions", cores, "cores");
}

/// The process of the hostile sessions, separate so that its CPU can be measured. It has the same niceness as the
/// gateway: a nicer process was delayed for seconds by a gateway that it kept busy, and attackers on other machines are
/// not.
struct Hostiles {
    _process: Arc<Mutex<Child>>,
    id: u32,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Hostiles {
    fn start(orders: Orders) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("hostile");
        let process = ending::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let mut child = process.lock().unwrap_or_else(PoisonError::into_inner);
        let (id, input, output) = (child.id(), child.stdin.take(), child.stdout.take());
        drop(child);
        let mut hostiles = Self {
            _process: process,
            id,
            input: input.context("the process of the hostile sessions has no input")?,
            output: BufReader::new(
                output.context("the process of the hostile sessions has no output")?,
            ),
        };
        hostiles.say(&serde_json::to_string(&orders)?)?;
        Ok(hostiles)
    }

    fn say(&mut self, line: &str) -> anyhow::Result<()> {
        Ok(writeln!(self.input, "{line}")?)
    }

    /// Sends a line and returns what the sessions did since the process began.
    fn ask(&mut self, line: &str) -> anyhow::Result<Done> {
        self.say(line)?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        serde_json::from_str(&line).context("the process of the hostile sessions failed")
    }
}

impl Done {
    fn tell(&self, report: &mut Report) {
        println!("  acts of the hostile sessions:");
        for (name, tally) in self
            .kinds
            .iter()
            .filter(|(_, tally)| tally.milliseconds > 0)
        {
            let seconds = tally.milliseconds as f64 / 1000.0;
            let outcomes: Vec<_> = tally
                .outcomes
                .iter()
                .map(|(what, count)| format!("{what} {count}"))
                .collect();
            println!(
                "    {name:<32} {seconds:>6.1} s {:>9} acts {:>9.1} MB {:>7} connections, {} refused, {} held; {}",
                tally.acts,
                tally.bytes as f64 / 1e6,
                tally.connections,
                tally.refused,
                tally.held,
                outcomes.join(", ")
            );
            // A session whose `connect` waits counts as active. In a long run some of them must connect.
            let carried_out = tally.acts + tally.held;
            let enough = carried_out >= (tally.milliseconds / 1000).max(1);
            report.must(
                enough && (tally.acts > 0 || tally.milliseconds < LONG_MS),
                format!("misuse was hardly carried out: {name}, {carried_out} acts"),
            );
        }
        println!(
            "    longest time between two turns of a session: {} ms",
            self.turn_ms_max
        );
        for (number, session) in (1..).zip(&self.sessions) {
            println!(
                "    session {number:<3} {:>9} acts {:>9.1} MB, fewest per second {}, longest time between two {} ms",
                session.acts,
                session.bytes as f64 / 1e6,
                session.least_per_second,
                session.idle_ms
            );
            report.must(
                session.idle_ms <= IDLE_MS_MAX,
                format!(
                    "hostile session {number} was idle for {} ms",
                    session.idle_ms
                ),
            );
        }
    }
}

/// The address of client `number` in a /16 network of loopback.
fn address(network: u8, number: usize) -> IpAddr {
    const HOSTS: usize = 250;
    let byte = |n: usize| (n % HOSTS + 1) as u8;
    IpAddr::V4(Ipv4Addr::new(
        127,
        network,
        byte(number / HOSTS),
        byte(number),
    ))
}

/// Creates what the hostile sessions need: their own groups with large messages, a busy channel, private channels of
/// others.
fn orders(servers: &[Server], options: &Options) -> anyhow::Result<Orders> {
    const PRIVATE: usize = 4;
    const NETWORK: u8 = 66;
    let hostile = |number: usize, user: String| {
        let source = address(NETWORK, number % usize::from(options.addresses));
        let server = &servers[number % servers.len()].address;
        let mut client = Client::connect_as(server, &user, source)?;
        let group =
            client.create_patiently(json!({"type": "create", "kind": "group", "name": "own"}))?;
        let who = Hostile {
            server: server.parse()?,
            source,
            token: token(&user)?,
            user,
            group,
            busy: String::new(),
            private: Vec::new(),
        };
        anyhow::Ok((who, client))
    };
    // The writer has an address that no hostile session uses.
    let (mut writer, mut client) = hostile(usize::from(options.addresses), "writer".to_owned())?;
    writer.source = address(NETWORK, usize::from(options.addresses));
    let busy = json!({"type": "create", "kind": "channel", "name": "busy", "public": true});
    writer.busy = client.create_patiently(busy)?;
    for _ in 0..PRIVATE {
        let channel = json!({"type": "create", "kind": "channel", "name": "private"});
        writer.private.push(client.create_patiently(channel)?);
    }
    let mut hostiles = Vec::new();
    for number in 0..options.hostile {
        let (mut who, mut client) = hostile(number, format!("hostile-{number}"))?;
        for number in 0..LINKED {
            client.ask_patiently(&linked(&who.group, number))?;
        }
        (who.busy, who.private) = (writer.busy.clone(), writer.private.clone());
        hostiles.push(who);
    }
    Ok(Orders {
        hostiles,
        writer,
        turn_ms: options.turn,
        only: options.only.as_deref().map(numbered).transpose()?,
    })
}

/// The number of a kind of misuse.
fn numbered(name: &str) -> anyhow::Result<usize> {
    let number = KINDS.iter().position(|(kind, _)| *kind == name);
    number.with_context(|| {
        let names: Vec<_> = KINDS.iter().map(|(kind, _)| *kind).collect();
        format!(
            "--only {name:?} is no kind of misuse. Kinds: {}",
            names.join("; ")
        )
    })
}

/// Maxima of the gateways together.
#[derive(Default)]
struct Most {
    memory_kib: f64,
    descriptors: usize,
}

/// A thread that samples memory and descriptors of the gateways.
struct Held {
    running: Arc<AtomicBool>,
    thread: JoinHandle<Most>,
}

impl Held {
    fn watch(servers: &[Server]) -> Self {
        let running = Arc::new(AtomicBool::new(true));
        let (goes_on, ids) = (
            running.clone(),
            servers.iter().map(Server::id).collect::<Vec<_>>(),
        );
        let thread = thread::spawn(move || {
            let mut most = Most::default();
            while goes_on.load(Ordering::Relaxed) {
                let kib = ids
                    .iter()
                    .filter_map(|&id| server::resident_kib(id).ok())
                    .sum();
                most.memory_kib = most.memory_kib.max(kib);
                let open = ids
                    .iter()
                    .filter_map(|&id| server::descriptors(id).ok())
                    .sum();
                most.descriptors = most.descriptors.max(open);
                sleep(LOOK);
            }
            most
        });
        Self { running, thread }
    }

    fn stop(self) -> Most {
        self.running.store(false, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

fn total_kib(servers: &[Server]) -> anyhow::Result<f64> {
    servers.iter().map(Server::resident_kib).sum()
}

fn descriptors(servers: &[Server]) -> anyhow::Result<usize> {
    servers
        .iter()
        .map(|server| server::descriptors(server.id()))
        .sum()
}

/// Waits until `enough` is true or `within` is over. Returns the number of open descriptors beyond `before`.
fn more_descriptors(
    servers: &[Server],
    before: usize,
    within: Duration,
    enough: impl Fn(usize) -> bool,
    people: &mut People,
    progress: &ProgressBar,
) -> anyhow::Result<usize> {
    let end = Instant::now() + within;
    loop {
        let more = descriptors(servers)?.saturating_sub(before);
        if enough(more) || Instant::now() > end {
            return Ok(more);
        }
        people.talk(LOOK, progress)?;
    }
}
