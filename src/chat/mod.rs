//! The rules of a conversation. Start with `conversation.rs`. The order of entries and the takeover are in `log.rs`, and
//! the participants and their rights are in `participants.rs`. Neither file has I/O.
//!
//! This layer never sees a socket, a frame or the ring. A [`Lease`] allows it to act, and it publishes through [`Publish`].

mod changed_items;
mod client_ids;
mod conversation;
mod conversations;
mod error;
mod following;
mod history;
mod holes;
mod inbox;
mod inbox_limits;
mod lease;
mod log;
mod open;
mod operation;
mod participants;
mod publish;
mod ranks;
mod recent;
mod repair;
mod states;
mod unfinished;
mod versions;

pub use conversation::Settings;
pub use conversations::Conversations;
pub use error::Error;
pub use following::{Consumers, Following, ToStore, Work};
pub use holes::{CheckedLog, CheckedLogs, check_logs, fill_holes, undeleted};
pub use inbox::InboxWriter;
pub use lease::{Lease, Ownership, Owns};
pub use operation::*;
pub use publish::{
    Audience, Body, Changed, ChangedItem, Confirmation, Guarantee, MembershipChange,
    MembershipNotice, Publication, Publish, Reacted, ReactedBy, Receipt, Recipients,
    RedeliveryGuard,
};
pub use ranks::RankClock;
pub(crate) use repair::repair_all;
pub use versions::Versions;
