//! How often a user may ask. All of a user's sessions on this gateway share what the user may do.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use dashmap::DashMap;
use foldhash::quality::RandomState;
use governor::{
    DefaultKeyedRateLimiter, InsufficientCapacity, NotUntil, Quota, RateLimiter,
    clock::{Clock, DefaultClock, MonotonicClock},
    middleware::NoOpMiddleware,
    state::{InMemoryState, NotKeyed},
};

use super::quota;
use crate::{config::Limits, model::UserId};

type Limiter =
    RateLimiter<NotKeyed, InMemoryState, MonotonicClock, NoOpMiddleware<std::time::Instant>>;

/// Rounds of upkeep after which a user who left is forgotten: what they used up has come back by then.
const ROUNDS_KEPT: u32 = 12;

/// The rates of all users who are connected, or were lately.
pub(super) struct Rates {
    requests: Quota,
    users: DashMap<UserId, Arc<UserRate>, RandomState>,
    creations: DefaultKeyedRateLimiter<UserId>,
    invitations: DefaultKeyedRateLimiter<UserId>,
}

/// Requests of one user.
pub(super) struct UserRate {
    limiter: Limiter,
    /// Rounds of upkeep since the user's last session ended.
    rounds: AtomicU32,
}

/// Too much was asked for: when to try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wait(pub Duration);

impl Rates {
    pub(super) fn new(limits: &Limits) -> Self {
        let per_minute = |count: u32, burst: u32| {
            let one = std::num::NonZeroU32::MIN;
            let count = std::num::NonZeroU32::new(count).unwrap_or(one);
            let burst = std::num::NonZeroU32::new(burst).unwrap_or(one);
            RateLimiter::keyed(Quota::per_minute(count).allow_burst(burst))
        };
        Self {
            requests: quota(limits.requests_per_second, limits.requests_burst),
            users: DashMap::default(),
            creations: per_minute(limits.creations_per_minute, limits.creations_burst),
            invitations: per_minute(limits.invitations_per_minute, limits.invitations_burst),
        }
    }

    /// What the sessions of a user share.
    pub(super) fn of(&self, user: &UserId) -> Arc<UserRate> {
        let new = || {
            Arc::new(UserRate {
                limiter: RateLimiter::direct_with_clock(self.requests, MonotonicClock),
                rounds: AtomicU32::new(0),
            })
        };
        self.users
            .entry(user.clone())
            .or_insert_with(new)
            .value()
            .clone()
    }

    /// Whether the user may create one more conversation.
    pub(super) fn create(&self, user: &UserId) -> Result<(), Wait> {
        self.creations.check_key(user).map_err(|e| wait(&e))
    }

    /// Whether the user may bring so many others into conversations, by creating them or by adding.
    pub(super) fn invite(&self, user: &UserId, others: usize) -> Result<(), Wait> {
        let others = u32::try_from(others).unwrap_or(u32::MAX);
        let Some(others) = std::num::NonZeroU32::new(others) else {
            return Ok(());
        };
        match self.invitations.check_key_n(user, others) {
            Ok(checked) => checked.map_err(|e| wait(&e)),
            // More than can ever be allowed at once; a creation of so many is too large for its own reasons.
            Err(InsufficientCapacity(_)) => Err(Wait(Duration::from_secs(60))),
        }
    }

    /// Forgets who has not asked lately. To be called every few seconds.
    pub(super) fn forget(&self) {
        self.users.retain(|_, user| {
            if Arc::strong_count(user) > 1 {
                user.rounds.store(0, Ordering::Relaxed);
                return true;
            }
            user.rounds.fetch_add(1, Ordering::Relaxed) < ROUNDS_KEPT
        });
        for limiter in [&self.creations, &self.invitations] {
            limiter.retain_recent();
            limiter.shrink_to_fit();
        }
    }
}

impl UserRate {
    /// Whether the user may ask once more.
    pub(super) fn check(&self) -> Result<(), Wait> {
        let checked = self.limiter.check();
        checked.map_err(|not_until| Wait(not_until.wait_time_from(MonotonicClock.now())))
    }
}

fn wait(not_until: &NotUntil<<DefaultClock as Clock>::Instant>) -> Wait {
    Wait(not_until.wait_time_from(DefaultClock::default().now()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(name: &str) -> UserId {
        UserId::new(name).unwrap()
    }

    fn rates() -> Rates {
        Rates::new(&Limits {
            requests_per_second: 1,
            requests_burst: 3,
            creations_per_minute: 1,
            creations_burst: 2,
            invitations_per_minute: 1,
            invitations_burst: 10,
            ..Limits::default()
        })
    }

    #[test]
    fn sessions_of_a_user_share_what_they_may_do_and_reconnecting_gains_nothing() {
        let rates = rates();
        let (one, other) = (rates.of(&user("alice")), rates.of(&user("alice")));
        assert!(one.check().is_ok() && other.check().is_ok() && one.check().is_ok());
        assert!(other.check().is_err());
        assert!(rates.of(&user("bob")).check().is_ok());
        drop((one, other));
        rates.forget();
        assert!(rates.of(&user("alice")).check().is_err());
        for _ in 0..=ROUNDS_KEPT {
            rates.forget();
        }
        assert!(rates.users.is_empty());
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
