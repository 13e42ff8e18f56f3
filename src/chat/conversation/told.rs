//! Tests: what is told while the store has not answered, and what is left when an owner panics.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use crate::{
    chat::{
        Body, Confirmation, Conversations, Creation, DetailsView, Error, InboxWriter, Lease,
        LogRange, Operation, Outcome, Publication, Publish, Settings, operation::fresh_client_id,
    },
    memory::Memory,
    model::{
        Content, ConversationId, Draft, GatewayId, Kind, Posting, UserId, limits::SCAN_ROWS_MAX,
    },
    mutation::{Mutation, break_rule},
    store::simulated::{Faults, Simulated},
    tasks::{Tasks, lock},
};

/// No write is acknowledged, though each lands.
const UNANSWERED: Faults = Faults {
    late: 100,
    late_ms: 100,
    ..Faults::NONE
};

#[derive(Default)]
struct Receipts(Mutex<Vec<UserId>>);

impl Publish for Receipts {
    fn publish(&self, publication: Publication) -> Confirmation {
        if let Body::Receipt(receipt) = publication.body {
            lock(&self.0).push(receipt.user);
        }
        Confirmation::Immediate
    }
}

pub(super) struct Fixture {
    pub(super) conversations: Conversations,
    pub(super) store: Arc<Simulated>,
    receipts: Arc<Receipts>,
}

pub(super) type Asked<'a> = Pin<Box<dyn Future<Output = Result<Outcome, Error>> + 'a>>;

impl Fixture {
    pub(super) fn new(lease: Lease) -> Self {
        let store = Arc::new(Simulated::new(1, Faults::NONE));
        let receipts = Arc::new(Receipts::default());
        let settings = Settings {
            body_bytes_max: 1000,
            group_participants_max: 5000,
            idle: IDLE,
            operation_timeout: Duration::from_secs(60),
            open_max: 100,
            memory: Memory::of_mib(64),
            page_bytes_max: 1 << 20,
        };
        let conversations = Conversations::new(
            GatewayId(Uuid::from_u128(1)),
            store.clone(),
            receipts.clone(),
            Arc::new(InboxWriter::new(store.clone(), Memory::of_mib(64))),
            lease,
            settings,
            Tasks::default(),
        );
        Self {
            conversations,
            store,
            receipts,
        }
    }

    /// Asks, and gives the owner time to answer what it answers without the store.
    pub(super) async fn ask(&self, who: &str, operation: Operation) -> Asked<'_> {
        self.ask_of(GROUP, who, operation).await
    }

    pub(super) async fn ask_of(
        &self,
        id: ConversationId,
        who: &str,
        operation: Operation,
    ) -> Asked<'_> {
        let mut asked: Asked<'_> = Box::pin(self.conversations.ask(id, user(who), operation));
        match (&mut asked).now_or_never() {
            Some(answer) => Box::pin(std::future::ready(answer)),
            None => {
                sleep(Duration::from_millis(20)).await;
                asked
            }
        }
    }

    async fn details(&self, who: &str) -> DetailsView {
        match self.ask(who, Operation::Details).await.await {
            Ok(Outcome::Details(view)) => view,
            other => panic!("{other:?}"),
        }
    }

    /// With how far each has read.
    async fn participants(&self, who: &str) -> Vec<(String, Option<u64>)> {
        let (after, limit) = (None, 100);
        match self
            .ask(who, Operation::Participants { after, limit })
            .await
            .await
        {
            Ok(Outcome::Participants(page)) => {
                let item =
                    |p: &crate::chat::Listed| (p.user.to_string(), p.marks().map(|(_, read)| read));
                page.items.iter().map(item).collect()
            }
            other => panic!("{other:?}"),
        }
    }
}

pub(super) const IDLE: Duration = Duration::from_secs(300);
pub(super) const GROUP: ConversationId = ConversationId(Uuid::from_u128(2));

pub(super) fn user(name: &str) -> UserId {
    UserId::new(name).unwrap()
}

pub(super) fn creation(kind: Kind, participants: &[&str]) -> Operation {
    Operation::Create(Creation {
        kind,
        participants: participants.iter().map(|name| user(name)).collect(),
        name: None,
        public: false,
        posting: Posting::Everyone,
        at: None,
    })
}

pub(super) fn send(sender: &str) -> Draft {
    Draft {
        sender: user(sender),
        client_id: fresh_client_id(),
        content: Content::text("hi"),
        at: None,
        retry: false,
    }
}

fn rename(name: &str) -> Operation {
    Operation::Update {
        name: Some(name.into()),
        posting: None,
        public: None,
    }
}

pub(super) fn pending(asked: &mut Asked<'_>) -> bool {
    asked.now_or_never().is_none()
}

#[tokio::test(start_paused = true)]
async fn what_is_in_flight_is_told_to_nobody() {
    let fixture = Fixture::new(Lease::unbounded(1));
    let made = fixture.ask("alice", creation(Kind::Group, &["bob"])).await;
    made.await.unwrap();
    fixture.store.set_faults(UNANSWERED);
    let (dave, bob) = (user("dave"), user("bob"));
    let mut added = fixture.ask("alice", Operation::Add { user: dave }).await;
    let mut renamed = fixture.ask("alice", rename("new")).await;
    let mut removed = fixture.ask("alice", Operation::Remove { user: bob }).await;
    assert!(pending(&mut added) && pending(&mut renamed) && pending(&mut removed));
    for who in ["alice", "bob"] {
        let told = fixture.details(who).await;
        assert_eq!((told.details.name, told.participant_count), (None, 2));
        let there = fixture.participants(who).await;
        assert_eq!(
            there.iter().map(|p| &p.0).collect::<Vec<_>>(),
            ["alice", "bob"]
        );
    }
    let mut read = fixture.ask("dave", Operation::Head).await;
    assert!(pending(&mut read), "who is not in it for certain");
    let refused = fixture.ask("mallory", Operation::Head).await.await;
    assert_eq!(refused.unwrap_err(), Error::UnknownConversation);
    fixture.store.set_faults(Faults::NONE);
    for done in [added, renamed, removed] {
        assert!(matches!(done.await.unwrap(), Outcome::Changed { .. }));
    }
    assert!(matches!(read.await.unwrap(), Outcome::Head(_)));
    let told = fixture.details("dave").await;
    assert_eq!(
        (told.details.name.as_deref(), told.participant_count),
        (Some("new"), 2)
    );
    let refused = fixture.ask("bob", Operation::Details).await.await;
    assert!(matches!(refused, Err(Error::Forbidden(_))));
}

#[tokio::test(start_paused = true)]
async fn what_a_lost_lease_leaves_open_was_told_to_nobody() {
    let lease = Lease::until(1, Instant::now() + Duration::from_secs(5));
    let fixture = Fixture::new(lease);
    let made = fixture.ask("alice", creation(Kind::Group, &["bob"])).await;
    made.await.unwrap();
    fixture.store.set_faults(UNANSWERED);
    let added = fixture
        .ask("alice", Operation::Add { user: user("dave") })
        .await;
    let read = fixture.ask("dave", Operation::Details).await;
    assert_eq!(fixture.details("alice").await.participant_count, 2);
    assert!(added.await.unwrap_err().is_unavailable());
    assert_eq!(read.await.unwrap_err(), Error::Moved, "not begun");
}

#[tokio::test(start_paused = true)]
async fn a_creation_repeated_waits_for_the_first() {
    let dm = ConversationId::dm(&user("alice"), &user("bob"));
    for (id, kind) in [(GROUP, Kind::Group), (dm, Kind::Dm)] {
        let fixture = Fixture::new(Lease::unbounded(1));
        fixture.store.set_faults(UNANSWERED);
        let create = || creation(kind, &["bob"]);
        let mut first = fixture.ask_of(id, "alice", create()).await;
        let mut again = fixture.ask_of(id, "alice", create()).await;
        let mut read = fixture.ask_of(id, "bob", Operation::Details).await;
        assert!(pending(&mut first) && pending(&mut again) && pending(&mut read));
        fixture.store.set_faults(Faults::NONE);
        assert!(matches!(
            first.await.unwrap(),
            Outcome::Created { existed: false } | Outcome::Changed { seq: 1 }
        ));
        assert!(matches!(
            again.await.unwrap(),
            Outcome::Created { existed: true }
        ));
        assert!(matches!(read.await.unwrap(), Outcome::Details(_)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_dm_created_again_does_not_wait_for_a_message_that_is_being_written() {
    let dm = ConversationId::dm(&user("alice"), &user("bob"));
    let fixture = Fixture::new(Lease::unbounded(1));
    let create = |other: &str| creation(Kind::Dm, &[other]);
    let made = fixture.ask_of(dm, "alice", create("bob")).await;
    made.await.unwrap();
    fixture.store.set_faults(UNANSWERED);
    let sent = Operation::Send(send("alice"));
    let mut sent = fixture.ask_of(dm, "alice", sent).await;
    assert!(pending(&mut sent));
    let mut again = fixture.ask_of(dm, "bob", create("alice")).await;
    let again = (&mut again).now_or_never().expect("it is answered at once");
    assert!(matches!(again.unwrap(), Outcome::Created { existed: true }));
    fixture.store.set_faults(Faults::NONE);
    sent.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_watermark_shows_once_it_is_stored_and_is_told_once() {
    let fixture = Fixture::new(Lease::unbounded(1));
    let made = fixture.ask("alice", creation(Kind::Group, &["bob"])).await;
    made.await.unwrap();
    fixture
        .conversations
        .send(GROUP, send("alice"))
        .await
        .unwrap();
    fixture.store.set_faults(UNANSWERED);
    let mut read = fixture.ask("bob", Operation::Read { seq: 2 }).await;
    let mut again = fixture.ask("bob", Operation::Read { seq: 2 }).await;
    assert!(pending(&mut read) && pending(&mut again));
    let marks = |of_bob| {
        [
            ("alice".to_owned(), Some(2)),
            ("bob".to_owned(), Some(of_bob)),
        ]
    };
    assert_eq!(fixture.participants("alice").await, marks(1));
    assert!(lock(&fixture.receipts.0).is_empty());
    fixture.store.set_faults(Faults::NONE);
    read.await.unwrap();
    again.await.unwrap();
    assert_eq!(fixture.participants("alice").await, marks(2));
    assert_eq!(*lock(&fixture.receipts.0), [user("bob")]);
}

#[tokio::test(start_paused = true)]
async fn of_a_channel_only_ones_own_watermarks_are_shown_and_a_request_reads_only_so_much() {
    let fixture = Fixture::new(Lease::unbounded(1));
    let names: Vec<String> = (0..=SCAN_ROWS_MAX)
        .map(|n| format!("member-{n:05}"))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let made = fixture.ask("alice", creation(Kind::Channel, &names)).await;
    made.await.unwrap();
    for (at, name) in names.iter().enumerate() {
        let left = fixture
            .conversations
            .ask(GROUP, user(name), Operation::Leave);
        if at < SCAN_ROWS_MAX {
            left.await.unwrap();
        }
    }
    let (mut after, mut pages) = (None, Vec::new());
    loop {
        let operation = Operation::Participants { after, limit: 10 };
        let Ok(Outcome::Participants(page)) = fixture.ask("alice", operation).await.await else {
            panic!("a page")
        };
        pages.push(page.items);
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    let items = pages.iter().flatten();
    let shown: Vec<_> = items
        .map(|p| (p.user.as_str(), p.marks().is_some()))
        .collect();
    assert_eq!(shown, [("alice", true), (names[SCAN_ROWS_MAX], false)]);
    assert_eq!(pages.len(), 2, "more than one request may look at");
}

#[tokio::test(start_paused = true)]
async fn after_a_panic_the_next_owner_serves_what_was_there() {
    let fixture = Fixture::new(Lease::unbounded(1));
    let made = fixture.ask("alice", creation(Kind::Group, &["bob"])).await;
    made.await.unwrap();
    fixture.store.set_faults(UNANSWERED);
    let draft = send("alice");
    let first = fixture.ask("alice", Operation::Send(draft.clone())).await;
    break_rule(Some(Mutation::Panic));
    let asked = fixture.ask("bob", Operation::Details).await;
    break_rule(None);
    assert_eq!(first.await.unwrap_err(), Error::Closed);
    assert_eq!(asked.await.unwrap_err(), Error::BROKEN);
    let mut next = fixture.ask("bob", Operation::Send(send("bob"))).await;
    assert!(
        pending(&mut next),
        "what the one before writes is not known yet"
    );
    fixture.store.set_faults(Faults::NONE);
    assert!(matches!(next.await.unwrap(), Outcome::Sent(sent) if sent.seq == 3));
    let retry = Draft {
        retry: true,
        ..draft
    };
    let again = fixture.conversations.send(GROUP, retry).await.unwrap();
    assert!(again.duplicate && again.seq == 2);
    let (range, limit) = (LogRange::Newest, 10);
    let history = fixture
        .ask("bob", Operation::History { range, limit })
        .await;
    let Ok(Outcome::History(page)) = history.await else {
        panic!("a page")
    };
    assert_eq!(
        page.entries.iter().map(|e| e.seq).collect::<Vec<_>>(),
        [1, 2, 3]
    );
    assert!(fixture.conversations.take_unfinished().contains(&GROUP));
}
