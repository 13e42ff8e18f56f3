//! Subscribers of the channel, in a thread. They follow the rules for clients: they keep the newest state of the message,
//! and ask for the changes of a gap.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    client::{Client, text_frame},
    server::Server,
    sockets::Sockets,
    store::celebrity::fan,
    worker::{Over, Worker, lock},
};

/// Emoji and the number of their users.
pub(super) type Reactions = BTreeMap<String, u64>;

const CHANGED: &[u8] = br#"{"type":"changed""#;
const REACTED: &[u8] = br#"{"type":"reacted""#;
const RESYNC: &[u8] = br#"{"type":"resync""#;
/// Beginning of the reply to a subscriber's only request in progress.
const REPLY: &[u8] = br#"{"id":3,"#;
/// Events kept in decoded form. All subscribers get the same ones at about the same time.
const RECENT_MAX: usize = 8;
/// Time between two looks for the lowest cursor.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Longest wait for an event.
const WAIT: Duration = Duration::from_millis(20);

/// Counts at one moment, of all subscribers together.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    /// `changed` events.
    pub(super) changed: u64,
    /// Bytes received.
    pub(super) bytes: u64,
    /// `reacted` events.
    pub(super) reacted: u64,
    /// Gaps, for which a subscriber asks.
    pub(super) gaps: u64,
    /// Errors in answer to that.
    pub(super) refused: u64,
    pub(super) closed: u64,
    /// The lowest cursor of a subscriber.
    pub(super) rev: u64,
}

/// The thread of the subscribers.
pub(super) struct Watchers {
    counts: Arc<Mutex<Counts>>,
    worker: Worker<Vec<Arc<Reactions>>>,
    pub(super) count: usize,
}

impl Watchers {
    /// Connects this many participants, subscribes them to the channel and reads what they get.
    pub(super) fn start(
        servers: &[Server],
        channel: &str,
        seq: u64,
        count: usize,
    ) -> anyhow::Result<Self> {
        let mut sockets = Sockets::new()?;
        for number in 0..count {
            let address = &servers[number % servers.len()].address;
            let mut client = Client::connect(address, &fan(number), number)?;
            let reply = client.ask(json!({"type": "subscribe", "conversation": channel}))?;
            let known = Known::new(reply["rev"].as_u64().unwrap_or_default());
            sockets.join(client.into_stream(), known)?;
        }
        let counts = Arc::default();
        let follow = Follow {
            message: Message {
                conversation: channel.to_owned(),
                seq,
            },
            recent: VecDeque::new(),
            counts: Counts::default(),
        };
        let told = Arc::clone(&counts);
        let worker = Worker::start(move |over| follow.run(sockets, over, &told));
        Ok(Self {
            counts,
            worker,
            count,
        })
    }

    pub(super) fn counts(&self) -> Counts {
        *lock(&self.counts)
    }

    /// Ends the thread. Returns the last state that each subscriber has.
    pub(super) fn finish(self) -> anyhow::Result<Vec<Arc<Reactions>>> {
        self.worker.stop()
    }
}

/// The message that gets reactions.
struct Message {
    conversation: String,
    seq: u64,
}

/// The state of the message that a subscriber knows.
struct Known {
    cursor: u64,
    /// The rev of the newest change of the message that the state has.
    rev: u64,
    reactions: Arc<Reactions>,
    /// Whether a request is in progress.
    asking: bool,
}

/// Changes, from an event or a reply.
#[derive(Deserialize)]
struct Changed {
    after: u64,
    rev: u64,
    items: Vec<Item>,
    #[serde(default)]
    more: bool,
    #[serde(default)]
    reset: bool,
}

#[derive(Deserialize)]
struct Item {
    seq: u64,
    rev: u64,
    reactions: Option<Arc<Reactions>>,
}

impl Known {
    fn new(cursor: u64) -> Self {
        Self {
            cursor,
            rev: 0,
            reactions: Arc::default(),
            asking: false,
        }
    }

    /// Applies an event. Returns false if there is a gap before it.
    fn event(&mut self, changed: &Changed, seq: u64) -> bool {
        if changed.after > self.cursor {
            return false;
        }
        for item in changed.items.iter().filter(|item| item.seq == seq) {
            if let Some(reactions) = &item.reactions
                && item.rev > self.rev
            {
                self.rev = item.rev;
                self.reactions = reactions.clone();
            }
        }
        self.cursor = self.cursor.max(changed.rev);
        true
    }

    /// The request for what comes after the cursor, unless one is in progress.
    fn ask(&mut self, message: &Message) -> Option<Value> {
        let asks = !std::mem::replace(&mut self.asking, true);
        asks.then(|| {
            json!({"type": "changes", "id": 3, "conversation": message.conversation, "after": self.cursor})
        })
    }

    /// Takes the reply to a request. Returns the next request.
    fn reply(&mut self, reply: Value, message: &Message) -> anyhow::Result<Option<Value>> {
        self.asking = false;
        if reply["type"] == "history" {
            self.cursor = reply["rev"].as_u64().context("`history` has no rev")?;
            let entry = &reply["messages"][0];
            self.rev = entry["rev"].as_u64().unwrap_or_default();
            self.reactions = reactions(entry)?.into();
            return Ok(None);
        }
        let changes: Changed = serde_json::from_value(reply)?;
        if changes.reset {
            self.asking = true;
            return Ok(Some(
                json!({"type": "history", "id": 3, "conversation": message.conversation,
                    "before": message.seq + 1, "limit": 1}),
            ));
        }
        let more = !self.event(&changes, message.seq) || changes.more;
        Ok(if more { self.ask(message) } else { None })
    }
}

/// The reactions of a message of a page.
pub(super) fn reactions(entry: &Value) -> anyhow::Result<Reactions> {
    match &entry["reactions"] {
        Value::Null => Ok(Reactions::new()),
        found => Ok(Reactions::deserialize(found)?),
    }
}

/// What all subscribers follow, and what they got.
struct Follow {
    message: Message,
    recent: VecDeque<(Vec<u8>, Arc<Changed>)>,
    counts: Counts,
}

impl Follow {
    fn run(
        mut self,
        mut sockets: Sockets<Known>,
        over: &Over,
        told: &Mutex<Counts>,
    ) -> anyhow::Result<Vec<Arc<Reactions>>> {
        let mut looked = Instant::now();
        while !over.is_over() {
            let mut wrong = None;
            let ended = sockets.read(WAIT, |_, number, known, text| {
                let request = self.take(known, text).unwrap_or_else(|error| {
                    wrong = Some(error.context(format!("subscriber {number}")));
                    None
                });
                request.map(|request| text_frame(&request.to_string()))
            })?;
            if let Some(error) = wrong {
                return Err(error);
            }
            self.counts.closed += ended.len() as u64;
            self.counts.bytes = sockets.bytes;
            if looked.elapsed() >= LOOK_EVERY {
                looked = Instant::now();
                let cursors = sockets.all.iter().map(|socket| socket.state.cursor);
                self.counts.rev = cursors.min().unwrap_or_default();
            }
            *lock(told) = self.counts;
        }
        let sockets = sockets.all.into_iter();
        Ok(sockets.map(|socket| socket.state.reactions).collect())
    }

    /// Handles a frame. Returns the request that it leads to.
    fn take(&mut self, known: &mut Known, text: &[u8]) -> anyhow::Result<Option<Value>> {
        if text.starts_with(CHANGED) {
            self.counts.changed += 1;
            let changed = self.decoded(text)?;
            if known.event(&changed, self.message.seq) {
                return Ok(None);
            }
            self.counts.gaps += 1;
            return Ok(known.ask(&self.message));
        }
        if text.starts_with(REPLY) {
            let reply: Value = serde_json::from_slice(text)?;
            if reply["type"] == "error" {
                self.counts.refused += 1;
                known.asking = false;
                return Ok(None);
            }
            return known.reply(reply, &self.message);
        }
        if text.starts_with(RESYNC) {
            self.counts.gaps += 1;
            return Ok(known.ask(&self.message));
        }
        self.counts.reacted += u64::from(text.starts_with(REACTED));
        Ok(None)
    }

    /// Decodes an event, or finds it among the last ones.
    fn decoded(&mut self, text: &[u8]) -> anyhow::Result<Arc<Changed>> {
        if let Some((_, changed)) = self.recent.iter().find(|(known, _)| known == text) {
            return Ok(changed.clone());
        }
        let decoded = serde_json::from_slice(text);
        let changed: Arc<Changed> =
            Arc::new(decoded.with_context(|| String::from_utf8_lossy(text).into_owned())?);
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back((text.to_vec(), changed.clone()));
        Ok(changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEQ: u64 = 7;

    fn changed(after: u64, rev: u64, thumbs: u64) -> Changed {
        let items = json!([{"seq": SEQ, "rev": rev, "reactions": {"👍": thumbs}}]);
        serde_json::from_value(json!({"after": after, "rev": rev, "items": items})).unwrap()
    }

    fn message() -> Message {
        Message {
            conversation: "c".to_owned(),
            seq: SEQ,
        }
    }

    #[test]
    fn an_older_event_changes_nothing() {
        let mut known = Known::new(0);
        assert!(known.event(&changed(0, 9, 5), SEQ));
        assert!(known.event(&changed(0, 4, 2), SEQ));
        assert_eq!((known.cursor, known.reactions["👍"]), (9, 5));
    }

    #[test]
    fn a_gap_is_asked_for_once_and_page_by_page() {
        let mut known = Known::new(0);
        assert!(!known.event(&changed(4, 9, 5), SEQ));
        assert_eq!(known.ask(&message()).unwrap()["after"], 0);
        assert!(known.ask(&message()).is_none());
        let items = json!([{"seq": SEQ, "rev": 3, "reactions": {"👍": 3}}]);
        let page = json!({"type": "changes", "after": 0, "rev": 3, "items": items, "more": true});
        let next = known.reply(page, &message()).unwrap().unwrap();
        assert_eq!(next["after"], 3);
        assert_eq!(known.reactions["👍"], 3);
    }

    #[test]
    fn after_a_reset_the_page_is_read_again() {
        let mut known = Known::new(2);
        known.asking = true;
        let reset = json!({"type": "changes", "after": 2, "rev": 9000, "items": [], "reset": true});
        let next = known.reply(reset, &message()).unwrap().unwrap();
        assert_eq!(
            (&next["type"], &next["before"]),
            (&json!("history"), &json!(8))
        );
        let entry = json!({"seq": SEQ, "rev": 8999, "reactions": {"👍": 11}});
        let page = json!({"type": "history", "rev": 9000, "messages": [entry]});
        assert!(known.reply(page, &message()).unwrap().is_none());
        assert_eq!(
            (known.cursor, known.rev, known.reactions["👍"]),
            (9000, 8999, 11)
        );
    }
}
