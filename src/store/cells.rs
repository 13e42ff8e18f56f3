//! Rows as cells. A cell has a key, a write timestamp (a seq, never a time) and a value; the highest timestamp wins.
//! This is Cassandra's model. Through this one mapping, the embedded and the simulated store follow the same rules as
//! the cluster.

mod changes;
mod check;
mod consumers;
mod erase;
mod files;
mod keys;
mod sends;
mod states;
#[cfg(test)]
mod stored_bytes;
mod summaries;
mod values;

use async_trait::async_trait;
pub(super) use check::CellCheck;
use keys::{
    ACTIVITY, CONVERSATION, DELIVERED, HEARTBEAT, INBOX_COLUMNS, Key, PARTICIPANT, PUBLIC, READ,
    SENDS, SETTLED, after, inbox_key, log_key, participant_key,
};
pub(super) use keys::{CHANGES, INBOX, LAST_SEEN, LOG, RING, Range, immutable};
use sends::SENDS_DAYS;
use states::log_page;
use summaries::{cell_keys, inbox_cells, inbox_rows, read_value};
use values::{
    conversation_cells, conversation_row, decode, encode, log_cells, participant_cells,
    participant_rows, public_row, ring_row, stored_ring, take, take_conversation, take_u64,
};

use super::{
    Activity, Applied, AppliedChanges, ChangeRow, ChangesTail, ConversationRow, Erasure, Heartbeat,
    InboxKey, InboxRow, InboxWrite, LogPage, LogRow, LogTail, Mark, ParticipantRow, PublicPage,
    ReactorsPage, Result, RingRow, SendRow, Store, Tail, first_of_tail,
    public::{PublicScan, Step},
};
use crate::{
    clock::{self, today},
    model::{ClientId, ConversationId, GatewayId, Kind, Level, Millis, Rev, Seq, UserId},
    mutation::{Mutation, broken},
};

/// Minutes for which activity is kept.
const ACTIVITY_MINUTES: u32 = 60;
/// Keys that a sweep scans in one step.
const SWEEP_KEYS: usize = 1_000;

fn activity_cell(conversation: ConversationId, activity: Activity) -> Cell {
    let Activity { gateway, minute } = activity;
    Key::new(ACTIVITY)
        .bytes(gateway.0.as_bytes())
        .u32(minute)
        .conversation(conversation)
        .cell(0, Vec::new())
}

#[derive(Clone, Debug)]
pub struct Cell {
    pub key: Vec<u8>,
    /// The write timestamp; 0 for cells whose content never changes. Two cells of one key with the same timestamp have
    /// the same content; if not, the greater content wins, as in Cassandra.
    pub timestamp: u64,
    pub value: Vec<u8>,
}

/// A sorted map of cells, which each backend implements.
#[async_trait]
pub trait Cells: Send + Sync + 'static {
    /// Writes all `cells` atomically, except those whose stored cell has a higher timestamp.
    async fn write(&self, operation: &'static str, cells: Vec<Cell>, durable: bool) -> Result<()>;

    /// Returns at most `limit` cells with `from <= key < to`, from either end.
    async fn scan(&self, range: Range, limit: usize, newest_first: bool) -> Result<Vec<Cell>>;

    /// Returns the cells of these keys, in their order, without those that do not exist. `keys` must be sorted.
    async fn get(&self, keys: Vec<Vec<u8>>) -> Result<Vec<Cell>>;

    /// Writes `cell` if the stored one has the timestamp `expected`, or if there is none and `expected` is `None`.
    /// Durable.
    async fn swap(&self, expected: Option<u64>, cell: Cell) -> Result<bool>;

    async fn remove(&self, keys: Vec<Vec<u8>>) -> Result<()>;

    /// Removes those of these cells that are still as they were read.
    async fn remove_unchanged(&self, cells: Vec<Cell>) -> Result<()>;

    /// Notes that cells were overwritten whose earlier content must leave the disk.
    async fn erased(&self) -> Result<()> {
        Ok(())
    }

    fn measure(&self) {}

    /// Whether other processes may use the store at the same time.
    fn is_shared(&self) -> bool {
        false
    }

    fn healthy(&self) -> Result<()>;

    async fn close(&self) -> Result<()>;
}

/// A store on top of cells.
pub struct CellStore<C>(pub(super) C);

pub(super) fn ring_cell(level: Level, row: &RingRow) -> Cell {
    Key::new(RING).cell(row.version, stored_ring(level, &row.members))
}

#[async_trait]
impl<C: Cells> Store for CellStore<C> {
    async fn append(
        &self,
        conversation: ConversationId,
        rows: &[LogRow],
        activity: Option<Activity>,
    ) -> Result<()> {
        let mut cells = log_cells(conversation, rows);
        if broken(Mutation::ReferencesAppend) {
            let references = files::reference_cells(rows).collect();
            drop(self.0.write("append", references, true).await);
        } else {
            cells.extend(files::reference_cells(rows));
        }
        cells.extend(activity.map(|activity| activity_cell(conversation, activity)));
        self.0.write("append", cells, true).await
    }

    async fn settle(&self, conversation: ConversationId, rows: &[LogRow]) -> Result<()> {
        let mut cells = log_cells(conversation, rows);
        // Rule [refs-settle]: the message may be the only one that has the file.
        if !broken(Mutation::ReferencesSettle) {
            cells.extend(files::reference_cells(rows));
        }
        self.0.write("settle", cells, true).await
    }

    async fn tail(&self, conversation: ConversationId, seqs: u64) -> Result<LogTail> {
        let whole = Range::prefix(&Key::new(LOG).conversation(conversation));
        let newest = self.0.scan(whole.clone(), 1, true).await?;
        let newest = newest.first();
        let newest = newest.map_or(Ok(0), |cell| take_u64("tail", &cell.key, 17))?;
        let first = first_of_tail(newest, seqs);
        let range = Range {
            from: log_key(conversation, first).0,
            to: whole.to,
        };
        let LogPage { rows, states } = if newest == 0 {
            LogPage::default()
        } else {
            log_page("tail", &self.0.scan(range, usize::MAX, false).await?)?
        };
        let marks = changes::marks(&self.0, "tail", conversation).await?;
        Ok(LogTail {
            tail: Tail {
                first,
                rows,
                settled: marks.settled,
            },
            states,
            may_have_changes: marks.changes_settled.is_some(),
        })
    }

    async fn log(&self, conversation: ConversationId, from: Seq, to: Seq) -> Result<LogPage> {
        let range = Range {
            from: log_key(conversation, from).0,
            to: log_key(conversation, to.saturating_add(1)).0,
        };
        let cells = self.0.scan(range, usize::MAX, false).await?;
        let mut page = log_page("log", &cells)?;
        // Rows of one seq are adjacent, and the highest epoch is the last of them.
        page.rows.reverse();
        page.rows.dedup_by_key(|row| row.record.seq);
        page.rows.reverse();
        Ok(page)
    }

    async fn set_settled(&self, conversation: ConversationId, seq: Seq) -> Result<()> {
        let cell = Key::new(SETTLED)
            .conversation(conversation)
            .cell(seq, Vec::new());
        self.0.write("set_settled", vec![cell], false).await
    }

    async fn append_changes(
        &self,
        conversation: ConversationId,
        rows: &[ChangeRow],
        activity: Option<Activity>,
    ) -> Result<()> {
        let mut cells = changes::cells_of(conversation, rows);
        cells.extend(activity.map(|activity| activity_cell(conversation, activity)));
        self.0.write("append_changes", cells, true).await
    }

    async fn changes_tail(&self, conversation: ConversationId, revs: u64) -> Result<ChangesTail> {
        changes::tail(&self.0, conversation, revs).await
    }

    async fn changes(
        &self,
        conversation: ConversationId,
        from: Rev,
        to: Rev,
    ) -> Result<Vec<ChangeRow>> {
        changes::read(&self.0, conversation, from, to).await
    }

    async fn set_changes_settled(&self, conversation: ConversationId, rev: Rev) -> Result<()> {
        let cell = changes::settled_cell(conversation, rev);
        self.0.write("set_changes_settled", vec![cell], false).await
    }

    async fn apply_changes(
        &self,
        conversation: ConversationId,
        _: Kind,
        applied: &AppliedChanges,
    ) -> Result<()> {
        let cells = changes::effects(conversation, applied);
        self.0.write("apply_changes", cells, true).await
    }

    async fn erase(&self, conversation: ConversationId, erasures: &[Erasure]) -> Result<()> {
        erase::erase(&self.0, conversation, erasures).await
    }

    async fn reactors(
        &self,
        conversation: ConversationId,
        _: Kind,
        seq: Seq,
        emoji: Option<&str>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ReactorsPage> {
        changes::reactors(&self.0, conversation, seq, emoji, after, limit).await
    }

    async fn reactions_of(
        &self,
        conversation: ConversationId,
        user: &UserId,
        from: Seq,
        to: Seq,
    ) -> Result<Vec<(Seq, String, bool)>> {
        changes::reactions_of(&self.0, conversation, user, from, to).await
    }

    async fn sends(
        &self,
        conversation: ConversationId,
        sender: &UserId,
        client_id: ClientId,
    ) -> Result<Vec<SendRow>> {
        sends::read(&self.0, conversation, sender, client_id).await
    }

    async fn conversation(&self, conversation: ConversationId) -> Result<Option<ConversationRow>> {
        let range = Range::prefix(&Key::new(CONVERSATION).conversation(conversation));
        let cells = self.0.scan(range, 1, false).await?;
        cells.first().map(conversation_row).transpose()
    }

    async fn apply(&self, conversation: ConversationId, applied: &Applied) -> Result<()> {
        let mut cells = Vec::with_capacity(2 + applied.participants.len() * 6);
        for row in &applied.participants {
            participant_cells(conversation, row, &mut cells);
        }
        for write in &applied.inbox {
            inbox_cells(write, &mut cells);
        }
        conversation_cells(conversation, &applied.conversation, &mut cells);
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
            cells.push(key.bytes(&[READ]).cell(seq, read_value(mark.read_texts)));
        }
        self.0.write("mark", cells, true).await
    }

    async fn inbox(&self, user: &UserId) -> Result<Vec<InboxRow>> {
        let prefix = Key::new(INBOX).user(user);
        let id_at = prefix.0.len();
        let range = Range::prefix(&prefix);
        let cells = self.0.scan(range, usize::MAX, false).await?;
        inbox_rows(&cells, id_at)
    }

    async fn inbox_count(&self, user: &UserId, most: usize) -> Result<usize> {
        let prefix = Key::new(INBOX).user(user);
        let (id_at, range) = (prefix.0.len(), Range::prefix(&prefix));
        let cells = most.saturating_mul(INBOX_COLUMNS);
        let cells = self.0.scan(range, cells, false).await?;
        let id = |cell| take_conversation("inbox_count", cell, id_at);
        let ids: Result<Vec<_>> = cells.iter().map(|cell| id(&cell.key)).collect();
        let mut ids = ids?;
        ids.dedup();
        Ok(ids.len().min(most))
    }

    async fn inbox_rows(&self, user: &UserId, keys: &[InboxKey]) -> Result<Vec<InboxRow>> {
        let id_at = Key::new(INBOX).user(user).0.len();
        let cells = self.0.get(cell_keys(user, keys)).await?;
        inbox_rows(&cells, id_at)
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
        let mut scan = PublicScan::new(limit);
        loop {
            let count = scan.rows_wanted();
            let cells = self.0.scan(range.clone(), count, false).await?;
            match scan.add(cells.iter().map(public_row), true)? {
                Step::Complete | Step::Exhausted => return Ok(scan.into_page()),
                Step::After(id) => range.from = after(&Key::new(PUBLIC).conversation(id).0),
            }
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
        cells.first().map(ring_row).transpose()
    }

    async fn propose_ring(&self, before: Option<&RingRow>, next: &RingRow) -> Result<bool> {
        // The version determines the level, so a proposal that is made has the stored level or a higher one.
        let level = next.level.max(before.map_or(0, |before| before.level));
        let cell = ring_cell(level, next);
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
        self.remove(files::usage_before(keep), |_| true).await?;
        self.sweep_consumers().await?;
        let minute = clock::minute();
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
