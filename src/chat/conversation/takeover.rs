//! Makes an owner from the rows that a previous owner left: "Taking over a conversation" of docs/storage.md.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use futures_util::stream::FuturesUnordered;
use metrics::counter;

use super::{Environment, Owner, Parked, effects::PendingEntry, taking_changes::TakenChanges};
use crate::{
    chat::{
        client_ids::ClientIds,
        error::Error,
        following::{Followed, Following},
        lease::Ownership,
        log::{Log, Takeover},
        open::{Held, Loading},
        participants::{Participants, users_of},
        recent::RecentEntries,
    },
    model::{
        ConversationId, Cursor, Entry, EntryState, Kind, Seq,
        limits::{PAGE_ITEMS_MAX, TAIL_ENTRIES},
    },
    mutation::{Mutation, broken},
    store::{
        self, ChangeRow, ChangesTail, ConversationRow, LogRow, LogTail, ParticipantRow, Store, Tail,
    },
};

impl Owner {
    /// Loads a conversation: reads the rows that a previous owner left, writes the uncertain entries again, and stores
    /// the rows that follow from them. The owner that it returns must still publish these entries.
    ///
    /// # Errors
    /// When the store does not answer, the ownership has ended, or the log is damaged.
    pub(super) async fn load(
        id: ConversationId,
        environment: Arc<Environment>,
        held: Arc<Held>,
        ownership: Arc<Ownership>,
        loading: &mut Loading,
    ) -> Result<Self, Error> {
        let store = environment.store.clone();
        let Ends {
            tail,
            states,
            changes,
        } = read_ends(id, &*store, &ownership, loading).await?;
        let row = loading.read(&ownership, || store.conversation(id)).await?;
        let Takeover {
            log,
            records,
            settle,
        } = take_over(id, &tail, &ownership)?;
        let stored_settled = tail.settled;
        drop(tail);
        let participants = match row {
            Some(row) => {
                let known = known_participants(id, &row, &*store, &ownership, loading).await?;
                Some(Participants::new(id, row, known))
            }
            None => settle
                .first()
                .and_then(|row| Participants::of_first_entry(id, &row.record)),
        };
        let texts = records.last().map_or(0, |newest| newest.texts);
        let (recent, client_ids) = remembered(records);
        let (changes, settle_changes) = TakenChanges::of(id, changes, states, &recent, &ownership)?;
        let certain = Cursor(log.settled(), changes.log.settled());
        let followed = read_offsets(id, &environment, &ownership, certain, loading).await?;
        let mut owner = Self {
            queued: log.settled(),
            id,
            held,
            environment,
            ownership,
            log,
            recent,
            client_ids,
            participants,
            changes,
            texts,
            unwritten: Vec::new(),
            backlog: VecDeque::new(),
            parked: Parked::default(),
            work: FuturesUnordered::new(),
            writing: 0,
            marks: 0,
            followed,
            stored_settled,
            inherited: 0,
            active_minute: 0,
            typing: HashMap::new(),
            failed: None,
        };
        owner.note_rank();
        owner.settle_both(settle, settle_changes, loading).await?;
        counter!("chat_takeovers_total").increment(1);
        Ok(owner)
    }

    /// Notes the rank of the newest entry, so that those of the next ones are above it.
    fn note_rank(&self) {
        if let Some(newest) = self.recent.newest() {
            self.environment
                .inbox
                .ranks()
                .observe(newest.message_id.rank());
        }
    }

    /// Settles the ends of both logs, and begins to follow them.
    async fn settle_both(
        &mut self,
        settle: Vec<LogRow>,
        settle_changes: Vec<ChangeRow>,
        loading: &mut Loading,
    ) -> Result<(), Error> {
        if !settle.is_empty() || !settle_changes.is_empty() {
            self.store_first_offsets(loading).await?;
        }
        self.settle_again(settle, loading).await?;
        self.settle_changes_again(settle_changes, loading).await?;
        self.begin_following(loading).await
    }

    /// Writes uncertain entries again under this owner's epoch, and stores the rows that follow from them.
    async fn settle_again(
        &mut self,
        settle: Vec<LogRow>,
        loading: &mut Loading,
    ) -> Result<(), Error> {
        let (id, ownership, environment) =
            (self.id, self.ownership.clone(), self.environment.clone());
        let store = &environment.store;
        if settle.is_empty() {
            self.inherited = self.log.head();
        }
        if !settle.is_empty() && !broken(Mutation::Settle) {
            // If this gateway dies before it wrote the inbox rows, crash repair finds the conversation by this row.
            let activity = environment.activity();
            loading
                .retry_while_owner(&ownership, || store.append(id, &[], Some(activity)))
                .await?;
            loading
                .retry_while_owner(&ownership, || store.settle(id, &settle))
                .await?;
            crate::seldom::seldom!(INFO, "uncertain entries settled", conversation = %id, entries = settle.len());
        }
        for LogRow { record: entry, .. } in settle {
            let Some(participants) = &mut self.participants else {
                self.log.restore(PendingEntry::without_effects(entry));
                continue;
            };
            let kind = participants.details.kind;
            let mut unknown = users_of(&entry);
            unknown.retain(|user| !participants.knows(user));
            for user in unknown {
                let row = loading
                    .retry_while_owner(&ownership, || store.participant(id, kind, &user))
                    .await?;
                participants.learn(&user, row);
            }
            let mut pending = PendingEntry::new(id, participants, entry);
            if let Some(rows) = pending.effects.rows.take()
                && !broken(Mutation::Apply)
            {
                loading
                    .retry_while_owner(&ownership, || store.apply(id, &rows))
                    .await?;
            }
            self.log.restore(pending);
        }
        Ok(())
    }
}

/// The ends of the two logs that a previous owner left.
struct Ends {
    tail: Tail<Entry>,
    states: Vec<(Seq, EntryState)>,
    changes: Option<ChangesTail>,
}

async fn read_ends(
    id: ConversationId,
    store: &dyn Store,
    ownership: &Ownership,
    loading: &mut Loading,
) -> Result<Ends, Error> {
    let LogTail {
        tail,
        states,
        may_have_changes,
    } = loading
        .read(ownership, || store.tail(id, TAIL_ENTRIES))
        .await?;
    let changes = if may_have_changes {
        let tail = loading.read(ownership, || store.changes_tail(id, TAIL_ENTRIES));
        Some(tail.await?)
    } else {
        None
    };
    // Rule [epoch-above]: nothing is written below an epoch that is stored, as it would be after a restore with an older ring.
    // The next takeover would take it for what a deposed owner wrote.
    let changed = || changes.iter().flat_map(|changes| &changes.tail.rows);
    let stored = tail.rows.iter().map(|row| row.epoch);
    let stored = stored.chain(changed().map(|row| row.epoch)).max();
    ownership.check_above(stored.unwrap_or_default())?;
    let read = tail.rows.iter().map(|row| row.record.weight());
    let read = read.chain(changed().map(|row| row.record.weight())).sum();
    loading.has_read(read);
    Ok(Ends {
        tail,
        states,
        changes,
    })
}

/// What an owner has in memory of its newest entries.
fn remembered(records: Vec<Arc<Entry>>) -> (RecentEntries, ClientIds) {
    let (mut recent, mut client_ids) = (RecentEntries::default(), ClientIds::default());
    for entry in records {
        client_ids.remember(&entry);
        recent.push(entry);
    }
    (recent, client_ids)
}

/// Returns the valid log of a tail.
fn take_over(
    id: ConversationId,
    tail: &Tail<Entry>,
    ownership: &Ownership,
) -> Result<Takeover<PendingEntry>, Error> {
    let epoch = if broken(Mutation::Epoch) {
        1
    } else {
        ownership.epoch()
    };
    Log::take_over(tail, epoch).map_err(|incomplete| {
        crate::seldom::seldom!(ERROR, "the log is damaged: stop all gateways and run chat-gateway store mend", conversation = %id, %incomplete);
        Error::DAMAGED
    })
}

/// Begins to follow a conversation that is being loaded. `None` if no consumer is configured.
async fn read_offsets(
    id: ConversationId,
    environment: &Environment,
    ownership: &Arc<Ownership>,
    certain: Cursor,
    loading: &mut Loading,
) -> store::Result<Option<Followed>> {
    let Some(consumers) = &environment.settings.consumers else {
        return Ok(None);
    };
    let store = &environment.store;
    let stored = loading.read(ownership, || store.offsets(id)).await?;
    let following = Following::new(id, consumers.clone(), ownership.clone(), &stored, certain);
    Ok(Some(Followed::new(following)))
}

/// Reads the participants that an owner has in memory from the start: all of a dm or group, none of a channel.
async fn known_participants(
    id: ConversationId,
    row: &ConversationRow,
    store: &dyn Store,
    ownership: &Ownership,
    loading: &mut Loading,
) -> store::Result<Vec<ParticipantRow>> {
    let kind = row.details.kind;
    let mut all: Vec<ParticipantRow> = Vec::new();
    if kind == Kind::Channel {
        return Ok(all);
    }
    loop {
        let after = all.last().map(|r| r.participant.user.clone());
        let page = loading
            .read(ownership, || {
                store.participants(id, kind, after.as_ref(), PAGE_ITEMS_MAX)
            })
            .await?;
        loading.has_read(page.iter().map(|row| row.participant.weight()).sum());
        let full = page.len() == PAGE_ITEMS_MAX;
        all.extend(page);
        if !full {
            return Ok(all);
        }
    }
}
