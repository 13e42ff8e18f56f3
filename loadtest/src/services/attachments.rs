//! Measures uploads of files: their speed beside a bare server that writes the same bytes, their memory, what they cost
//! people who talk meanwhile, and whether anything is left of files that are deleted.

mod bare;
pub(crate) mod http;

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::Args;
use http::Http;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;

use crate::{
    Common,
    client::Client,
    crowd::channel::{WARM_UP, spinner},
    data::Data,
    people::{self, Kind, People},
    report::Report,
    server::{Server, token},
    spread::Spread,
    worker::Worker,
};

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    people: people::Options,
    /// Bytes of the files whose speed is measured, in MiB
    #[arg(long, default_value_t = 64)]
    mib: usize,
    /// Files whose speed is measured, and as many on the bare server in turn
    #[arg(long, default_value_t = 10)]
    files: usize,
    /// Uploads at the same time, to measure the memory of each
    #[arg(long, default_value_t = 48)]
    open: usize,
    /// Pieces in which files are uploaded while people talk, and as many without; --seconds is the length of each
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Files of 1 MiB per second that are uploaded while people talk
    #[arg(long, default_value_t = 10)]
    uploads: u32,
}

const MIB: usize = 1 << 20;
/// Goals of `docs/attachments.md`.
const SPEED_MIN: f64 = 0.8;
const MEMORY_MIB_MAX: f64 = 1.0;
const P99_RATIO_MAX: f64 = 1.2;
/// Uploads of one user at the same time.
const OPEN_OF_USER: usize = 4;
/// The time within which nothing is left of deleted files.
const GONE_WITHIN: Duration = Duration::from_secs(120);
/// Limits that the uploads do not reach.
const SETTINGS: &str = "attachments.uploads_per_minute = 10000\nattachments.user_mib_per_day = 1048576\nattachments.min_free_mib = 0\n";

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("attachments", &common.outputs);
    let mut data = Data::new(common)?;
    data.more_settings = SETTINGS.to_owned();
    let servers = Server::gateways(common, &data, 1)?;
    let server = &servers[0];
    let mut sender = Sender::new(server)?;
    speed(server, &sender, &data.file("bare"), options, &mut report)?;
    memory(server, &sender, options.open, &mut report)?;
    beside_people(&servers, &mut sender, options, &mut report)?;
    let root = data.file("store/attachments");
    let before = files_in(&root)?;
    report.figure("files before the deletions", before as f64, "");
    sender.delete_all()?;
    let left = wait_until_gone(&root)?;
    report.must(left == 0, format!("{left} files are left of deleted ones"));
    report.figure("files left of deleted ones", left as f64, "");
    report.finish()
}

/// A user with a conversation, and what they have uploaded to it.
struct Sender {
    client: Client,
    token: String,
    conversation: String,
    /// Files that no message has.
    unused: Vec<String>,
    seqs: Vec<u64>,
    address: String,
}

impl Sender {
    fn new(server: &Server) -> anyhow::Result<Self> {
        let mut client = Client::connect(&server.address, "uploader", 0)?;
        let members: Vec<_> = (0..64).map(|n| format!("uploader-{n}")).collect();
        let request = json!({"type": "create", "kind": "group", "participants": members});
        let conversation = client.create(request)?;
        Ok(Self {
            client,
            token: token("uploader")?,
            conversation,
            unused: Vec::new(),
            seqs: Vec::new(),
            address: server.address.clone(),
        })
    }

    /// Sends a message with each second file, and keeps the others unused.
    fn take(&mut self, files: Vec<String>) -> anyhow::Result<()> {
        for (number, file) in files.into_iter().enumerate() {
            if number % 2 == 0 {
                self.unused.push(file);
                continue;
            }
            let message = json!({"type": "send", "conversation": self.conversation, "client_id": crate::client::client_id(),
                "body": "", "attachments": [{"id": file}]});
            let sent = self.client.ask(message)?;
            self.seqs.push(sent["seq"].as_u64().context("no seq")?);
        }
        Ok(())
    }

    /// Deletes the messages, and gives up the other files.
    fn delete_all(&mut self) -> anyhow::Result<()> {
        for seqs in self.seqs.chunks(50) {
            self.client
                .ask(json!({"type": "delete", "conversation": self.conversation, "seqs": seqs}))?;
        }
        let mut http = Http::connect(&self.address, &self.token)?;
        self.unused.iter().try_for_each(|file| http.give_up(file))
    }
}

/// Bytes that no format begins with, so that nothing but their hash is computed.
fn noise(len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    StdRng::seed_from_u64(1).fill_bytes(&mut data);
    data[..4].fill(0xee);
    data
}

/// Compares the speed of uploads with that of the bare server, in turn.
fn speed(
    server: &Server,
    sender: &Sender,
    bare_folder: &Path,
    options: &Options,
    report: &mut Report,
) -> anyhow::Result<()> {
    let data = noise(options.mib * MIB);
    let mut http = Http::connect(&server.address, &sender.token)?;
    let mut bare = bare::connect(bare_folder.to_owned())?;
    let (mut speeds, mut bare_speeds) = (Vec::new(), Vec::new());
    let mut cpu = Duration::ZERO;
    for _ in 0..options.files {
        let (begin, before) = (Instant::now(), server.cpu()?);
        let file = http.upload(&sender.conversation, &data)?;
        speeds.push(options.mib as f64 / begin.elapsed().as_secs_f64());
        cpu += server.cpu()?.saturating_sub(before);
        http.give_up(&file)?;
        let begin = Instant::now();
        bare::upload(&mut bare, &data)?;
        bare_speeds.push(options.mib as f64 / begin.elapsed().as_secs_f64());
    }
    let ratio = Spread::ratios(&speeds, &bare_speeds);
    Spread::of(speeds).tell(report, "upload", "MiB/s");
    Spread::of(bare_speeds).tell(report, "upload to the bare server", "MiB/s");
    ratio.tell(report, "upload, gateway / bare server, in turn", "");
    report.speed_at_least("upload, gateway / bare server", ratio.median, SPEED_MIN, "");
    let uploaded = (options.files * options.mib) as f64;
    report.figure("CPU per MiB", cpu.as_secs_f64() * 1e6 / uploaded, "µs");
    Ok(())
}

/// Measures the memory of uploads of which a part has come.
fn memory(
    server: &Server,
    sender: &Sender,
    open: usize,
    report: &mut Report,
) -> anyhow::Result<()> {
    let data = noise(8 * MIB);
    let before = server.resident_kib()?;
    let mut all = Vec::new();
    for number in 0..open {
        let user = format!("uploader-{}", number / OPEN_OF_USER);
        let mut http = Http::connect(&server.address, &token(&user)?)?;
        let file = http.begin(&sender.conversation, data.len())?;
        http.send(&file, &data, data.len() / 2)?;
        all.push((http, file));
    }
    let mib = (server.resident_kib()? - before) / 1024.0 / open.max(1) as f64;
    report.at_most("memory per upload", mib, MEMORY_MIB_MAX, "MiB");
    for (http, file) in &mut all {
        http.rest(&data[data.len() / 2..])?;
        http.ready()?;
        http.give_up(file)?;
    }
    Ok(())
}

/// Measures what people wait for their acknowledgements, with and without uploads in turn.
fn beside_people(
    servers: &[Server],
    sender: &mut Sender,
    options: &Options,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut people = People::gather(servers, &options.people, Kind::Mixed, Client::connect)?;
    people.time_replies()?;
    let progress = spinner();
    people.talk(WARM_UP, &progress)?;
    people.settle()?;
    let length = Duration::from_secs(options.people.seconds);
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for round in 0..options.rounds {
        let mut p99 = [0.0; 2];
        for uploads in [round % 2 == 1, round % 2 == 0] {
            people.begin_part(1 + round as u64);
            let uploader = uploads.then(|| uploader(sender, options.uploads));
            people.forget();
            people.talk(length, &progress)?;
            people.settle()?;
            p99[usize::from(uploads)] = people.waits()?.acknowledged.p99;
            if let Some(uploader) = uploader {
                sender.take(uploader.stop()?)?;
            }
        }
        without.push(p99[0]);
        with.push(p99[1]);
    }
    progress.finish_and_clear();
    people.judge(report);
    report.figure(
        "files uploaded meanwhile",
        (sender.unused.len() + sender.seqs.len()) as f64,
        "",
    );
    let ratio = Spread::ratios(&with, &without);
    Spread::of(without).tell(report, "p99 acknowledged, alone", "ms");
    Spread::of(with).tell(report, "p99 acknowledged, during uploads", "ms");
    ratio.tell(
        report,
        "p99 acknowledged, during uploads / alone, in turn",
        "",
    );
    report.speed_at_most(
        "p99 acknowledged, during uploads / alone",
        ratio.median,
        P99_RATIO_MAX,
        "",
    );
    Ok(())
}

/// Uploads files at a steady rate.
fn uploader(sender: &Sender, per_second: u32) -> Worker<Vec<String>> {
    let (address, token) = (sender.address.clone(), sender.token.clone());
    let conversation = sender.conversation.clone();
    Worker::start(move |over| {
        let data = noise(MIB);
        let mut http = Http::connect(&address, &token)?;
        let (begin, mut files) = (Instant::now(), Vec::new());
        while !over.is_over() {
            files.push(http.upload(&conversation, &data)?);
            let due = Duration::from_secs(1) / per_second * files.len() as u32;
            std::thread::sleep(due.saturating_sub(begin.elapsed()));
        }
        ensure!(!files.is_empty(), "nothing was uploaded");
        Ok(files)
    })
}

/// Counts the files in a directory, at every depth, but for the key.
fn files_in(root: &Path) -> anyhow::Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        // It may be erased meanwhile.
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => count += files_in(&entry.path()).unwrap_or_default(),
            Ok(_) if entry.file_name() != "signing.key" => count += 1,
            _ => {}
        }
    }
    Ok(count)
}

/// Waits until no file is left. Returns how many are left when it takes too long.
fn wait_until_gone(root: &Path) -> anyhow::Result<usize> {
    let begin = Instant::now();
    loop {
        let left = files_in(root)?;
        if left == 0 || begin.elapsed() > GONE_WITHIN {
            return Ok(left);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
