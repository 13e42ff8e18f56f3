//! The owner of one conversation: one task that alone changes its log, and the handle to ask it.
//!
//! An entry is committed, and only then acknowledged and published, when its row is durable and the lease
//! under which it was written still held afterwards. The rules are in `log.rs` and `participants.rs`;
//! here is the I/O around them.

mod answers;
mod broke;
#[cfg(test)]
mod comes_and_goes;
mod effects;
mod parked;
mod publishing;
mod room;
mod takeover;
#[cfg(test)]
mod told;

use std::{
    collections::{HashMap, VecDeque},
    future::Future,
    ops::Range,
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use metrics::{Counter, counter};
use tokio::{
    select,
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};

use self::{
    effects::PendingEntry,
    parked::{AllTold, Parked},
    room::load,
    takeover::insist,
};
use super::{
    client_ids::ClientIds,
    error::Error,
    inbox::InboxWriter,
    lease::{Lease, Ownership},
    log::Log,
    open::{Held, OpenPermit},
    operation::{Operation, Outcome},
    participants::Participants,
    publish::{Publish, RedeliveryGuard},
    recent::RecentEntries,
    unfinished::Unfinished,
};
use crate::{
    clock,
    memory::Memory,
    model::{ConversationId, GatewayId, Seq, UserId, limits::MAILBOX_OPERATIONS_MAX},
    store::{self, Activity, LogRow, Mark, Store},
    tasks::contain,
};

/// First and longest wait before a write with an unknown outcome is written again.
const REWRITE_AFTER: Duration = Duration::from_millis(20);
const REWRITE_AFTER_MAX: Duration = Duration::from_secs(1);

/// What the owner of a conversation must know of the configuration.
#[derive(Debug, Clone)]
pub struct Settings {
    pub body_bytes_max: usize,
    pub group_participants_max: usize,
    /// An owner without operations for this long lets go of its conversation.
    pub idle: Duration,
    /// An operation that takes longer is answered with `unavailable`; what it wrote may still be committed.
    pub operation_timeout: Duration,
    /// Conversations open at once; for one more, the one that was not used for longest is evicted.
    pub open_max: usize,
    /// What all of them, and pages of their history, may weigh.
    pub memory: Memory,
    /// About how many bytes a page of history may have.
    pub page_bytes_max: usize,
}

/// What every owner of this gateway needs.
pub(super) struct Environment {
    pub gateway: GatewayId,
    pub store: Arc<dyn Store>,
    pub publish: Arc<dyn Publish>,
    pub inbox: Arc<InboxWriter>,
    pub lease: Lease,
    pub settings: Settings,
    pub entries_committed: Counter,
    pub unfinished: Unfinished,
}

impl Environment {
    pub(super) fn new(
        gateway: GatewayId,
        store: Arc<dyn Store>,
        publish: Arc<dyn Publish>,
        inbox: Arc<InboxWriter>,
        lease: Lease,
        settings: Settings,
    ) -> Self {
        let entries_committed = counter!("chat_entries_committed_total");
        Self {
            gateway,
            store,
            publish,
            inbox,
            lease,
            settings,
            entries_committed,
            unfinished: Unfinished::default(),
        }
    }

    /// That this gateway writes to a conversation, now.
    fn activity(&self) -> Activity {
        Activity {
            gateway: self.gateway,
            minute: u32::try_from(clock::wall() / 60_000).unwrap_or_default(),
        }
    }
}

pub(super) struct Command {
    pub actor: UserId,
    pub operation: Operation,
    pub reply: oneshot::Sender<Result<OwnerReply, Error>>,
}

/// What the owner answers. A read of old entries is not done by the owner itself, which would keep
/// everyone else waiting: it says what may be read, and whoever asks reads it.
#[derive(Debug)]
pub(super) enum OwnerReply {
    Ready(Outcome),
    ReadLog {
        from: Seq,
        to: Seq,
        head: Seq,
    },
    /// A repeated message that has left memory: the entry with this seq acknowledges it.
    ReadSent {
        seq: Seq,
    },
    ReadParticipants {
        actor: UserId,
        after: Option<UserId>,
        limit: usize,
    },
}

type Reply = oneshot::Sender<Result<OwnerReply, Error>>;

pub(super) fn mailbox() -> (mpsc::Sender<Command>, mpsc::Receiver<Command>) {
    mpsc::channel(MAILBOX_OPERATIONS_MAX)
}

/// The right to open one conversation: its place, its room if there is some at once, and the ownership.
pub(super) struct Opening {
    pub held: Arc<Held>,
    pub room: Option<OpenPermit>,
    pub ownership: Arc<Ownership>,
}

/// Runs one conversation until it is idle or evicted, the gateway drains, or it cannot go on.
///
/// `leave` removes the conversation from those that are open if its mailbox is empty, in one step, and says whether it
/// has done so. So no request meets an owner that leaves, and none has to wait for the next owner, where one that was
/// asked later could come first.
pub(super) async fn own(
    id: ConversationId,
    environment: Arc<Environment>,
    Opening {
        held,
        room,
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
        loaded = load(id, &environment, &held, room, ownership) => loaded,
    };
    match loaded {
        Ok((_room, mut owner)) => {
            let running = async {
                // Nobody knows whether the previous owner published these. Receivers ignore a seq that they have.
                for seq in owner.log.settled() + 1..=owner.log.head() {
                    owner.carry_out(seq);
                }
                owner.run(&mut commands, stop, leave).await
            };
            let ended = contain("the owner of a conversation", id, running).await;
            if ended == Some(End::Left) {
                return;
            }
            if ended.is_none() {
                owner.broke();
            }
            owner.finish(&mut commands).await;
            if ended.is_none() {
                owner.written().await;
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

/// How an owner's run has ended.
#[derive(PartialEq, Eq)]
enum End {
    /// The conversation is not open any more, and nothing is left to do: the next owner may be there already.
    Left,
    /// Requests that still wait must be answered, and the settled mark be written for the next owner.
    Unfinished,
}

struct Owner {
    id: ConversationId,
    held: Arc<Held>,
    environment: Arc<Environment>,
    /// Under which it was loaded. When that has ended, so has this owner.
    ownership: Arc<Ownership>,
    log: Log<PendingEntry>,
    recent: RecentEntries,
    client_ids: ClientIds,
    /// `None` if the conversation does not exist yet.
    participants: Option<Participants>,
    /// Rows that were appended since the last write to the store.
    unwritten: Vec<LogRow>,
    /// Taken from the mailbox, not yet handled.
    backlog: VecDeque<Command>,
    parked: Parked,
    work: FuturesUnordered<BoxFuture<'static, Done>>,
    /// Writes to the log under way, of which each ends as [`Done::Stored`].
    writing: usize,
    /// Read and delivered marks that are being stored.
    marks: usize,
    /// Up to where the store knows that all is settled, as far as this owner has said so.
    marked: Seq,
    active_minute: u32,
    typing: HashMap<UserId, Instant>,
    failed: Option<Error>,
}

/// Something the owner was waiting for.
enum Done {
    /// The store has the rows at these positions of the log.
    Written(Range<Seq>),
    /// The rows that follow from this entry are stored.
    RowsStored(Seq),
    /// Every gateway concerned has queued a publication for its sockets.
    Delivered {
        seq: Seq,
        /// The publication is the entry itself, and not about somebody's membership.
        is_entry: bool,
        /// The entry is acknowledged only now.
        is_awaited: bool,
        guard: RedeliveryGuard,
    },
    Marked(Mark, Reply),
    /// The store knows that everything up to here is settled, or could not be told.
    Settled(Seq),
    DmCreated(Reply),
    Told(AllTold),
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
                self.work_off();
                continue;
            }
            let mut quiet = self.work.is_empty() && self.backlog.is_empty();
            if closed && quiet {
                break;
            }
            // A conversation that does not exist is not kept either.
            let is_over = is_retired || is_idle || self.participants.is_none();
            if is_over && quiet && !closing {
                // One that is used all the time stays: its next owner would settle, and tell of, its last entries again.
                if !self.is_marked() {
                    self.mark_settled();
                    quiet = false;
                } else if leave() {
                    return End::Left;
                }
            }
            select! {
                biased;
                Some(done) = self.work.next(), if !self.work.is_empty() => self.done(done),
                count = commands.recv_many(&mut received, AT_ONCE), if self.backlog.is_empty() && !closed => {
                    // Closed, and whoever was about to put something in has done so.
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
                () = &mut retired, if !is_retired => is_retired = true,
                () = sleep_until(idle_at), if quiet && !is_idle => is_idle = true,
            }
            self.weigh();
        }
        End::Unfinished
    }

    fn idle_at(&self) -> Instant {
        Instant::now() + self.environment.settings.idle
    }

    /// Whether another operation may be begun.
    fn accepts(&self) -> bool {
        let too_many = self
            .participants
            .as_ref()
            .is_some_and(Participants::knows_too_many);
        self.failed.is_none() && self.log.has_room() && (!too_many || self.log.is_settled())
    }

    /// Handles the backlog, as far as there is room in the log.
    fn work_off(&mut self) {
        let quiet = self.log.is_settled();
        if let Some(participants) = &mut self.participants
            && participants.knows_too_many()
            && quiet
        {
            participants.forget_known();
        }
        while self.accepts()
            && let Some(command) = self.backlog.pop_front()
        {
            // Who is deposed answers nothing, not even a read.
            if !self.ownership.holds(Instant::now()) {
                self.backlog.push_front(command);
                self.failed = Some(Error::Closed);
            } else if let Some(command) = self.park(command) {
                self.handle(command);
            }
        }
        self.ask_store();
        self.write_appended();
    }

    /// Writes everything appended in this round as one write.
    fn write_appended(&mut self) {
        if self.unwritten.is_empty() {
            return;
        }
        let rows = std::mem::take(&mut self.unwritten);
        let next = self.log.next();
        let written = next - rows.len() as Seq..next;
        let activity = self.environment.activity();
        let is_new = activity.minute != self.active_minute;
        self.active_minute = activity.minute;
        let activity = is_new.then_some(activity);
        self.writing += 1;
        let (id, environment, ownership) =
            (self.id, self.environment.clone(), self.ownership.clone());
        self.work.push(Box::pin(async move {
            let store = &environment.store;
            match insist(&ownership, || store.append(id, &rows, activity)).await {
                Ok(()) => Done::Written(written),
                Err(error) => Done::Lost(error),
            }
        }));
    }

    fn done(&mut self, done: Done) {
        match done {
            Done::Written(positions) => {
                self.writing -= 1;
                self.log.written(positions);
                if !self.ownership.holds(Instant::now()) {
                    self.failed = Some(Error::Closed);
                    return;
                }
                for seq in self.log.commit(true) {
                    self.committed(seq);
                }
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
            Done::Marked(mark, reply) => {
                self.marks -= 1;
                self.marked(mark);
                drop(reply.send(Ok(OwnerReply::Ready(Outcome::Done))));
            }
            Done::Settled(seq) => self.marked = self.marked.max(seq),
            Done::DmCreated(reply) => {
                if let Some(participants) = &mut self.participants
                    && participants.commit_founding()
                {
                    self.unpark();
                }
                drop(reply.send(Ok(OwnerReply::Ready(Outcome::Created { existed: false }))));
            }
            Done::Told(told) => self.told(told),
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

    /// Answers everyone who still waits, and leaves nothing for the next owner to settle.
    async fn finish(&mut self, commands: &mut mpsc::Receiver<Command>) {
        commands.close();
        let error = self.failed.clone().unwrap_or(Error::Closed);
        if !self.log.is_settled() {
            self.environment.unfinished.lost(self.id);
        }
        // Nothing of these was begun: whoever owns the conversation now may be asked instead.
        let parked = self.parked.take();
        for command in parked.into_iter().chain(self.backlog.drain(..)) {
            drop(command.reply.send(Err(Error::Moved)));
        }
        while let Some(command) = commands.recv().await {
            drop(command.reply.send(Err(Error::Moved)));
        }
        for reply in self.log.take().flat_map(|pending| pending.replies) {
            drop(reply.send(Err(error.clone())));
        }
        if self.failed.is_none() && !self.is_marked() {
            self.settle().await;
        }
    }

    /// Whether the next owner will find that it has nothing to settle.
    fn is_marked(&self) -> bool {
        self.marked >= self.log.settled()
    }

    fn mark_settled(&mut self) {
        let settled = self.settle();
        self.work.push(Box::pin(settled.map(Done::Settled)));
    }

    /// Tells the store that all is settled that is.
    fn settle(&self) -> impl Future<Output = Seq> + use<> {
        debug_assert!(
            self.log.is_settled(),
            "a conversation is closed with nothing in flight"
        );
        let (id, seq, store) = (self.id, self.log.settled(), self.environment.store.clone());
        async move {
            if let Err(error) = store.set_settled(id, seq).await {
                tracing::debug!(conversation = %id, %error, "left without a settled mark");
            }
            seq
        }
    }
}
