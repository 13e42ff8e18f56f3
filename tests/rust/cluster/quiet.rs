//! The checks at a quiet point, when nothing is sent and every gateway serves.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use chat_gateway::{
    chat::{LogRange, Operation, Outcome, Page},
    cluster::Users,
    model::{ClientId, Content, Seq, SystemChange, UserId, limits::RING_RAISE},
    protocol::InboxItem,
};
use tokio::time::{sleep, timeout};

use super::world::{Device, VISITOR, World, contiguous, user, visitor};

/// The time within which everything is served.
const PATIENCE: Duration = Duration::from_secs(30);

/// Checks that every client has every message and that every inbox agrees with the log.
pub(super) async fn check_quiet(world: &Arc<World>, devices: &[Arc<Device>], round: usize) {
    let waiting = *world.waiting.lock().unwrap();
    if waiting > 0 {
        let text = format!("round {round}: {waiting} messages are not acknowledged");
        world.checker.lock().unwrap().find(text);
    }
    let version = world.store.ring_version();
    if version >= RING_RAISE {
        let text = format!("round {round}: the ring was raised to {version}, and was not older");
        world.checker.lock().unwrap().find(text);
    }
    let mut heads = [0; 3];
    for (conversation, head) in heads.iter_mut().enumerate() {
        let Some(page) = whole_history(world, conversation).await else {
            let text =
                format!("round {round}: conversation {conversation} is not served within 30 s");
            world.checker.lock().unwrap().find(text);
            return;
        };
        *head = page.head;
        let entries: Vec<_> = page.entries.iter().map(|e| (e.seq, e.client_id)).collect();
        check_history(world, conversation, &entries, page.head, round);
    }
    // A gateway may lose its lease just now. Its clients connect again.
    let is_connected = |device: &Arc<Device>| device.connected.lock().unwrap().is_some();
    let somebody = timeout(PATIENCE, async {
        while !devices.iter().any(is_connected) {
            sleep(Duration::from_millis(10)).await;
        }
    });
    if somebody.await.is_err() {
        let text = format!("round {round}: nobody is connected");
        world.checker.lock().unwrap().find(text);
    }
    for device in devices {
        if device.connected.lock().unwrap().is_none() {
            continue;
        }
        check_received(world, device, &heads, round);
        let items = timeout(PATIENCE, inbox_items(world, device.user)).await;
        let Ok(Some(items)) = items else {
            let text = format!("round {round}: no inbox of user {}", device.user);
            world.checker.lock().unwrap().find(text);
            return;
        };
        check_inbox(world, device, &items, &heads, round);
    }
}

/// Reads the whole page of a conversation. `None` if it is not served within 30 s.
pub(super) async fn whole_history(world: &World, conversation: usize) -> Option<Page> {
    let whole = timeout(PATIENCE, async {
        loop {
            if let Some(read) = world.history(conversation, 0).await {
                break read;
            }
            sleep(Duration::from_millis(100)).await;
        }
    });
    whole.await.ok()
}

/// Checks that a history is whole, and has each acknowledged message once, at its seq.
fn check_history(
    world: &World,
    conversation: usize,
    entries: &[(Seq, ClientId)],
    newest: Seq,
    round: usize,
) {
    let mut checker = world.checker.lock().unwrap();
    if entries.len() as u64 != newest {
        checker.find(format!(
            "round {round}: the history has {} of {newest} entries",
            entries.len()
        ));
    }
    let ids: BTreeSet<ClientId> = entries.iter().map(|(_, client)| *client).collect();
    if ids.len() != entries.len() {
        checker.find(format!("round {round}: a client id is in the log twice"));
    }
    let places: BTreeMap<ClientId, Seq> = entries.iter().map(|(s, c)| (*c, *s)).collect();
    let acknowledged = checker.acknowledged.clone();
    for (client, (of, seq)) in acknowledged {
        if of == conversation && places.get(&client) != Some(&seq) {
            let found = places.get(&client);
            checker.find(format!(
                "{client} acknowledged at {seq}, found at {found:?}"
            ));
        }
    }
}

/// Checks that a connected client has every message up to the heads of its conversations.
fn check_received(world: &World, device: &Device, heads: &[Seq; 3], round: usize) {
    for (conversation, &head) in heads.iter().enumerate() {
        let have = contiguous(&device.got.lock().unwrap()[conversation]);
        if device.is_in(conversation) && have < head {
            let gateway = device.connected.lock().unwrap().as_ref().map(|g| g.number);
            world.checker.lock().unwrap().find(format!(
                "round {round}: user {} on gateway {gateway:?} has {have} of {head} messages of conversation {conversation}",
                device.user
            ));
        }
    }
}

/// Reads the inbox of a user, page by page. `None` if no gateway serves.
async fn inbox_items(world: &World, number: usize) -> Option<Vec<InboxItem>> {
    loop {
        sleep(Duration::from_millis(10)).await;
        let gateway = world.some_gateway()?;
        let Some(cluster) = gateway.cluster() else {
            continue;
        };
        let of = user(number);
        let asked = gateway.ask(async move { pages(&cluster.users, &of).await });
        if let Some(Some(items)) = asked.await {
            return Some(items);
        }
    }
}

/// Reads an inbox in pages of one conversation.
async fn pages(users: &Users, user: &UserId) -> Option<Vec<InboxItem>> {
    let (mut items, mut before) = (Vec::new(), None);
    loop {
        let mut page = users.inbox(user, before.as_deref(), 1).await.ok()?;
        items.append(&mut page.items);
        if page.next.is_none() {
            return Some(items);
        }
        before = page.next;
    }
}

/// Checks that an inbox is in order, and has the last message of the group and of the dm.
fn check_inbox(
    world: &World,
    device: &Device,
    items: &[InboxItem],
    heads: &[Seq; 3],
    round: usize,
) {
    let rank = |item: &InboxItem| {
        let last = item.last_message.as_ref();
        last.map_or(0, |last| last.message_id.rank())
    };
    if !items.is_sorted_by(|a, b| rank(a) >= rank(b)) {
        let text = format!(
            "round {round}: the inbox of user {} is not in order",
            device.user
        );
        world.checker.lock().unwrap().find(text);
    }
    for (conversation, &head) in heads.iter().enumerate().take(2) {
        let item = items
            .iter()
            .find(|item| item.conversation == world.conversations[conversation]);
        let last = item.map_or(0, |item| item.last_seq);
        if device.is_in(conversation) && last != head {
            world.checker.lock().unwrap().find(format!(
                "round {round}: the inbox of user {} says {last}, the log {}",
                device.user, head
            ));
        }
    }
}

/// Checks that what each home remembers of the visitor agrees with the inbox.
pub(super) async fn check_places(world: &Arc<World>, round: usize) {
    let gateways = world.gateways.lock().unwrap().clone();
    for (number, gateway) in gateways.iter().enumerate() {
        let Some(cluster) = gateway.cluster() else {
            continue;
        };
        let asked = gateway.ask(async move {
            let visitor = visitor(u64::MAX - number as u64);
            let places = cluster.users.register(&visitor).await;
            cluster.users.leave(&visitor);
            let rows = cluster.users.inbox_rows(&user(VISITOR)).await;
            Some((places.ok()?, rows.ok()?))
        });
        let Some(Some((places, rows))) = asked.await else {
            continue;
        };
        let places: BTreeMap<_, _> = places
            .into_iter()
            .map(|place| (place.conversation, place.last_seq))
            .collect();
        let rows: BTreeMap<_, _> = rows
            .into_iter()
            .map(|row| {
                let last = row.summary.and_then(|summary| summary.last);
                (row.conversation, last.map(|last| last.seq))
            })
            .collect();
        if places != rows {
            world.checker.lock().unwrap().find(format!(
                "round {round}: the visitor's home remembers {places:?}, the inbox says {rows:?}"
            ));
        }
    }
}

/// Checks that the visitor saw no message that was sent to the channel while they were not in it and it was not public.
pub(super) async fn check_secrets(world: &Arc<World>) {
    let seen = std::mem::take(&mut world.secrets.lock().unwrap().seen);
    let operation = Operation::History {
        range: LogRange::After(0),
        limit: 10_000,
    };
    let (visitor, channel) = (user(VISITOR), world.conversations[2]);
    let entries = loop {
        if seen.is_empty() {
            return;
        }
        sleep(Duration::from_millis(10)).await;
        let Some(gateway) = world.some_gateway() else {
            continue;
        };
        let Some(cluster) = gateway.cluster() else {
            continue;
        };
        let operation = operation.clone();
        let asked =
            gateway.ask(async move { cluster.router.ask(channel, user(0), operation).await });
        if let Some(Ok(Outcome::History(page))) = asked.await {
            break page.entries;
        }
    };
    let [mut is_in, mut is_public] = [false; 2];
    for entry in entries {
        if seen.contains(&entry.seq) && !is_in && !is_public {
            let seq = entry.seq;
            let text = format!(
                "the visitor saw message {seq} of the channel, which was sent when they had no access"
            );
            world.checker.lock().unwrap().find(text);
        }
        match &entry.content {
            Content::System(SystemChange::Created { public, .. }) => is_public = *public,
            Content::System(SystemChange::Updated {
                public: Some(public),
                ..
            }) => is_public = *public,
            Content::System(SystemChange::Added { user }) if *user == visitor => is_in = true,
            Content::System(SystemChange::Removed { user }) if *user == visitor => is_in = false,
            _ => {}
        }
    }
}
