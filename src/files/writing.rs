//! The right to write to an upload, which one task of this gateway has at a time.

use std::{
    any::Any,
    collections::HashSet,
    sync::{Arc, Mutex},
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
                place: Mutex::default(),
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
    place: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Writing {
    /// Keeps something until the right ends or [`Self::release`]: the place of the upload among all.
    pub fn keep(&self, place: impl Any + Send) {
        *lock(&self.0.place) = Some(Box::new(place));
    }

    /// Drops what is kept: nothing more is written to the upload.
    pub fn release(&self) {
        let place = lock(&self.0.place).take();
        drop(place);
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
