//! Tests of the entries pushed to a client that resumes, over a store whose reads can be made to fail.

use futures_util::FutureExt as _;
use uuid::Uuid;

use super::*;
use crate::{
    chat::{Creation, DeleteMessages, EditMessage, React},
    config::Config,
    gateway::{fixture, requests},
    model::{ClientId, Content, Draft, EditedContent, Posting, SessionId, UserId},
    protocol::{ChangedEvent, Codec, Message, Request, Send},
    store::simulated::{Faults, Simulated},
};

/// Faults with which no read is answered.
const UNREADABLE: Faults = Faults {
    unread: 100,
    ..Faults::NONE
};

struct Fixture {
    gateway: Gateway,
    store: Arc<Simulated>,
    bob: Arc<Subscriber>,
    _keys: tempfile::TempDir,
}

fn user(name: &str) -> UserId {
    UserId::new(name).unwrap()
}

impl Fixture {
    async fn new() -> Self {
        let keys = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.auth.development = true;
        config.store.embedded.path = keys.path().into();
        let simulated = Arc::new(Simulated::new(1, Faults::NONE));
        let gateway = fixture::gateway(&config, simulated.clone()).await;
        let outbox_bytes = gateway.limits.outbox_bytes;
        let bob = Subscriber::new(SessionId(1), user("bob"), Codec::Json, outbox_bytes);
        Self {
            gateway,
            store: simulated,
            bob: Arc::new(bob),
            _keys: keys,
        }
    }

    /// Creates a conversation of alice and bob. Its newest entry is `head`, and each body has this many bytes.
    async fn conversation(&self, kind: Kind, head: Seq, bytes: usize) -> ConversationId {
        let conversation = ConversationId::random();
        let creation = Creation {
            kind,
            participants: vec![user("bob")],
            name: None,
            public: kind == Kind::Channel,
            posting: Posting::Everyone,
            at: None,
        };
        let router = &self.gateway.router;
        let created = router.ask(conversation, user("alice"), creation);
        created.await.unwrap();
        for _ in 1..head {
            let draft = Draft {
                sender: user("alice"),
                client_id: ClientId(Uuid::new_v4()),
                content: Content::text("x".repeat(bytes)),
                at: None,
                retry: false,
            };
            router.send(conversation, draft).await.unwrap();
        }
        conversation
    }

    /// Reads what a cursor misses: the seqs of each page, and the event at the end if there is one.
    async fn missed(&self, place: InboxRef, after: Seq) -> (Vec<Vec<Seq>>, Option<Event>) {
        let (pages, mut events) = self.missed_after(place, Cursor(after, 0)).await;
        let pages = pages.into_iter();
        let seqs = |page: Vec<Message>| page.iter().map(|message| message.seq).collect();
        assert!(events.len() <= 1, "{events:?}");
        (pages.map(seqs).collect(), events.pop())
    }

    /// Reads what a cursor misses: the messages of each page, and the events that follow them.
    async fn missed_after(
        &self,
        place: InboxRef,
        cursor: Cursor,
    ) -> (Vec<Vec<Message>>, Vec<Event>) {
        let conversation = place.conversation;
        let cursors = HashMap::from([(conversation, cursor)]);
        let mut missed = Missed::new(&self.gateway, &self.bob, &cursors, vec![place]);
        let (mut pages, mut events) = (Vec::new(), Vec::new());
        while let Some((_, missing)) = missed.next().await {
            match missing {
                Missing::Entries(entries) => {
                    assert!(events.is_empty(), "no messages follow {events:?}");
                    let weight: usize = entries.iter().map(Shown::weight).sum();
                    assert!(weight <= self.gateway.limits.page_bytes(), "{weight}");
                    let entries = entries.into_iter();
                    pages.push(entries.map(|shown| shown.message(conversation)).collect());
                }
                Missing::Changes(changes, _) => events.extend(changes),
                Missing::Other(event) => events.push(event),
            }
        }
        (pages, events)
    }

    /// Edits the second entry, reacts to the third one and deletes the fourth one: the revs 1, 2 and 3.
    async fn change(&self, conversation: ConversationId) {
        let router = &self.gateway.router;
        let edit = EditMessage {
            seq: 2,
            content: EditedContent {
                body: "new".into(),
                attachments: Vec::new(),
            }
            .into(),
            base_rev: None,
            at: None,
        };
        let react = React {
            seq: 3,
            emoji: ":a:".into(),
            on: true,
            at: None,
        };
        let delete = DeleteMessages {
            seqs: vec![4],
            as_moderator: false,
            at: None,
        };
        let alice = || user("alice");
        assert_eq!(router.ask(conversation, alice(), edit).await, Ok(1));
        assert_eq!(router.ask(conversation, alice(), react).await, Ok(2));
        assert_eq!(router.ask(conversation, alice(), delete).await, Ok(3));
    }

    fn frames(&self) -> Vec<serde_json::Value> {
        let mut frames = std::collections::VecDeque::new();
        let _ = self.bob.outbox.take(&mut frames).now_or_never();
        let read = |frame: &Frame| {
            // Skips the header of the WebSocket frame.
            let bytes = frame.bytes();
            let begin = bytes.windows(2).position(|two| two == b"{\"");
            serde_json::from_slice(&bytes[begin.unwrap()..]).unwrap()
        };
        frames.iter().map(read).collect()
    }
}

fn place(conversation: ConversationId, kind: Kind, last_seq: Option<Seq>) -> InboxRef {
    InboxRef {
        conversation,
        kind,
        last_seq,
        rev: 0,
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_missed_comes_in_order_a_page_at_a_time() {
    let fixture = Fixture::new().await;
    for (head, bytes, pages_min) in [(3, 1, 1), (120, 1, 1), (480, 1, 3), (120, 10_000, 5)] {
        let group = fixture.conversation(Kind::Group, head, bytes).await;
        // The home may know an older entry than the newest one.
        for known in [head, 2] {
            let place = place(group, Kind::Group, Some(known));
            let (pages, other) = fixture.missed(place, 1).await;
            assert!(other.is_none(), "{other:?}");
            assert!(pages.len() >= pages_min, "{} pages", pages.len());
            assert_eq!(pages.concat(), (2..=head).collect::<Vec<_>>());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn more_than_may_be_pushed_is_not_read() {
    let fixture = Fixture::new().await;
    let group = fixture.conversation(Kind::Group, 502, 1).await;
    let channel = fixture.conversation(Kind::Channel, 502, 1).await;
    let channels = [place(channel, Kind::Channel, None)];
    let bob = &fixture.bob;
    subscribe_own_channels(&fixture.gateway, bob, &channels).await;
    let resync = |event: Option<Event>| match event {
        Some(Event::Resync { head, .. }) => head,
        other => panic!("{other:?}"),
    };
    fixture.store.set_faults(UNREADABLE);
    let [channel_place] = channels;
    for place in [place(group, Kind::Group, Some(502)), channel_place] {
        let (pages, other) = fixture.missed(place, 1).await;
        assert_eq!((pages.len(), resync(other)), (0, 502));
    }
    fixture.store.set_faults(Faults::NONE);
    // The head is known only after the first page, so that page is pushed and nothing after it.
    let older = place(group, Kind::Group, Some(2));
    let (pages, other) = fixture.missed(older, 1).await;
    assert_eq!((pages.len(), resync(other)), (1, 502));
}

/// Returns `after`, `rev` and the seqs of each `changed` event.
fn changed(events: Vec<Event>) -> Vec<(Rev, Rev, Vec<Seq>)> {
    let read = |event| match event {
        Event::Changed(ChangedEvent {
            after, rev, items, ..
        }) => (after, rev, items.iter().map(|item| item.seq).collect()),
        other => panic!("{other:?}"),
    };
    events.into_iter().map(read).collect()
}

#[tokio::test(start_paused = true)]
async fn what_changed_follows_the_missed_messages() {
    let fixture = Fixture::new().await;
    let group = fixture.conversation(Kind::Group, 6, 7).await;
    let channel = fixture.conversation(Kind::Channel, 6, 7).await;
    fixture.change(group).await;
    fixture.change(channel).await;
    let bob = &fixture.bob;
    let channel = place(channel, Kind::Channel, None);
    subscribe_own_channels(&fixture.gateway, bob, std::slice::from_ref(&channel)).await;
    let group = InboxRef {
        rev: 3,
        ..place(group, Kind::Group, Some(6))
    };
    for place in [group, channel] {
        let missed = |cursor| fixture.missed_after(place.clone(), cursor);
        let (pages, events) = missed(Cursor(2, 0)).await;
        let texts = pages.concat().into_iter();
        let texts: Vec<_> = texts.map(|m| (m.seq, m.body.len(), m.rev)).collect();
        assert_eq!(texts, [(3, 7, 2), (4, 0, 3), (5, 7, 0), (6, 7, 0)]);
        assert_eq!(changed(events), [(0, 3, vec![2, 3, 4])]);
        let (pages, events) = missed(Cursor(6, 2)).await;
        assert!(pages.is_empty());
        assert_eq!(changed(events), [(2, 3, vec![4])]);
        let (pages, events) = missed(Cursor(6, 3)).await;
        assert!(pages.is_empty() && events.is_empty(), "nothing is missing");
    }
}

/// The position of a channel that comes here is known without a question to its owner, and moves with the channel.
#[tokio::test(start_paused = true)]
async fn a_channel_that_comes_here_is_where_its_owner_says() {
    let fixture = Fixture::new().await;
    let channel = fixture.conversation(Kind::Channel, 6, 7).await;
    let place = place(channel, Kind::Channel, None);
    let places = std::slice::from_ref(&place);
    subscribe_own_channels(&fixture.gateway, &fixture.bob, places).await;
    let Gateway {
        router,
        users,
        channels,
        ..
    } = &fixture.gateway;
    let position = || channels.positions(vec![channel]).get(&channel).copied();
    assert_eq!(position(), None, "nobody has asked the owner yet");
    users.inbox(&user("bob"), None, 50).await.unwrap();
    assert_eq!(position(), Some(Cursor(6, 0)));
    fixture.change(channel).await;
    users.inbox(&user("bob"), None, 50).await.unwrap();
    assert_eq!(position(), Some(Cursor(6, 3)));
    let (pages, events) = fixture.missed_after(place.clone(), Cursor(6, 3)).await;
    assert!(pages.is_empty() && events.is_empty(), "nothing is missing");
    let (pages, events) = fixture.missed_after(place.clone(), Cursor(2, 1)).await;
    let seqs: Vec<Seq> = pages.concat().iter().map(|message| message.seq).collect();
    assert_eq!(seqs, [3, 4, 5, 6]);
    assert_eq!(changed(events), [(1, 3, vec![3, 4])]);
    let draft = Draft {
        sender: user("alice"),
        client_id: ClientId(Uuid::new_v4()),
        content: Content::text("new"),
        at: None,
        retry: false,
    };
    router.send(channel, draft).await.unwrap();
    assert_eq!(position(), Some(Cursor(7, 3)));
    let (pages, _) = fixture.missed_after(place, Cursor(6, 3)).await;
    assert_eq!(pages.concat().len(), 1);
}

/// The owner does not know the rev that the home has seen, which stands for an owner that cannot be asked.
#[tokio::test(start_paused = true)]
async fn changes_that_cannot_be_read_are_a_gap() {
    let fixture = Fixture::new().await;
    let group = fixture.conversation(Kind::Group, 3, 1).await;
    let place = InboxRef {
        rev: 5,
        ..place(group, Kind::Group, Some(3))
    };
    let missed = |cursor| fixture.missed_after(place.clone(), cursor);
    let (pages, events) = missed(Cursor(3, 3)).await;
    assert!(pages.is_empty());
    assert_eq!(changed(events), [(5, 5, vec![])]);
    let (pages, events) = missed(Cursor(1, 3)).await;
    assert_eq!(pages.concat().len(), 2);
    assert_eq!(changed(events), [(5, 5, vec![])]);
    let (pages, events) = missed(Cursor(3, 5)).await;
    assert!(pages.is_empty() && events.is_empty(), "nothing is missing");
}

#[tokio::test(start_paused = true)]
async fn a_subscription_brings_the_changes_after_its_rev() {
    let fixture = Fixture::new().await;
    let conversation = fixture.conversation(Kind::Channel, 6, 1).await;
    fixture.change(conversation).await;
    let subscribed = async |after, rev| {
        let request = Subscribe {
            conversation,
            after,
            rev,
        };
        let (answer, _) = subscribe(&fixture.gateway, &fixture.bob, &request).await;
        let Answer::Ok(okay) = answer else {
            panic!("{answer:?}");
        };
        assert_eq!((okay.head, okay.rev), (Some(6), Some(3)));
        let frames = fixture.frames().into_iter();
        let kinds = frames.map(|frame| (frame["type"].as_str() == Some("changed"), frame));
        kinds
            .map(|(is_changed, frame)| (is_changed, frame["rev"].as_u64()))
            .collect::<Vec<_>>()
    };
    assert_eq!(subscribed(None, None).await, []);
    assert_eq!(subscribed(None, Some(3)).await, []);
    assert_eq!(subscribed(None, Some(1)).await, [(true, Some(3))]);
    let both = [(false, None), (false, None), (true, Some(3))];
    assert_eq!(subscribed(Some(4), Some(0)).await, both);
}

#[tokio::test(start_paused = true)]
async fn a_subscription_that_cannot_be_caught_up_says_so_and_stays() {
    let fixture = Fixture::new().await;
    let conversation = fixture.conversation(Kind::Channel, 100, 1).await;
    fixture.store.set_faults(UNREADABLE);
    let after = Some(1);
    let request = Subscribe {
        conversation,
        after,
        rev: None,
    };
    let (gateway, bob) = (&fixture.gateway, &fixture.bob);
    let (answer, _) = subscribe(gateway, bob, &request).await;
    assert!(
        matches!(&answer, Answer::Ok(okay) if okay.head == Some(100)),
        "{answer:?}"
    );
    let frames = fixture.frames();
    assert_eq!(frames.len(), 1, "{frames:?}");
    assert_eq!(
        (&frames[0]["type"], &frames[0]["head"]),
        (&"resync".into(), &100.into())
    );
    let topic = Topic::Channel(conversation);
    assert!(gateway.hub.is_subscribed(&topic, bob.session));
}

/// A session holds the futures of its requests in progress, and moves each several times before it runs. Moving them is
/// most of the cost of a message before the store.
#[tokio::test(start_paused = true)]
async fn the_future_of_a_message_stays_small() {
    let fixture = Fixture::new().await;
    let send = Send {
        conversation: ConversationId::random(),
        client_id: ClientId(Uuid::new_v4()),
        body: "hi".into(),
        attachments: Vec::new(),
        reply_to: None,
        retry: false,
    };
    let handled = requests::handle(&fixture.gateway, user("bob"), Request::Send(send));
    let bytes = size_of_val(&handled);
    assert!(bytes <= 424, "{bytes} bytes");
}
