//! Damages of the directory: files that are missing, or have other bytes than were written.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use fjall::{AbstractTree as _, LsmError};
use xxhash_rust::xxh3::Xxh3;

use super::{
    super::{Error, Result},
    Keyspaces,
};
use crate::tasks::lock;

const CHUNK_BYTES: usize = 256 << 10;

/// The damage that was found while the store is in use.
pub(super) struct Damage {
    keyspaces: Keyspaces,
    is_found: AtomicBool,
    reason: Arc<Mutex<String>>,
}

impl Damage {
    pub(super) fn new(keyspaces: Keyspaces) -> Self {
        metrics::gauge!("chat_store_damaged").set(0.0);
        Self {
            keyspaces,
            is_found: AtomicBool::new(false),
            reason: Arc::default(),
        }
    }

    pub(super) fn is_found(&self) -> bool {
        self.is_found.load(Ordering::Relaxed)
    }

    /// Returns an error if a damage was found.
    pub(super) fn healthy(&self) -> Result<()> {
        if !self.is_found() {
            return Ok(());
        }
        Err(Error::Corrupt {
            operation: "read",
            reason: lock(&self.reason).clone(),
        })
    }

    /// Returns the error of an operation whose read failed, and notes the damage if that is the reason.
    pub(super) fn not_read(&self, operation: &'static str, error: &fjall::Error) -> Error {
        let reason = describe(error);
        if is_damage(error) {
            self.found(&reason);
            return Error::Corrupt { operation, reason };
        }
        Error::Unavailable { operation, reason }
    }

    /// Notes the first damage, and starts to look for the damaged files.
    pub(super) fn found(&self, text: &str) {
        if self.is_found.swap(true, Ordering::Relaxed) {
            return;
        }
        metrics::gauge!("chat_store_damaged").set(1.0);
        text.clone_into(&mut lock(&self.reason));
        tracing::error!(
            error = text,
            "the store is damaged; looking for the damaged files"
        );
        let (keyspaces, reason) = (self.keyspaces.clone(), self.reason.clone());
        let look = move || {
            let (_, damages) = damaged_tables(&keyspaces);
            for damage in &damages {
                tracing::error!(damage, "the store is damaged: restore a backup");
            }
            if !damages.is_empty() {
                *lock(&reason) = damages.join("; ");
            }
        };
        let looking = thread::Builder::new()
            .name("store-check".into())
            .spawn(look);
        if let Err(error) = looking {
            tracing::warn!(%error, "could not look for the damaged files");
        }
    }
}

/// Reads all tables, and returns their number and a text for each that is damaged.
pub(super) fn damaged_tables(keyspaces: &Keyspaces) -> (usize, Vec<String>) {
    let mut damages = Vec::new();
    let mut count = 0;
    for keyspace in [&keyspaces.log, &keyspaces.rows] {
        // The version keeps its tables from being removed.
        let version = keyspace.tree.current_version();
        for table in version.iter_tables() {
            count += 1;
            let path: &Path = &table.path;
            match hash(path) {
                Ok(hash) if hash == table.checksum().into_u128() => {}
                Ok(_) => damages.push(format!(
                    "{} has other bytes than were written",
                    path.display()
                )),
                Err(error) => damages.push(format!("{}: {error}", path.display())),
            }
        }
    }
    (count, damages)
}

fn hash(path: &Path) -> io::Result<u128> {
    let mut file = File::open(path)?;
    let mut hash = Xxh3::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let read = file.read(&mut chunk)?;
        if read == 0 {
            return Ok(hash.digest128());
        }
        hash.update(&chunk[..read]);
    }
}

/// Returns the error for a directory with these damages.
pub(super) fn found(path: &Path, damages: &[String]) -> Error {
    Error::Corrupt {
        operation: "open",
        reason: format!(
            "{}. Restore a backup of {}, or see \"Damage\" in docs/deployment.md",
            damages.join("; "),
            path.display()
        ),
    }
}

/// Returns the error for a directory that cannot be opened.
pub(super) fn not_opened(path: &Path, error: &fjall::Error) -> Error {
    let path_text = path.display();
    if is_damage(error) {
        return found(path, &[format!("{path_text}: {}", describe(error))]);
    }
    let reason = match error {
        fjall::Error::Locked => format!("{path_text} is in use by another process"),
        other => format!("{path_text}: {}", describe(other)),
    };
    Error::Unusable { reason }
}

/// Whether an error means that files of the store are missing or have other bytes than were written.
fn is_damage(error: &fjall::Error) -> bool {
    let io = |error: &io::Error| {
        use io::ErrorKind::{InvalidData, NotFound, UnexpectedEof};
        matches!(error.kind(), InvalidData | NotFound | UnexpectedEof)
    };
    match error {
        fjall::Error::Io(error) | fjall::Error::Storage(LsmError::Io(error)) => io(error),
        fjall::Error::Locked | fjall::Error::Poisoned | fjall::Error::KeyspaceDeleted => false,
        _ => true,
    }
}

/// Describes an error for operators.
pub(super) fn describe(error: &fjall::Error) -> String {
    match error {
        fjall::Error::Io(error) | fjall::Error::Storage(LsmError::Io(error)) => error.to_string(),
        fjall::Error::Storage(LsmError::ChecksumMismatch { .. }) => {
            "a block of a table has other bytes than were written".into()
        }
        fjall::Error::Storage(LsmError::Unrecoverable) => "files of tables are missing".into(),
        fjall::Error::Storage(_) => "a table cannot be read".into(),
        fjall::Error::JournalRecovery(_) => {
            "a journal (*.jnl) has other bytes than were written".into()
        }
        fjall::Error::InvalidVersion(_) => {
            "the file \"version\" is not that of a store of this gateway".into()
        }
        fjall::Error::Poisoned => "an earlier write failed".into(),
        fjall::Error::Locked => "it is in use by another process".into(),
        _ => "its files cannot be read".into(),
    }
}
