//! What operators may ask of consumers.

use std::sync::Arc;

use uuid::Uuid;

use super::{
    runner::Consumers,
    states::States,
    webhooks::{endpoint::Outcome, events::Event},
};
use crate::{
    chat::Error,
    clock,
    model::{ConsumerName, ConversationId, Millis},
    store::{self, EventAt, SKIPPED_DAYS, SkippedRow, SkippedShard, Store},
};

/// Skipped events that one request returns.
const SKIPPED_PAGE: usize = 500;

/// What is known of a consumer.
#[derive(Debug, Clone)]
pub struct Status {
    pub name: ConsumerName,
    pub enabled: bool,
    /// Why it is disabled.
    pub reason: Option<String>,
    /// Whether this gateway sends nothing at the moment, because requests fail.
    pub paused: bool,
    /// How the latest request of this gateway failed.
    pub error: Option<String>,
    /// Open conversations of this gateway with something that is not delivered, and the time of the oldest.
    pub waiting: usize,
    pub oldest: Option<Millis>,
}

/// The answer to an event with which an operator tested a webhook.
#[derive(Debug, Clone)]
pub struct Tested {
    pub accepted: bool,
    pub error: Option<String>,
}

/// A page of the events that a consumer skipped, and the position after it.
pub(crate) type SkippedPage = (Vec<(u32, SkippedRow)>, Option<SkippedAfter>);

/// A position in the events that a consumer skipped, in the order of days and shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SkippedAfter {
    pub day: u32,
    pub shard: u8,
    pub event: Option<(ConversationId, EventAt)>,
}

/// The consumers as operators control them.
pub struct Control {
    pub consumers: Arc<Consumers>,
    pub states: Arc<States>,
    pub store: Arc<dyn Store>,
}

impl Control {
    /// Returns the consumer of a webhook with this name. `None` if none is configured.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<ConsumerName> {
        let name = ConsumerName::webhook(name);
        self.consumers.line(&name).map(|line| line.name.clone())
    }

    /// Returns what is known of all consumers.
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn list(&self) -> store::Result<Vec<Status>> {
        let mut found = Vec::new();
        for webhook in self.consumers.webhooks() {
            let state = self.states.get(&webhook.name).await?;
            let line = self.consumers.line(&webhook.name);
            let (waiting, oldest) = self.consumers.follower.behind(&webhook.name);
            found.push(Status {
                name: webhook.name.clone(),
                enabled: state.as_ref().is_none_or(|state| state.enabled),
                reason: state.and_then(|state| state.reason),
                paused: line.is_some_and(|line| line.is_down() && line.is_enabled()),
                error: line.and_then(|line| line.error()),
                waiting,
                oldest,
            });
        }
        Ok(found)
    }

    /// Enables or disables a consumer for all gateways. They follow within seconds.
    ///
    /// # Errors
    /// `Unavailable` if it is not known whether it is stored.
    pub async fn set_enabled(&self, consumer: &ConsumerName, enabled: bool) -> Result<(), Error> {
        let reason = (!enabled).then(|| "an operator disabled it".to_owned());
        self.states.set(consumer, enabled, reason).await
    }

    /// Sends one event to a webhook, whatever else is waiting.
    pub async fn test(&self, consumer: &ConsumerName) -> Option<Tested> {
        let mut webhooks = self.consumers.webhooks();
        let webhook = webhooks.find(|webhook| webhook.name == *consumer)?;
        let event = Event::test(format!("test:{}", Uuid::now_v7()), clock::wall());
        let (outcome, error) = webhook.receiver.deliver(&[event]).await;
        Some(Tested {
            accepted: outcome == Outcome::Accepted,
            error,
        })
    }

    /// Returns a page of the events that a consumer skipped in the last [`SKIPPED_DAYS`] days, after a position.
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn skipped(
        &self,
        consumer: &ConsumerName,
        after: Option<SkippedAfter>,
    ) -> store::Result<SkippedPage> {
        let mut shards = self.store.skipped_shards(consumer).await?;
        let first_day = clock::today().saturating_sub(SKIPPED_DAYS);
        shards.retain(|shard| shard.consumer == *consumer && shard.day >= first_day);
        shards.sort_unstable();
        let mut found = Vec::new();
        for SkippedShard { day, shard, .. } in shards {
            let at = (day, shard);
            let event = match after {
                Some(after) if at < (after.day, after.shard) => continue,
                Some(after) if at == (after.day, after.shard) => after.event,
                _ => None,
            };
            let of = SkippedShard {
                consumer: consumer.clone(),
                day,
                shard,
            };
            let limit = SKIPPED_PAGE - found.len();
            let rows = self.store.skipped(&of, event, limit).await?;
            let last = rows.last().map(|row| (row.conversation, row.at));
            let is_full = rows.len() == limit;
            found.extend(rows.into_iter().map(|row| (day, row)));
            if is_full {
                let next = SkippedAfter {
                    day,
                    shard,
                    event: last,
                };
                return Ok((found, Some(next)));
            }
        }
        Ok((found, None))
    }
}
