//! Compares the rows of the store with both logs: states, reactions, inbox rows, and texts that must be erased.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
    time::Duration,
};

use chat_gateway::{
    chat::{Conversations, DetailsView, Operation, Outcome, Page},
    model::{
        Change, Content, Entry, EntryState, Kind, Participant, Rev, Seq, UserId,
        limits::DELETED_SEQS_KEPT,
    },
    store::{Error, InboxRow, Store as _},
};

use super::{
    World,
    changing::{LOG, holds, merged, number},
    history,
    replay::Replay,
    user,
};
use tokio::time::sleep;

/// The first byte of the keys of a table.
const CHANGES: u8 = b'r';
const INBOX: u8 = b'i';

/// What an owner and the store have at the end.
pub(super) struct Whole {
    pub entries: Vec<Arc<Entry>>,
    pub changes: Vec<Arc<Change>>,
    page: Page,
    details: DetailsView,
    states: BTreeMap<Seq, EntryState>,
    participants: Vec<Participant>,
}

impl World {
    /// Reads parts of both logs at any gateway, as pages do. Read repair copies what such a part covers, and nothing else.
    pub(super) async fn pages(self: Arc<Self>) {
        let (id, store) = (self.conversation, &self.store);
        loop {
            let acknowledged = self.checker.lock().unwrap().newest();
            let (from, to) = self.part_near(acknowledged);
            drop(store.log(id, from, to).await);
            if self.changing {
                let acknowledged = self.seen.lock().unwrap().newest;
                let (from, to) = self.part_near(acknowledged);
                drop(store.changes(id, from, to).await);
            }
            sleep(Duration::from_millis(self.random(60))).await;
        }
    }

    /// A part of a log that begins a little before or after a position.
    fn part_near(&self, position: u64) -> (u64, u64) {
        const LONGEST: u64 = 6;
        let from = (position + LONGEST).saturating_sub(self.random(3 * LONGEST));
        let from = from.max(1);
        (from, from + self.random(LONGEST))
    }

    /// Reads everything from a last owner and from the store, which has no faults any more.
    pub(super) async fn whole(&self, last: &Conversations) -> Result<Whole, String> {
        let (id, store) = (self.conversation, &self.store);
        let page = history(last, id).await?;
        let details = last.ask(id, user(0), Operation::Details).await;
        let Ok(Outcome::Details(details)) = details else {
            return Err(format!("{details:?}"));
        };
        let failed = |error: Error| format!("{error:?}");
        let read = store.log(id, 1, page.head).await.map_err(failed)?;
        let changes = store.changes(id, 1, page.rev).await.map_err(failed)?;
        let rows = store.participants(id, Kind::Group, None, 100).await;
        let rows = rows.map_err(failed)?;
        Ok(Whole {
            details,
            entries: read.rows.into_iter().map(|row| row.record).collect(),
            changes: changes.into_iter().map(|row| row.record).collect(),
            page,
            states: read.states.into_iter().collect(),
            participants: rows.into_iter().map(|row| row.participant).collect(),
        })
    }

    /// Compares all that is stored with the two logs.
    pub(super) async fn check_stored(&self, whole: &Whole, replay: &Replay<'_>) -> Vec<String> {
        let mut findings = check_states(whole, replay);
        self.check_reactors(whole, replay, &mut findings).await;
        for participant in whole.participants.iter().filter(|p| p.is_in()) {
            let rows = self.store.inbox(&participant.user).await.unwrap();
            match rows
                .iter()
                .find(|row| row.conversation == self.conversation)
            {
                Some(row) => self.check_inbox(whole, replay, participant, row, &mut findings),
                None => findings.push(format!("no inbox row of {}", participant.user)),
            }
        }
        self.check_erased(whole, replay, &mut findings);
        findings
    }

    async fn check_reactors(&self, whole: &Whole, replay: &Replay<'_>, findings: &mut Vec<String>) {
        let (id, head) = (self.conversation, whole.page.head);
        let mut by_user = BTreeMap::<UserId, BTreeSet<(Seq, String)>>::new();
        for &seq in replay.states.keys() {
            let expected = replay.reactors(seq);
            let page = self.store.reactors(id, Kind::Group, seq, None, None, 100);
            let found = page.await.unwrap().items.into_iter();
            let found: BTreeSet<_> = found.map(|row| (row.emoji, row.user)).collect();
            if found != expected {
                findings.push(format!(
                    "{found:?} reacted to {seq}, the log has {expected:?}"
                ));
            }
            for (emoji, user) in expected {
                by_user.entry(user).or_default().insert((seq, emoji));
            }
        }
        for participant in &whole.participants {
            let user = &participant.user;
            let found = self.store.reactions_of(id, user, 1, head).await.unwrap();
            let expected = by_user.remove(user).unwrap_or_default();
            if found
                .into_iter()
                .filter(|(.., on)| *on)
                .map(|(seq, emoji, _)| (seq, emoji))
                .collect::<BTreeSet<_>>()
                != expected
            {
                findings.push(format!("the reactions of {user} are not {expected:?}"));
            }
        }
    }

    /// Checks the preview, the rev, the read mark and the unread count of an inbox row.
    fn check_inbox(
        &self,
        whole: &Whole,
        replay: &Replay<'_>,
        participant: &Participant,
        row: &InboxRow,
        findings: &mut Vec<String>,
    ) {
        let user = &participant.user;
        let Some((summary, last)) = row
            .summary
            .as_ref()
            .and_then(|summary| Some((summary, summary.last.as_ref()?)))
        else {
            return findings.push(format!("the inbox row of {user} is empty: {row:?}"));
        };
        let newest = whole.entries.last().unwrap();
        let state = replay.states.get(&newest.seq);
        let shown = newest.newest(state);
        if (last, summary.changes) != (&shown.last, shown.changes) {
            findings.push(format!(
                "the inbox of {user} shows {summary:?}, not {shown:?}"
            ));
        }
        let rev = whole.changes.len() as Rev;
        if row.rev != rev {
            findings.push(format!(
                "the inbox row of {user} has {}, not {rev}",
                row.rev
            ));
        }
        let read = self.seen.lock().unwrap().read.get(user).copied();
        if read.is_some_and(|read| read > row.read_seq) {
            findings.push(format!("{user} has read {read:?}, the row says {row:?}"));
        }
        let texts = summary.texts;
        let unread = row.unread(summary.joined_seq, last.seq, texts, &row.deleted.1.highest);
        let after = row.read_seq.max(participant.joined_seq);
        let is_unread = |entry: &&Arc<Entry>| {
            let is_text = matches!(entry.content, Content::Text { .. });
            entry.seq > after && is_text && !replay.deleted.contains_key(&entry.seq)
        };
        let count = whole.entries.iter().filter(is_unread).count() as u64;
        let deleted = replay.deleted.range(after + 1..).count();
        if unread < count || (deleted <= DELETED_SEQS_KEPT && unread != count) {
            findings.push(format!(
                "{user} has {count} unread, the row says {unread}; {deleted} deleted after {after}: {row:?}"
            ));
        }
    }

    /// Checks that no text of a deleted entry is left where the deletion must have seen it.
    fn check_erased(&self, whole: &Whole, replay: &Replay<'_>, findings: &mut Vec<String>) {
        let seen = self.seen.lock().unwrap();
        let messages = self.messages.lock().unwrap();
        let cells: Vec<_> = merged(self.store.copies()).collect();
        for &seq in replay.deleted.keys() {
            let mut first = messages.iter().filter(|(of, ..)| *of == seq);
            let Some((_, first, _)) = first.next() else {
                continue; // Its message was never acknowledged.
            };
            let texts: HashSet<String> = seen.texts(seq, first).into_iter().collect();
            let none = BTreeSet::new();
            let (landed, edits) = (seen.landed.get(&seq), replay.edits.get(&seq));
            let (landed, edits) = (landed.unwrap_or(&none), edits.map_or(&[][..], |e| e));
            for (key, _) in cells.iter().filter(|(_, value)| holds(value, &texts)) {
                let is_wrong = match key[0] {
                    INBOX => true,
                    // The state of an entry has epoch 0.
                    LOG => number(key, 25) == 0 || landed.contains(key),
                    CHANGES => edits.contains(&number(key, 17)) && landed.contains(key),
                    _ => true,
                };
                if is_wrong {
                    let head = whole.page.head;
                    findings.push(format!(
                        "{seq} of {head} is deleted, and its text in {key:?}"
                    ));
                }
            }
        }
    }
}

/// Compares the states in the store, and those of the owner, with the log.
fn check_states(whole: &Whole, replay: &Replay<'_>) -> Vec<String> {
    let mut findings = Vec::new();
    let Whole { page, details, .. } = whole;
    let is_left = |entry: &&Arc<Entry>| {
        let is_text = matches!(entry.content, Content::Text { .. });
        is_text && !replay.deleted.contains_key(&entry.seq)
    };
    let left = whole.entries.iter().filter(is_left).count() as u64;
    let rev = whole.changes.len() as Rev;
    if (page.rev, details.rev, details.message_count) != (rev, rev, left) {
        findings.push(format!(
            "the log has {left} messages and rev {rev}, the owner says {} and {details:?}",
            page.rev
        ));
    }
    for seq in 1..=whole.page.head {
        let expected = replay.states.get(&seq).cloned().unwrap_or_default();
        let stored = whole.states.get(&seq).cloned().unwrap_or_default();
        let owners = whole.page.state(seq).cloned().unwrap_or_default();
        if stored != expected {
            findings.push(format!("{seq} is stored as {stored:?}, not {expected:?}"));
        }
        if owners != expected {
            findings.push(format!(
                "the owner has {seq} as {owners:?}, not {expected:?}"
            ));
        }
    }
    findings
}
