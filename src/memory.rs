//! The memory limit of a gateway and the share of each of its parts.

use std::{fs, path::Path};

/// The default's share of the machine's memory: one part in this many. The rest is for sockets, the store and the
/// system.
const OF_MACHINE: u64 = 4;
/// The smallest default, also used if the memory is unknown. Less would evict conversations that are in use.
const DEFAULT_MIB_MIN: u64 = 256;
/// The largest default. One gateway does not serve more conversations than this holds.
const DEFAULT_MIB_MAX: u64 = 16_384;
/// The smallest setting: one conversation of the largest messages, and one page of each, must fit into each share.
pub const MIB_MIN: u64 = 16;
/// The largest setting. A terabyte or more is a mistake.
pub const MIB_MAX: u64 = 1 << 20;

/// The shares in eighths. Open conversations have the largest, because they hold the most and are the most work to load
/// again. Inbox rows wait only for milliseconds; if the store does not answer, they use their whole share.
const OWNERS: usize = 4;
const MEMBERSHIPS: usize = 1;
const OVERLAYS: usize = 1;
const INBOX: usize = 1;
const HISTORY: usize = 1;
/// The largest share of pages of history. They are kept for clients that all reconnect at once; later reads use the
/// store's block cache.
const HISTORY_BYTES_MAX: usize = 64 << 20;
/// The part of the share of memberships that is for the devices of users: a 16th, because most users have none or two.
const DEVICES_DIVISOR: usize = 16;
const _: () = assert!(OWNERS + MEMBERSHIPS + OVERLAYS + INBOX + HISTORY == 8);

/// The memory of open conversations, homes, inbox rows and pages of history together, in bytes. The store's block cache
/// and the queues of sockets are not included; they have their own settings.
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

    /// Returns the bytes for open conversations.
    #[must_use]
    pub fn owners(self) -> usize {
        self.0 / 8 * OWNERS
    }

    /// Returns the bytes for the memberships that homes remember.
    #[must_use]
    pub fn memberships(self) -> usize {
        self.0 / 8 * MEMBERSHIPS - self.devices()
    }

    /// Returns the bytes for the devices of users that homes remember.
    #[must_use]
    pub fn devices(self) -> usize {
        self.0 / 8 * MEMBERSHIPS / DEVICES_DIVISOR
    }

    /// Returns the bytes for recent publications, which homes lay over stored inboxes.
    #[must_use]
    pub fn overlays(self) -> usize {
        self.0 / 8 * OVERLAYS
    }

    /// Returns the bytes for inbox rows that wait to be written.
    #[must_use]
    pub fn inbox(self) -> usize {
        self.0 / 8 * INBOX
    }

    /// Returns the bytes for pages of history.
    #[must_use]
    pub fn history(self) -> usize {
        (self.0 / 8 * HISTORY).min(HISTORY_BYTES_MAX)
    }
}

/// Returns the default: a quarter of the memory of the machine or its control group, within the bounds above.
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

/// Reads the bytes in `MemTotal:       24000000 kB`.
fn kib_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib << 10)
}

/// Returns the limit of this process's control group, version 2 or 1. A container sees its own group at the root.
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
