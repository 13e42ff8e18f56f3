//! The way of requests inward: to the owner of a conversation, or to the home of a user.

pub(super) mod channels;
pub(super) mod gateways;
pub(super) mod here;
pub(super) mod inbox;
pub(super) mod router;
pub(super) mod users;
