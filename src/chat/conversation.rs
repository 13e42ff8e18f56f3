//! The owner of one conversation: the only task that changes its log. It gets its operations from a mailbox.
//!
//! An entry is committed when its row is durable and the lease still held after the write. Only then it is acknowledged
//! and published. The rules are in `log.rs` and `participants.rs`; this file and its submodules do the I/O.

mod answers;
mod applying;
mod changes;
mod changing;
mod effects;
mod environment;
mod files;
mod finishing;
mod followed;
mod loading;
mod newcomers;
mod panicked;
mod parked;
mod publishing;
mod retrying;
mod takeover;
mod taking_changes;
mod writing;

use std::{
    collections::{HashMap, VecDeque},
    future::Future,
    ops::Range,
    sync::Arc,
};

use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::{
    select,
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};

pub(super) use self::environment::Environment;
pub use self::environment::Settings;
use self::{
    changes::ChangeLog,
    loading::load,
    parked::{LookupResults, Parked},
    retrying::retry_while_owner,
    writing::write_until_stored,
};
pub(super) use self::{changes::PendingChange, effects::PendingEntry, files::has_file};
use super::{
    client_ids::ClientIds,
    error::Error,
    following::Followed,
    lease::Ownership,
    log::Log,
    open::{Held, OpenPermit},
    operation::{Changes, GetReactors, Operation, Outcome, Page},
    participants::Participants,
    publish::{Recipients, RedeliveryGuard},
    recent::RecentEntries,
};
use crate::{
    model::{
        AttachmentId, ConsumerName, ConversationId, Kind, Rev, Seq, UserId,
        limits::MAILBOX_OPERATIONS_MAX,
    },
    mutation::{Mutation, broken},
    store::{self, ConsumerState, LogRow, Mark},
    tasks::contain,
};

/// An operation in the mailbox of an owner.
pub(super) struct Command {
    pub actor: UserId,
    pub operation: Operation,
    pub reply: oneshot::Sender<Result<OwnerReply, Error>>,
    /// Whether the users whom it brings into the conversation may be in one more.
    pub newcomers_fit: bool,
}

/// The answer of an owner. The owner does not read old entries itself, because all other operations would wait. It
/// answers which rows may be read, and the caller reads them.
#[derive(Debug)]
pub(super) enum OwnerReply {
    Ready(Outcome),
    /// A page of history. If entries have reactions, the caller reads which are those of the actor.
    Page {
        actor: UserId,
        page: Page,
    },
    /// The caller reads this part of the log.
    ReadLog(Box<ReadLog>),
    /// Changes. The caller reads the actor's own reactions.
    Changes {
        actor: UserId,
        page: Changes,
    },
    /// The caller reads the changes at these revs.
    ReadChanges {
        actor: UserId,
        after: Rev,
        revs: Range<Rev>,
        applied: Rev,
    },
    /// The caller reads who reacted.
    ReadReactors(ReadReactors),
    /// The message is a repetition of the entry with this seq, which is not in memory. The caller reads the entry.
    ReadSent {
        seq: Seq,
    },
    /// The caller reads which of these files the messages up to `head` have.
    ReadFiles {
        files: Vec<AttachmentId>,
        head: Seq,
    },
    /// The caller reads whether a message has a file.
    CheckFile(FileCheck),
    /// The caller writes the state of a consumer.
    SetConsumer(ConsumerName, ConsumerState),
    /// The caller reads this page of a channel's participants.
    ReadParticipants {
        actor: UserId,
        after: Option<UserId>,
        limit: usize,
    },
}

/// The question whether a message has a file.
#[derive(Debug)]
pub(super) struct FileCheck {
    pub file: AttachmentId,
    /// Whether a message that is not stored yet may have it.
    pub is_busy: bool,
    /// The newest entry of the log. Later rows are of earlier owners and do not count.
    pub newest: Seq,
    /// A row of this owner, which is written first (rule [fence]). `None` if there is one already.
    pub fence: Option<LogRow>,
}

/// A part of the log that a caller reads.
#[derive(Debug)]
pub(super) struct ReadLog {
    pub actor: UserId,
    pub from: Seq,
    pub to: Seq,
    pub head: Seq,
    /// The newest applied rev.
    pub rev: Rev,
    /// The newest rev that may have changed an entry of this part. Pages that were read before it are out of date (rule
    /// [cache]).
    pub touched: Rev,
}

/// The question who reacted to an entry.
#[derive(Debug)]
pub(super) struct ReadReactors {
    pub kind: Kind,
    pub asked: GetReactors,
    /// Whether the entry is known not to be deleted. Otherwise the caller reads that too.
    pub is_there: bool,
}

type Reply = oneshot::Sender<Result<OwnerReply, Error>>;

pub(super) fn mailbox() -> (mpsc::Sender<Command>, mpsc::Receiver<Command>) {
    mpsc::channel(MAILBOX_OPERATIONS_MAX)
}

/// The right to open one conversation.
pub(super) struct Opening {
    pub held: Arc<Held>,
    /// `None` if the conversation must wait until another one was evicted.
    pub permit: Option<OpenPermit>,
    pub ownership: Arc<Ownership>,
}

/// Runs one conversation until it is idle or evicted, the gateway drains, or it cannot go on.
///
/// `leave` removes the conversation from the open ones if its mailbox is empty, in one step, and returns whether it did.
/// So no request reaches an owner that has left, and no request is overtaken while it waits for the next owner.
pub(super) async fn own(
    id: ConversationId,
    environment: Arc<Environment>,
    Opening {
        held,
        permit,
        ownership,
    }: Opening,
    mut commands: mpsc::Receiver<Command>,
    stop: impl Future<Output = ()>,
    leave: impl Fn() -> bool,
) {
    let revoked = ownership.revoked();
    let loaded = select! {
        biased;
        () = revoked.cancelled() => Err(Error::Moved),
        loaded = load(id, &environment, &held, permit, ownership) => loaded,
    };
    match loaded {
        Ok((_permit, mut owner)) => {
            let running = async {
                // The previous owner may not have published these. Receivers ignore a seq that they have.
                for seq in owner.log.settled() + 1..=owner.log.head() {
                    owner.carry_out(seq);
                }
                owner.publish_taken_over();
                owner.run(&mut commands, stop, leave).await
            };
            let ended = contain("the owner of a conversation", id, running).await;
            if ended == Some(End::Left) {
                return;
            }
            if ended.is_none() {
                owner.give_up_after_panic();
            }
            owner.finish(&mut commands).await;
            if ended.is_none() {
                owner.wait_for_writes().await;
            }
        }
        Err(error) => {
            crate::seldom::seldom!(WARN, "a conversation could not be loaded", conversation = %id, %error);
            loop {
                while let Ok(command) = commands.try_recv() {
                    drop(command.reply.send(Err(error.clone())));
                }
                if leave() {
                    return;
                }
            }
        }
    }
}

/// The end of an owner's run.
#[derive(PartialEq, Eq)]
enum End {
    /// The conversation is no longer open, and nothing is left to do. The next owner may already exist.
    Left,
    /// The waiting requests must still be answered, and the settled seq must be stored for the next owner.
    Unfinished,
}

struct Owner {
    id: ConversationId,
    held: Arc<Held>,
    environment: Arc<Environment>,
    /// The ownership under which the conversation was loaded. The owner ends with it.
    ownership: Arc<Ownership>,
    log: Log<PendingEntry>,
    recent: RecentEntries,
    client_ids: ClientIds,
    /// `None` if the conversation does not exist yet.
    participants: Option<Participants>,
    changes: ChangeLog,
    /// [`Entry::texts`] of the newest appended entry.
    ///
    /// [`Entry::texts`]: crate::model::Entry::texts
    texts: u64,
    /// The newest entry whose inbox rows are queued or stored.
    queued: Seq,
    /// Rows appended since the last write to the store.
    unwritten: Vec<LogRow>,
    /// Operations from the mailbox that were not handled yet.
    backlog: VecDeque<Command>,
    parked: Parked,
    work: FuturesUnordered<BoxFuture<'static, Done>>,
    /// Number of writes to the two logs in progress. Each ends as [`Done::Written`] or [`Done::ChangesWritten`].
    writing: usize,
    /// Number of read and delivered marks that are being stored.
    marks: usize,
    /// The consumers of the log. `None` if there are none.
    followed: Option<Followed>,
    /// The settled seq that this owner stored for the next one, or tried to store.
    stored_settled: Seq,
    /// The newest entry if its row is of an earlier owner, otherwise 0.
    inherited: Seq,
    /// The last minute for which an `activity` row was written with entries. Changes have their own: an entry is committed
    /// after the entries before it, but not after the changes.
    active_minute: u32,
    /// The time of each user's last typing event.
    typing: HashMap<UserId, Instant>,
    /// The reason why the owner must end.
    failed: Option<Error>,
}

/// The end of some work that the owner started.
enum Done {
    /// The store has the rows at these positions of the log.
    Written(Range<Seq>),
    /// The rows that follow from this entry are stored.
    RowsStored(Seq),
    /// Every gateway concerned has queued a publication for its sockets.
    Delivered {
        seq: Seq,
        /// Whether the publication is the entry itself. If not, it is a notice of a membership.
        is_entry: bool,
        /// Whether the acknowledgement of the entry waited for this.
        is_awaited: bool,
        guard: RedeliveryGuard,
    },
    /// The store has the changes at these revs.
    ChangesWritten(Range<Rev>),
    /// The effects of the changes at these revs are stored.
    ChangesApplied(Range<Rev>),
    /// Every gateway concerned has queued a publication of changes for its sockets.
    ChangesDelivered {
        /// The changes that are settled by it.
        revs: Range<Rev>,
        guard: RedeliveryGuard,
        /// The users whose inbox rows get the rev. `None` for channels.
        members: Option<Arc<Recipients>>,
        rev: Rev,
    },
    /// Reactions waited long enough before they are written.
    ChangesRested,
    /// Reactions were gathered for long enough.
    ChangesDue,
    /// The store has a read or delivered mark.
    Marked {
        mark: Mark,
        away: bool,
        reply: Reply,
    },
    /// The store has this settled seq, or the attempt to store it failed.
    SettledStored(Seq, Rev),
    /// The store has the progress of the consumers, as it was when this began.
    ProgressStored,
    /// The store has the rows of a new dm.
    DmCreated(Reply),
    /// The store answered some lookups.
    Found(LookupResults),
    /// The owner cannot go on, because a write failed for good.
    Lost(store::Error),
}

impl Owner {
    async fn run(
        &mut self,
        commands: &mut mpsc::Receiver<Command>,
        stop: impl Future<Output = ()>,
        leave: impl Fn() -> bool,
    ) -> End {
        const AT_ONCE: usize = 64;
        let mut stop = Box::pin(stop.fuse());
        let revoked = self.ownership.revoked();
        let mut retired = Box::pin(self.held.retired().cancelled_owned());
        let mut idle_at = self.idle_at();
        let (mut closing, mut closed) = (false, false);
        let (mut is_retired, mut is_idle) = (false, false);
        let mut received = Vec::new();
        while self.failed.is_none() {
            if !self.backlog.is_empty() && self.accepts() {
                self.handle_backlog();
                continue;
            }
            let mut quiet = self.work.is_empty() && self.backlog.is_empty();
            if closed && quiet {
                break;
            }
            // A conversation that does not exist is closed at once.
            let is_over = is_retired || is_idle || self.participants.is_none();
            if is_over && quiet && !closing {
                // Without this the next owner would settle the last entries again, and publish them again.
                if !self.has_stored_settled() {
                    self.start_storing_settled();
                    quiet = false;
                } else if !self.has_stored_progress() {
                    self.start_storing_progress();
                    quiet = false;
                } else if leave() {
                    return End::Left;
                }
            }
            select! {
                biased;
                Some(done) = self.work.next(), if !self.work.is_empty() => self.done(done),
                count = commands.recv_many(&mut received, AT_ONCE), if self.backlog.is_empty() && !closed => {
                    // The mailbox is closed and empty: no sender is left that could still add an operation.
                    closed = count == 0;
                    closing |= closed;
                    self.backlog.extend(received.drain(..));
                    idle_at = self.idle_at();
                    is_idle = false;
                }
                () = revoked.cancelled() => self.failed = Some(Error::Closed),
                () = &mut stop, if !closing => {
                    closing = true;
                    commands.close();
                }
                () = &mut retired, if !is_retired => {
                    is_retired = true;
                    self.followed.iter().for_each(|followed| followed.0.leave());
                }
                () = sleep_until(idle_at), if quiet && !is_idle => is_idle = true,
            }
            self.weigh();
        }
        End::Unfinished
    }

    fn idle_at(&self) -> Instant {
        Instant::now() + self.environment.settings.idle
    }

    /// Whether another operation may be handled now.
    fn accepts(&self) -> bool {
        // Participants are forgotten only while nothing is in progress, so the owner begins nothing until the log is settled.
        let too_many = self
            .participants
            .as_ref()
            .is_some_and(Participants::has_too_many_known);
        self.failed.is_none() && self.log.can_append() && (!too_many || self.log.is_settled())
    }

    /// Handles the backlog until the log is full.
    fn handle_backlog(&mut self) {
        let quiet = self.log.is_settled();
        if let Some(participants) = &mut self.participants
            && participants.has_too_many_known()
            && quiet
        {
            participants.forget_known();
        }
        while self.accepts()
            && let Some(command) = self.backlog.pop_front()
        {
            // A deposed owner answers nothing, not even a read.
            let is_check = matches!(command.operation, Operation::CheckFile { .. });
            let answers =
                self.ownership.holds(Instant::now()) || (is_check && broken(Mutation::EraseLease));
            if !answers {
                self.backlog.push_front(command);
                self.failed = Some(Error::Closed);
            } else if let Some(command) = self.park(command) {
                self.handle(command);
            }
        }
        self.start_lookups();
        self.write_appended();
        self.write_changes();
        let (recent, applied) = (self.recent.first(), self.changes.applied);
        self.changes.states.forget(recent, applied);
    }

    /// Starts one write of all rows appended in this round.
    fn write_appended(&mut self) {
        if self.unwritten.is_empty() {
            return;
        }
        let rows = std::mem::take(&mut self.unwritten);
        let next = self.log.next();
        let written = next - rows.len() as Seq..next;
        let activity = self.environment.new_activity(&mut self.active_minute);
        let first = self.first_offsets();
        self.writing += 1;
        let (id, environment, ownership) =
            (self.id, self.environment.clone(), self.ownership.clone());
        self.work.push(Box::pin(async move {
            let write = |activity| environment.store.append(id, &rows, activity);
            match write_until_stored(&environment, &ownership, first, activity, write).await {
                Ok(()) => Done::Written(written),
                Err(error) => Done::Lost(error),
            }
        }));
    }

    #[expect(
        clippy::too_many_lines,
        reason = "a table: one end of each kind of work"
    )]
    fn done(&mut self, done: Done) {
        match done {
            Done::Written(positions) => {
                self.writing -= 1;
                self.log.written(positions);
                let holds = self.ownership.holds(Instant::now());
                if !holds {
                    self.failed = Some(Error::Closed);
                }
                for seq in self.log.commit(holds) {
                    self.committed(seq);
                }
                self.tell_consumers();
            }
            Done::RowsStored(seq) => {
                self.one_less_awaited(seq);
                self.log.release(seq);
                if seq == 1 {
                    self.unpark();
                }
            }
            Done::Delivered {
                seq,
                is_entry,
                is_awaited,
                guard,
            } => self.delivered(seq, is_entry, is_awaited, guard),
            Done::ChangesWritten(revs) => self.changes_written(revs),
            Done::ChangesApplied(revs) => self.changes_applied(revs),
            Done::ChangesDelivered {
                revs,
                guard,
                members,
                rev,
            } => {
                let inbox = &self.environment.inbox;
                members
                    .into_iter()
                    .for_each(|m| inbox.queue_rev(self.id, m, rev));
                self.changes_delivered(revs, guard);
            }
            Done::ChangesRested => self.changes_rested(),
            Done::ChangesDue => self.changes_due(),
            Done::Marked { mark, away, reply } => {
                self.marks -= 1;
                self.apply_mark(mark, away);
                drop(reply.send(Ok(OwnerReply::Ready(Outcome::Done))));
            }
            Done::SettledStored(seq, rev) => {
                self.stored_settled = self.stored_settled.max(seq);
                self.changes.stored_settled = self.changes.stored_settled.max(rev);
            }
            Done::ProgressStored => {}
            Done::DmCreated(reply) => {
                if let Some(participants) = &mut self.participants
                    && participants.commit_dm()
                {
                    self.unpark();
                }
                drop(reply.send(Ok(OwnerReply::Ready(Outcome::Created { existed: false }))));
            }
            Done::Found(results) => self.found(results),
            Done::Lost(error) => {
                crate::seldom::seldom!(WARN, "the conversation is given up", conversation = %self.id, %error);
                self.failed = Some(error.into());
            }
        }
    }

    /// Handles an entry that has just been committed.
    fn committed(&mut self, seq: Seq) {
        self.environment.entries_committed.increment(1);
        if let Some(pending) = self.log.get(seq) {
            self.recent.push(pending.entry.clone());
        }
        if let Some(participants) = &mut self.participants
            && participants.commit(seq)
        {
            self.unpark();
        }
        self.carry_out(seq);
    }
}

#[cfg(test)]
mod tests;
