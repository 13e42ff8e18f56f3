//! The bytes of files in a directory of this machine:
//!
//! | path | content |
//! |---|---|
//! | `incoming/<id>` | an upload that is not complete |
//! | `files/<id>/original` | a complete file |
//! | `files/<id>/thumbnail` | its thumbnail |
//! | `signing.key` | the secret that signs addresses, unless one is set |
//!
//! An upload cannot change a complete file, because it is moved first.

use std::{
    fs, io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::fs::File;

use super::{
    signing::Variant,
    upload::Upload,
    writing::{Writers, Writing},
};
use crate::{model::AttachmentId, private};

pub(super) const INCOMING: &str = "incoming";
pub(super) const FILES: &str = "files";
const SECRET: &str = "signing.key";
const SECRET_BYTES: usize = 32;
/// Files that uploads leave for others on the disk.
const FILES_FREE_MIN: u64 = 10_000;

/// A directory for the bytes of files.
#[derive(Debug)]
pub struct Directory {
    root: PathBuf,
    /// Bytes of the disk that uploads leave free.
    free_min: u64,
    writers: Writers,
}

impl Directory {
    /// Opens the directory, and creates it if necessary.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn open(root: &Path, free_min: u64) -> io::Result<Self> {
        fs::create_dir_all(root.join(INCOMING))?;
        fs::create_dir_all(root.join(FILES))?;
        // There may be many files, so they are only looked at if others can reach them.
        if private::is_open_to_others(root) {
            private::restrict_all(root);
        }
        for path in [INCOMING, FILES, SECRET] {
            private::restrict(&root.join(path));
        }
        sync_directory(root)?;
        Ok(Self {
            root: root.to_owned(),
            free_min,
            writers: Writers::default(),
        })
    }

    /// Returns the secret of the directory, which signs addresses. It is made once.
    ///
    /// # Errors
    /// The error of the file system, or of the source of random numbers.
    pub fn secret(&self) -> io::Result<Vec<u8>> {
        let path = self.root.join(SECRET);
        match fs::read(&path) {
            Ok(secret) if secret.len() >= SECRET_BYTES => return Ok(secret),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let mut secret = vec![0; SECRET_BYTES];
        aws_lc_rs::rand::fill(&mut secret).map_err(io::Error::other)?;
        let new = path.with_extension("new");
        let mut file = fs::OpenOptions::new()
            .mode(0o600)
            .create(true)
            .truncate(true)
            .write(true)
            .open(&new)?;
        io::Write::write_all(&mut file, &secret)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        sync_directory(&self.root)?;
        Ok(secret)
    }

    fn incoming(&self, id: AttachmentId) -> PathBuf {
        self.root.join(INCOMING).join(id.to_string())
    }

    fn folder(&self, id: AttachmentId) -> PathBuf {
        self.root.join(FILES).join(id.to_string())
    }

    /// Returns the path of a complete file, whether it exists or not.
    #[must_use]
    pub fn path(&self, id: AttachmentId, variant: Variant) -> PathBuf {
        self.folder(id).join(variant.name())
    }

    /// Returns whether the disk has room for so many bytes more.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn has_room(&self, bytes: u64) -> io::Result<bool> {
        let disk = rustix::fs::statvfs(&self.root)?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        // A file system without a number of files says 0.
        let has_files = disk.f_files == 0 || disk.f_favail > FILES_FREE_MIN;
        Ok(has_files && free >= bytes.saturating_add(self.free_min))
    }

    /// Begins an upload.
    ///
    /// # Errors
    /// The error of the file system.
    pub async fn begin(&self, id: AttachmentId) -> io::Result<()> {
        File::create_new(self.incoming(id)).await.map(drop)
    }

    /// Returns the bytes of an upload that have come. `None` if there is no such upload: it is complete, was given up, or
    /// never began.
    ///
    /// # Errors
    /// The error of the file system.
    pub async fn received(&self, id: AttachmentId) -> io::Result<Option<u64>> {
        match tokio::fs::metadata(self.incoming(id)).await {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the right to write to an upload, unless someone else has it.
    #[must_use]
    pub fn take(&self, id: AttachmentId) -> Option<Writing> {
        self.writers.take(id)
    }

    /// Opens an upload to continue it.
    ///
    /// # Errors
    /// The error of the file system.
    pub async fn resume(&self, writing: &Writing) -> io::Result<Upload> {
        let path = self.incoming(writing.id());
        let opened = blocking(move || {
            let mut file = fs::File::options().write(true).open(path)?;
            let len = io::Seek::seek(&mut file, io::SeekFrom::End(0))?;
            Ok((file, len))
        });
        let (file, len) = opened.await?;
        Ok(Upload::new(file, len, writing.clone()))
    }

    /// Makes the bytes of an upload durable, and moves them to where no upload can change them. It may be repeated.
    /// Returns the SHA-256 of the file in hexadecimal, if the upload knows it.
    ///
    /// # Errors
    /// The error of the file system.
    pub async fn complete(
        &self,
        writing: &Writing,
        size: u64,
        upload: Option<Upload>,
    ) -> io::Result<Option<String>> {
        let sha256 = match upload {
            Some(upload) => upload.finish().await?,
            None => None,
        };
        let (from, folder) = (self.incoming(writing.id()), self.folder(writing.id()));
        let root = self.root.clone();
        let moved = blocking(move || {
            if let Ok(metadata) = fs::metadata(&from)
                && metadata.len() != size
            {
                return Err(io::Error::other(
                    "an upload has another size than announced",
                ));
            }
            fs::create_dir_all(&folder)?;
            match fs::rename(&from, folder.join(Variant::Original.name())) {
                // An attempt before this one moved it.
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound
                        && folder.join(Variant::Original.name()).exists() => {}
                Err(error) => {
                    // It was given up meanwhile. Only an empty folder is removed.
                    let _ = fs::remove_dir(&folder);
                    return Err(error);
                }
                Ok(()) => {}
            }
            sync_directory(&folder)?;
            sync_directory(&root.join(FILES))?;
            sync_directory(&root.join(INCOMING))
        });
        moved.await.map(|()| sha256)
    }

    /// Replaces a variant of a complete file by other bytes, durably.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn replace(&self, id: AttachmentId, variant: Variant, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(id, variant);
        let new = path.with_extension("new");
        let mut file = fs::File::create(&new)?;
        io::Write::write_all(&mut file, bytes)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        sync_directory(&self.folder(id))
    }

    /// Removes uploads that are not complete and to which nothing was written for so long.
    ///
    /// # Errors
    /// The error of the file system.
    pub async fn remove_old_uploads(&self, age: Duration) -> io::Result<()> {
        let incoming = self.root.join(INCOMING);
        blocking(move || {
            for entry in fs::read_dir(incoming)? {
                let entry = entry?;
                let Ok(metadata) = entry.metadata() else {
                    continue; // It was moved meanwhile.
                };
                let written = metadata.modified()?;
                if written.elapsed().is_ok_and(|since| since > age) {
                    if_there(fs::remove_file(entry.path()))?;
                }
            }
            Ok(())
        })
        .await
    }

    /// Removes all bytes of a file, complete or not. It may be repeated.
    ///
    /// # Errors
    /// The error of the file system.
    pub async fn erase(&self, id: AttachmentId) -> io::Result<()> {
        let (incoming, folder, root) = (self.incoming(id), self.folder(id), self.root.clone());
        blocking(move || {
            if_there(fs::remove_file(incoming))?;
            if_there(fs::remove_dir_all(folder))?;
            sync_directory(&root.join(FILES))?;
            sync_directory(&root.join(INCOMING))
        })
        .await
    }
}

fn if_there(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Makes the names of the files in a directory durable.
fn sync_directory(path: &Path) -> io::Result<()> {
    fs::File::open(path)?.sync_all()
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_upload_is_resumed_completed_and_erased() {
        let root = tempfile::tempdir().unwrap();
        let directory = Directory::open(root.path(), 0).unwrap();
        let id = AttachmentId(uuid::Uuid::new_v4());
        assert_eq!(directory.received(id).await.unwrap(), None);
        directory.begin(id).await.unwrap();
        let writing = directory.take(id).unwrap();
        assert!(directory.take(id).is_none(), "there is one writer");
        let mut upload = directory.resume(&writing).await.unwrap();
        upload.append(b"hello ").await.unwrap();
        upload.flush().await.unwrap();
        drop((upload, writing));
        assert_eq!(directory.received(id).await.unwrap(), Some(6));
        let writing = directory.take(id).unwrap();
        let mut upload = directory.resume(&writing).await.unwrap();
        assert_eq!(upload.len, 6);
        upload.append(b"world").await.unwrap();
        directory
            .complete(&writing, 11, Some(upload))
            .await
            .unwrap();
        directory.complete(&writing, 11, None).await.unwrap();
        let path = directory.path(id, Variant::Original);
        assert_eq!(fs::read(&path).unwrap(), b"hello world");
        assert_eq!(directory.received(id).await.unwrap(), None);
        directory.replace(id, Variant::Thumbnail, b"small").unwrap();
        directory.erase(id).await.unwrap();
        directory.erase(id).await.unwrap();
        assert!(!path.exists());
        assert_eq!(fs::read_dir(root.path().join(FILES)).unwrap().count(), 0);
        assert_eq!(fs::read_dir(root.path().join(INCOMING)).unwrap().count(), 0);
    }

    #[test]
    fn a_full_disk_has_no_room() {
        let root = tempfile::tempdir().unwrap();
        let directory = Directory::open(root.path(), 0).unwrap();
        assert!(directory.has_room(1).unwrap());
        assert!(!directory.has_room(u64::MAX).unwrap());
    }
}
