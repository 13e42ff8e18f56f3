//! Measures what happens when some subscribers stop reading. The server must not queue everything for them, and the
//! other subscribers must not notice.

use std::time::Duration;

use clap::Args;

use crate::{
    Common, crowd::channel::Channel, data::Data, latency::quantile_ms, report::Report,
    server::Server,
};

#[derive(Args)]
pub(crate) struct Options {
    /// Subscribers of a channel
    #[arg(long, default_value_t = 300)]
    subscribers: usize,
    /// Subscribers that stop reading, of all subscribers
    #[arg(long, default_value_t = 30)]
    slow: usize,
    /// Messages per second
    #[arg(long, default_value_t = 60.0)]
    rate: f64,
    /// Bytes of a body
    #[arg(long, default_value_t = 8000)]
    size: usize,
    /// Seconds of each of two parts: all read, and some have stopped reading
    #[arg(long, default_value_t = 15)]
    seconds: u64,
}

/// Goal for the p99 of the others, with slow readers / without.
const RATIO_MAX: f64 = 1.2;
/// Goal for the server's memory for each slow reader, in KiB: its queue of 1 MiB, without buffers of the kernel.
const KIB_MAX: f64 = 1200.0;
/// Kernel receive buffer of a slow reader, small so that the server's queue fills.
const RECEIVE_BUFFER: usize = 64 << 10;
/// The gateway's counter of sessions closed with 4003 because their queue was full.
const TOO_SLOW: &str = "chat_sessions_closed_total{reason=\"too slow\"}";

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("slow-readers", &common.outputs);
    anyhow::ensure!(
        options.slow < options.subscribers,
        "--slow must be less than --subscribers"
    );
    let data = Data::new(common)?;
    let servers = vec![Server::gateway(common, &data)?];
    let mut channel = Channel::public(servers, options.subscribers, options.size)?;
    channel.crowd.shrink_buffers(options.slow, RECEIVE_BUFFER)?;
    let length = Duration::from_secs(options.seconds);
    channel.warm_up(options.rate)?;
    channel.paced(options.rate, length)?;
    channel.clear();
    report.latency("all read: latency", &channel.crowd.latency[0]);
    let before = quantile_ms(&channel.crowd.latency[0], 0.99);

    let stopped = channel.crowd.stop_reading(options.slow);
    let memory = channel.servers[0].resident_kib()?;
    channel.crowd.forget_latency();
    channel.paced(options.rate, length)?;
    channel.clear();
    report.latency("the others: latency", &channel.crowd.latency[0]);
    let after = quantile_ms(&channel.crowd.latency[0], 0.99);
    let memory = channel.servers[0].resident_kib()? - memory;
    let each = memory.max(0.0) / options.slow as f64;
    report.speed_at_most(
        "the others' p99, with slow ones / without",
        after / before,
        RATIO_MAX,
        "",
    );
    report.at_most("the server's memory per slow reader", each, KIB_MAX, "KiB");

    drop(stopped);
    let metrics = channel.servers[0].metrics()?;
    let closed = metrics.get(TOO_SLOW).copied().unwrap_or_default();
    println!("  {closed} of {} slow readers were closed", options.slow);
    report.must(
        closed as usize == options.slow,
        "a slow reader was not closed".to_owned(),
    );
    channel.finish(&mut report, "the others")?;
    report.finish()
}
