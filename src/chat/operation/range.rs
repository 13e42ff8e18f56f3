//! Which part of a log is a page.

use serde::{Deserialize, Serialize};

use crate::model::Seq;

/// The part of a log that a page is read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogRange {
    Newest,
    Before(Seq),
    After(Seq),
    Around(Seq),
}

impl LogRange {
    /// Returns the first and the last seq of a page of a log whose newest entry is `head`. The page is empty if the first
    /// is greater than the last.
    #[must_use]
    pub fn within(self, head: Seq, limit: usize) -> (Seq, Seq) {
        let limit = limit as Seq;
        let newest_up_to = |to: Seq| (to.saturating_sub(limit) + 1, to);
        match self {
            Self::Newest => newest_up_to(head),
            Self::Before(seq) => newest_up_to(seq.saturating_sub(1).min(head)),
            Self::After(seq) => (seq.saturating_add(1), seq.saturating_add(limit).min(head)),
            Self::Around(seq) => {
                let to = seq.saturating_add(limit / 2).min(head);
                newest_up_to(to.max(limit.min(head)))
            }
        }
    }
}
