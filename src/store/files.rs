//! The rows of uploaded files. Their bytes are elsewhere.

use async_trait::async_trait;

use super::Result;
use crate::model::{
    AttachmentId, Entry, FileFacts, FileResult, FileState, Metadata, Rev, Seq, UserId, file_ids,
};

/// Partitions of the work of one day.
pub const WORK_SHARDS: u8 = 64;
/// References of one file that are read at most. The owner lets no more messages have it.
pub const REFERENCES_MAX: usize = 64;

/// What is stored of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileRow {
    pub facts: FileFacts,
    pub result: Option<FileResult>,
    pub state: FileState,
}

impl FileRow {
    /// Returns what the file still says of people, if it was looked at.
    #[must_use]
    pub fn metadata(&self) -> Option<Metadata> {
        self.result.as_ref().and_then(|result| result.metadata)
    }
}

/// A message that has a file, or had it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reference {
    pub file: AttachmentId,
    pub seq: Seq,
    /// The rev of the change that made it so; 0 if the message was sent so. The highest rev counts.
    pub rev: Rev,
    pub on: bool,
}

impl Reference {
    /// Returns the references of a message as it was sent.
    pub(super) fn of_entry(entry: &Entry) -> impl Iterator<Item = Self> + use<'_> {
        let files = file_ids(entry.content.attachments());
        files.map(|file| Self {
            file,
            seq: entry.seq,
            rev: 0,
            on: true,
        })
    }
}

/// A partition of the files that a sweep looks at: those that were created or erased on a day.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct WorkShard {
    /// Days since 1970.
    pub day: u32,
    pub shard: u8,
}

impl WorkShard {
    /// Returns the partition of a file's work. It is part of the stored format and must never change.
    #[must_use]
    pub fn of(day: u32, file: AttachmentId) -> Self {
        let shard = file.0.as_bytes()[15] % WORK_SHARDS;
        Self { day, shard }
    }
}

/// The rows of files, of every backend. All writes are durable when they return. [`super::Store::append`] and
/// [`super::Store::settle`] write the references of the messages they are given; [`super::Store::apply_changes`] those of
/// changes.
#[async_trait]
pub trait FileStore: Send + Sync + 'static {
    /// Writes the facts of a new file, its state [`FileState::Pending`], and its work of a day.
    async fn create_file(&self, file: AttachmentId, facts: &FileFacts, day: u32) -> Result<()>;

    async fn set_file_result(&self, file: AttachmentId, result: &FileResult) -> Result<()>;

    /// Raises the state. A lower one changes nothing (rule [state-rises]).
    async fn set_file_state(&self, file: AttachmentId, state: FileState) -> Result<()>;

    /// Sets the state [`FileState::Erased`], and erases the name and the description of the file.
    async fn forget_file(&self, file: AttachmentId) -> Result<()>;

    /// Returns the files that exist among these, in any order.
    async fn files(&self, files: &[AttachmentId]) -> Result<Vec<(AttachmentId, FileRow)>>;

    /// Returns a file, if it exists.
    async fn file(&self, file: AttachmentId) -> Result<Option<FileRow>> {
        Ok(self.files(&[file]).await?.pop().map(|(_, row)| row))
    }

    /// Returns at most [`REFERENCES_MAX`] references of a file.
    async fn references(&self, file: AttachmentId) -> Result<Vec<Reference>>;

    /// Notes that a sweep must look at a file.
    async fn add_work(&self, day: u32, file: AttachmentId) -> Result<()>;

    /// Returns at most `limit` files of a partition of work after `after`, in the store's own order.
    async fn work(
        &self,
        shard: WorkShard,
        after: Option<AttachmentId>,
        limit: usize,
    ) -> Result<Vec<AttachmentId>>;

    /// Returns the partitions that have work, in any order.
    async fn work_shards(&self) -> Result<Vec<WorkShard>>;

    /// Removes a partition whose work is done. Its day must be over, so that nothing is added to it any more.
    async fn finish_work(&self, shard: WorkShard) -> Result<()>;

    /// Returns the bytes that a user has uploaded on a day, as far as they are recorded.
    async fn usage(&self, user: &UserId, day: u32) -> Result<u64>;

    /// Records the bytes that a user has uploaded on a day. The value only increases. It is kept for seven days.
    async fn set_usage(&self, user: &UserId, day: u32, bytes: u64) -> Result<()>;
}
