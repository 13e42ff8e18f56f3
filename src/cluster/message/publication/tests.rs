//! The encoded publications are pinned: two builds run in one ring during an upgrade.

use uuid::Uuid;

use super::*;
use crate::{
    chat::{ChangedItem, ReactedBy, Recipients},
    cluster::message::{Delivered, Interest, PeerMessage, decode, encode},
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
            texts: None,
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
        texts: None,
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

/// What builds before this one write for these messages, and read.
const EARLIER: &[&[u8]] = &[
    b"\x81\xa7Publish\x82\xa4part\t\xabpublication\x81\xa5Entry\x83\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa5entry\x86\xa3seq\x07\xaamessage_id\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\xa9client_id\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03\xa6sender\xa3ann\xa2at\xcf\x00\x00\x01\xa1\xeeV^{\xa7content\x81\xa4Text\x83\xa4body\xa2hi\xabattachments\x91\x83\xa3url\xb3https://a.example/b\xa4name\xa1b\xa4size\xcd\x01,\xa8reply_to\x05\xa8audience\x81\xa7Members\x83\xa4kind\xa5group\xa4name\xa5Lunch\xa5users\x92\x92\xa3ann\x01\x92\xa3bob\x02",
    b"\x81\xa7Deliver\x81\xabPublication\x81\xa5Entry\x83\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa5entry\x86\xa3seq\x07\xaamessage_id\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\xa9client_id\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03\xa6sender\xa3ann\xa2at\xcf\x00\x00\x01\xa1\xeeV^{\xa7content\x81\xa4Text\x83\xa4body\xa2hi\xabattachments\x91\x83\xa3url\xb3https://a.example/b\xa4name\xa1b\xa4size\xcd\x01,\xa8reply_to\x05\xa8audience\x81\xa7Members\x83\xa4kind\xa5group\xa4name\xa5Lunch\xa5users\x92\x92\xa3ann\x01\x92\xa3bob\x02",
    b"\x81\xa7Publish\x82\xa4part\t\xabpublication\x81\xa5Entry\x83\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa5entry\x86\xa3seq\x07\xaamessage_id\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\xa9client_id\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03\xa6sender\xa3ann\xa2at\xcf\x00\x00\x01\xa1\xeeV^{\xa7content\x81\xa6System\x83\xa6change\xa7updated\xa4name\xa3new\xa6public\xc2\xa8audience\xa7Channel",
    b"\x81\xa7Deliver\x81\xabPublication\x81\xa5Entry\x83\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa5entry\x86\xa3seq\x07\xaamessage_id\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\xa9client_id\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03\xa6sender\xa3ann\xa2at\xcf\x00\x00\x01\xa1\xeeV^{\xa7content\x81\xa6System\x83\xa6change\xa7updated\xa4name\xa3new\xa6public\xc2\xa8audience\xa7Channel",
    b"\x81\xa7Publish\x82\xa4part\t\xabpublication\x81\xa7Receipt\x85\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa4user\xa3bob\xa8read_seq\x07\xaddelivered_seq\xc0\xa8audience\x81\xa7Members\x83\xa4kind\xa2dm\xa4name\xc0\xa5users\x92\x92\xa3ann\x01\x92\xa3bob\x02",
    b"\x81\xa7Deliver\x81\xabPublication\x81\xa7Receipt\x85\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa4user\xa3bob\xa8read_seq\x07\xaddelivered_seq\xc0\xa8audience\x81\xa7Members\x83\xa4kind\xa2dm\xa4name\xc0\xa5users\x92\x92\xa3ann\x01\x92\xa3bob\x02",
    b"\x81\xa7Publish\x82\xa4part\t\xabpublication\x81\xa7Receipt\x85\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa4user\xa3bob\xa8read_seq\xc0\xaddelivered_seq\xcd\x01,\xa8audience\x81\xa4User\xa3bob",
    b"\x81\xa7Deliver\x81\xabPublication\x81\xa7Receipt\x85\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa4user\xa3bob\xa8read_seq\xc0\xaddelivered_seq\xcd\x01,\xa8audience\x81\xa4User\xa3bob",
    b"\x81\xa7Publish\x82\xa4part\t\xabpublication\x81\xa6Typing\x83\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa4user\xa3bob\xa8audience\x81\xa7Members\x83\xa4kind\xa2dm\xa4name\xa3cat\xa5users\x92\x92\xa3ann\x01\x92\xa3bob\x02",
    b"\x81\xa7Deliver\x81\xabPublication\x81\xa6Typing\x83\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa4user\xa3bob\xa8audience\x81\xa7Members\x83\xa4kind\xa2dm\xa4name\xa3cat\xa5users\x92\x92\xa3ann\x01\x92\xa3bob\x02",
    b"\x81\xa7Publish\x82\xa4part\t\xabpublication\x81\xa5Place\x85\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa3seq\x07\xa5place\xa5Added\xa7details\x85\xa4kind\xa2dm\xaacreated_at\xcf\x00\x00\x01\xa1\xeeV^\x00\xaacreated_by\xa3ann\xa7posting\xa8everyone\xa6public\xc2\xa8audience\x81\xa7Members\x83\xa4kind\xa2dm\xa4name\xc0\xa5users\x92\x92\xa3ann\x01\x92\xa3bob\x02",
    b"\x81\xa7Deliver\x81\xabPublication\x81\xa5Place\x85\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa3seq\x07\xa5place\xa5Added\xa7details\x85\xa4kind\xa2dm\xaacreated_at\xcf\x00\x00\x01\xa1\xeeV^\x00\xaacreated_by\xa3ann\xa7posting\xa8everyone\xa6public\xc2\xa8audience\x81\xa7Members\x83\xa4kind\xa2dm\xa4name\xc0\xa5users\x92\x92\xa3ann\x01\x92\xa3bob\x02",
    b"\x81\xa7Publish\x82\xa4part\t\xabpublication\x81\xa5Place\x85\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa3seq\x07\xa5place\xa7Removed\xa7details\x86\xa4kind\xa5group\xa4name\xa5Lunch\xaacreated_at\xcf\x00\x00\x01\xa1\xeeV^\x00\xaacreated_by\xa3ann\xa7posting\xa8everyone\xa6public\xc2\xa8audience\x81\xa4User\xa3bob",
    b"\x81\xa7Deliver\x81\xabPublication\x81\xa5Place\x85\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa3seq\x07\xa5place\xa7Removed\xa7details\x86\xa4kind\xa5group\xa4name\xa5Lunch\xaacreated_at\xcf\x00\x00\x01\xa1\xeeV^\x00\xaacreated_by\xa3ann\xa7posting\xa8everyone\xa6public\xc2\xa8audience\x81\xa4User\xa3bob",
    b"\x81\xa7Publish\x82\xa4part\t\xabpublication\x81\xa5Place\x85\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa3seq\x07\xa5place\xa7Updated\xa7details\x86\xa4kind\xa5group\xa4name\xa5Lunch\xaacreated_at\xcf\x00\x00\x01\xa1\xeeV^\x00\xaacreated_by\xa3ann\xa7posting\xa8everyone\xa6public\xc2\xa8audience\xa7Channel",
    b"\x81\xa7Deliver\x81\xabPublication\x81\xa5Place\x85\xacconversation\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa3seq\x07\xa5place\xa7Updated\xa7details\x86\xa4kind\xa5group\xa4name\xa5Lunch\xaacreated_at\xcf\x00\x00\x01\xa1\xeeV^\x00\xaacreated_by\xa3ann\xa7posting\xa8everyone\xa6public\xc2\xa8audience\xa7Channel",
    b"\x81\xa4Sent\x83\xa4user\xa3ann\xa7channel\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa3seq\x07",
    b"\x81\xa9Interests\x82\xa7version\x03\xa6topics\x92\x82\xa5topic\x81\xa7Channel\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xa6passed\x07\x82\xa5topic\x81\xa4User\xa3ann\xa6passed\xc0",
    b"\x81\xa9Published\x82\xa4part\x00\xa5taken\xc3",
];

/// From the level of changes on, all gateways read these.
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
        texts: Some(5),
    };
    let again: PeerMessage = decode(&encode(&read)).unwrap();
    assert_eq!(format!("{again:?}"), format!("{read:?}"));
}

/// From the level of files on, gateways that know the event read these.
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
fn publications_are_encoded_as_in_earlier_builds() {
    let messages = messages();
    assert_eq!(messages.len(), EARLIER.len());
    for (message, earlier) in messages.iter().zip(EARLIER) {
        let bytes = encode(message);
        assert_eq!(
            bytes.escape_ascii().to_string(),
            earlier.escape_ascii().to_string()
        );
        let read: PeerMessage = decode(earlier).unwrap();
        assert_eq!(format!("{read:?}"), format!("{message:?}"));
    }
}
