//! The largest messages fit into a frame, and messages of another version of the program are understood or skipped.

use std::sync::Arc;

use uuid::Uuid;

use super::*;
use crate::{
    chat::{
        Audience, Creation, LogRange, MembershipChange, MembershipNotice, Page, Receipt, Recipients,
    },
    cluster::exchange::TOPICS_AT_ONCE,
    model::{
        Attachment, ClientId, Content, Details, Draft, Entry, Kind, Posting, SystemChange,
        limits::{
            ATTACHMENT_BYTES_MAX, ATTACHMENTS_MAX, NAME_BYTES_MAX, RESUME_ENTRIES_MAX,
            USER_ID_BYTES_MAX,
        },
    },
    store::InboxSummary,
};

/// The largest value that may be configured.
const GROUP_PARTICIPANTS_MAX: usize = 10_000;
const BODY_BYTES_MAX: usize = 64 << 10;

fn user() -> UserId {
    UserId::new(&"u".repeat(USER_ID_BYTES_MAX)).unwrap()
}

fn users() -> Vec<UserId> {
    vec![user(); GROUP_PARTICIPANTS_MAX]
}

fn conversation() -> ConversationId {
    ConversationId(Uuid::max())
}

fn name() -> Option<String> {
    Some("n".repeat(NAME_BYTES_MAX))
}

fn entry(content: Content) -> Arc<Entry> {
    Arc::new(Entry {
        seq: Seq::MAX,
        message_id: crate::clock::message_id(1),
        client_id: ClientId(Uuid::max()),
        sender: user(),
        at: i64::MAX,
        content,
        texts: None,
    })
}

fn text() -> Content {
    let link = Attachment {
        url: "u".repeat(ATTACHMENT_BYTES_MAX),
        name: Some("n".repeat(ATTACHMENT_BYTES_MAX)),
        mime: Some(String::new()),
        size: Some(u64::MAX),
    };
    Content::Text {
        body: "b".repeat(BODY_BYTES_MAX),
        attachments: vec![link; ATTACHMENTS_MAX],
        reply_to: Some(Seq::MAX),
    }
}

#[expect(clippy::too_many_lines, reason = "a table: the largest of each")]
fn largest() -> Vec<PeerMessage> {
    let audience = Audience::Members(Arc::new(Recipients {
        kind: Kind::Channel,
        name: name(),
        users: users().into_iter().map(|user| (user, Seq::MAX)).collect(),
    }));
    let created = Content::System(SystemChange::Created {
        kind: Kind::Channel,
        name: name(),
        posting: Posting::Everyone,
        public: true,
        participants: users(),
    });
    let receipt = Receipt {
        user: user(),
        read_seq: Some(Seq::MAX),
        delivered_seq: Some(Seq::MAX),
    };
    let notice = Arc::new(MembershipNotice {
        change: MembershipChange::Updated,
        details: Details {
            kind: Kind::Channel,
            name: name(),
            created_at: i64::MAX,
            created_by: user(),
            posting: Posting::Everyone,
            public: true,
        },
    });
    let publications = [
        Publication::entry(conversation(), entry(created), audience.clone()),
        Publication::entry(conversation(), entry(text()), audience.clone()),
        Publication::receipt(conversation(), receipt, audience.clone()),
        Publication::membership(conversation(), Seq::MAX, notice, audience),
    ];
    let operations = [
        Operation::Create(Creation {
            kind: Kind::Channel,
            participants: users(),
            name: name(),
            public: true,
            posting: Posting::Everyone,
            at: Some(i64::MAX),
        }),
        Operation::Send(Draft {
            sender: user(),
            client_id: ClientId(Uuid::max()),
            content: text(),
            at: Some(i64::MAX),
            retry: true,
        }),
        Operation::History {
            range: LogRange::Around(Seq::MAX),
            limit: usize::MAX,
        },
    ];
    let interest = Interest {
        topic: Topic::Presence(user()),
        passed: Some(Cursor(Seq::MAX, 0)),
    };
    let id = u64::MAX;
    let part = u64::MAX;
    let ask = |operation| PeerMessage::Ask {
        id,
        ask: PeerRequest::Operation {
            conversation: conversation(),
            actor: user(),
            operation,
        },
    };
    let mut messages: Vec<_> = operations.into_iter().map(ask).collect();
    for publication in publications {
        messages.push(PeerMessage::Deliver(Delivered::Publication(
            publication.clone(),
        )));
        messages.push(PeerMessage::Publish { part, publication });
    }
    messages.push(PeerMessage::Interests {
        version: Epoch::MAX,
        topics: vec![interest; TOPICS_AT_ONCE],
    });
    messages.push(PeerMessage::AnswerPart {
        id,
        bytes: vec![0; PART_BYTES].into(),
        last: true,
    });
    messages
}

#[test]
fn the_largest_message_of_each_kind_fits_into_a_frame() {
    for message in largest() {
        let bytes = encode(&message).len();
        assert!(bytes < 2 << 20, "{bytes}");
    }
    let start = Batch {
        first: u64::MAX,
        acknowledged: u64::MAX,
        messages: u32::MAX,
    };
    assert!(encode(&start).len() <= BATCH_START_BYTES_MAX);
}

#[test]
fn a_page_of_the_largest_entries_can_be_answered() {
    let entries = vec![entry(text()); usize::try_from(RESUME_ENTRIES_MAX).unwrap()];
    let answer = PeerResponse::Outcome(Ok(Outcome::History(Page {
        entries,
        head: Seq::MAX,
        rev: 0,
        states: Vec::new(),
        mine: Vec::new(),
    })));
    let bytes = encode(&PeerMessage::Answer { id: 1, answer }).len();
    assert!(
        MESSAGE_BYTES_MAX < bytes && bytes <= ANSWER_BYTES_MAX,
        "{bytes}"
    );
}

/// The version before understands this one's handshake, and this one understands theirs.
#[test]
fn a_gateway_that_does_not_say_so_takes_no_parts() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Before {
        numbering: u64,
        peer: Option<u64>,
        received: u64,
    }
    let before = Before {
        numbering: 1,
        peer: None,
        received: 2,
    };
    let read: ResumePoint = decode(&encode(&before)).unwrap();
    assert!(!read.takes_parts);
    let now = ResumePoint {
        takes_parts: true,
        ..read
    };
    assert_eq!(decode::<Before>(&encode(&now)).unwrap(), before);
    #[derive(Deserialize)]
    struct WelcomeBefore {
        standing: Before,
    }
    let welcome = encode(&Welcome { resume_point: now });
    let read: WelcomeBefore = decode(&welcome).unwrap();
    assert_eq!(read.standing, before);
}

/// A build without a level reads this one's news of the ring, and this one reads a row without a level as level 0.
#[test]
fn a_version_of_the_ring_needs_no_level() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Before {
        version: Epoch,
        members: Vec<GatewayId>,
    }
    let (version, members) = (3, vec![GatewayId(uuid::Uuid::nil())]);
    let row = RingRow {
        version,
        members: members.clone(),
        level: 1,
    };
    let before = Before { version, members };
    assert_eq!(decode::<Before>(&encode(&row)).unwrap(), before);
    let read: RingRow = decode(&encode(&before)).unwrap();
    assert_eq!(read, RingRow { level: 0, ..row });
}

/// A newer build's messages hold up nothing else.
#[test]
fn an_unknown_message_is_skipped() {
    #[derive(Serialize)]
    enum Newer {
        Ask { id: u64, ask: NewerAsk },
        Changed { of: Vec<u64> },
        Leaving,
    }
    #[derive(Serialize)]
    enum NewerAsk {
        Search { text: String },
    }
    let text = "x".repeat(1_000);
    let of = (0..1_000).collect();
    let ask = NewerAsk::Search { text };
    let newer = [
        Newer::Changed { of },
        Newer::Ask { id: 7, ask },
        Newer::Leaving,
    ];
    let batch = Batch {
        first: 1,
        acknowledged: 0,
        messages: 3,
    };
    let mut frame = encode(&batch).to_vec();
    newer
        .iter()
        .for_each(|message| frame.extend_from_slice(&encode(message)));
    let (_, messages) = decode_batch(&frame).unwrap();
    let [Err(first), Err(second), Ok(PeerMessage::Leaving)] = &messages[..] else {
        panic!("{messages:?}")
    };
    assert_eq!(first.id, None);
    assert_eq!(second.id, Some(Numbered::Ask { id: 7 }));
    // What is no message at all still breaks the connection.
    frame.truncate(frame.len() - 5);
    assert!(decode_batch(&frame).is_err());
}

/// Earlier builds call the summary of an inbox row its face.
#[test]
fn an_inbox_row_is_encoded_as_in_earlier_builds() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Before {
        conversation: ConversationId,
        face: Option<InboxSummary>,
        read_seq: Seq,
        left_seq: Option<Seq>,
    }
    let mut row = InboxRow::empty(conversation());
    let summary = InboxSummary {
        seq: 7,
        kind: Kind::Group,
        name: name(),
        joined_seq: 1,
        last: None,
        changes: 0,
        texts: None,
    };
    row.summary = Some(summary.clone());
    row.read_seq = 3;
    let before: Before = decode(&encode(&row)).unwrap();
    assert_eq!(before.face, Some(summary));
    assert_eq!(decode::<InboxRow>(&encode(&before)).unwrap(), row);
    // Earlier builds ignore what they do not know.
    (row.rev, row.read_texts) = (9, Some(2));
    assert_eq!(decode::<Before>(&encode(&row)).unwrap(), before);
}
