//! The client protocol, version 1: frames as types, their two encodings, and every code a client can see.
//! No I/O. The text of it is `docs/protocol.md`.

pub mod codec;
pub mod codes;
mod frame;
mod list;

pub use codec::{BadFrame, Codec};
pub use codes::{CloseCode, ErrorCode};
pub use frame::*;
