//! Measures what reading an inbox costs and how that grows with its conversations, and checks its unread counts. Each
//! row has every column filled: read marks, edits and deletions.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use anyhow::ensure;
use clap::Args;
use hdrhistogram::Histogram;
use indicatif::ProgressBar;
use serde_json::json;

use crate::{
    Common,
    client::{Client, request_frame, send_frame},
    data::Data,
    latency::latencies,
    report::Report,
    server::{Server, token},
    store::celebrity::pipeline,
    verify::{INBOX_PAGE, Item, inbox_page, read_inbox},
};

#[derive(Args)]
pub(crate) struct Options {
    /// Sizes of the inboxes to measure, in conversations
    #[arg(long, value_delimiter = ',', default_values_t = [10, 100, 1_000, 5_000])]
    conversations: Vec<usize>,
    /// One conversation in this many is a channel, the others are groups
    #[arg(long, default_value_t = 5)]
    channel_every: usize,
    /// Messages in each conversation: one is read, one is edited, one is deleted, the others are unread
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(3..))]
    messages: u64,
    /// Pages read of each inbox
    #[arg(long, default_value_t = 2_000)]
    pages: usize,
    /// Connects of each user with cursors of all conversations, of which nothing is missed
    #[arg(long, default_value_t = 100)]
    connects: usize,
    /// Starts of the gateway, after each of which the first page of each inbox is measured
    #[arg(long, default_value_t = 5)]
    starts: usize,
}

/// Goal for the gateway's CPU of a page of an inbox, in microseconds.
const PAGE_CPU_US_MAX: f64 = 300.0;
/// Goal for the gateway's CPU of a connect and the first page after a start, in milliseconds. It is for an inbox of 5,000
/// conversations; a smaller one costs less.
const FIRST_PAGE_CPU_MS_MAX: f64 = 5.0;
/// Cursors of a connect: as many as fit into a frame.
const CURSORS_MAX: usize = 1_000;

/// Seqs of the messages that are read, edited and deleted. The first entry says that the conversation was created.
const READ: u64 = 2;
const EDITED: u64 = 3;
const DELETED: u64 = 4;
/// The newest rev of each conversation: an edit and a deletion.
const REV: u64 = 2;

/// The conversations that an inbox must have, with what it must say of each.
type Expected = HashMap<String, Item>;

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("inbox", &common.outputs);
    let data = Data::new(common)?;
    let mut server = Server::gateway(common, &data)?;
    let (mut times, mut costs) = (Vec::new(), Vec::new());
    for &conversations in &options.conversations {
        let user = reader_of(conversations);
        let expected = fill(&server, &user, conversations, options)?;
        let mut reader = Client::connect(&server.address, &user, 0)?;
        check(&mut reader, &expected, &mut report)?;
        let (connect, connect_cpu) = reconnect(&server, &user, &expected, options.connects)?;
        let cursors = expected.len().min(CURSORS_MAX);
        report.latency(
            &format!("a connect with {cursors} cursors, of {conversations} conversations"),
            &connect,
        );
        let connect_us = connect_cpu.as_secs_f64() * 1e6 / options.connects as f64;
        report.figure(
            &format!("CPU per connect with {cursors} cursors, of {conversations}"),
            connect_us,
            "µs",
        );
        let (latency, cpu) = read(&server, &mut reader, options.pages)?;
        report.latency(
            &format!("a page, of {conversations} conversations"),
            &latency,
        );
        let cpu_us = cpu.as_secs_f64() * 1e6 / options.pages as f64;
        let name = format!("CPU per page, of {conversations}");
        report.speed_at_most(&name, cpu_us, PAGE_CPU_US_MAX, "µs");
        times.push((
            conversations as f64,
            latency.value_at_quantile(0.5) as f64 / 1000.0,
        ));
        costs.push((conversations as f64, cpu_us));
    }
    for &conversations in &options.conversations {
        let mut cost = Duration::ZERO;
        for _ in 0..options.starts {
            server.drain()?;
            server = Server::gateway(common, &data)?;
            cost += first_page(&server, &reader_of(conversations))?;
        }
        report.speed_at_most(
            &format!("CPU of connect and first page after a start, of {conversations}"),
            cost.as_secs_f64() * 1e3 / options.starts.max(1) as f64,
            FIRST_PAGE_CPU_MS_MAX,
            "ms",
        );
    }
    let title = format!("a page of {INBOX_PAGE}, by conversations in the inbox");
    report.growth(&format!("{title}: p50"), "ms", "conversations", times);
    report.growth(&format!("{title}: CPU"), "µs", "conversations", costs);
    report.finish()
}

fn reader_of(conversations: usize) -> String {
    format!("reader-of-{conversations}")
}

/// Connects, and reads the first page of an inbox that the server has not read yet. Returns the server's CPU.
fn first_page(server: &Server, user: &str) -> anyhow::Result<Duration> {
    // Another user's connection and page bring the code into memory.
    inbox_page(&mut Client::connect(&server.address, "nobody", 0)?, None)?;
    let cpu = server.cpu()?;
    let mut reader = Client::connect(&server.address, user, 0)?;
    inbox_page(&mut reader, None)?;
    Ok(server.cpu()? - cpu)
}

/// Creates the conversations of an inbox. Returns what it must say of each.
fn fill(
    server: &Server,
    user: &str,
    conversations: usize,
    options: &Options,
) -> anyhow::Result<Expected> {
    let mut writer = Client::connect(&server.address, "writer", 0)?;
    let messages = options.messages as usize;
    let progress = ProgressBar::new((conversations * (messages + 4)) as u64);
    let mut expected = HashMap::new();
    for number in 0..conversations {
        let is_channel = number % options.channel_every == 0;
        let create = json!({"type": "create", "kind": if is_channel { "channel" } else { "group" },
            "name": format!("{number}"), "participants": [user]});
        let item = Item {
            unread: options.messages - 2,
            last_seq: options.messages + 1,
            read_seq: READ,
        };
        expected.insert(writer.create(create)?, item);
        progress.inc(1);
    }
    let ids: Vec<&String> = expected.keys().collect();
    pipeline(&mut writer, conversations * messages, &progress, |n| {
        send_frame(ids[n % ids.len()], &format!("number {n}"))
    })?;
    pipeline(&mut writer, conversations, &progress, |n| {
        request_frame(
            json!({"type": "edit", "conversation": ids[n], "seq": EDITED, "body": "edited"}),
        )
    })?;
    pipeline(&mut writer, conversations, &progress, |n| {
        request_frame(json!({"type": "delete", "conversation": ids[n], "seqs": [DELETED]}))
    })?;
    let mut reader = Client::connect(&server.address, user, 0)?;
    pipeline(&mut reader, conversations, &progress, |n| {
        request_frame(json!({"type": "read", "conversation": ids[n], "seq": READ}))
    })?;
    progress.finish_and_clear();
    Ok(expected)
}

/// Checks that the inbox has every conversation once, with the right unread count.
fn check(reader: &mut Client, expected: &Expected, report: &mut Report) -> anyhow::Result<()> {
    let seen = read_inbox(reader, report)?;
    let wrong = expected
        .iter()
        .filter(|(id, item)| seen.get(*id) != Some(item))
        .count();
    report.must(
        seen.len() == expected.len() && wrong == 0,
        format!(
            "the inbox has {} conversations instead of {}, and says something else of {wrong}",
            seen.len(),
            expected.len(),
        ),
    );
    Ok(())
}

/// Reads one page after the other, from the newest on, over and over. Returns the latencies and the server's CPU.
fn read(
    server: &Server,
    reader: &mut Client,
    pages: usize,
) -> anyhow::Result<(Histogram<u64>, Duration)> {
    let mut latency = latencies()?;
    let (mut before, cpu) = (None, server.cpu()?);
    for _ in 0..pages {
        let begin = Instant::now();
        let (_, next) = inbox_page(reader, before.as_ref())?;
        latency.saturating_record(begin.elapsed().as_micros() as u64);
        before = next;
    }
    Ok((latency, server.cpu()? - cpu))
}

/// Connects the user again and again with cursors of all conversations. Returns the times until nothing
/// more can come, and the server's CPU.
fn reconnect(
    server: &Server,
    user: &str,
    expected: &Expected,
    times: usize,
) -> anyhow::Result<(Histogram<u64>, Duration)> {
    let cursors = expected.iter().take(CURSORS_MAX);
    let cursors: HashMap<&String, [u64; 2]> = cursors
        .map(|(id, item)| (id, [item.last_seq, REV]))
        .collect();
    let connect = json!({"type": "connect", "token": token(user)?, "cursors": cursors});
    let (mut latency, cpu) = (latencies()?, server.cpu()?);
    for _ in 0..times {
        let mut client = Client::open(&server.address, "/v1/ws", 0)?;
        let begin = Instant::now();
        // What was missed is sent before the next request is read.
        client.begin(connect.clone())?;
        client.begin(json!({"type": "ping"}))?;
        for expected in ["connected", "pong"] {
            let frame = client.next()?;
            ensure!(
                frame["type"] == expected,
                "{frame} came instead of `{expected}`"
            );
        }
        latency.saturating_record(begin.elapsed().as_micros() as u64);
    }
    Ok((latency, server.cpu()? - cpu))
}
