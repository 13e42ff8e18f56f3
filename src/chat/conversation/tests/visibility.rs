//! Tests: the content of replies while the store has not answered, and after a panic of the owner.

use tokio::time::Instant;

use super::*;
use crate::{
    chat::{DetailsView, LogRange},
    model::limits::SCAN_ROWS_MAX,
    mutation::{Mutation, break_rule},
    store::Store as _,
};

/// Each write is stored, but none is acknowledged.
const UNANSWERED: Faults = Faults {
    late: 100,
    late_ms: 100,
    ..Faults::NONE
};

impl Fixture {
    async fn details(&self, who: &str) -> DetailsView {
        match self.ask(who, Operation::Details).await.await {
            Ok(Outcome::Details(view)) => view,
            other => panic!("{other:?}"),
        }
    }

    /// The participants, each with the seq up to which they have read.
    async fn participants(&self, who: &str) -> Vec<(String, Option<u64>)> {
        let (after, limit) = (None, 100);
        match self
            .ask(who, Operation::Participants { after, limit })
            .await
            .await
        {
            Ok(Outcome::Participants(page)) => {
                let item =
                    |p: &crate::chat::Listed| (p.user.to_string(), p.marks.map(|(_, read)| read));
                page.items.iter().map(item).collect()
            }
            other => panic!("{other:?}"),
        }
    }
}

fn rename(name: &str) -> Operation {
    Operation::Update {
        name: Some(name.into()),
        posting: None,
        public: None,
    }
}

#[tokio::test(start_paused = true)]
async fn replies_contain_only_committed_changes() {
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
        let view = fixture.details(who).await;
        assert_eq!((view.details.name, view.participant_count), (None, 2));
        let there = fixture.participants(who).await;
        assert_eq!(
            there.iter().map(|p| &p.0).collect::<Vec<_>>(),
            ["alice", "bob"]
        );
    }
    let mut read = fixture.ask("dave", Operation::Head).await;
    assert!(pending(&mut read), "the addition of dave is not committed");
    let refused = fixture.ask("mallory", Operation::Head).await.await;
    assert_eq!(refused.unwrap_err(), Error::UnknownConversation);
    fixture.store.set_faults(Faults::NONE);
    for done in [added, renamed, removed] {
        assert!(matches!(done.await.unwrap(), Outcome::Changed { .. }));
    }
    assert!(matches!(read.await.unwrap(), Outcome::Head(_)));
    let view = fixture.details("dave").await;
    assert_eq!(
        (view.details.name.as_deref(), view.participant_count),
        (Some("new"), 2)
    );
    let refused = fixture.ask("bob", Operation::Details).await.await;
    assert!(matches!(refused, Err(Error::Forbidden(_))));
}

#[tokio::test(start_paused = true)]
async fn an_uncommitted_change_of_a_lost_lease_was_in_no_reply() {
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
    assert_eq!(read.await.unwrap_err(), Error::Moved, "no work was begun");
}

#[tokio::test(start_paused = true)]
async fn a_repeated_creation_waits_for_the_first() {
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
async fn the_first_message_of_a_dm_waits_until_the_dm_is_stored() {
    let dm = ConversationId::dm(&user("alice"), &user("bob"));
    let fixture = Fixture::new(Lease::unbounded(1));
    fixture.store.set_faults(UNANSWERED);
    let made = creation(Kind::Dm, &["bob"]);
    let mut made = fixture.ask_of(dm, "alice", made).await;
    let sent = Operation::Send(send("alice"));
    let mut sent = fixture.ask_of(dm, "alice", sent).await;
    sleep(Duration::from_secs(1)).await;
    assert!(pending(&mut made) && pending(&mut sent));
    assert!(fixture.store.log(dm, 1, 1).await.unwrap().rows.is_empty());
    fixture.store.set_faults(Faults::NONE);
    made.await.unwrap();
    let sent = sent.await.unwrap();
    assert!(matches!(sent, Outcome::Sent(ack) if ack.seq == 1));
}

#[tokio::test(start_paused = true)]
async fn a_watermark_is_shown_when_it_is_stored_and_published_once() {
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
async fn a_channel_shows_users_only_their_own_watermarks_and_reads_a_bounded_page() {
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
        .map(|p| (p.user.as_str(), p.marks.is_some()))
        .collect();
    assert_eq!(shown, [("alice", true), (names[SCAN_ROWS_MAX], false)]);
    assert_eq!(pages.len(), 2, "the scan needs two requests");
}

#[tokio::test(start_paused = true)]
async fn after_a_panic_the_next_owner_serves_the_same_log() {
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
        "the writes of the owner before are in progress"
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
