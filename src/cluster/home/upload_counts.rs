//! What a home knows of the uploads that its users begin.

use std::{collections::HashMap, sync::Mutex, time::Duration};

use tokio::{sync::OwnedMutexGuard, time::Instant};

use super::devices::Locks;
use crate::{model::UserId, tasks::lock};

/// The time in which a user may begin `UploadLimits::per_minute` uploads.
const MINUTE: Duration = Duration::from_secs(60);
/// Users whose rate is remembered, above which those are forgotten who began nothing in the last minute.
const RATES_KEPT: usize = 1_024;

/// What a home knows of uploads.
#[derive(Default)]
pub(crate) struct UploadCounts {
    /// Locks of users, so that two uploads at once are counted one after the other.
    users: Locks,
    rates: Mutex<Rates>,
}

impl UploadCounts {
    /// Waits until nobody else counts an upload of the user.
    pub(crate) async fn lock_user(&self, user: &UserId) -> OwnedMutexGuard<()> {
        self.users.lock(user.as_str().as_bytes()).await
    }

    /// Returns whether a user may begin one more upload now. It counts.
    pub(crate) fn may_begin(&self, user: &UserId, per_minute: u32) -> bool {
        lock(&self.rates).may_begin(user, per_minute, Instant::now())
    }
}

/// How fast users begin uploads, as the generic cell rate algorithm has it: each upload takes its part of a minute, and a
/// user may be a minute ahead.
#[derive(Default)]
struct Rates {
    /// The time up to which each user has taken theirs.
    taken: HashMap<UserId, Instant>,
    /// The number of users at which others are forgotten.
    forget_at: usize,
}

impl Rates {
    fn may_begin(&mut self, user: &UserId, per_minute: u32, now: Instant) -> bool {
        if self.taken.len() >= self.forget_at.max(RATES_KEPT) {
            self.taken.retain(|_, taken| *taken > now);
            self.forget_at = 2 * self.taken.len();
        }
        let taken = self.taken.entry(user.clone()).or_insert(now);
        let next = (*taken).max(now) + MINUTE / per_minute.max(1);
        let may_begin = next <= now + MINUTE;
        if may_begin {
            *taken = next;
        }
        may_begin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_begins_so_many_uploads_in_a_minute() {
        let mut rates = Rates::default();
        let [alice, bob] = ["alice", "bob"].map(|name| UserId::new(name).unwrap());
        let began = Instant::now();
        for _ in 0..12 {
            assert!(rates.may_begin(&alice, 12, began));
        }
        assert!(!rates.may_begin(&alice, 12, began));
        assert!(rates.may_begin(&bob, 12, began));
        let later = began + MINUTE / 12;
        assert!(rates.may_begin(&alice, 12, later));
        assert!(!rates.may_begin(&alice, 12, later));
    }

    #[test]
    fn users_who_begin_nothing_are_forgotten() {
        let mut rates = Rates::default();
        let began = Instant::now();
        for n in 0..10 * RATES_KEPT as u32 {
            let user = UserId::new(&format!("user-{n}")).unwrap();
            assert!(rates.may_begin(&user, 1, began + n * MINUTE));
        }
        assert!(rates.taken.len() <= RATES_KEPT);
    }
}
