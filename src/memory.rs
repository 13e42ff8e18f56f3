//! How much memory the parts of a gateway may hold: one number for all of them, and each part's share of it.

use std::{fs, path::Path};

/// Part of the machine's memory that is taken where nobody says: the rest is for sockets, the store and the system.
const OF_MACHINE: u64 = 4;
/// Of a small machine, and where nobody can tell: less would evict conversations that people are writing in.
const DEFAULT_MIB_MIN: u64 = 256;
/// Of a large one: more conversations than this holds are more than one gateway serves.
const DEFAULT_MIB_MAX: u64 = 16_384;
/// The least that may be set: one conversation of the largest messages, and one page of each, must fit into each share.
pub const MIB_MIN: u64 = 16;
/// The most that may be set: a terabyte is a mistake.
pub const MIB_MAX: u64 = 1 << 20;

/// Eighths of the whole. Open conversations have the most to hold, and most to do again if they are evicted. The inbox
/// rows that wait are there for milliseconds, unless the store does not answer; then they fill their share and no more.
const OWNERS: usize = 4;
const PLACES: usize = 1;
const OVERLAYS: usize = 1;
const INBOX: usize = 1;
const HISTORY: usize = 1;
/// Pages are kept for those who come back at once; what is read again later is in the store's block cache.
const HISTORY_BYTES_MAX: usize = 64 << 20;
const _: () = assert!(OWNERS + PLACES + OVERLAYS + INBOX + HISTORY == 8);

/// What open conversations, homes, inbox rows and pages of history may weigh together, in bytes. Not in it: the store's
/// block cache and sockets' queues, which have settings of their own.
#[derive(Debug, Clone, Copy)]
pub struct Memory(usize);

impl Memory {
    #[must_use]
    pub fn of_mib(mib: u64) -> Self {
        Self(usize::try_from(mib << 20).unwrap_or(usize::MAX))
    }

    #[must_use]
    pub fn mib(self) -> usize {
        self.0 >> 20
    }

    /// Open conversations.
    #[must_use]
    pub fn owners(self) -> usize {
        self.0 / 8 * OWNERS
    }

    /// What homes remember of their users.
    #[must_use]
    pub fn places(self) -> usize {
        self.0 / 8 * PLACES
    }

    /// The publications of the last moments, for inboxes.
    #[must_use]
    pub fn overlays(self) -> usize {
        self.0 / 8 * OVERLAYS
    }

    /// Inbox rows that wait to be written.
    #[must_use]
    pub fn inbox(self) -> usize {
        self.0 / 8 * INBOX
    }

    /// Pages of history.
    #[must_use]
    pub fn history(self) -> usize {
        (self.0 / 8 * HISTORY).min(HISTORY_BYTES_MAX)
    }
}

/// The default: a quarter of the memory of this machine, or of what its control group may use, within bounds.
#[must_use]
pub fn default_mib() -> u64 {
    let machine = kib_total(&fs::read_to_string("/proc/meminfo").unwrap_or_default());
    let group = group_limit(Path::new("/sys/fs/cgroup"));
    default_of(machine.into_iter().chain(group).min())
}

fn default_of(bytes: Option<u64>) -> u64 {
    let mib = bytes.unwrap_or_default() >> 20;
    (mib / OF_MACHINE).clamp(DEFAULT_MIB_MIN, DEFAULT_MIB_MAX)
}

/// Bytes, of `MemTotal:       24000000 kB`.
fn kib_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib << 10)
}

/// Of this process's control group, version 2 or 1. A container sees its own group at the root.
fn group_limit(root: &Path) -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
    let limits = [
        own.map(|own| root.join(own).join("memory.max")),
        Some(root.join("memory.max")),
        Some(root.join("memory/memory.limit_in_bytes")),
    ];
    let read = |path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    limits.into_iter().flatten().filter_map(read).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_follows_the_machine_within_bounds() {
        assert_eq!(
            kib_total("MemTotal:       8388608 kB\nMemFree: 1 kB\n"),
            Some(8 << 30)
        );
        assert_eq!(default_of(Some(8 << 30)), 2_048);
        assert_eq!(default_of(Some(256 << 20)), DEFAULT_MIB_MIN);
        assert_eq!(default_of(Some(1 << 40)), DEFAULT_MIB_MAX);
        assert_eq!(default_of(None), DEFAULT_MIB_MIN);
    }
}
