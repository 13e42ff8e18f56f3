//! Simulates people in groups, and in a channel for everyone, while gateways are killed, or drained and replaced by
//! another build. They reconnect with their cursors to any gateway and repeat messages that were not acknowledged. In the
//! end everyone must have each of their logs, complete and in order.

mod changes;
mod person;
mod requests;
mod talk;
mod world;

use std::{
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use indicatif::ProgressBar;
pub(crate) use talk::Talk;
pub(crate) use world::Cast;

use crate::{
    Common,
    data::Data,
    latency::latencies,
    report::Report,
    server::{Server, other_build},
};

#[derive(Args)]
pub(crate) struct Options {
    /// Users, each on a connection of their own
    #[arg(long, default_value_t = 40)]
    users: usize,
    /// Messages per second of each user
    #[arg(long, default_value_t = 2.0)]
    rate: f64,
    /// Participants of a group, and groups of each user
    #[arg(long, default_value_t = 5)]
    participants: usize,
    /// Kills; each takes the next gateway in turn
    #[arg(long, default_value_t = 6)]
    kills: usize,
    /// Seconds from the moment a killed gateway is ready again until the next kill
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Gateways, over one store; more than one needs --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
    /// Program of an earlier build; instead of kills, each gateway begins with it and is drained and replaced by --gateway,
    /// one after the other, then all of them back, and forward again, and then the upgrade is finalized. One gateway with its
    /// own directory is only replaced forward, because its start finalizes
    #[arg(long, value_name = "PROGRAM")]
    upgrade_from: Option<PathBuf>,
    /// Seed of what each user writes and where
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Time within which all gateways must have a level that rose.
const LEVEL_WITHIN: Duration = Duration::from_secs(10);
/// Time until the level is looked at again.
const LOOK_AFTER: Duration = Duration::from_millis(50);
/// The metric with the level.
const LEVEL: &str = "chat_cluster_level";

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("chaos", &common.outputs);
    let data = Data::new(common)?;
    let several = options.gateways > 1;
    let earlier = earlier(common, options)?;
    let first = earlier.as_ref().unwrap_or(common);
    let mut servers = Server::gateways(first, &data, options.gateways)?;
    let mut talk = Talk::begin(
        &servers,
        Cast {
            users: options.users,
            rate: options.rate,
            participants: options.participants,
            seed: options.seed,
            every_request: false,
        },
    )?;

    let replacements = replacements(common, earlier.as_ref(), &data, options);
    let progress = ProgressBar::new(replacements.len() as u64);
    let pause = Duration::from_secs(options.seconds);
    let mut down = latencies()?;
    thread::sleep(pause);
    for &(replaced, build) in &replacements {
        let begin = Instant::now();
        if earlier.is_some() {
            servers[replaced].drain()?;
        } else {
            servers[replaced].kill()?;
        }
        servers[replaced] = Server::one(build, &data, several)?;
        down.saturating_record(begin.elapsed().as_micros() as u64);
        talk.follow(replaced, &servers[replaced]);
        progress.inc(1);
        thread::sleep(pause);
    }
    progress.finish_and_clear();
    if earlier.is_some() && data.cluster.is_some() {
        finalize(common, &data, &servers, &mut report)?;
        thread::sleep(pause);
    }
    talk.end(&servers[0].address, &mut report)?;
    let (what, until) = match earlier {
        None => ("kills", "killed until ready again"),
        Some(_) => ("replacements", "drained until another build is ready"),
    };
    report.figure(what, replacements.len() as f64, "");
    report.latency(until, &down);
    report.finish()
}

/// Returns the options with the earlier build, if this run is an upgrade from one.
fn earlier(common: &Common, options: &Options) -> anyhow::Result<Option<Common>> {
    let with = |program: &PathBuf| {
        anyhow::Ok(Common {
            gateway: Some(other_build("--upgrade-from", program)?),
            ..common.clone()
        })
    };
    options.upgrade_from.as_ref().map(with).transpose()
}

/// Ends the upgrade while everyone writes, and waits until each gateway has the level that rose.
fn finalize(
    common: &Common,
    data: &Data,
    servers: &[Server],
    report: &mut Report,
) -> anyhow::Result<()> {
    let levels = || -> anyhow::Result<Vec<f64>> {
        let level = |server: &Server| Ok(server.metrics()?.get(LEVEL).copied().unwrap_or(0.0));
        servers.iter().map(level).collect()
    };
    let before = levels()?;
    let said = Server::finalize(common, data)?;
    println!("  {}", said.trim_end());
    let risen = |now: &[f64]| now.iter().zip(&before).all(|(now, before)| now > before);
    // Two builds of one level leave it as it is.
    let same = said.contains("already");
    let (until, mut now) = (Instant::now() + LEVEL_WITHIN, levels()?);
    while !same && !risen(&now) && Instant::now() < until {
        thread::sleep(LOOK_AFTER);
        now = levels()?;
    }
    let what = format!("the level was {before:?} and is {now:?}");
    report.must(risen(&now) || same && now == before, what);
    Ok(())
}

/// Returns the gateways to replace, in order, each with the build that replaces it.
fn replacements<'a>(
    common: &'a Common,
    earlier: Option<&'a Common>,
    data: &Data,
    options: &Options,
) -> Vec<(usize, &'a Common)> {
    match earlier {
        None => (0..options.kills)
            .map(|kill| (kill % options.gateways, common))
            .collect(),
        Some(_) if data.cluster.is_none() => vec![(0, common)],
        Some(earlier) => [common, earlier, common]
            .into_iter()
            .flat_map(|build| (0..options.gateways).map(move |gateway| (gateway, build)))
            .collect(),
    }
}
