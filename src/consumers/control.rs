//! What operators may ask of consumers.

use std::sync::Arc;

use uuid::Uuid;

use super::{
    replays,
    runner::Consumers,
    states::States,
    webhooks::{endpoint::Outcome, events::Event},
};
use crate::{
    chat::Error,
    clock,
    model::{ConsumerName, ConversationId, Millis, Seq},
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
    /// The replays of a webhook that have not ended.
    pub replays: Vec<ConsumerName>,
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
        let states = self.store.consumers().await?;
        let replays: Vec<_> = states.into_iter().map(|(name, _)| name).collect();
        let follower = &self.consumers.follower;
        for line in &follower.lines {
            let state = self.states.get(&line.name).await?;
            let (waiting, oldest) = follower.behind(&line.name).await;
            found.push(Status {
                name: line.name.clone(),
                enabled: state.as_ref().is_none_or(|state| state.enabled),
                reason: state.and_then(|state| state.reason),
                paused: line.is_down() && line.is_enabled(),
                error: line.error(),
                waiting,
                oldest,
                replays: replays
                    .iter()
                    .filter(|name| name.is_replay_of(&line.name))
                    .cloned()
                    .collect(),
            });
        }
        Ok(found)
    }

    /// Sends a webhook again what it has got of some conversations, each from an entry to its present head. Returns the name
    /// of the replay and the number of conversations.
    ///
    /// # Errors
    /// `UnknownConversation`; `Conflict` if too many replays run; `Unavailable` if the store or an owner does not answer.
    pub async fn replay(
        &self,
        consumer: &ConsumerName,
        from: Vec<(ConversationId, Seq)>,
    ) -> Result<(ConsumerName, usize), Error> {
        replays::begin(&self.states, consumer, from).await
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
