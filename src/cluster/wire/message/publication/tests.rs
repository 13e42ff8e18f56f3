//! The encoded publications are pinned: two builds run in one ring during an upgrade.

use uuid::Uuid;

use super::*;
use crate::{
    chat::{ChangedItem, ReactedBy, Recipients},
    cluster::wire::message::{Delivered, Interest, PeerMessage, decode, encode},
    model::{
        Attachment, AttachmentId, ClientId, Content, Cursor, FileState, Kind, MessageId, Metadata,
        Posting, SystemChange, Topic,
    },
};

/// One message of each kind that carries a publication or follows from one.
#[expect(clippy::too_many_lines, reason = "a table: one of each")]
fn messages() -> Vec<PeerMessage> {
    let conversation = ConversationId(Uuid::from_u128(1));
    let user = |name: &str| UserId::new(name).unwrap();
    let members = |kind, name: Option<&str>| {
        Audience::Members(Arc::new(Recipients {
            kind,
            name: name.map(Into::into),
            users: vec![(user("ann"), 1), (user("bob"), 2)],
        }))
    };
    let entry = |content| {
        Arc::new(Entry {
            seq: 7,
            message_id: MessageId(Uuid::from_u128(2)),
            client_id: ClientId(Uuid::from_u128(3)),
            sender: user("ann"),
            at: 1_795_000_000_123,
            content,
            texts: 0,
        })
    };
    let text = Content::Text {
        body: "hi".into(),
        attachments: vec![Attachment {
            url: "https://a.example/b".into(),
            name: Some("b".into()),
            mime: None,
            size: Some(300),
            ..Attachment::default()
        }],
        reply_to: Some(5),
    };
    let private = Content::System(SystemChange::Updated {
        name: Some("new".into()),
        posting: None,
        public: Some(false),
    });
    let details = Details {
        kind: Kind::Group,
        name: Some("Lunch".into()),
        created_at: 1_795_000_000_000,
        created_by: user("ann"),
        posting: Posting::Everyone,
        public: false,
    };
    let membership = |change, details, audience| {
        let notice = MembershipNotice { change, details };
        Publication::membership(conversation, 7, notice.into(), audience)
    };
    let receipt = |read_seq, delivered_seq, audience| {
        let receipt = Receipt {
            user: user("bob"),
            read_seq,
            delivered_seq,
            away: false,
        };
        Publication::receipt(conversation, receipt, audience)
    };
    let of_nothing = Details {
        kind: Kind::Dm,
        name: None,
        ..details.clone()
    };
    let publications = [
        Publication::entry(
            conversation,
            entry(text),
            members(Kind::Group, Some("Lunch")),
        ),
        Publication::entry(conversation, entry(private), Audience::Channel),
        receipt(Some(7), None, members(Kind::Dm, None)),
        receipt(None, Some(300), Audience::User(user("bob"))),
        Publication::typing(conversation, user("bob"), members(Kind::Dm, Some("cat"))),
        membership(MembershipChange::Added, of_nothing, members(Kind::Dm, None)),
        membership(
            MembershipChange::Removed,
            details.clone(),
            Audience::User(user("bob")),
        ),
        membership(MembershipChange::Updated, details, Audience::Channel),
    ];
    let mut messages = Vec::new();
    for publication in publications {
        messages.push(PeerMessage::Publish {
            part: 9,
            publication: publication.clone(),
        });
        messages.push(PeerMessage::Deliver(Delivered::Publication(publication)));
    }
    messages.push(PeerMessage::ReadBySender {
        user: user("ann"),
        channel: conversation,
        seq: 7,
        texts: 0,
    });
    let topic = Topic::Channel(conversation);
    messages.push(PeerMessage::Interests {
        version: 3,
        topics: vec![
            Interest {
                topic,
                passed: Some(Cursor(7, 0)),
                away: false,
            },
            Interest {
                topic: Topic::User(user("ann")),
                passed: None,
                away: false,
            },
        ],
    });
    messages.push(PeerMessage::Published {
        part: 0,
        taken: true,
    });
    messages
}

/// Changes and reactions are decoded to what was encoded.
#[test]
fn changes_are_read_as_they_were_written() {
    let conversation = ConversationId(Uuid::from_u128(1));
    let bob = UserId::new("bob").unwrap();
    let members = Audience::Members(Arc::new(Recipients {
        kind: Kind::Group,
        name: None,
        users: vec![(bob.clone(), 2)],
    }));
    let item = ChangedItem {
        seq: 4,
        rev: 9,
        content: None,
        reactions: Some([("👍".to_owned(), 2)].into()),
        by: Some(ReactedBy {
            user: bob.clone(),
            emoji: "👍".into(),
            on: true,
        }),
        mine: None,
    };
    let changed = Arc::new(Changed {
        after: 8,
        items: vec![item],
        newest: None,
        deleted: None,
    });
    let reacted = Reacted {
        seq: 4,
        emoji: "👍".into(),
        on: true,
        rev: 9,
    };
    let changes = |audience, is_confirmed| {
        let at = Cursor(7, 9);
        Publication::changed(conversation, at, changed.clone(), audience, is_confirmed)
    };
    for publication in [
        changes(members.clone(), true),
        changes(members, false),
        changes(Audience::Channel, false),
        Publication::reacted(conversation, reacted, bob),
    ] {
        let message = Delivered::Publication(publication);
        let read: Delivered = decode(&encode(&message)).unwrap();
        assert_eq!(format!("{read:?}"), format!("{message:?}"));
    }
    let read = PeerMessage::ReadBySender {
        user: UserId::new("ann").unwrap(),
        channel: conversation,
        seq: 7,
        texts: 5,
    };
    let again: PeerMessage = decode(&encode(&read)).unwrap();
    assert_eq!(format!("{again:?}"), format!("{read:?}"));
}

#[test]
fn files_are_read_as_they_were_written() {
    let conversation = ConversationId(Uuid::from_u128(1));
    let bob = UserId::new("bob").unwrap();
    let file = AttachmentId(Uuid::from_u128(2));
    let ready = FileNotice {
        file,
        state: FileState::Ready,
        mime: Some("image/png".into()),
        width: Some(800),
        height: Some(600),
        metadata: Some(Metadata::Kept),
    };
    for publication in [
        Publication::file(conversation, ready, bob.clone()),
        Publication::file(conversation, FileNotice::blocked(file), bob),
    ] {
        let message = Delivered::Publication(publication);
        let read: Delivered = decode(&encode(&message)).unwrap();
        assert_eq!(format!("{read:?}"), format!("{message:?}"));
    }
}

#[test]
fn publications_between_gateways_are_the_golden_ones() {
    let mut lines = String::new();
    for message in &messages() {
        let bytes = encode(message);
        let read: PeerMessage = decode(&bytes).unwrap();
        assert_eq!(format!("{read:?}"), format!("{message:?}"));
        lines.push_str(&bytes.escape_ascii().to_string());
        lines.push('\n');
    }
    crate::golden::check("peer-publications.txt", &lines);
}
