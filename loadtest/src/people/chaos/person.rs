//! One person of the simulation: what they write, what they receive, and how they come back.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, atomic::Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, bail};
use hdrhistogram::Histogram;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{
    changes::Changes,
    requests::{Requests, User},
    world::{RETRY_AFTER, World, name},
};
use crate::{
    client::{Client, PAGE},
    latency::latencies,
    verify::MessageKey,
    worker::lock,
};

/// Longest wait for a frame, so that a person notices the end.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Shortest wait for a frame.
const LOOK_BRIEFLY: Duration = Duration::from_millis(1);
/// With every request, the share of actions that are messages, and the share that are leaving.
const MESSAGES: f64 = 0.4;
const LEAVING: f64 = 0.005;
/// Longest time until a person who left comes back.
const AWAY_MAX: Duration = Duration::from_secs(5);

/// What one person has received and sent.
pub(super) struct Person {
    pub(super) name: String,
    /// By conversation and seq, the client id of each received message.
    pub(super) got: HashMap<String, BTreeMap<u64, String>>,
    /// Messages not yet acknowledged, by client id: the conversation, and when each was due.
    pub(super) waiting: HashMap<String, (String, Duration)>,
    pub(super) acknowledged: HashMap<String, MessageKey>,
    /// Microseconds from due to delivered.
    pub(super) delivery: Histogram<u64>,
    /// Microseconds from due to acknowledged.
    pub(super) acknowledgement: Histogram<u64>,
    /// Messages that were received again.
    pub(super) again: u64,
    pub(super) connections: u64,
    pub(super) changes: Changes,
    /// Other requests on this connection that have no reply yet.
    pub(super) missing: usize,
    pub(super) wrong: Vec<String>,
}

/// Requests in flight on one connection.
#[derive(Default)]
struct Asked {
    /// Client ids, by request id.
    sends: HashMap<u64, String>,
    /// Conversations of which a page of history is read, by request id.
    pages: HashMap<u64, String>,
    reading: HashSet<String>,
    /// When the connection was made. What was due before is no measure of delivery if the person was away on purpose.
    since: Duration,
    others: Requests,
}

impl Person {
    pub(super) fn new(number: usize, world: &World) -> anyhow::Result<Arc<Mutex<Self>>> {
        let users = world.cast.users;
        let mine = (0..world.cast.participants)
            .map(|n| world.groups[(number + users - n) % users].clone());
        let mine = mine.chain(world.groups.last().cloned());
        Ok(Arc::new(Mutex::new(Self {
            name: name(number),
            got: mine.map(|group| (group, BTreeMap::new())).collect(),
            waiting: HashMap::new(),
            acknowledged: HashMap::new(),
            delivery: latencies()?,
            acknowledgement: latencies()?,
            again: 0,
            connections: 0,
            changes: Changes::default(),
            missing: 0,
            wrong: Vec::new(),
        })))
    }

    /// The seq up to which no message is missing.
    pub(super) fn has(&self, conversation: &str) -> u64 {
        let Some(got) = self.got.get(conversation) else {
            return 0;
        };
        // Seqs begin with 1, so this one has none missing before it.
        if let Some((&last, _)) = got.last_key_value()
            && last == got.len() as u64
        {
            return last;
        }
        (1..)
            .zip(got.keys())
            .take_while(|(n, seq)| n == *seq)
            .count() as u64
    }

    /// Notes a received message. An event comes with the time, and with that of the connection: its latency counts from
    /// when the message was due, if that was after the connection.
    fn note(&mut self, message: &Value, times: Option<(Duration, Duration)>) {
        let (Some(conversation), Some(seq)) =
            (message["conversation"].as_str(), message["seq"].as_u64())
        else {
            self.wrong.push(format!("not a message: {message}"));
            return;
        };
        let client_id = message["client_id"].as_str().unwrap_or_default();
        let Some(got) = self.got.get_mut(conversation) else {
            self.wrong.push(format!("not for {}: {message}", self.name));
            return;
        };
        match got.insert(seq, client_id.to_owned()) {
            None => {
                let due = message["body"].as_str().and_then(|body| body.parse().ok());
                if let (Some((now, since)), Some(due)) = (times, due.map(Duration::from_micros))
                    && due >= since
                {
                    let late = now.saturating_sub(due);
                    self.delivery.saturating_record(late.as_micros() as u64);
                }
            }
            Some(before) if before == client_id => self.again += 1,
            Some(before) => self.wrong.push(format!(
                "{conversation} {seq} was {before}, now {client_id}"
            )),
        }
    }
}

/// Connects again and again, to one gateway after the other, until the run is over.
pub(super) fn live(world: &World, person: &Mutex<Person>, number: usize) {
    let seed = world.cast.seed.wrapping_mul(1_000_003) + number as u64;
    let mut life = Life {
        world,
        person,
        number,
        random: StdRng::seed_from_u64(seed),
        due: Duration::ZERO,
    };
    let mut attempt = number;
    while !world.over.load(Ordering::Relaxed) {
        let address = {
            let addresses = lock(&world.addresses);
            addresses[attempt % addresses.len()].clone()
        };
        attempt += 1;
        // The connection broke or the client was told to reconnect. Unanswered messages are repeated.
        let away = life.connected(&address).unwrap_or(RETRY_AFTER);
        lock(person).missing = 0;
        thread::sleep(away);
    }
}

/// A person's life over all connections.
struct Life<'a> {
    world: &'a World,
    person: &'a Mutex<Person>,
    number: usize,
    random: StdRng,
    /// When the next action is due.
    due: Duration,
}

impl Life<'_> {
    /// Lives on one connection. Returns the time until the next one, or an error if the connection broke.
    fn connected(&mut self, address: &str) -> anyhow::Result<Duration> {
        let (world, person) = (self.world, self.person);
        let (token, cursors, mine) = {
            let person = lock(person);
            let mut mine: Vec<String> = person.got.keys().cloned().collect();
            mine.sort_unstable();
            let cursors: HashMap<String, [u64; 2]> = mine
                .iter()
                .map(|c| (c.clone(), [person.has(c), 0]))
                .collect();
            (crate::server::token(&person.name)?, cursors, mine)
        };
        let mut client = Client::open(address, "/v1/ws", 0)?;
        client.ask(json!({"type": "connect", "token": token, "cursors": cursors}))?;
        let mut asked = Asked::default();
        if world.cast.every_request {
            asked.since = world.epoch.elapsed();
        }
        {
            let mut person = lock(person);
            person.connections += 1;
            for (client_id, (conversation, at)) in &person.waiting {
                asked.send(&mut client, client_id, conversation, *at, true)?;
            }
        }
        while !world.over.load(Ordering::Relaxed) {
            let (now, writing) = (world.epoch.elapsed(), world.writing.load(Ordering::Relaxed));
            if writing && now >= self.due {
                let action = self.random.random::<f64>();
                if !world.cast.every_request || action < MESSAGES {
                    self.write(&mut client, &mut asked, &mine)?;
                } else if action < 1.0 - LEAVING {
                    self.request(&mut client, &mut asked, &mine)?;
                } else {
                    let away = AWAY_MAX.mul_f64(self.random.random());
                    self.due = now + away;
                    return Ok(away);
                }
                let rate = world.cast.rate;
                self.due +=
                    Duration::from_secs_f64(-(1.0 - self.random.random::<f64>()).ln() / rate);
                continue;
            }
            let wait = if writing { self.due - now } else { LOOK_EVERY };
            let Some(frame) = client.next_within(wait.clamp(LOOK_BRIEFLY, LOOK_EVERY))? else {
                continue;
            };
            if frame["type"] == "reconnect" {
                bail!("the gateway asked the client to reconnect");
            }
            asked.heard(&mut client, &mut lock(person), &frame, world)?;
        }
        Ok(Duration::ZERO)
    }

    /// Sends a message to one of the conversations.
    fn write(
        &mut self,
        client: &mut Client,
        asked: &mut Asked,
        mine: &[String],
    ) -> anyhow::Result<()> {
        let client_id = Uuid::new_v4().to_string();
        let conversation = mine[self.random.random_range(0..mine.len())].clone();
        // The message is noted first, because a failed send may have arrived.
        lock(self.person)
            .waiting
            .insert(client_id.clone(), (conversation.clone(), self.due));
        asked.send(client, &client_id, &conversation, self.due, false)
    }

    /// Makes a request other than a message.
    fn request(
        &mut self,
        client: &mut Client,
        asked: &mut Asked,
        mine: &[String],
    ) -> anyhow::Result<()> {
        let mut person = lock(self.person);
        let has: Vec<_> = mine.iter().map(|c| (c.clone(), person.has(c))).collect();
        let mut user = User {
            number: self.number,
            has: &has,
            changes: &mut person.changes,
        };
        let requested = asked
            .others
            .make(client, &mut user, self.world, &mut self.random);
        person.missing = asked.others.missing();
        requested
    }
}

impl Asked {
    fn send(
        &mut self,
        client: &mut Client,
        client_id: &str,
        conversation: &str,
        due: Duration,
        retry: bool,
    ) -> anyhow::Result<()> {
        let id = client.begin(
            json!({"type": "send", "conversation": conversation, "client_id": client_id,
            "body": due.as_micros().to_string(), "retry": retry}),
        )?;
        self.sends.insert(id.into(), client_id.to_owned());
        Ok(())
    }

    fn read(&mut self, client: &mut Client, conversation: &str, after: u64) -> anyhow::Result<()> {
        if self.reading.insert(conversation.to_owned()) {
            let id = client.begin(json!({"type": "history", "conversation": conversation, "after": after, "limit": PAGE}))?;
            self.pages.insert(id.into(), conversation.to_owned());
        }
        Ok(())
    }

    fn heard(
        &mut self,
        client: &mut Client,
        person: &mut Person,
        frame: &Value,
        world: &World,
    ) -> anyhow::Result<()> {
        let (now, id) = (world.epoch.elapsed(), id(frame));
        if let Some(reply) = self.others.heard(id, frame, &mut person.changes) {
            person.missing = self.others.missing();
            person.wrong.extend(reply.err());
            return Ok(());
        }
        if world.is_aside(frame) {
            return Ok(());
        }
        self.others.learn(frame);
        let mut behind = None;
        match frame["type"].as_str().unwrap_or_default() {
            "message" => {
                person.note(frame, Some((now, self.since)));
                behind = frame["conversation"].as_str().zip(frame["seq"].as_u64());
            }
            "resync" => behind = frame["conversation"].as_str().zip(frame["head"].as_u64()),
            "sent" => self.acknowledged(person, frame, now)?,
            "error" if frame["code"] == "unavailable" => self.ask_again(client, person, id)?,
            "error" => person.wrong.push(frame.to_string()),
            "history" => self.page(client, person, frame)?,
            _ => {}
        }
        if let Some((conversation, upto)) = behind {
            let has = person.has(conversation);
            if has < upto {
                self.read(client, conversation, has)?;
            }
        }
        Ok(())
    }

    fn acknowledged(
        &mut self,
        person: &mut Person,
        frame: &Value,
        now: Duration,
    ) -> anyhow::Result<()> {
        let client_id = self
            .sends
            .remove(&id(frame))
            .context("a reply without a request")?;
        let seq = frame["seq"].as_u64().context("`sent` has no seq")?;
        if let Some((conversation, due)) = person.waiting.remove(&client_id) {
            let late = now.saturating_sub(due);
            person
                .acknowledgement
                .saturating_record(late.as_micros() as u64);
            self.others.sent((conversation.clone(), seq));
            person.acknowledged.insert(client_id, (conversation, seq));
        }
        Ok(())
    }

    /// Repeats the request with this id.
    fn ask_again(&mut self, client: &mut Client, person: &Person, id: u64) -> anyhow::Result<()> {
        if let Some(conversation) = self.pages.remove(&id) {
            self.reading.remove(&conversation);
            let has = person.has(&conversation);
            self.read(client, &conversation, has)?;
        } else if let Some(client_id) = self.sends.remove(&id)
            && let Some((conversation, due)) = person.waiting.get(&client_id).cloned()
        {
            self.send(client, &client_id, &conversation, due, true)?;
        }
        Ok(())
    }

    /// Notes a page of history, and reads the next one if there is one.
    fn page(
        &mut self,
        client: &mut Client,
        person: &mut Person,
        frame: &Value,
    ) -> anyhow::Result<()> {
        let conversation = self
            .pages
            .remove(&id(frame))
            .context("a reply without a request")?;
        self.reading.remove(&conversation);
        for message in frame["messages"].as_array().into_iter().flatten() {
            let mut message = message.clone();
            message["conversation"] = conversation.clone().into();
            person.note(&message, None);
        }
        let head = frame["head"].as_u64().context("`history` has no head")?;
        let has = person.has(&conversation);
        if has < head {
            self.read(client, &conversation, has)?;
        }
        Ok(())
    }
}

/// The id of the request that a frame answers.
fn id(frame: &Value) -> u64 {
    frame["id"].as_u64().unwrap_or_default()
}
