//! What this gateway answers, to its sessions and to peers, as the owner of conversations and as the home of users.

use futures_util::{TryFutureExt, future::Either};
use metrics::counter;

use super::{
    memberships::Rows,
    message::{InboxPart, Interest, PeerRequest, PeerResponse},
    router::Router,
};
use crate::{
    chat::{CatchUp, Error, Operation, Outcome, output},
    model::{ConversationId, Cursor, GatewayId, Seq, UserId},
};

impl Router {
    /// Answers a request of a session here or of a peer, as an owner or a home.
    pub(super) async fn answer_here(&self, ask: PeerRequest) -> PeerResponse {
        match ask {
            PeerRequest::Operation {
                conversation,
                actor,
                operation,
            } => PeerResponse::Outcome(self.ask_owner_here(conversation, actor, operation).await),
            PeerRequest::Register { user, .. } => {
                let read = async {
                    self.at_home(&user).await?;
                    // A gateway that was paused or cut off may have missed anything.
                    let refs = self.home.conversations(&user, self.may_serve(), Rows::refs);
                    let (refs, remembered) = refs.await?;
                    if remembered {
                        counter!("chat_places_remembered_total").increment(1);
                    }
                    Ok(refs)
                };
                PeerResponse::Places(read.await)
            }
            PeerRequest::Inbox { user, part } => {
                let read = self.inbox_here(&user, part).await;
                read.unwrap_or_else(|error| PeerResponse::Inbox(Err(error)))
            }
            PeerRequest::Watch { user, .. } | PeerRequest::Presence { user } => {
                let read = async {
                    self.at_home(&user).await?;
                    Ok(self.home.presence.of(&user).await?)
                };
                PeerResponse::Presence(read.await)
            }
            PeerRequest::Follow { channel, .. } => {
                PeerResponse::position(self.position_here(channel).await)
            }
            PeerRequest::Disconnect { user } => {
                PeerResponse::Disconnected(self.sockets.disconnect(&user))
            }
            PeerRequest::BeginUpload {
                user,
                bytes,
                limits,
            } => PeerResponse::Upload(Box::pin(self.begin_upload_here(&user, bytes, limits)).await),
            ask => self.answer_for_consumers(ask).await,
        }
    }

    /// Answers what the level of consumers has added.
    async fn answer_for_consumers(&self, ask: PeerRequest) -> PeerResponse {
        match ask {
            PeerRequest::Devices { user, ask } => {
                let answer = Box::pin(self.devices_here(&user, ask)).await;
                answer.unwrap_or_else(|error| PeerResponse::Outcome(Err(error)))
            }
            PeerRequest::Token {
                hash,
                user,
                device,
                claims,
            } => {
                let written = self.token_here(hash, user, device, claims);
                PeerResponse::Outcome(Box::pin(written).await)
            }
            PeerRequest::Settings {
                user,
                conversation,
                change,
            } => {
                let set = self.settings_here(&user, conversation, change);
                PeerResponse::Settings(Box::pin(set).await)
            }
            PeerRequest::Push {
                conversation,
                users,
            } => PeerResponse::Push(self.push_here(conversation, users)),
            _ => PeerResponse::Outcome(Err(Error::invalid("not about consumers"))),
        }
    }

    /// Reads a user's inbox, or a part of it, as their home.
    async fn inbox_here(
        &self,
        user: &UserId,
        part: Option<InboxPart>,
    ) -> Result<PeerResponse, Error> {
        self.at_home(user).await?;
        Ok(match part {
            None => PeerResponse::Inbox(Ok(self.home.inbox(user).await?)),
            Some(InboxPart::Rows(conversations)) => {
                let rows = self.home.inbox_rows(user, self.may_serve(), &conversations);
                PeerResponse::Inbox(Ok(rows.await?))
            }
            Some(InboxPart::Order { before, limit }) => {
                let take = |rows: &Rows| rows.order(before, limit);
                let read = self.home.conversations(user, self.may_serve(), take);
                PeerResponse::InboxOrder(read.await?.0)
            }
        })
    }

    /// Notes that the asking gateway is interested in the topic of its request. It must be called in the order in which
    /// requests arrive, before anything else of that gateway is handled: see [`Exchange`](super::Exchange).
    pub(super) fn note(&self, from: GatewayId, ask: &PeerRequest) {
        let Some((topic, version)) = ask.interest() else {
            return;
        };
        tracing::trace!(me = %self.me, %from, ?topic, version, "interested");
        let interest = Interest {
            topic,
            passed: None,
            // A session that comes is not away.
            away: false,
        };
        self.home.interested(from, &interest, version);
    }

    /// Asks the owner on this gateway, and waits if this gateway is only about to own the conversation.
    ///
    /// # Errors
    /// `Moved` if another gateway owns the conversation.
    pub(super) async fn ask_owner_here(
        &self,
        conversation: ConversationId,
        actor: UserId,
        operation: Operation,
    ) -> Result<Outcome, Error> {
        let Some(others) = &self.others else {
            let asked = self.ask_owner_once(conversation, actor, operation);
            return asked.await;
        };
        let attempt = || async {
            if self.ring.load().owner(conversation) != Some(self.me) {
                return Some(Err(Error::Moved));
            }
            let (actor, operation) = (actor.clone(), operation.clone());
            let asked = self.ask_owner_once(conversation, actor, operation);
            match asked.await {
                Err(Error::Moved) => None,
                outcome => Some(outcome),
            }
        };
        self.retry(others, attempt).await
    }

    /// Asks the owner on this gateway once. A repair takes many operations, so it is no operation of the owner.
    pub(super) fn ask_owner_once(
        &self,
        conversation: ConversationId,
        actor: UserId,
        operation: Operation,
    ) -> impl Future<Output = Result<Outcome, Error>> {
        let conversations = &self.conversations;
        match operation {
            Operation::Repair => {
                let repaired = conversations.repair_one(conversation);
                Either::Left(Box::pin(repaired).map_ok(|()| Outcome::Done))
            }
            operation => Either::Right(conversations.ask(conversation, actor, operation)),
        }
    }

    /// Reads the position of a channel. What follows is published to the gateways that are interested now.
    async fn position_here(&self, channel: ConversationId) -> Result<Cursor, Error> {
        let nothing = CatchUp {
            after: Seq::MAX,
            limit: 1,
        };
        let asked = self.ask_owner_here(channel, UserId::gateway(), nothing.into());
        let page = output::<CatchUp>(asked.await)?;
        Ok(Cursor(page.head, page.rev))
    }

    /// Waits until this gateway may answer as the user's home: rule [confirm].
    async fn at_home(&self, user: &UserId) -> Result<(), Error> {
        self.at_home_since(user).await.map(drop)
    }
}
