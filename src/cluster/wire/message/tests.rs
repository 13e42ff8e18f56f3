//! The largest messages fit into a frame, and messages of another version of the program are understood or skipped.

use std::sync::Arc;

use uuid::Uuid;

use super::*;
use crate::{
    chat::{
        Audience, Changed, ChangedItem, Creation, DeleteMessages, EditMessage, LogRange,
        MembershipChange, MembershipNotice, Operation, Outcome, Page, Reacted, Receipt, Recipients,
    },
    cluster::{
        exchange::TOPICS_AT_ONCE,
        wire::question::{AnyAnswer, Operate, Push, ReadInbox},
    },
    model::{
        Attachment, ClientId, Content, ContentState, DeletedSeqs, Details, Draft, EditedContent,
        Entry, EntryKind, Kind, Last, Newest, Posting, Rev, SystemChange,
        limits::{
            ATTACHMENT_BYTES_MAX, ATTACHMENTS_MAX, CHANGED_BYTES_MAX, DELETE_SEQS_MAX,
            DELETED_SEQS_KEPT, EMOJI_BYTES_MAX, NAME_BYTES_MAX, PAGE_ITEMS_MAX, PREVIEW_CHARS,
            RESUME_ENTRIES_MAX, USER_ID_BYTES_MAX,
        },
    },
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
        texts: 0,
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
            texts: u64::MAX,
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
        ask: AnyQuestion::from(Operate {
            conversation: conversation(),
            actor: user(),
            operation,
        }),
    };
    let mut messages: Vec<_> = operations.into_iter().map(ask).collect();
    messages.push(PeerMessage::Ask {
        id,
        ask: AnyQuestion::from(ReadInbox {
            user: user(),
            some: Some(vec![conversation(); PAGE_ITEMS_MAX]),
        }),
    });
    let users = users().into_iter().map(|user| (user, Seq::MAX));
    messages.push(PeerMessage::Ask {
        id,
        ask: AnyQuestion::from(Push {
            conversation: conversation(),
            users: users.collect(),
        }),
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
    let answer = Ok(AnyAnswer::Operate(Outcome::History(Page {
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
