//! Checks that the store's cost of a message does not depend on the number of participants, in a channel with very
//! many. Then measures a channel with very many connected subscribers while others come and go, on one gateway and on
//! several.

use std::collections::BTreeMap;

use clap::Args;
use indicatif::ProgressBar;
use serde_json::json;

use crate::{
    Common,
    client::{Client, is_reply, request_frame, send_frame},
    crowd::live,
    data::Data,
    report::Report,
    server::Server,
};

#[derive(Args)]
pub(crate) struct Options {
    /// Participants of the large channel
    #[arg(long, default_value_t = 100_000)]
    participants: usize,
    /// Participants of the small channel
    #[arg(long, default_value_t = 10)]
    few: usize,
    /// Messages sent to each channel
    #[arg(long, default_value_t = 500)]
    messages: usize,
    #[command(flatten)]
    live: live::Options,
    /// Gateways to measure as well, over one store; more than one needs --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
}

/// Participants named when the channel is created. The others are added one by one.
const AT_CREATION: usize = 3_000;
/// Requests in flight.
const WINDOW: usize = 64;
/// Goal for the rows written per message, many participants / few.
const RATIO_MAX: f64 = 1.1;
/// Goal for the CPU of a delivery to the connected subscribers, several gateways / one.
const GATEWAYS_RATIO_MAX: f64 = 1.3;
/// The gateway's counter of written rows, up to the name of the table.
const ROWS: &str = "chat_store_rows_written_total{table=\"";

/// The owner of the channel.
pub(crate) const OWNER: &str = "celebrity";

/// Written rows, by table.
pub(crate) type Counters = BTreeMap<String, f64>;

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("celebrity", &common.outputs);
    let data = Data::new(common)?;
    let server = Server::gateway(common, &data)?;
    let mut rows = Vec::new();
    for participants in [options.few, options.participants] {
        let mut owner = Client::connect(&server.address, OWNER, 0)?;
        let channel = channel(&mut owner, participants)?;
        let gateway = settled(&server)?;
        let before = nodes(&data)?;
        send(&mut owner, &channel, options.messages)?;
        let written = per_message(&gateway, &settled(&server)?, options.messages);
        println!("  {participants} participants:");
        report.figure(
            &format!("rows per message, of {participants}"),
            written.values().sum(),
            "",
        );
        for (table, count) in &written {
            println!("    {count:>8.3} {table}");
        }
        let at_nodes = per_message(&before, &nodes(&data)?, options.messages);
        if !at_nodes.is_empty() {
            println!("  counted by the database, all its nodes:");
        }
        for (table, count) in &at_nodes {
            println!("    {count:>8.3} {table}");
        }
        rows.push(written.values().sum::<f64>());
    }
    report.at_most(
        "rows per message, many / few participants",
        rows[1] / rows[0],
        RATIO_MAX,
        "",
    );
    drop(server);
    if options.live.subscribers > 0 {
        // New data for each part: else the second would begin with what the first one left. A test of this tool keeps the
        // keyspace, because a new one takes a cluster long.
        let next = |data: Data| match common.keep_keyspaces {
            true => Ok(data),
            false => Data::new(common),
        };
        let data = next(data)?;
        let alone = live::run(common, &options.live, &data, 1, &mut report)?;
        if options.gateways > 1 {
            let data = next(data)?;
            let together = live::run(common, &options.live, &data, options.gateways, &mut report)?;
            report.speed_at_most(
                "CPU per delivery, gateways / gateway",
                together / alone,
                GATEWAYS_RATIO_MAX,
                "",
            );
        }
    }
    report.finish()
}

/// The user ids of the participants besides the owner.
pub(crate) fn fan(number: usize) -> String {
    format!("fan-{number:06}")
}

/// Creates a channel with this many participants, including the owner.
pub(crate) fn channel(owner: &mut Client, participants: usize) -> anyhow::Result<String> {
    let named: Vec<String> = (0..participants - 1).map(fan).collect();
    let (first, others) = named.split_at(named.len().min(AT_CREATION));
    let create =
        json!({"type": "create", "kind": "channel", "name": "celebrity", "participants": first});
    let channel = owner.create(create)?;
    let progress = ProgressBar::new(others.len() as u64);
    pipeline(owner, others.len(), &progress, |n| {
        request_frame(json!({"type": "add", "conversation": channel, "user": others[n]}))
    })?;
    progress.finish_and_clear();
    Ok(channel)
}

fn send(owner: &mut Client, channel: &str, messages: usize) -> anyhow::Result<()> {
    pipeline(owner, messages, &ProgressBar::hidden(), |n| {
        send_frame(channel, &format!("hello {n}"))
    })
}

/// Makes `count` requests, up to `WINDOW` in flight, sent half a window at a time. Each must succeed.
pub(crate) fn pipeline(
    client: &mut Client,
    count: usize,
    progress: &ProgressBar,
    request: impl Fn(usize) -> Vec<u8>,
) -> anyhow::Result<()> {
    let (mut begun, mut done) = (0, 0);
    let mut frames = Vec::new();
    while done < count {
        if begun < count && begun - done <= WINDOW / 2 {
            while begun < count && begun - done < WINDOW {
                frames.extend_from_slice(&request(begun));
                begun += 1;
            }
            client.say(&frames)?;
            frames.clear();
        }
        if is_reply(&client.hear()?)? {
            done += 1;
            progress.inc(1);
        }
    }
    Ok(())
}

/// The rows that the gateway has written, except heartbeats, which never stop.
pub(crate) fn rows_written(server: &Server) -> anyhow::Result<Counters> {
    let metrics = server.metrics()?;
    let tables = metrics.iter().filter_map(|(name, value)| {
        let table = name.strip_prefix(ROWS)?.strip_suffix("\"}")?;
        (table != "heartbeats").then(|| (table.to_owned(), *value))
    });
    Ok(tables.collect())
}

/// Waits until background writes are done and returns the rows that the gateway has written.
fn settled(server: &Server) -> anyhow::Result<Counters> {
    let mut before = Counters::new();
    loop {
        std::thread::sleep(std::time::Duration::from_millis(500));
        let now = rows_written(server)?;
        if now == before {
            return Ok(now);
        }
        before = now;
    }
}

/// Growth of each counter per message. Counters that did not grow are left out.
fn per_message(before: &Counters, after: &Counters, messages: usize) -> Counters {
    let grown = after.iter().map(|(table, rows)| {
        let grown = rows - before.get(table).copied().unwrap_or_default();
        (table.clone(), grown / messages as f64)
    });
    grown.filter(|(_, grown)| *grown > 0.0).collect()
}

/// Writes by table, counted by the nodes of the cluster and summed over them.
fn nodes(data: &Data) -> anyhow::Result<Counters> {
    let mut sums = Counters::new();
    if let Some(cluster) = &data.cluster {
        for (table, count) in cluster.local_writes()? {
            *sums.entry(table).or_default() += count;
        }
    }
    sums.remove("heartbeats");
    Ok(sums)
}
