//! Erasing the texts of deleted entries, and erasing them again after the hint window.

use std::collections::BTreeSet;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use rand::seq::SliceRandom as _;
use scylla::DeserializeRow;
use uuid::Uuid;

use super::{
    super::{Erasure, Result, Store as _},
    Cassandra,
    batches::Unit,
    changes::ChangeColumns,
    columns::{STATEMENT_BYTES, big, bucket_of, corrupt, day_column, unsigned, user},
    statements::Statements,
};
use crate::{
    clock,
    model::{ClientId, Content, ConversationId, Rev, Seq, UserId},
    store::LogRow,
};

const OPERATION: &str = "erase";
/// Places of one conversation that are read and erased concurrently.
const PLACES_AT_ONCE: usize = 16;
/// Full days after which an erasure is repeated. Cassandra replays hints of a node for at most `max_hint_window` after
/// it failed, 3 hours by default, and a node that comes back later is repaired within `gc_grace_seconds`, 10 days.
const REPEAT_AFTER_DAYS: i32 = 10;
/// Partitions of the erasures of one day.
const SHARDS: u64 = 256;
/// Partitions that one sweep repeats. Each has about a 256th of what was erased on one day.
const PARTITIONS_AT_ONCE: usize = 8;

/// A place with a text to erase.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Target {
    /// All rows at the seq, and the state of the entry.
    Entry(Seq),
    /// The rows at the seq that have this sender and this client id.
    Copy(Seq, UserId, ClientId),
    /// All rows at the rev.
    Edit(Rev),
}

impl Target {
    fn position(&self) -> u64 {
        match self {
            Self::Entry(at) | Self::Copy(at, ..) | Self::Edit(at) => *at,
        }
    }
}

fn today() -> i32 {
    day_column(clock::today())
}

/// Returns the last day whose erasures are repeated.
pub(super) fn last_due() -> i32 {
    today() - REPEAT_AFTER_DAYS - 1
}

/// Returns the partition of an erasure within its day. Erasures of neighbouring entries have the same one.
fn shard_of(conversation: ConversationId, position: u64) -> i32 {
    let first = u64::from(conversation.0.as_bytes()[0]);
    i32::try_from((first + position / SHARDS) % SHARDS).unwrap_or_default()
}

/// A record of an erasure. The columns are the key of its row.
#[derive(DeserializeRow)]
struct ErasureColumns {
    conversation_id: Uuid,
    place: String,
    position: i64,
    sender: String,
    client_id: Uuid,
}

impl ErasureColumns {
    fn target(&self) -> Result<Target> {
        let at = unsigned(self.position);
        match self.place.as_str() {
            "entry" => Ok(Target::Entry(at)),
            "copy" => {
                let sender = user(OPERATION, &self.sender)?;
                Ok(Target::Copy(at, sender, ClientId(self.client_id)))
            }
            "edit" => Ok(Target::Edit(at)),
            other => Err(corrupt(OPERATION, format!("unknown place {other:?}"))),
        }
    }
}

impl Statements {
    fn erase_message(&self, conversation: ConversationId, row: &LogRow) -> Unit {
        let seq = row.record.seq;
        let (bucket, seq, epoch) = (big(bucket_of(seq)), big(seq), big(row.epoch));
        let values = Box::new((
            String::new(),
            String::new(),
            conversation.0,
            bucket,
            seq,
            epoch,
        ));
        Unit::one(&self.erase_message, values, STATEMENT_BYTES)
    }

    fn record(&self, conversation: ConversationId, day: i32, target: &Target) -> Unit {
        let position = target.position();
        let (name, sender, client_id) = match target {
            Target::Entry(_) => ("entry", String::new(), Uuid::nil()),
            Target::Copy(_, sender, id) => ("copy", sender.as_str().to_owned(), id.0),
            Target::Edit(_) => ("edit", String::new(), Uuid::nil()),
        };
        let values = Box::new((
            day,
            shard_of(conversation, position),
            conversation.0,
            name.to_owned(),
            big(position),
            sender,
            client_id,
        ));
        Unit::one(&self.insert_erasure, values, STATEMENT_BYTES)
    }
}

impl Cassandra {
    /// Records the erasures, so that a later sweep repeats them, and does them.
    pub(super) async fn erase_entries(
        &self,
        conversation: ConversationId,
        erasures: &[Erasure],
    ) -> Result<()> {
        let found = stream::iter(erasures.to_vec());
        let found = found.map(|erasure| self.targets(conversation, erasure));
        let mut found = found.buffer_unordered(PLACES_AT_ONCE);
        let mut targets = BTreeSet::new();
        while let Some(some) = found.try_next().await? {
            targets.extend(some);
        }
        let day = today();
        let record = |target| self.statements.record(conversation, day, target);
        let records = targets.iter().map(record).collect();
        self.batches.write(OPERATION, records).await?;
        let erasing = targets.into_iter().map(|target| (conversation, target));
        self.erase_targets(erasing.collect()).await
    }

    async fn targets(&self, conversation: ConversationId, erasure: Erasure) -> Result<Vec<Target>> {
        let Erasure {
            seq,
            sender,
            client_id,
            edits,
        } = erasure;
        let copies = self.sends(conversation, &sender, client_id).await?;
        let copies = copies.into_iter().map(|send| send.seq);
        let copies = copies.filter(|copy| *copy != seq);
        let mut targets = vec![Target::Entry(seq)];
        targets.extend(copies.map(|copy| Target::Copy(copy, sender.clone(), client_id)));
        targets.extend(edits.into_iter().map(Target::Edit));
        Ok(targets)
    }

    async fn erase_targets(&self, targets: Vec<(ConversationId, Target)>) -> Result<()> {
        let erased = stream::iter(targets).map(|(id, target)| self.erase_target(id, target));
        let erased = erased.buffer_unordered(PLACES_AT_ONCE);
        erased.try_collect().await
    }

    async fn erase_target(&self, id: ConversationId, target: Target) -> Result<()> {
        let s = &self.statements;
        let mut unit = Unit::default();
        if let Target::Edit(rev) = target {
            let values = (id.0, big(bucket_of(rev)), big(rev), big(rev));
            let rows: Vec<ChangeColumns> = self.read(OPERATION, &s.changes, values).await?;
            for row in rows {
                let row = row.row(OPERATION)?;
                unit.extend(row.and_then(|row| s.erase_change(id, &row)));
            }
        } else {
            let seq = target.position();
            let page = self.range(OPERATION, id, seq, seq).await?;
            let which = |row: &&LogRow| match &target {
                Target::Copy(_, sender, client_id) => {
                    row.record.client_id == *client_id && row.record.sender == *sender
                }
                Target::Entry(_) | Target::Edit(_) => true,
            };
            let texts = page
                .rows
                .iter()
                .filter(|row| matches!(row.record.content, Content::Text { .. }));
            unit.extend(texts.filter(which).map(|row| s.erase_message(id, row)));
            let states = page
                .states
                .iter()
                .filter(|_| matches!(target, Target::Entry(_)));
            unit.extend(states.filter_map(|(seq, state)| s.erase_state(id, *seq, state)));
        }
        if unit.statements.is_empty() {
            return Ok(());
        }
        self.batches.write(OPERATION, vec![unit]).await
    }

    /// Repeats the erasures up to a day, which is before the hint window, and removes their records (rule [sweep]). A
    /// dead node's hints may have brought a text to a place at which no row was when it was erased.
    pub(super) async fn repeat_erasures(&self, last: i32) -> Result<()> {
        let s = &self.statements;
        let partitions: Vec<(i32, i32)> = self
            .read_pages(OPERATION, &s.erasure_partitions, ())
            .await?;
        let mut due: Vec<_> = partitions
            .into_iter()
            .filter(|(day, _)| *day <= last)
            .collect();
        // Gateways sweep at the same time. In random order they seldom repeat the same partition.
        due.shuffle(&mut rand::rng());
        for partition in due.into_iter().take(PARTITIONS_AT_ONCE) {
            let rows: Vec<ErasureColumns> =
                self.read_pages(OPERATION, &s.erasures, partition).await?;
            let mut targets = Vec::with_capacity(rows.len());
            for row in &rows {
                targets.push((ConversationId(row.conversation_id), row.target()?));
            }
            self.erase_targets(targets).await?;
            let removed = Unit::one(&s.delete_erasures, Box::new(partition), STATEMENT_BYTES);
            self.batches.write(OPERATION, vec![removed]).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These values are part of the stored format: they must never change.
    #[test]
    fn partitions_of_erasures_stay_where_they_are() {
        let id = ConversationId(Uuid::from_bytes([250; 16]));
        let shards = [1, 255, 256, 256 * 6].map(|position| shard_of(id, position));
        assert_eq!(shards, [250, 250, 251, 0]);
    }
}
