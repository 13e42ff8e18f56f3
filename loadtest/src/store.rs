//! What a stored message costs: beside the same rows and fsyncs on the bare embedded store, and how that grows with
//! the participants and with the messages that a conversation has already.

use std::{
    fs::File,
    io::{BufWriter, Write as _},
    thread,
    time::{Duration, Instant},
};

use anyhow::anyhow;
use clap::Args;
use fjall::{Database, KeyspaceCreateOptions, PersistMode};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    Common,
    celebrity::{fan, pipeline},
    client::{Client, send_frame},
    crowd::body,
    data::Data,
    ending,
    report::Report,
    server::Server,
};

#[derive(Args)]
pub(crate) struct Options {
    /// Messages measured each time
    #[arg(long, default_value_t = 30_000)]
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
/// Bytes of a row beside its body, about.
const ROW_BYTES: usize = 60;
const PARTICIPANTS: [usize; 4] = [1, 10, 100, 1_000];

/// Conversations that messages are sent to, and who sends to each.
struct Place {
    server: Server,
    senders: Vec<(Client, String)>,
    _data: Data,
}

/// What sending cost, for each message.
struct Cost {
    per_second: f64,
    cpu_us: f64,
    rows: f64,
    fsyncs: f64,
}

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("store", &common.outputs);
    let mut place = groups(common, 2, options.senders.into())?;
    let cost = place.send(options)?;
    drop(place);
    report.figure("stored messages, one recipient", cost.per_second, "/s");
    if common.cassandra.is_empty() {
        report.at_most(
            "CPU per message, one recipient",
            cost.cpu_us,
            CPU_US_MAX,
            "µs",
        );
        let bare = bare(&cost, options)?;
        report.figure("bare store, the same rows and fsyncs", bare, "/s");
        report.at_least(
            "gateway / bare store",
            cost.per_second / bare,
            BARE_RATIO_MIN,
            "",
        );
    } else {
        report.at_most(
            "CPU per message, one recipient",
            cost.cpu_us,
            CASSANDRA_CPU_US_MAX,
            "µs",
        );
    }

    let mut line = Vec::new();
    for participants in PARTICIPANTS {
        let cost = groups(common, participants, 1)?.send(options)?;
        report.figure(
            &format!("CPU per message, {participants} participants"),
            cost.cpu_us,
            "µs",
        );
        line.push((participants as f64, cost.cpu_us));
    }
    report.growth(
        "CPU per message, by participants",
        "µs",
        "participants",
        line,
    );
    let (mut line, mut length) = (Vec::new(), 100);
    while length <= options.longest {
        let cost = long(common, length)?.send(options)?;
        report.figure(
            &format!("CPU per message, after {length}"),
            cost.cpu_us,
            "µs",
        );
        line.push((length as f64, cost.cpu_us));
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
    fn send(&mut self, options: &Options) -> anyhow::Result<Cost> {
        let Self {
            server, senders, ..
        } = self;
        let mut send = |count: usize| {
            let each = count / senders.len();
            thread::scope(|scope| {
                let sending: Vec<_> = senders
                    .iter_mut()
                    .map(|(client, conversation)| {
                        scope.spawn(move || {
                            pipeline(client, each, &ProgressBar::hidden(), |n| {
                                let body = body(n as u64, Duration::ZERO, options.size);
                                send_frame(conversation, &body)
                            })
                        })
                    })
                    .collect();
                sending
                    .into_iter()
                    .try_for_each(|sent| sent.join().map_err(|_| anyhow!("a sender failed"))?)
            })
        };
        send(options.messages / 10)?;
        let (before, cpu, begin) = (counters(server)?, server.cpu()?, Instant::now());
        send(options.messages)?;
        let (took, cpu, after) = (begin.elapsed(), server.cpu()? - cpu, counters(server)?);
        let each = |total: f64| total / options.messages as f64;
        Ok(Cost {
            per_second: options.messages as f64 / took.as_secs_f64(),
            cpu_us: each(cpu.as_secs_f64() * 1e6),
            rows: each(after.0 - before.0),
            fsyncs: each(after.1 - before.1),
        })
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

/// Messages per second of a loop that only writes as many rows, with as many fsyncs. Their keys are as long and as alike as
/// the gateway's, because the store compares them: a log in order, and for each send a row of a random place.
fn bare(cost: &Cost, options: &Options) -> anyhow::Result<f64> {
    const EPOCH: [u8; 8] = [0; 8];
    let directory = ending::directory()?;
    let database = Database::builder(directory.path())
        .manual_journal_persist(true)
        .open()?;
    let log = database.keyspace("log", KeyspaceCreateOptions::default)?;
    let rows = database.keyspace("rows", KeyspaceCreateOptions::default)?;
    let conversations: Vec<Uuid> = (0..options.senders).map(|_| Uuid::new_v4()).collect();
    let commits = (cost.fsyncs * options.messages as f64).ceil().max(1.0) as usize;
    let per_commit = options.messages.div_ceil(commits);
    let small = (cost.rows - 1.0).max(0.0);
    let begin = Instant::now();
    let (mut number, mut owed) = (0_u64, 0.0);
    for _ in 0..commits {
        let mut batch = database.batch();
        for _ in 0..per_commit {
            number += 1;
            let sender = number as usize % conversations.len();
            let conversation = conversations[sender].as_bytes();
            let body = body(number, Duration::ZERO, options.size + ROW_BYTES);
            let seq = number.to_be_bytes();
            batch.insert(
                &log,
                [&b"l"[..], &conversation[..], &seq, &EPOCH].concat(),
                body,
            );
            owed += small;
            while owed >= 1.0 {
                owed -= 1.0;
                let (user, id) = (format!("sender-{sender}"), Uuid::new_v4());
                let key = [
                    &b"s\0day"[..],
                    &conversation[..],
                    user.as_bytes(),
                    id.as_bytes(),
                    &EPOCH,
                ];
                batch.insert(&rows, key.concat(), seq);
            }
        }
        batch.commit()?;
        database.persist(PersistMode::SyncData)?;
    }
    Ok(number as f64 / begin.elapsed().as_secs_f64())
}
