//! Files of this machine, for `chat-gateway import`.

use std::{io, path::Path, sync::Arc};

use axum::response::Response;
use tokio::{
    fs::File,
    io::{AsyncReadExt as _, AsyncSeekExt as _},
};

use super::{Files, bucket, inspect, storage::Storage, turns::Patience};
use crate::{
    clock,
    files::{Bucket, Directory, missing},
    model::{AttachmentId, FileFacts, FileState},
};

/// Bytes that are copied at once.
const PART_BYTES: usize = 1 << 20;

impl Files {
    /// The largest file, in bytes.
    #[must_use]
    pub fn size_max(&self) -> u64 {
        self.settings.size_max()
    }

    /// Keeps a file of this machine as if its uploader had uploaded it. Messages may have it then. The file must have the
    /// size of the facts.
    ///
    /// # Errors
    /// The error of the file, the storage or the store; what kept the file from becoming ready.
    pub async fn keep(
        self: &Arc<Self>,
        mut facts: FileFacts,
        path: &Path,
    ) -> io::Result<AttachmentId> {
        let mut source = File::open(path).await?;
        let id = AttachmentId(uuid::Uuid::new_v4());
        facts.upload = self.storage.begin(id, facts.size).await?;
        // Rule [upload-work]: if the import ends here, a sweep erases the file.
        let created = self.store.create_file(id, &facts, clock::today());
        created.await.map_err(io::Error::other)?;
        let state = match &self.storage {
            Storage::Directory(directory) => self.copy(directory, id, &facts, &mut source).await?,
            Storage::Bucket(bucket) => {
                send(bucket, id, &facts, &mut source).await?;
                bucket::complete(self, bucket, id, &facts, Patience::Waits).await
            }
        };
        match state {
            Ok(FileState::Ready) => Ok(id),
            Ok(FileState::Blocked) => Err(io::Error::other("the scanner blocks the file")),
            Ok(FileState::Scanning) => Err(io::Error::other("the file could not be scanned")),
            Ok(state) => Err(io::Error::other(format!("the file is {state:?}"))),
            Err(response) => Err(failed(&response)),
        }
    }

    async fn copy(
        self: &Arc<Self>,
        directory: &Arc<Directory>,
        id: AttachmentId,
        facts: &FileFacts,
        source: &mut File,
    ) -> io::Result<Result<FileState, Response>> {
        let writing = directory.take(id).ok_or(io::ErrorKind::ResourceBusy)?;
        let mut upload = directory.resume(&writing).await?;
        let mut part = vec![0; PART_BYTES];
        loop {
            let read = source.read(&mut part).await?;
            if read == 0 {
                break;
            }
            if upload.len + read as u64 > facts.size {
                return Err(io::Error::other("the file grows"));
            }
            upload.append(&part[..read]).await?;
        }
        let (upload, patience) = (Some(upload), Patience::Waits);
        let done = inspect::complete(self, directory, id, facts, &writing, upload, patience);
        Ok(done.await)
    }
}

/// Sends the parts of a file to a bucket.
async fn send(
    bucket: &Bucket,
    id: AttachmentId,
    facts: &FileFacts,
    source: &mut File,
) -> io::Result<()> {
    let upload = facts.upload.as_deref().unwrap_or_default();
    for part in missing(facts.size, &[]) {
        let size = usize::try_from(part.size).map_err(io::Error::other)?;
        let mut bytes = vec![0; size];
        source.seek(io::SeekFrom::Start(part.offset)).await?;
        source.read_exact(&mut bytes).await?;
        bucket.send(id, upload, part, bytes.into()).await?;
    }
    Ok(())
}

fn failed(response: &Response) -> io::Error {
    let status = response.status();
    io::Error::other(format!(
        "the file did not become ready: {status}, see the log"
    ))
}
