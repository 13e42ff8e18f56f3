//! The sockets of this gateway: who is subscribed to what, and the queue of each socket. A publication is
//! encoded once per codec and shared by all of them.

mod encoded;
mod hub;
mod outbox;

pub use encoded::{Encoded, Frame};
pub use hub::{Admitted, Hub, Subscriber};
pub use outbox::{Closing, Outbox};
