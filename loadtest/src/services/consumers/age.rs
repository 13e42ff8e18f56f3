//! Measures how old events are when they arrive, and how many offset rows that takes.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;

use super::{AGE_S_MAX, OFFSETS_MAX, Options, Setup, receiver::Receiver};
use crate::{Common, crowd::channel::spinner, data::Data, report::Report, server::Server};

/// The time between two looks at the gateway's metric, which changes each 5 s.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const OLDEST: &str = "chat_consumer_oldest_seconds";
/// A conversation stores its first offset with its first entry, so a shorter run says nothing of the others.
const OFFSETS_FROM: f64 = 60.0;

pub(super) fn run(
    common: &Common,
    options: &Options,
    conversations: usize,
    report: &mut Report,
) -> anyhow::Result<()> {
    let of = match conversations {
        1 => "1 conversation".to_owned(),
        many => format!("{many} conversations"),
    };
    let receiver = Receiver::start(Duration::from_millis(options.delay_ms))?;
    let settings = options.settings(receiver.address());
    let setup = Setup::begin(
        common,
        options.rate,
        conversations,
        1,
        settings,
        Some(&receiver),
    )?;
    let offsets_before = offsets(&setup.gateways.data)?;
    let (begin, cpu) = (Instant::now(), setup.gateways.servers[0].cpu()?);
    let mut oldest = Vec::new();
    let progress = spinner();
    while begin.elapsed() < Duration::from_secs(options.seconds) {
        let at = begin.elapsed().as_secs_f64();
        oldest.push((at, oldest_seconds(&setup.gateways.servers[0])?));
        progress.set_message(format!("{of}: {at:.0} of {} s", options.seconds));
        thread::sleep(LOOK_EVERY);
    }
    progress.finish_and_clear();
    let seconds = begin.elapsed().as_secs_f64();
    let cores = setup.gateways.servers[0]
        .cpu()?
        .saturating_sub(cpu)
        .as_secs_f64()
        / seconds;
    let rate = setup.senders.acknowledged() as f64 / seconds;
    report.figure(&format!("{of}: acknowledged"), rate, "messages/s");
    report.figure(&format!("{of}: CPU of the gateway"), cores, "cores");
    let rows = match (offsets_before, offsets(&setup.gateways.data)?) {
        (Some(before), Some(after)) if seconds >= OFFSETS_FROM => Some(after - before),
        _ => None,
    };
    let gateways = setup.end(&receiver, Some(&of), report);
    oldest.push((
        begin.elapsed().as_secs_f64(),
        oldest_seconds(&gateways.servers[0])?,
    ));
    tell_ages(&of, &receiver, oldest, report);
    if let Some(rows) = rows {
        let name = format!("{of}: offset rows of each, in 30 s");
        let each = rows / conversations as f64 / (seconds / 30.0);
        report.at_most(&name, each, OFFSETS_MAX, "");
    }
    Ok(())
}

fn tell_ages(of: &str, receiver: &Receiver, oldest: Vec<(f64, f64)>, report: &mut Report) {
    let arrivals = receiver.arrivals();
    report.latency(&format!("{of}: age at arrival"), &arrivals.ages);
    let oldest_arrival = arrivals.ages.max() as f64 / 1e6;
    let name = format!("{of}: oldest event at arrival");
    report.speed_at_most(&name, oldest_arrival, AGE_S_MAX, "s");
    let by_metric = oldest.iter().map(|(_, age)| *age).fold(0.0, f64::max);
    let name = format!("{of}: oldest event by the metric");
    report.speed_at_most(&name, by_metric, AGE_S_MAX, "s");
    report.over_time("oldest event not delivered", "s", of, oldest);
}

/// The age of the oldest event, as the gateway reports it.
fn oldest_seconds(server: &Server) -> anyhow::Result<f64> {
    let metrics = server.metrics()?;
    let of_consumers = metrics.iter().filter(|(name, _)| name.starts_with(OLDEST));
    let oldest = of_consumers.map(|(_, age)| *age).reduce(f64::max);
    oldest.with_context(|| format!("the gateway has no {OLDEST}"))
}

/// Writes of offsets, as the nodes of the cluster count them, each for itself. `None` over the embedded store, which counts
/// all its rows together.
fn offsets(data: &Data) -> anyhow::Result<Option<f64>> {
    let Some(cluster) = &data.cluster else {
        return Ok(None);
    };
    let writes = cluster.local_writes()?;
    let of_offsets = writes
        .iter()
        .filter(|(table, _)| table == "consumer_offsets");
    let replicas = cluster.nodes.len().clamp(1, 3) as f64;
    Ok(Some(
        of_offsets.map(|(_, count)| count).sum::<f64>() / replicas,
    ))
}
