//! A user's home: where their inbox is read. Rows are written some time after an entry is published, so the
//! publications of the last moments are laid over the stored rows (rule [overlay] of docs/storage.md).

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use dashmap::DashMap;

use crate::{
    chat::Members,
    model::{ConversationId, Entry, Last, Seq, UserId},
    store::{self, InboxRow, InboxWrite, Store},
};

/// For how long a publication is laid over the stored rows, at least; twice that at most.
pub(crate) const OVERLAY: Duration = Duration::from_secs(30);

type Overlay = DashMap<UserId, HashMap<ConversationId, Laid>>;

pub struct Home {
    store: Arc<dyn Store>,
    /// The current one and the one before it.
    overlays: [Overlay; 2],
    current: AtomicUsize,
}

/// What the stored row of one user and conversation may not say yet.
#[derive(Default)]
struct Laid {
    newest: Option<(Arc<Members>, Arc<Last>, Seq)>,
    read_seq: Option<Seq>,
    place: Option<InboxRow>,
}

impl Home {
    #[must_use]
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            overlays: [Overlay::new(), Overlay::new()],
            current: AtomicUsize::new(0),
        }
    }

    /// Notes an entry, before it is delivered: a user who registers now sees it in the inbox or gets it.
    pub(super) fn published(
        &self,
        conversation: ConversationId,
        members: &Arc<Members>,
        entry: &Entry,
    ) {
        let last = Arc::new(entry.last());
        for (user, joined_seq) in &members.users {
            let mut laid = self.overlay().entry(user.clone()).or_default();
            let laid = laid.entry(conversation).or_default();
            laid.newest = Some((members.clone(), last.clone(), *joined_seq));
            if *user == entry.sender {
                laid.read_seq = Some(entry.seq);
            }
        }
    }

    /// Notes a user's joining or leaving.
    pub(super) fn placed(&self, write: &InboxWrite) {
        let mut laid = self.overlay().entry(write.user.clone()).or_default();
        let laid = laid.entry(write.conversation).or_default();
        let row = laid
            .place
            .get_or_insert_with(|| InboxRow::empty(write.conversation));
        row.merge(write.face.clone(), write.read_seq, write.left_seq);
    }

    /// All of a user's conversations as they are now.
    pub(super) async fn inbox(&self, user: &UserId) -> store::Result<Vec<InboxRow>> {
        let mut rows = self.store.inbox(user).await?;
        let current = self.current.load(Ordering::Acquire);
        for overlay in [&self.overlays[1 - current], &self.overlays[current]] {
            let Some(laid) = overlay.get(user) else {
                continue;
            };
            for (&conversation, laid) in laid.iter() {
                let row = match rows.iter().position(|r| r.conversation == conversation) {
                    Some(index) => &mut rows[index],
                    None => rows.push_mut(InboxRow::empty(conversation)),
                };
                laid.lay_over(row, user);
            }
        }
        rows.retain(is_in);
        Ok(rows)
    }

    /// Forgets what is old enough to be stored. To be called every [`OVERLAY`].
    pub(crate) fn turn(&self) {
        let before = 1 - self.current.load(Ordering::Acquire);
        self.overlays[before].clear();
        self.overlays[before].shrink_to_fit();
        self.current.store(before, Ordering::Release);
    }

    fn overlay(&self) -> &Overlay {
        &self.overlays[self.current.load(Ordering::Acquire)]
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

fn is_in(row: &InboxRow) -> bool {
    let Some(face) = &row.face else { return false };
    row.left_seq.is_none_or(|left| left < face.joined_seq)
}
