//! A simulated Cassandra cluster with faults: three replicas in memory that lose, delay and resurrect writes, with
//! quorum reads and writes and blocking read repair. It is for tests only. With paused time and one seed, a run repeats
//! exactly.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{
    Error, Result, RingRow,
    cells::{CHANGES, Cell, CellStore, Cells, LAST_SEEN, RING, Range, ring_cell},
};
use crate::{
    model::UserId,
    mutation::{Step, took},
    tasks::lock,
};

/// The time after which a request to an unreachable store fails.
const OUT_OF_REACH: Duration = Duration::from_millis(500);

/// The time in which writes arrive of which nobody hears.
const LATER_MS: u64 = 60_000;

/// Where the writes of a client arrive.
#[derive(Clone, Copy, Default, Debug)]
pub enum Reach {
    /// At all replicas, but for the faults.
    #[default]
    All,
    /// At one.
    One,
    /// Late at all, and nobody acknowledges them.
    Late,
}

pub type Simulated = CellStore<Replicas>;

/// Cells by key, with their copies on the replicas.
pub type Copies = BTreeMap<Vec<u8>, Vec<(u64, Vec<u8>)>>;

type Replica = BTreeMap<Vec<u8>, (u64, Vec<u8>)>;

/// A cell of one replica: its key, write timestamp and value.
type CellCopy = (Vec<u8>, (u64, Vec<u8>));

/// The faults of the replicas, in percent of all writes to one replica.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub lost: u32,
    /// Writes that arrive unacknowledged, up to `late_ms` later, like a replayed hint.
    pub late: u32,
    pub late_ms: u64,
    /// Reads that time out, in percent of all reads.
    pub unread: u32,
    /// The time after which they time out.
    pub unread_ms: u64,
}

impl Faults {
    pub const NONE: Self = Self {
        lost: 0,
        late: 0,
        late_ms: 0,
        unread: 0,
        unread_ms: 0,
    };
    /// The faults of `model.py`.
    pub const BAD_DAY: Self = Self {
        lost: 5,
        late: 20,
        late_ms: 1500,
        unread: 5,
        unread_ms: 0,
    };
}

pub struct Replicas {
    state: Arc<Mutex<State>>,
    /// Whether this client of the store cannot reach it.
    cut: Arc<AtomicBool>,
    reach: Arc<Mutex<Reach>>,
    /// Cloned for each read in progress, which counts them.
    reading: Arc<()>,
}

struct State {
    replicas: [Replica; 3],
    random: StdRng,
    faults: Faults,
}

impl Simulated {
    #[must_use]
    pub fn new(seed: u64, faults: Faults) -> Self {
        let state = State {
            replicas: Default::default(),
            random: StdRng::seed_from_u64(seed),
            faults,
        };
        CellStore(Replicas {
            state: Arc::new(Mutex::new(state)),
            cut: Arc::default(),
            reach: Arc::default(),
            reading: Arc::default(),
        })
    }

    /// Returns a client of the same replicas, for another owner.
    #[must_use]
    pub fn share(&self) -> Self {
        CellStore(Replicas {
            state: self.0.state.clone(),
            cut: Arc::default(),
            reach: Arc::default(),
            reading: Arc::default(),
        })
    }

    /// Returns a flag. While it is true, requests of this client are not answered.
    #[must_use]
    pub fn cut(&self) -> Arc<AtomicBool> {
        self.0.cut.clone()
    }

    /// Sets where the writes of this client arrive.
    pub fn set_reach(&self, reach: Reach) {
        *lock(&self.0.reach) = reach;
    }

    /// The number of reads of this client in progress.
    #[must_use]
    pub fn reading(&self) -> usize {
        Arc::strong_count(&self.0.reading) - 1
    }

    pub fn set_faults(&self, faults: Faults) {
        self.0.state().faults = faults;
    }

    /// Sets the ring back to an earlier row, as a restore does.
    pub fn restore_ring(&self, row: &RingRow) {
        let cell = ring_cell(row.level, row);
        for replica in &mut self.0.state().replicas {
            replica.insert(cell.key.clone(), (cell.timestamp, cell.value.clone()));
        }
    }

    /// Returns the newest version of the ring on a replica. Nothing is drawn for that, unlike for a read.
    #[must_use]
    pub fn ring_version(&self) -> u64 {
        let state = self.0.state();
        let replicas = state.replicas.iter();
        let versions = replicas.filter_map(|replica| replica.get([RING].as_slice()));
        versions.map(|(version, _)| *version).max().unwrap_or(0)
    }

    /// Returns the key of each cell with its copies on the replicas that have it: write timestamps and values.
    #[must_use]
    pub fn copies(&self) -> Copies {
        let mut copies = Copies::new();
        for (key, cell) in self.0.state().replicas.iter().flatten() {
            copies.entry(key.clone()).or_default().push(cell.clone());
        }
        copies
    }
}

enum Fate {
    Lands(Duration),
    Late(Duration),
    Lost,
}

impl State {
    fn hop(&mut self) -> Duration {
        Duration::from_millis([5, 10, 10, 20, 40][self.random.random_range(0..5)])
    }

    fn fate(&mut self) -> Fate {
        if self.faults.lost + self.faults.late == 0 {
            return Fate::Lands(Duration::ZERO);
        }
        let draw = self.random.random_range(0..100);
        if draw < self.faults.lost {
            Fate::Lost
        } else if draw < self.faults.lost + self.faults.late {
            Fate::Late(Duration::from_millis(
                self.random.random_range(50..=self.faults.late_ms),
            ))
        } else {
            Fate::Lands(self.hop())
        }
    }

    fn later(&mut self) -> Fate {
        let delay = self.random.random_range(50..=LATER_MS);
        Fate::Late(Duration::from_millis(delay))
    }

    /// The fates of a write of which only one replica hears.
    fn one_of(&mut self, replicas: usize) -> Vec<Fate> {
        let hop = self.hop();
        let mut fates: Vec<_> = (0..replicas).map(|_| Fate::Lost).collect();
        fates[self.random.random_range(0..replicas)] = Fate::Lands(hop);
        fates
    }

    fn land(&mut self, replica: usize, cells: &[Cell]) {
        for cell in cells {
            let new = (cell.timestamp, cell.value.clone());
            let stored = self.replicas[replica]
                .entry(cell.key.clone())
                .or_insert_with(|| new.clone());
            if *stored < new {
                *stored = new;
            }
        }
    }
}

impl Replicas {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Fails after a while if the store is unreachable.
    async fn reach(&self, operation: &'static str) -> Result<()> {
        if self.cut.load(Ordering::Relaxed) {
            tokio::time::sleep(OUT_OF_REACH).await;
            return Err(unavailable(operation));
        }
        Ok(())
    }

    /// Writes to `replicas`. Returns true if two of them have the cells in time.
    async fn spread(&self, cells: Vec<Cell>, replicas: &[usize]) -> bool {
        let fates: Vec<_> = {
            let mut state = self.state();
            let fates = match *lock(&self.reach) {
                Reach::All => replicas.iter().map(|_| state.fate()).collect(),
                Reach::One => state.one_of(replicas.len()),
                Reach::Late => replicas.iter().map(|_| state.later()).collect::<Vec<_>>(),
            };
            replicas.iter().copied().zip(fates).collect()
        };
        let cells = Arc::new(cells);
        let mut landing: Vec<(Duration, usize)> = Vec::new();
        for (replica, fate) in fates {
            match fate {
                Fate::Lands(delay) => landing.push((delay, replica)),
                Fate::Late(delay) => {
                    let (state, cells) = (self.state.clone(), cells.clone());
                    #[expect(clippy::disallowed_methods, reason = "a hint outlives its writer")]
                    tokio::spawn(async move {
                        tokio::time::sleep(delay).await;
                        lock(&state).land(replica, &cells);
                    });
                }
                Fate::Lost => {}
            }
        }
        landing.sort_unstable();
        let mut waited = Duration::ZERO;
        for &(delay, replica) in &landing {
            tokio::time::sleep(delay - waited).await;
            waited = delay;
            self.state().land(replica, &cells);
            if replicas.len() == 3 && cells.iter().any(is_change) {
                took(Step::RowOnSomeReplicas);
            }
        }
        landing.len() >= 2
    }

    /// Reads the cells that `of` takes of two replicas, with blocking read repair: those of `page`.
    async fn read(&self, of: impl Fn(&Replica) -> Vec<CellCopy>, page: Page) -> Result<Vec<Cell>> {
        let _reading = self.reading.clone();
        self.reach("read").await?;
        let (pair, hop, timed_out, patience) = {
            let mut state = self.state();
            let first = state.random.random_range(0..3);
            let unread = state.faults.unread;
            let timed_out = state.random.random_range(0..100) < unread;
            let patience = Duration::from_millis(state.faults.unread_ms);
            let pair = [first, (first + 1) % 3];
            (pair, state.hop(), timed_out, patience)
        };
        if self.state().faults.lost > 0 {
            tokio::time::sleep(hop).await;
        }
        let mut merged: BTreeMap<Vec<u8>, (u64, Vec<u8>)> = BTreeMap::new();
        let views = {
            let state = self.state();
            pair.map(|r| of(&state.replicas[r]))
        };
        for (key, value) in views.iter().flatten() {
            let stored = merged.entry(key.clone()).or_insert_with(|| value.clone());
            if *stored < *value {
                stored.clone_from(value);
            }
        }
        page.cut(&mut merged);
        let [first, second] = views
            .each_ref()
            .map(|view| view.iter().filter(|(key, _)| merged.contains_key(key)));
        let differ = !first.eq(second);
        let cell = |(key, (timestamp, value))| Cell {
            key,
            timestamp,
            value,
        };
        if differ {
            let repair: Vec<Cell> = merged.clone().into_iter().map(cell).collect();
            if !self.spread(repair, &pair).await {
                return Err(unavailable("read"));
            }
        }
        if timed_out {
            tokio::time::sleep(patience).await;
            return Err(unavailable("read"));
        }
        Ok(merged.into_iter().map(cell).collect())
    }
}

/// How many cells of a range are read, and from which end. If each replica gives so many, the first of all of them together
/// are complete.
#[derive(Clone, Copy)]
struct Page {
    limit: usize,
    newest_first: bool,
}

impl Page {
    const ALL: Self = Self {
        limit: usize::MAX,
        newest_first: false,
    };

    fn cut(self, merged: &mut Replica) {
        while merged.len() > self.limit {
            if self.newest_first {
                merged.pop_first();
            } else {
                merged.pop_last();
            }
        }
    }
}

/// Whether a cell is a reservation of ranks.
fn is_reservation(key: &[u8]) -> bool {
    key.first() == Some(&LAST_SEEN) && key[1..].starts_with(UserId::of_ranks().as_str().as_bytes())
}

/// Whether a cell is a row of the log of changes that is not erased.
fn is_change(cell: &Cell) -> bool {
    cell.key.first() == Some(&CHANGES) && cell.timestamp == 0
}

fn unavailable(operation: &'static str) -> Error {
    Error::Unavailable {
        operation,
        reason: "timed out".into(),
    }
}

#[async_trait]
impl Cells for Replicas {
    async fn write(&self, operation: &'static str, cells: Vec<Cell>, _: bool) -> Result<()> {
        self.reach(operation).await?;
        // Without chance: the seeds that find broken rules count on it.
        if !cells.is_empty() && cells.iter().all(|cell| is_reservation(&cell.key)) {
            let mut state = self.state();
            (0..3).for_each(|replica| state.land(replica, &cells));
            return Ok(());
        }
        if self.spread(cells, &[0, 1, 2]).await {
            Ok(())
        } else {
            Err(unavailable(operation))
        }
    }

    async fn scan(&self, range: Range, limit: usize, newest_first: bool) -> Result<Vec<Cell>> {
        if is_reservation(&range.from) {
            self.reach("read").await?;
            let state = self.state();
            let found = state.replicas[0].range(range.from..range.to);
            let cell = |(key, (timestamp, value)): (&Vec<u8>, &(u64, Vec<u8>))| Cell {
                key: key.clone(),
                timestamp: *timestamp,
                value: value.clone(),
            };
            return Ok(found.map(cell).collect());
        }
        let faults = self.state().faults;
        // With faults, a read repairs its whole range: the seeds that find broken rules count on it.
        let page = match faults.lost + faults.late {
            0 => Page {
                limit,
                newest_first,
            },
            _ => Page::ALL,
        };
        let of = |replica: &Replica| {
            let found = replica.range(range.from.clone()..range.to.clone());
            let copy = |(key, cell): (&Vec<u8>, &(u64, Vec<u8>))| (key.clone(), cell.clone());
            if newest_first {
                found.rev().take(page.limit).map(copy).collect()
            } else {
                found.take(page.limit).map(copy).collect()
            }
        };
        let cells = self.read(of, page).await?.into_iter();
        Ok(if newest_first {
            cells.rev().take(limit).collect()
        } else {
            cells.take(limit).collect()
        })
    }

    async fn get(&self, keys: Vec<Vec<u8>>) -> Result<Vec<Cell>> {
        let of = |replica: &Replica| {
            let found = keys.iter().filter_map(|key| replica.get_key_value(key));
            found
                .map(|(key, cell)| (key.clone(), cell.clone()))
                .collect()
        };
        self.read(of, Page::ALL).await
    }

    async fn swap(&self, expected: Option<u64>, cell: Cell) -> Result<bool> {
        self.reach("swap").await?;
        let hop = self.state().hop();
        tokio::time::sleep(hop).await;
        let mut state = self.state();
        let stored = state
            .replicas
            .iter()
            .filter_map(|r| r.get(&cell.key))
            .map(|c| c.0)
            .max();
        if stored != expected {
            return Ok(false);
        }
        for replica in 0..3 {
            state.land(replica, std::slice::from_ref(&cell));
        }
        Ok(true)
    }

    async fn remove(&self, keys: Vec<Vec<u8>>) -> Result<()> {
        let mut state = self.state();
        for replica in &mut state.replicas {
            for key in &keys {
                replica.remove(key);
            }
        }
        Ok(())
    }

    async fn remove_unchanged(&self, cells: Vec<Cell>) -> Result<()> {
        let mut state = self.state();
        for replica in &mut state.replicas {
            for Cell {
                key,
                timestamp,
                value,
            } in &cells
            {
                // A replica that missed the newest write must not bring an earlier one back.
                let is_old = |stored: &(u64, Vec<u8>)| *stored <= (*timestamp, value.clone());
                if replica.get(key).is_some_and(is_old) {
                    replica.remove(key);
                }
            }
        }
        Ok(())
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn healthy(&self) -> Result<()> {
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Store as _, conformance};

    #[tokio::test(start_paused = true)]
    async fn it_keeps_the_promises_of_stores() {
        conformance::check(&Simulated::new(1, Faults::NONE))
            .await
            .unwrap();
    }

    /// Writes that are lost or late bring no erased text back. A replica that missed an erasure has it after reads.
    #[tokio::test(start_paused = true)]
    async fn erased_texts_do_not_come_back() {
        for seed in 0..30 {
            let store = Simulated::new(seed, Faults::NONE);
            let marked = conformance::write_marked(&store, "marker").await.unwrap();
            store.set_faults(Faults::BAD_DAY);
            // The rows arrive again, late on some replicas, and nobody waits for them.
            drop(store.append(marked.id, &marked.rows[..1], None).await);
            while store
                .erase(marked.id, std::slice::from_ref(&marked.erasure))
                .await
                .is_err()
            {}
            tokio::time::sleep(Duration::from_secs(5)).await;
            store.set_faults(Faults::NONE);
            for _ in 0..20 {
                let log = store.tail(marked.id, 100).await.unwrap();
                let changes = store.changes_tail(marked.id, 100).await.unwrap();
                let read = format!("{log:?} {changes:?}");
                assert!(!read.contains("marker"), "seed {seed}: {read}");
            }
            for replica in &store.0.state().replicas {
                let has = |value: &[u8]| value.windows(6).any(|w| w == b"marker");
                let with: Vec<_> = replica.iter().filter(|(_, v)| has(&v.1)).collect();
                assert!(with.is_empty(), "seed {seed}: {with:?}");
            }
        }
    }
}
