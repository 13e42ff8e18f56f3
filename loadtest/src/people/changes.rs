//! Changes of the people's own messages: edits, deletions and reactions.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

use super::Conversation;
use crate::{client::text_frame, crowd::Crowd, replies::Replies};

/// Sent messages that may still change. The oldest are forgotten.
const KNOWN_MAX: usize = 1_000;
/// Fewest known messages for a change. The oldest is deleted and newer ones change, so that no change comes too late.
const KNOWN_MIN: usize = 20;
/// Ids of requests for changes. Those of messages are lower.
const FIRST_ID: u32 = 1 << 31;
const EMOJI: [&str; 4] = ["👍", "❤️", "😂", "🎉"];

/// A message that was acknowledged.
struct Message {
    sender: usize,
    place: usize,
    seq: u64,
}

/// What people change, now and then.
pub(super) struct Changes {
    /// One message in this many is followed by a change.
    every: u64,
    /// Senders and conversations of messages without an acknowledgement, by request id.
    sent: HashMap<u32, (usize, usize)>,
    known: VecDeque<Message>,
    /// Its own, so that messages are the same with and without changes.
    random: StdRng,
    /// Changes that were requested.
    pub(super) made: u64,
}

impl Changes {
    pub(super) fn new(every: u64, seed: u64) -> Self {
        Self {
            every,
            sent: HashMap::new(),
            known: VecDeque::new(),
            random: StdRng::seed_from_u64(seed),
            made: 0,
        }
    }

    /// Notes the request `id`, which sends message `number`, and requests a change if it is time for one.
    pub(super) fn follow(
        &mut self,
        crowd: &mut Crowd,
        conversations: &[Conversation],
        (id, number): (u32, u64),
        (sender, place): (usize, usize),
        due: Duration,
    ) -> anyhow::Result<()> {
        self.sent.insert(id, (sender, place));
        let acknowledged = crowd.replies.as_mut().map(Replies::take_seqs);
        for (id, seq) in acknowledged.unwrap_or_default() {
            if let Some((sender, place)) = self.sent.remove(&id) {
                self.known.push_back(Message { sender, place, seq });
            }
        }
        while self.known.len() > KNOWN_MAX {
            self.known.pop_front();
        }
        if !number.is_multiple_of(self.every) || self.known.len() < KNOWN_MIN {
            return Ok(());
        }
        let (user, mut request) = self.next(conversations);
        let id = FIRST_ID + self.made as u32;
        request["id"] = id.into();
        self.made += 1;
        crowd.ask(user, id, due, &text_frame(&request.to_string()))
    }

    /// Returns a user and the change that they request.
    fn next(&mut self, conversations: &[Conversation]) -> (usize, Value) {
        if self.random.random_range(0..5) == 0
            && let Some(Message { sender, place, seq }) = self.known.pop_front()
        {
            let conversation = &conversations[place].id;
            let delete = json!({"type": "delete", "conversation": conversation, "seqs": [seq]});
            return (sender, delete);
        }
        let newer = self
            .random
            .random_range(self.known.len() / 2..self.known.len());
        let Message { sender, place, seq } = self.known[newer];
        let Conversation { id, writers, .. } = &conversations[place];
        if self.random.random() {
            let body = format!("edited as change {}", self.made);
            let edit = json!({"type": "edit", "conversation": id, "seq": seq, "body": body});
            return (sender, edit);
        }
        let user = writers[self.random.random_range(0..writers.len())];
        let emoji = EMOJI[self.random.random_range(0..EMOJI.len())];
        let react = json!({"type": "react", "conversation": id, "seq": seq, "emoji": emoji});
        (user, react)
    }
}
