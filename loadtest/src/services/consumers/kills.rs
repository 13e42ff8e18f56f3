//! Kills gateways with kill -9 and stops the receiver while messages are sent. In the end every acknowledged message must
//! have arrived, and for the first time in order.

use std::{
    thread,
    time::{Duration, Instant},
};

use indicatif::ProgressBar;

use super::{Options, Setup, receiver::Receiver};
use crate::{Common, latency::latencies, report::Report, server::Server};

/// What happens between two pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Kill,
    Stop,
    Start,
}

pub(super) fn run(common: &Common, options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let mut receiver = Receiver::start(Duration::from_millis(options.delay_ms))?;
    let settings = options.settings(receiver.address());
    let mut setup = Setup::begin(
        common,
        options.rate,
        options.groups,
        options.gateways,
        settings,
        Some(&receiver),
    )?;
    let steps = steps(options.kills);
    let progress = ProgressBar::new(steps.len() as u64);
    let pause = Duration::from_secs(options.pause);
    let (mut down, mut kills, mut stops) = (latencies()?, 0, 0_u32);
    for step in steps {
        thread::sleep(pause);
        match step {
            Step::Kill => {
                let begin = Instant::now();
                replace(common, &mut setup, kills % options.gateways)?;
                down.saturating_record(begin.elapsed().as_micros() as u64);
                kills += 1;
            }
            Step::Stop => {
                receiver.stop();
                stops += 1;
            }
            Step::Start => receiver.listen()?,
        }
        progress.inc(1);
    }
    thread::sleep(pause);
    progress.finish_and_clear();
    report.figure("kills of gateways", kills as f64, "");
    report.figure("stops of the receiver", stops.into(), "");
    report.latency("killed until ready again", &down);
    drop(setup.end(&receiver, Some("kills"), report));
    Ok(())
}

/// Kills a gateway, and starts another one over its data.
fn replace(common: &Common, setup: &mut Setup, number: usize) -> anyhow::Result<()> {
    let is_of_several = setup.gateways.servers.len() > 1;
    setup.gateways.servers[number].kill()?;
    setup.gateways.servers[number] = Server::one(common, &setup.gateways.data, is_of_several)?;
    setup
        .senders
        .follow(number, &setup.gateways.servers[number]);
    Ok(())
}

/// Returns the steps of a run with this many kills. Before every second kill the receiver is stopped; of these, every second
/// kill is while it is down.
fn steps(kills: usize) -> Vec<Step> {
    let of_kill = |kill: usize| match kill % 4 {
        1 => vec![Step::Stop, Step::Start, Step::Kill],
        3 => vec![Step::Stop, Step::Kill, Step::Start],
        _ => vec![Step::Kill],
    };
    (0..kills).flat_map(of_kill).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_receiver_is_stopped_before_every_second_kill_and_always_started_again() {
        for kills in 0..9 {
            let steps = steps(kills);
            let count = |of: Step| steps.iter().filter(|step| **step == of).count();
            assert_eq!(count(Step::Kill), kills);
            assert_eq!(count(Step::Stop), kills / 2);
            assert_eq!(count(Step::Start), kills / 2);
        }
        let killed_while_down = [Step::Stop, Step::Kill, Step::Start];
        assert!(steps(4).ends_with(&killed_while_down));
    }
}
