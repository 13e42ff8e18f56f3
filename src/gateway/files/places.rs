//! The places of uploads that are written to, and of downloads: so many in all, and so many of a user.

use std::{
    cmp::Reverse,
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex},
    time::Duration,
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
            DOWNLOAD_KEEPS_PLACE, DOWNLOAD_WAIT, DOWNLOADS_MAX, DOWNLOADS_OF_USER_MAX,
            UPLOAD_KEEPS_PLACE, UPLOAD_WAIT, UPLOADS_OPEN_MAX,
        },
    },
    tasks::lock,
};

/// Places that users share.
///
/// If none is free, whoever has one gives it to a user who has no more than its own user: of those that have had one for a
/// while, one of the user who has most, and of these the oldest. So nobody keeps others out for long.
struct Shared<U> {
    places: Arc<Semaphore>,
    /// Those that have a place, and those to which one is being given.
    open: Arc<Mutex<Vec<Open<U>>>>,
    of_user_max: usize,
    /// The time for which a place is kept.
    keeps: Duration,
    /// The longest wait for a place that another gives away.
    wait: Duration,
}

struct Open<U> {
    id: Arc<()>,
    user: U,
    since: Instant,
    gives_way: Arc<Notify>,
    /// Whether it was told to give way, or has no place yet.
    is_moving: bool,
}

/// A place that counts among those of its user, and among all.
struct Taken<U> {
    _listed: Listed<U>,
    // Dropped after it.
    _place: OwnedSemaphorePermit,
}

/// An entry of the list.
struct Listed<U> {
    id: Arc<()>,
    open: Arc<Mutex<Vec<Open<U>>>>,
}

impl<U: Clone + Eq + Hash> Shared<U> {
    fn new(all: usize, of_user_max: usize, keeps: Duration, wait: Duration) -> Self {
        Self {
            places: Arc::new(Semaphore::new(all)),
            open: Arc::default(),
            of_user_max,
            keeps,
            wait,
        }
    }

    /// Takes a place for a user. If none is free, it waits a while for one that another gives away. `gives_way` is notified
    /// when this one has to.
    async fn take(&self, user: &U, gives_way: Arc<Notify>) -> Result<Taken<U>, NoPlace> {
        let listed = self.list(user, gives_way)?;
        let place = match self.places.clone().try_acquire_owned() {
            Ok(place) => place,
            Err(_) if self.ask(user) => {
                let place = timeout(self.wait, self.places.clone().acquire_owned()).await;
                place.ok().and_then(Result::ok).ok_or(NoPlace::OfAll)?
            }
            Err(_) => return Err(NoPlace::OfAll),
        };
        let mut open = lock(&self.open);
        for open in open.iter_mut().filter(|open| listed.is(open)) {
            (open.since, open.is_moving) = (Instant::now(), false);
        }
        Ok(Taken {
            _listed: listed,
            _place: place,
        })
    }

    fn list(&self, user: &U, gives_way: Arc<Notify>) -> Result<Listed<U>, NoPlace> {
        let mut open = lock(&self.open);
        if open.iter().filter(|open| open.user == *user).count() >= self.of_user_max {
            return Err(NoPlace::OfOne);
        }
        let id = Arc::new(());
        open.push(Open {
            id: id.clone(),
            user: user.clone(),
            since: Instant::now(),
            gives_way,
            is_moving: true,
        });
        Ok(Listed {
            id,
            open: self.open.clone(),
        })
    }

    /// Tells someone to give a place to a user. Returns false if nobody has to.
    fn ask(&self, newcomer: &U) -> bool {
        let mut open = lock(&self.open);
        let mut counts: HashMap<&U, usize> = HashMap::new();
        for open in open.iter() {
            *counts.entry(&open.user).or_default() += 1;
        }
        let of_newcomer = counts.get(newcomer).copied().unwrap_or_default();
        let settled = open.iter().enumerate().filter(|(_, open)| {
            !open.is_moving && open.user != *newcomer && open.since.elapsed() >= self.keeps
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

impl<U> Listed<U> {
    fn is(&self, open: &Open<U>) -> bool {
        Arc::ptr_eq(&open.id, &self.id)
    }
}

impl<U> Drop for Listed<U> {
    fn drop(&mut self) {
        lock(&self.open).retain(|open| !self.is(open));
    }
}

/// The places of uploads. Each is an open file. What has come of one that gives way counts, and the client continues.
pub(super) struct Uploads(Shared<UserId>);

/// One upload that counts among those of its user, and among all that are written to.
pub(super) struct Counted {
    gives_way: Arc<Notify>,
    _taken: Taken<UserId>,
}

impl Uploads {
    pub(super) fn new(of_user_max: usize) -> Self {
        let (keeps, wait) = (UPLOAD_KEEPS_PLACE, UPLOAD_WAIT);
        Self(Shared::new(UPLOADS_OPEN_MAX, of_user_max, keeps, wait))
    }

    /// Counts an upload to which a user writes.
    pub(super) async fn count(&self, user: &UserId) -> Result<Counted, NoPlace> {
        let gives_way = Arc::new(Notify::new());
        let taken = self.0.take(user, gives_way.clone()).await?;
        gauge!("chat_uploads").increment(1.0);
        Ok(Counted {
            gives_way,
            _taken: taken,
        })
    }
}

impl Counted {
    /// Notified when the upload has to give its place to another user.
    pub(super) fn gives_way(&self) -> Arc<Notify> {
        self.gives_way.clone()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        gauge!("chat_uploads").decrement(1.0);
    }
}

/// The places of downloads. Each is a part of a file in memory. The client of one that gives way asks for the rest.
pub(super) struct Downloads {
    places: Shared<String>,
    readers: Arc<Mutex<Readers>>,
}

/// The places of each reader who has or awaits one. A reader is named as in the addresses of files.
type Readers = HashMap<String, Arc<Semaphore>>;

/// The place of one download.
pub(super) struct Downloading {
    _taken: Taken<String>,
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
            places: Shared::new(
                DOWNLOADS_MAX,
                DOWNLOADS_OF_USER_MAX,
                DOWNLOAD_KEEPS_PLACE,
                DOWNLOAD_WAIT,
            ),
            readers: Arc::default(),
        }
    }

    /// Takes a place for a download, whose connection ends when it has to give way. It waits a while for the other
    /// downloads of the same reader.
    pub(super) async fn take(
        &self,
        reader: &str,
        gives_way: Arc<Notify>,
    ) -> Result<Downloading, NoPlace> {
        let mut turn = Turn::of(reader, &self.readers);
        if let Some(places) = turn.places.clone() {
            let permit = timeout(DOWNLOAD_WAIT, places.acquire_owned()).await;
            turn.permit = permit.map_err(|_| NoPlace::OfOne)?.ok();
        }
        let taken = self.places.take(&reader.to_owned(), gives_way).await?;
        gauge!("chat_downloads").increment(1.0);
        Ok(Downloading {
            _taken: taken,
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
    use futures_util::FutureExt as _;
    use tokio::time::advance;

    use super::*;

    async fn take(downloads: &Downloads, reader: &str) -> Result<Downloading, NoPlace> {
        downloads.take(reader, Arc::default()).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_has_so_many_downloads_and_others_their_own() {
        let downloads = Downloads::new();
        let mut taken = Vec::new();
        for _ in 0..DOWNLOADS_OF_USER_MAX {
            taken.push(take(&downloads, "alice").await.unwrap());
        }
        let refused = take(&downloads, "alice").await.map(drop);
        assert_eq!(refused, Err(NoPlace::OfOne));
        drop(take(&downloads, "bob").await.unwrap());
        assert_eq!(lock(&downloads.readers).len(), 1);
        let (last, waiting) = (taken.pop(), take(&downloads, "alice"));
        drop(last);
        taken.push(waiting.await.unwrap());
        drop(taken);
        assert!(lock(&downloads.readers).is_empty());
        assert_eq!(downloads.places.places.available_permits(), DOWNLOADS_MAX);
    }

    #[tokio::test]
    async fn all_downloads_have_a_bound() {
        let downloads = Downloads::new();
        let mut taken = Vec::new();
        for n in 0..DOWNLOADS_MAX {
            taken.push(take(&downloads, &format!("reader {n}")).await.unwrap());
        }
        let refused = take(&downloads, "one more").await.map(drop);
        assert_eq!(refused, Err(NoPlace::OfAll));
        assert_eq!(lock(&downloads.readers).len(), DOWNLOADS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_most_downloads_gives_a_place_to_who_has_none() {
        let downloads = Downloads::new();
        let (mut taken, mut gives_way) = (Vec::new(), Vec::new());
        for n in 0..DOWNLOADS_MAX {
            let reader = format!("reader {}", n / DOWNLOADS_OF_USER_MAX);
            gives_way.push(Arc::new(Notify::new()));
            taken.push(downloads.take(&reader, gives_way[n].clone()).await.unwrap());
            advance(Duration::from_millis(1)).await;
        }
        let refused = take(&downloads, "one more").await.map(drop);
        assert_eq!(refused, Err(NoPlace::OfAll), "all have just begun");
        advance(DOWNLOAD_KEEPS_PLACE).await;
        let (newcomer, ()) = tokio::join!(take(&downloads, "one more"), async {
            gives_way[0].notified().await;
            drop(taken.remove(0));
        });
        drop((newcomer.unwrap(), taken));
        assert!(lock(&downloads.places.open).is_empty());
        assert!(lock(&downloads.readers).is_empty());
        assert_eq!(downloads.places.places.available_permits(), DOWNLOADS_MAX);
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
        assert_eq!(lock(&uploads.0.open).len(), UPLOADS_OPEN_MAX);
        // User 0 gives its other places too, and then users who have one give it to one who has no more.
        for n in 0..4 {
            assert!(uploads.0.ask(&none_yet));
            assert!(open[n].gives_way().notified().now_or_never().is_some());
        }
        let second = uploads.0.list(&none_yet, Arc::default()).ok().unwrap();
        assert!(!uploads.0.ask(&none_yet), "nobody has two");
        drop((newcomer, second, open));
        assert!(lock(&uploads.0.open).is_empty());
        assert_eq!(uploads.0.places.available_permits(), UPLOADS_OPEN_MAX);
    }
}
