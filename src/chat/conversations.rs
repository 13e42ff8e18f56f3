//! The conversations that are open on this gateway: finds the owner of a conversation, or makes one.

mod reading;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use dashmap::{DashMap, mapref::entry::Entry as Slot};
use foldhash::quality::RandomState;
use futures_util::FutureExt;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    conversation::{Command, Environment, Opening, OwnerReply, Settings, mailbox, own},
    error::Error,
    history::History,
    inbox::InboxWriter,
    lease::{Lease, Ownership},
    open::{Held, Table},
    operation::{Ask, LogRange, Operation, SendAck, output},
    publish::Publish,
};
use crate::{
    model::{ConversationId, Draft, Epoch, GatewayId, UserId, limits::MAILBOX_OPERATIONS_KEPT},
    store::{Store, Version},
    tasks::{Tasks, contain},
};

/// All conversations that this gateway owns. It is cheap to clone.
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
    /// Fires when all conversations must be closed, after the sessions have ended.
    closing: CancellationToken,
}

/// The access of all other tasks to an owner.
#[derive(Clone)]
struct Handle {
    held: Arc<Held>,
    mailbox: mpsc::Sender<Command>,
    ownership: Arc<Ownership>,
    /// Fires when the owner has ended and another one may be made.
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

    /// Returns whether the mailbox is empty.
    fn is_unasked(&self) -> bool {
        self.mailbox.capacity() == self.mailbox.max_capacity()
    }
}

/// The reason why a command is not in an owner's mailbox.
enum Rejected {
    Refused(Error),
    /// The owner closes. When the token fires, the command may be offered to the next owner.
    Closing(CancellationToken, Box<Command>),
}

impl Conversations {
    /// Returns whether this gateway may act as an owner at all: its lease has not ended.
    #[must_use]
    pub fn may_serve(&self) -> bool {
        self.shared.environment.lease.holds(Instant::now())
    }

    /// See [`Lease::check_above`].
    ///
    /// # Errors
    /// The ring must go beyond that version first.
    pub fn check_above(&self, stored: Version, epoch: Epoch) -> Result<(), Error> {
        self.shared.environment.lease.check_above(stored, epoch)
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

    pub(super) fn environment(&self) -> &Environment {
        &self.shared.environment
    }

    /// Asks the owner of a conversation, which gets operations in the order of these calls.
    ///
    /// This is no `async fn`, so that the operation is in the owner's mailbox when this returns, and not in the future,
    /// which is moved several times for each request.
    ///
    /// # Errors
    /// The error of the operation; `Moved` if nothing was begun; `Closed` if the outcome is unknown; `Unavailable` if the
    /// owner is overloaded, or cannot reach the store in time.
    pub fn ask<A: Ask>(
        &self,
        conversation: ConversationId,
        actor: UserId,
        ask: A,
    ) -> impl Future<Output = Result<A::Output, Error>> {
        let operation = ask.into();
        // Clients that resume and gateways that catch up request more than a page.
        let asked = match operation {
            Operation::History { range, limit } => (range, limit),
            _ => (LogRange::After(0), usize::MAX),
        };
        let (reply, answer) = oneshot::channel();
        let command = Command {
            actor,
            operation,
            reply,
            newcomers_fit: false,
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
                OwnerReply::Ready(outcome) => Ok(outcome),
                read => Box::pin(self.read(conversation, &ownership, asked, read)).await,
            }
        };
        let limit = self.shared.environment.settings.operation_timeout;
        timeout(limit, answered)
            .map(|answered| output::<A>(answered.unwrap_or(Err(Error::TOO_LATE))))
    }

    /// Puts a command into the owner's mailbox while the conversation's entry in the map is locked. An owner leaves the
    /// map only while the entry is unlocked.
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

    /// Offers a command to the owner that follows a closing one.
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

    /// Asks the owner to append a message.
    ///
    /// # Errors
    /// The errors of [`Self::ask`].
    pub fn send(
        &self,
        conversation: ConversationId,
        draft: Draft,
    ) -> impl Future<Output = Result<SendAck, Error>> {
        let sender = draft.sender.clone();
        self.ask(conversation, sender, draft)
    }

    /// Offers a command to the owner, and makes one if there is none.
    fn open(
        &self,
        conversation: ConversationId,
        command: Command,
    ) -> Result<Arc<Ownership>, Rejected> {
        let shared = &self.shared;
        if shared.closing.is_cancelled() {
            return Err(Rejected::Refused(Error::Moved));
        }
        // Gateways catch up by themselves. Everything else was caused by the request of a user.
        let user = match command.operation {
            Operation::CatchUp { .. } | Operation::CatchUpChanges { .. }
                if command.actor == UserId::gateway() =>
            {
                None
            }
            _ => Some(&command.actor),
        };
        match shared.open.entry(conversation) {
            Slot::Occupied(there) => there.get().offer(command),
            Slot::Vacant(place) => {
                // The ring is asked while the entry is locked, so that `release` finds a conversation that moves then.
                let ownership = shared.environment.lease.ownership(conversation);
                let ownership = Arc::new(ownership.ok_or(Rejected::Refused(Error::Moved))?);
                let (held, permit) = shared.table.begin(user).map_err(Rejected::Refused)?;
                let (mailbox, commands) = mailbox();
                let gone = CancellationToken::new();
                let handle = Handle {
                    held: held.clone(),
                    mailbox,
                    ownership: ownership.clone(),
                    gone: gone.clone(),
                };
                // The request that makes an owner is the first one that it serves.
                let offered = place.insert(handle).offer(command);
                let opening = Opening {
                    held,
                    permit,
                    ownership,
                };
                let owning = shared.clone().own(conversation, opening, commands, gone);
                shared.tasks.spawn(owning);
                offered
            }
        }
    }

    /// Evicts the least recently used conversation, for tests.
    #[doc(hidden)]
    pub fn evict_one(&self) {
        self.shared.table.evict_one();
    }

    #[cfg(test)]
    pub(super) fn is_open(&self, conversation: ConversationId) -> bool {
        self.shared.open.contains_key(&conversation)
    }

    /// Revokes the right to all conversations but those to keep. Returns a token for each, which fires when its owner has
    /// ended: nothing is answered after that.
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

    /// Takes the conversations that were lost while work was in progress. The next owner of each finishes that work
    /// when it is asked to load it. The caller must call [`Self::asked`] for each.
    #[must_use]
    pub fn take_unfinished(&self) -> BTreeSet<ConversationId> {
        self.shared.environment.unfinished.take()
    }

    /// Records whether the owner of a lost conversation has answered.
    pub fn asked(&self, conversation: ConversationId, answered: bool) {
        let unfinished = &self.shared.environment.unfinished;
        unfinished.asked(conversation, answered);
    }

    /// Returns whether the next owners have finished all conversations that were lost.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.shared.environment.unfinished.is_empty()
    }

    /// Waits until the next owners have finished all conversations that were lost.
    pub async fn wait_until_finished(&self) {
        const LOOK_EVERY: Duration = Duration::from_millis(20);
        while !self.is_finished() {
            sleep(LOOK_EVERY).await;
        }
    }

    /// Closes all conversations, each when nothing of it is in flight, and waits for that.
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

impl Shared {
    /// Runs the owner of a conversation, and removes the conversation from the map.
    async fn own(
        self: Arc<Self>,
        conversation: ConversationId,
        opening: Opening,
        commands: mpsc::Receiver<Command>,
        gone: CancellationToken,
    ) {
        let held = opening.held.clone();
        let is_same = |other: &Handle| Arc::ptr_eq(&other.held, &held);
        let leave = || {
            let is_over = |_: &_, handle: &Handle| is_same(handle) && handle.is_unasked();
            self.open.remove_if(&conversation, is_over).is_some()
        };
        let stop = self.closing.clone().cancelled_owned();
        let environment = self.environment.clone();
        let owning = own(conversation, environment, opening, commands, stop, leave);
        contain("the owner of a conversation", conversation, owning).await;
        // Another owner may be made from here on, if this one has not left before: there are never two at a time.
        self.open
            .remove_if(&conversation, |_, other| is_same(other));
        gone.cancel();
        held.end();
    }
}
