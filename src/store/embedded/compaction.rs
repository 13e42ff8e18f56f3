//! Compaction after erasures. An overwritten value stays in the files of the database until its table is compacted, and
//! in the journal until that is removed. So texts of deleted messages leave the disk only when everything is compacted.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread,
    time::Duration,
};

use fjall::{Database, KeyspaceCreateOptions, PersistMode};
use rand::Rng as _;
use tokio::time::Instant;

use super::{
    super::{Error, Result},
    Keyspaces, damage, journals, open_database,
};
use crate::tasks::lock;

/// The time between an erasure and the compaction that follows it, in which further erasures are collected. It is also
/// the least time between two compactions.
const COMPACT_AFTER: Duration = Duration::from_secs(10 * 60);
/// The time between a start and the compaction after erasures of an earlier process.
const COMPACT_AFTER_START: Duration = Duration::from_secs(20);
/// The least time between two compactions, as a multiple of what the earlier one took. So compacting a large directory
/// takes at most a twentieth of the time.
const COMPACT_PAUSE: u32 = 19;
/// The time for which closing the store waits for a compaction in progress. The end of the process breaks it off without
/// harm.
pub(super) const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// A file in the directory: there are erasures after the last compaction. It makes a restart compact too.
const MARK: &str = "erased";
/// The keyspace of the bytes that fill the journal.
const FILLER: &str = "filler";
/// Bytes after which fjall begins a new journal.
const JOURNAL_BYTES: usize = 64 << 20;
const FILLER_CHUNK_BYTES: usize = 1 << 20;
/// Bytes of filler in memory.
const FILLER_MEMORY_BYTES: u64 = 8 << 20;
const CACHE_BYTES: u64 = 32 << 20;

/// Compacts a closed directory, so that no erased byte is in any of its files.
///
/// # Errors
/// [`Error::Unusable`] if the directory does not exist, is in use, or cannot be written, and [`Error::Corrupt`] if it is
/// damaged.
pub fn compact(path: &Path) -> Result<()> {
    let failed = |e: fjall::Error| damage::not_opened(path, &e);
    if !path.is_dir() {
        let reason = format!("{}: there is no such directory", path.display());
        return Err(Error::Unusable { reason });
    }
    {
        let (database, keyspaces) = open_database(path, CACHE_BYTES)?;
        compact_all(&database, &keyspaces).map_err(failed)?;
    }
    // Files of tables that were replaced are removed when the directory is opened.
    let (database, _locked) = open_database(path, CACHE_BYTES)?;
    drop(database);
    journals::record_stopped(path).map_err(|e| failed(e.into()))?;
    remove_mark(path).map_err(|e| failed(e.into()))
}

/// Rewrites all tables with the newest values only, and removes the journals that have older ones. Writers continue in
/// the meantime.
fn compact_all(database: &Database, keyspaces: &Keyspaces) -> fjall::Result<()> {
    let filler = database.keyspace(FILLER, || {
        KeyspaceCreateOptions::default().max_memtable_size(FILLER_MEMORY_BYTES)
    })?;
    // fjall begins a new journal only when it flushes a keyspace while the journal is large, and has no other way.
    let mut bytes = vec![0; FILLER_CHUNK_BYTES];
    for _ in 0..=JOURNAL_BYTES / FILLER_CHUNK_BYTES {
        // It compresses journals, so that other bytes would fill them slowly.
        rand::rng().fill_bytes(&mut bytes);
        filler.insert("filler", bytes.as_slice())?;
    }
    database.persist(PersistMode::Buffer)?;
    filler.rotate_memtable_and_wait()?;
    let keyspaces = [&keyspaces.log, &keyspaces.rows];
    // A journal is removed once all keyspaces that it has writes of are flushed beyond it.
    for keyspace in keyspaces {
        keyspace.rotate_memtable_and_wait()?;
    }
    for keyspace in keyspaces {
        keyspace.major_compact()?;
    }
    filler.clear()?;
    filler.insert("filler", "")?;
    // This also removes the journals and the tables that became obsolete.
    filler.rotate_memtable_and_wait()
}

fn remove_mark(path: &Path) -> io::Result<()> {
    journals::remove(&path.join(MARK))
}

/// The thread that compacts after erasures.
pub(super) struct Compactor(Arc<Shared>);

struct Shared {
    path: PathBuf,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Erasures since the start, those before it counted as one. A compaction covers the erasures before it began.
    erasures: u64,
    compacted: u64,
    stopping: bool,
    stopped: bool,
}

impl Compactor {
    pub(super) fn start(
        path: &Path,
        database: &Database,
        keyspaces: &Keyspaces,
    ) -> fjall::Result<Self> {
        let shared = Arc::new(Shared {
            path: path.to_owned(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        shared.state().erasures = u64::from(path.join(MARK).try_exists()?);
        let (database, keyspaces) = (database.clone(), keyspaces.clone());
        let compactor = Self(shared.clone());
        let run = move || {
            shared.run(&database, &keyspaces);
            // Only now another process may open the directory.
            drop((database, keyspaces));
            shared.state().stopped = true;
        };
        thread::Builder::new()
            .name("store-compactor".into())
            .spawn(run)?;
        Ok(compactor)
    }

    /// Records durably that something was erased, so that a compaction follows.
    pub(super) async fn request(&self) -> Result<()> {
        let shared = self.0.clone();
        let recorded = tokio::task::spawn_blocking(move || shared.request()).await;
        let reason = match recorded {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(e)) => e.to_string(),
            Err(e) => e.to_string(),
        };
        Err(Error::Unavailable {
            operation: "erase",
            reason,
        })
    }

    /// Ends the thread, and waits a while for it. Returns whether it ended.
    pub(super) async fn stop(&self) -> bool {
        self.0.stop();
        let ended = async {
            while !self.0.state().stopped {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let is_ended = tokio::time::timeout(CLOSE_PATIENCE, ended).await.is_ok();
        if !is_ended {
            tracing::info!("the store closes during a compaction; the next start compacts again");
        }
        is_ended
    }
}

impl Drop for Compactor {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn stop(&self) {
        self.state().stopping = true;
        self.changed.notify_all();
    }

    fn request(&self) -> io::Result<()> {
        let mut state = self.state();
        if state.erasures == state.compacted {
            File::create(self.path.join(MARK))?.sync_all()?;
            File::open(&self.path)?.sync_all()?;
        }
        state.erasures += 1;
        self.changed.notify_all();
        Ok(())
    }

    fn run(&self, database: &Database, keyspaces: &Keyspaces) {
        // Before the first request, the state says whether an earlier process left erasures.
        let is_left = self.state().erasures > 0;
        let mut pause = if is_left {
            COMPACT_AFTER_START
        } else {
            COMPACT_AFTER
        };
        while let Some(erasures) = self.next(pause) {
            let began = Instant::now();
            if let Err(error) = compact_all(database, keyspaces) {
                tracing::warn!(%error, "the store could not be compacted; trying again later");
            } else {
                let seconds = began.elapsed().as_secs();
                tracing::info!(seconds, "compacted: erased texts have left the disk");
                self.done(erasures);
            }
            pause = COMPACT_AFTER.max(began.elapsed() * COMPACT_PAUSE);
        }
    }

    /// Waits until a compaction is due, and returns the number of erasures that it covers. `None` to stop.
    fn next(&self, pause: Duration) -> Option<u64> {
        let idle = |state: &mut State| !state.stopping && state.erasures == state.compacted;
        let state = self.changed.wait_while(self.state(), idle);
        let state = state.unwrap_or_else(std::sync::PoisonError::into_inner);
        let waiting = |state: &mut State| !state.stopping;
        let waited = self.changed.wait_timeout_while(state, pause, waiting);
        let (state, _) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        (!state.stopping).then_some(state.erasures)
    }

    fn done(&self, erasures: u64) {
        let mut state = self.state();
        state.compacted = erasures;
        if state.erasures == erasures
            && let Err(error) = remove_mark(&self.path)
        {
            tracing::warn!(%error, "a mark could not be removed; the next start compacts again");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{super::Embedded, *};
    use crate::store::{Store as _, conformance};

    /// Returns the files below a folder that contain a text.
    fn files_with(folder: &Path, text: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                found.extend(files_with(&path, text));
                continue;
            }
            let bytes = fs::read(&path).unwrap();
            if bytes.windows(text.len()).any(|w| w == text.as_bytes()) {
                found.push(path);
            }
        }
        found
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_file_has_an_erased_text_after_a_compaction() {
        let folder = tempfile::tempdir().unwrap();
        let store = Embedded::open(folder.path(), 1 << 20).unwrap();
        let marker = "qZ7kWv3XnE9s";
        conformance::write_and_erase(&store, marker).await.unwrap();
        store.close().await.unwrap();
        drop(store);
        assert!(!files_with(folder.path(), marker).is_empty());
        assert!(folder.path().join(MARK).exists());
        compact(folder.path()).unwrap();
        assert_eq!(files_with(folder.path(), marker), Vec::<PathBuf>::new());
        assert!(!folder.path().join(MARK).exists());
        let store = Embedded::open(folder.path(), 1 << 20).unwrap();
        store.close().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_running_store_is_compacted_too() {
        let folder = tempfile::tempdir().unwrap();
        let store = Embedded::open(folder.path(), 1 << 20).unwrap();
        let marker = "qZ7kWv3XnE9s";
        conformance::write_and_erase(&store, marker).await.unwrap();
        let keyspaces = &store.0.keyspaces;
        let database = store.0.database.read().unwrap().clone().unwrap();
        compact_all(&database, keyspaces).unwrap();
        assert_eq!(files_with(folder.path(), marker), Vec::<PathBuf>::new());
        // The next one finds everything in place.
        compact_all(&database, keyspaces).unwrap();
        drop(database);
        store.close().await.unwrap();
    }

    #[test]
    fn only_a_directory_can_be_compacted() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        assert!(compact(&missing).is_err());
        assert!(!missing.exists());
    }
}
