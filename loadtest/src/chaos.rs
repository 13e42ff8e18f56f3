//! Simulates people in groups, and in a channel for everyone, while gateways are killed, or drained and replaced by
//! another build. They reconnect with their cursors to any gateway and repeat messages that were not acknowledged. In the
//! end everyone must have each of their logs, complete and in order.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::Args;
use hdrhistogram::Histogram;
use indicatif::ProgressBar;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    Common,
    client::{Client, PAGE},
    crowd::latencies,
    data::Data,
    report::Report,
    server::Server,
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
/// Longest wait for a frame, so that a person also writes and notices the end.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// State shared by all people.
struct World {
    epoch: Instant,
    /// Addresses of the gateways. A gateway that is down keeps its last address.
    addresses: Mutex<Vec<String>>,
    writing: AtomicBool,
    over: AtomicBool,
}

/// What one person has received and sent.
struct Person {
    name: String,
    /// By conversation and seq, the client id of each received message.
    got: HashMap<String, BTreeMap<u64, String>>,
    /// Messages not yet acknowledged, by client id: the conversation, and when each was due.
    waiting: HashMap<String, (String, Duration)>,
    acknowledged: HashMap<String, (String, u64)>,
    /// Microseconds from due to delivered.
    delivery: Histogram<u64>,
    /// Microseconds from due to acknowledged.
    acknowledgement: Histogram<u64>,
    /// Messages that were received again.
    again: u64,
    connections: u64,
    wrong: Vec<String>,
}

/// Requests in flight on one connection.
#[derive(Default)]
struct Asked {
    /// Client ids, by request id.
    sends: HashMap<u64, String>,
    /// Conversations of which a page of history is read, by request id.
    pages: HashMap<u64, String>,
    reading: HashSet<String>,
}

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("chaos", &common.outputs);
    anyhow::ensure!(
        options.users >= options.participants,
        "--users must be at least --participants"
    );
    let data = Data::new(common)?;
    let several = options.gateways > 1;
    let earlier = options.upgrade_from.as_ref().map(|program| {
        let found = program.canonicalize();
        let found = found.with_context(|| format!("--upgrade-from {}", program.display()))?;
        anyhow::Ok(Common {
            gateway: Some(found),
            ..common.clone()
        })
    });
    let earlier = earlier.transpose()?;
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
    let threads: Vec<_> = people
        .iter()
        .enumerate()
        .map(|(number, person)| {
            let (world, person) = (world.clone(), person.clone());
            let (rate, seed) = (
                options.rate,
                options.seed.wrapping_mul(1_000_003) + number as u64,
            );
            thread::spawn(move || live(&world, &person, number, rate, seed))
        })
        .collect();

    // The gateways to replace, in order, each with the build that replaces it.
    let replacements: Vec<(usize, &Common)> = match &earlier {
        None => (0..options.kills)
            .map(|kill| (kill % options.gateways, common))
            .collect(),
        Some(_) if data.cluster.is_none() => vec![(0, common)],
        Some(earlier) => [common, earlier, common]
            .into_iter()
            .flat_map(|build| (0..options.gateways).map(move |gateway| (gateway, build)))
            .collect(),
    };
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
    let logs = groups
        .iter()
        .map(|group| {
            Ok((
                group.clone(),
                settled_log(&servers[0].address, group, &people)?,
            ))
        })
        .collect::<anyhow::Result<HashMap<_, _>>>();
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

fn name(number: usize) -> String {
    format!("user-{number:04}")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Person {
    fn new(
        number: usize,
        groups: &[String],
        options: &Options,
    ) -> anyhow::Result<Arc<Mutex<Self>>> {
        let mine = (0..options.participants).map(|n| {
            let group = (number + options.users - n) % options.users;
            groups[group].clone()
        });
        let mine = mine.chain(groups.last().cloned());
        Ok(Arc::new(Mutex::new(Self {
            name: name(number),
            got: mine.map(|group| (group, BTreeMap::new())).collect(),
            waiting: HashMap::new(),
            acknowledged: HashMap::new(),
            delivery: latencies()?,
            acknowledgement: latencies()?,
            again: 0,
            connections: 0,
            wrong: Vec::new(),
        })))
    }

    /// The seq up to which no message is missing.
    fn has(&self, conversation: &str) -> u64 {
        let Some(got) = self.got.get(conversation) else {
            return 0;
        };
        (1..)
            .zip(got.keys())
            .take_while(|(n, seq)| n == *seq)
            .count() as u64
    }

    /// Notes a received message. `now` is set for an event, whose latency counts from when the message was due.
    fn note(&mut self, message: &Value, now: Option<Duration>) {
        let (Some(conversation), Some(seq)) =
            (message["conversation"].as_str(), message["seq"].as_u64())
        else {
            self.wrong.push(format!("not a message: {message}"));
            return;
        };
        let client_id = message["client_id"].as_str().unwrap_or_default();
        let Some(got) = self.got.get_mut(conversation) else {
            self.wrong.push(format!("not for {}: {message}", self.name));
            return;
        };
        match got.insert(seq, client_id.to_owned()) {
            None => {
                let due = message["body"].as_str().and_then(|body| body.parse().ok());
                if let (Some(now), Some(due)) = (now, due) {
                    let late = now.saturating_sub(Duration::from_micros(due));
                    self.delivery.saturating_record(late.as_micros() as u64);
                }
            }
            Some(before) if before == client_id => self.again += 1,
            Some(before) => self.wrong.push(format!(
                "{conversation} {seq} was {before}, now {client_id}"
            )),
        }
    }
}

/// Connects again and again, to one gateway after the other, until the run is over.
fn live(world: &World, person: &Mutex<Person>, number: usize, rate: f64, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut due = Duration::ZERO;
    let mut attempt = number;
    while !world.over.load(Ordering::Relaxed) {
        let address = {
            let addresses = lock(&world.addresses);
            addresses[attempt % addresses.len()].clone()
        };
        attempt += 1;
        // The connection broke or the client was told to reconnect. Unanswered messages are repeated.
        if connected(world, person, &address, rate, &mut random, &mut due).is_err() {
            thread::sleep(RETRY_AFTER);
        }
    }
}

fn connected(
    world: &World,
    person: &Mutex<Person>,
    address: &str,
    rate: f64,
    random: &mut StdRng,
    due: &mut Duration,
) -> anyhow::Result<()> {
    let (token, cursors, mine) = {
        let person = lock(person);
        let mut mine: Vec<String> = person.got.keys().cloned().collect();
        mine.sort_unstable();
        let cursors: HashMap<String, [u64; 2]> = mine
            .iter()
            .map(|c| (c.clone(), [person.has(c), 0]))
            .collect();
        (crate::server::token(&person.name)?, cursors, mine)
    };
    let mut client = Client::open(address, "/v1/ws", 0)?;
    client.ask(json!({"type": "connect", "token": token, "cursors": cursors}))?;
    let mut asked = Asked::default();
    {
        let mut person = lock(person);
        person.connections += 1;
        for (client_id, (conversation, at)) in &person.waiting {
            asked.send(&mut client, client_id, conversation, *at, true)?;
        }
    }
    while !world.over.load(Ordering::Relaxed) {
        let now = world.epoch.elapsed();
        if world.writing.load(Ordering::Relaxed) && now >= *due {
            let (client_id, conversation) = (
                Uuid::new_v4().to_string(),
                mine[random.random_range(0..mine.len())].clone(),
            );
            // The message is noted first, because a failed send may have arrived.
            lock(person)
                .waiting
                .insert(client_id.clone(), (conversation.clone(), *due));
            asked.send(&mut client, &client_id, &conversation, *due, false)?;
            *due += Duration::from_secs_f64(-(1.0 - random.random::<f64>()).ln() / rate);
            continue;
        }
        let Some(frame) = client.next_within(LOOK_EVERY)? else {
            continue;
        };
        if frame["type"] == "reconnect" {
            bail!("the gateway asked the client to reconnect");
        }
        asked.heard(&mut client, &mut lock(person), &frame, world)?;
    }
    Ok(())
}

impl Asked {
    fn send(
        &mut self,
        client: &mut Client,
        client_id: &str,
        conversation: &str,
        due: Duration,
        retry: bool,
    ) -> anyhow::Result<()> {
        let id = client.begin(
            json!({"type": "send", "conversation": conversation, "client_id": client_id,
            "body": due.as_micros().to_string(), "retry": retry}),
        )?;
        self.sends.insert(id.into(), client_id.to_owned());
        Ok(())
    }

    fn read(&mut self, client: &mut Client, conversation: &str, after: u64) -> anyhow::Result<()> {
        if self.reading.insert(conversation.to_owned()) {
            let id = client.begin(json!({"type": "history", "conversation": conversation, "after": after, "limit": PAGE}))?;
            self.pages.insert(id.into(), conversation.to_owned());
        }
        Ok(())
    }

    fn heard(
        &mut self,
        client: &mut Client,
        person: &mut Person,
        frame: &Value,
        world: &World,
    ) -> anyhow::Result<()> {
        let (now, id) = (
            world.epoch.elapsed(),
            frame["id"].as_u64().unwrap_or_default(),
        );
        let mut behind = None;
        match frame["type"].as_str().unwrap_or_default() {
            "message" => {
                person.note(frame, Some(now));
                behind = frame["conversation"].as_str().zip(frame["seq"].as_u64());
            }
            "resync" => behind = frame["conversation"].as_str().zip(frame["head"].as_u64()),
            "sent" => {
                let client_id = self
                    .sends
                    .remove(&id)
                    .context("a reply without a request")?;
                let seq = frame["seq"].as_u64().context("`sent` has no seq")?;
                if let Some((conversation, due)) = person.waiting.remove(&client_id) {
                    let late = now.saturating_sub(due);
                    person
                        .acknowledgement
                        .saturating_record(late.as_micros() as u64);
                    person.acknowledged.insert(client_id, (conversation, seq));
                }
            }
            "error" if frame["code"] == "unavailable" => {
                if let Some(conversation) = self.pages.remove(&id) {
                    self.reading.remove(&conversation);
                    let has = person.has(&conversation);
                    self.read(client, &conversation, has)?;
                } else if let Some(client_id) = self.sends.remove(&id)
                    && let Some((conversation, due)) = person.waiting.get(&client_id).cloned()
                {
                    self.send(client, &client_id, &conversation, due, true)?;
                }
            }
            "error" => person.wrong.push(frame.to_string()),
            "history" => {
                let conversation = self
                    .pages
                    .remove(&id)
                    .context("a reply without a request")?;
                self.reading.remove(&conversation);
                for message in frame["messages"].as_array().into_iter().flatten() {
                    let mut message = message.clone();
                    message["conversation"] = conversation.clone().into();
                    person.note(&message, None);
                }
                let head = frame["head"].as_u64().context("`history` has no head")?;
                let has = person.has(&conversation);
                if has < head {
                    self.read(client, &conversation, has)?;
                }
            }
            _ => {}
        }
        if let Some((conversation, upto)) = behind {
            let has = person.has(conversation);
            if has < upto {
                self.read(client, conversation, has)?;
            }
        }
        Ok(())
    }
}

/// Waits until all messages are acknowledged and received. Returns the log of a conversation: client ids by seq.
fn settled_log(
    address: &str,
    group: &str,
    people: &[Arc<Mutex<Person>>],
) -> anyhow::Result<BTreeMap<u64, String>> {
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
    let log: BTreeMap<u64, String> = log.into_iter().map(|(seq, m)| (seq, of(m))).collect();
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

fn judge(
    people: &[Arc<Mutex<Person>>],
    logs: &HashMap<String, BTreeMap<u64, String>>,
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
    let (mut delivery, mut acknowledgement) = (latencies()?, latencies()?);
    let (
        mut lost,
        mut misplaced,
        mut unanswered,
        mut got,
        mut again,
        mut acknowledged,
        mut connections,
    ) = (0, 0, 0, 0, 0, 0, 0);
    for person in people {
        let person = lock(person);
        delivery.add(&person.delivery)?;
        acknowledgement.add(&person.acknowledgement)?;
        for (group, got_here) in &person.got {
            let log = &logs[group];
            got += got_here.len();
            lost += log
                .iter()
                .filter(|(seq, id)| got_here.get(seq) != Some(id))
                .count();
        }
        let wrong =
            |(id, (group, seq)): &(&String, &(String, u64))| logs[group].get(seq) != Some(id);
        misplaced += person.acknowledged.iter().filter(wrong).count();
        unanswered += person.waiting.len();
        again += person.again;
        acknowledged += person.acknowledged.len();
        connections += person.connections;
        report.must(
            person.wrong.is_empty(),
            format!("{}: {:?}", person.name, person.wrong.first()),
        );
    }
    println!(
        "  {acknowledged} messages acknowledged, {got} delivered over {connections} connections, {again} delivered again"
    );
    println!(
        "  {lost} lost, {misplaced} not at their acknowledged seq, {unanswered} never answered"
    );
    report.must(
        lost + misplaced + unanswered == 0,
        "messages or deliveries were lost, misplaced or never answered".to_owned(),
    );
    report.figure("messages acknowledged", acknowledged as f64, "");
    report.latency("from due to acknowledged", &acknowledgement);
    report.latency("from due to delivered", &delivery);
    Ok(())
}
