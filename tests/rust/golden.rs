//! Compares every frame of the protocol with `tests/golden/frames.json`, byte for byte. The SDK's tests
//! (`client-js/test/golden.test.ts`) read the same file, so neither side can change alone. The SDK writes the requests,
//! the gateway the replies and events: after an intended change `GOLDEN=write` rewrites a side's own part.

mod files;

use std::{collections::BTreeMap, fmt::Write as _, fs, path::PathBuf};

use chat_gateway::{
    model::{
        Attachment, ClientId, ConversationId, Details, EntryKind, Kind, Last, MessageId, Posting,
        PushContent, PushProvider, Role, SystemChange, UserId,
    },
    protocol::{
        Answer, ChangedEvent, Changes, Codec, Connected, ConversationAnswer, ConversationChange,
        ConversationEvent, Created, Deleted, DeviceItem, DeviceList, ErrorCode, Event, HistoryPage,
        InboxItem, InboxPage, Item, Limits, Message, Okay, ParticipantItem, ParticipantsPage,
        PresenceItem, PublicItem, PublicPage, ReactionBy, ReactionsPage, ReactorItem, Refusal,
        Reply, Sent, SettingsEvent, Switch,
    },
};
use serde::Serialize;
use serde_json::{Value, json};

use files::{file_notices, file_url};

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../golden/frames.json")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}

const CONVERSATION: &str = "0199c0de-0000-4000-8000-000000000001";
const MESSAGE: &str = "7a2b6c00-c0de-11f0-8000-0123456789ab";
const CLIENT: &str = "0199c0de-0000-4000-8000-000000000002";
const AT: i64 = 1_795_000_000_123;

/// The third write of a gateway under version 7 of the ring.
const VERSION: u64 = (7 << 32) + 3;

fn device(id: &str, provider: PushProvider, content: PushContent) -> DeviceItem {
    DeviceItem {
        device: id.into(),
        provider,
        content,
    }
}

fn conversation() -> ConversationId {
    CONVERSATION.parse().unwrap()
}

fn user(name: &str) -> UserId {
    UserId::new(name).unwrap()
}

fn message(seq: u64, system: Option<SystemChange>) -> Message {
    let text = system.is_none();
    Message {
        conversation: conversation(),
        seq,
        message_id: MESSAGE.parse::<MessageId>().unwrap(),
        client_id: CLIENT.parse::<ClientId>().unwrap(),
        sender: user("alice"),
        kind: if text {
            EntryKind::Text
        } else {
            EntryKind::System
        },
        body: if text {
            "Grüße 👋".into()
        } else {
            String::new()
        },
        attachments: Vec::new(),
        reply_to: None,
        system,
        at: AT,
        edited_at: None,
        deleted: None,
        reactions: BTreeMap::new(),
        mine: None,
        rev: 0,
    }
}

fn full_message() -> Message {
    Message {
        attachments: vec![Attachment {
            url: "https://example.org/cat.png".into(),
            name: Some("cat.png".into()),
            mime: Some("image/png".into()),
            size: Some(70_000),
            ..Attachment::default()
        }],
        reply_to: Some(3),
        ..message(4, None)
    }
}

fn reactions() -> BTreeMap<String, u64> {
    BTreeMap::from([("👍".into(), 3), (":party:".into(), 1)])
}

fn deleted() -> Deleted {
    Deleted {
        by: user("bob"),
        at: AT,
    }
}

fn edited_message() -> Message {
    Message {
        body: "See you at 13:00".into(),
        edited_at: Some(AT),
        reactions: reactions(),
        mine: Some(vec!["👍".into()]),
        rev: 70_000,
        ..full_message()
    }
}

fn deleted_message() -> Message {
    Message {
        body: String::new(),
        deleted: Some(deleted()),
        rev: 8,
        ..message(6, None)
    }
}

fn item(seq: u64, rev: u64) -> Item {
    Item {
        seq,
        rev,
        body: None,
        attachments: None,
        edited_at: None,
        deleted: None,
        reactions: None,
        by: None,
        mine: None,
    }
}

fn edited_item() -> Item {
    Item {
        body: Some("See you at 13:00".into()),
        attachments: Some(Vec::new()),
        edited_at: Some(AT),
        ..item(3, 7)
    }
}

fn deleted_item() -> Item {
    Item {
        deleted: Some(deleted()),
        ..item(6, 8)
    }
}

fn reacted_item() -> Item {
    Item {
        reactions: Some(reactions()),
        by: Some(ReactionBy {
            user: user("bob"),
            emoji: "👍".into(),
            on: true,
        }),
        ..item(4, 9)
    }
}

fn details() -> Details {
    Details {
        kind: Kind::Group,
        name: Some("Lunch".into()),
        created_at: AT,
        created_by: user("alice"),
        posting: Posting::Everyone,
        public: false,
    }
}

fn system_changes() -> Vec<SystemChange> {
    let bob = || user("bob");
    vec![
        SystemChange::Created {
            kind: Kind::Group,
            name: Some("Lunch".into()),
            posting: Posting::Everyone,
            public: true,
            participants: vec![user("alice"), bob()],
        },
        SystemChange::Added { user: bob() },
        SystemChange::Removed { user: bob() },
        SystemChange::Joined,
        SystemChange::Left,
        SystemChange::RoleSet {
            user: bob(),
            role: Role::Admin,
        },
        SystemChange::Updated {
            name: Some("Dinner".into()),
            posting: Some(Posting::Admins),
            public: Some(false),
        },
    ]
}

fn last() -> Last {
    Last {
        seq: 4,
        message_id: MESSAGE.parse().unwrap(),
        at: AT,
        sender: user("bob"),
        kind: EntryKind::Text,
        preview: "See you".into(),
        deleted: false,
    }
}

#[expect(clippy::too_many_lines, reason = "a table: one answer of each kind")]
fn answers() -> Vec<Answer> {
    let connected = Connected {
        user: user("alice"),
        session: "1".into(),
        gateway: "0199c0de-0000-7000-8000-000000000003".into(),
        expires_at: AT,
        ping_interval_ms: 25_000,
        limits: Limits {
            frame_bytes: 65_536,
            body_bytes: 16_384,
            attachments: 10,
            group_participants: 1_000,
            page_entries: 200,
            requests_per_second: 50,
            requests_burst: 200,
            watched_users: 500,
            cursors: 5_000,
            edit_window_s: 900,
            reactions: 32,
            delete_seqs: 256,
        },
        time: AT,
    };
    let item = |last_message| InboxItem {
        conversation: conversation(),
        kind: Kind::Dm,
        name: Some("bob".into()),
        last_seq: 4,
        rev: 0,
        last_message,
        read_seq: 1,
        unread: 3,
        joined_seq: 0,
        settings_version: None,
        muted_until: None,
        push: None,
    };
    let muted = InboxItem {
        settings_version: Some(VERSION),
        muted_until: Some(AT),
        push: Some(Switch::Off),
        ..item(None)
    };
    let gone = InboxItem {
        rev: 8,
        unread: 0,
        ..item(Some(Last {
            preview: String::new(),
            deleted: true,
            ..last()
        }))
    };
    let present = PresenceItem {
        user: user("bob"),
        online: true,
        last_seen: None,
    };
    let away = PresenceItem {
        user: user("carol"),
        online: false,
        last_seen: Some(AT),
    };
    vec![
        Answer::Connected(Box::new(connected)),
        Answer::Refreshed { expires_at: AT },
        Answer::Inbox(InboxPage {
            items: vec![item(Some(last())), item(None), gone],
            next: Some("1795000000123.7".into()),
        }),
        Answer::Created(Created {
            conversation: conversation(),
            existed: false,
        }),
        Answer::Conversation(Box::new(ConversationAnswer {
            conversation: conversation(),
            details: details(),
            participant_count: 2,
            message_count: 4,
            head: 6,
            rev: 9,
            role: Some(Role::Owner),
        })),
        Answer::Participants(ParticipantsPage {
            items: vec![ParticipantItem {
                user: user("bob"),
                role: Role::Member,
                joined_seq: 1,
                delivered_seq: Some(4),
                read_seq: Some(3),
            }],
            next: Some(user("bob")),
        }),
        Answer::Ok(Okay::default()),
        Answer::Ok(Okay {
            seq: Some(5),
            ..Okay::default()
        }),
        Answer::Ok(Okay {
            head: Some(5),
            rev: Some(9),
            ..Okay::default()
        }),
        Answer::Ok(Okay {
            rev: Some(9),
            ..Okay::default()
        }),
        Answer::Sent(Sent {
            seq: 5,
            message_id: MESSAGE.parse().unwrap(),
            at: AT,
            duplicate: true,
        }),
        Answer::History(HistoryPage {
            messages: vec![message(3, None), full_message()],
            rev: 0,
            head: 4,
        }),
        Answer::History(HistoryPage {
            messages: vec![message(3, None), edited_message(), deleted_message()],
            rev: 70_000,
            head: 6,
        }),
        Answer::Reactions(ReactionsPage {
            items: vec![ReactorItem {
                user: user("bob"),
                emoji: "👍".into(),
                at: AT,
            }],
            next: Some("👍 bob".into()),
        }),
        Answer::Changes(Changes {
            after: 6,
            rev: 9,
            items: vec![edited_item(), deleted_item(), {
                let mine = Some(Vec::new());
                Item {
                    mine,
                    ..reacted_item()
                }
            }],
            more: true,
            reset: false,
        }),
        Answer::Changes(Changes {
            after: 6,
            rev: 70_000,
            items: Vec::new(),
            more: false,
            reset: true,
        }),
        Answer::Presence {
            items: vec![present, away],
        },
        Answer::Public(PublicPage {
            items: vec![PublicItem {
                conversation: conversation(),
                kind: Kind::Channel,
                name: Some("News".into()),
                created_at: AT,
            }],
            next: Some(conversation()),
        }),
        Answer::Pong { time: AT },
        Answer::Error(Refusal {
            code: ErrorCode::RateLimited,
            message: "too many requests".into(),
            retry_after_ms: Some(250),
        }),
        Answer::AttachmentUrls {
            items: vec![file_url()],
        },
        Answer::Ok(Okay {
            version: Some(VERSION),
            ..Okay::default()
        }),
        Answer::Devices(DeviceList {
            items: vec![
                device("browser", PushProvider::Web, PushContent::Full),
                device("phone", PushProvider::Apns, PushContent::None),
            ],
            web_key: Some("BCVxsr7N".into()),
        }),
        Answer::Inbox(InboxPage {
            items: vec![muted],
            next: None,
        }),
    ]
}

fn changed_events() -> Vec<Event> {
    vec![
        Event::Changed(ChangedEvent {
            conversation: conversation(),
            after: 6,
            rev: 9,
            items: vec![edited_item(), deleted_item(), reacted_item()],
        }),
        Event::Changed(ChangedEvent {
            conversation: conversation(),
            after: 9,
            rev: 10,
            items: vec![Item {
                reactions: Some(BTreeMap::new()),
                ..item(4, 10)
            }],
        }),
        Event::Changed(ChangedEvent::gap(conversation(), 70_000)),
        Event::Reacted {
            conversation: conversation(),
            seq: 4,
            emoji: "👍".into(),
            on: true,
            rev: 9,
        },
    ]
}

fn events() -> Vec<Event> {
    let mut events = vec![
        Event::Message(Box::new(message(3, None))),
        Event::Message(Box::new(full_message())),
        Event::Message(Box::new(Message {
            mine: None,
            ..edited_message()
        })),
        Event::Message(Box::new(deleted_message())),
    ];
    let system = |change| Event::Message(Box::new(message(5, Some(change))));
    events.extend(system_changes().into_iter().map(system));
    let change = |change, details| {
        Event::Conversation(ConversationEvent {
            conversation: conversation(),
            change,
            details,
        })
    };
    events.extend([
        Event::Receipt {
            conversation: conversation(),
            user: user("bob"),
            read_seq: Some(4),
            delivered_seq: Some(5),
        },
        Event::Typing {
            conversation: conversation(),
            user: user("bob"),
        },
        Event::Presence(PresenceItem {
            user: user("bob"),
            online: false,
            last_seen: Some(AT),
        }),
        change(ConversationChange::Added, Some(details())),
        change(ConversationChange::Updated, Some(details())),
        change(ConversationChange::Removed, None),
        Event::Resync {
            conversation: conversation(),
            head: 1_000,
        },
    ]);
    events.extend(changed_events());
    events.extend(file_notices());
    events.extend(settings());
    events.extend([
        Event::Reconnect { after_ms: 20_000 },
        Event::Error(Refusal {
            code: ErrorCode::BadRequest,
            message: "it makes no sense".into(),
            retry_after_ms: None,
        }),
    ]);
    events
}

fn settings() -> [Event; 2] {
    [(Some(AT), Switch::On), (None, Switch::Off)].map(|(muted_until, push)| {
        Event::Settings(SettingsEvent {
            conversation: conversation(),
            version: VERSION,
            muted_until,
            push,
        })
    })
}

fn vectors<T: Serialize>(frames: &[T]) -> Value {
    let vector = |frame| {
        let text: Value = serde_json::from_slice(&Codec::Json.encode(frame)).unwrap();
        json!({ "frame": text, "msgpack": hex(&Codec::MessagePack.encode(frame)) })
    };
    frames.iter().map(vector).collect()
}

#[test]
fn replies_and_events_are_the_golden_ones() {
    let replies: Vec<_> = (1..)
        .zip(answers())
        .map(|(id, answer)| Reply {
            id: Some(id),
            answer,
        })
        .collect();
    let mut file: Value = serde_json::from_slice(&fs::read(path()).unwrap()).unwrap();
    let is = json!({ "replies": vectors(&replies), "events": vectors(&events()) });
    for part in ["replies", "events"] {
        if std::env::var("GOLDEN").is_ok_and(|what| what == "write") {
            file[part] = is[part].clone();
        }
        let (is, golden) = (is[part].as_array().unwrap(), file[part].as_array().unwrap());
        for (is, golden) in is.iter().zip(golden) {
            assert_eq!(is, golden);
        }
        assert_eq!(is.len(), golden.len(), "{part}");
    }
    let text = serde_json::to_string_pretty(&file).unwrap() + "\n";
    if std::env::var("GOLDEN").is_ok() {
        fs::write(path(), text).unwrap();
    }
}

/// Both encodings decode to the same request, and no field is lost.
#[test]
fn golden_requests_are_decoded() {
    let file: Value = serde_json::from_slice(&fs::read(path()).unwrap()).unwrap();
    let requests = file["requests"].as_array().unwrap();
    assert!(!requests.is_empty());
    for vector in requests {
        let frame = &vector["frame"];
        let packed = bytes(vector["msgpack"].as_str().unwrap());
        let text = Codec::Json.decode(frame.to_string().as_bytes()).unwrap();
        let packed = Codec::MessagePack.decode(&packed).unwrap();
        assert_eq!(text.id.unwrap(), frame["id"].as_u64().unwrap());
        let request = format!("{:?}", text.request.unwrap());
        assert_eq!(request, format!("{:?}", packed.request.unwrap()));
        let fields = frame.as_object().unwrap().keys();
        for field in fields.filter(|name| !["type", "id"].contains(&name.as_str())) {
            assert!(
                request.contains(&format!("{field}: ")),
                "{field} in {request}"
            );
            assert!(
                !request.contains(&format!("{field}: None")),
                "{field} in {request}"
            );
        }
    }
}
