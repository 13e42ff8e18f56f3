//! What clients saw, and what they must not see.

use std::collections::{BTreeMap, BTreeSet};

use chat_gateway::model::{ClientId, Seq};

/// What clients saw, and what was wrong with it.
#[derive(Default)]
pub(crate) struct Checker {
    pub(crate) acknowledged: BTreeMap<ClientId, (usize, Seq)>,
    /// For each conversation, the sequence that every history must be a prefix of.
    canon: [Vec<ClientId>; 3],
    pub(crate) findings: Vec<String>,
}

impl Checker {
    pub(crate) fn find(&mut self, text: String) {
        self.findings.push(text);
    }

    pub(super) fn acknowledge(&mut self, conversation: usize, client: ClientId, seq: Seq) {
        let first = *self
            .acknowledged
            .entry(client)
            .or_insert((conversation, seq));
        if first != (conversation, seq) {
            self.find(format!("{client} acknowledged at {first:?} and at {seq}"));
        }
    }

    /// Checks entries that a client saw.
    pub(super) fn saw(
        &mut self,
        conversation: usize,
        entries: impl Iterator<Item = (Seq, ClientId)>,
    ) {
        for (seq, client) in entries {
            let index = usize::try_from(seq - 1).unwrap();
            let canon = &mut self.canon[conversation];
            match canon.get(index).copied() {
                Some(known) if known != client => {
                    self.find(format!(
                        "conversation {conversation}: {seq} was {known}, now {client}"
                    ));
                }
                None if index == canon.len() => canon.push(client),
                // A live entry after a gap is compared once its predecessors have been read.
                Some(_) | None => {}
            }
        }
    }
}

/// Messages of the channel that the visitor must not see.
#[derive(Default)]
pub(crate) struct Secrets {
    /// Whether the visitor can be in the channel, and whether the channel can be public.
    rights: [bool; 2],
    /// Messages sent while neither was possible, as far as acknowledgements tell.
    pub(super) sent: BTreeSet<ClientId>,
    /// Those of them that the visitor has seen. A change with an unknown outcome may have allowed it; the log decides.
    pub(crate) seen: BTreeSet<Seq>,
}

impl Secrets {
    /// Notes that one of the two rights may be given from now on.
    pub(super) fn visible(&mut self, right: usize) {
        self.rights[right] = true;
        self.sent.clear();
    }

    /// Notes that the end of one of the two rights is acknowledged.
    pub(super) fn hidden(&mut self, right: usize) {
        self.rights[right] = false;
    }

    /// Notes a message that is about to be sent.
    pub(super) fn sends(&mut self, client: ClientId) {
        if self.rights == [false; 2] {
            self.sent.insert(client);
        }
    }
}
