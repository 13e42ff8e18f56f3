//! Rate-limited log lines, for lines that clients can cause. A line is written a few times in each period; one more
//! line says how many were suppressed.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Lines of one kind in a period.
const LINES: u32 = 5;
const PERIOD: Duration = Duration::from_secs(10);

/// The places in the code with suppressed lines that are not reported yet, each at most once.
static SILENT: Mutex<Vec<&'static Seldom>> = Mutex::new(Vec::new());

/// A log line of one place in the code.
#[doc(hidden)]
#[derive(Debug)]
pub struct Seldom {
    message: &'static str,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The begin of the period.
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

/// Logs how many lines of each kind were suppressed. To be called every few seconds.
pub fn tell() {
    let silent = std::mem::take(&mut *SILENT.lock().unwrap_or_else(PoisonError::into_inner));
    for line in silent {
        let (left_out, line) = (line.take(), line.message);
        tracing::warn!(left_out, line, "suppressed more lines of this kind");
    }
}

/// Logs like `tracing::event!`, but rate-limited: `seldom!(WARN, "the message", %error, user = %user)`.
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
