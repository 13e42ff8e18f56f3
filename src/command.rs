//! The command line. It is not in `main.rs`, which has only the allocator, so that it is compiled once with the library
//! and the tests can use it.

mod bucket_rules;
mod logs;
mod signals;

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use metrics_exporter_prometheus::PrometheusHandle;

use self::signals::Signals;
use crate::{
    auth::{KeyError, Tokens},
    cluster::{self, Finalized},
    config::{Config, Loaded, Log, LogFormat, StoreKind},
    consumers::push,
    files, gateway, import,
    model::{
        LEVEL_MAX, UserId,
        limits::{OPEN_FILES_RESERVED, TOKEN_S_MAX},
    },
    node::{Node, open_store},
    private,
    store::{
        Store,
        cassandra::{self, schema},
        embedded,
    },
    tasks::Tasks,
    telemetry,
};

/// A real-time chat gateway: every message stored, ordered, and found again.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The settings file; environment variables (CHAT__…) override it. Without it, the defaults apply
    #[arg(long, global = true)]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Run a gateway (the default)
    Serve,
    /// Print a token for a user
    Token {
        user: UserId,
        /// How long it is valid, such as 90s, 15m, 1h or 7d; at most 3650d
        #[arg(long, default_value = "1h", value_parser = duration)]
        ttl: Duration,
        /// `service`: a back end, which may act for any user within its scopes
        #[arg(long, value_parser = ["service"], requires = "scope")]
        role: Option<String>,
        /// The scopes of a service, such as "messages:read messages:write"; see docs/deployment.md
        #[arg(long, value_parser = scopes, requires = "role")]
        scope: Option<String>,
    },
    /// Check or show the settings
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Import conversations and messages from JSON lines; no gateway may be running on the store
    Import { file: PathBuf },
    /// Create or show the tables of Cassandra or ScyllaDB
    Schema {
        #[command(subcommand)]
        command: SchemaCommand,
    },
    /// Compact the embedded store, so that no byte of a deleted message is in any of its files; no gateway may be running on
    /// it
    Compact,
    /// Read everything in a directory of the embedded store, and say what is damaged; no gateway may be running on it
    Check {
        /// The directory. By default that of the settings
        directory: Option<PathBuf>,
        /// Let a gateway start with what is left, although journals are missing or were changed
        #[arg(long)]
        accept_loss: bool,
    },
    /// Show the gateways on a Cassandra or ScyllaDB store, or end their upgrade
    Cluster {
        #[command(subcommand)]
        command: ClusterCommand,
    },
    /// Check or mend the logs of one conversation
    Store {
        #[command(subcommand)]
        command: logs::Command,
    },
    /// Print rules for the bucket of uploaded files
    Attachments {
        #[command(subcommand)]
        command: bucket_rules::Command,
    },
    /// Ask a running gateway whether it is ready; for container health checks
    Health,
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Exit with 0 if all settings are right; otherwise print what is wrong
    Check,
    /// Print every setting with its origin, secrets hidden
    Show,
}

#[derive(Subcommand)]
enum SchemaCommand {
    /// Create the keyspace and its tables, or update them to this version; idempotent
    Apply,
    /// Print the tables for cqlsh
    Print,
}

#[derive(Subcommand)]
enum ClusterCommand {
    /// Print the ring: its version and level, and each gateway with its address, whether it is alive, and the highest level
    /// that it supports
    Status,
    /// End an upgrade: raise the level of the ring once all gateways support it. Builds that support less no longer start
    Finalize,
    /// Raise the version of the ring beyond the epochs that are stored; run it after a restore, after `check --accept-loss`, or
    /// before gateways start in another datacenter
    RaiseRing,
}

/// Runs the command of the command line.
#[must_use]
pub fn main() -> ExitCode {
    // The gateway starts such a process for each picture, so nothing comes before it.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|first| first == files::DECODER_ARGUMENT)
    {
        return files::decoder_main();
    }
    match run(Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("chat-gateway: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    private::restrict_new_files();
    let command = arguments.command.unwrap_or(Command::Serve);
    let loaded = match command {
        // A container's health check has the environment, but perhaps not the file with the keys.
        Command::Health | Command::Check { .. } => Config::read(arguments.config)?,
        _ => Config::load(arguments.config)?,
    };
    if let Command::Import { .. } | Command::Store { .. } | Command::Cluster { .. } = command {
        // They wait for a cluster that cannot be reached, and must say so.
        telemetry::start_logs(&Log {
            format: LogFormat::Text,
            filter: "chat_gateway=warn".into(),
        })
        .map_err(anyhow::Error::msg)?;
    }
    match command {
        Command::Serve => runtime()?.block_on(serve(&loaded)),
        Command::Token {
            user, ttl, scope, ..
        } => {
            let tokens = Tokens::existing(&loaded.config)?;
            println!("{}", tokens.sign(&user, scope.as_deref(), ttl.as_secs())?);
            Ok(ExitCode::SUCCESS)
        }
        Command::Config { command } => config(&loaded, &command),
        Command::Import { file } => {
            println!(
                "{}",
                runtime()?.block_on(import::import(&loaded.config, &file))?
            );
            Ok(ExitCode::SUCCESS)
        }
        Command::Schema {
            command: SchemaCommand::Apply,
        } => runtime()?.block_on(apply_schema(&loaded.config)),
        Command::Schema {
            command: SchemaCommand::Print,
        } => {
            print!(
                "{}",
                loaded.config.store.cassandra.settings().keyspace.print()
            );
            Ok(ExitCode::SUCCESS)
        }
        Command::Attachments { command } => bucket_rules::print(&loaded.config, &command),
        Command::Store { command } => runtime()?.block_on(logs::run(&loaded.config, &command)),
        Command::Compact => compact(&loaded.config),
        Command::Check {
            directory,
            accept_loss,
        } => {
            let path = directory.unwrap_or_else(|| loaded.config.store.embedded.path.clone());
            check(&path, accept_loss)
        }
        Command::Cluster { command } => {
            runtime()?.block_on(cluster_command(&loaded.config, command))
        }
        Command::Health => health(&loaded),
    }
}

fn config(loaded: &Loaded, command: &ConfigCommand) -> anyhow::Result<ExitCode> {
    match command {
        ConfigCommand::Check => {
            match Tokens::existing(&loaded.config) {
                // A gateway makes it when it starts.
                Ok(_) | Err(KeyError::NoDevelopmentKey(_)) => {}
                Err(error) => return Err(error.into()),
            }
            push::Keys::read(&loaded.config.push.settings())?;
            if loaded.config.store.kind == StoreKind::Cassandra {
                let tls = loaded.config.store.cassandra.settings().tls;
                tls.map_or(Ok(()), |files| files.check())
                    .context("store.cassandra")?;
            }
            if let Some(bucket) = loaded.config.bucket() {
                files::Bucket::open(bucket).context("attachments.s3")?;
            }
            println!("the settings are right");
        }
        ConfigCommand::Show => println!("{}", loaded.show()),
    }
    Ok(ExitCode::SUCCESS)
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the runtime could not start")
}

async fn serve(loaded: &Loaded) -> anyhow::Result<ExitCode> {
    let config = loaded.config.clone();
    telemetry::start_logs(&config.log).map_err(anyhow::Error::msg)?;
    let metrics = telemetry::start_metrics().map_err(anyhow::Error::msg)?;
    let mut signals = Signals::catch()?;
    let (config, files) = fitted(config)?;
    if config.auth.development {
        tracing::warn!(
            implied = loaded.development_implied,
            "development tokens are on: anyone on this machine can act as any user. Set auth.keys before production"
        );
    }
    if !loaded.ignored_variables().is_empty() {
        tracing::info!(
            variables = loaded.ignored_variables().join(", "),
            "these variables of the environment are not settings, which begin with CHAT__"
        );
    }
    // Boxed, because it is large.
    let node = match Box::pin(run_until_told(config, files, metrics, &mut signals)).await? {
        Ended::Told(node) => node,
        Ended::With(code) => return Ok(code),
    };
    tracing::info!("draining");
    let stopped = tokio::select! {
        stopped = node.stop() => stopped,
        () = signals.stop() => bail!("stopped at once by a second signal"),
    };
    if stopped {
        tracing::info!("stopped: everything is stored");
        Ok(ExitCode::SUCCESS)
    } else {
        tracing::warn!("stopped before everything was finished");
        Ok(ExitCode::FAILURE)
    }
}

/// Raises the limit of open files, and reduces `limits.connections` to it. Returns the limit too.
fn fitted(mut config: Config) -> anyhow::Result<(Config, u64)> {
    let files = rlimit::increase_nofile_limit(u64::MAX)
        .context("could not raise the limit of open files")?;
    let connections = within(files, config.limits.connections)?;
    if connections < config.limits.connections {
        tracing::info!(
            connections,
            open_files_max = files,
            reserved = OPEN_FILES_RESERVED,
            "limits.connections exceeds the limit of open files; using as many connections as that allows"
        );
        config.limits.connections = connections;
    }
    Ok((config, files))
}

/// The reason why a gateway ended.
enum Ended {
    /// A signal came. The gateway still has to stop.
    Told(Box<Node>),
    With(ExitCode),
}

/// Runs a gateway until a signal comes, and starts it anew whenever the others have removed it.
async fn run_until_told(
    mut config: Config,
    files: u64,
    metrics: PrometheusHandle,
    signals: &mut Signals,
) -> anyhow::Result<Ended> {
    loop {
        let node = tokio::select! {
            node = Node::start(&config, metrics.clone()) => node?,
            () = signals.stop() => return Ok(Ended::With(ExitCode::SUCCESS)),
        };
        tracing::info!(
            clients = %node.client_address,
            internal = %node.internal_address,
            open_files_max = files,
            "ready"
        );
        tokio::select! {
            () = signals.stop() => return Ok(Ended::Told(Box::new(node))),
            () = node.removed() => {}
        }
        if !config.cluster.enabled {
            tracing::error!("another gateway has taken over this store");
            return Ok(Ended::With(ExitCode::FAILURE));
        }
        // The gateway was paused or cut off, so nothing that it knows can be trusted.
        tracing::warn!("the other gateways removed this one; coming back as a new one");
        config.client.listen = node.client_address;
        config.internal.listen = node.internal_address;
        node.stop().await;
    }
}

/// Returns `connections`, or fewer if the limit of open files does not allow that many besides the reserved ones.
fn within(files: u64, connections: usize) -> anyhow::Result<usize> {
    let files = usize::try_from(files).unwrap_or(usize::MAX);
    let left = files.saturating_sub(OPEN_FILES_RESERVED);
    if left == 0 {
        bail!(
            "the limit of open files is {files}: {OPEN_FILES_RESERVED} are reserved, and each connection takes one more. \
             Raise it, for example with ulimit -n 65536"
        );
    }
    Ok(connections.min(left))
}

async fn apply_schema(config: &Config) -> anyhow::Result<ExitCode> {
    let settings = config.store.cassandra.settings();
    let (session, settings) = cassandra::connect(&settings).await?;
    let done = schema::apply(&session, &settings.keyspace).await?;
    let (name, version) = (&settings.keyspace.name, schema::wanted());
    let what = if done { "now has" } else { "had already" };
    println!("keyspace {name} {what} version {version} of the tables");
    Ok(ExitCode::SUCCESS)
}

fn compact(config: &Config) -> anyhow::Result<ExitCode> {
    if config.store.kind != StoreKind::Embedded {
        bail!(
            "only an embedded store is compacted by this program: Cassandra and ScyllaDB compact their tables themselves"
        );
    }
    let path = &config.store.embedded.path;
    embedded::compact(path)?;
    println!("{} is compacted", path.display());
    Ok(ExitCode::SUCCESS)
}

/// Reads a directory of the embedded store, and prints what is damaged.
fn check(path: &Path, accept_loss: bool) -> anyhow::Result<ExitCode> {
    if accept_loss {
        embedded::accept(path)?;
    }
    let checked = embedded::check(path)?;
    for damage in &checked.damages {
        println!("{damage}");
    }
    if checked.further_damages > 0 {
        println!("and {} more damages", checked.further_damages);
    }
    let (path, tables, cells) = (path.display(), checked.tables, checked.cells);
    if checked.damages.is_empty() {
        let left = if accept_loss { "what is left of " } else { "" };
        println!("{left}{path} is whole: {tables} tables and {cells} cells were read");
        return Ok(ExitCode::SUCCESS);
    }
    println!("{path} is damaged: restore a backup, or see \"Damage\" in docs/deployment.md");
    Ok(ExitCode::FAILURE)
}

/// Runs a command on the store alone, so that no gateway has to answer.
async fn cluster_command(config: &Config, command: ClusterCommand) -> anyhow::Result<ExitCode> {
    let tasks = Tasks::default();
    let store = open_store(config, &tasks).await?;
    let done = match command {
        ClusterCommand::RaiseRing => raise_ring(&*store).await,
        ClusterCommand::Status if store.is_shared() => print_status(&*store).await,
        ClusterCommand::Finalize if store.is_shared() => finalize(&*store).await,
        ClusterCommand::Status => {
            bail!("an embedded store belongs to one gateway alone: ask its /health/ready")
        }
        ClusterCommand::Finalize => bail!(
            "an embedded store belongs to one gateway alone: it raises the level by itself when it starts"
        ),
    };
    store.close().await?;
    done.map(|()| ExitCode::SUCCESS)
}

/// Prints the ring and the heartbeats.
async fn print_status(store: &dyn Store) -> anyhow::Result<()> {
    match cluster::status(store).await? {
        None => println!("no gateway has ever run on this store"),
        Some(status) => {
            println!("ring version {}", status.version);
            println!("level {} (this build supports {LEVEL_MAX})", status.level);
            for member in status.members {
                let heart = if member.beats { "alive" } else { "silent" };
                let level = match member.supports {
                    Some(level) => format!("supports level {level}"),
                    None => "has not been heard of".to_owned(),
                };
                println!("{} {} {heart} {level}", member.gateway, member.address);
            }
        }
    }
    Ok(())
}

/// Raises the version of the ring.
async fn raise_ring(store: &dyn Store) -> anyhow::Result<()> {
    let (before, after) = cluster::raise_ring(store).await?;
    println!("the ring rose from version {before} to {after}");
    Ok(())
}

/// Raises the level of the ring.
async fn finalize(store: &dyn Store) -> anyhow::Result<()> {
    match cluster::finalize(store).await? {
        Finalized::Raised { from, members } => println!(
            "the level rose from {from} to {LEVEL_MAX}: all {members} gateways of the ring support it. Builds that \
             support less no longer start on this store"
        ),
        Finalized::Already => {
            println!(
                "the ring has level {LEVEL_MAX} already, the highest of this build; nothing was changed"
            )
        }
    }
    Ok(())
}

/// Requests `/health/ready` on the internal port.
fn health(loaded: &Loaded) -> anyhow::Result<ExitCode> {
    const TIMEOUT: Duration = Duration::from_secs(3);
    let address = loaded.config.internal.listen;
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)
        .with_context(|| format!("no gateway answers on {address}"))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream
        .write_all(b"GET /health/ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or((&response, ""));
    println!("{body}");
    Ok(if head.starts_with("HTTP/1.1 200") {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Checks a list of scopes, separated by spaces. It may be empty.
fn scopes(text: &str) -> Result<String, String> {
    match text
        .split(' ')
        .find(|s| !s.is_empty() && !gateway::SCOPES.contains(s))
    {
        Some(unknown) => Err(format!(
            "{unknown:?} is not one of {}",
            gateway::SCOPES.join(", ")
        )),
        None => Ok(text.to_owned()),
    }
}

/// Reads the validity of a token: a number and one of s, m, h, d.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong =
        || "must be a number and one of s, m, h, d, from 1s to 3650d, such as 90s or 1h".to_owned();
    let unit = text.chars().last().ok_or_else(wrong)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return Err(wrong()),
    };
    let number = text.strip_suffix(unit).unwrap_or_default();
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number
        .checked_mul(seconds)
        .filter(|seconds| (1..=TOKEN_S_MAX).contains(seconds))
        .map(Duration::from_secs)
        .ok_or_else(wrong)
}
