//! Finishes what was interrupted when a conversation was lost, here or with another gateway.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, timeout_at};

use super::{Exchange, RETRY_AFTER};
use crate::{
    chat::{Error, Load, Repair, repair_all},
    cluster::ring::status::BEAT_SEEN,
    model::{ConversationId, GatewayId, UserId},
};

/// The time between two searches for gateways that are gone and not repaired. A search reads the keys of a whole table, and
/// whoever is gone shows in the ring, so it only finds what should not be there.
const REPAIR_EVERY: Duration = Duration::from_mins(10);
/// The same while a gateway that is no member still lives. It may die without a change of the ring.
const REPAIR_SOON: Duration = Duration::from_secs(10);

impl Exchange {
    /// Lets the new owners of conversations that were lost here load them, and thereby finish what was in progress.
    pub(super) fn finish(self: &Arc<Self>) {
        for conversation in self.conversations.take_unfinished() {
            let exchange = self.clone();
            self.tasks.spawn_until_drained(async move {
                let ask = exchange.router.ask(conversation, UserId::gateway(), Load);
                // The answer does not matter: asking loads the conversation.
                let answered = !ask.await.is_err_and(|error| error.is_unavailable());
                exchange.conversations.asked(conversation, answered);
            });
        }
    }

    /// Repairs the conversations of gateways that are gone. For each of these one member is responsible.
    pub(super) async fn repair(self: Arc<Self>) {
        let mut changes = self.members.view_changes();
        let mut version = 0;
        loop {
            let now = changes.version();
            let looked_at = Instant::now();
            let all_repaired = match self.repair_gone().await {
                Ok(all_repaired) => all_repaired,
                Err(error) => {
                    tracing::warn!(%error, "crash repair could not finish; trying again");
                    sleep(RETRY_AFTER * 5).await;
                    continue;
                }
            };
            version = version.max(now);
            // Again at once when the ring changes, and otherwise after a while.
            let again = looked_at
                + if all_repaired {
                    REPAIR_EVERY
                } else {
                    REPAIR_SOON
                };
            while changes.version() <= version && Instant::now() < again {
                let _ = timeout_at(again, changes.changed()).await;
            }
        }
    }

    /// Repairs the conversations of all gateways that are gone, for which this member is responsible. Returns `false` if a
    /// gateway that is no member still lives.
    async fn repair_gone(&self) -> Result<bool, Error> {
        let ring = self.members.ring().load_full();
        let members = ring.members();
        let mut gone = self.store.active_gateways().await?;
        gone.retain(|gateway| !members.contains(gateway));
        gone.retain(|gateway| ring.owner(ConversationId(gateway.0)) == Some(self.me));
        let mut all_repaired = true;
        for gateway in gone {
            if self.lives(gateway).await? {
                all_repaired = false;
                continue;
            }
            let touched = self.store.activity(gateway).await?;
            let repair = async |conversation| {
                let asked = self
                    .router
                    .ask(conversation, UserId::gateway(), Repair)
                    .await;
                asked.or_else(|error| {
                    if error.is_unavailable() {
                        Err(error)
                    } else {
                        Ok(())
                    }
                })
            };
            if repair_all(gateway, touched, repair).await? {
                self.store.forget_activity(gateway).await?;
            }
        }
        Ok(all_repaired)
    }

    /// Whether a gateway that is no member still writes heartbeats: it is about to join, or is leaving.
    async fn lives(&self, gateway: GatewayId) -> Result<bool, Error> {
        let before = self.store.heartbeat(gateway).await?;
        if before.is_none() {
            return Ok(false);
        }
        sleep(BEAT_SEEN).await;
        Ok(self.store.heartbeat(gateway).await? != before)
    }
}
