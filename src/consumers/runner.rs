//! Builds and runs the consumers of one gateway.

use std::{sync::Arc, time::Duration};

use metrics::{Gauge, gauge};
use tokio::time::sleep;

use super::{
    follower::{Follower, Line, Settings},
    push::{Decider, Notifier, asking::Asker},
    replays::Replays,
    scan::{self, Scan},
    states::States,
    webhooks::dispatcher::{Dependencies, Dispatcher, Webhook},
};
use crate::{
    chat::{self, Conversations},
    clock,
    cluster::{Cluster, Pushes},
    model::{ConsumerName, GatewayId, Kind},
    store::Store,
    tasks::Tasks,
};

/// The time between two updates of the gauges.
const MEASURE_EVERY: Duration = Duration::from_secs(5);

/// Pushing, if there are push services.
#[derive(Clone)]
pub struct Push {
    pub notifier: Arc<dyn Notifier>,
    /// The time for which a user must not have looked.
    pub grace: Duration,
    /// The age at which a message is not pushed any more.
    pub ttl: Duration,
}

/// The consumers of a gateway.
pub struct Consumers {
    pub follower: Arc<Follower>,
    webhooks: Vec<(Webhook, Arc<Line>)>,
    push: Option<(Push, Arc<Line>)>,
}

impl Consumers {
    #[must_use]
    pub fn new(
        gateway: GatewayId,
        store: Arc<dyn Store>,
        settings: Settings,
        webhooks: Vec<Webhook>,
        push: Option<Push>,
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
        let push = push.map(|push| {
            let kinds = vec![Kind::Dm, Kind::Group];
            (push, Arc::new(Line::new(ConsumerName::push(), kinds)))
        });
        let lines = webhooks.iter().map(|(_, line)| line.clone());
        let lines = lines.chain(push.as_ref().map(|(_, line)| line.clone()));
        Self {
            follower: Arc::new(Follower::new(gateway, store, settings, lines.collect())),
            webhooks,
            push,
        }
    }

    /// Returns the port through which conversations are followed. `None` if there are no consumers.
    #[must_use]
    pub fn port(&self) -> Option<Arc<dyn chat::Consumers>> {
        let follower: Arc<dyn chat::Consumers> = self.follower.clone();
        (!self.follower.lines.is_empty()).then_some(follower)
    }

    /// Returns what this gateway knows of a webhook.
    #[must_use]
    pub fn line(&self, name: &ConsumerName) -> Option<&Arc<Line>> {
        self.follower.lines.iter().find(|line| line.name == *name)
    }

    pub fn webhooks(&self) -> impl Iterator<Item = &Webhook> {
        self.webhooks.iter().map(|(webhook, _)| webhook)
    }

    /// Starts everything. Returns the states of the consumers. `seed` makes pauses differ from those of other gateways.
    pub fn start(
        &self,
        cluster: &Cluster,
        store: &Arc<dyn Store>,
        tasks: &Tasks,
        seed: u64,
    ) -> Arc<States> {
        let (router, conversations) = (&cluster.router, &cluster.conversations);
        let states = Arc::new(States {
            store: store.clone(),
            router: router.clone(),
            tasks: tasks.clone(),
        });
        let follower = &self.follower;
        if follower.lines.is_empty() {
            return states;
        }
        let kept = follower.clone();
        tasks.keep(move || kept.clone().keep_stored());
        let kept = follower.clone();
        tasks.keep(move || kept.clone().keep_clearing());
        let lost = (follower.clone(), router.clone());
        tasks.keep(move || scan::reload_lost(lost.0.clone(), lost.1.clone()));
        let (kept, lines) = (states.clone(), follower.lines.clone());
        tasks.keep(move || kept.clone().keep(lines.clone()));
        let measured = follower.clone();
        tasks.keep(move || measure(measured.clone()));
        for line in &follower.lines {
            let scan = Scan {
                follower: follower.clone(),
                line: line.clone(),
                router: router.clone(),
                store: store.clone(),
            };
            tasks.keep(move || scan.clone().run());
        }
        self.start_webhooks(conversations, &states, tasks, seed);
        self.start_push(cluster, tasks);
        states
    }

    fn start_webhooks(
        &self,
        conversations: &Conversations,
        states: &Arc<States>,
        tasks: &Tasks,
        seed: u64,
    ) {
        for (webhook, line) in &self.webhooks {
            let with = Dependencies {
                follower: self.follower.clone(),
                line: line.clone(),
                conversations: conversations.clone(),
                store: states.store.clone(),
                states: states.clone(),
                receiver: webhook.receiver.clone(),
                filter: webhook.filter.clone(),
            };
            let limits = webhook.limits;
            tasks.keep(move || Dispatcher::new(with.clone(), limits, seed).run());
        }
        if !self.webhooks.is_empty() {
            let replays = Replays {
                webhooks: self.webhooks.clone(),
                router: states.router.clone(),
                store: states.store.clone(),
                states: states.clone(),
            };
            tasks.keep(move || replays.clone().run());
        }
    }

    fn start_push(&self, cluster: &Cluster, tasks: &Tasks) {
        let Some((push, line)) = &self.push else {
            return;
        };
        let (router, users) = (cluster.router.clone(), cluster.users.clone());
        let decider = Decider::new(router, users, push.notifier.clone(), push.grace);
        let pushes: Arc<dyn Pushes> = decider.clone();
        cluster.users.on_push(&pushes);
        tasks.keep(move || decider.clone().run());
        let asker = Asker {
            follower: self.follower.clone(),
            line: line.clone(),
            users: cluster.users.clone(),
            conversations: cluster.conversations.clone(),
            ttl: push.ttl,
        };
        tasks.keep(move || asker.clone().run());
    }
}

/// Updates the gauges of the consumers.
async fn measure(follower: Arc<Follower>) {
    let gauges: Vec<(&Arc<Line>, Gauge, Gauge)> = follower
        .lines
        .iter()
        .map(|line| {
            let name = line.name.as_str().to_owned();
            let oldest = gauge!("chat_consumer_oldest_seconds", "consumer" => name.clone());
            let waiting = gauge!("chat_consumer_lagging", "consumer" => name);
            (line, oldest, waiting)
        })
        .collect();
    loop {
        for (line, oldest, waiting) in &gauges {
            let (count, at) = follower.behind(&line.name).await;
            #[expect(clippy::cast_precision_loss, reason = "a gauge")]
            let age = at.map_or(0.0, |at| (clock::wall() - at).max(0) as f64 / 1_000.0);
            oldest.set(age);
            #[expect(clippy::cast_precision_loss, reason = "a gauge")]
            waiting.set(count as f64);
        }
        sleep(MEASURE_EVERY).await;
    }
}
