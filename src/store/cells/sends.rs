//! The rows that find a client id's places in the log.

use super::{
    Cells,
    keys::{Key, Range, SENDS},
    today,
    values::take_u64,
};
use crate::{
    model::{ClientId, ConversationId, UserId},
    store::{Result, SendRow},
};

/// Days for which a client id is kept.
pub(super) const SENDS_DAYS: u32 = 7;

pub(super) async fn read(
    cells: &impl Cells,
    conversation: ConversationId,
    sender: &UserId,
    client_id: ClientId,
) -> Result<Vec<SendRow>> {
    let mut found = Vec::new();
    let today = today();
    for day in today.saturating_sub(SENDS_DAYS)..=today {
        let key = Key::new(SENDS)
            .u32(day)
            .conversation(conversation)
            .user(sender)
            .bytes(client_id.0.as_bytes());
        let epoch_at = key.0.len();
        for cell in cells.scan(Range::prefix(&key), usize::MAX, false).await? {
            found.push(SendRow {
                epoch: take_u64("sends", &cell.key, epoch_at)?,
                seq: take_u64("sends", &cell.value, 0)?,
            });
        }
    }
    Ok(found)
}
