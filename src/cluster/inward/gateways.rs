//! How a gateway of the ring is asked, which may be this one, also if the ring changes meanwhile.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use futures_util::FutureExt;
use metrics::counter;
use tokio::time::{sleep, timeout};

use crate::{
    chat::Error,
    cluster::{
        home::Home,
        ring::{members::MembershipAgent, view::View, view_changes::ViewListener},
        sockets::local_sockets::LocalSockets,
        wire::{link::CallError, message::Interest, peers::Peers, question::Question},
    },
    model::{Epoch, GatewayId, Topic},
};

/// The time between two attempts while another gateway takes over.
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// The gateways of the ring.
pub(crate) struct Gateways {
    pub me: GatewayId,
    pub ring: Arc<ArcSwap<View>>,
    /// The other gateways. `None` with the embedded store, where there never are any.
    pub others: Option<Others>,
    operation_timeout: Duration,
    /// Notes in what this gateway is interested, when it asks itself.
    home: Arc<Home>,
    /// Keeps interests in order.
    sockets: Arc<LocalSockets>,
}

/// The other gateways, and the changes of the ring.
#[derive(Clone)]
pub(crate) struct Others {
    pub members: Arc<MembershipAgent>,
    pub peers: Arc<Peers>,
}

impl Gateways {
    pub(crate) fn new(
        me: GatewayId,
        ring: Arc<ArcSwap<View>>,
        others: Option<Others>,
        operation_timeout: Duration,
        home: Arc<Home>,
        sockets: Arc<LocalSockets>,
    ) -> Self {
        Self {
            me,
            ring,
            others,
            operation_timeout,
            home,
            sockets,
        }
    }

    /// Asks the gateway that the ring names as `responsible`. If that is this one, `here` answers.
    ///
    /// # Errors
    /// The refusal; `Unavailable` if the gateway does not answer in time.
    pub(crate) async fn ask<Q: Question, F>(
        &self,
        responsible: impl Fn(&View) -> Option<GatewayId>,
        question: impl Fn(Epoch) -> Q,
        here: impl Fn(Q) -> F,
    ) -> Result<Q::Answer, Error>
    where
        F: Future<Output = Result<Q::Answer, Error>>,
    {
        let Some(others) = &self.others else {
            let question = question(self.ring.load().version());
            self.note(self.me, question.interest());
            return here(question).await;
        };
        let attempt = || async {
            // Interests are announced under this lock, so that none is told for an older version after that.
            let (question, asked) = self.sockets.in_interest_order(|| {
                let ring = self.ring.load();
                let question = question(ring.version());
                match responsible(&ring) {
                    Some(gateway) if gateway == self.me => {
                        self.note(self.me, question.interest());
                        (Some(question), None)
                    }
                    Some(gateway) => (None, Some(others.peers.ask(gateway, question))),
                    None => (None, None),
                }
            });
            let answer = match (question, asked) {
                (Some(question), _) => Ok(here(question).await),
                (None, Some(asked)) => asked.await,
                (None, None) => return None,
            };
            match answer {
                Ok(Err(Error::Moved)) | Err(CallError::Lost) => None,
                Ok(answer) => Some(answer),
                Err(unasked) => Some(Err(unasked.into())),
            }
        };
        self.retry(others, attempt).await
    }

    /// Notes that the asking gateway is interested in the topic of its question. It must be called in the order in which
    /// questions arrive, before anything else of that gateway is handled: see [`Exchange`](crate::cluster::Exchange).
    pub(crate) fn note(&self, from: GatewayId, interest: Option<(Topic, Epoch)>) {
        let Some((topic, version)) = interest else {
            return;
        };
        tracing::trace!(me = %self.me, %from, ?topic, version, "interested");
        let interest = Interest {
            topic,
            passed: None,
            // A session that comes is not away.
            away: false,
        };
        self.home.interested(from, &interest, version);
    }

    /// Repeats an attempt until it gives a result, or until the operation's time is over. In between it waits for a change
    /// of the ring, or for [`RETRY_AFTER`].
    pub(crate) async fn retry<T, F>(
        &self,
        others: &Others,
        attempt: impl Fn() -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Option<Result<T, Error>>>,
    {
        let mut changes = others.members.view_changes();
        let decided = async {
            loop {
                changes.mark_heard();
                if let Some(result) = attempt().await {
                    return result;
                }
                changed(&mut changes).await;
            }
        };
        self.in_time(decided).await
    }

    /// Limits the time of an operation. This is no `async fn`, because that would contain `asked` twice.
    pub(crate) fn in_time<T>(
        &self,
        asked: impl Future<Output = Result<T, Error>>,
    ) -> impl Future<Output = Result<T, Error>> {
        timeout(self.operation_timeout, asked).map(|asked| asked.unwrap_or(Err(Error::TOO_LATE)))
    }
}

/// Waits until another attempt may succeed.
async fn changed(changes: &mut ViewListener) {
    counter!("chat_cluster_retries_total").increment(1);
    tokio::select! {
        biased;
        () = changes.changed() => {}
        () = sleep(RETRY_AFTER) => {}
    }
}
