//! The way of requests inward: an operation goes to the owner of its conversation, a question about a user to the user's
//! home. Everything is retried while another gateway takes over.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use futures_util::{FutureExt, future::Either};

use super::{
    gateways::{Gateways, Others},
    here::Here,
};
use crate::{
    chat::{self, Error, Operation, Outcome, SendAck, output},
    cluster::{
        ring::view::View,
        wire::question::{Answers, Operate, Question},
    },
    fanout::{Hub, Subscriber},
    model::{ConsumerName, ConversationId, Draft, Epoch, GatewayId, Topic, UserId},
    store::{PublicPage, Store, WorkShard},
};

/// The way to the owners of conversations and to the homes of users.
pub struct Router {
    pub(super) gateways: Arc<Gateways>,
    pub(super) here: Arc<Here>,
}

impl Router {
    pub(crate) fn new(here: Arc<Here>) -> Self {
        let gateways = here.gateways.clone();
        Self { gateways, here }
    }

    #[must_use]
    pub fn me(&self) -> GatewayId {
        self.gateways.me
    }

    fn store(&self) -> &dyn Store {
        &*self.here.store
    }

    /// Returns whether this gateway sweeps a partition of the files. While the ring changes, two may do it, or none.
    #[must_use]
    pub fn sweeps(&self, shard: WorkShard) -> bool {
        self.gateways.others.is_none()
            || self.gateways.ring.load().sweeper(shard) == Some(self.gateways.me)
    }

    /// Returns whether this gateway scans a shard of a consumer's lagging conversations. While the ring changes, two may do
    /// it, or none.
    #[must_use]
    pub fn scans(&self, consumer: &ConsumerName, shard: u8) -> bool {
        self.gateways.others.is_none()
            || self.gateways.ring.load().scanner(consumer, shard) == Some(self.gateways.me)
    }

    /// Returns the version of the ring.
    #[must_use]
    pub fn version(&self) -> Epoch {
        self.gateways.ring.load().version()
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
        match &self.gateways.others {
            None => Either::Left(self.here.conversations.ask(conversation, actor, ask)),
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
            let owner = self.gateways.ring.load().owner(conversation);
            let again = unknown.load(Ordering::Relaxed).then(|| operation.again());
            let asked = again.flatten().unwrap_or_else(|| operation.clone());
            let actor = actor.clone();
            let outcome = match owner {
                None => Err(Error::Moved),
                Some(owner) if owner == self.gateways.me => {
                    let asked = self.here.ask_owner_once(conversation, actor, asked);
                    asked.await
                }
                Some(owner) => {
                    let ask = Operate {
                        conversation,
                        actor,
                        operation: asked,
                    };
                    let asked = others.peers.ask(owner, ask).await;
                    asked.unwrap_or_else(|unasked| Err(unasked.into()))
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
        self.gateways.retry(others, attempt).await
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
        // A draft is an operation itself: it has a row in the table of `chat/operation.rs`.
        self.ask(conversation, sender, draft)
    }

    /// Asks the gateway that the ring names as `responsible`, also if that changes meanwhile. It may be this one.
    pub(super) async fn ask_responsible<Q: Question>(
        &self,
        responsible: impl Fn(&View) -> Option<GatewayId>,
        question: impl Fn(Epoch) -> Q,
    ) -> Result<Q::Answer, Error>
    where
        Here: Answers<Q>,
    {
        let here = |question: Q| self.here.answer(question);
        self.gateways.ask(responsible, question, here).await
    }

    pub(super) async fn ask_home<Q: Question>(
        &self,
        user: &UserId,
        question: impl Fn(Epoch) -> Q,
    ) -> Result<Q::Answer, Error>
    where
        Here: Answers<Q>,
    {
        self.ask_responsible(|ring| ring.home(user), question).await
    }

    /// Ends subscriptions that a session requested: to channels that its user is not in, and to the presence of users.
    pub fn unsubscribe(&self, session: &Subscriber, topics: &[Topic]) {
        self.end(|hub| hub.end_requested(topics, session));
    }

    /// Undoes a request for subscriptions that failed.
    pub(super) fn give_up(&self, session: &Subscriber, topics: &[Topic]) {
        self.end(|hub| hub.give_up(topics, session));
    }

    fn end(&self, end: impl FnOnce(&Hub) -> Vec<Topic>) {
        let sockets = &self.here.sockets;
        sockets.end(end, |topic| self.uninterested(topic));
    }

    /// Tells the gateway that is responsible for a topic that no socket here is interested in it any more.
    pub(super) fn uninterested(&self, topic: &Topic) {
        let gateways = &self.gateways;
        match (gateways.ring.load().responsible(topic), &gateways.others) {
            (Some(gateway), Some(others)) if gateway != gateways.me => {
                others.peers.uninterested(gateway, topic);
            }
            _ => self.here.home.uninterested(gateways.me, topic),
        }
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
        Ok(self.store().public_conversations(after, limit).await?)
    }

    /// Whether this gateway's lease has not ended.
    pub(super) fn may_serve(&self) -> bool {
        self.here.may_serve()
    }

    /// Checks whether requests can be served.
    ///
    /// # Errors
    /// The reason why nothing can be stored now.
    pub fn ready(&self) -> Result<(), crate::store::Error> {
        self.store().healthy()?;
        if self.may_serve() {
            return Ok(());
        }
        Err(crate::store::Error::Unavailable {
            operation: "lease",
            reason: "it has ended, and could not be renewed yet".into(),
        })
    }
}
