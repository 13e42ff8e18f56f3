//! Where tasks live. Nothing else spawns, so that a drain can wait for everything.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{task::JoinHandle, time::timeout};
use tokio_util::{
    sync::{CancellationToken, WaitForCancellationFuture},
    task::TaskTracker,
};

/// Locks what tasks share, whether or not one of them panicked meanwhile.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All tasks of a gateway, and the one signal to stop. Cheap to clone.
#[derive(Clone, Default, Debug)]
pub struct Tasks {
    running: TaskTracker,
    draining: CancellationToken,
    process: Option<Process>,
}

/// A process of a simulation: its tasks stop while it is paused, as with SIGSTOP, and for ever once it is killed.
#[doc(hidden)]
#[derive(Clone, Default, Debug)]
pub struct Process(Arc<Mutex<State>>);

#[derive(Default, Debug)]
struct State {
    paused: bool,
    killed: bool,
    waiting: Vec<Waker>,
}

impl Process {
    pub fn pause(&self) {
        lock(&self.0).paused = true;
    }

    pub fn resume(&self) {
        let mut state = lock(&self.0);
        state.paused = false;
        state.waiting.drain(..).for_each(Waker::wake);
    }

    pub fn kill(&self) {
        let mut state = lock(&self.0);
        state.killed = true;
        state.waiting.drain(..).for_each(Waker::wake);
    }

    /// A future that runs as part of the process.
    pub fn run<F: Future>(&self, future: F) -> impl Future<Output = F::Output> + use<F> {
        Running {
            process: self.clone(),
            future: Some(Box::pin(future)),
        }
    }
}

struct Running<F> {
    process: Process,
    future: Option<Pin<Box<F>>>,
}

impl<F: Future> Future for Running<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let killed = {
            let mut state = lock(&self.process.0);
            if !state.killed && !state.paused {
                None
            } else {
                state.waiting.push(context.waker().clone());
                Some(state.killed)
            }
        };
        match (killed, &mut self.future) {
            (None, Some(future)) => future.as_mut().poll(context),
            (Some(true), future) => {
                *future = None; // Its connections break.
                Poll::Pending
            }
            _ => Poll::Pending,
        }
    }
}

impl Tasks {
    /// Tasks of a simulated process.
    #[doc(hidden)]
    #[must_use]
    pub fn of(process: Process) -> Self {
        Self {
            process: Some(process),
            ..Self::default()
        }
    }

    #[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let task = self.running.track_future(task);
        match &self.process {
            None => tokio::spawn(task),
            Some(process) => tokio::spawn(process.run(task)),
        }
    }

    /// Does this until the gateway begins to drain.
    pub async fn until_drained(&self, work: impl Future<Output = ()>) {
        tokio::select! {
            biased;
            () = work => {}
            () = self.draining() => {}
        }
    }

    /// As `until_drained`, as a task of its own.
    pub fn spawn_until_drained(&self, work: impl Future<Output = ()> + Send + 'static) {
        let tasks = self.clone();
        self.spawn(async move { tasks.until_drained(work).await });
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
