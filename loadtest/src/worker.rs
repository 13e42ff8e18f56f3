//! Threads that work until they are told to stop, and what threads share.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::bail;

/// A thread, and what it returns in the end.
pub(crate) struct Worker<T> {
    telling: Telling,
    thread: JoinHandle<anyhow::Result<T>>,
}

/// Tells a thread to stop, at the latest when it is dropped: after an error nobody waits for the thread.
struct Telling(Arc<AtomicBool>);

impl Telling {
    fn tell(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        self.tell();
    }
}

/// Tells a thread when it is to stop.
pub(crate) struct Over(Arc<AtomicBool>);

impl Over {
    pub(crate) fn is_over(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl<T: Send + 'static> Worker<T> {
    pub(crate) fn start(work: impl FnOnce(&Over) -> anyhow::Result<T> + Send + 'static) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let told = Over(over.clone());
        Self {
            telling: Telling(over),
            thread: thread::spawn(move || work(&told)),
        }
    }

    /// Tells the thread to stop.
    pub(crate) fn tell(&self) {
        self.telling.tell();
    }

    /// Stops the thread, and waits for it.
    pub(crate) fn stop(self) -> anyhow::Result<T> {
        self.tell();
        let worked = self.thread.join();
        worked.unwrap_or_else(|_| bail!("a thread of the load tester panicked"))
    }
}

/// Locks a value, also after a thread panicked that had it locked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
