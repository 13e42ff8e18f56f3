//! Tests: messages that change.

use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use tokio::time::sleep;
use uuid::Uuid;

use super::{GROUP, IDLE, creation, send, user};
use crate::{
    chat::{
        Body, Changed, Changes, Confirmation, Conversations, DeleteMessages, EditMessage, Error,
        GetChanges, GetHistory, GetReactors, InboxWriter, Lease, LogRange, MarkRead, Operation,
        Page, Publication, Publish, React, Settings,
    },
    memory::Memory,
    model::{
        Content, ContentState, Cursor, EditedContent, GatewayId, Kind, Rev, Seq,
        limits::{CHANGES_BEHIND_MAX, CHANGES_PAGE_MAX, EMOJI_OF_USER_AT_ONCE_MAX, RECENT_ENTRIES},
    },
    mutation::{Mutation, break_rule},
    store::{
        InboxRow, Store,
        simulated::{Faults, Simulated},
    },
    tasks::{Tasks, lock},
};

/// Keeps the changes that were published.
#[derive(Default)]
struct Told(Mutex<Vec<(Rev, Arc<Changed>)>>);

impl Publish for Told {
    fn publish(&self, publication: Publication) -> Confirmation {
        let Cursor(_, rev) = publication.at;
        if let Body::Changed(changed) = publication.body {
            lock(&self.0).push((rev, changed));
        }
        Confirmation::Immediate
    }
}

/// A gateway with a group of alice, bob and carol in a store that others share.
pub(super) struct Fixture {
    conversations: Conversations,
    pub(super) store: Arc<Simulated>,
    inbox: Arc<InboxWriter>,
    lease: Lease,
    told: Arc<Told>,
}

impl Fixture {
    fn on(store: Simulated, epoch: u64) -> Self {
        let store = Arc::new(store);
        let told = Arc::new(Told::default());
        let inbox = Arc::new(InboxWriter::new(store.clone(), Memory::of_mib(64)));
        let lease = Lease::unbounded(epoch);
        let settings = Settings {
            idle: IDLE,
            edit_window: Some(Duration::from_secs(3600)),
            ..Settings::for_tests()
        };
        let conversations = Conversations::new(
            GatewayId(Uuid::from_u128(epoch.into())),
            store.clone(),
            told.clone(),
            inbox.clone(),
            lease.clone(),
            settings,
            Tasks::default(),
        );
        Self {
            conversations,
            store,
            inbox,
            lease,
            told,
        }
    }

    async fn with(kind: Kind) -> Self {
        let fixture = Self::on(Simulated::new(1, Faults::NONE), 1);
        let created = creation(kind, &["bob", "carol"]);
        fixture.ask("alice", created).await.unwrap();
        fixture
    }

    pub(super) async fn group() -> Self {
        Self::with(Kind::Group).await
    }

    /// The next owner of the conversation. The one before has lost its lease.
    pub(super) fn successor(&self, epoch: u64) -> Self {
        self.lease.end_at(tokio::time::Instant::now());
        Self::on(self.store.share(), epoch)
    }

    pub(super) fn ask<A: crate::chat::Ask>(
        &self,
        who: &str,
        ask: A,
    ) -> impl Future<Output = Result<A::Output, Error>> {
        self.conversations.ask(GROUP, user(who), ask)
    }

    pub(super) async fn say(&self, who: &str, body: &str) -> Seq {
        let mut draft = send(who);
        draft.content = Content::text(body);
        self.ask(who, draft).await.unwrap().seq
    }

    async fn edit(&self, who: &str, seq: Seq, body: &str) -> Result<Rev, Error> {
        self.ask(who, edit(seq, body, None)).await
    }

    async fn delete(&self, who: &str, seqs: &[Seq]) -> Result<Rev, Error> {
        self.ask(who, delete(seqs)).await
    }

    pub(super) async fn react(
        &self,
        who: &str,
        seq: Seq,
        emoji: &str,
        on: bool,
    ) -> Result<Rev, Error> {
        self.ask(who, react(seq, emoji, on)).await
    }

    pub(super) async fn page(&self, who: &str) -> Page {
        let range = LogRange::After(0);
        let history = GetHistory { range, limit: 200 };
        self.ask(who, history).await.unwrap()
    }

    async fn changes(&self, who: &str, after: Rev) -> Changes {
        let limit = CHANGES_PAGE_MAX;
        self.ask(who, GetChanges { after, limit }).await.unwrap()
    }

    async fn row(&self, who: &str) -> InboxRow {
        assert!(self.inbox.flush().await);
        let rows = self.store.inbox(&user(who)).await.unwrap();
        rows.into_iter().find(|r| r.conversation == GROUP).unwrap()
    }

    async fn unread(&self, who: &str) -> u64 {
        let row = self.row(who).await;
        let summary = row.summary.as_ref().unwrap();
        let texts = summary.texts;
        let gone = &row.deleted.1.highest;
        row.unread(summary.joined_seq, summary.seq, texts, gone)
    }
}

fn edit(seq: Seq, body: &str, base_rev: Option<Rev>) -> EditMessage {
    let content = EditedContent {
        body: body.into(),
        attachments: Vec::new(),
    };
    EditMessage {
        seq,
        content: content.into(),
        base_rev,
        at: None,
    }
}

fn delete(seqs: &[Seq]) -> DeleteMessages {
    DeleteMessages {
        seqs: seqs.to_vec(),
        as_moderator: false,
        at: None,
    }
}

fn react(seq: Seq, emoji: &str, on: bool) -> React {
    React {
        seq,
        emoji: emoji.into(),
        on,
        at: None,
    }
}

/// The body of an entry as the page shows it.
fn body(page: &Page, seq: Seq) -> String {
    let entry = page.entries.iter().find(|e| e.seq == seq).unwrap();
    let state = page.state(seq).cloned().unwrap_or_default();
    match entry.as_changed(&state).content {
        Content::Text { body, .. } => body,
        Content::System(_) => panic!("a system entry"),
    }
}

fn is_deleted(page: &Page, seq: Seq) -> bool {
    let content = page.state(seq).and_then(|state| state.content.as_ref());
    content.is_some_and(ContentState::is_deleted)
}

#[tokio::test(start_paused = true)]
async fn a_message_is_edited_by_its_sender() {
    let fixture = Fixture::group().await;
    let seq = fixture.say("alice", "one").await;
    assert_eq!(fixture.edit("alice", seq, "two").await, Ok(1));
    let page = fixture.page("bob").await;
    assert_eq!((body(&page, seq).as_str(), page.rev), ("two", 1));
    assert_eq!(fixture.edit("alice", seq, "two").await, Ok(1), "a no-op");
    let by_bob = fixture.edit("bob", seq, "three").await;
    assert!(matches!(by_bob, Err(Error::Forbidden(_))));
    let by_stranger = fixture.edit("mallory", seq, "three").await;
    assert_eq!(by_stranger, Err(Error::UnknownConversation));
    for missing in [0, 1, seq + 1, Seq::MAX] {
        let edited = fixture.edit("alice", missing, "x").await;
        assert!(matches!(edited, Err(Error::Invalid(_))), "{missing}");
    }
    let empty = fixture.edit("alice", seq, "").await;
    assert!(matches!(empty, Err(Error::Invalid(_))));
    let long = fixture.edit("alice", seq, &"x".repeat(1001)).await;
    assert!(matches!(long, Err(Error::TooLarge { .. })));
    let row = fixture.row("bob").await;
    assert_eq!(row.summary.unwrap().last.unwrap().preview, "two");
}

#[tokio::test(start_paused = true)]
async fn a_repeated_edit_does_not_undo_a_newer_one() {
    let fixture = Fixture::group().await;
    let seq = fixture.say("alice", "zero").await;
    let first = edit(seq, "one", Some(0));
    assert_eq!(fixture.ask("alice", first.clone()).await, Ok(1));
    assert_eq!(fixture.ask("alice", edit(seq, "two", Some(1))).await, Ok(2));
    let again = fixture.ask("alice", first.clone()).await;
    assert!(matches!(again, Err(Error::Conflict(_))), "{again:?}");
    assert_eq!(body(&fixture.page("alice").await, seq), "two");
    break_rule(Some(Mutation::BaseRev));
    let broken = fixture.ask("alice", first).await;
    break_rule(None);
    assert_eq!(broken, Ok(3), "the test can fail");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_message_is_gone() {
    let fixture = Fixture::group().await;
    let seq = fixture.say("alice", "a secret").await;
    fixture.edit("alice", seq, "another secret").await.unwrap();
    let by_bob = fixture.delete("bob", &[seq]).await;
    assert!(matches!(by_bob, Err(Error::Forbidden(_))));
    assert_eq!(fixture.delete("alice", &[seq, seq]).await, Ok(2));
    assert_eq!(fixture.delete("alice", &[seq]).await, Ok(2), "a no-op");
    let page = fixture.page("bob").await;
    assert!(is_deleted(&page, seq));
    assert_eq!(body(&page, seq), "");
    assert!(!format!("{page:?}").contains("secret"));
    for refused in [
        fixture.edit("alice", seq, "x").await,
        fixture.react("bob", seq, "👍", true).await,
    ] {
        assert!(matches!(refused, Err(Error::Conflict(_))));
    }
    let changes = fixture.changes("bob", 0).await;
    assert!(!format!("{changes:?}").contains("secret"), "{changes:?}");
    let row = fixture.row("bob").await;
    let last = row.summary.unwrap().last.unwrap();
    assert!(last.deleted && last.preview.is_empty());
    // The next owner finds no text either.
    let next = fixture.successor(2);
    let page = next.page("bob").await;
    assert!(is_deleted(&page, seq) && !format!("{page:?}").contains("secret"));
    let stored = next.store.log(GROUP, 1, seq).await.unwrap();
    assert!(!format!("{stored:?}").contains("secret"));
    let stored = next.store.changes(GROUP, 1, 9).await.unwrap();
    assert!(!format!("{stored:?}").contains("secret"));
}

#[tokio::test(start_paused = true)]
async fn admins_and_moderators_delete_what_others_wrote() {
    let fixture = Fixture::group().await;
    let (first, second) = (
        fixture.say("bob", "one").await,
        fixture.say("bob", "two").await,
    );
    assert_eq!(fixture.delete("alice", &[first]).await, Ok(1));
    let mut moderated = delete(&[second]);
    moderated.as_moderator = true;
    assert_eq!(fixture.ask("moderator", moderated).await, Ok(2));
    let page = fixture.page("bob").await;
    assert!(is_deleted(&page, first) && is_deleted(&page, second));
    let none = fixture.delete("alice", &[]).await;
    assert!(matches!(none, Err(Error::Invalid(_))));
}

#[tokio::test(start_paused = true)]
async fn reactions_are_counted_once_for_each_user() {
    let fixture = Fixture::group().await;
    let seq = fixture.say("alice", "one").await;
    assert_eq!(fixture.react("bob", seq, "👍", true).await, Ok(1));
    assert_eq!(
        fixture.react("bob", seq, "👍", true).await,
        Ok(1),
        "a no-op"
    );
    assert_eq!(fixture.react("carol", seq, "👍", true).await, Ok(2));
    assert_eq!(fixture.react("bob", seq, "👎", true).await, Ok(3));
    assert_eq!(fixture.react("bob", seq, "👍", false).await, Ok(4));
    assert_eq!(fixture.react("bob", seq, "👍", false).await, Ok(4));
    let page = fixture.page("bob").await;
    let reactions = &page
        .state(seq)
        .unwrap()
        .reactions
        .as_ref()
        .unwrap()
        .reactions;
    assert_eq!(
        reactions
            .iter()
            .map(|(e, n)| (e.as_str(), *n))
            .collect::<Vec<_>>(),
        [("👍", 1), ("👎", 1)]
    );
    assert_eq!(page.mine, [(seq, vec!["👎".to_owned()])]);
    let asked = GetReactors {
        seq,
        emoji: None,
        after: None,
        limit: 10,
    };
    let reactors = fixture.ask("alice", asked).await.unwrap().items;
    let mut reactors: Vec<_> = reactors
        .iter()
        .map(|r| (r.user.as_str(), r.emoji.as_str()))
        .collect();
    reactors.sort_unstable();
    assert_eq!(reactors, [("bob", "👎"), ("carol", "👍")]);
    for bad in ["", "a b", "x", "https://evil.example", &"x".repeat(65)] {
        let refused = fixture.react("bob", seq, bad, true).await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{bad:?}");
    }
    for number in 1..EMOJI_OF_USER_AT_ONCE_MAX {
        let emoji = format!(":e{number}:");
        fixture.react("bob", seq, &emoji, true).await.unwrap();
    }
    let max = EMOJI_OF_USER_AT_ONCE_MAX;
    for emoji in ["🎉", "👍"] {
        let refused = fixture.react("bob", seq, emoji, true).await;
        let is_max = matches!(refused, Err(Error::TooLarge { max: limit, .. }) if limit == max);
        assert!(is_max, "{refused:?}");
    }
    assert!(fixture.react("bob", seq, "👎", false).await.is_ok());
    assert!(fixture.react("bob", seq, "🎉", true).await.is_ok());
    assert!(fixture.react("alice", seq, "👍", true).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn entries_that_are_not_in_memory_change_too() {
    let fixture = Fixture::group().await;
    let first = fixture.say("alice", "old").await;
    for number in 0..2 * RECENT_ENTRIES {
        fixture.say("alice", &format!("{number}")).await;
    }
    assert_eq!(fixture.page("bob").await.rev, 0);
    assert_eq!(fixture.edit("alice", first, "new").await, Ok(1));
    assert_eq!(fixture.react("bob", first, "👍", true).await, Ok(2));
    // The page that was cached before is out of date (rule [cache]).
    let page = fixture.page("bob").await;
    assert_eq!((body(&page, first).as_str(), page.rev), ("new", 2));
    assert_eq!(page.mine, [(first, vec!["👍".to_owned()])]);
    let next = fixture.successor(2);
    assert_eq!(next.edit("alice", first, "new").await, Ok(2), "a no-op");
    assert_eq!(next.react("bob", first, "👍", false).await, Ok(3));
    assert_eq!(next.page("bob").await.mine, []);
}

#[tokio::test(start_paused = true)]
async fn changes_are_told_in_order_and_can_be_asked_for() {
    let fixture = Fixture::group().await;
    let seq = fixture.say("alice", "one").await;
    fixture.edit("alice", seq, "two").await.unwrap();
    fixture.react("bob", seq, "👍", true).await.unwrap();
    {
        let told = lock(&fixture.told.0);
        let revs: Vec<_> = told
            .iter()
            .map(|(rev, changed)| (changed.after, *rev))
            .collect();
        assert_eq!(revs, [(0, 1), (1, 2)]);
        assert_eq!(told[1].1.items[0].by.as_ref().unwrap().user, user("bob"));
    }
    let changes = fixture.changes("bob", 0).await;
    assert_eq!((changes.after, changes.rev, changes.items.len()), (0, 2, 1));
    assert_eq!(changes.items[0].mine, Some(vec!["👍".to_owned()]));
    assert!(changes.items[0].content.is_some() && changes.items[0].rev == 2);
    assert_eq!(fixture.changes("bob", 2).await.items, []);
    assert_eq!(fixture.changes("bob", 9).await.rev, 2);
    let next = fixture.successor(2);
    let changes = next.changes("carol", 0).await;
    assert_eq!(
        (changes.rev, changes.items[0].mine.as_deref()),
        (2, Some(&[][..]))
    );
    let stranger = next.ask("mallory", GetChanges { after: 0, limit: 9 }).await;
    assert_eq!(stranger.unwrap_err(), Error::UnknownConversation);
}

#[tokio::test(start_paused = true)]
async fn many_changes_come_in_pages_and_too_many_are_a_reset() {
    let fixture = Fixture::group().await;
    let seq = fixture.say("alice", "one").await;
    let many = 2 * CHANGES_PAGE_MAX as Rev + 10;
    for number in 0..many {
        fixture
            .react("bob", seq, "👍", number % 2 == 0)
            .await
            .unwrap();
    }
    let (mut after, mut pages) = (0, 0);
    loop {
        let page = fixture.changes("bob", after).await;
        assert_eq!(page.after, after);
        (after, pages) = (page.rev, pages + 1);
        if !page.more {
            break;
        }
    }
    assert_eq!((after, pages), (many, 3));
    for number in many..=CHANGES_BEHIND_MAX {
        fixture
            .react("bob", seq, "👍", number % 2 == 0)
            .await
            .unwrap();
    }
    let page = fixture.changes("bob", 0).await;
    assert!(page.reset && page.items.is_empty() && page.rev == CHANGES_BEHIND_MAX + 1);
    assert!(!fixture.changes("bob", 1).await.reset);
}

#[tokio::test(start_paused = true)]
async fn reactions_in_a_channel_are_gathered() {
    let fixture = Fixture::with(Kind::Channel).await;
    let seq = fixture.say("alice", "one").await;
    for who in ["alice", "bob", "carol"] {
        fixture.react(who, seq, "👍", true).await.unwrap();
    }
    assert!(lock(&fixture.told.0).is_empty());
    sleep(Duration::from_millis(300)).await;
    let revs = |fixture: &Fixture| -> Vec<_> {
        let told = lock(&fixture.told.0);
        told.iter()
            .map(|(rev, changed)| (changed.after, *rev))
            .collect()
    };
    assert_eq!(revs(&fixture), [(0, 3)]);
    fixture.react("bob", seq, "👍", false).await.unwrap();
    fixture.edit("alice", seq, "two").await.unwrap();
    assert_eq!(revs(&fixture), [(0, 3), (3, 5)], "an edit is told at once");
    sleep(Duration::from_millis(300)).await;
    assert_eq!(revs(&fixture).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn neither_system_entries_nor_deleted_messages_are_unread() {
    let fixture = Fixture::group().await;
    let first = fixture.say("alice", "one").await;
    fixture
        .ask("alice", Operation::Add { user: user("dave") })
        .await
        .unwrap();
    let second = fixture.say("alice", "two").await;
    let third = fixture.say("alice", "three").await;
    assert_eq!(fixture.unread("bob").await, 3);
    assert_eq!(
        fixture.unread("dave").await,
        2,
        "they joined after the first"
    );
    assert_eq!(fixture.unread("alice").await, 0);
    fixture.delete("alice", &[second]).await.unwrap();
    assert_eq!(fixture.unread("bob").await, 2);
    fixture.ask("bob", MarkRead { seq: first }).await.unwrap();
    assert_eq!(fixture.unread("bob").await, 1);
    fixture.ask("bob", MarkRead { seq: third }).await.unwrap();
    assert_eq!(fixture.unread("bob").await, 0);
    let details = fixture.ask("bob", crate::chat::GetDetails).await.unwrap();
    assert_eq!(details.message_count, 2);
}

#[tokio::test(start_paused = true)]
async fn a_successor_carries_out_what_its_predecessor_only_wrote() {
    for broken in [false, true] {
        let fixture = Fixture::group().await;
        let seq = fixture.say("alice", "one").await;
        fixture.edit("alice", seq, "two").await.unwrap();
        // The row of the change is stored, and its effects are not: the store is cut off after it.
        let row = crate::store::ChangeRow {
            record: Arc::new(crate::model::Change {
                rev: 2,
                by: user("alice"),
                at: 1,
                op: crate::model::ChangeOp::Edit {
                    seq,
                    content: Some(EditedContent {
                        body: "three".into(),
                        attachments: Vec::new(),
                    }),
                    edits: vec![1, 2],
                    dropped: Vec::new(),
                },
            }),
            epoch: 1,
            settled: 1,
            settle_end: 0,
        };
        fixture
            .store
            .append_changes(GROUP, &[row], None)
            .await
            .unwrap();
        let next = fixture.successor(2);
        break_rule(broken.then_some(Mutation::ChangeReapply));
        let page = next.page("bob").await;
        break_rule(None);
        assert_eq!((body(&page, seq).as_str(), page.rev), ("three", 2));
        let stored = next.store.log(GROUP, seq, seq).await.unwrap().states;
        let is_applied = stored[0].1.rev() == 2;
        assert_eq!(is_applied, !broken, "the test can fail");
        let told = lock(&next.told.0).clone();
        assert_eq!(told.last().map(|(rev, _)| *rev), Some(2));
        assert_eq!(next.edit("alice", seq, "four").await, Ok(3));
        let row = next.row("bob").await;
        assert_eq!(row.summary.unwrap().last.unwrap().preview, "four");
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_is_acknowledged_when_its_effects_are_stored() {
    let fixture = Fixture::group().await;
    let seq = fixture.say("alice", "zero").await;
    fixture.edit("alice", seq, "one").await.unwrap();
    fixture.store.cut().store(true, Ordering::Relaxed);
    let mut edited = Box::pin(fixture.edit("alice", seq, "two"));
    let answer = tokio::time::timeout(Duration::from_secs(5), &mut edited).await;
    assert!(answer.is_err(), "the store does not answer");
    // Neither pages nor changes contain it before (rule [applied]).
    let page = fixture.page("alice").await;
    assert_eq!((body(&page, seq).as_str(), page.rev), ("one", 1));
    fixture.store.cut().store(false, Ordering::Relaxed);
    assert_eq!(edited.await, Ok(2));
}
