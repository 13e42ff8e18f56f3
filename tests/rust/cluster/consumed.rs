//! The checks of webhooks and push at a quiet point: everything arrives, although nobody else opens the conversations.

use std::time::Duration;

use chat_gateway::{
    chat::Page,
    consumers::{
        SCAN_EVERY, push,
        webhooks::endpoint::{ATTEMPT_PAUSES_S, PAUSE_MAX},
    },
    model::{Cursor, EntryKind, Seq},
};
use tokio::time::{Instant, sleep, timeout};

use super::{quiet::whole_history, world::World};

/// The time after which no request is in progress that a client made before it rested: such a request opens conversations.
const REQUESTS_END_WITHIN: Duration = Duration::from_secs(5);

/// The time in which everything is found and sent when nothing pauses any more. A closed conversation is found by the next
/// scan, and again by a later one if the store fails meanwhile, which it does for one read in a hundred. Sending the few
/// messages of a round takes a second.
const BACKLOG: Duration = Duration::from_secs(5 * SCAN_EVERY.as_secs());

/// The time in which everything arrives at a receiver that is healthy. Two pauses may come one after the other:
///
/// 1. The gateway has paused the webhook. Such a pause is at most `PAUSE_MAX`, because the receiver asks for nothing longer.
///    Its probe succeeds, so no other pause follows.
/// 2. By that probe the gateway learns that an event failed by itself, so that event waits for its next attempt. This is the
///    third attempt at most: an event fails only from the beginning of a round until this check, which is shorter than the
///    pause after the second attempt, and this check waits until it has arrived.
const ARRIVES_WITHIN: Duration =
    Duration::from_secs(PAUSE_MAX.as_secs() + ATTEMPT_PAUSES_S[1] + BACKLOG.as_secs());

/// The same for push. A home waits until it may try the device again, and may then wait until somebody may try the service.
const PUSHED_WITHIN: Duration =
    Duration::from_secs(2 * push::PAUSE_MAX.as_secs() + BACKLOG.as_secs());

/// What must arrive.
pub(super) struct Expected {
    /// The newest entry and change of each conversation.
    heads: Vec<Cursor>,
    /// The newest message of the group that is not deleted.
    newest: Seq,
}

/// Lets everyone rest, and closes all conversations. From then on only consumers ask for them, so what no consumer finds is
/// lost. From then on the receiver is healthy, too. Returns what must arrive.
pub(super) async fn begin(world: &World) -> Expected {
    world.rest(true);
    sleep(REQUESTS_END_WITHIN).await;
    let (mut heads, mut newest) = (Vec::new(), 0);
    for conversation in 0..world.conversations.len() {
        let Some(page) = whole_history(world, conversation).await else {
            heads.push(Cursor::default());
            continue;
        };
        heads.push(Cursor(page.head, page.rev));
        if conversation == 0 {
            newest = newest_text(&page);
        }
    }
    for gateway in world.serving() {
        let cluster = gateway.cluster();
        (0..heads.len()).for_each(|_| cluster.iter().for_each(|c| c.conversations.evict_one()));
    }
    // What was just closed and not stored is lost, and is loaded again.
    sleep(Duration::from_secs(2)).await;
    world.arrivals.set_healthy(true);
    Expected { heads, newest }
}

/// Returns the newest message of a page that is not deleted.
fn newest_text(page: &Page) -> Seq {
    let texts = page.entries.iter().rev().filter(|entry| {
        let state = page.states.iter().find(|(seq, _)| *seq == entry.seq);
        let newest = entry.newest(state.map(|(_, state)| &**state)).last;
        newest.kind == EntryKind::Text && !newest.deleted
    });
    texts.map(|entry| entry.seq).next().unwrap_or_default()
}

/// Lets everyone go on, and the receiver fail again.
pub(super) fn end(world: &World) {
    world.arrivals.set_healthy(false);
    world.rest(false);
}

/// Checks that everything arrives at the receiver of the webhook, in order. Returns how long that took.
pub(super) async fn check_arrivals(world: &World, round: usize, expected: &Expected) -> Duration {
    let begin = Instant::now();
    let missing = || {
        let reached = world.arrivals.reached.lock().unwrap();
        let ids = world.conversations.iter().map(ToString::to_string);
        let each = ids.zip(&expected.heads).enumerate();
        let missing = each.filter_map(|(number, (id, head))| {
            let reached = reached.get(&id).copied().unwrap_or_default();
            (reached != *head).then(|| format!("conversation {number} {head:?}: {reached:?}"))
        });
        missing.collect::<Vec<_>>().join(", ")
    };
    let all_there = timeout(ARRIVES_WITHIN, async {
        while !missing().is_empty() {
            sleep(Duration::from_secs(1)).await;
        }
    });
    let mut found = Vec::new();
    if all_there.await.is_err() {
        let missing = missing();
        found.push(format!(
            "round {round}: not all arrived at the receiver: {missing}"
        ));
    }
    found.extend(world.arrivals.take_findings());
    let mut checker = world.checker.lock().unwrap();
    found.into_iter().for_each(|text| checker.find(text));
    begin.elapsed()
}

/// Checks that the device of the user who sleeps is notified of the newest message that is not deleted.
/// Returns how long that took.
pub(super) async fn check_pushed(world: &World, round: usize, expected: &Expected) -> Duration {
    let begin = Instant::now();
    let pushed = || {
        let newest = world.pushed.newest.lock().unwrap();
        newest
            .get(&world.conversations[0])
            .copied()
            .unwrap_or_default()
    };
    let all_there = timeout(PUSHED_WITHIN, async {
        while pushed() < expected.newest {
            sleep(Duration::from_secs(1)).await;
        }
    });
    let mut found = Vec::new();
    if all_there.await.is_err() {
        found.push(format!(
            "round {round}: message {} was not pushed, only {}",
            expected.newest,
            pushed()
        ));
    }
    found.extend(world.pushed.take_findings());
    let mut checker = world.checker.lock().unwrap();
    found.into_iter().for_each(|text| checker.find(text));
    begin.elapsed()
}
