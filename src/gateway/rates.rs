//! The rate limits of users. All sessions of a user on this gateway share them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use dashmap::DashMap;
use foldhash::quality::RandomState;
use governor::{
    DefaultKeyedRateLimiter, InsufficientCapacity, NotUntil, Quota, RateLimiter,
    clock::{Clock, DefaultClock},
};
use tokio::time::Instant;

use crate::{
    config::Limits,
    model::{UserId, limits::CONNECT_BYTES},
    protocol::{Answer, ErrorCode, Refusal},
};

/// The longest wait for bytes that a user owes. It is shorter than the time after which a client considers a silent
/// connection dead (the SDK: 6 s).
pub(super) const BYTES_WAIT_MAX: Duration = Duration::from_secs(5);

/// The rates of all users who are connected or were recently.
pub(super) struct Rates {
    began: Instant,
    requests: Rate,
    bytes: Rate,
    users: DashMap<UserId, Arc<UserRate>, RandomState>,
    creations: DefaultKeyedRateLimiter<UserId>,
    invitations: DefaultKeyedRateLimiter<UserId>,
}

/// The rates that the sessions of one user share. Each rate is the time at which its budget is full again, in
/// nanoseconds since `Rates::began`.
#[derive(Default)]
pub(super) struct UserRate {
    requests: AtomicU64,
    bytes: AtomicU64,
    /// Sockets whose `connect` was accepted and whose session is not registered yet.
    connecting: AtomicUsize,
}

/// A socket that counts as one of its user's connections until its session is registered.
pub(super) struct Connecting(Arc<UserRate>);

impl Connecting {
    /// Counts a socket. Returns `None` if its user has `connections_max` connections already, including the `sessions`
    /// registered ones.
    pub(super) fn begin(
        user: &Arc<UserRate>,
        sessions: usize,
        connections_max: usize,
    ) -> Option<Self> {
        let before = user.connecting.fetch_add(1, Ordering::AcqRel);
        let counted = Self(user.clone());
        (before + sessions < connections_max).then_some(counted)
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        self.0.connecting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An average rate with a burst (generic cell rate algorithm). Both are in nanoseconds: per unit, and for the whole
/// burst.
struct Rate {
    each: f64,
    burst: u64,
}

/// The error for a rate that is exceeded: the time to wait before the next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wait(pub Duration);

impl Wait {
    /// Returns the answer to what came too often.
    pub(super) fn refuse(self, what: &str) -> Answer {
        Answer::Error(Refusal {
            code: ErrorCode::RateLimited,
            message: what.into(),
            retry_after_ms: Some(u64::try_from(self.0.as_millis()).unwrap_or_default() + 1),
        })
    }
}

impl Rate {
    fn new(per_second: u32, burst: u32) -> Self {
        let each = 1e9 / f64::from(per_second.max(1));
        Self {
            each,
            burst: (each * f64::from(burst.max(1))) as u64,
        }
    }

    /// Returns the nanoseconds in which `count` units come back.
    fn cost(&self, count: usize) -> u64 {
        (self.each * count as f64) as u64
    }

    /// Returns the largest value of `full_at`, so that nobody waits longer than [`BYTES_WAIT_MAX`].
    fn most(&self, now: u64) -> u64 {
        now + self.burst + BYTES_WAIT_MAX.as_nanos() as u64
    }

    /// Takes one unit if there is one.
    fn take(&self, full_at: &AtomicU64, now: u64) -> Result<(), Wait> {
        let ordering = Ordering::Relaxed;
        let more = |full_at: u64| {
            let after = full_at.max(now) + self.cost(1);
            (after <= now + self.burst).then_some(after)
        };
        let taken = full_at.fetch_update(ordering, ordering, more);
        taken.map(drop).map_err(|full_at| {
            let until = (full_at + self.cost(1)).saturating_sub(self.burst);
            Wait(Duration::from_nanos(until.saturating_sub(now)))
        })
    }

    /// Takes `count` units, even if there are fewer, unless there is a debt.
    fn take_if_repaid(&self, full_at: &AtomicU64, now: u64, count: usize) -> Result<(), Wait> {
        let ordering = Ordering::Relaxed;
        let more = |full_at: u64| {
            let is_repaid = full_at <= now + self.burst;
            is_repaid.then(|| (full_at.max(now) + self.cost(count)).min(self.most(now)))
        };
        let taken = full_at.fetch_update(ordering, ordering, more);
        taken.map(drop).map_err(|full_at| {
            Wait(Duration::from_nanos(
                full_at.saturating_sub(now + self.burst),
            ))
        })
    }

    /// Takes `count` units, even if there are fewer.
    fn charge(&self, full_at: &AtomicU64, now: u64, count: usize) {
        let most = self.most(now);
        let ordering = Ordering::Relaxed;
        let more =
            |full_at: u64| Some((full_at.max(now) + self.cost(count)).min(most.max(full_at)));
        let _ = full_at.fetch_update(ordering, ordering, more);
    }

    /// Returns the time until the debt is repaid.
    fn wait(&self, full_at: &AtomicU64, now: u64) -> Duration {
        let until = full_at.load(Ordering::Relaxed).saturating_sub(self.burst);
        Duration::from_nanos(until.saturating_sub(now))
    }
}

impl Rates {
    pub(super) fn new(limits: &Limits, bytes_burst: u32) -> Self {
        let per_minute = |count: u32, burst: u32| {
            let one = std::num::NonZeroU32::MIN;
            let count = std::num::NonZeroU32::new(count).unwrap_or(one);
            let burst = std::num::NonZeroU32::new(burst).unwrap_or(one);
            RateLimiter::keyed(Quota::per_minute(count).allow_burst(burst))
        };
        Self {
            began: Instant::now(),
            requests: Rate::new(limits.requests_per_second, limits.requests_burst),
            bytes: Rate::new(limits.request_bytes_per_second, bytes_burst),
            users: DashMap::default(),
            creations: per_minute(limits.creations_per_minute, limits.creations_burst),
            invitations: per_minute(limits.invitations_per_minute, limits.invitations_burst),
        }
    }

    /// Returns the rates that the sessions of a user share.
    pub(super) fn of(&self, user: &UserId) -> Arc<UserRate> {
        self.users.entry(user.clone()).or_default().value().clone()
    }

    /// Counts a request of the user.
    pub(super) fn request(&self, user: &UserRate) -> Result<(), Wait> {
        self.requests.take(&user.requests, self.now())
    }

    /// Counts bytes of requests and replies.
    pub(super) fn charge(&self, user: &UserRate, bytes: usize) {
        self.bytes.charge(&user.bytes, self.now(), bytes);
    }

    /// Returns how long the user's sessions must pause reading because of the bytes that the user owes.
    pub(super) fn bytes_wait(&self, user: &UserRate) -> Option<Duration> {
        let wait = self.bytes.wait(&user.bytes, self.now());
        (!wait.is_zero()).then_some(wait)
    }

    /// Counts a `connect`, unless its user owes bytes.
    pub(super) fn connect(&self, user: &UserRate) -> Result<(), Wait> {
        let now = self.now();
        self.bytes.take_if_repaid(&user.bytes, now, CONNECT_BYTES)
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Counts a conversation that the user creates.
    pub(super) fn create(&self, user: &UserId) -> Result<(), Wait> {
        self.creations.check_key(user).map_err(|e| wait(&e))
    }

    /// Counts users whom this user brings into conversations, by creating or adding.
    pub(super) fn invite(&self, user: &UserId, others: usize) -> Result<(), Wait> {
        let others = u32::try_from(others).unwrap_or(u32::MAX);
        let Some(others) = std::num::NonZeroU32::new(others) else {
            return Ok(());
        };
        match self.invitations.check_key_n(user, others) {
            Ok(checked) => checked.map_err(|e| wait(&e)),
            // This is more than the burst. Creations with that many participants are refused as too large anyway.
            Err(InsufficientCapacity(_)) => Err(Wait(Duration::from_secs(60))),
        }
    }

    /// Drops users without a session whose budgets are full again. It is called every few seconds.
    pub(super) fn forget(&self) {
        let now = self.now();
        let owes = |full_at: &AtomicU64| full_at.load(Ordering::Relaxed) > now;
        self.users.retain(|_, user| {
            Arc::strong_count(user) > 1 || owes(&user.requests) || owes(&user.bytes)
        });
        for limiter in [&self.creations, &self.invitations] {
            limiter.retain_recent();
            limiter.shrink_to_fit();
        }
    }
}

pub(super) fn wait(not_until: &NotUntil<<DefaultClock as Clock>::Instant>) -> Wait {
    Wait(not_until.wait_time_from(DefaultClock::default().now()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Delete, Request};

    fn user(name: &str) -> UserId {
        UserId::new(name).unwrap()
    }

    fn rates() -> Rates {
        Rates::new(
            &Limits {
                requests_per_second: 1,
                requests_burst: 3,
                request_bytes_per_second: 100,
                creations_per_minute: 1,
                creations_burst: 2,
                invitations_per_minute: 1,
                invitations_burst: 10,
                ..Limits::default()
            },
            1_000,
        )
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_of_a_user_share_what_they_may_do_and_reconnecting_gains_nothing() {
        let rates = rates();
        let (one, other) = (rates.of(&user("alice")), rates.of(&user("alice")));
        let asks = |who: &UserRate| rates.request(who);
        assert!(asks(&one).is_ok() && asks(&other).is_ok() && asks(&one).is_ok());
        let Err(Wait(wait)) = asks(&other) else {
            panic!("a fourth at once");
        };
        assert!(wait <= Duration::from_secs(1) && wait > Duration::from_millis(900));
        assert!(asks(&rates.of(&user("bob"))).is_ok());
        drop((one, other));
        rates.forget();
        assert!(rates.request(&rates.of(&user("alice"))).is_err());
        tokio::time::advance(Duration::from_secs(3)).await;
        rates.forget();
        assert!(rates.users.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_asked_for_comes_back_in_time_and_nobody_waits_for_long() {
        let rates = rates();
        let alice = rates.of(&user("alice"));
        rates.charge(&alice, 1_000);
        assert_eq!(rates.bytes_wait(&alice), None);
        rates.charge(&alice, 200);
        let wait = rates.bytes_wait(&alice).unwrap();
        assert!(wait <= Duration::from_secs(2) && wait > Duration::from_millis(1_900));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(rates.bytes_wait(&alice), None);
        rates.charge(&alice, 1_000_000);
        rates.charge(&alice, 1_000_000);
        assert_eq!(rates.bytes_wait(&alice), Some(BYTES_WAIT_MAX));
        // Many connections may wait for the same debt. When it is repaid, one of them is accepted.
        assert_eq!(rates.connect(&alice), Err(Wait(BYTES_WAIT_MAX)));
        tokio::time::advance(BYTES_WAIT_MAX).await;
        assert_eq!(rates.connect(&alice), Ok(()));
        assert!(rates.connect(&alice).is_err());
    }

    #[test]
    fn who_still_connects_counts_among_the_connections_of_a_user() {
        let alice = rates().of(&user("alice"));
        let begin = |sessions| Connecting::begin(&alice, sessions, 3);
        let (first, second) = (begin(1), begin(1));
        assert!(first.is_some() && second.is_some());
        assert!(begin(1).is_none(), "one session and two that connect");
        drop(first);
        assert!(begin(1).is_some());
        assert!(begin(2).is_none());
    }

    #[test]
    fn a_deletion_costs_as_much_as_the_messages_it_names() {
        let delete = |count: usize| {
            let request = Request::Delete(Delete {
                conversation: crate::model::ConversationId::random(),
                seqs: vec![1; count],
                as_moderator: false,
            });
            request.work_bytes()
        };
        let each = delete(2);
        assert_eq!((delete(0), delete(1), delete(3)), (0, 0, 2 * each));
        assert_eq!(delete(256), 255 * each);
        assert_eq!(delete(257), 0, "it is refused without any work");
        let limits = Limits::default();
        let seconds = delete(256) as u32 / limits.request_bytes_per_second;
        assert!((1..=256 / limits.requests_per_second).contains(&seconds));
    }

    #[test]
    fn creating_and_inviting_have_rates_of_their_own() {
        let rates = rates();
        let alice = user("alice");
        assert!(rates.create(&alice).is_ok() && rates.create(&alice).is_ok());
        assert!(rates.create(&alice).is_err() && rates.create(&user("bob")).is_ok());
        assert!(rates.invite(&alice, 0).is_ok() && rates.invite(&alice, 8).is_ok());
        assert!(rates.invite(&alice, 3).is_err() && rates.invite(&alice, 2).is_ok());
        assert!(rates.invite(&user("bob"), 11).is_err());
    }
}
