//! The client protocol, version 1: frames as types, their two encodings, and all codes that clients see. No I/O.
//! `docs/protocol.md` describes it.

mod changed;
pub mod codec;
pub mod codes;
mod device;
mod explain;
mod file;
mod frame;
mod list;
mod message;
mod request;
mod route;

pub use changed::*;
pub use codec::{BadFrame, Codec};
pub use codes::{CloseCode, ErrorCode};
pub use device::*;
pub use file::*;
pub use frame::*;
pub(crate) use list::{at_most, objects_at_most};
pub use message::Message;
pub use request::*;
pub(crate) use route::body;
pub use route::{Described, Given, Rest};
