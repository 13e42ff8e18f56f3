//! A channel with very many participants: what a message costs the store does not depend on their number.

use std::collections::BTreeMap;

use anyhow::Context;
use clap::Args;
use indicatif::ProgressBar;
use serde_json::json;

use crate::{Common, client::Client, data::Data, report::Report, server::Server};

#[derive(Args)]
pub(crate) struct Options {
    /// Participants of the large channel
    #[arg(long, default_value_t = 100_000)]
    participants: usize,
    /// Of the small one
    #[arg(long, default_value_t = 10)]
    few: usize,
    /// Messages sent to each
    #[arg(long, default_value_t = 500)]
    messages: usize,
}

/// Who can be named when a channel is made; the others are added one by one.
const AT_CREATION: usize = 3_000;
/// Requests under way at once.
const WINDOW: usize = 64;
/// Rows of a message, many participants / few.
const RATIO_MAX: f64 = 1.1;
/// The gateway's counter, by table.
const ROWS: &str = "chat_store_rows_written_total{table=\"";

/// Rows written, by table.
type Counters = BTreeMap<String, f64>;

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("celebrity", &common.outputs);
    let data = Data::new(common)?;
    let server = Server::gateway(common, &data)?;
    let mut rows = Vec::new();
    for participants in [options.few, options.participants] {
        let mut owner = Client::connect(&server.address, "celebrity", 0)?;
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
            println!("  as the database counts them, all its nodes:");
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
    report.finish()
}

/// The names of the participants besides the owner.
pub(crate) fn fan(number: usize) -> String {
    format!("fan-{number:06}")
}

/// Makes a channel with so many participants.
pub(crate) fn channel(owner: &mut Client, participants: usize) -> anyhow::Result<String> {
    let named: Vec<String> = (0..participants - 1).map(fan).collect();
    let (first, others) = named.split_at(named.len().min(AT_CREATION));
    let create =
        json!({"type": "create", "kind": "channel", "name": "celebrity", "participants": first});
    let channel = owner.ask(create)?["conversation"]
        .as_str()
        .context("no id")?
        .to_owned();
    let progress = ProgressBar::new(others.len() as u64);
    pipeline(
        owner,
        others.len(),
        &progress,
        |n| json!({"type": "add", "conversation": channel, "user": others[n]}),
    )?;
    progress.finish_and_clear();
    Ok(channel)
}

fn send(owner: &mut Client, channel: &str, messages: usize) -> anyhow::Result<()> {
    pipeline(
        owner,
        messages,
        &ProgressBar::hidden(),
        |n| json!({"type": "send", "conversation": channel, "client_id": uuid::Uuid::new_v4(), "body": format!("hello {n}")}),
    )
}

/// Makes `count` requests, some at once; each must succeed.
pub(crate) fn pipeline(
    client: &mut Client,
    count: usize,
    progress: &ProgressBar,
    request: impl Fn(usize) -> serde_json::Value,
) -> anyhow::Result<()> {
    let (mut begun, mut done) = (0, 0);
    while done < count {
        while begun < count && begun - done < WINDOW {
            client.begin(request(begun))?;
            begun += 1;
        }
        let reply = client.next()?;
        if reply["id"].is_number() {
            anyhow::ensure!(reply["type"] != "error", "refused: {reply}");
            done += 1;
            progress.inc(1);
        }
    }
    Ok(())
}

/// The rows that the gateway has written, once what was written behind is written. Heartbeats go on for ever.
fn settled(server: &Server) -> anyhow::Result<Counters> {
    let mut before = Counters::new();
    loop {
        std::thread::sleep(std::time::Duration::from_millis(500));
        let metrics = server.metrics()?;
        let tables = metrics.iter().filter_map(|(name, value)| {
            let table = name.strip_prefix(ROWS)?.strip_suffix("\"}")?;
            (table != "heartbeats").then(|| (table.to_owned(), *value))
        });
        let now: Counters = tables.collect();
        if now == before {
            return Ok(now);
        }
        before = now;
    }
}

/// How much each counter of rows grew, per message; those that did.
fn per_message(before: &Counters, after: &Counters, messages: usize) -> Counters {
    let grown = after.iter().map(|(table, rows)| {
        let grown = rows - before.get(table).copied().unwrap_or_default();
        (table.clone(), grown / messages as f64)
    });
    grown.filter(|(_, grown)| *grown > 0.0).collect()
}

/// Writes that each node of the cluster has made, by table, as it counts them itself.
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
