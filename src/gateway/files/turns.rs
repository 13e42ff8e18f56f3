//! Whose file is worked on next, where that takes long. One user has one place in the queue at a time, so the files of one
//! user do not delay those of others; the files of the same user take turns.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use metrics::gauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    model::{
        UserId,
        limits::{FILES_WAITING_MAX, FILES_WAITING_OF_USER_MAX},
    },
    tasks::lock,
};

/// What happens to a file that has to wait.
#[derive(Clone, Copy)]
pub(super) enum Patience {
    /// It waits.
    Waits,
    /// It is looked at later, so that the files after it do not wait for it.
    Leaves,
}

/// The queue before one kind of work.
pub(super) struct Turns {
    /// The work, as the metric names it.
    work: &'static str,
    /// Places of files that are worked on at the same time. The users wait for them in order.
    places: Arc<Semaphore>,
    waiting: Arc<Mutex<Waiting>>,
}

/// The files that wait or are worked on.
#[derive(Default)]
struct Waiting {
    files: usize,
    users: HashMap<UserId, OfUser>,
}

struct OfUser {
    files: usize,
    /// One place, for which the files of the user wait before they wait for those of all.
    own: Arc<Semaphore>,
}

/// The right to work on a file.
pub(super) struct Turn {
    // In this order they end.
    _place: OwnedSemaphorePermit,
    _own: OwnedSemaphorePermit,
    _counted: Counted,
}

/// A file that waits or is worked on.
struct Counted {
    user: UserId,
    work: &'static str,
    all: Arc<Mutex<Waiting>>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut all = lock(&self.all);
        all.files -= 1;
        report(self.work, &all);
        if let Some(of_user) = all.users.get_mut(&self.user) {
            of_user.files -= 1;
            if of_user.files == 0 {
                all.users.remove(&self.user);
            }
        }
    }
}

fn report(work: &'static str, all: &Waiting) {
    let files = u32::try_from(all.files).unwrap_or(u32::MAX);
    gauge!("chat_files_in_work", "work" => work).set(files);
}

impl Turns {
    pub(super) fn new(work: &'static str, places: usize) -> Self {
        Self {
            work,
            places: Arc::new(Semaphore::new(places)),
            waiting: Arc::default(),
        }
    }

    /// Returns the right to work on a file of this user. `None` if it is to be looked at later.
    pub(super) async fn next(&self, user: &UserId, patience: Patience) -> Option<Turn> {
        match patience {
            Patience::Waits => self.take(user).await,
            Patience::Leaves => self.try_take(user),
        }
    }

    /// Waits until a file of this user may be worked on. `None` if too many files wait already.
    async fn take(&self, user: &UserId) -> Option<Turn> {
        let (counted, own) = self.count(user)?;
        // Nobody closes them.
        let own = own.acquire_owned().await.ok()?;
        let place = self.places.clone().acquire_owned().await.ok()?;
        Some(Turn {
            _place: place,
            _own: own,
            _counted: counted,
        })
    }

    /// Returns the right to work on a file of this user if no other file waits for it.
    fn try_take(&self, user: &UserId) -> Option<Turn> {
        let (counted, own) = self.count(user)?;
        let own = own.try_acquire_owned().ok()?;
        let place = self.places.clone().try_acquire_owned().ok()?;
        Some(Turn {
            _place: place,
            _own: own,
            _counted: counted,
        })
    }

    fn count(&self, user: &UserId) -> Option<(Counted, Arc<Semaphore>)> {
        let mut all = lock(&self.waiting);
        let of_user = all.users.get(user).map_or(0, |of_user| of_user.files);
        if all.files >= FILES_WAITING_MAX || of_user >= FILES_WAITING_OF_USER_MAX {
            return None;
        }
        all.files += 1;
        report(self.work, &all);
        let of_user = all.users.entry(user.clone()).or_insert_with(|| OfUser {
            files: 0,
            own: Arc::new(Semaphore::new(1)),
        });
        of_user.files += 1;
        let own = of_user.own.clone();
        let counted = Counted {
            user: user.clone(),
            work: self.work,
            all: self.waiting.clone(),
        };
        Some((counted, own))
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use futures_util::FutureExt as _;

    use super::*;

    fn user(name: &str) -> UserId {
        UserId::new(name).unwrap()
    }

    #[tokio::test]
    async fn one_user_has_one_place_in_the_queue() {
        let turns = Turns::new("test", 1);
        let (alice, bob) = (user("alice"), user("bob"));
        let first = turns.take(&alice).await.unwrap();
        let mut second = Box::pin(turns.take(&alice));
        let mut third = Box::pin(turns.take(&alice));
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none());
        let mut other = Box::pin(turns.take(&bob));
        assert!(other.as_mut().now_or_never().is_none());
        drop(first);
        // Both wait for the place now, in the order in which they could.
        assert!(second.as_mut().now_or_never().is_none());
        let other = other.as_mut().now_or_never().unwrap().unwrap();
        assert!(second.as_mut().now_or_never().is_none());
        drop(other);
        let second = second.as_mut().now_or_never().unwrap().unwrap();
        assert!(third.as_mut().now_or_never().is_none());
        drop(second);
        drop(third.as_mut().now_or_never().unwrap().unwrap());
        drop(third);
        assert!(lock(&turns.waiting).users.is_empty());
        assert_eq!(lock(&turns.waiting).files, 0);
    }

    /// Lets a file of this user wait.
    fn wait<'a>(
        turns: &'a Turns,
        name: String,
    ) -> Pin<Box<dyn Future<Output = Option<Turn>> + 'a>> {
        let mut waiting = Box::pin(async move { turns.take(&user(&name)).await });
        let _ = waiting.as_mut().now_or_never();
        waiting
    }

    #[tokio::test]
    async fn the_queue_is_bounded() {
        let turns = Turns::new("test", 1);
        let first = turns.take(&user("first")).await.unwrap();
        let mut waiting = Vec::new();
        for _ in 0..FILES_WAITING_OF_USER_MAX {
            waiting.push(wait(&turns, "alice".to_owned()));
        }
        assert!(turns.take(&user("alice")).await.is_none());
        for n in waiting.len() + 1..FILES_WAITING_MAX {
            waiting.push(wait(&turns, format!("user{n}")));
        }
        assert!(turns.take(&user("bob")).await.is_none());
        waiting.clear();
        assert!(turns.try_take(&user("bob")).is_none());
        drop(first);
        assert!(turns.try_take(&user("bob")).is_some());
        assert_eq!(lock(&turns.waiting).files, 0);
    }
}
