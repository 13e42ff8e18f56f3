//! Events, encoded at most once per codec for any number of sockets.

use std::{iter, sync::OnceLock};

use bytes::Bytes;
use serde::Serialize;
use tokio_tungstenite::tungstenite::protocol::frame::{
    FrameHeader,
    coding::{Data, OpCode},
};

use crate::{
    model::{Attachment, reactions_bytes},
    protocol::{Codec, Event},
};

/// The longest header of a WebSocket frame from a server (RFC 6455, 5.2).
const HEADER_MAX: usize = 10;
/// The initial capacity for a frame without its body, large enough for most frames.
const FRAME_BYTES: usize = 320;
/// The bytes of an attachment without its texts.
const ATTACHMENT_BYTES: usize = 64;

/// The bytes of one or more frames as they are on the wire, with their WebSocket headers. Clones share the bytes.
#[derive(Clone, Debug)]
pub struct Frame {
    bytes: Bytes,
    count: u32,
}

impl Frame {
    pub fn encode<T: Serialize>(codec: Codec, frame: &T) -> Self {
        Self::encode_in(FRAME_BYTES, codec, frame)
    }

    /// Encodes a frame like `encode`, with this initial capacity.
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
        Self {
            bytes: Bytes::from(bytes).slice(begins..),
            count: 1,
        }
    }

    fn joined(frames: &[Self]) -> Self {
        let mut bytes = Vec::with_capacity(frames.iter().map(|f| f.bytes.len()).sum());
        for frame in frames {
            bytes.extend_from_slice(&frame.bytes);
        }
        Self {
            bytes: Bytes::from(bytes),
            count: frames.iter().map(|f| f.count).sum(),
        }
    }

    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns the number of frames in these bytes.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.into()
    }
}

/// One or more events on their way to many sockets.
#[derive(Clone, Debug)]
pub struct Encoded {
    event: Event,
    more: Vec<Event>,
    json: OnceLock<Frame>,
    message_pack: OnceLock<Frame>,
}

impl Encoded {
    #[must_use]
    pub fn new(event: Event) -> Self {
        Self {
            event,
            more: Vec::new(),
            json: OnceLock::new(),
            message_pack: OnceLock::new(),
        }
    }

    /// Appends the events of `others`.
    pub(super) fn append(&mut self, others: Self) {
        self.more.push(others.event);
        self.more.extend(others.more);
        (self.json, self.message_pack) = Default::default();
    }

    pub(super) fn count(&self) -> u64 {
        1 + self.more.len() as u64
    }

    /// Returns the approximate size of the encoded events.
    pub(super) fn bytes(&self) -> usize {
        iter::once(&self.event).chain(&self.more).map(room).sum()
    }

    #[must_use]
    pub fn frame(&self, codec: Codec) -> &Frame {
        let encoded = match codec {
            Codec::Json => &self.json,
            Codec::MessagePack => &self.message_pack,
        };
        let encode = |event| Frame::encode_in(room(event), codec, event);
        encoded.get_or_init(|| {
            if self.more.is_empty() {
                return encode(&self.event);
            }
            let events = iter::once(&self.event).chain(&self.more);
            Frame::joined(&events.map(encode).collect::<Vec<_>>())
        })
    }
}

/// Returns the approximate size of an encoded event.
fn room(event: &Event) -> usize {
    let more = match event {
        Event::Message(message) => message.body.len() + attachments_bytes(&message.attachments),
        Event::Changed(changed) => {
            let items = changed.items.iter().map(|item| {
                let body = item.body.as_ref().map_or(0, String::len);
                let attachments = item.attachments.as_deref().map_or(0, attachments_bytes);
                let reactions = item.reactions.as_ref().map_or(0, reactions_bytes);
                FRAME_BYTES + body + attachments + reactions
            });
            items.sum()
        }
        _ => 0,
    };
    FRAME_BYTES + more
}

fn attachments_bytes(attachments: &[Attachment]) -> usize {
    let bytes = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let texts = |a: &Attachment| bytes(&a.name) + bytes(&a.mime) + bytes(&a.alt);
    let each = |a: &Attachment| ATTACHMENT_BYTES + a.numbers_bytes() + a.url.len() + texts(a);
    attachments.iter().map(each).sum()
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
