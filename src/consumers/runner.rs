//! Builds and runs the consumers of one gateway.

use std::sync::Arc;

use metrics::{Gauge, gauge};
use tokio::time::sleep;

use super::{
    follower::{Follower, Line, Settings},
    scan::{self, Scan},
    states::States,
    webhooks::{
        dispatcher::{Dispatcher, Parts, Receiver},
        endpoint::Limits,
        events::Filter,
    },
};
use crate::{
    chat::{self, Conversations},
    clock,
    cluster::Router,
    model::{ConsumerName, GatewayId, Kind},
    store::Store,
    tasks::Tasks,
};

/// The time between two updates of the gauges.
const MEASURE_EVERY: std::time::Duration = std::time::Duration::from_secs(5);

/// A webhook to run.
#[derive(Clone)]
pub struct Webhook {
    pub name: ConsumerName,
    pub filter: Filter,
    pub limits: Limits,
    pub receiver: Arc<dyn Receiver>,
}

/// The consumers of a gateway.
pub struct Consumers {
    pub follower: Arc<Follower>,
    webhooks: Vec<(Webhook, Arc<Line>)>,
}

impl Consumers {
    #[must_use]
    pub fn new(
        gateway: GatewayId,
        store: Arc<dyn Store>,
        settings: Settings,
        webhooks: Vec<Webhook>,
    ) -> Self {
        let webhooks: Vec<_> = webhooks
            .into_iter()
            .map(|webhook| {
                let mut kinds = vec![Kind::Dm, Kind::Group, Kind::Channel];
                kinds.retain(|kind| webhook.filter.allows_kind(*kind));
                let line = Arc::new(Line::new(webhook.name.clone(), kinds));
                (webhook, line)
            })
            .collect();
        let lines = webhooks.iter().map(|(_, line)| line.clone()).collect();
        Self {
            follower: Arc::new(Follower::new(gateway, store, settings, lines)),
            webhooks,
        }
    }

    /// Returns the port through which conversations are followed. `None` if there are no consumers.
    #[must_use]
    pub fn port(&self) -> Option<Arc<dyn chat::Consumers>> {
        let follower: Arc<dyn chat::Consumers> = self.follower.clone();
        (!self.webhooks.is_empty()).then_some(follower)
    }

    /// Returns what this gateway knows of a webhook.
    #[must_use]
    pub fn line(&self, name: &ConsumerName) -> Option<&Arc<Line>> {
        let mut lines = self.webhooks.iter().map(|(_, line)| line);
        lines.find(|line| line.name == *name)
    }

    pub fn webhooks(&self) -> impl Iterator<Item = &Webhook> {
        self.webhooks.iter().map(|(webhook, _)| webhook)
    }

    /// Starts everything. Returns the states of the consumers. `seed` makes pauses differ from those of other gateways.
    pub fn start(
        &self,
        router: &Arc<Router>,
        conversations: &Conversations,
        store: &Arc<dyn Store>,
        tasks: &Tasks,
        seed: u64,
    ) -> Arc<States> {
        let states = Arc::new(States {
            store: store.clone(),
            router: router.clone(),
            tasks: tasks.clone(),
        });
        if self.webhooks.is_empty() {
            return states;
        }
        let follower = &self.follower;
        tasks.spawn_until_drained(follower.clone().keep_stored());
        tasks.spawn_until_drained(follower.clone().keep_clearing());
        tasks.spawn_until_drained(scan::reload_lost(follower.clone(), router.clone()));
        let lines = self.webhooks.iter().map(|(_, line)| line.clone());
        tasks.spawn_until_drained(states.clone().keep(lines.clone().collect()));
        tasks.spawn_until_drained(measure(follower.clone(), lines.collect()));
        for (webhook, line) in &self.webhooks {
            let parts = Parts {
                follower: follower.clone(),
                line: line.clone(),
                conversations: conversations.clone(),
                store: store.clone(),
                states: states.clone(),
                receiver: webhook.receiver.clone(),
                filter: webhook.filter.clone(),
            };
            let dispatcher = Dispatcher::new(parts, webhook.limits, seed);
            tasks.spawn_until_drained(dispatcher.run());
            let scan = Scan {
                follower: follower.clone(),
                line: line.clone(),
                router: router.clone(),
                store: store.clone(),
            };
            tasks.spawn_until_drained(scan.run());
        }
        states
    }
}

/// Updates the gauges of the consumers.
async fn measure(follower: Arc<Follower>, lines: Vec<Arc<Line>>) {
    let gauges: Vec<(Arc<Line>, Gauge, Gauge)> = lines
        .into_iter()
        .map(|line| {
            let name = line.name.as_str().to_owned();
            let oldest = gauge!("chat_consumer_oldest_seconds", "consumer" => name.clone());
            let waiting = gauge!("chat_consumer_lagging", "consumer" => name);
            (line, oldest, waiting)
        })
        .collect();
    loop {
        for (line, oldest, waiting) in &gauges {
            let (count, at) = follower.behind(&line.name);
            #[expect(clippy::cast_precision_loss, reason = "a gauge")]
            let age = at.map_or(0.0, |at| (clock::wall() - at).max(0) as f64 / 1_000.0);
            oldest.set(age);
            #[expect(clippy::cast_precision_loss, reason = "a gauge")]
            waiting.set(count as f64);
        }
        sleep(MEASURE_EVERY).await;
    }
}
