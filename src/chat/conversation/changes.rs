//! The log of changes of a conversation as its owner has it in memory: edits, deletions and reactions. It follows the same
//! rules as the log of entries, see `log.rs`.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use super::Reply;
use crate::{
    chat::{
        changed_items,
        client_ids::Origin,
        log::{Log, Pending},
        operation::{Changes, Outcome},
        states::States,
    },
    model::{
        Change, ChangeOp, DeletedSeqs, Rev, Seq,
        limits::{CHANGES_BEHIND_MAX, CHANGES_PAGE_MAX, RECENT_CHANGES, RECENT_CHANGES_BYTES},
    },
    mutation::{Mutation, broken},
    store::ChangeRow,
};

/// Seqs of a block. The page cache is told of changes by block.
const BLOCK_SEQS: Seq = 64;
/// Changed blocks that are remembered. Above this, all blocks count as changed.
const BLOCKS_MAX: usize = 1_024;

/// A change that is not settled yet.
pub(in crate::chat) struct PendingChange {
    pub change: Arc<Change>,
    /// The replies to the request that made the change, and to those that asked for the same meanwhile.
    pub replies: Vec<Reply>,
}

impl Pending for PendingChange {
    type Record = Change;

    fn record(&self) -> &Arc<Change> {
        &self.change
    }

    fn position(change: &Change) -> u64 {
        change.rev
    }

    fn is_same(a: &Change, b: &Change) -> bool {
        a.is_same(b)
    }

    fn origin(_: &Change) -> Option<Origin> {
        None
    }

    fn weight(change: &Change) -> usize {
        change.weight()
    }
}

impl PendingChange {
    /// Acknowledges the change: sends all its replies.
    pub(super) fn answer(&mut self) {
        let rev = self.change.rev;
        for reply in self.replies.drain(..) {
            drop(reply.send(Ok(super::OwnerReply::Ready(Outcome::Revised { rev }))));
        }
    }
}

/// The deleted entries of a conversation as of a rev.
pub(super) type Deleted = (Rev, DeletedSeqs);

/// The changes of a conversation.
pub(super) struct ChangeLog {
    pub log: Log<PendingChange>,
    /// Rows appended since the last write to the store.
    pub unwritten: Vec<ChangeRow>,
    /// Whether reactions wait before they are written.
    pub is_resting: bool,
    pub states: States,
    /// The deleted entries after all appended changes.
    pub deleted: Deleted,
    /// The deleted entries after all applied changes.
    pub deleted_applied: Deleted,
    /// The newest rev whose effects are stored. Clients are told of changes up to it.
    pub applied: Rev,
    /// The newest rev that was published.
    pub published: Rev,
    /// The changes whose effects are being stored. Rule [rounds]: one round at a time.
    pub round: Option<Range<Rev>>,
    /// Whether a publication of reactions is waiting for more of them.
    pub is_coalescing: bool,
    /// The settled rev that this owner stored for the next one, or tried to store.
    pub stored_settled: Rev,
    /// The last minute for which an `activity` row was written with changes.
    pub active_minute: u32,
    recent: RecentChanges,
    touched: Touched,
}

impl ChangeLog {
    pub(super) fn new(log: Log<PendingChange>, states: States, deleted: Deleted) -> Self {
        // The effects of later changes may be missing.
        let (applied, settled) = (log.settled(), log.settled());
        Self {
            log,
            unwritten: Vec::new(),
            is_resting: false,
            states,
            deleted_applied: deleted.clone(),
            deleted,
            applied,
            published: settled,
            round: None,
            is_coalescing: false,
            stored_settled: settled,
            active_minute: 0,
            recent: RecentChanges::default(),
            touched: Touched {
                all: applied,
                ..Touched::default()
            },
        }
    }

    /// Whether nothing is in progress.
    pub(super) fn is_settled(&self) -> bool {
        self.log.is_settled() && self.published == self.applied
    }

    /// Remembers an applied change.
    pub(super) fn remember(&mut self, change: &Arc<Change>) {
        self.recent.push(change.clone(), self.published);
    }

    /// Includes an applied change in everything that replies contain.
    pub(super) fn apply(&mut self, change: &Arc<Change>) {
        self.remember(change);
        self.states.apply(change);
        if let ChangeOp::Delete { entries, deleted } = &change.op {
            self.deleted_applied = (change.rev, deleted.clone());
            let edits = entries.iter().flat_map(|entry| &entry.edits);
            edits.for_each(|&rev| self.recent.erase(rev));
        }
        // Rule [cache-late]: a page that is read from now on has the change.
        for seq in change.seqs() {
            self.touched.add(seq, change.rev);
        }
    }

    /// The newest rev that changed an entry from `from` to `to`, as far as this owner knows, or a higher one.
    pub(super) fn touched(&self, from: Seq, to: Seq) -> Rev {
        if broken(Mutation::ChangeCache) {
            return 0;
        }
        self.touched.newest(from, to)
    }

    /// The changes in (after, applied], if all are in memory.
    pub(super) fn since(&self, after: Rev) -> Option<impl Iterator<Item = &Arc<Change>>> {
        self.recent.since(after, self.applied)
    }

    /// The reply to the question for the changes after a rev, or the part of the log that must be read for it.
    pub(super) fn page(
        &self,
        after: Rev,
        limit: usize,
        bytes_max: usize,
    ) -> Result<Changes, Range<Rev>> {
        let applied = self.applied;
        let empty = |after: Rev, reset| Changes {
            after,
            rev: applied,
            items: Vec::new(),
            more: false,
            reset,
        };
        if after >= applied {
            return Ok(empty(applied, false));
        }
        if applied - after > CHANGES_BEHIND_MAX {
            return Ok(empty(after, true));
        }
        let limit = limit.clamp(1, CHANGES_PAGE_MAX) as Rev;
        let upto = applied.min(after + limit);
        match self.since(after) {
            None => Err(after + 1..upto + 1),
            Some(changes) => {
                let changes = changes.take_while(|change| change.rev <= upto);
                let changes: Vec<&Change> = changes.map(AsRef::as_ref).collect();
                // Rule [lost-reset]: the client must load anew what the lost changes changed.
                if changes.iter().any(|change| change.is_lost()) {
                    return Ok(empty(after, true));
                }
                let fitting = changed_items::fitting(changes.iter().copied(), bytes_max);
                let upto = upto.min(after + fitting as Rev);
                Ok(Changes {
                    rev: upto,
                    items: changed_items::items(changes.into_iter().take(fitting)),
                    more: upto < applied,
                    ..empty(after, false)
                })
            }
        }
    }

    /// Bytes of memory held.
    pub(super) fn weight(&self) -> usize {
        const BLOCK_BYTES: usize = 4 * size_of::<(Seq, Rev)>();
        let blocks = self.touched.blocks.len() * BLOCK_BYTES;
        self.log.weight() + self.states.weight() + self.recent.bytes + blocks
    }
}

/// The newest applied changes without gaps: those that are not published, and at most [`RECENT_CHANGES`].
#[derive(Default)]
struct RecentChanges {
    changes: VecDeque<Arc<Change>>,
    bytes: usize,
}

impl RecentChanges {
    fn push(&mut self, change: Arc<Change>, published: Rev) {
        self.bytes += change.weight();
        self.changes.push_back(change);
        while (self.changes.len() > RECENT_CHANGES || self.bytes > RECENT_CHANGES_BYTES)
            && let Some(oldest) = self.changes.pop_front_if(|oldest| oldest.rev <= published)
        {
            self.bytes -= oldest.weight();
        }
    }

    /// The changes in (after, upto], if all are here.
    fn since(&self, after: Rev, upto: Rev) -> Option<impl Iterator<Item = &Arc<Change>>> {
        let first = self.changes.front().map_or(upto + 1, |first| first.rev);
        let skip = usize::try_from((after + 1).checked_sub(first)?).ok()?;
        Some(self.changes.iter().skip(skip))
    }

    /// Erases the content of an edit.
    fn erase(&mut self, rev: Rev) {
        let first = self.changes.front().map_or(0, |first| first.rev);
        let place = rev.checked_sub(first).map(usize::try_from);
        if let Some(Ok(place)) = place
            && let Some(change) = self.changes.get_mut(place)
            && let Some(op) = change.op.erased_edit()
        {
            let erased = Arc::new(Change {
                op,
                ..change.as_ref().clone()
            });
            self.bytes = self.bytes + erased.weight() - change.weight();
            *change = erased;
        }
    }
}

/// The newest rev of each block of seqs in the time of this owner. It is part of the key of cached pages (rule [cache]).
#[derive(Default)]
struct Touched {
    blocks: std::collections::BTreeMap<Seq, Rev>,
    /// A rev that counts for every block.
    all: Rev,
}

impl Touched {
    fn add(&mut self, seq: Seq, rev: Rev) {
        if self.blocks.len() >= BLOCKS_MAX {
            self.blocks.clear();
            self.all = rev;
        }
        self.blocks.insert(seq / BLOCK_SEQS, rev);
    }

    fn newest(&self, from: Seq, to: Seq) -> Rev {
        let blocks = self.blocks.range(from / BLOCK_SEQS..=to / BLOCK_SEQS);
        blocks.map(|(_, rev)| *rev).fold(self.all, Rev::max)
    }
}
