use super::*;
use crate::{
    cluster::wire::question::{Operate, Watch},
    model::{ConversationId, Draft, UserId},
};

fn sent(link: &Link) -> u64 {
    link.send(Bytes::from_static(b"x"), None);
    link.next_batch(false);
    link.state().sent
}

fn connect(a: &Link, b: &Link) -> (Result<(), Stale>, Result<(), Stale>) {
    let (from_a, from_b) = (a.resume_point(), b.resume_point());
    (a.connected(from_b), b.connected(from_a))
}

#[test]
fn what_was_not_acknowledged_is_sent_again() {
    let (a, b) = (
        Link::new(GatewayId(uuid::Uuid::nil())),
        Link::new(GatewayId(uuid::Uuid::nil())),
    );
    assert_eq!(connect(&a, &b), (Ok(()), Ok(())));
    assert_eq!((sent(&a), sent(&a)), (1, 2));
    b.handled(1);
    assert_eq!(connect(&a, &b), (Ok(()), Ok(())));
    assert!(a.next_batch(false).is_some() && !a.is_idle());
    b.handled(2);
    assert_eq!(connect(&a, &b), (Ok(()), Ok(())));
    assert!(a.is_idle());
}

#[test]
fn one_that_was_forgotten_begins_again() {
    let (a, b) = (
        Link::new(GatewayId(uuid::Uuid::nil())),
        Link::new(GatewayId(uuid::Uuid::nil())),
    );
    assert_eq!(connect(&a, &b), (Ok(()), Ok(())));
    sent(&a);
    b.handled(1);
    let b = Link::new(GatewayId(uuid::Uuid::nil())); // It has forgotten `a`.
    assert_eq!(connect(&a, &b), (Err(Stale::Mine), Err(Stale::Theirs)));
    let a = Link::new(GatewayId(uuid::Uuid::nil()));
    assert_eq!(connect(&a, &b), (Ok(()), Ok(())));
}

fn link() -> Arc<Link> {
    Arc::new(Link::new(GatewayId(uuid::Uuid::nil())))
}

fn watch(user: &str) -> AnyQuestion {
    let user = UserId::new(user).unwrap();
    Watch { user, version: 1 }.into()
}

/// Fills the queue, so that optional messages are dropped.
fn fill(link: &Link, bytes: usize) {
    let message = Bytes::from(vec![0; 1 << 20]);
    for _ in 0..bytes >> 20 {
        link.send(message.clone(), None);
    }
}

fn deal_with_all(link: &Link) {
    while link.next_batch(false).is_some() {}
    let sent = link.state().sent;
    link.acknowledge(sent);
}

/// Returns the queued messages that can be read.
fn queued(link: &Link) -> Vec<PeerMessage> {
    let state = link.state();
    let bytes = state.queue.iter().map(|queued| decode(&queued.bytes));
    bytes.filter_map(Result::ok).collect()
}

#[test]
fn a_question_that_is_too_long_fails_and_nothing_else() {
    let link = link();
    let ask = |bytes| {
        let alice = UserId::new("alice").unwrap();
        let draft = Draft {
            sender: alice.clone(),
            client_id: crate::model::ClientId(uuid::Uuid::nil()),
            content: crate::model::Content::text("x".repeat(bytes)),
            at: None,
            retry: false,
        };
        AnyQuestion::from(Operate {
            conversation: ConversationId(uuid::Uuid::nil()),
            actor: alice,
            operation: crate::chat::Operation::Send(draft),
        })
    };
    let asked = link.begin_ask(ask(MESSAGE_BYTES_MAX));
    assert_eq!(asked.err(), Some(CallError::TooLong));
    link.send(vec![0; MESSAGE_BYTES_MAX + 1].into(), None);
    assert!(link.is_idle() && link.state().asks.is_empty());
    assert!(link.begin_ask(ask(1_000)).is_ok());
}

#[test]
fn a_link_is_given_up_when_too_much_waits_and_nothing_counts_as_done() {
    let link = link();
    let done = Arc::new(AtomicBool::new(false));
    let token = || {
        let done = done.clone();
        Token::new(move |_| done.store(true, Ordering::Relaxed))
    };
    link.send(Bytes::from_static(b"x"), Some(token()));
    fill(&link, BACKLOG_BYTES_MAX - (1 << 20));
    assert!(!link.is_given_up());
    fill(&link, 1 << 20);
    assert!(link.is_given_up() && !link.is_idle());
    assert!(link.next_batch(false).is_none(), "nothing is sent any more");
    link.send(Bytes::from_static(b"x"), Some(token()));
    link.uninterested(&Topic::Presence(UserId::new("bob").unwrap()));
    assert_eq!(link.begin_ask(watch("bob")).err(), Some(CallError::Full));
    assert!(link.queued().1 == 0 && !done.load(Ordering::Relaxed));
    link.close();
    assert!(done.load(Ordering::Relaxed), "the peer is gone");
}

#[test]
fn what_sockets_are_interested_in_is_announced_however_long_it_is() {
    let link = link();
    let announce = |version| {
        for _ in 0..BACKLOG_BYTES_MAX >> 20 {
            let bytes = Bytes::from_static(&[0; 1 << 20]);
            link.send_announced(version, bytes);
        }
    };
    announce(1);
    assert!(!link.is_given_up());
    announce(2);
    assert!(link.is_given_up(), "but not again and again");
}

#[test]
fn what_ended_is_told_when_there_is_room_unless_it_began_again() {
    let link = link();
    let topic = |user| Topic::Presence(UserId::new(user).unwrap());
    fill(&link, QUEUE_BYTES_MAX);
    let (_, before) = link.queued();
    for _ in 0..10_000 {
        for user in ["alice", "bob", "carol"] {
            link.uninterested(&topic(user));
        }
    }
    assert_eq!(link.queued().1, before, "nothing was queued");
    assert!(link.begin_ask(watch("alice")).is_err(), "nor asked");
    let interest = Interest {
        topic: topic("bob"),
        passed: None,
        away: false,
    };
    link.announce(1, vec![interest]);
    deal_with_all(&link);
    let told: Vec<_> = queued(&link)
        .into_iter()
        .map(|message| match message {
            PeerMessage::Uninterested { topic } => topic,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(told, [topic("alice"), topic("carol")]);
}

#[test]
fn whoever_asks_again_before_the_end_was_told_stays_interested() {
    let link = link();
    fill(&link, QUEUE_BYTES_MAX);
    link.uninterested(&Topic::Presence(UserId::new("alice").unwrap()));
    // Dealt with, up to where questions are taken again and what ended is not yet told.
    for number in 0..4 {
        link.next_batch(false);
        link.acknowledge(number + 1);
    }
    let _asked = link.begin_ask(watch("alice")).unwrap();
    deal_with_all(&link);
    assert!(link.is_idle(), "{:?}", queued(&link));
}
