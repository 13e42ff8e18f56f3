//! What clients saw of the log of entries.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use chat_gateway::model::{ClientId, Entry, Seq, UserId};

use super::participants_of;

/// What clients saw, and what was wrong with it.
#[derive(Default)]
pub(super) struct Checker {
    pub(super) acknowledged: HashMap<ClientId, Seq>,
    /// The sequence that every history must be a prefix of.
    pub(super) canon: Vec<ClientId>,
    pub(super) findings: Vec<String>,
}

impl Checker {
    /// The highest seq that was acknowledged.
    pub(super) fn newest(&self) -> Seq {
        self.acknowledged
            .values()
            .max()
            .copied()
            .unwrap_or_default()
    }

    pub(super) fn acknowledge(&mut self, client: ClientId, seq: Seq) {
        let first = *self.acknowledged.entry(client).or_insert(seq);
        if first != seq {
            self.findings
                .push(format!("{client} acknowledged at {first} and at {seq}"));
        }
    }

    /// Checks the entries from `first` on that a reader or a subscriber saw.
    pub(super) fn saw<'a>(&mut self, first: Seq, entries: impl Iterator<Item = &'a Arc<Entry>>) {
        for (seq, entry) in (first..).zip(entries) {
            if entry.seq != seq {
                self.findings
                    .push(format!("expected {seq}, saw {}", entry.seq));
                return;
            }
            let index = usize::try_from(seq - 1).unwrap();
            match self.canon.get(index) {
                Some(known) if *known != entry.client_id => {
                    self.findings
                        .push(format!("{seq} was {known}, now {}", entry.client_id));
                }
                Some(_) => {}
                None if index == self.canon.len() => self.canon.push(entry.client_id),
                // A live entry after a gap is compared once its predecessors have been read.
                None => {}
            }
        }
    }

    /// Checks the whole log, and the participants that its last owner returned.
    pub(super) fn end(&mut self, entries: &[Arc<Entry>], present: &BTreeSet<UserId>) {
        self.saw(1, entries.iter());
        let expected = participants_of(entries);
        if *present != expected {
            let finding =
                format!("the owner says that {present:?} are in the group, the log {expected:?}");
            self.findings.push(finding);
        }
        let ids: Vec<ClientId> = entries.iter().map(|e| e.client_id).collect();
        if ids.iter().collect::<HashSet<_>>().len() != ids.len() {
            self.findings.push("a client id is in the log twice".into());
        }
        for (client, seq) in &self.acknowledged {
            let at = ids.get(usize::try_from(seq - 1).unwrap());
            if at != Some(client) {
                self.findings
                    .push(format!("{client} acknowledged at {seq}, found {at:?}"));
            }
        }
    }
}
