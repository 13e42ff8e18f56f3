//! The place of the bytes: a directory of this machine, or a bucket.

use std::{io, sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::response::Response;

use super::{Files, disk_failed, storage_failed};
use crate::{
    clock, config,
    files::{Bucket, Directory, missing},
    model::{AttachmentId, FileFacts},
    store::Store,
};

pub(super) enum Storage {
    Directory(Arc<Directory>),
    Bucket(Arc<Bucket>),
}

/// The bytes of files, as erasing sees them.
#[async_trait]
pub trait FileBytes: Send + Sync {
    /// Whether they are in a bucket, where writes may arrive late.
    fn is_bucket(&self) -> bool;

    /// Returns the bytes of an upload that have come. `None` if there is no such upload: it is complete, or was given up.
    async fn received(&self, id: AttachmentId, facts: &FileFacts) -> io::Result<Option<u64>>;

    /// Removes all bytes of a file, complete or not. It may be repeated.
    async fn erase(&self, id: AttachmentId, upload: Option<&str>) -> io::Result<()>;

    /// Removes uploads to which nothing was written for so long. In a bucket its lifecycle rule does that.
    async fn remove_old_uploads(&self, age: Duration) -> io::Result<()>;
}

impl Storage {
    /// Opens the storage of the settings. `None` if they turn uploads off.
    pub(super) fn open(config: &config::Config) -> io::Result<Option<Self>> {
        if let Some(settings) = config.bucket() {
            return Ok(Some(Self::Bucket(Arc::new(Bucket::open(settings)?))));
        }
        let Some(path) = config.attachments_path() else {
            return Ok(None);
        };
        let directory = Directory::open(&path, config.attachments.min_free_mib << 20)?;
        Ok(Some(Self::Directory(Arc::new(directory))))
    }

    pub(super) fn directory(&self) -> Option<&Arc<Directory>> {
        match self {
            Self::Directory(directory) => Some(directory),
            Self::Bucket(_) => None,
        }
    }

    pub(super) fn bucket(&self) -> Option<&Arc<Bucket>> {
        match self {
            Self::Directory(_) => None,
            Self::Bucket(bucket) => Some(bucket),
        }
    }

    /// Returns the answer to a request in which the storage failed.
    pub(super) fn failed(&self, error: &io::Error) -> Response {
        match self {
            Self::Directory(_) => disk_failed(error),
            Self::Bucket(_) => storage_failed(error),
        }
    }

    /// Begins an upload of so many bytes. Returns the id of an upload to a bucket, if parts are to be sent there.
    pub(super) async fn begin(&self, id: AttachmentId, size: u64) -> io::Result<Option<String>> {
        match self {
            // Rule [incoming-once]: nothing else creates the file in the directory.
            Self::Directory(directory) => directory.begin(id).await.map(|()| None),
            // It has no parts, so nothing would end it.
            Self::Bucket(_) if size == 0 => Ok(None),
            Self::Bucket(bucket) => bucket.begin(id).await.map(Some),
        }
    }
}

#[async_trait]
impl FileBytes for Storage {
    fn is_bucket(&self) -> bool {
        self.bucket().is_some()
    }

    async fn received(&self, id: AttachmentId, facts: &FileFacts) -> io::Result<Option<u64>> {
        match (self, &facts.upload) {
            (Self::Directory(directory), _) => directory.received(id).await,
            (Self::Bucket(_), None) => Ok(None),
            (Self::Bucket(bucket), Some(upload)) => {
                let stored = bucket.parts(id, upload).await?;
                Ok(stored.map(|stored| {
                    let left = missing(facts.size, &stored).map(|part| part.size);
                    facts.size.saturating_sub(left.sum())
                }))
            }
        }
    }

    async fn erase(&self, id: AttachmentId, upload: Option<&str>) -> io::Result<()> {
        match self {
            Self::Directory(directory) => directory.erase(id).await,
            Self::Bucket(bucket) => bucket.erase(id, upload).await,
        }
    }

    async fn remove_old_uploads(&self, age: Duration) -> io::Result<()> {
        match self {
            Self::Directory(directory) => directory.remove_old_uploads(age).await,
            Self::Bucket(_) => Ok(()),
        }
    }
}

#[async_trait]
impl FileBytes for Files {
    fn is_bucket(&self) -> bool {
        self.storage.is_bucket()
    }

    async fn received(&self, id: AttachmentId, facts: &FileFacts) -> io::Result<Option<u64>> {
        self.storage.received(id, facts).await
    }

    async fn erase(&self, id: AttachmentId, upload: Option<&str>) -> io::Result<()> {
        let _place = self.finishing.acquire().await;
        self.storage.erase(id, upload).await
    }

    async fn remove_old_uploads(&self, age: Duration) -> io::Result<()> {
        self.storage.remove_old_uploads(age).await
    }
}

/// Removes the bytes of a file, whose upload to a bucket has this id.
pub(super) async fn erase_bytes(
    store: &dyn Store,
    bytes: &dyn FileBytes,
    file: AttachmentId,
    upload: Option<&str>,
) -> io::Result<()> {
    if bytes.is_bucket() {
        // Rule [erase-again]: what arrives late is removed by the sweep of this day.
        let work = store.add_work(clock::today(), file);
        work.await.map_err(io::Error::other)?;
    }
    bytes.erase(file, upload).await
}
