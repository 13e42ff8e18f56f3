//! What this gateway answers, to its sessions and to peers, as the owner of conversations and as the home of users.

mod devices;
mod pushing;
mod settings;
mod uploads;

use std::{future::ready, sync::Arc};

use futures_util::{TryFutureExt, future::Either};
use metrics::counter;

use super::gateways::Gateways;
use crate::{
    chat::{CatchUp, Conversations, Error, Operation, Outcome, output},
    cluster::{
        home::{AtHome, Home, memberships::Rows},
        ring::view::View,
        sockets::local_sockets::LocalSockets,
        wire::question::{
            Answers, Disconnect, InboxOrder, InboxRef, Operate, OrderInbox, ReadInbox,
            ReadPresence, Register, WantChannel, Watch,
        },
    },
    model::{ConversationId, Cursor, Epoch, GatewayId, Seq, UserId},
    mutation::{Mutation, broken},
    protocol::PresenceItem,
    store::{self, InboxRow, Store, Version},
    tasks::Tasks,
};

/// This gateway as it answers.
pub(crate) struct Here {
    pub gateways: Arc<Gateways>,
    pub store: Arc<dyn Store>,
    pub conversations: Conversations,
    pub home: Arc<Home>,
    pub sockets: Arc<LocalSockets>,
    pub tasks: Tasks,
}

impl Here {
    /// Whether this gateway's lease has not ended.
    pub(crate) fn may_serve(&self) -> bool {
        self.conversations.may_serve()
    }

    /// Asks the owner on this gateway, and waits if this gateway is only about to own the conversation.
    ///
    /// # Errors
    /// `Moved` if another gateway owns the conversation.
    pub(crate) async fn ask_owner(
        &self,
        conversation: ConversationId,
        actor: UserId,
        operation: Operation,
    ) -> Result<Outcome, Error> {
        let Some(others) = &self.gateways.others else {
            let asked = self.ask_owner_once(conversation, actor, operation);
            return asked.await;
        };
        let attempt = || async {
            if self.gateways.ring.load().owner(conversation) != Some(self.gateways.me) {
                return Some(Err(Error::Moved));
            }
            let (actor, operation) = (actor.clone(), operation.clone());
            let asked = self.ask_owner_once(conversation, actor, operation);
            match asked.await {
                Err(Error::Moved) => None,
                outcome => Some(outcome),
            }
        };
        self.gateways.retry(others, attempt).await
    }

    /// Asks the owner on this gateway once. A repair takes many operations, so it is no operation of the owner.
    pub(crate) fn ask_owner_once(
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

    async fn presence(&self, user: &UserId) -> Result<PresenceItem, Error> {
        self.at_home(user).await?;
        Ok(self.home.presence.of(user).await?)
    }

    /// Waits until this gateway may act as the user's home: rule [confirm]. Returns the version of the ring since which, at the
    /// latest.
    async fn at_home(&self, user: &UserId) -> Result<Epoch, Error> {
        self.responsible_since(|ring| ring.home(user)).await
    }

    /// Waits until this gateway may act as the one that the ring names by `pick`: rule [confirm].
    async fn responsible_since(
        &self,
        pick: impl Fn(&View) -> Option<GatewayId>,
    ) -> Result<Epoch, Error> {
        let Some(others) = &self.gateways.others else {
            return Ok(self.home.version());
        };
        let attempt = || {
            let (at_home, version) = self.home.is_responsible(&pick);
            ready(match at_home {
                AtHome::Yes => Some(Ok(version)),
                AtHome::No => Some(Err(Error::Moved)),
                AtHome::NotYet => None,
            })
        };
        self.gateways.retry(others, attempt).await
    }

    /// Whether this gateway has been responsible all the time since it was under this version of the ring.
    fn is_responsible_still(&self, since: Epoch) -> bool {
        self.may_serve() && self.home.version() == since
    }

    // Writes of rows without a seq.

    /// Returns the version of a write under a version of the ring.
    fn next_version(&self, epoch: Epoch) -> Result<Version, Error> {
        self.home.devices.versions.next(epoch).ok_or(Error::Moved)
    }

    /// Completes a write under rule [version]: it counts only if this gateway has been the writer all the time. Otherwise
    /// the next writer may have read what was there before, and so it is asked again.
    async fn written(
        &self,
        epoch: Epoch,
        written: impl Future<Output = store::Result<()>> + Send + 'static,
    ) -> Result<(), Error> {
        match self.tasks.spawn(written).await {
            Ok(written) => written?,
            Err(_) => return Err(Error::BROKEN),
        }
        if self.is_responsible_still(epoch) || broken(Mutation::Version) {
            Ok(())
        } else {
            Err(Error::Moved)
        }
    }
}

impl Answers<Operate> for Here {
    fn answer(
        &self,
        Operate {
            conversation,
            actor,
            operation,
        }: Operate,
    ) -> impl Future<Output = Result<Outcome, Error>> {
        self.ask_owner(conversation, actor, operation)
    }
}

impl Answers<Register> for Here {
    async fn answer(&self, Register { user, .. }: Register) -> Result<Vec<InboxRef>, Error> {
        self.at_home(&user).await?;
        // A gateway that was paused or cut off may have missed anything.
        let refs = self.home.conversations(&user, self.may_serve(), Rows::refs);
        let (refs, remembered) = refs.await?;
        if remembered {
            counter!("chat_places_remembered_total").increment(1);
        }
        Ok(refs)
    }
}

impl Answers<ReadInbox> for Here {
    async fn answer(&self, ReadInbox { user, some }: ReadInbox) -> Result<Vec<InboxRow>, Error> {
        self.at_home(&user).await?;
        let rows = match some {
            None => self.home.inbox(&user).await,
            Some(some) => {
                let rows = self.home.inbox_rows(&user, self.may_serve(), &some);
                rows.await
            }
        };
        Ok(rows?)
    }
}

impl Answers<OrderInbox> for Here {
    async fn answer(
        &self,
        OrderInbox {
            user,
            before,
            limit,
        }: OrderInbox,
    ) -> Result<InboxOrder, Error> {
        self.at_home(&user).await?;
        let take = |rows: &Rows| rows.order(before, limit);
        let read = self.home.conversations(&user, self.may_serve(), take);
        Ok(read.await?.0)
    }
}

impl Answers<Watch> for Here {
    async fn answer(&self, Watch { user, .. }: Watch) -> Result<PresenceItem, Error> {
        self.presence(&user).await
    }
}

impl Answers<ReadPresence> for Here {
    async fn answer(&self, ReadPresence { user }: ReadPresence) -> Result<PresenceItem, Error> {
        self.presence(&user).await
    }
}

impl Answers<WantChannel> for Here {
    /// Reads the position of a channel. What follows is published to the gateways that are interested now.
    async fn answer(&self, WantChannel { channel, .. }: WantChannel) -> Result<Cursor, Error> {
        let nothing = CatchUp {
            after: Seq::MAX,
            limit: 1,
        };
        let asked = self.ask_owner(channel, UserId::gateway(), nothing.into());
        let page = output::<CatchUp>(asked.await)?;
        Ok(Cursor(page.head, page.rev))
    }
}

impl Answers<Disconnect> for Here {
    async fn answer(&self, Disconnect { user }: Disconnect) -> Result<usize, Error> {
        Ok(self.sockets.disconnect(&user))
    }
}
