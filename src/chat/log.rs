//! The log of one conversation as its owner sees it: the rules of docs/storage.md, proved by
//! `tests/models/model.py`, and no I/O. The owner stores what `append` returns, reports `stored`, and
//! acknowledges and publishes what `commit` returns.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    sync::Arc,
};

use foldhash::quality::RandomState;

use crate::{
    model::{
        ClientId, Draft, Entry, Epoch, MessageId, Millis, Seq, UserId,
        limits::{APPENDS_IN_FLIGHT_MAX, RECENT_CLIENT_IDS, RECENT_ENTRIES, TAIL_ENTRIES},
    },
    store::{LogRow, Tail},
};

/// A client id means a message only together with who sent it.
type Origin = (UserId, ClientId);

#[derive(Debug)]
pub(super) struct Log {
    epoch: Epoch,
    /// The newest committed entry.
    head: Seq,
    in_flight: VecDeque<Pending>,
    /// Committed entries of which something is yet to be done, and how much: to be applied to the other rows, to be
    /// published.
    unfinished: BTreeMap<Seq, u32>,
    /// Where client ids are in the log: of the last [`RECENT_CLIENT_IDS`] at least.
    seqs: HashMap<Origin, Seq, RandomState>,
    /// Those before: forgotten all at once, because to look for the oldest one costs more than to add one.
    older_seqs: HashMap<Origin, Seq, RandomState>,
    /// What the client ids of both weigh besides the tables.
    seqs_bytes: [usize; 2],
    recent: VecDeque<Arc<Entry>>,
    /// What the entries in flight and the recent ones weigh.
    entries_bytes: usize,
}

#[derive(Debug)]
struct Pending {
    entry: Arc<Entry>,
    stored: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Appended {
    /// Store this.
    New(LogRow),
    /// It is in the log, or on its way there, at this place.
    Repeated(Seq),
    /// Too much is in flight; `has_room` says when.
    Full,
}

/// What a new owner found.
#[derive(Debug)]
pub(super) struct Takeover {
    pub log: Log,
    /// To be stored, all or nothing, before anything is served. Their effects may be missing from the other
    /// rows, and they may not have been published.
    pub settle: Vec<LogRow>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("entry {missing} is committed, but no valid row of it is found")]
pub(super) struct Incomplete {
    missing: Seq,
}

impl Log {
    pub(super) fn empty(epoch: Epoch) -> Self {
        Self {
            epoch,
            head: 0,
            in_flight: VecDeque::new(),
            unfinished: BTreeMap::new(),
            seqs: HashMap::default(),
            older_seqs: HashMap::default(),
            seqs_bytes: [0; 2],
            recent: VecDeque::new(),
            entries_bytes: 0,
        }
    }

    /// Makes a log of what a predecessor left.
    pub(super) fn take_over(tail: &Tail, epoch: Epoch) -> Result<Takeover, Incomplete> {
        // Rule [epoch]: the epoch is in the key, so rows of several owners stand side by side;
        // at each seq the highest epoch counts.
        let mut best: BTreeMap<Seq, &LogRow> = BTreeMap::new();
        for row in &tail.rows {
            let chosen = best.entry(row.entry.seq).or_insert(row);
            if row.epoch > chosen.epoch {
                *chosen = row;
            }
        }
        // Every row says how far its owner had settled: all up to the highest such claim is certain.
        let known = tail
            .rows
            .iter()
            .map(|r| r.committed)
            .max()
            .unwrap_or_default()
            .max(tail.settled);
        let mut log = Self::empty(epoch);
        // Of a log shorter than what is read, the first entry must be there: a hole at the very start is one too.
        let newest = best.keys().next_back().copied().unwrap_or_default();
        let first = best.keys().next().copied().unwrap_or(1);
        log.head = if newest <= TAIL_ENTRIES { 0 } else { first - 1 };
        let mut previous_epoch = 0;
        let mut origins = HashSet::new();
        let mut settle = Vec::new();
        for (&seq, row) in &best {
            let entry = &row.entry;
            let origin = (entry.sender.clone(), entry.client_id);
            // Rule [prefix]: the valid log ends before the first hole, and before the first epoch lower
            // than its predecessor's (Raft, section 5.4). Rule [repeat]: and before a client id's second time.
            if seq != log.head + 1 || row.epoch < previous_epoch || !origins.insert(origin) {
                break;
            }
            previous_epoch = row.epoch;
            if seq > known {
                // Rule [settle]: written again under this epoch before anything is served, or an older and a
                // newer unacknowledged row could trade places after a reader saw one.
                // Rule [settle-sends]: `settle` writes the `sends` row too, so that a retry finds it.
                settle.push(LogRow {
                    entry: entry.clone(),
                    epoch,
                    committed: known,
                });
            }
            log.head = seq;
            log.remember(entry);
        }
        if log.head < known {
            return Err(Incomplete {
                missing: log.head + 1,
            });
        }
        Ok(Takeover { log, settle })
    }

    pub(super) fn head(&self) -> Seq {
        self.head
    }

    /// The place after the last one given away.
    pub(super) fn next(&self) -> Seq {
        self.head + 1 + self.in_flight.len() as Seq
    }

    /// Everything up to here is committed, applied to the other rows, and published.
    pub(super) fn settled(&self) -> Seq {
        let first = self.unfinished.first_key_value();
        first.map_or(self.head, |(seq, _)| seq - 1)
    }

    pub(super) fn has_room(&self) -> bool {
        // Rule: at most this many uncertain entries for a successor to look at.
        self.next() - self.settled() <= APPENDS_IN_FLIGHT_MAX as Seq
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.in_flight.is_empty() && self.unfinished.is_empty()
    }

    /// Gives `draft` the next place in the log.
    pub(super) fn append(&mut self, draft: Draft, message_id: MessageId, at: Millis) -> Appended {
        if let Some(seq) = self.find(&draft.sender, draft.client_id) {
            return Appended::Repeated(seq);
        }
        if !self.has_room() {
            return Appended::Full;
        }
        let entry = Arc::new(Entry {
            seq: self.next(),
            message_id,
            client_id: draft.client_id,
            sender: draft.sender,
            at,
            content: draft.content,
        });
        self.remember_origin(&entry);
        self.entries_bytes += entry.weight();
        self.in_flight.push_back(Pending {
            entry: entry.clone(),
            stored: false,
        });
        Appended::New(LogRow {
            entry,
            epoch: self.epoch,
            committed: self.settled(),
        })
    }

    /// The place that a client id has in the log or on the way to it, as far as memory goes.
    pub(super) fn find(&self, sender: &UserId, client_id: ClientId) -> Option<Seq> {
        let origin = (sender.clone(), client_id);
        let seq = self.seqs.get(&origin);
        seq.or_else(|| self.older_seqs.get(&origin)).copied()
    }

    /// The store has the entry.
    pub(super) fn stored(&mut self, seq: Seq) {
        let index = usize::try_from(seq - self.head - 1).unwrap_or(usize::MAX);
        match self.in_flight.get_mut(index) {
            Some(pending) => pending.stored = true,
            None => debug_assert!(false, "stored entry {seq} is not in flight"),
        }
    }

    /// Commits all stored entries up to the first gap.
    pub(super) fn commit(&mut self, lease_holds: bool) -> Vec<Arc<Entry>> {
        let mut committed = Vec::new();
        // Rule [lease]: looked at after the writes; a deposed owner acknowledges nothing.
        if !lease_holds {
            return committed;
        }
        // Rule [order]: a hole is never skipped; later entries wait for it.
        while self.in_flight.front().is_some_and(|p| p.stored)
            && let Some(Pending { entry, .. }) = self.in_flight.pop_front()
        {
            debug_assert_eq!(entry.seq, self.head + 1, "the log has no gaps");
            self.head = entry.seq;
            if matches!(entry.content, crate::model::Content::System(_)) {
                self.hold(entry.seq);
            }
            self.keep_recent(entry.clone());
            committed.push(entry);
        }
        committed
    }

    /// Something is yet to be done about a committed entry; a successor does it again unless it is released.
    pub(super) fn hold(&mut self, seq: Seq) {
        *self.unfinished.entry(seq).or_default() += 1;
    }

    /// It is done.
    pub(super) fn release(&mut self, seq: Seq) {
        if let Some(left) = self.unfinished.get_mut(&seq) {
            *left -= 1;
            if *left == 0 {
                self.unfinished.remove(&seq);
            }
        }
    }

    /// The committed entries from `from` to `to`, if memory has them all.
    pub(super) fn recent(&self, from: Seq, to: Seq) -> Option<Vec<Arc<Entry>>> {
        debug_assert!(to <= self.head, "readers see only what is committed");
        if from > to {
            return Some(Vec::new());
        }
        let first = self.recent.front()?.seq;
        let start = usize::try_from(from.checked_sub(first)?).ok()?;
        let end = usize::try_from(to - first).ok()?;
        Some(self.recent.range(start..=end).cloned().collect())
    }

    pub(super) fn newest(&self) -> Option<&Arc<Entry>> {
        self.recent.back()
    }

    /// Notes where a client id was found in the store.
    pub(super) fn remember_origin_at(&mut self, sender: &UserId, client_id: ClientId, seq: Seq) {
        if self.seqs.len() == RECENT_CLIENT_IDS {
            std::mem::swap(&mut self.seqs, &mut self.older_seqs);
            self.seqs.clear();
            self.seqs_bytes = [0, self.seqs_bytes[0]];
        }
        let known = self.seqs.insert((sender.clone(), client_id), seq);
        if known.is_none() {
            self.seqs_bytes[0] += sender.weight();
        }
    }

    fn remember_origin(&mut self, entry: &Entry) {
        self.remember_origin_at(&entry.sender, entry.client_id, entry.seq);
    }

    fn remember(&mut self, entry: &Arc<Entry>) {
        self.remember_origin(entry);
        self.entries_bytes += entry.weight();
        self.keep_recent(entry.clone());
    }

    fn keep_recent(&mut self, entry: Arc<Entry>) {
        self.recent.push_back(entry);
        if self.recent.len() > RECENT_ENTRIES
            && let Some(oldest) = self.recent.pop_front()
        {
            self.entries_bytes -= oldest.weight();
        }
    }

    /// Bytes held: entries and client ids.
    pub(super) fn weight(&self) -> usize {
        const PLACE_BYTES: usize = size_of::<(Origin, Seq)>() + 1;
        let places = self.seqs.capacity() + self.older_seqs.capacity();
        self.entries_bytes + places * PLACE_BYTES + self.seqs_bytes.iter().sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        clock,
        model::{Content, SystemChange},
    };

    fn draft(client: u128) -> Draft {
        Draft {
            sender: UserId::new("alice").unwrap(),
            client_id: ClientId(uuid::Uuid::from_u128(client)),
            content: Content::text("hi"),
            at: None,
            retry: false,
        }
    }

    fn row(seq: Seq, epoch: Epoch, client: u128, committed: Seq) -> LogRow {
        let mut log = Log::empty(epoch);
        log.head = seq - 1;
        let Appended::New(row) = log.append(draft(client), clock::message_id(1), 1) else {
            panic!()
        };
        LogRow { committed, ..row }
    }

    fn append(log: &mut Log, client: u128) -> Appended {
        log.append(draft(client), clock::message_id(1), 1)
    }

    fn seqs(entries: &[Arc<Entry>]) -> Vec<Seq> {
        entries.iter().map(|e| e.seq).collect()
    }

    fn taken(rows: Vec<LogRow>, epoch: Epoch) -> (Seq, Vec<(Seq, Epoch)>) {
        let takeover = Log::take_over(&Tail { rows, settled: 0 }, epoch).unwrap();
        let settle = takeover
            .settle
            .iter()
            .map(|r| (r.entry.seq, r.epoch))
            .collect();
        (takeover.log.head(), settle)
    }

    #[test]
    fn a_log_whose_first_entry_was_never_stored_is_empty() {
        let tail = Tail {
            rows: vec![row(2, 1, 2, 0)],
            settled: 0,
        };
        let Takeover { log, settle } = Log::take_over(&tail, 2).unwrap();
        assert_eq!((log.head(), settle.len()), (0, 0));
    }

    #[test]
    fn nothing_commits_across_a_gap() {
        let mut log = Log::empty(1);
        for client in 1..=3 {
            assert!(matches!(append(&mut log, client), Appended::New(_)));
        }
        log.stored(1);
        log.stored(3);
        assert_eq!(seqs(&log.commit(true)), [1]);
        assert!(log.commit(true).is_empty());
        log.stored(2);
        assert!(
            log.commit(false).is_empty(),
            "a deposed owner commits nothing"
        );
        assert_eq!(seqs(&log.commit(true)), [2, 3]);
        assert_eq!(seqs(&log.recent(2, 3).unwrap()), [2, 3]);
    }

    #[test]
    fn a_client_id_has_one_place() {
        let mut log = Log::empty(1);
        assert!(matches!(append(&mut log, 7), Appended::New(_)));
        assert_eq!(append(&mut log, 7), Appended::Repeated(1));
        let mut other = draft(7);
        other.sender = UserId::new("bob").unwrap();
        assert!(matches!(
            log.append(other, clock::message_id(1), 1),
            Appended::New(_)
        ));
    }

    #[test]
    fn enough_client_ids_are_remembered_and_not_for_ever() {
        let mut log = Log::empty(1);
        let sender = draft(0).sender;
        let newest = 3 * RECENT_CLIENT_IDS as u128 + 7;
        for client in 1..=newest {
            let client_id = ClientId(uuid::Uuid::from_u128(client));
            log.remember_origin_at(&sender, client_id, client as Seq);
        }
        let find = |client: u128| log.find(&sender, ClientId(uuid::Uuid::from_u128(client)));
        for client in newest - RECENT_CLIENT_IDS as u128 + 1..=newest {
            assert_eq!(find(client), Some(client as Seq));
        }
        assert_eq!(find(newest - 2 * RECENT_CLIENT_IDS as u128), None);
    }

    #[test]
    fn a_log_weighs_what_it_holds_and_no_longer_what_it_let_go_of() {
        let mut log = Log::empty(1);
        let mut heaviest = 0;
        for client in 1..=20 * RECENT_CLIENT_IDS as u128 {
            let mut draft = draft(client);
            draft.content = Content::text("x".repeat(client as usize % 2 * 1_000));
            log.append(draft, clock::message_id(1), 1);
            log.stored(log.head() + 1);
            log.commit(true);
            heaviest = heaviest.max(log.weight());
            let entries: usize = log.recent.iter().map(|entry| entry.weight()).sum();
            assert_eq!(log.entries_bytes, entries);
        }
        let least = RECENT_ENTRIES / 2 * 1_000 + RECENT_CLIENT_IDS * size_of::<Origin>();
        assert!((least..2_000_000).contains(&heaviest), "{heaviest}");
    }

    #[test]
    fn what_is_uncertain_is_bounded() {
        let mut log = Log::empty(1);
        for client in 1..=APPENDS_IN_FLIGHT_MAX as u128 {
            assert!(matches!(append(&mut log, client), Appended::New(_)));
        }
        assert_eq!(append(&mut log, 1000), Appended::Full);
        log.stored(1);
        log.commit(true);
        assert!(matches!(append(&mut log, 1000), Appended::New(_)));
    }

    #[test]
    fn an_entry_is_settled_only_when_it_is_applied() {
        let mut log = Log::empty(1);
        let mut joining = draft(1);
        joining.content = Content::System(SystemChange::Joined);
        log.append(joining, clock::message_id(1), 1);
        append(&mut log, 2);
        log.stored(1);
        log.stored(2);
        log.commit(true);
        assert_eq!((log.head(), log.settled()), (2, 0));
        log.release(1);
        assert_eq!(log.settled(), 2);
    }

    #[test]
    fn a_takeover_settles_what_is_valid_but_not_certain() {
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

    #[test]
    fn a_takeover_never_loses_what_is_certain() {
        let rows = vec![row(1, 1, 1, 0), row(3, 1, 3, 2)];
        let lost = Log::take_over(&Tail { rows, settled: 0 }, 2);
        assert_eq!(lost.unwrap_err(), Incomplete { missing: 2 });
        let settled = Tail {
            rows: vec![row(1, 1, 1, 0)],
            settled: 1,
        };
        assert!(Log::take_over(&settled, 2).unwrap().settle.is_empty());
        assert!(
            Log::take_over(
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
