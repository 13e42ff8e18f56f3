//! Tests: pages stay within the log, and gateways of the build before understand each operation and outcome.

use std::fmt::Write as _;

use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::{
    LogRange::{After, Around, Before, Newest},
    *,
};
use crate::model::{Content, EntryKind};

#[test]
fn pages_stay_within_the_log() {
    assert_eq!(Newest.within(100, 10), (91, 100));
    assert_eq!(Newest.within(3, 10), (1, 3));
    assert_eq!(Newest.within(0, 10), (1, 0));
    assert_eq!(Before(50).within(100, 10), (40, 49));
    assert_eq!(Before(1).within(100, 10), (1, 0));
    assert_eq!(Before(u64::MAX).within(100, 10), (91, 100));
    assert_eq!(After(0).within(100, 10), (1, 10));
    assert_eq!(After(95).within(100, 10), (96, 100));
    assert_eq!(After(u64::MAX).within(100, 10), (u64::MAX, 100));
    assert_eq!(Around(50).within(100, 10), (46, 55));
    assert_eq!(Around(1).within(100, 10), (1, 10));
    assert_eq!(Around(u64::MAX).within(100, 10), (91, 100));
    assert_eq!(Around(2).within(4, 10), (1, 4));
}

fn user(name: &str) -> UserId {
    UserId::new(name).unwrap()
}

fn operations() -> Vec<Operation> {
    vec![
        Operation::Create(Creation {
            kind: Kind::Group,
            participants: vec![user("bob")],
            name: Some("Lunch".into()),
            public: true,
            posting: Posting::Everyone,
            at: Some(5),
        }),
        Operation::Details,
        Operation::Participants {
            after: Some(user("bob")),
            limit: 50,
        },
        Operation::Add { user: user("bob") },
        Operation::Remove { user: user("bob") },
        Operation::Join,
        Operation::Leave,
        Operation::SetRole {
            user: user("bob"),
            role: Role::Admin,
        },
        Operation::Update {
            name: None,
            posting: Some(Posting::Admins),
            public: Some(false),
        },
        Operation::Send(Draft {
            sender: user("alice"),
            client_id: ClientId(Uuid::max()),
            content: Content::text("hi"),
            at: None,
            retry: true,
        }),
        Operation::History {
            range: Around(7),
            limit: 200,
        },
        Operation::Read { seq: 7 },
        Operation::Delivered(MarkDelivered {
            seq: 7,
            away: false,
        }),
        Operation::Typing,
        Operation::Head,
        Operation::CatchUp { after: 7, limit: 1 },
        Operation::Load,
        Operation::Repair,
    ]
}

#[expect(clippy::too_many_lines, reason = "a table: one of each")]
fn outcomes() -> Vec<Outcome> {
    let details = Details {
        kind: Kind::Channel,
        name: None,
        created_at: 5,
        created_by: user("alice"),
        posting: Posting::Admins,
        public: true,
    };
    let participant = Participant {
        user: user("bob"),
        role: Role::Member,
        joined_seq: 1,
        left_seq: None,
        delivered_seq: 2,
        read_seq: 3,
    };
    let entry = Entry {
        seq: 7,
        message_id: MessageId(Uuid::nil()),
        client_id: ClientId(Uuid::max()),
        sender: user("alice"),
        at: 5,
        content: Content::text("hi"),
        texts: 0,
    };
    vec![
        Outcome::Created { existed: true },
        Outcome::Details(DetailsView {
            details: details.clone(),
            participant_count: 2,
            head: 7,
            role: Some(Role::Owner),
            rev: 0,
            message_count: 6,
        }),
        Outcome::Participants(ParticipantsPage {
            items: vec![
                Listed::of(&participant, true),
                Listed::of(&participant, false),
            ],
            next: Some(user("bob")),
        }),
        Outcome::Changed { seq: 7 },
        Outcome::Sent(SendAck {
            seq: 7,
            message_id: MessageId(Uuid::nil()),
            at: 5,
            duplicate: true,
        }),
        Outcome::History(Page {
            entries: vec![Arc::new(entry)],
            head: 7,
            rev: 0,
            states: Vec::new(),
            mine: Vec::new(),
        }),
        Outcome::Head(Box::new(Head {
            details,
            head: 7,
            last: Some(Last {
                seq: 7,
                message_id: MessageId(Uuid::nil()),
                at: 5,
                sender: user("alice"),
                kind: EntryKind::Text,
                preview: "hi".into(),
                deleted: false,
            }),
            rev: 0,
            texts: 0,
            deleted: Default::default(),
        })),
        Outcome::Done,
    ]
}

/// Returns the encoding of these values between gateways: letters as they are, other bytes in hexadecimal.
fn encoded<T: Serialize + DeserializeOwned>(values: &[T]) -> String {
    let mut lines = String::new();
    for value in values {
        let bytes = rmp_serde::to_vec_named(value).unwrap();
        let again: T = rmp_serde::from_slice(&bytes).unwrap();
        assert_eq!(rmp_serde::to_vec_named(&again).unwrap(), bytes);
        for byte in bytes {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'_' => lines.push(byte.into()),
                byte => write!(lines, "[{byte:02x}]").unwrap(),
            }
        }
        lines.push('\n');
    }
    lines
}

/// During an upgrade, two builds ask each other. If these files change, they no longer understand each other.
#[test]
fn operations_between_gateways_are_the_golden_ones() {
    crate::golden::check("peer-operations.txt", &encoded(&operations()));
}

#[test]
fn outcomes_between_gateways_are_the_golden_ones() {
    crate::golden::check("peer-outcomes.txt", &encoded(&outcomes()));
}
