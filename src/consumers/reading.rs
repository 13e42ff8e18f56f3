//! Reads what a consumer delivers next, from the owner's memory or one page of the store.

use std::sync::Arc;

use crate::{
    chat::{CatchUp, Conversations, Error, Following, Work},
    model::{Change, Cursor, Entry, EntryState, Millis, UserId},
    mutation::{Mutation, broken},
};

/// Changes that are read at once. Each may have a whole message.
const CHANGES_AT_ONCE: usize = 32;

/// Something that happened in a conversation.
#[derive(Debug, Clone)]
pub(super) enum Happened {
    /// An entry, with its state if it changed: content is delivered as it is now.
    Entry(Arc<Entry>, Option<Arc<EntryState>>),
    Change(Arc<Change>),
}

/// One thing that happened, and the offset after it.
#[derive(Debug, Clone)]
pub(super) struct Next {
    pub(super) happened: Happened,
    pub(super) upto: Cursor,
    pub(super) at: Millis,
}

/// Reads at most `limit` things that happened in a conversation after its offset, in their order: rule [order]. All entries
/// up to the heads come before the changes up to the heads, so a change comes after its entries.
///
/// # Errors
/// The owner was lost, or the store did not answer. Nothing was delivered, and it may be tried again.
pub(super) async fn read(
    conversations: &Conversations,
    following: &Following,
    work: Work,
    limit: usize,
) -> Result<Vec<Next>, Error> {
    let Work { offset, heads } = work;
    let id = following.conversation;
    let mut found = Vec::new();
    let mut reached = offset;
    if offset.0 < heads.0 && !(broken(Mutation::ConsumerOrder) && offset.1 < heads.1) {
        let catch_up = CatchUp {
            after: offset.0,
            limit,
        };
        let page = conversations.ask(id, UserId::gateway(), catch_up).await?;
        let mut states = page.states.into_iter().peekable();
        for entry in page.entries {
            if entry.seq > heads.0 || found.len() == limit {
                break;
            }
            if entry.seq != reached.0 + 1 {
                return Err(Error::DAMAGED);
            }
            while states.next_if(|(seq, _)| *seq < entry.seq).is_some() {}
            let state = states.next_if(|(seq, _)| *seq == entry.seq);
            reached.0 = entry.seq;
            found.push(Next {
                upto: reached,
                at: entry.at,
                happened: Happened::Entry(entry, state.map(|(_, state)| state)),
            });
        }
    }
    let room = limit - found.len();
    let are_entries_read = reached.0 >= heads.0 || broken(Mutation::ConsumerOrder);
    if are_entries_read && offset.1 < heads.1 && room > 0 {
        let to = heads.1.min(offset.1 + room.min(CHANGES_AT_ONCE) as u64);
        for change in conversations.changes_between(id, offset.1 + 1, to).await? {
            reached.1 = change.rev;
            found.push(Next {
                upto: reached,
                at: change.at,
                happened: Happened::Change(change),
            });
        }
    }
    Ok(found)
}
