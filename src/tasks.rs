//! Where tasks live. Nothing else spawns, so that a drain can wait for everything.

use std::{future::Future, time::Duration};

use tokio::{task::JoinHandle, time::timeout};
use tokio_util::{
    sync::{CancellationToken, WaitForCancellationFuture},
    task::TaskTracker,
};

/// All tasks of a gateway, and the one signal to stop. Cheap to clone.
#[derive(Clone, Default, Debug)]
pub struct Tasks {
    running: TaskTracker,
    draining: CancellationToken,
}

impl Tasks {
    #[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        tokio::spawn(self.running.track_future(task))
    }

    /// Counts a task that a library spawns.
    pub fn track<F: Future>(&self, task: F) -> impl Future<Output = F::Output> + use<F> {
        self.running.track_future(task)
    }

    /// Fires once, when the gateway begins to drain.
    pub fn draining(&self) -> WaitForCancellationFuture<'_> {
        self.draining.cancelled()
    }

    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Tells everyone to finish. Returns at once.
    pub fn drain(&self) {
        self.draining.cancel();
    }

    /// Waits until all have finished; false if some have not in `limit`.
    pub async fn finished(&self, limit: Duration) -> bool {
        self.running.close();
        timeout(limit, self.running.wait()).await.is_ok()
    }
}
