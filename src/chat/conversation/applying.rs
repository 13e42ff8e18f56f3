//! Carries out committed changes in rounds: stores their effects, acknowledges them, and publishes them.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use futures_util::FutureExt;
use tokio::time::{Instant, sleep};

use super::{
    Done, Owner, changes::PendingChange, files::references, publishing::arrived, retry_while_owner,
};
use crate::{
    chat::{
        changed_items,
        error::Error,
        lease::Ownership,
        log::Log,
        participants::Participants,
        publish::{
            Audience, Changed, Confirmation, Publication, Reacted, Recipients, RedeliveryGuard,
        },
        states::States,
    },
    model::{
        Change, ChangeOp, ConversationId, Cursor, Entry, EntryState, Kind, Newest, Rev, Seq,
        UserId,
        limits::{CHANGED_BYTES_MAX, CHANGES_CONFIRMED_PARTICIPANTS_MAX, CHANGES_UNTOLD_MAX},
    },
    mutation::{Mutation, Step, broken, die, is_fatal, took},
    store::{self, AppliedChanges, Erasure, InboxWrite, ReactorRow, Store},
};

/// The rows that follow from the changes of one round.
#[derive(Default)]
pub(super) struct Effects {
    pub applied: AppliedChanges,
    pub erasures: Vec<Erasure>,
}

impl Effects {
    /// The effects of some changes, merged: the last state of an entry wins.
    pub(super) fn of<'a>(changes: impl Iterator<Item = &'a Change>, states: &States) -> Self {
        let mut effects = Self::default();
        let mut merged = std::collections::BTreeMap::<Seq, EntryState>::new();
        for change in changes {
            for (seq, state) in change.states() {
                merged.entry(seq).or_default().merge(&state);
            }
            let references = references(&change.op, change.rev);
            effects.applied.references.extend(references);
            match &change.op {
                ChangeOp::React { seq, emoji, on, .. } => {
                    effects.applied.reactors.push(ReactorRow {
                        seq: *seq,
                        emoji: emoji.clone(),
                        user: change.by.clone(),
                        rev: change.rev,
                        on: *on,
                        at: change.at,
                    });
                }
                ChangeOp::Delete { entries, deleted } => {
                    effects.applied.deleted = Some((change.rev, deleted.clone()));
                    for deleted in entries {
                        // The entry is known: it was when the change was checked or taken over.
                        let known = states.entry(deleted.seq);
                        effects.erasures.extend(known.map(|known| Erasure {
                            seq: deleted.seq,
                            sender: known.entry.sender.clone(),
                            client_id: known.entry.client_id,
                            edits: deleted.edits.clone(),
                        }));
                    }
                }
                ChangeOp::Edit { .. } => {}
            }
        }
        effects.applied.states = merged.into_iter().collect();
        effects
    }

    fn change_content(&self) -> bool {
        self.applied.states.iter().any(|(_, s)| s.content.is_some())
    }
}

/// The erasure of some entries. An attempt continues where the one before it failed, with fewer entries at once. So many
/// entries are erased also while some reads of the store fail.
pub(super) struct Erasing<'a> {
    erasures: &'a [Erasure],
    done: AtomicUsize,
    at_once: AtomicUsize,
}

impl<'a> Erasing<'a> {
    pub(super) fn new(erasures: &'a [Erasure]) -> Self {
        Self {
            erasures,
            done: AtomicUsize::new(0),
            at_once: AtomicUsize::new(erasures.len()),
        }
    }

    /// Erases the entries that are left.
    pub(super) async fn attempt(&self, store: &dyn Store, id: ConversationId) -> store::Result<()> {
        loop {
            let left = &self.erasures[self.done.load(Ordering::Relaxed)..];
            if left.is_empty() {
                return Ok(());
            }
            let count = self.at_once.load(Ordering::Relaxed).clamp(1, left.len());
            self.at_once.store(count / 2, Ordering::Relaxed);
            store.erase(id, &left[..count]).await?;
            self.at_once.store(count, Ordering::Relaxed);
            self.done.fetch_add(count, Ordering::Relaxed);
        }
    }
}

/// Stores the effects of a round, and erases the texts that it deletes.
async fn store_effects(
    id: ConversationId,
    kind: Kind,
    effects: Effects,
    store: &dyn Store,
    ownership: &Ownership,
) -> store::Result<()> {
    let Effects {
        mut applied,
        erasures,
    } = effects;
    let is_last = cut_at_step(&mut applied);
    retry_while_owner(ownership, || store.apply_changes(id, kind, &applied)).await?;
    if is_last {
        die();
    }
    took(Step::EffectsWritten);
    if !erasures.is_empty() && !broken(Mutation::Erase) {
        let erasing = Erasing::new(&erasures);
        retry_while_owner(ownership, || erasing.attempt(store, id)).await?;
        took(Step::Erased);
    }
    Ok(())
}

/// Leaves out the rows that are written after a step, if a test lets the owner die after it. Returns whether it does.
fn cut_at_step(applied: &mut AppliedChanges) -> bool {
    let steps = [
        Step::StatesWritten,
        Step::ReactorsWritten,
        Step::InboxWritten,
    ];
    let Some(step) = steps.iter().position(|&step| is_fatal(step)) else {
        return false;
    };
    if step < 1 {
        applied.reactors.clear();
    }
    if step < 2 {
        applied.inbox.clear();
    }
    applied.deleted = None;
    true
}

/// The changes at these revs, which are not settled yet.
pub(super) fn changes_at(
    log: &Log<PendingChange>,
    revs: Range<Rev>,
) -> impl Iterator<Item = &Arc<Change>> {
    revs.filter_map(|rev| log.get(rev)).map(|p| &p.change)
}

impl Owner {
    /// Handles the end of a write of changes.
    pub(super) fn changes_written(&mut self, revs: Range<Rev>) {
        self.writing -= 1;
        self.changes.log.written(revs);
        let holds = self.ownership.holds(Instant::now());
        if !holds {
            self.failed = Some(Error::Closed);
        }
        self.changes.log.commit(holds);
        took(Step::Committed);
        self.start_round();
    }

    /// Stores the effects of all committed changes that are not applied yet, if no other round is in progress.
    pub(super) fn start_round(&mut self) {
        let revs = self.changes.applied + 1..self.changes.log.head() + 1;
        if self.changes.round.is_some() || revs.is_empty() {
            return;
        }
        let changes = changes_at(&self.changes.log, revs.clone());
        let mut effects = Effects::of(changes.map(AsRef::as_ref), &self.changes.states);
        effects.applied.inbox = self.corrected_inboxes(&effects);
        self.changes.round = Some(revs.clone());
        if broken(Mutation::ChangeEffects) {
            // A change is acknowledged before its effects are stored.
            self.answer_changes(revs.clone());
        }
        let kind = self.participants.as_ref().map(|p| p.details.kind);
        let (id, environment, ownership) =
            (self.id, self.environment.clone(), self.ownership.clone());
        self.work.push(Box::pin(async move {
            let Some(kind) = kind else {
                return Done::ChangesApplied(revs);
            };
            let stored = store_effects(id, kind, effects, &*environment.store, &ownership).await;
            match stored {
                Ok(()) => Done::ChangesApplied(revs),
                Err(error) => Done::Lost(error),
            }
        }));
    }

    /// The inbox rows that an edit or a deletion corrects. Rule [face-newest]: they show the newest entry again, because
    /// the stored row may still show the changed one.
    pub(super) fn corrected_inboxes(&mut self, effects: &Effects) -> Vec<InboxWrite> {
        if !effects.change_content() {
            return Vec::new();
        }
        let of_round = |seq| {
            let states = &effects.applied.states;
            states
                .iter()
                .find(|(s, _)| *s == seq)
                .map(|(_, state)| state.clone())
        };
        let newest = self.newest_queued(of_round);
        let audience = self
            .participants
            .as_mut()
            .and_then(|p| p.audience_committed());
        let Some(Audience::Members(members)) = audience else {
            return Vec::new();
        };
        let newest = newest.filter(|_| !broken(Mutation::InboxCorrection));
        if let Some(newest) = &newest {
            self.environment.inbox.correct(self.id, newest);
        }
        let deleted = &effects.applied.deleted;
        let write = |(user, joined_seq): &(_, Seq)| InboxWrite {
            summary: newest
                .as_ref()
                .map(|newest| members.summary(user, *joined_seq, newest)),
            deleted: deleted.clone().filter(|_| !broken(Mutation::DeletedSeqs)),
            ..InboxWrite::of(user.clone(), self.id, members.kind)
        };
        members.users.iter().map(write).collect()
    }

    /// The newest entry that was delivered, with its applied state and that of the round. Rule [flush]: no inbox row is
    /// ahead of the delivery.
    fn newest_queued(&self, of_round: impl Fn(Seq) -> Option<EntryState>) -> Option<Newest> {
        let queued = self.queued;
        let entries = self.recent.range(queued, queued);
        let entry = match entries.as_deref() {
            Some([entry]) => entry,
            // So many entries are not delivered yet that it left memory. A later one is as good for the rows.
            _ => match self.changes.states.entry(queued) {
                Some(known) => &known.entry,
                None => self.recent.oldest()?,
            },
        };
        let known = self.changes.states.entry(entry.seq);
        let mut state = known.map_or_else(EntryState::default, |k| k.applied.as_ref().clone());
        if let Some(newer) = of_round(entry.seq) {
            state.merge(&newer);
        }
        Some(entry.newest(Some(&state)))
    }

    /// An entry with its applied state and that of the round in progress. That round corrected the inbox rows before this
    /// entry was delivered, so the entry's own row must have the change.
    pub(super) fn shown_in_round(&self, entry: &Entry) -> Newest {
        let known = self.changes.states.entry(entry.seq);
        let mut state = known.map_or_else(EntryState::default, |k| k.applied.as_ref().clone());
        let round = self.changes.round.clone().unwrap_or_default();
        for change in changes_at(&self.changes.log, round) {
            let states = change.states().into_iter();
            states
                .filter(|(seq, _)| *seq == entry.seq)
                .for_each(|(_, newer)| state.merge(&newer));
        }
        entry.newest(Some(&state))
    }

    /// Handles the end of a round: its effects are stored.
    pub(super) fn changes_applied(&mut self, revs: Range<Rev>) {
        self.changes.round = None;
        // Rule [ack-lease]: the lease is checked after the effects, before the acknowledgement.
        if !self.ownership.holds(Instant::now()) {
            self.failed = Some(Error::Closed);
            return;
        }
        let changes: Vec<_> = changes_at(&self.changes.log, revs.clone())
            .cloned()
            .collect();
        self.changes.applied = revs.end - 1;
        for change in &changes {
            self.include(change);
            for gone in references(&change.op, change.rev) {
                if !gone.on {
                    self.environment.publish.drop_file(self.id, gone.file);
                }
            }
        }
        let only_reactions = changes.iter().all(|change| change.is_reaction());
        took(Step::Applied);
        self.answer_changes(revs.clone());
        took(Step::Acknowledged);
        self.environment
            .changes_committed
            .increment(changes.len() as u64);
        for change in &changes {
            self.tell_reactor(change);
        }
        self.tell(revs, only_reactions);
        self.tell_consumers();
        took(Step::Published);
        self.start_round();
    }

    /// Includes an applied change in everything that replies contain, and erases the texts that it deletes.
    pub(super) fn include(&mut self, change: &Arc<Change>) {
        self.changes.apply(change);
        if let ChangeOp::Delete { entries, .. } = &change.op {
            for deleted in entries {
                self.erase(deleted.seq);
            }
        }
    }

    /// Erases the text of a deleted entry in memory, also that of an entry which a takeover is about to publish again.
    pub(super) fn erase(&mut self, seq: Seq) {
        self.recent.erase(seq);
        if let Some(pending) = self.log.get_mut(seq) {
            pending.erase();
        }
    }

    fn answer_changes(&mut self, revs: Range<Rev>) {
        for rev in revs {
            if let Some(pending) = self.changes.log.get_mut(rev) {
                pending.answer();
            }
        }
    }

    /// Publishes applied changes. Reactions in channels and large groups wait for more.
    fn tell(&mut self, revs: Range<Rev>, only_reactions: bool) {
        let audience = self
            .participants
            .as_mut()
            .and_then(|p| p.audience_committed());
        let is_confirmed = match &audience {
            Some(Audience::Members(members)) => {
                members.users.len() <= CHANGES_CONFIRMED_PARTICIPANTS_MAX
            }
            Some(Audience::Channel | Audience::User(_)) | None => false,
        };
        if is_confirmed {
            return self.publish_changes(Some(revs));
        }
        self.release_changes(revs);
        let untold = self.changes.applied - self.changes.published;
        if !only_reactions || untold >= CHANGES_UNTOLD_MAX {
            self.publish_changes(None);
        } else if !self.changes.is_coalescing {
            self.changes.is_coalescing = true;
            let wait = self.environment.settings.reactions_coalesce;
            self.work
                .push(Box::pin(sleep(wait).map(|()| Done::ChangesDue)));
        }
    }

    /// Publishes what was gathered.
    pub(super) fn changes_due(&mut self) {
        self.changes.is_coalescing = false;
        self.publish_changes(None);
    }

    /// Publishes everything that is applied and not published. The changes at `held` are settled when it was delivered.
    pub(super) fn publish_changes(&mut self, held: Option<Range<Rev>>) {
        let (after, rev) = (self.changes.published, self.changes.applied);
        let audience = self
            .participants
            .as_mut()
            .and_then(|p| p.audience_committed());
        let Some(audience) = audience.filter(|_| after < rev) else {
            held.into_iter().for_each(|revs| self.release_changes(revs));
            return;
        };
        let members = match &audience {
            Audience::Members(members) => Some(members.clone()),
            Audience::Channel | Audience::User(_) => None,
        };
        let changes: Vec<Arc<Change>> = match self.changes.since(after) {
            Some(changes) => changes.cloned().collect(),
            None => Vec::new(),
        };
        self.changes.published = rev;
        let mut rest = changes.as_slice();
        let mut from = after;
        loop {
            let fitting = changed_items::fitting(rest.iter().map(AsRef::as_ref), CHANGED_BYTES_MAX);
            let (part, later) = rest.split_at(fitting.min(rest.len()));
            let upto = part.last().map_or(rev, |last| last.rev);
            let changed = Arc::new(self.changed(from, upto, part));
            let is_last = later.is_empty();
            let held = if is_last { held.clone() } else { None };
            self.publish_part(upto, changed, audience.clone(), members.clone(), held);
            if is_last {
                return;
            }
            (from, rest) = (upto, later);
        }
    }

    /// Publishes the changes up to a rev. Edits and deletions are delivered for certain, so that no text that is gone stays
    /// visible; reactions in large groups and channels may be missed.
    fn publish_part(
        &mut self,
        rev: Rev,
        changed: Arc<Changed>,
        audience: Audience,
        members: Option<Arc<Recipients>>,
        held: Option<Range<Rev>>,
    ) {
        let changes_content = changed.items.iter().any(|item| item.content.is_some());
        let is_confirmed = held.is_some() || (changes_content && members.is_some());
        let at = Cursor(0, rev);
        let publication = Publication::changed(self.id, at, changed, audience, is_confirmed);
        match self.environment.publish.publish(publication) {
            Confirmation::Pending(delivered) => {
                let delivered = arrived(delivered).map(move |guard| Done::ChangesDelivered {
                    revs: held.unwrap_or_default(),
                    guard,
                    members,
                    rev,
                });
                self.work.push(Box::pin(delivered));
            }
            Confirmation::Immediate => {
                let inbox = &self.environment.inbox;
                members
                    .into_iter()
                    .for_each(|m| inbox.queue_rev(self.id, m, rev));
                held.into_iter().for_each(|revs| self.release_changes(revs));
            }
        }
    }

    /// The publication of changes in (after, rev]. Without the changes, whoever lacks them asks.
    fn changed(&self, after: Rev, rev: Rev, changes: &[Arc<Change>]) -> Changed {
        let (mut changes_content, mut deleted) = (changes.is_empty(), None);
        for change in changes {
            match &change.op {
                ChangeOp::Edit { .. } => changes_content = true,
                ChangeOp::Delete { deleted: after, .. } => {
                    changes_content = true;
                    deleted = Some(Arc::new(after.clone()));
                }
                ChangeOp::React { .. } => {}
            }
        }
        let newest = changes_content
            .then(|| self.newest_queued(|_| None))
            .flatten();
        let items = changed_items::items(changes.iter().map(AsRef::as_ref));
        let bytes: usize = items.iter().map(changed_items::encoded_bytes).sum();
        let fits = bytes <= CHANGED_BYTES_MAX && !items.is_empty();
        Changed {
            after: if fits { after } else { rev },
            items: if fits { items } else { Vec::new() },
            newest: newest.map(Arc::new),
            deleted,
        }
    }

    /// Tells a user who joins which rev the conversation has reached. Rule [join-rev]: their inbox row may have a rev from
    /// an earlier time in the conversation, and they would not learn that they lack changes.
    pub(super) fn tell_rev(&mut self, user: &UserId) {
        let rev = self.changes.applied;
        let audience = self.participants.as_mut().map(Participants::audience);
        let Some(Audience::Members(members)) = audience.filter(|_| rev > 0) else {
            return;
        };
        let audience = Audience::Members(members.clone());
        let nothing = Changed {
            after: rev,
            items: Vec::new(),
            newest: None,
            deleted: None,
        };
        let (at, nothing) = (Cursor(0, rev), Arc::new(nothing));
        let to_all = Publication::changed(self.id, at, nothing.clone(), audience, true);
        let audience = to_all.to(std::slice::from_ref(user)).audience;
        // The rows of all get the rev, because one queued rev of a conversation replaces another.
        self.publish_part(
            rev,
            nothing,
            audience,
            Some(members),
            Some(Range::default()),
        );
    }

    /// Tells the other sessions of a user that they reacted.
    fn tell_reactor(&self, change: &Change) {
        if let ChangeOp::React { seq, emoji, on, .. } = &change.op {
            let reacted = Reacted {
                seq: *seq,
                emoji: emoji.clone(),
                on: *on,
                rev: change.rev,
            };
            let publication = Publication::reacted(self.id, reacted, change.by.clone());
            drop(self.environment.publish.publish(publication));
        }
    }

    /// Handles the delivery of changes to every gateway concerned.
    pub(super) fn changes_delivered(&mut self, revs: Range<Rev>, guard: RedeliveryGuard) {
        // The inbox rows with the rev are queued by now.
        took(Step::Delivered);
        drop(guard);
        self.release_changes(revs);
    }

    pub(super) fn release_changes(&mut self, revs: Range<Rev>) {
        if revs.is_empty() {
            return;
        }
        revs.for_each(|rev| self.changes.log.release(rev));
        // Parked changes may have waited for room in the log.
        self.unpark();
    }
}
