//! The receiver of a webhook: it is down, answers with errors, and answers get lost. It checks what arrives.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use chat_gateway::{
    consumers::{
        Consumers, Settings, Webhook,
        webhooks::{
            dispatcher::Receiver,
            endpoint::{Limits, Outcome},
            events::{Event, EventType, Filter, payload},
        },
    },
    model::{ConsumerName, Cursor, GatewayId},
    store::Store,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::Value;
use tokio::time::sleep;

use super::World;

/// What arrived at the receiver, whatever it answered.
pub(crate) struct Arrivals {
    random: Mutex<StdRng>,
    is_down: AtomicBool,
    /// Whether it accepts everything. Otherwise it fails now and then also when it is not down.
    is_healthy: AtomicBool,
    /// Whether what delivers panics at the next events.
    pub(crate) panics: AtomicBool,
    /// The newest entry and change of each conversation.
    pub(crate) reached: Mutex<BTreeMap<String, Cursor>>,
    pub(crate) repeats: Mutex<usize>,
    findings: Mutex<Vec<String>>,
}

impl Arrivals {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            random: Mutex::new(StdRng::seed_from_u64(seed ^ 2)),
            is_down: AtomicBool::new(false),
            is_healthy: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            reached: Mutex::default(),
            repeats: Mutex::default(),
            findings: Mutex::default(),
        }
    }

    pub(super) fn below(&self, most: u64) -> u64 {
        self.random.lock().unwrap().random_range(0..most)
    }

    pub(super) fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Relaxed)
    }

    /// Draws whether something fails that does so once in so many times.
    pub(super) fn fails(&self, one_in: u64) -> bool {
        !self.is_healthy.load(Ordering::Relaxed) && self.below(one_in) == 0
    }

    /// Lets it accept everything from now on, or fail now and then.
    pub(crate) fn set_healthy(&self, is_healthy: bool) {
        self.is_healthy.store(is_healthy, Ordering::Relaxed);
        if is_healthy {
            self.recover();
        }
    }

    pub(crate) fn go_down(&self) {
        self.is_down.store(true, Ordering::Relaxed);
    }

    pub(crate) fn recover(&self) {
        self.is_down.store(false, Ordering::Relaxed);
    }

    pub(crate) fn take_findings(&self) -> Vec<String> {
        std::mem::take(&mut *self.findings.lock().unwrap())
    }

    /// Notes that an event arrived. First arrivals are in order, and a change comes after its entries.
    fn arrived(&self, event: &Event) {
        let body = payload(std::slice::from_ref(event)).unwrap().body;
        let body: Value = serde_json::from_slice(&body).unwrap();
        let data = &body["data"];
        let conversation = data["conversation"].as_str().unwrap().to_owned();
        let seqs = data["seqs"].as_array().cloned().unwrap_or_default();
        let seqs = seqs.iter().chain(data.get("seq")).filter_map(Value::as_u64);
        let newest = seqs.max().unwrap();
        let mut reached = self.reached.lock().unwrap();
        let at = reached.entry(conversation.clone()).or_default();
        let is_change = event.id.starts_with(&conversation);
        let (position, before) = if is_change {
            (data["rev"].as_u64().unwrap(), &mut at.1)
        } else {
            (newest, &mut at.0)
        };
        let found = if position > *before + 1 {
            Some(format!("{position} arrived after {before}"))
        } else if is_change && newest > at.0 {
            Some(format!("a change of {newest} arrived after entry {}", at.0))
        } else {
            None
        };
        let before = if is_change { &mut at.1 } else { &mut at.0 };
        if position <= *before {
            *self.repeats.lock().unwrap() += 1;
        }
        *before = position.max(*before);
        if let Some(found) = found {
            let what = event.event.name();
            let text = format!("the receiver, {conversation}, {what}: {found}");
            self.findings.lock().unwrap().push(text);
        }
    }
}

/// The receiver as one gateway reaches it.
struct Simulated(Arc<World>);

impl Receiver for Simulated {
    fn deliver<'a, 'b, 'c>(
        &'a self,
        events: &'b [Event],
    ) -> Pin<Box<dyn Future<Output = (Outcome, Option<String>)> + Send + 'c>>
    where
        'a: 'c,
        'b: 'c,
    {
        // Outside the future, in which a panic is contained.
        let panics = self.0.arrivals.panics.swap(false, Ordering::Relaxed);
        assert!(!panics, "simulated");
        Box::pin(self.answer(events))
    }
}

impl Simulated {
    async fn answer(&self, events: &[Event]) -> (Outcome, Option<String>) {
        let arrivals = &self.0.arrivals;
        let unavailable = Outcome::Unavailable {
            status: Some(503),
            retry_after: None,
        };
        sleep(Duration::from_millis(arrivals.below(40))).await;
        if arrivals.is_down() || arrivals.fails(20) {
            return (unavailable, None);
        }
        if events.len() > 1 && arrivals.fails(30) {
            return (Outcome::Rejected(413), None);
        }
        for event in events {
            arrivals.arrived(event);
        }
        let is_lost = arrivals.fails(15);
        sleep(Duration::from_millis(arrivals.below(40))).await;
        let outcome = if is_lost {
            unavailable
        } else {
            Outcome::Accepted
        };
        (outcome, None)
    }
}

impl World {
    /// Builds the consumers of a gateway.
    pub(super) fn consumers(
        self: &Arc<Self>,
        gateway: GatewayId,
        store: &Arc<dyn Store>,
    ) -> Consumers {
        let large = self.consuming.large;
        let settings = Settings {
            offset_flush: Duration::from_secs(if large { 30 } else { 5 }),
            lagging_after: Duration::from_secs(if large { 30 } else { 3 }),
            catch_up: if large { 64 } else { 2 },
        };
        let limits = Limits {
            batch: if large { 100 } else { 5 },
            connections: if large { 4 } else { 2 },
        };
        let webhooks = self.consuming.webhook.then(|| Webhook {
            name: ConsumerName::webhook("simulated"),
            filter: Filter {
                events: EventType::ALL.to_vec(),
                kinds: Vec::new(),
            },
            limits,
            receiver: Arc::new(Simulated(self.clone())),
        });
        let webhooks = webhooks.into_iter().collect();
        let push = self.consuming.pushing.then(|| self.push());
        Consumers::new(gateway, store.clone(), settings, webhooks, push)
    }

    /// Lets the receiver go down and recover while gateways come and go. If it is down at the end of that, it stays so until
    /// a check. So conversations are closed while they lag, and gateways pause for long.
    pub(crate) async fn fail(self: Arc<Self>) {
        loop {
            let arrivals = &self.arrivals;
            sleep(Duration::from_millis(500 + arrivals.below(4_000))).await;
            if self.churning.load(Ordering::Relaxed) {
                let is_down = arrivals.below(2) == 0;
                arrivals.is_down.store(is_down, Ordering::Relaxed);
            }
        }
    }
}
