//! Whether a user looks, as their home knows it. A session is away while its user does not look at it: its page is hidden.
//! Other users do not see that; pushing depends on it.

use std::{
    collections::{HashMap, VecDeque},
    sync::Mutex,
    time::Duration,
};

use foldhash::quality::RandomState;
use tokio::time::Instant;

use crate::{
    model::{GatewayId, UserId},
    tasks::lock,
};

/// The time for which it is known since when a user looks or not: the longest one for which a push waits.
const KNOWN_FOR: Duration = Duration::from_secs(300);
/// Users of whom this is known. Of more, the earliest changes are forgotten.
const CHANGES_MAX: usize = 100_000;

/// Whether a user looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attention {
    /// The user has no session.
    None,
    /// The user has sessions, and all of them are away.
    Away,
    /// The user has a session that is not away.
    Present,
}

/// The attention of all users whose home this gateway is. It is changed under a lock of [`Presence`](super::presence).
pub(super) struct Attentions(Mutex<State>);

struct State {
    /// The gateways whose sessions of a user are all away. Most users have none.
    away: HashMap<UserId, Vec<GatewayId>, RandomState>,
    /// When the attention of users changed last, if that is not long ago.
    changed: HashMap<UserId, Instant, RandomState>,
    /// The same changes, the earliest first. Some users have changed again since.
    order: VecDeque<(Instant, UserId)>,
    /// The time of the latest change of the ring. This gateway may have become the home of users who had sessions until then.
    since: Instant,
}

impl Default for Attentions {
    fn default() -> Self {
        Self(Mutex::new(State {
            away: HashMap::default(),
            changed: HashMap::default(),
            order: VecDeque::new(),
            since: Instant::now(),
        }))
    }
}

impl Attentions {
    /// Notes whether all sessions of a user at a gateway are away.
    pub(crate) fn set_away(&self, user: &UserId, gateway: GatewayId, away: bool) {
        let mut state = lock(&self.0);
        if away {
            let gateways = state.away.entry(user.clone()).or_default();
            if !gateways.contains(&gateway) {
                gateways.push(gateway);
            }
        } else if let Some(gateways) = state.away.get_mut(user) {
            gateways.retain(|known| *known != gateway);
            if gateways.is_empty() {
                state.away.remove(user);
            }
        }
    }

    /// Returns the attention of a user with sessions at these gateways.
    pub(crate) fn of(&self, user: &UserId, gateways: &[GatewayId]) -> Attention {
        if gateways.is_empty() {
            return Attention::None;
        }
        let state = lock(&self.0);
        let away = state.away.get(user);
        let all = away.is_some_and(|away| gateways.iter().all(|gateway| away.contains(gateway)));
        if all {
            Attention::Away
        } else {
            Attention::Present
        }
    }

    /// Notes that the attention of a user has changed now.
    pub(crate) fn changed(&self, user: &UserId) {
        let mut state = lock(&self.0);
        let now = Instant::now();
        state.changed.insert(user.clone(), now);
        state.order.push_back((now, user.clone()));
        state.forget_old(now);
    }

    /// Notes that the gateways of a user are gone.
    pub(super) fn vanished(&self, user: &UserId) {
        lock(&self.0).away.remove(user);
        self.changed(user);
    }

    /// Returns how long the present attention of a user has lasted, at least.
    pub(super) fn lasted(&self, user: &UserId) -> Duration {
        let state = lock(&self.0);
        let changed = state.changed.get(user).copied();
        changed.unwrap_or(state.since).elapsed()
    }

    /// Notes that the ring changed. Of a user who is not `known` any more, nothing is remembered.
    pub(crate) fn adopted(&self, known: impl Fn(&UserId) -> bool) {
        let mut state = lock(&self.0);
        state.since = Instant::now();
        state.away.retain(|user, _| known(user));
        state.changed.retain(|user, _| known(user));
    }

    /// Notes that from now on, all sessions of the users whose home this gateway is are known.
    pub(super) fn complete(&self) {
        lock(&self.0).since = Instant::now();
    }
}

impl State {
    fn forget_old(&mut self, now: Instant) {
        let is_old = |(at, _): &(Instant, UserId)| now.duration_since(*at) > KNOWN_FOR;
        while self.order.len() > CHANGES_MAX || self.order.front().is_some_and(is_old) {
            let Some((at, user)) = self.order.pop_front() else {
                return;
            };
            if self.changed.get(&user) == Some(&at) {
                self.changed.remove(&user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gateway(number: u128) -> GatewayId {
        GatewayId(uuid::Uuid::from_u128(number))
    }

    fn user(number: usize) -> UserId {
        UserId::new(&format!("user-{number}")).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_user_is_away_while_all_sessions_at_all_gateways_are() {
        let attentions = Attentions::default();
        let (alice, two) = (user(1), [gateway(1), gateway(2)]);
        assert_eq!(attentions.of(&alice, &[]), Attention::None);
        attentions.set_away(&alice, gateway(1), true);
        attentions.set_away(&alice, gateway(1), true);
        assert_eq!(attentions.of(&alice, &two), Attention::Present);
        assert_eq!(attentions.of(&alice, &two[..1]), Attention::Away);
        attentions.set_away(&alice, gateway(2), true);
        assert_eq!(attentions.of(&alice, &two), Attention::Away);
        attentions.set_away(&alice, gateway(1), false);
        assert_eq!(attentions.of(&alice, &two), Attention::Present);
        attentions.vanished(&alice);
        assert_eq!(attentions.of(&alice, &two[1..]), Attention::Present);
        assert!(lock(&attentions.0).away.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_a_change_is_known_for_a_while_and_for_so_many_users() {
        let attentions = Attentions::default();
        tokio::time::advance(Duration::from_secs(1_000)).await;
        attentions.changed(&user(1));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(attentions.lasted(&user(1)), Duration::from_secs(2));
        // Of others nothing has changed since the beginning.
        assert_eq!(attentions.lasted(&user(2)), Duration::from_secs(1_002));
        tokio::time::advance(KNOWN_FOR).await;
        for number in 2..CHANGES_MAX + 10 {
            attentions.changed(&user(number));
        }
        let state = lock(&attentions.0);
        assert_eq!(state.changed.len(), CHANGES_MAX);
        assert!(!state.changed.contains_key(&user(1)));
        drop(state);
        // After a change of the ring, it may be that a user had a session until then.
        attentions.adopted(|_| false);
        assert_eq!(attentions.lasted(&user(CHANGES_MAX)), Duration::ZERO);
    }
}
