//! The fan-out of events to this gateway's sockets: the subscriptions, a queue for each socket, and writes past that
//! queue. Each event is encoded once per codec, and all sockets share the bytes.

mod encoded;
mod hub;
mod outbox;
mod pace;
mod passes;
mod requests;
mod shared_stream;
mod subscriber;

pub use encoded::{Encoded, Frame};
pub use hub::{Admitted, Hub, TooMany};
pub use outbox::{Closing, Outbox};
pub use requests::LongRequest;
pub use shared_stream::{FrameWriter, SharedStream, WriteProgress};
pub use subscriber::Subscriber;

use crate::tasks::lock;
