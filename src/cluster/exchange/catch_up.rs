//! Gateways that have missed entries of a channel get them from its owner.

use futures_util::{StreamExt, stream};

use super::{Exchange, REPAIRS_AT_ONCE};
use crate::{
    chat::{Audience, Operation, Outcome, Page, Publication},
    cluster::{
        lock,
        message::{Delivered, Message, encode},
    },
    model::{ConversationId, GatewayId, Seq, UserId, limits::RESUME_ENTRIES_MAX},
};

/// Bytes of entries sent to a gateway that has missed them; more is a `resync`.
const CATCH_UP_BYTES_MAX: usize = 4 << 20;

impl Exchange {
    /// Rule 7: who has missed something of a channel gets it from its owner.
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

    async fn catch_up_with(
        &self,
        channel: ConversationId,
        gateway: GatewayId,
        passed: Seq,
    ) -> bool {
        if self.members.ring().load().owner(channel) != Some(self.me) {
            return true; // Its new owner is told by the gateway itself.
        }
        if gateway != self.me && !self.peers.has_room(gateway) {
            return false;
        }
        let limit = usize::try_from(RESUME_ENTRIES_MAX).unwrap_or(usize::MAX);
        let operation = Operation::CatchUp {
            after: passed,
            limit,
        };
        match self
            .router
            .ask_here(channel, UserId::gateway(), operation)
            .await
        {
            Ok(Outcome::History(page)) => {
                let is_whole = page.reaches_head(passed);
                let Page { entries, head } = page;
                let entry = |entry| {
                    Delivered::Publication(Publication::entry(channel, entry, Audience::Channel))
                };
                let entries: Vec<_> = entries.into_iter().map(entry).collect();
                let too_many = head - passed.min(head) > RESUME_ENTRIES_MAX;
                if too_many || !is_whole || encoded_bytes(&entries) > CATCH_UP_BYTES_MAX {
                    self.deliver(gateway, &Delivered::Resync { channel, head });
                } else if gateway != self.me && !self.peers.has_room(gateway) {
                    return false; // Others have taken the room meanwhile.
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
            let bytes = encode(&Message::Deliver(delivered.clone()));
            self.peers.send(gateway, bytes, None);
        }
    }
}

/// Bytes of these between gateways, as far as that matters.
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
