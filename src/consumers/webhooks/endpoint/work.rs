//! The conversations that have events for a webhook: in which order they are sent, and what is known of their failures. Each
//! is waiting, blocked or being sent.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use tokio::time::Instant;

use crate::model::{
    ConversationId,
    limits::{WEBHOOK_CONVERSATIONS_MAX, WEBHOOK_SUSPECTS_MAX},
};

/// What is known of a conversation. There may be [`WEBHOOK_CONVERSATIONS_MAX`] of them, so it is small.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    stage: Stage,
    /// The successes of the endpoint at the last failed attempt for the next event.
    pub(super) successes: u64,
    /// Events that a request with this conversation may have, because a larger one was rejected. 0: as many as always.
    pub(super) cap: u16,
    /// Events of the request that failed when the endpoint was found to be down. 0: none failed.
    suspect: u16,
    /// The last status that was no success, or 0.
    status: u16,
    /// Failed attempts for the next event that were its own. 0: none.
    pub(super) attempts: u8,
    /// Failed attempts after these, while nothing else was accepted.
    pub(super) tries: u8,
}

impl Work {
    fn at(stage: Stage) -> Self {
        Self {
            stage,
            successes: 0,
            cap: 0,
            suspect: 0,
            status: 0,
            attempts: 0,
            tries: 0,
        }
    }

    pub(super) fn status(&self) -> Option<u16> {
        (self.status > 0).then_some(self.status)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// It waits; the lowest number is next.
    Waiting(i64),
    Blocked(Instant),
    InFlight(After),
}

/// What was learned of a conversation while it is being sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum After {
    Nothing,
    /// It may have more events.
    Woken,
    Forgotten,
}

/// All conversations that have events.
#[derive(Debug, Default)]
pub(super) struct Works {
    all: HashMap<ConversationId, Work, foldhash::fast::RandomState>,
    waiting: BTreeMap<i64, ConversationId>,
    blocked: BTreeSet<(Instant, ConversationId)>,
    /// The conversations with a `suspect`, and some that had one.
    suspects: VecDeque<ConversationId>,
    /// The numbers that were given last, at the front and at the back.
    front: i64,
    back: i64,
}

impl Works {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn get(&self, conversation: ConversationId) -> Option<&Work> {
        self.all.get(&conversation)
    }

    pub(super) fn get_mut(&mut self, conversation: ConversationId) -> Option<&mut Work> {
        self.all.get_mut(&conversation)
    }

    pub(super) fn wake(&mut self, conversation: ConversationId) -> bool {
        if let Some(work) = self.all.get_mut(&conversation) {
            if let Stage::InFlight(after) = &mut work.stage {
                *after = After::Woken;
            }
            return true;
        }
        if self.all.len() >= WEBHOOK_CONVERSATIONS_MAX {
            return false;
        }
        self.back += 1;
        self.waiting.insert(self.back, conversation);
        let work = Work::at(Stage::Waiting(self.back));
        self.all.insert(conversation, work);
        true
    }

    pub(super) fn forget(&mut self, conversation: ConversationId) {
        match self.all.get_mut(&conversation) {
            Some(Work {
                stage: Stage::InFlight(after),
                ..
            }) => *after = After::Forgotten,
            Some(_) => self.remove(conversation),
            None => {}
        }
    }

    pub(super) fn remove(&mut self, conversation: ConversationId) {
        if let Some(work) = self.all.remove(&conversation) {
            self.leave(conversation, work.stage);
        }
    }

    /// Takes a conversation from where it is.
    fn leave(&mut self, conversation: ConversationId, stage: Stage) {
        match stage {
            Stage::Waiting(number) => drop(self.waiting.remove(&number)),
            Stage::Blocked(until) => drop(self.blocked.remove(&(until, conversation))),
            Stage::InFlight(_) => {}
        }
    }

    fn set(&mut self, conversation: ConversationId, stage: Stage) {
        let Some(work) = self.all.get_mut(&conversation) else {
            return;
        };
        let before = std::mem::replace(&mut work.stage, stage);
        self.leave(conversation, before);
        match stage {
            Stage::Waiting(number) => drop(self.waiting.insert(number, conversation)),
            Stage::Blocked(until) => drop(self.blocked.insert((until, conversation))),
            Stage::InFlight(_) => {}
        }
    }

    fn queue(&mut self, conversation: ConversationId) {
        self.back += 1;
        self.set(conversation, Stage::Waiting(self.back));
    }

    /// Returns whether a conversation is kept after a failure. If not, it was forgotten meanwhile, and is gone now.
    fn stays(&mut self, conversation: ConversationId) -> bool {
        let stage = self.all.get(&conversation).map(|work| work.stage);
        if stage == Some(Stage::InFlight(After::Forgotten)) {
            self.remove(conversation);
        }
        self.all.contains_key(&conversation)
    }

    /// Ends the sending of a conversation of which nothing more is known.
    pub(super) fn finish(&mut self, conversation: ConversationId) {
        match self.all.get(&conversation).map(|work| work.stage) {
            Some(Stage::InFlight(After::Woken)) => self.queue(conversation),
            Some(Stage::InFlight(_)) => self.remove(conversation),
            _ => {}
        }
    }

    /// Puts a conversation back to the front, because it could not be sent.
    pub(super) fn put_back(&mut self, conversation: ConversationId) {
        if self.stays(conversation) {
            self.front -= 1;
            self.set(conversation, Stage::Waiting(self.front));
        }
    }

    /// Returns whether the conversation is blocked now. It is not if it was forgotten.
    pub(super) fn block(&mut self, conversation: ConversationId, until: Instant) -> bool {
        let stays = self.stays(conversation);
        if stays {
            self.set(conversation, Stage::Blocked(until));
        }
        stays
    }

    pub(super) fn unblock(&mut self, now: Instant) {
        while let Some((until, conversation)) = self.blocked.first().copied()
            && until <= now
        {
            self.queue(conversation);
        }
    }

    pub(super) fn blocked_until(&self) -> Option<Instant> {
        self.blocked.first().map(|(until, _)| *until)
    }

    /// Takes up to `count` waiting conversations for one request, and returns how many events it may have.
    pub(super) fn take(&mut self, count: usize, batch: usize) -> (Vec<ConversationId>, usize) {
        let (mut taken, mut events) = (Vec::new(), batch);
        for conversation in self.waiting.values() {
            let cap = self.all.get(conversation).map_or(0, |work| work.cap);
            let cap = if cap == 0 { batch } else { usize::from(cap) };
            let least = events.min(cap);
            if !taken.is_empty() && taken.len() >= least.min(count) {
                break;
            }
            events = least;
            taken.push(*conversation);
        }
        for conversation in &taken {
            self.set(*conversation, Stage::InFlight(After::Nothing));
        }
        (taken, events)
    }

    /// Takes the first waiting conversation whose event never failed, or else the one that failed first.
    pub(super) fn take_other(&mut self) -> Option<ConversationId> {
        let is_clean = |id: &&ConversationId| {
            let work = self.all.get(id);
            work.is_none_or(|work| work.suspect == 0 && work.attempts == 0)
        };
        let clean = self.waiting.values().find(is_clean);
        let taken = clean.or_else(|| self.waiting.values().next()).copied()?;
        self.set(taken, Stage::InFlight(After::Nothing));
        Some(taken)
    }

    pub(super) fn accepted(&mut self, conversation: ConversationId, batch: usize) {
        if let Some(work) = self.all.get_mut(&conversation) {
            let cap = work.cap.saturating_mul(2);
            *work = Work::at(work.stage);
            work.cap = if usize::from(cap) < batch { cap } else { 0 };
        }
        self.finish(conversation);
    }

    /// Halves the requests with this conversation after one with so many events was rejected.
    pub(super) fn halve(&mut self, conversation: ConversationId, events: usize) {
        if let Some(work) = self.all.get_mut(&conversation) {
            work.cap = u16::try_from(events / 2).unwrap_or(u16::MAX).max(1);
        }
    }

    pub(super) fn note_status(&mut self, conversations: &[ConversationId], status: Option<u16>) {
        for conversation in conversations {
            if let Some(work) = self.all.get_mut(conversation) {
                work.status = status.unwrap_or_default();
            }
        }
    }

    /// Notes that a request with this conversation failed, and nobody knows why yet.
    pub(super) fn suspect(&mut self, conversation: ConversationId, events: usize) {
        if !self.stays(conversation) {
            return;
        }
        self.queue(conversation);
        let Some(work) = self.all.get_mut(&conversation) else {
            return;
        };
        let is_new = work.suspect == 0;
        work.suspect = u16::try_from(events).unwrap_or(u16::MAX).max(1);
        if is_new {
            self.suspects.push_back(conversation);
        }
        if self.suspects.len() > WEBHOOK_SUSPECTS_MAX
            && let Some(oldest) = self.suspects.pop_front()
            && let Some(work) = self.all.get_mut(&oldest)
        {
            work.suspect = 0;
        }
    }

    /// Returns the conversations that failed since the endpoint was found to be down, each with the events of its request.
    pub(super) fn take_suspects(&mut self) -> Vec<(ConversationId, usize)> {
        let mut failed = Vec::new();
        for conversation in std::mem::take(&mut self.suspects) {
            if let Some(work) = self.all.get_mut(&conversation)
                && work.suspect > 0
            {
                failed.push((conversation, usize::from(work.suspect)));
                work.suspect = 0;
            }
        }
        failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_conversations_take_at_most_16_mib() {
        // A hash map has 8 places for 7 entries, and twice as many from one power of two on.
        let places = (WEBHOOK_CONVERSATIONS_MAX * 8 / 7).next_power_of_two();
        let map = places * (size_of::<(ConversationId, Work)>() + 1);
        // The nodes of a tree that is filled in order are half full.
        let place = size_of::<(Instant, ConversationId)>();
        let tree = 2 * WEBHOOK_CONVERSATIONS_MAX * place;
        assert!(map + tree <= 16 << 20, "{map} and {tree} bytes");
    }
}
