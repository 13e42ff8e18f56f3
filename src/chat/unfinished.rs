//! Conversations that this gateway lost in the middle of something. Their next owner settles and publishes it, but only
//! once there is one: so somebody must ask it something.

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
    asking: usize,
}

impl Unfinished {
    pub(super) fn lost(&self, conversation: ConversationId) {
        self.get().to_ask.insert(conversation);
    }

    /// Those that nobody has asked yet. For each, [`Self::asked`] is to be called.
    pub(super) fn take(&self) -> BTreeSet<ConversationId> {
        let mut lost = self.get();
        let taken = std::mem::take(&mut lost.to_ask);
        lost.asking += taken.len();
        taken
    }

    /// Whether it was answered: if not, it is to be asked again.
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
