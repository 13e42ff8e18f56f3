//! The largest messages fit into a frame, and messages of another version of the program are understood or skipped.

use std::sync::Arc;

use uuid::Uuid;

use super::*;
use crate::{
    chat::{
        Audience, Changed, ChangedItem, Creation, DeleteMessages, EditMessage, LogRange,
        MembershipChange, MembershipNotice, Page, Reacted, Receipt, Recipients,
    },
    cluster::exchange::TOPICS_AT_ONCE,
    model::{
        Attachment, ClientId, Content, ContentState, DeletedSeqs, Details, Draft, EditedContent,
        Entry, EntryKind, Kind, Last, Newest, Posting, SystemChange,
        limits::{
            ATTACHMENT_BYTES_MAX, ATTACHMENTS_MAX, CHANGED_BYTES_MAX, DELETE_SEQS_MAX,
            DELETED_SEQS_KEPT, EMOJI_BYTES_MAX, NAME_BYTES_MAX, PAGE_ITEMS_MAX, PREVIEW_CHARS,
            RESUME_ENTRIES_MAX, USER_ID_BYTES_MAX,
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
        ..Attachment::default()
    };
    Content::Text {
        body: "b".repeat(BODY_BYTES_MAX),
        attachments: vec![link; ATTACHMENTS_MAX],
        reply_to: Some(Seq::MAX),
    }
}

/// Changes whose items are as large as an event may be.
fn changes() -> Changed {
    let content = ContentState {
        rev: Rev::MAX,
        by: user(),
        at: i64::MAX,
        content: Some(EditedContent {
            body: "b".repeat(CHANGED_BYTES_MAX),
            attachments: Vec::new(),
        }),
        edits: Vec::new(),
    };
    let item = ChangedItem {
        seq: Seq::MAX,
        rev: Rev::MAX,
        content: Some(content),
        reactions: None,
        by: None,
        mine: None,
    };
    let last = Last {
        seq: Seq::MAX,
        message_id: crate::clock::message_id(1),
        at: i64::MAX,
        sender: user(),
        kind: EntryKind::Text,
        preview: "😀".repeat(PREVIEW_CHARS),
        deleted: true,
    };
    Changed {
        after: Rev::MAX,
        items: vec![item],
        newest: Some(Arc::new(Newest {
            last,
            changes: u32::MAX,
            texts: Some(u64::MAX),
        })),
        deleted: Some(Arc::new(DeletedSeqs {
            highest: vec![Seq::MAX; DELETED_SEQS_KEPT],
            count: u64::MAX,
        })),
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
        away: true,
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
    let reacted = Reacted {
        seq: Seq::MAX,
        emoji: "e".repeat(EMOJI_BYTES_MAX),
        on: true,
        rev: Rev::MAX,
    };
    let at = Cursor(Seq::MAX, Rev::MAX);
    let (changed, members) = (Arc::new(changes()), audience.clone());
    let Content::Text {
        body, attachments, ..
    } = text()
    else {
        unreachable!()
    };
    let publications = [
        Publication::changed(conversation(), at, changed, members, true),
        Publication::reacted(conversation(), reacted, user()),
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
        Operation::Edit(EditMessage {
            seq: Seq::MAX,
            content: EditedContent { body, attachments }.into(),
            base_rev: Some(Rev::MAX),
            at: Some(i64::MAX),
        }),
        Operation::Delete(DeleteMessages {
            seqs: vec![Seq::MAX; DELETE_SEQS_MAX],
            as_moderator: true,
            at: Some(i64::MAX),
        }),
    ];
    let interest = Interest {
        topic: Topic::Presence(user()),
        passed: Some(Cursor(Seq::MAX, Rev::MAX)),
        away: true,
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
    messages.push(PeerMessage::Ask {
        id,
        ask: PeerRequest::Inbox {
            user: user(),
            part: Some(InboxPart::Rows(vec![conversation(); PAGE_ITEMS_MAX])),
        },
    });
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
        rank: u64::MAX,
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

/// Earlier builds know of a channel's position only the seq, and get a rev where they ignore it.
#[test]
fn earlier_builds_understand_an_interest_and_a_reference() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Before {
        topic: Topic,
        passed: Option<Seq>,
    }
    let topic = Topic::Channel(conversation());
    let interest = |passed| Interest {
        topic: topic.clone(),
        passed,
        away: false,
    };
    for (now, seq) in [
        (Some(Cursor(7, 5)), Some(7)),
        (Some(Cursor(7, 0)), Some(7)),
        (None, None),
    ] {
        let encoded = encode(&interest(now));
        assert_eq!(decode::<Interest>(&encoded).unwrap(), interest(now));
        let before: Before = decode(&encoded).unwrap();
        assert_eq!(before.passed, seq);
        let without_rev = now.map(|Cursor(seq, _)| Cursor(seq, 0));
        let read: Interest = decode(&encode(&before)).unwrap();
        assert_eq!(read, interest(without_rev));
    }
    #[derive(Serialize, Deserialize)]
    struct RefBefore {
        conversation: ConversationId,
        kind: Kind,
        last_seq: Option<Seq>,
    }
    let reference = InboxRef {
        conversation: conversation(),
        kind: Kind::Group,
        last_seq: Some(7),
        rev: 5,
    };
    let encoded = encode(&reference);
    assert_eq!(decode::<InboxRef>(&encoded).unwrap(), reference);
    let before: RefBefore = decode(&encoded).unwrap();
    let unchanged = InboxRef {
        rev: 0,
        ..reference
    };
    assert_eq!(decode::<InboxRef>(&encode(&before)).unwrap(), unchanged);
    assert_eq!(encode(&before), encode(&unchanged));
}

/// An earlier build answers a question about a part of an inbox with the whole inbox, and asks for no part.
#[test]
fn earlier_builds_understand_a_question_about_a_part_of_an_inbox() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Before {
        Inbox { user: UserId },
    }
    let order = InboxPart::Order {
        before: Some((5, conversation())),
        limit: 50,
    };
    for part in [
        None,
        Some(order),
        Some(InboxPart::Rows(vec![conversation()])),
    ] {
        let (user, is_whole) = (user(), part.is_none());
        let encoded = encode(&PeerRequest::Inbox {
            user: user.clone(),
            part: part.clone(),
        });
        let read: PeerRequest = decode(&encoded).unwrap();
        assert!(matches!(read, PeerRequest::Inbox { part: read, .. } if read == part));
        let before: Before = decode(&encoded).unwrap();
        assert_eq!(before, Before::Inbox { user });
        let read: PeerRequest = decode(&encode(&before)).unwrap();
        assert!(matches!(read, PeerRequest::Inbox { part: None, .. }));
        assert_eq!(encode(&before) == encoded, is_whole);
    }
}

/// There are no revs below the level of changes, so gateways of earlier builds get the form that they know.
#[test]
fn the_answer_to_follow_has_a_rev_only_if_there_is_one() {
    let without = PeerResponse::position(Ok(Cursor(7, 0)));
    assert!(matches!(without, PeerResponse::Head(Ok(7))));
    let with = PeerResponse::position(Ok(Cursor(7, 5)));
    let read: PeerResponse = decode(&encode(&with)).unwrap();
    assert!(matches!(read, PeerResponse::Position(Cursor(7, 5))));
    assert!(PeerResponse::position(Err(Error::Moved)).is_moved());
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
        rank: 0,
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
