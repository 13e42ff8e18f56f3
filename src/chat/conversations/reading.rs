//! Reads from the store for an owner, but outside its task, so that a slow read delays no other operation of the
//! conversation.

use tokio::time::Instant;

use super::Conversations;
use crate::{
    chat::{
        conversation::OwnerReply,
        error::Error,
        lease::Ownership,
        operation::{Listed, LogRange, Outcome, Page, ParticipantsPage, SendAck},
    },
    model::{
        ConversationId, Kind, UserId,
        limits::{PAGE_ITEMS_MAX, SCAN_ROWS_MAX},
    },
    store::ParticipantRow,
};

impl Conversations {
    /// Turns an owner's reply into the outcome. `asked` is the range and the limit of the request.
    pub(super) async fn read(
        &self,
        conversation: ConversationId,
        ownership: &Ownership,
        asked: (LogRange, usize),
        reply: OwnerReply,
    ) -> Result<Outcome, Error> {
        let history = &self.shared.history;
        let outcome = match reply {
            OwnerReply::Ready(outcome) => return Ok(outcome),
            OwnerReply::ReadLog { from, to, head } => {
                let entries = history.read(conversation, (from, to), asked).await?;
                Outcome::History(Page {
                    entries,
                    head,
                    rev: 0,
                    states: Vec::new(),
                    mine: Vec::new(),
                })
            }
            OwnerReply::ReadSent { seq } => {
                let entries = history.read(conversation, (seq, seq), asked).await?;
                let entry = entries.first().ok_or(Error::Closed)?;
                Outcome::Sent(SendAck::of(entry, true))
            }
            OwnerReply::ReadParticipants {
                actor,
                after,
                limit,
            } => {
                let page = self.read_participants(conversation, &actor, after, limit);
                Outcome::Participants(page.await?)
            }
        };
        // A deposed owner answers nothing, so the result counts only if the lease still holds.
        if ownership.holds(Instant::now()) {
            Ok(outcome)
        } else {
            Err(Error::Closed)
        }
    }

    /// Reads a page of a channel's participants. (Those of groups and dms are in their owner's memory.) It skips the rows
    /// of former participants, and looks at no more than [`SCAN_ROWS_MAX`] rows.
    async fn read_participants(
        &self,
        conversation: ConversationId,
        actor: &UserId,
        mut after: Option<UserId>,
        limit: usize,
    ) -> Result<ParticipantsPage, Error> {
        let store = &self.shared.environment.store;
        let mut items = Vec::new();
        let mut left = SCAN_ROWS_MAX;
        let mut rows = limit + 1;
        loop {
            rows = rows.min(left);
            let page = store
                .participants(conversation, Kind::Channel, after.as_ref(), rows)
                .await?;
            let (found, full) = (page.len(), page.len() == rows);
            for (i, ParticipantRow { participant, .. }) in page.into_iter().enumerate() {
                if participant.is_in() {
                    items.push(Listed::of(&participant, participant.user == *actor));
                }
                after = Some(participant.user);
                if items.len() == limit {
                    let next = after.filter(|_| full || i + 1 < found);
                    return Ok(ParticipantsPage { items, next });
                }
            }
            left -= found;
            if !full || left == 0 {
                let next = after.filter(|_| full);
                return Ok(ParticipantsPage { items, next });
            }
            rows = PAGE_ITEMS_MAX;
        }
    }
}
