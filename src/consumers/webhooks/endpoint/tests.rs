mod batches;

use super::*;
use crate::model::limits::WEBHOOK_CONVERSATIONS_MAX;

const DOWN: Outcome = Outcome::Unavailable {
    status: Some(503),
    retry_after: None,
};
const HOUR: Duration = Duration::from_secs(3_600);

fn id(number: u128) -> ConversationId {
    ConversationId(uuid::Uuid::from_u128(number))
}

fn endpoint(batch: usize, connections: usize) -> Endpoint {
    Endpoint::new(Limits { batch, connections }, 7)
}

fn woken(endpoint: &mut Endpoint, ids: impl IntoIterator<Item = u128>) {
    for number in ids {
        assert!(endpoint.wake(id(number)));
    }
}

fn sent(next: Next) -> Assignment {
    match next {
        Next::Send(assignment) => assignment,
        other => panic!("expected a request, got {other:?}"),
    }
}

/// Sends one event of each assigned conversation.
fn send(endpoint: &mut Endpoint, now: Instant) -> Assignment {
    let assignment = sent(endpoint.next(now));
    let events: Vec<_> = assignment.conversations.iter().map(|id| (*id, 1)).collect();
    assert!(endpoint.loaded(assignment.request, &events));
    assignment
}

fn answer(endpoint: &mut Endpoint, now: Instant, outcome: Outcome) -> (Assignment, Effects) {
    let assignment = send(endpoint, now);
    let effects = endpoint.answered(assignment.request, outcome, now);
    (assignment, effects)
}

/// Waits until something is to be sent.
fn assigned_soon(endpoint: &mut Endpoint, now: &mut Instant) -> Assignment {
    match endpoint.next(*now) {
        Next::WaitUntil(until) => {
            assert!(until > *now);
            *now = until;
            sent(endpoint.next(*now))
        }
        next => sent(next),
    }
}

fn send_soon(endpoint: &mut Endpoint, now: &mut Instant) -> Assignment {
    let assignment = assigned_soon(endpoint, now);
    let events: Vec<_> = assignment.conversations.iter().map(|id| (*id, 1)).collect();
    assert!(endpoint.loaded(assignment.request, &events));
    assignment
}

fn answer_soon(
    endpoint: &mut Endpoint,
    now: &mut Instant,
    outcome: Outcome,
) -> (Assignment, Effects) {
    let assignment = send_soon(endpoint, now);
    let effects = endpoint.answered(assignment.request, outcome, *now);
    (assignment, effects)
}

#[test]
fn events_that_come_alone_are_sent_alone() {
    let (mut endpoint, now) = (endpoint(100, 4), Instant::now());
    assert_eq!(endpoint.next(now), Next::Idle);
    woken(&mut endpoint, 1..=4);
    for number in 1..=4 {
        let assignment = send(&mut endpoint, now);
        assert_eq!(assignment.conversations, [id(number)]);
        assert!(!assignment.probe);
    }
    woken(&mut endpoint, 5..=5);
    assert_eq!(endpoint.next(now), Next::Idle, "all connections are in use");
}

#[test]
fn what_waits_is_sent_in_batches() {
    let (mut endpoint, now) = (endpoint(100, 2), Instant::now());
    woken(&mut endpoint, 1..=5);
    let first = send(&mut endpoint, now);
    assert_eq!(first.conversations, [id(1), id(2), id(3)]);
    assert_eq!((first.events_max, first.bytes_max), (100, 256 << 10));
    assert_eq!(send(&mut endpoint, now).conversations, [id(4), id(5)]);
    woken(&mut endpoint, 10..310);
    endpoint.answered(first.request, Outcome::Accepted, now);
    assert_eq!(send(&mut endpoint, now).conversations.len(), 100);
}

#[test]
fn a_conversation_is_in_one_request_at_a_time() {
    let (mut endpoint, now) = (endpoint(100, 4), Instant::now());
    woken(&mut endpoint, [1]);
    let first = send(&mut endpoint, now);
    woken(&mut endpoint, [1]);
    assert_eq!(endpoint.next(now), Next::Idle);
    let effects = endpoint.answered(first.request, Outcome::Accepted, now);
    assert_eq!(effects.accepted, [id(1)]);
    assert_eq!(
        answer(&mut endpoint, now, Outcome::Accepted)
            .0
            .conversations,
        [id(1)]
    );
    assert_eq!((endpoint.next(now), endpoint.known()), (Next::Idle, 0));
    // A second answer to the same request changes nothing.
    let again = endpoint.answered(first.request, Outcome::Gone, now);
    assert_eq!((again, endpoint.is_disabled()), (Effects::default(), false));
}

#[test]
fn a_conversation_can_be_forgotten_at_any_time() {
    let (mut endpoint, now) = (endpoint(100, 1), Instant::now());
    woken(&mut endpoint, [1, 2]);
    endpoint.forget(id(1));
    endpoint.forget(id(3));
    let second = send(&mut endpoint, now);
    assert_eq!(second.conversations, [id(2)]);
    endpoint.forget(id(2));
    assert_eq!(endpoint.known(), 1, "it is being sent");
    endpoint.answered(second.request, DOWN, now);
    assert_eq!(endpoint.known(), 0);
    endpoint.enable();
    woken(&mut endpoint, [2]);
    let third = send(&mut endpoint, now);
    endpoint.forget(id(2));
    woken(&mut endpoint, [2]);
    assert_eq!(endpoint.next(now), Next::Idle, "it is still being sent");
    endpoint.answered(third.request, Outcome::Rejected(400), now);
    assert_eq!(endpoint.known(), 1);
    endpoint.forget(id(2));
    assert_eq!((endpoint.known(), endpoint.next(now)), (0, Next::Idle));
}

#[test]
fn a_request_has_only_what_was_found_and_had_room() {
    let (mut endpoint, now) = (endpoint(100, 1), Instant::now());
    woken(&mut endpoint, 1..=4);
    let first = sent(endpoint.next(now));
    let events = [(id(1), 60), (id(2), 0)];
    assert!(endpoint.loaded(first.request, &events));
    woken(&mut endpoint, 5..=5);
    let effects = endpoint.answered(first.request, Outcome::Accepted, now);
    assert_eq!(effects.accepted, [id(1)]);
    let next = sent(endpoint.next(now));
    assert_eq!(next.conversations, [id(3), id(4), id(5)]);
    let nothing: Vec<_> = next.conversations.iter().map(|id| (*id, 0)).collect();
    assert!(!endpoint.loaded(next.request, &nothing));
    assert_eq!((endpoint.next(now), endpoint.known()), (Next::Idle, 0));
}

#[test]
fn statuses_have_their_meaning() {
    let outcome = |status| {
        Outcome::from(&Ok(Response {
            status,
            retry_after: None,
            body: bytes::Bytes::new(),
        }))
    };
    for status in [200, 201, 204, 299] {
        assert_eq!(outcome(status), Outcome::Accepted);
    }
    for status in [408, 425, 429, 500, 502, 503, 504, 599] {
        let is_down =
            matches!(outcome(status), Outcome::Unavailable { status: Some(s), .. } if s == status);
        assert!(is_down, "{status}");
    }
    for status in [301, 302, 307, 308, 400, 401, 403, 404, 409, 413, 422] {
        assert_eq!(outcome(status), Outcome::Rejected(status));
    }
    assert_eq!(outcome(410), Outcome::Gone);
    for failure in [
        Failure::Timeout,
        Failure::Network("reset".into()),
        Failure::Refused("no".into()),
    ] {
        let outcome = Outcome::from(&Err(failure));
        assert!(matches!(outcome, Outcome::Unavailable { status: None, .. }));
    }
}

#[test]
fn pauses_double_up_to_ten_minutes() {
    let mut endpoint = endpoint(100, 4);
    let mut now = Instant::now();
    woken(&mut endpoint, 1..=3);
    let mut pauses = Vec::new();
    for _ in 0..200 {
        let (assignment, effects) = answer_soon(&mut endpoint, &mut now, DOWN);
        assert_eq!(effects, Effects::default());
        assert_eq!(assignment.probe, !pauses.is_empty());
        assert_eq!(assignment.conversations.len(), 1);
        pauses.push(endpoint.paused_until().unwrap() - now);
    }
    for (i, pause) in pauses.iter().enumerate() {
        let most = PAUSE_MAX.min(PAUSE_MIN * (1 << i.min(20)));
        assert!(*pause <= most, "pause {i}: {pause:?}");
    }
    // Jitter takes all values up to the longest pause.
    let long = pauses[10..].iter();
    assert!(long.clone().any(|pause| *pause > Duration::from_secs(570)));
    assert!(long.clone().any(|pause| *pause < Duration::from_secs(30)));
    // Afterwards it begins with one second again.
    answer_soon(&mut endpoint, &mut now, Outcome::Accepted);
    assert_eq!(endpoint.paused_until(), None);
    woken(&mut endpoint, [4]);
    answer(&mut endpoint, now, DOWN);
    assert!(endpoint.paused_until().unwrap() <= now + PAUSE_MIN);
}

#[test]
fn the_pauses_of_two_gateways_differ() {
    let pause = |seed| {
        let limits = Limits {
            batch: 1,
            connections: 1,
        };
        let (mut endpoint, now) = (Endpoint::new(limits, seed), Instant::now());
        woken(&mut endpoint, [1]);
        answer(&mut endpoint, now, DOWN);
        endpoint.paused_until().unwrap() - now
    };
    assert_ne!(pause(1), pause(2));
    assert_eq!(pause(1), pause(1));
}

#[test]
fn a_receiver_can_ask_for_a_pause_of_up_to_an_hour() {
    for (asked, pause) in [(HOUR / 2, HOUR / 2), (5 * HOUR, HOUR)] {
        let (mut endpoint, now) = (endpoint(100, 4), Instant::now());
        woken(&mut endpoint, [1]);
        let later = Outcome::Unavailable {
            status: Some(429),
            retry_after: Some(asked),
        };
        answer(&mut endpoint, now, later);
        assert_eq!(endpoint.next(now), Next::WaitUntil(now + pause));
    }
}

#[test]
fn failures_at_the_same_time_count_once() {
    let (mut endpoint, now) = (endpoint(1, 4), Instant::now());
    woken(&mut endpoint, 1..=8);
    let requests: Vec<_> = (0..4).map(|_| send(&mut endpoint, now).request).collect();
    for request in requests {
        endpoint.answered(request, DOWN, now);
        assert!(endpoint.paused_until().unwrap() <= now + PAUSE_MIN);
    }
    let mut later = now;
    let probe = send_soon(&mut endpoint, &mut later);
    assert!(probe.probe);
    assert_eq!(endpoint.next(later), Next::Idle, "one probe at a time");
}

#[test]
fn an_answer_from_before_does_not_end_a_pause() {
    let (mut endpoint, now) = (endpoint(1, 4), Instant::now());
    woken(&mut endpoint, 1..=3);
    let before = send(&mut endpoint, now);
    answer(&mut endpoint, now, DOWN);
    let until = endpoint.paused_until().unwrap();
    let effects = endpoint.answered(before.request, Outcome::Accepted, now);
    assert_eq!(effects.accepted, [id(1)]);
    assert_eq!(endpoint.next(now), Next::WaitUntil(until));
}

#[test]
fn each_probe_takes_another_conversation() {
    let mut endpoint = endpoint(100, 4);
    let mut now = Instant::now();
    woken(&mut endpoint, 1..=3);
    let mut probed = Vec::new();
    for _ in 0..7 {
        probed.push(answer_soon(&mut endpoint, &mut now, DOWN).0.conversations[0]);
    }
    assert_eq!(probed, [1, 2, 3, 1, 2, 3, 1].map(id));
    // One that never failed goes first.
    woken(&mut endpoint, [4]);
    assert_eq!(send_soon(&mut endpoint, &mut now).conversations, [id(4)]);
}

#[test]
fn a_probe_that_succeeds_shows_whose_failure_it_was() {
    let mut endpoint = endpoint(1, 4);
    let mut now = Instant::now();
    woken(&mut endpoint, [1, 2]);
    answer(&mut endpoint, now, DOWN);
    let (probe, effects) = answer_soon(&mut endpoint, &mut now, Outcome::Accepted);
    assert_eq!((probe.conversations, probe.events_max), (vec![id(2)], 1));
    let until = now + Duration::from_secs(5);
    assert_eq!(effects.blocked, [(id(1), until)]);
    assert_eq!(endpoint.next(now), Next::WaitUntil(until));
    // It fails again, and others were accepted: nobody else waits for it.
    woken(&mut endpoint, [3]);
    answer(&mut endpoint, now, Outcome::Accepted);
    now = until;
    let (_, effects) = answer(&mut endpoint, now, DOWN);
    assert_eq!(effects.blocked, [(id(1), now + Duration::from_secs(300))]);
    assert_eq!(endpoint.paused_until(), None);
    // If nothing was accepted meanwhile, it may be the endpoint.
    now += Duration::from_secs(300);
    let (_, effects) = answer(&mut endpoint, now, DOWN);
    assert_eq!(effects, Effects::default());
    assert!(endpoint.paused_until().is_some());
}

#[test]
fn a_probe_of_the_same_event_that_succeeds_blames_nobody() {
    let mut endpoint = endpoint(1, 4);
    let mut now = Instant::now();
    woken(&mut endpoint, [1]);
    answer(&mut endpoint, now, DOWN);
    let (_, effects) = answer_soon(&mut endpoint, &mut now, Outcome::Accepted);
    assert_eq!((effects.accepted, effects.blocked.len()), (vec![id(1)], 0));
    assert_eq!(endpoint.next(now), Next::Idle);
}

/// Rejects the event of conversation 1 until it is skipped. Before each attempt, others succeed if `others` says so.
fn attempts(outcome: Outcome, others: impl Fn(usize) -> bool) -> (Vec<Duration>, Option<Skipped>) {
    let mut endpoint = endpoint(100, 4);
    let mut now = Instant::now();
    let mut pauses = Vec::new();
    for attempt in 1..=40 {
        if others(attempt) {
            woken(&mut endpoint, [99]);
            let (other, _) = answer(&mut endpoint, now, Outcome::Accepted);
            assert_eq!(other.conversations, [id(99)]);
        }
        if attempt == 1 {
            woken(&mut endpoint, [1]);
        }
        let (assignment, effects) = answer_soon(&mut endpoint, &mut now, outcome);
        assert_eq!(assignment.conversations, [id(1)]);
        if let [skipped] = effects.skipped[..] {
            assert_eq!(endpoint.known(), 0);
            return (pauses, Some(skipped));
        }
        let [(_, until)] = effects.blocked[..] else {
            panic!("attempt {attempt}: {effects:?}");
        };
        pauses.push(until - now);
    }
    (pauses, None)
}

#[test]
fn an_event_is_skipped_after_ten_attempts_in_75_hours() {
    let (pauses, skipped) = attempts(Outcome::Rejected(400), |_| true);
    assert_eq!(pauses.len(), 9);
    let total: Duration = pauses.iter().sum();
    assert!(total > 75 * HOUR && total < 76 * HOUR, "{total:?}");
    let expected = Skipped {
        conversation: id(1),
        status: Some(400),
    };
    assert_eq!(skipped, Some(expected));
}

#[test]
fn an_event_is_not_skipped_if_nothing_else_succeeds() {
    let (pauses, skipped) = attempts(Outcome::Rejected(302), |_| false);
    assert_eq!(skipped, None);
    assert_eq!(pauses[0], Duration::from_secs(5));
    assert_eq!(
        pauses.last(),
        Some(&PAUSE_MAX),
        "it is tried on every ten minutes"
    );
    assert!(pauses.is_sorted());
    // Attempts while nothing else succeeds do not count.
    let (pauses, skipped) = attempts(Outcome::Rejected(404), |attempt| attempt % 2 == 0);
    assert_eq!((pauses.len(), skipped.is_some()), (17, true));
}

#[test]
fn a_rejected_event_does_not_pause_the_endpoint() {
    let (mut endpoint, now) = (endpoint(100, 1), Instant::now());
    woken(&mut endpoint, [1]);
    let (_, effects) = answer(&mut endpoint, now, Outcome::Rejected(400));
    assert_eq!(effects.blocked.len(), 1);
    assert_eq!(endpoint.paused_until(), None);
    woken(&mut endpoint, [2]);
    let (other, _) = answer(&mut endpoint, now, Outcome::Accepted);
    assert_eq!(other.conversations, [id(2)]);
    woken(&mut endpoint, [1]);
    let blocked = effects.blocked[0].1;
    assert_eq!(
        endpoint.next(now),
        Next::WaitUntil(blocked),
        "waking does not unblock"
    );
}

#[test]
fn an_endpoint_that_rejects_everything_is_paused() {
    let (mut endpoint, mut now) = (endpoint(1, 1), Instant::now());
    woken(&mut endpoint, 1..=1_000);
    let mut requests = 0;
    let end = now + HOUR;
    while now < end {
        requests += 1;
        answer_soon(&mut endpoint, &mut now, Outcome::Rejected(401));
    }
    assert!(
        (20..100).contains(&requests),
        "{requests} requests in an hour"
    );
    assert!(endpoint.paused_until().is_some());
    // It works again: all are sent within minutes, and nothing is skipped.
    let mut accepted = 0;
    let began = now;
    while endpoint.known() > 0 {
        let effects = answer_soon(&mut endpoint, &mut now, Outcome::Accepted).1;
        assert!(effects.skipped.is_empty());
        accepted += effects.accepted.len();
    }
    assert_eq!(accepted, 1_000);
    assert!(now - began < Duration::from_secs(660), "{:?}", now - began);
}

#[test]
fn gone_disables_until_it_is_enabled() {
    let (mut endpoint, now) = (endpoint(1, 2), Instant::now());
    woken(&mut endpoint, [1, 2]);
    let (_, effects) = answer(&mut endpoint, now, Outcome::Gone);
    assert!(effects.disabled && effects.accepted.is_empty());
    assert_eq!(endpoint.next(now), Next::Disabled);
    endpoint.enable();
    let (first, _) = answer(&mut endpoint, now, Outcome::Accepted);
    assert_eq!(first.conversations, [id(1)], "nothing was lost");
    endpoint.disable();
    assert_eq!(
        (endpoint.next(now), endpoint.is_disabled()),
        (Next::Disabled, true)
    );
}

#[test]
fn what_failed_before_it_was_enabled_is_not_judged() {
    let mut now = Instant::now();
    let mut endpoint = endpoint(1, 3);
    woken(&mut endpoint, 1..=3);
    answer(&mut endpoint, now, DOWN);
    endpoint.disable();
    endpoint.enable();
    let others = [send(&mut endpoint, now), send(&mut endpoint, now)];
    // It is in flight while a probe succeeds.
    assert_eq!(send(&mut endpoint, now).conversations, [id(1)]);
    for other in others {
        endpoint.answered(other.request, DOWN, now);
    }
    let (_, effects) = answer_soon(&mut endpoint, &mut now, Outcome::Accepted);
    let blocked: Vec<_> = effects.blocked.iter().map(|(id, _)| *id).collect();
    assert_eq!(blocked, [id(3)]);
}

#[test]
fn too_many_conversations_are_not_remembered() {
    let mut endpoint = endpoint(100, 4);
    let max = WEBHOOK_CONVERSATIONS_MAX as u128;
    woken(&mut endpoint, 1..=max);
    assert!(!endpoint.wake(id(max + 1)));
    assert!(endpoint.wake(id(1)), "it is known");
    endpoint.forget(id(5));
    assert!(endpoint.wake(id(max + 1)));
    assert_eq!(endpoint.known(), WEBHOOK_CONVERSATIONS_MAX);
}
