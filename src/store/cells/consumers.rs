//! The cells of consumers and devices.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::{
    Cell, CellStore, Cells, SWEEP_KEYS,
    keys::{
        CONSUMER, DEVICES, Key, LAGGING, MUTED, OFFSET, PUSH, Range, SKIPPED, TOKEN, after,
        inbox_key,
    },
    summaries::{muted_value, push_value},
    today,
    values::{corrupt, decode, encode, take, take_conversation, take_u64},
};
use crate::{
    model::{
        ConsumerName, ConversationId, Cursor, Device, Millis, PushContent, PushProvider, UserId,
    },
    store::{
        ConsumerState, ConsumerStore, EventAt, FOREVER, InboxKey, InboxSettings, LaggingRow,
        Result, SKIPPED_DAYS, SkippedRow, SkippedShard, Store as _, TokenRow, Version,
        consumer_shard,
    },
};

/// Columns of an offset and of a lagging row, and of events that were skipped.
const SEQ: u8 = b's';
const REV: u8 = b'r';

/// The first byte of the value of a removed cell. Values are empty or MessagePack arrays, so this is above them: of two
/// cells with one timestamp the removed one wins, as a tombstone does in Cassandra.
const REMOVED: u8 = u8::MAX;
/// Full days for which a removed cell keeps late writes out. No write arrives so late.
const REMOVED_DAYS: u32 = 1;
/// Offsets that are written at once.
const OFFSETS_AT_ONCE: usize = 1_000;
/// Cells that one step of a scan for lagging rows reads at least. Many may be removed.
const LAGGING_CELLS: usize = 256;

#[derive(Serialize, Deserialize)]
struct StoredState(bool, Option<String>);

#[derive(Serialize, Deserialize)]
struct StoredDevice(String, PushProvider, String, PushContent, Version);

#[derive(Serialize, Deserialize)]
struct StoredToken(UserId, String);

fn offset_key(conversation: ConversationId, consumer: &ConsumerName) -> Key {
    let key = Key::new(OFFSET).conversation(conversation);
    key.text(consumer.as_str())
}

fn shard_key(consumer: &ConsumerName, shard: u8) -> Key {
    let key = Key::new(LAGGING).text(consumer.as_str());
    key.bytes(&[shard])
}

fn lagging_key(consumer: &ConsumerName, conversation: ConversationId) -> Key {
    shard_key(consumer, consumer_shard(conversation)).conversation(conversation)
}

fn state_key(consumer: &ConsumerName) -> Key {
    Key::new(CONSUMER).text(consumer.as_str())
}

fn skipped_key(consumer: &ConsumerName, day: u32) -> Key {
    Key::new(SKIPPED).text(consumer.as_str()).u32(day)
}

fn event_key(shard: &SkippedShard, conversation: ConversationId, at: EventAt) -> Key {
    let key = skipped_key(&shard.consumer, shard.day).bytes(&[shard.shard]);
    let (column, number) = match at {
        EventAt::Entry(seq) => (SEQ, seq),
        EventAt::Change(rev) => (REV, rev),
    };
    key.conversation(conversation).bytes(&[column]).u64(number)
}

fn token_key(hash: &[u8; 32]) -> Key {
    Key::new(TOKEN).bytes(hash)
}

/// Returns the value of a cell that is removed today.
fn removed_value() -> Vec<u8> {
    [&[REMOVED][..], &today().to_be_bytes()].concat()
}

fn is_removed(cell: &Cell) -> bool {
    cell.value.first() == Some(&REMOVED)
}

/// Returns the consumer whose name begins here in a key, and the position after it.
fn take_consumer(operation: &'static str, key: &[u8], at: usize) -> Result<(ConsumerName, usize)> {
    let rest = key.get(at..).unwrap_or_default();
    let mut parts = rest.splitn(2, |byte| *byte == 0);
    let name = match (parts.next(), parts.next()) {
        (Some(name), Some(_)) => name,
        _ => return Err(corrupt(operation, "a name without an end")),
    };
    let text = std::str::from_utf8(name).map_err(|e| corrupt(operation, e))?;
    Ok((ConsumerName::stored(text), at + name.len() + 1))
}

/// Returns the cells of the parts of a cursor that are not zero.
fn parts(key: impl Fn() -> Key, cursor: Cursor, value: &[u8]) -> impl Iterator<Item = Cell> {
    let Cursor(seq, rev) = cursor;
    let parts = [(SEQ, seq), (REV, rev)].into_iter();
    parts
        .filter(|(_, position)| *position > 0)
        .map(move |(column, position)| key().bytes(&[column]).cell(position, value.to_vec()))
}

/// Returns the row that the cells of one conversation make, unless the consumer has reached its heads.
fn lagging_of(conversation: ConversationId, cells: &[Cell]) -> Result<Option<LaggingRow>> {
    const OPERATION: &str = "lagging";
    let mut row: Option<LaggingRow> = None;
    for cell in cells.iter().filter(|cell| !is_removed(cell)) {
        let (at,): (Millis,) = decode(OPERATION, &cell.value)?;
        let row = row.get_or_insert(LaggingRow {
            conversation,
            heads: Cursor::default(),
            oldest: at,
        });
        row.oldest = row.oldest.min(at);
        match cell.key.last().copied() {
            Some(SEQ) => row.heads.0 = cell.timestamp,
            Some(REV) => row.heads.1 = cell.timestamp,
            _ => return Err(corrupt(OPERATION, "unknown column")),
        }
    }
    Ok(row)
}

impl<C: Cells> CellStore<C> {
    async fn cell(&self, key: Key) -> Result<Option<Cell>> {
        Ok(self.0.get(vec![key.0]).await?.pop())
    }

    /// Removes what consumers need no more: skipped events that are too old, and removed cells that late writes cannot
    /// reach any more.
    pub(super) async fn sweep_consumers(&self) -> Result<()> {
        const OPERATION: &str = "sweep";
        let keep = today().saturating_sub(SKIPPED_DAYS);
        let mut range = Range::prefix(&Key::new(SKIPPED));
        while let [cell] = &self.0.scan(range.clone(), 1, false).await?[..] {
            let (consumer, _) = take_consumer(OPERATION, &cell.key, 1)?;
            let old = Range {
                from: skipped_key(&consumer, 0).0,
                to: skipped_key(&consumer, keep).0,
            };
            self.remove(old, |_| true).await?;
            range.from = after(&Key::new(SKIPPED).text(consumer.as_str()).0);
        }
        self.sweep_removed().await
    }

    async fn sweep_removed(&self) -> Result<()> {
        const OPERATION: &str = "sweep";
        let keep = today().saturating_sub(REMOVED_DAYS);
        let mut range = Range::prefix(&Key::new(LAGGING));
        loop {
            let cells = self.0.scan(range.clone(), SWEEP_KEYS, false).await?;
            let Some(last) = cells.last() else {
                return Ok(());
            };
            range.from = after(&last.key);
            let mut gone = Vec::new();
            for cell in cells.into_iter().filter(is_removed) {
                if u32::from_be_bytes(take(OPERATION, &cell.value, 1)?) >= keep {
                    continue;
                }
                if cell.timestamp == FOREVER {
                    gone.push(offset_of_removed(&cell)?);
                }
                gone.push(cell);
            }
            if !gone.is_empty() {
                self.0.remove_unchanged(gone).await?;
            }
        }
    }
}

/// Returns the cell of the offset that [`ConsumerStore::remove_replay`] wrote with this one of the lagging row.
fn offset_of_removed(cell: &Cell) -> Result<Cell> {
    const OPERATION: &str = "sweep";
    let (consumer, shard_at) = take_consumer(OPERATION, &cell.key, 1)?;
    let conversation = take_conversation(OPERATION, &cell.key, shard_at + 1)?;
    let [column] = take(OPERATION, &cell.key, shard_at + 17)?;
    let key = offset_key(conversation, &consumer).bytes(&[column]);
    Ok(key.cell(cell.timestamp, cell.value.clone()))
}

#[async_trait]
impl<C: Cells> ConsumerStore for CellStore<C> {
    async fn offsets(&self, conversation: ConversationId) -> Result<Vec<(ConsumerName, Cursor)>> {
        const OPERATION: &str = "offsets";
        let range = Range::prefix(&Key::new(OFFSET).conversation(conversation));
        let cells = self.0.scan(range, usize::MAX, false).await?;
        let mut offsets: Vec<(ConsumerName, Cursor)> = Vec::new();
        for cell in cells.iter().filter(|cell| !is_removed(cell)) {
            let (consumer, column_at) = take_consumer(OPERATION, &cell.key, 17)?;
            if offsets.last().is_none_or(|(last, _)| *last != consumer) {
                offsets.push((consumer, Cursor::default()));
            }
            let Some((_, offset)) = offsets.last_mut() else {
                continue;
            };
            match cell.key.get(column_at).copied() {
                Some(SEQ) => offset.0 = cell.timestamp,
                Some(REV) => offset.1 = cell.timestamp,
                _ => return Err(corrupt(OPERATION, "unknown column")),
            }
        }
        Ok(offsets)
    }

    async fn set_offsets(&self, offsets: &[(ConversationId, ConsumerName, Cursor)]) -> Result<()> {
        let mut left = offsets.len();
        for some in offsets.chunks(OFFSETS_AT_ONCE) {
            let mut cells = Vec::with_capacity(some.len() * 2);
            for (conversation, consumer, Cursor(seq, rev)) in some {
                for (column, position) in [(REV, *rev), (SEQ, *seq)] {
                    let key = offset_key(*conversation, consumer).bytes(&[column]);
                    // Rule [offset].
                    cells.push(key.cell(position, Vec::new()));
                }
            }
            left -= some.len();
            // A durable write makes those before it durable too.
            self.0.write("set_offsets", cells, left == 0).await?;
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
        let key = || lagging_key(consumer, conversation);
        let cells = parts(key, heads, &encode(&(oldest,))).collect();
        self.0.write("set_lagging", cells, true).await
    }

    async fn clear_lagging(
        &self,
        consumer: &ConsumerName,
        conversation: ConversationId,
        upto: Cursor,
    ) -> Result<()> {
        let key = || lagging_key(consumer, conversation);
        // Rule [lagging]: the timestamp is the offset, so higher heads win, and the others stay removed.
        let cells = parts(key, upto, &removed_value()).collect();
        self.0.write("clear_lagging", cells, true).await
    }

    async fn lagging(
        &self,
        consumer: &ConsumerName,
        shard: u8,
        after_id: Option<ConversationId>,
        limit: usize,
    ) -> Result<Vec<LaggingRow>> {
        let prefix = shard_key(consumer, shard);
        let id_at = prefix.0.len();
        let mut range = Range::prefix(&prefix);
        if let Some(id) = after_id {
            range.from = after(&prefix.conversation(id).0);
        }
        let mut rows = Vec::new();
        let count = limit.saturating_mul(2).max(LAGGING_CELLS);
        loop {
            let cells = self.0.scan(range.clone(), count, false).await?;
            let is_last = cells.len() < count;
            let same = |a: &Cell, b: &Cell| a.key[..a.key.len() - 1] == b.key[..b.key.len() - 1];
            let mut groups: Vec<&[Cell]> = cells.chunk_by(same).collect();
            // The cells of the last conversation may be cut off.
            if !is_last && let Some(cut) = groups.pop() {
                range.from = cut[0].key.clone();
            }
            for group in groups {
                let id = take_conversation("lagging", &group[0].key, id_at)?;
                rows.extend(lagging_of(id, group)?);
            }
            if is_last || rows.len() >= limit {
                rows.truncate(limit);
                return Ok(rows);
            }
        }
    }

    async fn lagging_row(
        &self,
        consumer: &ConsumerName,
        conversation: ConversationId,
    ) -> Result<Option<LaggingRow>> {
        let range = Range::prefix(&lagging_key(consumer, conversation));
        let cells = self.0.scan(range, 2, false).await?;
        lagging_of(conversation, &cells)
    }

    async fn remove_replay(
        &self,
        replay: &ConsumerName,
        conversation: ConversationId,
    ) -> Result<()> {
        debug_assert!(replay.is_replay(), "{replay}");
        let (end, value) = (Cursor(FOREVER, FOREVER), removed_value());
        let lagging = parts(|| lagging_key(replay, conversation), end, &value);
        let offset = parts(|| offset_key(conversation, replay), end, &value);
        let cells = lagging.chain(offset).collect();
        self.0.write("remove_replay", cells, true).await
    }

    async fn consumer_state(&self, consumer: &ConsumerName) -> Result<Option<ConsumerState>> {
        let cell = self.cell(state_key(consumer)).await?;
        Ok(cell.as_ref().map(state_of).transpose()?.flatten())
    }

    async fn consumers(&self) -> Result<Vec<(ConsumerName, ConsumerState)>> {
        let range = Range::prefix(&Key::new(CONSUMER));
        let mut consumers = Vec::new();
        for cell in self.0.scan(range, usize::MAX, false).await? {
            let (consumer, _) = take_consumer("consumers", &cell.key, 1)?;
            consumers.extend(state_of(&cell)?.map(|state| (consumer, state)));
        }
        Ok(consumers)
    }

    async fn set_consumer_state(
        &self,
        consumer: &ConsumerName,
        state: &ConsumerState,
    ) -> Result<()> {
        let stored = StoredState(state.enabled, state.reason.clone());
        // Rule [version].
        let cell = state_key(consumer).cell(state.version, encode(&stored));
        self.0.write("set_consumer_state", vec![cell], true).await
    }

    async fn remove_consumer_state(&self, consumer: &ConsumerName, version: Version) -> Result<()> {
        let cell = state_key(consumer).cell(version, Vec::new());
        self.0
            .write("remove_consumer_state", vec![cell], true)
            .await
    }

    async fn add_skipped(
        &self,
        consumer: &ConsumerName,
        day: u32,
        skipped: &SkippedRow,
    ) -> Result<()> {
        let shard = SkippedShard {
            consumer: consumer.clone(),
            day,
            shard: consumer_shard(skipped.conversation),
        };
        let key = event_key(&shard, skipped.conversation, skipped.at);
        let cell = key.cell(0, encode(&(skipped.status,)));
        self.0.write("add_skipped", vec![cell], true).await
    }

    async fn skipped_shards(&self, consumer: &ConsumerName) -> Result<Vec<SkippedShard>> {
        const OPERATION: &str = "skipped_shards";
        let prefix = Key::new(SKIPPED).text(consumer.as_str());
        let day_at = prefix.0.len();
        let mut range = Range::prefix(&prefix);
        let mut shards = Vec::new();
        while let [cell] = &self.0.scan(range.clone(), 1, false).await?[..] {
            let day = u32::from_be_bytes(take(OPERATION, &cell.key, day_at)?);
            let [shard] = take(OPERATION, &cell.key, day_at + 4)?;
            range.from = after(&skipped_key(consumer, day).bytes(&[shard]).0);
            shards.push(SkippedShard {
                consumer: consumer.clone(),
                day,
                shard,
            });
        }
        Ok(shards)
    }

    async fn skipped(
        &self,
        shard: &SkippedShard,
        after_event: Option<(ConversationId, EventAt)>,
        limit: usize,
    ) -> Result<Vec<SkippedRow>> {
        const OPERATION: &str = "skipped";
        let prefix = skipped_key(&shard.consumer, shard.day).bytes(&[shard.shard]);
        let id_at = prefix.0.len();
        let mut range = Range::prefix(&prefix);
        if let Some((conversation, at)) = after_event {
            range.from = after(&event_key(shard, conversation, at).0);
        }
        let mut rows = Vec::new();
        for cell in self.0.scan(range, limit, false).await? {
            let [column] = take(OPERATION, &cell.key, id_at + 16)?;
            let number = take_u64(OPERATION, &cell.key, id_at + 17)?;
            let at = match column {
                SEQ => EventAt::Entry(number),
                REV => EventAt::Change(number),
                _ => return Err(corrupt(OPERATION, "unknown column")),
            };
            let (status,) = decode(OPERATION, &cell.value)?;
            rows.push(SkippedRow {
                conversation: take_conversation(OPERATION, &cell.key, id_at)?,
                at,
                status,
            });
        }
        Ok(rows)
    }

    async fn devices(&self, user: &UserId) -> Result<Option<(Version, Vec<Device>)>> {
        let Some(cell) = self.cell(Key::new(DEVICES).user(user)).await? else {
            return Ok(None);
        };
        let stored: Vec<StoredDevice> = match &cell.value[..] {
            [] => Vec::new(),
            value => decode("devices", value)?,
        };
        let device = |StoredDevice(id, provider, token, content, version)| Device {
            id,
            provider,
            token,
            content,
            version,
        };
        let devices = stored.into_iter().map(device).collect();
        Ok(Some((cell.timestamp, devices)))
    }

    async fn set_devices(&self, user: &UserId, version: Version, devices: &[Device]) -> Result<()> {
        let stored = |d: Device| StoredDevice(d.id, d.provider, d.token, d.content, d.version);
        let stored: Vec<_> = devices.iter().cloned().map(stored).collect();
        let value = if stored.is_empty() {
            Vec::new()
        } else {
            encode(&stored)
        };
        let cell = Key::new(DEVICES).user(user).cell(version, value);
        self.0.write("set_devices", vec![cell], true).await
    }

    async fn device_token(&self, hash: &[u8; 32]) -> Result<Option<TokenRow>> {
        let cell = self.cell(token_key(hash)).await?;
        let Some(cell) = cell.filter(|cell| !cell.value.is_empty()) else {
            return Ok(None);
        };
        let StoredToken(user, device) = decode("device_token", &cell.value)?;
        Ok(Some(TokenRow {
            version: cell.timestamp,
            user,
            device,
        }))
    }

    async fn set_device_token(&self, hash: &[u8; 32], row: &TokenRow) -> Result<()> {
        let stored = StoredToken(row.user.clone(), row.device.clone());
        let cell = token_key(hash).cell(row.version, encode(&stored));
        self.0.write("set_device_token", vec![cell], true).await
    }

    async fn remove_device_token(&self, hash: &[u8; 32], version: Version) -> Result<()> {
        let cell = token_key(hash).cell(version, Vec::new());
        self.0.write("remove_device_token", vec![cell], true).await
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
        let cell = |(column, value)| {
            let key = inbox_key(user, conversation).bytes(&[column]);
            key.cell(settings.version, value)
        };
        let columns = [
            (MUTED, muted_value(settings.muted_until)),
            (PUSH, push_value(settings.push)),
        ];
        let cells = columns.into_iter().map(cell).collect();
        self.0.write("set_settings", cells, true).await?;
        Ok(true)
    }
}

fn state_of(cell: &Cell) -> Result<Option<ConsumerState>> {
    if cell.value.is_empty() {
        return Ok(None);
    }
    let StoredState(enabled, reason) = decode("consumer_state", &cell.value)?;
    Ok(Some(ConsumerState {
        version: cell.timestamp,
        enabled,
        reason,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::embedded::Embedded;

    /// Returns the keys of all cells of these tables.
    async fn keys(store: &Embedded, tables: &[u8]) -> Vec<Vec<u8>> {
        let mut keys = Vec::new();
        for table in tables {
            let range = Range::prefix(&Key::new(*table));
            let cells = store.0.scan(range, usize::MAX, false).await.unwrap();
            keys.extend(cells.into_iter().map(|cell| cell.key));
        }
        keys
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_old_is_swept() {
        let folder = tempfile::tempdir().unwrap();
        let store = Embedded::open(folder.path(), 1 << 20).unwrap();
        let (hook, replay) = (
            ConsumerName::webhook("one"),
            ConsumerName::stored("webhook:one:id"),
        );
        let removed = |days: u32| [&[REMOVED][..], &(today() - days).to_be_bytes()].concat();
        let lagging = |consumer, seq, timestamp, value| {
            let id = ConversationId(uuid::Uuid::from_u128(seq));
            let key = lagging_key(consumer, id).bytes(&[SEQ]);
            key.cell(timestamp, value)
        };
        let ended = ConversationId(uuid::Uuid::from_u128(4));
        let offset = |timestamp, value| {
            let key = offset_key(ended, &replay).bytes(&[SEQ]);
            key.cell(timestamp, value)
        };
        let stays = [
            lagging(&hook, 1, 9, removed(REMOVED_DAYS)),
            lagging(&hook, 2, 9, encode(&(5,))),
            offset_key(ended, &hook).bytes(&[SEQ]).cell(9, Vec::new()),
        ];
        let goes = [
            lagging(&hook, 3, 9, removed(REMOVED_DAYS + 1)),
            lagging(&replay, 4, FOREVER, removed(REMOVED_DAYS + 1)),
            offset(FOREVER, removed(REMOVED_DAYS + 1)),
        ];
        let all = stays.iter().chain(&goes).cloned().collect();
        store.0.write("test", all, true).await.unwrap();
        let row = SkippedRow {
            conversation: ended,
            at: EventAt::Entry(1),
            status: None,
        };
        for days in [SKIPPED_DAYS, SKIPPED_DAYS + 1] {
            for consumer in [&hook, &replay] {
                let day = today() - days;
                store.add_skipped(consumer, day, &row).await.unwrap();
            }
        }
        store.sweep().await.unwrap();
        let mut wanted = stays.map(|cell| cell.key);
        wanted.sort();
        let mut found = keys(&store, &[LAGGING, OFFSET]).await;
        found.sort();
        assert_eq!(found, wanted);
        for consumer in [&hook, &replay] {
            let shards = store.skipped_shards(consumer).await.unwrap();
            let days: Vec<_> = shards.iter().map(|shard| today() - shard.day).collect();
            assert_eq!(days, [SKIPPED_DAYS]);
        }
        // A cell that changed since it was read stays.
        let newer = lagging(&hook, 3, 10, encode(&(5,)));
        store.0.write("test", vec![newer], true).await.unwrap();
        store.0.remove_unchanged(goes.to_vec()).await.unwrap();
        assert_eq!(keys(&store, &[LAGGING]).await.len(), 3);
        store.close().await.unwrap();
    }
}
