//! What arrived at a receiver, and what is wrong with it. This file is pure: it knows no socket and no clock.

use std::{
    borrow::Cow,
    collections::{HashMap, hash_map::Entry},
};

use anyhow::Context as _;
use hdrhistogram::Histogram;
use serde::Deserialize;
use uuid::Uuid;

use crate::{latency::latencies, senders::Acknowledged};

/// The types of events that the conversations of this scenario have.
const TYPES: [&str; 2] = ["conversation.created", "message.created"];

/// The body of a request: an event, or a batch of events.
#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
    #[serde(borrow)]
    data: Content<'a>,
}

/// The data of an event, or of a batch.
#[derive(Deserialize)]
struct Content<'a> {
    conversation: Option<Uuid>,
    seq: Option<u64>,
    /// Milliseconds since 1970.
    at: Option<u64>,
    #[serde(borrow, default)]
    events: Vec<Inner<'a>>,
}

/// An event of a batch.
#[derive(Deserialize)]
struct Inner<'a> {
    id: Uuid,
    #[serde(borrow)]
    r#type: Cow<'a, str>,
    #[serde(borrow)]
    data: Content<'a>,
}

/// The first arrivals of one conversation.
#[derive(Default)]
struct Arrived {
    highest: u64,
    /// The id of the event of each seq.
    ids: HashMap<u64, Uuid>,
}

/// Events that did not arrive as they should have.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Faults {
    /// Seqs of the logs without an event.
    pub(super) lost: u64,
    /// Acknowledged messages whose event has another id.
    pub(super) misplaced: u64,
}

/// Everything that arrived so far.
pub(super) struct Arrivals {
    conversations: HashMap<Uuid, Arrived>,
    /// From the time of an event to its first arrival, in microseconds.
    pub(super) ages: Histogram<u64>,
    pub(super) requests: u64,
    /// Events that arrived for the first time.
    pub(super) first: u64,
    /// Events that had arrived before.
    pub(super) repeated: u64,
    /// Events that arrived for the first time after a later event of their conversation.
    pub(super) out_of_order: u64,
    /// The first request that is not as documented.
    pub(super) wrong: Option<String>,
}

impl Arrivals {
    pub(super) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            conversations: HashMap::new(),
            ages: latencies()?,
            requests: 0,
            first: 0,
            repeated: 0,
            out_of_order: 0,
            wrong: None,
        })
    }

    /// Notes a request that arrived at `now`, in milliseconds since 1970. `id` is its header `webhook-id`.
    pub(super) fn note(&mut self, id: &str, body: &[u8], now: u64) {
        self.requests += 1;
        if let Err(error) = self.note_all(id, body, now) {
            let body = String::from_utf8_lossy(body);
            self.wrong
                .get_or_insert_with(|| format!("{error:#}: {id} {body}"));
        }
    }

    fn note_all(&mut self, id: &str, body: &[u8], now: u64) -> anyhow::Result<()> {
        let Body { r#type, data } = serde_json::from_slice(body)?;
        if r#type != "batch" {
            return self.note_event(id.parse()?, &r#type, &data, now);
        }
        anyhow::ensure!(!data.events.is_empty(), "a batch has no events");
        let mut events = data.events.iter();
        events.try_for_each(|event| self.note_event(event.id, &event.r#type, &event.data, now))
    }

    fn note_event(
        &mut self,
        id: Uuid,
        of_type: &str,
        data: &Content<'_>,
        now: u64,
    ) -> anyhow::Result<()> {
        anyhow::ensure!(TYPES.contains(&of_type), "the type is {of_type}");
        let conversation = data.conversation.context("an event has no conversation")?;
        let seq = data.seq.context("an event has no seq")?;
        let at = data.at.context("an event has no time")?;
        let arrived = self.conversations.entry(conversation).or_default();
        match arrived.ids.entry(seq) {
            Entry::Occupied(before) => {
                anyhow::ensure!(*before.get() == id, "seq {seq} had {} before", before.get());
                self.repeated += 1;
                return Ok(());
            }
            Entry::Vacant(place) => drop(place.insert(id)),
        }
        self.first += 1;
        if seq < arrived.highest {
            self.out_of_order += 1;
        }
        arrived.highest = arrived.highest.max(seq);
        let age = now.saturating_sub(at) * 1_000;
        self.ages.saturating_record(age);
        Ok(())
    }

    /// Forgets the ages so far.
    pub(super) fn restart_ages(&mut self) {
        self.ages.reset();
    }

    /// Compares what arrived with what was acknowledged. Logs begin at 1 and have no gaps, so every seq up to the highest
    /// known one must have arrived, whether or not its sender saw the acknowledgement.
    pub(super) fn faults(&self, acknowledged: &[Acknowledged]) -> Faults {
        let mut heads: HashMap<Uuid, u64> = HashMap::new();
        let mut misplaced = 0;
        for message in acknowledged {
            let head = heads.entry(message.conversation).or_default();
            *head = message.seq.max(*head);
            let arrived = self.conversations.get(&message.conversation);
            let id = arrived.and_then(|arrived| arrived.ids.get(&message.seq));
            misplaced += u64::from(id.is_some_and(|id| *id != message.id));
        }
        for (conversation, arrived) in &self.conversations {
            let head = heads.entry(*conversation).or_default();
            *head = arrived.highest.max(*head);
        }
        let got: u64 = self
            .conversations
            .values()
            .map(|arrived| arrived.ids.len() as u64)
            .sum();
        Faults {
            lost: heads.values().sum::<u64>().saturating_sub(got),
            misplaced,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const CONVERSATION: Uuid = Uuid::from_u128(7);

    fn id(seq: u64) -> Uuid {
        Uuid::from_u128(u128::from(100 + seq))
    }

    fn event(seq: u64) -> Value {
        json!({"id": id(seq), "type": "message.created", "timestamp": "2026-01-01T00:00:00.000Z",
            "data": {"conversation": CONVERSATION, "seq": seq, "at": 1_000, "body": "a \"quote\"", "kind": "text"}})
    }

    fn acknowledged(seqs: &[u64]) -> Vec<Acknowledged> {
        let of = |seq: &u64| Acknowledged {
            conversation: CONVERSATION,
            seq: *seq,
            id: id(*seq),
            client_id: Uuid::nil(),
        };
        seqs.iter().map(of).collect()
    }

    /// Notes a batch for each list of seqs, or the event itself if there is one.
    fn arrivals(requests: &[&[u64]]) -> Arrivals {
        let mut arrivals = Arrivals::new().unwrap();
        for request in requests {
            let (name, body) = match request {
                [seq] => (id(*seq).to_string(), event(*seq)),
                seqs => {
                    let events: Vec<_> = seqs.iter().map(|seq| event(*seq)).collect();
                    let body =
                        json!({"type": "batch", "timestamp": "", "data": {"events": events}});
                    ("batch:0".to_owned(), body)
                }
            };
            arrivals.note(&name, body.to_string().as_bytes(), 3_500);
        }
        assert_eq!(arrivals.wrong, None);
        arrivals
    }

    #[test]
    fn what_arrives_in_order_has_no_faults() {
        let arrivals = arrivals(&[&[1], &[2, 3], &[4]]);
        assert_eq!((arrivals.requests, arrivals.first), (3, 4));
        assert_eq!((arrivals.repeated, arrivals.out_of_order), (0, 0));
        assert_eq!(
            arrivals.faults(&acknowledged(&[2, 3, 4])),
            Faults::default()
        );
        assert!((2_499_000..=2_501_000).contains(&arrivals.ages.max()));
    }

    #[test]
    fn a_repetition_is_neither_out_of_order_nor_an_age() {
        let arrivals = arrivals(&[&[1], &[2, 3], &[2], &[3, 4]]);
        assert_eq!((arrivals.repeated, arrivals.out_of_order), (2, 0));
        assert_eq!(arrivals.ages.len(), 4);
    }

    #[test]
    fn a_late_first_arrival_is_out_of_order() {
        let arrivals = arrivals(&[&[1], &[3], &[2]]);
        assert_eq!((arrivals.repeated, arrivals.out_of_order), (0, 1));
        assert_eq!(arrivals.faults(&acknowledged(&[2, 3])), Faults::default());
    }

    #[test]
    fn a_missing_event_is_lost() {
        let lost =
            |requests: &[&[u64]], seqs: &[u64]| arrivals(requests).faults(&acknowledged(seqs)).lost;
        assert_eq!(lost(&[&[1], &[2]], &[2, 3]), 1, "the newest");
        assert_eq!(lost(&[&[1], &[2, 4]], &[2, 3, 4]), 1, "one in between");
        assert_eq!(
            lost(&[&[1], &[4]], &[]),
            2,
            "those that nobody saw acknowledged"
        );
        assert_eq!(lost(&[], &[2]), 2, "all of a conversation");
    }

    #[test]
    fn another_id_is_misplaced_or_wrong() {
        let mut arrivals = arrivals(&[&[1], &[2]]);
        let mut other = acknowledged(&[2]);
        other[0].id = id(9);
        assert_eq!(arrivals.faults(&other).misplaced, 1);
        arrivals.note(&id(9).to_string(), event(2).to_string().as_bytes(), 0);
        assert!(arrivals.wrong.is_some());
    }

    #[test]
    fn a_request_that_is_not_an_event_is_wrong() {
        for body in [
            "",
            "{}",
            r#"{"type":"batch","data":{"events":[]}}"#,
            r#"{"type":"x","data":{}}"#,
        ] {
            let mut arrivals = Arrivals::new().unwrap();
            arrivals.note(&id(1).to_string(), body.as_bytes(), 0);
            assert!(arrivals.wrong.is_some(), "{body}");
        }
    }
}
