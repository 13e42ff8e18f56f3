use std::collections::VecDeque;

use super::*;

/// A receiver with endless conversations of events, of which some are bad.
struct Receiver {
    endpoint: Endpoint,
    now: Instant,
    /// The events of each conversation. A bad one is answered with its status.
    events: HashMap<ConversationId, VecDeque<Option<u16>>>,
    requests: usize,
    accepted: usize,
    skipped: Vec<Skipped>,
}

impl Receiver {
    fn new(endpoint: Endpoint, conversations: u128, events: usize) -> Self {
        let all = (1..=conversations).map(|n| (id(n), VecDeque::from(vec![None; events])));
        let mut receiver = Self {
            endpoint,
            now: Instant::now(),
            events: all.collect(),
            requests: 0,
            accepted: 0,
            skipped: Vec::new(),
        };
        woken(&mut receiver.endpoint, 1..=conversations);
        receiver
    }

    fn left(&self) -> usize {
        self.events.values().map(VecDeque::len).sum()
    }

    fn step(&mut self) {
        let assignment = assigned_soon(&mut self.endpoint, &mut self.now);
        let (mut room, mut counts, mut status) = (assignment.events_max, Vec::new(), None);
        for conversation in &assignment.conversations {
            let events = &self.events[conversation];
            let count = events.len().min(room);
            if count > 0 || events.is_empty() {
                counts.push((*conversation, count));
            }
            room -= count;
            status = status.or(events.iter().take(count).find_map(|event| *event));
        }
        if !self.endpoint.loaded(assignment.request, &counts) {
            return;
        }
        self.requests += 1;
        let outcome = match status {
            None => Outcome::Accepted,
            Some(status @ 500..) => Outcome::Unavailable {
                status: Some(status),
                retry_after: None,
            },
            Some(status) => Outcome::Rejected(status),
        };
        let effects = self
            .endpoint
            .answered(assignment.request, outcome, self.now);
        for conversation in &effects.accepted {
            let count = counts.iter().find(|(id, _)| id == conversation).unwrap().1;
            self.take(*conversation, count);
            self.accepted += count;
        }
        for skipped in effects.skipped {
            self.take(skipped.conversation, 1);
            self.skipped.push(skipped);
        }
    }

    fn take(&mut self, conversation: ConversationId, count: usize) {
        let events = self.events.get_mut(&conversation).unwrap();
        events.drain(..count);
        if !events.is_empty() {
            assert!(self.endpoint.wake(conversation));
        }
    }
}

#[test]
fn a_rejected_batch_is_halved_down_to_the_bad_event() {
    for status in [400, 500] {
        let mut receiver = Receiver::new(endpoint(100, 1), 1_000, 1);
        receiver.events.get_mut(&id(530)).unwrap()[0] = Some(status);
        while receiver.accepted < 999 {
            receiver.step();
        }
        assert_eq!(receiver.left(), 1);
        // Ten without the bad event; with it some for each halving, and if it looked like an outage, a probe for each.
        assert!(
            receiver.requests < 60,
            "{status}: {} requests",
            receiver.requests
        );
        assert!(receiver.now < Instant::now() + Duration::from_secs(20));
    }
}

#[test]
fn a_bad_event_in_a_long_conversation_is_found() {
    for status in [400, 500] {
        let mut receiver = Receiver::new(endpoint(100, 1), 2, 1_000);
        let bad = &mut receiver.events.get_mut(&id(1)).unwrap()[450];
        *bad = Some(status);
        while receiver.accepted < 1_450 {
            receiver.step();
        }
        assert_eq!(receiver.events[&id(1)].len(), 550, "it is the next one");
        assert!(receiver.requests < 60, "{} requests", receiver.requests);
        // Others succeed meanwhile, so it is skipped after 75 hours, and the rest follows.
        let began = receiver.now;
        while receiver.left() > 0 {
            receiver.events.insert(id(2), VecDeque::from([None]));
            woken(&mut receiver.endpoint, [2]);
            receiver.step();
            if receiver.left() > 0 {
                receiver.step();
            }
        }
        assert_eq!(receiver.skipped.len(), 1);
        assert_eq!(receiver.skipped[0].status, Some(status));
        let passed = receiver.now - began;
        assert!(passed > 75 * HOUR && passed < 76 * HOUR, "{passed:?}");
    }
}

#[test]
fn many_bad_events_do_not_stop_the_others() {
    let mut receiver = Receiver::new(endpoint(50, 1), 500, 20);
    for number in (1..=500).step_by(50) {
        receiver.events.get_mut(&id(number)).unwrap()[7] = Some(422);
    }
    let began = receiver.now;
    while receiver.accepted < 490 * 20 + 10 * 7 {
        receiver.step();
    }
    assert_eq!(receiver.left(), 10 * 13);
    assert!(receiver.now - began < Duration::from_secs(60));
    assert!(receiver.requests < 900, "{} requests", receiver.requests);
}
