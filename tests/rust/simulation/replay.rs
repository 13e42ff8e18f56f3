//! Replays the log of changes, and compares it with what clients asked for and were told.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use chat_gateway::{
    chat::ChangedItem,
    model::{
        Change, ChangeOp, Content, ContentState, DeletedSeqs, EditedContent, Entry, EntryState,
        ReactionState, Reactions, Rev, Seq, UserId,
    },
};

use super::seen::{Request, Seen, Told, Wish};

/// The log of changes, and what follows from it.
pub(crate) struct Replay<'a> {
    changes: &'a [Arc<Change>],
    entries: &'a [Arc<Entry>],
    pub states: BTreeMap<Seq, EntryState>,
    /// The revs of the edits of each entry.
    pub edits: BTreeMap<Seq, Vec<Rev>>,
    /// The deleted entries, with the revs of their deletions.
    pub deleted: BTreeMap<Seq, Rev>,
    /// Each user's reactions: the revs that changed them, and whether they were on then.
    pub toggles: BTreeMap<(Seq, String, UserId), Vec<(Rev, bool)>>,
    /// For each entry, the revs that changed its content and those that changed its reactions.
    revs: BTreeMap<Seq, (Vec<Rev>, Vec<Rev>)>,
    pub findings: Vec<String>,
}

impl<'a> Replay<'a> {
    pub(crate) fn of(changes: &'a [Arc<Change>], entries: &'a [Arc<Entry>]) -> Self {
        let mut replay = Self {
            changes,
            entries,
            states: BTreeMap::new(),
            edits: BTreeMap::new(),
            deleted: BTreeMap::new(),
            toggles: BTreeMap::new(),
            revs: BTreeMap::new(),
            findings: Vec::new(),
        };
        let mut deleted = DeletedSeqs::default();
        for (change, rev) in changes.iter().zip(1..) {
            if change.rev != rev {
                replay.find(format!("rev {} is at {rev}", change.rev));
            }
            replay.add(change, &mut deleted);
        }
        replay
    }

    fn find(&mut self, text: String) {
        self.findings.push(text);
    }

    fn entry(&self, seq: Seq) -> Option<&'a Entry> {
        let index = usize::try_from(seq).ok()?.checked_sub(1)?;
        self.entries.get(index).map(AsRef::as_ref)
    }

    /// Checks a change against those before it, and adds it.
    fn add(&mut self, change: &Change, deleted: &mut DeletedSeqs) {
        let rev = change.rev;
        for seq in change.seqs() {
            let is_text = |entry: &Entry| matches!(entry.content, Content::Text { .. });
            if self.deleted.contains_key(&seq) || !self.entry(seq).is_some_and(is_text) {
                self.find(format!("{change:?}, but that entry is deleted or no text"));
            }
            let (contents, reactions) = self.revs.entry(seq).or_default();
            match change.op {
                ChangeOp::React { .. } => reactions.push(rev),
                ChangeOp::Edit { .. } | ChangeOp::Delete { .. } => contents.push(rev),
            }
        }
        match &change.op {
            ChangeOp::Edit {
                seq,
                content,
                edits,
                ..
            } => {
                let known = self.edits.entry(*seq).or_default();
                known.push(rev);
                if known != edits || self.entry(*seq).is_none_or(|e| e.sender != change.by) {
                    self.find(format!(
                        "{change:?}, but its edits or its sender are others"
                    ));
                }
                let content = content.clone().unwrap_or_default();
                self.set_content(change, *seq, Some(content), edits.clone());
            }
            ChangeOp::Delete {
                entries,
                deleted: after,
            } => {
                for entry in entries {
                    deleted.add(entry.seq);
                    self.deleted.insert(entry.seq, rev);
                    if self.edits.get(&entry.seq).map_or(&[][..], |e| e) != entry.edits {
                        self.find(format!("{change:?}, but the edits are {:?}", self.edits));
                    }
                    self.set_content(change, entry.seq, None, entry.edits.clone());
                }
                if deleted != after {
                    self.find(format!("{change:?}, but {deleted:?} are deleted"));
                }
            }
            ChangeOp::React {
                seq,
                emoji,
                on,
                reactions,
            } => self.add_reaction(change, (*seq, emoji, *on), reactions),
        }
    }

    fn set_content(
        &mut self,
        change: &Change,
        seq: Seq,
        content: Option<EditedContent>,
        edits: Vec<Rev>,
    ) {
        self.states.entry(seq).or_default().content = Some(ContentState {
            rev: change.rev,
            by: change.by.clone(),
            at: change.at,
            content,
            edits,
        });
    }

    fn add_reaction(
        &mut self,
        change: &Change,
        (seq, emoji, on): (Seq, &str, bool),
        reactions: &Reactions,
    ) {
        let key = (seq, emoji.to_owned(), change.by.clone());
        let toggles = self.toggles.entry(key).or_default();
        if toggles.last().is_some_and(|(_, was)| *was) == on {
            self.findings
                .push(format!("{change:?} changes nothing: {toggles:?}"));
        }
        toggles.push((change.rev, on));
        let counts = self.reactions(seq);
        if counts != *reactions {
            self.find(format!("{change:?}, but the reactions are {counts:?}"));
        }
        self.states.entry(seq).or_default().reactions = Some(ReactionState {
            rev: change.rev,
            reactions: reactions.clone(),
        });
    }

    /// The reactions to an entry, counted from who reacted.
    fn reactions(&self, seq: Seq) -> Reactions {
        let mut counts = Reactions::new();
        for (emoji, _) in self.reactors(seq) {
            *counts.entry(emoji).or_default() += 1;
        }
        counts
    }

    /// The users who reacted to an entry, with their emoji.
    pub(crate) fn reactors(&self, seq: Seq) -> BTreeSet<(String, UserId)> {
        let from = (seq, String::new(), UserId::gateway());
        let toggles = self.toggles.range(from..).take_while(|(k, _)| k.0 == seq);
        let on = toggles.filter(|(_, toggles)| toggles.last().is_some_and(|(_, on)| *on));
        on.map(|((_, emoji, user), _)| (emoji.clone(), user.clone()))
            .collect()
    }

    /// Compares the log with everything that clients asked for and were told.
    pub(crate) fn check(&mut self, seen: &Seen) {
        self.check_requests(&seen.requests);
        for request in &seen.requests {
            if let Some(rev) = request.acknowledged
                && !self.has(request, rev)
            {
                self.find(format!("{request:?} is not in the log"));
            }
        }
        for told in &seen.told {
            if let Some(finding) = self.wrong(told) {
                self.find(finding);
            }
        }
        self.check_pages(seen);
        for (user, reacted) in &seen.reacted {
            let key = (reacted.seq, reacted.emoji.clone(), user.clone());
            let toggles = self.toggles.get(&key);
            if !toggles.is_some_and(|all| all.contains(&(reacted.rev, reacted.on))) {
                self.find(format!("{user} was told {reacted:?}, but has {toggles:?}"));
            }
        }
    }

    /// Checks that each change was asked for, in the order of time, and that no request made two. Only a repeated reaction
    /// may do so, as often as its repetitions were not answered.
    fn check_requests(&mut self, requests: &[Request]) {
        let mut used = vec![0; requests.len()];
        for change in self.changes {
            let is_possible = |(number, request): &(usize, &Request)| {
                let times = match request.wish {
                    Wish::Edit { .. } => 1,
                    Wish::Delete { .. } => usize::MAX,
                    Wish::React { .. } => request.executions_max(),
                };
                let acknowledged = request.due();
                used[*number] < times
                    && request.by == change.by
                    && (request.floor + 1..=acknowledged).contains(&change.rev)
                    && makes(&request.wish, change)
            };
            let possible = requests.iter().enumerate().filter(is_possible);
            let due = |(_, request): &(usize, &Request)| request.due();
            match possible.min_by_key(due) {
                Some((number, _)) => used[number] += 1,
                None => {
                    let asked: Vec<&Request> = requests
                        .iter()
                        .filter(|request| request.by == change.by && makes(&request.wish, change))
                        .collect();
                    self.findings.push(format!(
                        "nobody asked for {change:?} then, or it is doubled: {asked:?}"
                    ));
                }
            }
        }
    }

    /// Whether the log has the change of a request at `rev`, or its effect.
    fn has(&self, request: &Request, rev: Rev) -> bool {
        let upto = usize::try_from(rev).unwrap().min(self.changes.len());
        match &request.wish {
            Wish::Edit { .. } => self.changes[..upto]
                .iter()
                .any(|change| change.by == request.by && makes(&request.wish, change)),
            Wish::Delete { seqs } => seqs
                .iter()
                .all(|seq| self.deleted.get(seq).is_some_and(|at| *at <= rev)),
            Wish::React { seq, emoji, on } => {
                let key = (*seq, emoji.clone(), request.by.clone());
                let toggles = self.toggles.get(&key);
                let before = |all: &Vec<(Rev, bool)>| {
                    let before = all.iter().take_while(|(at, _)| *at <= rev);
                    before.last().is_some_and(|(_, on)| *on)
                };
                toggles.is_some_and(before) == *on
            }
        }
    }

    /// What is wrong with an event or an answer.
    fn wrong(&self, told: &Told) -> Option<String> {
        let Told { after, rev, items } = told;
        if *rev > self.changes.len() as Rev {
            return Some(format!("a client was told of rev {rev}, which is nowhere"));
        }
        if after >= rev {
            let is_gap = items.is_empty();
            return (!is_gap).then(|| format!("changes in ({after}, {rev}]: {items:?}"));
        }
        let mut expected = BTreeMap::<Seq, Rev>::new();
        for change in &self.changes[*after as usize..*rev as usize] {
            expected.extend(change.seqs().map(|seq| (seq, change.rev)));
        }
        let revs = items.iter().map(|item| (item.seq, item.rev));
        if !revs.clone().eq(expected.clone()) {
            let revs: Vec<_> = revs.collect();
            return Some(format!(
                "told in ({after}, {rev}]: {revs:?}, but the log has {expected:?}"
            ));
        }
        let wrong = items.iter().find(|item| !self.is_right(item, *after, *rev));
        wrong.map(|item| format!("told in ({after}, {rev}]: {item:?}"))
    }

    /// Whether an item has the fields of its entry after the newest changes in (after, rev].
    fn is_right(&self, item: &ChangedItem, after: Rev, rev: Rev) -> bool {
        let newest = |revs: &[Rev]| {
            revs.iter()
                .rfind(|r| (after + 1..=rev).contains(r))
                .copied()
        };
        let Some((contents, reactions)) = self.revs.get(&item.seq) else {
            return false;
        };
        let content = match (newest(contents), &item.content) {
            (None, None) => true,
            (Some(at), Some(state)) => state.rev == at && self.is_content(item.seq, state),
            // The content of an edit is left out when the entry was deleted later.
            (Some(at), None) => self.deleted.get(&item.seq).is_some_and(|d| *d > at),
            (None, Some(_)) => false,
        };
        let reactions = match (newest(reactions), &item.reactions) {
            (None, None) => true,
            (Some(at), Some(summary)) => self.is_summary(at, summary),
            _ => false,
        };
        content && reactions
    }

    /// Whether this was the content of an entry. The log does not know the erased ones.
    fn is_content(&self, seq: Seq, state: &ContentState) -> bool {
        let Some(change) = self.change(state.rev) else {
            return false;
        };
        change.by == state.by
            && match (&change.op, &state.content) {
                (ChangeOp::Delete { entries, .. }, None) => entries.iter().any(|e| e.seq == seq),
                (
                    ChangeOp::Edit {
                        seq: of, content, ..
                    },
                    Some(told),
                ) => *of == seq && content.as_ref().is_none_or(|content| content == told),
                _ => false,
            }
    }

    fn is_summary(&self, rev: Rev, summary: &Reactions) -> bool {
        let op = self.change(rev).map(|change| &change.op);
        matches!(op, Some(ChangeOp::React { reactions, .. }) if reactions == summary)
    }

    fn change(&self, rev: Rev) -> Option<&Change> {
        let index = usize::try_from(rev).ok()?.checked_sub(1)?;
        self.changes.get(index).map(AsRef::as_ref)
    }

    /// Checks that pages had at least the changes up to their rev, and no state that the log does not have.
    fn check_pages(&mut self, seen: &Seen) {
        let nothing = (Vec::new(), Vec::new());
        for ((seq, content, reactions), upto) in &seen.pages {
            let (contents, reacted) = self.revs.get(seq).unwrap_or(&nothing);
            let at_least = |revs: &[Rev]| revs.iter().rfind(|r| *r <= upto).copied();
            let (first, second) = (at_least(contents), at_least(reacted));
            if *content < first.unwrap_or(0) || *reactions < second.unwrap_or(0) {
                self.findings.push(format!(
                    "a page of rev {upto} shows {seq} as of {content} and {reactions}, the log has {first:?} and {second:?}"
                ));
            }
        }
        for ((seq, rev), state) in &seen.contents {
            if !self.is_content(*seq, state) {
                self.find(format!("a page shows {seq} as {state:?}, not so at {rev}"));
            }
        }
        for ((seq, rev), summary) in &seen.reactions {
            let revs = self.revs.get(seq);
            if !revs.is_some_and(|(_, r)| r.contains(rev)) || !self.is_summary(*rev, summary) {
                self.find(format!("a page shows {seq} with {summary:?} at {rev}"));
            }
        }
    }
}

/// Whether a wish may have made a change.
fn makes(wish: &Wish, change: &Change) -> bool {
    match (wish, &change.op) {
        (
            Wish::Edit { seq, body },
            ChangeOp::Edit {
                seq: of, content, ..
            },
        ) => seq == of && content.as_ref().is_none_or(|content| content.body == *body),
        (Wish::Delete { seqs }, ChangeOp::Delete { entries, .. }) => {
            entries.iter().all(|entry| seqs.contains(&entry.seq))
        }
        (
            Wish::React { seq, emoji, on },
            ChangeOp::React {
                seq: of,
                emoji: with,
                on: is,
                ..
            },
        ) => (seq, emoji, on) == (of, with, is),
        _ => false,
    }
}
