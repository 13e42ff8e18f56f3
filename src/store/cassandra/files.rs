//! Uploaded files as columns.

use async_trait::async_trait;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use uuid::Uuid;

use super::{
    Cassandra,
    batches::Unit,
    columns::{STATEMENT_BYTES, big, corrupt, day_column, from_json, json, small, unsigned},
    statements::Statements,
};
use crate::{
    clock::today,
    model::{AttachmentId, FileFacts, FileResult, FileState, UserId},
    store::{FileRow, FileStore, LogRow, REFERENCES_MAX, Reference, Result, WorkShard},
};

/// Files that are read concurrently.
const FILES_AT_ONCE: usize = 16;

impl Statements {
    fn file_state(&self, file: AttachmentId, state: FileState) -> Unit {
        let number = big(state.number());
        let values = Box::new((number, number, file.0));
        Unit::one(&self.set_file_state, values, STATEMENT_BYTES)
    }

    fn file_work(&self, day: u32, file: AttachmentId) -> Unit {
        let WorkShard { day, shard } = WorkShard::of(day, file);
        let values = Box::new((day_column(day), i32::from(shard), file.0));
        Unit::one(&self.insert_work, values, STATEMENT_BYTES)
    }

    pub(super) fn reference(&self, reference: Reference) -> Unit {
        let (rev, seq) = (big(reference.rev), big(reference.seq));
        let values = Box::new((rev, reference.on, rev, reference.file.0, seq));
        Unit::one(&self.set_reference, values, STATEMENT_BYTES)
    }

    /// Returns the units of a reference that changed. A sweep erases a dropped file if nothing else does before.
    pub(super) fn changed_reference(&self, reference: Reference) -> impl Iterator<Item = Unit> {
        let work = (!reference.on).then(|| self.file_work(today(), reference.file));
        [self.reference(reference)].into_iter().chain(work)
    }

    /// Returns the units of the references of messages as they were sent.
    pub(super) fn references_of(&self, rows: &[LogRow]) -> impl Iterator<Item = Unit> {
        let entries = rows.iter().map(|row| &row.record);
        let references = entries.flat_map(|entry| Reference::of_entry(entry));
        references.map(|reference| self.reference(reference))
    }
}

impl Cassandra {
    async fn file(&self, file: AttachmentId) -> Result<Option<(AttachmentId, FileRow)>> {
        const OPERATION: &str = "files";
        type Columns = (Option<String>, Option<String>, Option<i64>);
        let found: Option<Columns> = self
            .read_one(OPERATION, &self.statements.file, (file.0,))
            .await?;
        let Some((Some(facts), result, Some(state))) = found else {
            return Ok(None);
        };
        let result = result.map(|text| from_json(OPERATION, &text)).transpose()?;
        let state = FileState::of(unsigned(state));
        let row = FileRow {
            facts: from_json(OPERATION, &facts)?,
            result,
            state: state.ok_or_else(|| corrupt(OPERATION, "unknown state"))?,
        };
        Ok(Some((file, row)))
    }
}

#[async_trait]
impl FileStore for Cassandra {
    async fn create_file(&self, file: AttachmentId, facts: &FileFacts, day: u32) -> Result<()> {
        const OPERATION: &str = "create_file";
        let s = &self.statements;
        // The work comes first, so that no file is without.
        let work = s.file_work(day, file);
        self.batches.write(OPERATION, vec![work]).await?;
        let facts = json(facts);
        let bytes = STATEMENT_BYTES + facts.len();
        let mut unit = Unit::one(&s.insert_file, Box::new((file.0, facts)), bytes);
        unit.extend([s.file_state(file, FileState::Pending)]);
        self.batches.write(OPERATION, vec![unit]).await
    }

    async fn set_file_result(&self, file: AttachmentId, result: &FileResult) -> Result<()> {
        let result = json(result);
        let bytes = STATEMENT_BYTES + result.len();
        let values = Box::new((result, file.0));
        let unit = Unit::one(&self.statements.set_file_result, values, bytes);
        self.batches.write("set_file_result", vec![unit]).await
    }

    async fn set_file_state(&self, file: AttachmentId, state: FileState) -> Result<()> {
        let unit = self.statements.file_state(file, state);
        self.batches.write("set_file_state", vec![unit]).await
    }

    async fn forget_file(&self, file: AttachmentId) -> Result<()> {
        let s = &self.statements;
        let mut unit = s.file_state(file, FileState::Erased);
        for (_, row) in self.files(&[file]).await? {
            let facts = json(&row.facts.without_texts());
            let bytes = STATEMENT_BYTES + facts.len();
            let values = Box::new((facts, file.0));
            unit.extend([Unit::one(&s.erase_file, values, bytes)]);
        }
        self.batches.write("forget_file", vec![unit]).await
    }

    async fn files(&self, files: &[AttachmentId]) -> Result<Vec<(AttachmentId, FileRow)>> {
        let found = stream::iter(files.to_vec()).map(|file| self.file(file));
        let found = found.buffered(FILES_AT_ONCE);
        found
            .try_filter_map(async |row| Ok(row))
            .try_collect()
            .await
    }

    async fn references(&self, file: AttachmentId) -> Result<Vec<Reference>> {
        let values = (file.0, small(REFERENCES_MAX));
        let rows: Vec<(i64, bool, i64)> = self
            .read("references", &self.statements.references, values)
            .await?;
        let reference = |(seq, on, rev)| Reference {
            file,
            seq: unsigned(seq),
            rev: unsigned(rev),
            on,
        };
        Ok(rows.into_iter().map(reference).collect())
    }

    async fn add_work(&self, day: u32, file: AttachmentId) -> Result<()> {
        let unit = self.statements.file_work(day, file);
        self.batches.write("add_work", vec![unit]).await
    }

    async fn work(
        &self,
        shard: WorkShard,
        after: Option<AttachmentId>,
        limit: usize,
    ) -> Result<Vec<AttachmentId>> {
        const OPERATION: &str = "work";
        let s = &self.statements;
        let (day, number) = (day_column(shard.day), i32::from(shard.shard));
        let rows: Vec<(Uuid,)> = match after {
            None => {
                let values = (day, number, small(limit));
                self.read(OPERATION, &s.work_first, values).await?
            }
            Some(file) => {
                let values = (day, number, file.0, small(limit));
                self.read(OPERATION, &s.work, values).await?
            }
        };
        Ok(rows.into_iter().map(|(id,)| AttachmentId(id)).collect())
    }

    async fn work_shards(&self) -> Result<Vec<WorkShard>> {
        let rows: Vec<(i32, i32)> = self
            .read_pages("work_shards", &self.statements.work_shards, ())
            .await?;
        let shard = |(day, shard)| WorkShard {
            day: u32::try_from(day).unwrap_or_default(),
            shard: u8::try_from(shard).unwrap_or_default(),
        };
        Ok(rows.into_iter().map(shard).collect())
    }

    async fn finish_work(&self, shard: WorkShard) -> Result<()> {
        let values = Box::new((day_column(shard.day), i32::from(shard.shard)));
        let unit = Unit::one(&self.statements.delete_work, values, STATEMENT_BYTES);
        self.batches.write("finish_work", vec![unit]).await
    }

    async fn usage(&self, user: &UserId, day: u32) -> Result<u64> {
        let values = (user.as_str(), day_column(day));
        let row: Option<(Option<i64>,)> = self
            .read_one("usage", &self.statements.usage, values)
            .await?;
        Ok(row.and_then(|(bytes,)| bytes).map_or(0, unsigned))
    }

    async fn set_usage(&self, user: &UserId, day: u32, bytes: u64) -> Result<()> {
        let bytes = big(bytes);
        let values = Box::new((bytes, bytes, user.as_str().to_owned(), day_column(day)));
        let unit = Unit::one(&self.statements.set_usage, values, STATEMENT_BYTES);
        self.batches.write("set_usage", vec![unit]).await
    }
}
