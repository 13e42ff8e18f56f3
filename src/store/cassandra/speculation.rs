//! The speculative execution of requests: if a node does not answer soon, another is asked too.
//!
//! A node that is down or pauses then costs a request a tenth of a second, not its time-out. But if all nodes are slow
//! because they have too much to do, asking again makes them slower, and they may stay so although the clients ask no
//! more than before. So a gateway has a budget for reads and one for writes: each request adds two fifths of a further
//! one. That is enough if one node of three does not answer and the others do, and in the long run it adds at most 40 %
//! to the requests. What the driver repeats after an error is not counted.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use metrics::{Counter, counter};
use scylla::{
    client::execution_profile::ExecutionProfileHandle,
    errors::{RequestAttemptError, RequestError},
    observability::history::{AttemptId, HistoryListener, RequestId, SpeculativeId},
    policies::{
        retry::RetryDecision,
        speculative_execution::{Context, SpeculativeExecutionPolicy},
    },
};

/// What a request adds to the budget, and what a further one costs.
const ADDED: i64 = 2;
const COST: i64 = 5;
/// The largest budget, with which a gateway begins: 200 further requests.
const BUDGET_MAX: i64 = 200 * COST;

/// How the statements of one kind run.
#[derive(Clone)]
pub(super) struct Profile {
    pub handle: ExecutionProfileHandle,
    pub speculation: Arc<Speculation>,
}

/// When to ask a further node, and the budget for it. The driver asks for the policy when a request begins, and tells as
/// a listener what it did. Requests that began while there was a budget may overdraw it; the next ones make up for that.
#[derive(Debug)]
pub(super) struct Speculation {
    after: Duration,
    times_max: usize,
    /// `None`: without limit.
    budget: Option<AtomicI64>,
    asked: Counter,
}

impl Speculation {
    /// Of reads.
    pub(super) fn reads() -> Self {
        Self::new("read", Duration::from_millis(100), 2)
    }

    /// Of writes, all of which are idempotent. They wait longer, because a busy node takes longer to write than to read.
    pub(super) fn writes() -> Self {
        Self::new("write", Duration::from_millis(700), 1)
    }

    fn new(kind: &'static str, after: Duration, times_max: usize) -> Self {
        Self {
            after,
            times_max,
            budget: Some(AtomicI64::new(BUDGET_MAX)),
            asked: counter!("chat_store_speculative_requests_total", "kind" => kind),
        }
    }

    /// Without a budget: for the few requests on which the lease of the gateway depends.
    pub(super) fn without_limit(self) -> Self {
        Self {
            budget: None,
            ..self
        }
    }

    /// Returns how many further nodes a request may ask. It is at most one if less than half of the budget is left, so that
    /// more requests may ask.
    fn times(&self) -> usize {
        let Some(budget) = &self.budget else {
            return self.times_max;
        };
        match budget.load(Ordering::Relaxed) {
            left if left >= BUDGET_MAX / 2 => self.times_max,
            left if left >= COST => self.times_max.min(1),
            _ => 0,
        }
    }

    fn begun(&self) {
        let add = |budget| (budget < BUDGET_MAX).then(|| BUDGET_MAX.min(budget + ADDED));
        if let Some(budget) = &self.budget {
            let _ = budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        }
    }

    fn asked_another(&self) {
        if let Some(budget) = &self.budget {
            budget.fetch_sub(COST, Ordering::Relaxed);
        }
        self.asked.increment(1);
    }
}

impl SpeculativeExecutionPolicy for Speculation {
    fn max_retry_count(&self, _: &Context) -> usize {
        self.times()
    }

    fn retry_interval(&self, _: &Context) -> Duration {
        self.after
    }
}

/// The ids are not needed.
impl HistoryListener for Speculation {
    fn log_request_start(&self) -> RequestId {
        self.begun();
        RequestId(0)
    }

    fn log_request_success(&self, _: RequestId) {}

    fn log_request_error(&self, _: RequestId, _: &RequestError) {}

    fn log_new_speculative_fiber(&self, _: RequestId) -> SpeculativeId {
        SpeculativeId(0)
    }

    fn log_attempt_start(
        &self,
        _: RequestId,
        speculative: Option<SpeculativeId>,
        _: SocketAddr,
    ) -> AttemptId {
        // Not when the driver decides to ask another: there may be none.
        if speculative.is_some() {
            self.asked_another();
        }
        AttemptId(0)
    }

    fn log_attempt_success(&self, _: AttemptId) {}

    fn log_attempt_error(&self, _: AttemptId, _: &RequestAttemptError, _: &RetryDecision) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes requests, so many at once, of which some ask further nodes. Returns how many were asked.
    fn asked(
        at_once: usize,
        rounds: usize,
        is_slow: impl Fn(usize) -> bool,
        times: usize,
    ) -> usize {
        let speculation = Speculation::reads();
        let mut asked = 0;
        for round in 0..rounds {
            let allowed: Vec<_> = (0..at_once)
                .map(|_| {
                    let times = speculation.times();
                    speculation.begun();
                    times
                })
                .collect();
            for (number, allowed) in allowed.into_iter().enumerate() {
                if is_slow(round * at_once + number) {
                    let further = allowed.min(times);
                    (0..further).for_each(|_| speculation.asked_another());
                    asked += further;
                }
            }
        }
        asked
    }

    #[test]
    fn nodes_that_are_all_slow_are_asked_again_within_the_budget() {
        let (at_once, rounds) = (1_000, 100);
        let asked = asked(at_once, rounds, |_| true, 2);
        let most = at_once * rounds * ADDED as usize / COST as usize + 200 + 2 * at_once;
        assert!(asked <= most, "{asked} > {most}");
        assert!(asked >= at_once * rounds / 3, "{asked}");
    }

    #[test]
    fn one_node_of_three_that_does_not_answer_is_made_up_for() {
        for at_once in [1, 100, 500] {
            let asked = asked(at_once, 300, |number| number % 3 == 0, 1);
            assert_eq!(asked, (at_once * 300).div_ceil(3));
        }
    }

    #[test]
    fn a_lease_does_not_depend_on_the_budget() {
        let lease = Speculation::reads().without_limit();
        (0..10_000).for_each(|_| lease.asked_another());
        assert_eq!(lease.times(), 2);
    }
}
