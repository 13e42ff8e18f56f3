//! Measures webhooks: what they cost the gateway, how old events are when they arrive, and whether all of them arrive, in
//! order, while gateways are killed and the receiver is stopped. Counts what push services are asked.

mod age;
mod arrivals;
mod cpu;
mod kills;
mod memory;
mod push;
mod receiver;

use std::{
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use serde_json::json;

use self::receiver::Receiver;
use crate::{
    Common,
    client::Client,
    data::Data,
    report::Report,
    senders::{Pace, Senders, User},
    server::Server,
};

#[derive(Args)]
pub(crate) struct Options {
    /// Messages per second
    #[arg(long, default_value_t = 1_000.0)]
    rate: f64,
    /// Milliseconds after which the receiver answers
    #[arg(long, default_value_t = 50)]
    delay_ms: u64,
    /// Requests to the webhook at once
    #[arg(long, default_value_t = 4)]
    connections: usize,
    /// Rounds in which the CPU is measured without a webhook, with one that is down, and with one that is up; 0 leaves it out
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of each of the three in a round
    #[arg(long, default_value_t = 10)]
    piece_seconds: u64,
    /// Seconds in which the age of events is measured, for each number of conversations; 0 leaves it out
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Conversations when the age is measured
    #[arg(long, value_delimiter = ',', default_value = "1,1000")]
    conversations: Vec<usize>,
    /// Seconds in which messages go to a user with a session, for whom no push service may be asked; 0 leaves it out
    #[arg(long, default_value_t = 30)]
    push_seconds: u64,
    /// Conversations that lag because the webhook is down, when the memory is measured; 0 leaves it out
    #[arg(long, default_value_t = 100_000)]
    lagging: usize,
    /// Conversations when the CPU is measured, when messages are pushed, and when gateways are killed
    #[arg(long, default_value_t = 100)]
    groups: usize,
    /// Kills, each of the next gateway in turn; before every second one the receiver is stopped; 0 leaves them out
    #[arg(long, default_value_t = 20)]
    kills: usize,
    /// Seconds between the kills, stops and starts
    #[arg(long, default_value_t = 2)]
    pause: u64,
    /// Gateways that are killed, over one store; more than one needs --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
}

/// Goal for the CPU of a message with a webhook, compared with none.
const CPU_RATIO_MAX: f64 = 1.05;
/// Goal for the memory of conversations that lag.
const MEMORY_MIB_MAX: f64 = 16.0;
/// Goal for the age of the oldest event.
const AGE_S_MAX: f64 = 5.0;
/// Goal for the offset rows of a conversation in 30 s.
const OFFSETS_MAX: f64 = 1.0;
/// Senders, if there are enough conversations.
const SENDERS: usize = 4;
/// Messages of one sender in flight.
const WINDOW: usize = 256;
/// The time within which the creations of all conversations must have arrived.
const CREATED_WITHIN: Duration = Duration::from_secs(60);
/// The events count as lost if so long none arrives. Lagging conversations are looked for each 60 s.
const SILENCE_MAX: Duration = Duration::from_secs(150);

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let positive = options.rate > 0.0 && options.groups > 0 && !options.conversations.contains(&0);
    anyhow::ensure!(positive, "--rate, --groups and --conversations are above 0");
    let mut report = Report::new("consumers", &common.outputs);
    if options.rounds > 0 {
        cpu::run(common, options, &mut report)?;
    }
    if options.seconds > 0 {
        for conversations in &options.conversations {
            age::run(common, options, *conversations, &mut report)?;
        }
    }
    if options.push_seconds > 0 {
        push::run(common, options, &mut report)?;
    }
    if options.lagging > 0 {
        memory::run(common, options, &mut report)?;
    }
    if options.kills > 0 {
        kills::run(common, options, &mut report)?;
    }
    report.finish()
}

/// Gateways, and the users who send messages.
struct Setup {
    senders: Senders,
    gateways: Gateways,
}

/// Gateways and their data, which is deleted after they ended.
struct Gateways {
    servers: Vec<Server>,
    data: Data,
}

impl Setup {
    /// Starts gateways with these settings, and begins to send. `receiver` is the one that gets the events, if there is one.
    fn begin(
        common: &Common,
        rate: f64,
        conversations: usize,
        gateways: usize,
        settings: String,
        receiver: Option<&Receiver>,
    ) -> anyhow::Result<Self> {
        let mut data = Data::new(common)?;
        data.more_settings = settings;
        let servers = Server::gateways(common, &data, gateways)?;
        let users = users(&servers[0], conversations)?;
        if let Some(receiver) = receiver {
            receiver.wait_for(conversations as u64, CREATED_WITHIN)?;
            receiver.arrivals().restart_ages();
        }
        Ok(Self {
            senders: Senders::begin(
                &servers,
                users,
                Pace {
                    rate: Some(rate),
                    window: WINDOW,
                },
            ),
            gateways: Gateways { servers, data },
        })
    }

    /// Ends the sending, waits until everything has arrived, and checks it. Prints the figures only if `of` names them.
    fn end(self, receiver: &Receiver, of: Option<&str>, report: &mut Report) -> Gateways {
        let sent = self.senders.end();
        let begin = Instant::now();
        let (mut before, mut silent_since) = (0, Instant::now());
        let faults = loop {
            let arrivals = receiver.arrivals();
            let faults = arrivals.faults(&sent.acknowledged);
            let now = arrivals.first + arrivals.repeated;
            drop(arrivals);
            if now != before {
                (before, silent_since) = (now, Instant::now());
            }
            if faults.lost == 0 || silent_since.elapsed() > SILENCE_MAX {
                break faults;
            }
            thread::sleep(Duration::from_millis(200));
        };
        let arrivals = receiver.arrivals();
        if let Some(of) = of {
            let mut figure = |what: &str, value: u64| {
                report.figure(&format!("{of}: {what}"), value as f64, "");
            };
            figure("messages acknowledged", sent.acknowledged.len() as u64);
            figure("events lost", faults.lost + faults.misplaced);
            figure("first arrivals out of order", arrivals.out_of_order);
            figure("events repeated", arrivals.repeated);
            let events = (arrivals.first + arrivals.repeated) as f64;
            let each = events / arrivals.requests.max(1) as f64;
            report.figure(&format!("{of}: events in a request"), each, "");
            let all_after = begin.elapsed().as_secs_f64();
            report.figure(
                &format!("{of}: last message until all arrived"),
                all_after,
                "s",
            );
        }
        let of = of.unwrap_or("CPU");
        let mut must =
            |count: u64, what: &str| report.must(count == 0, format!("{of}: {count} {what}"));
        must(faults.lost, "events were lost");
        must(
            faults.misplaced,
            "events have other ids than their messages",
        );
        must(arrivals.out_of_order, "first arrivals were out of order");
        must(sent.unanswered, "messages were never acknowledged");
        for wrong in [&arrivals.wrong, &sent.wrong].into_iter().flatten() {
            report.must(false, format!("{of}: {wrong}"));
        }
        self.gateways
    }
}

/// Creates groups of two, of which only one user is ever connected. Returns these users.
fn users(server: &Server, count: usize) -> anyhow::Result<Vec<User>> {
    let create = |number: usize| {
        let name = format!("sender-{number}");
        let mut user = Client::connect(&server.address, &name, number)?;
        let mut conversations = Vec::new();
        for _ in (number..count).step_by(SENDERS) {
            let create = json!({"type": "create", "kind": "group", "participants": ["reader"]});
            conversations.push(user.create_patiently(create)?.parse()?);
        }
        Ok(User {
            name,
            conversations,
        })
    };
    (0..SENDERS.min(count)).map(create).collect()
}

impl Options {
    /// The settings of a webhook at this address.
    fn settings(&self, address: &str) -> String {
        let connections = self.connections;
        format!(
            r#"[[webhooks]]
name = "load"
url = "http://{address}/"
secrets = ["whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"]
connections = {connections}
http = true
allow = ["127.0.0.0/8"]
"#
        )
    }
}
