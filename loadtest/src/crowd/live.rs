//! Measures a channel with very many connected subscribers while others come and go.

use std::{thread, time::Duration};

use clap::Args;
use serde_json::json;

use super::{channel::Channel, fanout::Before};
use crate::{Common, client::Client, data::Data, report::Report, server::Server, worker::Worker};

// Another scenario flattens these options, where a second clap group with this name would be an error.
#[derive(Args)]
#[group(skip)]
pub(crate) struct Options {
    /// Connected subscribers of another channel; 0 leaves that part out
    #[arg(long = "live", value_name = "LIVE", default_value_t = 15_000)]
    pub(crate) subscribers: usize,
    /// Messages per second to the connected subscribers
    #[arg(long, default_value_t = 2.0)]
    rate: f64,
    /// Messages of a burst; there is one every five seconds
    #[arg(long, default_value_t = 20)]
    burst: usize,
    /// Seconds of the part with connected subscribers
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

/// Time between two bursts.
const CALM: Duration = Duration::from_secs(5);
/// Time between two visits of a client that comes and goes.
const CHURN_EVERY: Duration = Duration::from_millis(20);
/// One visit in this many joins and leaves, which everyone is told; the others only subscribe.
const JOINS_EVERY: usize = 50;

/// Sends messages and bursts to all subscribers while others come and go. Returns the CPU of a delivery, in
/// microseconds.
pub(crate) fn run(
    common: &Common,
    options: &Options,
    data: &Data,
    gateways: usize,
    report: &mut Report,
) -> anyhow::Result<f64> {
    println!("  {} connected, {gateways} gateways:", options.subscribers);
    let servers = Server::gateways(common, data, gateways)?;
    let name = |what: &str| format!("{what}, on {gateways}");
    let mut channel = Channel::public(servers, options.subscribers, 200)?;
    channel.warm_up(options.rate)?;
    let passers_by: Vec<_> = (0..)
        .zip(&channel.servers)
        .map(|(number, server)| {
            let (address, channel) = (server.address.clone(), channel.id.clone());
            come_and_go(number, address, channel)
        })
        .collect();
    let before = Before::new(&channel)?;
    let epoch = channel.crowd.epoch;
    let end = epoch.elapsed() + Duration::from_secs(options.seconds);
    while epoch.elapsed() < end {
        channel.paced(options.rate, CALM)?;
        for _ in 0..options.burst {
            channel.publish(epoch.elapsed())?;
        }
        channel.settle()?;
    }
    let part = before.part(&channel)?;
    passers_by.iter().for_each(Worker::tell);
    let visits = passers_by.into_iter().map(Worker::stop);
    let visits: usize = visits.sum::<anyhow::Result<_>>()?;
    channel.clear();
    report.figure(&name("came and went"), visits as f64, "");
    report.figure(&name("CPU per delivery"), part.cpu_us, "µs");
    if gateways > 1 {
        report.figure(&name("peer frames per message"), part.peer_frames, "");
    }
    for (server, latency) in (1..).zip(&channel.crowd.latency) {
        report.latency(&format!("{} at {server}", name("latency")), latency);
    }
    channel.finish(report, &name("live"))?;
    Ok(part.cpu_us)
}

/// Subscribes or joins for a moment, again and again. Returns the number of visits.
fn come_and_go(number: usize, address: String, channel: String) -> Worker<usize> {
    Worker::start(move |over| {
        let mut client = Client::connect(&address, &format!("passer-by-{number}"), 0)?;
        let mut visits = 0;
        while !over.is_over() {
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
