//! A ring that is older than the log, as after a restore (rule [epoch-above]): what is acknowledged afterwards stays, also
//! what is not in the log.

use std::{sync::Arc, time::Duration};

use chat_gateway::{
    chat::{GetHistory, LogRange},
    model::{ClientId, Content, ConversationId, Draft, Kind, Seq, SettingsChange},
    mutation::{Mutation, break_rule},
    store::{RingRow, Store, simulated::Faults},
};
use tokio::time::sleep;
use uuid::Uuid;

use super::{
    paused,
    ranks::{conversation, create, patiently},
    world::{Consuming, World, user},
};

const GATEWAYS: usize = 2;
const CONVERSATIONS: u128 = 6;
/// A time that never passes.
const FAR: i64 = 4_000_000_000_000;

/// Kills all gateways, and starts others.
async fn kill_all(world: &Arc<World>, between: impl FnOnce()) {
    for gateway in world.serving() {
        world.kill(&gateway);
    }
    // What they wrote has arrived.
    sleep(Duration::from_secs(5)).await;
    between();
    for _ in 0..GATEWAYS {
        world.start();
    }
    while world.serving().len() < GATEWAYS {
        sleep(Duration::from_millis(100)).await;
    }
}

async fn send(world: &Arc<World>, id: ConversationId, text: String) -> (Seq, String) {
    let client_id = ClientId(Uuid::new_v4());
    let seq = patiently(world, async |gateway| {
        let draft = Draft {
            sender: user(0),
            client_id,
            content: Content::text(&text),
            at: None,
            retry: true,
        };
        let cluster = gateway.cluster()?;
        let asked = gateway.ask(async move { cluster.router.send(id, draft).await });
        Some(asked.await?.ok()?.seq)
    });
    (seq.await, text)
}

async fn mute(world: &Arc<World>, id: ConversationId, until: i64) {
    patiently(world, async |gateway| {
        let change = SettingsChange {
            muted_until: Some(until),
            push: None,
        };
        let cluster = gateway.cluster()?;
        let asked = gateway.ask(async move {
            let router = &cluster.router;
            router.set_settings(&user(0), id, change).await
        });
        asked.await?.ok()
    })
    .await;
}

/// The messages of a conversation, and until when the user muted it.
async fn stored(world: &Arc<World>, id: ConversationId) -> (Vec<(Seq, String)>, Option<i64>) {
    let texts = patiently(world, async |gateway| {
        let cluster = gateway.cluster()?;
        let asked = gateway.ask(async move {
            let range = LogRange::Newest;
            let get = GetHistory { range, limit: 50 };
            cluster.router.ask(id, user(0), get).await
        });
        let page = asked.await?.ok()?;
        let text = |content: &Content| match content {
            Content::Text { body, .. } => Some(body.clone()),
            Content::System(_) => None,
        };
        let entries = page.entries.iter();
        let texts = entries.filter_map(|entry| Some((entry.seq, text(&entry.content)?)));
        Some(texts.collect())
    });
    let texts = texts.await;
    let muted = patiently(world, async |gateway| {
        let cluster = gateway.cluster()?;
        let asked = gateway.ask(async move {
            let router = &cluster.router;
            router.inbox_rows(&user(0)).await
        });
        let rows = asked.await?.ok()?;
        let row = rows.iter().find(|row| row.conversation == id)?;
        Some(row.settings.muted_until)
    });
    (texts, muted.await)
}

async fn run() -> Vec<String> {
    let world = World::new(1, Faults::NONE, false, false, None, Consuming::default());
    kill_all(&world, || {}).await;
    // The ring that is restored.
    let early = RingRow {
        members: Vec::new(),
        ..world.store.ring().await.unwrap().unwrap()
    };
    for _ in 0..3 {
        kill_all(&world, || {}).await;
    }
    let ids: Vec<_> = (0..CONVERSATIONS)
        .map(|n| conversation(n, Kind::Group))
        .collect();
    let mut sent = Vec::new();
    for &id in &ids {
        create(&world, id, Kind::Group).await;
        sent.push(vec![send(&world, id, "before the restore".into()).await]);
        mute(&world, id, FAR).await;
    }
    kill_all(&world, || world.store.restore_ring(&early)).await;
    for (&id, sent) in ids.iter().zip(&mut sent) {
        sent.push(send(&world, id, "after the restore".into()).await);
        mute(&world, id, FAR + 1).await;
    }
    kill_all(&world, || {}).await;
    let mut found = Vec::new();
    for (&id, sent) in ids.iter().zip(&sent) {
        let stored = stored(&world, id).await;
        let expected = (sent.clone(), Some(FAR + 1));
        if stored != expected {
            found.push(format!("{stored:?}, not {expected:?}"));
        }
    }
    found
}

#[test]
fn what_is_acknowledged_under_a_restored_ring_stays() {
    let found = paused(1, run());
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn a_ring_that_stays_older_than_the_log_is_found() {
    break_rule(Some(Mutation::EpochAbove));
    let found = paused(1, run());
    break_rule(None);
    println!("{:?}", found.first());
    assert!(!found.is_empty(), "the broken rule is not found");
}
