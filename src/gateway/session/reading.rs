//! The reading side of a session.

use std::collections::VecDeque;

use axum::extract::ws::{Message, WebSocket};
use futures_util::StreamExt;
use tokio::{
    select,
    time::{Instant, sleep_until},
};

use super::{End, Session};
use crate::{
    fanout::{Closing, Frame, Subscriber},
    protocol::{CloseCode, Codec},
};

/// Bytes that may be read for each byte of the largest frame, because a frame may come in fragments. No sensible
/// fragments need more.
const PIECES_OVERHEAD: usize = 4;

pub(super) type Came = Option<Result<Message, axum::Error>>;

pub(super) enum Next {
    Queued(Result<(), Closing>),
    Came(Came),
}

impl Session {
    /// Allows the bytes of one more message.
    pub(super) fn await_message(&self) {
        let bytes = PIECES_OVERHEAD * self.gateway.limits.frame_bytes;
        self.writer.limit_message(bytes);
    }

    /// Returns the content of a frame, or `None` for a ping or pong, which the WebSocket library answers.
    pub(super) fn incoming(&self, frame: Came) -> Result<Option<bytes::Bytes>, End> {
        match &frame {
            Some(Ok(Message::Text(_) | Message::Binary(_))) => {
                self.await_message();
            }
            // Control frames may come between the fragments of a message, so their bytes are allowed in addition.
            Some(Ok(Message::Ping(bytes) | Message::Pong(bytes))) => {
                self.writer.control_frame_came(bytes.len());
            }
            _ => {}
        }
        match frame {
            None | Some(Ok(Message::Close(_))) => Err(CloseCode::GoingAway),
            Some(Err(error)) => Err(ended_by(&error)),
            Some(Ok(Message::Text(text))) if self.codec == Codec::Json => Ok(Some(text.into())),
            Some(Ok(Message::Binary(bytes))) if self.codec == Codec::MessagePack => Ok(Some(bytes)),
            Some(Ok(Message::Text(_) | Message::Binary(_))) => Err(CloseCode::BadFrame),
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(None),
        }
    }
}

/// Waits for frames to write or for a frame of the client. Frames to write come first, except if `reads_first`, so that
/// neither starves the other. `reads` says whether the client is read from, and after which pause.
pub(super) async fn next(
    socket: &mut WebSocket,
    subscriber: &Subscriber,
    frames: &mut VecDeque<Frame>,
    reads: Option<Option<Instant>>,
    reads_first: bool,
) -> Next {
    let (reads, pause_until) = (reads.is_some(), reads.flatten());
    if reads_first {
        return select! {
            biased;
            frame = read(socket, pause_until), if reads => Next::Came(frame),
            queued = subscriber.outbox.take(frames) => Next::Queued(queued),
        };
    }
    select! {
        biased;
        queued = subscriber.outbox.take(frames) => Next::Queued(queued),
        frame = read(socket, pause_until), if reads => Next::Came(frame),
    }
}

async fn read(socket: &mut WebSocket, pause_until: Option<Instant>) -> Came {
    if let Some(until) = pause_until {
        // Boxed, because few sessions pause and the timer would enlarge every session.
        Box::pin(sleep_until(until)).await;
    }
    socket.next().await
}

/// Returns the close code for a failed read. A broken pipe or reset is a normal end; a violation of the WebSocket
/// protocol or its limits is the client's error.
fn ended_by(error: &axum::Error) -> CloseCode {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(error) = cause.downcast_ref::<std::io::Error>() {
            return match error.kind() {
                // `SharedStream` reports too many bytes without a whole message like this.
                std::io::ErrorKind::InvalidData => CloseCode::BadFrame,
                _ => CloseCode::GoingAway,
            };
        }
        source = cause.source();
    }
    if error.to_string().contains("without closing handshake") {
        return CloseCode::GoingAway;
    }
    CloseCode::BadFrame
}
