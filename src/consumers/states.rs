//! Whether consumers are enabled. Each state has one writer: rule [version]. All gateways read it again and again.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;

use super::follower::Line;
use crate::{
    chat::{Error, SetConsumer, state_of},
    cluster::Router,
    model::{ConsumerName, UserId},
    store::{self, ConsumerState, Store},
    tasks::{Tasks, contain},
};

/// The time between two reads.
const READ_EVERY: Duration = Duration::from_secs(5);
/// The pause before a state that could not be stored is stored again.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Reads and writes the states of consumers.
pub struct States {
    pub store: Arc<dyn Store>,
    pub router: Arc<Router>,
    pub tasks: Tasks,
}

impl States {
    /// Enables or disables a consumer for all gateways.
    ///
    /// # Errors
    /// `Unavailable` if it is not known whether it is stored.
    pub async fn set(
        &self,
        consumer: &ConsumerName,
        enabled: bool,
        reason: Option<String>,
    ) -> Result<(), Error> {
        let set = SetConsumer {
            consumer: consumer.clone(),
            enabled,
            reason,
        };
        let asked = self.router.ask(state_of(consumer), UserId::gateway(), set);
        asked.await
    }

    /// Returns the state of a consumer. Without one it is enabled.
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn get(&self, consumer: &ConsumerName) -> store::Result<Option<ConsumerState>> {
        self.store.consumer_state(consumer).await
    }

    /// Disables a consumer, because its receiver wants no more events. Until that is stored, it is disabled here.
    pub(super) fn receiver_is_gone(self: &Arc<Self>, line: &Arc<Line>) {
        let reason = "the receiver answered with status 410".to_owned();
        let (states, line) = (self.clone(), line.clone());
        line.set_enabled(false);
        line.hold_state(true);
        self.tasks.clone().spawn_until_drained(async move {
            tracing::warn!(consumer = %line.name, reason, "a consumer is disabled");
            let set = || {
                let set = states.set(&line.name, false, Some(reason.clone()));
                contain("a state of a consumer", &line.name, set)
            };
            while !matches!(set().await, Some(Ok(_))) {
                sleep(AGAIN_AFTER).await;
            }
            line.hold_state(false);
        });
    }

    /// Keeps the lines as the states say.
    pub async fn keep(self: Arc<Self>, lines: Vec<Arc<Line>>) {
        loop {
            for line in &lines {
                match self.get(&line.name).await {
                    Ok(state) if !line.holds_state() => {
                        line.set_enabled(state.is_none_or(|state| state.enabled));
                    }
                    Ok(_) => {}
                    Err(error) => {
                        crate::seldom::seldom!(WARN, "the state of a consumer could not be read", %error);
                    }
                }
            }
            sleep(READ_EVERY).await;
        }
    }
}
