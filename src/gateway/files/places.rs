//! The places of uploads that are written to, and of downloads: so many in all, and so many of a user.

use std::{
    cmp::Reverse,
    collections::HashMap,
    sync::{Arc, Mutex},
};

use metrics::gauge;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout},
};

use crate::{
    model::{
        UserId,
        limits::{
            DOWNLOAD_WAIT, DOWNLOADS_MAX, DOWNLOADS_OF_USER_MAX, UPLOAD_KEEPS_PLACE, UPLOAD_WAIT,
            UPLOADS_OPEN_MAX,
        },
    },
    tasks::lock,
};

/// The places of uploads. Each is an open file.
///
/// If none is free, another upload gives its place to a user who has no more than its own user: of those that have had one for
/// [`UPLOAD_KEEPS_PLACE`], one of the user who has most, and of these the oldest. So nobody keeps others from uploading
/// for long. What has come counts, and the client continues.
pub(super) struct Uploads {
    places: Arc<Semaphore>,
    /// Those that have a place, and those to which one is being given.
    open: Arc<Mutex<Vec<Open>>>,
    of_user_max: usize,
}

struct Open {
    user: UserId,
    since: Instant,
    gives_way: Arc<Notify>,
    /// Whether it was told to give way, or has no place yet.
    is_moving: bool,
}

/// One upload that counts among those of its user, and among all that are written to.
pub(super) struct Counted {
    listed: Listed,
    // Dropped after it.
    _place: OwnedSemaphorePermit,
}

/// An entry of the list.
struct Listed {
    gives_way: Arc<Notify>,
    open: Arc<Mutex<Vec<Open>>>,
}

impl Uploads {
    pub(super) fn new(of_user_max: usize) -> Self {
        Self {
            places: Arc::new(Semaphore::new(UPLOADS_OPEN_MAX)),
            open: Arc::default(),
            of_user_max,
        }
    }

    /// Counts an upload to which a user writes. If no place is free, it waits a while for one that another gives away.
    pub(super) async fn count(&self, user: &UserId) -> Result<Counted, NoPlace> {
        let listed = self.list(user)?;
        let place = match self.places.clone().try_acquire_owned() {
            Ok(place) => place,
            Err(_) if self.ask(user) => {
                let place = timeout(UPLOAD_WAIT, self.places.clone().acquire_owned()).await;
                place.ok().and_then(Result::ok).ok_or(NoPlace::OfAll)?
            }
            Err(_) => return Err(NoPlace::OfAll),
        };
        let mut open = lock(&self.open);
        for open in open.iter_mut().filter(|open| listed.is(open)) {
            (open.since, open.is_moving) = (Instant::now(), false);
        }
        gauge!("chat_uploads").increment(1.0);
        Ok(Counted {
            listed,
            _place: place,
        })
    }

    fn list(&self, user: &UserId) -> Result<Listed, NoPlace> {
        let mut open = lock(&self.open);
        if open.iter().filter(|open| open.user == *user).count() >= self.of_user_max {
            return Err(NoPlace::OfOne);
        }
        let gives_way = Arc::new(Notify::new());
        open.push(Open {
            user: user.clone(),
            since: Instant::now(),
            gives_way: gives_way.clone(),
            is_moving: true,
        });
        Ok(Listed {
            gives_way,
            open: self.open.clone(),
        })
    }

    /// Tells an upload to give its place to a user. Returns false if none has to.
    fn ask(&self, newcomer: &UserId) -> bool {
        let mut open = lock(&self.open);
        let mut counts: HashMap<&UserId, usize> = HashMap::new();
        for open in open.iter() {
            *counts.entry(&open.user).or_default() += 1;
        }
        let of_newcomer = counts.get(newcomer).copied().unwrap_or_default();
        let settled = open.iter().enumerate().filter(|(_, open)| {
            !open.is_moving && open.user != *newcomer && open.since.elapsed() >= UPLOAD_KEEPS_PLACE
        });
        let most = settled
            .map(|(n, open)| (counts[&open.user], Reverse(open.since), n))
            .max();
        match most {
            Some((count, _, n)) if count >= of_newcomer => {
                open[n].is_moving = true;
                open[n].gives_way.notify_one();
                true
            }
            _ => false,
        }
    }
}

impl Counted {
    /// Notified when the upload has to give its place to another user.
    pub(super) fn gives_way(&self) -> Arc<Notify> {
        self.listed.gives_way.clone()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        gauge!("chat_uploads").decrement(1.0);
    }
}

impl Listed {
    fn is(&self, open: &Open) -> bool {
        Arc::ptr_eq(&open.gives_way, &self.gives_way)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        lock(&self.open).retain(|open| !self.is(open));
    }
}

/// The places of downloads. Each is a part of a file in memory.
pub(super) struct Downloads {
    places: Arc<Semaphore>,
    readers: Arc<Mutex<Readers>>,
}

/// The places of each reader who has or awaits one. A reader is named as in the addresses of files.
type Readers = HashMap<String, Arc<Semaphore>>;

/// The place of one download.
pub(super) struct Downloading {
    _place: OwnedSemaphorePermit,
    _turn: Turn,
}

impl Drop for Downloading {
    fn drop(&mut self) {
        gauge!("chat_downloads").decrement(1.0);
    }
}

/// A place among those of a reader, or the wait for one.
struct Turn {
    reader: String,
    readers: Arc<Mutex<Readers>>,
    places: Option<Arc<Semaphore>>,
    permit: Option<OwnedSemaphorePermit>,
}

/// Why an upload or a download has no place: one user has too many, or all together.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
    OfOne,
    OfAll,
}

impl Downloads {
    pub(super) fn new() -> Self {
        Self {
            places: Arc::new(Semaphore::new(DOWNLOADS_MAX)),
            readers: Arc::default(),
        }
    }

    /// Takes a place for a download. It waits a while for the other downloads of the same reader.
    pub(super) async fn take(&self, reader: &str) -> Result<Downloading, NoPlace> {
        let mut turn = Turn::of(reader, &self.readers);
        if let Some(places) = turn.places.clone() {
            let permit = timeout(DOWNLOAD_WAIT, places.acquire_owned()).await;
            turn.permit = permit.map_err(|_| NoPlace::OfOne)?.ok();
        }
        let place = self.places.clone().try_acquire_owned();
        let place = place.map_err(|_| NoPlace::OfAll)?;
        gauge!("chat_downloads").increment(1.0);
        Ok(Downloading {
            _place: place,
            _turn: turn,
        })
    }
}

impl Turn {
    fn of(reader: &str, readers: &Arc<Mutex<Readers>>) -> Self {
        let mut all = lock(readers);
        let places = all.entry(reader.to_owned());
        let places = places.or_insert_with(|| Arc::new(Semaphore::new(DOWNLOADS_OF_USER_MAX)));
        Self {
            reader: reader.to_owned(),
            readers: readers.clone(),
            places: Some(places.clone()),
            permit: None,
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut all = lock(&self.readers);
        drop((self.permit.take(), self.places.take()));
        // Only the map has it. Clones are made under its lock only.
        if all
            .get(&self.reader)
            .is_some_and(|p| Arc::strong_count(p) == 1)
        {
            all.remove(&self.reader);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_reader_has_so_many_downloads_and_others_their_own() {
        let downloads = Downloads::new();
        let mut taken = Vec::new();
        for _ in 0..DOWNLOADS_OF_USER_MAX {
            taken.push(downloads.take("alice").await.unwrap());
        }
        let refused = downloads.take("alice").await.map(drop);
        assert_eq!(refused, Err(NoPlace::OfOne));
        drop(downloads.take("bob").await.unwrap());
        assert_eq!(lock(&downloads.readers).len(), 1);
        let (last, waiting) = (taken.pop(), downloads.take("alice"));
        drop(last);
        taken.push(waiting.await.unwrap());
        drop(taken);
        assert!(lock(&downloads.readers).is_empty());
        assert_eq!(downloads.places.available_permits(), DOWNLOADS_MAX);
    }

    #[tokio::test]
    async fn all_downloads_have_a_bound() {
        let downloads = Downloads::new();
        let mut taken = Vec::new();
        for n in 0..DOWNLOADS_MAX {
            taken.push(downloads.take(&format!("reader {n}")).await.unwrap());
        }
        let refused = downloads.take("one more").await.map(drop);
        assert_eq!(refused, Err(NoPlace::OfAll));
        assert_eq!(lock(&downloads.readers).len(), DOWNLOADS_MAX);
    }

    fn user(n: usize) -> UserId {
        UserId::new(&format!("user{n}")).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_most_gives_a_place_to_who_has_none() {
        let uploads = Uploads::new(4);
        let mut open = Vec::new();
        for n in 0..UPLOADS_OPEN_MAX {
            // User 0 has four, the others one each.
            let user = user(n.saturating_sub(3));
            open.push(uploads.count(&user).await.ok().unwrap());
            advance(Duration::from_millis(1)).await;
        }
        let refused = uploads.count(&user(0)).await.err();
        assert_eq!(refused, Some(NoPlace::OfOne));
        let refused = uploads.count(&user(999)).await.err();
        assert_eq!(refused, Some(NoPlace::OfAll), "all have just begun");
        advance(UPLOAD_KEEPS_PLACE).await;
        let gives = open[0].gives_way();
        let none_yet = user(999);
        let (newcomer, ()) = tokio::join!(uploads.count(&none_yet), async {
            gives.notified().await;
            drop(open.remove(0));
        });
        let newcomer = newcomer.ok().unwrap();
        assert_eq!(lock(&uploads.open).len(), UPLOADS_OPEN_MAX);
        // User 0 gives its other places too, and then users who have one give it to one who has no more.
        for held in open.iter().take(4) {
            assert!(uploads.ask(&none_yet));
            assert!(held.gives_way().notified().now_or_never().is_some());
        }
        let second = uploads.list(&none_yet).ok().unwrap();
        assert!(!uploads.ask(&none_yet), "nobody has two");
        drop((newcomer, second, open));
        assert!(lock(&uploads.open).is_empty());
        assert_eq!(uploads.places.available_permits(), UPLOADS_OPEN_MAX);
    }
}
