//! The messages between gateways, and the links that carry them.

pub(super) mod answers;
pub(super) mod link;
pub(super) mod message;
pub(super) mod network;
pub(super) mod peers;
pub(super) mod question;
mod unproven;
