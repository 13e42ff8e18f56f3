//! The conversations that this gateway lost while work was in progress. Their next owners settle and publish that work,
//! so this gateway asks for each to be loaded.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard},
};

use crate::{model::ConversationId, tasks::lock};

#[derive(Default)]
pub(super) struct Unfinished(Mutex<Lost>);

#[derive(Default)]
struct Lost {
    to_ask: BTreeSet<ConversationId>,
    /// The number of conversations that were taken and not answered yet.
    asking: usize,
}

impl Unfinished {
    pub(super) fn lost(&self, conversation: ConversationId) {
        self.get().to_ask.insert(conversation);
    }

    /// Takes the conversations whose next owners were not asked yet. The caller must call [`Self::asked`] for each.
    pub(super) fn take(&self) -> BTreeSet<ConversationId> {
        let mut lost = self.get();
        let taken = std::mem::take(&mut lost.to_ask);
        lost.asking += taken.len();
        taken
    }

    /// Records whether the owner has answered. If not, it is asked again.
    pub(super) fn asked(&self, conversation: ConversationId, answered: bool) {
        let mut lost = self.get();
        lost.asking -= 1;
        if !answered {
            lost.to_ask.insert(conversation);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        let lost = self.get();
        lost.to_ask.is_empty() && lost.asking == 0
    }

    fn get(&self) -> MutexGuard<'_, Lost> {
        lock(&self.0)
    }
}
