//! The rules of one page of public conversations, the same in each backend. Rows of conversations that are private
//! again stay in the tables, so a page may need more rows than it shows.

use super::{PublicPage, PublicRow, Result};
use crate::model::{
    ConversationId,
    limits::{PAGE_ITEMS_MAX, SCAN_ROWS_MAX},
};

/// A page of public conversations that is being read.
pub(super) struct PublicScan {
    page: PublicPage,
    /// Conversations of a full page.
    limit: usize,
    /// Rows that may still be read for this page.
    rows_left: usize,
    /// Rows of the next read, as long as so many are left.
    rows_wanted: usize,
}

/// How a scan continues after a read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The page is full, or the bound of rows is reached.
    Complete,
    /// The next read begins after this row.
    After(ConversationId),
    /// No row is left in this table or partition.
    Exhausted,
}

impl PublicScan {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            page: PublicPage::default(),
            limit,
            rows_left: SCAN_ROWS_MAX,
            // One more than fits, so that a full page knows whether another one follows.
            rows_wanted: limit + 1,
        }
    }

    /// Returns the number of rows that the next read asks for.
    pub(super) fn rows_wanted(&self) -> usize {
        self.rows_wanted.min(self.rows_left)
    }

    /// Adds the rows of one read, in which private conversations are `None`. `is_last` if no other partition follows.
    pub(super) fn add(
        &mut self,
        rows: impl ExactSizeIterator<Item = Result<(ConversationId, Option<PublicRow>)>>,
        is_last: bool,
    ) -> Result<Step> {
        let read = rows.len();
        let full = read == self.rows_wanted();
        let mut newest = None;
        for (i, row) in rows.enumerate() {
            let (conversation, row) = row?;
            self.page.rows.extend(row);
            self.rows_left -= 1;
            newest = Some(conversation);
            if self.page.rows.len() == self.limit || self.rows_left == 0 {
                let more = full || i + 1 < read || !is_last;
                self.page.next = newest.filter(|_| more);
                return Ok(Step::Complete);
            }
        }
        self.rows_wanted = PAGE_ITEMS_MAX;
        Ok(newest.filter(|_| full).map_or(Step::Exhausted, Step::After))
    }

    pub(super) fn into_page(self) -> PublicPage {
        self.page
    }
}
