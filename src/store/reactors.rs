//! The rules of one page of the users who reacted to an entry, the same in each backend. Rows of removed reactions stay
//! in the tables, so a page may need more rows than it shows.

use std::fmt;

use super::{ReactorRow, ReactorsPage};
use crate::model::{
    UserId,
    limits::{PAGE_ITEMS_MAX, SCAN_ROWS_MAX},
    text::is_reaction_key,
};

/// The position of a reaction in the order of the store. Its text is the emoji, a space, and the user: an emoji has no
/// space.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Position {
    pub emoji: String,
    pub user: UserId,
}

impl Position {
    /// Reads a position. `None` for a text that is none, or one of another emoji than the one asked for.
    pub(super) fn read(text: &str, emoji: Option<&str>) -> Option<Self> {
        let (of, user) = text.split_once(' ')?;
        let fits = is_reaction_key(of) && emoji.is_none_or(|emoji| emoji == of);
        let user = UserId::new(user).ok()?;
        fits.then(|| Self {
            emoji: of.to_owned(),
            user,
        })
    }

    fn of(row: &ReactorRow) -> Self {
        Self {
            emoji: row.emoji.clone(),
            user: row.user.clone(),
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.emoji, self.user.as_str())
    }
}

/// A page that is being read.
pub(super) struct ReactorsScan {
    page: ReactorsPage,
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
    After(Position),
    /// No row is left in this table or partition.
    Exhausted,
}

impl ReactorsScan {
    pub(super) fn new(limit: usize) -> Self {
        let limit = limit.clamp(1, SCAN_ROWS_MAX);
        Self {
            page: ReactorsPage::default(),
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

    /// Adds the rows of one read, removed reactions among them. `is_last` if no other partition follows.
    pub(super) fn add(&mut self, rows: Vec<ReactorRow>, is_last: bool) -> Step {
        let read = rows.len();
        let full = read == self.rows_wanted();
        let mut newest = None;
        for (i, row) in rows.into_iter().enumerate() {
            let position = Position::of(&row);
            if row.on {
                self.page.items.push(row);
            }
            self.rows_left -= 1;
            if self.page.items.len() == self.limit || self.rows_left == 0 {
                let more = full || i + 1 < read || !is_last;
                self.page.next = more.then(|| position.to_string());
                return Step::Complete;
            }
            newest = Some(position);
        }
        self.rows_wanted = PAGE_ITEMS_MAX;
        newest.filter(|_| full).map_or(Step::Exhausted, Step::After)
    }

    pub(super) fn into_page(self) -> ReactorsPage {
        self.page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_read_as_it_was_written_and_nothing_else_is_one() {
        let position = Position {
            emoji: "👍".into(),
            user: UserId::new("alice").unwrap(),
        };
        let text = position.to_string();
        assert_eq!(Position::read(&text, None), Some(position.clone()));
        assert_eq!(Position::read(&text, Some("👍")), Some(position));
        assert_eq!(Position::read(&text, Some("x")), None);
        for bad in ["", " ", "👍", "👍 ", " alice", "\0 alice", "👍 a\0b"] {
            assert_eq!(Position::read(bad, None), None, "{bad:?}");
        }
    }
}
