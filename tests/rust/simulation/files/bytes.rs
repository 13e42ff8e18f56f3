//! A simulated directory or bucket, and the gateways that look at what is uploaded there.

use std::{collections::BTreeSet, io, sync::Mutex, time::Duration};

use async_trait::async_trait;
use chat_gateway::{
    clock,
    files::Inspection,
    gateway::FileBytes,
    model::{AttachmentId, FileFacts, FileResult, FileState, Millis},
    store::{FileStore as _, simulated::Simulated},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::time::sleep;

pub(super) struct Bytes {
    pub in_bucket: bool,
    held: Mutex<Held>,
    random: Mutex<StdRng>,
}

#[derive(Default)]
struct Held {
    incoming: BTreeSet<AttachmentId>,
    complete: BTreeSet<AttachmentId>,
    /// What users were told that they may send.
    ready: BTreeSet<AttachmentId>,
    /// What was removed once.
    gone: BTreeSet<AttachmentId>,
    reliable: bool,
}

impl Bytes {
    pub(super) fn new(seed: u64, in_bucket: bool) -> Self {
        Self {
            in_bucket,
            held: Mutex::default(),
            random: Mutex::new(StdRng::seed_from_u64(seed ^ 0xb17e5)),
        }
    }

    fn random(&self, most: u64) -> u64 {
        self.random.lock().unwrap().random_range(0..=most)
    }

    async fn pause(&self, most_ms: u64) {
        sleep(Duration::from_millis(self.random(most_ms))).await;
    }

    /// Waits up to so many hours by people's clocks.
    async fn hours(&self, most: u64) {
        let until = clock::wall() + self.random(most * 3_600_000) as Millis;
        while clock::wall() < until {
            self.pause(60_000).await;
        }
    }

    /// A complete upload is there.
    pub(super) fn begin(&self, file: AttachmentId) {
        self.held.lock().unwrap().incoming.insert(file);
    }

    pub(super) fn is_complete(&self, file: AttachmentId) -> bool {
        self.held.lock().unwrap().complete.contains(&file)
    }

    pub(super) fn is_ready(&self, file: AttachmentId) -> bool {
        self.held.lock().unwrap().ready.contains(&file)
    }

    pub(super) fn has_any(&self, file: AttachmentId) -> bool {
        let held = self.held.lock().unwrap();
        held.incoming.contains(&file) || held.complete.contains(&file)
    }

    pub(super) fn erased(&self) -> usize {
        self.held.lock().unwrap().gone.len()
    }

    /// From now on nothing fails.
    pub(super) fn set_reliable(&self) {
        self.held.lock().unwrap().reliable = true;
    }

    fn fails(&self) -> bool {
        self.random(19) == 0 && !self.held.lock().unwrap().reliable
    }

    /// Looks at an upload, as a gateway that may pause for days or die in between: the file is scanning, its bytes are put
    /// where no upload can change them, and unless it was erased meanwhile it becomes ready.
    pub(super) async fn inspect(&self, store: &Simulated, file: AttachmentId) {
        let inspection = Inspection::begin();
        let Ok(found) = store.file(file).await else {
            return;
        };
        let state = found.map(|row| row.state);
        if !matches!(state, Some(FileState::Pending | FileState::Scanning)) {
            return;
        }
        if store
            .set_file_state(file, FileState::Scanning)
            .await
            .is_err()
        {
            return;
        }
        self.pause(200).await;
        if self.random(5) == 0 {
            self.hours(70).await;
        }
        if !self.keep(inspection, file).await || self.random(4) == 0 {
            return;
        }
        drop(self.record(store, file).await);
    }

    /// Puts a file where no upload can change it. Returns whether it is there.
    async fn keep(&self, inspection: Inspection, file: AttachmentId) -> bool {
        if !self.in_bucket {
            let mut held = self.held.lock().unwrap();
            if held.incoming.remove(&file) {
                held.complete.insert(file);
            }
            return held.complete.contains(&file);
        }
        let until = inspection.writes_until();
        // The request is on its way.
        self.pause(100).await;
        if self.random(5) == 0 {
            self.hours(1).await;
        }
        let arrives = clock::wall() <= until;
        if arrives {
            self.held.lock().unwrap().complete.insert(file);
        }
        arrives
    }

    /// Makes a file ready that is kept, unless it was erased meanwhile.
    async fn record(
        &self,
        store: &Simulated,
        file: AttachmentId,
    ) -> chat_gateway::store::Result<()> {
        let state = store.file(file).await?.map(|row| row.state);
        if self.in_bucket && state == Some(FileState::Erased) {
            drop(self.erase(file, None).await);
            return Ok(());
        }
        self.held.lock().unwrap().incoming.remove(&file);
        let result = FileResult {
            sha256: String::new(),
            size: 1,
            mime: "text/plain".into(),
            pixels: None,
            thumbnail: None,
            metadata: None,
        };
        store.set_file_result(file, &result).await?;
        store.set_file_state(file, FileState::Ready).await?;
        self.held.lock().unwrap().ready.insert(file);
        Ok(())
    }
}

#[async_trait]
impl FileBytes for Bytes {
    fn is_bucket(&self) -> bool {
        self.in_bucket
    }

    async fn received(&self, file: AttachmentId, facts: &FileFacts) -> io::Result<Option<u64>> {
        let is_here = self.held.lock().unwrap().incoming.contains(&file);
        Ok(is_here.then_some(facts.size))
    }

    async fn erase(&self, file: AttachmentId, _: Option<&str>) -> io::Result<()> {
        self.held.lock().unwrap().incoming.remove(&file);
        self.pause(50).await;
        if self.fails() {
            return Err(io::Error::other("the storage does not answer"));
        }
        let mut held = self.held.lock().unwrap();
        held.complete.remove(&file);
        held.gone.insert(file);
        Ok(())
    }

    async fn remove_old_uploads(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }
}
