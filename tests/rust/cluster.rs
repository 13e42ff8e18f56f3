//! Simulates everything above the store and the network, with paused time and seeded chance. Gateways crash, pause,
//! leave, join, and are cut off from each other and from the store, which loses, delays and resurrects writes.
//! Meanwhile users come and go, and conversations are evicted. The checker sees only what clients see:
//!
//! 1. every acknowledged message is in every later full history, once, at its seq;
//! 2. histories are prefixes of one sequence, without gaps;
//! 3. no client id is in the log twice;
//! 4. at a quiet point every connected user has every message, without another message and without a reconnect;
//! 5. at a quiet point every inbox agrees with the log, and what each home remembers agrees with the inbox;
//! 6. edits, deletions and reactions are in the log of changes as `simulation.rs` says, and at a quiet point every
//!    connected user shows each message as it is stored, and every inbox has the right rev, preview and unread count;
//! 7. a webhook's receiver, which fails and is down at times, gets every entry and change, and first arrivals are in order,
//!    although only consumers ask for conversations during this check;
//! 8. the device of a user without sessions is notified of the newest message.
//!
//! `rules.rs` breaks one rule after the other on purpose, and the checker must find each. `CLUSTER_SEEDS=2000
//! CLUSTER_FROM=0 cargo test --release --test all a_cluster_loses` runs more seeds. The same seed always runs the same.
//! `week.rs` has one more simulation: a receiver that is down for hours, or a week.

mod changes;
mod consumed;
mod late_interest;
mod quiet;
mod ranks;
mod restored;
mod rules;
mod uploads;
mod week;
mod world;
mod writers;

use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use changes::check_changes;
use chat_gateway::{
    chat::{Creation, LogRange, Operation, Outcome},
    cluster::Cluster,
    fanout::Subscriber,
    model::{
        Attachment, ClientId, Content, ConversationId, Draft, EntryKind, Kind, Last, Posting, Seq,
        SessionId,
    },
    mutation::{Mutation, break_rule},
    protocol::Codec,
    store::{InboxSummary, InboxWrite, Store, simulated::Faults},
};
use quiet::{check_places, check_quiet, check_secrets};
use rand::RngExt;
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};
use uuid::Uuid;
use world::{ClientRule, Consuming, Device, USERS, World, create, spawn, user};

use crate::paused::paused;

/// Quiet points of one run.
const ROUNDS: usize = 3;

/// What happens in a run, besides messages and gateways that come and go.
#[derive(Clone, Copy)]
struct Scene {
    /// Whether conversations are evicted at random moments.
    evicting: bool,
    /// Whether users change messages.
    changing: bool,
    /// Whether a webhook follows the conversations.
    webhook: bool,
    /// Whether messages are pushed to a user who sleeps.
    pushing: bool,
}

impl Scene {
    const WHOLE: Self = Self {
        evicting: true,
        changing: true,
        webhook: true,
        pushing: true,
    };
}

/// The rule that is broken on purpose, if any, which the checker must find.
#[derive(Clone, Copy)]
enum Broken {
    Nothing,
    Rule(Mutation),
    OfClients(ClientRule),
}

/// What happened in a run.
#[derive(Default)]
struct Done {
    findings: Vec<String>,
    /// Acknowledged messages and changes.
    messages: usize,
    changes: usize,
    /// The longest time that a check waited for a webhook, and for push.
    waited: [Duration; 2],
}

/// Runs one seed.
async fn run(seed: u64, scene: Scene, broken: Option<ClientRule>) -> Done {
    let Scene {
        evicting, changing, ..
    } = scene;
    let consumers = Consuming {
        webhook: scene.webhook,
        pushing: scene.pushing,
        large: false,
    };
    let world = World::new(seed, Faults::BAD_DAY, evicting, changing, broken, consumers);
    (0..3).for_each(|_| drop(world.start()));
    create(&world).await;
    if scene.pushing {
        world.register_sleeper().await;
    }
    let devices = populate(&world);
    let mut waited = [Duration::ZERO; 2];
    for round in 0..ROUNDS {
        unrest(&world, &devices).await;
        // Gateways that were paused or removed must notice it before they are replaced.
        sleep(Duration::from_secs(12)).await;
        while world.live() < 3 {
            world.start();
        }
        sleep(Duration::from_secs(25)).await;
        check_quiet(&world, &devices, round).await;
        check_places(&world, round).await;
        check_secrets(&world).await;
        if changing {
            check_changes(&world, &devices, round).await;
        }
        if scene.webhook {
            let expected = consumed::begin(&world).await;
            let arrival = consumed::check_arrivals(&world, round, &expected).await;
            waited[0] = waited[0].max(arrival);
            if scene.pushing {
                let push = consumed::check_pushed(&world, round, &expected).await;
                waited[1] = waited[1].max(push);
            }
            consumed::end(&world);
        }
        if !world.checker.lock().unwrap().findings.is_empty() {
            break;
        }
    }
    Done {
        findings: std::mem::take(&mut world.checker.lock().unwrap().findings),
        messages: *world.messages.lock().unwrap(),
        changes: *world.changes.lock().unwrap(),
        waited,
    }
}

/// Starts everyone who acts in the world. Returns the devices of the users.
fn populate(world: &Arc<World>) -> Vec<Arc<Device>> {
    let device = |user| {
        Arc::new(Device {
            user,
            got: Mutex::default(),
            held: Mutex::default(),
            connected: Mutex::default(),
            reconnect: Notify::new(),
        })
    };
    let devices: Vec<Arc<Device>> = (0..USERS).map(device).collect();
    for device in &devices {
        spawn(device.clone().live(world.clone()));
    }
    for sender in 0..USERS {
        spawn(world.clone().send(sender));
        if world.changing {
            spawn(world.clone().change(sender));
        }
    }
    spawn(world.clone().churn());
    spawn(world.clone().visit());
    spawn(world.clone().look());
    spawn(world.clone().read());
    spawn(world.clone().evict());
    if world.consuming.webhook {
        spawn(world.clone().fail());
    }
    devices
}

/// Lets clients send and reconnect while gateways crash, pause, leave, join and are cut off.
async fn unrest(world: &World, devices: &[Arc<Device>]) {
    world.sending.store(true, Ordering::Relaxed);
    world.churning.store(true, Ordering::Relaxed);
    let ends = Instant::now() + world.millis(3_000, 9_000);
    while Instant::now() < ends {
        sleep(world.millis(100, 1_500)).await;
        if world.below(3) == 0 {
            devices[world.below(USERS)].reconnect.notify_one();
        }
    }
    if world.below(2) == 0 {
        world.sending.store(false, Ordering::Relaxed);
        sleep(world.millis(0, 500)).await;
    }
    world.sending.store(false, Ordering::Relaxed);
    world.churning.store(false, Ordering::Relaxed);
}

fn simulate(seed: u64, scene: Scene, broken: Broken) -> Done {
    let (rule, of_clients) = match broken {
        Broken::Nothing => (None, None),
        Broken::Rule(rule) => (Some(rule), None),
        Broken::OfClients(rule) => (None, Some(rule)),
    };
    break_rule(rule);
    let found = paused(seed, run(seed, scene, of_clients));
    break_rule(None);
    found
}

/// A number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn a_cluster_loses_and_duplicates_nothing() {
    let (from, seeds) = (setting("CLUSTER_FROM", 0), setting("CLUSTER_SEEDS", 200));
    let mut all = Done::default();
    for seed in from..from + seeds {
        let done = simulate(seed, Scene::WHOLE, Broken::Nothing);
        assert!(
            done.findings.is_empty(),
            "seed {seed}: {:#?}",
            done.findings
        );
        all.messages += done.messages;
        all.changes += done.changes;
        all.waited = std::array::from_fn(|n| all.waited[n].max(done.waited[n]));
    }
    let (messages, changes) = (all.messages, all.changes);
    let [webhook, push] = all.waited.map(|waited| waited.as_secs());
    println!(
        "{seeds} seeds, {messages} messages and {changes} changes acknowledged; what was left arrived at the webhook within \
         {webhook} s, and was pushed within {push} s"
    );
    assert!(
        messages as u64 > seeds * 20,
        "too few messages were acknowledged: {messages}"
    );
}

/// The answers to `ask` through each gateway. All but one must ask another gateway.
async fn through_each<T: Send + 'static, F: Future<Output = Option<T>> + Send + 'static>(
    world: &Arc<World>,
    ask: impl Fn(Arc<Cluster>) -> F,
) -> Vec<T> {
    let mut answers = Vec::new();
    for gateway in world.serving() {
        let ends = Instant::now() + Duration::from_secs(60);
        let answer = loop {
            assert!(Instant::now() < ends, "no answer within 60 s");
            let asked = gateway.ask(ask(gateway.cluster().unwrap()));
            if let Some(Some(answer)) = asked.await {
                break answer;
            }
            sleep(Duration::from_millis(100)).await;
        };
        answers.push(answer);
    }
    answers
}

/// A world with this many gateways, without faults, in which the conversations are created.
async fn gateways(number: usize) -> Arc<World> {
    let world = World::new(1, Faults::NONE, false, false, None, Consuming::default());
    world.start_all(number).await;
    create(&world).await;
    world
}

/// Reads an inbox with so many conversations that the answer does not fit into one frame.
async fn long_inbox() {
    const ROWS: u128 = 30_000;
    let world = gateways(2).await;
    let row = |number: u128| InboxWrite {
        summary: Some(InboxSummary {
            seq: 7,
            kind: Kind::Group,
            name: Some("n".repeat(256)),
            joined_seq: 1,
            last: Some(Last {
                seq: 7,
                message_id: chat_gateway::clock::message_id(1),
                at: 1,
                sender: user(0),
                kind: EntryKind::Text,
                preview: "\u{1f600}".repeat(100),
                deleted: false,
            }),
            changes: 0,
            texts: 0,
        }),
        ..InboxWrite::of(
            user(3),
            ConversationId(Uuid::from_u128(number)),
            Kind::Group,
        )
    };
    let rows = (0..ROWS).map(row).collect();
    world.store.write_inbox(rows).await.unwrap();
    for rows in through_each(&world, |cluster| async move {
        cluster.users.inbox_rows(&user(3)).await.ok()
    })
    .await
    {
        assert_eq!(
            rows.len(),
            30_002,
            "the rows written above, a group and a channel"
        );
    }
    for places in through_each(&world, |cluster| async move {
        let session = SessionId(Arc::as_ptr(&cluster) as u64);
        let subscriber = Subscriber::new(session, user(3), Codec::Json, 1 << 22);
        cluster.users.register(&Arc::new(subscriber)).await.ok()
    })
    .await
    {
        assert_eq!(places.len(), 30_002);
    }
    assert_eq!(world.wire.lock().unwrap().too_long, 0);
}

/// A link whose parts are nearly as long as allowed.
fn long_link() -> Attachment {
    Attachment {
        url: format!("https://example.org/{}", "u".repeat(2_000)),
        name: Some("n".repeat(2_000)),
        mime: None,
        size: None,
        ..Attachment::default()
    }
}

/// Reads pages of messages with ten long links each, whose answer does not fit into one frame.
async fn long_pages() {
    const MESSAGES: usize = 500;
    let world = gateways(2).await;
    let group = world.conversations[0];
    for number in 0..MESSAGES {
        let draft = Draft {
            sender: user(0),
            client_id: ClientId(Uuid::from_u128(number as u128 + 1)),
            content: Content::Text {
                body: "ten links".into(),
                attachments: vec![long_link(); 10],
                reply_to: None,
            },
            at: None,
            retry: false,
        };
        let cluster = world.serving()[0].cluster().unwrap();
        cluster.router.send(group, draft).await.unwrap();
    }
    for operation in [
        Operation::CatchUp {
            after: 1,
            limit: MESSAGES,
        },
        Operation::History {
            range: LogRange::After(1),
            limit: MESSAGES,
        },
    ] {
        let pages = through_each(&world, move |cluster| {
            let operation = operation.clone();
            async move {
                match cluster.router.ask(group, user(0), operation).await {
                    Ok(Outcome::History(page)) => Some(page),
                    _ => None,
                }
            }
        });
        for page in pages.await {
            // A page ends at the byte limit of an answer. It begins where it was asked for and has no gap.
            let count = page.entries.len() as Seq;
            let seqs = page.entries.iter().map(|entry| entry.seq);
            assert!(count > 50 && seqs.eq(2..count + 2), "{count} without a gap");
            assert_eq!(page.reaches_head(1), count == MESSAGES as Seq);
        }
    }
    assert_eq!(world.wire.lock().unwrap().too_long, 0);
}

#[test]
fn a_cluster_answers_with_an_inbox_longer_than_a_frame() {
    paused(1, long_inbox());
}

#[test]
fn a_cluster_answers_with_pages_longer_than_a_frame() {
    paused(1, long_pages());
}

/// Cuts the link to a gateway with subscribers for a second, in which a channel gets more messages than may wait for
/// that link. Dropped messages never arrive there, so that gateway must leave the ring, and its clients reconnect.
async fn too_much_waits() {
    let world = gateways(3).await;
    let serving = world.serving();
    let (first, last) = (&serving[0], &serving[2]);
    let router = first.cluster().unwrap().router.clone();
    let draft = |links| Draft {
        sender: user(0),
        client_id: ClientId(Uuid::from_u128(world.random.lock().unwrap().random())),
        content: Content::Text {
            body: "long".into(),
            attachments: vec![long_link(); links],
            reply_to: None,
        },
        at: None,
        retry: false,
    };
    // Requests to a channel take no time if the first gateway owns it.
    let channel = loop {
        let bytes = world.random.lock().unwrap().random();
        let id = uuid::Builder::from_u128(bytes).with_version(uuid::Version::Random);
        let channel = ConversationId(id.into_uuid());
        let creation = Creation {
            kind: Kind::Channel,
            participants: vec![user(3)],
            name: None,
            public: false,
            posting: Posting::Everyone,
            at: None,
        };
        let create = Operation::Create(creation);
        router.ask(channel, user(0), create).await.unwrap();
        let began = Instant::now();
        for _ in 0..5 {
            router.send(channel, draft(0)).await.unwrap();
        }
        if began.elapsed().is_zero() {
            break channel;
        }
    };
    let subscriber = Arc::new(Subscriber::new(SessionId(1), user(3), Codec::Json, 1 << 22));
    let there = last.cluster().unwrap();
    there.users.register(&subscriber).await.unwrap();
    there.channels.subscribe_own(&subscriber, &[channel]).await;
    // By then every home knows the channel.
    sleep(Duration::from_secs(5)).await;
    let pair = (first.address.clone(), last.address.clone());
    world.wire.lock().unwrap().cut.insert(pair.clone());
    for _ in 0..3_500 {
        router.send(channel, draft(10)).await.unwrap();
    }
    sleep(Duration::from_secs(1)).await;
    world.wire.lock().unwrap().cut.remove(&pair);
    world.wire.lock().unwrap().healed.notify_waiters();
    sleep(Duration::from_secs(20)).await;
    assert!(
        last.over.load(Ordering::Relaxed),
        "the gateway did not leave the ring"
    );
    assert_eq!(world.live(), 2);
    router.send(channel, draft(0)).await.unwrap();
}

#[test]
fn a_gateway_that_falls_too_far_behind_leaves_the_ring() {
    paused(1, too_much_waits());
}
