//! Measures what reactions to one message of a large channel cost: its subscribers, the store, and people who chat in
//! groups meanwhile. In the end every reaction must be there once, in the store and in what each subscriber has.

mod reactors;
mod verify;
mod watchers;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use indicatif::ProgressBar;
use reactors::{Plan, Reactors};
use serde_json::json;
use verify::Verification;
use watchers::{Counts, Watchers};

use crate::{
    Common,
    client::{Client, client_id},
    crowd::channel::{WARM_UP, spinner},
    data::Data,
    latency::latencies,
    people::{self, Kind, People, Waits},
    report::Report,
    server::{Server, Watches, total_cpu},
    spread::Spread,
    store::celebrity::{OWNER, channel, rows_written},
};

#[derive(Args)]
pub(crate) struct Options {
    /// Participants of the channel
    #[arg(long, default_value_t = 100_000)]
    participants: usize,
    /// Reactions at --rate; each is of another user, or has another emoji
    #[arg(long, default_value_t = 100_000)]
    reactions: u64,
    /// Reactions per second
    #[arg(long, default_value_t = 1700.0)]
    rate: f64,
    /// Reactions per second of the first, short piece
    #[arg(long, default_value_t = 100.0)]
    slow_rate: f64,
    /// Seconds of that piece
    #[arg(long, default_value_t = 10.0)]
    slow_seconds: f64,
    /// Connected participants that are subscribed to the channel
    #[arg(long, default_value_t = 1000)]
    subscribers: usize,
    /// Other users, who chat in groups
    #[arg(long, default_value_t = 400)]
    people: usize,
    /// Messages per second of each of them
    #[arg(long, default_value_t = 0.5)]
    people_rate: f64,
    /// Pieces with people and reactions, and as many with people only
    #[arg(long, default_value_t = 4)]
    rounds: u32,
    /// Gateways, over one store; more than one needs --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
}

/// Goal for the `changed` events of a subscriber per second. Each 250 ms has one.
const EVENTS_MAX: f64 = 4.0;
/// Goal for the acknowledged reactions per second, of the rate at which they were sent. Below it, the other figures are
/// those of a lower rate.
const RATE_MIN: f64 = 0.9;
/// Goal for the rows per reaction, last tenth / first tenth.
const ROWS_RATIO_MAX: f64 = 1.1;
/// Goal for the people's p99, with reactions / without.
const RATIO_MAX: f64 = 1.2;
/// Participants of each group of the people.
const GROUP: usize = 20;
/// Bytes of the people's messages.
const SIZE: usize = 100;
/// The part of the reactions that each quiet piece has.
const TENTH: u64 = 10;
/// Time within which every subscriber must have the newest state.
const SEEN_WITHIN: Duration = Duration::from_secs(10);
/// Time in which the gateway finishes the work of a piece before the next one.
const CALM: Duration = Duration::from_secs(2);
/// Time between two looks at the written rows, and the maximum number of looks.
const LOOK: Duration = Duration::from_millis(500);
const LOOKS_MAX: usize = 20;

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("reactions", &common.outputs);
    let sizes = Sizes::of(options)?;
    match &common.cassandra[..] {
        [] => println!("  store: embedded"),
        nodes => println!("  store: Cassandra at {}", nodes.join(", ")),
    }
    let data = Data::new(common)?;
    let servers = Server::gateways(common, &data, options.gateways)?;
    let (channel, seq) = message(&servers, options.participants)?;
    let plan = Arc::new(Plan::new(&servers, channel, seq, options.participants - 1)?);
    ensure!(
        sizes.all() <= plan.capacity(),
        "--reactions: {} participants have only {} different reactions",
        options.participants,
        plan.capacity()
    );
    let watchers = Watchers::start(&servers, &plan.conversation, seq, options.subscribers)?;
    let mut people = People::gather(&servers, &chatting(options), Kind::Groups, Client::connect)?;
    people.time_replies()?;
    let watches = Watches::of(&servers);
    let mut run = Run {
        servers: &servers,
        options,
        plan: plan.clone(),
        watchers: &watchers,
        people,
        done: Done::new()?,
        progress: spinner(),
    };
    let pieces = run.pieces(&sizes)?;
    let Run { people, done, .. } = run;
    people.judge(&mut report);
    people.judge_replies(&mut report);
    pieces.tell(&mut report, options);
    report.latency("a reaction acknowledged", &done.latency);
    watches.draw(&mut report, "gateway");
    let verification = Verification {
        plan: &plan,
        asked: sizes.all(),
        done,
        counts: watchers.counts(),
        last_states: watchers.finish()?,
    };
    verification.run(&servers, &mut report)?;
    report.finish()
}

/// The number of reactions of each piece.
struct Sizes {
    slow: u64,
    first: u64,
    round: u64,
    rounds: u32,
    last: u64,
}

impl Sizes {
    fn of(options: &Options) -> anyhow::Result<Self> {
        let first = options.reactions / TENTH;
        let rounds = options.rounds;
        let round = (options.reactions - 2 * first) / u64::from(rounds.max(1));
        let sizes = Self {
            slow: (options.slow_rate * options.slow_seconds) as u64,
            first,
            round,
            rounds,
            last: options.reactions - first - round * u64::from(rounds),
        };
        ensure!(
            options.participants > options.subscribers,
            "--participants must be more than --subscribers"
        );
        ensure!(
            sizes.slow > 0 && first > 0 && options.subscribers > 0 && rounds > 0,
            "every piece needs reactions and subscribers"
        );
        ensure!(
            round as f64 / options.rate > WARM_UP.as_secs_f64(),
            "--reactions is too few for --rate and --rounds: a piece must take more than {} s",
            WARM_UP.as_secs()
        );
        Ok(sizes)
    }

    fn all(&self) -> u64 {
        self.slow + self.first + self.round * u64::from(self.rounds) + self.last
    }
}

fn chatting(options: &Options) -> people::Options {
    people::Options {
        users: options.people,
        rate: options.people_rate,
        participants: GROUP,
        size: SIZE,
        seconds: 0,
        gateways: options.gateways,
        seed: 1,
        change_every: 0,
    }
}

/// Creates the channel and a message in it. Returns their ids.
fn message(servers: &[Server], participants: usize) -> anyhow::Result<(String, u64)> {
    let mut owner = Client::connect(&servers[0].address, OWNER, 0)?;
    let channel = channel(&mut owner, participants)?;
    let send = json!({"type": "send", "conversation": channel, "client_id": client_id(), "body": "react!"});
    let sent = owner.ask(send)?;
    Ok((channel, sent["seq"].as_u64().context("`sent` has no seq")?))
}

/// A run in progress.
struct Run<'a> {
    servers: &'a [Server],
    options: &'a Options,
    plan: Arc<Plan>,
    watchers: &'a Watchers,
    people: People,
    done: Done,
    progress: ProgressBar,
}

/// What became of the reactions of all pieces so far.
struct Done {
    /// The number of the next reaction.
    next: u64,
    acknowledged: u64,
    /// Numbers of the reactions that were refused.
    refused: Vec<u64>,
    /// The first refusal.
    refusal: Option<String>,
    /// The highest rev of an acknowledgement.
    rev: u64,
    /// Microseconds from due to acknowledged.
    latency: Histogram<u64>,
}

/// All pieces.
struct Pieces {
    slow: Quiet,
    first: Quiet,
    rounds: Rounds,
    last: Quiet,
}

/// What a subscriber got in a piece, on average.
#[derive(Clone, Copy)]
struct SeenByOne {
    reactions: f64,
    events: f64,
    bytes: f64,
    /// From the first reaction to the last acknowledgement.
    seconds: f64,
}

/// A piece with reactions only.
struct Quiet {
    seen: SeenByOne,
    rows: f64,
    cpu: Duration,
}

/// All pieces with people.
#[derive(Default)]
struct Rounds {
    with: Cost,
    without: Cost,
    seen: Vec<SeenByOne>,
}

/// What people waited for in each piece, and the CPU of the gateways in all pieces.
#[derive(Default)]
struct Cost {
    waits: Vec<Waits>,
    cpu: Duration,
    /// Reactions that were due in that time, if there were any.
    reactions: f64,
}

impl Done {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            next: 0,
            acknowledged: 0,
            refused: Vec::new(),
            refusal: None,
            rev: 0,
            latency: latencies()?,
        })
    }
}

impl Run<'_> {
    /// Starts this many reactions.
    fn react(&mut self, count: u64, rate: f64) -> anyhow::Result<Reactors> {
        let begin = self.done.next;
        self.done.next += count;
        Reactors::start(self.plan.clone(), begin..self.done.next, rate)
    }

    /// Waits until all reactions are answered and every subscriber has the newest state. Returns what a subscriber got
    /// since `before`.
    fn seen(&mut self, reactors: Reactors, before: Counts) -> anyhow::Result<SeenByOne> {
        while !reactors.are_done() {
            self.read()?;
        }
        let answers = reactors.finish()?;
        let reactions = answers.acknowledged as f64;
        let done = &mut self.done;
        done.acknowledged += answers.acknowledged;
        done.refused.extend(answers.refused);
        done.refusal = done.refusal.take().or(answers.refusal);
        done.rev = done.rev.max(answers.rev);
        done.latency.add(&answers.latency)?;
        let end = Instant::now() + SEEN_WITHIN;
        while self.watchers.counts().rev < self.done.rev && Instant::now() < end {
            self.read()?;
        }
        let (after, subscribers) = (self.watchers.counts(), self.watchers.count as f64);
        Ok(SeenByOne {
            reactions,
            events: (after.changed - before.changed) as f64 / subscribers,
            bytes: (after.bytes - before.bytes) as f64 / subscribers,
            seconds: answers.time.as_secs_f64(),
        })
    }

    /// Reads what arrives for the people, mostly pings.
    fn read(&mut self) -> anyhow::Result<()> {
        let Done { next, refused, .. } = &self.done;
        self.progress
            .set_message(format!("{next} reactions, {} refused", refused.len()));
        self.progress.tick();
        self.people.crowd.read(Duration::from_millis(5))
    }

    /// Measures a piece with reactions only.
    fn quiet(&mut self, count: u64, rate: f64) -> anyhow::Result<Quiet> {
        let rows = self.rows_settled()?;
        let (seen, cpu) = (self.watchers.counts(), total_cpu(self.servers)?);
        let reactors = self.react(count, rate)?;
        let seen = self.seen(reactors, seen)?;
        // The total can fall: a thread that has ended no longer counts.
        let cpu = total_cpu(self.servers)?.saturating_sub(cpu);
        Ok(Quiet {
            seen,
            rows: self.rows_settled()? - rows,
            cpu,
        })
    }

    /// Waits until the gateways write no more, within bounds. Returns the number of rows written so far.
    fn rows_settled(&mut self) -> anyhow::Result<f64> {
        let mut before = -1.0;
        for _ in 0..LOOKS_MAX {
            let mut now = 0.0;
            for server in self.servers {
                now += rows_written(server)?.values().sum::<f64>();
            }
            if now == before {
                break;
            }
            before = now;
            let end = Instant::now() + LOOK;
            while Instant::now() < end {
                self.read()?;
            }
        }
        Ok(before)
    }

    /// Measures all pieces.
    fn pieces(&mut self, sizes: &Sizes) -> anyhow::Result<Pieces> {
        let rate = self.options.rate;
        self.calm()?;
        let slow = self.quiet(sizes.slow, self.options.slow_rate)?;
        let first = self.quiet(sizes.first, rate)?;
        let rounds = self.rounds(sizes.round)?;
        let last = self.quiet(sizes.last, rate)?;
        self.progress.finish_and_clear();
        Ok(Pieces {
            slow,
            first,
            rounds,
            last,
        })
    }

    /// Lets people talk while the gateways finish earlier work.
    fn calm(&mut self) -> anyhow::Result<()> {
        self.people.talk(CALM, &self.progress)?;
        self.people.settle()
    }

    /// Measures the pieces with and without reactions in turn.
    fn rounds(&mut self, in_round: u64) -> anyhow::Result<Rounds> {
        let mut rounds = Rounds::default();
        for round in 0..self.options.rounds {
            // The order alternates, so that drift affects both kinds of pieces alike.
            for reacting in [round % 2 == 1, round % 2 == 0] {
                self.calm()?;
                // The same messages in both.
                self.people.begin_part(1 + u64::from(round));
                if reacting {
                    let before = self.watchers.counts();
                    let reactors = self.react(in_round, self.options.rate)?;
                    self.piece(&mut rounds.with, in_round)?;
                    let seen = self.seen(reactors, before)?;
                    rounds.seen.push(seen);
                } else {
                    self.piece(&mut rounds.without, in_round)?;
                }
            }
        }
        Ok(rounds)
    }

    /// Measures the people's waits while the reactions of a piece are due.
    fn piece(&mut self, cost: &mut Cost, reactions: u64) -> anyhow::Result<()> {
        let (people, begin) = (&mut self.people, WARM_UP / 2);
        people.warm_up(begin, &self.progress)?;
        let cpu = total_cpu(self.servers)?;
        let length = Duration::from_secs_f64(reactions as f64 / self.options.rate);
        people.talk(length.saturating_sub(begin), &self.progress)?;
        people.settle()?;
        cost.cpu += total_cpu(self.servers)?.saturating_sub(cpu);
        cost.reactions += reactions as f64 * (1.0 - begin.div_duration_f64(length));
        cost.waits.push(people.waits()?);
        Ok(())
    }
}

impl SeenByOne {
    /// Events, bytes and seconds of several pieces together.
    fn sum(pieces: &[Self]) -> Self {
        let sum = |of: fn(&Self) -> f64| pieces.iter().map(of).sum();
        Self {
            reactions: sum(|piece| piece.reactions),
            // n intervals have n + 1 ends: the event that ends a piece belongs to the rest after it.
            events: sum(|piece| (piece.events - 1.0).max(0.0)),
            bytes: sum(|piece| piece.bytes),
            seconds: sum(|piece| piece.seconds),
        }
    }
}

impl Pieces {
    fn tell(self, report: &mut Report, options: &Options) {
        let mut fast = self.rounds.seen.clone();
        fast.extend([self.first.seen, self.last.seen]);
        tell_seen(report, options.slow_rate, SeenByOne::sum(&[self.slow.seen]));
        tell_seen(report, options.rate, SeenByOne::sum(&fast));
        let pieces = [
            ("slow piece", &self.slow),
            ("first tenth", &self.first),
            ("last tenth", &self.last),
        ];
        for (name, piece) in pieces {
            report.figure(&format!("rows per reaction, {name}"), piece.rows(), "");
            let cpu_us = piece.cpu.as_secs_f64() * 1e6 / piece.seen.reactions;
            report.figure(&format!("CPU per reaction, {name}"), cpu_us, "µs");
        }
        report.at_most(
            "rows per reaction, last / first tenth",
            self.last.rows() / self.first.rows(),
            ROWS_RATIO_MAX,
            "",
        );
        self.rounds.tell(report);
    }
}

impl Quiet {
    /// Rows written per reaction.
    fn rows(&self) -> f64 {
        self.rows / self.seen.reactions
    }
}

fn tell_seen(report: &mut Report, rate: f64, seen: SeenByOne) {
    let SeenByOne {
        reactions,
        events,
        bytes,
        seconds,
    } = seen;
    report.speed_at_least(
        &format!("acknowledged reactions, at {rate}/s"),
        reactions / seconds,
        rate * RATE_MIN,
        "/s",
    );
    report.at_most(
        &format!("events per subscriber, at {rate}/s"),
        events / seconds,
        EVENTS_MAX,
        "/s",
    );
    report.figure(
        &format!("bytes per subscriber, at {rate}/s"),
        bytes / seconds,
        "B/s",
    );
}

impl Rounds {
    fn tell(self, report: &mut Report) {
        let Self { with, without, .. } = self;
        let more = with.cpu.as_secs_f64() - without.cpu.as_secs_f64();
        report.figure(
            "CPU per reaction, beside people",
            more * 1e6 / with.reactions,
            "µs",
        );
        type Of = fn(&Waits) -> f64;
        let waits: [(&str, Of); 2] = [
            ("acknowledged", |waits| waits.acknowledged.p99),
            ("delivered", |waits| waits.delivered.p99),
        ];
        for (name, of) in waits {
            let all = |cost: &Cost| -> Vec<f64> { cost.waits.iter().map(of).collect() };
            let (with, without) = (all(&with), all(&without));
            let ratios = Spread::ratios(&with, &without);
            Spread::of(without).tell(report, &format!("people's {name} p99, without"), "ms");
            Spread::of(with).tell(report, &format!("people's {name} p99, with"), "ms");
            let name = format!("people's {name} p99, with / without");
            ratios.tell(report, &format!("{name}, each round"), "");
            report.speed_at_most(&name, ratios.median, RATIO_MAX, "");
        }
    }
}
