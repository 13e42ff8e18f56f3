//! The right to write to an upload, which one task of this gateway has at a time.

use std::{
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
        lock(&self.0).insert(id).then(|| Writing {
            id,
            all: self.clone(),
        })
    }
}

/// The right to write to an upload. Nobody else on this gateway has it for the same upload.
#[derive(Debug)]
pub struct Writing {
    pub(super) id: AttachmentId,
    all: Writers,
}

impl Drop for Writing {
    fn drop(&mut self) {
        lock(&self.all.0).remove(&self.id);
    }
}
