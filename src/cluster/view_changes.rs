//! That a version was adopted, or that something else may have become possible. As tokio's `watch`, which wakes those
//! who wait in a random order: here they are woken in the order in which they came, so that a simulation repeats itself.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tokio::sync::Notify;

use crate::model::Epoch;

pub(super) struct ViewChanges {
    version: AtomicU64,
    told: AtomicU64,
    notify: Notify,
}

impl ViewChanges {
    pub(super) fn new(version: Epoch) -> Arc<Self> {
        Arc::new(Self {
            version: version.into(),
            told: AtomicU64::new(0),
            notify: Notify::new(),
        })
    }

    pub(super) fn adopted(&self, version: Epoch) {
        self.version.store(version, Ordering::Release);
        self.tell();
    }

    pub(super) fn tell(&self) {
        self.told.fetch_add(1, Ordering::AcqRel);
        self.notify.notify_waiters();
    }

    pub(super) fn listen(self: &Arc<Self>) -> ViewListener {
        ViewListener {
            heard: self.told.load(Ordering::Acquire),
            changes: self.clone(),
        }
    }
}

pub(super) struct ViewListener {
    changes: Arc<ViewChanges>,
    heard: u64,
}

impl ViewListener {
    /// The version adopted last; waits for what comes after this.
    pub(super) fn version(&mut self) -> Epoch {
        self.mark_heard();
        self.changes.version.load(Ordering::Acquire)
    }

    pub(super) fn mark_heard(&mut self) {
        self.heard = self.changes.told.load(Ordering::Acquire);
    }

    pub(super) async fn changed(&mut self) {
        loop {
            let notified = self.changes.notify.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            let told = self.changes.told.load(Ordering::Acquire);
            if told != self.heard {
                self.heard = told;
                return;
            }
            notified.await;
        }
    }
}
