//! Sends the entries of a channel that other gateways have missed, as its owner.

use futures_util::{StreamExt, stream};

use super::{Exchange, REPAIRS_AT_ONCE};
use crate::{
    chat::{Audience, Operation, Outcome, Page, Publication},
    cluster::{
        lock,
        message::{Delivered, PeerMessage, encode},
    },
    model::{ConversationId, Cursor, GatewayId, UserId, limits::RESUME_ENTRIES_MAX},
};

/// The bytes of entries that are sent to a gateway that has missed them. If there are more, it gets a `resync`.
const CATCH_UP_BYTES_MAX: usize = 4 << 20;

impl Exchange {
    /// Sends to each gateway that is behind what it has missed of a channel: rule 7 of docs/cluster.md.
    pub(super) async fn catch_up(&self) {
        let behind = std::mem::take(&mut *lock(&self.behind));
        let again = stream::iter(behind)
            .map(|(channel, gateway, passed)| async move {
                let done = self.catch_up_with(channel, gateway, passed).await;
                (!done).then_some((channel, gateway, passed))
            })
            .buffer_unordered(REPAIRS_AT_ONCE)
            .filter_map(async |again| again)
            .collect::<Vec<_>>()
            .await;
        lock(&self.behind).extend(again);
    }

    /// Returns whether it is done, or no longer this gateway's task.
    async fn catch_up_with(
        &self,
        channel: ConversationId,
        gateway: GatewayId,
        Cursor(after, _): Cursor,
    ) -> bool {
        if self.members.ring().load().owner(channel) != Some(self.me) {
            return true; // The gateway announces its interest to the new owner by itself.
        }
        if gateway != self.me && !self.peers.has_room(gateway) {
            return false;
        }
        let limit = usize::try_from(RESUME_ENTRIES_MAX).unwrap_or(usize::MAX);
        let operation = Operation::CatchUp { after, limit };
        match self
            .router
            .ask_owner_here(channel, UserId::gateway(), operation)
            .await
        {
            Ok(Outcome::History(page)) => {
                let is_whole = page.reaches_head(after);
                let Page { entries, head, .. } = page;
                let entry = |entry| {
                    Delivered::Publication(Publication::entry(channel, entry, Audience::Channel))
                };
                let entries: Vec<_> = entries.into_iter().map(entry).collect();
                let too_many = head - after.min(head) > RESUME_ENTRIES_MAX;
                if too_many || !is_whole || encoded_bytes(&entries) > CATCH_UP_BYTES_MAX {
                    self.deliver(gateway, &Delivered::Resync { channel, head });
                } else if gateway != self.me && !self.peers.has_room(gateway) {
                    return false; // Other messages have taken the room meanwhile.
                } else {
                    entries
                        .iter()
                        .for_each(|entry| self.deliver(gateway, entry));
                }
                true
            }
            Err(error) if error.is_unavailable() => false,
            Ok(_) | Err(_) => true,
        }
    }

    fn deliver(&self, gateway: GatewayId, delivered: &Delivered) {
        if gateway == self.me {
            self.take(delivered.clone());
        } else {
            let bytes = encode(&PeerMessage::Deliver(delivered.clone()));
            self.peers.send(gateway, bytes, None);
        }
    }
}

/// Returns the encoded bytes of these entries, or any number above the limit if there are more.
fn encoded_bytes(entries: &[Delivered]) -> usize {
    let mut bytes = 0;
    for entry in entries {
        bytes += encode(entry).len();
        if bytes > CATCH_UP_BYTES_MAX {
            break;
        }
    }
    bytes
}
