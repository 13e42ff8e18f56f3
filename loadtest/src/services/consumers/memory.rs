//! Measures the memory that conversations take which lag because the webhook is down.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::bail;
use serde_json::json;

use super::{MEMORY_MIB_MAX, Options};
use crate::{
    Common,
    client::Client,
    crowd::channel::spinner,
    data::Data,
    report::Report,
    server::{Server, free_address},
    spread::Spread,
};

/// Users who create conversations at the same time.
const CREATORS: usize = 16;
/// Creations of one user in flight.
const WINDOW: usize = 64;
/// Gateways of each kind, in turn, at most.
const ROUNDS_MAX: usize = 3;
/// Room for all of them: an open conversation counts 32 KiB, and half of this is for conversations.
const ROOM: &str = "memory.mib = 8192\n";
/// The age at which a conversation counts as lagging. A short one, so that all do when the memory is measured.
const LAGGING: &str = "consumers.lagging_after_s = 5\n";
/// The time from the last creation until the memory is measured, for each conversation.
const SETTLED_AFTER: Duration = Duration::from_micros(200);
/// The time within which all must lag by the metric, which changes each 5 s.
const LAGS_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(250);

pub(super) fn run(common: &Common, options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let conversations = options.lagging;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    let progress = spinner();
    let rounds = options.rounds.clamp(1, ROUNDS_MAX);
    for round in 0..rounds {
        progress.set_message(format!("memory, round {} of {rounds}", round + 1));
        without.push(resident_mib(common, options, false)?);
        with.push(resident_mib(common, options, true)?);
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
    more.tell_range("MiB");
    Ok(())
}

/// The memory of a gateway with this many conversations, each of which has had one event.
fn resident_mib(common: &Common, options: &Options, has_webhook: bool) -> anyhow::Result<f64> {
    let conversations = options.lagging;
    let mut data = Data::new(common)?;
    data.more_settings = ROOM.to_owned();
    if has_webhook {
        // Nothing listens there.
        data.more_settings += &format!("{LAGGING}{}", options.settings(&free_address()));
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
    thread::sleep(SETTLED_AFTER * conversations as u32);
    let begin = Instant::now();
    loop {
        let metrics = server.metrics()?;
        let of = |name: &str| {
            let is_it = |found: &str| found.split('{').next() == Some(name);
            let found = metrics.iter().find(|(found, _)| is_it(found));
            found.map_or(0.0, |(_, value)| *value)
        };
        let (lagging, open) = (of("chat_consumer_lagging"), of("chat_conversations_open"));
        if open == conversations as f64 && (!has_webhook || lagging == open) {
            break;
        }
        anyhow::ensure!(
            begin.elapsed() < LAGS_WITHIN,
            "{open} of {conversations} conversations are open, {lagging} lag"
        );
        thread::sleep(LOOK_EVERY);
    }
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
