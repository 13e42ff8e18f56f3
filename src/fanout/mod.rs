//! The sockets of this gateway: who is subscribed to what, the queue of each socket, and the way past it. A publication
//! is encoded once per codec and shared by all of them.

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
pub use wire::{Line, Wire};

use crate::tasks::lock;
