//! The log of one conversation as its owner sees it: the rules of docs/storage.md, proved by
//! `tests/models/model.py`. It has no I/O. The owner stores the row that `append` returns, reports it with `written`,
//! and acknowledges and publishes the positions that `commit` returns.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    fmt::Debug,
    ops::Range,
    sync::Arc,
};

use super::client_ids::Origin;
use crate::{
    model::{Epoch, limits::APPENDS_IN_FLIGHT_MAX},
    mutation::{Mutation, broken},
    store::{Row, Tail},
};

/// The epoch of rows that take the places of lost ones. Rule [filled]: no owner has it, so a row of any owner at the same
/// position counts more, also one that comes back later.
pub(super) const FILLED: Epoch = 0;

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
        let rows = of_owners_that_served::<P>(tail);
        for &row in &rows {
            let chosen = best.entry(P::position(&row.record)).or_insert(row);
            if row.epoch > chosen.epoch {
                *chosen = row;
            }
        }
        let known = tail.certain();
        // The row at the first position must be there, because the log may begin with a hole. What is older is certain.
        let mut head = tail.first - 1;
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

    /// Returns the rows that are missing in settles, up to the certain end. A place of which the row of a lower epoch is left is
    /// among them: it lacks no record, but the settle is not whole without it. If a takeover does not refuse the log, they were
    /// never there, because their owner never served.
    pub(super) fn missing_of_settles(tail: &Tail<P::Record>) -> BTreeSet<u64> {
        let known = tail.certain();
        let present: HashSet<_> = places::<P>(tail).collect();
        let places = settles(tail).into_iter().flat_map(|(epoch, settled, end)| {
            let places = tail.first.max(settled + 1)..=end.min(known);
            places.map(move |position| (epoch, position))
        });
        places
            .filter(|(epoch, position)| !is_present(&present, *epoch, *position))
            .map(|(_, position)| position)
            .collect()
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

/// Returns the rows without those of owners whose settle is not whole. Rule [settle-whole]: they never served anything, because
/// a settle must be stored before, so their rows say nothing. A page that somebody reads may repair a part of a settle: the
/// epochs of the rows would fall where that part ends, and hide entries that were acknowledged.
fn of_owners_that_served<P: Pending>(tail: &Tail<P::Record>) -> Vec<&Row<P::Record>> {
    let rows = tail.rows.iter();
    let settles = settles(tail);
    if settles.is_empty() || broken(Mutation::SettleWhole) {
        return rows.collect();
    }
    let present: HashSet<_> = places::<P>(tail).collect();
    let mut has_settled: HashMap<Epoch, bool> = HashMap::new();
    for (epoch, settled, end) in settles {
        // What was not read is older, and certain.
        let mut settle = tail.first.max(settled + 1)..=end;
        let is_whole = settle.all(|position| is_present(&present, epoch, position));
        // If an owner was loaded twice, the first attempt may have known less to be certain, and left a part of its settle.
        *has_settled.entry(epoch).or_default() |= is_whole;
    }
    rows.filter(|row| has_settled.get(&row.epoch) != Some(&false))
        .collect()
}

/// Returns the settles of which rows were read: the epoch of each, the settled position before it, and its end. The rows of one
/// settle are alike. Mostly there is none.
fn settles<T>(tail: &Tail<T>) -> HashSet<(Epoch, u64, u64)> {
    let rows = tail.rows.iter().filter(|row| row.settle_end > 0);
    rows.map(|row| (row.epoch, row.settled, row.settle_end))
        .collect()
}

fn places<P: Pending>(tail: &Tail<P::Record>) -> impl Iterator<Item = (Epoch, u64)> {
    tail.rows
        .iter()
        .map(|row| (row.epoch, P::position(&row.record)))
}

/// Whether an owner's row is there, or was lost and its place is filled: see [`FILLED`]. Only places that are certain are filled,
/// and at these no order of epochs counts.
fn is_present(present: &HashSet<(Epoch, u64)>, epoch: Epoch, position: u64) -> bool {
    [epoch, FILLED]
        .iter()
        .any(|epoch| present.contains(&(*epoch, position)))
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
mod tests;
