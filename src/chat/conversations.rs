//! Which conversations are open here: finds the owner of each, or makes one.

mod repair;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use dashmap::{DashMap, mapref::entry::Entry as Place};
use foldhash::quality::RandomState;
use futures_util::{FutureExt, StreamExt, future::Either, stream};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    conversation::{Answer, Command, Environment, Opening, Settings, mailbox, own},
    error::Error,
    history::History,
    inbox::InboxWriter,
    lease::{Lease, Ownership},
    open::{Held, Table},
    operation::{Listed, LogRange, Operation, Outcome, Page, ParticipantsPage, Sent},
    publish::Publish,
};
use crate::{
    model::{
        ConversationId, GatewayId, Kind, UserId,
        limits::{MAILBOX_OPERATIONS_KEPT, PAGE_ITEMS_MAX, SCAN_ROWS_MAX},
    },
    store::{self, ParticipantRow, Store},
    tasks::{Tasks, contain},
};

/// Conversations repaired at once after a crash.
const REPAIRS_AT_ONCE: usize = 32;

/// All conversations that this gateway owns. Cheap to clone.
#[derive(Clone)]
pub struct Conversations {
    shared: Arc<Shared>,
}

struct Shared {
    open: DashMap<ConversationId, Handle, RandomState>,
    table: Arc<Table>,
    environment: Arc<Environment>,
    history: History,
    tasks: Tasks,
    /// Fires when conversations are to be closed: after the sessions have gone.
    closing: CancellationToken,
}

#[derive(Clone)]
struct Handle {
    held: Arc<Held>,
    mailbox: mpsc::Sender<Command>,
    ownership: Arc<Ownership>,
    /// Fires when the owner has let go and another one may be made.
    gone: CancellationToken,
}

impl Handle {
    fn offer(&self, command: Command) -> Result<Arc<Ownership>, Rejected> {
        if command.operation.only_reads() && self.mailbox.capacity() <= MAILBOX_OPERATIONS_KEPT {
            return Err(Rejected::Refused(Error::BUSY));
        }
        self.held.used();
        match self.mailbox.try_send(command) {
            Ok(()) => Ok(self.ownership.clone()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(Rejected::Refused(Error::BUSY)),
            Err(mpsc::error::TrySendError::Closed(command)) => {
                Err(Rejected::Closing(self.gone.clone(), Box::new(command)))
            }
        }
    }

    /// Whether nothing is in the mailbox.
    fn is_unasked(&self) -> bool {
        self.mailbox.capacity() == self.mailbox.max_capacity()
    }
}

/// Why a command is not in an owner's mailbox.
enum Rejected {
    Refused(Error),
    /// The owner is letting go: once it has gone, the next one may have it.
    Closing(CancellationToken, Box<Command>),
}

impl Conversations {
    /// Whether this gateway may act as an owner at all: its lease has not ended.
    #[must_use]
    pub fn may_serve(&self) -> bool {
        self.shared.environment.lease.holds(Instant::now())
    }

    #[must_use]
    pub fn new(
        gateway: GatewayId,
        store: Arc<dyn Store>,
        publish: Arc<dyn Publish>,
        inbox: Arc<InboxWriter>,
        lease: Lease,
        settings: Settings,
        tasks: Tasks,
    ) -> Self {
        let history = History::new(
            store.clone(),
            settings.memory.history(),
            settings.page_bytes_max,
        );
        let table = Table::new(settings.open_max, settings.memory.owners());
        let environment = Arc::new(Environment::new(
            gateway, store, publish, inbox, lease, settings,
        ));
        let open = DashMap::default();
        let closing = CancellationToken::new();
        let (keeping, closed) = (table.clone(), closing.clone());
        tasks.spawn(async move { closed.run_until_cancelled(keeping.keep()).await });
        Self {
            shared: Arc::new(Shared {
                open,
                table,
                environment,
                history,
                tasks,
                closing,
            }),
        }
    }

    /// Asks the owner of a conversation, which gets operations in the order in which this is called.
    ///
    /// No `async fn`: what is asked is in the owner's mailbox by the time this returns, and not in the future, of whose
    /// size every request is a copy.
    ///
    /// # Errors
    /// As the operation; `Moved` when nothing was begun, `Closed` when the outcome is unknown; `Unavailable` when the owner
    /// is overloaded or cannot reach the store in time.
    pub fn ask(
        &self,
        conversation: ConversationId,
        actor: UserId,
        operation: Operation,
    ) -> impl Future<Output = Result<Outcome, Error>> {
        if let Operation::Repair = operation {
            return Either::Left(Box::pin(self.repair_one(conversation)));
        }
        // Sessions come back, and gateways catch up, with more than a page.
        let asked = match operation {
            Operation::History { range, limit } => (range, limit),
            _ => (LogRange::After(0), usize::MAX),
        };
        let (reply, answer) = oneshot::channel();
        let command = Command {
            actor,
            operation,
            reply,
        };
        let offered = self.offer(conversation, command);
        let answered = async move {
            let ownership = match offered {
                Ok(ownership) => ownership,
                Err(Rejected::Refused(error)) => return Err(error),
                Err(Rejected::Closing(gone, command)) => {
                    Box::pin(self.offer_next(conversation, gone, command)).await?
                }
            };
            match answer.await.unwrap_or(Err(Error::BROKEN))? {
                Answer::Ready(outcome) => Ok(outcome),
                read => Box::pin(self.read(conversation, &ownership, asked, read)).await,
            }
        };
        let limit = self.shared.environment.settings.operation_timeout;
        Either::Right(timeout(limit, answered).map(|answered| {
            answered.unwrap_or_else(|_| Err(Error::unavailable("it took too long")))
        }))
    }

    /// Puts a command into the owner's mailbox, while the conversation's place in the map is held: the owner leaves only
    /// while that is not.
    fn offer(
        &self,
        conversation: ConversationId,
        command: Command,
    ) -> Result<Arc<Ownership>, Rejected> {
        if let Some(handle) = self.shared.open.get(&conversation) {
            return handle.offer(command);
        }
        self.open(conversation, command)
    }

    /// As `offer`, to the owner after the one that closes.
    async fn offer_next(
        &self,
        conversation: ConversationId,
        mut gone: CancellationToken,
        mut command: Box<Command>,
    ) -> Result<Arc<Ownership>, Error> {
        loop {
            gone.cancelled().await;
            match self.offer(conversation, *command) {
                Ok(ownership) => return Ok(ownership),
                Err(Rejected::Refused(error)) => return Err(error),
                Err(Rejected::Closing(next, returned)) => (gone, command) = (next, returned),
            }
        }
    }

    /// Reads what the owner says may be read.
    async fn read(
        &self,
        conversation: ConversationId,
        ownership: &Ownership,
        asked: (LogRange, usize),
        read: Answer,
    ) -> Result<Outcome, Error> {
        match read {
            Answer::Ready(outcome) => Ok(outcome),
            Answer::ReadLog { from, to, head } => {
                let entries = self
                    .shared
                    .history
                    .read(conversation, (from, to), asked)
                    .await?;
                // Read under the lease, or not at all.
                if !ownership.holds(Instant::now()) {
                    return Err(Error::Closed);
                }
                Ok(Outcome::History(Page { entries, head }))
            }
            Answer::ReadParticipants {
                actor,
                after,
                limit,
            } => {
                let read = self.read_participants(conversation, &actor, after, limit);
                let page = read.await?;
                if !ownership.holds(Instant::now()) {
                    return Err(Error::Closed);
                }
                Ok(Outcome::Participants(page))
            }
        }
    }

    /// As `repair`, of one conversation.
    async fn repair_one(&self, conversation: ConversationId) -> Result<Outcome, Error> {
        let environment = &self.shared.environment;
        repair::conversation(self, environment, conversation).await?;
        // Written, before anyone forgets that there was something to repair.
        if environment.inbox.flush().await {
            Ok(Outcome::Done)
        } else {
            Err(Error::unavailable("the store did not answer"))
        }
    }

    /// As `ask`, for a message.
    ///
    /// # Errors
    /// As `ask`.
    pub async fn send(
        &self,
        conversation: ConversationId,
        draft: crate::model::Draft,
    ) -> Result<Sent, Error> {
        let sender = draft.sender.clone();
        let asked = self.ask(conversation, sender, Operation::Send(draft));
        Self::sent(asked.await?)
    }

    /// What a message's outcome says.
    ///
    /// # Errors
    /// If it does not say where the message is.
    pub fn sent(outcome: Outcome) -> Result<Sent, Error> {
        match outcome {
            Outcome::Sent(sent) => Ok(sent),
            // A repetition of a message that has left memory.
            Outcome::History(page) => match &page.entries[..] {
                [entry] => Ok(Sent {
                    seq: entry.seq,
                    message_id: entry.message_id,
                    at: entry.at,
                    duplicate: true,
                }),
                _ => Err(Error::Closed),
            },
            other => {
                debug_assert!(false, "a message is answered with its place, not {other:?}");
                Err(Error::Closed)
            }
        }
    }

    /// As `offer`; makes an owner if there is none.
    fn open(
        &self,
        conversation: ConversationId,
        command: Command,
    ) -> Result<Arc<Ownership>, Rejected> {
        let Shared {
            open,
            table,
            environment,
            tasks,
            closing,
            ..
        } = &*self.shared;
        if closing.is_cancelled() {
            return Err(Rejected::Refused(Error::Moved));
        }
        // Gateways catch up by themselves; whatever else is asked, somebody's request is behind it.
        let user = match command.operation {
            Operation::CatchUp { .. } if command.actor == UserId::gateway() => None,
            _ => Some(&command.actor),
        };
        match open.entry(conversation) {
            Place::Occupied(there) => there.get().offer(command),
            Place::Vacant(place) => {
                // Asked while the place is held: whoever then lets go of what is lost finds it there.
                let ownership = environment.lease.ownership(conversation);
                let ownership = Arc::new(ownership.ok_or(Rejected::Refused(Error::Moved))?);
                let (held, room) = table.begin(user).map_err(Rejected::Refused)?;
                let (mailbox, commands) = mailbox();
                let handle = Handle {
                    held: held.clone(),
                    mailbox,
                    ownership: ownership.clone(),
                    gone: CancellationToken::new(),
                };
                let gone = handle.gone.clone();
                // Offered before anybody else can be: whoever makes an owner is the first to be served.
                let offered = place.insert(handle).offer(command);
                let shared = self.shared.clone();
                tasks.spawn(async move {
                    let stop = shared.closing.clone().cancelled_owned();
                    let environment = shared.environment.clone();
                    let is_same = |other: &Handle| Arc::ptr_eq(&other.held, &held);
                    let leave = || {
                        let is_over =
                            |_: &_, handle: &Handle| is_same(handle) && handle.is_unasked();
                        shared.open.remove_if(&conversation, is_over).is_some()
                    };
                    let opening = Opening {
                        held: held.clone(),
                        room,
                        ownership,
                    };
                    let owning = own(conversation, environment, opening, commands, stop, leave);
                    contain("the owner of a conversation", conversation, owning).await;
                    // Only now may another owner be made, unless this one has left: never two at once.
                    shared
                        .open
                        .remove_if(&conversation, |_, other| is_same(other));
                    gone.cancel();
                    held.end();
                });
                offered
            }
        }
    }

    /// Evicts the conversation that was not used for longest, for tests.
    #[doc(hidden)]
    pub fn evict_one(&self) {
        self.shared.table.evict_one();
    }

    #[cfg(test)]
    pub(super) fn is_open(&self, conversation: ConversationId) -> bool {
        self.shared.open.contains_key(&conversation)
    }

    /// Of a channel: those of others are in their owner's memory. Former participants have rows too and are passed
    /// over, as many as one request may look at.
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

    /// Writes the inbox rows that a gateway which is gone may have left unwritten. Idempotent.
    ///
    /// # Errors
    /// When the store cannot be read; it must be tried again before anyone is served.
    pub async fn repair(&self, gone: GatewayId) -> store::Result<()> {
        let Environment { store, inbox, .. } = &*self.shared.environment;
        let touched = store.activity(gone).await?;
        if !touched.is_empty() {
            tracing::info!(gateway = %gone, conversations = touched.len(), "crash repair began");
            let failures: Vec<store::Error> = stream::iter(touched)
                .map(|conversation| {
                    repair::conversation(self, &self.shared.environment, conversation)
                })
                .buffer_unordered(REPAIRS_AT_ONCE)
                .filter_map(async |result| result.err())
                .collect()
                .await;
            if let Some(error) = failures.into_iter().next() {
                return Err(error);
            }
            while !inbox.flush().await {
                store.healthy()?;
            }
            tracing::info!(gateway = %gone, "crash repair ended");
        }
        store.forget_activity(gone).await
    }

    /// Lets go of all conversations but those to keep. Each of them fires when it is let go of: nothing of it is
    /// answered after that.
    pub fn release(&self, keep: impl Fn(ConversationId) -> bool) -> Vec<CancellationToken> {
        let open = self.shared.open.iter();
        let lost = open.filter(|open| !keep(*open.key()));
        let lost: BTreeMap<_, _> = lost
            .map(|open| (*open.key(), open.value().clone()))
            .collect();
        lost.into_values()
            .map(|lost| {
                lost.ownership.revoke();
                lost.gone
            })
            .collect()
    }

    /// Conversations that were lost in the middle of something: their next owner is to be asked something, and
    /// finishes it when it begins. What came of that is told to [`Self::asked`].
    #[must_use]
    pub fn take_unfinished(&self) -> BTreeSet<ConversationId> {
        self.shared.environment.unfinished.take()
    }

    pub fn asked(&self, conversation: ConversationId, answered: bool) {
        let unfinished = &self.shared.environment.unfinished;
        unfinished.asked(conversation, answered);
    }

    /// Whether every conversation that was lost has been finished by somebody else.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.shared.environment.unfinished.is_empty()
    }

    /// Closes all conversations, each once nothing of it is in flight, and waits for that.
    pub async fn close(&self) {
        self.shared.closing.cancel();
        loop {
            let one = self.shared.open.iter().next();
            let Some(gone) = one.map(|open| open.gone.clone()) else {
                return;
            };
            gone.cancelled().await;
        }
    }
}
