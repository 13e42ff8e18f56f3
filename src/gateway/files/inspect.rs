//! What happens to a file when its bytes are complete: it is moved, looked at, cleaned of metadata, and becomes ready.

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
    sync::Arc,
};

use aws_lc_rs::digest;
use axum::response::Response;
use bytes::Bytes;
use tokio::time::timeout;

use super::{
    Files, bucket, disk_failed, no_such_file,
    picture::{Looked, NotLooked, plain, readable},
    rights::given_up,
    scan::{Scanned, scan},
    storage::Storage,
    store_failed,
    turns::Patience,
};
use crate::{
    files::{Directory, HEAD_BYTES, Upload, Variant, Writing, hexadecimal, sniff},
    model::{
        AttachmentId, FileFacts, FileNotice, FileResult, FileState,
        limits::{FILE_ANSWER_MAX, FILES_LATER_AT_ONCE, FILES_LATER_MAX},
    },
    protocol::ErrorCode,
    tasks::lock,
};

/// Bytes that are read at once to compute a hash.
const PART_BYTES: usize = 256 << 10;

impl Files {
    /// Records what a file is, and that messages may have it. Returns its state: it may be erasing meanwhile, which is a
    /// higher one.
    pub(super) async fn make_ready(
        &self,
        file: AttachmentId,
        result: &FileResult,
    ) -> Result<FileState, Response> {
        let recorded = async {
            self.store.set_file_result(file, result).await?;
            self.store.set_file_state(file, FileState::Ready).await?;
            self.row(file).await
        };
        let row = recorded.await.map_err(store_failed)?;
        let row = row.ok_or_else(no_such_file)?;
        if row.state == FileState::Ready {
            self.tell(&row.facts, FileNotice::ready(file, result));
        }
        Ok(row.state)
    }

    /// Has files scanned again for which the scanner was away, until it is away again.
    pub(super) fn scan_again(self: &Arc<Self>) {
        let mut waiting: Vec<_> = std::mem::take(&mut *lock(&self.unscanned))
            .into_iter()
            .collect();
        if waiting.is_empty() {
            return;
        }
        // So that a file that the scanner never takes does not keep the same ones waiting.
        let first = rand::random_range(0..waiting.len());
        waiting.rotate_left(first);
        let files = self.clone();
        self.tasks.spawn_until_drained(async move {
            let mut waiting = waiting.into_iter();
            while let Some(file) = waiting.next() {
                match files.row(file).await {
                    Ok(Some(row)) => again(&files, file, &row.facts, Patience::Leaves).await,
                    Ok(None) => {}
                    Err(_) => drop(lock(&files.unscanned).insert(file)),
                }
                let mut unscanned = lock(&files.unscanned);
                if unscanned.contains(&file) {
                    unscanned.extend(waiting);
                    return;
                }
            }
        });
    }

    /// Notes a file that is to be looked at when fewer wait.
    pub(super) fn look_later(&self, file: AttachmentId) {
        let mut unlooked = lock(&self.unlooked);
        if unlooked.len() < FILES_LATER_MAX {
            unlooked.insert(file);
        }
    }

    /// Looks at some of the files for which too many were waiting.
    pub(super) fn look_again(self: &Arc<Self>) {
        let mut unlooked = lock(&self.unlooked);
        // So that the same files are not always the first.
        let first = rand::random_range(0..=unlooked.len().saturating_sub(FILES_LATER_AT_ONCE));
        let some = unlooked.iter().skip(first).take(FILES_LATER_AT_ONCE);
        for file in some.copied().collect::<Vec<_>>() {
            unlooked.remove(&file);
            let files = self.clone();
            self.tasks.spawn_until_drained(async move {
                match files.row(file).await {
                    Ok(Some(row)) => again(&files, file, &row.facts, Patience::Waits).await,
                    Ok(None) => {}
                    Err(_) => files.look_later(file),
                }
            });
        }
    }

    /// Runs `inspection` to its end, also if the caller goes away. Returns the state of the file, which is `Scanning` if the
    /// inspection takes longer than [`FILE_ANSWER_MAX`].
    pub(super) async fn finish(
        &self,
        inspection: impl Future<Output = Result<FileState, Response>> + Send + 'static,
    ) -> Result<FileState, Response> {
        let inspected = timeout(FILE_ANSWER_MAX, self.run(inspection));
        inspected.await.unwrap_or(Ok(FileState::Scanning))
    }

    /// Runs `work` to its end, also if the caller goes away. A drain ends it when conversations are stored: the client's next
    /// request for the offset continues it.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Response>> + Send + 'static,
    ) -> Result<T, Response> {
        let (done, finished) = tokio::sync::oneshot::channel();
        self.tasks.spawn_until_drained(async move {
            let _ = done.send(work.await);
        });
        let gone = "the gateway is stopping";
        match finished.await {
            Ok(done) => done,
            Err(_) => Err(super::refused(ErrorCode::Unavailable, gone)),
        }
    }
}

/// Moves a complete upload of a directory and looks at it. Returns its state.
pub(super) async fn complete(
    files: &Arc<Files>,
    directory: &Arc<Directory>,
    file: AttachmentId,
    facts: &FileFacts,
    writing: &Writing,
    upload: Option<Upload>,
    patience: Patience,
) -> Result<FileState, Response> {
    let sha256 = {
        let _place = files.finishing.acquire().await;
        let moved = directory.complete(writing, facts.size, upload).await;
        moved.map_err(|error| failed(&error))?
    };
    // Its file is closed, so others may write while it waits.
    writing.release();
    let scanning = files.store.set_file_state(file, FileState::Scanning);
    scanning.await.map_err(store_failed)?;
    match scan(files, file, facts, patience).await? {
        Scanned::Passed => look_at(files, directory, file, facts, sha256, patience).await,
        Scanned::Stopped(state) => Ok(state),
        Scanned::Missing => Err(given_up()),
    }
}

/// Returns the answer to a request whose file could not be moved or read.
fn failed(error: &io::Error) -> Response {
    match error.kind() {
        // Its bytes were erased meanwhile.
        io::ErrorKind::NotFound => given_up(),
        _ => disk_failed(error),
    }
}

/// Completes what a gateway that ended had begun.
pub(super) async fn again(
    files: &Arc<Files>,
    file: AttachmentId,
    facts: &FileFacts,
    patience: Patience,
) {
    let taken = match &files.storage {
        Storage::Directory(directory) => directory.take(file),
        Storage::Bucket(bucket) => bucket.take(file),
    };
    let Some(writing) = taken else {
        return; // Someone is at it.
    };
    match files.row(file).await {
        Ok(Some(row)) if matches!(row.state, FileState::Pending | FileState::Scanning) => {}
        // Someone has done it since.
        Ok(_) => return,
        Err(error) => return tracing::warn!(%file, %error, "could not look at a file again"),
    }
    let completed = match &files.storage {
        Storage::Directory(directory) => {
            complete(files, directory, file, facts, &writing, None, patience).await
        }
        Storage::Bucket(bucket) => bucket::complete(files, bucket, file, facts, patience).await,
    };
    if let Err(response) = completed {
        tracing::warn!(%file, status = %response.status(), "could not look at a file again");
    }
}

/// Looks at a file of a directory. Returns its state.
async fn look_at(
    files: &Arc<Files>,
    directory: &Arc<Directory>,
    file: AttachmentId,
    facts: &FileFacts,
    sha256: Option<String>,
    patience: Patience,
) -> Result<FileState, Response> {
    match inspect(files, directory, (file, facts), sha256, patience).await {
        Ok(result) => files.make_ready(file, &result).await,
        Err(NotLooked::Failed(error)) => Err(failed(&error)),
        Err(why) => files.not_looked(file, &why),
    }
}

/// Finds out what a file is, whose upload had this SHA-256, if it is known. A picture loses its metadata and gets a
/// thumbnail.
async fn inspect(
    files: &Files,
    directory: &Arc<Directory>,
    (file, facts): (AttachmentId, &FileFacts),
    sha256: Option<String>,
    patience: Patience,
) -> Result<FileResult, NotLooked> {
    let path = directory.path(file, Variant::Original);
    let (begin, uploaded) = (path.clone(), (sha256, facts.size));
    let head = on_disk(move || read(&begin, HEAD_BYTES)).await?;
    let kind = sniff(&head);
    let Some(format) = kind.format() else {
        // It never waits for pictures.
        let _place = files.finishing.acquire().await;
        let (sha256, size) = on_disk(move || hashed(&path, uploaded)).await?;
        return Ok(plain(kind, sha256, size));
    };
    let _turn = files.turn_of_picture(&facts.uploader, patience).await?;
    let bytes = match readable(facts.size) {
        Some(bytes) => Some(on_disk(move || read(&path, bytes)).await?),
        None => None,
    };
    let looked = files.look(file, bytes, kind, format).await?;
    let directory = directory.clone();
    Ok(on_disk(move || keep(&directory, file, &looked, uploaded)).await?)
}

/// Runs `work`, which uses the disk, on a thread for that.
async fn on_disk<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(io::Error::other)?
}

/// Reads so many bytes from the begin of a file, or all if it has fewer.
fn read(path: &Path, bytes_max: usize) -> io::Result<Bytes> {
    let mut bytes = Vec::with_capacity(bytes_max);
    fs::File::open(path)?
        .take(bytes_max as u64)
        .read_to_end(&mut bytes)?;
    Ok(bytes.into())
}

/// Writes what was made of a picture, whose upload had this SHA-256, if it is known, and size.
fn keep(
    directory: &Directory,
    file: AttachmentId,
    looked: &Looked,
    uploaded: (Option<String>, u64),
) -> io::Result<FileResult> {
    if let Some(shown) = &looked.shown {
        directory.replace(file, Variant::Thumbnail, &shown.thumbnail.bytes)?;
    }
    let (sha256, size) = match &looked.clean {
        Some(clean) => {
            directory.replace(file, Variant::Original, clean)?;
            let sha256 = digest::digest(&digest::SHA256, clean);
            (hexadecimal(sha256.as_ref()), clean.len() as u64)
        }
        None => hashed(&directory.path(file, Variant::Original), uploaded)?,
    };
    Ok(looked.result(sha256, size))
}

/// Returns the SHA-256 and the size of a file, which are read from it if the former is not known.
fn hashed(path: &Path, (sha256, size): (Option<String>, u64)) -> io::Result<(String, u64)> {
    match sha256 {
        Some(sha256) => Ok((sha256, size)),
        None => hash(path),
    }
}

/// Returns the SHA-256 of a file in hexadecimal, and its length.
fn hash(path: &Path) -> io::Result<(String, u64)> {
    let mut file = fs::File::open(path)?;
    let mut context = digest::Context::new(&digest::SHA256);
    let (mut part, mut len) = (vec![0; PART_BYTES], 0);
    loop {
        let read = file.read(&mut part)?;
        if read == 0 {
            break;
        }
        context.update(&part[..read]);
        len += read as u64;
    }
    Ok((hexadecimal(context.finish().as_ref()), len))
}
