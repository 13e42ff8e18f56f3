//! Keeps the files of the gateway from other users of the machine: directories get mode 0700 and files 0600.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use rustix::{fs::Mode, process::umask};

/// The rights of all users but the owner.
const OTHERS: u32 = 0o077;

/// Creates new files and directories without rights for others, whatever the umask was. It must be called before there
/// are other threads.
pub fn restrict_new_files() {
    umask(Mode::RWXG | Mode::RWXO);
}

/// Takes the rights of others from a file or directory that an earlier build, or someone else, made. An error is only
/// logged, because some file systems have no modes.
pub fn restrict(path: &Path) {
    tell(restrict_one(path));
}

/// Takes the rights of others from the files that are directly in a directory.
pub fn restrict_files(directory: &Path) {
    let each = entries(directory)
        .into_iter()
        .filter(|path| path.is_file())
        .map(|path| restrict_one(&path));
    tell(each.collect());
}

/// Takes the rights of others from everything in a directory, and in the end from the directory itself.
pub fn restrict_all(directory: &Path) {
    tell(restrict_tree(directory));
}

/// Returns whether others have rights on a file or directory.
#[must_use]
pub fn is_open_to_others(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.permissions().mode() & OTHERS != 0)
}

fn restrict_tree(path: &Path) -> Result<(), (PathBuf, io::Error)> {
    for entry in entries(path) {
        match fs::symlink_metadata(&entry) {
            Ok(metadata) if metadata.is_dir() => restrict_tree(&entry)?,
            Ok(metadata) if metadata.is_file() => restrict_one(&entry)?,
            // A link leads elsewhere, and a file may be removed meanwhile.
            Ok(_) | Err(_) => {}
        }
    }
    restrict_one(path)
}

fn restrict_one(path: &Path) -> Result<(), (PathBuf, io::Error)> {
    let restricted = fs::metadata(path).and_then(|metadata| {
        let mode = metadata.permissions().mode();
        if mode & OTHERS == 0 {
            return Ok(());
        }
        fs::set_permissions(path, Permissions::from_mode(mode & 0o7700))
    });
    match restricted {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err((path.to_owned(), error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

fn tell(restricted: Result<(), (PathBuf, io::Error)>) {
    if let Err((path, error)) = restricted {
        tracing::warn!(path = %path.display(), %error, "other users of this machine may have access to a file");
    }
}
