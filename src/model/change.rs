//! Changes of entries: edits, deletions and reactions. A conversation numbers its changes in a log of their own, beside
//! the log of entries.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    Attachment, AttachmentId, Content, Entry, Millis, Newest, Rev, Seq, UserId,
    limits::DELETED_SEQS_KEPT,
};

/// The reactions to one entry: each emoji with the number of its users. Emoji without users are absent.
pub type Reactions = BTreeMap<String, u64>;

/// A change with its position in the conversation's log of changes.
///
/// Rule [complete]: it carries everything that its effects need, as it is after the change. So applying a change again
/// is a pure overwrite, and nothing is computed again after a crash.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Change {
    pub rev: Rev,
    pub by: UserId,
    pub at: Millis,
    pub op: ChangeOp,
}

/// The kind of a change, with its target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ChangeOp {
    Edit {
        seq: Seq,
        /// The new content. `None` when it was erased, because the entry was deleted later.
        content: Option<EditedContent>,
        /// The revs of all edits of the entry, including this one.
        edits: Vec<Rev>,
        /// The uploaded files that the entry had before and has no more.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        dropped: Vec<AttachmentId>,
    },
    Delete {
        entries: Vec<DeletedEntry>,
        /// The deleted entries of the conversation, including these.
        deleted: DeletedSeqs,
    },
    React {
        seq: Seq,
        emoji: String,
        /// Whether the reaction was added. If not, it was removed.
        on: bool,
        /// The reactions to the entry after this change.
        reactions: Reactions,
    },
}

impl ChangeOp {
    /// Returns the change that takes the place of a lost one: it deletes nothing.
    #[must_use]
    pub fn lost(deleted: DeletedSeqs) -> Self {
        Self::Delete {
            entries: Vec::new(),
            deleted,
        }
    }

    /// Returns an edit without its content, as it is after its entry was deleted. `None` if it is another change.
    #[must_use]
    pub fn erased_edit(&self) -> Option<Self> {
        let Self::Edit {
            seq,
            content: _,
            edits,
            dropped,
        } = self
        else {
            return None;
        };
        Some(Self::Edit {
            seq: *seq,
            content: None,
            edits: edits.clone(),
            dropped: dropped.clone(),
        })
    }
}

/// The content of an edited message.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EditedContent {
    pub body: String,
    pub attachments: Vec<Attachment>,
}

/// An entry that a change deletes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeletedEntry {
    pub seq: Seq,
    /// The revs of its edits, whose content is erased too.
    pub edits: Vec<Rev>,
    /// The uploaded files that the entry had.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<AttachmentId>,
}

/// The deleted entries of a conversation, as far as unread counts need them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DeletedSeqs {
    /// The highest seqs, ascending, at most [`DELETED_SEQS_KEPT`].
    pub highest: Vec<Seq>,
    /// The number of all deleted entries.
    pub count: u64,
}

impl DeletedSeqs {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds an entry that was not deleted before.
    pub fn add(&mut self, seq: Seq) {
        self.count += 1;
        if let Err(place) = self.highest.binary_search(&seq) {
            self.highest.insert(place, seq);
        }
        if self.highest.len() > DELETED_SEQS_KEPT {
            self.highest.remove(0);
        }
    }
}

/// What changed in an entry: its content and its reactions, each with the rev of its newest change.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EntryState {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<ContentState>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reactions: Option<ReactionState>,
}

/// The newest change of an entry's content.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ContentState {
    pub rev: Rev,
    pub by: UserId,
    pub at: Millis,
    /// The new content. `None` if the entry is deleted.
    pub content: Option<EditedContent>,
    /// The revs of all edits of the entry.
    pub edits: Vec<Rev>,
}

/// The reactions to an entry after the newest change of them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ReactionState {
    pub rev: Rev,
    pub reactions: Reactions,
}

impl ContentState {
    #[must_use]
    pub fn is_deleted(&self) -> bool {
        self.content.is_none()
    }

    /// Returns how often the entry's content changed. The version of an inbox summary contains it.
    #[must_use]
    pub fn changes(&self) -> u32 {
        let edits = u32::try_from(self.edits.len()).unwrap_or(u32::MAX);
        edits.saturating_add(self.is_deleted().into())
    }
}

impl EntryState {
    /// Returns the rev of the newest change, or 0 if nothing changed.
    #[must_use]
    pub fn rev(&self) -> Rev {
        let content = self.content.as_ref().map_or(0, |content| content.rev);
        content.max(self.reactions.as_ref().map_or(0, |r| r.rev))
    }

    #[must_use]
    pub fn is_deleted(&self) -> bool {
        self.content.as_ref().is_some_and(ContentState::is_deleted)
    }

    /// Returns how often the entry's content changed.
    #[must_use]
    pub fn changes(&self) -> u32 {
        self.content.as_ref().map_or(0, ContentState::changes)
    }

    /// Takes over each part of `newer` that has a higher rev (rule [state-ts]).
    pub fn merge(&mut self, newer: &Self) {
        if let Some(content) = &newer.content
            && self.content.as_ref().is_none_or(|c| c.rev < content.rev)
        {
            self.content = Some(content.clone());
        }
        if let Some(reactions) = &newer.reactions
            && self
                .reactions
                .as_ref()
                .is_none_or(|r| r.rev < reactions.rev)
        {
            self.reactions = Some(reactions.clone());
        }
    }
}

impl Change {
    /// Returns whether the change was lost, and this one has its place. Nobody knows what changed.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(&self.op, ChangeOp::Delete { entries, .. } if entries.is_empty())
    }

    pub fn is_reaction(&self) -> bool {
        matches!(self.op, ChangeOp::React { .. })
    }

    /// Returns the seqs of the entries that it changes.
    pub fn seqs(&self) -> impl Iterator<Item = Seq> {
        let (one, deleted) = match &self.op {
            ChangeOp::Edit { seq, .. } | ChangeOp::React { seq, .. } => (Some(*seq), &[][..]),
            ChangeOp::Delete { entries, .. } => (None, entries.as_slice()),
        };
        one.into_iter().chain(deleted.iter().map(|entry| entry.seq))
    }

    /// Returns whether another change at the same rev is this one. The text of an edit may be erased in one of them.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let is_same = match (&self.op, &other.op) {
            (
                ChangeOp::Edit { seq, edits, .. },
                ChangeOp::Edit {
                    seq: s, edits: e, ..
                },
            ) => seq == s && edits == e,
            (mine, others) => mine == others,
        };
        is_same && self.by == other.by && self.at == other.at
    }

    /// Returns the states that follow from this change alone: the changed part of each entry. An edit whose content was
    /// erased has none, because the deletion follows.
    pub fn states(&self) -> Vec<(Seq, EntryState)> {
        let content = |content, edits: &[Rev]| EntryState {
            content: Some(ContentState {
                rev: self.rev,
                by: self.by.clone(),
                at: self.at,
                content,
                edits: edits.to_vec(),
            }),
            reactions: None,
        };
        match &self.op {
            ChangeOp::Edit {
                seq,
                content: new,
                edits,
                ..
            } => {
                let state = new.clone().map(|new| (*seq, content(Some(new), edits)));
                state.into_iter().collect()
            }
            ChangeOp::Delete { entries, .. } => entries
                .iter()
                .map(|entry| (entry.seq, content(None, &entry.edits)))
                .collect(),
            ChangeOp::React { seq, reactions, .. } => {
                let reactions = Some(ReactionState {
                    rev: self.rev,
                    reactions: reactions.clone(),
                });
                let state = EntryState {
                    content: None,
                    reactions,
                };
                vec![(*seq, state)]
            }
        }
    }
}

impl Entry {
    /// Returns the entry without its text, as it is after its deletion.
    #[must_use]
    pub fn erased(&self) -> Self {
        let mut entry = self.clone();
        if let Content::Text {
            body, attachments, ..
        } = &mut entry.content
        {
            (*body, *attachments) = (String::new(), Vec::new());
        }
        entry
    }

    /// Returns the attachments of the entry after the changes in `state`.
    #[must_use]
    pub fn attachments<'a>(&'a self, state: Option<&'a EntryState>) -> &'a [Attachment] {
        match state.and_then(|state| state.content.as_ref()) {
            None => self.content.attachments(),
            Some(changed) => {
                let content = changed.content.as_ref();
                content.map_or(&[], |content| &content.attachments)
            }
        }
    }

    /// Returns the entry as people see it after the changes in `state`.
    #[must_use]
    pub fn as_changed(&self, state: &EntryState) -> Self {
        let mut entry = self.clone();
        if let (
            Some(ContentState { content, .. }),
            Content::Text {
                body, attachments, ..
            },
        ) = (&state.content, &mut entry.content)
        {
            let content = content.clone().unwrap_or_default();
            (*body, *attachments) = (content.body, content.attachments);
        }
        entry
    }

    /// Returns the entry as inboxes show it, with the changes in `state`.
    #[must_use]
    pub fn newest(&self, state: Option<&EntryState>) -> Newest {
        let mut last = match state {
            Some(state) if state.content.is_some() => self.as_changed(state).last(),
            Some(_) | None => self.last(),
        };
        last.deleted = state.is_some_and(EntryState::is_deleted);
        Newest {
            last,
            changes: state.map_or(0, EntryState::changes),
            texts: self.texts,
        }
    }
}

/// Returns the approximate bytes of reactions in an event. Escapes of JSON do not count.
#[must_use]
pub fn reactions_bytes(reactions: &Reactions) -> usize {
    /// Bytes of a count and of what surrounds an emoji.
    const COUNT: usize = 24;
    reactions.keys().map(|emoji| emoji.len() + COUNT).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_highest_deleted_seqs_are_kept() {
        let mut deleted = DeletedSeqs::default();
        let kept = DELETED_SEQS_KEPT as Seq;
        for seq in (1..=kept + 10).rev() {
            deleted.add(seq);
        }
        assert_eq!(deleted.count, kept + 10);
        assert_eq!(deleted.highest, (11..=kept + 10).collect::<Vec<_>>());
    }

    #[test]
    fn a_state_takes_over_only_what_is_newer() {
        let reactions = |rev| EntryState {
            content: None,
            reactions: Some(ReactionState {
                rev,
                reactions: Reactions::from([("a".into(), rev)]),
            }),
        };
        let mut state = reactions(5);
        state.merge(&reactions(4));
        assert_eq!(state, reactions(5));
        state.merge(&reactions(6));
        assert_eq!(state, reactions(6));
        assert_eq!(state.rev(), 6);
    }
}
