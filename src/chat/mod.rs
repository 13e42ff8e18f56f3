//! The domain: what a conversation is. Start with `conversation.rs`; the rules it obeys are in `log.rs`
//! (order, takeover) and `participants.rs` (who may do what), both without I/O.
//!
//! This room never sees a socket, a frame or the ring. It learns that it may act from a [`Lease`] and
//! tells the world through [`Publish`].

mod conversation;
mod conversations;
mod error;
mod history;
mod inbox;
mod lease;
mod log;
mod open;
mod operation;
mod participants;
mod publish;
mod unfinished;

pub use conversation::Settings;
pub use conversations::Conversations;
pub use error::Error;
pub use inbox::InboxWriter;
pub use lease::{Lease, Ownership, Owns};
pub use operation::{
    Creation, DetailsView, Head, Listed, LogRange, Operation, Outcome, Page, ParticipantsPage, Sent,
};
pub use publish::{Audience, Handed, InHand, Members, Place, Publication, Publish};
