//! What happens to a file when its bytes are complete: it is moved, looked at, cleaned of metadata, and becomes ready.

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
    sync::Arc,
};

use aws_lc_rs::digest;
use axum::response::Response;

use super::{
    Files, bucket, disk_failed, no_such_file,
    picture::{IMAGE_BYTES_MAX, Picture, named, picture},
    scan::{Scanned, scan},
    storage::Storage,
    store_failed,
};
use crate::{
    files::{
        Directory, HEAD_BYTES, ImageLimits, Kind, Upload, Variant, Writing, hexadecimal, sniff,
    },
    model::{AttachmentId, FileFacts, FileNotice, FileResult, FileState},
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
                    Ok(Some(row)) => again(&files, file, &row.facts).await,
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

    /// Runs `inspection` to its end, also if the caller goes away. A drain ends it when conversations are stored: the
    /// client's next request for the offset continues it.
    pub(super) async fn finish(
        &self,
        inspection: impl Future<Output = Result<FileState, Response>> + Send + 'static,
    ) -> Result<FileState, Response> {
        let (done, finished) = tokio::sync::oneshot::channel();
        self.tasks.spawn_until_drained(async move {
            let _ = done.send(inspection.await);
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
) -> Result<FileState, Response> {
    let sha256 = {
        let _place = files.finishing.acquire().await;
        let moved = directory.complete(writing, facts.size, upload).await;
        moved.map_err(|error| disk_failed(&error))?
    };
    let scanning = files.store.set_file_state(file, FileState::Scanning);
    scanning.await.map_err(store_failed)?;
    match scan(files, file, facts).await? {
        Scanned::Passed => look_at(files, directory, file, facts, sha256).await,
        Scanned::Stopped(state) => Ok(state),
        Scanned::Missing => Err(no_such_file()),
    }
}

/// Completes what a gateway that ended had begun.
pub(super) async fn again(files: &Arc<Files>, file: AttachmentId, facts: &FileFacts) {
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
            complete(files, directory, file, facts, &writing, None).await
        }
        Storage::Bucket(bucket) => bucket::complete(files, bucket, file, facts).await,
    };
    if let Err(response) = completed {
        tracing::warn!(%file, status = %response.status(), "could not look at a file again");
    }
}

async fn look_at(
    files: &Arc<Files>,
    directory: &Arc<Directory>,
    file: AttachmentId,
    facts: &FileFacts,
    sha256: Option<String>,
) -> Result<FileState, Response> {
    let _permit = files.inspections.acquire().await;
    let (directory, limits, size) = (directory.clone(), files.settings.image_limits(), facts.size);
    let inspect = move || inspect(&directory, file, (size, sha256), limits.as_ref());
    let looked = tokio::task::spawn_blocking(inspect);
    let result = looked
        .await
        .map_err(io::Error::other)
        .and_then(|looked| looked);
    let result = result.map_err(|error| disk_failed(&error))?;
    files.make_ready(file, &result).await
}

/// Finds out what a file of this size and SHA-256, if it is known, is. Images lose their metadata and get a thumbnail.
fn inspect(
    directory: &Directory,
    file: AttachmentId,
    (size, sha256): (u64, Option<String>),
    limits: Option<&ImageLimits>,
) -> io::Result<FileResult> {
    let path = directory.path(file, Variant::Original);
    let mut head = Vec::with_capacity(HEAD_BYTES);
    fs::File::open(&path)?
        .take(HEAD_BYTES as u64)
        .read_to_end(&mut head)?;
    let mut kind = sniff(&head);
    let mut image = None;
    if kind.format().is_some() {
        image = match limits {
            Some(limits) if size <= IMAGE_BYTES_MAX => show(directory, file, &kind, limits)?,
            _ => None,
        };
        if image.is_none() {
            // What cannot be decoded or cleaned is not shown.
            kind = kind.as_download();
        }
    }
    let (sha256, size) = match (sha256, &image) {
        (Some(sha256), None) => (sha256, size),
        // An image was replaced.
        _ => hash(&path)?,
    };
    Ok(FileResult {
        sha256,
        size,
        mime: named(kind).to_owned(),
        pixels: image.as_ref().map(|image| image.pixels),
        thumbnail: image.map(|image| image.thumbnail.to_owned()),
    })
}

struct Shown {
    pixels: (u32, u32),
    thumbnail: &'static str,
}

/// Replaces an image by one without metadata, and writes its thumbnail. `None` if it is no image that can be decoded.
fn show(
    directory: &Directory,
    file: AttachmentId,
    kind: &Kind,
    limits: &ImageLimits,
) -> io::Result<Option<Shown>> {
    let bytes = fs::read(directory.path(file, Variant::Original))?;
    let Some(Picture { clean, processed }) = picture(bytes, kind, limits) else {
        return Ok(None);
    };
    directory.replace(file, Variant::Thumbnail, &processed.thumbnail.bytes)?;
    directory.replace(file, Variant::Original, &clean)?;
    Ok(Some(Shown {
        pixels: (processed.width, processed.height),
        thumbnail: processed.thumbnail.mime,
    }))
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
