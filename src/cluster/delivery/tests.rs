//! Parts of publications, and the order in which a home and its sessions get them.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use futures_util::FutureExt as _;
use uuid::Uuid;

use super::*;
use crate::{
    chat::Recipients,
    fanout::Subscriber,
    memory::Memory,
    model::{ClientId, Content, Kind, Seq, SessionId},
    protocol::Codec,
    store::simulated::{Faults, Simulated},
};

/// Races of two threads, each of which shows a broken order in most runs.
const ROUNDS: usize = 20;

fn ring(of: u128) -> View {
    View::new(1, vec![GatewayId(Uuid::from_u128(of))])
}

#[test]
fn however_often_a_publication_is_cut_no_part_is_mistaken_for_that_of_another() {
    let mut outstanding = Outstanding::default();
    let user = UserId::new("alice").unwrap();
    let typing = || {
        let conversation = ConversationId(Uuid::from_u128(1));
        Publication::typing(conversation, user.clone(), Audience::User(user.clone()))
    };
    let mut sent = ToSend::new();
    for id in [1, 2] {
        let publication = OutstandingPublication {
            publication: typing(),
            parts: Vec::new(),
            confirm: None,
        };
        outstanding.publications.insert(id, publication);
        outstanding.cut(id, vec![user.clone()], &ring(1), &mut sent);
    }
    for turn in 0..70_000 {
        let ring = ring(1 + (turn + 1) % 2);
        let moved = outstanding.take_moved(1, &ring);
        assert_eq!(moved, std::slice::from_ref(&user));
        sent.clear();
        outstanding.cut(1, moved, &ring, &mut sent);
    }
    let [(newest, ..)] = sent[..] else {
        panic!("one home, one part")
    };
    assert_eq!(outstanding.parts[&newest].of, 1);
    assert_eq!(outstanding.parts.len(), 2);
    assert!(!outstanding.parts.contains_key(&BEST_EFFORT));
    drop(outstanding.remove(1));
    assert_eq!(outstanding.parts.len(), 1);
    drop(outstanding.remove(2));
    assert!(outstanding.parts.is_empty());
}

/// A gateway that is everyone's home under `home`, and sends publications under `sending`. Alice has a session there.
fn gateway(home: View, sending: View) -> (Arc<Delivery>, Arc<Subscriber>) {
    let me = GatewayId(Uuid::from_u128(1));
    let sockets = Arc::new(LocalSockets::new(Arc::default()));
    let store = Arc::new(Simulated::new(1, Faults::NONE));
    let interests = Arc::new(Interests::default());
    let (here, known) = (sockets.clone(), interests.clone());
    let home = Home::new(me, store, here, None, known, home, Memory::of_mib(64));
    let alice = UserId::new("alice").unwrap();
    let session = Subscriber::new(SessionId(1), alice.clone(), Codec::Json, 1 << 22);
    let session = Arc::new(session);
    sockets.subscribe(&Topic::User(alice), &session);
    let delivery = Delivery::new(me, sending, sockets, Arc::new(home), interests, None);
    (delivery, session)
}

/// The publication of an entry to Alice.
fn entry(seq: Seq) -> Publication {
    entry_to(seq, vec![UserId::new("alice").unwrap()])
}

fn entry_to(seq: Seq, users: Vec<UserId>) -> Publication {
    let entry = Entry {
        seq,
        message_id: crate::clock::message_id(1),
        client_id: ClientId(Uuid::nil()),
        sender: users[0].clone(),
        at: 1,
        content: Content::text(format!("number {seq}")),
        texts: 0,
    };
    let members = Arc::new(Recipients {
        kind: Kind::Group,
        name: None,
        users: users.into_iter().map(|user| (user, 1)).collect(),
    });
    let conversation = ConversationId(Uuid::from_u128(1));
    Publication::entry(conversation, entry.into(), Audience::Members(members))
}

/// The seqs that a session was sent.
fn seqs(session: &Subscriber) -> Vec<Seq> {
    let mut frames = VecDeque::new();
    let _ = session.outbox.take(&mut frames).now_or_never();
    let seq = |text: &str| -> Option<Seq> {
        let (_, after) = text.split_once("\"seq\":")?;
        after.split([',', '}']).next()?.parse().ok()
    };
    let frames = frames.iter();
    let texts = frames.map(|frame| String::from_utf8_lossy(frame.bytes()).into_owned());
    texts.filter_map(|text| seq(&text)).collect()
}

#[test]
fn nothing_overtakes_what_a_home_has_held() {
    for _ in 0..ROUNDS {
        let (delivery, session) = gateway(ring(1), ring(1));
        let home = &delivery.home;
        (1..=100).for_each(|seq| home.deliver(&entry(seq), None));
        assert!(seqs(&session).is_empty(), "held");
        thread::scope(|scope| {
            scope.spawn(|| {
                while !home.is_complete() {
                    std::hint::spin_loop();
                }
                home.deliver(&entry(101), None);
            });
            home.announced(delivery.me, 1);
        });
        assert_eq!(seqs(&session), Vec::from_iter(1..=101));
    }
}

#[test]
fn nothing_overtakes_what_a_new_home_is_sent_again() {
    for _ in 0..ROUNDS {
        let here = ring(1);
        // Until Alice's home is here, publications go to a gateway that does not exist.
        let (delivery, session) = gateway(here.clone(), ring(2));
        delivery.home.announced(delivery.me, 1);
        let waiting = Mutex::new(Vec::new());
        let send = |seq| {
            let (confirm, confirmed) = oneshot::channel();
            lock(&waiting).push(confirmed);
            delivery.send_confirmed(entry(seq), confirm);
        };
        let adopted = AtomicBool::new(false);
        (1..=100).for_each(send);
        let newest = thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let mut newest = 100;
                while !adopted.load(Ordering::Acquire) && newest < 1_000 {
                    newest += 1;
                    send(newest);
                }
                newest
            });
            delivery.adopt(&here);
            adopted.store(true, Ordering::Release);
            sending.join().unwrap()
        });
        assert_eq!(seqs(&session), Vec::from_iter(1..=newest));
    }
}

#[test]
fn a_user_gets_what_is_refused_for_another_before_what_is_newer() {
    let [first, second] = [1, 2].map(|n| GatewayId(Uuid::from_u128(n)));
    let both = View::new(1, vec![first, second]);
    let user_of = |home| {
        let users = (0..).map(|n| UserId::new(&format!("user{n}")).unwrap());
        users.into_iter().find(|user| both.home(user) == Some(home))
    };
    let [here, there] = [first, second].map(|home| user_of(home).unwrap());
    let (delivery, session) = gateway(both.clone(), both.clone());
    delivery
        .sockets
        .subscribe(&Topic::User(here.clone()), &session);
    for member in [first, second] {
        delivery.home.announced(member, 1);
    }
    // Its sender has another ring, in which this is the home of both.
    delivery
        .home
        .deliver(&entry_to(1, vec![here.clone(), there]), None);
    delivery.home.deliver(&entry_to(2, vec![here]), None);
    assert_eq!(seqs(&session), [1, 2]);
}
