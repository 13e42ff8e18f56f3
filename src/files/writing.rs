//! The right to write to an upload, which one task of this gateway has at a time.

use std::{
    any::Any,
    collections::HashSet,
    sync::{Arc, Mutex, OnceLock},
};

use crate::{model::AttachmentId, tasks::lock};

/// The uploads to which something writes now.
#[derive(Clone, Debug, Default)]
pub(super) struct Writers(Arc<Mutex<HashSet<AttachmentId>>>);

impl Writers {
    /// Returns the right to write to an upload, unless someone else has it.
    pub(super) fn take(&self, id: AttachmentId) -> Option<Writing> {
        lock(&self.0).insert(id).then(|| {
            Writing(Arc::new(Right {
                id,
                all: self.clone(),
                place: OnceLock::new(),
            }))
        })
    }
}

/// The right to write to an upload. Nobody else on this gateway has it for the same upload until all clones are gone.
#[derive(Clone, Debug)]
pub struct Writing(Arc<Right>);

#[derive(Debug)]
struct Right {
    id: AttachmentId,
    all: Writers,
    place: OnceLock<Box<dyn Any + Send + Sync>>,
}

impl Writing {
    /// Keeps something until the right ends: the place of the upload among all.
    pub fn keep(&self, place: impl Any + Send + Sync) {
        let _ = self.0.place.set(Box::new(place));
    }

    /// The upload.
    pub(super) fn id(&self) -> AttachmentId {
        self.0.id
    }
}

impl Drop for Right {
    fn drop(&mut self) {
        lock(&self.all.0).remove(&self.id);
    }
}
