//! Load tester for the chat gateway. Starts its own gateway on loopback, counts every delivery, and measures
//! beside a raw epoll loop in the same run. Exits with 1 when something was lost or a goal was missed.

#![expect(clippy::disallowed_methods, reason = "real time is what is measured")]

mod abuse;
mod attacks;
mod bare;
mod celebrity;
mod chaos;
mod client;
mod crowd;
mod data;
mod ending;
mod fanout;
mod hostile;
mod idle;
mod inbox;
mod kill;
mod load;
mod pairs;
mod peers;
mod people;
mod plot;
mod raw;
mod replies;
mod report;
mod server;
mod slow;
mod source;
mod spread;
mod store;
mod storm;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand};

use report::Outputs;

/// The gateway's: the bare store is measured beside it in this process.
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
    /// The gateway's program; without it, the one beside this program
    #[arg(long, global = true)]
    gateway: Option<PathBuf>,
    /// Nodes of a Cassandra or ScyllaDB cluster to use instead of the embedded store: 127.0.0.1:9042,…
    #[arg(long, global = true, value_delimiter = ',')]
    cassandra: Vec<String>,
    /// A directory to keep the log of each gateway in
    #[arg(long, global = true)]
    logs: Option<PathBuf>,
    /// Measure the gateway alone, nothing beside it: no raw loop, no bare store, no other servers
    #[arg(long, global = true)]
    alone: bool,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Subcommand)]
enum Scenario {
    /// One channel, many subscribers: paced, and as fast as it goes
    Fanout(fanout::Options),
    /// Many connections that do nothing: memory and CPU of each
    Idle(idle::Options),
    /// Writes under load, kill -9, and whether everything acknowledged is there
    Kill(kill::Options),
    /// A channel with 100,000 participants: what a message costs the store
    Celebrity(celebrity::Options),
    /// A million messages, stored, beside the bare store; and pages at the beginning, in the middle and at the end
    Load(load::Options),
    /// Pairs of people at a human pace
    Dm(people::Options),
    /// Groups at a human pace
    Groups(people::Options),
    /// Direct chats, groups and a channel for all, at a human pace
    Mixed(people::Options),
    /// Groups at a human pace while gateways are killed
    Chaos(chaos::Options),
    /// What reading an inbox costs, and whether it counts right
    Inbox(inbox::Options),
    /// What a stored message costs, beside the bare store; and how that grows
    Store(store::Options),
    /// Some subscribers stop reading: what that costs the server, and the others
    SlowReaders(slow::Options),
    /// All clients drop and come back with their cursors while messages flow
    ReconnectStorm(storm::Options),
    /// The same fan-out and idle connections beside NATS, Socket.IO and the raw loop; installs them
    Peers(peers::Options),
    /// Ordinary people beside hostile sessions: what these cost the others, and what they make the gateway hold
    Abuse(abuse::Options),
    /// A scenario against this build and a base build in turn: what has become dearer
    Pairs(pairs::Options),
    /// The hostile sessions, in a process of their own
    #[command(hide = true)]
    Hostile,
    /// The epoll loop that others are measured beside
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
            Scenario::Inbox(options) => inbox::run(&common, &options),
            Scenario::Store(options) => store::run(&common, &options),
            Scenario::SlowReaders(options) => slow::run(&common, &options),
            Scenario::ReconnectStorm(options) => storm::run(&common, &options),
            Scenario::Peers(options) => peers::run(&common, &options),
            Scenario::Abuse(options) => abuse::run(&common, &options),
            Scenario::Pairs(options) => pairs::run(&common, &options),
            Scenario::Hostile => hostile::serve().map(|()| true),
            Scenario::RawServer => raw::serve().map(|()| true),
        });
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("loadtest: {error:#}");
            ExitCode::FAILURE
        }
    }
}
