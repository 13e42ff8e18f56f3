//! Repeats operations of the store for an owner until their outcome is known.

use std::{future::Future, time::Duration};

use metrics::counter;
use tokio::time::{Instant, sleep, timeout_at};

use crate::{
    chat::{lease::Ownership, open::Loading},
    store,
};

/// The first wait before an operation of the store with an unknown outcome is repeated. Each wait doubles it.
const REWRITE_AFTER: Duration = Duration::from_millis(20);
/// The longest of these waits.
const REWRITE_AFTER_MAX: Duration = Duration::from_secs(1);

/// Repeats a store operation until its outcome is known or the ownership has ended. Repeating is harmless, because the
/// operation has the same keys and content each time; skipping a seq would not be. A success after the ownership has
/// ended is an error, because another gateway may own the conversation by then.
pub(super) async fn retry_while_owner<T, F>(
    ownership: &Ownership,
    operation: impl Fn() -> F,
) -> store::Result<T>
where
    F: Future<Output = store::Result<T>>,
{
    repeat(ownership, None, None, operation).await
}

impl Loading {
    /// As [`retry_while_owner`]. Between two attempts, other conversations are loaded.
    pub(super) async fn retry_while_owner<T, F>(
        &mut self,
        ownership: &Ownership,
        operation: impl Fn() -> F,
    ) -> store::Result<T>
    where
        F: Future<Output = store::Result<T>>,
    {
        repeat(ownership, Some(self), None, operation).await
    }

    /// As [`Self::retry_while_owner`], but it gives up when the request that opened the conversation has ended. For
    /// reads only: the owner that begins a write must finish it under the same lease.
    pub(super) async fn read<T, F>(
        &mut self,
        ownership: &Ownership,
        operation: impl Fn() -> F,
    ) -> store::Result<T>
    where
        F: Future<Output = store::Result<T>>,
    {
        let until = self.until();
        repeat(ownership, Some(self), Some(until), operation).await
    }
}

/// Repeats a store operation until its outcome is known, the ownership has ended, or `until`.
async fn repeat<T, F>(
    ownership: &Ownership,
    mut loading: Option<&mut Loading>,
    until: Option<Instant>,
    operation: impl Fn() -> F,
) -> store::Result<T>
where
    F: Future<Output = store::Result<T>>,
{
    let mut wait = REWRITE_AFTER;
    loop {
        let result = operation().await;
        if !ownership.holds(Instant::now()) {
            return Err(ended());
        }
        let Err(store::Error::Unavailable { .. }) = result else {
            return result;
        };
        counter!("chat_store_retries_total").increment(1);
        let paused = pause(wait, loading.as_deref_mut());
        match until {
            None => paused.await,
            Some(until) => {
                if timeout_at(until, paused).await.is_err() {
                    return result;
                }
            }
        }
        if !ownership.holds(Instant::now()) {
            return Err(ended());
        }
        wait = (wait * 2).min(REWRITE_AFTER_MAX);
    }
}

/// Waits before the next attempt. Other conversations are loaded meanwhile.
async fn pause(wait: Duration, loading: Option<&mut Loading>) {
    let Some(loading) = loading else {
        return sleep(wait).await;
    };
    loading.pause();
    sleep(wait).await;
    loading.resume().await;
}

fn ended() -> store::Error {
    store::Error::Unavailable {
        operation: "own",
        reason: "the lease has ended".into(),
    }
}
