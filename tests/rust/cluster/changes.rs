//! The checks of changes at a quiet point.

use std::{sync::Arc, time::Duration};

use chat_gateway::{
    chat::Page,
    model::{Change, Content, Entry, Rev, limits::DELETED_SEQS_KEPT},
    protocol::InboxItem,
    store::{Result, Store as _},
};
use tokio::time::{sleep, timeout};

use super::{
    quiet::whole_history,
    world::{Device, USERS, World, expected, user},
};
use crate::simulation::replay::Replay;

/// Checks that the log has the changes that clients asked for, that the store and every connected client show each
/// message as it is after them, and that every inbox agrees.
pub(super) async fn check_changes(world: &Arc<World>, devices: &[Arc<Device>], round: usize) {
    let mut inboxes = Vec::new();
    for number in 0..USERS {
        inboxes.push(inbox(world, number).await);
    }
    for conversation in 0..3 {
        let Some((page, changes)) = read(world, conversation).await else {
            let text = format!("round {round}: the changes of {conversation} are not served");
            return world.checker.lock().unwrap().find(text);
        };
        let mut replay = Replay::of(&changes, &page.entries);
        let mut findings = {
            let seen = &mut world.seen.lock().unwrap()[conversation];
            replay.check(seen);
            std::mem::take(&mut seen.findings)
        };
        findings.append(&mut replay.findings);
        check_states(world, conversation, &page, &replay, &mut findings).await;
        for device in devices {
            let is_connected = device.connected.lock().unwrap().is_some();
            if is_connected && device.is_in(conversation) {
                check_held(device, conversation, &page, &replay, &mut findings);
            }
            let inbox = inboxes[device.user].iter().flatten();
            let id = world.conversations[conversation];
            let item = inbox.clone().find(|item| item.conversation == id);
            if let (Some(item), true) = (item, device.is_in(conversation)) {
                check_item(item, device.user, &page, &replay, &mut findings);
            }
        }
        let mut checker = world.checker.lock().unwrap();
        for finding in findings {
            checker.find(format!(
                "round {round}: conversation {conversation}: {finding}"
            ));
        }
    }
}

/// Reads the entries with their states, and the log of changes.
async fn read(world: &World, conversation: usize) -> Option<(Page, Vec<Arc<Change>>)> {
    let page = whole_history(world, conversation).await?;
    let id = world.conversations[conversation];
    let rows = repeat(|| world.store.changes(id, 1, page.rev)).await?;
    Some((page, rows.into_iter().map(|row| row.record).collect()))
}

/// Repeats a read of the store, which sometimes fails. `None` after 30 s.
async fn repeat<T, F: Future<Output = Result<T>>>(read: impl Fn() -> F) -> Option<T> {
    let repeated = timeout(Duration::from_secs(30), async {
        loop {
            if let Ok(read) = read().await {
                break read;
            }
            sleep(Duration::from_millis(50)).await;
        }
    });
    repeated.await.ok()
}

/// Reads the inbox of a user. `None` if no gateway answers within 30 s.
async fn inbox(world: &World, number: usize) -> Option<Vec<InboxItem>> {
    let asked = timeout(Duration::from_secs(30), async {
        loop {
            sleep(Duration::from_millis(10)).await;
            let Some(gateway) = world.some_gateway() else {
                continue;
            };
            let Some(cluster) = gateway.cluster() else {
                continue;
            };
            let of = user(number);
            let asked = gateway.ask(async move { cluster.users.inbox(&of, None, 100).await });
            if let Some(Ok(inbox)) = asked.await {
                break inbox.items;
            }
        }
    });
    asked.await.ok()
}

/// Compares the states in the store, and those of the owner, with the log of changes.
async fn check_states(
    world: &World,
    conversation: usize,
    page: &Page,
    replay: &Replay<'_>,
    findings: &mut Vec<String>,
) {
    let id = world.conversations[conversation];
    let Some(stored) = repeat(|| world.store.log(id, 1, page.head)).await else {
        return findings.push("the store does not answer".into());
    };
    for entry in &page.entries {
        let expected = replay.states.get(&entry.seq);
        let mut stored = stored.states.iter().filter(|(seq, _)| *seq == entry.seq);
        let stored = stored.next().map(|(_, state)| state);
        if stored != expected || page.state(entry.seq) != expected {
            let owners = page.state(entry.seq);
            findings.push(format!(
                "{} is stored as {stored:?}, the owner has {owners:?}, the log {expected:?}",
                entry.seq
            ));
        }
    }
}

/// Checks that a connected client shows each message as it is.
fn check_held(
    device: &Device,
    conversation: usize,
    page: &Page,
    replay: &Replay<'_>,
    findings: &mut Vec<String>,
) {
    let held = &device.held.lock().unwrap()[conversation];
    for entry in &page.entries {
        let expected = expected(entry, replay.states.get(&entry.seq));
        let shown = held.shown(entry.seq);
        if shown.as_ref() != Some(&expected) {
            findings.push(format!(
                "user {} with cursor {} of {} shows {} as {shown:?}, it is {expected:?}",
                device.user, held.cursor, page.rev, entry.seq
            ));
        }
    }
}

/// Checks the rev, the preview and the unread count in an inbox.
fn check_item(
    item: &InboxItem,
    number: usize,
    page: &Page,
    replay: &Replay<'_>,
    findings: &mut Vec<String>,
) {
    let rev: Rev = page.rev;
    if item.rev != rev {
        findings.push(format!(
            "the inbox of user {number} has rev {}, not {rev}",
            item.rev
        ));
    }
    let Some(newest) = page.entries.last() else {
        return;
    };
    let shown = newest.newest(replay.states.get(&newest.seq)).last;
    if item.last_message.as_ref() != Some(&shown) {
        findings.push(format!(
            "the inbox of user {number} shows {:?}, not {shown:?}",
            item.last_message
        ));
    }
    let is_unread = |entry: &&Arc<Entry>| {
        let is_text = matches!(entry.content, Content::Text { .. });
        entry.seq > item.read_seq && is_text && !replay.deleted.contains_key(&entry.seq)
    };
    let count = page.entries.iter().filter(is_unread).count() as u64;
    let deleted = replay.deleted.range(item.read_seq + 1..).count();
    if item.unread < count || (deleted <= DELETED_SEQS_KEPT && item.unread != count) {
        findings.push(format!(
            "user {number} has {count} unread after {}, the inbox says {}",
            item.read_seq, item.unread
        ));
    }
}
