//! The order of inboxes while the wall clock of one gateway is wrong: a conversation that got an entry later is above the
//! others, whatever the clocks said, whoever answers, and from memory as well as from the store.

use std::{sync::Arc, time::Duration};

use chat_gateway::{
    chat::{Creation, Operation, Outcome},
    clock::set_ahead,
    model::{ClientId, Content, ConversationId, Draft, Kind, Posting, Seq},
    mutation::{Mutation, break_rule},
    store::simulated::Faults,
};
use tokio::time::sleep;
use uuid::Uuid;

use super::{
    paused,
    world::{Consuming, Gateway, World, user},
};
use crate::broken::{find, require};

const GATEWAYS: usize = 3;
/// Enough that each gateway owns some.
const CONVERSATIONS: u128 = 12;
/// By how much the wrong clock is ahead, in milliseconds.
const WRONG: i64 = 2 * 3_600_000;
/// Longer than two gateways that say nothing else wait until they tell each other their ranks.
const TOLD: Duration = Duration::from_secs(1);

/// Asks through any gateway until it is done.
pub(super) async fn patiently<T>(
    world: &Arc<World>,
    ask: impl AsyncFn(Arc<Gateway>) -> Option<T>,
) -> T {
    loop {
        for gateway in world.serving() {
            if let Some(done) = ask(gateway).await {
                return done;
            }
        }
        sleep(Duration::from_millis(100)).await;
    }
}

pub(super) fn conversation(number: u128, kind: Kind) -> ConversationId {
    let spread = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    let id = uuid::Builder::from_u128(spread ^ kind as u128);
    ConversationId(id.with_version(uuid::Version::Random).into_uuid())
}

pub(super) async fn create(world: &Arc<World>, id: ConversationId, kind: Kind) {
    patiently(world, async |gateway| {
        let create = Operation::Create(Creation {
            kind,
            participants: Vec::new(),
            name: Some("here".into()),
            public: false,
            posting: Posting::Everyone,
            at: None,
        });
        let cluster = gateway.cluster()?;
        let asked = gateway.ask(async move { cluster.router.ask(id, user(0), create).await });
        matches!(asked.await, Some(Ok(Outcome::Created { .. }))).then_some(())
    })
    .await;
}

/// Sends a message, and returns its seq.
pub(super) async fn send(world: &Arc<World>, id: ConversationId) -> Seq {
    let client_id = ClientId(Uuid::new_v4());
    patiently(world, async |gateway| {
        let draft = Draft {
            sender: user(0),
            client_id,
            content: Content::text("hello"),
            at: None,
            retry: true,
        };
        let cluster = gateway.cluster()?;
        let asked = gateway.ask(async move { cluster.router.send(id, draft).await });
        asked.await?.ok()
    })
    .await
    .seq
}

/// Returns the user's conversations in the order of the inbox, read in pages through this gateway.
async fn order(gateway: &Arc<Gateway>, limit: usize) -> Option<Vec<ConversationId>> {
    let (mut all, mut before) = (Vec::new(), None::<String>);
    loop {
        let (cluster, from) = (gateway.cluster()?, before.take());
        let asked = gateway.ask(async move {
            let users = &cluster.users;
            users.inbox(&user(0), from.as_deref(), limit).await
        });
        let page = asked.await?.ok()?;
        all.extend(page.items.iter().map(|item| item.conversation));
        match page.next {
            Some(next) => before = Some(next),
            None => return Some(all),
        }
    }
}

/// Compares the order through each gateway with the expected one.
async fn check(
    world: &Arc<World>,
    expected: &[ConversationId],
    when: &str,
    found: &mut Vec<String>,
) {
    for gateway in world.serving() {
        for limit in [4, 50] {
            let shown = loop {
                match order(&gateway, limit).await {
                    Some(shown) => break shown,
                    None => sleep(Duration::from_millis(100)).await,
                }
            };
            if shown != expected {
                let name = &gateway.address;
                found.push(format!(
                    "{when}, pages of {limit} of {name}: {shown:?}, not {expected:?}"
                ));
            }
        }
    }
}

/// Replaces all gateways by new ones, which know only what the store has.
async fn replace_all(world: &Arc<World>) {
    let before = world.serving();
    before.iter().for_each(|gateway| world.let_leave(gateway));
    while before
        .iter()
        .any(|gateway| !gateway.over.load(std::sync::atomic::Ordering::Relaxed))
    {
        sleep(Duration::from_millis(100)).await;
    }
    world.start_all(GATEWAYS).await;
}

/// Sends to each conversation in turn while the clock of its owner is ahead, and to another one when it is right again.
async fn run() -> Vec<String> {
    let world = World::new(1, Faults::NONE, false, false, None, Consuming::default());
    world.start_all(GATEWAYS).await;
    let mut found = Vec::new();
    // The newest is the first.
    let mut expected = Vec::new();
    for number in 0..CONVERSATIONS {
        let kind = if number % 3 == 0 {
            Kind::Channel
        } else {
            Kind::Group
        };
        let id = conversation(number, kind);
        create(&world, id, kind).await;
        expected.insert(0, id);
        sleep(TOLD).await;
    }
    check(&world, &expected, "with right clocks", &mut found).await;
    for turn in 0..CONVERSATIONS as usize {
        let ahead = expected.remove((5 * turn) % expected.len());
        expected.insert(0, ahead);
        set_ahead(WRONG);
        send(&world, ahead).await;
        set_ahead(0);
        sleep(TOLD).await;
        let later = expected.remove(1 + (7 * turn) % (expected.len() - 1));
        expected.insert(0, later);
        send(&world, later).await;
        sleep(TOLD).await;
    }
    check(&world, &expected, "after a wrong clock", &mut found).await;
    set_ahead(WRONG);
    let last = expected.remove(3);
    expected.insert(0, last);
    send(&world, last).await;
    set_ahead(0);
    sleep(TOLD).await;
    replace_all(&world).await;
    let later = expected.remove(5);
    expected.insert(0, later);
    send(&world, later).await;
    sleep(TOLD).await;
    check(&world, &expected, "after a restart", &mut found).await;
    replace_all(&world).await;
    check(&world, &expected, "from the store", &mut found).await;
    found
}

#[test]
fn a_clock_that_was_wrong_keeps_no_conversation_on_top() {
    let found = paused(1, run());
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn each_broken_rule_of_ranks_is_found() {
    let rules = [
        (Mutation::RankAbove, "after a wrong clock, "),
        (Mutation::RankTold, "after a wrong clock, "),
        (Mutation::RankReserved, "after a restart, "),
    ];
    require(rules.map(|(rule, kind)| {
        find(rule, 1..2, &[kind], |seed, is_broken| {
            break_rule(is_broken.then_some(rule));
            let found = paused(seed, run());
            break_rule(None);
            found
        })
    }));
}
