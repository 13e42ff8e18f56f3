//! Takes over the log of changes from a previous owner: settles the changes that are uncertain, and stores their effects
//! again.

use std::sync::Arc;

use super::{
    Owner,
    applying::{Effects, Erasing, changes_at},
    changes::{ChangeLog, PendingChange},
};
use crate::{
    chat::{
        error::Error,
        lease::Ownership,
        log::{Log, Takeover},
        open::Loading,
        recent::RecentEntries,
        states::States,
    },
    model::{ChangeOp, ConversationId, EntryState, Rev, Seq},
    mutation::{Mutation, Step, broken, took},
    store::{ChangeRow, ChangesTail},
};

/// The log of changes that a takeover found.
pub(super) struct TakenChanges;

impl TakenChanges {
    /// Returns the valid log of a tail, and its uncertain rows. `states` are those of the newest entries; the changed ones
    /// in `recent` are known from now on.
    ///
    /// # Errors
    /// When the log is damaged.
    pub(super) fn of(
        id: ConversationId,
        tail: Option<ChangesTail>,
        states: Vec<(Seq, EntryState)>,
        recent: &RecentEntries,
        ownership: &Ownership,
    ) -> Result<(ChangeLog, Vec<ChangeRow>), Error> {
        let mut known = States::default();
        for (seq, state) in states {
            if let Some([entry]) = recent.range(seq, seq).as_deref() {
                let entry = if state.is_deleted() {
                    Arc::new(entry.erased())
                } else {
                    entry.clone()
                };
                known.know(entry, state);
            }
        }
        let Some(ChangesTail { tail, deleted }) = tail else {
            let log = Log::empty(ownership.epoch());
            let changes = ChangeLog::new(log, known, (0, Default::default()));
            return Ok((changes, Vec::new()));
        };
        let stored_settled = tail.settled;
        let epoch = if broken(Mutation::ChangeEpoch) {
            1
        } else {
            ownership.epoch()
        };
        let taken = Log::<PendingChange>::take_over(&tail, epoch);
        let Takeover {
            log,
            records,
            settle,
        } = taken.map_err(|incomplete| {
            crate::seldom::seldom!(ERROR, "the log of changes is damaged: stop all gateways and run chat-gateway store mend", conversation = %id, %incomplete);
            Error::DAMAGED_CHANGES
        })?;
        let settled = log.settled();
        let deleted = Some(deleted).filter(|_| !broken(Mutation::DeletedKept));
        let mut changes = ChangeLog::new(log, known, deleted.unwrap_or_default());
        changes.stored_settled = stored_settled;
        for change in records.iter().filter(|change| change.rev <= settled) {
            changes.remember(change);
        }
        Ok((changes, settle))
    }
}

impl Owner {
    /// Writes uncertain changes again under this owner's epoch, and stores their effects.
    pub(super) async fn settle_changes_again(
        &mut self,
        settle: Vec<ChangeRow>,
        loading: &mut Loading,
    ) -> Result<(), Error> {
        for (seq, _) in self
            .changes
            .states
            .applied(self.recent.first(), self.log.head())
        {
            if self
                .changes
                .states
                .entry(seq)
                .is_some_and(|k| k.applied.is_deleted())
            {
                self.erase(seq);
            }
        }
        if settle.is_empty() {
            return Ok(());
        }
        took(Step::TakeoverRead);
        let (id, ownership, environment) =
            (self.id, self.ownership.clone(), self.environment.clone());
        let store = &environment.store;
        let activity = environment.activity();
        loading
            .retry_while_owner(&ownership, || store.append_changes(id, &[], Some(activity)))
            .await?;
        if !broken(Mutation::ChangeSettle) {
            loading
                .retry_while_owner(&ownership, || store.append_changes(id, &settle, None))
                .await?;
        }
        took(Step::TakeoverSettled);
        crate::seldom::seldom!(INFO, "uncertain changes settled", conversation = %id, changes = settle.len());
        for row in settle {
            self.know_changed(&row, loading).await?;
            let change = row.record;
            self.changes.states.append(&change);
            if let ChangeOp::Delete { deleted, .. } = &change.op {
                self.changes.deleted = (change.rev, deleted.clone());
            }
            self.changes.log.restore(PendingChange {
                change,
                replies: Vec::new(),
            });
        }
        let revs = self.changes.applied + 1..self.changes.log.head() + 1;
        // Rule [reapply]: the previous owner may not have stored their effects.
        self.reapply(revs, loading).await
    }

    /// Reads the entries that a change names, if they are not known.
    async fn know_changed(&mut self, row: &ChangeRow, loading: &mut Loading) -> Result<(), Error> {
        let (id, store) = (self.id, self.environment.store.clone());
        let ownership = self.ownership.clone();
        for seq in row.record.seqs() {
            if self.changes.states.entry(seq).is_some() {
                continue;
            }
            let page = loading
                .retry_while_owner(&ownership, || store.log(id, seq, seq))
                .await?;
            let state = page.states.into_iter().next().map(|(_, state)| state);
            if let Some(row) = page.rows.into_iter().next() {
                let state = state.unwrap_or_default();
                self.changes.states.know(row.record, state);
            }
        }
        Ok(())
    }

    async fn reapply(
        &mut self,
        revs: std::ops::Range<Rev>,
        loading: &mut Loading,
    ) -> Result<(), Error> {
        let changes: Vec<_> = changes_at(&self.changes.log, revs.clone())
            .cloned()
            .collect();
        let mut effects = Effects::of(changes.iter().map(AsRef::as_ref), &self.changes.states);
        effects.applied.inbox = self.corrected_inboxes(&effects);
        let kind = self.participants.as_ref().map(|p| p.details.kind);
        if let Some(kind) = kind
            && !broken(Mutation::ChangeReapply)
        {
            let (id, store) = (self.id, self.environment.store.clone());
            let ownership = self.ownership.clone();
            let applied = &effects.applied;
            loading
                .retry_while_owner(&ownership, || store.apply_changes(id, kind, applied))
                .await?;
            took(Step::TakeoverApplied);
            let erasing = Erasing::new(&effects.erasures);
            loading
                .retry_while_owner(&ownership, || erasing.attempt(&*store, id))
                .await?;
            if !effects.erasures.is_empty() {
                took(Step::TakeoverErased);
            }
        }
        self.changes.applied = revs.end - 1;
        for change in &changes {
            self.include(change);
        }
        Ok(())
    }

    /// Publishes the changes that the takeover settled. The previous owner may not have published them.
    pub(super) fn publish_taken_over(&mut self) {
        let revs = self.changes.log.settled() + 1..self.changes.log.head() + 1;
        if revs.is_empty() {
            return;
        }
        if broken(Mutation::ChangePublish) {
            return self.release_changes(revs);
        }
        self.publish_changes(Some(revs));
        took(Step::TakeoverPublished);
    }
}
