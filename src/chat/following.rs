//! A conversation as the consumers of its log follow it: webhooks and push. docs/consumers.md has the rules.
//!
//! The owner only raises two numbers, and queues nothing. A consumer reads the committed entries and the applied changes
//! after its offset, and raises the offset when it has delivered them.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use foldhash::quality::RandomState;
use tokio::time::Instant;

use super::{lease::Ownership, publish::Recipients};
use crate::{
    clock,
    model::{ConsumerName, ConversationId, Cursor, Kind, Millis, Seq, UserId},
    mutation::{Mutation, broken},
    store::{self, Store},
    tasks::lock,
};

/// The consumers of this gateway, as its conversations see them.
pub trait Consumers: Send + Sync + 'static {
    /// Returns the consumers that are configured. All of them follow each conversation.
    fn names(&self) -> Vec<ConsumerName>;

    /// Returns whether a consumer reads conversations of this kind.
    fn wants(&self, consumer: &ConsumerName, kind: Kind) -> bool;

    /// Remembers a conversation that is followed from now on.
    fn opened(&self, following: &Arc<Following>);

    /// Tells a consumer that a conversation has something to deliver. It is told once until it calls [`Following::rest`].
    fn wake(&self, consumer: &ConsumerName, following: &Arc<Following>);

    /// Learns that a conversation lagged, and does not any more. That is to be stored soon.
    fn caught_up(&self, following: &Arc<Following>);

    /// Forgets a conversation. Its rows are stored, or its next owner does everything again that is not.
    fn closed(&self, following: &Arc<Following>);
}

/// The progress of all consumers in one open conversation.
pub struct Following {
    pub conversation: ConversationId,
    consumers: Arc<dyn Consumers>,
    ownership: Arc<Ownership>,
    /// Whether its messages are pushed.
    pub(super) is_pushed: bool,
    /// Whether the conversation is evicted. Its consumers stop, so that its owner need not wait until they caught up.
    is_leaving: AtomicBool,
    is_closed: AtomicBool,
    state: Mutex<State>,
}

struct State {
    /// The newest committed entry and the newest applied change.
    heads: Cursor,
    /// `None` as long as the conversation does not exist.
    kind: Option<Kind>,
    pushing: Option<Box<Pushing>>,
    progress: Box<[Progress]>,
}

/// What push needs to know of a conversation.
#[derive(Default)]
struct Pushing {
    /// The participants of a dm or group.
    recipients: Option<Arc<Recipients>>,
    /// The newest message of which a session that looks has said that it got it, of each participant.
    seen: HashMap<UserId, Seq, RandomState>,
}

/// The progress of one consumer in one conversation.
struct Progress {
    consumer: ConsumerName,
    /// Everything up to it is delivered.
    offset: Cursor,
    /// The offset in the store. `None` if there is none.
    stored: Option<Cursor>,
    /// The heads of the lagging row that this owner has stored, if it stored one and did not begin to remove it.
    row: Option<Cursor>,
    /// Whether a scan found a row, which may be one of an earlier owner. It names nothing for sure, but must be removed.
    has_old_row: bool,
    /// The highest offset at which this owner began to remove a row. No row up to it counts (rule [lagging-turn]).
    cleared: Cursor,
    /// Since when there is something to deliver, and the time of the oldest of that.
    behind: Option<Behind>,
    /// Whether the consumer was told, and did not rest yet.
    is_told: bool,
}

#[derive(Clone, Copy)]
struct Behind {
    since: Instant,
    oldest: Millis,
}

/// What must be stored of some consumers' progress in a conversation.
#[derive(Clone, Default)]
pub struct ToStore {
    pub offsets: Vec<(ConversationId, ConsumerName, Cursor)>,
    /// Conversations that lag: the heads, and the time of the oldest event that is not delivered.
    pub lagging: Vec<(ConversationId, ConsumerName, Cursor, Millis)>,
    /// Conversations that no longer lag, with the offset.
    pub caught_up: Vec<(ConversationId, ConsumerName, Cursor)>,
}

impl ToStore {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty() && self.lagging.is_empty() && self.caught_up.is_empty()
    }
}

/// What a consumer may deliver now: everything in (offset, heads].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    pub offset: Cursor,
    pub heads: Cursor,
}

impl Progress {
    fn is_behind(&self, heads: Cursor) -> bool {
        self.offset.0 < heads.0 || self.offset.1 < heads.1
    }

    /// Whether the consumer may have a lagging row.
    fn has_row(&self) -> bool {
        self.row.is_some() || self.has_old_row
    }

    fn is_dirty(&self) -> bool {
        self.stored.is_some_and(|stored| stored != self.offset)
    }
}

/// Returns the higher of each of the two positions.
fn raised(a: Cursor, b: Cursor) -> Cursor {
    Cursor(a.0.max(b.0), a.1.max(b.1))
}

impl Following {
    /// Begins to follow a conversation that is being loaded. `stored` are its offsets, and everything up to `certain` was
    /// settled by earlier owners.
    ///
    /// Rule [first]: a consumer without an offset begins at `certain`, not at the newest entry: an entry that this owner
    /// settles again may be one that was never delivered.
    #[must_use]
    pub(super) fn new(
        conversation: ConversationId,
        consumers: Arc<dyn Consumers>,
        ownership: Arc<Ownership>,
        stored: &[(ConsumerName, Cursor)],
        certain: Cursor,
    ) -> Arc<Self> {
        let progress = consumers.names().into_iter().map(|consumer| {
            let stored = stored.iter().find(|(name, _)| *name == consumer);
            let stored = stored.map(|(_, offset)| *offset);
            Progress {
                consumer,
                offset: stored.unwrap_or(certain),
                stored,
                row: None,
                has_old_row: false,
                cleared: Cursor::default(),
                behind: None,
                is_told: false,
            }
        });
        let state = State {
            heads: certain,
            kind: None,
            pushing: None,
            progress: progress.collect(),
        };
        let is_pushed = state.progress.iter().any(|p| p.consumer.is_push());
        Arc::new(Self {
            is_pushed,
            conversation,
            consumers,
            ownership,
            is_leaving: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            state: Mutex::new(state),
        })
    }

    /// The offsets of the consumers that have none in the store. They must be stored before anything is appended: rule
    /// [first].
    pub(super) fn first_offsets(&self) -> Vec<(ConversationId, ConsumerName, Cursor)> {
        if broken(Mutation::ConsumerFirst) {
            return Vec::new();
        }
        let state = lock(&self.state);
        let new = state.progress.iter().filter(|p| p.stored.is_none());
        new.map(|p| (self.conversation, p.consumer.clone(), p.offset))
            .collect()
    }

    /// Notes that offsets of this conversation are in the store.
    pub(super) fn offsets_stored(&self, offsets: &[(ConversationId, ConsumerName, Cursor)]) {
        let mut state = lock(&self.state);
        for (_, consumer, offset) in offsets {
            if let Some(progress) = state.find(consumer) {
                progress.stored = Some(raised(progress.stored.unwrap_or_default(), *offset));
            }
        }
    }

    /// Returns the participants of a dm or group.
    #[must_use]
    pub fn recipients(&self) -> Option<Arc<Recipients>> {
        lock(&self.state).pushing.as_ref()?.recipients.clone()
    }

    /// Notes that a session that looks has a message. Returns whether that is new to those who push.
    pub(super) fn has_seen(&self, user: &UserId, seq: Seq) -> bool {
        if !self.is_pushed {
            return false;
        }
        let mut state = lock(&self.state);
        let seen = &mut state.pushing.get_or_insert_default().seen;
        let seen = seen.entry(user.clone()).or_default();
        let is_new = seq > *seen;
        *seen = seq.max(*seen);
        is_new
    }

    /// Raises the heads: rule [committed]. Consumers that have something to deliver are told. `recipients` are the participants
    /// of a dm or group that is pushed.
    pub(super) fn moved(
        self: &Arc<Self>,
        heads: Cursor,
        kind: Option<Kind>,
        recipients: Option<Arc<Recipients>>,
    ) {
        let mut told = Vec::new();
        let mut state = lock(&self.state);
        state.heads = raised(state.heads, heads);
        state.kind = kind;
        if recipients.is_some() {
            state.pushing.get_or_insert_default().recipients = recipients;
        }
        let heads = state.heads;
        for progress in &mut state.progress {
            if !progress.is_behind(heads) {
                continue;
            }
            let is_unwanted =
                kind.is_some_and(|kind| !self.consumers.wants(&progress.consumer, kind));
            // Changes are not pushed.
            let is_change = progress.consumer.is_push() && progress.offset.0 >= heads.0;
            if is_unwanted || is_change {
                (progress.offset, progress.behind) = (heads, None);
                continue;
            }
            progress.behind.get_or_insert_with(|| Behind {
                since: Instant::now(),
                oldest: clock::wall(),
            });
            if !progress.is_told {
                progress.is_told = true;
                told.push(progress.consumer.clone());
            }
        }
        drop(state);
        for consumer in told {
            self.consumers.wake(&consumer, self);
        }
    }

    /// Returns what a consumer may deliver. `None` if there is nothing, or the conversation was closed here: then the
    /// consumer has rested, and is told again.
    #[must_use]
    pub fn work(&self, consumer: &ConsumerName) -> Option<Work> {
        let mut state = lock(&self.state);
        let heads = state.heads;
        let is_over = self.is_closed() || self.is_leaving.load(Ordering::Acquire);
        let progress = state.find(consumer)?;
        if is_over || !progress.is_behind(heads) {
            progress.is_told = false;
            return None;
        }
        let offset = progress.offset;
        if broken(Mutation::ConsumerOffset) {
            progress.offset = heads;
        }
        Some(Work { offset, heads })
    }

    /// Notes that a consumer is told again at the next event. One that forgets this conversation is told at the next event,
    /// or by the scan of lagging rows.
    pub fn rest(&self, consumer: &ConsumerName) {
        if let Some(progress) = lock(&self.state).find(consumer) {
            progress.is_told = false;
        }
    }

    /// Tells a consumer again that has forgotten what it was told, if there is something to deliver.
    pub fn tell_again(self: &Arc<Self>, consumer: &ConsumerName) {
        let mut state = lock(&self.state);
        let heads = state.heads;
        let is_behind = state.find(consumer).is_some_and(|progress| {
            progress.is_told = progress.is_behind(heads);
            progress.is_told
        });
        drop(state);
        if is_behind {
            self.consumers.wake(consumer, self);
        }
    }

    /// Raises a consumer's offset: rule [offset]. `at` is the time of the last event that was delivered.
    pub fn delivered(self: &Arc<Self>, consumer: &ConsumerName, upto: Cursor, at: Millis) {
        let mut state = lock(&self.state);
        let heads = state.heads;
        let Some(progress) = state.find(consumer) else {
            return;
        };
        progress.offset = raised(progress.offset, upto);
        progress.behind = progress
            .behind
            .filter(|_| progress.is_behind(heads))
            .map(|behind| Behind {
                oldest: behind.oldest.max(at),
                ..behind
            });
        let caught_up = progress.has_row() && progress.behind.is_none();
        drop(state);
        if caught_up && !self.is_closed() {
            self.consumers.caught_up(self);
        }
    }

    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        lock(&self.state).kind
    }

    /// Returns a consumer's offset.
    #[must_use]
    pub fn offset(&self, consumer: &ConsumerName) -> Option<Cursor> {
        Some(lock(&self.state).find(consumer)?.offset)
    }

    /// Returns the time of the oldest event that a consumer has not delivered.
    #[must_use]
    pub fn oldest(&self, consumer: &ConsumerName) -> Option<Millis> {
        let mut state = lock(&self.state);
        state.find(consumer)?.behind.map(|behind| behind.oldest)
    }

    /// Returns what must be stored: offsets that rose, and rows for consumers that have been behind since `before`, or
    /// `None` for all that are behind.
    #[must_use]
    pub fn to_store(&self, before: Option<Instant>) -> ToStore {
        let state = lock(&self.state);
        let mut found = ToStore::default();
        for progress in &state.progress {
            let (id, consumer) = (self.conversation, || progress.consumer.clone());
            if progress.is_dirty() {
                found.offsets.push((id, consumer(), progress.offset));
            }
            match progress.behind.filter(|_| progress.is_behind(state.heads)) {
                // An owner that closes names all that is left, whatever an earlier row named.
                Some(behind)
                    if before.map_or(progress.row != Some(state.heads), |before| {
                        progress.row.is_none() && behind.since <= before
                    }) =>
                {
                    let row = (id, consumer(), state.heads, behind.oldest);
                    found.lagging.push(row);
                }
                None if progress.has_row() => {
                    found.caught_up.push((id, consumer(), progress.offset));
                }
                _ => {}
            }
        }
        if broken(Mutation::ConsumerFound) {
            found.lagging.clear();
        }
        found
    }

    /// Notes that all of this is in the store.
    fn stored(&self, done: &ToStore) {
        self.offsets_stored(&done.offsets);
        let mut state = lock(&self.state);
        for (_, consumer, heads, _) in &done.lagging {
            if let Some(progress) = state.find(consumer)
                && (heads.0 > progress.cleared.0 || heads.1 > progress.cleared.1)
            {
                progress.row = Some(*heads);
            }
        }
    }

    /// Notes that the rows of what caught up are being removed. From now on they do not count: if a consumer is behind again
    /// before they are removed, it needs a new one.
    fn begins_clearing(&self, progress: &ToStore) {
        let mut state = lock(&self.state);
        for (_, consumer, upto) in &progress.caught_up {
            if let Some(progress) = state.find(consumer) {
                progress.row = None;
                progress.has_old_row = false;
                progress.cleared = raised(progress.cleared, *upto);
            }
        }
    }

    /// Stores all of this. It may be repeated.
    ///
    /// # Errors
    /// The first error of the store.
    pub async fn store(&self, progress: &ToStore, store: &dyn Store) -> store::Result<()> {
        if !progress.offsets.is_empty() {
            store.set_offsets(&progress.offsets).await?;
        }
        self.store_rows(progress, store).await
    }

    /// Stores the lagging rows, and removes those of what caught up. The offsets are in the store.
    ///
    /// # Errors
    /// The first error of the store.
    pub async fn store_rows(&self, progress: &ToStore, store: &dyn Store) -> store::Result<()> {
        self.begins_clearing(progress);
        for (id, consumer, heads, oldest) in &progress.lagging {
            store.set_lagging(consumer, *id, *heads, *oldest).await?;
        }
        // Rule [lagging-offset]: the lease is checked between the offset and the removal. So the next owner begins at this
        // offset, and each row on which it counts is newer than the removal.
        if self.ownership.holds(Instant::now()) && !self.is_closed() {
            for (id, consumer, upto) in &progress.caught_up {
                store.clear_lagging(consumer, *id, *upto).await?;
            }
        }
        self.stored(progress);
        Ok(())
    }

    /// Handles the request of a scan, which found a row of this conversation: rule [lagging-scan]. A consumer that is behind is
    /// told again. One that is not removes its row.
    pub(super) fn asked(self: &Arc<Self>) {
        let (mut told, mut caught_up) = (Vec::new(), false);
        let mut state = lock(&self.state);
        let heads = state.heads;
        for progress in &mut state.progress {
            progress.has_old_row = true;
            if !progress.is_behind(heads) {
                caught_up = true;
            } else if !progress.is_told {
                progress.is_told = true;
                told.push(progress.consumer.clone());
            }
        }
        drop(state);
        for consumer in told {
            self.consumers.wake(&consumer, self);
        }
        if caught_up {
            self.consumers.caught_up(self);
        }
    }

    /// Whether the store knows everything: rule [found-close]. Only then the conversation may be closed.
    pub fn is_stored(&self) -> bool {
        self.to_store(None).is_empty() || broken(Mutation::ConsumerClose)
    }

    /// Whether a consumer still has something to deliver here.
    pub(super) fn is_behind(&self) -> bool {
        let state = lock(&self.state);
        state.progress.iter().any(|p| p.is_behind(state.heads))
    }

    /// Stops the consumers. Lagging rows name what they have not delivered.
    pub(super) fn leave(&self) {
        self.is_leaving.store(true, Ordering::Release);
    }

    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}

impl State {
    fn find(&mut self, consumer: &ConsumerName) -> Option<&mut Progress> {
        self.progress.iter_mut().find(|p| p.consumer == *consumer)
    }
}

/// The owner's hold on what follows its conversation. It ends with the owner, however that ends.
pub(super) struct Followed(pub Arc<Following>);

impl Followed {
    pub(super) fn new(following: Arc<Following>) -> Self {
        following.consumers.opened(&following);
        Self(following)
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.0.is_closed.store(true, Ordering::Release);
        self.0.consumers.closed(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn following_a_conversation_takes_little_memory() {
        let (following, progress) = (size_of::<Following>(), size_of::<Progress>());
        // 128 bytes with the two counters of its `Arc`.
        assert!(following <= 112, "{following} bytes");
        assert!(progress <= 128, "{progress} bytes");
    }
}
