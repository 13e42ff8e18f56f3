//! Measures idle connections: the memory of each, and the CPU of connecting it.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use clap::Args;
use indicatif::ProgressBar;

use crate::{
    Common,
    client::Client,
    data::Data,
    report::Report,
    server::{Server, token},
};

#[derive(Args)]
pub(crate) struct Options {
    /// Connections, each of another user, authenticated and registered for its inbox
    #[arg(long, default_value_t = 8000)]
    connections: usize,
}

/// Goal for the memory of an idle connection, in KiB.
pub(crate) const KIB_MAX: f64 = 5.0;
/// Goal for the CPU of connecting, in milliseconds.
pub(crate) const CONNECT_MS_MAX: f64 = 0.15;
/// Connections before the measured ones, which fill buffers and pools that a server grows only once.
const WARM_UP: usize = 100;

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("idle", &common.outputs);

    alone(common, options.connections, &mut report)?;
    if common.alone {
        return report.finish();
    }
    println!("raw epoll loop, without authentication:");
    let (kib, connect_ms) = raw(options.connections)?;
    report.figure("raw: resident memory per connection", kib, "KiB");
    report.figure("raw: CPU per connect", connect_ms, "ms");
    report.finish()
}

/// Measures the gateway alone.
pub(crate) fn alone(
    common: &Common,
    connections: usize,
    report: &mut Report,
) -> anyhow::Result<()> {
    println!("gateway, {connections} authenticated users:");
    let (kib, connect_ms) = gateway(common, connections)?;
    report.at_most(
        "gateway: resident memory per connection",
        kib,
        KIB_MAX,
        "KiB",
    );
    report.speed_at_most("gateway: CPU per connect", connect_ms, CONNECT_MS_MAX, "ms");
    Ok(())
}

/// The memory in KiB and the CPU in milliseconds of each connection to a new gateway.
pub(crate) fn gateway(common: &Common, connections: usize) -> anyhow::Result<(f64, f64)> {
    let tokens = (0..WARM_UP + connections)
        .map(|n| token(&format!("user-{n}")))
        .collect::<Result<Vec<_>, _>>()?;
    let data = Data::new(common)?;
    let server = Server::gateway(common, &data)?;
    measure(&server, connections, |n| {
        Client::connect_with(&server.address, &tokens[n], n)
    })
}

/// The memory in KiB and the CPU in milliseconds of each connection to the raw loop.
pub(crate) fn raw(connections: usize) -> anyhow::Result<(f64, f64)> {
    let server = Server::raw()?;
    measure(&server, connections, |n| {
        Client::connect_raw(&server.address, n)
    })
}

/// The memory in KiB and the CPU in milliseconds of each connection to a server.
pub(crate) fn measure(
    server: &Server,
    connections: usize,
    connect: impl Fn(usize) -> anyhow::Result<Client>,
) -> anyhow::Result<(f64, f64)> {
    let total = WARM_UP + connections;
    let mut clients = Vec::with_capacity(total);
    for n in 0..WARM_UP {
        clients.push(connect(n)?);
    }
    settled(server)?;
    let (memory, cpu) = (server.resident_kib()?, server.cpu()?);
    let progress = ProgressBar::new(connections as u64);
    for n in WARM_UP..total {
        clients.push(connect(n)?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let cpu = server.cpu()? - cpu;
    settled(server)?;
    let memory = server.resident_kib()? - memory;
    let count = connections as f64;
    Ok((memory / count, cpu.as_secs_f64() * 1e3 / count))
}

/// Waits until the server needs no CPU any more, at most 10 s.
fn settled(server: &Server) -> anyhow::Result<()> {
    let until = Instant::now() + Duration::from_secs(10);
    let mut before = server.cpu()?;
    loop {
        sleep(Duration::from_millis(200));
        let now = server.cpu()?;
        if now - before < Duration::from_millis(2) || Instant::now() > until {
            return Ok(());
        }
        before = now;
    }
}
