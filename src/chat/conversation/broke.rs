//! What is left to do when an owner has panicked.

use futures_util::StreamExt as _;
use tokio::select;

use super::{Done, Owner};
use crate::chat::error::Error;

impl Owner {
    /// After a panic: what is in memory is not believed any more. Whoever owns it next loads it.
    pub(super) fn broke(&mut self) {
        self.failed = Some(Error::Closed);
        self.environment.unfinished.lost(self.id);
    }

    /// Waits for the writes to the log that are under way. Whoever owns it next under the same epoch would give their
    /// places away again: none of them may be stored after it has looked.
    pub(super) async fn written(&mut self) {
        let revoked = self.ownership.revoked();
        while self.writing > 0 {
            select! {
                biased;
                () = revoked.cancelled() => return,
                done = self.work.next() => match done {
                    Some(Done::Written(_)) => self.writing -= 1,
                    Some(Done::Lost(_)) | None => return,
                    Some(_) => {}
                }
            }
        }
    }
}
