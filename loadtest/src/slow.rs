//! Some subscribers stop reading: the server must not keep everything for them, and the others must not notice.

use std::time::Duration;

use clap::Args;

use crate::{
    Common,
    client::send_frame,
    data::Data,
    fanout::{WARM_UP, public_channel, spinner},
    report::Report,
    server::Server,
    source::Source,
};

#[derive(Args)]
pub(crate) struct Options {
    #[arg(long, default_value_t = 300)]
    subscribers: usize,
    /// Of these, how many stop reading
    #[arg(long, default_value_t = 30)]
    slow: usize,
    /// Messages per second
    #[arg(long, default_value_t = 60.0)]
    rate: f64,
    /// Bytes of a body
    #[arg(long, default_value_t = 8000)]
    size: usize,
    /// Seconds of each part: with all reading, and without those who do not
    #[arg(long, default_value_t = 15)]
    seconds: u64,
}

/// The others' p99, with slow ones / without.
const RATIO_MAX: f64 = 1.2;
/// Of a slow reader: its queue (1 MiB) and what the kernel holds is not counted as the server's.
const KIB_MAX: f64 = 1200.0;
/// The kernel's buffer of a slow client: the server's queue is what is to be filled.
const RECEIVE_BUFFER: usize = 64 << 10;
/// The gateway's counter of those whose queue was full (4003).
const TOO_SLOW: &str = "chat_sessions_closed_total{reason=\"too slow\"}";

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("slow-readers", &common.outputs);
    anyhow::ensure!(options.slow < options.subscribers, "somebody must read");
    let data = Data::new(common)?;
    let server = Server::gateway(common, &data)?;
    let (publisher, channel, mut crowd) =
        public_channel(std::slice::from_ref(&server), options.subscribers)?;
    crowd.shrink_buffers(options.slow, RECEIVE_BUFFER)?;
    let compose = |body: &str| send_frame(&channel, body);
    let mut source = Source::new(publisher, true, compose, options.size, crowd.epoch)?;
    let watch = server.watch();
    let length = Duration::from_secs(options.seconds);
    let progress = spinner();

    source.paced(&mut crowd, options.rate, WARM_UP, &progress)?;
    crowd.latency[0].reset();
    source.paced(&mut crowd, options.rate, length, &progress)?;
    progress.suspend(|| report.latency("all read: latency", &crowd.latency[0]));
    let before = crowd.latency[0].value_at_quantile(0.99) as f64;

    let stopped = crowd.stop_reading(options.slow)?;
    let memory = server.resident_kib()?;
    crowd.latency[0].reset();
    source.paced(&mut crowd, options.rate, length, &progress)?;
    progress.finish_and_clear();
    report.latency("the others: latency", &crowd.latency[0]);
    let after = crowd.latency[0].value_at_quantile(0.99) as f64;
    let each = (server.resident_kib()? - memory).max(0.0) / options.slow as f64;
    report.at_most(
        "the others' p99, with slow ones / without",
        after / before,
        RATIO_MAX,
        "",
    );
    report.at_most("the server's memory per slow reader", each, KIB_MAX, "KiB");

    drop(stopped);
    let metrics = server.metrics()?;
    let closed = metrics.get(TOO_SLOW).copied().unwrap_or_default();
    println!("  {closed} of {} slow readers were closed", options.slow);
    report.must(
        closed as usize == options.slow,
        "a slow reader was kept".to_owned(),
    );
    source.finish(&crowd, &mut report, "the others")?;
    crowd.draw(&mut report, "gateway");
    watch.stop().draw(&mut report, "gateway");
    report.finish()
}
