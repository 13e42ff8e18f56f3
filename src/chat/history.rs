//! Pages of the committed log from the store, through a cache that joins identical reads in flight: ten
//! thousand clients that come back at once cost one read.

use std::sync::Arc;

use moka::future::Cache;

use super::error::Error;
use crate::{
    model::{Content, ConversationId, Entry, Seq},
    store::{self, Store},
};

/// Bytes of entries kept, roughly.
const CACHE_BYTES: u64 = 32 << 20;
/// What an entry weighs besides its body.
const ENTRY_BYTES: usize = 300;

type Entries = Arc<Vec<Arc<Entry>>>;

pub(super) struct History {
    store: Arc<dyn Store>,
    pages: Cache<(ConversationId, Seq, Seq), Entries>,
}

impl History {
    pub(super) fn new(store: Arc<dyn Store>) -> Self {
        let pages = Cache::builder()
            .max_capacity(CACHE_BYTES)
            .weigher(|_, entries: &Entries| {
                let bytes: usize = entries.iter().map(|e| ENTRY_BYTES + body_bytes(e)).sum();
                u32::try_from(bytes).unwrap_or(u32::MAX)
            })
            .build();
        Self { store, pages }
    }

    /// The entries from `from` to `to`. The caller has asked the owner: all of them are committed, and what
    /// is committed never changes, so a page never grows stale.
    pub(super) async fn read(
        &self,
        conversation: ConversationId,
        from: Seq,
        to: Seq,
    ) -> Result<Entries, Error> {
        let load = async {
            let rows = self.store.log(conversation, from, to).await?;
            let whole = rows.iter().map(|r| r.entry.seq).eq(from..=to);
            if !whole {
                return Err(store::Error::Corrupt {
                    operation: "history",
                    reason: format!("{conversation}: entries {from} to {to} are not all there"),
                });
            }
            Ok(Arc::new(
                rows.into_iter().map(|r| r.entry).collect::<Vec<_>>(),
            ))
        };
        self.pages
            .try_get_with((conversation, from, to), load)
            .await
            .map_err(|error| {
                crate::seldom::seldom!(WARN, "a page could not be read", %conversation, %error);
                store::Error::clone(&error).into()
            })
    }
}

fn body_bytes(entry: &Entry) -> usize {
    match &entry.content {
        Content::Text { body, .. } => body.len(),
        Content::System(_) => 0,
    }
}
