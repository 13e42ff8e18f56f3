//! Kills the gateway under load with kill -9 and starts it again. In the end every acknowledged message must be there,
//! once and in order.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::Args;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{Common, client::Client, data::Data, report::Report, server::Server};

#[derive(Args)]
pub(crate) struct Options {
    /// Kills of the gateway
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Users who write, each to one conversation
    #[arg(long, default_value_t = 8)]
    writers: usize,
    /// Conversations, assigned to the writers in turn
    #[arg(long, default_value_t = 4)]
    conversations: usize,
    /// Messages acknowledged before each kill
    #[arg(long, default_value_t = 2000)]
    messages: u64,
}

/// Messages of one writer in flight.
const WINDOW: usize = 64;

/// What one writer saw.
#[derive(Default)]
struct Seen {
    /// The acknowledged seq of each client id.
    acknowledged: HashMap<Uuid, u64>,
    /// Client ids whose outcome is unknown. They are sent again after the restart.
    unknown: Vec<Uuid>,
    /// Violations.
    wrong: Vec<String>,
}

struct Entry {
    client_id: Uuid,
    sender: String,
}

/// A conversation's entries by seq.
type Log = BTreeMap<u64, Entry>;

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("kill", &common.outputs);
    let data = Data::new(common)?;
    let gateway = || Server::gateway(common, &data);
    let mut server = gateway()?;
    let users: Vec<String> = (0..options.writers)
        .map(|w| format!("writer-{w}"))
        .collect();
    let mut owner = Client::connect(&server.address, "reader", 0)?;
    let mut conversations = Vec::new();
    for _ in 0..options.conversations {
        let create = json!({"type": "create", "kind": "group", "participants": users});
        conversations.push(owner.create(create)?);
    }
    let seen: Vec<Arc<Mutex<Seen>>> = users.iter().map(|_| Arc::default()).collect();
    let total = Arc::new(AtomicU64::new(0));
    let progress = ProgressBar::new(options.rounds as u64);
    let mut down = Duration::ZERO;
    for _ in 0..options.rounds {
        let writers: Vec<_> = (0..)
            .zip(&users)
            .map(|(w, user)| {
                let conversation = conversations[w % conversations.len()].clone();
                let (address, user) = (server.address.clone(), user.clone());
                let (seen, total) = (seen[w].clone(), total.clone());
                thread::spawn(move || write(&address, &user, &conversation, &seen, &total))
            })
            .collect();
        wait_for(&total, options.messages)?;
        server.kill()?;
        for writer in writers {
            drop(writer.join());
        }
        let begin = Instant::now();
        server = gateway()?;
        down += begin.elapsed();
        progress.inc(1);
    }
    progress.finish_and_clear();
    let acknowledged = total.load(Ordering::Relaxed);
    report.figure("kills", options.rounds as f64, "");
    report.figure("messages acknowledged", acknowledged as f64, "");
    report.figure(
        "from start to ready, mean",
        down.as_secs_f64() * 1e3 / options.rounds.max(1) as f64,
        "ms",
    );
    for (index, conversation) in conversations.iter().enumerate() {
        let log = whole_log(&server.address, conversation)?;
        let writers = seen.iter().enumerate();
        let writers = writers.filter(|(w, _)| w % conversations.len() == index);
        check_log(conversation, &log, writers, &mut report);
        check_unread(&server.address, conversation, &log, &users, &mut report)?;
    }
    report.finish()
}

/// Waits until this many more messages are acknowledged.
fn wait_for(total: &AtomicU64, messages: u64) -> anyhow::Result<()> {
    let target = total.load(Ordering::Relaxed) + messages;
    let until = Instant::now() + Duration::from_secs(60);
    while total.load(Ordering::Relaxed) < target {
        if Instant::now() > until {
            bail!("the gateway did not acknowledge enough messages within 60 s");
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Checks that a log has no gaps, and has each message that its writers saw acknowledged, once, at its seq.
fn check_log<'a>(
    conversation: &str,
    log: &Log,
    writers: impl Iterator<Item = (usize, &'a Arc<Mutex<Seen>>)>,
    report: &mut Report,
) {
    let places: HashMap<Uuid, u64> = log
        .iter()
        .map(|(seq, entry)| (entry.client_id, *seq))
        .collect();
    report.must(
        places.len() == log.len(),
        format!("{conversation}: a message is in the log twice"),
    );
    let gapless = log.keys().copied().eq(1..=log.len() as u64);
    report.must(gapless, format!("{conversation}: the log has gaps"));
    for (w, seen) in writers {
        let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        report.must(
            seen.wrong.is_empty(),
            format!("writer {w}: {:?}", seen.wrong.first()),
        );
        let lost = seen
            .acknowledged
            .iter()
            .filter(|(id, seq)| places.get(id) != Some(seq))
            .count();
        report.must(
            lost == 0,
            format!("writer {w}: {lost} acknowledged messages are not at their seq"),
        );
    }
}

/// Sends messages until the connection breaks. Unanswered ones are sent again after the restart.
fn write(address: &str, user: &str, conversation: &str, seen: &Mutex<Seen>, total: &AtomicU64) {
    let again = {
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut seen.unknown)
    };
    let mut writer = Writer {
        conversation,
        window: VecDeque::new(),
        again: again.into(),
    };
    // An error ends the connection, which is what a kill does.
    let _ = writer.run(address, user, seen, total);
    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let unanswered = writer.window.into_iter().map(|(_, id)| id);
    seen.unknown.extend(unanswered.chain(writer.again));
}

/// The messages of one connection that are not answered yet.
struct Writer<'a> {
    conversation: &'a str,
    /// Request ids and client ids in flight.
    window: VecDeque<(u32, Uuid)>,
    /// Client ids to send again.
    again: VecDeque<Uuid>,
}

impl Writer<'_> {
    fn run(
        &mut self,
        address: &str,
        user: &str,
        seen: &Mutex<Seen>,
        total: &AtomicU64,
    ) -> anyhow::Result<()> {
        let mut client = Client::connect(address, user, 0)?;
        loop {
            while self.window.len() < WINDOW {
                self.send(&mut client)?;
            }
            let frame = client.next()?;
            let answered = |(number, _): &(u32, Uuid)| frame["id"] == *number;
            let Some(at) = self.window.iter().position(answered) else {
                continue;
            };
            let Some((_, client_id)) = self.window.remove(at) else {
                continue;
            };
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            if seen.note(client_id, &frame) {
                total.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn send(&mut self, client: &mut Client) -> anyhow::Result<()> {
        let retry = self.again.pop_front();
        let id = retry.unwrap_or_else(Uuid::new_v4);
        let request = json!({"type": "send", "conversation": self.conversation, "client_id": id,
            "body": id.to_string(), "retry": retry.is_some()});
        // The message is noted first, because a failed send may have arrived.
        self.window.push_back((0, id));
        let number = client.begin(request)?;
        if let Some(last) = self.window.back_mut() {
            last.0 = number;
        }
        Ok(())
    }
}

impl Seen {
    /// Notes the answer to a message. Returns true if it is acknowledged.
    fn note(&mut self, client_id: Uuid, frame: &Value) -> bool {
        if let ("sent", Some(seq)) = (
            frame["type"].as_str().unwrap_or_default(),
            frame["seq"].as_u64(),
        ) {
            let before = self.acknowledged.insert(client_id, seq);
            if before.is_some_and(|before| before != seq) {
                self.wrong
                    .push(format!("{client_id} acknowledged at {before:?} and {seq}"));
            }
            return true;
        }
        if frame["code"] == "unavailable" {
            self.unknown.push(client_id);
        } else {
            self.wrong.push(frame.to_string());
        }
        false
    }
}

fn whole_log(address: &str, conversation: &str) -> anyhow::Result<Log> {
    let log = Client::connect(address, "reader", 0)?.whole_log(conversation)?;
    log.into_iter()
        .map(|(seq, message)| {
            let client_id = message["client_id"]
                .as_str()
                .context("a message has no client_id")?;
            let sender = message["sender"]
                .as_str()
                .context("a message has no sender")?
                .to_owned();
            let client_id = client_id.parse()?;
            Ok((seq, Entry { client_id, sender }))
        })
        .collect()
}

/// Checks the unread counts. Nobody sent `read`, so the messages after a user's own last one are unread.
fn check_unread(
    address: &str,
    conversation: &str,
    log: &Log,
    users: &[String],
    report: &mut Report,
) -> anyhow::Result<()> {
    // The log is in the order of seqs, so the last message of each sender remains.
    let own: HashMap<&str, u64> = log
        .iter()
        .map(|(seq, entry)| (entry.sender.as_str(), *seq))
        .collect();
    for user in users {
        let mut client = Client::connect(address, user, 0)?;
        let inbox = client.ask(json!({"type": "inbox"}))?;
        let items = inbox["items"].as_array().context("`inbox` has no items")?;
        let item: &Value = items
            .iter()
            .find(|i| i["conversation"] == conversation)
            .context("the conversation is not in the inbox")?;
        let unread = log.len() as u64 - own.get(user.as_str()).copied().unwrap_or(1);
        let right = item["unread"] == unread && item["last_seq"] == log.len() as u64;
        report.must(
            right,
            format!(
                "the inbox of {user} says {item}, but the log has {unread} unread messages of {}",
                log.len()
            ),
        );
    }
    Ok(())
}
