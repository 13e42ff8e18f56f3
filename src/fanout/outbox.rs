//! The queue of one socket, bounded in bytes. Publishing never waits: a frame is written at once if nothing is queued
//! before it and the socket accepts it; otherwise it is queued. The session takes all queued frames and flushes once.
//! Too many queued events close the socket (4003): the client reconnects with its cursors and misses nothing. Too many
//! replies cause back-pressure instead.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    task::{Poll, Waker},
};

use super::{
    encoded::Frame,
    lock,
    shared_stream::{FrameWriter, Written},
};
use crate::protocol::{CloseCode, Codec};

/// The queue of one socket. The order of the fields keeps everything that each frame needs in the first 48 bytes: see
/// [`Subscriber`](super::Subscriber). Bytes are counted in 32 bits, because there is an outbox per connection;
/// `limits.outbox_bytes` and the replies of one session stay far below that.
#[derive(Debug)]
#[repr(C)]
pub struct Outbox {
    codec: Codec,
    bytes_max: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
#[repr(C)]
struct State {
    /// The socket. It is set while frames may be written past the session.
    writer: Option<Arc<FrameWriter>>,
    /// Bytes that are pushed and not flushed, including those of frames that were taken.
    bytes: u32,
    /// The part of `bytes` that is replies. They do not count against the limit, because the session itself requested
    /// them.
    reply_bytes: u32,
    /// The code with which the session must end. It is set once.
    closing: Option<CloseCode>,
    /// Whether a frame was written in part. A flush writes the rest.
    in_part: bool,
    /// The part of `bytes` that the session has taken or, for a frame written in part, has to flush.
    taken: u32,
    /// The part of `taken` that is replies.
    taken_replies: u32,
    waker: Option<Waker>,
    queue: VecDeque<Frame>,
}

/// The signal that the socket must be closed, with its code.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub struct Closing(pub CloseCode);

impl Outbox {
    #[must_use]
    pub fn new(codec: Codec, bytes_max: usize) -> Self {
        Self {
            codec,
            bytes_max: u32::try_from(bytes_max).unwrap_or(u32::MAX),
            state: Mutex::default(),
        }
    }

    #[must_use]
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Allows frames to be written at once. The caller has written everything that must come before them.
    pub fn attach(&self, writer: Arc<FrameWriter>) {
        self.state().writer = Some(writer);
    }

    /// Queues a frame. A full queue closes the socket as too slow.
    pub fn push(&self, frame: Frame) {
        self.change(|state| self.queue(state, frame));
    }

    /// As [`Self::push`], unless `done` is set. Sets it. Returns whether it was not set.
    pub fn push_once(&self, frame: &Frame, done: &AtomicBool) -> bool {
        let mut first = false;
        self.change(|state| {
            first = !done.swap(true, Ordering::Relaxed);
            if first {
                self.queue(state, frame.clone());
            }
        });
        first
    }

    /// Queues a reply of the session to its client. Replies have no limit here: the session starts no further request
    /// while [`reply_bytes`](Self::reply_bytes) is high. The session checks its queue before it waits, so this does not
    /// wake it.
    pub fn push_reply(&self, frame: Frame) {
        let mut state = self.state();
        if state.closing.is_none() {
            let bytes = size(&frame);
            state.bytes += bytes;
            state.reply_bytes += bytes;
            state.queue.push_back(frame);
        }
    }

    /// Returns the bytes of replies that are queued or being written.
    pub fn reply_bytes(&self) -> usize {
        self.state().reply_bytes as usize
    }

    /// Writes a frame at once if everything before it is written and the socket accepts it; otherwise queues it.
    /// Returns true if any of it was written.
    pub fn write_or_push(&self, frame: &Frame) -> bool {
        self.write_or_push_in(self.state(), frame)
    }

    /// As [`Self::write_or_push`], unless `done` is set: then it returns `None`. Sets it.
    pub fn write_or_push_once(&self, frame: &Frame, done: &AtomicBool) -> Option<bool> {
        let state = self.state();
        let first = !done.swap(true, Ordering::Relaxed);
        first.then(|| self.write_or_push_in(state, frame))
    }

    fn write_or_push_in(&self, mut state: MutexGuard<'_, State>, frame: &Frame) -> bool {
        let writer = state.writer.as_ref().filter(|_| state.bytes == 0);
        let written = match writer {
            Some(writer) if state.closing.is_none() => writer.write(frame.bytes()),
            _ => Written::Nothing,
        };
        let waker = match written {
            Written::Whole => None,
            Written::Part(left) => {
                state.bytes = left as u32;
                state.in_part = true;
                state.waker.take()
            }
            Written::Nothing => {
                self.queue(&mut state, frame.clone());
                state.waker.take()
            }
        };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        written != Written::Nothing
    }

    fn queue(&self, state: &mut State, frame: Frame) {
        if state.closing.is_some() {
            return;
        }
        let bytes = size(&frame);
        if state.bytes - state.reply_bytes + bytes > self.bytes_max {
            state.closing = Some(CloseCode::TooSlow);
            state.queue = VecDeque::new();
        } else {
            state.bytes += bytes;
            state.queue.push_back(frame);
        }
    }

    /// Ends the session with `code`.
    pub fn close(&self, code: CloseCode) {
        self.change(|state| {
            state.closing.get_or_insert(code);
            state.writer = None;
        });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let waker = {
            let mut state = self.state();
            change(&mut state);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits for frames and takes all of them, in exchange for the empty queue `frames`. It also returns, perhaps
    /// without frames, when a frame was written in part and needs a flush. It is cancel-safe.
    ///
    /// # Errors
    /// [`Closing`] if the session must end.
    pub async fn take(&self, frames: &mut VecDeque<Frame>) -> Result<(), Closing> {
        debug_assert!(frames.is_empty(), "what was taken before has been written");
        poll_fn(|context| {
            let mut state = self.state();
            if let Some(code) = state.closing {
                return Poll::Ready(Err(Closing(code)));
            }
            if !state.queue.is_empty() || state.in_part {
                state.taken = state.bytes;
                state.taken_replies = state.reply_bytes;
                state.in_part = false;
                std::mem::swap(&mut state.queue, frames);
                return Poll::Ready(Ok(()));
            }
            state.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Waits until the session must end. It is used while the socket accepts no bytes.
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

    /// Releases the bytes of the frames taken before: the kernel has them now.
    pub fn flushed(&self) {
        let mut state = self.state();
        state.bytes -= std::mem::take(&mut state.taken);
        state.reply_bytes -= std::mem::take(&mut state.taken_replies);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn size(frame: &Frame) -> u32 {
    frame.bytes().len() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a frame of this many bytes, including its header.
    fn frame(bytes: usize) -> Frame {
        let frame = Frame::encode(Codec::Json, &"x".repeat(bytes - 4));
        assert_eq!(frame.bytes().len(), bytes);
        frame
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
        // Frames that are taken but not flushed still count.
        outbox.push(frame(40));
        assert_eq!(
            taken(&outbox).await.unwrap_err(),
            Closing(CloseCode::TooSlow)
        );
    }

    #[tokio::test]
    async fn replies_leave_room_for_events() {
        let outbox = Outbox::new(Codec::Json, 100);
        outbox.push_reply(frame(90));
        outbox.push_reply(frame(90));
        outbox.push(frame(90));
        assert_eq!(outbox.reply_bytes(), 180);
        assert_eq!(taken(&outbox).await.unwrap(), 3);
        outbox.push_reply(frame(90));
        outbox.flushed();
        assert_eq!(outbox.reply_bytes(), 90);
        outbox.push(frame(90));
        outbox.push(frame(90));
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
            outbox.flushed();
        }
    }

    #[tokio::test]
    async fn the_first_reason_to_close_stays() {
        let outbox = Outbox::new(Codec::Json, 100);
        outbox.close(CloseCode::Disconnected);
        outbox.push(frame(101));
        assert_eq!(outbox.closing().await, Closing(CloseCode::Disconnected));
    }
}
