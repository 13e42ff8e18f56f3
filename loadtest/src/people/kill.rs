//! Kills the gateway under load with kill -9 and starts it again. In the end every acknowledged message must be there,
//! once and in order.

use std::{
    collections::HashMap,
    thread,
    time::{Duration, Instant},
};

use anyhow::ensure;
use clap::Args;
use indicatif::ProgressBar;
use serde_json::json;
use uuid::Uuid;

use crate::{
    Common,
    client::Client,
    data::Data,
    report::Report,
    senders::{Pace, Senders, Sent, User},
    server::Server,
    verify::{Log, check_logs, is_at, read_inbox, read_log},
};

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
    messages: usize,
}

/// Messages of one writer in flight.
const WINDOW: usize = 64;
/// The user who creates the conversations, and reads them in the end.
const READER: &str = "reader";
/// The time within which enough messages must be acknowledged.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("kill", &common.outputs);
    let data = Data::new(common)?;
    let mut server = Server::gateway(common, &data)?;
    let names: Vec<_> = (0..options.writers)
        .map(|w| format!("writer-{w}"))
        .collect();
    let conversations = create(&server, &names, options.conversations)?;
    let users = names.iter().zip(conversations.iter().cycle());
    let users = users.map(|(name, conversation)| User {
        name: name.clone(),
        conversations: vec![*conversation],
    });
    let pace = Pace {
        rate: None,
        window: WINDOW,
    };
    let senders = Senders::begin(std::slice::from_ref(&server), users.collect(), pace);
    let progress = ProgressBar::new(options.rounds as u64);
    let mut down = Duration::ZERO;
    for _ in 0..options.rounds {
        wait_for(&senders, options.messages)?;
        server.kill()?;
        let begin = Instant::now();
        server = Server::gateway(common, &data)?;
        down += begin.elapsed();
        senders.follow(0, &server);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let sent = senders.end();
    report.figure("kills", options.rounds as f64, "");
    let acknowledged = sent.acknowledged.len() as f64;
    report.figure("messages acknowledged", acknowledged, "");
    report.figure(
        "from start to ready, mean",
        down.as_secs_f64() * 1e3 / options.rounds.max(1) as f64,
        "ms",
    );
    let logs = conversations.iter().map(|conversation| {
        let id = conversation.to_string();
        let log = read_log(&server.address, READER, &id)?;
        Ok((id, log))
    });
    let logs = logs.collect::<anyhow::Result<_>>()?;
    check_logs(&logs, &mut report);
    check_sent(&sent, &logs, &mut report);
    for user in &names {
        check_unread(&server, user, &logs, &mut report)?;
    }
    report.finish()
}

/// Creates groups with these users.
fn create(server: &Server, users: &[String], count: usize) -> anyhow::Result<Vec<Uuid>> {
    let mut owner = Client::connect(&server.address, READER, 0)?;
    let create = json!({"type": "create", "kind": "group", "participants": users});
    (0..count)
        .map(|_| Ok(owner.create(create.clone())?.parse()?))
        .collect()
}

/// Waits until this many more messages are acknowledged.
fn wait_for(senders: &Senders, messages: usize) -> anyhow::Result<()> {
    let (target, begin) = (senders.acknowledged() + messages, Instant::now());
    while senders.acknowledged() < target {
        ensure!(
            begin.elapsed() < PATIENCE,
            "the gateway did not acknowledge enough messages within {PATIENCE:?}"
        );
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Checks that each message was acknowledged, and is where that said.
fn check_sent(sent: &Sent, logs: &HashMap<String, Log>, report: &mut Report) {
    report.must(sent.wrong.is_none(), format!("a reply: {:?}", sent.wrong));
    let unanswered = sent.unanswered;
    report.must(
        unanswered == 0,
        format!("{unanswered} messages were never acknowledged"),
    );
    let lost = sent.acknowledged.iter().filter(|message| {
        let place = (message.conversation.to_string(), message.seq);
        !is_at(logs, &place, &message.client_id.to_string())
    });
    let lost = lost.count();
    report.must(
        lost == 0,
        format!("{lost} acknowledged messages are not at their seq"),
    );
}

/// Checks the unread counts. Nobody sent `read`, so the messages after a user's own last one are unread.
fn check_unread(
    server: &Server,
    user: &str,
    logs: &HashMap<String, Log>,
    report: &mut Report,
) -> anyhow::Result<()> {
    let said = read_inbox(&mut Client::connect(&server.address, user, 0)?, report)?;
    for (conversation, log) in logs {
        let own = log.iter().rfind(|(_, entry)| entry.sender == user);
        let last = log.len() as u64;
        let unread = last - own.map_or(1, |(seq, _)| *seq);
        let item = said.get(conversation);
        let right = item.is_some_and(|item| (item.unread, item.last_seq) == (unread, last));
        report.must(
            right,
            format!("the inbox of {user} has {item:?}, but {unread} messages of {last} are unread"),
        );
    }
    Ok(())
}
