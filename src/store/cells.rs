//! Rows as cells. A cell has a key, a write timestamp (a seq, never a time) and a value; the highest timestamp wins.
//! This is Cassandra's model. Through this one mapping, the embedded and the simulated store follow the same rules as
//! the cluster.
//!
//! Keys sort in the order of reading; numbers are big endian. This layout is the on-disk format.

use std::{borrow::Cow, sync::Arc};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::{
    Activity, Applied, ConversationRow, Error, Heartbeat, InboxRow, InboxSummary, InboxWrite,
    LogRow, Mark, ParticipantRow, PublicPage, PublicRow, Result, RingRow, SendRow, Store, Tail,
};
use crate::{
    clock,
    model::{
        Attachment, ClientId, Content, ConversationId, Details, Entry, GatewayId, Kind,
        LEVEL_STATED, Last, Level, MessageId, Millis, Participant, Role, Seq, UserId,
        limits::{PAGE_ITEMS_MAX, SCAN_ROWS_MAX},
    },
};

/// Days for which a client id is kept.
const SENDS_DAYS: u32 = 7;
/// Minutes for which activity is kept.
const ACTIVITY_MINUTES: u32 = 60;
/// Keys that a sweep scans in one step.
const SWEEP_KEYS: usize = 1_000;

#[derive(Clone, Debug)]
pub struct Cell {
    pub key: Vec<u8>,
    /// The write timestamp; 0 for cells whose content never changes.
    pub timestamp: u64,
    pub value: Vec<u8>,
}

/// Whether cells of this key never change, so that they are written without reading the stored timestamp.
pub(super) fn immutable(key: &[u8]) -> bool {
    matches!(key.first(), Some(&(LOG | SENDS | ACTIVITY)))
}

/// A sorted map of cells, which each backend implements.
#[async_trait]
pub trait Cells: Send + Sync + 'static {
    /// Writes all `cells` atomically, except those whose stored cell has a higher timestamp.
    async fn write(&self, operation: &'static str, cells: Vec<Cell>, durable: bool) -> Result<()>;

    /// Returns at most `limit` cells with `from <= key < to`, from either end.
    async fn scan(&self, range: Range, limit: usize, newest_first: bool) -> Result<Vec<Cell>>;

    /// Writes `cell` if the stored one has the timestamp `expected`, or if there is none and `expected` is `None`.
    /// Durable.
    async fn swap(&self, expected: Option<u64>, cell: Cell) -> Result<bool>;

    async fn remove(&self, keys: Vec<Vec<u8>>) -> Result<()>;

    fn measure(&self) {}

    /// Whether other processes may use the store at the same time.
    fn is_shared(&self) -> bool {
        false
    }

    fn healthy(&self) -> Result<()>;

    async fn close(&self) -> Result<()>;
}

#[derive(Clone, Debug)]
pub struct Range {
    pub from: Vec<u8>,
    pub to: Vec<u8>,
}

impl Range {
    fn prefix(prefix: &Key) -> Self {
        Self {
            from: prefix.0.clone(),
            to: after(&prefix.0),
        }
    }
}

/// Returns the first key that does not start with `prefix`.
fn after(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![u8::MAX; 64]
}

/// The first byte of all keys of the log. All other keys are those of rows.
pub(super) const LOG: u8 = b'm';
const SENDS: u8 = b's';
const CONVERSATION: u8 = b'c';
const SETTLED: u8 = b'k';
const PARTICIPANT: u8 = b'p';
const INBOX: u8 = b'i';
const PUBLIC: u8 = b'g';
const ACTIVITY: u8 = b'a';
const LAST_SEEN: u8 = b'u';
const RING: u8 = b'v';
const HEARTBEAT: u8 = b'h';

const MEMBERSHIP: u8 = b'm';
const READ: u8 = b'r';
const DELIVERED: u8 = b'd';
const SUMMARY: u8 = b'f';
const LEFT: u8 = b'l';

/// The initial capacity of a key, enough for most users.
const KEY_BYTES: usize = 80;
/// The initial capacity of a value, enough for most messages.
const VALUE_BYTES: usize = 384;

struct Key(Vec<u8>);

impl Key {
    fn new(table: u8) -> Self {
        let mut key = Vec::with_capacity(KEY_BYTES);
        key.push(table);
        Self(key)
    }

    fn conversation(self, id: ConversationId) -> Self {
        self.bytes(id.0.as_bytes())
    }

    /// Appends a user id and a zero. User ids contain no control characters, so the zero ends them.
    fn user(self, user: &UserId) -> Self {
        self.bytes(user.as_str().as_bytes()).bytes(&[0])
    }

    fn u64(self, number: u64) -> Self {
        self.bytes(&number.to_be_bytes())
    }

    fn u32(self, number: u32) -> Self {
        self.bytes(&number.to_be_bytes())
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn cell(self, timestamp: u64, value: Vec<u8>) -> Cell {
        Cell {
            key: self.0,
            timestamp,
            value,
        }
    }
}

fn log_key(conversation: ConversationId, seq: Seq) -> Key {
    Key::new(LOG).conversation(conversation).u64(seq)
}

fn participant_key(conversation: ConversationId, user: &UserId) -> Key {
    Key::new(PARTICIPANT).conversation(conversation).user(user)
}

fn inbox_key(user: &UserId, conversation: ConversationId) -> Key {
    Key::new(INBOX).user(user).conversation(conversation)
}

fn number(number: u64) -> Vec<u8> {
    number.to_be_bytes().to_vec()
}

fn today() -> u32 {
    u32::try_from(clock::wall() / 86_400_000).unwrap_or_default()
}

/// Encodes a value as a MessagePack array of all fields in order. New fields are added at the end.
fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(VALUE_BYTES);
    let encoded = rmp_serde::encode::write(&mut bytes, value);
    debug_assert!(encoded.is_ok(), "a row must always encode: {encoded:?}");
    bytes
}

fn corrupt(operation: &'static str, reason: impl ToString) -> Error {
    Error::Corrupt {
        operation,
        reason: reason.to_string(),
    }
}

fn decode<'a, T: Deserialize<'a>>(operation: &'static str, bytes: &'a [u8]) -> Result<T> {
    rmp_serde::from_slice(bytes).map_err(|e| corrupt(operation, e))
}

fn take<const N: usize>(operation: &'static str, bytes: &[u8], at: usize) -> Result<[u8; N]> {
    bytes
        .get(at..at + N)
        .and_then(|part| part.try_into().ok())
        .ok_or_else(|| corrupt(operation, "a key or value is too short"))
}

fn take_u64(operation: &'static str, bytes: &[u8], at: usize) -> Result<u64> {
    take(operation, bytes, at).map(u64::from_be_bytes)
}

fn take_conversation(operation: &'static str, bytes: &[u8], at: usize) -> Result<ConversationId> {
    take(operation, bytes, at).map(|id| ConversationId(uuid::Uuid::from_bytes(id)))
}

#[derive(Serialize, Deserialize)]
struct StoredEntry<'a>(
    MessageId,
    ClientId,
    UserId,
    Millis,
    Seq, // committed
    #[serde(borrow)] StoredContent<'a>,
);

#[derive(Serialize, Deserialize)]
enum StoredContent<'a> {
    #[serde(rename = "t")]
    Text(
        #[serde(borrow)] Cow<'a, str>,
        Vec<StoredAttachment>,
        Option<Seq>,
    ),
    /// The change as JSON: it is rare, and readable without this program.
    #[serde(rename = "s")]
    System(String),
}

#[derive(Serialize, Deserialize)]
struct StoredAttachment(String, Option<String>, Option<String>, Option<u64>);

fn log_cells(conversation: ConversationId, rows: &[LogRow]) -> Vec<Cell> {
    let day = today();
    let mut cells = Vec::with_capacity(rows.len() * 2 + 1);
    for row in rows {
        let entry = &row.record;
        let content = match &entry.content {
            Content::Text {
                body,
                attachments,
                reply_to,
            } => StoredContent::Text(
                body.into(),
                attachments
                    .iter()
                    .cloned()
                    .map(|a| StoredAttachment(a.url, a.name, a.mime, a.size))
                    .collect(),
                *reply_to,
            ),
            Content::System(change) => {
                StoredContent::System(serde_json::to_string(change).unwrap_or_default())
            }
        };
        let stored = StoredEntry(
            entry.message_id,
            entry.client_id,
            entry.sender.clone(),
            entry.at,
            row.settled,
            content,
        );
        cells.push(
            log_key(conversation, entry.seq)
                .u64(row.epoch)
                .cell(0, encode(&stored)),
        );
        cells.push(
            Key::new(SENDS)
                .u32(day)
                .conversation(conversation)
                .user(&entry.sender)
                .bytes(entry.client_id.0.as_bytes())
                .u64(row.epoch)
                .cell(0, number(entry.seq)),
        );
    }
    cells
}

fn log_row(operation: &'static str, cell: &Cell) -> Result<LogRow> {
    let seq = take_u64(operation, &cell.key, 17)?;
    let epoch = take_u64(operation, &cell.key, 25)?;
    let StoredEntry(message_id, client_id, sender, at, committed, content) =
        decode(operation, &cell.value)?;
    let content = match content {
        StoredContent::Text(body, attachments, reply_to) => Content::Text {
            body: body.into_owned(),
            attachments: attachments
                .into_iter()
                .map(|StoredAttachment(url, name, mime, size)| Attachment {
                    url,
                    name,
                    mime,
                    size,
                })
                .collect(),
            reply_to,
        },
        StoredContent::System(json) => {
            Content::System(serde_json::from_str(&json).map_err(|e| corrupt(operation, e))?)
        }
    };
    let entry = Arc::new(Entry {
        seq,
        message_id,
        client_id,
        sender,
        at,
        content,
    });
    Ok(LogRow {
        record: entry,
        epoch,
        settled: committed,
    })
}

#[derive(Serialize, Deserialize)]
struct StoredConversation(
    Kind,
    Option<String>,
    Millis,
    UserId,
    crate::model::Posting,
    bool,
    u64,
);

#[derive(Serialize, Deserialize)]
struct StoredMembership(Role, Seq, Option<Seq>);

#[derive(Serialize, Deserialize)]
struct StoredSummary(Kind, Option<String>, Seq, Option<StoredLast>);

#[derive(Serialize, Deserialize)]
struct StoredLast(
    Seq,
    MessageId,
    Millis,
    UserId,
    crate::model::EntryKind,
    String,
);

/// The ring from [`LEVEL_STATED`] on. Below that level only the members are stored, which is the form that builds without
/// a level can read.
#[derive(Serialize, Deserialize)]
struct StoredRing<'a>(Level, Cow<'a, [GatewayId]>);

fn stored_ring(level: Level, members: &[GatewayId]) -> Vec<u8> {
    if level < LEVEL_STATED {
        encode(&members)
    } else {
        encode(&StoredRing(level, members.into()))
    }
}

fn read_ring(cell: &Cell) -> Result<RingRow> {
    let stored = rmp_serde::from_slice(&cell.value);
    let (level, members) = match stored {
        Ok(StoredRing(level, members)) => (level, members.into_owned()),
        Err(_) => (0, decode("ring", &cell.value)?),
    };
    Ok(RingRow {
        version: cell.timestamp,
        members,
        level,
    })
}

#[derive(Serialize, Deserialize)]
struct StoredPublic(bool, Kind, Option<String>, Millis);

fn inbox_cells(write: &InboxWrite, cells: &mut Vec<Cell>) {
    let key = || inbox_key(&write.user, write.conversation);
    if let Some(summary) = &write.summary {
        let last = summary
            .last
            .clone()
            .map(|l| StoredLast(l.seq, l.message_id, l.at, l.sender, l.kind, l.preview));
        let stored = StoredSummary(summary.kind, summary.name.clone(), summary.joined_seq, last);
        cells.push(key().bytes(&[SUMMARY]).cell(summary.seq, encode(&stored)));
    }
    if let Some(seq) = write.read_seq {
        cells.push(key().bytes(&[READ]).cell(seq, Vec::new()));
        let participant = participant_key(write.conversation, &write.user);
        cells.push(participant.bytes(&[READ]).cell(seq, Vec::new()));
    }
    if let Some(seq) = write.left_seq {
        cells.push(key().bytes(&[LEFT]).cell(seq, Vec::new()));
    }
}

/// A store on top of cells.
pub struct CellStore<C>(pub(super) C);

#[async_trait]
impl<C: Cells> Store for CellStore<C> {
    async fn append(
        &self,
        conversation: ConversationId,
        rows: &[LogRow],
        activity: Option<Activity>,
    ) -> Result<()> {
        let mut cells = log_cells(conversation, rows);
        if let Some(Activity { gateway, minute }) = activity {
            cells.push(
                Key::new(ACTIVITY)
                    .bytes(gateway.0.as_bytes())
                    .u32(minute)
                    .conversation(conversation)
                    .cell(0, Vec::new()),
            );
        }
        self.0.write("append", cells, true).await
    }

    async fn settle(&self, conversation: ConversationId, rows: &[LogRow]) -> Result<()> {
        self.0
            .write("settle", log_cells(conversation, rows), true)
            .await
    }

    async fn tail(&self, conversation: ConversationId, seqs: u64) -> Result<Tail<Entry>> {
        let whole = Range::prefix(&Key::new(LOG).conversation(conversation));
        let newest = self.0.scan(whole.clone(), 1, true).await?;
        let rows = match newest.first() {
            None => Vec::new(),
            Some(cell) => {
                let first = (take_u64("tail", &cell.key, 17)? + 1).saturating_sub(seqs);
                let range = Range {
                    from: log_key(conversation, first).0,
                    to: whole.to,
                };
                let cells = self.0.scan(range, usize::MAX, false).await?;
                cells
                    .iter()
                    .map(|c| log_row("tail", c))
                    .collect::<Result<_>>()?
            }
        };
        let settled = Range::prefix(&Key::new(SETTLED).conversation(conversation));
        let settled = self
            .0
            .scan(settled, 1, false)
            .await?
            .first()
            .map_or(0, |c| c.timestamp);
        Ok(Tail { rows, settled })
    }

    async fn log(&self, conversation: ConversationId, from: Seq, to: Seq) -> Result<Vec<LogRow>> {
        let range = Range {
            from: log_key(conversation, from).0,
            to: log_key(conversation, to.saturating_add(1)).0,
        };
        let mut rows: Vec<LogRow> = Vec::new();
        for cell in self.0.scan(range, usize::MAX, false).await? {
            let row = log_row("log", &cell)?;
            // Rows of one seq are adjacent, and the highest epoch is the last of them.
            if rows
                .last()
                .is_some_and(|previous| previous.record.seq == row.record.seq)
            {
                rows.pop();
            }
            rows.push(row);
        }
        Ok(rows)
    }

    async fn set_settled(&self, conversation: ConversationId, seq: Seq) -> Result<()> {
        let cell = Key::new(SETTLED)
            .conversation(conversation)
            .cell(seq, Vec::new());
        self.0.write("set_settled", vec![cell], false).await
    }

    async fn sends(
        &self,
        conversation: ConversationId,
        sender: &UserId,
        client_id: ClientId,
    ) -> Result<Vec<SendRow>> {
        let mut found = Vec::new();
        let today = today();
        for day in today.saturating_sub(SENDS_DAYS)..=today {
            let key = Key::new(SENDS)
                .u32(day)
                .conversation(conversation)
                .user(sender)
                .bytes(client_id.0.as_bytes());
            let epoch_at = key.0.len();
            for cell in self.0.scan(Range::prefix(&key), usize::MAX, false).await? {
                found.push(SendRow {
                    epoch: take_u64("sends", &cell.key, epoch_at)?,
                    seq: take_u64("sends", &cell.value, 0)?,
                });
            }
        }
        Ok(found)
    }

    async fn conversation(&self, conversation: ConversationId) -> Result<Option<ConversationRow>> {
        let range = Range::prefix(&Key::new(CONVERSATION).conversation(conversation));
        let cells = self.0.scan(range, 1, false).await?;
        let Some(cell) = cells.first() else {
            return Ok(None);
        };
        let StoredConversation(kind, name, created_at, created_by, posting, public, count) =
            decode("conversation", &cell.value)?;
        Ok(Some(ConversationRow {
            details: Details {
                kind,
                name,
                created_at,
                created_by,
                posting,
                public,
            },
            participant_count: count,
            seq: cell.timestamp,
        }))
    }

    async fn apply(&self, conversation: ConversationId, applied: &Applied) -> Result<()> {
        let mut cells = Vec::with_capacity(2 + applied.participants.len() * 6);
        for ParticipantRow {
            participant: p,
            seq,
        } in &applied.participants
        {
            let key = || participant_key(conversation, &p.user);
            let membership = StoredMembership(p.role, p.joined_seq, p.left_seq);
            cells.push(key().bytes(&[MEMBERSHIP]).cell(*seq, encode(&membership)));
            cells.push(key().bytes(&[READ]).cell(p.read_seq, Vec::new()));
            cells.push(key().bytes(&[DELIVERED]).cell(p.delivered_seq, Vec::new()));
        }
        for write in &applied.inbox {
            inbox_cells(write, &mut cells);
        }
        let ConversationRow {
            details,
            participant_count,
            seq,
        } = &applied.conversation;
        let d = details.clone();
        if d.kind != Kind::Dm {
            let public = StoredPublic(d.public, d.kind, d.name.clone(), d.created_at);
            cells.push(
                Key::new(PUBLIC)
                    .conversation(conversation)
                    .cell(*seq, encode(&public)),
            );
        }
        let stored = StoredConversation(
            d.kind,
            d.name,
            d.created_at,
            d.created_by,
            d.posting,
            d.public,
            *participant_count,
        );
        cells.push(
            Key::new(CONVERSATION)
                .conversation(conversation)
                .cell(*seq, encode(&stored)),
        );
        self.0.write("apply", cells, true).await
    }

    async fn participants(
        &self,
        conversation: ConversationId,
        _: Kind,
        after_user: Option<&UserId>,
        limit: usize,
    ) -> Result<Vec<ParticipantRow>> {
        let prefix = Key::new(PARTICIPANT).conversation(conversation);
        let key_at = prefix.0.len();
        let mut range = Range::prefix(&prefix);
        if let Some(user) = after_user {
            range.from = after(&participant_key(conversation, user).0);
        }
        // Each row has up to three cells.
        let cells = self.0.scan(range, limit.saturating_mul(3), false).await?;
        let mut rows = participant_rows(&cells, key_at)?;
        rows.truncate(limit);
        Ok(rows)
    }

    async fn participant(
        &self,
        conversation: ConversationId,
        _: Kind,
        user: &UserId,
    ) -> Result<Option<ParticipantRow>> {
        let range = Range::prefix(&participant_key(conversation, user));
        let cells = self.0.scan(range, 3, false).await?;
        Ok(participant_rows(&cells, 17)?.pop())
    }

    async fn mark(&self, conversation: ConversationId, _: Kind, mark: &Mark) -> Result<()> {
        let mut cells = Vec::with_capacity(3);
        let key = || participant_key(conversation, &mark.user);
        if let Some(seq) = mark.delivered_seq {
            cells.push(key().bytes(&[DELIVERED]).cell(seq, Vec::new()));
        }
        if let Some(seq) = mark.read_seq {
            cells.push(key().bytes(&[READ]).cell(seq, Vec::new()));
            let key = inbox_key(&mark.user, conversation);
            cells.push(key.bytes(&[READ]).cell(seq, Vec::new()));
        }
        self.0.write("mark", cells, true).await
    }

    async fn inbox(&self, user: &UserId) -> Result<Vec<InboxRow>> {
        let prefix = Key::new(INBOX).user(user);
        let id_at = prefix.0.len();
        let mut rows: Vec<InboxRow> = Vec::new();
        for cell in self
            .0
            .scan(Range::prefix(&prefix), usize::MAX, false)
            .await?
        {
            let conversation = take_conversation("inbox", &cell.key, id_at)?;
            if rows
                .last()
                .is_none_or(|row| row.conversation != conversation)
            {
                rows.push(InboxRow::empty(conversation));
            }
            let Some(row) = rows.last_mut() else { continue };
            match cell.key.last().copied() {
                Some(SUMMARY) => {
                    let StoredSummary(kind, name, joined_seq, last) = decode("inbox", &cell.value)?;
                    let last = last.map(
                        |StoredLast(seq, message_id, at, sender, kind, preview)| Last {
                            seq,
                            message_id,
                            at,
                            sender,
                            kind,
                            preview,
                        },
                    );
                    row.summary = Some(InboxSummary {
                        seq: cell.timestamp,
                        kind,
                        name,
                        joined_seq,
                        last,
                    });
                }
                Some(READ) => row.read_seq = cell.timestamp,
                Some(LEFT) => row.left_seq = Some(cell.timestamp),
                _ => return Err(corrupt("inbox", "unknown column")),
            }
        }
        Ok(rows)
    }

    async fn write_inbox(&self, writes: Vec<InboxWrite>) -> Result<()> {
        let mut cells = Vec::with_capacity(writes.len() * 2);
        for write in &writes {
            inbox_cells(write, &mut cells);
        }
        self.0.write("write_inbox", cells, false).await
    }

    async fn public_conversations(
        &self,
        after_id: Option<ConversationId>,
        limit: usize,
    ) -> Result<PublicPage> {
        let mut range = Range::prefix(&Key::new(PUBLIC));
        if let Some(id) = after_id {
            range.from = after(&Key::new(PUBLIC).conversation(id).0);
        }
        let mut page = PublicPage::default();
        let (mut left, mut count) = (SCAN_ROWS_MAX, limit + 1);
        loop {
            count = count.min(left);
            let cells = self.0.scan(range.clone(), count, false).await?;
            let full = cells.len() == count;
            for (i, cell) in cells.iter().enumerate() {
                let conversation = take_conversation("public_conversations", &cell.key, 1)?;
                let StoredPublic(public, kind, name, created_at) =
                    decode("public_conversations", &cell.value)?;
                if public {
                    page.rows.push(PublicRow {
                        conversation,
                        kind,
                        name,
                        created_at,
                    });
                }
                let is_last = i + 1 == cells.len();
                left -= 1;
                if page.rows.len() == limit || left == 0 {
                    page.next = (full || !is_last).then_some(conversation);
                    return Ok(page);
                }
            }
            match cells.last() {
                Some(last) if full => range.from = after(&last.key),
                _ => return Ok(page),
            }
            count = PAGE_ITEMS_MAX;
        }
    }

    async fn activity(&self, gateway: GatewayId) -> Result<Vec<ConversationId>> {
        let range = Range::prefix(&Key::new(ACTIVITY).bytes(gateway.0.as_bytes()));
        let cells = self.0.scan(range, usize::MAX, false).await?;
        let mut ids: Vec<_> = cells
            .iter()
            .map(|c| take_conversation("activity", &c.key, 21))
            .collect::<Result<_>>()?;
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    async fn forget_activity(&self, gateway: GatewayId) -> Result<()> {
        let range = Range::prefix(&Key::new(ACTIVITY).bytes(gateway.0.as_bytes()));
        self.remove(range, |_| true).await
    }

    async fn active_gateways(&self) -> Result<Vec<GatewayId>> {
        let mut range = Range::prefix(&Key::new(ACTIVITY));
        let mut gateways = Vec::new();
        while let [cell] = &self.0.scan(range.clone(), 1, false).await?[..] {
            let gateway = take("active_gateways", &cell.key, 1)?;
            gateways.push(GatewayId(uuid::Uuid::from_bytes(gateway)));
            range.from = Range::prefix(&Key::new(ACTIVITY).bytes(&gateway)).to;
        }
        Ok(gateways)
    }

    async fn last_seen(&self, user: &UserId) -> Result<Option<Millis>> {
        let range = Range::prefix(&Key::new(LAST_SEEN).user(user));
        let cells = self.0.scan(range, 1, false).await?;
        Ok(cells
            .first()
            .and_then(|c| Millis::try_from(c.timestamp).ok()))
    }

    async fn set_last_seen(&self, seen: &[(UserId, Millis)]) -> Result<()> {
        let cell = |(user, at): &(UserId, Millis)| {
            let at = u64::try_from(*at).unwrap_or_default();
            Key::new(LAST_SEEN).user(user).cell(at, Vec::new())
        };
        let cells = seen.iter().map(cell).collect();
        self.0.write("set_last_seen", cells, false).await
    }

    async fn ring(&self) -> Result<Option<RingRow>> {
        let cells = self
            .0
            .scan(Range::prefix(&Key::new(RING)), 1, false)
            .await?;
        cells.first().map(read_ring).transpose()
    }

    async fn propose_ring(&self, before: Option<&RingRow>, next: &RingRow) -> Result<bool> {
        // The version determines the level, so a proposal that is made has the stored level or a higher one.
        let level = next.level.max(before.map_or(0, |before| before.level));
        let cell = Key::new(RING).cell(next.version, stored_ring(level, &next.members));
        self.0.swap(before.map(|before| before.version), cell).await
    }

    async fn beat(&self, gateway: GatewayId, beat: &Heartbeat) -> Result<()> {
        let cell = Key::new(HEARTBEAT)
            .bytes(gateway.0.as_bytes())
            .cell(beat.counter, encode(&(&beat.address, beat.level)));
        self.0.write("beat", vec![cell], false).await
    }

    async fn heartbeat(&self, gateway: GatewayId) -> Result<Option<Heartbeat>> {
        let range = Range::prefix(&Key::new(HEARTBEAT).bytes(gateway.0.as_bytes()));
        let cells = self.0.scan(range, 1, false).await?;
        let Some(cell) = cells.first() else {
            return Ok(None);
        };
        let (address, level) = decode("heartbeat", &cell.value)?;
        Ok(Some(Heartbeat {
            address,
            counter: cell.timestamp,
            level,
        }))
    }

    async fn sweep(&self) -> Result<()> {
        let keep = today().saturating_sub(SENDS_DAYS);
        let from = Key::new(SENDS).0;
        let to = Key::new(SENDS).u32(keep).0;
        self.remove(Range { from, to }, |_| true).await?;
        let minute = u32::try_from(clock::wall() / 60_000).unwrap_or_default();
        let old = minute.saturating_sub(ACTIVITY_MINUTES);
        self.remove(Range::prefix(&Key::new(ACTIVITY)), |key| {
            take("sweep", key, 17).is_ok_and(|minute| u32::from_be_bytes(minute) < old)
        })
        .await
    }

    fn is_shared(&self) -> bool {
        self.0.is_shared()
    }

    fn measure(&self) {
        self.0.measure();
    }

    fn healthy(&self) -> Result<()> {
        self.0.healthy()
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

impl<C: Cells> CellStore<C> {
    async fn remove(&self, mut range: Range, which: impl Fn(&[u8]) -> bool + Send) -> Result<()> {
        loop {
            let cells = self.0.scan(range.clone(), SWEEP_KEYS, false).await?;
            let Some(last) = cells.last() else {
                return Ok(());
            };
            range.from = after(&last.key);
            let full = cells.len() == SWEEP_KEYS;
            let keys: Vec<_> = cells
                .into_iter()
                .map(|c| c.key)
                .filter(|k| which(k))
                .collect();
            if !keys.is_empty() {
                self.0.remove(keys).await?;
            }
            if !full {
                return Ok(());
            }
        }
    }
}

/// Groups the cells of participants, in key order, into rows. A row has at most three cells, so a scan of three times
/// the limit contains enough whole rows.
fn participant_rows(cells: &[Cell], user_at: usize) -> Result<Vec<ParticipantRow>> {
    const OPERATION: &str = "participants";
    let mut rows: Vec<ParticipantRow> = Vec::new();
    for group in cells.chunk_by(|a, b| a.key[..a.key.len() - 1] == b.key[..b.key.len() - 1]) {
        let mut found: Option<(StoredMembership, Seq)> = None;
        let (mut read_seq, mut delivered_seq) = (0, 0);
        for cell in group {
            match cell.key.last().copied() {
                Some(MEMBERSHIP) => {
                    found = Some((decode(OPERATION, &cell.value)?, cell.timestamp));
                }
                Some(READ) => read_seq = cell.timestamp,
                Some(DELIVERED) => delivered_seq = cell.timestamp,
                _ => return Err(corrupt(OPERATION, "unknown column")),
            }
        }
        let Some((StoredMembership(role, joined_seq, left_seq), seq)) = found else {
            continue;
        };
        let key = &group[0].key;
        let name =
            std::str::from_utf8(&key[user_at..key.len() - 2]).map_err(|e| corrupt(OPERATION, e))?;
        let user = UserId::new(name).map_err(|e| corrupt(OPERATION, e))?;
        let participant = Participant {
            user,
            role,
            joined_seq,
            left_seq,
            delivered_seq,
            read_seq,
        };
        rows.push(ParticipantRow { participant, seq });
    }
    Ok(rows)
}
