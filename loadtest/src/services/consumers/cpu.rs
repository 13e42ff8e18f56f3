//! Measures what a webhook costs: the gateway's CPU of each message without one, and with one that is down or up.

use std::{thread, time::Duration};

use super::{CPU_RATIO_MAX, Options, Setup, receiver::Receiver};
use crate::{
    Common, crowd::channel::spinner, report::Report, server::free_address, spread::Spread,
};

/// The time before each measurement in which messages are sent already.
const WARM_UP: Duration = Duration::from_secs(1);

/// The state of the webhook.
#[derive(Clone, Copy)]
enum Webhook {
    None,
    Down,
    Up,
}

const ALL: [Webhook; 3] = [Webhook::None, Webhook::Down, Webhook::Up];

pub(super) fn run(common: &Common, options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let mut costs = [const { Vec::new() }; ALL.len()];
    let progress = spinner();
    for round in 0..options.rounds {
        progress.set_message(format!("CPU, round {} of {}", round + 1, options.rounds));
        // Each is first in every third round, so that other work on the machine affects all alike.
        for turn in 0..ALL.len() {
            progress.tick();
            let which = (round + turn) % ALL.len();
            costs[which].push(piece(common, options, ALL[which], report)?);
        }
    }
    progress.finish_and_clear();
    let [none, down, up] = costs;
    let ratios = |with: &[f64]| Spread::ratios(with, &none);
    let all = [("down", ratios(&down)), ("up", ratios(&up))];
    let names = ["no webhook", "webhook down", "webhook up"];
    for (name, costs) in names.into_iter().zip([none, down, up]) {
        let name = format!("CPU per message, {name}");
        Spread::of(costs).tell(report, &name, "µs");
    }
    for (state, ratios) in all {
        let name = format!("CPU per message, {state} / none");
        report.speed_at_most(&name, ratios.median, CPU_RATIO_MAX, "");
        ratios.tell_range("");
    }
    Ok(())
}

/// Measures the CPU of a message, in microseconds, with a gateway of its own.
fn piece(
    common: &Common,
    options: &Options,
    webhook: Webhook,
    report: &mut Report,
) -> anyhow::Result<f64> {
    let receiver = match webhook {
        Webhook::Up => Some(Receiver::start(Duration::from_millis(options.delay_ms))?),
        Webhook::None | Webhook::Down => None,
    };
    let address = match (&receiver, webhook) {
        (Some(receiver), _) => Some(receiver.address().to_owned()),
        // Nothing listens there.
        (None, Webhook::Down) => Some(free_address()),
        (None, _) => None,
    };
    let settings = address
        .map(|address| options.settings(&address))
        .unwrap_or_default();
    let setup = Setup::begin(
        common,
        options.rate,
        options.groups,
        1,
        settings,
        receiver.as_ref(),
    )?;
    thread::sleep(WARM_UP);
    let (cpu, messages) = (
        setup.gateways.servers[0].cpu()?,
        setup.senders.acknowledged(),
    );
    thread::sleep(Duration::from_secs(options.piece_seconds.max(1)));
    let cpu = setup.gateways.servers[0].cpu()?.saturating_sub(cpu);
    let messages = setup.senders.acknowledged() - messages;
    anyhow::ensure!(messages > 0, "no message was acknowledged");
    match &receiver {
        Some(receiver) => drop(setup.end(receiver, None, report)),
        None => {
            let sent = setup.senders.end();
            report.must(
                sent.unanswered == 0 && sent.wrong.is_none(),
                format!(
                    "{} messages were never acknowledged {:?}",
                    sent.unanswered, sent.wrong
                ),
            );
        }
    }
    Ok(cpu.as_secs_f64() * 1e6 / messages as f64)
}
