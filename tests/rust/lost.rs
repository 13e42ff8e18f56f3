//! Logs that have lost entries and changes, as after a restore: what is refused, and how `store mend` lets them go on.

use std::{collections::BTreeSet, path::Path};

use chat_gateway::{
    alone::Alone,
    chat::{
        AddParticipant, Creation, EditMessage, Error, GetChanges, GetHistory, LogRange, MarkRead,
        Page, React, check_logs, fill_holes,
    },
    config::Config,
    mend::{Report, check, mend},
    model::{
        ClientId, Content, ConversationId, Draft, EditedContent, Kind, LEVEL_MAX, Posting, Rev,
        Seq, SystemChange, UserId,
    },
    store::{Applied, AppliedChanges, InboxKey, LogRow, RingRow, Store, embedded::Embedded},
    tasks::Tasks,
};
use uuid::Uuid;

const GROUP: ConversationId = ConversationId(Uuid::from_u128(0x4000_8000_0000_0000_0001));
/// The newest entry of the group.
const HEAD: Seq = 14;
/// The entry up to which bob has read.
const READ: Seq = 5;

fn user(name: &str) -> UserId {
    UserId::new(name).unwrap()
}

fn config(path: &Path) -> Config {
    let mut config = Config::default();
    config.store.embedded.path = path.to_owned();
    config
}

fn open(path: &Path) -> Embedded {
    Embedded::open(path, 8 << 20).unwrap()
}

async fn alone(path: &Path) -> Alone {
    let tasks = Tasks::default();
    Alone::open(&config(path), std::sync::Arc::new(open(path)), &tasks)
        .await
        .unwrap()
}

async fn send(alone: &Alone, sender: &str, body: String) -> Result<Seq, Error> {
    let draft = Draft {
        sender: user(sender),
        client_id: ClientId(Uuid::new_v4()),
        content: Content::text(body),
        at: None,
        retry: false,
    };
    Ok(alone.conversations.send(GROUP, draft).await?.seq)
}

/// Fills a directory with a group: entry 1 creates it, 10 adds carol, and the others are messages. Changes 1 and 2 edit, and the
/// others up to `revs` add and remove a reaction.
async fn written(path: &Path, revs: Rev) {
    let alone = alone(path).await;
    let conversations = &alone.conversations;
    let creation = Creation {
        kind: Kind::Group,
        participants: vec![user("bob")],
        name: None,
        public: false,
        posting: Posting::default(),
        at: None,
    };
    conversations
        .ask(GROUP, user("alice"), creation)
        .await
        .unwrap();
    for seq in 2..=HEAD {
        if seq == 10 {
            let user_added = AddParticipant {
                user: user("carol"),
            };
            let added = conversations.ask(GROUP, user("alice"), user_added).await;
            assert_eq!(added.unwrap(), seq);
        } else {
            assert_eq!(
                send(&alone, "alice", format!("message {seq}"))
                    .await
                    .unwrap(),
                seq
            );
        }
    }
    let read = MarkRead { seq: READ };
    conversations.ask(GROUP, user("bob"), read).await.unwrap();
    for seq in [2, 3] {
        let content = EditedContent {
            body: format!("edited {seq}"),
            attachments: Vec::new(),
        };
        let edit = EditMessage {
            seq,
            content: content.into(),
            base_rev: None,
            at: None,
        };
        conversations.ask(GROUP, user("alice"), edit).await.unwrap();
    }
    for rev in 3..=revs {
        let react = React {
            seq: 13,
            emoji: "👍".into(),
            on: rev % 2 == 1,
            at: None,
        };
        conversations.ask(GROUP, user("bob"), react).await.unwrap();
    }
    alone.close(true).await.unwrap();
}

/// What a copy of a directory lacks.
#[derive(Default)]
struct Without {
    entries: BTreeSet<Seq>,
    changes: BTreeSet<Rev>,
    /// Whether the marks of the orderly stop are missing too, so that the newest entries are not certain.
    marks: bool,
    settle: Option<Settle>,
}

/// A takeover settled entries 9 and 10, and wrote the later ones. Its row at 10 is lost.
#[derive(Clone, Copy)]
struct Settle {
    /// Whether the row of the owner before is left at 10.
    is_old_left: bool,
    /// Whether later rows say that more is settled than the takeover settled.
    is_more_certain: bool,
}

impl Settle {
    const LAST: Seq = 10;

    /// Returns the rows that are there instead of a row.
    fn rows(self, row: LogRow) -> Vec<LogRow> {
        let seq = row.record.seq;
        let again = LogRow {
            epoch: row.epoch + 7,
            settled: Self::LAST - 2,
            settle_end: Self::LAST,
            ..row.clone()
        };
        let settled = if self.is_more_certain {
            seq - 1
        } else {
            Self::LAST
        };
        match seq {
            9 => vec![row, again],
            Self::LAST if self.is_old_left => vec![row],
            Self::LAST => vec![],
            _ if seq > Self::LAST => vec![LogRow {
                settled,
                settle_end: 0,
                ..again
            }],
            _ => vec![row],
        }
    }
}

/// Copies the group to another directory, without some rows.
async fn copied(from: &Path, to: &Path, without: &Without) {
    let (from, to) = (open(from), open(to));
    let ring = from.ring().await.unwrap().unwrap();
    let first = RingRow {
        level: LEVEL_MAX,
        version: ring.version + 20,
        ..ring
    };
    assert!(to.propose_ring(None, &first).await.unwrap());
    let page = from.log(GROUP, 1, HEAD).await.unwrap();
    let mut rows = page.rows;
    rows.retain(|row| !without.entries.contains(&row.record.seq));
    if let Some(settle) = without.settle {
        rows = rows.into_iter().flat_map(|row| settle.rows(row)).collect();
    }
    to.append(GROUP, &rows, None).await.unwrap();
    let mut changes = from.changes(GROUP, 1, 1000).await.unwrap();
    let rev = changes.last().unwrap().record.rev;
    changes.retain(|row| !without.changes.contains(&row.record.rev));
    to.append_changes(GROUP, &changes, None).await.unwrap();
    let mut states = AppliedChanges {
        states: page.states,
        ..AppliedChanges::default()
    };
    states
        .states
        .retain(|(seq, _)| !without.entries.contains(seq));
    to.apply_changes(GROUP, Kind::Group, &states).await.unwrap();
    let conversation = from.conversation(GROUP).await.unwrap().unwrap();
    let participants = from.participants(GROUP, Kind::Group, None, 10).await;
    let applied = Applied {
        conversation,
        participants: participants.unwrap(),
        inbox: Vec::new(),
    };
    to.apply(GROUP, &applied).await.unwrap();
    for name in ["alice", "bob", "carol"] {
        let [row] = &from.inbox(&user(name)).await.unwrap()[..] else {
            panic!("one row of {name}");
        };
        let write = chat_gateway::store::InboxWrite {
            summary: row.summary.clone(),
            read_seq: Some(row.read_seq),
            read_texts: row.read_texts,
            ..chat_gateway::store::InboxWrite::of(user(name), GROUP, Kind::Group)
        };
        to.write_inbox(vec![write]).await.unwrap();
    }
    to.set_changes_settled(GROUP, rev).await.unwrap();
    if !without.marks {
        to.set_settled(GROUP, HEAD).await.unwrap();
    }
    to.close().await.unwrap();
    from.close().await.unwrap();
}

async fn history(alone: &Alone) -> Result<Page, Error> {
    let (range, limit) = (LogRange::Newest, 100);
    let asked = GetHistory { range, limit };
    alone.conversations.ask(GROUP, user("bob"), asked).await
}

/// The number of messages that bob's inbox shows as unread.
async fn unread(alone: &Alone) -> u64 {
    let keys = [InboxKey::unknown(GROUP)];
    let rows = alone.store.inbox_rows(&user("bob"), &keys).await.unwrap();
    let summary = rows[0].summary.as_ref().unwrap();
    let (seq, texts) = (summary.seq, summary.texts);
    rows[0].unread(summary.joined_seq, seq, texts, &rows[0].deleted.1.highest)
}

fn is_system(seq: Seq) -> bool {
    [1, 10].contains(&seq)
}

/// Loses entries and changes, is refused if `is_refused`, mends, and goes on.
async fn goes_on(lost: &[Seq], changes: &[Rev], revs: Rev, is_refused: bool) {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    written(first.path(), revs).await;
    let path = second.path();
    let without = Without {
        entries: lost.iter().copied().collect(),
        changes: changes.iter().copied().collect(),
        ..Without::default()
    };
    copied(first.path(), path, &without).await;

    is_refused_and_mended(path, lost, is_refused).await;
    let after = alone(path).await;
    check_entries(&after, lost).await;
    check_changes(&after, lost, changes, revs).await;
    assert_eq!(
        send(&after, "bob", "after it".into()).await.unwrap(),
        HEAD + 1
    );
    after.close(true).await.unwrap();
    assert!(check(&config(path), GROUP).await.unwrap().is_whole());
}

async fn mended(path: &Path) -> Report {
    Box::pin(mend(&config(path), GROUP)).await.unwrap()
}

async fn is_refused_and_mended(path: &Path, lost: &[Seq], is_refused: bool) {
    let before = alone(path).await;
    let refused = history(&before).await;
    assert_eq!(refused.is_err(), is_refused, "{refused:?}");
    before.close(true).await.unwrap();

    for _ in 0..2 {
        let report = check(&config(path), GROUP).await.unwrap();
        assert!(!report.is_whole());
        let text = report.to_string();
        for seq in lost {
            assert!(text.contains("missing"), "{seq}: {text}");
        }
    }
    let report = mended(path).await;
    assert!(!report.is_whole(), "it says what was missing");
    let again = mended(path).await;
    assert!(again.is_whole(), "{again}");
    assert!(
        again.to_string().contains("lost before and filled"),
        "{again}"
    );
}

/// All entries are there, those that were lost as deleted messages, and the unread count is exact.
async fn check_entries(after: &Alone, lost: &[Seq]) {
    let page = history(after).await.unwrap();
    let seqs: Vec<Seq> = page.entries.iter().map(|entry| entry.seq).collect();
    assert_eq!(seqs, (1..=HEAD).collect::<Vec<_>>());
    let lost_systems = lost.iter().filter(|seq| is_system(**seq)).count();
    let systems = page.entries.iter().filter(|entry| {
        lost.contains(&entry.seq)
            && matches!(entry.content, Content::System(SystemChange::Updated { .. }))
    });
    assert_eq!(systems.count(), lost_systems, "as many as were lost");
    for entry in &page.entries {
        let is_deleted = page
            .state(entry.seq)
            .is_some_and(|state| state.is_deleted());
        let Content::Text { body, .. } = &entry.content else {
            assert!(!is_deleted);
            continue;
        };
        assert_eq!(is_deleted, lost.contains(&entry.seq), "{entry:?}");
        let expected = match (entry.seq, is_deleted) {
            (_, true) => String::new(),
            (seq, false) => format!("message {seq}"),
        };
        assert_eq!(*body, expected);
    }
    let is_unread = |seq: &Seq| *seq > READ && !is_system(*seq) && !lost.contains(seq);
    let expected = (1..=HEAD).filter(is_unread).count() as u64;
    assert_eq!(unread(after).await, expected);
}

/// A client that lacks lost changes is told to read everything anew. Another one learns that the lost messages are deleted.
async fn check_changes(after: &Alone, lost: &[Seq], changes: &[Rev], revs: Rev) {
    let changed = GetChanges {
        after: 0,
        limit: 100,
    };
    let asked = after.conversations.ask(GROUP, user("bob"), changed.clone());
    let changed_since = asked.await.unwrap();
    assert_eq!(changed_since.reset, !changes.is_empty());
    let since = GetChanges {
        after: revs,
        ..changed
    };
    let asked = after.conversations.ask(GROUP, user("bob"), since);
    let changed_since = asked.await.unwrap();
    let told: Vec<Seq> = changed_since.items.iter().map(|item| item.seq).collect();
    assert!(!changed_since.reset && told.iter().all(|seq| lost.contains(seq)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_with_a_hole_is_refused_until_it_is_mended() {
    goes_on(&[4, 5, 6, 9, 10, 11], &[], 3, true).await;
}

/// Rule [settle-whole] would take the whole takeover for one that never served.
#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_that_has_lost_a_row_keeps_the_others() {
    let first = tempfile::tempdir().unwrap();
    written(first.path(), 3).await;
    for (is_old_left, is_more_certain) in [(false, true), (false, false), (true, true)] {
        let second = tempfile::tempdir().unwrap();
        let path = second.path();
        let settle = Settle {
            is_old_left,
            is_more_certain,
        };
        let without = Without {
            settle: Some(settle),
            ..Without::default()
        };
        copied(first.path(), path, &without).await;
        let before = alone(path).await;
        assert!(history(&before).await.is_err());
        before.close(true).await.unwrap();
        assert!(!check(&config(path), GROUP).await.unwrap().is_whole());
        assert!(!mended(path).await.is_whole(), "it says what was missing");
        let again = mended(path).await;
        assert!(again.is_whole(), "{again}");
        let after = alone(path).await;
        let page = history(&after).await.unwrap();
        let seqs: Vec<Seq> = page.entries.iter().map(|entry| entry.seq).collect();
        assert_eq!(seqs, (1..=HEAD).collect::<Vec<_>>());
        for entry in page.entries.iter().filter(|entry| !is_system(entry.seq)) {
            let body = format!("message {}", entry.seq);
            assert!(matches!(&entry.content, Content::Text { body: text, .. } if *text == body));
        }
        after.close(true).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_beginning_of_a_log_may_be_lost() {
    goes_on(&[1, 2], &[1], 3, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_log_may_be_lost() {
    goes_on(&[13, 14], &[3], 3, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_may_be_lost_alone() {
    goes_on(&[], &[2], 3, true).await;
}

/// The conversation is served, but nobody learns of the changes.
#[tokio::test(flavor = "multi_thread")]
async fn changes_far_back_may_be_lost() {
    goes_on(&[], &[2, 3], 140, false).await;
}

/// The process ended when the holes were filled, and before their entries were deleted.
#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_mend_is_continued() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    written(first.path(), 3).await;
    let path = second.path();
    let without = Without {
        entries: [6, 7].into(),
        ..Without::default()
    };
    copied(first.path(), path, &without).await;
    let store = open(path);
    fill_holes(&store, GROUP).await.unwrap();
    store.close().await.unwrap();
    drop(store);
    let report = check(&config(path), GROUP).await.unwrap();
    assert!(!report.is_whole());
    assert!(report.to_string().contains("not deleted yet"), "{report}");
    mended(path).await;
    assert!(check(&config(path), GROUP).await.unwrap().is_whole());
}

/// The last certain entry is lost, and later ones are not certain: an owner decides about them, and must still find them.
#[tokio::test(flavor = "multi_thread")]
async fn entries_after_the_certain_part_stay() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    written(first.path(), 3).await;
    let (store, path) = (open(first.path()), second.path());
    let rows = store.log(GROUP, 1, HEAD).await.unwrap().rows;
    store.close().await.unwrap();
    drop(store);
    let certain = rows.iter().map(|row| row.settled).max().unwrap();
    assert!((2..HEAD).contains(&certain));
    let without = Without {
        entries: [certain].into(),
        marks: true,
        ..Without::default()
    };
    copied(first.path(), path, &without).await;
    mended(path).await;
    let after = alone(path).await;
    let page = history(&after).await.unwrap();
    assert_eq!(page.head, HEAD);
    let kept = page.entries.iter().filter(|entry| entry.seq > certain);
    for entry in kept {
        assert_eq!(
            entry.content,
            Content::text(format!("message {}", entry.seq))
        );
    }
    after.close(true).await.unwrap();
}

/// A row that comes back, as from a node that was away, counts more than the one that took its place.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_row_that_comes_back_counts() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    written(first.path(), 3).await;
    let without = Without {
        entries: [7].into(),
        ..Without::default()
    };
    copied(first.path(), second.path(), &without).await;
    let (whole, holed) = (open(first.path()), open(second.path()));
    let lost: LogRow = whole.log(GROUP, 7, 7).await.unwrap().rows.remove(0);
    assert_eq!(
        fill_holes(&holed, GROUP).await.unwrap().entries.holes,
        [7..=7]
    );
    let filled = holed.log(GROUP, 7, 7).await.unwrap().rows.remove(0);
    assert_eq!((filled.epoch, filled.record.texts), (0, lost.record.texts));
    holed
        .append(GROUP, std::slice::from_ref(&lost), None)
        .await
        .unwrap();
    // Filling it late, because it was not there before, changes nothing either.
    holed.append(GROUP, &[filled], None).await.unwrap();
    assert_eq!(holed.log(GROUP, 7, 7).await.unwrap().rows, [lost]);
    assert!(check_logs(&holed, GROUP).await.unwrap().are_whole());
    whole.close().await.unwrap();
    holed.close().await.unwrap();
}
