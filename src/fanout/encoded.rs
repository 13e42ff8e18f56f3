//! An event, encoded at most once per codec, however many sockets get it.

use std::sync::OnceLock;

use axum::extract::ws::{Message, Utf8Bytes};
use bytes::Bytes;
use serde::Serialize;

use crate::protocol::{Codec, Event};

/// The bytes of one frame; cloning shares them.
#[derive(Clone, Debug)]
pub enum Frame {
    Text(Utf8Bytes),
    Binary(Bytes),
}

impl Frame {
    pub fn encode<T: Serialize>(codec: Codec, frame: &T) -> Self {
        let bytes = codec.encode(frame);
        match codec {
            // The JSON encoder writes UTF-8 only; what is not would be its bug, and is shown as such.
            Codec::Json => Self::Text(String::from_utf8(bytes).unwrap_or_default().into()),
            Codec::MessagePack => Self::Binary(bytes.into()),
        }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Binary(bytes) => bytes.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[must_use]
    pub fn into_message(self) -> Message {
        match self {
            Self::Text(text) => Message::Text(text),
            Self::Binary(bytes) => Message::Binary(bytes),
        }
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
    pub fn frame(&self, codec: Codec) -> Frame {
        let encoded = match codec {
            Codec::Json => &self.json,
            Codec::MessagePack => &self.message_pack,
        };
        encoded
            .get_or_init(|| Frame::encode(codec, &self.event))
            .clone()
    }
}
