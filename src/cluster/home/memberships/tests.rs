//! The order of inboxes, and what comes late or while the store is read.

use std::{cmp::Reverse, collections::BTreeMap};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use uuid::Uuid;

use super::*;

fn user() -> UserId {
    UserId::new("alice").unwrap()
}

fn group(number: u128) -> ConversationId {
    ConversationId(Uuid::from_u128(number))
}

fn summary(joined_seq: Seq, last_seq: Seq) -> SummaryVersion {
    SummaryVersion {
        seq: last_seq,
        kind: Kind::Group,
        joined_seq,
        last: Some((last_seq, 0)),
    }
}

fn row(conversation: ConversationId, joined_seq: Seq) -> InboxRow {
    let summary = InboxSummary {
        seq: joined_seq,
        kind: Kind::Group,
        name: None,
        joined_seq,
        last: None,
        changes: 0,
        texts: 0,
    };
    let mut row = InboxRow::empty(conversation);
    row.summary = Some(summary);
    row
}

fn last_seqs(index: &InboxIndex) -> Option<Vec<Option<Seq>>> {
    let refs = index.of(&user(), Rows::refs)?;
    Some(refs.iter().map(|r| r.last_seq).collect())
}

#[test]
fn what_is_published_while_the_store_is_read_is_known() {
    let index = InboxIndex::new(1 << 20);
    let known = index.begin(&user());
    index.record(&user(), group(1), Some(summary(1, 7)), None, 0);
    index.record(&user(), group(2), Some(summary(1, 1)), None, 0);
    assert_eq!(index.of(&user(), Rows::refs), None, "not read yet");
    index.learn(&user(), &known, &[row(group(1), 1)], |_| ());
    assert_eq!(last_seqs(&index), Some(vec![Some(7), Some(1)]));
}

#[test]
fn what_comes_late_changes_nothing() {
    let index = InboxIndex::new(1 << 20);
    let known = index.begin(&user());
    index.learn(&user(), &known, &[row(group(1), 1)], |_| ());
    let record = |summary, left| index.record(&user(), group(1), summary, left, 0);
    record(Some(summary(1, 9)), None);
    record(Some(summary(1, 8)), None);
    assert_eq!(last_seqs(&index), Some(vec![Some(9)]));
    record(None, Some(10));
    record(Some(summary(1, 10)), None);
    assert_eq!(last_seqs(&index), Some(vec![]), "removed by entry 10");
    record(Some(summary(12, 12)), None);
    record(None, Some(10));
    assert_eq!(last_seqs(&index), Some(vec![Some(12)]), "added again");
}

/// A returning cursor is compared with the rev, so it never falls and is not lost while the store is read.
#[test]
fn the_rev_is_the_newest_that_was_read_or_published() {
    let index = InboxIndex::new(1 << 20);
    let known = index.begin(&user());
    index.record(&user(), group(1), None, None, 7);
    let mut read = row(group(1), 1);
    read.rev = 5;
    index.learn(&user(), &known, &[read], |_| ());
    let rev = || index.of(&user(), Rows::refs).unwrap()[0].rev;
    assert_eq!(rev(), 7, "published while the row was read");
    index.record(&user(), group(1), None, None, 6);
    assert_eq!(rev(), 7, "it came late");
    index.record(&user(), group(1), Some(summary(1, 9)), None, 0);
    assert_eq!(rev(), 7, "an entry is no change");
    index.record(&user(), group(1), None, None, 8);
    assert_eq!(rev(), 8);
}

#[test]
fn who_is_forgotten_while_the_store_is_read_stays_forgotten() {
    let index = InboxIndex::new(1 << 20);
    let known = index.begin(&user());
    index.retain(|_| false);
    index.record(&user(), group(1), Some(summary(1, 7)), None, 0);
    index.learn(&user(), &known, &[row(group(1), 1)], |_| ());
    assert_eq!(index.of(&user(), Rows::refs), None);
    let known = index.begin(&user());
    index.learn(&user(), &known, &[], |_| ());
    assert_eq!(index.of(&user(), Rows::refs), None, "nothing to remember");
}

/// The order is that of the rows, however they changed: entries that come late, leaving, and joining again.
#[test]
fn the_order_follows_the_newest_entries() {
    const GROUPS: u64 = 40;
    let (index, mut random) = (InboxIndex::new(1 << 20), StdRng::seed_from_u64(1));
    let mut newest: BTreeMap<ConversationId, (Seq, Rank)> = BTreeMap::new();
    let mut left: BTreeMap<ConversationId, Seq> = BTreeMap::new();
    let known = index.begin(&user());
    for step in 1..2_000 {
        if step == 500 {
            index.learn(&user(), &known, &[], |_| ());
        }
        let id = group(random.random_range(1..=GROUPS).into());
        let seq = random.random_range(1..=step);
        if random.random_range(0..10) == 0 {
            index.record(&user(), id, None, Some(seq), 0);
            let before = left.entry(id).or_default();
            *before = seq.max(*before);
        } else {
            // The rank of an entry follows from its seq, and does not rise with it.
            let rank = seq * 7 % 500;
            let summary = SummaryVersion {
                last: Some((seq, rank)),
                ..summary(seq, seq)
            };
            index.record(&user(), id, Some(summary), None, 0);
            let before = newest.entry(id).or_default();
            *before = (*before).max((seq, rank));
        }
        if step < 500 {
            continue;
        }
        let is_in = |id: &ConversationId, seq| left.get(id).is_none_or(|left| *left < seq);
        let all = newest.iter().filter(|(id, (seq, _))| is_in(id, *seq));
        let mut all: Vec<Position> = all.map(|(&id, &(_, rank))| (rank, id)).collect();
        all.sort_unstable_by_key(|position| Reverse(*position));
        let limit = random.random_range(1..10);
        let before = all.get(random.random_range(0..all.len() * 2)).copied();
        let order = index.of(&user(), |rows| rows.order(before, limit)).unwrap();
        all.retain(|position| before.is_none_or(|before| *position < before));
        all.truncate(limit + 1);
        assert_eq!(order.newest, all, "step {step}");
    }
}

#[test]
fn the_order_has_all_channels_on_each_page() {
    let channel = |number| {
        let mut row = row(group(number), 1);
        row.summary.as_mut().unwrap().kind = Kind::Channel;
        row
    };
    let mut left = channel(3);
    left.left_seq = Some(2);
    let rows = [channel(2), row(group(1), 1), left, channel(4)];
    for before in [None, Some((0, group(1))), Some((9, group(9)))] {
        let mut all = Rows::default();
        all.learn(&rows);
        let order = all.order(before, 5);
        assert_eq!(order.channels, [group(2), group(4)]);
        let is_before = before != Some((0, group(1)));
        assert_eq!(order.newest, [(0, group(1))][..usize::from(is_before)]);
    }
}

#[test]
fn a_user_weighs_what_their_rows_hold() {
    let index = InboxIndex::new(1 << 20);
    let known = index.begin(&user());
    index.learn(&user(), &known, &[row(group(1), 1)], |_| ());
    (2..=1_000).for_each(|number| {
        index.record(&user(), group(number), Some(summary(1, 1)), None, 0);
    });
    let weight = index.0.weight();
    let held = 1_000 * (size_of::<Row>() + size_of::<OrderKey>());
    assert!(weight >= held as u64, "{weight}");
    assert!(weight <= (2 * held + 2 * USER_BYTES) as u64, "{weight}");
}
