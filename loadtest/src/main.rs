//! Load tester for the chat gateway. It starts its own gateway on loopback, counts every delivery, and measures a raw
//! epoll loop in the same run for comparison. It exits with 1 if something was lost or a goal was missed.

#![expect(clippy::disallowed_methods, reason = "measurements need real time")]

mod abuse;
mod attachments;
mod attacks;
mod bare;
mod bombs;
mod celebrity;
mod chaos;
mod client;
mod consumers;
mod crowd;
mod data;
mod ending;
mod fanout;
mod hostile;
mod idle;
mod inbox;
mod kill;
mod latency;
mod load;
mod pairs;
mod peers;
mod people;
mod plot;
mod raw;
mod reactions;
mod replies;
mod report;
mod server;
mod slow;
mod soak;
mod source;
mod spread;
mod store;
mod storm;
mod trend;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand};

use report::Outputs;

/// The gateway's allocator, because this process also measures the bare store for comparison.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Args, Clone)]
struct Common {
    /// Program of the gateway; by default chat-gateway in the folder of this program
    #[arg(long, global = true)]
    gateway: Option<PathBuf>,
    /// Nodes of a Cassandra or ScyllaDB cluster, used instead of the embedded store: 127.0.0.1:9042,…
    #[arg(long, global = true, value_delimiter = ',')]
    cassandra: Vec<String>,
    /// Do not drop the keyspaces at the end, for a cluster that is deleted afterwards; for tests of this tool
    #[arg(long, global = true)]
    keep_keyspaces: bool,
    /// Directory to write the log of each gateway to
    #[arg(long, global = true)]
    logs: Option<PathBuf>,
    /// Measure only the gateway: no raw loop, no bare store, no other servers for comparison
    #[arg(long, global = true)]
    alone: bool,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Subcommand)]
enum Scenario {
    /// Measure fan-out: one channel with many subscribers, paced and as fast as possible
    Fanout(fanout::Options),
    /// Measure idle connections: the memory and CPU of each
    Idle(idle::Options),
    /// Kill the gateway under load with kill -9, and check that every acknowledged message is there
    Kill(kill::Options),
    /// Measure what a message to a channel of 100,000 participants costs the store
    Celebrity(celebrity::Options),
    /// Import a million messages into one conversation, and read pages at its beginning, middle and end
    Load(load::Options),
    /// Simulate direct chats at a human pace
    Dm(people::Options),
    /// Simulate groups at a human pace
    Groups(people::Options),
    /// Simulate direct chats, groups and a channel for everyone, at a human pace
    Mixed(people::Options),
    /// Simulate groups at a human pace while gateways are killed
    Chaos(chaos::Options),
    /// Let people talk for a long time with every kind of request: memory and disk must not grow without need
    ///
    /// Kills are in the first eighth of the run. Slopes are of its second half: the gateways have run for long by then, and
    /// are not killed any more. A slope is the median of the slopes between any two samples (Theil and Sen).
    /// It is within the noise, and no goal is missed, if the line rises by less in that half than the samples spread about
    /// it. The gateways have small caches (`memory.mib` 16, `store.embedded.cache_mib` 8), because a cache that fills looks
    /// like a leak. In a run of less than an hour they still fill, so no slope has a goal there. Latency is that of the messages
    /// since the last sample, from when they were due to their acknowledgement.
    Soak(soak::Options),
    /// Measure what reading an inbox costs, and check its unread counts
    Inbox(inbox::Options),
    /// Measure what storing a message costs, compared with the bare store, and how the cost grows
    Store(store::Options),
    /// Measure what subscribers that stop reading cost the server and the other subscribers
    SlowReaders(slow::Options),
    /// Drop all clients at once and reconnect them with their cursors while messages flow
    ReconnectStorm(storm::Options),
    /// Compare fan-out and idle connections with NATS, Socket.IO and the raw loop; installs them
    Peers(peers::Options),
    /// Measure what hostile sessions cost ordinary users, and how much memory they make the gateway use
    Abuse(abuse::Options),
    /// Measure what reactions to one message of a large channel cost, and look for each of them in the end
    Reactions(reactions::Options),
    /// Measure uploads of files, what they cost people who talk meanwhile, and whether deleted files are gone
    Attachments(attachments::Options),
    /// Measure what webhooks cost, and how old events are when they arrive; kill the gateway, and look for each of them
    Consumers(consumers::Options),
    /// Compare this build with a base build, in turn: which costs have grown
    Pairs(pairs::Options),
    /// Run the hostile sessions, in a separate process
    #[command(hide = true)]
    Hostile,
    /// Run the raw epoll loop, in a separate process
    #[command(hide = true)]
    RawServer,
}

fn main() -> ExitCode {
    let Arguments { common, scenario } = Arguments::parse();
    let outcome = rlimit::increase_nofile_limit(u64::MAX)
        .map_err(anyhow::Error::from)
        .and_then(|_| ending::watch())
        .and_then(|()| match scenario {
            Scenario::Fanout(options) => fanout::run(&common, &options),
            Scenario::Idle(options) => idle::run(&common, &options),
            Scenario::Kill(options) => kill::run(&common, &options),
            Scenario::Celebrity(options) => celebrity::run(&common, &options),
            Scenario::Load(options) => load::run(&common, &options),
            Scenario::Dm(options) => people::run(&common, &options, people::Kind::Dm),
            Scenario::Groups(options) => people::run(&common, &options, people::Kind::Groups),
            Scenario::Mixed(options) => people::run(&common, &options, people::Kind::Mixed),
            Scenario::Chaos(options) => chaos::run(&common, &options),
            Scenario::Soak(options) => soak::run(&common, &options),
            Scenario::Inbox(options) => inbox::run(&common, &options),
            Scenario::Store(options) => store::run(&common, &options),
            Scenario::SlowReaders(options) => slow::run(&common, &options),
            Scenario::ReconnectStorm(options) => storm::run(&common, &options),
            Scenario::Peers(options) => peers::run(&common, &options),
            Scenario::Abuse(options) => abuse::run(&common, &options),
            Scenario::Reactions(options) => reactions::run(&common, &options),
            Scenario::Attachments(options) => attachments::run(&common, &options),
            Scenario::Consumers(options) => consumers::run(&common, &options),
            Scenario::Pairs(options) => pairs::run(&common, &options),
            Scenario::Hostile => hostile::serve().map(|()| true),
            Scenario::RawServer => raw::serve().map(|()| true),
        });
    match outcome {
        Ok(true) if server::has_panicked() => {
            eprintln!("loadtest: a gateway panicked: see its log above");
            ExitCode::FAILURE
        }
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("loadtest: {error:#}");
            ExitCode::FAILURE
        }
    }
}
