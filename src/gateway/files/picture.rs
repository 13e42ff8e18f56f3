//! What is done with a picture, wherever its bytes are: its metadata is removed, and it is decoded in a process of its own.

use std::io;

use axum::response::Response;
use bytes::Bytes;
use metrics::counter;

use super::{
    Files, refused,
    turns::{Patience, Turn},
};
use crate::{
    files::{DOWNLOAD, DecoderError, Format, Kind, Processed, decode, is_inline, strip},
    model::{
        AttachmentId, FileResult, FileState, Metadata, UserId,
        limits::{FILES_LATER_MAX, PICTURE_BYTES_MAX},
    },
    protocol::ErrorCode,
    tasks::lock,
};

/// What becomes of pictures, as it is counted.
pub const PICTURE_OUTCOMES: [&str; 3] = ["failed", "refused", "shown"];

/// Describes a file that is no picture.
pub(super) fn plain(kind: Kind, sha256: String, size: u64) -> FileResult {
    FileResult {
        sha256,
        size,
        mime: named(kind).to_owned(),
        pixels: None,
        thumbnail: None,
        metadata: kept(kind),
    }
}

/// Returns what a file of this kind says of people if it stays as it was uploaded.
fn kept(kind: Kind) -> Option<Metadata> {
    kind.is_media().then_some(Metadata::Kept)
}

/// Returns the media type that messages name. Of a broken image it is that of a download.
fn named(kind: Kind) -> &'static str {
    if !kind.is_inline() && is_inline(kind.mime()) {
        DOWNLOAD
    } else {
        kind.mime()
    }
}

/// Returns how many bytes of a picture are read. `None` if it is too large to be looked at.
pub(super) fn readable(size: u64) -> Option<usize> {
    usize::try_from(size)
        .ok()
        .filter(|_| size <= PICTURE_BYTES_MAX)
}

/// Why nothing was found out about a file.
pub(super) enum NotLooked {
    /// The storage failed.
    Failed(io::Error),
    /// The gateway stops. Whoever asks for the state of the file later has it looked at again.
    Stopping,
    /// Too many files wait, or the machine had no room for a decoder.
    Busy,
}

impl From<io::Error> for NotLooked {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// What was found out about a picture.
pub(super) struct Looked {
    kind: Kind,
    /// The picture without its metadata. `None` if it is malformed or too large: then it stays as it was uploaded.
    pub(super) clean: Option<Bytes>,
    /// What browsers may show. `None` if the picture is a download.
    pub(super) shown: Option<Processed>,
}

impl Looked {
    /// Describes the picture, whose bytes have this SHA-256 and size.
    pub(super) fn result(&self, sha256: String, size: u64) -> FileResult {
        let kind = match self.shown {
            Some(_) => self.kind,
            None => self.kind.as_download(),
        };
        let thumbnail = self.shown.as_ref().map(|shown| &shown.thumbnail);
        FileResult {
            sha256,
            size,
            mime: named(kind).to_owned(),
            pixels: self.shown.as_ref().map(|shown| (shown.width, shown.height)),
            thumbnail: thumbnail.map(|thumbnail| thumbnail.format.mime().to_owned()),
            metadata: match self.clean {
                Some(_) => None,
                None => kept(self.kind),
            },
        }
    }
}

impl Files {
    /// Returns the state of a file about which nothing was found out, or the answer to its uploader.
    #[expect(clippy::result_large_err, reason = "a response either way")]
    pub(super) fn not_looked(
        &self,
        file: AttachmentId,
        why: &NotLooked,
    ) -> Result<FileState, Response> {
        match why {
            NotLooked::Failed(error) => Err(self.storage.failed(error)),
            NotLooked::Stopping => {
                let text = "the gateway is stopping";
                Err(refused(ErrorCode::Unavailable, text))
            }
            NotLooked::Busy => {
                self.look_later(file);
                Ok(FileState::Scanning)
            }
        }
    }

    /// Waits until a picture of this user may be looked at.
    pub(super) async fn turn_of_picture(
        &self,
        user: &UserId,
        patience: Patience,
    ) -> Result<Turn, NotLooked> {
        tokio::select! {
            biased;
            () = self.edge.draining() => Err(NotLooked::Stopping),
            turn = self.pictures.next(user, patience) => turn.ok_or(NotLooked::Busy),
        }
    }

    /// Removes the metadata of a picture, and makes its thumbnail. Without the bytes it is too large for both. It has its
    /// turn.
    pub(super) async fn look(
        &self,
        file: AttachmentId,
        bytes: Option<Bytes>,
        kind: Kind,
        format: Format,
    ) -> Result<Looked, NotLooked> {
        let clean = match bytes {
            // The bytes go before the picture is decoded, because they may be many.
            Some(bytes) => tokio::task::spawn_blocking(move || strip(&bytes, format))
                .await
                .map_err(io::Error::other)?
                .ok(),
            None => None,
        };
        let shown = match &clean {
            Some(clean) => self.show(file, clean, format).await?,
            None => None,
        };
        Ok(Looked { kind, clean, shown })
    }

    /// Decodes a picture. `None` if browsers may not show it.
    async fn show(
        &self,
        file: AttachmentId,
        clean: &Bytes,
        format: Format,
    ) -> Result<Option<Processed>, NotLooked> {
        let Some(limits) = self.settings.image_limits() else {
            return Ok(None);
        };
        let decoded = tokio::select! {
            decoded = decode(clean, format, &limits) => decoded,
            () = self.edge.draining() => Err(DecoderError::Interrupted),
        };
        let (outcome, shown) = match decoded {
            Ok(processed) => ("shown", Some(processed)),
            Err(DecoderError::Refused(reason)) => {
                tracing::debug!(reason, "a picture is a download");
                ("refused", None)
            }
            Err(DecoderError::Interrupted) => return Err(NotLooked::Stopping),
            Err(error) if error.is_of_machine() && self.is_first_failure(file) => {
                crate::seldom::seldom!(WARN, "a picture is decoded later, because the machine had no room for its decoder", %error);
                return Err(NotLooked::Busy);
            }
            Err(error) => {
                crate::seldom::seldom!(WARN, "a picture is a download, because its decoder failed", %error);
                ("failed", None)
            }
        };
        lock(&self.undecoded).remove(&file);
        counter!("chat_pictures_total", "outcome" => outcome).increment(1);
        Ok(shown)
    }

    /// Returns whether the decoder of a picture has not failed before, and notes that it has now.
    fn is_first_failure(&self, file: AttachmentId) -> bool {
        let mut undecoded = lock(&self.undecoded);
        undecoded.len() < FILES_LATER_MAX && undecoded.insert(file)
    }
}
