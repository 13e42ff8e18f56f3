//! Memory and descriptors of the gateways.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle, sleep},
};

use super::LOOK;
use crate::server::{self, Server};

/// Maxima of the gateways together.
#[derive(Default)]
pub(super) struct Most {
    pub(super) memory_kib: f64,
    pub(super) descriptors: usize,
}

/// A thread that samples memory and descriptors of the gateways.
pub(super) struct Held {
    running: Arc<AtomicBool>,
    thread: JoinHandle<Most>,
}

impl Held {
    pub(super) fn watch(servers: &[Server]) -> Self {
        let running = Arc::new(AtomicBool::new(true));
        let (goes_on, ids) = (
            running.clone(),
            servers.iter().map(Server::id).collect::<Vec<_>>(),
        );
        let thread = thread::spawn(move || {
            let mut most = Most::default();
            while goes_on.load(Ordering::Relaxed) {
                let kib = ids
                    .iter()
                    .filter_map(|&id| server::resident_kib(id).ok())
                    .sum();
                most.memory_kib = most.memory_kib.max(kib);
                let open = ids
                    .iter()
                    .filter_map(|&id| server::descriptors(id).ok())
                    .sum();
                most.descriptors = most.descriptors.max(open);
                sleep(LOOK);
            }
            most
        });
        Self { running, thread }
    }

    pub(super) fn stop(self) -> Most {
        self.running.store(false, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}
