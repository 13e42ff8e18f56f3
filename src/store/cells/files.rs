//! The cells of uploaded files.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::{
    Cell, CellStore, Cells,
    keys::{FILE, Key, REFERENCE, Range, USAGE, WORK, after},
    values::{corrupt, decode, encode, take, take_u64},
};
use crate::{
    model::{
        AttachmentId, ConversationId, FileFacts, FileResult, FileState, Metadata, Millis, UserId,
    },
    store::{FileRow, FileStore, LogRow, REFERENCES_MAX, Reference, Result, WorkShard},
};

const FACTS: u8 = b'f';
const RESULT: u8 = b'r';
const STATE: u8 = b's';
/// Columns of a file.
const COLUMNS: usize = 3;
/// The timestamp of the result of a file, which is found out once.
const RESULT_TIMESTAMP: u64 = 3;

#[derive(Serialize, Deserialize)]
struct StoredFacts(
    UserId,
    ConversationId,
    String,
    u64,
    Option<String>,
    Millis,
    Option<String>, // upload in a bucket
);

#[derive(Serialize, Deserialize)]
struct StoredResult(
    String,
    u64,
    String,
    Option<(u32, u32)>,
    Option<String>, // media type of the thumbnail
    Option<Metadata>,
);

fn file_key(file: AttachmentId) -> Key {
    Key::new(FILE).bytes(file.0.as_bytes())
}

fn work_key(shard: WorkShard) -> Key {
    Key::new(WORK).u32(shard.day).bytes(&[shard.shard])
}

pub(super) fn work_cell(day: u32, file: AttachmentId) -> Cell {
    let key = work_key(WorkShard::of(day, file)).bytes(file.0.as_bytes());
    key.cell(0, Vec::new())
}

fn usage_key(user: &UserId, day: u32) -> Key {
    Key::new(USAGE).u32(day).user(user)
}

/// Returns the keys of all usage before a day.
pub(super) fn usage_before(day: u32) -> Range {
    let (from, to) = (Key::new(USAGE).0, Key::new(USAGE).u32(day).0);
    Range { from, to }
}

fn state_cell(file: AttachmentId, state: FileState) -> Cell {
    file_key(file)
        .bytes(&[STATE])
        .cell(state.number(), Vec::new())
}

fn facts_cell(file: AttachmentId, facts: &FileFacts, timestamp: u64) -> Cell {
    let facts = facts.clone();
    let stored = StoredFacts(
        facts.uploader,
        facts.conversation,
        facts.name,
        facts.size,
        facts.alt,
        facts.created_at,
        facts.upload,
    );
    file_key(file)
        .bytes(&[FACTS])
        .cell(timestamp, encode(&stored))
}

pub(super) fn reference_cell(reference: Reference) -> Cell {
    Key::new(REFERENCE)
        .bytes(reference.file.0.as_bytes())
        .u64(reference.seq)
        .cell(reference.rev, encode(&(reference.on,)))
}

/// Returns the cells of the references of messages.
pub(super) fn reference_cells(rows: &[LogRow]) -> impl Iterator<Item = Cell> + '_ {
    rows.iter()
        .flat_map(|row| Reference::of_entry(&row.record))
        .map(reference_cell)
}

fn row(cells: &[Cell]) -> Result<Option<FileRow>> {
    const OPERATION: &str = "files";
    let (mut facts, mut result, mut state) = (None, None, None);
    for cell in cells {
        match cell.key.last().copied() {
            Some(FACTS) => {
                let StoredFacts(uploader, conversation, name, size, alt, created_at, upload) =
                    decode(OPERATION, &cell.value)?;
                facts = Some(FileFacts {
                    uploader,
                    conversation,
                    name,
                    size,
                    alt,
                    created_at,
                    upload,
                });
            }
            Some(RESULT) => {
                let StoredResult(sha256, size, mime, pixels, thumbnail, metadata) =
                    decode(OPERATION, &cell.value)?;
                result = Some(FileResult {
                    sha256,
                    size,
                    mime,
                    pixels,
                    thumbnail,
                    metadata,
                });
            }
            Some(STATE) => {
                let known = FileState::of(cell.timestamp);
                state = Some(known.ok_or_else(|| corrupt(OPERATION, "unknown state"))?);
            }
            _ => return Err(corrupt(OPERATION, "unknown column")),
        }
    }
    let row = facts.zip(state).map(|(facts, state)| FileRow {
        facts,
        result,
        state,
    });
    Ok(row)
}

#[async_trait]
impl<C: Cells> FileStore for CellStore<C> {
    async fn create_file(&self, file: AttachmentId, facts: &FileFacts, day: u32) -> Result<()> {
        let facts = facts_cell(file, facts, 0);
        let cells = vec![
            facts,
            state_cell(file, FileState::Pending),
            work_cell(day, file),
        ];
        self.0.write("create_file", cells, true).await
    }

    async fn set_file_result(&self, file: AttachmentId, result: &FileResult) -> Result<()> {
        let result = result.clone();
        let stored = StoredResult(
            result.sha256,
            result.size,
            result.mime,
            result.pixels,
            result.thumbnail,
            result.metadata,
        );
        let cell = file_key(file)
            .bytes(&[RESULT])
            .cell(RESULT_TIMESTAMP, encode(&stored));
        self.0.write("set_file_result", vec![cell], true).await
    }

    async fn set_file_state(&self, file: AttachmentId, state: FileState) -> Result<()> {
        let cell = state_cell(file, state);
        self.0.write("set_file_state", vec![cell], true).await
    }

    async fn forget_file(&self, file: AttachmentId) -> Result<()> {
        let mut cells = vec![state_cell(file, FileState::Erased)];
        for (_, row) in self.files(&[file]).await? {
            cells.push(facts_cell(file, &row.facts.without_texts(), 1));
        }
        self.0.write("forget_file", cells, true).await?;
        self.0.erased().await
    }

    async fn files(&self, files: &[AttachmentId]) -> Result<Vec<(AttachmentId, FileRow)>> {
        let mut found = Vec::with_capacity(files.len());
        for file in files {
            let range = Range::prefix(&file_key(*file));
            let cells = self.0.scan(range, COLUMNS, false).await?;
            found.extend(row(&cells)?.map(|row| (*file, row)));
        }
        Ok(found)
    }

    async fn references(&self, file: AttachmentId) -> Result<Vec<Reference>> {
        const OPERATION: &str = "references";
        let key = Key::new(REFERENCE).bytes(file.0.as_bytes());
        let seq_at = key.0.len();
        let cells = self.0.scan(Range::prefix(&key), REFERENCES_MAX, false);
        let mut references = Vec::new();
        for cell in cells.await? {
            let (on,) = decode(OPERATION, &cell.value)?;
            references.push(Reference {
                file,
                seq: take_u64(OPERATION, &cell.key, seq_at)?,
                rev: cell.timestamp,
                on,
            });
        }
        Ok(references)
    }

    async fn add_work(&self, day: u32, file: AttachmentId) -> Result<()> {
        let cell = work_cell(day, file);
        self.0.write("add_work", vec![cell], true).await
    }

    async fn work(
        &self,
        shard: WorkShard,
        after_file: Option<AttachmentId>,
        limit: usize,
    ) -> Result<Vec<AttachmentId>> {
        let key = work_key(shard);
        let id_at = key.0.len();
        let mut range = Range::prefix(&key);
        if let Some(file) = after_file {
            range.from = after(&key.bytes(file.0.as_bytes()).0);
        }
        let mut files = Vec::new();
        for cell in self.0.scan(range, limit, false).await? {
            let id = take("work", &cell.key, id_at)?;
            files.push(AttachmentId(uuid::Uuid::from_bytes(id)));
        }
        Ok(files)
    }

    async fn work_shards(&self) -> Result<Vec<WorkShard>> {
        const OPERATION: &str = "work_shards";
        let mut range = Range::prefix(&Key::new(WORK));
        let mut shards = Vec::new();
        while let [cell] = &self.0.scan(range.clone(), 1, false).await?[..] {
            let day = u32::from_be_bytes(take(OPERATION, &cell.key, 1)?);
            let [shard] = take(OPERATION, &cell.key, 5)?;
            let shard = WorkShard { day, shard };
            range.from = Range::prefix(&work_key(shard)).to;
            shards.push(shard);
        }
        Ok(shards)
    }

    async fn finish_work(&self, shard: WorkShard) -> Result<()> {
        self.remove(Range::prefix(&work_key(shard)), |_| true).await
    }

    async fn usage(&self, user: &UserId, day: u32) -> Result<u64> {
        let cells = self.0.get(vec![usage_key(user, day).0]).await?;
        Ok(cells.first().map_or(0, |cell| cell.timestamp))
    }

    async fn set_usage(&self, user: &UserId, day: u32, bytes: u64) -> Result<()> {
        let cell = usage_key(user, day).cell(bytes, Vec::new());
        self.0.write("set_usage", vec![cell], true).await
    }
}
