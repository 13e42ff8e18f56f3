//! What a stored message costs: beside the same rows and fsyncs on the bare embedded store, and how that grows with
//! the participants and with the messages that a conversation has already.

use std::{
    fs::File,
    io::{BufWriter, Write as _},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::anyhow;
use clap::Args;
use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use tempfile::TempDir;
use uuid::Uuid;

use crate::{
    Common,
    celebrity::{fan, pipeline},
    client::{Client, client_id, send_frame},
    crowd::body,
    data::Data,
    ending,
    report::Report,
    server::Server,
};

#[derive(Args)]
pub(crate) struct Options {
    /// Messages whose rate is measured; a tenth of them for each step of how the cost grows
    #[arg(long, default_value_t = 300_000)]
    messages: usize,
    /// Clients that send at once where the rate is measured, each to a conversation of its own
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..))]
    senders: u8,
    /// Bytes of a body
    #[arg(long, default_value_t = 200)]
    size: usize,
    /// Messages already in a conversation, at most; in steps of a hundred times
    #[arg(long, default_value_t = 1_000_000)]
    longest: u64,
}

/// Rate beside the bare store's.
const BARE_RATIO_MIN: f64 = 0.8;
/// Of a message to one recipient, all CPU of the process.
const CPU_US_MAX: f64 = 100.0;
/// The same over Cassandra, the gateway's own.
const CASSANDRA_CPU_US_MAX: f64 = 120.0;
/// The gateway and the bare store take turns, so that what else the machine does meanwhile meets both alike.
const ROUNDS: usize = 5;
/// The gateway's, by default: `store.embedded.cache_mib`, and `JOURNAL_BYTES_MAX` of `src/store/embedded.rs`.
const CACHE_BYTES: u64 = 64 << 20;
const JOURNAL_BYTES_MAX: u64 = 256 << 20;
/// Bytes of a row beside its body, about.
const ROW_BYTES: usize = 60;
const PARTICIPANTS: [usize; 4] = [1, 10, 100, 1_000];

/// Conversations that messages are sent to, and who sends to each.
struct Place {
    server: Server,
    senders: Vec<(Client, String)>,
    _data: Data,
}

/// What sending cost.
#[derive(Default)]
struct Cost {
    messages: usize,
    time: Duration,
    cpu: Duration,
    rows: f64,
    fsyncs: f64,
}

/// A loop that only writes as many rows, with as many fsyncs, and the gateway's settings. Its keys are as long and as alike
/// as the gateway's, because the store compares them: a log in order, and for each send a row of a random place.
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
    let mut place = groups(common, 2, options.senders.into())?;
    let embedded = common.cassandra.is_empty();
    let mut bare = (embedded && !common.alone)
        .then(|| Bare::new(options))
        .transpose()?;
    let few = options.messages.div_ceil(10);
    place.send(few, options.size)?;
    let mut cost = Cost::default();
    for _ in 0..ROUNDS {
        let part = place.send(options.messages.div_ceil(ROUNDS), options.size)?;
        if let Some(bare) = &mut bare {
            bare.write(&part)?;
        }
        cost.add(&part);
    }
    drop(place);
    let per_second = cost.per_second();
    report.figure("stored messages, one recipient", per_second, "/s");
    let most = if embedded {
        CPU_US_MAX
    } else {
        CASSANDRA_CPU_US_MAX
    };
    report.at_most("CPU per message, one recipient", cost.cpu_us(), most, "µs");
    if let Some(bare) = bare {
        let bare = bare.written as f64 / bare.time.as_secs_f64();
        report.figure("bare store, the same rows and fsyncs", bare, "/s");
        let ratio = per_second / bare;
        report.at_least("gateway / bare store", ratio, BARE_RATIO_MIN, "");
    }

    let mut line = Vec::new();
    for participants in PARTICIPANTS {
        let cpu_us = groups(common, participants, 1)?.cpu_us(few, options.size)?;
        report.figure(
            &format!("CPU per message, {participants} participants"),
            cpu_us,
            "µs",
        );
        line.push((participants as f64, cpu_us));
    }
    report.growth(
        "CPU per message, by participants",
        "µs",
        "participants",
        line,
    );
    let (mut line, mut length) = (Vec::new(), 100);
    while length <= options.longest {
        let cpu_us = long(common, length)?.cpu_us(few, options.size)?;
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
    report.finish()
}

/// Groups with so many participants, none of whom is connected but the sender.
fn groups(common: &Common, participants: usize, count: usize) -> anyhow::Result<Place> {
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
    Ok(Place {
        server,
        senders,
        _data: data,
    })
}

/// A group of two with so many messages.
fn long(common: &Common, messages: u64) -> anyhow::Result<Place> {
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
    Ok(Place {
        server,
        senders: vec![(owner, conversation)],
        _data: data,
    })
}

impl Place {
    /// What a message costs, after a warm-up.
    fn cpu_us(&mut self, messages: usize, size: usize) -> anyhow::Result<f64> {
        self.send(messages / 10, size)?;
        Ok(self.send(messages, size)?.cpu_us())
    }

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
                .try_for_each(|sent| sent.join().map_err(|_| anyhow!("a sender failed"))?)
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

    /// Of each message.
    fn cpu_us(&self) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / self.messages as f64
    }
}

/// Rows written and fsyncs made.
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

    /// Writes what the gateway wrote.
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
