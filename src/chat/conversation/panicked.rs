//! Ends an owner that panicked.

use futures_util::StreamExt as _;
use tokio::select;

use super::{Done, Owner};
use crate::chat::error::Error;

impl Owner {
    /// Gives up the state in memory, which may be wrong after a panic. The next owner loads the conversation again.
    pub(super) fn give_up_after_panic(&mut self) {
        self.failed = Some(Error::Closed);
        self.environment.unfinished.lost(self.id);
    }

    /// Waits until no write to the log is in progress. The next owner may have the same epoch and append at the same
    /// positions, so none of these writes may be stored after it has read the log.
    pub(super) async fn wait_for_writes(&mut self) {
        let revoked = self.ownership.revoked();
        while self.writing > 0 {
            select! {
                biased;
                () = revoked.cancelled() => return,
                done = self.work.next() => match done {
                    Some(Done::Written(_) | Done::ChangesWritten(_)) => self.writing -= 1,
                    Some(Done::Lost(_)) | None => return,
                    Some(_) => {}
                }
            }
        }
    }
}
