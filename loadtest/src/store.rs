//! Measures what storing a message costs, compared with the same rows and fsyncs on the bare embedded store, and how
//! the cost grows with the participants and with the messages of a conversation.

mod bare;
pub(crate) mod celebrity;
mod inbox;
mod load;
mod reactions;

use std::{
    fs::File,
    io::{BufWriter, Write as _},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::anyhow;
use clap::{Args, Subcommand};
use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use tempfile::TempDir;
use uuid::Uuid;

use crate::{
    Common,
    client::{Client, client_id, send_frame},
    crowd::body,
    data::Data,
    ending,
    report::Report,
    server::Server,
    store::celebrity::{fan, pipeline},
};

/// The scenarios of this folder.
#[derive(Subcommand)]
pub(crate) enum Scenario {
    /// Measure what storing a message costs, compared with the bare store, and how the cost grows
    Store(Options),
    /// Import a million messages into one conversation, and read pages at its beginning, middle and end
    Load(load::Options),
    /// Measure what reading an inbox costs, and check its unread counts
    Inbox(inbox::Options),
    /// Measure what a message to a channel of 100,000 participants costs the store
    Celebrity(celebrity::Options),
    /// Measure what reactions to one message of a large channel cost, and look for each of them in the end
    Reactions(reactions::Options),
}

impl Scenario {
    pub(crate) fn run(&self, common: &Common) -> anyhow::Result<bool> {
        match self {
            Self::Store(options) => run(common, options),
            Self::Load(options) => load::run(common, options),
            Self::Inbox(options) => inbox::run(common, options),
            Self::Celebrity(options) => celebrity::run(common, options),
            Self::Reactions(options) => reactions::run(common, options),
        }
    }
}

#[derive(Args)]
pub(crate) struct Options {
    /// Messages whose rate is measured; each step of the growth has a tenth of them
    #[arg(long, default_value_t = 300_000)]
    messages: usize,
    /// Clients that send at once in the measurement of the rate, each to a conversation of its own
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..))]
    senders: u8,
    /// Bytes of a body
    #[arg(long, default_value_t = 200)]
    size: usize,
    /// Messages of the longest conversation; the steps are 100, 10,000 and so on up to this
    #[arg(long, default_value_t = 1_000_000)]
    longest: u64,
}

/// Goal for the rate, gateway / bare store.
const BARE_RATIO_MIN: f64 = 0.8;
/// Goal for the CPU of a message to one recipient, in microseconds.
const CPU_US_MAX: f64 = 100.0;
/// Goal for the gateway's CPU of such a message over Cassandra, in microseconds.
const CASSANDRA_CPU_US_MAX: f64 = 120.0;
/// Goal for the CPU of a message to a group of 1,000 in the embedded store, in microseconds.
const LARGE_CPU_US_MAX: f64 = 150.0;
/// Rounds in which the gateway and the bare store take turns, so that other work on the machine affects both alike.
const ROUNDS: usize = 5;
/// The gateway's default of `store.embedded.cache_mib`.
const CACHE_BYTES: u64 = 64 << 20;
/// As `JOURNAL_BYTES_MAX` in `src/store/embedded.rs`.
const JOURNAL_BYTES_MAX: u64 = 256 << 20;
/// Approximate bytes of a row without its body.
const ROW_BYTES: usize = 60;
/// Participants of the group in each step.
const PARTICIPANTS: [usize; 4] = [1, 10, 100, 1_000];

/// A gateway, and the senders, each with a conversation.
struct Setup {
    server: Server,
    senders: Vec<(Client, String)>,
    _data: Data,
}

/// The cost of sending messages.
#[derive(Default)]
struct Cost {
    messages: usize,
    time: Duration,
    cpu: Duration,
    rows: f64,
    fsyncs: f64,
}

/// A loop that only writes as many rows with as many fsyncs, with the gateway's store settings. Its keys are like the
/// gateway's, because the store compares keys: the log is in order, and each send adds a row at a random setup.
struct Bare {
    database: Database,
    log: Keyspace,
    rows: Keyspace,
    conversations: Vec<Uuid>,
    users: Vec<String>,
    body: String,
    written: u64,
    time: Duration,
    _directory: Arc<TempDir>,
}

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("store", &common.outputs);
    let mut setup = groups(common, 2, options.senders.into())?;
    let embedded = common.cassandra.is_empty();
    let mut bare = (embedded && !common.alone)
        .then(|| Bare::new(options))
        .transpose()?;
    let few = options.messages.div_ceil(10);
    setup.send(few, options.size)?;
    let mut cost = Cost::default();
    for _ in 0..ROUNDS {
        let part = setup.send(options.messages.div_ceil(ROUNDS), options.size)?;
        if let Some(bare) = &mut bare {
            bare.write(&part)?;
        }
        cost.add(&part);
    }
    drop(setup);
    let per_second = cost.per_second();
    report.figure("stored messages, one recipient", per_second, "/s");
    let most = if embedded {
        CPU_US_MAX
    } else {
        CASSANDRA_CPU_US_MAX
    };
    report.speed_at_most("CPU per message, one recipient", cost.cpu_us(), most, "µs");
    if let Some(bare) = bare {
        let bare = bare.written as f64 / bare.time.as_secs_f64();
        report.figure("bare store, the same rows and fsyncs", bare, "/s");
        let ratio = per_second / bare;
        report.speed_at_least("gateway / bare store", ratio, BARE_RATIO_MIN, "");
    }

    by_participants(common, few, options.size, &mut report)?;
    by_length(common, few, options, &mut report)?;
    report.finish()
}

/// Measures how the cost of a message depends on the number of participants.
fn by_participants(
    common: &Common,
    messages: usize,
    size: usize,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut line = Vec::new();
    for participants in PARTICIPANTS {
        let cpu_us = groups(common, participants, 1)?.cpu_us(messages, size)?;
        let name = format!("CPU per message, {participants} participants");
        if participants == 1_000 && common.cassandra.is_empty() {
            report.speed_at_most(&name, cpu_us, LARGE_CPU_US_MAX, "µs");
        } else {
            report.figure(&name, cpu_us, "µs");
        }
        line.push((participants as f64, cpu_us));
    }
    report.growth(
        "CPU per message, by participants",
        "µs",
        "participants",
        line,
    );
    Ok(())
}

/// Measures how the cost of a message depends on the number of messages before it.
fn by_length(
    common: &Common,
    messages: usize,
    options: &Options,
    report: &mut Report,
) -> anyhow::Result<()> {
    let (mut line, mut length) = (Vec::new(), 100);
    while length <= options.longest {
        let cpu_us = long(common, length)?.cpu_us(messages, options.size)?;
        report.figure(&format!("CPU per message, after {length}"), cpu_us, "µs");
        line.push((length as f64, cpu_us));
        length *= 100;
    }
    report.growth(
        "CPU per message, by messages before",
        "µs",
        "messages",
        line,
    );
    Ok(())
}

/// Creates `count` groups with this many participants. Only the sender of each is connected.
fn groups(common: &Common, participants: usize, count: usize) -> anyhow::Result<Setup> {
    let data = Data::new(common)?;
    let server = Server::gateway(common, &data)?;
    let others: Vec<String> = (0..participants - 1).map(fan).collect();
    let mut senders = Vec::new();
    for number in 0..count {
        let mut owner = Client::connect(&server.address, &format!("sender-{number}"), 0)?;
        let create =
            json!({"type": "create", "kind": "group", "name": "load", "participants": others});
        let conversation = owner.create(create)?;
        senders.push((owner, conversation));
    }
    Ok(Setup {
        server,
        senders,
        _data: data,
    })
}

/// Imports a group of two with this many messages.
fn long(common: &Common, messages: u64) -> anyhow::Result<Setup> {
    let data = Data::new(common)?;
    let conversation = Uuid::new_v4().to_string();
    let file = data.file("messages.jsonl");
    let mut lines = BufWriter::new(File::create(&file)?);
    let created: Value = json!({"type": "conversation", "kind": "group", "id": conversation, "participants": ["sender", "other"]});
    writeln!(lines, "{created}")?;
    for number in 0..messages {
        let body = format!("message {number}");
        let line = json!({"type": "message", "conversation": conversation, "sender": "other", "body": body});
        writeln!(lines, "{line}")?;
    }
    lines.flush()?;
    Server::import(common, &data, &file)?;
    let server = Server::gateway(common, &data)?;
    let owner = Client::connect(&server.address, "sender", 0)?;
    Ok(Setup {
        server,
        senders: vec![(owner, conversation)],
        _data: data,
    })
}

impl Setup {
    /// The CPU of a message in microseconds, after a warm-up.
    fn cpu_us(&mut self, messages: usize, size: usize) -> anyhow::Result<f64> {
        self.send(messages / 10, size)?;
        Ok(self.send(messages, size)?.cpu_us())
    }

    /// Sends messages from all senders at once.
    fn send(&mut self, messages: usize, size: usize) -> anyhow::Result<Cost> {
        let Self {
            server, senders, ..
        } = self;
        let each = messages.div_ceil(senders.len());
        let messages = each * senders.len();
        let (before, cpu, begin) = (counters(server)?, server.cpu()?, Instant::now());
        thread::scope(|scope| {
            let sending: Vec<_> = senders
                .iter_mut()
                .map(|(client, conversation)| {
                    scope.spawn(move || {
                        pipeline(client, each, &ProgressBar::hidden(), |n| {
                            let body = body(n as u64, Duration::ZERO, size);
                            send_frame(conversation, &body)
                        })
                    })
                })
                .collect();
            sending
                .into_iter()
                .try_for_each(|sent| sent.join().map_err(|_| anyhow!("a sender panicked"))?)
        })?;
        let (time, cpu, after) = (begin.elapsed(), server.cpu()? - cpu, counters(server)?);
        Ok(Cost {
            messages,
            time,
            cpu,
            rows: after.0 - before.0,
            fsyncs: after.1 - before.1,
        })
    }
}

impl Cost {
    fn add(&mut self, other: &Self) {
        self.messages += other.messages;
        self.time += other.time;
        self.cpu += other.cpu;
        self.rows += other.rows;
        self.fsyncs += other.fsyncs;
    }

    fn per_second(&self) -> f64 {
        self.messages as f64 / self.time.as_secs_f64()
    }

    /// Microseconds of CPU of each message.
    fn cpu_us(&self) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / self.messages as f64
    }
}

/// Rows and fsyncs that the gateway has written so far.
fn counters(server: &Server) -> anyhow::Result<(f64, f64)> {
    let metrics = server.metrics()?;
    let rows = metrics
        .iter()
        .filter(|(name, _)| name.starts_with("chat_store_rows_written_total"));
    let fsyncs = metrics.get("chat_store_fsyncs_total").copied();
    Ok((
        rows.map(|(_, count)| count).sum(),
        fsyncs.unwrap_or_default(),
    ))
}

impl Bare {
    fn new(options: &Options) -> anyhow::Result<Self> {
        let directory = ending::directory()?;
        let database = Database::builder(directory.path())
            .cache_size(CACHE_BYTES)
            .max_journaling_size(JOURNAL_BYTES_MAX)
            .manual_journal_persist(true)
            .open()?;
        let senders = 0..options.senders;
        Ok(Self {
            log: database.keyspace("log", KeyspaceCreateOptions::default)?,
            rows: database.keyspace("rows", KeyspaceCreateOptions::default)?,
            database,
            conversations: senders.clone().map(|_| client_id()).collect(),
            users: senders.map(|number| format!("sender-{number}")).collect(),
            body: body(0, Duration::ZERO, options.size + ROW_BYTES),
            written: 0,
            time: Duration::ZERO,
            _directory: directory,
        })
    }

    /// Writes as many rows, with as many fsyncs, as the gateway did.
    fn write(&mut self, cost: &Cost) -> anyhow::Result<()> {
        const EPOCH: [u8; 8] = [0; 8];
        let commits = (cost.fsyncs as usize).max(1);
        let per_commit = cost.messages.div_ceil(commits);
        let small = (cost.rows / cost.messages as f64 - 1.0).max(0.0);
        let begin = Instant::now();
        let mut owed = 0.0;
        for _ in 0..commits {
            let mut batch = self.database.batch();
            for _ in 0..per_commit {
                self.written += 1;
                let sender = self.written as usize % self.users.len();
                let conversation = self.conversations[sender].as_bytes();
                let seq = self.written.to_be_bytes();
                let key = [&b"l"[..], conversation, &seq, &EPOCH];
                batch.insert(&self.log, key.concat(), self.body.as_bytes());
                owed += small;
                while owed >= 1.0 {
                    owed -= 1.0;
                    let (user, id) = (self.users[sender].as_bytes(), client_id());
                    let key = [&b"s\0day"[..], conversation, user, id.as_bytes(), &EPOCH];
                    batch.insert(&self.rows, key.concat(), seq);
                }
            }
            batch.commit()?;
            self.database.persist(PersistMode::SyncData)?;
        }
        self.time += begin.elapsed();
        Ok(())
    }
}
