//! What a home does for pushing. `consumers/push` decides; here is the port to it.

use crate::{
    chat::Receipt,
    cluster::wire::question::ToNotify,
    model::{ConversationId, UserId},
};

/// A home's part of pushing. Because of it, this layer knows no push services.
pub trait Pushes: Send + Sync + 'static {
    /// Takes the request to notify users of a conversation. Returns those for whom it has not decided yet: it is asked again.
    fn ask(&self, conversation: ConversationId, users: ToNotify) -> Vec<UserId>;

    /// Learns that a user has read a conversation, or that messages were delivered to the user.
    fn marked(&self, conversation: ConversationId, receipt: &Receipt);

    /// Learns that a user begins to look, or does not any more.
    fn looked(&self, user: &UserId);
}
