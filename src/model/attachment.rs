//! Attachments of messages: links to files elsewhere, and files that the gateway keeps.

use serde::{Deserialize, Serialize};

use super::{AttachmentId, ConversationId, Millis, UserId};

/// A file of a message: one that the gateway keeps, which has an `id`, or a link to a file elsewhere, which has a `url`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Attachment {
    /// The id of an uploaded file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = Uuid)]
    pub id: Option<AttachmentId>,
    /// The address of a file that is stored elsewhere: `https://…` or `http://…`. Empty for an uploaded file.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub url: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The media type of the file, such as `image/png`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mime: Option<String>,
    /// The size of the file in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// A description for people who cannot see the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alt: Option<String>,
    /// Width of a picture in pixels, as it is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<u32>,
    /// Height of a picture in pixels, as it is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub height: Option<u32>,
}

impl Attachment {
    /// Returns the bytes of a frame that the id, width and height take at most.
    #[must_use]
    pub fn numbers_bytes(&self) -> usize {
        let id = if self.id.is_some() { 44 } else { 0 };
        let pixels = if self.width.is_some() || self.height.is_some() {
            40
        } else {
            0
        };
        id + pixels
    }
}

/// Returns the uploaded files among attachments.
pub fn file_ids(attachments: &[Attachment]) -> impl Iterator<Item = AttachmentId> + '_ {
    attachments.iter().filter_map(|attachment| attachment.id)
}

/// What is known of a file before its bytes have come. It changes only when the file is erased: then its texts go.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileFacts {
    pub uploader: UserId,
    /// The only conversation whose messages may have the file.
    pub conversation: ConversationId,
    pub name: String,
    /// Bytes of the upload.
    pub size: u64,
    pub alt: Option<String>,
    pub created_at: Millis,
    /// The id of the upload in a bucket, which joins its parts. `None` if the bytes are in a directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<String>,
}

impl FileFacts {
    /// Returns the facts of a file that was erased.
    #[must_use]
    pub fn without_texts(&self) -> Self {
        Self {
            name: String::new(),
            alt: None,
            ..self.clone()
        }
    }
}

/// What was found out about a complete file. It never changes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileResult {
    /// SHA-256 of the bytes that are served, in hexadecimal.
    pub sha256: String,
    /// Bytes that are served.
    pub size: u64,
    /// The media type found in the bytes.
    pub mime: String,
    /// Width and height of a picture, as it is shown.
    pub pixels: Option<(u32, u32)>,
    /// The media type of the thumbnail, if there is one.
    pub thumbnail: Option<String>,
    /// What the file still says of people. `None` if it says nothing more, or is of a kind that is not looked into.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Metadata>,
}

/// What a picture, video or sound still says of the people who made it: the place, the camera, names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Metadata {
    /// The file is as it was uploaded, with all its metadata.
    Kept,
}

impl Metadata {
    /// Returns the name by which clients know it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kept => "kept",
        }
    }
}

/// What the uploader's sessions are told when the gateway has looked at a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileNotice {
    /// The id. It is not named so, because a frame with an `id` is a reply.
    pub file: AttachmentId,
    pub state: FileState,
    /// The media type found in the bytes, if the file is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mime: Option<String>,
    /// Width of a picture in pixels, as it is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<u32>,
    /// Height of a picture in pixels, as it is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub height: Option<u32>,
    /// What the file still says of people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Metadata>,
}

impl FileNotice {
    /// Returns the notice that messages may have a file.
    #[must_use]
    pub fn ready(file: AttachmentId, result: &FileResult) -> Self {
        Self {
            file,
            state: FileState::Ready,
            mime: Some(result.mime.clone()),
            width: result.pixels.map(|(width, _)| width),
            height: result.pixels.map(|(_, height)| height),
            metadata: result.metadata,
        }
    }

    /// Returns the notice that the scanner found something in a file.
    #[must_use]
    pub fn blocked(file: AttachmentId) -> Self {
        Self {
            file,
            state: FileState::Blocked,
            mime: None,
            width: None,
            height: None,
            metadata: None,
        }
    }
}

/// The state of a file. It only rises: its number is the write timestamp (rule [state-rises]).
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum FileState {
    /// Its bytes are not complete.
    Pending = 1,
    /// Its bytes are complete and are being looked at.
    Scanning = 2,
    Ready = 3,
    /// No new message may have it. Its bytes go unless a message has it.
    Erasing = 4,
    /// The scanner found something harmful. Its bytes are gone.
    Blocked = 5,
    /// Its bytes are gone.
    Erased = 6,
}

impl FileState {
    /// Returns the state with this number.
    #[must_use]
    pub fn of(number: u64) -> Option<Self> {
        let all = [
            Self::Pending,
            Self::Scanning,
            Self::Ready,
            Self::Erasing,
            Self::Blocked,
            Self::Erased,
        ];
        all.into_iter().find(|state| state.number() == number)
    }

    #[must_use]
    pub fn number(self) -> u64 {
        self as u64
    }
}
/// What a user may begin to upload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UploadLimits {
    pub bytes_per_day: u64,
    /// Uploads in a minute.
    pub per_minute: u32,
}

/// Whether a user may begin an upload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum UploadBegun {
    /// It counts among those of the day.
    Counted,
    /// The user has begun too many in the last minute.
    TooOften,
    /// It would be more than the user may upload in a day.
    TooMuch,
}
