//! The clock that gives each entry its rank in the order of inboxes: a hybrid logical clock (Kulkarni et al., "Logical
//! Physical Clocks", OPODIS 2014). It follows the wall clock, but is never behind a rank that this gateway has given, read
//! or been told of. So a wall clock that jumps makes no conversation stay above later ones. Pure: time is an argument.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::{
    clock,
    model::{Millis, Rank},
    mutation::{Mutation, broken},
};

/// The ranks are in units of 100 ns: ten thousand in a millisecond.
const IN_A_MILLISECOND: u64 = 10_000;
/// How far ahead of the wall clock ranks are reserved in the store, so that it is written to at most every ten seconds.
const RESERVED: Millis = 10_000;
/// The same for ranks that are ahead of the wall clock. It is less, because a restart begins above what is reserved: many
/// restarts one after the other do not run far ahead.
const RESERVED_AHEAD: u64 = 1_000 * IN_A_MILLISECOND;
/// The highest rank that the clock takes from a wall clock or an entry: the year 4000. It fits into a time UUID.
const HIGHEST: Millis = 64_060_588_800_000;

/// The clock of one gateway. Its clones are the same clock.
#[derive(Clone, Debug, Default)]
pub struct RankClock(Arc<Ranks>);

#[derive(Debug, Default)]
struct Ranks {
    /// The highest rank that was given, read or told.
    highest: AtomicU64,
    /// The rank up to which the store knows that ranks may be given.
    reserved: AtomicU64,
}

impl RankClock {
    /// Returns the rank of a new entry: above all others that are known here. Rule [rank-above].
    pub fn next(&self, wall: Millis) -> Rank {
        let now = clock::rank(wall.min(HIGHEST));
        if broken(Mutation::RankAbove) {
            return now;
        }
        let above = |highest: u64| Some(now.max(highest + 1));
        let highest = &self.0.highest;
        match highest.fetch_update(Ordering::AcqRel, Ordering::Acquire, above) {
            Ok(before) | Err(before) => now.max(before + 1),
        }
    }

    /// Notes a rank that was read or told. Those that are given later are above it.
    pub fn observe(&self, rank: Rank) {
        let rank = rank.min(clock::rank(HIGHEST));
        self.0.highest.fetch_max(rank, Ordering::AcqRel);
    }

    /// Returns the highest rank that is known here, to tell other gateways.
    #[must_use]
    pub fn highest(&self) -> Rank {
        self.0.highest.load(Ordering::Acquire)
    }

    /// Returns up to where ranks must be reserved in the store before the next inbox rows are written. `None` if that is
    /// so already.
    pub(super) fn unreserved(&self, wall: Millis) -> Option<Millis> {
        let highest = self.highest();
        let is_reserved = highest <= self.0.reserved.load(Ordering::Acquire);
        let ahead = clock::time_of(highest.saturating_add(RESERVED_AHEAD)).saturating_add(1);
        (!is_reserved).then(|| ahead.max(wall.min(HIGHEST).saturating_add(RESERVED)))
    }

    /// Notes that the store has this time as a reservation.
    pub(super) fn reserved(&self, until: Millis) {
        self.0
            .reserved
            .fetch_max(clock::rank(until), Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Millis = 1_800_000_000_000;

    #[test]
    fn places_follow_the_wall_clock_and_never_go_back() {
        let clock = RankClock::default();
        let first = clock.next(NOW);
        assert_eq!(first, clock::rank(NOW));
        let ahead = clock.next(NOW + 7_200_000);
        assert_eq!(ahead, clock::rank(NOW + 7_200_000));
        let back: Vec<Rank> = (1..=100).map(|n| clock.next(NOW + n)).collect();
        assert_eq!(back, (1..=100).map(|n| ahead + n).collect::<Vec<_>>());
        assert_eq!(clock.next(NOW + 8_000_000), clock::rank(NOW + 8_000_000));
    }

    #[test]
    fn what_was_observed_is_below_what_follows() {
        let clock = RankClock::default();
        clock.observe(clock::rank(NOW));
        clock.observe(clock::rank(NOW - 1));
        assert_eq!(clock.next(NOW - 5), clock::rank(NOW) + 1);
        // A rank from nowhere does not use up the room of a time UUID.
        clock.observe(u64::MAX);
        let next = clock.next(Millis::MAX);
        assert!(next < 1 << 60, "{next}");
        assert_eq!(clock::message_id_at(next).rank(), next);
    }

    #[test]
    fn a_reservation_covers_what_was_given() {
        let clock = RankClock::default();
        assert_eq!(clock.unreserved(NOW), None, "nothing was given");
        clock.next(NOW);
        let until = clock.unreserved(NOW).unwrap();
        assert_eq!(until, NOW + 10_000);
        clock.reserved(until);
        clock.next(NOW + 9_999);
        assert_eq!(clock.unreserved(NOW + 9_999), None);
        clock.next(NOW + 10_100);
        assert_eq!(clock.unreserved(NOW + 10_100), Some(NOW + 20_100));
        // Behind a clock that was fast.
        let until = clock.unreserved(NOW).unwrap();
        assert!((NOW + 11_100..NOW + 11_102).contains(&until), "{until}");
    }

    #[test]
    fn restarts_do_not_run_ahead() {
        let mut until = NOW;
        for restart in 0..100 {
            let (clock, wall) = (RankClock::default(), NOW + restart);
            clock.observe(clock::rank(until));
            clock.reserved(until);
            clock.next(wall);
            until = clock.unreserved(wall).unwrap_or(until);
        }
        assert!(until < NOW + 110_000, "{until}");
    }
}
