//! The newest committed entries of a conversation, from which most pages are read.

use std::{collections::VecDeque, sync::Arc};

use crate::model::{Entry, Seq, limits::RECENT_ENTRIES};

/// At most [`RECENT_ENTRIES`] entries without gaps.
#[derive(Debug, Default)]
pub(super) struct RecentEntries {
    entries: VecDeque<Arc<Entry>>,
    /// Bytes that the entries hold.
    bytes: usize,
}

impl RecentEntries {
    /// Adds the next committed entry. The oldest one leaves if there are too many.
    pub(super) fn push(&mut self, entry: Arc<Entry>) {
        self.bytes += entry.weight();
        self.entries.push_back(entry);
        if self.entries.len() > RECENT_ENTRIES
            && let Some(oldest) = self.entries.pop_front()
        {
            self.bytes -= oldest.weight();
        }
    }

    /// Returns the entries from `from` to `to`, if all of them are here.
    pub(super) fn range(&self, from: Seq, to: Seq) -> Option<Vec<Arc<Entry>>> {
        if from > to {
            return Some(Vec::new());
        }
        let first = self.entries.front()?.seq;
        let start = usize::try_from(from.checked_sub(first)?).ok()?;
        let end = usize::try_from(to - first).ok()?;
        (end < self.entries.len()).then(|| self.entries.range(start..=end).cloned().collect())
    }

    /// The oldest entry here.
    pub(super) fn oldest(&self) -> Option<&Arc<Entry>> {
        self.entries.front()
    }

    pub(super) fn has(&self, seq: Seq) -> bool {
        let newest = self.newest().map_or(0, |newest| newest.seq);
        (self.first()..=newest).contains(&seq) && newest > 0
    }

    /// The seq of the oldest entry here, or 0.
    pub(super) fn first(&self) -> Seq {
        self.entries.front().map_or(0, |oldest| oldest.seq)
    }

    /// Erases the text of a deleted entry.
    pub(super) fn erase(&mut self, seq: Seq) {
        let place = seq.checked_sub(self.first()).map(usize::try_from);
        if let Some(Ok(place)) = place
            && let Some(entry) = self.entries.get_mut(place)
        {
            let erased = Arc::new(entry.erased());
            self.bytes = self.bytes + erased.weight() - entry.weight();
            *entry = erased;
        }
    }

    pub(super) fn newest(&self) -> Option<&Arc<Entry>> {
        self.entries.back()
    }

    /// Bytes of memory held.
    pub(super) fn weight(&self) -> usize {
        self.bytes
    }
}
