//! Who owns what, and the way there. `Router` carries requests inward, to a conversation's owner or a
//! user's home; `Delivery` carries publications outward, to the sockets concerned. They meet in `node.rs`
//! and nowhere else.
//!
//! With the embedded store the ring has one member and every hop is a function call.

mod delivery;
mod home;
mod members;
mod membership;
mod presence;
mod ring;
mod router;

pub use delivery::Delivery;
pub use home::Home;
pub(crate) use home::OVERLAY;
pub use members::{Members, NotJoined};
pub use membership::{LEASE, Learned, Membership, Rule};
pub use presence::Presence;
pub use ring::Ring;
pub use router::{Inbox, Router};
