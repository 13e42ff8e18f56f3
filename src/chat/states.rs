//! The entries and reactions of a conversation that its owner checks changes against. It has no I/O: the owner reads what
//! is not here from the store.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
};

use foldhash::quality::RandomState;

use crate::{
    model::{
        Attachment, Change, ChangeOp, Entry, EntryState, Rev, Seq, UserId,
        limits::{ENTRIES_KNOWN_MAX, REACTORS_KNOWN_MAX, USER_ID_BYTES_MAX},
        weight::ALLOCATION_BYTES,
    },
    mutation::{Mutation, broken},
};

/// What an owner knows of the entries that changed, and of who reacted.
#[derive(Debug, Default)]
pub(super) struct States {
    entries: HashMap<Seq, KnownEntry, RandomState>,
    /// The known entries in the order in which they became known.
    entries_order: VecDeque<Seq>,
    reactors: HashMap<(Seq, UserId), Toggles, RandomState>,
    reactors_order: VecDeque<(Seq, UserId)>,
    /// Bytes that the known entries and reactions hold.
    bytes: usize,
}

/// An entry with its state.
#[derive(Debug)]
pub(super) struct KnownEntry {
    pub entry: Arc<Entry>,
    /// The state after all appended changes. The next change is checked against it.
    pub appended: EntryState,
    /// The state after all applied changes, which replies may contain (rule [applied]).
    pub applied: Arc<EntryState>,
}

/// A user's reactions to one entry: by emoji the rev that changed it last, or 0 if that is unknown, and whether it is on.
pub(super) type Toggles = BTreeMap<String, (Rev, bool)>;

/// Bytes that the map of a user's reactions holds.
fn toggles_weight(toggles: &Toggles) -> usize {
    const SLOT_BYTES: usize = 2 * size_of::<(String, (Rev, bool))>() + ALLOCATION_BYTES;
    let each = toggles.keys().map(|emoji| SLOT_BYTES + emoji.len());
    each.sum()
}

impl KnownEntry {
    /// The attachments of the entry after all appended changes.
    pub(super) fn attachments(&self) -> &[Attachment] {
        self.entry.attachments(Some(&self.appended))
    }

    fn weight(&self) -> usize {
        let order = size_of::<(Seq, Self)>() + size_of::<Seq>() + 2 * ALLOCATION_BYTES;
        order + self.entry.weight() + self.appended.weight() + self.applied.weight()
    }
}

impl States {
    /// The entry with this seq, if it is known.
    pub(super) fn entry(&self, seq: Seq) -> Option<&KnownEntry> {
        self.entries.get(&seq)
    }

    /// Remembers an entry as the store has it. Rule [cold]: it never replaces what is known, which may be newer.
    pub(super) fn know(&mut self, entry: Arc<Entry>, state: EntryState) {
        let seq = entry.seq;
        if self.entries.contains_key(&seq) {
            return;
        }
        let known = KnownEntry {
            entry,
            applied: Arc::new(state.clone()),
            appended: state,
        };
        self.bytes += known.weight();
        self.entries.insert(seq, known);
        self.entries_order.push_back(seq);
    }

    /// The reactions of a user to an entry, if they are known.
    pub(super) fn reactions_of(&self, seq: Seq, user: &UserId) -> Option<&Toggles> {
        self.reactors.get(&(seq, user.clone()))
    }

    /// Remembers the reactions of a user to an entry as the store has them.
    pub(super) fn know_reactions(&mut self, seq: Seq, user: &UserId, emoji: Vec<(String, bool)>) {
        let key = (seq, user.clone());
        if self.reactors.contains_key(&key) {
            return;
        }
        let toggles = emoji.into_iter().map(|(emoji, on)| (emoji, (0, on)));
        let toggles: Toggles = toggles.collect();
        self.bytes += toggles_weight(&toggles);
        self.reactors.insert(key.clone(), toggles);
        self.reactors_order.push_back(key);
    }

    /// Includes an appended change in what the next changes are checked against.
    pub(super) fn append(&mut self, change: &Change) {
        for (seq, state) in change.states() {
            self.update(seq, |known| known.appended.merge(&state));
        }
        if let ChangeOp::React { seq, emoji, on, .. } = &change.op
            && let Some(toggles) = self.reactors.get_mut(&(*seq, change.by.clone()))
        {
            let before = toggles_weight(toggles);
            toggles.insert(emoji.clone(), (change.rev, *on));
            self.bytes = self.bytes + toggles_weight(toggles) - before;
        }
    }

    /// Includes an applied change in what replies contain.
    pub(super) fn apply(&mut self, change: &Change) {
        for (seq, state) in change.states() {
            self.update(seq, |known| {
                Arc::make_mut(&mut known.applied).merge(&state);
                known.appended.merge(&state);
                if state.is_deleted() {
                    known.entry = Arc::new(known.entry.as_changed(&state));
                }
            });
        }
    }

    fn update(&mut self, seq: Seq, with: impl FnOnce(&mut KnownEntry)) {
        if let Some(known) = self.entries.get_mut(&seq) {
            let before = known.weight();
            with(known);
            self.bytes = self.bytes + known.weight() - before;
        }
    }

    /// The applied states of the known entries from `from` to `to`, oldest first. These are all states there, if all
    /// entries of this part are in the owner's memory.
    pub(super) fn applied(&self, from: Seq, to: Seq) -> Vec<(Seq, Arc<EntryState>)> {
        let state = |seq| {
            let known: &KnownEntry = self.entries.get(&seq)?;
            if broken(Mutation::ChangeApplied) {
                return (known.appended.rev() > 0).then(|| (seq, Arc::new(known.appended.clone())));
            }
            (known.applied.rev() > 0).then(|| (seq, known.applied.clone()))
        };
        if self.entries.is_empty() {
            return Vec::new();
        }
        (from..=to).filter_map(state).collect()
    }

    /// Forgets what became known first, above the limits. Entries with unapplied changes stay, and changed entries from
    /// `recent` on, whose states pages from memory need.
    pub(super) fn forget(&mut self, recent: Seq, applied: Rev) {
        let mut left = self.entries_order.len();
        while self.entries.len() > ENTRIES_KNOWN_MAX
            && left > 0
            && let Some(seq) = self.entries_order.pop_front()
        {
            left -= 1;
            let Some(known) = self.entries.get(&seq) else {
                continue;
            };
            let rev = known.appended.rev();
            if rev > applied || (seq >= recent && rev > 0) {
                self.entries_order.push_back(seq);
            } else {
                self.bytes -= known.weight();
                self.entries.remove(&seq);
            }
        }
        let mut left = self.reactors_order.len();
        while self.reactors.len() > REACTORS_KNOWN_MAX
            && left > 0
            && let Some(key) = self.reactors_order.pop_front()
        {
            left -= 1;
            let toggles = self.reactors.get(&key);
            if toggles.is_some_and(|toggles| toggles.values().any(|(rev, _)| *rev > applied)) {
                self.reactors_order.push_back(key);
            } else if let Some(toggles) = self.reactors.remove(&key) {
                self.bytes -= toggles_weight(&toggles);
            }
        }
    }

    /// Bytes of memory held.
    pub(super) fn weight(&self) -> usize {
        const REACTOR_BYTES: usize = 2 * size_of::<(Seq, UserId)>()
            + size_of::<Toggles>()
            + 2 * (ALLOCATION_BYTES + USER_ID_BYTES_MAX);
        self.bytes + self.reactors.len() * REACTOR_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ClientId, Content, DeletedEntry, DeletedSeqs, MessageId, Reactions};

    fn user() -> UserId {
        UserId::new("alice").unwrap()
    }

    fn entry(seq: Seq) -> Arc<Entry> {
        let id = uuid::Uuid::from_u128(seq.into());
        Arc::new(Entry {
            seq,
            message_id: MessageId(id),
            client_id: ClientId(id),
            sender: user(),
            at: 1,
            content: Content::text("hi"),
            texts: seq,
        })
    }

    fn change(rev: Rev, op: ChangeOp) -> Change {
        let by = user();
        Change { rev, by, at: 1, op }
    }

    fn react(rev: Rev, seq: Seq, on: bool) -> Change {
        let emoji = "+".to_owned();
        let count = Reactions::from([(emoji.clone(), 1)]);
        let reactions = if on { count } else { Reactions::new() };
        let op = ChangeOp::React {
            seq,
            emoji,
            on,
            reactions,
        };
        change(rev, op)
    }

    fn delete(rev: Rev, seq: Seq) -> Change {
        let entries = vec![DeletedEntry {
            seq,
            edits: Vec::new(),
            files: Vec::new(),
        }];
        let deleted = DeletedSeqs::default();
        change(rev, ChangeOp::Delete { entries, deleted })
    }

    #[test]
    fn replies_see_a_change_only_when_it_is_applied() {
        let mut states = States::default();
        states.know(entry(1), EntryState::default());
        let change = delete(1, 1);
        states.append(&change);
        let known = states.entry(1).unwrap();
        assert!(known.appended.is_deleted() && !known.applied.is_deleted());
        assert_eq!(states.applied(1, 1), []);
        states.apply(&change);
        assert_eq!(states.applied(1, 9).len(), 1);
        let known = states.entry(1).unwrap();
        assert!(known.applied.is_deleted());
        assert_eq!(known.entry.content, Content::text(""), "the text is erased");
        // A cold read that was begun before does not bring it back.
        states.know(entry(1), EntryState::default());
        assert!(states.entry(1).unwrap().appended.is_deleted());
    }

    #[test]
    fn reactions_that_are_off_are_known() {
        let mut states = States::default();
        states.know(entry(1), EntryState::default());
        states.know_reactions(1, &user(), vec![("+".into(), true), ("-".into(), false)]);
        states.append(&react(5, 1, false));
        let toggles = states.reactions_of(1, &user()).unwrap();
        assert_eq!((toggles["+"], toggles["-"]), ((5, false), (0, false)));
    }

    #[test]
    fn what_is_known_is_bounded() {
        let mut states = States::default();
        let many = 3 * ENTRIES_KNOWN_MAX as Seq;
        for seq in 1..=many {
            states.know(entry(seq), EntryState::default());
            states.know_reactions(seq, &user(), Vec::new());
            states.append(&react(seq, seq, true));
        }
        states.forget(many, 0);
        assert_eq!(states.entries.len() as Seq, many, "nothing is applied");
        states.forget(many - 9, many);
        assert_eq!(states.entries.len(), ENTRIES_KNOWN_MAX);
        assert!(states.entry(many).is_some() && states.entry(1).is_none());
        assert!(states.reactors.len() <= REACTORS_KNOWN_MAX);
        let entries = states.entries.values().map(KnownEntry::weight);
        let toggles = states.reactors.values().map(toggles_weight);
        assert_eq!(states.bytes, entries.chain(toggles).sum::<usize>());
    }
}
