//! The tasks of a gateway. Nothing else spawns tasks, so a drain can wait for all of them.

use std::{
    any::Any,
    cell::RefCell,
    fmt::Display,
    future::Future,
    panic::{AssertUnwindSafe, Location, resume_unwind},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures_util::FutureExt as _;
use metrics::counter;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tokio_util::{
    sync::{CancellationToken, WaitForCancellationFuture, WaitForCancellationFutureOwned},
    task::TaskTracker,
};

/// Waits until a time. Without one it waits for ever.
pub(crate) async fn wait_until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Locks a mutex even if a task panicked while holding it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same for reading under a lock that many may read under.
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// The same for writing under it.
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

fn boxed<T>(future: impl Future<Output = T> + Send + 'static) -> BoxFuture<T> {
    Box::pin(future)
}

/// The pause before a task that must not end is restarted after a panic.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Runs `work`. A panic is counted and logged with `what` and `of`, and the result is `None`.
///
/// This is not an `async fn`, because its future would contain `work` twice, as its argument and as the future it
/// awaits.
pub(crate) fn contain<F: Future>(
    what: &'static str,
    of: impl Display,
    work: F,
) -> impl Future<Output = Option<F::Output>> {
    let ended = AssertUnwindSafe(work).catch_unwind();
    ended.map(move |ended| ended.inspect_err(|panic| panicked(what, of, &**panic)).ok())
}

fn panicked(what: &'static str, of: impl Display, panic: &(dyn Any + Send)) {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    counter!("chat_panics_total").increment(1);
    tracing::error!(%of, panic = text.unwrap_or_default(), "{what} panicked");
}

/// The tasks of a gateway, with one signal to stop. Cheap to clone.
#[derive(Clone, Default, Debug)]
pub struct Tasks {
    running: TaskTracker,
    draining: CancellationToken,
    /// The time at which the drain began.
    drained_at: Arc<OnceLock<Instant>>,
    /// Cancelled when nobody waits for these tasks any more.
    abandoned: CancellationToken,
    process: Option<Process>,
}

/// A simulated process. Its tasks stop while it is paused, as with SIGSTOP, and permanently once it is killed.
#[doc(hidden)]
#[derive(Clone, Default, Debug)]
pub struct Process(Arc<Mutex<State>>);

thread_local! {
    /// The simulated process whose task this thread runs.
    static CURRENT: RefCell<Option<Process>> = const { RefCell::new(None) };
}

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

    /// Kills the process of the task that runs on this thread.
    pub(crate) fn kill_current() {
        if let Some(process) = CURRENT.with_borrow(Clone::clone) {
            process.kill();
        }
    }

    #[must_use]
    pub fn is_killed(&self) -> bool {
        lock(&self.0).killed
    }

    /// Returns a future that runs as part of the process.
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
        let process = self.process.clone();
        let killed = {
            let mut state = lock(&process.0);
            if !state.killed && !state.paused {
                None
            } else {
                state.waiting.push(context.waker().clone());
                Some(state.killed)
            }
        };
        match (killed, &mut self.future) {
            (None, Some(future)) => {
                let before = CURRENT.replace(Some(process));
                let polled = future.as_mut().poll(context);
                CURRENT.set(before);
                polled
            }
            (Some(true), future) => {
                *future = None; // This closes its connections.
                Poll::Pending
            }
            _ => Poll::Pending,
        }
    }
}

impl Tasks {
    /// Returns the tasks of a simulated process.
    #[doc(hidden)]
    #[must_use]
    pub fn of(process: Process) -> Self {
        Self {
            process: Some(process),
            ..Self::default()
        }
    }

    /// Spawns a task. A panic is counted, logged, and returned to the caller that joins the task.
    #[track_caller]
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.start(Box::pin(task), Location::caller())
    }

    /// Spawns a boxed task. All that is around it is generated once for each output instead of once for each task.
    #[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
    fn start<T: Send + 'static>(
        &self,
        task: BoxFuture<T>,
        spawned: &'static Location<'static>,
    ) -> JoinHandle<T> {
        let task = AssertUnwindSafe(task).catch_unwind().map(move |ended| {
            ended.unwrap_or_else(|panic| {
                panicked("a task", spawned, &*panic);
                resume_unwind(panic)
            })
        });
        let task = self.running.track_future(task);
        match &self.process {
            None => tokio::spawn(task),
            Some(process) => tokio::spawn(process.run(task)),
        }
    }

    /// Runs `work` until the gateway begins to drain.
    pub async fn until_drained(&self, work: impl Future<Output = ()>) {
        tokio::select! {
            biased;
            () = work => {}
            () = self.draining() => {}
        }
    }

    /// Spawns a task like `spawn_until_drained`, for work that never ends. After a panic the work is restarted.
    #[track_caller]
    pub fn keep<F>(&self, work: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let spawned = Location::caller();
        self.spawn_until_drained(async move {
            while contain("a task", spawned, boxed(work())).await.is_none() {
                sleep(AGAIN_AFTER).await;
            }
        });
    }

    /// Spawns a task that runs `work` until the gateway begins to drain.
    #[track_caller]
    pub fn spawn_until_drained(&self, work: impl Future<Output = ()> + Send + 'static) {
        let tasks = self.clone();
        let work = boxed(work);
        self.spawn(async move { tasks.until_drained(work).await });
    }

    /// Counts a task that a library spawns.
    pub fn track<F: Future>(&self, task: F) -> impl Future<Output = F::Output> + use<F> {
        self.running.track_future(task)
    }

    /// Completes when the gateway begins to drain.
    pub fn draining(&self) -> WaitForCancellationFuture<'_> {
        self.draining.cancelled()
    }

    /// Completes like [`draining`](Self::draining), without borrowing.
    pub fn draining_owned(&self) -> WaitForCancellationFutureOwned {
        self.draining.clone().cancelled_owned()
    }

    /// Completes when the gateway has drained for this time, or when nobody waits for these tasks any more.
    pub async fn drained_for(&self, time: Duration) {
        self.draining().await;
        drop(timeout_at(self.drain_began() + time, self.abandoned()).await);
    }

    /// Returns the time at which the drain began, or now if it has not.
    #[must_use]
    pub fn drain_began(&self) -> Instant {
        self.drained_at.get().copied().unwrap_or_else(Instant::now)
    }

    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Signals all tasks to finish, without waiting.
    pub fn drain(&self) {
        self.drained_at.get_or_init(Instant::now);
        self.draining.cancel();
    }

    /// Signals the tasks that are left after a drain to end at once: nobody waits for them any more.
    pub fn abandon(&self) {
        self.abandoned.cancel();
    }

    /// Completes when nobody waits for these tasks any more.
    pub fn abandoned(&self) -> WaitForCancellationFuture<'_> {
        self.abandoned.cancelled()
    }

    /// Waits until all tasks have finished. Returns false if some have not within `limit`.
    pub async fn finished(&self, limit: Duration) -> bool {
        self.running.close();
        timeout(limit, self.running.wait()).await.is_ok()
    }
}
