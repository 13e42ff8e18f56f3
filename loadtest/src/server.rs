//! The server processes under test: starts and stops them, and reads their CPU and memory from /proc.

use std::{
    collections::{HashMap, HashSet},
    fs,
    io::{BufRead, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use jsonwebtoken::{EncodingKey, Header, encode};
use serde_json::json;

use crate::{
    Common,
    data::Data,
    ending,
    report::Report,
    worker::{Worker, lock},
};

/// Secret of the gateways that this program starts on loopback.
const SECRET: &str = "a secret of the load tester, on loopback only";

/// Time within which a gateway that was told to end must have ended.
const DRAINED_WITHIN: Duration = Duration::from_secs(30);

/// Whether the log of a gateway, at any time, said that something panicked.
static PANICKED: AtomicBool = AtomicBool::new(false);

pub(crate) fn has_panicked() -> bool {
    PANICKED.load(Ordering::Relaxed)
}

/// Writes a line of a log to its file. After an error it stops writing to that file.
fn keep(file: &mut Option<fs::File>, line: &str) {
    if let Some(open) = file
        && let Err(error) = writeln!(open, "{line}")
    {
        eprintln!("--logs: a gateway's log could not be written and ends here: {error}");
        *file = None;
    }
}

/// A server process. Dropping it kills the process.
pub(crate) struct Server {
    process: Arc<Mutex<Child>>,
    /// Process id.
    id: u32,
    pub(crate) address: String,
    /// Address of health checks and metrics.
    internal: String,
    _output: Option<BufReader<ChildStdout>>,
}

/// An address whose port was free a moment ago. It is below the range from which outgoing connections take theirs.
pub(crate) fn free_address() -> String {
    loop {
        let address = format!("127.0.0.1:{}", rand::random_range(12_000..32_000_u16));
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}

impl Server {
    /// Starts a gateway over `data`, with limits that a load test does not reach unless `data` says otherwise.
    pub(crate) fn gateway(common: &Common, data: &Data) -> anyhow::Result<Self> {
        Self::start(&mut command(common, data)?, common.logs.as_deref())
    }

    /// Starts this many gateways over the same data. More than one form a cluster.
    pub(crate) fn gateways(
        common: &Common,
        data: &Data,
        count: usize,
    ) -> anyhow::Result<Vec<Self>> {
        (0..count)
            .map(|_| Self::one(common, data, count > 1))
            .collect()
    }

    /// Starts one gateway, as a member of a cluster if it is one of several.
    pub(crate) fn one(common: &Common, data: &Data, of_several: bool) -> anyhow::Result<Self> {
        if !of_several {
            return Self::gateway(common, data);
        }
        if data.cluster.is_none() {
            bail!("several gateways need a shared store: pass the nodes of one with --cassandra");
        }
        let address = free_address();
        let mut command = command(common, data)?;
        command
            .env("CHAT__CLUSTER__ENABLED", "true")
            .env("CHAT__CLUSTER__SECRET", SECRET)
            .env("CHAT__CLUSTER__LISTEN", &address)
            .env("CHAT__CLUSTER__ADVERTISE", &address);
        Self::start(&mut command, common.logs.as_deref())
    }

    fn new(process: Arc<Mutex<Child>>, address: String) -> Self {
        let id = lock(&process).id();
        Self {
            process,
            id,
            address,
            internal: String::new(),
            _output: None,
        }
    }

    fn start(command: &mut Command, logs: Option<&Path>) -> anyhow::Result<Self> {
        let process = ending::spawn(command.stderr(Stdio::piped()))?;
        let mut server = Self::new(process, String::new());
        let kept = logs.map(|directory| {
            fs::create_dir_all(directory)?;
            fs::File::create(directory.join(format!("gateway-{}.log", server.id)))
        });
        let mut kept = kept.transpose()?;
        let Some(log) = lock(&server.process).stderr.take() else {
            bail!("the standard error of the gateway is not connected")
        };
        let mut lines = BufReader::new(log).lines();
        (server.address, server.internal) = loop {
            let Some(line) = lines.next() else {
                bail!(
                    "the gateway ended before it was ready: see its log above, or keep it with --logs"
                )
            };
            let line = line?;
            keep(&mut kept, &line);
            match serde_json::from_str::<serde_json::Value>(&line) {
                Ok(entry) if entry["message"] == "ready" => {
                    let of = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
                    break (of("clients"), of("internal"));
                }
                Ok(entry) if entry["level"] == "INFO" => {}
                // Why it is not ready yet, perhaps for ever.
                _ => eprintln!("{line}"),
            }
        };
        std::thread::spawn(move || {
            let mut drains = false;
            for line in lines.map_while(Result::ok) {
                keep(&mut kept, &line);
                let panicked = line.contains("panicked");
                if panicked {
                    PANICKED.store(true, Ordering::Relaxed);
                }
                drains |= line.contains("\"draining\"");
                let tell = ["\"ERROR\"", "removed from the ring"];
                // Each warning of a drain may be why it was not clean.
                let why = drains && line.contains("\"WARN\"");
                if panicked || why || tell.iter().any(|what| line.contains(what)) {
                    eprintln!("{line}");
                }
            }
        });
        Ok(server)
    }

    /// Runs `chat-gateway import` on the same data.
    pub(crate) fn import(common: &Common, data: &Data, file: &Path) -> anyhow::Result<()> {
        let status = command(common, data)?.arg("import").arg(file).status()?;
        if !status.success() {
            bail!("`chat-gateway import` failed; its errors are above");
        }
        Ok(())
    }

    /// Creates the gateway's tables with `chat-gateway schema apply`.
    pub(crate) fn make_tables(common: &Common, data: &Data) -> anyhow::Result<()> {
        Self::do_once(common, data, &["schema", "apply"])
    }

    /// Compacts the embedded store with `chat-gateway compact`.
    pub(crate) fn compact(common: &Common, data: &Data) -> anyhow::Result<()> {
        Self::do_once(common, data, &["compact"])
    }

    fn do_once(common: &Common, data: &Data, arguments: &[&str]) -> anyhow::Result<()> {
        let status = command(common, data)?
            .args(arguments)
            .stdout(Stdio::null())
            .status()?;
        if !status.success() {
            bail!(
                "`chat-gateway {}` failed; its errors are above",
                arguments.join(" ")
            );
        }
        Ok(())
    }

    /// Ends an upgrade with `chat-gateway cluster finalize`. Returns what the command says.
    pub(crate) fn finalize(common: &Common, data: &Data) -> anyhow::Result<String> {
        let output = command(common, data)?
            .args(["cluster", "finalize"])
            .stderr(Stdio::inherit())
            .output()?;
        if !output.status.success() {
            bail!("`chat-gateway cluster finalize` failed; its errors are above");
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// All metrics of the gateway, by name with labels.
    pub(crate) fn metrics(&self) -> anyhow::Result<HashMap<String, f64>> {
        let mut stream = TcpStream::connect(&self.internal)?;
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let lines = text.lines().filter(|line| line.starts_with("chat_"));
        let pairs = lines.filter_map(|line| line.rsplit_once(' '));
        Ok(pairs
            .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
            .collect())
    }

    /// Starts the raw epoll loop in a process of its own.
    pub(crate) fn raw() -> anyhow::Result<Self> {
        Self::other(Command::new(std::env::current_exe()?).arg("raw-server"))
    }

    /// Starts another server. The first line of its output is its address.
    pub(crate) fn other(command: &mut Command) -> anyhow::Result<Self> {
        let process = ending::spawn(command.stdout(Stdio::piped()))?;
        let mut server = Self::new(process, String::new());
        let Some(output) = lock(&server.process).stdout.take() else {
            bail!("the standard output of the server is not connected")
        };
        let mut output = BufReader::new(output);
        output.read_line(&mut server.address)?;
        server.address.truncate(server.address.trim_end().len());
        server._output = Some(output);
        Ok(server)
    }

    /// Starts another server and waits until it listens on this address, at most 20 s.
    pub(crate) fn listening(command: &mut Command, address: String) -> anyhow::Result<Self> {
        let server = Self::new(ending::spawn(command)?, address);
        let until = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(&server.address).is_err() {
            if Instant::now() > until {
                bail!(
                    "the server does not listen on {} after 20 s",
                    server.address
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    /// Kills the process with SIGKILL.
    pub(crate) fn kill(&self) -> anyhow::Result<()> {
        let mut process = lock(&self.process);
        process.kill()?;
        process.wait()?;
        Ok(())
    }

    /// Ends the process with SIGTERM and waits until it has drained, at most `DRAINED_WITHIN`.
    pub(crate) fn drain(&self) -> anyhow::Result<()> {
        let told = Command::new("kill").arg(self.id.to_string()).status()?;
        anyhow::ensure!(told.success(), "the gateway could not be sent SIGTERM");
        let until = Instant::now() + DRAINED_WITHIN;
        loop {
            if let Some(status) = lock(&self.process).try_wait()? {
                anyhow::ensure!(status.success(), "the drained gateway ended with {status}");
                return Ok(());
            }
            anyhow::ensure!(
                Instant::now() < until,
                "the gateway did not drain within 30 s"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// CPU time of all threads, user and system.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        cpu(self.id)
    }

    /// Resident memory in KiB.
    pub(crate) fn resident_kib(&self) -> anyhow::Result<f64> {
        resident_kib(self.id)
    }

    /// Process id.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Samples CPU and memory from now on.
    fn watch(&self) -> Worker<Usage> {
        const EACH: Duration = Duration::from_millis(250);
        let process = self.id;
        Worker::start(move |over| {
            let mut usage = Usage::default();
            let began = Instant::now();
            let mut before = (began, cpu(process).unwrap_or_default());
            while !over.is_over() {
                std::thread::sleep(EACH);
                let now = Instant::now();
                let (Ok(cpu), Ok(kib)) = (cpu(process), resident_kib(process)) else {
                    break;
                };
                let at = (now - began).as_secs_f64();
                // The total can fall: a thread that has ended no longer counts.
                let cores =
                    cpu.saturating_sub(before.1).as_secs_f64() / (now - before.0).as_secs_f64();
                usage.cores.push((at, cores));
                usage.memory_mib.push((at, kib / 1024.0));
                before = (now, cpu);
            }
            Ok(usage)
        })
    }
}

/// CPU time of all servers together.
pub(crate) fn total_cpu(servers: &[Server]) -> anyhow::Result<Duration> {
    servers.iter().map(Server::cpu).sum()
}

/// Resident memory of all servers together, in KiB.
pub(crate) fn total_kib(servers: &[Server]) -> anyhow::Result<f64> {
    servers.iter().map(Server::resident_kib).sum()
}

/// Open files and sockets of all servers together.
pub(crate) fn total_descriptors(servers: &[Server]) -> anyhow::Result<usize> {
    servers.iter().map(|server| descriptors(server.id)).sum()
}

/// CPU and memory of a process, each with the time in seconds.
#[derive(Default)]
struct Usage {
    cores: Vec<(f64, f64)>,
    memory_mib: Vec<(f64, f64)>,
}

impl Usage {
    fn draw(self, report: &mut Report, name: &str) {
        report.over_time("CPU of the server", "cores", name, self.cores);
        report.over_time("memory of the server", "MiB", name, self.memory_mib);
    }
}

/// Samples of several servers.
pub(crate) struct Watches(Vec<Worker<Usage>>);

impl Watches {
    /// Samples from now on.
    pub(crate) fn of(servers: &[Server]) -> Self {
        Self(servers.iter().map(Server::watch).collect())
    }

    /// Ends the sampling, and draws it. The lines have a number if there are several servers.
    pub(crate) fn draw(self, report: &mut Report, name: &str) {
        let several = self.0.len() > 1;
        for (number, watch) in (1..).zip(self.0) {
            let usage = watch.stop().unwrap_or_default();
            match several {
                true => usage.draw(report, &format!("{name} {number}")),
                false => usage.draw(report, name),
            }
        }
    }
}

/// CPU time of all threads of a process, user and system.
pub(crate) fn cpu(process: u32) -> anyhow::Result<Duration> {
    // schedstat counts nanoseconds for each thread; /proc/…/stat counts only hundredths of a second.
    let mut total = Duration::ZERO;
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
        let nanos = text
            .split(' ')
            .next()
            .and_then(|n| n.parse().ok())
            .unwrap_or(0);
        total += Duration::from_nanos(nanos);
    }
    Ok(total)
}

/// Open files and sockets of a process.
pub(crate) fn descriptors(process: u32) -> anyhow::Result<usize> {
    Ok(fs::read_dir(format!("/proc/{process}/fd"))?.count())
}

/// Resident memory of a process in KiB.
pub(crate) fn resident_kib(process: u32) -> anyhow::Result<f64> {
    status_kib(process, "VmRSS:")
}

/// The most resident memory that a process had, in KiB.
pub(crate) fn peak_resident_kib(process: u32) -> anyhow::Result<f64> {
    status_kib(process, "VmHWM:")
}

fn status_kib(process: u32, name: &str) -> anyhow::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let value = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = value.and_then(|value| value.split_whitespace().next());
    Ok(kib
        .with_context(|| format!("/proc/…/status has no {name}"))?
        .parse()?)
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// The command of a gateway that is configured for `data`.
fn command(common: &Common, data: &Data) -> anyhow::Result<Command> {
    let program = this_build(common)?;
    let mut text = format!(
        r#"
client.listen = "127.0.0.1:0"
internal.listen = "127.0.0.1:0"
{}auth.keys = [{{ algorithm = "HS256", secret = "{SECRET}" }}]
log = {{ format = "json", filter = "info" }}
"#,
        data.settings()
    );
    if !data.default_limits {
        let known = known_settings(&program)?;
        for (setting, value) in LARGE.iter().filter(|(setting, _)| known.contains(*setting)) {
            text += &format!("{setting} = {value}\n");
        }
    }
    if data.default_limits {
        text += &format!("memory.mib = {MEMORY_MIB}\n");
    }
    text += &data.more_settings;
    let config = data.write("loadtest.toml", &text)?;
    let mut command = Command::new(&program);
    command.arg("--config").arg(&config);
    Ok(command)
}

/// `memory.mib` of gateways with default limits. The default of a large machine is more than a short run can fill, so
/// the bound would not be tested.
const MEMORY_MIB: u32 = 512;
/// Limits that a load test does not reach. Older builds do not know some of them, and would refuse to start with them.
const LARGE: [(&str, u64); 14] = [
    ("limits.group_participants", 10_000),
    ("limits.requests_per_second", 1_000_000),
    ("limits.requests_burst", 1_000_000),
    ("limits.request_bytes_per_second", 4_000_000_000),
    ("limits.request_bytes_burst", 4_000_000_000),
    ("limits.connects_per_second_per_address", 1_000_000),
    ("limits.connects_burst_per_address", 1_000_000),
    ("limits.creations_per_minute", 1_000_000),
    ("limits.creations_burst", 1_000_000),
    ("limits.invitations_per_minute", 1_000_000),
    ("limits.invitations_burst", 1_000_000),
    ("limits.connections_per_address", 1_000_000),
    ("limits.unauthenticated_connections", 1_000_000),
    ("limits.service_requests_burst", 1_000_000),
];

/// The names of all settings of a build.
fn known_settings(program: &Path) -> anyhow::Result<HashSet<String>> {
    let output = Command::new(program)
        .args(["config", "show"])
        .current_dir("/")
        .output()
        .with_context(|| format!("{}", program.display()))?;
    let lines = String::from_utf8(output.stdout)?;
    let names = lines.lines().filter_map(|line| line.split_once(" = "));
    let known: HashSet<_> = names.map(|(name, _)| name.to_owned()).collect();
    if known.is_empty() {
        bail!(
            "`{} config show` prints no settings: is it a gateway?",
            program.display()
        );
    }
    Ok(known)
}

/// The path of a program in the folder of this program.
fn beside(name: &str) -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name(name);
    if !path.exists() {
        bail!(
            "{} does not exist: build it with cargo build --release",
            path.display()
        );
    }
    Ok(path)
}

/// The path of the gateway to test: `--gateway`, or the one in the folder of this program.
pub(crate) fn this_build(common: &Common) -> anyhow::Result<PathBuf> {
    match &common.gateway {
        Some(program) => Ok(program.clone()),
        None => beside("chat-gateway"),
    }
}

/// The absolute path of another build, which this option names. Programs are also run in other directories.
pub(crate) fn other_build(option: &str, program: &Path) -> anyhow::Result<PathBuf> {
    let found = program.canonicalize();
    found.with_context(|| format!("{option} {}", program.display()))
}

/// A token for a user that the gateways of this program accept for an hour.
pub(crate) fn token(user: &str) -> anyhow::Result<String> {
    signed(json!({"sub": user}))
}

/// A token for a back end that acts for users, with these scopes.
pub(crate) fn service_token(scope: &str) -> anyhow::Result<String> {
    signed(json!({"sub": "loadtest", "role": "service", "scope": scope}))
}

fn signed(mut claims: serde_json::Value) -> anyhow::Result<String> {
    let in_an_hour = std::time::UNIX_EPOCH.elapsed()?.as_secs() + 3600;
    claims["exp"] = in_an_hour.into();
    Ok(encode(
        &Header::default(),
        &claims,
        &EncodingKey::from_secret(SECRET.as_bytes()),
    )?)
}
