//! Cleans up when a load test is told to end (SIGINT, SIGTERM, SIGHUP): it stops all servers and deletes all data.

use std::{
    fs, io,
    process::{self, Child, Command},
    sync::{Arc, Mutex, MutexGuard, Weak},
    thread,
};

use tempfile::TempDir;
use tokio::{
    runtime,
    signal::unix::{SignalKind, signal},
};

use crate::worker::lock;

static LEFT: Mutex<Left> = Mutex::new(Left {
    processes: Vec::new(),
    directories: Vec::new(),
});

/// Processes and directories that may still exist.
struct Left {
    processes: Vec<Weak<Mutex<Child>>>,
    directories: Vec<Weak<TempDir>>,
}

fn left() -> MutexGuard<'static, Left> {
    lock(&LEFT)
}

/// Starts a process that is killed when the load test is told to end.
pub(crate) fn spawn(command: &mut Command) -> io::Result<Arc<Mutex<Child>>> {
    let mut left = left();
    let process = Arc::new(Mutex::new(command.spawn()?));
    left.processes.push(Arc::downgrade(&process));
    Ok(process)
}

/// Creates a temporary directory that is deleted when the load test is told to end.
pub(crate) fn directory() -> io::Result<Arc<TempDir>> {
    let mut left = left();
    let directory = Arc::new(tempfile::tempdir()?);
    left.directories.push(Arc::downgrade(&directory));
    Ok(directory)
}

/// Handles the signals from now on, in a thread.
pub(crate) fn watch() -> anyhow::Result<()> {
    let runtime = runtime::Builder::new_current_thread().enable_io().build()?;
    let entered = runtime.enter();
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut terminated = signal(SignalKind::terminate())?;
    let mut hung_up = signal(SignalKind::hangup())?;
    drop(entered);
    thread::spawn(move || {
        let code = runtime.block_on(async {
            tokio::select! {
                _ = interrupted.recv() => 130,
                _ = terminated.recv() => 143,
                _ = hung_up.recv() => 129,
            }
        });
        // The lock is held until the exit, so that nothing new is started meanwhile.
        let left = left();
        for process in left.processes.iter().filter_map(Weak::upgrade) {
            let mut process = lock(&process);
            let _ = process.kill();
            let _ = process.wait();
        }
        for directory in left.directories.iter().filter_map(Weak::upgrade) {
            let _ = fs::remove_dir_all(directory.path());
        }
        process::exit(code);
    });
    Ok(())
}
