//! Measures the memory that conversations take which lag because the webhook is down.

use std::{thread, time::Duration};

use anyhow::bail;
use serde_json::json;

use super::{MEMORY_MIB_MAX, settings};
use crate::{
    Common, client::Client, data::Data, fanout::spinner, report::Report, server::Server,
    server::free_address, spread::Spread,
};

/// Users who create conversations at the same time.
const CREATORS: usize = 16;
/// Creations of one user in flight.
const WINDOW: usize = 64;
/// Gateways of each kind, in turn.
const ROUNDS: usize = 3;
/// Room for all of them: an open conversation counts 32 KiB, and half of this is for conversations.
const ROOM: &str = "memory.mib = 8192\n";
/// The age at which a conversation counts as lagging. A short one, so that all do when the memory is measured.
const LAGGING: &str = "consumers.lagging_after_s = 5\n";
/// The time from the last creation until the memory is measured.
const SETTLED_AFTER: Duration = Duration::from_secs(20);
const LAGGING_METRIC: &str = "chat_consumer_lagging";

pub(super) fn run(
    common: &Common,
    conversations: usize,
    report: &mut Report,
) -> anyhow::Result<()> {
    let (mut without, mut with) = (Vec::new(), Vec::new());
    let progress = spinner();
    for round in 0..ROUNDS {
        progress.set_message(format!("memory, round {} of {ROUNDS}", round + 1));
        without.push(resident_mib(common, conversations, false)?);
        with.push(resident_mib(common, conversations, true)?);
    }
    progress.finish_and_clear();
    let more = with
        .iter()
        .zip(&without)
        .map(|(with, without)| with - without);
    let more = Spread::of(more.collect());
    let of = format!("{conversations} conversations");
    Spread::of(without).tell(report, &format!("memory, {of}, no webhook"), "MiB");
    Spread::of(with).tell(report, &format!("memory, {of}, webhook down"), "MiB");
    let name = format!("memory of {conversations} that lag");
    report.at_most(&name, more.median, MEMORY_MIB_MAX, "MiB");
    println!(
        "  {:<44} {:.1} to {:.1} in {ROUNDS} rounds",
        "",
        more.at(0.0),
        more.at(1.0)
    );
    Ok(())
}

/// The memory of a gateway with this many conversations, each of which has had one event.
fn resident_mib(common: &Common, conversations: usize, has_webhook: bool) -> anyhow::Result<f64> {
    let mut data = Data::new(common)?;
    data.more_settings = ROOM.to_owned();
    if has_webhook {
        // Nothing listens there.
        data.more_settings += &format!("{LAGGING}{}", settings(&free_address()));
    }
    let server = Server::gateway(common, &data)?;
    thread::scope(|scope| {
        let creators: Vec<_> = (0..CREATORS)
            .map(|number| {
                let count = (number..conversations).step_by(CREATORS).len();
                let address = &server.address;
                scope.spawn(move || create(address, number, count))
            })
            .collect();
        creators
            .into_iter()
            .try_for_each(|creator| match creator.join() {
                Ok(created) => created,
                Err(_) => bail!("a thread that creates conversations panicked"),
            })
    })?;
    thread::sleep(SETTLED_AFTER);
    let metrics = server.metrics()?;
    let of = |start: &str| {
        let found = metrics.iter().find(|(name, _)| name.starts_with(start));
        found.map_or(0.0, |(_, value)| *value)
    };
    let (lagging, evicted) = (of(LAGGING_METRIC), of("chat_conversations_evicted_total"));
    let expected = if has_webhook { conversations } else { 0 };
    anyhow::ensure!(
        lagging == expected as f64,
        "{lagging} conversations lag, not {expected}; {evicted} were evicted"
    );
    Ok(server.resident_kib()? / 1024.0)
}

/// Creates groups, of which only the creator is connected.
fn create(address: &str, number: usize, count: usize) -> anyhow::Result<()> {
    let mut user = Client::connect(address, &format!("creator-{number}"), number)?;
    let (mut begun, mut done) = (0, 0);
    while done < count {
        while begun < count && begun - done < WINDOW {
            user.begin(json!({"type": "create", "kind": "group", "participants": ["reader"]}))?;
            begun += 1;
        }
        let frame = user.next()?;
        if frame["type"] == "error" {
            bail!("{frame}");
        }
        done += usize::from(!frame["id"].is_null());
    }
    Ok(())
}
