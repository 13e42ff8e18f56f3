//! Frees the memtables of the database. fjall frees a flushed memtable while it holds a lock that every read and write
//! needs, and freeing the hundreds of thousands of rows of one takes up to a tenth of a second. So this thread holds each
//! memtable until nothing else does, and frees it then.

use std::{
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use fjall::AbstractTree as _;

use super::Keyspaces;

/// How often the thread looks for new memtables and for unused ones. At the highest rate of writes a memtable is used for
/// longer. If one is missed, reads and writes wait while fjall frees it.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The thread that frees memtables. It ends when this is dropped.
pub(super) struct Memtables {
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Memtables {
    pub(super) fn start(keyspaces: Keyspaces) -> std::io::Result<Self> {
        let (end, ended) = mpsc::channel::<()>();
        let run = move || {
            // fjall has a few memtables at most: it makes writers wait for flushes.
            let mut held = Vec::new();
            while ended.recv_timeout(LOOK_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                for keyspace in [&keyspaces.log, &keyspaces.rows] {
                    let active = keyspace.tree.active_memtable();
                    if !held.iter().any(|memtable| Arc::ptr_eq(memtable, &active)) {
                        held.push(active);
                    }
                }
                held.retain(|memtable| Arc::strong_count(memtable) > 1);
            }
        };
        let thread = thread::Builder::new()
            .name("store-memtables".into())
            .spawn(run)?;
        Ok(Self {
            end: Some(end),
            thread: Some(thread),
        })
    }
}

impl Drop for Memtables {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
