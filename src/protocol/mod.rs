//! The client protocol, version 1: frames as types, their two encodings, and all codes that clients see. No I/O.
//! `docs/protocol.md` describes it.

pub mod codec;
pub mod codes;
mod frame;
mod list;

pub use codec::{BadFrame, Codec};
pub use codes::{CloseCode, ErrorCode};
pub use frame::*;
