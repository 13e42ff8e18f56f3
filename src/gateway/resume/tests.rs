//! Tests of the entries pushed to a client that resumes, over a store whose reads can be made to fail.

use futures_util::FutureExt as _;
use uuid::Uuid;

use super::*;
use crate::{
    auth::Tokens,
    chat::{Conversations, Creation},
    cluster::{Cluster, MembershipAgent},
    config::Config,
    fanout::Hub,
    gateway::requests,
    model::{ClientId, Content, Draft, Posting, SessionId, UserId},
    protocol::{ChangedEvent, Codec, Request, Send},
    store::{
        Store,
        simulated::{Faults, Simulated},
    },
    tasks::Tasks,
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
        let store: Arc<dyn Store> = simulated.clone();
        let tasks = Tasks::default();
        let members = Arc::new(MembershipAgent::alone(store.clone()).await.unwrap());
        let hub = Arc::new(Hub::new(config.fanout.coalesce(), tasks.clone()));
        let cluster = Cluster::new(
            &members,
            &store,
            &hub,
            None,
            config.conversations().operation_timeout,
            config.memory(),
            &tasks,
            |publish, inbox, lease| {
                let (me, store) = (members.me(), store.clone());
                let settings = config.conversations();
                Conversations::new(me, store, publish, inbox, lease, settings, tasks.clone())
            },
        );
        let kept = members.clone();
        tasks.spawn_until_drained(async move { kept.keep().await });
        let tokens = Tokens::new(&config).unwrap();
        let gateway = Gateway::new(&config, cluster.router.clone(), hub, tokens, tasks);
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
        self.missed_after(place, Cursor(after, 0)).await
    }

    async fn missed_after(
        &self,
        place: InboxRef,
        cursor: Cursor,
    ) -> (Vec<Vec<Seq>>, Option<Event>) {
        let cursors = HashMap::from([(place.conversation, cursor)]);
        let mut missed = Missed::new(&self.gateway, &self.bob, &cursors, vec![place]);
        let (mut pages, mut other) = (Vec::new(), None);
        while let Some((_, missing)) = missed.next().await {
            assert!(other.is_none(), "nothing follows {other:?}");
            match missing {
                Missing::Entries(entries) => {
                    let weight: usize = entries.iter().map(Shown::weight).sum();
                    assert!(weight <= self.gateway.limits.page_bytes(), "{weight}");
                    pages.push(entries.iter().map(|e| e.entry.seq).collect());
                }
                Missing::Changes(events, _) => panic!("{events:?}"),
                Missing::Other(event) => other = Some(event),
            }
        }
        (pages, other)
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
    follow_channels(&fixture.gateway, bob, &channels).await;
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

/// The owner does not know the rev that the home has seen, which stands for an owner that cannot be asked.
#[tokio::test(start_paused = true)]
async fn changes_that_cannot_be_read_are_a_gap() {
    let fixture = Fixture::new().await;
    let group = fixture.conversation(Kind::Group, 3, 1).await;
    let place = || InboxRef {
        rev: 5,
        ..place(group, Kind::Group, Some(3))
    };
    let gap = |event: Option<Event>| match event {
        Some(Event::Changed(ChangedEvent { after, rev, .. })) => (after, rev),
        other => panic!("{other:?}"),
    };
    let (pages, other) = fixture.missed_after(place(), Cursor(3, 3)).await;
    assert_eq!((pages.len(), gap(other)), (0, (5, 5)));
    let (pages, other) = fixture.missed_after(place(), Cursor(1, 3)).await;
    assert_eq!((pages.concat(), gap(other)), (vec![2, 3], (5, 5)));
    let (pages, other) = fixture.missed_after(place(), Cursor(3, 5)).await;
    assert!(pages.is_empty() && other.is_none(), "it lacks nothing");
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
