//! Sends the entries and changes of a channel that other gateways have missed, as its owner.

use futures_util::{StreamExt, stream};

use super::{Exchange, REPAIRS_AT_ONCE};
use crate::{
    chat::{CatchUp, CatchUpChanges, Error, Publication, output},
    cluster::{
        sockets::events::{gap, missed, missed_changes, missed_entries},
        wire::message::{Delivered, PeerMessage, encode},
    },
    model::{
        ConversationId, Cursor, GatewayId, Rev, UserId,
        limits::{CHANGES_PAGE_MAX, RESUME_ENTRIES_MAX},
    },
    tasks::lock,
};

/// The bytes of entries that are sent to a gateway that has missed them. If there are more, it gets a `resync`. The same
/// number of bytes of changes is sent; if there are more, it gets a gap, and its clients ask for the changes.
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
        passed: Cursor,
    ) -> bool {
        if self.members.ring().load().owner(channel) != Some(self.me) {
            return true; // The gateway announces its interest to the new owner by itself.
        }
        let has_room = || gateway == self.me || self.peers.has_room(gateway);
        if !has_room() {
            return false;
        }
        match self.missed(channel, passed).await {
            // Other messages have taken the room meanwhile.
            Ok(_) if !has_room() => false,
            Ok(missed) => {
                missed.iter().for_each(|one| self.deliver(gateway, one));
                true
            }
            Err(error) => !error.is_unavailable(),
        }
    }

    /// Reads what a gateway that has passed this position has missed: the entries first, then the changes.
    async fn missed(
        &self,
        channel: ConversationId,
        Cursor(after, rev): Cursor,
    ) -> Result<Vec<Delivered>, Error> {
        let limit = usize::try_from(RESUME_ENTRIES_MAX).unwrap_or(usize::MAX);
        let missed = CatchUp { after, limit };
        let asked = self
            .here
            .ask_owner(channel, UserId::gateway(), missed.into());
        let page = output::<CatchUp>(asked.await)?;
        let (head, newest_rev, is_whole) = (page.head, page.rev, page.reaches_head(after));
        let too_many = head - after.min(head) > RESUME_ENTRIES_MAX;
        let entries = missed_entries(channel, page).into_iter();
        let mut missed: Vec<_> = entries.map(Delivered::Publication).collect();
        if too_many || !is_whole || encoded_bytes(&missed) > CATCH_UP_BYTES_MAX {
            missed = vec![Delivered::Resync { channel, head }];
        }
        if newest_rev > rev {
            let changes = self.missed_changes(channel, rev, newest_rev).await?;
            missed.extend(changes.into_iter().map(Delivered::Publication));
        }
        Ok(missed)
    }

    /// Reads the changes after a rev, up to `newest` at least. If they are too many, it returns a gap.
    async fn missed_changes(
        &self,
        channel: ConversationId,
        mut after: Rev,
        mut newest: Rev,
    ) -> Result<Vec<Publication>, Error> {
        let (mut all, mut bytes) = (Vec::new(), 0);
        let limit = CHANGES_PAGE_MAX;
        while after < newest {
            let ask = CatchUpChanges { after, limit }.into();
            let asked = self.here.ask_owner(channel, UserId::gateway(), ask).await;
            let changes = output::<CatchUpChanges>(asked)?;
            newest = newest.max(changes.rev);
            if changes.reset || changes.rev <= after {
                return Ok(vec![missed_changes(channel, (newest, gap(newest)))]);
            }
            after = changes.rev;
            let changes = missed_changes(channel, missed(changes));
            bytes += encode(&Delivered::Publication(changes.clone())).len();
            all.push(changes);
            if bytes > CATCH_UP_BYTES_MAX {
                return Ok(vec![missed_changes(channel, (newest, gap(newest)))]);
            }
        }
        Ok(all)
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
