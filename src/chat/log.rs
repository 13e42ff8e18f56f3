//! The log of one conversation as its owner sees it: the rules of docs/storage.md, proved by
//! `tests/models/model.py`. It has no I/O. The owner stores the row that `append` returns, reports it with `written`,
//! and acknowledges and publishes the positions that `commit` returns.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    fmt::Debug,
    ops::Range,
    sync::Arc,
};

use super::client_ids::Origin;
use crate::{
    model::{
        Epoch,
        limits::{APPENDS_IN_FLIGHT_MAX, TAIL_ENTRIES},
    },
    mutation::{Mutation, broken},
    store::{Row, Tail},
};

/// A record of the log, with what its owner keeps for it until all its effects are carried out.
pub(super) trait Pending {
    type Record: Debug;

    fn record(&self) -> &Arc<Self::Record>;

    /// The position of a record in its log. Positions begin at 1 and have no gaps.
    fn position(record: &Self::Record) -> u64;

    /// Whether two records at one position are the same: one owner appended it, another settled it again. A text that was
    /// erased in one of them makes no difference.
    fn is_same(a: &Self::Record, b: &Self::Record) -> bool;

    /// The key under which a record may be in the log only once, if it has one.
    fn origin(record: &Self::Record) -> Option<Origin>;

    /// Bytes of memory that a record holds.
    fn weight(record: &Self::Record) -> usize;
}

/// The log of one conversation, from the settled position on.
#[derive(Debug)]
pub(super) struct Log<P> {
    epoch: Epoch,
    /// The highest settled position: all records up to it are committed, and their effects are carried out.
    settled: u64,
    /// The newest committed position.
    head: u64,
    /// One slot for each position after `settled`.
    open: VecDeque<Slot<P>>,
    /// Bytes of the records that are not committed yet.
    uncommitted_bytes: usize,
}

#[derive(Debug)]
struct Slot<P> {
    pending: P,
    is_written: bool,
    /// Number of effects of a committed record that are not carried out yet.
    holds: u32,
}

/// The valid end of a log that a previous owner left.
#[derive(Debug)]
pub(super) struct Takeover<P: Pending> {
    /// The log before the first row of `settle`. The owner restores these rows.
    pub log: Log<P>,
    /// The valid records that were read, oldest first, including those of `settle`.
    pub records: Vec<Arc<P::Record>>,
    /// The uncertain rows, which must be stored, all or nothing, before anything is served. Their effects may be missing
    /// from other tables, and they may not have been published.
    pub settle: Vec<Row<P::Record>>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("position {missing} of the log is committed, but no valid row of it is found")]
pub(super) struct Incomplete {
    missing: u64,
}

impl<P: Pending> Log<P> {
    /// An empty log.
    pub(super) fn empty(epoch: Epoch) -> Self {
        Self::at(0, epoch)
    }

    /// A log whose positions up to `head` are settled.
    fn at(head: u64, epoch: Epoch) -> Self {
        Self {
            epoch,
            settled: head,
            head,
            open: VecDeque::new(),
            uncommitted_bytes: 0,
        }
    }

    /// Makes a log of the rows that a previous owner left.
    pub(super) fn take_over(
        tail: &Tail<P::Record>,
        epoch: Epoch,
    ) -> Result<Takeover<P>, Incomplete> {
        // Rule [epoch]: the epoch is in the key, so rows of several owners stand side by side, and the highest epoch at
        // each position counts.
        let mut best: BTreeMap<u64, &Row<P::Record>> = BTreeMap::new();
        let rows = of_owners_that_served::<P>(&tail.rows);
        for &row in &rows {
            let chosen = best.entry(P::position(&row.record)).or_insert(row);
            if row.epoch > chosen.epoch {
                *chosen = row;
            }
        }
        // Every row has the settled position of its owner. Everything up to the highest one is certain.
        let claimed = tail.rows.iter().map(|row| row.settled).max();
        let known = claimed.unwrap_or_default().max(tail.settled);
        // A log that is shorter than the part that is read must have its first row, because it may begin with a hole.
        let newest = best.keys().next_back().copied().unwrap_or_default();
        let first = best.keys().next().copied().unwrap_or(1);
        let mut head = if newest <= TAIL_ENTRIES { 0 } else { first - 1 };
        let mut previous = None;
        let mut origins = HashSet::new();
        let (mut records, mut settle) = (Vec::new(), Vec::new());
        for (&position, row) in &best {
            let is_repeated = P::origin(&row.record).is_some_and(|origin| !origins.insert(origin));
            // Rule [prefix]: the valid log ends before the first hole. Rule [repeat]: it ends before the first client id that
            // occurs twice.
            if position != head + 1 || is_repeated {
                break;
            }
            if position > known
                && let Some(previous) = previous
                && !follows::<P>(row, previous, known, &rows)
            {
                break;
            }
            previous = Some(row);
            if position > known {
                // Rule [settle]: the row is written again under this epoch before anything is served. Otherwise an older
                // and a newer unacknowledged row could trade places after a reader saw one.
                // Rule [settle-sends]: `settle` writes the `sends` row too, so that a retry finds it.
                settle.push(Row {
                    record: row.record.clone(),
                    epoch,
                    settled: known,
                    settle_end: 0,
                });
            }
            head = position;
            records.push(row.record.clone());
        }
        // An owner that is loaded again, under the epoch under which it has served, adds nothing to its settle.
        if rows.iter().all(|row| row.epoch != epoch) {
            settle.iter_mut().for_each(|row| row.settle_end = head);
        }
        if head < known {
            return Err(Incomplete { missing: head + 1 });
        }
        let log = Self::at(head - settle.len() as u64, epoch);
        Ok(Takeover {
            log,
            records,
            settle,
        })
    }

    /// Adds the next row that a takeover settled. Its record is committed, with one hold.
    pub(super) fn restore(&mut self, pending: P) {
        debug_assert_eq!(P::position(pending.record()), self.next());
        debug_assert_eq!(self.next(), self.head + 1, "nothing is appended before");
        self.head += 1;
        self.open.push_back(Slot {
            pending,
            is_written: true,
            holds: 1,
        });
    }

    /// The newest committed position.
    pub(super) fn head(&self) -> u64 {
        self.head
    }

    /// The position of the next record that is appended.
    pub(super) fn next(&self) -> u64 {
        self.settled + 1 + self.open.len() as u64
    }

    /// The highest settled position: all records up to it are committed, applied to other rows, and published.
    pub(super) fn settled(&self) -> u64 {
        self.settled
    }

    /// Whether another record can be appended. The limit bounds the uncertain records that a successor may find.
    pub(super) fn can_append(&self) -> bool {
        self.open.len() < APPENDS_IN_FLIGHT_MAX
    }

    /// Whether all records are settled.
    pub(super) fn is_settled(&self) -> bool {
        self.open.is_empty()
    }

    /// Gives a record the next position. Returns the row to be stored, or `None` if the log is full.
    pub(super) fn append(&mut self, make: impl FnOnce(u64) -> P) -> Option<Row<P::Record>> {
        if !self.can_append() {
            return None;
        }
        let pending = make(self.next());
        let record = pending.record().clone();
        debug_assert_eq!(P::position(&record), self.next());
        self.uncommitted_bytes += P::weight(&record);
        self.open.push_back(Slot {
            pending,
            is_written: false,
            holds: 0,
        });
        Some(Row {
            record,
            epoch: self.epoch,
            settled: self.settled,
            settle_end: 0,
        })
    }

    /// Notes that the store has these rows.
    pub(super) fn written(&mut self, positions: Range<u64>) {
        for position in positions {
            match self.slot(position) {
                Some(slot) => slot.is_written = true,
                None => debug_assert!(false, "row {position} was written, but not appended"),
            }
        }
    }

    /// Commits all written records up to the first gap. Returns their positions. Each has one hold, which is released
    /// when its effects have been carried out.
    pub(super) fn commit(&mut self, lease_holds: bool) -> Range<u64> {
        let from = self.head + 1;
        // Rule [lease]: the lease is checked after the writes, so a deposed owner acknowledges nothing.
        if lease_holds {
            let first = usize::try_from(self.head - self.settled).unwrap_or(usize::MAX);
            for slot in self.open.iter_mut().skip(first) {
                // Rule [order]: a hole is never skipped. Later records wait for it.
                if !slot.is_written {
                    break;
                }
                slot.holds = 1;
                self.head += 1;
                self.uncommitted_bytes -= P::weight(slot.pending.record());
            }
        }
        from..self.head + 1
    }

    fn slot(&mut self, position: u64) -> Option<&mut Slot<P>> {
        let index = position.checked_sub(self.settled + 1)?;
        self.open.get_mut(usize::try_from(index).ok()?)
    }

    /// The record at a position that is not settled yet.
    pub(super) fn get_mut(&mut self, position: u64) -> Option<&mut P> {
        self.slot(position).map(|slot| &mut slot.pending)
    }

    /// As [`Self::get_mut`], but for reading.
    pub(super) fn get(&self, position: u64) -> Option<&P> {
        let index = position.checked_sub(self.settled + 1)?;
        let slot = self.open.get(usize::try_from(index).ok()?)?;
        Some(&slot.pending)
    }

    /// Notes one more effect that must be carried out before a committed record is settled. Until it is released, a
    /// successor carries it out again.
    pub(super) fn hold(&mut self, position: u64) {
        match self.slot(position) {
            Some(slot) => slot.holds += 1,
            None => debug_assert!(false, "position {position} is settled already"),
        }
    }

    /// Notes that one effect is carried out. Records without holds leave at the front: they are settled.
    pub(super) fn release(&mut self, position: u64) {
        match self.slot(position) {
            Some(slot) => slot.holds -= 1,
            None => debug_assert!(false, "position {position} is settled already"),
        }
        while self.settled < self.head && self.open.pop_front_if(|slot| slot.holds == 0).is_some() {
            self.settled += 1;
        }
    }

    /// Takes all records that are not settled, because the owner ends.
    pub(super) fn take(&mut self) -> impl Iterator<Item = P> {
        let open = std::mem::take(&mut self.open);
        open.into_iter().map(|slot| slot.pending)
    }

    /// Bytes of the records that are not committed yet. Committed ones count among the recent entries.
    pub(super) fn weight(&self) -> usize {
        self.uncommitted_bytes
    }
}

/// Returns the rows without those of an owner whose settle is not whole. Rule [settle-whole]: it never served anything, because
/// its settle must be stored first, so its rows say nothing. A settle is written as one batch, but a page that somebody reads
/// may repair a part of it: the epochs of the rows would fall where that part ends, and hide entries that were acknowledged.
fn of_owners_that_served<P: Pending>(rows: &[Row<P::Record>]) -> Vec<&Row<P::Record>> {
    let position = |row: &Row<P::Record>| P::position(&row.record);
    let present: HashSet<_> = rows.iter().map(|row| (row.epoch, position(row))).collect();
    // What is older was not read. It is certain.
    let newest = rows.iter().map(position).max().unwrap_or_default();
    let first = newest.saturating_sub(TAIL_ENTRIES) + 1;
    let mut has_settled: HashMap<Epoch, bool> = HashMap::new();
    for row in rows.iter().filter(|row| row.settle_end > 0) {
        let is_whole = (first.max(row.settled + 1)..=row.settle_end)
            .all(|position| present.contains(&(row.epoch, position)));
        // An attempt of the same owner that saw more may have failed.
        *has_settled.entry(row.epoch).or_default() |= is_whole;
    }
    let has_served = |row: &&Row<P::Record>| has_settled.get(&row.epoch).copied().unwrap_or(true);
    rows.iter()
        .filter(|row| has_served(row) || broken(Mutation::SettleWhole))
        .collect()
}

/// Returns whether an uncertain row was built on the row before it, whose counts its own follow from.
fn follows<P: Pending>(
    row: &Row<P::Record>,
    previous: &Row<P::Record>,
    known: u64,
    rows: &[&Row<P::Record>],
) -> bool {
    // No lower epoch follows (Raft, section 5.4): that is part of rule [prefix]. The higher one may have served the log without
    // this row.
    if row.epoch < previous.epoch {
        return false;
    }
    // Rule [chain]: one owner wrote both records, unless the previous one is certain. Others may have settled them again.
    P::position(&previous.record) <= known
        || writers::<P>(row, rows)
            .any(|epoch| writers::<P>(previous, rows).any(|other| other == epoch))
}

/// Returns the epochs of the owners that wrote this record at its position.
fn writers<'a, P: Pending>(
    row: &'a Row<P::Record>,
    rows: &'a [&Row<P::Record>],
) -> impl Iterator<Item = Epoch> + 'a {
    let is_same = |other: &&&Row<P::Record>| {
        P::position(&other.record) == P::position(&row.record)
            && P::is_same(&other.record, &row.record)
    };
    rows.iter().filter(is_same).map(|other| other.epoch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        clock,
        model::{ClientId, Content, Entry, UserId},
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
            texts: None,
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

    /// The head and the settled rows of a takeover.
    fn taken(rows: Vec<Row<Entry>>, epoch: Epoch) -> (u64, Vec<(u64, Epoch)>) {
        let takeover = EntryLog::take_over(&Tail { rows, settled: 0 }, epoch).unwrap();
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
        let tail = Tail {
            rows: vec![row(1, 1, 1, 0), row(2, 1, 2, 1), row(3, 1, 3, 1)],
            settled: 0,
        };
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
            let tail = Tail {
                rows: rows.to_vec(),
                settled: 0,
            };
            EntryLog::take_over(&tail, epoch).unwrap().settle
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
        // A part of a settle that failed, of more rows than it found the next time, does not hide what it served then.
        rows[5].settle_end = 9;
        assert_eq!(taken(rows, 6).0, 7);
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
        let lost = EntryLog::take_over(&Tail { rows, settled: 0 }, 2);
        assert_eq!(lost.unwrap_err(), Incomplete { missing: 2 });
        let settled = Tail {
            rows: vec![row(1, 1, 1, 0)],
            settled: 1,
        };
        assert!(EntryLog::take_over(&settled, 2).unwrap().settle.is_empty());
        assert!(
            EntryLog::take_over(
                &Tail {
                    rows: Vec::new(),
                    settled: 1
                },
                2
            )
            .is_err()
        );
    }
}
