//! Consumers and devices as columns.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    Cassandra,
    batches::Unit,
    columns::{
        STATEMENT_BYTES, big, corrupt, day_column, from_json, json, small, unset, unsigned, user,
    },
    statements::Statements,
};
use crate::{
    model::{ConsumerName, ConversationId, Cursor, Device, Millis, UserId},
    store::{
        ConsumerState, ConsumerStore, EventAt, FOREVER, InboxKey, InboxSettings, LaggingRow,
        Result, SkippedRow, SkippedShard, Store as _, TokenRow, Version, consumer_shard,
    },
};

/// Offsets that are written at once.
const OFFSETS_AT_ONCE: usize = 1_000;
/// The places of skipped events.
const ENTRY: &str = "entry";
const CHANGE: &str = "change";

/// The column `state` of a consumer. It is empty if the state was removed.
#[derive(Serialize, Deserialize)]
struct StoredState {
    enabled: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// The columns of a lagging row, and their timestamps, which are the heads.
type LaggingColumns = (Uuid, Option<i64>, Option<i64>, Option<i64>, Option<i64>);

fn lagging_of(columns: LaggingColumns) -> Option<LaggingRow> {
    let (id, seq_at, rev_at, seq, rev) = columns;
    let oldest = match (seq_at, rev_at) {
        (Some(one), Some(other)) => one.min(other),
        (one, other) => one.or(other)?,
    };
    let head = |head: Option<i64>| head.map_or(0, unsigned);
    Some(LaggingRow {
        conversation: ConversationId(id),
        heads: Cursor(head(seq), head(rev)),
        oldest,
    })
}

fn state_of(
    operation: &'static str,
    state: Option<&str>,
    version: Option<i64>,
) -> Result<Option<ConsumerState>> {
    let (Some(text), Some(version)) = (state.filter(|text| !text.is_empty()), version) else {
        return Ok(None);
    };
    let StoredState { enabled, reason } = from_json(operation, text)?;
    Ok(Some(ConsumerState {
        version: unsigned(version),
        enabled,
        reason,
    }))
}

/// Returns the columns of the position of an event.
fn place_of(at: EventAt) -> (&'static str, i64) {
    match at {
        EventAt::Entry(seq) => (ENTRY, big(seq)),
        EventAt::Change(rev) => (CHANGE, big(rev)),
    }
}

impl Statements {
    /// Returns the unit of an offset. Its parts have themselves as timestamps (rule [offset]).
    fn offset(&self, conversation: ConversationId, consumer: &ConsumerName, at: Cursor) -> Unit {
        let part = |statement, position| {
            let name = consumer.as_str().to_owned();
            let values = Box::new((big(position), big(position), conversation.0, name));
            Unit::one(statement, values, STATEMENT_BYTES)
        };
        let mut unit = part(&self.set_offset_seq, at.0);
        unit.extend([part(&self.set_offset_rev, at.1)]);
        unit
    }

    /// Returns the unit that notes heads with the time of the oldest event. A head of 0 is not written.
    fn lag(
        &self,
        consumer: &ConsumerName,
        conversation: ConversationId,
        heads: Cursor,
        oldest: Millis,
    ) -> Unit {
        let mut unit = Unit::default();
        let parts = [
            (&self.set_lagging_seq, heads.0),
            (&self.set_lagging_rev, heads.1),
        ];
        for (statement, head) in parts.into_iter().filter(|(_, head)| *head > 0) {
            let (name, shard) = place(consumer, conversation);
            let values = Box::new((big(head), oldest, name, shard, conversation.0));
            unit.extend([Unit::one(statement, values, STATEMENT_BYTES)]);
        }
        unit
    }

    /// Returns the unit that removes heads up to an offset. The timestamp is the offset, so higher heads win, and the
    /// others stay removed (rule [lagging]).
    fn clear(&self, consumer: &ConsumerName, conversation: ConversationId, upto: Cursor) -> Unit {
        let mut unit = Unit::default();
        let parts = [
            (&self.clear_lagging_seq, upto.0),
            (&self.clear_lagging_rev, upto.1),
        ];
        for (statement, offset) in parts.into_iter().filter(|(_, offset)| *offset > 0) {
            let (name, shard) = place(consumer, conversation);
            let values = Box::new((big(offset), name, shard, conversation.0));
            unit.extend([Unit::one(statement, values, STATEMENT_BYTES)]);
        }
        unit
    }
}

/// Returns the partition of a lagging row.
fn place(consumer: &ConsumerName, conversation: ConversationId) -> (String, i32) {
    let shard = consumer_shard(conversation);
    (consumer.as_str().to_owned(), i32::from(shard))
}

impl Cassandra {
    /// Writes a unit, unless it is empty.
    async fn write_unit(&self, operation: &'static str, unit: Unit) -> Result<()> {
        if unit.statements.is_empty() {
            return Ok(());
        }
        self.batches.write(operation, vec![unit]).await
    }

    async fn write_state(
        &self,
        operation: &'static str,
        consumer: &ConsumerName,
        version: Version,
        state: String,
    ) -> Result<()> {
        let bytes = STATEMENT_BYTES + state.len();
        let name = consumer.as_str().to_owned();
        // Rule [version].
        let values = Box::new((big(version), state, name));
        let unit = Unit::one(&self.statements.set_consumer, values, bytes);
        self.write_unit(operation, unit).await
    }

    async fn write_token(
        &self,
        operation: &'static str,
        hash: &[u8; 32],
        version: Version,
        (user, device): (&str, &str),
    ) -> Result<()> {
        let (user, device) = (user.to_owned(), device.to_owned());
        let values = Box::new((big(version), user, device, hash.to_vec()));
        let unit = Unit::one(&self.statements.set_device_token, values, STATEMENT_BYTES);
        self.write_unit(operation, unit).await
    }
}

#[async_trait]
impl ConsumerStore for Cassandra {
    async fn offsets(&self, conversation: ConversationId) -> Result<Vec<(ConsumerName, Cursor)>> {
        let rows: Vec<(String, Option<i64>, Option<i64>)> = self
            .read("offsets", &self.statements.offsets, (conversation.0,))
            .await?;
        let part = |part: Option<i64>| part.map_or(0, unsigned);
        let offset = |(name, seq, rev): (String, _, _)| {
            let offset = Cursor(part(seq), part(rev));
            (ConsumerName::stored(&name), offset)
        };
        Ok(rows.into_iter().map(offset).collect())
    }

    async fn set_offsets(&self, offsets: &[(ConversationId, ConsumerName, Cursor)]) -> Result<()> {
        for some in offsets.chunks(OFFSETS_AT_ONCE) {
            let unit = |(conversation, consumer, at): &(_, _, _)| {
                self.statements.offset(*conversation, consumer, *at)
            };
            let units = some.iter().map(unit).collect();
            self.batches.write("set_offsets", units).await?;
        }
        Ok(())
    }

    async fn set_lagging(
        &self,
        consumer: &ConsumerName,
        conversation: ConversationId,
        heads: Cursor,
        oldest: Millis,
    ) -> Result<()> {
        let unit = self.statements.lag(consumer, conversation, heads, oldest);
        self.write_unit("set_lagging", unit).await
    }

    async fn clear_lagging(
        &self,
        consumer: &ConsumerName,
        conversation: ConversationId,
        upto: Cursor,
    ) -> Result<()> {
        let unit = self.statements.clear(consumer, conversation, upto);
        self.write_unit("clear_lagging", unit).await
    }

    async fn lagging(
        &self,
        consumer: &ConsumerName,
        shard: u8,
        after: Option<ConversationId>,
        limit: usize,
    ) -> Result<Vec<LaggingRow>> {
        const OPERATION: &str = "lagging";
        let s = &self.statements;
        let (name, shard) = (consumer.as_str(), i32::from(shard));
        let rows: Vec<LaggingColumns> = match after {
            None => {
                let values = (name, shard, small(limit));
                self.read(OPERATION, &s.lagging_first, values).await?
            }
            Some(id) => {
                let values = (name, shard, id.0, small(limit));
                self.read(OPERATION, &s.lagging, values).await?
            }
        };
        Ok(rows.into_iter().filter_map(lagging_of).collect())
    }

    async fn lagging_row(
        &self,
        consumer: &ConsumerName,
        conversation: ConversationId,
    ) -> Result<Option<LaggingRow>> {
        let (name, shard) = place(consumer, conversation);
        let values = (name, shard, conversation.0);
        let row: Option<LaggingColumns> = self
            .read_one("lagging_row", &self.statements.lagging_row, values)
            .await?;
        Ok(row.and_then(lagging_of))
    }

    async fn remove_replay(
        &self,
        replay: &ConsumerName,
        conversation: ConversationId,
    ) -> Result<()> {
        debug_assert!(replay.is_replay(), "{replay}");
        let s = &self.statements;
        let (name, shard) = place(replay, conversation);
        let lagging = Box::new((big(FOREVER), name.clone(), shard, conversation.0));
        let offset = Box::new((big(FOREVER), conversation.0, name));
        let units = vec![
            Unit::one(&s.delete_lagging, lagging, STATEMENT_BYTES),
            Unit::one(&s.delete_offset, offset, STATEMENT_BYTES),
        ];
        self.batches.write("remove_replay", units).await
    }

    async fn consumer_state(&self, consumer: &ConsumerName) -> Result<Option<ConsumerState>> {
        const OPERATION: &str = "consumer_state";
        let row: Option<(Option<String>, Option<i64>)> = self
            .read_one(OPERATION, &self.statements.consumer, (consumer.as_str(),))
            .await?;
        let (state, version) = row.unwrap_or_default();
        state_of(OPERATION, state.as_deref(), version)
    }

    async fn consumers(&self) -> Result<Vec<(ConsumerName, ConsumerState)>> {
        const OPERATION: &str = "consumers";
        let rows: Vec<(String, Option<String>, Option<i64>)> = self
            .read_pages(OPERATION, &self.statements.consumers, ())
            .await?;
        let mut consumers = Vec::new();
        for (name, state, version) in rows {
            let state = state_of(OPERATION, state.as_deref(), version)?;
            consumers.extend(state.map(|state| (ConsumerName::stored(&name), state)));
        }
        Ok(consumers)
    }

    async fn set_consumer_state(
        &self,
        consumer: &ConsumerName,
        state: &ConsumerState,
    ) -> Result<()> {
        let stored = json(&StoredState {
            enabled: state.enabled,
            reason: state.reason.clone(),
        });
        self.write_state("set_consumer_state", consumer, state.version, stored)
            .await
    }

    async fn remove_consumer_state(&self, consumer: &ConsumerName, version: Version) -> Result<()> {
        let empty = String::new();
        self.write_state("remove_consumer_state", consumer, version, empty)
            .await
    }

    async fn add_skipped(
        &self,
        consumer: &ConsumerName,
        day: u32,
        skipped: &SkippedRow,
    ) -> Result<()> {
        let (name, shard) = place(consumer, skipped.conversation);
        let (place, position) = place_of(skipped.at);
        let values = Box::new((
            name,
            day_column(day),
            shard,
            skipped.conversation.0,
            place,
            position,
            unset(skipped.status.map(i32::from)),
        ));
        let unit = Unit::one(&self.statements.insert_skipped, values, STATEMENT_BYTES);
        self.write_unit("add_skipped", unit).await
    }

    async fn skipped_shards(&self, consumer: &ConsumerName) -> Result<Vec<SkippedShard>> {
        let rows: Vec<(String, i32, i32)> = self
            .read_pages("skipped_shards", &self.statements.skipped_shards, ())
            .await?;
        let of_consumer = rows.into_iter().filter(|row| row.0 == consumer.as_str());
        let shard = |(_, day, shard)| SkippedShard {
            consumer: consumer.clone(),
            day: u32::try_from(day).unwrap_or_default(),
            shard: u8::try_from(shard).unwrap_or_default(),
        };
        Ok(of_consumer.map(shard).collect())
    }

    async fn skipped(
        &self,
        shard: &SkippedShard,
        after: Option<(ConversationId, EventAt)>,
        limit: usize,
    ) -> Result<Vec<SkippedRow>> {
        const OPERATION: &str = "skipped";
        let s = &self.statements;
        let partition = (
            shard.consumer.as_str(),
            day_column(shard.day),
            i32::from(shard.shard),
        );
        let (name, day, number) = partition;
        let rows: Vec<(Uuid, String, i64, Option<i32>)> = match after {
            None => {
                let values = (name, day, number, small(limit));
                self.read(OPERATION, &s.skipped_first, values).await?
            }
            Some((id, at)) => {
                let (place, position) = place_of(at);
                let values = (name, day, number, id.0, place, position, small(limit));
                self.read(OPERATION, &s.skipped, values).await?
            }
        };
        let row = |(id, place, position, status): (Uuid, String, i64, Option<i32>)| {
            let at = match place.as_str() {
                ENTRY => EventAt::Entry(unsigned(position)),
                CHANGE => EventAt::Change(unsigned(position)),
                other => return Err(corrupt(OPERATION, format!("unknown place {other}"))),
            };
            Ok(SkippedRow {
                conversation: ConversationId(id),
                at,
                status: status.and_then(|status| u16::try_from(status).ok()),
            })
        };
        rows.into_iter().map(row).collect()
    }

    async fn devices(&self, user: &UserId) -> Result<Option<(Version, Vec<Device>)>> {
        const OPERATION: &str = "devices";
        let row: Option<(Option<String>, Option<i64>)> = self
            .read_one(OPERATION, &self.statements.devices, (user.as_str(),))
            .await?;
        let Some((Some(text), Some(version))) = row else {
            return Ok(None);
        };
        let devices = match text.as_str() {
            "" => Vec::new(),
            text => from_json(OPERATION, text)?,
        };
        Ok(Some((unsigned(version), devices)))
    }

    async fn set_devices(&self, user: &UserId, version: Version, devices: &[Device]) -> Result<()> {
        let text = match devices {
            [] => String::new(),
            devices => json(&devices),
        };
        let bytes = STATEMENT_BYTES + text.len();
        let values = Box::new((big(version), text, user.as_str().to_owned()));
        let unit = Unit::one(&self.statements.set_devices, values, bytes);
        self.write_unit("set_devices", unit).await
    }

    async fn device_token(&self, hash: &[u8; 32]) -> Result<Option<TokenRow>> {
        const OPERATION: &str = "device_token";
        type Columns = (Option<String>, Option<String>, Option<i64>);
        let row: Option<Columns> = self
            .read_one(OPERATION, &self.statements.device_token, (&hash[..],))
            .await?;
        let Some((Some(name), Some(device), Some(version))) = row else {
            return Ok(None);
        };
        if name.is_empty() {
            return Ok(None);
        }
        Ok(Some(TokenRow {
            version: unsigned(version),
            user: user(OPERATION, &name)?,
            device,
        }))
    }

    async fn set_device_token(&self, hash: &[u8; 32], row: &TokenRow) -> Result<()> {
        let owner = (row.user.as_str(), row.device.as_str());
        self.write_token("set_device_token", hash, row.version, owner)
            .await
    }

    async fn remove_device_token(&self, hash: &[u8; 32], version: Version) -> Result<()> {
        self.write_token("remove_device_token", hash, version, ("", ""))
            .await
    }

    async fn set_settings(
        &self,
        user: &UserId,
        conversation: ConversationId,
        settings: &InboxSettings,
    ) -> Result<bool> {
        let found = self
            .inbox_rows(user, &[InboxKey::summary(conversation)])
            .await?;
        // A summary never disappears, so this stays true.
        if found.iter().all(|row| row.summary.is_none()) {
            return Ok(false);
        }
        let values = Box::new((
            big(settings.version),
            settings.muted_until.unwrap_or_default(),
            settings.push,
            user.as_str().to_owned(),
            conversation.0,
        ));
        let unit = Unit::one(&self.statements.set_inbox_settings, values, STATEMENT_BYTES);
        self.write_unit("set_settings", unit).await?;
        Ok(true)
    }
}
