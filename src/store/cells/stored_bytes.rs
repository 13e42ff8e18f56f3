//! Tests that compare bytes that are stored with those of a list.

use std::sync::Arc;

use super::{Cell, states::log_page, values::log_cells};
use crate::{
    model::{
        Attachment, ClientId, ConsumerName, Content, ConversationId, Cursor, Device, Entry,
        EntryKind, Kind, Last, MessageId, PushContent, PushProvider, UserId,
    },
    store::{
        ConsumerState, ConsumerStore as _, EventAt, InboxSettings, InboxSummary, InboxWrite,
        LogRow, SkippedRow, Store as _, TokenRow,
        simulated::{Faults, Simulated},
    },
};

fn hex(cells: &[Cell]) -> Vec<String> {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    cells
        .iter()
        .map(|c| format!("{} {} {}", hex(&c.key), c.timestamp, hex(&c.value)))
        .collect()
}

fn id(byte: u8) -> uuid::Uuid {
    uuid::Uuid::from_bytes([byte; 16])
}

fn entry() -> Entry {
    let attachment = Attachment {
        url: "https://a/b".into(),
        name: Some("b".into()),
        mime: None,
        size: Some(7),
        ..Attachment::default()
    };
    Entry {
        seq: 300,
        message_id: MessageId(id(1)),
        client_id: ClientId(id(2)),
        sender: UserId::new("alice").unwrap(),
        at: 1_700_000_000_000,
        content: Content::Text {
            body: "hello".into(),
            attachments: vec![attachment],
            reply_to: Some(3),
        },
        texts: 7,
    }
}

#[test]
fn settled_rows_keep_the_end_of_their_settle() {
    let settled = LogRow {
        record: Arc::new(entry()),
        epoch: 5,
        settled: 298,
        settle_end: 310,
    };
    let cells = log_cells(ConversationId(id(9)), std::slice::from_ref(&settled));
    assert_eq!(log_page("test", &cells[..1]).unwrap().rows, [settled]);
}

fn write() -> InboxWrite {
    let last = Last {
        seq: 300,
        message_id: MessageId(id(1)),
        at: 1_700_000_000_000,
        sender: UserId::new("alice").unwrap(),
        kind: EntryKind::Text,
        preview: "hello".into(),
        deleted: false,
    };
    let conversation = ConversationId(id(9));
    InboxWrite {
        summary: Some(InboxSummary {
            seq: 300,
            kind: Kind::Group,
            name: Some("team".into()),
            joined_seq: 2,
            last: Some(last),
            changes: 0,
            texts: 7,
        }),
        read_seq: Some(299),
        left_seq: Some(298),
        ..InboxWrite::of(UserId::new("bob").unwrap(), conversation, Kind::Group)
    }
}

/// The devices, lagging rows, state, offsets, token, skipped event and settings, in the order of their keys. The
/// day of a removed cell is left out.
const STORED: [&str; 13] = [
    "44626f6200 4294967296 9195a570686f6e65a461706e73a430613162a46e6f6e65cf0000000100000000",
    "4c776562686f6f6b3a6f6e6500090909090909090909090909090909090973 301 91cf0000018bcfe56800",
    "4c776562686f6f6b3a6f6e653a696400090909090909090909090909090909090972 1125899906842624 ff",
    "4c776562686f6f6b3a6f6e653a696400090909090909090909090909090909090973 1125899906842624 ff",
    "4e776562686f6f6b3a6f6e6500 4294967296 92c2a3343130",
    "4f09090909090909090909090909090909776562686f6f6b3a6f6e650072 2 ",
    "4f09090909090909090909090909090909776562686f6f6b3a6f6e650073 300 ",
    "4f09090909090909090909090909090909776562686f6f6b3a6f6e653a69640072 1125899906842624 ff",
    "4f09090909090909090909090909090909776562686f6f6b3a6f6e653a69640073 1125899906842624 ff",
    "540707070707070707070707070707070707070707070707070707070707070707 4294967296 92a3626f62a570686f6e65",
    "58776562686f6f6b3a6f6e650000004e200909090909090909090909090909090909720000000000000002 0 91cd0190",
    "69626f6200090909090909090909090909090909096d 4294967296 91cf0000018bcfe56800",
    "69626f62000909090909090909090909090909090970 4294967296 91c2",
];

fn device() -> Device {
    Device {
        id: "phone".into(),
        provider: PushProvider::Apns,
        token: "0a1b".into(),
        content: PushContent::None,
        version: 1 << 32,
    }
}

#[tokio::test]
async fn the_same_bytes_are_stored_as_before() {
    let store = Simulated::new(1, Faults::NONE);
    let (hook, conversation) = (ConsumerName::webhook("one"), ConversationId(id(9)));
    let replay = ConsumerName::stored("webhook:one:id");
    let bob = UserId::new("bob").unwrap();
    let offset = (conversation, hook.clone(), Cursor(300, 2));
    store.set_offsets(&[offset]).await.unwrap();
    let at = 1_700_000_000_000;
    let lag = store.set_lagging(&hook, conversation, Cursor(301, 0), at);
    lag.await.unwrap();
    store.remove_replay(&replay, conversation).await.unwrap();
    let state = ConsumerState {
        version: 1 << 32,
        enabled: false,
        reason: Some("410".into()),
    };
    store.set_consumer_state(&hook, &state).await.unwrap();
    let skipped = SkippedRow {
        conversation,
        at: EventAt::Change(2),
        status: Some(400),
    };
    store.add_skipped(&hook, 20_000, &skipped).await.unwrap();
    store.set_devices(&bob, 1 << 32, &[device()]).await.unwrap();
    let token = TokenRow {
        version: 1 << 32,
        user: bob.clone(),
        device: "phone".into(),
    };
    store.set_device_token(&[7; 32], &token).await.unwrap();
    store.write_inbox(vec![write()]).await.unwrap();
    let settings = InboxSettings {
        version: 1 << 32,
        muted_until: Some(at),
        push: false,
    };
    let set = store.set_settings(&bob, conversation, &settings);
    assert!(set.await.unwrap());
    let is_pinned = |cell: &Cell| match cell.key[0] {
        b'i' => b"mp".contains(cell.key.last().unwrap()),
        table => b"OLNXDT".contains(&table),
    };
    let copies = store.copies().into_iter().map(|(key, copies)| {
        let (timestamp, mut value) = copies[0].clone();
        if value.len() == 5 && value[0] == u8::MAX {
            // The day of today.
            value.truncate(1);
        }
        Cell {
            key,
            timestamp,
            value,
        }
    });
    let cells: Vec<Cell> = copies.filter(is_pinned).collect();
    assert_eq!(hex(&cells), STORED);
}
