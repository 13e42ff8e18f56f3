//! The places of uploads that are written to, and of downloads: so many in all, and so many of a user.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use metrics::gauge;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use crate::{
    model::{
        UserId,
        limits::{DOWNLOAD_WAIT, DOWNLOADS_MAX, DOWNLOADS_OF_USER_MAX, UPLOADS_OPEN_MAX},
    },
    tasks::lock,
};

/// The places of uploads. Each is an open file.
pub(super) struct Uploads {
    places: Arc<Semaphore>,
    /// Users with the number of their uploads to which something is being written.
    users: Arc<Mutex<HashMap<UserId, usize>>>,
    of_user_max: usize,
}

/// One upload that counts among those of its user, and among all that are written to.
pub(super) struct Counted {
    _place: OwnedSemaphorePermit,
    user: UserId,
    users: Arc<Mutex<HashMap<UserId, usize>>>,
}

impl Uploads {
    pub(super) fn new(of_user_max: usize) -> Self {
        Self {
            places: Arc::new(Semaphore::new(UPLOADS_OPEN_MAX)),
            users: Arc::default(),
            of_user_max,
        }
    }

    /// Counts an upload to which a user writes. `None` if there are too many.
    pub(super) fn count(&self, user: &UserId) -> Option<Counted> {
        let place = self.places.clone().try_acquire_owned().ok()?;
        let mut users = lock(&self.users);
        let count = users.entry(user.clone()).or_default();
        if *count >= self.of_user_max {
            return None;
        }
        *count += 1;
        gauge!("chat_uploads").increment(1.0);
        Some(Counted {
            _place: place,
            user: user.clone(),
            users: self.users.clone(),
        })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        gauge!("chat_uploads").decrement(1.0);
        let mut users = lock(&self.users);
        if let Some(count) = users.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                users.remove(&self.user);
            }
        }
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

/// Why a download has no place.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
    OfReader,
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
            turn.permit = permit.map_err(|_| NoPlace::OfReader)?.ok();
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
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_reader_has_so_many_downloads_and_others_their_own() {
        let downloads = Downloads::new();
        let mut taken = Vec::new();
        for _ in 0..DOWNLOADS_OF_USER_MAX {
            taken.push(downloads.take("alice").await.unwrap());
        }
        let refused = downloads.take("alice").await.map(drop);
        assert_eq!(refused, Err(NoPlace::OfReader));
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
}
