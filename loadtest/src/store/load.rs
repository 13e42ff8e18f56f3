//! Imports one long conversation. Pages at its beginning, in its middle and at its end must take the same time.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::Args;
use hdrhistogram::Histogram;
use serde_json::json;

use crate::{
    Common,
    client::Client,
    data::Data,
    report::Report,
    server::Server,
    store::bare::{self, Writing},
};

#[derive(Args)]
pub(crate) struct Options {
    /// Messages of the conversation
    #[arg(long, default_value_t = 1_000_000)]
    messages: u64,
    /// Pages of each size at each place
    #[arg(long, default_value_t = 2000)]
    pages: u64,
    /// Messages of the bare loop, which needs --cassandra
    #[arg(long, default_value_t = 20_000)]
    bare: u64,
}

const CONVERSATION: &str = "0199c0de-0000-7000-8000-00000000f00d";
/// Goal for the medians of the three places, slowest / fastest.
const RATIO_MAX: f64 = 1.2;
/// Goal for the rate of the import, gateway / bare loop.
const BARE_RATIO_MIN: f64 = 1.0;
/// Newest entries, which an owner has in memory. Only older pages are measured.
const IN_MEMORY: u64 = 200;

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("load", &common.outputs);
    let data = Data::new(common)?;
    let file = data.file("messages.jsonl");
    write_messages(&file, options.messages)?;
    import(common, options, &data, &file, &mut report)?;
    let server = Server::gateway(common, &data)?;
    let mut client = Client::connect(&server.address, "alice", 0)?;
    for size in [10, 50] {
        read_pages(&mut client, options, size, &mut report)?;
    }
    report.finish()
}

/// Writes the file to import.
fn write_messages(file: &Path, messages: u64) -> anyhow::Result<()> {
    let mut lines = BufWriter::new(File::create(file)?);
    let users = ["alice", "bob", "carol"];
    let created =
        json!({"type": "conversation", "kind": "group", "id": CONVERSATION, "participants": users});
    writeln!(lines, "{created}")?;
    for number in 0..messages {
        let body = body(number);
        let sender = users[number as usize % users.len()];
        let line = json!({"type": "message", "conversation": CONVERSATION, "sender": sender, "body": body});
        writeln!(lines, "{line}")?;
    }
    Ok(lines.into_inner()?.sync_all()?)
}

/// Measures the import, and a bare loop before and after it.
fn import(
    common: &Common,
    options: &Options,
    data: &Data,
    file: &Path,
    report: &mut Report,
) -> anyhow::Result<()> {
    let bare_before = bare(common, data, options, Writing::OneByOne)?;
    let begin = Instant::now();
    Server::import(common, data, file)?;
    let rate = options.messages as f64 / begin.elapsed().as_secs_f64();
    report.figure("imported, durable and in order", rate, "messages/s");
    let bare_after = bare(common, data, options, Writing::OneByOne)?;
    if let (Some(before), Some(after)) = (bare_before, bare_after) {
        // The bare loop runs before and after, so that compaction of the database affects both alike.
        let one_by_one = (before + after) / 2.0;
        report.figure("bare loop of the same rows", one_by_one, "messages/s");
        if let Some(batches) = bare(common, data, options, Writing::InBatches)? {
            report.figure("the same in batches", batches, "messages/s");
        }
        report.speed_at_least("imported / bare", rate / one_by_one, BARE_RATIO_MIN, "");
    }
    Ok(())
}

/// Measures pages of this size at three places of the log.
fn read_pages(
    client: &mut Client,
    options: &Options,
    size: u64,
    report: &mut Report,
) -> anyhow::Result<()> {
    let head = options.messages + 1;
    let span = options.pages * size;
    if head < 3 * span + IN_MEMORY {
        bail!(
            "--messages is too small for --pages {} of {size} messages at three places",
            options.pages
        );
    }
    let places = [0, head / 2, head - IN_MEMORY - span];
    let mut times = [
        Histogram::<u64>::new(3)?,
        Histogram::new(3)?,
        Histogram::new(3)?,
    ];
    // Each page is read once, so none is cached. The places take turns, so that noise affects all alike.
    for page in 0..options.pages {
        for turn in 0..places.len() {
            let at = (turn + page as usize) % places.len();
            let after = places[at] + page * size;
            let took = read_page(client, after, size, report)?;
            times[at].record(took.as_micros() as u64)?;
        }
    }
    let names = ["oldest", "middle", "newest"];
    for (name, time) in names.iter().zip(&times) {
        report.latency(&format!("{size} messages, {name}"), time);
    }
    let medians = times
        .each_ref()
        .map(|t| Duration::from_micros(t.value_at_quantile(0.5)).as_secs_f64());
    let slowest = medians.into_iter().fold(0.0, f64::max);
    let fastest = medians.into_iter().fold(f64::MAX, f64::min);
    report.speed_at_most(
        &format!("{size} messages: slowest / fastest median"),
        slowest / fastest,
        RATIO_MAX,
        "",
    );
    Ok(())
}

/// Reads and checks one page. Returns the time it took.
fn read_page(
    client: &mut Client,
    after: u64,
    size: u64,
    report: &mut Report,
) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    let reply = client.ask(
        json!({"type": "history", "conversation": CONVERSATION, "after": after, "limit": size}),
    )?;
    let took = begin.elapsed();
    let messages = reply["messages"]
        .as_array()
        .context("`history` has no messages")?;
    let first = messages.first().and_then(|m| m["seq"].as_u64());
    report.must(
        messages.len() as u64 == size && first == Some(after + 1),
        format!("the page after {after} has the wrong messages"),
    );
    Ok(took)
}

fn body(number: u64) -> String {
    format!(
        "message {number} {}",
        "lorem ipsum dolor sit amet ".repeat(1 + number as usize % 6)
    )
}

/// Messages per second of a loop that only writes their rows with the same driver. `None` without a cluster.
fn bare(
    common: &Common,
    data: &Data,
    options: &Options,
    writing: Writing,
) -> anyhow::Result<Option<f64>> {
    let Some(cluster) = &data.cluster else {
        return Ok(None);
    };
    Server::make_tables(common, data)?;
    Ok(Some(bare::messages(cluster, options.bare, writing, body)?))
}
