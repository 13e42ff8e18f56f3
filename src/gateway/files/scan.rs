//! Has files scanned before anything else looks at them.

use std::io;

use axum::response::Response;
use metrics::counter;
use tokio::io::AsyncRead;

use super::{
    Files,
    storage::{Storage, erase_bytes},
    store_failed,
    turns::Patience,
};
use crate::{
    files::{NotScanned, Object, Variant, Verdict},
    model::{AttachmentId, FileFacts, FileNotice, FileState, limits::FILES_LATER_MAX},
    tasks::lock,
};

/// What is known of a file when it was to be scanned.
pub(super) enum Scanned {
    /// It may be shown.
    Passed,
    /// It may not be shown: it has this state.
    Stopped(FileState),
    /// Its bytes are not there: another gateway joins its parts, or it is gone.
    Missing,
}

/// Has a file scanned, if there is a scanner: nothing is served that was not scanned.
pub(super) async fn scan(
    files: &Files,
    file: AttachmentId,
    facts: &FileFacts,
    patience: Patience,
) -> Result<Scanned, Response> {
    let Some(scanner) = &files.scanner else {
        return Ok(Scanned::Passed);
    };
    let scanned = {
        let Some(_turn) = files.scans.next(&facts.uploader, patience).await else {
            files.look_later(file);
            return Ok(Scanned::Stopped(FileState::Scanning));
        };
        match files.storage.open_complete(file).await {
            Ok(Some(bytes)) => scanner.scan(bytes).await,
            Ok(None) => return Ok(Scanned::Missing),
            Err(error) => return Err(files.storage.failed(&error)),
        }
    };
    let finding = match scanned {
        Ok(Verdict::Clean) => return Ok(Scanned::Passed),
        Ok(Verdict::Found(name)) => name,
        Ok(Verdict::TooLarge) => "larger than clamd's StreamMaxLength".to_owned(),
        Err(NotScanned::File(error)) => return Err(files.storage.failed(&error)),
        Err(error) => {
            crate::seldom::seldom!(ERROR, "a file could not be scanned, so it does not become ready (attachments.scanner)", %scanner, %error);
            files.scan_later(file);
            return Ok(Scanned::Stopped(FileState::Scanning));
        }
    };
    tracing::warn!(%file, user = %facts.uploader, conversation = %facts.conversation, finding, "an uploaded file was blocked");
    // Rule [block-erase]: the bytes go first. If the gateway ends before the state is written, nothing can be shown.
    erase(files, file, facts).await?;
    let blocked = files.store.set_file_state(file, FileState::Blocked);
    blocked.await.map_err(store_failed)?;
    if files.storage.bucket().is_some() {
        // What a gateway without this scanner has written meanwhile.
        erase(files, file, facts).await?;
    }
    counter!("chat_files_blocked_total").increment(1);
    files.tell(facts, FileNotice::blocked(file));
    Ok(Scanned::Stopped(FileState::Blocked))
}

async fn erase(files: &Files, file: AttachmentId, facts: &FileFacts) -> Result<(), Response> {
    let upload = facts.upload.as_deref();
    let erased = erase_bytes(&*files.store, &files.storage, file, upload);
    erased.await.map_err(|error| files.storage.failed(&error))
}

impl Files {
    /// Notes a file that is to be scanned when the scanner is back.
    fn scan_later(&self, file: AttachmentId) {
        let mut unscanned = lock(&self.unscanned);
        if unscanned.len() < FILES_LATER_MAX {
            unscanned.insert(file);
        }
    }
}

impl Storage {
    /// Opens a complete file to read all of it. `None` if there is no such file.
    async fn open_complete(
        &self,
        file: AttachmentId,
    ) -> io::Result<Option<Box<dyn AsyncRead + Send + Unpin>>> {
        match self {
            Self::Directory(directory) => {
                let path = directory.path(file, Variant::Original);
                let opened = there(tokio::fs::File::open(path).await)?;
                Ok(opened.map(|file| Box::new(file) as _))
            }
            Self::Bucket(bucket) => {
                for object in [Object::Incoming, Object::ORIGINAL] {
                    if let Some(opened) = there(bucket.stream(file, object).await)? {
                        return Ok(Some(Box::new(opened)));
                    }
                }
                Ok(None)
            }
        }
    }
}

fn there<T>(opened: io::Result<T>) -> io::Result<Option<T>> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
