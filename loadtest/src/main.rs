//! Load tester for the chat gateway. It starts its own gateway on loopback, counts every delivery, and measures a raw
//! epoll loop in the same run for comparison. It exits with 1 if something was lost or a goal was missed.

#![expect(clippy::disallowed_methods, reason = "measurements need real time")]

mod abuse;
mod client;
mod crowd;
mod data;
mod ending;
mod latency;
mod pairs;
mod people;
mod plot;
mod replies;
mod report;
mod senders;
mod server;
mod services;
mod sockets;
mod spread;
mod store;
mod trend;
mod verify;
mod worker;

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

/// The scenarios, by folder.
#[derive(Subcommand)]
enum Scenario {
    #[command(flatten)]
    People(people::Scenario),
    #[command(flatten)]
    Crowd(crowd::Scenario),
    #[command(flatten)]
    Store(store::Scenario),
    #[command(flatten)]
    Services(services::Scenario),
    #[command(flatten)]
    Abuse(abuse::Scenario),
    /// Compare this build with a base build, in turn: which costs have grown
    Pairs(pairs::Options),
}

fn main() -> ExitCode {
    let Arguments { common, scenario } = Arguments::parse();
    let outcome = rlimit::increase_nofile_limit(u64::MAX)
        .map_err(anyhow::Error::from)
        .and_then(|_| ending::watch())
        .and_then(|()| match scenario {
            Scenario::People(scenario) => scenario.run(&common),
            Scenario::Crowd(scenario) => scenario.run(&common),
            Scenario::Store(scenario) => scenario.run(&common),
            Scenario::Services(scenario) => scenario.run(&common),
            Scenario::Abuse(scenario) => scenario.run(&common),
            Scenario::Pairs(options) => pairs::run(&common, &options),
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
