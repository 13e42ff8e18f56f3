//! A receiver that is down for hours, or a week, while people go on in many conversations. When it is back, everything arrives, in
//! order.
//!
//! `WEEK_HOURS=168 WEEK_CONVERSATIONS=100000 cargo test --release --test all week` is the whole of it.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use chat_gateway::{
    chat::{Creation, Operation, Outcome},
    model::{ClientId, Content, ConversationId, Cursor, Draft, Kind, Posting},
    store::simulated::Faults,
};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{
    paused, setting,
    world::{Consuming, Gateway, World, user},
};

/// Users, each with conversations of their own.
const PEOPLE: usize = 100;
/// Messages of each conversation: one after it is created, the others when all are created.
const MESSAGES: u64 = 2;
/// The time that catching up with a conversation may take, of all together: far more than it takes.
const OF_EACH: Duration = Duration::from_millis(250);
/// A receiver may be asked for the last time shortly before it is back, and the next time 10 min later. A request that fails then
/// takes as long again.
const AT_LEAST: Duration = Duration::from_hours(1);

/// A conversation, with the system entry of its creation and its messages.
struct Talk {
    id: ConversationId,
    sender: usize,
    head: u64,
}

/// Asks again until it is done.
async fn patiently<T, F: Future<Output = Option<T>>>(ask: impl Fn() -> F) -> T {
    loop {
        if let Some(done) = ask().await {
            return done;
        }
        sleep(Duration::from_millis(100)).await;
    }
}

async fn create(gateway: &Gateway, number: usize) -> Talk {
    let spread = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
    let id = uuid::Builder::from_u128((number as u128 + 1).wrapping_mul(spread));
    let id = ConversationId(id.with_version(uuid::Version::Random).into_uuid());
    let sender = number % PEOPLE;
    let created = || async {
        let create = Operation::Create(Creation {
            kind: Kind::Group,
            participants: Vec::new(),
            name: Some("here".into()),
            public: false,
            posting: Posting::Everyone,
            at: None,
        });
        let cluster = gateway.cluster().unwrap();
        let asked = gateway.ask(async move { cluster.router.ask(id, user(sender), create).await });
        matches!(asked.await, Some(Ok(Outcome::Created { .. }))).then_some(())
    };
    patiently(created).await;
    Talk {
        id,
        sender,
        head: 1,
    }
}

async fn send(gateway: &Gateway, talk: &mut Talk) {
    let client_id = ClientId(Uuid::from_u128(talk.id.0.as_u128() ^ u128::from(talk.head)));
    let (id, sender) = (talk.id, talk.sender);
    let sent = || async {
        let draft = Draft {
            sender: user(sender),
            client_id,
            content: Content::text("hello"),
            at: None,
            retry: true,
        };
        let cluster = gateway.cluster().unwrap();
        let asked = gateway.ask(async move { cluster.router.send(id, draft).await });
        Some(asked.await?.ok()?.seq)
    };
    talk.head = patiently(sent).await;
}

/// Starts gateways, and returns one that serves.
async fn started() -> (Arc<World>, Arc<Gateway>) {
    let consuming = Consuming {
        webhook: true,
        pushing: false,
        large: true,
    };
    let world = World::new(1, Faults::NONE, false, false, None, consuming);
    world.start();
    while world.serving().is_empty() {
        sleep(Duration::from_millis(100)).await;
    }
    let gateway = world.serving().remove(0);
    (world, gateway)
}

/// Waits until everything has arrived. Returns the findings, and how long it took.
async fn arrived(world: &World, talks: &[Talk], within: Duration) -> (Vec<String>, Duration) {
    let begin = Instant::now();
    let is_missing = |talk: &Talk| {
        let reached = world.arrivals.reached.lock().unwrap();
        reached.get(&talk.id.to_string()).copied() != Some(Cursor(talk.head, 0))
    };
    while begin.elapsed() < within && talks.iter().any(is_missing) {
        sleep(Duration::from_secs(1)).await;
    }
    let mut found = world.arrivals.take_findings();
    let missing = talks.iter().filter(|talk| is_missing(talk)).count();
    if missing > 0 {
        let all = talks.len();
        found.push(format!("{missing} of {all} conversations have not arrived"));
    }
    (found, begin.elapsed())
}

/// Keeps the receiver down for this time. Returns the findings, and how long catching up took.
async fn down(conversations: usize, time: Duration) -> (Vec<String>, Duration) {
    let (world, gateway) = started().await;
    world.arrivals.go_down();
    let pause = time / (conversations as u32 * MESSAGES as u32);
    let mut talks = Vec::new();
    for number in 0..conversations {
        let mut talk = create(&gateway, number).await;
        send(&gateway, &mut talk).await;
        talks.push(talk);
        sleep(pause).await;
    }
    for _ in 1..MESSAGES {
        for talk in &mut talks {
            send(&gateway, talk).await;
            sleep(pause).await;
        }
    }
    world.arrivals.recover();
    let within = (OF_EACH * conversations as u32).max(AT_LEAST);
    arrived(&world, &talks, within).await
}

#[test]
fn a_receiver_that_was_down_for_long_gets_everything() {
    let conversations = setting("WEEK_CONVERSATIONS", 200) as usize;
    let hours = setting("WEEK_HOURS", 6);
    let (findings, took) = paused(1, down(conversations, Duration::from_hours(hours)));
    println!("down for {hours} h: {conversations} conversations were caught up with in {took:?}");
    assert!(findings.is_empty(), "{findings:#?}");
}

async fn panicking() -> (Vec<String>, Duration) {
    let (world, gateway) = started().await;
    world.arrivals.go_down();
    let mut talks = Vec::new();
    for number in 0..5 {
        let mut talk = create(&gateway, number).await;
        send(&gateway, &mut talk).await;
        talks.push(talk);
    }
    // Nothing is sent after the panic: the webhook must deliver these messages without being woken by new ones.
    world.arrivals.recover();
    world.arrivals.panics.store(true, Ordering::Relaxed);
    // Less than until the scan that finds what lags.
    let arrived = arrived(&world, &talks, Duration::from_secs(40)).await;
    assert!(!world.arrivals.panics.load(Ordering::Relaxed));
    arrived
}

#[test]
fn a_webhook_goes_on_after_a_panic() {
    let (findings, _) = paused(1, panicking());
    assert!(findings.is_empty(), "{findings:#?}");
}
