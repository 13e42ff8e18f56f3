//! Handles edits, deletions and reactions: checks each, and appends it to the log of changes.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::time::{Instant, sleep};

use super::{
    Done, Owner, OwnerReply, ReadReactors, Reply,
    changes::PendingChange,
    files::{includes, kept},
    write_until_stored,
};
use crate::{
    chat::{
        error::Error,
        operation::{
            DeleteMessages, EditMessage, GetReactors, NewContent, Outcome, React, Reactors,
        },
        states::KnownEntry,
    },
    clock,
    model::{
        Attachment, Change, ChangeOp, Content, DeletedEntry, EditedContent, Entry, EntryState,
        Kind, Millis, Participant, Rev, Role, Seq, UserId, file_ids,
        limits::{
            DELETE_SEQS_MAX, DELETED_EDITS_MAX, EDITS_MAX, EMOJI_MAX, EMOJI_OF_USER_AT_ONCE_MAX,
            EMOJI_OF_USER_MAX, REACTIONS_REST,
        },
        text,
    },
    mutation::{Mutation, Step, broken, took},
};

/// What follows from the check of a change.
enum Checked {
    /// The change is appended.
    New(ChangeOp, Option<Millis>),
    /// The change of this rev did the same before. 0 means that it was applied before this owner knew it.
    DoneBefore(Rev),
}

impl Owner {
    pub(super) fn edit(&mut self, actor: UserId, edit: &EditMessage, reply: Reply) {
        let checked = self.check_edit(&actor, edit);
        self.change_entry(actor, checked, reply);
    }

    pub(super) fn delete(&mut self, actor: UserId, delete: &DeleteMessages, reply: Reply) {
        let checked = self.check_deletion(&actor, delete);
        self.change_entry(actor, checked, reply);
    }

    pub(super) fn react(&mut self, actor: UserId, react: &React, reply: Reply) {
        let checked = self.check_reaction(&actor, react);
        self.change_entry(actor, checked, reply);
    }

    /// Appends a change that was checked, or refuses it.
    fn change_entry(&mut self, actor: UserId, checked: Result<Checked, Error>, reply: Reply) {
        match checked {
            Ok(Checked::New(op, at)) => self.append_to_changes(actor, op, at, reply),
            Ok(Checked::DoneBefore(rev)) => self.repeated_in_changes(rev, reply),
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    /// Answers a change that an earlier one made, as soon as that one is acknowledged.
    fn repeated_in_changes(&mut self, rev: Rev, reply: Reply) {
        if rev > self.changes.applied
            && let Some(pending) = self.changes.log.get_mut(rev)
        {
            return pending.replies.push(reply);
        }
        let rev = self.changes.applied;
        drop(reply.send(Ok(OwnerReply::Ready(Outcome::Revised { rev }))));
    }

    /// Appends a change. Its row is written at the end of this round.
    fn append_to_changes(&mut self, by: UserId, op: ChangeOp, at: Option<Millis>, reply: Reply) {
        let at = at.unwrap_or_else(clock::wall);
        let appended = self.changes.log.append(|rev| {
            let change = Arc::new(Change {
                rev,
                by,
                at,
                op: numbered(op, rev),
            });
            PendingChange {
                change,
                replies: vec![reply],
            }
        });
        let Some(row) = appended else {
            // It does not happen, because `park` keeps changes while the log is full. The caller sees an unavailable owner.
            debug_assert!(false, "the log of changes is full");
            return;
        };
        let change = row.record.clone();
        self.changes.states.append(&change);
        if let ChangeOp::Delete { deleted, .. } = &change.op {
            self.changes.deleted = (change.rev, deleted.clone());
        }
        self.changes.unwritten.push(row);
        took(Step::Appended);
    }

    /// Starts one write of all changes appended in this round. Reactions that come while earlier changes are being stored
    /// wait for [`REACTIONS_REST`]: so a message with many reactions costs a bounded number of writes.
    pub(super) fn write_changes(&mut self) {
        let changes = &mut self.changes;
        if changes.unwritten.is_empty() {
            return;
        }
        let first = changes.log.next() - changes.unwritten.len() as Rev;
        let are_stored = first == changes.applied + 1;
        let only_reactions = changes.unwritten.iter().all(|row| row.record.is_reaction());
        if !only_reactions || !changes.log.can_append() || (are_stored && !changes.is_resting) {
            self.start_writing_changes();
        } else if !changes.is_resting {
            changes.is_resting = true;
            let rest = sleep(REACTIONS_REST).map(|()| Done::ChangesRested);
            self.work.push(Box::pin(rest));
        }
    }

    /// Writes the reactions that waited.
    pub(super) fn changes_rested(&mut self) {
        self.changes.is_resting = false;
        if self.ownership.holds(Instant::now()) {
            self.start_writing_changes();
        } else {
            self.failed = Some(Error::Closed);
        }
    }

    fn start_writing_changes(&mut self) {
        if self.changes.unwritten.is_empty() {
            return;
        }
        let rows = std::mem::take(&mut self.changes.unwritten);
        let next = self.changes.log.next();
        let written = next - rows.len() as Rev..next;
        let activity = self
            .environment
            .new_activity(&mut self.changes.active_minute);
        let first = self.first_offsets();
        self.writing += 1;
        let (id, environment, ownership) =
            (self.id, self.environment.clone(), self.ownership.clone());
        self.work.push(Box::pin(async move {
            let write = |activity| environment.store.append_changes(id, &rows, activity);
            match write_until_stored(&environment, &ownership, first, activity, write).await {
                Ok(()) => {
                    took(Step::RowWritten);
                    Done::ChangesWritten(written)
                }
                Err(error) => Done::Lost(error),
            }
        }));
    }

    /// The entry that an operation names, which is known by now.
    fn entry_to_change(&mut self, seq: Seq) -> Result<&KnownEntry, Error> {
        let no_message = || Error::invalid("there is no such message");
        if seq == 0 || seq > self.log.head() {
            return Err(no_message());
        }
        if self.changes.states.entry(seq).is_none()
            && let Some([entry]) = self.recent.range(seq, seq).as_deref()
        {
            // The states of all recent entries that changed are known.
            let entry = entry.clone();
            self.changes.states.know(entry, EntryState::default());
        }
        let known = self.changes.states.entry(seq).ok_or_else(no_message)?;
        match known.entry.content {
            Content::Text { .. } => Ok(known),
            Content::System(_) => Err(Error::invalid("this entry is no message of a person")),
        }
    }

    fn participant(&self, actor: &UserId) -> Result<&Participant, Error> {
        let participants = self.known()?;
        participants.check_in(actor)
    }

    fn check_edit(&mut self, actor: &UserId, edit: &EditMessage) -> Result<Checked, Error> {
        let participants = self.known()?;
        if edit.at.is_none() {
            // A new text is a post.
            participants.check_posting(actor)?;
        } else {
            participants.check_in(actor)?;
        }
        if edit.base_rev > Some(self.changes.log.head()) {
            return Err(Error::Invalid("base_rev is above the newest rev".into()));
        }
        let window = self.environment.settings.edit_window;
        let before = self.attachments_of(edit.seq)?;
        let new = self.edited(&edit.content, &before)?;
        let known = self.entry_to_change(edit.seq)?;
        if known.entry.sender != *actor {
            return Err(Error::Forbidden(
                "a message is edited by its sender only".into(),
            ));
        }
        if edit.at.is_none() && !is_in_window(&known.entry, window) {
            return Err(Error::Forbidden(
                "this message may not be edited any more".into(),
            ));
        }
        let mut edits = Vec::new();
        if let Some(state) = &known.appended.content {
            let Some(content) = &state.content else {
                return Err(deleted());
            };
            if *content == new && edit.at.is_none() {
                return Ok(Checked::DoneBefore(state.rev));
            }
            // Rule [base-rev]: a repeated edit never undoes a newer one.
            if edit.base_rev.is_some_and(|base| state.rev > base) && !broken(Mutation::BaseRev) {
                return Err(Error::Conflict("the message was changed meanwhile".into()));
            }
            edits.clone_from(&state.edits);
        } else if has_content(&known.entry, &new) && edit.at.is_none() {
            return Ok(Checked::DoneBefore(0));
        }
        if edits.len() >= EDITS_MAX {
            return Err(too_large("edits of a message", EDITS_MAX));
        }
        let op = ChangeOp::Edit {
            seq: edit.seq,
            dropped: file_ids(&before)
                .filter(|file| !includes(&new.attachments, *file))
                .collect(),
            content: Some(new),
            edits,
        };
        Ok(Checked::New(op, edit.at))
    }

    /// The attachments of a message after all appended changes.
    fn attachments_of(&mut self, seq: Seq) -> Result<Vec<Attachment>, Error> {
        Ok(self.entry_to_change(seq)?.attachments().to_vec())
    }

    /// Returns the content of a message after an edit. What the edit does not name stays.
    fn edited(&self, edit: &NewContent, before: &[Attachment]) -> Result<EditedContent, Error> {
        let attachments = match &edit.attachments {
            Some(given) => {
                self.check_attachments(given, before)?;
                kept(given, before)?
            }
            None => before.to_vec(),
        };
        self.check_body(&edit.body, &attachments)?;
        Ok(EditedContent {
            body: edit.body.clone(),
            attachments,
        })
    }

    fn check_deletion(
        &mut self,
        actor: &UserId,
        delete: &DeleteMessages,
    ) -> Result<Checked, Error> {
        if delete.seqs.is_empty() {
            return Err(Error::invalid("no messages are named"));
        }
        if delete.seqs.len() > DELETE_SEQS_MAX {
            return Err(too_large("messages to delete", DELETE_SEQS_MAX));
        }
        let kind = self.known()?.details.kind;
        let may_delete_any = delete.as_moderator
            || (self.participant(actor)?.role >= Role::Admin && kind != Kind::Dm);
        let mut seqs = delete.seqs.clone();
        seqs.sort_unstable();
        seqs.dedup();
        let (mut before, mut entries) = (0, Vec::new());
        for seq in seqs {
            let known = self.entry_to_change(seq)?;
            if known.entry.sender != *actor && !may_delete_any {
                return Err(Error::Forbidden(
                    "only admins may delete the messages of others".into(),
                ));
            }
            match &known.appended.content {
                Some(state) if state.is_deleted() => before = state.rev.max(before),
                state => entries.push(DeletedEntry {
                    seq,
                    edits: state.as_ref().map_or(Vec::new(), |s| s.edits.clone()),
                    files: file_ids(known.attachments()).collect(),
                }),
            }
        }
        if entries.is_empty() {
            return Ok(Checked::DoneBefore(before));
        }
        let edits: usize = entries.iter().map(|entry| entry.edits.len()).sum();
        if edits > DELETED_EDITS_MAX {
            return Err(too_large(
                "edits of the messages to delete",
                DELETED_EDITS_MAX,
            ));
        }
        let mut deleted = self.changes.deleted.1.clone();
        entries.iter().for_each(|entry| deleted.add(entry.seq));
        let op = ChangeOp::Delete { entries, deleted };
        Ok(Checked::New(op, delete.at))
    }

    fn check_reaction(&mut self, actor: &UserId, react: &React) -> Result<Checked, Error> {
        self.participant(actor)?;
        let React { seq, on, at, .. } = *react;
        let emoji = self.stored_emoji(actor, react)?;
        let known = self.entry_to_change(seq)?;
        if known.appended.is_deleted() {
            return Err(deleted());
        }
        let state = known.appended.reactions.as_ref();
        let mut reactions = state.map_or_else(Default::default, |state| state.reactions.clone());
        let toggles = self.changes.states.reactions_of(seq, actor);
        let ever = toggles.map_or(0, BTreeMap::len);
        let is_new = toggles.is_none_or(|toggles| !toggles.contains_key(&emoji));
        let (rev, was_on) = toggles
            .and_then(|toggles| toggles.get(&emoji))
            .copied()
            .unwrap_or_default();
        if was_on == on {
            return Ok(Checked::DoneBefore(rev));
        }
        if on {
            if reactions.len() >= EMOJI_MAX && !reactions.contains_key(&emoji) {
                return Err(too_large("different emoji of a message", EMOJI_MAX));
            }
            let at_once =
                toggles.map_or(0, |toggles| toggles.values().filter(|(_, on)| *on).count());
            // Elsewhere, where imported reactions come from, there may have been no such limit.
            if at.is_none() && at_once >= EMOJI_OF_USER_AT_ONCE_MAX {
                let what = "emoji of one user to a message at once";
                return Err(too_large(what, EMOJI_OF_USER_AT_ONCE_MAX));
            }
            if is_new && ever >= EMOJI_OF_USER_MAX {
                let what = "different emoji of one user to a message";
                return Err(too_large(what, EMOJI_OF_USER_MAX));
            }
            *reactions.entry(emoji.clone()).or_default() += 1;
        } else if let Some(count) = reactions.get_mut(&emoji) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                reactions.remove(&emoji);
            }
        }
        let op = ChangeOp::React {
            seq,
            emoji,
            on,
            reactions,
        };
        Ok(Checked::New(op, at))
    }

    /// Returns the emoji of a reaction as it is stored. One that is removed may have been stored in another form, or when
    /// other texts were allowed. If it was removed before, this is its repetition, which must not remove another form.
    fn stored_emoji(&self, actor: &UserId, react: &React) -> Result<String, Error> {
        let React { seq, emoji, on, .. } = react;
        let own = self.changes.states.reactions_of(*seq, actor);
        if !on && own.is_some_and(|own| own.contains_key(emoji)) {
            return Ok(emoji.clone());
        }
        text::emoji(emoji).map_err(|wrong| Error::invalid(format!("{emoji:?} {wrong}")))
    }

    /// Answers the question for the changes after a rev.
    pub(super) fn changes_after(
        &self,
        actor: UserId,
        after: Rev,
        limit: usize,
    ) -> Result<OwnerReply, Error> {
        self.view()?;
        let bytes_max = self.environment.settings.page_bytes_max;
        Ok(match self.changes.page(after, limit, bytes_max) {
            Ok(page) => OwnerReply::Changes { actor, page },
            Err(revs) => OwnerReply::ReadChanges {
                actor,
                after,
                revs,
                applied: self.changes.applied,
            },
        })
    }

    /// Answers the question who reacted to an entry.
    pub(super) fn reactors(&self, actor: &UserId, asked: GetReactors) -> Result<OwnerReply, Error> {
        let view = self.view()?;
        view.check_reading(actor)?;
        if asked.seq == 0 || asked.seq > self.log.head() {
            return Err(Error::invalid("there is no such message"));
        }
        // The states of all recent entries that changed are known.
        let known = self.changes.states.entry(asked.seq);
        let is_deleted = known.map(|known| known.applied.is_deleted());
        let is_recent = || self.recent.range(asked.seq, asked.seq).is_some();
        match is_deleted.or_else(|| is_recent().then_some(false)) {
            Some(true) => Ok(OwnerReply::Ready(Outcome::Reactors(Reactors::default()))),
            is_deleted => Ok(OwnerReply::ReadReactors(ReadReactors {
                kind: view.details.kind,
                asked,
                is_there: is_deleted.is_some(),
            })),
        }
    }
}

/// Completes a change with its own rev.
fn numbered(mut op: ChangeOp, rev: Rev) -> ChangeOp {
    if let ChangeOp::Edit { edits, .. } = &mut op {
        edits.push(rev);
    }
    op
}

fn has_content(entry: &Entry, content: &EditedContent) -> bool {
    match &entry.content {
        Content::Text {
            body, attachments, ..
        } => *body == content.body && *attachments == content.attachments,
        Content::System(_) => false,
    }
}

fn is_in_window(entry: &Entry, window: Option<Duration>) -> bool {
    window.is_none_or(|window| {
        let window = Millis::try_from(window.as_millis()).unwrap_or(Millis::MAX);
        clock::wall().saturating_sub(entry.at) <= window
    })
}

fn deleted() -> Error {
    Error::Conflict("the message was deleted".into())
}

fn too_large(what: &'static str, max: usize) -> Error {
    Error::TooLarge {
        what: what.into(),
        max,
    }
}
