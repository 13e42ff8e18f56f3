//! Finds entries and changes that a log has lost, and fills their places: "Lost entries" of docs/storage.md. It needs no
//! lease, because the rows that it writes count less than the rows of every owner.

use std::{collections::BTreeMap, ops::RangeInclusive, sync::Arc};

use uuid::Uuid;

use super::{
    conversation::{PendingChange, PendingEntry},
    log::{FILLED, Log, Pending},
};
use crate::{
    clock,
    model::{
        Change, ChangeOp, ClientId, Content, ConversationId, DeletedSeqs, Entry, EntryState, Epoch,
        Millis, Seq, SystemChange, UserId,
        limits::{APPENDS_IN_FLIGHT_MAX, TAIL_ENTRIES},
    },
    store::{self, ChangeRow, ChangesTail, LogPage, LogRow, Row, Store, Tail},
};

/// Rows that are read or written at once.
const AT_ONCE: u64 = APPENDS_IN_FLIGHT_MAX as u64;
/// Holes that are listed. Further ones are only counted.
const LISTED_MAX: usize = 20;

/// What was found in both logs of a conversation.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CheckedLogs {
    pub entries: CheckedLog,
    pub changes: CheckedLog,
    /// The first and last filled entry that is not deleted yet.
    pub undeleted: Option<(Seq, Seq)>,
    /// Whether there were rows beyond the recorded end of a log.
    pub have_more: bool,
}

/// What was found in one log.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CheckedLog {
    /// The position up to which the log is certain, so that no row may be missing.
    pub certain: u64,
    /// The newest position that is stored.
    pub newest: u64,
    /// The lost positions, up to a maximum number of holes.
    pub holes: Vec<RangeInclusive<u64>>,
    pub further_holes: u64,
    /// The number of lost positions.
    pub lost: u64,
    /// The number of positions that were lost and are filled.
    pub filled: u64,
    /// Lost rows of which a row of an earlier owner is left, so that no record is lost. Known only without holes.
    pub unsettled: Vec<u64>,
    /// Whether an owner would refuse the log for another reason. Known only without holes.
    pub is_refused: bool,
}

impl CheckedLogs {
    /// Whether nothing is left to be done.
    #[must_use]
    pub fn are_whole(&self) -> bool {
        self.entries.is_whole()
            && self.changes.is_whole()
            && self.undeleted.is_none()
            && !self.have_more
    }
}

impl CheckedLog {
    fn of<T>(tail: &Tail<T>, position: fn(&T) -> u64) -> Self {
        let newest = tail.rows.last().map(|row| position(&row.record));
        Self {
            certain: tail.certain(),
            newest: newest.unwrap_or_default(),
            ..Self::default()
        }
    }

    /// Whether nothing is missing.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.lost == 0 && self.unsettled.is_empty() && !self.is_refused
    }

    /// Asks the takeover itself. Returns rows for the places of lost rows of settles.
    fn ask<P: Pending>(&mut self, tail: &Tail<P::Record>) -> Vec<Row<P::Record>> {
        if Log::<P>::take_over(tail, Epoch::MAX).is_ok() {
            return Vec::new();
        }
        let missing = Log::<P>::missing_of_settles(tail);
        self.is_refused = missing.is_empty();
        let mut left: Vec<_> = tail.rows.iter().collect();
        left.retain(|row| missing.contains(&P::position(&row.record)));
        // Of several rows at one place the highest epoch is the last, and stays.
        left.sort_by_key(|row| row.epoch);
        let fills: BTreeMap<_, _> = left
            .iter()
            .map(|row| (P::position(&row.record), filled(row.record.clone())))
            .collect();
        self.unsettled = missing.into_iter().collect();
        fills.into_values().collect()
    }

    fn add<T>(&mut self, hole: &Hole<T>) {
        self.lost += hole.len();
        if self.holes.len() < LISTED_MAX {
            self.holes.push(hole.from..=hole.to);
        } else {
            self.further_holes += 1;
        }
    }
}

/// Positions that are lost, with the rows around them.
struct Hole<T> {
    before: Option<Row<T>>,
    from: u64,
    to: u64,
    after: Option<Row<T>>,
}

impl<T> Hole<T> {
    fn len(&self) -> u64 {
        self.to - self.from + 1
    }
}

/// The rows of a log that were passed, from its beginning.
struct Walk<T> {
    reached: u64,
    before: Option<Row<T>>,
}

impl<T> Default for Walk<T> {
    fn default() -> Self {
        Self {
            reached: 0,
            before: None,
        }
    }
}

impl<T> Walk<T> {
    /// Passes the next row. Returns the hole before it.
    fn pass(&mut self, position: u64, row: Row<T>) -> Option<Hole<T>> {
        let hole = self.end(position.saturating_sub(1), Some(row.clone()));
        (self.reached, self.before) = (position, Some(row));
        hole
    }

    /// Returns the hole after the rows that were passed, up to a position, if there is one.
    fn end(&self, to: u64, after: Option<Row<T>>) -> Option<Hole<T>> {
        (self.reached < to).then(|| Hole {
            before: self.before.clone(),
            from: self.reached + 1,
            to,
            after,
        })
    }
}

/// Reads both logs from their beginning, page by page. Writes nothing.
///
/// # Errors
/// The error of the store.
pub async fn check_logs(
    store: &dyn Store,
    conversation: ConversationId,
) -> store::Result<CheckedLogs> {
    walk(store, conversation, false).await
}

/// As [`check_logs`], and fills the holes. Repeating it changes nothing. Returns what was found before.
///
/// # Errors
/// The error of the store. It may be repeated.
pub async fn fill_holes(
    store: &dyn Store,
    conversation: ConversationId,
) -> store::Result<CheckedLogs> {
    walk(store, conversation, true).await
}

/// Returns the filled messages from `from` to `to` that are not deleted yet. It reads only the beginning of the range, and also
/// returns up to where.
///
/// # Errors
/// The error of the store.
pub async fn undeleted(
    store: &dyn Store,
    conversation: ConversationId,
    from: Seq,
    to: Seq,
) -> store::Result<(Vec<Seq>, Seq)> {
    let to = to.min(from + AT_ONCE - 1);
    let page = store.log(conversation, from, to).await?;
    Ok((undeleted_of(&page).collect(), to))
}

async fn walk(
    store: &dyn Store,
    conversation: ConversationId,
    fill: bool,
) -> store::Result<CheckedLogs> {
    let mut checked = CheckedLogs {
        have_more: store.find_ends(conversation, fill).await?,
        ..CheckedLogs::default()
    };
    let ends = store.tail(conversation, TAIL_ENTRIES).await?;
    checked.entries = CheckedLog::of(&ends.tail, |entry| entry.seq);
    walk_entries(store, conversation, fill, &mut checked).await?;
    if ends.may_have_changes {
        let ChangesTail { tail, deleted } = store.changes_tail(conversation, TAIL_ENTRIES).await?;
        checked.changes = CheckedLog::of(&tail, |change| change.rev);
        let deleted = fill.then_some(&deleted.1);
        walk_changes(store, conversation, deleted, &mut checked.changes).await?;
    }
    ask_takeover(store, conversation, fill, &mut checked).await?;
    Ok(checked)
}

/// Asks whether an owner would take the logs, as they are now. It may refuse a log without holes: what a takeover
/// settled has lost rows, of which those of an earlier owner are left.
async fn ask_takeover(
    store: &dyn Store,
    conversation: ConversationId,
    fill: bool,
    checked: &mut CheckedLogs,
) -> store::Result<()> {
    let CheckedLogs {
        entries, changes, ..
    } = checked;
    let tail = store.tail(conversation, TAIL_ENTRIES).await?;
    if fill || entries.lost == 0 {
        let rows = entries.ask::<PendingEntry>(&tail.tail);
        if fill && !rows.is_empty() {
            store.append(conversation, &rows, None).await?;
        }
    }
    if tail.may_have_changes && (fill || changes.lost == 0) {
        let tail = store.changes_tail(conversation, TAIL_ENTRIES).await?.tail;
        let rows = changes.ask::<PendingChange>(&tail);
        if fill && !rows.is_empty() {
            store.append_changes(conversation, &rows, None).await?;
        }
    }
    Ok(())
}

async fn walk_entries(
    store: &dyn Store,
    conversation: ConversationId,
    fill: bool,
    checked: &mut CheckedLogs,
) -> store::Result<()> {
    let CheckedLogs {
        entries, undeleted, ..
    } = checked;
    let (mut walk, certain) = (Walk::default(), entries.certain);
    // The row after the last certain one may say how many messages are lost before it.
    let last = if certain == 0 { 0 } else { certain + 1 };
    let mut from = 1;
    while from <= last {
        let to = (from + AT_ONCE - 1).min(last);
        let page = store.log(conversation, from, to).await?;
        for seq in undeleted_of(&page) {
            let first = undeleted.map_or(seq, |(first, _)| first);
            *undeleted = Some((first, seq));
        }
        let mut holes = Vec::new();
        for row in page.rows {
            entries.filled += u64::from(row.epoch == FILLED);
            holes.extend(walk.pass(row.record.seq, row));
        }
        if to == last {
            holes.extend(walk.end(certain, None));
        }
        for hole in holes {
            entries.add(&hole);
            if fill {
                fill_entries(store, conversation, &hole).await?;
            }
        }
        from = to + 1;
    }
    Ok(())
}

async fn walk_changes(
    store: &dyn Store,
    conversation: ConversationId,
    fill: Option<&DeletedSeqs>,
    checked: &mut CheckedLog,
) -> store::Result<()> {
    let (mut walk, certain) = (Walk::default(), checked.certain);
    let mut from = 1;
    while from <= certain {
        let to = (from + AT_ONCE - 1).min(certain);
        let mut holes = Vec::new();
        for row in store.changes(conversation, from, to).await? {
            checked.filled += u64::from(row.epoch == FILLED);
            holes.extend(walk.pass(row.record.rev, row));
        }
        if to == certain {
            holes.extend(walk.end(certain, None));
        }
        for hole in holes {
            checked.add(&hole);
            if let Some(deleted) = fill {
                fill_changes(store, conversation, &hole, deleted).await?;
            }
        }
        from = to + 1;
    }
    Ok(())
}

/// Returns the filled messages of a page that are not deleted.
fn undeleted_of(page: &LogPage) -> impl Iterator<Item = Seq> {
    let is_deleted = |seq: Seq| {
        let of_seq = |(s, state): &(Seq, EntryState)| *s == seq && state.is_deleted();
        page.states.iter().any(of_seq)
    };
    let filled = page.rows.iter().filter(|row| row.epoch == FILLED);
    let messages = filled.filter(|row| is_message(&row.record));
    messages
        .map(|row| row.record.seq)
        .filter(move |seq| !is_deleted(*seq))
}

fn is_message(entry: &Entry) -> bool {
    matches!(entry.content, Content::Text { .. })
}

async fn fill_entries(
    store: &dyn Store,
    conversation: ConversationId,
    hole: &Hole<Entry>,
) -> store::Result<()> {
    let lost = Lost::of(conversation, hole);
    for from in (hole.from..=hole.to).step_by(APPENDS_IN_FLIGHT_MAX) {
        let to = hole.to.min(from + AT_ONCE - 1);
        let rows: Vec<LogRow> = (from..=to).map(|seq| filled(lost.entry(seq))).collect();
        store.append(conversation, &rows, None).await?;
    }
    Ok(())
}

async fn fill_changes(
    store: &dyn Store,
    conversation: ConversationId,
    hole: &Hole<Change>,
    deleted: &DeletedSeqs,
) -> store::Result<()> {
    let near = hole.before.as_ref().or(hole.after.as_ref());
    let at = near.map_or(0, |row| row.record.at);
    for from in (hole.from..=hole.to).step_by(APPENDS_IN_FLIGHT_MAX) {
        let to = hole.to.min(from + AT_ONCE - 1);
        let change = |rev| Change {
            rev,
            by: UserId::gateway(),
            at,
            op: ChangeOp::lost(deleted.clone()),
        };
        let rows: Vec<ChangeRow> = (from..=to).map(|rev| filled(change(rev))).collect();
        store.append_changes(conversation, &rows, None).await?;
    }
    Ok(())
}

/// A row that fills a place. It says nothing about what is settled, and is of no settle.
fn filled<T>(record: impl Into<Arc<T>>) -> Row<T> {
    Row {
        record: record.into(),
        epoch: FILLED,
        settled: 0,
        settle_end: 0,
    }
}

/// What is known of the lost entries of a hole.
struct Lost {
    conversation: ConversationId,
    first: Seq,
    at: Millis,
    rank: u64,
    /// The number of people's messages before the hole.
    texts: u64,
    /// How many of the lost entries are messages.
    messages: u64,
}

impl Lost {
    fn of(conversation: ConversationId, hole: &Hole<Entry>) -> Self {
        let before = hole.before.as_ref().map(|row| &*row.record);
        let after = hole.after.as_ref().map(|row| &*row.record);
        let texts = before.map_or(0, |before| before.texts);
        // Without a later entry nobody knows, so all count. An unread count may be too high then, but not too low.
        let messages = after.map_or(hole.len(), |after| {
            let until = after.texts.saturating_sub(u64::from(is_message(after)));
            until.saturating_sub(texts).min(hole.len())
        });
        let near = before.or(after);
        Self {
            conversation,
            first: hole.from,
            at: near.map_or(0, |entry| entry.at),
            rank: near.map_or(0, |entry| entry.message_id.rank()),
            texts,
            messages,
        }
    }

    /// Returns the entry that takes the place of a lost one: a message without text, or a change of the conversation that changes
    /// nothing. The messages come first, so that no unread count is too low. Everything in it follows from its place, so filling
    /// the place again writes the same.
    fn entry(&self, seq: Seq) -> Entry {
        let nth = seq - self.first + 1;
        let is_message = nth <= self.messages;
        let content = if is_message {
            Content::text("")
        } else {
            Content::System(SystemChange::Updated {
                name: None,
                posting: None,
                public: None,
            })
        };
        let name = format!("lost entry {seq}");
        let id = Uuid::new_v5(&self.conversation.0, name.as_bytes());
        Entry {
            seq,
            message_id: clock::message_id_of(self.rank, id),
            client_id: ClientId(id),
            sender: UserId::gateway(),
            at: self.at,
            content,
            texts: self.texts + nth.min(self.messages),
        }
    }
}

#[cfg(test)]
mod tests;
