//! Simulates many people at a human pace in direct chats, groups and a channel for everyone. Every message must reach
//! every participant once and in order. Its latency counts from when it was due.

mod changes;
mod chaos;
mod kill;
mod soak;

use std::time::{Duration, Instant};

use anyhow::Context as _;
use changes::Changes;
use clap::{Args, Subcommand};
use indicatif::ProgressBar;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;

use crate::{
    Common,
    client::{Client, send_frame, send_frame_with, text_frame},
    crowd::{
        Crowd, body,
        channel::{WARM_UP, spinner},
    },
    data::Data,
    latency::{Quantiles, latencies, quantile_ms},
    replies::Replies,
    report::Report,
    server::{Server, Watches, total_cpu},
};

/// The scenarios of this folder.
#[derive(Subcommand)]
pub(crate) enum Scenario {
    /// Simulate direct chats at a human pace
    Dm(Options),
    /// Simulate groups at a human pace
    Groups(Options),
    /// Simulate direct chats, groups and a channel for everyone, at a human pace
    Mixed(Options),
    /// Simulate groups at a human pace while gateways are killed
    Chaos(chaos::Options),
    /// Kill the gateway under load with kill -9, and check that every acknowledged message is there
    Kill(kill::Options),
    /// Let people talk for a long time with every kind of request: memory and disk must not grow without need
    ///
    /// Kills are in the first eighth of the run. Slopes are of its second half: the gateways have run for long by then, and
    /// are not killed any more. A slope is the median of the slopes between any two samples (Theil and Sen).
    /// It is within the noise, and no goal is missed, if the line rises by less in that half than the samples spread about
    /// it. The gateways have small caches (`memory.mib` 16, `store.embedded.cache_mib` 8), because a cache that fills looks
    /// like a leak. In a run of less than an hour they still fill, so no slope has a goal there. Latency is that of the messages
    /// since the last sample, from when they were due to their acknowledgement.
    Soak(soak::Options),
}

impl Scenario {
    pub(crate) fn run(&self, common: &Common) -> anyhow::Result<bool> {
        match self {
            Self::Dm(options) => run(common, options, Kind::Dm),
            Self::Groups(options) => run(common, options, Kind::Groups),
            Self::Mixed(options) => run(common, options, Kind::Mixed),
            Self::Chaos(options) => chaos::run(common, options),
            Self::Kill(options) => kill::run(common, options),
            Self::Soak(options) => soak::run(common, options),
        }
    }
}

// Another scenario flattens these options, where a second clap group with this name would be an error.
#[derive(Args)]
#[group(skip)]
pub(crate) struct Options {
    /// Users, each on a connection of their own
    #[arg(long, default_value_t = 1000)]
    pub(crate) users: usize,
    /// Messages per second of each user
    #[arg(long, default_value_t = 0.5)]
    pub(crate) rate: f64,
    /// Participants of a group
    #[arg(long, default_value_t = 20)]
    pub(crate) participants: usize,
    /// Bytes of a body
    #[arg(long, default_value_t = 100)]
    pub(crate) size: usize,
    /// Seconds, after a warm-up
    #[arg(long, default_value_t = 20)]
    pub(crate) seconds: u64,
    /// Gateways, over one store; more than one needs --cassandra
    #[arg(long, default_value_t = 1)]
    pub(crate) gateways: usize,
    /// Seed of who writes what, where and when
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// One message in this many is followed by an edit, a deletion or a reaction; 0 means none
    #[arg(long, default_value_t = 0)]
    pub(crate) change_every: u64,
}

/// Who talks to whom.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Dm,
    Groups,
    /// Direct chats, groups, and a channel for everyone.
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

/// Approximate number of direct chats and of groups of each user.
const CONVERSATIONS: usize = 3;
/// Participants of the channel, which are named when it is created.
const CHANNEL_MAX: usize = 3_000;
/// Goal for the latency through one gateway with the embedded store, p99.9 / p50.
const TAIL_RATIO_MAX: f64 = 10.0;

struct Conversation {
    id: String,
    /// Users who write in it. The first one created it.
    writers: Vec<usize>,
    readers: usize,
}

pub(crate) fn run(common: &Common, options: &Options, kind: Kind) -> anyhow::Result<bool> {
    let mut report = Report::new(kind.name(), &common.outputs);
    let data = Data::new(common)?;
    let servers = Server::gateways(common, &data, options.gateways)?;
    let mut people = People::gather(&servers, options, kind, Client::connect)?;
    let watches = Watches::of(&servers);
    let progress = spinner();
    people.warm_up(WARM_UP, &progress)?;
    let (cpu, counted) = (total_cpu(&servers)?, people.sent);
    people.talk(Duration::from_secs(options.seconds), &progress)?;
    people.settle()?;
    let cpu = total_cpu(&servers)? - cpu;
    progress.finish_and_clear();
    people.judge(&mut report);
    people.judge_replies(&mut report);
    let crowd = &people.crowd;
    crowd.tell_latency(&mut report, "latency");
    if options.gateways == 1 && common.cassandra.is_empty() {
        let [p50, p999] = [0.5, 0.999].map(|q| quantile_ms(&crowd.latency[0], q));
        report.speed_at_most("latency, p99.9 / p50", p999 / p50, TAIL_RATIO_MAX, "");
    }
    if let Some(replies) = &crowd.replies {
        report.latency("a change acknowledged", &replies.changed);
    }
    let messages = (people.sent - counted) as f64;
    report.figure(
        "messages per second",
        messages / options.seconds as f64,
        "/s",
    );
    report.figure("CPU per message", cpu.as_secs_f64() * 1e6 / messages, "µs");
    crowd.draw(&mut report, kind.name());
    watches.draw(&mut report, "gateway");
    report.finish()
}

/// Connected people, their conversations, and what they say to each other.
pub(crate) struct People {
    pub(crate) crowd: Crowd,
    conversations: Vec<Conversation>,
    /// For each user, the conversations that they write in.
    places: Vec<Vec<usize>>,
    random: StdRng,
    seed: u64,
    /// Mean time between two messages of all users together.
    each: Duration,
    /// When the next message is due, since the crowd's epoch.
    due: Option<Duration>,
    /// Bytes of a body.
    size: usize,
    pub(crate) sent: u64,
    expected: u64,
    /// The changes that people make, if any.
    changes: Option<Changes>,
}

/// How long people waited in a piece of a run.
pub(crate) struct Waits {
    pub(crate) acknowledged: Quantiles,
    pub(crate) delivered: Quantiles,
    /// The answer of a ping.
    pub(crate) pong: Quantiles,
}

/// Time within which every message must arrive.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);
/// While replies are timed, one message in this many comes with a ping of some user.
const PING_EVERY: u64 = 5;
/// Requests with ids below this are not timed.
const TIMED_ID_MIN: u32 = 16;

impl People {
    /// Connects all users with `connect` (address, user, number) and creates their conversations.
    pub(crate) fn gather(
        servers: &[Server],
        options: &Options,
        kind: Kind,
        connect: impl Fn(&str, &str, usize) -> anyhow::Result<Client>,
    ) -> anyhow::Result<Self> {
        anyhow::ensure!(
            options.users > options.participants,
            "--users must be more than --participants"
        );
        let mut random = StdRng::seed_from_u64(options.seed);
        let mut clients = Vec::new();
        for number in 0..options.users {
            let address = &servers[number % servers.len()].address;
            clients.push(connect(address, &name(number), number)?);
        }
        let conversations = conversations(&mut clients, options, kind, &mut random)?;
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
        let changes = match options.change_every {
            0 => None,
            every => {
                crowd.replies.insert(Replies::new()?).keep_seqs();
                Some(Changes::new(every, options.seed))
            }
        };
        Ok(Self {
            crowd: crowd.by_conversation(),
            conversations,
            places,
            random,
            seed: options.seed,
            each: Duration::from_secs_f64(1.0 / (options.rate * options.users as f64)),
            due: None,
            size: options.size,
            sent: 0,
            expected: 0,
            changes,
        })
    }

    /// Measures the latency of replies from now on.
    pub(crate) fn time_replies(&mut self) -> anyhow::Result<()> {
        if self.crowd.replies.is_none() {
            self.crowd.replies = Some(Replies::new()?);
        }
        Ok(())
    }

    /// Lets people write for a moment, and forgets how long they waited.
    pub(crate) fn warm_up(
        &mut self,
        length: Duration,
        progress: &ProgressBar,
    ) -> anyhow::Result<()> {
        self.talk(length, progress)?;
        self.forget();
        Ok(())
    }

    /// Forgets how long people waited so far.
    pub(crate) fn forget(&mut self) {
        self.crowd.forget_latency();
        self.crowd.replies.iter_mut().for_each(Replies::forget);
    }

    /// How long people waited since `forget`, if replies are timed.
    pub(crate) fn waits(&self) -> anyhow::Result<Waits> {
        let mut delivered = latencies()?;
        for latency in &self.crowd.latency {
            delivered.add(latency)?;
        }
        let replies = self
            .crowd
            .replies
            .as_ref()
            .context("replies are not timed: call `time_replies` first")?;
        Ok(Waits {
            acknowledged: Quantiles::of(&replies.sent),
            delivered: Quantiles::of(&delivered),
            pong: Quantiles::of(&replies.pong),
        })
    }

    /// Begins a part. Parts with the same number have the same messages at the same times.
    pub(crate) fn begin_part(&mut self, number: u64) {
        self.random = StdRng::seed_from_u64(self.seed.wrapping_add(number));
    }

    /// Lets people write for `length`. The times between two messages are exponentially distributed, as of people who
    /// write independently.
    pub(crate) fn talk(&mut self, length: Duration, progress: &ProgressBar) -> anyhow::Result<()> {
        let epoch = self.crowd.epoch;
        let mut due = self.due.unwrap_or_else(|| epoch.elapsed());
        let end = due + length;
        while due < end {
            while epoch.elapsed() < due {
                let left = due.saturating_sub(epoch.elapsed());
                self.crowd.read(left.min(Duration::from_millis(5)))?;
            }
            self.say(due)?;
            due += self.each.mul_f64(-(1.0 - self.random.random::<f64>()).ln());
            progress.set_message(format!(
                "{} messages, {} deliveries",
                self.sent, self.crowd.counts.delivered
            ));
            progress.tick();
        }
        self.due = Some(due);
        Ok(())
    }

    /// Sends a message of a random user to one of their conversations.
    fn say(&mut self, due: Duration) -> anyhow::Result<()> {
        let user = self.random.random_range(0..self.places.len());
        let places = &self.places[user];
        let Some(&place) = places.get(self.random.random_range(0..places.len().max(1))) else {
            return Ok(());
        };
        let conversation = &self.conversations[place];
        let body = body(self.sent, due, self.size);
        let crowd = &mut self.crowd;
        if crowd.replies.is_some() {
            let id = TIMED_ID_MIN + self.sent as u32 * 2;
            crowd.ask(user, id, due, &send_frame_with(id, &conversation.id, &body))?;
            if self.sent.is_multiple_of(PING_EVERY) {
                let user = self.random.random_range(0..self.places.len());
                let ping = json!({"type": "ping", "id": id + 1});
                crowd.ask(user, id + 1, due, &text_frame(&ping.to_string()))?;
            }
            if let Some(changes) = &mut self.changes {
                let message = (id, self.sent);
                changes.follow(crowd, &self.conversations, message, (user, place), due)?;
            }
        } else {
            crowd.send(user, &send_frame(&conversation.id, &body))?;
        }
        self.sent += 1;
        self.expected += conversation.readers as u64;
        Ok(())
    }

    /// Waits until everything is acknowledged and delivered, at most `SETTLED_WITHIN`. The next message is due at once
    /// then.
    pub(crate) fn settle(&mut self) -> anyhow::Result<()> {
        let begin = Instant::now();
        while (self.crowd.counts.delivered < self.expected
            || self.crowd.counts.acknowledged < self.sent
            || self.changes_missing() > 0)
            && begin.elapsed() < SETTLED_WITHIN
        {
            self.crowd.read(Duration::from_millis(5))?;
        }
        self.due = None;
        Ok(())
    }

    /// The number of requests without a reply, if people make changes.
    fn changes_missing(&self) -> usize {
        let replies = self.crowd.replies.as_ref();
        let replies = replies.filter(|_| self.changes.is_some());
        replies.map_or(0, Replies::missing)
    }

    /// Checks that every message was acknowledged and reached every participant once and in order.
    pub(crate) fn judge(&self, report: &mut Report) {
        let (sent, counts) = (self.sent, self.crowd.counts);
        let lost = counts.lost(self.expected);
        println!(
            "  {sent} messages, {} acknowledged; {} delivered, {lost} lost, {} duplicated, {} out of order, {} connections closed",
            counts.acknowledged, counts.delivered, counts.doubled, counts.gaps, counts.closed
        );
        report.must(
            lost + counts.doubled + counts.gaps + counts.closed == 0 && counts.acknowledged == sent,
            "messages or deliveries were lost, duplicated, out of order or not acknowledged"
                .to_owned(),
        );
    }

    /// Checks that no request was refused, if replies are timed, and that every change was acknowledged.
    pub(crate) fn judge_replies(&self, report: &mut Report) {
        if let Some(changes) = &self.changes {
            let missing = self.changes_missing();
            println!("  {} changes, {missing} without a reply", changes.made);
            report.must(missing == 0, format!("{missing} requests have no reply"));
        }
        if let Some(replies) = &self.crowd.replies {
            let first = replies.refusal.as_deref().unwrap_or_default();
            report.must(
                replies.refused == 0,
                format!(
                    "{} requests of ordinary users were refused, the first with: {first}",
                    replies.refused
                ),
            );
        }
    }
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
            anyhow::bail!("a conversation needs a participant")
        };
        let names: Vec<_> = others.iter().copied().map(name).collect();
        let mut create = json!({"type": "create", "kind": kind, "participants": names});
        if kind != "dm" {
            create["name"] = kind.into();
        }
        let id = clients[*maker].create_patiently(create)?;
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
