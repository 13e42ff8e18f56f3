//! Whether users may be in one more conversation. Each conversation is a row of a user's inbox, which is one partition of
//! the store and is read as a whole, and the row stays when the user leaves.

use std::{collections::HashMap, sync::Mutex, time::Duration};

use futures_util::{StreamExt, stream};
use tokio::time::Instant;

use crate::{
    model::UserId,
    store::{self, Store},
    tasks::lock,
};

/// Inboxes with fewer rows are counted each time, which is cheap.
const REMEMBERED_FROM: usize = 1_000;
/// The time for which the rows of a larger inbox are not counted again. What other gateways add in this time is missing.
const REMEMBERED_FOR: Duration = Duration::from_secs(60);
/// Users whose rows are remembered. Above this, none are added until some are forgotten.
const REMEMBERED_MAX: usize = 4_096;
/// Inboxes that are counted at once for one operation.
const COUNTED_AT_ONCE: usize = 16;

/// The number of rows of large inboxes that were counted last.
#[derive(Default)]
pub(super) struct InboxLimits(Mutex<HashMap<UserId, Counted>>);

struct Counted {
    rows: usize,
    since: Instant,
}

impl InboxLimits {
    /// Returns one of these users who is in `max` conversations already.
    ///
    /// # Errors
    /// The error of the store.
    pub(super) async fn first_full(
        &self,
        store: &dyn Store,
        users: &[UserId],
        max: usize,
    ) -> store::Result<Option<UserId>> {
        let has_none = move |user: UserId| async move {
            let has_room = self.count(store, &user, max).await? < max;
            Ok::<_, store::Error>((!has_room).then_some(user))
        };
        let mut counted = stream::iter(users.to_vec())
            .map(has_none)
            .buffer_unordered(COUNTED_AT_ONCE);
        while let Some(full) = counted.next().await {
            if let Some(user) = full? {
                return Ok(Some(user));
            }
        }
        Ok(None)
    }

    async fn count(&self, store: &dyn Store, user: &UserId, max: usize) -> store::Result<usize> {
        if let Some(rows) = self.remembered(user) {
            return Ok(rows);
        }
        let rows = store.inbox_count(user, max).await?;
        if rows >= REMEMBERED_FROM {
            self.remember(user, rows);
        }
        Ok(rows)
    }

    /// Counts one more row for each of these users who is remembered.
    pub(super) fn take_places(&self, users: &[UserId]) {
        let mut all = lock(&self.0);
        for user in users {
            if let Some(counted) = all.get_mut(user) {
                counted.rows += 1;
            }
        }
    }

    /// Returns the rows of a user if they were counted lately.
    fn remembered(&self, user: &UserId) -> Option<usize> {
        let mut all = lock(&self.0);
        let counted = all.get(user)?;
        if counted.since.elapsed() >= REMEMBERED_FOR {
            all.remove(user);
            return None;
        }
        Some(counted.rows)
    }

    fn remember(&self, user: &UserId, rows: usize) {
        let mut all = lock(&self.0);
        if all.len() >= REMEMBERED_MAX {
            all.retain(|_, counted| counted.since.elapsed() < REMEMBERED_FOR);
        }
        if all.len() < REMEMBERED_MAX {
            let since = Instant::now();
            all.insert(user.clone(), Counted { rows, since });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::{ConversationId, Kind},
        store::{
            InboxWrite,
            simulated::{Faults, Simulated},
        },
    };

    async fn write(store: &Simulated, user: &UserId, rows: usize) {
        let write = || InboxWrite {
            left_seq: Some(1),
            ..InboxWrite::of(user.clone(), ConversationId::random(), Kind::Group)
        };
        let writes = std::iter::repeat_with(write).take(rows);
        store.write_inbox(writes.collect()).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_inbox_is_counted_once_a_minute() {
        let (store, inbox_limits) = (Simulated::new(1, Faults::NONE), InboxLimits::default());
        let alice = UserId::new("alice").unwrap();
        let bob = UserId::new("bob").unwrap();
        let users = [alice.clone(), bob.clone()];
        let first = async |max| inbox_limits.first_full(&store, &users, max).await.unwrap();
        write(&store, &alice, REMEMBERED_FROM).await;
        write(&store, &bob, 2).await;
        let max = REMEMBERED_FROM + 2;
        assert_eq!(first(max).await, None);
        // It is not counted again, but each that had room takes a place. A question alone takes none.
        write(&store, &alice, 1).await;
        for _ in 0..2 {
            assert_eq!(first(max).await, None);
            inbox_limits.take_places(&users);
            assert_eq!(first(REMEMBERED_FROM + 9).await, None);
        }
        assert_eq!(first(max).await, Some(alice.clone()));
        // After that it is counted as it is stored.
        tokio::time::sleep(REMEMBERED_FOR).await;
        assert_eq!(first(max).await, None);
        // A small one is counted each time.
        write(&store, &bob, 1).await;
        let full = inbox_limits.first_full(&store, std::slice::from_ref(&bob), 3);
        assert_eq!(full.await.unwrap(), Some(bob.clone()));
    }
}
