//! Reads pages of the committed log from the store, through a cache that joins identical reads in progress: ten thousand
//! clients that reconnect at once cost one read.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use metrics::counter;
use moka::future::Cache;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::{error::Error, operation::LogRange};
use crate::{
    model::{
        ConversationId, Entry, EntryState, Rev, Seq,
        limits::{PAGE_ENTRIES_DEFAULT, PAGE_ENTRIES_MAX, READ_ENTRIES_MAX, RESUME_BYTES_MAX},
        weight::ALLOCATION_BYTES,
    },
    store::{self, Store},
};

/// The time after which a page is read again.
const KEPT: Duration = Duration::from_secs(600);

/// A part of the log as it was read from the store.
#[derive(Clone, Default)]
struct Stretch {
    entries: Vec<Arc<Entry>>,
    /// The states of those entries that changed.
    states: Vec<(Seq, Arc<EntryState>)>,
}

/// Entries with the states of those that changed.
pub(super) type EntriesWithStates = (Vec<Arc<Entry>>, Vec<(Seq, Arc<EntryState>)>);

pub(super) struct History {
    store: Arc<dyn Store>,
    /// By conversation, first and last seq, and the newest rev that changed an entry there.
    parts: Cache<(ConversationId, Seq, Seq, Rev), Arc<Stretch>>,
    page_bytes_max: usize,
    /// A permit for each entry that is being read from the store.
    reads: Semaphore,
}

impl History {
    pub(super) fn new(store: Arc<dyn Store>, bytes_max: usize, page_bytes_max: usize) -> Self {
        let parts = Cache::builder()
            .max_capacity(bytes_max as u64)
            .weigher(|_, part: &Arc<Stretch>| u32::try_from(part.weight()).unwrap_or(u32::MAX))
            // A page with a text that was deleted since is never served, and is forgotten after this time.
            .time_to_live(KEPT)
            .build();
        Self {
            store,
            parts,
            page_bytes_max,
            reads: Semaphore::new(READ_ENTRIES_MAX),
        }
    }

    /// Reads the entries from `from` to `to`. If they weigh too much for a page, it omits those farthest from the
    /// requested position. The owner has said that all of them are committed, and which rev changed one of them last:
    /// `touched`. A page that was read before that is not used (rule [cache]).
    pub(super) async fn read(
        &self,
        conversation: ConversationId,
        (from, to): (Seq, Seq),
        (range, limit): (LogRange, usize),
        touched: Rev,
    ) -> Result<EntriesWithStates, Error> {
        let bytes_max = if limit <= PAGE_ENTRIES_MAX {
            self.page_bytes_max
        } else {
            RESUME_BYTES_MAX
        };
        let mut page = Reading::new(from, to, range, bytes_max);
        let mut states = Vec::new();
        while let Some((from, to)) = page.next() {
            let part = self.part(conversation, from, to, touched).await?;
            page.take(&part.entries);
            page.bytes += part.states.iter().map(|(_, s)| s.weight()).sum::<usize>();
            states.extend(part.states.iter().cloned());
        }
        let entries = page.page();
        let first = entries.first().map_or(Seq::MAX, |entry| entry.seq);
        let last = entries.last().map_or(0, |entry| entry.seq);
        states.retain(|(seq, _)| (first..=last).contains(seq));
        states.sort_unstable_by_key(|(seq, _)| *seq);
        Ok((entries, states))
    }

    /// Waits until so many entries or changes may be read from the store.
    pub(super) async fn reserve(&self, count: u64) -> Option<SemaphorePermit<'_>> {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        self.reads.acquire_many(count).await.ok()
    }

    async fn part(
        &self,
        conversation: ConversationId,
        from: Seq,
        to: Seq,
        touched: Rev,
    ) -> Result<Arc<Stretch>, Error> {
        let load = async {
            let entries = u32::try_from(to - from + 1).unwrap_or(u32::MAX);
            // The semaphore is never closed.
            let _permits = self.reads.acquire_many(entries).await;
            let store::LogPage { rows, states } = self.store.log(conversation, from, to).await?;
            counter!("chat_history_entries_read_total").increment(rows.len() as u64);
            let whole = rows.iter().map(|r| r.record.seq).eq(from..=to);
            if !whole {
                return Err(store::Error::Corrupt {
                    operation: "history",
                    reason: format!("{conversation}: entries {from} to {to} are not all there"),
                });
            }
            let states = states.into_iter();
            Ok(Arc::new(Stretch {
                entries: rows.into_iter().map(|row| row.record).collect(),
                states: states.map(|(seq, state)| (seq, Arc::new(state))).collect(),
            }))
        };
        let mut loaded = false;
        let load = async {
            loaded = true;
            load.await
        };
        let part = self
            .parts
            .try_get_with((conversation, from, to, touched), load)
            .await
            .map_err(|error| {
                crate::seldom::seldom!(WARN, "a page could not be read", %conversation, %error);
                store::Error::clone(&error).into()
            });
        if loaded {
            // The cache would evict some time later, and exceed its bound until then.
            self.parts.run_pending_tasks().await;
        }
        part
    }
}

impl Stretch {
    fn weight(&self) -> usize {
        let entries = self.entries.iter().map(|entry| entry.weight());
        let states = self
            .states
            .iter()
            .map(|(_, state)| state.weight() + 2 * size_of::<Seq>());
        PART_BYTES + entries.sum::<usize>() + states.sum::<usize>()
    }
}

/// Entries of the first part of a page.
const FIRST_PART_ENTRIES: Seq = PAGE_ENTRIES_DEFAULT as Seq;
/// Entries of each further part, at most.
const PART_ENTRIES_MAX: Seq = 2 * FIRST_PART_ENTRIES;
/// The weight of a part without its entries: the list, its key, its place in the cache.
const PART_BYTES: usize = 400 + 2 * ALLOCATION_BYTES;

/// A page that is read in parts, beginning next to the requested position.
struct Reading {
    from: Seq,
    to: Seq,
    /// The requested position. The entries next to it are read first.
    near: Seq,
    bytes_max: usize,
    /// The entries read so far, without a gap.
    entries: VecDeque<Arc<Entry>>,
    bytes: usize,
}

impl Reading {
    fn new(from: Seq, to: Seq, range: LogRange, bytes_max: usize) -> Self {
        let near = match range {
            LogRange::Newest | LogRange::Before(_) => to,
            LogRange::After(_) => from,
            LogRange::Around(seq) => seq.clamp(from, to),
        };
        Self {
            from,
            to,
            near,
            bytes_max,
            entries: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Returns the part to read next. `None` if the page is complete or full.
    fn next(&self) -> Option<(Seq, Seq)> {
        let Self { from, to, near, .. } = *self;
        let (Some(first), Some(last)) = (self.entries.front(), self.entries.back()) else {
            let latest = from.max((to + 1).saturating_sub(FIRST_PART_ENTRIES));
            let start = near.saturating_sub(FIRST_PART_ENTRIES / 2);
            let start = start.clamp(from, latest);
            return Some((start, to.min(start + FIRST_PART_ENTRIES - 1)));
        };
        let (first, last) = (first.seq, last.seq);
        let room = self.bytes_max.saturating_sub(self.bytes) as Seq;
        if room == 0 {
            return None;
        }
        // The size of the next entries is estimated from those that were read.
        let each = self.bytes as Seq / self.entries.len() as Seq;
        let count = (room / each.max(1)).clamp(1, PART_ENTRIES_MAX);
        let (before, after) = (first - from, to - last);
        let is_nearer = near.abs_diff(first) <= near.abs_diff(last);
        match (before, after) {
            (0, 0) => None,
            (0, _) => Some((last + 1, last + count.min(after))),
            (_, 1..) if !is_nearer => Some((last + 1, last + count.min(after))),
            _ => Some((first - count.min(before), first - 1)),
        }
    }

    fn take(&mut self, part: &[Arc<Entry>]) {
        self.bytes += part.iter().map(|entry| entry.weight()).sum::<usize>();
        let first = self.entries.front().map_or(0, |entry| entry.seq);
        if part.last().is_some_and(|entry| entry.seq < first) {
            for entry in part.iter().rev() {
                self.entries.push_front(entry.clone());
            }
        } else {
            self.entries.extend(part.iter().cloned());
        }
    }

    /// Returns the entries that fit into the page, but at least one.
    fn page(mut self) -> Vec<Arc<Entry>> {
        while self.bytes > self.bytes_max
            && self.entries.len() > 1
            && let (Some(first), Some(last)) = (self.entries.front(), self.entries.back())
        {
            let left_out = if self.near.abs_diff(last.seq) > self.near.abs_diff(first.seq) {
                self.entries.pop_back()
            } else {
                self.entries.pop_front()
            };
            self.bytes -= left_out.map_or(0, |entry| entry.weight());
        }
        self.entries.into()
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::operation::LogRange::{After, Around, Before, Newest},
        *,
    };
    use crate::model::{ClientId, Content, MessageId, UserId};

    fn entry(seq: Seq, bytes: usize) -> Arc<Entry> {
        let id = uuid::Uuid::from_u128(seq.into());
        Arc::new(Entry {
            seq,
            message_id: MessageId(id),
            client_id: ClientId(id),
            sender: UserId::new("alice").unwrap(),
            at: 1,
            content: Content::text("x".repeat(bytes)),
            texts: 0,
        })
    }

    /// Returns the page and the number of entries read for it.
    fn read(range: LogRange, limit: usize, bytes: usize) -> (Vec<Seq>, usize) {
        let (from, to) = range.within(1_000, limit);
        let mut page = Reading::new(from, to, range, 100_000);
        let mut read = 0;
        while let Some((from, to)) = page.next() {
            let part: Vec<_> = (from..=to).map(|seq| entry(seq, bytes)).collect();
            read += part.len();
            page.take(&part);
        }
        (page.page().iter().map(|entry| entry.seq).collect(), read)
    }

    #[test]
    fn a_page_of_small_entries_is_whole() {
        for range in [Newest, Before(500), After(500), Around(500), Around(3)] {
            for limit in [1, 2, 49, 50, 51, 200] {
                let (from, to) = range.within(1_000, limit);
                let (page, read) = read(range, limit, 1);
                assert_eq!(page, (from..=to).collect::<Vec<_>>(), "{range:?} {limit}");
                assert_eq!(read, limit);
            }
        }
    }

    #[test]
    fn of_large_entries_few_are_read_and_those_asked_for_are_kept() {
        for (range, near) in [
            (Newest, 1_000),
            (Before(500), 499),
            (After(500), 501),
            (Around(500), 500),
        ] {
            let (page, read) = read(range, 200, 10_000);
            assert!((5..=10).contains(&page.len()), "{range:?}: {page:?}");
            assert!(page.contains(&near), "{range:?}: {page:?}");
            assert!(page.windows(2).all(|two| two[0] + 1 == two[1]));
            assert!(read <= 50, "{range:?}: {read} were read");
            let (page, _) = self::read(range, 200, 1_000_000);
            assert_eq!(page, [near], "one at least");
        }
    }
}
