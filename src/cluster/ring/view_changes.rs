//! Wakes tasks when a version of the ring was adopted, or when something else may have become possible. It is like tokio's
//! `watch`, but wakes tasks in the order in which they began to wait, so that a simulation repeats exactly.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tokio::sync::Notify;

use crate::model::Epoch;

/// The sender: it knows the version that was adopted last.
pub(super) struct ViewChanges {
    version: AtomicU64,
    told: AtomicU64,
    notify: Notify,
}

impl ViewChanges {
    pub(crate) fn new(version: Epoch) -> Arc<Self> {
        Arc::new(Self {
            version: version.into(),
            told: AtomicU64::new(0),
            notify: Notify::new(),
        })
    }

    pub(crate) fn adopted(&self, version: Epoch) {
        self.version.store(version, Ordering::Release);
        self.tell();
    }

    pub(crate) fn tell(&self) {
        self.told.fetch_add(1, Ordering::AcqRel);
        self.notify.notify_waiters();
    }

    pub(crate) fn listen(self: &Arc<Self>) -> ViewListener {
        ViewListener {
            heard: self.told.load(Ordering::Acquire),
            changes: self.clone(),
        }
    }
}

/// A receiver of changes.
pub(crate) struct ViewListener {
    changes: Arc<ViewChanges>,
    heard: u64,
}

impl ViewListener {
    /// Returns the version that was adopted last. From now on, `changed` waits for later changes.
    pub(crate) fn version(&mut self) -> Epoch {
        self.mark_heard();
        self.changes.version.load(Ordering::Acquire)
    }

    pub(crate) fn mark_heard(&mut self) {
        self.heard = self.changes.told.load(Ordering::Acquire);
    }

    pub(crate) async fn changed(&mut self) {
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
