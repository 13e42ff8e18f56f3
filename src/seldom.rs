//! Log lines that strangers can cause. However often it happens, a line is written a few times in each period; how many
//! were left out, one more line says.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Lines of one kind in a period.
const LINES: u32 = 5;
const PERIOD: Duration = Duration::from_secs(10);

/// Those that have left out lines, and not said so yet. One at most for each place in the code.
static SILENT: Mutex<Vec<&'static Seldom>> = Mutex::new(Vec::new());

/// One line of the log: a place in the code.
#[doc(hidden)]
#[derive(Debug)]
pub struct Seldom {
    message: &'static str,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// When the period began.
    since: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl Seldom {
    #[must_use]
    pub const fn new(message: &'static str) -> Self {
        let state = State {
            since: None,
            written: 0,
            left_out: 0,
        };
        let state = Mutex::new(state);
        Self { message, state }
    }

    /// Whether the line may be written now.
    pub fn may(&'static self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if state
            .since
            .is_none_or(|since| now >= since + PERIOD || now < since)
        {
            state.since = Some(now);
            state.written = 0;
        }
        if state.written < LINES {
            state.written += 1;
            return true;
        }
        state.left_out += 1;
        let first = state.left_out == 1;
        drop(state);
        if first {
            SILENT
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(self);
        }
        false
    }

    fn take(&self) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut state.left_out)
    }
}

/// Says of which lines how many were left out. To be called every few seconds.
pub fn tell() {
    let silent = std::mem::take(&mut *SILENT.lock().unwrap_or_else(PoisonError::into_inner));
    for line in silent {
        let (left_out, line) = (line.take(), line.message);
        tracing::warn!(left_out, line, "more lines of this kind were left out");
    }
}

/// As `tracing::event!`, but not more often than is useful: `seldom!(WARN, "the message", %error, user = %user)`.
macro_rules! seldom {
    ($level:ident, $message:literal $(, $($fields:tt)*)?) => {{
        static LINE: $crate::seldom::Seldom = $crate::seldom::Seldom::new($message);
        if LINE.may() {
            tracing::event!(tracing::Level::$level, $($($fields)*,)? $message);
        }
    }};
}
pub(crate) use seldom;

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_line_is_written_a_few_times_in_each_period() {
        static LINE: Seldom = Seldom::new("a line");
        let written = || (0..100).filter(|_| LINE.may()).count();
        assert_eq!(written(), LINES as usize);
        assert_eq!(written(), 0);
        advance(PERIOD).await;
        assert_eq!(written(), LINES as usize);
        assert_eq!(LINE.take(), 3 * 100 - 2 * u64::from(LINES));
        assert_eq!(LINE.take(), 0);
    }
}
