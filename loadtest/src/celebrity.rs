//! Checks that the store's cost of a message does not depend on the number of participants, in a channel with very
//! many. Then measures a channel with very many connected subscribers while others come and go, on one gateway and on
//! several.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::anyhow;
use clap::Args;
use indicatif::ProgressBar;
use serde_json::json;

use crate::{
    Common,
    client::{Client, is_reply, request_frame, send_frame},
    data::Data,
    fanout::{Before, WARM_UP, public_channel, spinner},
    report::Report,
    server::Server,
    source::{Source, settle},
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
    /// Connected subscribers of another channel; 0 leaves that part out
    #[arg(long, default_value_t = 15_000)]
    live: usize,
    /// Messages per second to the connected subscribers
    #[arg(long, default_value_t = 2.0)]
    rate: f64,
    /// Messages of a burst; there is one every five seconds
    #[arg(long, default_value_t = 20)]
    burst: usize,
    /// Seconds of the part with connected subscribers
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Gateways to measure as well, over one store; more than one needs --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
}

/// Time between two bursts.
const CALM: Duration = Duration::from_secs(5);
/// Time between two visits of a client that comes and goes.
const CHURN_EVERY: Duration = Duration::from_millis(20);
/// One visit in this many joins and leaves, which everyone is told; the others only subscribe.
const JOINS_EVERY: usize = 50;

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
    if options.live > 0 {
        // New data for each part: else the second would begin with what the first one left. A test of this tool keeps the
        // keyspace, because a new one takes a cluster long.
        let next = |data: Data| match common.keep_keyspaces {
            true => Ok(data),
            false => Data::new(common),
        };
        let data = next(data)?;
        let alone = live(common, options, &data, 1, &mut report)?;
        if options.gateways > 1 {
            let data = next(data)?;
            let together = live(common, options, &data, options.gateways, &mut report)?;
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

/// Sends messages and bursts to all subscribers while others come and go. Returns the CPU of a delivery, in
/// microseconds.
fn live(
    common: &Common,
    options: &Options,
    data: &Data,
    gateways: usize,
    report: &mut Report,
) -> anyhow::Result<f64> {
    println!("  {} connected, {gateways} gateways:", options.live);
    let servers = Server::gateways(common, data, gateways)?;
    let name = |what: &str| format!("{what}, on {gateways}");
    let (publisher, channel, mut crowd) = public_channel(&servers, options.live)?;
    let epoch = crowd.epoch;
    let compose = |body: &str| send_frame(&channel, body);
    let mut source = Source::new(publisher, true, compose, 200, epoch)?;
    let watches: Vec<_> = servers.iter().map(Server::watch).collect();
    let progress = spinner();
    source.paced(&mut crowd, options.rate, WARM_UP, &progress)?;
    crowd.forget_latency();
    let over = Arc::new(AtomicBool::new(false));
    let passers_by: Vec<_> = (0..)
        .zip(&servers)
        .map(|(number, server)| {
            let (address, channel) = (server.address.clone(), channel.clone());
            come_and_go(number, address, channel, over.clone())
        })
        .collect();
    let before = Before::new(&servers, &crowd)?;
    let end = epoch.elapsed() + Duration::from_secs(options.seconds);
    while epoch.elapsed() < end {
        source.paced(&mut crowd, options.rate, CALM, &progress)?;
        for _ in 0..options.burst {
            source.publish(epoch.elapsed())?;
        }
        settle(&mut crowd, source.number)?;
    }
    let part = before.part(&servers, &crowd)?;
    over.store(true, Ordering::Relaxed);
    let visits = visits(passers_by)?;
    progress.finish_and_clear();
    report.figure(&name("came and went"), visits as f64, "");
    report.figure(&name("CPU per delivery"), part.cpu_us, "µs");
    if gateways > 1 {
        report.figure(&name("peer frames per message"), part.peer_frames, "");
    }
    for (server, latency) in (1..).zip(&crowd.latency) {
        report.latency(&format!("{} at {server}", name("latency")), latency);
    }
    crowd.draw(report, &name("subscribers"));
    for (number, watch) in (1..).zip(watches) {
        watch
            .stop()
            .draw(report, &format!("{}: {number}", name("gateway")));
    }
    source.finish(&crowd, report, &name("live"))?;
    Ok(part.cpu_us)
}

/// Waits for the clients that come and go. Returns the number of their visits.
fn visits(passers_by: Vec<JoinHandle<anyhow::Result<usize>>>) -> anyhow::Result<usize> {
    let mut visits = 0;
    for passer_by in passers_by {
        visits += passer_by
            .join()
            .map_err(|_| anyhow!("a client that comes and goes panicked"))??;
    }
    Ok(visits)
}

/// Subscribes or joins for a moment, again and again, until `over`. Returns the number of visits.
fn come_and_go(
    number: usize,
    address: String,
    channel: String,
    over: Arc<AtomicBool>,
) -> JoinHandle<anyhow::Result<usize>> {
    thread::spawn(move || {
        let mut client = Client::connect(&address, &format!("passer-by-{number}"), 0)?;
        let mut visits = 0;
        while !over.load(Ordering::Relaxed) {
            visits += 1;
            let (come, go) = match visits % JOINS_EVERY {
                0 => ("join", "leave"),
                _ => ("subscribe", "unsubscribe"),
            };
            client.ask(json!({"type": come, "conversation": channel}))?;
            client.ask(json!({"type": go, "conversation": channel}))?;
            thread::sleep(CHURN_EVERY);
        }
        Ok(visits)
    })
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
