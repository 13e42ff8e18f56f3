//! Keeps operations that cannot be handled yet. Some wait for a lookup in the store: the membership of a channel's user,
//! or an earlier message with the same client id. Others wait until a change is committed. Only the operations of the
//! same users wait; all others continue, however slow the store is.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
};

use futures_util::future::join_all;
use tokio::time::Instant;

use super::{
    Command, Done, Owner,
    files::{self, FoundFile, LookedUp},
};
use crate::{
    chat::{
        error::Error,
        operation::{Operation, Waits},
    },
    model::{
        AttachmentId, ClientId, ConversationId, Entry, EntryState, Kind, Seq, UserId, file_ids,
        limits::{ATTACHMENTS_MAX, DELETE_SEQS_MAX, LOOKUPS_IN_FLIGHT_MAX, MAILBOX_OPERATIONS_MAX},
    },
    store::{self, ParticipantRow, Store},
};

/// The parked operations of one conversation.
#[derive(Default)]
pub(super) struct Parked {
    commands: VecDeque<Command>,
    /// The users who asked for these commands. Their next commands are parked too, so that none overtakes another.
    actors: HashSet<UserId>,
    /// The lookups that the store has not answered yet.
    in_flight: HashSet<Lookup>,
    /// The files that were looked up for these commands.
    pub files: LookedUp,
}

/// A question to the store whose answer an operation needs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Lookup {
    /// The row of a channel's user, because a channel has not all its participants in memory.
    Participant(UserId),
    /// The entry with a client id that is not in memory. It is looked up in `sends` if the frame says `retry`.
    Sent(UserId, ClientId),
    /// An entry that is not in memory, with its state.
    Entry(Seq),
    /// The reactions of a user to an entry.
    Reactions(Seq, UserId),
    /// An uploaded file that a message is to have.
    File(AttachmentId),
    /// Whether these users may be in one more conversation.
    FullInbox(Vec<UserId>),
}

/// The answer to one lookup.
enum Found {
    Participant(Option<ParticipantRow>),
    Sent(Option<Seq>),
    Entry(Box<(Arc<Entry>, EntryState)>),
    Reactions(Vec<(String, bool)>),
    File(Instant, Option<FoundFile>),
    /// A user who is in as many conversations as one may be in.
    FullInbox(Option<UserId>),
}

/// The answers to lookups that were made together.
pub(super) struct LookupResults(Vec<(Lookup, store::Result<Found>)>);

impl Parked {
    /// Takes all commands, oldest first.
    pub(super) fn take(&mut self) -> VecDeque<Command> {
        self.actors.clear();
        std::mem::take(&mut self.commands)
    }
}

impl Owner {
    /// Keeps a command that cannot be handled yet. Returns the command if it can be.
    pub(super) fn park(&mut self, command: Command) -> Option<Command> {
        if command.reply.is_closed() {
            return None; // The caller does not wait any more.
        }
        let waits = self.parked.actors.contains(&command.actor)
            || self.awaits_commit(&command)
            || self.awaits_room(&command)
            || !self.lookups(&command).is_empty();
        if !waits {
            return Some(command);
        }
        if self.parked.commands.len() >= MAILBOX_OPERATIONS_MAX {
            drop(command.reply.send(Err(Error::BUSY)));
            return None;
        }
        self.parked.actors.insert(command.actor.clone());
        self.parked.commands.push_back(command);
        None
    }

    /// Whether the command depends on a change that is not committed yet, or whose rows are not stored yet.
    fn awaits_commit(&self, command: &Command) -> bool {
        let Some(participants) = &self.participants else {
            return false;
        };
        match command.operation.waits() {
            Waits::Nothing | Waits::Room => false,
            Waits::Creation => participants.committed().is_none() || self.awaits_effects(1),
            Waits::Dm => {
                participants.details.kind == Kind::Dm && participants.committed().is_none()
            }
            Waits::Reading => participants.awaits_commit(&command.actor, false),
            Waits::Membership => participants.awaits_commit(&command.actor, true),
        }
    }

    /// Whether the command is a change, and the log of changes is full.
    fn awaits_room(&self, command: &Command) -> bool {
        command.operation.waits() == Waits::Room && !self.changes.log.can_append()
    }

    /// Whether a message that is not appended yet is to have a file (rule [naming]).
    pub(super) fn awaits_file(&self, file: AttachmentId) -> bool {
        let commands = self.parked.commands.iter().chain(&self.backlog);
        let names = |command: &Command| match &command.operation {
            Operation::Send(draft) => files::includes(draft.content.attachments(), file),
            _ => false,
        };
        commands.into_iter().any(names)
    }

    /// Puts all parked commands before the later ones in the backlog. Those that must still wait are parked again.
    pub(super) fn unpark(&mut self) {
        let mut unparked = self.parked.take();
        unparked.append(&mut self.backlog);
        self.backlog = unparked;
    }

    /// The lookups that are needed before the command can be handled.
    fn lookups(&self, command: &Command) -> Vec<Lookup> {
        let Command {
            actor, operation, ..
        } = command;
        let mut lookups = Vec::new();
        let Some(participants) = &self.participants else {
            lookups.extend(self.newcomers(command).map(Lookup::FullInbox));
            return lookups;
        };
        let committed = participants.committed();
        let details = committed.map_or(&participants.details, |c| c.details);
        let actor = operation.depends_on_actor(details).then_some(actor);
        // An actor who is not in the channel is refused anyway, so the store is not asked about the user they name.
        let is_in =
            |actor: &UserId| !participants.is_channel() || participants.get(actor).is_some();
        let subject = operation.subject().filter(|_| actor.is_none_or(is_in));
        for user in actor.into_iter().chain(subject) {
            if !participants.knows(user) {
                lookups.push(Lookup::Participant(user.clone()));
            }
        }
        if let Operation::Send(draft) = operation
            && draft.retry
            && self
                .client_ids
                .find(&draft.sender, draft.client_id)
                .is_none()
        {
            lookups.push(Lookup::Sent(draft.sender.clone(), draft.client_id));
        }
        if lookups.is_empty() {
            self.file_lookups(command, &mut lookups);
        }
        if lookups.is_empty() {
            self.entry_lookups(command, &mut lookups);
        }
        if lookups.is_empty() {
            lookups.extend(self.newcomers(command).map(Lookup::FullInbox));
        }
        lookups
    }

    /// The files that must be known before the command can be handled.
    fn file_lookups(&self, command: &Command, lookups: &mut Vec<Lookup>) {
        let Operation::Send(draft) = &command.operation else {
            return;
        };
        let mut files = file_ids(draft.content.attachments())
            .take(ATTACHMENTS_MAX)
            .peekable();
        // Most messages have no file, and nothing is read for a user who is refused anyway.
        if files.peek().is_none() {
            return;
        }
        let participants = self.participants.as_ref();
        if participants.is_none_or(|p| p.get(&command.actor).is_none()) {
            return;
        }
        let unknown = files.filter(|file| !self.parked.files.has(*file));
        lookups.extend(unknown.map(Lookup::File));
    }

    /// The entries and reactions that must be known before the command can be handled.
    fn entry_lookups(&self, command: &Command, lookups: &mut Vec<Lookup>) {
        let Some(participants) = &self.participants else {
            return;
        };
        // Nothing is read for a user who is refused anyway.
        let actor = participants.get(&command.actor);
        let is_moderator =
            matches!(&command.operation, Operation::Delete(delete) if delete.as_moderator);
        if actor.is_none() && !is_moderator {
            return;
        }
        let is_unknown = |seq: &Seq| {
            let exists = (1..=self.log.head()).contains(seq);
            exists && !self.recent.has(*seq) && self.changes.states.entry(*seq).is_none()
        };
        let mut entry = |seq: Seq| {
            if is_unknown(&seq) {
                lookups.push(Lookup::Entry(seq));
            }
        };
        match &command.operation {
            Operation::Edit(edit) => entry(edit.seq),
            Operation::Delete(delete) => {
                let seqs = delete.seqs.iter().take(DELETE_SEQS_MAX);
                seqs.for_each(|&seq| entry(seq));
            }
            // The mark is stored with the number of messages up to it (rule [read-texts]).
            Operation::Read { seq } => entry(actor.map_or(*seq, |a| a.read_seq.max(*seq))),
            Operation::React(react) => {
                entry(react.seq);
                let states = &self.changes.states;
                let exists = (1..=self.log.head()).contains(&react.seq);
                if exists && states.reactions_of(react.seq, &command.actor).is_none() {
                    lookups.push(Lookup::Reactions(react.seq, command.actor.clone()));
                }
            }
            // Each is named, so that nobody who adds one forgets that an older message must be read first.
            Operation::Create(_)
            | Operation::Details
            | Operation::Participants { .. }
            | Operation::Add { .. }
            | Operation::Remove { .. }
            | Operation::Join
            | Operation::Leave
            | Operation::SetRole { .. }
            | Operation::Update { .. }
            | Operation::Send(_)
            | Operation::History { .. }
            | Operation::Delivered(_)
            | Operation::Typing
            | Operation::Head
            | Operation::CatchUp { .. }
            | Operation::Reactors(_)
            | Operation::Changes { .. }
            | Operation::CatchUpChanges { .. }
            | Operation::Files { .. }
            | Operation::CheckFile { .. }
            | Operation::SetConsumer { .. }
            | Operation::Load
            | Operation::Repair => {}
        }
    }

    /// Starts the lookups that the parked commands need, up to the limit.
    pub(super) fn start_lookups(&mut self) {
        let kind = self.participants.as_ref().map(|p| p.details.kind);
        // Without participants only their inboxes are looked up.
        let kind = kind.unwrap_or(Kind::Group);
        let mut lookups = Vec::new();
        for command in &self.parked.commands {
            let free = LOOKUPS_IN_FLIGHT_MAX.saturating_sub(self.parked.in_flight.len());
            if free == 0 {
                break;
            }
            for lookup in self.lookups(command).into_iter().take(free) {
                if self.parked.in_flight.insert(lookup.clone()) {
                    lookups.push(lookup);
                }
            }
        }
        if lookups.is_empty() {
            return;
        }
        let (id, head, environment) = (self.id, self.log.head(), self.environment.clone());
        self.work.push(Box::pin(async move {
            let store = &environment.store;
            let max = environment.settings.conversations_per_user_max;
            let results = lookups.into_iter().map(async |lookup| {
                let found = match &lookup {
                    Lookup::Participant(user) => store
                        .participant(id, kind, user)
                        .await
                        .map(Found::Participant),
                    Lookup::Sent(sender, client) => {
                        let seq = find_sent(&**store, id, sender, *client, head).await;
                        seq.map(Found::Sent)
                    }
                    Lookup::Entry(seq) => find_entry(&**store, id, *seq).await,
                    Lookup::Reactions(seq, user) => {
                        let found = store.reactions_of(id, user, *seq, *seq).await;
                        let emoji = |(_, emoji, on)| (emoji, on);
                        found.map(|found| Found::Reactions(found.into_iter().map(emoji).collect()))
                    }
                    Lookup::File(file) => {
                        let found = files::find(&**store, *file).await;
                        found.map(|(since, found)| Found::File(since, found))
                    }
                    Lookup::FullInbox(users) => {
                        let max = max.unwrap_or(usize::MAX);
                        let full = environment.inbox_limits.first_full(&**store, users, max);
                        full.await.map(Found::FullInbox)
                    }
                };
                (lookup, found)
            });
            Done::Found(LookupResults(join_all(results).await))
        }));
    }

    /// Applies the answers of the store, and unparks the commands.
    pub(super) fn found(&mut self, LookupResults(results): LookupResults) {
        let mut unparked = self.parked.take();
        // Commands that were unparked for another reason may need these lookups too.
        unparked.append(&mut self.backlog);
        let mut failed = HashMap::new();
        for (lookup, found) in results {
            self.parked.in_flight.remove(&lookup);
            match (&lookup, found) {
                (Lookup::Participant(user), Ok(Found::Participant(row))) => {
                    if let Some(participants) = &mut self.participants {
                        participants.learn(user, row);
                    }
                }
                (Lookup::Sent(sender, client), Ok(Found::Sent(Some(seq)))) => {
                    self.client_ids.remember_at(sender, *client, seq);
                }
                (Lookup::Sent(sender, client), Ok(Found::Sent(None))) => {
                    // The message is new: no other one of this sender was handled since the lookup began.
                    for command in &mut unparked {
                        if let Operation::Send(draft) = &mut command.operation
                            && (&draft.sender, draft.client_id) == (sender, *client)
                        {
                            draft.retry = false;
                        }
                    }
                }
                (Lookup::Entry(_), Ok(Found::Entry(found))) => {
                    let (entry, state) = *found;
                    self.changes.states.know(entry, state);
                }
                (Lookup::Reactions(seq, user), Ok(Found::Reactions(emoji))) => {
                    self.changes.states.know_reactions(*seq, user, emoji);
                }
                (Lookup::File(file), Ok(Found::File(since, found))) => {
                    self.parked.files.learn(*file, since, found);
                }
                (Lookup::FullInbox(users), Ok(Found::FullInbox(full))) => {
                    self.found_full(users, full.as_ref(), &mut unparked);
                }
                (_, Ok(_)) => debug_assert!(false, "the result is not of the kind of its lookup"),
                (_, Err(error)) => {
                    failed.insert(lookup, Error::from(error));
                }
            }
        }
        self.refuse(&failed, &mut unparked);
        let failed = failed.len();
        if failed > 0 {
            crate::seldom::seldom!(
                WARN,
                "lookups of participants or earlier messages failed",
                conversation = %self.id,
                failed
            );
        }
        unparked.append(&mut self.backlog);
        self.backlog = unparked;
    }
}

impl Owner {
    /// Answers the commands whose lookups failed.
    fn refuse(&self, failed: &HashMap<Lookup, Error>, unparked: &mut VecDeque<Command>) {
        if failed.is_empty() {
            return;
        }
        for command in std::mem::take(unparked) {
            let lookups = self.lookups(&command);
            match lookups.iter().find_map(|lookup| failed.get(lookup)) {
                Some(error) => drop(command.reply.send(Err(error.clone()))),
                None => unparked.push_back(command),
            }
        }
    }
}

/// Finds the committed entry with a client id. There may be one `sends` row per epoch; a row counts only if the log at
/// its seq has that client id.
async fn find_sent(
    store: &dyn Store,
    id: ConversationId,
    sender: &UserId,
    client_id: ClientId,
    head: Seq,
) -> store::Result<Option<Seq>> {
    for send in store.sends(id, sender, client_id).await? {
        // Rule [sends-epoch]: a row of a deposed epoch may point at a seq that another entry took.
        if send.seq <= head
            && let [row] = &store.log(id, send.seq, send.seq).await?.rows[..]
            && row.record.client_id == client_id
            && row.record.sender == *sender
        {
            return Ok(Some(send.seq));
        }
    }
    Ok(None)
}

/// Reads one entry with its state.
async fn find_entry(store: &dyn Store, id: ConversationId, seq: Seq) -> store::Result<Found> {
    let page = store.log(id, seq, seq).await?;
    let state = page.states.into_iter().next();
    let state = state.map_or_else(EntryState::default, |(_, state)| state);
    match page.rows.into_iter().next() {
        Some(row) => Ok(Found::Entry(Box::new((row.record, state)))),
        None => Err(store::Error::Corrupt {
            operation: "find_entry",
            reason: format!("{id}: entry {seq} is not there"),
        }),
    }
}

#[cfg(test)]
mod tests;
