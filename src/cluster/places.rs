//! Which conversations a user is in, as their home remembers it: read from the store when a session first registers, and
//! raised by every publication that the home notes. So whoever comes back costs the store no read. Rule [remember] of
//! docs/cluster.md says why that misses nothing.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use quick_cache::{
    Weighter,
    sync::{Cache, EntryAction},
};
use serde::{Deserialize, Serialize};

use super::lock;
use crate::{
    model::{
        ConversationId, Kind, Seq, UserId, limits::USER_ID_BYTES_MAX, weight::ALLOCATION_BYTES,
    },
    store::{InboxFace, InboxRow},
};

/// A conversation that a user is in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InboxPlace {
    pub conversation: ConversationId,
    pub kind: Kind,
    /// Of a dm or group, its newest entry; a channel's owner says that.
    pub last_seq: Option<Seq>,
}

pub(super) struct Places(Cache<UserId, Kept, ByRows>);

#[derive(Clone)]
struct Kept {
    known: Arc<Known>,
    /// In bytes, as last weighed; the cache counts on it not to change by itself.
    weight: u64,
}

/// What is known of one user's conversations.
#[derive(Debug, Default)]
pub(super) struct Known(Mutex<Rows>);

#[derive(Debug, Default)]
struct Rows {
    /// What the store has is among them; before that, they are only what was published since somebody asked.
    read: bool,
    /// By conversation.
    rows: Vec<Row>,
}

/// What of an inbox row decides. Whatever comes late, or twice, changes nothing.
#[derive(Debug, Clone, Copy)]
struct Row {
    conversation: ConversationId,
    face: Option<Face>,
    left_seq: Option<Seq>,
}

/// Of an [`InboxFace`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Face {
    pub seq: Seq,
    pub kind: Kind,
    pub joined_seq: Seq,
    pub last_seq: Option<Seq>,
}

#[derive(Clone)]
struct ByRows;

impl Weighter<UserId, Kept> for ByRows {
    fn weight(&self, _: &UserId, kept: &Kept) -> u64 {
        kept.weight
    }
}

/// What a user weighs without rows: the cache's place and key, and what is known.
const USER_BYTES: usize = size_of::<(UserId, Kept)>()
    + size_of::<Known>()
    + 4 * ALLOCATION_BYTES
    + USER_ID_BYTES_MAX
    + 64;
/// Users for which the cache makes room at once.
const USERS_EXPECTED_MAX: usize = 100_000;

fn weight(rows: usize) -> u64 {
    (USER_BYTES + rows * size_of::<Row>()) as u64
}

impl Places {
    pub(super) fn new(bytes_max: usize) -> Self {
        let users = (bytes_max / USER_BYTES / 2).min(USERS_EXPECTED_MAX);
        Self(Cache::with_weighter(users, bytes_max as u64, ByRows))
    }

    pub(super) fn of(&self, user: &UserId) -> Option<Vec<InboxPlace>> {
        let kept = self.0.get(user)?;
        let rows = lock(&kept.known.0);
        rows.read.then(|| rows.places())
    }

    /// To be called before the store is read: what is published from now on is noted.
    pub(super) fn begin(&self, user: &UserId) -> Arc<Known> {
        let new = || {
            let known = Arc::default();
            let weight = weight(0);
            Ok::<_, Infallible>(Kept { known, weight })
        };
        let Ok(kept) = self.0.get_or_insert_with(user, new);
        kept.known
    }

    /// What the store has, what was published of late laid over it.
    pub(super) fn learn(
        &self,
        user: &UserId,
        known: &Arc<Known>,
        read: &[InboxRow],
    ) -> Vec<InboxPlace> {
        let mut rows = lock(&known.0);
        for row in read {
            let face = row.face.as_ref().map(Face::of);
            rows.row(row.conversation).raise(face, row.left_seq);
        }
        rows.rows.shrink_to_fit();
        rows.read = true;
        let (places, count) = (rows.places(), rows.rows.len());
        drop(rows);
        self.weigh(user, known, count);
        places
    }

    pub(super) fn note(
        &self,
        user: &UserId,
        conversation: ConversationId,
        face: Option<Face>,
        left_seq: Option<Seq>,
    ) {
        let Some(Kept { known, .. }) = self.0.get(user) else {
            return;
        };
        let mut rows = lock(&known.0);
        let before = rows.rows.len();
        rows.row(conversation).raise(face, left_seq);
        let count = rows.rows.len();
        drop(rows);
        if count > before {
            self.weigh(user, &known, count);
        }
    }

    /// If it was forgotten meanwhile, it stays forgotten: what was published since is not in it. Somebody who is in no
    /// conversation is not worth remembering.
    fn weigh(&self, user: &UserId, known: &Arc<Known>, rows: usize) {
        let weigh = |_: &_, kept: &mut Kept| {
            if !Arc::ptr_eq(&kept.known, known) {
                return EntryAction::Retain(());
            }
            kept.weight = weight(rows);
            if rows == 0 {
                EntryAction::Remove
            } else {
                EntryAction::Retain(())
            }
        };
        drop(self.0.entry(user, Some(Duration::ZERO), weigh));
    }

    pub(super) fn retain(&self, stays: impl Fn(&UserId) -> bool) {
        self.0.retain(|user, _| stays(user));
    }
}

impl Rows {
    fn row(&mut self, conversation: ConversationId) -> &mut Row {
        let found = self
            .rows
            .binary_search_by_key(&conversation, |row| row.conversation);
        let index = found.unwrap_or_else(|index| {
            let row = Row {
                conversation,
                face: None,
                left_seq: None,
            };
            self.rows.insert(index, row);
            index
        });
        &mut self.rows[index]
    }

    fn places(&self) -> Vec<InboxPlace> {
        self.rows.iter().filter_map(Row::place).collect()
    }
}

impl Row {
    /// The same rules as those of [`InboxRow::merge`].
    fn raise(&mut self, face: Option<Face>, left_seq: Option<Seq>) {
        if let Some(face) = face
            && self.face.is_none_or(|mine| mine.seq <= face.seq)
        {
            self.face = Some(face);
        }
        self.left_seq = self.left_seq.max(left_seq);
    }

    fn place(&self) -> Option<InboxPlace> {
        let face = self.face?;
        let is_in = self.left_seq.is_none_or(|left| left < face.joined_seq);
        is_in.then_some(InboxPlace {
            conversation: self.conversation,
            kind: face.kind,
            last_seq: face.last_seq,
        })
    }
}

impl Face {
    pub(super) fn of(face: &InboxFace) -> Self {
        Self {
            seq: face.seq,
            kind: face.kind,
            joined_seq: face.joined_seq,
            last_seq: face.last.as_ref().map(|last| last.seq),
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn user() -> UserId {
        UserId::new("alice").unwrap()
    }

    fn group(number: u128) -> ConversationId {
        ConversationId(Uuid::from_u128(number))
    }

    fn face(joined_seq: Seq, last_seq: Seq) -> Face {
        Face {
            seq: last_seq,
            kind: Kind::Group,
            joined_seq,
            last_seq: Some(last_seq),
        }
    }

    fn row(conversation: ConversationId, joined_seq: Seq) -> InboxRow {
        let face = InboxFace {
            seq: joined_seq,
            kind: Kind::Group,
            name: None,
            joined_seq,
            last: None,
        };
        let mut row = InboxRow::empty(conversation);
        row.merge(Some(face), None, None);
        row
    }

    fn last_seqs(places: &Places) -> Option<Vec<Option<Seq>>> {
        let places = places.of(&user())?;
        Some(places.iter().map(|place| place.last_seq).collect())
    }

    #[test]
    fn what_is_published_while_the_store_is_read_is_known() {
        let places = Places::new(1 << 20);
        let known = places.begin(&user());
        places.note(&user(), group(1), Some(face(1, 7)), None);
        places.note(&user(), group(2), Some(face(1, 1)), None);
        assert_eq!(places.of(&user()), None, "not read yet");
        places.learn(&user(), &known, &[row(group(1), 1)]);
        assert_eq!(last_seqs(&places), Some(vec![Some(7), Some(1)]));
    }

    #[test]
    fn what_comes_late_changes_nothing() {
        let places = Places::new(1 << 20);
        let known = places.begin(&user());
        places.learn(&user(), &known, &[row(group(1), 1)]);
        let note = |face, left| places.note(&user(), group(1), face, left);
        note(Some(face(1, 9)), None);
        note(Some(face(1, 8)), None);
        assert_eq!(last_seqs(&places), Some(vec![Some(9)]));
        note(None, Some(10));
        note(Some(face(1, 10)), None);
        assert_eq!(last_seqs(&places), Some(vec![]), "removed by entry 10");
        note(Some(face(12, 12)), None);
        note(None, Some(10));
        assert_eq!(last_seqs(&places), Some(vec![Some(12)]), "added again");
    }

    #[test]
    fn who_is_forgotten_while_the_store_is_read_stays_forgotten() {
        let places = Places::new(1 << 20);
        let known = places.begin(&user());
        places.retain(|_| false);
        places.note(&user(), group(1), Some(face(1, 7)), None);
        places.learn(&user(), &known, &[row(group(1), 1)]);
        assert_eq!(places.of(&user()), None);
        let known = places.begin(&user());
        places.learn(&user(), &known, &[]);
        assert_eq!(places.of(&user()), None, "nothing to remember");
    }
}
