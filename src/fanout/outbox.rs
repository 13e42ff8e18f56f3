//! The queue of one socket, bounded in bytes. Whoever publishes pushes and never waits; the session takes
//! everything queued and flushes once. A full queue closes the socket (4003): the client comes back with
//! its cursors and misses nothing.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::{Mutex, MutexGuard, PoisonError},
    task::{Poll, Waker},
};

use super::encoded::Frame;
use crate::protocol::{CloseCode, Codec};

#[derive(Debug)]
pub struct Outbox {
    codec: Codec,
    bytes_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Frame>,
    /// Of everything pushed and not yet flushed, taken frames included.
    bytes: usize,
    /// Set once: the session must end, and why.
    closing: Option<CloseCode>,
    waker: Option<Waker>,
}

/// The socket is to be closed with this code.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub struct Closing(pub CloseCode);

impl Outbox {
    #[must_use]
    pub fn new(codec: Codec, bytes_max: usize) -> Self {
        Self {
            codec,
            bytes_max,
            state: Mutex::default(),
        }
    }

    #[must_use]
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Queues a frame, or marks the socket as too slow.
    pub fn push(&self, frame: Frame) {
        let waker = {
            let mut state = self.state();
            if state.closing.is_some() {
                return;
            }
            if state.bytes + frame.len() > self.bytes_max {
                state.closing = Some(CloseCode::TooSlow);
                state.queue = VecDeque::new();
            } else {
                state.bytes += frame.len();
                state.queue.push_back(frame);
            }
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends the session with `code`.
    pub fn close(&self, code: CloseCode) {
        let waker = {
            let mut state = self.state();
            state.closing.get_or_insert(code);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits for frames and takes all of them, in exchange for an empty queue. Safe to drop at any time.
    ///
    /// # Errors
    /// [`Closing`] when the session is to end.
    pub async fn take(&self, frames: &mut VecDeque<Frame>) -> Result<(), Closing> {
        debug_assert!(frames.is_empty(), "what was taken before has been written");
        poll_fn(|context| {
            let mut state = self.state();
            if let Some(code) = state.closing {
                return Poll::Ready(Err(Closing(code)));
            }
            if !state.queue.is_empty() {
                std::mem::swap(&mut state.queue, frames);
                return Poll::Ready(Ok(()));
            }
            state.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Waits until the session is to end; for while the socket takes nothing.
    pub async fn closing(&self) -> Closing {
        poll_fn(|context| {
            let mut state = self.state();
            if let Some(code) = state.closing {
                return Poll::Ready(Closing(code));
            }
            state.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Frames of `bytes` taken before are with the kernel now.
    pub fn flushed(&self, bytes: usize) {
        let mut state = self.state();
        state.bytes = state.bytes.saturating_sub(bytes);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(bytes: usize) -> Frame {
        Frame::Binary(vec![0; bytes].into())
    }

    async fn taken(outbox: &Outbox) -> Result<usize, Closing> {
        let mut frames = VecDeque::new();
        outbox.take(&mut frames).await.map(|()| frames.len())
    }

    #[tokio::test]
    async fn all_that_is_queued_is_taken_at_once() {
        let outbox = Outbox::new(Codec::Json, 100);
        outbox.push(frame(40));
        outbox.push(frame(40));
        assert_eq!(taken(&outbox).await.unwrap(), 2);
        // Taken is not flushed: the bytes are still ours.
        outbox.push(frame(40));
        assert_eq!(
            taken(&outbox).await.unwrap_err(),
            Closing(CloseCode::TooSlow)
        );
    }

    #[tokio::test]
    async fn flushed_bytes_make_room() {
        let outbox = Outbox::new(Codec::Json, 100);
        for _ in 0..10 {
            outbox.push(frame(90));
            assert_eq!(taken(&outbox).await.unwrap(), 1);
            outbox.flushed(90);
        }
    }

    #[tokio::test]
    async fn the_first_reason_to_close_stays() {
        let outbox = Outbox::new(Codec::Json, 100);
        outbox.close(CloseCode::Disconnected);
        outbox.push(frame(1000));
        assert_eq!(outbox.closing().await, Closing(CloseCode::Disconnected));
    }
}
