//! Pushing: one user sleeps. The only device of this user is notified of what others write, through a push service that is
//! down at times.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use chat_gateway::{
    consumers::{
        self,
        push::{Notification, Notifier, Sent},
    },
    model::{ConversationId, Device, PushContent, PushProvider, Seq},
};
use tokio::time::sleep;

use super::{VISITOR, World, user};

/// Number of the user who has no session.
pub(crate) const SLEEPER: usize = VISITOR + 1;

/// What the device got.
#[derive(Default)]
pub(crate) struct Pushed {
    /// The newest message of each conversation.
    pub(crate) newest: Mutex<BTreeMap<ConversationId, Seq>>,
    findings: Mutex<Vec<String>>,
}

impl Pushed {
    pub(crate) fn take_findings(&self) -> Vec<String> {
        std::mem::take(&mut *self.findings.lock().unwrap())
    }

    fn got(&self, notification: &Notification) {
        let Some(message) = &notification.message else {
            return;
        };
        let mut newest = self.newest.lock().unwrap();
        let newest = newest.entry(notification.conversation).or_default();
        *newest = message.seq.max(*newest);
        if message.sender == user(SLEEPER) || message.body.is_empty() {
            let text = format!("a notification that nobody should get: {message:?}");
            self.findings.lock().unwrap().push(text);
        }
    }
}

/// The push service as one gateway reaches it.
struct Service(Arc<World>);

#[async_trait]
impl Notifier for Service {
    async fn notify(&self, device: &Device, notification: &Notification) -> Sent {
        let arrivals = &self.0.arrivals;
        sleep(Duration::from_millis(arrivals.below(40))).await;
        if arrivals.is_down() || arrivals.fails(10) {
            return Sent::Later(None);
        }
        assert_eq!(device.token, "sleeper");
        self.0.pushed.got(notification);
        let is_lost = arrivals.fails(15);
        sleep(Duration::from_millis(arrivals.below(40))).await;
        if is_lost {
            Sent::Later(None)
        } else {
            Sent::Done
        }
    }
}

impl World {
    /// Returns how a gateway pushes.
    pub(super) fn push(self: &Arc<Self>) -> consumers::Push {
        consumers::Push {
            notifier: Arc::new(Service(self.clone())),
            grace: Duration::from_secs(1),
            ttl: Duration::from_secs(86_400),
        }
    }

    /// Registers the device of the sleeper.
    pub(crate) async fn register_sleeper(&self) {
        let device = Device {
            id: "phone".into(),
            provider: PushProvider::Fcm,
            token: "sleeper".into(),
            content: PushContent::Full,
            version: 0,
        };
        loop {
            if let Some(gateway) = self.some_gateway()
                && let Some(cluster) = gateway.cluster()
            {
                let device = device.clone();
                let asked = gateway
                    .ask(async move { cluster.users.set_device(&user(SLEEPER), device).await });
                if let Some(Ok(())) = asked.await {
                    return;
                }
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
}
