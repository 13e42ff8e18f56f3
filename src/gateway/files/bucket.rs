//! What happens to an upload to a bucket when its parts are there: they are joined, and the file is looked at, cleaned of
//! metadata and copied to where no upload can change it. Other gateways may do the same at the same time: each writes the
//! same bytes.

use std::{io, sync::Arc};

use aws_lc_rs::digest;
use axum::response::Response;
use tokio::time::{Duration, sleep};

use super::{
    Files, no_such_file,
    picture::{Looked, NotLooked, plain, readable},
    refused,
    scan::{Scanned, scan},
    storage_failed, store_failed,
    turns::Patience,
};
use crate::{
    files::{Bucket, Inspection, Object, hexadecimal, missing, sniff},
    model::{AttachmentId, FileFacts, FileResult, FileState},
    protocol::ErrorCode,
};

/// How often a gateway looks for a file that another one is moving.
const ATTEMPTS: usize = 10;
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Joins the parts of an upload and looks at the file. Returns its state.
pub(super) async fn complete(
    files: &Arc<Files>,
    bucket: &Arc<Bucket>,
    file: AttachmentId,
    facts: &FileFacts,
    patience: Patience,
) -> Result<FileState, Response> {
    if facts.size == 0 {
        return empty(files, bucket, file).await;
    }
    join(bucket, file, facts).await?;
    let scanning = files.store.set_file_state(file, FileState::Scanning);
    scanning.await.map_err(store_failed)?;
    let inspection = Inspection::begin();
    for _ in 0..ATTEMPTS {
        match scan(files, file, facts, patience).await? {
            Scanned::Passed => {
                match look_at(files, bucket, inspection, (file, facts), patience).await {
                    Ok(result) => return finish(files, bucket, file, &result).await,
                    Err(NotLooked::Failed(error)) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(why) => return files.not_looked(file, &why),
                }
            }
            Scanned::Stopped(state) => return Ok(state),
            Scanned::Missing => {}
        }
        // Another gateway moves it now, or has done so, or erases it.
        let row = files.row(file).await.map_err(store_failed)?;
        match row.map(|row| row.state) {
            Some(FileState::Ready) => return Ok(FileState::Ready),
            Some(FileState::Pending | FileState::Scanning) => sleep(RETRY_AFTER).await,
            Some(FileState::Erasing | FileState::Blocked | FileState::Erased) | None => {
                return Err(no_such_file());
            }
        }
    }
    let gone = io::Error::other(format!("the bytes of the file {file} are in no object"));
    Err(storage_failed(&gone))
}

/// Makes a file ready that has no bytes, and so no parts. Returns its state.
pub(super) async fn empty(
    files: &Arc<Files>,
    bucket: &Arc<Bucket>,
    file: AttachmentId,
) -> Result<FileState, Response> {
    let written = bucket.write(
        Inspection::begin(),
        file,
        Object::ORIGINAL,
        bytes::Bytes::new(),
    );
    written.await.map_err(|error| storage_failed(&error))?;
    let scanning = files.store.set_file_state(file, FileState::Scanning);
    scanning.await.map_err(store_failed)?;
    let sha256 = hexadecimal(digest::digest(&digest::SHA256, &[]).as_ref());
    let result = plain(sniff(&[]), sha256, 0);
    finish(files, bucket, file, &result).await
}

/// Joins the parts of an upload, unless that was done before.
async fn join(bucket: &Bucket, file: AttachmentId, facts: &FileFacts) -> Result<(), Response> {
    let Some(upload) = &facts.upload else {
        return Ok(());
    };
    let stored = bucket.parts(file, upload).await;
    let Some(stored) = stored.map_err(|error| storage_failed(&error))? else {
        return Ok(());
    };
    if missing(facts.size, &stored).next().is_some() {
        let text = "parts are missing, or have another size: ask for their addresses";
        return Err(refused(ErrorCode::Conflict, text));
    }
    let Err(error) = bucket.join(file, upload, &stored).await else {
        return Ok(());
    };
    match bucket.parts(file, upload).await {
        // Another gateway joins them. Storages differ in how they say that.
        Ok(None) => Ok(()),
        _ if error.kind() == io::ErrorKind::InvalidData => {
            let text = "a part was sent again meanwhile: try again";
            Err(refused(ErrorCode::Conflict, text))
        }
        _ => Err(storage_failed(&error)),
    }
}

/// Finds out what a file is, and writes the objects that are served.
async fn look_at(
    files: &Files,
    bucket: &Bucket,
    inspection: Inspection,
    (file, facts): (AttachmentId, &FileFacts),
    patience: Patience,
) -> Result<FileResult, NotLooked> {
    // Without the upload, an inspection before this one has moved it.
    let (object, (head, size)) = match bucket.head(file, Object::Incoming).await? {
        Some(found) => (Object::Incoming, found),
        None => match bucket.head(file, Object::ORIGINAL).await? {
            Some(found) => (Object::ORIGINAL, found),
            None => return Err(io::Error::from(io::ErrorKind::NotFound).into()),
        },
    };
    if object == Object::Incoming && size != facts.size {
        let text = "an upload has another size than announced";
        return Err(io::Error::other(text).into());
    }
    let kind = sniff(&head);
    let looked = match kind.format() {
        Some(format) => {
            let _turn = files.turn_of_picture(&facts.uploader, patience).await?;
            let bytes = match readable(size) {
                Some(bytes) => Some(bucket.read(file, object, bytes).await?),
                None => None,
            };
            let looked = files.look(file, bytes, kind, format).await?;
            if let Some(result) = keep(bucket, inspection, file, &looked).await? {
                return Ok(result);
            }
            Some(looked)
        }
        None => None,
    };
    let turn = files.hashes.next(&facts.uploader, patience).await;
    let _turn = turn.ok_or(NotLooked::Busy)?;
    let (sha256, size) = bucket.hash(file, object).await?;
    if object == Object::Incoming {
        bucket.copy(inspection, file).await?;
    }
    Ok(match looked {
        Some(looked) => looked.result(sha256, size),
        None => plain(kind, sha256, size),
    })
}

/// Writes what was made of a picture. `None` if it stays as it was uploaded.
async fn keep(
    bucket: &Bucket,
    inspection: Inspection,
    file: AttachmentId,
    looked: &Looked,
) -> io::Result<Option<FileResult>> {
    let Some(clean) = &looked.clean else {
        return Ok(None);
    };
    if let Some(shown) = &looked.shown {
        let thumbnail = shown.thumbnail.bytes.clone();
        let written = bucket.write(inspection, file, Object::THUMBNAIL, thumbnail);
        written.await?;
    }
    let written = bucket.write(inspection, file, Object::ORIGINAL, clean.clone());
    written.await?;
    let sha256 = digest::digest(&digest::SHA256, clean);
    let result = looked.result(hexadecimal(sha256.as_ref()), clean.len() as u64);
    Ok(Some(result))
}

/// Makes a file ready whose objects are written.
async fn finish(
    files: &Files,
    bucket: &Bucket,
    file: AttachmentId,
    result: &FileResult,
) -> Result<FileState, Response> {
    let row = files.row(file).await.map_err(store_failed)?;
    let row = row.ok_or_else(no_such_file)?;
    if matches!(row.state, FileState::Blocked | FileState::Erased) {
        // It was erased while this wrote. A sweep does the same again, in case this gateway ends here.
        let upload = row.facts.upload.as_deref();
        let erased = bucket.erase(file, upload).await;
        erased.map_err(|error| storage_failed(&error))?;
        return Err(no_such_file());
    }
    // Before the file is ready, because nobody looks for it after that.
    let removed = bucket.remove(file, Object::Incoming).await;
    removed.map_err(|error| storage_failed(&error))?;
    files.make_ready(file, result).await
}
