//! A process that uses the store alone and serves nobody: commands that write to conversations as their owner.

use std::{sync::Arc, time::Duration};

use anyhow::bail;
use tokio::{task::JoinHandle, time::timeout};

use crate::{
    chat::{Confirmation, Conversations, InboxWriter, Publication, Publish},
    cluster::MembershipAgent,
    config::Config,
    store::Store,
    tasks::Tasks,
};

/// The time in which everything must be stored at the end.
const FINISH_TIMEOUT: Duration = Duration::from_secs(600);

/// The conversations of a store that no gateway uses.
pub struct Alone {
    pub store: Arc<dyn Store>,
    pub conversations: Conversations,
    pub publish: Arc<dyn Publish>,
    pub core: Tasks,
    members: Arc<MembershipAgent>,
    inbox: Arc<InboxWriter>,
    upkeep: [JoinHandle<()>; 2],
}

impl Alone {
    /// Takes the store. `tasks` are those of the store.
    ///
    /// # Errors
    /// A gateway is using the store, or the store does not answer.
    pub async fn open(
        config: &Config,
        store: Arc<dyn Store>,
        tasks: &Tasks,
    ) -> anyhow::Result<Self> {
        let core = Tasks::default();
        let members = Arc::new(MembershipAgent::alone(store.clone()).await?);
        let inbox = Arc::new(InboxWriter::new(store.clone(), config.memory()));
        inbox.recall_ranks().await?;
        let keeping = members.clone();
        let keep = tasks.spawn(async move {
            keeping.keep().await;
            tracing::error!(
                "another gateway has taken over this store; this command cannot continue"
            );
        });
        let mut settings = config.conversations();
        settings.operation_timeout = FINISH_TIMEOUT;
        settings.edit_window = None;
        settings.conversations_per_user_max = None;
        let publish: Arc<dyn Publish> = Arc::new(Nobody);
        let conversations = Conversations::new(
            members.me(),
            store.clone(),
            publish.clone(),
            inbox.clone(),
            members.lease(),
            settings,
            core.clone(),
        );
        let flushing = inbox.clone();
        let flush = tasks.spawn(async move { flushing.run().await });
        Ok(Self {
            store,
            conversations,
            publish,
            core,
            members,
            inbox,
            upkeep: [keep, flush],
        })
    }

    /// Whether another gateway has taken over the store, which ends this command.
    pub fn is_taken_over(&self) -> bool {
        let [keep, _] = &self.upkeep;
        keep.is_finished()
    }

    /// Repairs what gateways left that crashed, as far as it is not damaged.
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn repair(&self) -> anyhow::Result<()> {
        for &gone in self.members.gone() {
            self.conversations.repair(gone).await?;
        }
        Ok(())
    }

    /// Stores everything, and leaves the store. If it was not repaired, the next gateway does that.
    ///
    /// # Errors
    /// Not everything was stored.
    pub async fn close(self, is_repaired: bool) -> anyhow::Result<()> {
        let closed = timeout(FINISH_TIMEOUT, self.conversations.close()).await;
        if closed.is_err() || !self.core.finished(FINISH_TIMEOUT).await {
            bail!("the conversations were not stored in time");
        }
        while !self.inbox.flush().await {
            self.store.healthy()?;
        }
        self.upkeep.iter().for_each(JoinHandle::abort);
        self.store.forget_activity(self.members.me()).await?;
        if is_repaired {
            self.members.leave(std::future::ready(())).await;
        } else {
            self.members.give_back().await;
        }
        self.store.close().await?;
        Ok(())
    }
}

/// A publisher that does nothing, because no sockets are open.
struct Nobody;

impl Publish for Nobody {
    fn publish(&self, _: Publication) -> Confirmation {
        Confirmation::Immediate
    }
}
