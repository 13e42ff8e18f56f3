//! Finds lagging conversations in the store, and lets their owners load them, so that they are followed again: rule [lagging-scan].

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::{StreamExt, future::join_all, stream};
use tokio::time::{Instant, sleep};

use super::follower::{Follower, Line};
use crate::{
    chat::Load,
    cluster::Router,
    model::{ConversationId, UserId},
    store::{LaggingRow, Store},
    tasks::contain,
};

/// The time between two scans.
pub const SCAN_EVERY: Duration = Duration::from_secs(60);
/// Rows that are read at once.
const PAGE: usize = 500;
/// The time in which a conversation is expected to be caught up with. Then its place is given to another one.
const CAUGHT_UP_WITHIN: Duration = Duration::from_secs(30);
/// The first and the longest pause between two looks at the conversations that are caught up with.
const LOOK_AFTER: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// Conversations that are loaded at once because their owner was lost.
const LOADS_AT_ONCE: usize = 32;

/// Scans for one consumer.
#[derive(Clone)]
pub(super) struct Scan {
    pub(super) follower: Arc<Follower>,
    pub(super) line: Arc<Line>,
    pub(super) router: Arc<Router>,
    pub(super) store: Arc<dyn Store>,
}

/// Loads conversations again whose owner was lost while something was not delivered.
pub(super) async fn reload_lost(follower: Arc<Follower>, router: Arc<Router>) {
    loop {
        sleep(LOOK_AFTER.1).await;
        let lost = follower.take_lost();
        let loads = lost.into_iter().map(|conversation| {
            let load = router.ask(conversation, UserId::gateway(), Load);
            async move {
                let load = contain("a load of a conversation", conversation, load);
                (conversation, load.await)
            }
        });
        let mut loads = stream::iter(loads).buffer_unordered(LOADS_AT_ONCE);
        while let Some((conversation, loaded)) = loads.next().await {
            if loaded.is_none_or(|loaded| loaded.is_err_and(|error| error.is_unavailable())) {
                follower.lose(conversation);
            }
        }
    }
}

impl Scan {
    /// Scans each minute, whenever the ring changes, and when the consumer is up again. A shard that could not be read is read
    /// again a second later.
    pub(super) async fn run(self) {
        loop {
            let (began, version) = (Instant::now(), self.router.version());
            let is_due = || began.elapsed() >= SCAN_EVERY || self.router.version() != version;
            let mut left: Vec<u8> = (0..=u8::MAX).collect();
            loop {
                left = self.scan(left).await;
                sleep(LOOK_AFTER.1).await;
                if !self.line.is_down() && (self.line.take_is_up() || is_due()) {
                    break;
                }
            }
        }
    }

    /// Scans some shards. Returns those that are left.
    async fn scan(&self, shards: Vec<u8>) -> Vec<u8> {
        let mut left = Vec::new();
        for shard in shards {
            if !self.router.scans(&self.line.name, shard) {
                continue;
            }
            if self.line.is_down() {
                left.push(shard);
            } else if let Err(error) = self.catch_up(shard).await {
                crate::seldom::seldom!(WARN, "lagging conversations could not be read; it is tried again", %error);
                left.push(shard);
            }
        }
        left
    }

    /// Catches up with the lagging conversations of a shard.
    async fn catch_up(&self, shard: u8) -> crate::store::Result<()> {
        let mut after = None;
        loop {
            let page = self
                .store
                .lagging(&self.line.name, shard, after, PAGE)
                .await?;
            let last = page.last().map(|row| row.conversation);
            let is_full = page.len() == PAGE;
            self.catch_up_with(page).await;
            match last {
                Some(last) if is_full && !self.line.is_down() => after = Some(last),
                _ => return Ok(()),
            }
        }
    }

    /// Lets the owners of these conversations follow them, a bounded number at a time.
    async fn catch_up_with(&self, rows: Vec<LaggingRow>) {
        let mut left = rows.into_iter();
        let mut places: BTreeMap<ConversationId, Instant> = BTreeMap::new();
        let mut pause = LOOK_AFTER.0;
        loop {
            let free = self.follower.settings.catch_up.saturating_sub(places.len());
            let next: Vec<LaggingRow> = left.by_ref().take(free).collect();
            if (next.is_empty() && places.is_empty()) || self.line.is_down() {
                return;
            }
            let until = Instant::now() + CAUGHT_UP_WITHIN;
            join_all(next.iter().map(|row| self.follow(row))).await;
            places.extend(next.iter().map(|row| (row.conversation, until)));
            sleep(pause).await;
            let before = places.len();
            self.free(&mut places).await;
            let is_idle = places.len() == before;
            pause = if is_idle {
                (pause * 2).min(LOOK_AFTER.1)
            } else {
                LOOK_AFTER.0
            };
        }
    }

    /// Lets the owner of a lagging conversation load it. An owner that has caught up removes the row.
    async fn follow(&self, row: &LaggingRow) {
        let conversation = row.conversation;
        let load = self.router.ask(conversation, UserId::gateway(), Load);
        drop(contain("a load of a conversation", conversation, load).await);
    }

    /// Frees the places of conversations that no longer lag, or that take too long.
    async fn free(&self, places: &mut BTreeMap<ConversationId, Instant>) {
        let ids: Vec<ConversationId> = places.keys().copied().collect();
        let rows = ids
            .iter()
            .map(|id| self.store.lagging_row(&self.line.name, *id));
        for (id, row) in ids.iter().zip(join_all(rows).await) {
            if matches!(row, Ok(None)) {
                places.remove(id);
            }
        }
        let now = Instant::now();
        places.retain(|_, until| *until > now);
    }
}
