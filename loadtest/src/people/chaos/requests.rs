//! The requests of one connection besides the messages that are checked: reading, changes, marks, presence, membership
//! and conversations. Each must get its reply, unless the outcome is unknown.

use std::collections::{HashMap, VecDeque};

use rand::{RngExt as _, rngs::StdRng};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{
    changes::{Change, Changes},
    world::{World, name},
};
use crate::{client::Client, server::token, verify::MessageKey};

/// Messages that a person remembers in order to change them.
const REMEMBERED_MAX: usize = 30;
/// Revs before the newest one from which changes are read.
const REVS_BACK: u64 = 20;
/// Users whose presence a person watches.
const WATCHED: usize = 5;
/// Requests to one's own group before a new one is created.
const GROUP_STEPS: usize = 40;
const EMOJI: [&str; 4] = ["👍", "❤️", "😂", "🎉"];

/// A request: itself, the type of its reply, if it gets one, and what the reply means.
type Request = (Value, Option<&'static str>, Meaning);

/// What a reply means for the person.
enum Meaning {
    Nothing,
    Changed(MessageKey, Change),
    /// The read mark of a conversation is at least here.
    Read(String, u64),
    /// The person is in this public conversation, or left it.
    Lobby(Option<String>),
    /// A step of one's own group succeeded.
    Step,
}

/// The user who makes the requests.
pub(super) struct User<'a> {
    pub(super) number: usize,
    /// The user's conversations that are checked, each with the seq up to which the user has everything.
    pub(super) has: &'a [(String, u64)],
    pub(super) changes: &'a mut Changes,
}

/// The requests of one connection.
#[derive(Default)]
pub(super) struct Requests {
    /// Requests without a reply, by id.
    asked: HashMap<u64, (&'static str, Meaning)>,
    /// Newest messages of this user that were acknowledged on this connection.
    own: VecDeque<MessageKey>,
    /// Newest texts of anyone.
    seen: VecDeque<MessageKey>,
    /// The newest rev that is known of each conversation.
    revs: HashMap<String, u64>,
    watched: Vec<String>,
    /// The public conversation that the user joined.
    lobby: Option<String>,
    /// The user's own group, whose id the user chose, the participant who comes and goes, and the number of steps done.
    group: Option<(Uuid, String, usize)>,
    /// Whether a request about membership is in progress. The next one depends on its outcome.
    moving: bool,
}

impl Requests {
    /// The number of requests without a reply.
    pub(super) fn missing(&self) -> usize {
        self.asked.len()
    }

    /// Remembers a message that this user sent.
    pub(super) fn sent(&mut self, place: MessageKey) {
        remember(&mut self.own, place);
    }

    /// Learns from an event.
    pub(super) fn learn(&mut self, event: &Value) {
        let Some(conversation) = event["conversation"].as_str() else {
            return;
        };
        if let Some(rev) = event["rev"].as_u64() {
            let known = self.revs.entry(conversation.to_owned()).or_default();
            *known = rev.max(*known);
        }
        if let Some(seq) = event["seq"].as_u64().filter(|_| event["kind"] == "text") {
            remember(&mut self.seen, (conversation.to_owned(), seq));
        }
    }

    /// Makes a random request.
    pub(super) fn make(
        &mut self,
        client: &mut Client,
        user: &mut User,
        world: &World,
        random: &mut StdRng,
    ) -> anyhow::Result<()> {
        let request = match random.random_range(0..20) {
            0..6 => Some(self.reading(user, random)?),
            6..12 => self.change(user, random),
            12..16 => Some(Self::mark(user, world, random)),
            16 => Some(self.presence(world, random)),
            _ if self.moving => None,
            17 | 18 => Some(self.visit(world, random)),
            _ => Some(self.own_group(user, world, random)),
        };
        if let Some((request, reply, meaning)) = request {
            let id = client.begin(request)?;
            if let Some(reply) = reply {
                self.asked.insert(id.into(), (reply, meaning));
            }
        }
        Ok(())
    }

    /// Notes a frame. `None` if it is not a reply to one of these requests; an error text if it is a wrong one.
    pub(super) fn heard(
        &mut self,
        id: u64,
        frame: &Value,
        changes: &mut Changes,
    ) -> Option<Result<(), String>> {
        let (reply, meaning) = self.asked.remove(&id)?;
        let unknown = frame["code"] == "unavailable";
        if frame["type"] != reply && !unknown {
            return Some(Err(format!("{frame} instead of `{reply}`")));
        }
        match meaning {
            Meaning::Lobby(_) if unknown => (self.moving, self.lobby) = (false, None),
            Meaning::Step if unknown => (self.moving, self.group) = (false, None),
            Meaning::Nothing => {}
            _ if unknown => {}
            Meaning::Changed(place, change) => changes.acknowledge(place, change),
            Meaning::Read(conversation, seq) => {
                let known = changes.read.entry(conversation).or_default();
                *known = seq.max(*known);
            }
            Meaning::Lobby(lobby) => {
                changes.stored += 1;
                (self.moving, self.lobby) = (false, lobby);
            }
            Meaning::Step => {
                changes.stored += 1;
                self.moving = false;
                self.group = self.group.take().filter(|group| group.2 < GROUP_STEPS);
            }
        }
        Some(Ok(()))
    }

    fn reading(&self, user: &User, random: &mut StdRng) -> anyhow::Result<Request> {
        let (conversation, has) = one(user.has, random);
        let (request, reply) = match random.random_range(0..9) {
            0 => (
                json!({"type": "history", "conversation": conversation, "limit": 20}),
                "history",
            ),
            1 => (
                json!({"type": "history", "conversation": conversation, "around": has / 2 + 1}),
                "history",
            ),
            2 => {
                let rev = self.revs.get(conversation).copied().unwrap_or_default();
                let after = rev.saturating_sub(REVS_BACK);
                (
                    json!({"type": "changes", "conversation": conversation, "after": after}),
                    "changes",
                )
            }
            3 => (json!({"type": "inbox", "limit": 20}), "inbox"),
            4 => (
                json!({"type": "conversation", "conversation": conversation}),
                "conversation",
            ),
            5 => (
                json!({"type": "participants", "conversation": conversation}),
                "participants",
            ),
            6 => (json!({"type": "public", "limit": 20}), "public"),
            7 => (
                json!({"type": "refresh", "token": token(&name(user.number))?}),
                "refreshed",
            ),
            _ => match self.seen.back() {
                Some((conversation, seq)) => (
                    json!({"type": "reactions", "conversation": conversation, "seq": seq}),
                    "reactions",
                ),
                None => (json!({"type": "ping"}), "pong"),
            },
        };
        Ok((request, Some(reply), Meaning::Nothing))
    }

    /// A change of a message. Deleted messages cannot get reactions, so odd seqs are deleted and even ones get reactions.
    fn change(&self, user: &mut User, random: &mut StdRng) -> Option<Request> {
        let kind = random.random_range(0..4);
        let known = if kind < 2 { &self.seen } else { &self.own };
        let place = known
            .get(random.random_range(0..known.len().max(1)))?
            .clone();
        let (conversation, seq) = &place;
        let change = match (kind, seq % 2) {
            (0 | 1, 0) => {
                let emoji = EMOJI[random.random_range(0..EMOJI.len())];
                if user.changes.has(&place, emoji) {
                    Change::Unreact(emoji)
                } else {
                    Change::React(emoji)
                }
            }
            (3, 1) => Change::Delete,
            (2, _) => Change::Edit(format!("edited to {}", random.random::<u32>())),
            _ => return None,
        };
        if !user.changes.begin(&place) {
            return None;
        }
        let request = match &change {
            Change::Edit(body) => {
                json!({"type": "edit", "conversation": conversation, "seq": seq, "body": body})
            }
            Change::Delete => {
                json!({"type": "delete", "conversation": conversation, "seqs": [seq]})
            }
            Change::React(emoji) => {
                json!({"type": "react", "conversation": conversation, "seq": seq, "emoji": emoji})
            }
            Change::Unreact(emoji) => {
                json!({"type": "unreact", "conversation": conversation, "seq": seq, "emoji": emoji})
            }
        };
        Some((request, Some("ok"), Meaning::Changed(place, change)))
    }

    fn mark(user: &User, world: &World, random: &mut StdRng) -> Request {
        let (conversation, has) = one(user.has, random);
        let of = |kind: &str| json!({"type": kind, "conversation": conversation, "seq": has});
        match random.random_range(0..4) {
            0 if world.groups.last() != Some(conversation) => {
                (of("typing"), None, Meaning::Nothing)
            }
            _ if *has == 0 => (json!({"type": "ping"}), Some("pong"), Meaning::Nothing),
            1 => (of("delivered"), Some("ok"), Meaning::Nothing),
            _ => (
                of("read"),
                Some("ok"),
                Meaning::Read(conversation.clone(), *has),
            ),
        }
    }

    /// Watches some users, or ends that.
    fn presence(&mut self, world: &World, random: &mut StdRng) -> Request {
        let (kind, users) = if self.watched.is_empty() {
            self.watched = (0..WATCHED).map(|_| anyone(world, random)).collect();
            ("watch", self.watched.clone())
        } else {
            ("unwatch", std::mem::take(&mut self.watched))
        };
        let request = json!({"type": kind, "users": users});
        (request, Some("presence"), Meaning::Nothing)
    }

    /// Joins a public conversation, writes there or leaves it, or subscribes to the public channel without joining.
    fn visit(&mut self, world: &World, random: &mut StdRng) -> Request {
        let channel = world.lobbies.last();
        match (random.random_range(0..4), &self.lobby) {
            (0, None) => {
                let request = json!({"type": "subscribe", "conversation": channel});
                (request, Some("ok"), Meaning::Nothing)
            }
            (1, None) => {
                let request = json!({"type": "unsubscribe", "conversation": channel});
                (request, Some("ok"), Meaning::Nothing)
            }
            (_, None) => {
                self.moving = true;
                let lobby = &world.lobbies[random.random_range(0..world.lobbies.len())];
                let request = json!({"type": "join", "conversation": lobby});
                (request, Some("ok"), Meaning::Lobby(Some(lobby.clone())))
            }
            (0..3, Some(lobby)) => {
                self.moving = true;
                let request = json!({"type": "send", "conversation": lobby, "client_id": Uuid::new_v4(), "body": "hello"});
                (request, Some("sent"), Meaning::Lobby(Some(lobby.clone())))
            }
            (_, Some(lobby)) => {
                self.moving = true;
                let request = json!({"type": "leave", "conversation": lobby});
                (request, Some("ok"), Meaning::Lobby(None))
            }
        }
    }

    /// Creates a direct chat, which usually exists, or the user's own group, or takes the next step in that group: another
    /// user is added, becomes an admin, and is removed, and the group gets a new name.
    fn own_group(&mut self, user: &User, world: &World, random: &mut StdRng) -> Request {
        if random.random_range(0..10) == 0 {
            let request =
                json!({"type": "create", "kind": "dm", "participants": [anyone(world, random)]});
            return (request, Some("created"), Meaning::Nothing);
        }
        self.moving = true;
        let Some((group, guest, step)) = &mut self.group else {
            let id = Uuid::new_v4();
            self.group = Some((id, String::new(), 0));
            let request =
                json!({"type": "create", "kind": "group", "conversation": id, "name": "own"});
            return (request, Some("created"), Meaning::Step);
        };
        *step += 1;
        let request = match *step % 4 {
            1 => {
                *guest = another(world, user, random);
                json!({"type": "add", "conversation": group, "user": guest})
            }
            2 => json!({"type": "set_role", "conversation": group, "user": guest, "role": "admin"}),
            3 => json!({"type": "remove", "conversation": group, "user": guest}),
            _ => json!({"type": "update", "conversation": group, "name": format!("own {step}")}),
        };
        (request, Some("ok"), Meaning::Step)
    }
}

fn remember(known: &mut VecDeque<MessageKey>, place: MessageKey) {
    known.push_back(place);
    if known.len() > REMEMBERED_MAX {
        known.pop_front();
    }
}

fn one<'a>(has: &'a [(String, u64)], random: &mut StdRng) -> &'a (String, u64) {
    &has[random.random_range(0..has.len())]
}

/// A random user, who may be the person.
fn anyone(world: &World, random: &mut StdRng) -> String {
    name(random.random_range(0..world.cast.users))
}

/// A random user, but not this one.
fn another(world: &World, user: &User, random: &mut StdRng) -> String {
    name((user.number + random.random_range(1..world.cast.users)) % world.cast.users)
}
