//! What the sockets of this gateway get, and what is remembered of channels.

use futures_util::FutureExt as _;

use super::*;
use crate::{
    chat::Reacted,
    model::{Content, Details, SessionId, SystemChange},
    protocol::Codec,
};

/// A session asks, everyone leaves, another session comes. The answer to the first question is older than the notice
/// that nobody is interested.
#[test]
fn an_answer_of_an_earlier_subscription_says_nothing() {
    let sockets = LocalSockets::new(Arc::default());
    let channel = ConversationId(uuid::Uuid::from_u128(1));
    let topic = Topic::Channel(channel);
    let session = |n| {
        let id = SessionId(n);
        let user = UserId::new("alice").unwrap();
        Arc::new(Subscriber::new(id, user, Codec::Json, 1 << 20))
    };
    let (first, second) = (session(1), session(2));
    assert_eq!(sockets.subscription(channel), None, "nobody is here");
    sockets.subscribe(&topic, &first);
    let asked = sockets.subscription(channel).unwrap();
    sockets.leave(&first, |_| {}, |_| {});
    sockets.subscribe(&topic, &second);
    sockets.confirmed(channel, asked, Cursor(10, 0));
    assert!(
        !sockets.owner_knows(channel),
        "the owner was told otherwise since"
    );
    let again = sockets.subscription(channel).unwrap();
    sockets.confirmed(channel, asked, Cursor(10, 0));
    assert!(!sockets.owner_knows(channel));
    sockets.confirmed(channel, again, Cursor(10, 0));
    assert!(sockets.owner_knows(channel));
}

fn text(seq: Seq) -> Content {
    Content::text(format!("number {seq}"))
}

fn delivers(sockets: &LocalSockets, conversation: ConversationId, seq: Seq, content: Content) {
    let entry = Entry {
        seq,
        message_id: crate::clock::message_id(1),
        client_id: crate::model::ClientId(uuid::Uuid::nil()),
        sender: UserId::new("alice").unwrap(),
        at: 1,
        content,
        texts: 0,
    };
    let audience = Audience::Channel;
    sockets.deliver_publication(&Publication::entry(conversation, entry.into(), audience));
}

/// The owner's answer counts for as long as everything that followed was delivered here.
#[test]
fn a_head_is_known_while_nothing_is_missing() {
    let sockets = LocalSockets::new(Arc::default());
    let channel = ConversationId(uuid::Uuid::from_u128(1));
    let user = UserId::new("alice").unwrap();
    let session = Arc::new(Subscriber::new(
        SessionId(1),
        user.clone(),
        Codec::Json,
        1 << 20,
    ));
    sockets.subscribe(&Topic::Channel(channel), &session);
    let details = Details {
        kind: Kind::Channel,
        name: None,
        created_at: 1,
        created_by: user,
        posting: crate::model::Posting::Everyone,
        public: false,
    };
    let said = |head| {
        Arc::new(Head {
            details: details.clone(),
            head,
            last: None,
            rev: 0,
            texts: 0,
            deleted: Default::default(),
        })
    };
    let known = || {
        let (heads, _) = sockets.heads(vec![channel], None, 1);
        heads.get(&channel).map(|head| head.head)
    };
    let subscription = sockets.subscription(channel).unwrap();
    delivers(&sockets, channel, 11, text(11));
    sockets.confirmed(channel, subscription, Cursor(10, 0));
    sockets.learned(channel, subscription, &said(10));
    assert_eq!(known(), None, "11 was delivered before the answer came");
    sockets.learned(channel, subscription, &said(11));
    assert_eq!(known(), Some(11));
    delivers(&sockets, channel, 12, text(12));
    assert_eq!(known(), Some(12));
    delivers(&sockets, channel, 14, text(14));
    assert_eq!(known(), None, "13 is missing");
    delivers(&sockets, channel, 13, text(13));
    sockets.learned(channel, subscription, &said(14));
    assert_eq!(known(), Some(14));
    let renamed = SystemChange::Updated {
        name: Some("new".into()),
        posting: None,
        public: None,
    };
    delivers(&sockets, channel, 15, Content::System(renamed));
    assert_eq!(known(), None, "the details are other ones");
    sockets.learned(channel, subscription + 1, &said(15));
    assert_eq!(known(), None, "an answer of another subscription");
}

/// Returns the type of each queued frame, with its rev if it has one.
fn queued(session: &Subscriber) -> Vec<(String, Option<u64>)> {
    let mut frames = std::collections::VecDeque::new();
    let _ = session.outbox.take(&mut frames).now_or_never();
    let read = |frame: &crate::fanout::Frame| {
        // Skips the header of the WebSocket frame.
        let bytes = frame.bytes();
        let begin = bytes.windows(2).position(|two| two == b"{\"");
        let frame: serde_json::Value = serde_json::from_slice(&bytes[begin.unwrap()..]).unwrap();
        let kind = frame["type"].as_str().unwrap().to_owned();
        (kind, frame["rev"].as_u64())
    };
    frames.iter().map(read).collect()
}

#[test]
fn changes_come_in_order_with_the_messages_of_their_channel() {
    let sockets = LocalSockets::new(Arc::default());
    let channel = ConversationId(uuid::Uuid::from_u128(1));
    let user = UserId::new("alice").unwrap();
    let session = |n, user: &UserId| {
        let id = SessionId(n);
        Arc::new(Subscriber::new(id, user.clone(), Codec::Json, 1 << 20))
    };
    let (alice, bob) = (session(1, &user), session(2, &UserId::new("bob").unwrap()));
    for session in [&alice, &bob] {
        sockets.subscribe(&Topic::Channel(channel), session);
    }
    sockets.subscribe(&Topic::User(user.clone()), &alice);
    let subscription = sockets.subscription(channel).unwrap();
    sockets.confirmed(channel, subscription, Cursor(10, 3));
    delivers(&sockets, channel, 11, text(11));
    let (changed, audience) = (Arc::new(gap(4)), Audience::Channel);
    let changed = Publication::changed(channel, Cursor(11, 4), changed, audience, false);
    sockets.deliver_publication(&changed);
    delivers(&sockets, channel, 12, text(12));
    let reacted = Reacted {
        seq: 11,
        emoji: "a".into(),
        on: true,
        rev: 4,
    };
    sockets.deliver_publication(&Publication::reacted(channel, reacted, user));
    let expected = [("message", None), ("changed", Some(4)), ("message", None)];
    let expected = expected.map(|(kind, rev)| (kind.to_owned(), rev));
    assert_eq!(queued(&bob), expected);
    assert_eq!(queued(&alice)[..3], expected);
    // Rule [subscribe]: the gateway asks for the channel again from here.
    let interests = sockets.interests();
    let passed = interests.iter().find_map(|interest| interest.passed);
    assert_eq!(passed, Some(Cursor(12, 4)));
}

#[test]
fn a_reaction_is_told_to_its_user_only() {
    let sockets = LocalSockets::new(Arc::default());
    let user = UserId::new("alice").unwrap();
    let session = Arc::new(Subscriber::new(
        SessionId(1),
        user.clone(),
        Codec::Json,
        1 << 20,
    ));
    sockets.subscribe(&Topic::User(user.clone()), &session);
    let channel = ConversationId(uuid::Uuid::from_u128(1));
    let reacted = |user| {
        let reacted = Reacted {
            seq: 11,
            emoji: "a".into(),
            on: true,
            rev: 4,
        };
        sockets.deliver_publication(&Publication::reacted(channel, reacted, user));
    };
    reacted(user);
    reacted(UserId::new("bob").unwrap());
    assert_eq!(queued(&session), [("reacted".to_owned(), Some(4))]);
}

/// A user is away here while all sessions are. It is told when that changes, also by a session that leaves.
#[test]
fn a_user_is_away_while_all_sessions_here_are() {
    let sockets = LocalSockets::new(Arc::default());
    let user = UserId::new("alice").unwrap();
    let topic = Topic::User(user.clone());
    let session = |n| {
        let session = Subscriber::new(SessionId(n), user.clone(), Codec::Json, 1 << 20);
        let session = Arc::new(session);
        sockets.subscribe(&topic, &session);
        session
    };
    let told = Mutex::new(Vec::new());
    let tell = |away| lock(&told).push(away);
    let took = || std::mem::take(&mut *lock(&told));
    let (first, second) = (session(1), session(2));
    sockets.set_away(&first, true, tell);
    assert!(took().is_empty(), "the second one is not away");
    sockets.set_away(&second, true, tell);
    sockets.set_away(&second, true, tell);
    assert_eq!(took(), [true]);
    let announced = sockets.interests();
    assert!(announced.iter().all(|interest| interest.away));
    sockets.set_away(&first, false, tell);
    assert_eq!(took(), [false]);
    let third = session(3);
    sockets.leave(&first, |_| {}, tell);
    assert!(took().is_empty(), "the third one is not away");
    sockets.leave(&third, |_| {}, tell);
    assert_eq!(took(), [true], "only one that is away is left");
    sockets.leave(&second, |_| {}, tell);
    assert!(took().is_empty(), "nobody is left");
}
