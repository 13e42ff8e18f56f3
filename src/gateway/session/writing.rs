//! The writing side of a session. Every wait has a limit.

use std::{collections::VecDeque, time::Duration};

use axum::extract::ws::{CloseFrame, Message, WebSocket};
use futures_util::{FutureExt, SinkExt, StreamExt};
use tokio::{
    select,
    task::yield_now,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{End, Live, SILENT_PINGS_MAX, Session};
use crate::{
    fanout::{Closing, Frame, FrameWriter, Subscriber},
    gateway::Gateway,
    protocol::{BadFrame, CloseCode},
};

/// The time in which a close frame must be sent and answered.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes of the reason in a close frame (RFC 6455: 125 with the code).
const CLOSE_REASON_BYTES_MAX: usize = 123;
/// The time for one write and for the close frame at the end of a drain.
const LAST_WRITE: Duration = Duration::from_millis(500);
/// Frames for which an idle session's queue keeps capacity.
const FRAMES_KEPT: usize = 8;

impl Session {
    pub(super) async fn write(
        &mut self,
        subscriber: &Subscriber,
        expires_at: Instant,
        frames: &mut VecDeque<Frame>,
    ) -> Result<(), End> {
        let count = frames.iter().map(Frame::count).sum();
        self.gateway.sent.frames.increment(count);
        let writing = write_all(&mut self.socket, &self.writer, frames);
        let written = patiently(&self.gateway, &self.writer, subscriber, expires_at, writing).await;
        // The capacity for a burst is not kept forever.
        frames.shrink_to(FRAMES_KEPT);
        subscriber.outbox.flushed();
        written
    }

    /// Sends a frame before the outbox is attached to the socket: the reply to `connect`. The client must take it within
    /// the time for connecting.
    pub(super) async fn send(&mut self, frame: Frame) -> Result<(), End> {
        self.gateway.sent.frames.increment(1);
        let mut frames = VecDeque::from([frame]);
        let limit = Duration::from_millis(self.gateway.session.connect_timeout_ms);
        let writing = write_all(&mut self.socket, &self.writer, &mut frames);
        match timeout(limit, writing).await {
            Ok(written) => written.map_err(|_| CloseCode::GoingAway),
            Err(_) => Err(CloseCode::TooSlow),
        }
    }

    pub(super) async fn ping(
        &mut self,
        subscriber: &Subscriber,
        expires_at: Instant,
    ) -> Result<(), End> {
        let ping = self.socket.send(Message::Ping(Default::default()));
        patiently(&self.gateway, &self.writer, subscriber, expires_at, ping).await
    }

    /// Notes why a frame is none, and returns the close code.
    pub(super) fn bad_frame(&mut self, bad: &BadFrame) -> End {
        self.bad_frame = Some(bad.to_string());
        CloseCode::BadFrame
    }

    /// Completes the requests in progress and writes their replies before the session ends.
    pub(super) async fn finish_requests(&mut self, live: &mut Live) -> End {
        let gateway = self.gateway.clone();
        let mut frames = VecDeque::new();
        loop {
            let finished = select! {
                finished = live.replies.next() => finished,
                () = gateway.tasks.abandoned() => return CloseCode::Restart,
            };
            let none_left = finished.is_none();
            if let Some(finished) = finished {
                self.finished(live, finished);
            }
            if none_left || !self.takes_replies(live) {
                while let Some(Ok(())) = live.subscriber.outbox.take(&mut frames).now_or_never() {
                    let written = self.write(&live.subscriber, live.expires_at, &mut frames);
                    if let Err(code) = written.await {
                        return code;
                    }
                }
            }
            if none_left {
                return CloseCode::Restart;
            }
        }
    }

    pub(super) async fn close(&mut self, code: CloseCode) {
        if code == CloseCode::GoingAway {
            // The client closed or is gone. This completes the closing handshake if there is one.
            let _ = timeout(CLOSE_TIMEOUT, self.socket.close()).await;
            return;
        }
        let gateway = self.gateway.clone();
        let mut reason = code.reason().to_owned();
        if let (CloseCode::BadFrame, Some(text)) = (code, &self.bad_frame) {
            reason = format!("{reason}: {text}");
            reason.truncate(reason.floor_char_boundary(CLOSE_REASON_BYTES_MAX));
        }
        let frame = CloseFrame {
            code: code.number(),
            reason: reason.into(),
        };
        let closed = async {
            self.socket.send(Message::Close(Some(frame))).await?;
            // The client must answer first: closing at once could discard the close code.
            while let Some(Ok(_)) = self.socket.next().await {}
            self.writer.linger().await;
            Ok::<_, axum::Error>(())
        };
        select! {
            _ = timeout(CLOSE_TIMEOUT, closed) => {}
            () = leave_time(&gateway) => {}
        }
    }
}

/// Writes frames past the WebSocket library, after the library has flushed what it has begun, such as a pong.
async fn write_all(
    socket: &mut WebSocket,
    writer: &FrameWriter,
    frames: &mut VecDeque<Frame>,
) -> Result<(), axum::Error> {
    if writer.busy() {
        socket.flush().await?;
    }
    writer.write_all(frames).await.map_err(axum::Error::new)
}

/// Waits for a write. If the socket takes nothing, the session must still notice that its queue is full, its token
/// expires, the gateway drains, or its client is gone. These waits use memory only if the write does not complete at
/// once, as most do.
async fn patiently(
    gateway: &Gateway,
    writer: &FrameWriter,
    subscriber: &Subscriber,
    expires_at: Instant,
    write: impl Future<Output = Result<(), axum::Error>>,
) -> Result<(), End> {
    let mut write = std::pin::pin!(write);
    match (&mut write).now_or_never() {
        Some(written) => written.map_err(|_| CloseCode::GoingAway),
        None => Box::pin(wait_for(gateway, writer, subscriber, expires_at, write)).await,
    }
}

async fn wait_for(
    gateway: &Gateway,
    writer: &FrameWriter,
    subscriber: &Subscriber,
    expires_at: Instant,
    write: impl Future<Output = Result<(), axum::Error>>,
) -> Result<(), End> {
    select! {
        biased;
        Closing(code) = subscriber.outbox.closing() => Err(code),
        () = sleep_until(expires_at) => Err(CloseCode::TokenExpired),
        () = leave_time(gateway) => Err(CloseCode::Restart),
        written = write => written.map_err(|_| CloseCode::GoingAway),
        () = no_progress(gateway, writer) => Err(CloseCode::TooSlow),
    }
}

/// Returns when the client took nothing for as long as a client may be silent.
async fn no_progress(gateway: &Gateway, writer: &FrameWriter) {
    let patience = Duration::from_millis(gateway.session.ping_interval_ms) * (1 + SILENT_PINGS_MAX);
    loop {
        let before = writer.writes();
        sleep(patience).await;
        writer.try_soon();
        // The write of this session is polled, and then this.
        yield_now().await;
        if writer.writes() == before {
            return;
        }
    }
}

/// Returns when the gateway drains and all clients should have left. A wait that begins later than that has
/// [`LAST_WRITE`].
async fn leave_time(gateway: &Gateway) {
    gateway.tasks.draining().await;
    let began = Instant::now();
    let leave = gateway.tasks.drain_began() + gateway.drain.leave_within();
    sleep_until(leave.max(began + LAST_WRITE)).await;
}
