//! An event, encoded at most once per codec, however many sockets get it.

use std::sync::OnceLock;

use bytes::Bytes;
use serde::Serialize;
use tokio_tungstenite::tungstenite::protocol::frame::{
    FrameHeader,
    coding::{Data, OpCode},
};

use crate::protocol::{Codec, Event};

/// The longest header of a WebSocket frame from a server (RFC 6455, 5.2).
const HEADER_MAX: usize = 10;
/// Room for a frame without growing, but for its body.
const FRAME_BYTES: usize = 320;

/// One frame as it is on the wire, with its WebSocket header; clones share the bytes.
#[derive(Clone, Debug)]
pub struct Frame(Bytes);

impl Frame {
    pub fn encode<T: Serialize>(codec: Codec, frame: &T) -> Self {
        Self::encode_in(FRAME_BYTES, codec, frame)
    }

    /// As `encode`, beginning with so much room.
    fn encode_in<T: Serialize>(room: usize, codec: Codec, frame: &T) -> Self {
        let mut bytes = Vec::with_capacity(room);
        bytes.resize(HEADER_MAX, 0);
        codec.encode_onto(frame, &mut bytes);
        let length = bytes.len() - HEADER_MAX;
        let data = match codec {
            Codec::Json => Data::Text,
            Codec::MessagePack => Data::Binary,
        };
        let header = FrameHeader {
            opcode: OpCode::Data(data),
            ..FrameHeader::default()
        };
        let begins = HEADER_MAX - header.len(length as u64);
        let written = header.format(length as u64, &mut &mut bytes[begins..HEADER_MAX]);
        debug_assert!(written.is_ok(), "there is room for every header");
        Self(Bytes::from(bytes).slice(begins..))
    }

    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.0
    }
}

/// An event on its way to many sockets.
#[derive(Debug)]
pub struct Encoded {
    event: Event,
    json: OnceLock<Frame>,
    message_pack: OnceLock<Frame>,
}

impl Encoded {
    #[must_use]
    pub fn new(event: Event) -> Self {
        Self {
            event,
            json: OnceLock::new(),
            message_pack: OnceLock::new(),
        }
    }

    #[must_use]
    pub fn frame(&self, codec: Codec) -> &Frame {
        let encoded = match codec {
            Codec::Json => &self.json,
            Codec::MessagePack => &self.message_pack,
        };
        encoded.get_or_init(|| {
            let body = match &self.event {
                Event::Message(message) => message.body.len(),
                _ => 0,
            };
            Frame::encode_in(FRAME_BYTES + body, codec, &self.event)
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio_tungstenite::tungstenite::protocol::frame::FrameSocket;

    use super::*;

    #[test]
    fn the_wire_has_the_same_frame_whatever_its_length() {
        for length in [0, 1, 100, 125, 126, 65_535, 65_536, 200_000] {
            let text = "x".repeat(length);
            for codec in [Codec::Json, Codec::MessagePack] {
                let frame = Frame::encode(codec, &text);
                let mut socket = FrameSocket::new(std::io::Cursor::new(frame.bytes().to_vec()));
                let read = socket.read(None).unwrap().unwrap();
                assert!(read.header().is_final && read.header().mask.is_none());
                assert_eq!(read.payload(), codec.encode(&text));
            }
        }
    }
}
