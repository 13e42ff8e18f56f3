//! Simulates people in groups, and in a channel for everyone, while gateways are killed, or drained and replaced by
//! another build. They reconnect with their cursors to any gateway and repeat messages that were not acknowledged. In the
//! end everyone must have each of their logs, complete and in order.

mod person;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::Args;
use hdrhistogram::Histogram;
use indicatif::ProgressBar;
use person::{Person, live, name};
use serde_json::{Value, json};

use crate::{
    Common,
    client::Client,
    data::Data,
    latency::latencies,
    report::Report,
    server::{Server, other_build},
};

#[derive(Args)]
pub(crate) struct Options {
    /// Users, each on a connection of their own
    #[arg(long, default_value_t = 40)]
    users: usize,
    /// Messages per second of each user
    #[arg(long, default_value_t = 2.0)]
    rate: f64,
    /// Participants of a group, and groups of each user
    #[arg(long, default_value_t = 5)]
    participants: usize,
    /// Kills; each takes the next gateway in turn
    #[arg(long, default_value_t = 6)]
    kills: usize,
    /// Seconds from the moment a killed gateway is ready again until the next kill
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Gateways, over one store; more than one needs --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
    /// Program of an earlier build; instead of kills, each gateway begins with it and is drained and replaced by --gateway,
    /// one after the other, then all of them back, and forward again, and then the upgrade is finalized. One gateway with its
    /// own directory is only replaced forward, because its start finalizes
    #[arg(long, value_name = "PROGRAM")]
    upgrade_from: Option<PathBuf>,
    /// Seed of what each user writes and where
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Time within which everyone must have everything once nobody writes.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);
/// Time within which all gateways must have a level that rose.
const LEVEL_WITHIN: Duration = Duration::from_secs(10);
/// The metric with the level.
const LEVEL: &str = "chat_cluster_level";
/// Time until a failed connection is retried.
const RETRY_AFTER: Duration = Duration::from_millis(50);
/// The client ids of a conversation's messages, by seq.
type Log = BTreeMap<u64, String>;

/// State shared by all people.
struct World {
    epoch: Instant,
    /// Addresses of the gateways. A gateway that is down keeps its last address.
    addresses: Mutex<Vec<String>>,
    writing: AtomicBool,
    over: AtomicBool,
}

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("chaos", &common.outputs);
    anyhow::ensure!(
        options.users >= options.participants,
        "--users must be at least --participants"
    );
    let data = Data::new(common)?;
    let several = options.gateways > 1;
    let earlier = earlier(common, options)?;
    let first = earlier.as_ref().unwrap_or(common);
    let mut servers = Server::gateways(first, &data, options.gateways)?;
    let groups = groups(&servers[0].address, options)?;
    let world = Arc::new(World {
        epoch: Instant::now(),
        addresses: Mutex::new(servers.iter().map(|s| s.address.clone()).collect()),
        writing: AtomicBool::new(true),
        over: AtomicBool::new(false),
    });
    let people: Vec<Arc<Mutex<Person>>> = (0..options.users)
        .map(|n| Person::new(n, &groups, options))
        .collect::<Result<_, _>>()?;
    let threads = begin(&world, &people, options);

    let replacements = replacements(common, earlier.as_ref(), &data, options);
    let progress = ProgressBar::new(replacements.len() as u64);
    let pause = Duration::from_secs(options.seconds);
    let mut down = latencies()?;
    thread::sleep(pause);
    for &(replaced, build) in &replacements {
        let begin = Instant::now();
        if earlier.is_some() {
            servers[replaced].drain()?;
        } else {
            servers[replaced].kill()?;
        }
        servers[replaced] = Server::one(build, &data, several)?;
        down.saturating_record(begin.elapsed().as_micros() as u64);
        lock(&world.addresses)[replaced].clone_from(&servers[replaced].address);
        progress.inc(1);
        thread::sleep(pause);
    }
    progress.finish_and_clear();
    if earlier.is_some() && data.cluster.is_some() {
        finalize(common, &data, &servers, &mut report)?;
        thread::sleep(pause);
    }
    world.writing.store(false, Ordering::Relaxed);
    let logs = settled_logs(&servers[0].address, &groups, &people);
    world.over.store(true, Ordering::Relaxed);
    for thread in threads {
        drop(thread.join());
    }
    judge(&people, &logs?, &mut report)?;
    let (what, until) = match earlier {
        None => ("kills", "killed until ready again"),
        Some(_) => ("replacements", "drained until another build is ready"),
    };
    report.figure(what, replacements.len() as f64, "");
    report.latency(until, &down);
    report.finish()
}

/// Returns the options with the earlier build, if this run is an upgrade from one.
fn earlier(common: &Common, options: &Options) -> anyhow::Result<Option<Common>> {
    let with = |program: &PathBuf| {
        anyhow::Ok(Common {
            gateway: Some(other_build("--upgrade-from", program)?),
            ..common.clone()
        })
    };
    options.upgrade_from.as_ref().map(with).transpose()
}

/// Ends the upgrade while everyone writes, and waits until each gateway has the level that rose.
fn finalize(
    common: &Common,
    data: &Data,
    servers: &[Server],
    report: &mut Report,
) -> anyhow::Result<()> {
    let levels = || -> anyhow::Result<Vec<f64>> {
        let level = |server: &Server| Ok(server.metrics()?.get(LEVEL).copied().unwrap_or(0.0));
        servers.iter().map(level).collect()
    };
    let before = levels()?;
    let said = Server::finalize(common, data)?;
    println!("  {}", said.trim_end());
    let risen = |now: &[f64]| now.iter().zip(&before).all(|(now, before)| now > before);
    // Two builds of one level leave it as it is.
    let same = said.contains("already");
    let (until, mut now) = (Instant::now() + LEVEL_WITHIN, levels()?);
    while !same && !risen(&now) && Instant::now() < until {
        thread::sleep(RETRY_AFTER);
        now = levels()?;
    }
    let what = format!("the level was {before:?} and is {now:?}");
    report.must(risen(&now) || same && now == before, what);
    Ok(())
}

/// Starts a thread for each person, who lives until the run is over.
fn begin(
    world: &Arc<World>,
    people: &[Arc<Mutex<Person>>],
    options: &Options,
) -> Vec<JoinHandle<()>> {
    (0..)
        .zip(people)
        .map(|(number, person)| {
            let (world, person) = (world.clone(), person.clone());
            let (rate, seed) = (
                options.rate,
                options.seed.wrapping_mul(1_000_003) + number as u64,
            );
            thread::spawn(move || live(&world, &person, number, rate, seed))
        })
        .collect()
}

/// Returns the gateways to replace, in order, each with the build that replaces it.
fn replacements<'a>(
    common: &'a Common,
    earlier: Option<&'a Common>,
    data: &Data,
    options: &Options,
) -> Vec<(usize, &'a Common)> {
    match earlier {
        None => (0..options.kills)
            .map(|kill| (kill % options.gateways, common))
            .collect(),
        Some(_) if data.cluster.is_none() => vec![(0, common)],
        Some(earlier) => [common, earlier, common]
            .into_iter()
            .flat_map(|build| (0..options.gateways).map(move |gateway| (gateway, build)))
            .collect(),
    }
}

/// Creates the conversations. Group `n` has the users from `n` on; the last conversation is a channel with everyone.
fn groups(address: &str, options: &Options) -> anyhow::Result<Vec<String>> {
    let mut groups = Vec::new();
    for number in 0..=options.users {
        let (kind, count) = if number < options.users {
            ("group", options.participants)
        } else {
            ("channel", options.users)
        };
        let members: Vec<String> = (number..number + count)
            .map(|n| name(n % options.users))
            .collect();
        let mut maker = Client::connect(address, &members[0], 0)?;
        let create = json!({"type": "create", "kind": kind, "name": format!("{kind} {number}"),
            "participants": members[1..], "posting": "everyone"});
        groups.push(maker.create(create)?);
    }
    Ok(groups)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until all messages are acknowledged and received. Returns the log of each conversation.
fn settled_logs(
    address: &str,
    groups: &[String],
    people: &[Arc<Mutex<Person>>],
) -> anyhow::Result<HashMap<String, Log>> {
    groups
        .iter()
        .map(|group| Ok((group.clone(), settled_log(address, group, people)?)))
        .collect()
}

/// Waits until all messages of a conversation are acknowledged and received. Returns its log.
fn settled_log(address: &str, group: &str, people: &[Arc<Mutex<Person>>]) -> anyhow::Result<Log> {
    let until = Instant::now() + SETTLED_WITHIN;
    while people.iter().any(|person| !lock(person).waiting.is_empty()) && Instant::now() < until {
        thread::sleep(RETRY_AFTER);
    }
    let members: Vec<_> = people
        .iter()
        .filter(|p| lock(p).got.contains_key(group))
        .collect();
    let reader = lock(
        members
            .first()
            .context("the conversation has no participants")?,
    )
    .name
    .clone();
    let log = Client::connect(address, &reader, 0)?.whole_log(group)?;
    let of = |message: Value| message["client_id"].as_str().unwrap_or_default().to_owned();
    let log: Log = log.into_iter().map(|(seq, m)| (seq, of(m))).collect();
    // A client reads history only after it noticed a gap, so the gateway must bring everything else to it.
    while members
        .iter()
        .any(|p| lock(p).has(group) < log.len() as u64)
        && Instant::now() < until
    {
        thread::sleep(RETRY_AFTER);
    }
    Ok(log)
}

/// What all people received and sent together.
struct Totals {
    delivery: Histogram<u64>,
    acknowledgement: Histogram<u64>,
    lost: usize,
    misplaced: usize,
    unanswered: usize,
    got: usize,
    again: u64,
    acknowledged: usize,
    connections: u64,
}

impl Totals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            delivery: latencies()?,
            acknowledgement: latencies()?,
            lost: 0,
            misplaced: 0,
            unanswered: 0,
            got: 0,
            again: 0,
            acknowledged: 0,
            connections: 0,
        })
    }

    fn add(&mut self, person: &Person, logs: &HashMap<String, Log>) -> anyhow::Result<()> {
        self.delivery.add(&person.delivery)?;
        self.acknowledgement.add(&person.acknowledgement)?;
        for (group, got) in &person.got {
            self.got += got.len();
            let missing = |(seq, id): &(&u64, &String)| got.get(seq) != Some(id);
            self.lost += logs[group].iter().filter(missing).count();
        }
        let wrong =
            |(id, (group, seq)): &(&String, &(String, u64))| logs[group].get(seq) != Some(id);
        self.misplaced += person.acknowledged.iter().filter(wrong).count();
        self.unanswered += person.waiting.len();
        self.again += person.again;
        self.acknowledged += person.acknowledged.len();
        self.connections += person.connections;
        Ok(())
    }
}

fn judge(
    people: &[Arc<Mutex<Person>>],
    logs: &HashMap<String, Log>,
    report: &mut Report,
) -> anyhow::Result<()> {
    for (group, log) in logs {
        report.must(
            log.keys().copied().eq(1..=log.len() as u64),
            format!("{group}: the log has gaps"),
        );
        let ids: HashSet<&String> = log.values().collect();
        report.must(
            ids.len() == log.len(),
            format!("{group}: a message is in the log twice"),
        );
    }
    let mut totals = Totals::new()?;
    for person in people {
        let person = lock(person);
        totals.add(&person, logs)?;
        report.must(
            person.wrong.is_empty(),
            format!("{}: {:?}", person.name, person.wrong.first()),
        );
    }
    println!(
        "  {} messages acknowledged, {} delivered over {} connections, {} delivered again",
        totals.acknowledged, totals.got, totals.connections, totals.again
    );
    println!(
        "  {} lost, {} not at their acknowledged seq, {} never answered",
        totals.lost, totals.misplaced, totals.unanswered
    );
    report.must(
        totals.lost + totals.misplaced + totals.unanswered == 0,
        "messages or deliveries were lost, misplaced or never answered".to_owned(),
    );
    report.figure("messages acknowledged", totals.acknowledged as f64, "");
    report.latency("from due to acknowledged", &totals.acknowledgement);
    report.latency("from due to delivered", &totals.delivery);
    Ok(())
}
