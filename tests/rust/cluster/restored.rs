//! A ring that is older than what is stored, as after a restore (rule [epoch-above]): what is acknowledged afterwards stays,
//! in the log as well as settings and devices.

use std::{sync::Arc, time::Duration};

use chat_gateway::{
    chat::{Error, GetHistory, LogRange},
    model::{
        ClientId, Content, ConversationId, Device, Draft, Kind, PushContent, PushProvider, Seq,
        SettingsChange, limits::RING_RAISE,
    },
    mutation::{Mutation, break_rule},
    store::{ConsumerStore as _, RingRow, Store, simulated::Faults},
};
use tokio::time::sleep;
use uuid::Uuid;

use super::{
    paused,
    ranks::{conversation, create, patiently},
    world::{Consuming, World, user},
};
use crate::broken::{find, require};

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
    world.start_all(GATEWAYS).await;
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

fn token(id: ConversationId, until: i64) -> String {
    format!("{id} {until}")
}

/// Mutes a conversation and registers a device, which both are stored with versions of the ring.
async fn set(world: &Arc<World>, id: ConversationId, until: i64) {
    patiently(world, async |gateway| {
        let change = SettingsChange {
            muted_until: Some(until),
            push: None,
        };
        let device = Device {
            id: id.to_string(),
            provider: PushProvider::Fcm,
            token: token(id, until),
            content: PushContent::None,
            version: 0,
        };
        let cluster = gateway.cluster()?;
        let asked = gateway.ask(async move {
            let users = &cluster.users;
            users.set_device(&user(0), device).await?;
            users.set_settings(&user(0), id, change).await
        });
        asked.await?.ok()
    })
    .await;
}

/// What is stored of a conversation: the messages, until when the user muted it, and the token of the device.
type Stored = (Vec<(Seq, String)>, Option<i64>, Option<String>);

async fn stored(world: &Arc<World>, id: ConversationId) -> Stored {
    patiently(world, async |gateway| {
        let cluster = gateway.cluster()?;
        let asked = gateway.ask(async move {
            let (range, limit) = (LogRange::Newest, 50);
            let page = cluster.router.ask(id, user(0), GetHistory { range, limit });
            Ok::<_, Error>((page.await?, cluster.users.inbox_rows(&user(0)).await?))
        });
        let (page, rows) = asked.await?.ok()?;
        let text = |content: &Content| match content {
            Content::Text { body, .. } => Some(body.clone()),
            Content::System(_) => None,
        };
        let entries = page.entries.iter();
        let texts = entries.filter_map(|entry| Some((entry.seq, text(&entry.content)?)));
        let row = rows.iter().find(|row| row.conversation == id)?;
        let devices = world.store.devices(&user(0)).await.ok()?;
        let (_, devices) = devices.unwrap_or_default();
        let device = devices
            .into_iter()
            .find(|device| device.id == id.to_string());
        let token = device.map(|device| device.token);
        Some((texts.collect(), row.settings.muted_until, token))
    })
    .await
}

/// What is asked for first under the restored ring.
#[derive(Clone, Copy, PartialEq)]
enum First {
    Log,
    Settings,
}

/// Returns what is wrong, and whether the ring was raised.
async fn run(first: First) -> (Vec<String>, bool) {
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
    let ids = (0..CONVERSATIONS).map(|n| conversation(n, Kind::Group));
    let ids: Vec<_> = ids.collect();
    let mut sent = Vec::new();
    for &id in &ids {
        create(&world, id, Kind::Group).await;
        sent.push(vec![send(&world, id, "before the restore".into()).await]);
        set(&world, id, FAR).await;
    }
    kill_all(&world, || world.store.restore_ring(&early)).await;
    for (&id, sent) in ids.iter().zip(&mut sent) {
        if first == First::Settings {
            set(&world, id, FAR + 1).await;
            continue;
        }
        sent.push(send(&world, id, "after the restore".into()).await);
    }
    let is_raised = world.store.ring_version() >= RING_RAISE;
    kill_all(&world, || {}).await;
    let until = if first == First::Settings {
        FAR + 1
    } else {
        FAR
    };
    let mut found = Vec::new();
    for (&id, sent) in ids.iter().zip(&sent) {
        let stored = stored(&world, id).await;
        let expected = (sent.clone(), Some(until), Some(token(id, until)));
        if stored != expected {
            found.push(format!("{stored:?}, not {expected:?}"));
        }
    }
    (found, is_raised)
}

const EACH: [(First, Mutation); 2] = [
    (First::Log, Mutation::EpochAbove),
    (First::Settings, Mutation::VersionAbove),
];

#[test]
fn what_is_acknowledged_under_a_restored_ring_stays() {
    for (first, _) in EACH {
        let (found, is_raised) = paused(1, run(first));
        assert!(found.is_empty() && is_raised, "{found:#?}");
    }
}

#[test]
fn writing_below_what_is_stored_is_found() {
    require(EACH.map(|(first, rule)| {
        find(rule, 1..2, &[", not "], |seed, is_broken| {
            break_rule(is_broken.then_some(rule));
            let (found, _) = paused(seed, run(first));
            break_rule(None);
            found
        })
    }));
}
