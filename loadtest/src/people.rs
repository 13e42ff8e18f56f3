//! Many people at a human pace: direct chats, groups, a channel for all. Every message must reach everyone in its
//! conversation once and in order; how late it is counts from when it was due.

use std::time::{Duration, Instant};

use clap::Args;
use indicatif::ProgressBar;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;

use crate::{
    Common,
    client::{Client, send_frame},
    crowd::{Crowd, body},
    data::Data,
    fanout::{WARM_UP, spinner},
    report::Report,
    server::{Server, total_cpu},
};

#[derive(Args)]
pub(crate) struct Options {
    #[arg(long, default_value_t = 1000)]
    users: usize,
    /// Messages per second of each user
    #[arg(long, default_value_t = 0.5)]
    rate: f64,
    /// Participants of a group
    #[arg(long, default_value_t = 20)]
    participants: usize,
    /// Bytes of a body
    #[arg(long, default_value_t = 100)]
    size: usize,
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Gateways, over one store; more than one needs --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
    /// The same seed makes the same people say the same at the same times
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Who talks to whom.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Dm,
    Groups,
    /// Both, and a channel in which everyone is.
    Mixed,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Dm => "dm",
            Self::Groups => "groups",
            Self::Mixed => "mixed",
        }
    }
}

/// Direct chats and groups of each user, about.
const CONVERSATIONS: usize = 3;
/// Who can be named when a channel is made.
const CHANNEL_MAX: usize = 3_000;

struct Conversation {
    id: String,
    /// Those who write in it, the one who made it first.
    writers: Vec<usize>,
    readers: usize,
}

pub(crate) fn run(common: &Common, options: &Options, kind: Kind) -> anyhow::Result<bool> {
    let mut report = Report::new(kind.name(), &common.outputs);
    anyhow::ensure!(
        options.users > options.participants,
        "more users than one group has"
    );
    let mut random = StdRng::seed_from_u64(options.seed);
    let data = Data::new(common)?;
    let servers = Server::gateways(common, &data, options.gateways)?;
    let mut clients = Vec::new();
    for number in 0..options.users {
        let address = &servers[number % servers.len()].address;
        clients.push(Client::connect(address, &name(number), number)?);
    }
    let conversations = conversations(&mut clients, options, kind, &mut random)?;
    // Of each user, where it may write.
    let mut places = vec![Vec::new(); options.users];
    for (number, conversation) in conversations.iter().enumerate() {
        for &writer in &conversation.writers {
            places[writer].push(number);
        }
    }
    println!(
        "  {} users in {} conversations",
        options.users,
        conversations.len()
    );

    let mut crowd = Crowd::new(servers.len())?;
    for client in clients {
        crowd.join(client.into_stream())?;
    }
    let mut crowd = crowd.by_conversation();
    let epoch = crowd.epoch;
    let watches: Vec<_> = servers.iter().map(Server::watch).collect();
    let progress = spinner();
    let each = Duration::from_secs_f64(1.0 / (options.rate * options.users as f64));
    let begin = epoch.elapsed();
    let end = begin + WARM_UP + Duration::from_secs(options.seconds);
    let (mut due, mut sent, mut expected, mut warm) = (begin, 0, 0, false);
    let (mut cpu, mut counted) = (Duration::ZERO, 0);
    while due < end {
        while epoch.elapsed() < due {
            let left = due.saturating_sub(epoch.elapsed());
            crowd.read(left.min(Duration::from_millis(5)))?;
        }
        if !warm && due >= begin + WARM_UP {
            warm = true;
            crowd.forget_latency();
            (cpu, counted) = (total_cpu(&servers)?, sent);
        }
        let user = random.random_range(0..options.users);
        if let Some(&place) = places[user].get(random.random_range(0..places[user].len().max(1))) {
            let conversation = &conversations[place];
            let body = body(sent, due, options.size);
            crowd.send(user, &send_frame(&conversation.id, &body))?;
            sent += 1;
            expected += conversation.readers as u64;
        }
        // People do not write in turn: the times between are exponentially distributed.
        due += each.mul_f64(-(1.0 - random.random::<f64>()).ln());
        progress.set_message(format!(
            "{sent} messages, {} deliveries",
            crowd.counts.delivered
        ));
        progress.tick();
    }
    let quiet = Instant::now();
    while (crowd.counts.delivered < expected || crowd.counts.acknowledged < sent)
        && quiet.elapsed() < Duration::from_secs(10)
    {
        crowd.read(Duration::from_millis(5))?;
    }
    let cpu = total_cpu(&servers)? - cpu;
    progress.finish_and_clear();
    let counts = crowd.counts;
    let lost = counts.lost(expected);
    println!(
        "  {sent} messages, {} acknowledged; {} delivered, {lost} lost, {} doubled, {} out of order, {} closed",
        counts.acknowledged, counts.delivered, counts.doubled, counts.gaps, counts.closed
    );
    report.must(
        lost + counts.doubled + counts.gaps + counts.closed == 0 && counts.acknowledged == sent,
        "a message or a delivery went wrong".to_owned(),
    );
    crowd.tell_latency(&mut report, "latency");
    let messages = (sent - counted) as f64;
    report.figure(
        "messages per second",
        messages / options.seconds as f64,
        "/s",
    );
    report.figure("CPU per message", cpu.as_secs_f64() * 1e6 / messages, "µs");
    crowd.draw(&mut report, kind.name());
    for (number, watch) in (1..).zip(watches) {
        watch.stop().draw(&mut report, &format!("gateway {number}"));
    }
    report.finish()
}

fn name(number: usize) -> String {
    format!("user-{number:06}")
}

fn conversations(
    clients: &mut [Client],
    options: &Options,
    kind: Kind,
    random: &mut StdRng,
) -> anyhow::Result<Vec<Conversation>> {
    let users = clients.len();
    let mut made = Vec::new();
    let progress = ProgressBar::new_spinner();
    let mut make = |kind: &str, members: Vec<usize>, everyone_writes: bool| {
        let [maker, others @ ..] = &members[..] else {
            anyhow::bail!("nobody is in it")
        };
        let names: Vec<_> = others.iter().copied().map(name).collect();
        let mut create = json!({"type": "create", "kind": kind, "participants": names});
        if kind != "dm" {
            create["name"] = kind.into();
        }
        let id = clients[*maker].create(create)?;
        progress.tick();
        made.push(Conversation {
            id,
            readers: members.len(),
            writers: if everyone_writes {
                members
            } else {
                vec![*maker]
            },
        });
        Ok(())
    };
    if kind != Kind::Groups {
        for user in 0..users {
            for other in 1..=CONVERSATIONS / 2 + 1 {
                make("dm", vec![user, (user + other * 7) % users], true)?;
            }
        }
    }
    if kind != Kind::Dm {
        for _ in 0..users * CONVERSATIONS / options.participants {
            let members = rand::seq::index::sample(random, users, options.participants);
            make("group", members.into_vec(), true)?;
        }
    }
    if kind == Kind::Mixed {
        make("channel", (0..users.min(CHANNEL_MAX)).collect(), false)?;
    }
    progress.finish_and_clear();
    Ok(made)
}
