//! Reads from the store for an owner, but outside its task, so that a slow read delays no other operation of the
//! conversation.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use futures_util::future::join_all;
use tokio::time::Instant;

use super::Conversations;
use crate::{
    chat::{
        changed_items,
        conversation::{FileCheck, OwnerReply, ReadLog, ReadReactors, has_file},
        error::Error,
        lease::Ownership,
        operation::{
            Changes, FileUse, GetReactors, Listed, LogRange, Outcome, Page, ParticipantsPage,
            Reactor, Reactors, SendAck,
        },
        versions::Versions,
    },
    model::{
        AttachmentId, Change, ConsumerName, ConversationId, FileState, Kind, Rev, Seq, UserId,
        limits::{PAGE_ITEMS_MAX, SCAN_ROWS_MAX},
    },
    mutation::{Mutation, broken},
    store::{ConsumerState, ParticipantRow, ReactorsPage},
};

/// Reads for one request that are in progress at once.
const READS_AT_ONCE: usize = 8;

impl Conversations {
    /// Turns an owner's reply into the outcome. `asked` is the range and the limit of the request.
    pub(super) async fn read(
        &self,
        conversation: ConversationId,
        ownership: &Ownership,
        asked: (LogRange, usize),
        reply: OwnerReply,
    ) -> Result<Outcome, Error> {
        let outcome = match reply {
            OwnerReply::Ready(outcome) => return Ok(outcome),
            OwnerReply::ReadLog(part) => {
                let actor = part.actor.clone();
                let page = self.read_log(conversation, *part, asked).await?;
                Outcome::History(self.with_own(conversation, &actor, page).await?)
            }
            OwnerReply::Page { page, .. } if page.states.is_empty() => {
                return Ok(Outcome::History(page));
            }
            OwnerReply::Page { actor, page } => {
                Outcome::History(self.with_own(conversation, &actor, page).await?)
            }
            OwnerReply::Changes { actor, page } => {
                Outcome::Changes(self.with_own_in(conversation, &actor, page).await?)
            }
            OwnerReply::ReadChanges {
                actor,
                after,
                revs,
                applied,
            } => {
                let read = self.read_changes(conversation, after, revs, applied);
                let page = read.await?;
                Outcome::Changes(self.with_own_in(conversation, &actor, page).await?)
            }
            OwnerReply::ReadReactors(read) => {
                Outcome::Reactors(self.read_reactors(conversation, read).await?)
            }
            OwnerReply::ReadSent { seq } => {
                let history = &self.shared.history;
                let read = history.read(conversation, (seq, seq), asked, 0);
                let (entries, _) = read.await?;
                let entry = entries.first().ok_or(Error::Closed)?;
                Outcome::Sent(SendAck::of(entry, true))
            }
            OwnerReply::ReadFiles { files, head } => {
                Outcome::Files(self.files_in_use(conversation, files, head).await?)
            }
            OwnerReply::CheckFile(check) => {
                Outcome::FileUse(self.check_file(conversation, check).await?)
            }
            OwnerReply::SetConsumer(consumer, state) => self.set_state(&consumer, &state).await?,
            OwnerReply::ReadParticipants {
                actor,
                after,
                limit,
            } => {
                let page = self.read_participants(conversation, &actor, after, limit);
                Outcome::Participants(page.await?)
            }
        };
        // A deposed owner answers nothing, so the result counts only if the lease still holds.
        let is_file_use = matches!(outcome, Outcome::FileUse(_));
        if ownership.holds(Instant::now()) || (is_file_use && broken(Mutation::EraseLease)) {
            Ok(outcome)
        } else {
            Err(Error::Closed)
        }
    }

    async fn set_state(
        &self,
        consumer: &ConsumerName,
        state: &ConsumerState,
    ) -> Result<Outcome, Error> {
        let store = &self.shared.environment.store;
        let stored = store.consumer_state(consumer).await?;
        let stored = stored.map_or(0, |stored| stored.version);
        self.check_above(stored, Versions::ring_of(state.version))?;
        store.set_consumer_state(consumer, state).await?;
        Ok(Outcome::Done)
    }

    async fn read_log(
        &self,
        conversation: ConversationId,
        part: ReadLog,
        asked: (LogRange, usize),
    ) -> Result<Page, Error> {
        let ReadLog {
            actor: _,
            from,
            to,
            head,
            rev,
            touched,
        } = part;
        let history = &self.shared.history;
        let read = history.read(conversation, (from, to), asked, touched);
        let (entries, states) = read.await?;
        Ok(Page {
            entries,
            head,
            rev,
            states,
            mine: Vec::new(),
        })
    }

    /// Returns which of these files messages up to `head` have.
    async fn files_in_use(
        &self,
        conversation: ConversationId,
        files: Vec<AttachmentId>,
        head: Seq,
    ) -> Result<Vec<AttachmentId>, Error> {
        let mut found = Vec::new();
        for files in files.chunks(READS_AT_ONCE) {
            let used = files
                .iter()
                .map(|file| self.has_file(conversation, *file, head));
            for (file, is_used) in files.iter().zip(join_all(used).await) {
                found.extend(is_used?.then_some(*file));
            }
        }
        Ok(found)
    }

    /// Checks whether a message has a file. If none has, no later one may have it.
    async fn check_file(
        &self,
        conversation: ConversationId,
        check: FileCheck,
    ) -> Result<FileUse, Error> {
        let FileCheck {
            file,
            is_busy,
            newest,
            fence,
        } = check;
        if is_busy {
            return Ok(FileUse::Busy);
        }
        let store = &self.shared.environment.store;
        if let Some(row) = fence
            && !broken(Mutation::Fence)
        {
            // Rule [fence]: no takeover adopts a late row of an earlier owner, which might have the file.
            store.settle(conversation, &[row]).await?;
        }
        if self.has_file(conversation, file, newest).await? {
            return Ok(FileUse::Used);
        }
        store.set_file_state(file, FileState::Erasing).await?;
        Ok(FileUse::Unused)
    }

    /// Whether a message up to `head` has the file.
    async fn has_file(
        &self,
        conversation: ConversationId,
        file: AttachmentId,
        head: Seq,
    ) -> Result<bool, Error> {
        let store = &self.shared.environment.store;
        for reference in store.references(file).await? {
            if !reference.on || reference.seq > head {
                continue;
            }
            let page = store
                .log(conversation, reference.seq, reference.seq)
                .await?;
            let state = page.states.first().map(|(_, state)| state);
            if page
                .rows
                .iter()
                .any(|row| has_file(&row.record, state, file))
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether an entry that its owner does not have in memory was deleted.
    async fn is_deleted(&self, conversation: ConversationId, seq: Seq) -> Result<bool, Error> {
        let store = &self.shared.environment.store;
        let page = store.log(conversation, seq, seq).await?;
        Ok(page.states.iter().any(|(_, state)| state.is_deleted()))
    }

    async fn read_reactors(
        &self,
        conversation: ConversationId,
        read: ReadReactors,
    ) -> Result<Reactors, Error> {
        let ReadReactors {
            kind,
            asked,
            is_there,
        } = read;
        if !is_there && self.is_deleted(conversation, asked.seq).await? {
            return Ok(Reactors::default());
        }
        let GetReactors {
            seq,
            emoji,
            after,
            limit,
        } = asked;
        let limit = limit.clamp(1, PAGE_ITEMS_MAX);
        let (emoji, after) = (emoji.as_deref(), after.as_deref());
        let store = &self.shared.environment.store;
        let read = store.reactors(conversation, kind, seq, emoji, after, limit);
        let ReactorsPage { items, next } = read.await?;
        let items = items.into_iter().map(|row| Reactor {
            user: row.user,
            emoji: row.emoji,
            at: row.at,
        });
        Ok(Reactors {
            items: items.collect(),
            next,
        })
    }

    /// Returns the changes from `from` to `to` one by one, for a consumer. Their owner said that they are applied. A deleted
    /// text is erased in them too.
    ///
    /// # Errors
    /// The conversation is not open here, its owner was deposed, or the store did not answer.
    pub async fn changes_between(
        &self,
        conversation: ConversationId,
        from: Rev,
        to: Rev,
    ) -> Result<Vec<Arc<Change>>, Error> {
        let open = self.shared.open.get(&conversation);
        let ownership = open.map(|open| open.ownership.clone());
        let ownership = ownership.ok_or(Error::Moved)?;
        let store = &self.shared.environment.store;
        let rows = store.changes(conversation, from, to).await?;
        if !rows.iter().map(|row| row.record.rev).eq(from..=to) {
            return Err(Error::DAMAGED_CHANGES);
        }
        if !ownership.holds(Instant::now()) {
            return Err(Error::Closed);
        }
        Ok(rows.into_iter().map(|row| row.record).collect())
    }

    /// Reads changes from the store, up to the bytes of a page.
    async fn read_changes(
        &self,
        conversation: ConversationId,
        after: Rev,
        revs: Range<Rev>,
        applied: Rev,
    ) -> Result<Changes, Error> {
        /// Changes that are read at once. The size of further ones is not known before.
        const AT_ONCE: Rev = 32;
        let environment = &self.shared.environment;
        let bytes_max = environment.settings.page_bytes_max;
        let mut rows = Vec::new();
        loop {
            let from = revs.start + rows.len() as Rev;
            let to = (from + AT_ONCE).min(revs.end);
            let _permits = self.shared.history.reserve(to - from).await;
            let read = environment
                .store
                .changes(conversation, from, to - 1)
                .await?;
            if !read.iter().map(|row| row.record.rev).eq(from..to) {
                return Err(Error::DAMAGED_CHANGES);
            }
            if read.iter().any(|row| row.record.is_lost()) {
                // The same rule holds for changes that are read.
                return Ok(Changes {
                    after,
                    rev: applied,
                    items: Vec::new(),
                    more: false,
                    reset: true,
                });
            }
            rows.extend(read.into_iter().map(|row| row.record));
            let fitting = changed_items::fitting(rows.iter().map(AsRef::as_ref), bytes_max);
            if fitting < rows.len() || to == revs.end {
                rows.truncate(fitting);
                break;
            }
        }
        let upto = after + rows.len() as Rev;
        Ok(Changes {
            after,
            rev: upto,
            items: changed_items::items(rows.iter().map(AsRef::as_ref)),
            more: upto < applied,
            reset: false,
        })
    }

    /// Adds the reactions of the user who asks to a page.
    async fn with_own(
        &self,
        conversation: ConversationId,
        actor: &UserId,
        mut page: Page,
    ) -> Result<Page, Error> {
        let reacted = page.states.iter().filter(|(_, state)| {
            let reactions = state.reactions.as_ref();
            reactions.is_some_and(|state| !state.reactions.is_empty())
        });
        let reacted: Vec<Seq> = reacted.map(|(seq, _)| *seq).collect();
        let mut own = self.own_reactions(conversation, actor, &reacted).await?;
        let mine = reacted.iter().filter_map(|seq| own.remove_entry(seq));
        page.mine = mine.collect();
        Ok(page)
    }

    /// Adds the reactions of the user who asks to changes.
    async fn with_own_in(
        &self,
        conversation: ConversationId,
        actor: &UserId,
        mut page: Changes,
    ) -> Result<Changes, Error> {
        let reacted = page.items.iter().filter(|item| item.reactions.is_some());
        let reacted: Vec<Seq> = reacted.map(|item| item.seq).collect();
        let mut own = self.own_reactions(conversation, actor, &reacted).await?;
        if *actor != UserId::gateway() {
            for item in page
                .items
                .iter_mut()
                .filter(|item| item.reactions.is_some())
            {
                item.mine = Some(own.remove(&item.seq).unwrap_or_default());
            }
        }
        Ok(page)
    }

    /// Reads the reactions of a user to some entries, in ascending order. Entries near each other cost one read.
    async fn own_reactions(
        &self,
        conversation: ConversationId,
        actor: &UserId,
        seqs: &[Seq],
    ) -> Result<BTreeMap<Seq, Vec<String>>, Error> {
        const APART_MAX: Seq = 64;
        let mut own: BTreeMap<Seq, Vec<String>> = BTreeMap::new();
        if *actor == UserId::gateway() {
            return Ok(own);
        }
        let store = &self.shared.environment.store;
        let near = seqs.chunk_by(|a, b| b - a <= APART_MAX);
        let ends: Vec<(Seq, Seq)> = near
            .filter_map(|near| Some((*near.first()?, *near.last()?)))
            .collect();
        for ends in ends.chunks(READS_AT_ONCE) {
            let read = |&(from, to): &(Seq, Seq)| store.reactions_of(conversation, actor, from, to);
            let reads: Vec<_> = ends.iter().map(read).collect();
            for read in join_all(reads).await {
                for (seq, emoji, on) in read? {
                    if on {
                        own.entry(seq).or_default().push(emoji);
                    }
                }
            }
        }
        Ok(own)
    }

    /// Reads a page of a channel's participants. (Those of groups and dms are in their owner's memory.) It skips the rows
    /// of former participants, and looks at no more than [`SCAN_ROWS_MAX`] rows.
    async fn read_participants(
        &self,
        conversation: ConversationId,
        actor: &UserId,
        mut after: Option<UserId>,
        limit: usize,
    ) -> Result<ParticipantsPage, Error> {
        let store = &self.shared.environment.store;
        let mut items = Vec::new();
        let mut left = SCAN_ROWS_MAX;
        let mut rows = limit + 1;
        loop {
            rows = rows.min(left);
            let page = store
                .participants(conversation, Kind::Channel, after.as_ref(), rows)
                .await?;
            let (found, full) = (page.len(), page.len() == rows);
            for (i, ParticipantRow { participant, .. }) in page.into_iter().enumerate() {
                if participant.is_in() {
                    items.push(Listed::of(&participant, participant.user == *actor));
                }
                after = Some(participant.user);
                if items.len() == limit {
                    let next = after.filter(|_| full || i + 1 < found);
                    return Ok(ParticipantsPage { items, next });
                }
            }
            left -= found;
            if !full || left == 0 {
                let next = after.filter(|_| full);
                return Ok(ParticipantsPage { items, next });
            }
            rows = PAGE_ITEMS_MAX;
        }
    }
}
