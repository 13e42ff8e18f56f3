//! Requests inward: an operation goes to the conversation's owner, an inbox read to the user's home.

use std::{
    future::{Future, ready},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use futures_util::{
    FutureExt,
    future::{Either, join_all},
};
use metrics::counter;
use tokio::time::{sleep, timeout};

use super::{
    edge::Edge,
    home::{AtHome, Home},
    link::CallError,
    members::MembershipAgent,
    message::{Answer, Ask, Interest},
    peers::Peers,
    places::InboxPlace,
    view::View,
    view_changes::ViewListener,
};
use crate::{
    chat::{Conversations, Error, Operation, Outcome, Sent},
    fanout::{Hub, Subscriber},
    model::{
        ConversationId, Draft, Epoch, GatewayId, Seq, Topic, UserId,
        limits::{HEADS_AT_ONCE, WATCHED_MAX},
    },
    protocol::PresenceItem,
    store::{InboxRow, PublicPage, Store},
    tasks::Tasks,
};

/// Between two tries of what another gateway is about to take over.
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// The way to everything a session can ask for.
pub struct Router {
    me: GatewayId,
    ring: Arc<ArcSwap<View>>,
    store: Arc<dyn Store>,
    conversations: Conversations,
    home: Arc<Home>,
    pub(super) edge: Arc<Edge>,
    /// None: this gateway never has any.
    pub(super) cluster: Option<Cluster>,
    operation_timeout: Duration,
    pub(super) tasks: Tasks,
}

/// The other gateways.
#[derive(Clone)]
pub(super) struct Cluster {
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
        edge: Arc<Edge>,
        cluster: Option<Cluster>,
        operation_timeout: Duration,
        tasks: Tasks,
    ) -> Self {
        Self {
            me,
            ring,
            store,
            conversations,
            home,
            edge,
            cluster,
            operation_timeout,
            tasks,
        }
    }

    #[must_use]
    pub fn me(&self) -> GatewayId {
        self.me
    }

    pub(super) fn edge(&self) -> &Edge {
        &self.edge
    }

    /// Asks the owner of `conversation`, wherever it is, and whoever it becomes meanwhile.
    ///
    /// # Errors
    /// As the operation; `Unavailable` when the owner cannot be reached in time, `Closed` when it was lost meanwhile.
    pub fn ask(
        &self,
        conversation: ConversationId,
        actor: UserId,
        operation: Operation,
    ) -> impl Future<Output = Result<Outcome, Error>> {
        match &self.cluster {
            None => Either::Left(self.conversations.ask(conversation, actor, operation)),
            // Boxed: who is alone is not to carry it.
            Some(cluster) => Either::Right(Box::pin(self.ask_owner(
                cluster,
                conversation,
                actor,
                operation,
            ))),
        }
    }

    async fn ask_owner(
        &self,
        cluster: &Cluster,
        conversation: ConversationId,
        actor: UserId,
        operation: Operation,
    ) -> Result<Outcome, Error> {
        // After an unknown outcome it is asked only what does no harm if it was done before.
        let unknown = AtomicBool::new(false);
        let attempt = || async {
            let owner = self.ring.load().owner(conversation);
            let again = unknown.load(Ordering::Relaxed).then(|| operation.again());
            let asked = again.flatten().unwrap_or_else(|| operation.clone());
            let actor = actor.clone();
            let outcome = match owner {
                None => Err(Error::Moved),
                Some(owner) if owner == self.me => {
                    self.conversations.ask(conversation, actor, asked).await
                }
                Some(owner) => {
                    let ask = Ask::Operation {
                        conversation,
                        actor,
                        operation: asked,
                    };
                    match cluster.peers.ask(owner, ask).await {
                        Ok(Answer::Outcome(outcome)) => outcome,
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
        self.retry(cluster, attempt).await
    }

    /// Repeats an attempt until it gives a result, or until the operation's time is over. In between it waits for a change
    /// of the ring, or a moment.
    async fn retry<T, F>(&self, cluster: &Cluster, attempt: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Option<Result<T, Error>>>,
    {
        let mut changes = cluster.members.view_changes();
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

    /// No `async fn`: that would hold `asked` twice, and every request is a copy of all it holds.
    fn in_time<T>(
        &self,
        asked: impl Future<Output = Result<T, Error>>,
    ) -> impl Future<Output = Result<T, Error>> {
        timeout(self.operation_timeout, asked)
            .map(|asked| asked.unwrap_or(Err(Error::unavailable("it took too long"))))
    }

    /// As `ask`, for a message.
    ///
    /// # Errors
    /// As `ask`.
    pub fn send(
        &self,
        conversation: ConversationId,
        draft: Draft,
    ) -> impl Future<Output = Result<Sent, Error>> {
        let sender = draft.sender.clone();
        let asked = self.ask(conversation, sender, Operation::Send(draft));
        asked.map(|asked| asked.and_then(Conversations::sent))
    }

    /// Answers what this gateway is asked, by a session here or by a peer, as an owner or a home.
    pub(super) async fn answer_here(&self, ask: Ask) -> Answer {
        match ask {
            Ask::Operation {
                conversation,
                actor,
                operation,
            } => Answer::Outcome(self.ask_here(conversation, actor, operation).await),
            Ask::Register { user, .. } => {
                let read = async {
                    self.at_home(&user).await?;
                    // Who was paused or cut off may have missed anything.
                    Ok(self.home.places(&user, self.may_serve()).await?)
                };
                Answer::Places(read.await)
            }
            Ask::Inbox { user } => {
                let read = async {
                    self.at_home(&user).await?;
                    Ok(self.home.inbox(&user).await?)
                };
                Answer::Inbox(read.await)
            }
            Ask::Watch { user, .. } | Ask::Presence { user } => {
                let read = async {
                    self.at_home(&user).await?;
                    Ok(self.home.presence.of(&user).await?)
                };
                Answer::Presence(read.await)
            }
            Ask::Follow { channel, .. } => Answer::Head(self.head_here(channel).await),
            Ask::Disconnect { user } => Answer::Disconnected(self.edge.disconnect(&user)),
        }
    }

    /// Whoever asks here is told of it before anything else that comes from there: see [`Exchange`](super::Exchange).
    pub(super) fn note(&self, from: GatewayId, ask: &Ask) {
        let Some((topic, version)) = ask.interest() else {
            return;
        };
        tracing::trace!(me = %self.me, %from, ?topic, version, "interested");
        let passed = None;
        self.home
            .interested(from, &Interest { topic, passed }, version);
    }

    /// Asks the conversation here for as long as this gateway is its owner, also while it is only about to be.
    pub(super) async fn ask_here(
        &self,
        conversation: ConversationId,
        actor: UserId,
        operation: Operation,
    ) -> Result<Outcome, Error> {
        let Some(cluster) = &self.cluster else {
            return self.conversations.ask(conversation, actor, operation).await;
        };
        let attempt = || async {
            if self.ring.load().owner(conversation) != Some(self.me) {
                return Some(Err(Error::Moved));
            }
            let (actor, operation) = (actor.clone(), operation.clone());
            match self.conversations.ask(conversation, actor, operation).await {
                Err(Error::Moved) => None,
                outcome => Some(outcome),
            }
        };
        self.retry(cluster, attempt).await
    }

    /// The channel's newest seq: what comes after it is published to whoever is interested now.
    async fn head_here(&self, channel: ConversationId) -> Result<Seq, Error> {
        let nothing = Operation::CatchUp {
            after: Seq::MAX,
            limit: 1,
        };
        match self.ask_here(channel, UserId::gateway(), nothing).await? {
            Outcome::History(page) => Ok(page.head),
            _ => Err(Error::UnknownConversation),
        }
    }

    /// Waits until this gateway speaks for the user: rule [confirm].
    async fn at_home(&self, user: &UserId) -> Result<(), Error> {
        let Some(cluster) = &self.cluster else {
            return Ok(());
        };
        let attempt = || {
            ready(match self.home.at_home(user) {
                AtHome::Yes => Some(Ok(())),
                AtHome::No => Some(Err(Error::Moved)),
                AtHome::NotYet => None,
            })
        };
        self.retry(cluster, attempt).await
    }

    /// Asks one that the ring names, wherever it is, and whichever it becomes meanwhile.
    pub(super) async fn ask_wherever(
        &self,
        place: impl Fn(&View) -> Option<GatewayId>,
        ask: impl Fn(Epoch) -> Ask,
    ) -> Result<Answer, Error> {
        let Some(cluster) = &self.cluster else {
            let ask = ask(self.ring.load().version());
            self.note(self.me, &ask);
            return Ok(self.answer_here(ask).await);
        };
        let attempt = || async {
            // Said under the lock under which announcements are made: never under an older version after those.
            let (ask, asked) = self.edge.telling(|| {
                let ring = self.ring.load();
                let ask = ask(ring.version());
                match place(&ring) {
                    Some(place) if place == self.me => {
                        self.note(self.me, &ask);
                        (Some(ask), None)
                    }
                    Some(place) => (None, Some(cluster.peers.ask(place, ask))),
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
        self.retry(cluster, attempt).await
    }

    async fn ask_home(&self, user: &UserId, ask: impl Fn(Epoch) -> Ask) -> Result<Answer, Error> {
        self.ask_wherever(|ring| ring.home(user), ask).await
    }

    /// Subscribes a session to its user, at the user's home, and reads which conversations the user is in. Everything
    /// published from then on reaches the session: rule [register], then read.
    ///
    /// # Errors
    /// When that cannot be read in time.
    pub async fn register(&self, session: &Arc<Subscriber>) -> Result<Vec<InboxPlace>, Error> {
        let user = &session.user;
        self.edge.subscribe(&Topic::User(user.clone()), session);
        let ask = |version| Ask::Register {
            user: user.clone(),
            version,
        };
        match self.ask_home(user, ask).await? {
            Answer::Places(places) => places,
            _ => Err(Error::Closed),
        }
    }

    /// Ends everything that `register` and `subscribe` began.
    pub fn leave(&self, session: &Subscriber) {
        self.edge.leave(session, |topic| self.uninterested(topic));
    }

    fn uninterested(&self, topic: &Topic) {
        match (self.ring.load().responsible(topic), &self.cluster) {
            (Some(place), Some(cluster)) if place != self.me => {
                cluster.peers.uninterested(place, topic);
            }
            _ => self.home.uninterested(self.me, topic),
        }
    }

    /// All conversations of a user, as stored and as published since.
    ///
    /// # Errors
    /// When the store cannot be read, or the user's home not be reached.
    pub async fn inbox_rows(&self, user: &UserId) -> Result<Vec<InboxRow>, Error> {
        let ask = |_| Ask::Inbox { user: user.clone() };
        inbox(self.ask_home(user, ask).await?)
    }

    /// Ends what a session asked for: looking into channels, watching users.
    pub fn unsubscribe(&self, session: &Subscriber, topics: &[Topic]) {
        let end = |hub: &Hub| hub.end_requested(topics, session);
        self.edge.end(end, |topic| self.uninterested(topic));
    }

    /// A request for these failed.
    pub(super) fn give_up(&self, session: &Subscriber, topics: &[Topic]) {
        let end = |hub: &Hub| hub.give_up(topics, session);
        self.edge.end(end, |topic| self.uninterested(topic));
    }

    /// Whether each user is online; and from now on, when that changes.
    ///
    /// # Errors
    /// `TooLarge` if the session would watch too many; else when the store cannot be read, or a user's home not be
    /// reached. Then nothing has changed.
    pub async fn watch(
        &self,
        session: &Arc<Subscriber>,
        users: &[UserId],
    ) -> Result<Vec<PresenceItem>, Error> {
        let topics: Vec<Topic> = users.iter().cloned().map(Topic::Presence).collect();
        let what = "users that a session watches";
        self.edge.request(&topics, session, what, WATCHED_MAX)?;
        let mut items = Vec::with_capacity(users.len());
        for users in users.chunks(HEADS_AT_ONCE) {
            items.extend(join_all(users.iter().map(|user| self.watch_one(user))).await);
        }
        let items: Result<Vec<_>, Error> = items.into_iter().collect();
        match items {
            Ok(items) if self.edge.hub().confirm(&topics, session) => Ok(items),
            Ok(_) => Err(Error::unavailable("unwatched meanwhile")),
            Err(error) => {
                self.give_up(session, &topics);
                Err(error)
            }
        }
    }

    async fn watch_one(&self, user: &UserId) -> Result<PresenceItem, Error> {
        let ask = |version| Ask::Watch {
            user: user.clone(),
            version,
        };
        presence(self.ask_home(user, ask).await?)
    }

    /// # Errors
    /// When the store cannot be read, or the user's home not be reached.
    pub async fn presence(&self, user: &UserId) -> Result<PresenceItem, Error> {
        let ask = |_| Ask::Presence { user: user.clone() };
        presence(self.ask_home(user, ask).await?)
    }

    /// Closes all sessions of a user, wherever they are; returns how many.
    ///
    /// # Errors
    /// When a gateway could not be told.
    pub async fn disconnect(&self, user: &UserId) -> Result<usize, Error> {
        let mut closed = self.edge.disconnect(user);
        if let Some(cluster) = &self.cluster {
            let others = self.ring.load_full();
            let others = others.members().iter().filter(|&&g| g != self.me);
            let asks = others.map(|&gateway| {
                let user = user.clone();
                cluster.peers.ask(gateway, Ask::Disconnect { user })
            });
            let answers = self.in_time(async { Ok(join_all(asks).await) });
            for answer in answers.await? {
                match answer {
                    Ok(Answer::Disconnected(there)) => closed += there,
                    Ok(Answer::Outcome(Err(error))) => return Err(error),
                    // Gone, and its sessions with it.
                    Ok(_) | Err(CallError::Lost) => {}
                    Err(unasked) => return Err(unasked.into()),
                }
            }
        }
        Ok(closed)
    }

    /// # Errors
    /// When the store cannot be read.
    pub async fn public(
        &self,
        after: Option<ConversationId>,
        limit: usize,
    ) -> Result<PublicPage, Error> {
        Ok(self.store.public_conversations(after, limit).await?)
    }

    /// Stores when users were last seen. To be called every few seconds.
    pub async fn flush_presence(&self) {
        self.home.presence.flush().await;
    }

    /// Whether this gateway's lease has not ended.
    pub(super) fn may_serve(&self) -> bool {
        self.conversations.may_serve()
    }

    /// # Errors
    /// Why nothing can be stored now.
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

/// Something may have become possible.
async fn changed(changes: &mut ViewListener) {
    counter!("chat_cluster_retries_total").increment(1);
    tokio::select! {
        biased;
        () = changes.changed() => {}
        () = sleep(RETRY_AFTER) => {}
    }
}

fn inbox(answer: Answer) -> Result<Vec<InboxRow>, Error> {
    match answer {
        Answer::Inbox(rows) => rows,
        _ => Err(Error::Closed),
    }
}

fn presence(answer: Answer) -> Result<PresenceItem, Error> {
    match answer {
        Answer::Presence(item) => item,
        _ => Err(Error::Closed),
    }
}
