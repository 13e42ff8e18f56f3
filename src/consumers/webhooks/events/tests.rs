use serde_json::{Value, json};

use super::*;
use crate::model::{
    ClientId, DeletedEntry, DeletedSeqs, EditedContent, MessageId, Reactions, Role,
};

const CONVERSATION: &str = "3ed719bc-703a-4957-93c7-9bce59d4ad0e";
const MESSAGE: &str = "d9b8a000-cb3a-11f0-8000-000000000001";
const AT: Millis = 1_764_172_800_123;

fn origin(kind: Kind) -> Origin {
    Origin {
        conversation: CONVERSATION.parse().unwrap(),
        kind,
        replayed: false,
    }
}

fn user(name: &str) -> UserId {
    UserId::new(name).unwrap()
}

fn entry(content: Content) -> Entry {
    Entry {
        seq: 4,
        message_id: MessageId(MESSAGE.parse().unwrap()),
        client_id: ClientId(uuid::Uuid::nil()),
        sender: user("alice"),
        at: AT,
        content,
        texts: 0,
    }
}

fn system(change: SystemChange) -> Entry {
    entry(Content::System(change))
}

fn change(op: ChangeOp) -> Change {
    Change {
        rev: 7,
        by: user("bob"),
        at: AT + 1,
        op,
    }
}

fn edit(content: Option<&str>) -> Change {
    change(ChangeOp::Edit {
        seq: 4,
        content: content.map(|body| EditedContent {
            body: body.into(),
            attachments: Vec::new(),
        }),
        edits: vec![7],
        dropped: Vec::new(),
    })
}

fn delete() -> Change {
    let entries = [4, 6].map(|seq| DeletedEntry {
        seq,
        edits: Vec::new(),
        files: Vec::new(),
    });
    change(ChangeOp::Delete {
        entries: entries.into(),
        deleted: DeletedSeqs::default(),
    })
}

fn react() -> Change {
    change(ChangeOp::React {
        seq: 4,
        emoji: "👍".into(),
        on: true,
        reactions: Reactions::from([("👍".into(), 3)]),
    })
}

fn all() -> Filter {
    Filter {
        events: EventType::ALL.into(),
        kinds: Vec::new(),
    }
}

fn json_of(event: &Event) -> Value {
    let payload = payload(std::slice::from_ref(event)).unwrap();
    assert_eq!(payload.id, event.id);
    serde_json::from_slice(&payload.body).unwrap()
}

fn of_entry(entry: &Entry, state: Option<&EntryState>) -> Value {
    json_of(&Event::of_entry(origin(Kind::Group), &all(), entry, state).unwrap())
}

fn of_change(change: &Change) -> Value {
    json_of(&Event::of_change(origin(Kind::Dm), &all(), change).unwrap())
}

#[test]
fn a_message_is_sent_as_in_history() {
    let event = of_entry(&entry(Content::text("Hi \"Bob\"")), None);
    let expected = json!({
        "type": "message.created",
        "timestamp": "2025-11-26T16:00:00.123Z",
        "data": {
            "conversation": CONVERSATION,
            "conversation_kind": "group",
            "seq": 4,
            "message_id": MESSAGE,
            "client_id": "00000000-0000-0000-0000-000000000000",
            "sender": "alice",
            "kind": "text",
            "body": "Hi \"Bob\"",
            "at": AT,
        },
    });
    assert_eq!(event, expected);
}

#[test]
fn a_message_that_changed_meanwhile_is_sent_as_it_is_now() {
    let sent = entry(Content::text("a secret"));
    let state = |change: &Change| change.states().pop().unwrap().1;
    let edited = of_entry(&sent, Some(&state(&edit(Some("better")))));
    assert_eq!(edited["type"], "message.created");
    assert_eq!(edited["data"]["body"], "better");
    assert_eq!(edited["data"]["rev"], 7);
    let deleted = of_entry(&sent, Some(&state(&delete())));
    assert_eq!(deleted["type"], "message.created");
    assert_eq!(deleted["data"]["body"], "");
    let expected = json!({"by": "bob", "at": AT + 1});
    assert_eq!(deleted["data"]["deleted"], expected);
    assert!(!deleted.to_string().contains("secret"));
}

#[test]
fn changes_have_the_fields_of_the_protocol() {
    let expected = json!({
        "type": "message.updated",
        "timestamp": "2025-11-26T16:00:00.124Z",
        "data": {
            "conversation": CONVERSATION,
            "conversation_kind": "dm",
            "seq": 4,
            "rev": 7,
            "sender": "bob",
            "body": "better",
            "attachments": [],
            "edited_at": AT + 1,
        },
    });
    assert_eq!(of_change(&edit(Some("better"))), expected);
    let erased = of_change(&edit(None));
    assert_eq!(erased["data"].get("body"), None);
    assert_eq!(
        (&erased["data"]["seq"], &erased["data"]["rev"]),
        (&json!(4), &json!(7))
    );
    let expected = json!({
        "conversation": CONVERSATION,
        "conversation_kind": "dm",
        "seqs": [4, 6],
        "rev": 7,
        "deleted": {"by": "bob", "at": AT + 1},
    });
    let deleted = of_change(&delete());
    assert_eq!(
        (&deleted["type"], &deleted["data"]),
        (&json!("message.deleted"), &expected)
    );
    let expected = json!({
        "conversation": CONVERSATION,
        "conversation_kind": "dm",
        "seq": 4,
        "rev": 7,
        "reactions": {"👍": 3},
        "by": {"user": "bob", "emoji": "👍", "on": true},
    });
    let reacted = of_change(&react());
    assert_eq!(
        (&reacted["type"], &reacted["data"]),
        (&json!("message.reacted"), &expected)
    );
}

#[test]
fn a_lost_change_is_no_event() {
    let lost = change(ChangeOp::lost(DeletedSeqs::default()));
    assert_eq!(Event::of_change(origin(Kind::Dm), &all(), &lost), None);
}

#[test]
fn ids_are_the_same_each_time() {
    let created = Event::of_entry(origin(Kind::Dm), &all(), &entry(Content::text("a")), None);
    assert_eq!(created.unwrap().id, MESSAGE);
    let updated = Event::of_change(origin(Kind::Dm), &all(), &edit(None));
    assert_eq!(updated.unwrap().id, format!("{CONVERSATION}:7"));
    let mut replay = origin(Kind::Dm);
    replay.replayed = true;
    let replayed = Event::of_change(replay, &all(), &edit(None)).unwrap();
    assert_eq!(replayed.id, format!("{CONVERSATION}:7"));
    assert_eq!(json_of(&replayed)["data"]["replayed"], true);
    assert_eq!(of_change(&edit(None))["data"].get("replayed"), None);
}

#[test]
fn each_system_entry_has_a_type() {
    let member = user("carol");
    let created = SystemChange::Created {
        kind: Kind::Group,
        name: None,
        posting: crate::model::Posting::Everyone,
        public: false,
        participants: vec![user("alice"), member.clone()],
    };
    let updated = SystemChange::Updated {
        name: Some("A name".into()),
        posting: None,
        public: None,
    };
    let role_set = SystemChange::RoleSet {
        user: member.clone(),
        role: Role::Admin,
    };
    let added = SystemChange::Added {
        user: member.clone(),
    };
    for (name, change) in [
        ("conversation.created", created),
        ("conversation.updated", updated),
        ("member.added", added),
        ("member.removed", SystemChange::Removed { user: member }),
        ("member.joined", SystemChange::Joined),
        ("member.left", SystemChange::Left),
        ("member.role_set", role_set),
    ] {
        let event = of_entry(&system(change.clone()), None);
        assert_eq!(event["type"], name);
        assert_eq!(event["data"]["kind"], "system");
        assert_eq!(event["data"]["message_id"], MESSAGE);
        assert_eq!(
            event["data"]["system"],
            serde_json::to_value(change).unwrap()
        );
    }
}

#[test]
fn a_webhook_gets_what_it_lists() {
    let text = entry(Content::text("a"));
    let gets = |filter: &Filter, kind| {
        let created = Event::of_entry(origin(kind), filter, &text, None).is_some();
        let joined = Event::of_entry(origin(kind), filter, &system(SystemChange::Joined), None);
        let reacted = Event::of_change(origin(kind), filter, &react()).is_some();
        (created, joined.is_some(), reacted)
    };
    let default = Filter::default();
    assert_eq!(gets(&default, Kind::Channel), (true, true, false));
    assert_eq!(gets(&all(), Kind::Channel), (true, true, true));
    let some = Filter {
        events: vec![EventType::MemberJoined, EventType::MessageReacted],
        kinds: vec![Kind::Group],
    };
    assert_eq!(gets(&some, Kind::Group), (false, true, true));
    assert_eq!(gets(&some, Kind::Dm), (false, false, false));
    assert!(some.allows_kind(Kind::Group) && !some.allows_kind(Kind::Dm));
}

#[test]
fn several_events_are_a_batch() {
    let one = Event::of_entry(origin(Kind::Dm), &all(), &entry(Content::text("a")), None).unwrap();
    let other = Event::of_change(origin(Kind::Dm), &all(), &delete()).unwrap();
    let events = [one.clone(), other.clone()];
    let batch = payload(&events).unwrap();
    let json: Value = serde_json::from_slice(&batch.body).unwrap();
    assert_eq!(json["type"], "batch");
    assert_eq!(json["timestamp"], "2025-11-26T16:00:00.124Z");
    let inside = json["data"]["events"].as_array().unwrap();
    for (inside, event) in inside.iter().zip(&events) {
        let mut alone = json_of(event);
        alone["id"] = event.id.clone().into();
        assert_eq!(*inside, alone);
    }
    assert_eq!(inside.len(), 2);
    assert!(
        batch.id.starts_with("batch:") && batch.id.len() == 38,
        "{}",
        batch.id
    );
    assert_eq!(payload(&events), Some(batch.clone()));
    assert_ne!(payload(&[other, one]).unwrap().id, batch.id);
    let bytes: usize = events.iter().map(Event::bytes).sum();
    assert!(batch.body.len() <= bytes + EVENT_BYTES && batch.body.len() > bytes / 2);
    assert_eq!(payload(&[]), None);
}

#[test]
fn types_have_names() {
    for event in EventType::ALL {
        assert_eq!(event.name().parse(), Ok(event));
    }
    assert_eq!("webhook.test".parse::<EventType>(), Err(()));
    let test = json_of(&Event::test("an-id".into(), 0));
    assert_eq!(
        test,
        json!({"type": "webhook.test", "timestamp": "1970-01-01T00:00:00.000Z", "data": {}})
    );
}
