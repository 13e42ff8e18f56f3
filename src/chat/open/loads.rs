//! Limits how many conversations are loaded at once, because the entries that a load reads are counted only afterwards.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use super::Held;
use crate::model::limits::{LOADS_AGAIN_MAX, LOADS_MAX};

pub(super) struct Loads {
    first: Arc<Semaphore>,
    /// The permits of loads whose last read failed. They are separate, so that these loads delay no others.
    again: Arc<Semaphore>,
}

/// The permit to load one conversation. It counts the bytes that were read, and is given back when it is dropped.
pub(in crate::chat) struct Loading {
    held: Arc<Held>,
    permit: Option<OwnedSemaphorePermit>,
    /// The deadline of the request that opened the conversation.
    until: Instant,
}

impl Loads {
    pub(super) fn new() -> Self {
        Self {
            first: Arc::new(Semaphore::new(LOADS_MAX)),
            again: Arc::new(Semaphore::new(LOADS_AGAIN_MAX)),
        }
    }
}

impl Loading {
    pub(super) async fn begin(held: &Arc<Held>, patience: Duration) -> Self {
        let permit = permit(&held.table.loads.first).await;
        Self {
            held: held.clone(),
            permit,
            until: Instant::now() + patience,
        }
    }

    pub(in crate::chat) fn until(&self) -> Instant {
        self.until
    }

    /// Counts bytes that were read.
    pub(in crate::chat) fn has_read(&self, bytes: usize) {
        let before = self.held.bytes.load(Ordering::Relaxed);
        self.held.weighs(before + bytes);
    }

    /// Gives the turn to others until [`Self::resume`], because the store did not answer.
    pub(in crate::chat) fn pause(&mut self) {
        self.permit = None;
    }

    /// Waits for the next attempt.
    pub(in crate::chat) async fn resume(&mut self) {
        self.permit = permit(&self.held.table.loads.again).await;
    }
}

/// Waits for a permit. It is never `None`, because the semaphores are never closed.
async fn permit(of: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    of.clone().acquire_owned().await.ok()
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::chat::open::Table;

    const PATIENCE: Duration = Duration::from_secs(5);

    #[tokio::test(start_paused = true)]
    async fn one_is_weighed_before_the_next_is_loaded() {
        let table = Table::new(1_000, 100_000);
        let begin = || table.begin(None).unwrap();
        let begun: Vec<_> = (0..2 * LOADS_MAX).map(|_| begin()).collect();
        assert!(begun.iter().all(|(_, room)| room.is_some()));
        let mut loading = Vec::new();
        for (held, _) in &begun[..LOADS_MAX] {
            loading.push(held.loading(PATIENCE).now_or_never().expect("its turn"));
        }
        let mut next = Box::pin(begun[LOADS_MAX].0.loading(PATIENCE));
        assert!((&mut next).now_or_never().is_none(), "as many as may");
        loading[0].has_read(200_000);
        begun[0].0.loaded();
        drop(loading.remove(0));
        assert!((&mut next).now_or_never().is_none(), "all weigh too much");
        assert!(begun[0].0.retired().is_cancelled());
        begun[0].0.end();
        assert!((&mut next).now_or_never().is_some());
        // A conversation that is not loaded yet is not evicted, because it could not close at once.
        assert!(!table.evict_one());
        begun.iter().for_each(|(held, _)| held.end());
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_the_store_fails_hold_up_no_others() {
        let table = Table::new(1_000, usize::MAX);
        let begin = || table.begin(None).unwrap().0;
        let begun: Vec<_> = (0..3 * LOADS_MAX).map(|_| begin()).collect();
        let mut failed = Vec::new();
        for held in &begun {
            let mut loading = held
                .loading(PATIENCE)
                .now_or_never()
                .expect("others have paused");
            loading.pause();
            failed.push(loading);
        }
        let resumed = failed
            .iter_mut()
            .map(|loading| loading.resume().now_or_never());
        assert_eq!(resumed.flatten().count(), LOADS_AGAIN_MAX);
    }
}
