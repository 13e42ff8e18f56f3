//! The publications of the last moments, which the stored inbox rows may not have yet: noted before they are delivered,
//! laid over the rows that are read, dropped when they are old enough to be stored (rule [overlay] of docs/cluster.md).

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use dashmap::DashMap;
use foldhash::quality::RandomState;
use metrics::counter;
use tokio::time::{Instant, sleep};

use crate::{
    chat::{InboxWriter, Recipients},
    model::{
        ConversationId, Last, Seq, UserId,
        limits::{NAME_BYTES_MAX, PREVIEW_CHARS, USER_ID_BYTES_MAX},
        weight::ALLOCATION_BYTES,
    },
    store::{InboxRow, InboxWrite},
};

/// For how long a publication is laid over the stored rows, at least; twice that at most.
const OVERLAY: Duration = Duration::from_secs(30);
/// As [`OVERLAY`], where they weigh too much: the inbox writers of other gateways, which write every 30 ms and may have
/// failed once or twice, have written by then.
const HEAVY: Duration = Duration::from_secs(5);
/// As [`HEAVY`], where this gateway is alone: its own inbox writer says when it has written.
const HEAVY_ALONE: Duration = Duration::from_millis(500);
/// Between two looks at what they weigh.
const WEIGHED_EVERY: Duration = Duration::from_millis(100);

/// What one of these weighs, with its places in the maps and its user's name, counted once for each.
const LAID_BYTES: usize = 2 * size_of::<(ConversationId, Laid)>()
    + 2 * size_of::<(UserId, BTreeMap<ConversationId, Laid>)>()
    + 3 * ALLOCATION_BYTES
    + USER_ID_BYTES_MAX;
/// A character of a preview has at most so many bytes.
const PREVIEW_BYTES_MAX: usize = 4 * PREVIEW_CHARS;

/// Two generations: the current one and the one before it.
pub(super) struct Overlays {
    generations: [Generation; 2],
    current: AtomicUsize,
    /// What both may weigh; with more they are dropped sooner.
    bytes_max: usize,
}

#[derive(Default)]
struct Generation {
    users: DashMap<UserId, BTreeMap<ConversationId, Laid>, RandomState>,
    bytes: AtomicUsize,
}

/// What the stored row of one user and conversation may not say yet.
#[derive(Default)]
struct Laid {
    newest: Option<(Arc<Recipients>, Arc<Last>, Seq)>,
    read_seq: Option<Seq>,
    place: Option<Box<InboxRow>>,
}

impl Overlays {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            generations: Default::default(),
            current: AtomicUsize::new(0),
            bytes_max,
        }
    }

    fn current(&self) -> &Generation {
        &self.generations[self.current.load(Ordering::Acquire)]
    }

    pub(super) fn published(
        &self,
        conversation: ConversationId,
        members: &Arc<Recipients>,
        last: &Arc<Last>,
    ) {
        let generation = self.current();
        let (mut new, mut other_list) = (0, false);
        for (user, joined_seq) in &members.users {
            let mut laid = generation.users.entry(user.clone()).or_default();
            let laid = laid.entry(conversation).or_default();
            new += usize::from(laid.newest.is_none());
            // An entry that was given again may come after a newer one.
            let newer = |(_, known, _): &(_, Arc<Last>, _)| known.seq <= last.seq;
            if laid.newest.as_ref().is_none_or(newer) {
                // Those who are in it no more keep the list they had.
                let known = laid.newest.as_ref();
                other_list |= known.is_some_and(|(known, ..)| !Arc::ptr_eq(known, members));
                laid.newest = Some((members.clone(), last.clone(), *joined_seq));
            }
            if *user == last.sender {
                laid.read_seq = laid.read_seq.max(Some(last.seq));
            }
        }
        if new > 0 || other_list {
            // The users of an entry share the list of members and the preview, which may yet become longer.
            let shared = members.weight() + last.weight() + PREVIEW_BYTES_MAX;
            let bytes = shared + new * LAID_BYTES;
            generation.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub(super) fn placed(&self, write: &InboxWrite) {
        let generation = self.current();
        let mut laid = generation.users.entry(write.user.clone()).or_default();
        let laid = laid.entry(write.conversation).or_default();
        let row = laid.place.get_or_insert_with(|| {
            let bytes = LAID_BYTES + size_of::<InboxRow>() + NAME_BYTES_MAX;
            generation.bytes.fetch_add(bytes, Ordering::Relaxed);
            Box::new(InboxRow::empty(write.conversation))
        });
        row.merge(write.face.clone(), write.read_seq, write.left_seq);
    }

    /// Lays what is noted of a user over their stored rows.
    pub(super) fn lay_over(&self, user: &UserId, rows: &mut Vec<InboxRow>) {
        let numbered = rows.iter().enumerate();
        let mut places: HashMap<_, _> = numbered.map(|(n, row)| (row.conversation, n)).collect();
        let current = self.current.load(Ordering::Acquire);
        for generation in [&self.generations[1 - current], &self.generations[current]] {
            let Some(laid) = generation.users.get(user) else {
                continue;
            };
            for (&conversation, laid) in laid.iter() {
                let place = *places.entry(conversation).or_insert_with(|| {
                    rows.push(InboxRow::empty(conversation));
                    rows.len() - 1
                });
                laid.lay_over(&mut rows[place], user);
            }
        }
    }

    /// Drops the older generation every [`OVERLAY`], and sooner if both weigh too much.
    pub(super) async fn keep(&self, inbox: &InboxWriter, alone: bool) {
        let heavy = if alone { HEAVY_ALONE } else { HEAVY };
        loop {
            let turned = Instant::now();
            sleep(heavy).await;
            while turned.elapsed() < OVERLAY && !self.is_heavy() {
                sleep(WEIGHED_EVERY).await;
            }
            if turned.elapsed() < OVERLAY {
                // What is dropped was noted before the last turn: by now its rows are with the writer, or written.
                inbox.flush().await;
                counter!("chat_overlays_turned_early_total").increment(1);
            }
            if inbox.is_current() {
                self.turn();
            }
        }
    }

    fn is_heavy(&self) -> bool {
        let bytes = self.generations.iter();
        let bytes: usize = bytes.map(|g| g.bytes.load(Ordering::Relaxed)).sum();
        bytes > self.bytes_max
    }

    fn turn(&self) {
        let before = 1 - self.current.load(Ordering::Acquire);
        let generation = &self.generations[before];
        generation.users.clear();
        generation.users.shrink_to_fit();
        generation.bytes.store(0, Ordering::Relaxed);
        self.current.store(before, Ordering::Release);
    }
}

impl Laid {
    fn lay_over(&self, row: &mut InboxRow, user: &UserId) {
        if let Some(place) = &self.place {
            row.merge(place.face.clone(), Some(place.read_seq), place.left_seq);
        }
        let face = self
            .newest
            .as_ref()
            .map(|(members, last, joined)| members.face(user, *joined, last));
        row.merge(face, self.read_seq, None);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        clock,
        memory::Memory,
        model::{EntryKind, Kind},
        store::simulated::{Faults, Simulated},
        tasks::Tasks,
    };

    fn user() -> UserId {
        UserId::new("alice").unwrap()
    }

    fn publish(overlays: &Overlays, number: u128) {
        let members = Arc::new(Recipients {
            kind: Kind::Group,
            name: None,
            users: vec![(user(), 1)],
        });
        let last = Last {
            seq: 7,
            message_id: clock::message_id(1),
            at: 1,
            sender: user(),
            kind: EntryKind::Text,
            preview: "hi".into(),
        };
        let id = ConversationId(uuid::Uuid::from_u128(number));
        overlays.published(id, &members, &Arc::new(last));
    }

    fn noted(overlays: &Overlays) -> usize {
        let mut rows = Vec::new();
        overlays.lay_over(&user(), &mut rows);
        rows.len()
    }

    #[tokio::test(start_paused = true)]
    async fn what_weighs_too_much_is_dropped_sooner() {
        let store = Simulated::new(1, Faults::NONE);
        let inbox = Arc::new(InboxWriter::new(Arc::new(store), Memory::of_mib(64)));
        for heavy in [false, true] {
            let bytes_max = if heavy { 10_000 } else { 10_000_000 };
            let overlays = Arc::new(Overlays::new(bytes_max));
            (1..=100).for_each(|number| publish(&overlays, number));
            assert_eq!(overlays.is_heavy(), heavy);
            let (keeping, writer) = (overlays.clone(), inbox.clone());
            let keep = Tasks::default().spawn(async move { keeping.keep(&writer, true).await });
            sleep(Duration::from_secs(20)).await;
            assert_eq!(noted(&overlays), if heavy { 0 } else { 100 });
            sleep(Duration::from_secs(60)).await;
            assert_eq!(noted(&overlays), 0);
            keep.abort();
        }
    }
}
