//! The last hop of publications: the sockets of this gateway, and which gateways have sockets that want a topic.

pub(super) mod channel_progress;
pub(super) mod events;
pub(super) mod interests;
pub(super) mod local_sockets;
