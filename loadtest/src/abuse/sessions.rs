//! The process of the hostile sessions, and what it is told.

use std::{
    io::{BufRead, BufReader, Write as _},
    net::{IpAddr, Ipv4Addr},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex},
};

use anyhow::Context;
use serde_json::json;

use super::Options;
use crate::{
    abuse::{
        attacks::{BOMBS_AT_ONCE, DOWNLOAD_BYTES, Hostile, KINDS, LINKED, UPLOAD_BYTES, linked},
        bombs,
        hostile::{Done, Orders},
    },
    client::Client,
    ending,
    report::Report,
    server::{Server, token},
    services::attachments::http::Http,
    worker::lock,
};

/// Longest time between two acts of a hostile session. Above it, the run proves nothing.
const IDLE_MS_MAX: u64 = 1_000;
/// Time after which a kind of misuse must have had at least one act.
const LONG_MS: u64 = 10_000;

/// The process of the hostile sessions, separate so that its CPU can be measured. It has the same niceness as the
/// gateway: a nicer process was delayed for seconds by a gateway that it kept busy, and attackers on other machines are
/// not.
pub(super) struct Hostiles {
    _process: Arc<Mutex<Child>>,
    pub(super) id: u32,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Hostiles {
    pub(super) fn start(orders: Orders) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("hostile");
        let process = ending::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let mut child = lock(&process);
        let (id, input, output) = (child.id(), child.stdin.take(), child.stdout.take());
        drop(child);
        let mut hostiles = Self {
            _process: process,
            id,
            input: input.context("the process of the hostile sessions has no input")?,
            output: BufReader::new(
                output.context("the process of the hostile sessions has no output")?,
            ),
        };
        hostiles.say(&serde_json::to_string(&orders)?)?;
        Ok(hostiles)
    }

    pub(super) fn say(&mut self, line: &str) -> anyhow::Result<()> {
        Ok(writeln!(self.input, "{line}")?)
    }

    /// Sends a line and returns what the sessions did since the process began.
    pub(super) fn ask(&mut self, line: &str) -> anyhow::Result<Done> {
        self.say(line)?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        serde_json::from_str(&line).context("the process of the hostile sessions failed")
    }
}

impl Done {
    pub(super) fn tell(&self, report: &mut Report, options: &Options) {
        println!("  acts of the hostile sessions:");
        let only = options.only.as_deref();
        for (name, tally) in &self.kinds {
            if tally.milliseconds == 0 {
                let asked_for = only.is_none_or(|only| only == name);
                report.must(!asked_for, format!("misuse never ran: {name}"));
                continue;
            }
            let seconds = tally.milliseconds as f64 / 1000.0;
            let outcomes: Vec<_> = tally
                .outcomes
                .iter()
                .map(|(what, count)| format!("{what} {count}"))
                .collect();
            println!(
                "    {name:<32} {seconds:>6.1} s {:>9} acts {:>9.1} MB {:>7} connections, {} refused, {} held; {}",
                tally.acts,
                tally.bytes as f64 / 1e6,
                tally.connections,
                tally.refused,
                tally.held,
                outcomes.join(", ")
            );
            // A session whose `connect` waits counts as active. In a long run some of them must connect.
            let carried_out = tally.acts + tally.held;
            let enough = carried_out >= (tally.milliseconds / 1000).max(1);
            report.must(
                enough && (tally.acts > 0 || tally.milliseconds < LONG_MS),
                format!("misuse was hardly carried out: {name}, {carried_out} acts"),
            );
        }
        println!(
            "    longest time between two turns of a session: {} ms",
            self.turn_ms_max
        );
        for (number, session) in (1..).zip(&self.sessions) {
            println!(
                "    session {number:<3} {:>9} acts {:>9.1} MB, fewest per second {}, longest time between two {} ms",
                session.acts,
                session.bytes as f64 / 1e6,
                session.least_per_second,
                session.idle_ms
            );
            report.must(
                session.idle_ms <= IDLE_MS_MAX,
                format!(
                    "hostile session {number} was idle for {} ms",
                    session.idle_ms
                ),
            );
        }
    }
}

/// The address of client `number` in a /16 network of loopback.
pub(super) fn address(network: u8, number: usize) -> IpAddr {
    const HOSTS: usize = 250;
    let byte = |n: usize| (n % HOSTS + 1) as u8;
    IpAddr::V4(Ipv4Addr::new(
        127,
        network,
        byte(number / HOSTS),
        byte(number),
    ))
}

/// Creates what the hostile sessions need: their own groups with large messages, a busy channel, private channels of
/// others.
pub(super) fn orders(servers: &[Server], options: &Options) -> anyhow::Result<Orders> {
    const PRIVATE: usize = 4;
    const NETWORK: u8 = 66;
    let hostile = |number: usize, user: String| {
        let source = address(NETWORK, number % usize::from(options.addresses));
        let server = &servers[number % servers.len()].address;
        let mut client = Client::connect_as(server, &user, source)?;
        let group =
            client.create_patiently(json!({"type": "create", "kind": "group", "name": "own"}))?;
        let who = Hostile {
            server: server.parse()?,
            source,
            token: token(&user)?,
            user,
            group,
            busy: String::new(),
            private: Vec::new(),
            upload: None,
            download: None,
            bombs: Vec::new(),
            bombs_left: BOMBS_AT_ONCE,
        };
        anyhow::Ok((who, client))
    };
    // The writer has an address that no hostile session uses.
    let (mut writer, mut client) = hostile(usize::from(options.addresses), "writer".to_owned())?;
    writer.source = address(NETWORK, usize::from(options.addresses));
    let busy = json!({"type": "create", "kind": "channel", "name": "busy", "public": true});
    writer.busy = client.create_patiently(busy)?;
    for _ in 0..PRIVATE {
        let channel = json!({"type": "create", "kind": "channel", "name": "private"});
        writer.private.push(client.create_patiently(channel)?);
    }
    let mut hostiles = Vec::new();
    for number in 0..options.hostile {
        let (mut who, mut client) = hostile(number, format!("hostile-{number}"))?;
        for number in 0..LINKED {
            client.ask_patiently(&linked(&who.group, number))?;
        }
        (who.busy, who.private) = (writer.busy.clone(), writer.private.clone());
        // Several gateways have no uploads without a bucket.
        if servers.len() == 1 {
            add_files(&mut who, &mut client, options.rounds)?;
        }
        hostiles.push(who);
    }
    Ok(Orders {
        hostiles,
        writer,
        turn_ms: options.turn,
        only: options.only.as_deref().map(numbered).transpose()?,
    })
}

/// Begins the uploads of a hostile session, and uploads the file that it downloads.
fn add_files(who: &mut Hostile, client: &mut Client, rounds: usize) -> anyhow::Result<()> {
    /// A user may begin 60 uploads in a minute.
    const BOMBS_MAX: usize = 48;
    let mut http = Http::connect(&who.server.to_string(), &who.token)?;
    who.upload = Some(http.begin(&who.group, UPLOAD_BYTES)?);
    let pictures = bombs::pictures();
    for number in 0..(rounds * BOMBS_AT_ONCE).min(BOMBS_MAX) {
        let picture = number % pictures.len();
        let file = http.begin(&who.group, pictures[picture].len())?;
        who.bombs.push((picture, file));
    }
    let file = http.upload(&who.group, &vec![b'x'; DOWNLOAD_BYTES])?;
    let found = client.ask_patiently(&json!({"type": "attachment_urls", "ids": [file]}))?;
    who.download = found["items"][0]["url"].as_str().map(str::to_owned);
    Ok(())
}

/// The number of a kind of misuse.
fn numbered(name: &str) -> anyhow::Result<usize> {
    let number = KINDS.iter().position(|(kind, _)| *kind == name);
    number.with_context(|| {
        let names: Vec<_> = KINDS.iter().map(|(kind, _)| *kind).collect();
        format!(
            "--only {name:?} is no kind of misuse. Kinds: {}",
            names.join("; ")
        )
    })
}
