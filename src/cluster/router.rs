//! The way of requests inward: an operation goes to the owner of its conversation, a question about a user to the user's
//! home. Everything is retried while another gateway takes over.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use futures_util::{FutureExt, future::Either};
use metrics::counter;
use tokio::time::{sleep, timeout};

use super::{
    home::Home,
    link::CallError,
    local_sockets::LocalSockets,
    members::MembershipAgent,
    message::{PeerRequest, PeerResponse},
    peers::Peers,
    view::View,
    view_changes::ViewListener,
};
use crate::{
    chat::{self, Conversations, Error, Operation, Outcome, SendAck, output},
    model::{
        ConsumerName, ConversationId, CurrentLevel, Draft, Epoch, GatewayId, LEVEL_CHANGES,
        LEVEL_CONSUMERS, LEVEL_FILES, Level, UserId,
    },
    store::{PublicPage, Store, WorkShard},
    tasks::Tasks,
};

/// The time between two attempts while another gateway takes over.
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// The way to everything that a session can request.
pub struct Router {
    pub(super) me: GatewayId,
    pub(super) ring: Arc<ArcSwap<View>>,
    store: Arc<dyn Store>,
    pub(super) conversations: Conversations,
    pub(super) home: Arc<Home>,
    pub(super) sockets: Arc<LocalSockets>,
    /// The other gateways. `None` with the embedded store, where there never are any.
    pub(super) others: Option<Others>,
    /// The level of the ring.
    level: CurrentLevel,
    operation_timeout: Duration,
    pub(super) tasks: Tasks,
}

/// The other gateways, and the changes of the ring.
#[derive(Clone)]
pub(super) struct Others {
    pub members: Arc<MembershipAgent>,
    pub peers: Arc<Peers>,
}

impl Router {
    #[expect(
        clippy::too_many_arguments,
        reason = "the one place where all of them meet"
    )]
    pub(super) fn new(
        me: GatewayId,
        ring: Arc<ArcSwap<View>>,
        store: Arc<dyn Store>,
        conversations: Conversations,
        home: Arc<Home>,
        sockets: Arc<LocalSockets>,
        others: Option<Others>,
        level: CurrentLevel,
        operation_timeout: Duration,
        tasks: Tasks,
    ) -> Self {
        Self {
            me,
            ring,
            store,
            conversations,
            home,
            sockets,
            others,
            level,
            operation_timeout,
            tasks,
        }
    }

    #[must_use]
    pub fn me(&self) -> GatewayId {
        self.me
    }

    /// Returns whether messages may have changes: the ring has the level that knows them.
    #[must_use]
    pub fn has_changes(&self) -> bool {
        self.level.get() >= LEVEL_CHANGES
    }

    /// Returns whether messages may have uploaded files.
    #[must_use]
    pub fn has_files(&self) -> bool {
        self.level.get() >= LEVEL_FILES
    }

    /// Returns the level of the ring.
    pub(super) fn level(&self) -> Level {
        self.level.get()
    }

    pub(super) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Returns whether this gateway sweeps a partition of the files. While the ring changes, two may do it, or none.
    #[must_use]
    pub fn sweeps(&self, shard: WorkShard) -> bool {
        self.others.is_none() || self.ring.load().sweeper(shard) == Some(self.me)
    }

    /// Returns whether this gateway scans a shard of a consumer's lagging conversations. While the ring changes, two may do
    /// it, or none.
    #[must_use]
    pub fn scans(&self, consumer: &ConsumerName, shard: u8) -> bool {
        self.others.is_none() || self.ring.load().scanner(consumer, shard) == Some(self.me)
    }

    /// Returns the version of the ring.
    #[must_use]
    pub fn version(&self) -> Epoch {
        self.ring.load().version()
    }

    pub(super) fn sockets(&self) -> &LocalSockets {
        &self.sockets
    }

    /// Asks the owner of a conversation, on whichever gateway it is, also if that changes meanwhile.
    ///
    /// This is no `async fn`: without other gateways the operation is in the owner's mailbox when this returns.
    ///
    /// # Errors
    /// The error of the operation; `Unavailable` if the owner cannot be reached in time; `Closed` if it was lost meanwhile.
    pub fn ask<A: chat::Ask>(
        &self,
        conversation: ConversationId,
        actor: UserId,
        ask: A,
    ) -> impl Future<Output = Result<A::Output, Error>> {
        match &self.others {
            None => Either::Left(self.conversations.ask(conversation, actor, ask)),
            // Boxed, so that without other gateways no future reserves room for it.
            Some(others) => {
                let asked = self.ask_owner(others, conversation, actor, ask.into());
                Either::Right(Box::pin(asked).map(output::<A>))
            }
        }
    }

    async fn ask_owner(
        &self,
        others: &Others,
        conversation: ConversationId,
        actor: UserId,
        operation: Operation,
    ) -> Result<Outcome, Error> {
        // After an unknown outcome only what may be applied twice is asked again.
        let unknown = AtomicBool::new(false);
        let attempt = || async {
            let owner = self.ring.load().owner(conversation);
            let again = unknown.load(Ordering::Relaxed).then(|| operation.again());
            let asked = again.flatten().unwrap_or_else(|| operation.clone());
            let actor = actor.clone();
            let outcome = match owner {
                None => Err(Error::Moved),
                Some(owner) if owner == self.me => {
                    self.ask_owner_once(conversation, actor, asked).await
                }
                // The owner may be a gateway of an earlier build, which cannot read the operation.
                Some(_) if needed_level(&asked) > self.level.get() => {
                    return Some(Err(Error::NOT_UPGRADED));
                }
                Some(owner) => {
                    let ask = PeerRequest::Operation {
                        conversation,
                        actor,
                        operation: asked,
                    };
                    match others.peers.ask(owner, ask).await {
                        Ok(PeerResponse::Outcome(outcome)) => outcome,
                        Ok(_) => Err(Error::Closed),
                        Err(unasked) => Err(unasked.into()),
                    }
                }
            };
            match outcome {
                Err(Error::Moved) => None,
                Err(Error::Closed) if operation.again().is_some() => {
                    unknown.store(true, Ordering::Relaxed);
                    None
                }
                outcome => Some(outcome),
            }
        };
        self.retry(others, attempt).await
    }

    /// Repeats an attempt until it gives a result, or until the operation's time is over. In between it waits for a change
    /// of the ring, or for [`RETRY_AFTER`].
    pub(super) async fn retry<T, F>(
        &self,
        others: &Others,
        attempt: impl Fn() -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Option<Result<T, Error>>>,
    {
        let mut changes = others.members.view_changes();
        let decided = async {
            loop {
                changes.mark_heard();
                if let Some(result) = attempt().await {
                    return result;
                }
                changed(&mut changes).await;
            }
        };
        self.in_time(decided).await
    }

    /// Limits the time of an operation. This is no `async fn`, because that would contain `asked` twice.
    pub(super) fn in_time<T>(
        &self,
        asked: impl Future<Output = Result<T, Error>>,
    ) -> impl Future<Output = Result<T, Error>> {
        timeout(self.operation_timeout, asked).map(|asked| asked.unwrap_or(Err(Error::TOO_LATE)))
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

    /// Asks the gateway that the ring names as `responsible`, also if that changes meanwhile. It may be this one.
    pub(super) async fn ask_responsible(
        &self,
        responsible: impl Fn(&View) -> Option<GatewayId>,
        ask: impl Fn(Epoch) -> PeerRequest,
    ) -> Result<PeerResponse, Error> {
        let Some(others) = &self.others else {
            let ask = ask(self.ring.load().version());
            self.note(self.me, &ask);
            return Ok(self.answer_here(ask).await);
        };
        let attempt = || async {
            // Interests are announced under this lock, so that none is told for an older version after that.
            let (ask, asked) = self.sockets.in_interest_order(|| {
                let ring = self.ring.load();
                let ask = ask(ring.version());
                match responsible(&ring) {
                    Some(gateway) if gateway == self.me => {
                        self.note(self.me, &ask);
                        (Some(ask), None)
                    }
                    Some(gateway) => (None, Some(others.peers.ask(gateway, ask))),
                    None => (None, None),
                }
            });
            let answer = match (ask, asked) {
                (Some(ask), _) => Ok(self.answer_here(ask).await),
                (None, Some(asked)) => asked.await,
                (None, None) => return None,
            };
            match answer {
                Ok(answer) if answer.is_moved() => None,
                Ok(answer) => Some(Ok(answer)),
                Err(CallError::Lost) => None,
                Err(unasked) => Some(Err(unasked.into())),
            }
        };
        self.retry(others, attempt).await
    }

    pub(super) async fn ask_home(
        &self,
        user: &UserId,
        ask: impl Fn(Epoch) -> PeerRequest,
    ) -> Result<PeerResponse, Error> {
        self.ask_responsible(|ring| ring.home(user), ask).await
    }

    /// Reads a page of the public conversations.
    ///
    /// # Errors
    /// The error of the store.
    pub async fn public(
        &self,
        after: Option<ConversationId>,
        limit: usize,
    ) -> Result<PublicPage, Error> {
        Ok(self.store.public_conversations(after, limit).await?)
    }

    /// Stores the times at which users were last seen. It must be called every few seconds.
    pub async fn flush_presence(&self) {
        self.home.presence.flush().await;
    }

    /// Whether this gateway's lease has not ended.
    pub(super) fn may_serve(&self) -> bool {
        self.conversations.may_serve()
    }

    /// Checks whether requests can be served.
    ///
    /// # Errors
    /// The reason why nothing can be stored now.
    pub fn ready(&self) -> Result<(), crate::store::Error> {
        self.store.healthy()?;
        if self.may_serve() {
            return Ok(());
        }
        Err(crate::store::Error::Unavailable {
            operation: "lease",
            reason: "it has ended, and could not be renewed yet".into(),
        })
    }
}

/// Returns the level from which on every gateway can read an operation.
fn needed_level(operation: &Operation) -> Level {
    match operation {
        Operation::Edit(_)
        | Operation::Delete(_)
        | Operation::React(_)
        | Operation::Reactors(_)
        | Operation::Changes { .. }
        | Operation::CatchUpChanges { .. } => LEVEL_CHANGES,
        Operation::Files { .. } | Operation::CheckFile { .. } => LEVEL_FILES,
        Operation::SetConsumer { .. } => LEVEL_CONSUMERS,
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
        | Operation::Read { .. }
        | Operation::Delivered { .. }
        | Operation::Typing
        | Operation::Head
        | Operation::CatchUp { .. }
        | Operation::Repair => 0,
    }
}

/// Waits until another attempt may succeed.
async fn changed(changes: &mut ViewListener) {
    counter!("chat_cluster_retries_total").increment(1);
    tokio::select! {
        biased;
        () = changes.changed() => {}
        () = sleep(RETRY_AFTER) => {}
    }
}
