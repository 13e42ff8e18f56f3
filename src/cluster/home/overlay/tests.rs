//! Tests: what was published lies over the rows of inboxes.

use std::time::Duration;

use super::*;
use crate::{
    clock,
    memory::Memory,
    model::{Details, EntryKind, Kind, Last, Posting},
    store::simulated::{Faults, Simulated},
    tasks::Tasks,
};

fn user() -> UserId {
    UserId::new("alice").unwrap()
}

fn group(number: u128) -> ConversationId {
    ConversationId(uuid::Uuid::from_u128(number))
}

fn members() -> Arc<Recipients> {
    Arc::new(Recipients {
        kind: Kind::Group,
        name: None,
        users: vec![(user(), 1)],
    })
}

/// The entry `seq` after so many changes of its content, of which the last deletes it if `deleted`.
fn newest(seq: Seq, changes: u32, deleted: bool) -> Newest {
    let last = Last {
        seq,
        message_id: clock::message_id(1),
        at: 1,
        sender: user(),
        kind: EntryKind::Text,
        preview: format!("{seq}.{changes}"),
        deleted,
    };
    Newest {
        last,
        changes,
        texts: seq - 1,
    }
}

fn publish(overlay: &Overlay, number: u128) {
    let index = InboxIndex::new(1 << 20);
    overlay.record_entry(group(number), &members(), newest(7, 0, false), &index);
}

fn publish_changed(
    overlay: &Overlay,
    rev: Rev,
    newest: Option<Newest>,
    deleted: Option<DeletedSeqs>,
) {
    let changed = Changed {
        after: rev - 1,
        items: Vec::new(),
        newest: newest.map(Arc::new),
        deleted: deleted.map(Arc::new),
    };
    let audience = Audience::Members(members());
    let (changed, at) = (Arc::new(changed), Cursor(7, rev));
    let publication = Publication::changed(group(1), at, changed, audience, true);
    overlay.record(&publication, &InboxIndex::new(1 << 20));
}

/// Returns the row of the first group, as it is laid over this one.
fn laid_over(overlay: &Overlay, stored: InboxRow) -> InboxRow {
    let mut rows = vec![stored];
    overlay.lay_over(&user(), None, &mut rows);
    rows.remove(0)
}

fn preview(row: &InboxRow) -> Option<&str> {
    let summary = row.summary.as_ref()?;
    Some(&summary.last.as_ref()?.preview)
}

fn recorded(overlay: &Overlay) -> usize {
    let mut rows = Vec::new();
    overlay.lay_over(&user(), None, &mut rows);
    rows.len()
}

#[test]
fn some_rows_are_laid_over_like_all() {
    let overlay = Overlay::new(1 << 20);
    (1..=5).for_each(|number| publish(&overlay, number));
    overlay.rotate();
    publish_changed(&overlay, 3, Some(newest(7, 1, false)), None);
    let mut all = Vec::new();
    overlay.lay_over(&user(), None, &mut all);
    for some in [&[][..], &[group(1)], &[group(4), group(9), group(1)]] {
        let mut rows = Vec::new();
        overlay.lay_over(&user(), Some(some), &mut rows);
        rows.sort_unstable_by_key(|row| row.conversation);
        let mut expected = all.clone();
        expected.retain(|row| some.contains(&row.conversation));
        expected.sort_unstable_by_key(|row| row.conversation);
        assert_eq!(rows, expected);
    }
}

/// Rule [face-k]: an edit or deletion of the newest entry replaces its preview. The same entry, published again after
/// a takeover, does not bring the old one back.
#[test]
fn a_preview_follows_the_edits_of_its_entry() {
    let overlay = Overlay::new(1 << 20);
    let row = || laid_over(&overlay, InboxRow::empty(group(1)));
    publish(&overlay, 1);
    assert_eq!(preview(&row()), Some("7.0"));
    publish_changed(&overlay, 3, Some(newest(7, 1, false)), None);
    publish(&overlay, 1);
    assert_eq!(preview(&row()), Some("7.1"));
    publish_changed(&overlay, 4, Some(newest(7, 2, true)), None);
    publish_changed(&overlay, 3, Some(newest(7, 1, false)), None);
    assert_eq!(preview(&row()), Some("7.2"));
    assert!(row().summary.unwrap().last.unwrap().deleted);
    publish_changed(&overlay, 5, Some(newest(6, 9, false)), None);
    assert_eq!(preview(&row()), Some("7.2"), "6 is not the newest entry");
    let index = InboxIndex::new(1 << 20);
    overlay.record_entry(group(1), &members(), newest(8, 0, false), &index);
    assert_eq!(preview(&row()), Some("8.0"));
    let mut stored = InboxRow::empty(group(1));
    stored.summary = Some(members().summary(&user(), 1, &newest(8, 1, false)));
    assert_eq!(preview(&laid_over(&overlay, stored)), Some("8.1"));
}

#[test]
fn revs_and_deleted_entries_only_rise() {
    let overlay = Overlay::new(1 << 20);
    let deleted = |count| DeletedSeqs {
        highest: vec![5],
        count,
    };
    publish_changed(&overlay, 4, None, Some(deleted(2)));
    publish_changed(&overlay, 3, None, Some(deleted(1)));
    publish_changed(&overlay, 6, None, None);
    let row = laid_over(&overlay, InboxRow::empty(group(1)));
    assert_eq!((row.rev, row.deleted), (6, (4, deleted(2))));
    let mut stored = InboxRow::empty(group(1));
    (stored.rev, stored.deleted) = (9, (8, deleted(3)));
    let row = laid_over(&overlay, stored);
    assert_eq!((row.rev, row.deleted), (9, (8, deleted(3))));
}

/// Rule [face-deleted].
#[test]
fn a_deleted_entry_that_is_published_again_stays_deleted() {
    let overlay = Overlay::new(1 << 20);
    publish(&overlay, 1);
    let mut stored = InboxRow::empty(group(1));
    let deleted = |highest: &[Seq]| DeletedSeqs {
        highest: highest.to_vec(),
        count: highest.len() as u64,
    };
    stored.deleted = (2, deleted(&[2]));
    assert_eq!(preview(&laid_over(&overlay, stored.clone())), Some("7.0"));
    stored.deleted = (3, deleted(&[2, 7]));
    let row = laid_over(&overlay, stored);
    assert_eq!(preview(&row), Some(""));
    assert!(row.summary.unwrap().last.unwrap().deleted);
}

/// Rule [read-texts]: only the stored row knows how many messages were before the join.
#[test]
fn who_was_added_to_a_channel_has_nothing_unread() {
    let (overlay, index) = (Overlay::new(1 << 20), InboxIndex::new(1 << 20));
    let notice = MembershipNotice {
        change: MembershipChange::Added,
        details: Details {
            kind: Kind::Channel,
            name: None,
            created_at: 1,
            created_by: user(),
            posting: Posting::Everyone,
            public: false,
        },
    };
    let write = membership(group(1), 51, &notice, &user()).unwrap();
    overlay.record_write(&write, &index);
    let row = laid_over(&overlay, InboxRow::empty(group(1)));
    assert_eq!(row.unread(51, 51, 50, &[]), 0);
    assert_eq!(row.unread(51, 52, 51, &[]), 0, "unknown, but not too high");
    let mut stored = InboxRow::empty(group(1));
    (stored.read_seq, stored.read_texts) = (51, 50);
    let row = laid_over(&overlay, stored);
    assert_eq!(row.unread(51, 52, 51, &[]), 1);
}

/// Rule [read-texts]: the read mark of a sender has the number of messages that they have read.
#[test]
fn a_sender_has_read_their_own_message() {
    let overlay = Overlay::new(1 << 20);
    publish(&overlay, 1);
    let row = || laid_over(&overlay, InboxRow::empty(group(1)));
    assert_eq!((row().read_seq, row().read_texts), (7, 6));
    overlay.record_read(group(1), &user(), (5, 4));
    assert_eq!((row().read_seq, row().read_texts), (7, 6));
    overlay.record_read(group(1), &user(), (9, 8));
    assert_eq!((row().read_seq, row().read_texts), (9, 8));
}

#[test]
fn changes_weigh_something_and_repeated_ones_do_not() {
    let overlay = Overlay::new(1 << 20);
    let weight = || overlay.current().bytes.load(Ordering::Relaxed);
    publish_changed(&overlay, 1, None, Some(DeletedSeqs::default()));
    let once = weight();
    assert!(once >= ENTRY_BYTES + DELETED_BYTES_MAX);
    (2..100).for_each(|rev| publish_changed(&overlay, rev, None, None));
    assert_eq!(weight(), once);
}

#[tokio::test(start_paused = true)]
async fn what_weighs_too_much_is_dropped_sooner() {
    let store = Simulated::new(1, Faults::NONE);
    let inbox = Arc::new(InboxWriter::new(Arc::new(store), Memory::of_mib(64)));
    for heavy in [false, true] {
        let bytes_max = if heavy { 10_000 } else { 10_000_000 };
        let overlay = Arc::new(Overlay::new(bytes_max));
        (1..=100).for_each(|number| publish(&overlay, number));
        assert_eq!(overlay.is_heavy(), heavy);
        let (keeping, writer) = (overlay.clone(), inbox.clone());
        let keep = Tasks::default().spawn(async move { keeping.keep(&writer, true).await });
        sleep(Duration::from_secs(20)).await;
        assert_eq!(recorded(&overlay), if heavy { 0 } else { 100 });
        sleep(Duration::from_secs(60)).await;
        assert_eq!(recorded(&overlay), 0);
        keep.abort();
    }
}
