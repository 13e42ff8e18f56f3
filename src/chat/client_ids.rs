//! The client ids of recent entries. A message that is sent again is found here, without a lookup in the store.

use std::collections::HashMap;

use foldhash::quality::RandomState;

use crate::model::{ClientId, Entry, Seq, UserId, limits::RECENT_CLIENT_IDS};

/// A client id identifies a message only together with its sender.
pub(super) type Origin = (UserId, ClientId);

/// Remembers at least the last [`RECENT_CLIENT_IDS`] client ids that were added, and at most twice as many. A takeover adds
/// those of the entries that it reads.
#[derive(Debug, Default)]
pub(super) struct ClientIds {
    seqs: HashMap<Origin, Seq, RandomState>,
    /// The client ids before those in `seqs`. They are forgotten all at once, because finding the
    /// oldest one costs more than adding one.
    older_seqs: HashMap<Origin, Seq, RandomState>,
    /// Bytes that the client ids of each map hold besides the table.
    bytes: [usize; 2],
}

impl ClientIds {
    /// The seq of an appended message, if its client id is remembered.
    pub(super) fn find(&self, sender: &UserId, client_id: ClientId) -> Option<Seq> {
        let origin = (sender.clone(), client_id);
        let seq = self.seqs.get(&origin);
        seq.or_else(|| self.older_seqs.get(&origin)).copied()
    }

    pub(super) fn remember(&mut self, entry: &Entry) {
        self.remember_at(&entry.sender, entry.client_id, entry.seq);
    }

    /// Remembers where a client id was found in the store.
    pub(super) fn remember_at(&mut self, sender: &UserId, client_id: ClientId, seq: Seq) {
        if self.seqs.len() == RECENT_CLIENT_IDS {
            std::mem::swap(&mut self.seqs, &mut self.older_seqs);
            self.seqs.clear();
            self.bytes = [0, self.bytes[0]];
        }
        let known = self.seqs.insert((sender.clone(), client_id), seq);
        if known.is_none() {
            self.bytes[0] += sender.weight();
        }
    }

    /// Bytes of memory held.
    pub(super) fn weight(&self) -> usize {
        const SLOT_BYTES: usize = size_of::<(Origin, Seq)>() + 1;
        let slots = self.seqs.capacity() + self.older_seqs.capacity();
        slots * SLOT_BYTES + self.bytes.iter().sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_client_ids_are_remembered_and_old_ones_are_forgotten() {
        let mut ids = ClientIds::default();
        let sender = UserId::new("alice").unwrap();
        let newest = 3 * RECENT_CLIENT_IDS as u128 + 7;
        for client in 1..=newest {
            let client_id = ClientId(uuid::Uuid::from_u128(client));
            ids.remember_at(&sender, client_id, client as Seq);
        }
        let find = |client: u128| ids.find(&sender, ClientId(uuid::Uuid::from_u128(client)));
        for client in newest - RECENT_CLIENT_IDS as u128 + 1..=newest {
            assert_eq!(find(client), Some(client as Seq));
        }
        assert_eq!(find(newest - 2 * RECENT_CLIENT_IDS as u128), None);
        let least = RECENT_CLIENT_IDS * size_of::<Origin>();
        assert!(
            (least..2_000_000).contains(&ids.weight()),
            "{}",
            ids.weight()
        );
    }
}
