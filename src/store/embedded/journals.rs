//! Finds journals that were removed, truncated or changed while no process had the directory open. After a crash fjall
//! ignores the end of a journal that cannot be read, because its last writes may be incomplete. After a clean stop nothing is
//! incomplete, so a file in the directory has the length and a checksum of each journal then. It also has the files without
//! which fjall takes the directory, or one of its keyspaces, for a new one, and removes the tables.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

/// The file with the state of the journals.
const STATE: &str = "journals.json";
/// The file that fjall makes last in a new directory.
const VERSION: &str = "version";
const EXTENSION: &str = "jnl";
/// The file that a process with the directory open has locked, and the directory of the tables.
const LOCK: &str = "lock";
const KEYSPACES: &str = "keyspaces";
/// The file of a keyspace that names its tables.
const CURRENT: &str = "current";
const TABLES: &str = "tables";
/// The keyspace that fjall makes first. It has the names of the others.
const FIRST_KEYSPACE: &str = "0";
const CHUNK_BYTES: usize = 256 << 10;

#[derive(Serialize, Deserialize)]
struct State {
    /// The number of the journal that was written to. It exists until a later one does.
    active: u64,
    /// The journals at a clean stop. Empty while a process has the directory open, and after a crash.
    stopped: Vec<Journal>,
    /// The files that exist, and are not empty, since the directory was made.
    #[serde(default)]
    bases: Vec<PathBuf>,
}

#[derive(PartialEq, Serialize, Deserialize)]
struct Journal {
    number: u64,
    bytes: u64,
    xxh3: String,
}

/// Removes what a process left that died while it made the directory. fjall makes the lock, `keyspaces`, a journal and the
/// version, in this order, and everything else later; it cannot open a directory with only some of them.
pub(super) fn clear_beginnings(directory: &Path) -> io::Result<()> {
    let version = directory.join(VERSION);
    let state = read(directory)?;
    if is_there(&version)? || state.as_ref().is_some_and(|state| !state.bases.is_empty()) {
        return make_lock_again(directory, state.as_ref());
    }
    let lock = match File::open(directory.join(LOCK)) {
        Ok(lock) => lock,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    // The lock ends with the file. Who has it is making the directory.
    let is_abandoned = lock.try_lock().is_ok();
    let has_tables = !keyspaces(directory)?.is_empty();
    let first = file(directory, 0);
    if !is_abandoned || has_tables || numbers(directory)?.iter().any(|&n| n > 0) {
        return Ok(());
    }
    remove(&version)?;
    remove(&first)
}

/// Makes the lock, which has no content, if it is missing after a clean stop. Otherwise a process may still have the removed
/// one.
fn make_lock_again(directory: &Path, state: Option<&State>) -> io::Result<()> {
    let lock = directory.join(LOCK);
    if lock.try_exists()? || state.is_none_or(|state| state.stopped.is_empty()) {
        return Ok(());
    }
    File::create(lock).map(drop)
}

/// Returns what is wrong with the journals, with their files.
///
/// # Errors
/// The error of the file system.
pub(super) fn damages(directory: &Path) -> io::Result<Vec<String>> {
    let state = read(directory)?;
    let keyspaces = keyspaces(directory)?;
    if is_new(directory, state.as_ref(), &keyspaces)? {
        return Ok(Vec::new());
    }
    let mut damages = missing_bases(directory, state.as_ref(), &keyspaces)?;
    let numbers = numbers(directory)?;
    let Some(&newest) = numbers.last() else {
        let missing = directory.join("*.jnl");
        damages.push(format!("{} is missing", missing.display()));
        return Ok(damages);
    };
    let Some(state) = state else {
        return Ok(damages);
    };
    let missing = |number| format!("{} is missing", file(directory, number).display());
    if newest < state.active && state.stopped.is_empty() {
        damages.push(missing(state.active));
    }
    for then in &state.stopped {
        if !numbers.contains(&then.number) {
            damages.push(missing(then.number));
            continue;
        }
        let now = Journal::read(directory, then.number)?;
        let path = file(directory, then.number);
        if now.bytes != then.bytes {
            damages.push(format!(
                "{} has {} bytes, and had {} when the gateway stopped",
                path.display(),
                now.bytes,
                then.bytes
            ));
        } else if now != *then {
            let path = path.display();
            damages.push(format!("{path} was changed after the gateway stopped"));
        }
    }
    Ok(damages)
}

/// Whether nothing was ever stored in a directory.
fn is_new(directory: &Path, state: Option<&State>, keyspaces: &[OsString]) -> io::Result<bool> {
    Ok(state.is_none() && keyspaces.is_empty() && !is_there(&directory.join(VERSION))?)
}

/// Returns which files are missing or empty without which fjall removes tables.
fn missing_bases(
    directory: &Path,
    state: Option<&State>,
    keyspaces: &[OsString],
) -> io::Result<Vec<String>> {
    let mut bases = vec![PathBuf::from(VERSION)];
    bases.extend(state.into_iter().flat_map(|state| state.bases.clone()));
    // Also of a directory of which nothing is recorded: a keyspace that is being made has no tables, and the first one names
    // the others.
    for keyspace in keyspaces {
        let mut tables = names(&directory.join(KEYSPACES).join(keyspace).join(TABLES))?;
        if tables.next().is_some() {
            bases.push(current_of(keyspace));
        }
    }
    if keyspaces.iter().any(|keyspace| keyspace != FIRST_KEYSPACE) {
        bases.push(current_of(FIRST_KEYSPACE.as_ref()));
    }
    bases.sort_unstable();
    bases.dedup();
    let mut missing = Vec::new();
    for base in bases {
        let path = directory.join(base);
        if !is_there(&path)? {
            missing.push(format!("{} is missing or empty", path.display()));
        }
    }
    Ok(missing)
}

/// Records that a process will open the directory: from then on journals whose writes are in tables may vanish.
pub(super) fn record_opening(directory: &Path) -> io::Result<()> {
    if !is_there(&directory.join(VERSION))? {
        return Ok(());
    }
    let bases = read(directory)?.map(|state| state.bases);
    record(directory, Vec::new(), bases.unwrap_or_default())
}

/// Records that a process has opened the directory. What fjall did not want is removed by now.
pub(super) fn record_open(directory: &Path) -> io::Result<()> {
    let mut bases = vec![PathBuf::from(VERSION)];
    for keyspace in keyspaces(directory)? {
        let current = current_of(&keyspace);
        if is_there(&directory.join(&current))? {
            bases.push(current);
        }
    }
    record(directory, Vec::new(), bases)
}

/// Records a clean stop. The database must be closed: its threads change journals after the last write.
pub(super) fn record_stopped(directory: &Path) -> io::Result<()> {
    let journals = numbers(directory)?.into_iter();
    let stopped = journals.map(|n| Journal::read(directory, n));
    let stopped = stopped.collect::<io::Result<_>>()?;
    let bases = read(directory)?.map(|state| state.bases);
    record(directory, stopped, bases.unwrap_or_default())
}

/// Lets the directory be opened with the journals that it has. Returns which other files are missing; then it does nothing.
pub(super) fn accept(directory: &Path) -> io::Result<Vec<String>> {
    let state = read(directory)?;
    let keyspaces = keyspaces(directory)?;
    if is_new(directory, state.as_ref(), &keyspaces)? {
        return Ok(Vec::new());
    }
    let missing = missing_bases(directory, state.as_ref(), &keyspaces)?;
    if !missing.is_empty() {
        return Ok(missing);
    }
    if numbers(directory)?.is_empty() {
        // With an empty journal fjall reads the tables. Without one it would take the directory for a new one.
        let number = state.as_ref().map_or(0, |state| state.active);
        File::create_new(file(directory, number))?.sync_all()?;
    }
    let bases = state.map_or_else(Vec::new, |state| state.bases);
    record(directory, Vec::new(), bases)?;
    Ok(missing)
}

fn record(directory: &Path, stopped: Vec<Journal>, bases: Vec<PathBuf>) -> io::Result<()> {
    let active = numbers(directory)?.last().copied().unwrap_or_default();
    let state = State {
        active,
        stopped,
        bases,
    };
    write(directory, &state)
}

/// Returns the path of the file that names the tables of a keyspace.
fn current_of(keyspace: &OsStr) -> PathBuf {
    Path::new(KEYSPACES).join(keyspace).join(CURRENT)
}

/// Returns the names of the keyspaces. Other files are nobody's.
fn keyspaces(directory: &Path) -> io::Result<Vec<OsString>> {
    let folder = directory.join(KEYSPACES);
    let is_folder = |name: &OsString| folder.join(name).is_dir();
    Ok(names(&folder)?.filter(is_folder).collect())
}

/// Returns the names in a folder, if there is one.
fn names(folder: &Path) -> io::Result<impl Iterator<Item = OsString> + use<>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    Ok(entries.into_iter().map(|entry| entry.file_name()))
}

/// Whether a file exists and is not empty.
fn is_there(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(file) => Ok(file.len() > 0),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

impl Journal {
    fn read(directory: &Path, number: u64) -> io::Result<Self> {
        let mut file = File::open(file(directory, number))?;
        let mut hash = Xxh3::new();
        let mut bytes = 0;
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let read = file.read(&mut chunk)?;
            if read == 0 {
                break;
            }
            hash.update(&chunk[..read]);
            bytes += read as u64;
        }
        Ok(Self {
            number,
            bytes,
            xxh3: format!("{:016x}", hash.digest()),
        })
    }
}

/// Removes a file if it is there.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn file(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("{number}.{EXTENSION}"))
}

/// Returns the numbers of the journals, in order.
fn numbers(directory: &Path) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let is_journal = path.extension().is_some_and(|end| end == EXTENSION);
        let number = path
            .file_stem()
            .and_then(|stem| stem.to_str()?.parse::<u64>().ok());
        numbers.extend(number.filter(|_| is_journal));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Returns the recorded state. `None` if there is none, or if the file is damaged: then less is noticed.
fn read(directory: &Path) -> io::Result<Option<State>> {
    match fs::read(directory.join(STATE)) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn write(directory: &Path, state: &State) -> io::Result<()> {
    let new = directory.join(format!("{STATE}.new"));
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(state).map_err(io::Error::other)?)?;
    file.sync_all()?;
    fs::rename(&new, directory.join(STATE))?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_first_start_left_is_removed() {
        let directory = tempfile::tempdir().expect("creates a directory");
        let path = directory.path();
        for name in [LOCK, "0.jnl"] {
            fs::write(path.join(name), "").expect("writes");
        }
        let making = File::open(path.join(LOCK)).expect("opens");
        making.lock().expect("locks");
        clear_beginnings(path).expect("looks");
        assert_eq!(
            numbers(path).expect("looks"),
            [0],
            "another process makes it"
        );
        drop(making);
        fs::create_dir_all(path.join(KEYSPACES).join("0")).expect("creates");
        clear_beginnings(path).expect("looks");
        assert_eq!(numbers(path).expect("looks"), [0], "there are tables");
        fs::remove_dir(path.join(KEYSPACES).join("0")).expect("removes");
        fs::write(path.join(VERSION), "").expect("writes");
        clear_beginnings(path).expect("looks");
        let left = [LOCK, KEYSPACES].map(|name| path.join(name).exists());
        assert!(numbers(path).expect("looks").is_empty() && left == [true, true]);
        assert!(!path.join(VERSION).exists());
    }

    #[test]
    fn a_journal_may_vanish_only_while_a_process_has_the_directory_open() {
        let directory = tempfile::tempdir().expect("creates a directory");
        let path = directory.path();
        for name in [VERSION, "3.jnl", "4.jnl"] {
            fs::write(path.join(name), name).expect("writes");
        }
        record_stopped(path).expect("records");
        assert_eq!(damages(path).expect("looks"), Vec::<String>::new());
        for number in [3, 4] {
            let (there, away) = (file(path, number), path.join("away"));
            fs::rename(&there, &away).expect("moves");
            let found = damages(path).expect("looks");
            assert_eq!(found, [format!("{} is missing", there.display())]);
            fs::rename(&away, &there).expect("moves");
        }
        record_opening(path).expect("records");
        fs::remove_file(file(path, 3)).expect("removes");
        assert_eq!(damages(path).expect("looks"), Vec::<String>::new());
        // The one that was written to exists until a later one does.
        fs::rename(file(path, 4), file(path, 3)).expect("moves");
        assert_eq!(damages(path).expect("looks").len(), 1);
    }

    /// A directory that a process has opened, with two keyspaces.
    fn opened() -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("creates a directory");
        let path = directory.path();
        for keyspace in ["0", "1"] {
            let tables = path.join(KEYSPACES).join(keyspace).join(TABLES);
            fs::create_dir_all(&tables).expect("creates");
            fs::write(tables.join("7"), "a table").expect("writes");
            fs::write(path.join(current_of(keyspace.as_ref())), "v1").expect("writes");
        }
        for name in [LOCK, VERSION, "0.jnl"] {
            fs::write(path.join(name), name).expect("writes");
        }
        record_open(path).expect("records");
        directory
    }

    #[test]
    fn a_keyspace_without_its_tables_is_a_damage_also_without_records() {
        for recorded in [true, false] {
            let directory = opened();
            let path = directory.path();
            if !recorded {
                fs::remove_file(path.join(STATE)).expect("removes");
            }
            assert_eq!(damages(path).expect("looks"), Vec::<String>::new());
            for keyspace in ["0", "1"] {
                let current = path.join(current_of(keyspace.as_ref()));
                fs::write(&current, "").expect("empties");
                let found = damages(path).expect("looks");
                let text = format!("{} is missing or empty", current.display());
                assert_eq!(found, [text]);
                fs::write(&current, "v1").expect("writes");
            }
            fs::remove_dir_all(path.join(KEYSPACES).join("0")).expect("removes");
            assert_eq!(damages(path).expect("looks").len(), 1);
        }
    }

    #[test]
    fn a_keyspace_that_was_being_made_is_no_damage() {
        let directory = opened();
        let path = directory.path();
        // One has a file, and fjall does not know its name yet. The other one has none. Somebody left a file there.
        let unnamed = path.join(KEYSPACES).join("2");
        fs::create_dir_all(unnamed.join(TABLES)).expect("creates");
        fs::write(unnamed.join(CURRENT), "v0").expect("writes");
        fs::create_dir_all(path.join(KEYSPACES).join("3")).expect("creates");
        fs::write(path.join(KEYSPACES).join(".DS_Store"), "").expect("writes");
        record_opening(path).expect("records");
        fs::remove_dir_all(&unnamed).expect("removes");
        assert_eq!(damages(path).expect("looks"), Vec::<String>::new());
        // A first start made nothing but the folder of the first keyspace.
        let directory = tempfile::tempdir().expect("creates a directory");
        let path = directory.path();
        fs::create_dir_all(path.join(KEYSPACES).join(FIRST_KEYSPACE)).expect("creates");
        for name in [LOCK, VERSION, "0.jnl"] {
            fs::write(path.join(name), name).expect("writes");
        }
        assert_eq!(damages(path).expect("looks"), Vec::<String>::new());
    }

    #[test]
    fn a_lock_is_made_again_only_after_a_clean_stop() {
        let directory = opened();
        let path = directory.path();
        fs::remove_file(path.join(LOCK)).expect("removes");
        clear_beginnings(path).expect("looks");
        assert!(!path.join(LOCK).exists(), "a gateway may run");
        record_stopped(path).expect("records");
        clear_beginnings(path).expect("looks");
        assert!(path.join(LOCK).exists());
    }
}
