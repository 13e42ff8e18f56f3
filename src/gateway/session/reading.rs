//! What a session reads.

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

/// Bytes of a frame that may come in pieces, for each byte that it may have: the smallest sensible pieces are larger.
const PIECES_OVERHEAD: usize = 4;

pub(super) type Came = Option<Result<Message, axum::Error>>;

pub(super) enum Next {
    Queued(Result<(), Closing>),
    Came(Came),
}

impl Session {
    /// From now on the next message may take its bytes.
    pub(super) fn await_message(&self) {
        let bytes = PIECES_OVERHEAD * self.gateway.limits.frame_bytes;
        self.line.limit_message(bytes);
    }

    /// The bytes of a frame of this codec; `None` for what the WebSocket layer sees to itself.
    pub(super) fn incoming(&self, frame: Came) -> Result<Option<bytes::Bytes>, End> {
        match &frame {
            Some(Ok(Message::Text(_) | Message::Binary(_))) => {
                self.await_message();
            }
            // Between the pieces of a message, too: only those add up.
            Some(Ok(Message::Ping(bytes) | Message::Pong(bytes))) => {
                self.line.control_frame_came(bytes.len());
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

/// What is to be written, or else what the client sends; the other way round if it `reads_first`, so that neither
/// keeps the other waiting for ever. `reads`: whether the client is read from, and after which pause.
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
        // Boxed: few sessions pause, and the timer would enlarge every session.
        Box::pin(sleep_until(until)).await;
    }
    socket.next().await
}

/// Broken pipes and resets are ends like any other; what breaks the WebSocket protocol or its limits
/// is the client's mistake.
fn ended_by(error: &axum::Error) -> CloseCode {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(error) = cause.downcast_ref::<std::io::Error>() {
            return match error.kind() {
                // Too many bytes without a message.
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
