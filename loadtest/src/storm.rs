//! Drops all clients at once and reconnects them with their cursors while messages flow. Measures how long it takes
//! until everyone has everything, and what that costs the store, and checks that nothing is missed.

use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use serde_json::json;

use crate::{
    Common, celebrity,
    client::{Client, send_frame},
    crowd::{BACK_OFF, Crowd},
    data::Data,
    fanout::{WARM_UP, spinner},
    report::Report,
    server::{Server, token, total_cpu},
    source::{Source, settle_while},
};

#[derive(Args)]
pub(crate) struct Options {
    /// Participants of a channel, all connected
    #[arg(long, default_value_t = 15_000)]
    subscribers: usize,
    /// Messages per second, before, during and after the storm
    #[arg(long, default_value_t = 4.0)]
    rate: f64,
    /// Bytes of a body
    #[arg(long, default_value_t = 200)]
    size: usize,
    /// Seconds before the storm, and after it
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Gateways, over one store; more than one needs --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
}

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("reconnect-storm", &common.outputs);
    let data = Data::new(common)?;
    let servers = Server::gateways(common, &data, options.gateways)?;
    let mut owner = Client::connect(&servers[0].address, "celebrity", 0)?;
    let channel = celebrity::channel(&mut owner, options.subscribers + 1)?;
    let tokens = (0..options.subscribers)
        .map(|n| token(&celebrity::fan(n)))
        .collect::<Result<Vec<_>, _>>()?;
    let at = |number: usize| &servers[number % servers.len()].address;
    let connecting = ProgressBar::new(options.subscribers as u64);
    let mut crowd = Crowd::new(servers.len())?;
    for (number, token) in tokens.iter().enumerate() {
        crowd.join(Client::connect_with(at(number), token, number)?.into_stream())?;
        connecting.inc(1);
    }
    connecting.finish_and_clear();
    let compose = |body: &str| send_frame(&channel, body);
    let epoch = crowd.epoch;
    // The owner's first connection has answered no pings meanwhile, so it may be closed.
    let publisher = Client::connect(&servers[0].address, "celebrity", 0)?.into_stream();
    let mut source = Source::new(publisher, true, compose, options.size, epoch)?;
    let watches: Vec<_> = servers.iter().map(Server::watch).collect();
    let length = Duration::from_secs(options.seconds);
    let progress = spinner();
    let (quiet, quiet_reads) = (epoch.elapsed(), reads(&servers)?);
    source.paced(&mut crowd, options.rate, WARM_UP + length, &progress)?;
    // The storm begins. One thread reconnects all clients, as fast as it can.
    let (reads, cpu) = (reads(&servers)?, total_cpu(&servers)?);
    let began = epoch.elapsed();
    let reads_per_second = (reads - quiet_reads) / (began - quiet).as_secs_f64();
    crowd.drop_all();
    let each = Duration::from_secs_f64(1.0 / options.rate);
    let mut due = began;
    let before = source.number;
    let come_back = |crowd: &mut Crowd, number: usize| {
        let mut client = Client::open(at(number), "/v1/ws", number)?;
        let cursors = json!({ (channel.as_str()): [crowd.cursor(number), 0] });
        let token = &tokens[number];
        client.begin(json!({"type": "connect", "token": token, "cursors": cursors}))?;
        crowd.come_back(number, client.into_stream())
    };
    let mut again = 0;
    for number in 0..options.subscribers {
        come_back(&mut crowd, number)?;
        while epoch.elapsed() > due {
            source.publish(due)?;
            due += each;
        }
        if number % 16 == 0 {
            crowd.read(Duration::ZERO)?;
            progress.set_message(format!("{number} are back"));
            progress.tick();
        }
    }
    let all_back = epoch.elapsed() - began;
    again += insist(&mut crowd, source.number, &come_back)?;
    let caught_up = epoch.elapsed() - began;
    let missed = source.number - before;
    progress.finish_and_clear();
    let reads = self::reads(&servers)? - reads;
    let cpu = total_cpu(&servers)? - cpu;
    println!(
        "  {missed} messages were sent while {} clients came back",
        options.subscribers
    );
    report.figure("all connected again after", all_back.as_secs_f64(), "s");
    report.figure("all caught up after", caught_up.as_secs_f64(), "s");
    report.figure(
        "CPU per client that came back",
        cpu.as_secs_f64() * 1e3 / options.subscribers as f64,
        "ms",
    );
    if data.cluster.is_some() {
        report.figure("store reads during the storm", reads, "");
        // Gateways always read the ring and each other's heartbeats.
        let anyway = reads_per_second * caught_up.as_secs_f64();
        report.at_most(
            "store reads per client, beyond those of quiet",
            (reads - anyway).max(0.0) / options.subscribers as f64,
            READS_PER_CLIENT_MAX,
            "",
        );
    }

    // A message can arrive both in the resume and as an event. Clients ignore a seq that they have.
    let twice = std::mem::take(&mut crowd.counts.doubled);
    report.figure("came twice while coming back", twice as f64, "");
    let progress = spinner();
    source.paced(&mut crowd, options.rate, length, &progress)?;
    again += insist(&mut crowd, source.number, &come_back)?;
    progress.finish_and_clear();
    report.figure("refused, and came again", again as f64, "");
    let resyncs = crowd.counts.resyncs;
    report.figure("told to read what they lacked", resyncs as f64, "");
    source.finish(&crowd, &mut report, "the storm")?;
    crowd.draw(&mut report, "gateway");
    for (number, watch) in (1..).zip(watches) {
        watch.stop().draw(&mut report, &format!("gateway {number}"));
    }
    report.finish()
}

/// Goal for the reads of the store for each client: next to nothing.
const READS_PER_CLIENT_MAX: f64 = 0.1;
/// Time without a delivery or a reconnect after which no more is expected.
const QUIET: Duration = Duration::from_secs(10);

/// Waits until all messages have arrived everywhere, or nothing has arrived for `QUIET`. Refused clients connect again.
/// Returns the number of these attempts.
fn insist(
    crowd: &mut Crowd,
    sent: u64,
    come_back: &dyn Fn(&mut Crowd, usize) -> anyhow::Result<()>,
) -> anyhow::Result<usize> {
    let mut again = 0;
    settle_while(crowd, sent, QUIET, |crowd| {
        let before = again;
        while let Some(number) = crowd.gone(BACK_OFF) {
            come_back(crowd, number)?;
            again += 1;
            crowd.read(Duration::ZERO)?;
        }
        Ok(again > before)
    })?;
    Ok(again)
}

/// Reads of the shared store by all gateways.
fn reads(servers: &[Server]) -> anyhow::Result<f64> {
    let mut sum = 0.0;
    for server in servers {
        let metrics = server.metrics()?;
        sum += metrics
            .get("chat_store_request_seconds_count{kind=\"read\"}")
            .copied()
            .unwrap_or_default();
    }
    Ok(sum)
}
