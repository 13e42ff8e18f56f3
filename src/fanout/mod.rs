//! The fan-out of events to this gateway's sockets: the subscriptions, a queue for each socket, and writes past that
//! queue. Each event is encoded once per codec, and all sockets share the bytes.

mod coalescing;
mod encoded;
mod hub;
mod outbox;
mod pace;
mod wire;

pub use coalescing::Coalesce;
pub use encoded::{Encoded, Frame};
pub use hub::{Admitted, Hub, Subscriber, TooMany};
pub use outbox::{Closing, Outbox};
pub use wire::{FrameWriter, SharedStream};

use crate::tasks::lock;
