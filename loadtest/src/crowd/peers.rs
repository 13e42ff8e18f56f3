//! Measures the same fan-out and the same idle connections on the gateway, the raw loop, NATS over WebSocket and
//! Socket.IO, in one run. The other servers are installed with their own installers, and started and stopped here. None
//! of them stores messages; the gateway stores every message.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::Value;

use crate::{
    Common,
    client::{Client, binary_frame, text_frame},
    crowd::{
        Crowd,
        channel::{Channel, Publisher},
        fanout::{self, Parts, Subject, event_with},
        idle,
    },
    data::Data,
    report::Report,
    server::{Server, free_address},
};

/// The Go package of NATS.
const NATS: &str = "github.com/nats-io/nats-server/v2@v2.15.2";

#[derive(Args, Clone)]
pub(crate) struct Options {
    #[command(flatten)]
    fanout: fanout::Options,
    /// Idle connections to each server
    #[arg(long, default_value_t = 8000)]
    connections: usize,
    /// Folder to install the other servers in, which is reused; by default in the user's cache
    #[arg(long)]
    installed: Option<PathBuf>,
    /// Program of an installed NATS server; by default one is installed with Go
    #[arg(long)]
    nats_server: Option<PathBuf>,
}

/// A number of messages in flight, with the goals for it beside NATS.
struct Goal {
    window: u64,
    cpu_ratio_max: f64,
    deliveries_ratio_min: f64,
}

const WINDOWS: [Goal; 2] = [
    Goal {
        window: 32,
        cpu_ratio_max: 0.6,
        deliveries_ratio_min: 1.5,
    },
    Goal {
        window: 128,
        cpu_ratio_max: 0.4,
        deliveries_ratio_min: 2.0,
    },
];

/// The results of one server.
struct Row {
    name: &'static str,
    fanout: Parts,
    idle_kib: f64,
    connect_ms: f64,
}

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let windows: Vec<u64> = WINDOWS.iter().map(|goal| goal.window).collect();
    let options = &Options {
        fanout: options.fanout.with_windows(&windows),
        ..options.clone()
    };
    let mut report = Report::new("peers", &common.outputs);
    if common.alone {
        fanout::alone(common, &options.fanout, &mut report)?;
        idle::alone(common, options.connections, &mut report)?;
        return report.finish();
    }
    let others = Others::install(options)?;
    let data = Data::new(common)?;
    let rows = measure(common, options, &others, &data, &mut report)?;
    print(&rows, &options.fanout);
    judge(&rows, &options.fanout, &mut report);
    report.finish()
}

/// The servers that the gateway is compared with, installed.
struct Others {
    nats: PathBuf,
    /// Folder of the server.
    socket_io: PathBuf,
}

impl Others {
    fn install(options: &Options) -> anyhow::Result<Self> {
        let folder = match &options.installed {
            Some(folder) => folder.clone(),
            None => cache()?,
        };
        let nats = match &options.nats_server {
            Some(program) => program.clone(),
            None => install_nats(&folder)?,
        };
        let socket_io = install_socket_io(&folder)?;
        Ok(Self { nats, socket_io })
    }

    fn start_socket_io(&self) -> anyhow::Result<Server> {
        Server::other(
            Command::new("node")
                .arg("server.cjs")
                .current_dir(&self.socket_io),
        )
    }
}

/// The results of all servers.
struct Rows {
    raw: Row,
    gateway: Row,
    nats: Row,
    socket_io: Row,
}

/// Measures the fan-out of all servers in turn, then the idle connections of each alone.
fn measure(
    common: &Common,
    options: &Options,
    others: &Others,
    data: &Data,
    report: &mut Report,
) -> anyhow::Result<Rows> {
    let servers = vec![Server::gateway(common, data)?];
    let mut gateway = Subject::gateways("gateway", servers, &options.fanout)?;
    let sample = gateway.sample()?;
    let event: Value = serde_json::from_str(&sample)?;
    let mut raw = Subject::raw(&sample, &options.fanout)?;
    let nats = || start_nats(&others.nats, data);
    let sent = event.clone();
    let publish_nats = move |body: &str| {
        let text = event_with(&sent, body);
        binary_frame(format!("PUB load {}\r\n{text}\r\n", text.len()).as_bytes())
    };
    let mut nats_fanout = peer("NATS", nats()?, &open_nats, publish_nats, options)?;
    let publish_socket_io =
        move |body: &str| text_frame(&format!("42[\"publish\",{}]", event_with(&event, body)));
    let mut socket_io_fanout = peer(
        "Socket.IO",
        others.start_socket_io()?,
        &open_socket_io,
        publish_socket_io,
        options,
    )?;
    let mut all = [
        &mut raw,
        &mut gateway,
        &mut nats_fanout,
        &mut socket_io_fanout,
    ];
    fanout::compare(&mut all, &options.fanout, report)?;

    let connections = options.connections;
    Ok(Rows {
        raw: Row::of("raw epoll loop", raw, report, || idle::raw(connections))?,
        gateway: Row::of("gateway (stores)", gateway, report, || {
            idle::gateway(common, connections)
        })?,
        nats: Row::of("NATS over WebSocket", nats_fanout, report, || {
            let server = nats()?;
            idle::measure(&server, connections, |n| open_nats(&server.address, n))
        })?,
        socket_io: Row::of("Socket.IO", socket_io_fanout, report, || {
            let server = others.start_socket_io()?;
            idle::measure(&server, connections, |n| open_socket_io(&server.address, n))
        })?,
    })
}

impl Row {
    /// Ends the fan-out of a server, then measures its idle connections.
    fn of(
        name: &'static str,
        subject: Subject<'_>,
        report: &mut Report,
        idle: impl Fn() -> anyhow::Result<(f64, f64)>,
    ) -> anyhow::Result<Self> {
        let fanout = subject.finish(report)?;
        let (idle_kib, connect_ms) = idle()?;
        Ok(Self {
            name,
            fanout,
            idle_kib,
            connect_ms,
        })
    }
}

/// Prints the results as a table.
fn print(rows: &Rows, options: &fanout::Options) {
    let Rows {
        raw,
        gateway,
        nats,
        socket_io,
    } = rows;
    println!();
    print!("| server | paced: µs CPU per delivery | ÷ raw | p50, p99 in ms |");
    for part in options.part_names() {
        print!(" {part}: µs CPU | M deliveries/s |");
    }
    println!(" KiB per idle connection | ms CPU per connect |");
    println!(
        "|---|---|---|---|{}---|---|",
        "---|---|".repeat(options.part_names().count())
    );
    for row in [raw, gateway, nats, socket_io] {
        let Parts {
            paced,
            p50_ms,
            p99_ms,
            saturated,
        } = &row.fanout;
        let ratio = paced.cpu_us / raw.fanout.paced.cpu_us;
        print!(
            "| {} | {:.1} | {ratio:.2} | {p50_ms:.1}, {p99_ms:.1} |",
            row.name, paced.cpu_us
        );
        for part in saturated {
            print!(" {:.2} | {:.2} |", part.cpu_us, part.per_second / 1e6);
        }
        println!(" {:.1} | {:.3} |", row.idle_kib, row.connect_ms);
    }
    println!();
}

/// Compares the results with the goals.
fn judge(rows: &Rows, options: &fanout::Options, report: &mut Report) {
    let Rows {
        raw, gateway, nats, ..
    } = rows;
    fanout::paced_beside_raw(&gateway.fanout, &raw.fanout, report);
    let parts = options.saturated(&gateway.fanout, &nats.fanout);
    for (window, (name, mine, other)) in options.windows().zip(parts) {
        let cpu = mine.cpu_us / other.cpu_us;
        let deliveries = mine.per_second / other.per_second;
        let cpu_name = format!("{name}: CPU, gateway / NATS");
        let deliveries_name = format!("{name}: deliveries, gateway / NATS");
        match WINDOWS.iter().find(|goal| goal.window == window) {
            Some(goal) => {
                report.speed_at_most(&cpu_name, cpu, goal.cpu_ratio_max, "");
                report.speed_at_least(&deliveries_name, deliveries, goal.deliveries_ratio_min, "");
            }
            None => {
                println!("  there is no goal for {name}");
                report.figure(&cpu_name, cpu, "");
                report.figure(&deliveries_name, deliveries, "");
            }
        }
    }
    report.at_most(
        "memory per idle connection",
        gateway.idle_kib,
        idle::KIB_MAX,
        "KiB",
    );
    report.speed_at_most(
        "CPU per connect",
        gateway.connect_ms,
        idle::CONNECT_MS_MAX,
        "ms",
    );
}

/// Connects the subscribers of another server.
fn peer(
    name: &'static str,
    server: Server,
    open: &dyn Fn(&str, usize) -> anyhow::Result<Client>,
    compose: impl Fn(&str) -> Vec<u8> + 'static,
    options: &Options,
) -> anyhow::Result<Subject<'static>> {
    let mut crowd = Crowd::new(1)?;
    crowd.connect(options.fanout.subscribers, |number| {
        open(&server.address, number)
    })?;
    let publisher = Publisher::new(open(&server.address, 0)?, false)?;
    let channel = Channel::new(vec![server], crowd, publisher, compose, options.fanout.size);
    Subject::new(name, channel, &options.fanout)
}

/// The default folder of the other servers.
fn cache() -> anyhow::Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => PathBuf::from(
            std::env::var_os("HOME")
                .context("neither --installed, XDG_CACHE_HOME nor HOME is set")?,
        )
        .join(".cache"),
    };
    Ok(base.join("chat-gateway-loadtest"))
}

/// Runs an installer.
fn installed(command: &mut Command, what: &str) -> anyhow::Result<()> {
    println!("installing {what}");
    let output = command.output().with_context(|| {
        format!(
            "{:?} could not be run, which installs {what}",
            command.get_program()
        )
    })?;
    if !output.status.success() {
        bail!(
            "{what} could not be installed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

/// Installs NATS unless it is installed. Returns its program.
fn install_nats(folder: &Path) -> anyhow::Result<PathBuf> {
    let version = NATS.rsplit('@').next().unwrap_or_default();
    let bin = folder.join(format!("nats-{version}"));
    let program = bin.join("nats-server");
    if !program.exists() {
        let mut go = Command::new("go");
        installed(go.args(["install", NATS]).env("GOBIN", &bin), NATS)?;
    }
    Ok(program)
}

fn start_nats(program: &Path, data: &Data) -> anyhow::Result<Server> {
    let (clients, websocket) = (free_address(), free_address());
    let config = data.write(
        "nats.conf",
        &format!(
            "listen: \"{clients}\"\nmax_connections: 200000\nlogtime: false\n\
             websocket {{ listen: \"{websocket}\", no_tls: true, compression: false }}\n"
        ),
    )?;
    let mut command = Command::new(program);
    command.arg("--config").arg(&config);
    command.arg("--log").arg(data.file("nats.log"));
    Server::listening(&mut command, websocket)
}

/// Opens a connection that is subscribed to the subject.
fn open_nats(address: &str, number: usize) -> anyhow::Result<Client> {
    let mut client = Client::open(address, "/", number)?;
    let hello =
        b"CONNECT {\"verbose\":false,\"echo\":false,\"protocol\":1}\r\nSUB load 1\r\nPING\r\n";
    client.say(&binary_frame(hello))?;
    while !client.hear()?.windows(4).any(|w| w == b"PONG") {}
    Ok(client)
}

/// The files of the Socket.IO server: its code and its packages.
const SOCKET_IO: [(&str, &str); 3] = [
    ("server.cjs", include_str!("../../socket.io/server.cjs")),
    ("package.json", include_str!("../../socket.io/package.json")),
    (
        "package-lock.json",
        include_str!("../../socket.io/package-lock.json"),
    ),
];

/// Installs Socket.IO. Returns the folder of its server.
fn install_socket_io(folder: &Path) -> anyhow::Result<PathBuf> {
    let folder = folder.join("socket.io");
    fs::create_dir_all(&folder)?;
    for (name, text) in SOCKET_IO {
        fs::write(folder.join(name), text)?;
    }
    let mut npm = Command::new("npm");
    npm.args(["ci", "--silent", "--no-audit", "--no-fund", "--prefix"]);
    installed(npm.arg(&folder), "Socket.IO")?;
    Ok(folder)
}

/// Opens a connection, which the server puts into its room.
fn open_socket_io(address: &str, number: usize) -> anyhow::Result<Client> {
    let mut client = Client::open(address, "/socket.io/?EIO=4&transport=websocket", number)?;
    client.say(&text_frame("40"))?;
    while !client.hear()?.starts_with(b"40") {}
    Ok(client)
}
