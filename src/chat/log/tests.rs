use super::*;
use crate::{
    clock,
    model::{ClientId, Content, Entry, UserId, limits::TAIL_ENTRIES},
    mutation::break_rule,
    store::first_of_tail,
};

impl Pending for Arc<Entry> {
    type Record = Entry;

    fn record(&self) -> &Self {
        self
    }

    fn position(entry: &Entry) -> u64 {
        entry.seq
    }

    fn is_same(a: &Entry, b: &Entry) -> bool {
        a.message_id == b.message_id
    }

    fn origin(entry: &Entry) -> Option<Origin> {
        Some((entry.sender.clone(), entry.client_id))
    }

    fn weight(entry: &Entry) -> usize {
        entry.weight()
    }
}

type EntryLog = Log<Arc<Entry>>;

fn entry(seq: u64, client: u128) -> Arc<Entry> {
    Arc::new(Entry {
        seq,
        message_id: clock::message_id(1),
        client_id: ClientId(uuid::Uuid::from_u128(client)),
        sender: UserId::new("alice").unwrap(),
        at: 1,
        content: Content::text("hi"),
        texts: 0,
    })
}

fn row(seq: u64, epoch: Epoch, client: u128, settled: u64) -> Row<Entry> {
    Row {
        record: entry(seq, client),
        epoch,
        settled,
        settle_end: 0,
    }
}

fn append(log: &mut EntryLog) -> Option<Row<Entry>> {
    log.append(|seq| entry(seq, u128::from(seq)))
}

/// A log with some entries appended.
fn log_of(entries: u64) -> EntryLog {
    let mut log = Log::at(0, 1);
    for seq in 1..=entries {
        assert_eq!(append(&mut log).unwrap().record.seq, seq);
    }
    log
}

/// What a takeover reads if these are the newest rows.
fn tail(rows: Vec<Row<Entry>>, settled: u64) -> Tail<Entry> {
    let newest = rows.iter().map(|row| row.record.seq).max();
    Tail {
        first: first_of_tail(newest.unwrap_or_default(), TAIL_ENTRIES),
        rows,
        settled,
    }
}

/// The head and the settled rows of a takeover.
fn taken(rows: Vec<Row<Entry>>, epoch: Epoch) -> (u64, Vec<(u64, Epoch)>) {
    let takeover = EntryLog::take_over(&tail(rows, 0), epoch).unwrap();
    let Takeover {
        mut log,
        records,
        settle,
    } = takeover;
    for row in &settle {
        log.restore(row.record.clone());
    }
    assert_eq!(log.head(), records.last().map_or(0, |entry| entry.seq));
    let settle = settle.iter().map(|row| (row.record.seq, row.epoch));
    (log.head(), settle.collect())
}

#[test]
fn a_log_whose_first_entry_was_never_stored_is_empty() {
    assert_eq!(taken(vec![row(2, 1, 2, 0)], 2), (0, Vec::new()));
}

#[test]
fn no_record_is_committed_across_a_gap() {
    let mut log = log_of(3);
    log.written(1..2);
    log.written(3..4);
    assert_eq!(log.commit(true), 1..2);
    assert!(log.commit(true).is_empty());
    log.written(2..3);
    assert!(
        log.commit(false).is_empty(),
        "a deposed owner commits nothing"
    );
    assert_eq!(log.commit(true), 2..4);
    assert_eq!((log.head(), log.settled()), (3, 0));
}

#[test]
fn a_log_weighs_its_uncommitted_records() {
    let mut log = log_of(2);
    let each = entry(1, 1).weight();
    assert_eq!(log.weight(), 2 * each);
    log.written(1..2);
    log.commit(true);
    assert_eq!(log.weight(), each);
}

#[test]
fn uncertain_records_are_bounded() {
    let mut log = log_of(APPENDS_IN_FLIGHT_MAX as u64);
    assert!(append(&mut log).is_none());
    log.written(1..2);
    log.commit(true);
    assert!(
        append(&mut log).is_none(),
        "its effects are not carried out"
    );
    log.release(1);
    assert!(append(&mut log).is_some());
}

#[test]
fn an_entry_is_settled_when_it_and_those_before_have_no_holds() {
    let mut log = log_of(3);
    log.written(1..4);
    log.commit(true);
    log.hold(1);
    log.release(2);
    log.release(1);
    assert_eq!(log.settled(), 0);
    assert_eq!(log.get(2).map(|entry| entry.seq), Some(2));
    log.release(1);
    assert_eq!((log.settled(), log.head()), (2, 3));
    assert!(log.get_mut(2).is_none() && log.get_mut(3).is_some());
    log.release(3);
    assert!(log.is_settled());
    assert_eq!(append(&mut log).unwrap().settled, 3);
}

#[test]
fn records_that_a_takeover_restores_are_committed_and_not_settled() {
    let tail = tail(vec![row(1, 1, 1, 0), row(2, 1, 2, 1), row(3, 1, 3, 1)], 0);
    let Takeover {
        mut log, settle, ..
    } = EntryLog::take_over(&tail, 2).unwrap();
    for row in &settle {
        log.restore(row.record.clone());
    }
    assert_eq!((log.settled(), log.head(), log.next()), (1, 3, 4));
    log.release(3);
    assert_eq!(log.settled(), 1);
    log.release(2);
    assert!(log.is_settled());
}

#[test]
fn a_takeover_settles_rows_that_are_valid_but_not_certain() {
    let rows = vec![row(1, 1, 1, 0), row(2, 1, 2, 1), row(3, 1, 3, 1)];
    assert_eq!(taken(rows, 2), (3, vec![(2, 2), (3, 2)]));
    assert_eq!(taken(Vec::new(), 2), (0, Vec::new()));
}

#[test]
fn a_takeover_ends_at_a_hole_a_lower_epoch_or_a_repetition() {
    assert_eq!(taken(vec![row(1, 1, 1, 0), row(3, 1, 3, 0)], 2).0, 1);
    assert_eq!(taken(vec![row(1, 2, 1, 0), row(2, 1, 2, 0)], 3).0, 1);
    assert_eq!(taken(vec![row(1, 1, 1, 0), row(2, 1, 1, 0)], 3).0, 1);
    // The highest epoch at each seq counts.
    assert_eq!(
        taken(vec![row(1, 1, 1, 0), row(1, 2, 9, 0), row(2, 2, 2, 0)], 3).0,
        2
    );
    assert_eq!(
        taken(vec![row(1, 2, 9, 0), row(1, 1, 1, 0), row(2, 1, 2, 0)], 3).0,
        1
    );
}

/// The same record, settled again by another owner.
fn again(row: &Row<Entry>, epoch: Epoch, settled: u64) -> Row<Entry> {
    Row {
        record: row.record.clone(),
        epoch,
        settled,
        settle_end: 0,
    }
}

#[test]
fn a_settle_that_is_not_whole_hides_nothing() {
    let acknowledged: Vec<_> = (1..=140)
        .map(|seq| row(seq, 4, seq.into(), seq.min(119)))
        .collect();
    // Owner 5 settled 120 to 140 on one replica. A page of another gateway copied some of these rows to a second one.
    let settle = |seqs: Range<u64>| {
        let rows = acknowledged
            .iter()
            .filter(move |row| seqs.contains(&row.record.seq));
        rows.map(|row| Row {
            settle_end: 140,
            ..again(row, 5, 119)
        })
    };
    let of = |part: Range<u64>| {
        let read = acknowledged.iter().skip(12).cloned();
        taken(read.chain(settle(part)).collect(), 6)
    };
    for part in [120..128, 125..130, 121..141, 140..141, 120..141] {
        let (head, settled) = of(part.clone());
        assert_eq!((head, settled.len()), (140, 21), "{part:?}");
    }
    break_rule(Some(Mutation::SettleWhole));
    let broken = of(120..128);
    break_rule(None);
    assert_eq!(broken.0, 127, "the rule is needed");
    // An owner whose settle is whole may have served: what comes after it was not acknowledged.
    let whole = settle(120..131).map(|row| Row {
        settle_end: 130,
        ..row
    });
    let read = acknowledged.iter().skip(12).cloned().chain(whole);
    assert_eq!(taken(read.collect(), 6).0, 130);
}

#[test]
fn an_owner_that_is_loaded_again_has_served() {
    let mut rows: Vec<_> = (1..=5).map(|seq| row(seq, 4, seq.into(), 3)).collect();
    let settle = |rows: &[Row<Entry>], epoch| {
        let taken = EntryLog::take_over(&tail(rows.to_vec(), 0), epoch);
        taken.unwrap().settle
    };
    // Owner 5 settles 4 and 5, appends 6 and 7, and panics.
    let first = settle(&rows, 5);
    assert!(first.iter().all(|row| row.settle_end == 5));
    rows.extend(first);
    rows.extend([row(6, 5, 6, 4), row(7, 5, 7, 4)]);
    let again = settle(&rows, 5);
    let ends: Vec<_> = again
        .iter()
        .map(|row| (row.record.seq, row.settle_end))
        .collect();
    assert_eq!(ends, [(5, 0), (6, 0), (7, 0)]);
}

#[test]
fn a_part_of_a_settle_that_failed_hides_nothing() {
    let mut rows: Vec<_> = (1..=6).map(|seq| row(seq, 4, seq.into(), 3)).collect();
    // Owner 5 knew that 3 is certain, but its settle came to one replica only, and then to another one in part. When it was
    // loaded again, it knew that 5 is certain, and served.
    rows.push(Row {
        settle_end: 6,
        ..again(&rows[3], 5, 3)
    });
    rows.push(Row {
        settle_end: 6,
        ..again(&rows[5], 5, 5)
    });
    rows.extend([row(7, 5, 7, 5), row(8, 5, 8, 5)]);
    assert_eq!(taken(rows, 6).0, 8);
}

#[test]
fn only_what_was_read_decides_whether_a_settle_is_whole() {
    // Owner 5 settled 110 to 140 and appended up to 239. Of its row 245 the read found a part, which is no row.
    let settled = (118..=140).map(|seq| Row {
        settle_end: 140,
        ..row(seq, 5, seq.into(), 109)
    });
    let appended = (141..=239).map(|seq| row(seq, 5, seq.into(), seq - 1));
    let tail = Tail {
        first: 118,
        rows: settled.chain(appended).collect(),
        settled: 0,
    };
    let taken = EntryLog::take_over(&tail, 6).unwrap();
    assert_eq!(taken.records.last().unwrap().seq, 239);
}

#[test]
fn the_first_row_of_a_short_log_may_be_older_than_what_is_read() {
    let tail = Tail {
        first: 3,
        rows: (3..=126)
            .map(|seq| row(seq, 1, seq.into(), seq - 1))
            .collect(),
        settled: 0,
    };
    let taken = EntryLog::take_over(&tail, 2).unwrap();
    assert_eq!((taken.records.len(), taken.settle.len()), (124, 1));
}

#[test]
fn a_settle_is_whole_although_its_oldest_rows_are_not_read() {
    let settled = |seq| Row {
        settle_end: 140,
        ..row(seq, 5, seq.into(), 99)
    };
    let rows = (123..=140).map(settled);
    let appended = (141..=250).map(|seq| row(seq, 5, seq.into(), seq - 1));
    let (head, settle) = taken(rows.chain(appended).collect(), 6);
    assert_eq!((head, settle.len()), (250, 1));
}

#[test]
fn a_takeover_ends_at_a_row_that_was_built_on_another_one() {
    // Owner 2 did not see row 1 of owner 1. Its own row 1 is lost, but its row 2 is there.
    assert_eq!(taken(vec![row(1, 1, 1, 0), row(2, 2, 2, 0)], 3).0, 1);
    // Owner 2 knew that row 1 is certain.
    let taken_over = taken(vec![row(1, 1, 1, 0), row(2, 2, 2, 1)], 3);
    assert_eq!(taken_over, (2, vec![(2, 3)]));
}

#[test]
fn a_takeover_keeps_rows_of_which_a_part_was_settled_again() {
    let first = [row(1, 1, 1, 0), row(2, 1, 2, 0), row(3, 1, 3, 0)];
    let mut rows = first.to_vec();
    rows.push(again(&first[2], 3, 0));
    assert_eq!(taken(rows, 4).0, 3);
    let mut rows = first.to_vec();
    rows.push(again(&first[1], 3, 0));
    assert_eq!(taken(rows, 4).0, 2, "row 3 has a lower epoch than row 2");
    // The chosen rows 1 and 2 are those of different owners, and owner 1 wrote both records.
    let mut rows = first.to_vec();
    rows.extend([again(&first[0], 2, 0), again(&first[1], 3, 0)]);
    rows.push(row(3, 2, 9, 0));
    assert_eq!(taken(rows, 4).0, 2);
}

#[test]
fn certain_rows_may_have_any_epoch() {
    let rows = [row(1, 1, 1, 0), row(2, 1, 2, 0), row(3, 1, 3, 2)];
    let mut rows_again = rows.to_vec();
    rows_again.push(again(&rows[0], 2, 0));
    assert_eq!(taken(rows_again, 3), (3, vec![(3, 3)]));
}

#[test]
fn a_takeover_never_loses_certain_rows() {
    let rows = vec![row(1, 1, 1, 0), row(3, 1, 3, 2)];
    let lost = EntryLog::take_over(&tail(rows, 0), 2);
    assert_eq!(lost.unwrap_err(), Incomplete { missing: 2 });
    let settled = tail(vec![row(1, 1, 1, 0)], 1);
    assert!(EntryLog::take_over(&settled, 2).unwrap().settle.is_empty());
    assert!(EntryLog::take_over(&tail(Vec::new(), 1), 2).is_err());
}
