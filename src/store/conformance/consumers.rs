//! The promises about consumers, devices and settings. What is written in any order must read the same.

use std::collections::BTreeSet;

use super::{Checked, changes, mark, somebody};
use crate::{
    clock::today,
    model::{
        ConsumerName, ConversationId, Cursor, Device, Kind, Millis, PushContent, PushProvider,
        UserId,
    },
    store::{
        ConsumerState, EventAt, InboxKey, InboxRow, InboxSettings, InboxWrite, LaggingRow,
        SkippedRow, SkippedShard, Store, TokenRow, Version, consumer_shard,
    },
};

pub(super) async fn check(store: &dyn Store) -> Checked {
    offsets_only_rise(store).await?;
    many_offsets_are_set_at_once(store).await?;
    lagging_rows_are_the_same_in_any_order(store).await?;
    late_lagging_rows_stay_removed(store).await?;
    lagging_rows_are_paged(store).await?;
    a_replay_is_removed_for_ever(store).await?;
    the_newest_state_of_a_consumer_counts(store).await?;
    skipped_events_are_listed(store).await?;
    the_newest_devices_count(store).await?;
    the_newest_owner_of_a_token_counts(store).await?;
    the_newest_settings_count(store).await?;
    settings_alone_make_no_row(store).await
}

fn consumer() -> ConsumerName {
    ConsumerName::webhook(&uuid::Uuid::new_v4().simple().to_string())
}

/// Returns all orders of some steps.
fn orders<T: Clone>(steps: &[T]) -> Vec<Vec<T>> {
    if steps.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for first in 0..steps.len() {
        let mut rest = steps.to_vec();
        let step = rest.remove(first);
        for mut order in orders(&rest) {
            order.insert(0, step.clone());
            all.push(order);
        }
    }
    all
}

async fn offsets_only_rise(store: &dyn Store) -> Checked {
    let steps = [Cursor(5, 3), Cursor(4, 9), Cursor(5, 0), Cursor(0, 0)];
    for order in orders(&steps) {
        let (id, one, other) = (ConversationId::random(), consumer(), consumer());
        assert_eq!(store.offsets(id).await?, []);
        let mut highest = Cursor::default();
        for offset in &order {
            store.set_offsets(&[(id, one.clone(), *offset)]).await?;
            highest = Cursor(highest.0.max(offset.0), highest.1.max(offset.1));
            assert_eq!(store.offsets(id).await?, [(one.clone(), highest)]);
        }
        // An offset of zeros is a row too. Offsets of other consumers and conversations are others.
        let zero = (id, other.clone(), Cursor::default());
        let elsewhere = (ConversationId::random(), one.clone(), Cursor(99, 99));
        store.set_offsets(&[zero, elsewhere]).await?;
        let found: BTreeSet<_> = store.offsets(id).await?.into_iter().map(plain).collect();
        let wanted = [(one, highest), (other, Cursor::default())];
        assert_eq!(found, wanted.into_iter().map(plain).collect());
    }
    store.set_offsets(&[]).await
}

fn plain((consumer, offset): (ConsumerName, Cursor)) -> (ConsumerName, u64, u64) {
    (consumer, offset.0, offset.1)
}

async fn many_offsets_are_set_at_once(store: &dyn Store) -> Checked {
    let consumer = consumer();
    let offset = |number| {
        let offset = Cursor(number, number * 2);
        (ConversationId::random(), consumer.clone(), offset)
    };
    let offsets: Vec<_> = (0..2_500).map(offset).collect();
    store.set_offsets(&offsets).await?;
    for (conversation, consumer, offset) in offsets.into_iter().step_by(499) {
        assert_eq!(store.offsets(conversation).await?, [(consumer, offset)]);
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Step {
    Lag(Cursor, Millis),
    Clear(Cursor),
}

async fn take(
    store: &dyn Store,
    consumer: &ConsumerName,
    id: ConversationId,
    step: Step,
) -> Checked {
    match step {
        Step::Lag(heads, oldest) => store.set_lagging(consumer, id, heads, oldest).await,
        Step::Clear(upto) => store.clear_lagging(consumer, id, upto).await,
    }
}

/// Takes the steps in each order, the first of them twice, and compares what is read.
async fn check_lagging(
    store: &dyn Store,
    steps: &[Step],
    wanted: Option<(Cursor, Millis)>,
) -> Checked {
    for order in orders(steps) {
        let (id, consumer) = (ConversationId::random(), consumer());
        for step in order.iter().chain(order.first()) {
            take(store, &consumer, id, *step).await?;
        }
        let wanted = wanted.map(|(heads, oldest)| LaggingRow {
            conversation: id,
            heads,
            oldest,
        });
        assert_eq!(store.lagging_row(&consumer, id).await?, wanted);
        let shard = consumer_shard(id);
        let listed = store.lagging(&consumer, shard, None, 10).await?;
        assert_eq!(listed, Vec::from_iter(wanted));
        // A sweep changes nothing that is read.
        store.sweep().await?;
        assert_eq!(store.lagging_row(&consumer, id).await?, wanted);
        let other = shard.wrapping_add(1);
        assert_eq!(store.lagging(&consumer, other, None, 10).await?, []);
        assert_eq!(store.lagging_row(&self::consumer(), id).await?, None);
    }
    Ok(())
}

async fn lagging_rows_are_the_same_in_any_order(store: &dyn Store) -> Checked {
    use Step::{Clear, Lag};
    let early = 1_700_000_000_000;
    let late = early + 5;
    check_lagging(
        store,
        &[Lag(Cursor(10, 0), early)],
        Some((Cursor(10, 0), early)),
    )
    .await?;
    // Higher heads survive.
    let steps = [
        Lag(Cursor(10, 5), early),
        Clear(Cursor(10, 3)),
        Lag(Cursor(12, 0), late),
    ];
    check_lagging(store, &steps, Some((Cursor(12, 5), early))).await?;
    // A part that the consumer reached is 0.
    let steps = [
        Lag(Cursor(10, 5), early),
        Clear(Cursor(9, 7)),
        Clear(Cursor(4, 5)),
    ];
    check_lagging(store, &steps, Some((Cursor(10, 0), early))).await?;
    // Equal and lower ones are removed.
    let steps = [
        Lag(Cursor(10, 5), early),
        Lag(Cursor(12, 4), late),
        Clear(Cursor(12, 5)),
    ];
    check_lagging(store, &steps, None).await?;
    check_lagging(
        store,
        &[Clear(Cursor(12, 5)), Lag(Cursor(12, 0), late)],
        None,
    )
    .await
}

async fn late_lagging_rows_stay_removed(store: &dyn Store) -> Checked {
    let (id, consumer) = (ConversationId::random(), consumer());
    store.set_lagging(&consumer, id, Cursor(7, 2), 1).await?;
    store.clear_lagging(&consumer, id, Cursor(9, 2)).await?;
    store.sweep().await?;
    for late in [Cursor(7, 2), Cursor(9, 1), Cursor(9, 2)] {
        store.set_lagging(&consumer, id, late, 2).await?;
        assert_eq!(store.lagging_row(&consumer, id).await?, None);
    }
    store.set_lagging(&consumer, id, Cursor(10, 2), 3).await?;
    let row = LaggingRow {
        conversation: id,
        heads: Cursor(10, 0),
        oldest: 3,
    };
    assert_eq!(store.lagging_row(&consumer, id).await?, Some(row));
    Ok(())
}

/// Returns a conversation of this shard. Those with higher numbers come later in every store.
fn conversation_in(shard: u8, number: u32) -> ConversationId {
    let mut bytes = *ConversationId::random().0.as_bytes();
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes[15] = shard;
    ConversationId(uuid::Uuid::from_bytes(bytes))
}

/// Pages have every row once and whole, whatever was removed between the rows. The first row has one part and the others
/// two, so that a store that reads an even number of parts divides a row.
async fn lagging_rows_are_paged(store: &dyn Store) -> Checked {
    let consumer = consumer();
    let mut wanted = Vec::new();
    for number in 0..300 {
        let conversation = conversation_in(77, number);
        let heads = Cursor(9, u64::from(number > 0));
        store.set_lagging(&consumer, conversation, heads, 5).await?;
        if (1..128).contains(&number) || number % 5 == 0 && number > 0 {
            let upto = Cursor(9, 1);
            store.clear_lagging(&consumer, conversation, upto).await?;
        } else {
            wanted.push(LaggingRow {
                conversation,
                heads,
                oldest: 5,
            });
        }
    }
    for limit in [1, 7, 80, 500] {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = store.lagging(&consumer, 77, after, limit).await?;
            assert!(page.len() <= limit);
            after = page.last().map(|row| row.conversation);
            let is_full = page.len() == limit;
            found.extend(page);
            if !is_full {
                break;
            }
        }
        assert_eq!(found, wanted);
    }
    Ok(())
}

async fn a_replay_is_removed_for_ever(store: &dyn Store) -> Checked {
    let (id, consumer) = (ConversationId::random(), consumer());
    let replay = consumer.replay(uuid::Uuid::new_v4());
    assert!(replay.is_replay() && !consumer.is_replay());
    let offset = |consumer: &ConsumerName, seq| [(id, consumer.clone(), Cursor(seq, 4))];
    store.set_offsets(&offset(&consumer, 9)).await?;
    store.set_lagging(&replay, id, Cursor(9, 4), 1).await?;
    store.set_offsets(&offset(&replay, 2)).await?;
    assert_eq!(store.offsets(id).await?.len(), 2);
    for _ in 0..2 {
        store.remove_replay(&replay, id).await?;
        let left = [(consumer.clone(), Cursor(9, 4))];
        assert_eq!(store.offsets(id).await?, left);
        store.set_offsets(&offset(&replay, 3)).await?;
        store.set_lagging(&replay, id, Cursor(9, 5), 1).await?;
        store.sweep().await?;
        assert_eq!(store.offsets(id).await?, left);
        assert_eq!(store.lagging_row(&replay, id).await?, None);
    }
    Ok(())
}

async fn the_newest_state_of_a_consumer_counts(store: &dyn Store) -> Checked {
    let state = |version: Version, reason: Option<&str>| ConsumerState {
        version,
        enabled: reason.is_none(),
        reason: reason.map(Into::into),
    };
    let removed = 1 << 33;
    let steps = [
        Some(state(removed - 1, Some("gone"))),
        None,
        Some(state(removed + 1, None)),
        Some(state(removed + 7, Some("410 from the receiver"))),
    ];
    // All of them; and the first two, of which the removal is the newest.
    for count in [4, 2] {
        let wanted = steps.iter().take(count).next_back().cloned().flatten();
        for order in orders(&steps[..count]) {
            let consumer = consumer();
            assert_eq!(store.consumer_state(&consumer).await?, None);
            for step in order.iter().chain(order.first()) {
                match step {
                    Some(state) => store.set_consumer_state(&consumer, state).await?,
                    None => store.remove_consumer_state(&consumer, removed).await?,
                }
            }
            assert_eq!(store.consumer_state(&consumer).await?, wanted);
            let mut listed = store.consumers().await?;
            listed.retain(|(name, _)| *name == consumer);
            let listed: Vec<_> = listed.into_iter().map(|(_, state)| state).collect();
            assert_eq!(listed, Vec::from_iter(wanted.clone()));
        }
    }
    Ok(())
}

async fn skipped_events_are_listed(store: &dyn Store) -> Checked {
    let (one, other) = (conversation_in(3, 1), conversation_in(3, 2));
    let (consumer, day) = (consumer(), today());
    assert_eq!(store.skipped_shards(&consumer).await?, []);
    let row = |conversation, at, status| SkippedRow {
        conversation,
        at,
        status,
    };
    let rows = [
        row(one, EventAt::Change(7), Some(400)),
        row(one, EventAt::Entry(7), None),
        row(one, EventAt::Entry(300), Some(422)),
        row(other, EventAt::Entry(1), Some(400)),
        row(other, EventAt::Change(2), Some(400)),
    ];
    for row in rows.iter().chain(&rows[..2]) {
        store.add_skipped(&consumer, day, row).await?;
    }
    store.add_skipped(&consumer, day - 1, &rows[0]).await?;
    store.add_skipped(&self::consumer(), day, &rows[0]).await?;
    store.sweep().await?;
    let shard = |day| SkippedShard {
        consumer: consumer.clone(),
        day,
        shard: 3,
    };
    let found = store.skipped_shards(&consumer).await?;
    assert_eq!(found.len(), 2);
    assert_eq!(
        BTreeSet::from_iter(found),
        BTreeSet::from([shard(day - 1), shard(day)])
    );
    assert_eq!(store.skipped(&shard(day - 1), None, 10).await?, rows[..1]);
    for limit in [1, 2, 10] {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = store.skipped(&shard(day), after, limit).await?;
            assert!(page.len() <= limit);
            let Some(last) = page.last() else { break };
            after = Some((last.conversation, last.at));
            found.extend(page);
        }
        assert_eq!(found.len(), rows.len(), "each once");
        assert!(rows.iter().all(|row| found.contains(row)), "{found:?}");
    }
    Ok(())
}

fn device(id: &str, token: &str) -> Device {
    Device {
        id: id.into(),
        provider: PushProvider::Web,
        token: token.into(),
        content: PushContent::None,
        version: (1 << 32) + 7,
    }
}

async fn the_newest_devices_count(store: &dyn Store) -> Checked {
    let phone = Device {
        provider: PushProvider::Apns,
        content: PushContent::Full,
        ..device("phone", "0a1b")
    };
    let browser = device("browser", r#"{"endpoint":"https://push.example"}"#);
    let steps = [
        (1 << 32, vec![phone.clone()]),
        (2 << 32, Vec::new()),
        ((2 << 32) + 1, vec![browser, phone]),
    ];
    for count in [3, 2] {
        for order in orders(&steps[..count]) {
            let user = somebody();
            assert_eq!(store.devices(&user).await?, None);
            for (version, devices) in order.iter().chain(order.first()) {
                store.set_devices(&user, *version, devices).await?;
            }
            let newest = steps[..count].last().cloned();
            assert_eq!(store.devices(&user).await?, newest);
        }
    }
    Ok(())
}

async fn the_newest_owner_of_a_token_counts(store: &dyn Store) -> Checked {
    let row = |version, name: &str, device: &str| TokenRow {
        version,
        user: super::user(name),
        device: device.into(),
    };
    let removed = 9;
    let steps = [
        Some(row(8, "alice", "phone")),
        None,
        Some(row(10, "bob", "tablet")),
    ];
    for count in [3, 2] {
        let wanted = steps.iter().take(count).next_back().cloned().flatten();
        for order in orders(&steps[..count]) {
            let mut hash = [7; 32];
            hash[..16].copy_from_slice(uuid::Uuid::new_v4().as_bytes());
            assert_eq!(store.device_token(&hash).await?, None);
            for step in order.iter().chain(order.first()) {
                match step {
                    Some(row) => store.set_device_token(&hash, row).await?,
                    None => store.remove_device_token(&hash, removed).await?,
                }
            }
            assert_eq!(store.device_token(&hash).await?, wanted);
        }
    }
    Ok(())
}

/// Returns the row of a conversation, read as a whole inbox and by its key.
async fn inbox_row(
    store: &dyn Store,
    user: &UserId,
    id: ConversationId,
) -> crate::store::Result<Option<InboxRow>> {
    let mut whole = store.inbox(user).await?;
    let row = whole.pop();
    assert_eq!(whole, [], "only one conversation");
    let keys = [InboxKey::unknown(id)];
    assert_eq!(
        store.inbox_rows(user, &keys).await?,
        Vec::from_iter(row.clone())
    );
    Ok(row)
}

async fn the_newest_settings_count(store: &dyn Store) -> Checked {
    let settings = |version, muted_until, push| InboxSettings {
        version,
        muted_until,
        push,
    };
    let steps = [
        settings(3 << 32, Some(1_800_000_000_000), false),
        settings((3 << 32) + 1, None, true),
        settings(4 << 32, Some(Millis::MAX), true),
        settings((4 << 32) + 1, None, false),
    ];
    for count in 1..=steps.len() {
        for order in orders(&steps[..count]) {
            let (id, user) = (ConversationId::random(), somebody());
            let write = InboxWrite {
                summary: Some(changes::summary(9, 1, 7, "hi")),
                read_seq: Some(2),
                ..InboxWrite::of(user.clone(), id, Kind::Group)
            };
            store.write_inbox(vec![write.clone()]).await?;
            let mut wanted = InboxRow::empty(id);
            wanted.merge(&write);
            assert_eq!(inbox_row(store, &user, id).await?, Some(wanted.clone()));
            for settings in order.iter().chain(order.first()) {
                assert!(store.set_settings(&user, id, settings).await?);
            }
            // A message changes no settings.
            store.write_inbox(vec![write]).await?;
            wanted.settings = steps[count - 1];
            assert_eq!(inbox_row(store, &user, id).await?, Some(wanted));
        }
    }
    Ok(())
}

async fn settings_alone_make_no_row(store: &dyn Store) -> Checked {
    let (id, user) = (ConversationId::random(), somebody());
    let settings = InboxSettings {
        version: 1 << 32,
        muted_until: None,
        push: false,
    };
    assert!(!store.set_settings(&user, id, &settings).await?);
    assert_eq!(inbox_row(store, &user, id).await?, None);
    // A read watermark may be stored before the row itself.
    store
        .mark(id, Kind::Group, &mark(&user, Some(9), None))
        .await?;
    assert!(!store.set_settings(&user, id, &settings).await?);
    let row = inbox_row(store, &user, id).await?;
    assert_eq!(row.map(|row| row.settings), Some(InboxSettings::default()));
    // A user who has left the conversation may still have settings for it.
    let write = InboxWrite {
        summary: Some(changes::summary(9, 1, 7, "hi")),
        left_seq: Some(10),
        ..InboxWrite::of(user.clone(), id, Kind::Group)
    };
    store.write_inbox(vec![write]).await?;
    assert!(store.set_settings(&user, id, &settings).await?);
    let row = inbox_row(store, &user, id).await?;
    assert_eq!(row.map(|row| row.settings), Some(settings));
    Ok(())
}
