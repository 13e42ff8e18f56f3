//! Memory and descriptors of the gateways, and the processes in which they decode pictures.

use std::{fs, thread::sleep};

use super::{DECODERS_LOOK, LOOK};
use crate::{
    server::{self, Server},
    worker::Worker,
};

/// Maxima of the gateways together.
#[derive(Default)]
pub(super) struct Most {
    pub(super) memory_kib: f64,
    pub(super) descriptors: usize,
    /// Processes that decode at the same time, and their memory.
    pub(super) decoders: usize,
    pub(super) decoders_kib: f64,
}

/// Samples memory and descriptors of the gateways. Its result is an error if nothing could be seen of a gateway.
pub(super) fn watch(servers: &[Server]) -> Worker<Most> {
    let ids: Vec<_> = servers.iter().map(Server::id).collect();
    Worker::start(move |over| {
        let each = (LOOK.as_millis() / DECODERS_LOOK.as_millis()) as usize;
        let mut most = Most::default();
        let mut looks = (0..each).cycle();
        while !over.is_over() {
            most.look_at_decoders(&ids);
            if looks.next() == Some(0) {
                most.look_at_gateways(&ids)?;
            }
            sleep(DECODERS_LOOK);
        }
        Ok(most)
    })
}

impl Most {
    fn look_at_gateways(&mut self, ids: &[u32]) -> anyhow::Result<()> {
        let kib = ids.iter().map(|&id| server::resident_kib(id));
        self.memory_kib = self.memory_kib.max(kib.sum::<anyhow::Result<f64>>()?);
        let open = ids.iter().map(|&id| server::descriptors(id));
        self.descriptors = self.descriptors.max(open.sum::<anyhow::Result<usize>>()?);
        Ok(())
    }

    fn look_at_decoders(&mut self, ids: &[u32]) {
        let found: Vec<_> = ids.iter().flat_map(|&id| decoders(id)).collect();
        self.decoders = self.decoders.max(found.len());
        let kib = found
            .iter()
            .filter_map(|&id| server::peak_resident_kib(id).ok());
        self.decoders_kib = self.decoders_kib.max(kib.sum());
    }
}

/// The processes in which a gateway decodes pictures.
pub(super) fn decoders(gateway: u32) -> Vec<u32> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{gateway}/task")) else {
        return Vec::new();
    };
    let children = tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .collect::<String>();
    let ids = children.split_whitespace().filter_map(|id| id.parse().ok());
    ids.filter(|id| is_decoder(*id)).collect()
}

/// Whether a process decodes, and is not about to become one that does: until then it is the gateway once more.
fn is_decoder(process: u32) -> bool {
    let line = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    line.ends_with(b"\0decode-picture\0")
}
