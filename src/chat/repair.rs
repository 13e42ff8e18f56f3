//! "Crash repair" of docs/storage.md: an owner that died may have committed entries whose inbox rows were
//! not written yet. Idempotent, thanks to seq timestamps.

use std::sync::Arc;

use super::{Conversations, Environment, Error, LogRange, Operation, Outcome, Page};
use crate::{
    chat::publish::{Audience, Handed, Members, Publication},
    model::{ConversationId, Kind, Seq, UserId, limits::PAGE_ENTRIES_MAX},
    store::{self, Store},
};

/// Queues the inbox rows of one conversation again, from the lowest entry that any of its participants' rows lacks.
pub(super) async fn conversation(
    conversations: &Conversations,
    environment: &Environment,
    conversation: ConversationId,
) -> store::Result<()> {
    let store = &*environment.store;
    // Whatever the answer: asking loads the conversation, and thereby settles it and applies what is missing.
    let asked = conversations.ask(conversation, UserId::gateway(), Operation::Details);
    if let Err(error) = asked.await
        && error.is_unavailable()
    {
        return Err(unavailable(&error));
    }
    let Some((participants, kind, name)) = participants(store, conversation).await? else {
        return Ok(());
    };
    let Some(asker) = participants.first().map(|(user, ..)| user.clone()) else {
        return Ok(());
    };
    // What senders have read is a write of its own, and for a channel the only one: look back over the last page for
    // that, and further if a row lacks more.
    let mut lowest = Seq::MAX;
    if kind != Kind::Channel {
        for (user, _) in &participants {
            let rows = store.inbox(user).await?;
            let row = rows.into_iter().find(|r| r.conversation == conversation);
            let last = row
                .and_then(|r| r.face)
                .and_then(|f| f.last)
                .map_or(0, |l| l.seq);
            lowest = lowest.min(last);
        }
    }
    let members = (kind != Kind::Channel).then(|| {
        Arc::new(Members {
            kind,
            name,
            users: participants,
        })
    });
    let mut range = LogRange::Newest;
    loop {
        let operation = Operation::History {
            range,
            limit: PAGE_ENTRIES_MAX,
        };
        let page = match conversations
            .ask(conversation, asker.clone(), operation)
            .await
        {
            Ok(Outcome::History(page)) => page,
            Ok(_) | Err(Error::UnknownConversation | Error::Forbidden(_)) => return Ok(()),
            Err(error) => return Err(unavailable(&error)),
        };
        let Page { entries, head } = page;
        let first = entries.first().map_or(0, |entry| entry.seq);
        // A page of large entries has fewer of them.
        let page = head.saturating_sub(PAGE_ENTRIES_MAX as Seq);
        if range == LogRange::Newest && lowest.min(page).saturating_add(1) < first {
            range = LogRange::After(lowest.min(page));
            continue;
        }
        // Published again too: whoever came since has read an inbox without it. The newest one in any case: the row that
        // the dead owner wrote may have landed after that. Receivers drop by seq what they have, and read what they lack.
        let published: Vec<_> = entries
            .iter()
            .map(|entry| {
                let unseen = |_: &_| entry.seq > lowest || entry.seq == head;
                let unseen = members.as_ref().filter(unseen);
                let publication = unseen.map(|members| Publication::Entry {
                    conversation,
                    entry: entry.clone(),
                    audience: Audience::Members(members.clone()),
                });
                publication.map(|publication| environment.publish.publish(publication))
            })
            .collect();
        for (entry, published) in entries.iter().zip(published) {
            let in_hand = match published {
                Some(Handed::Waiting(delivered)) => Some(delivered.await.map_err(|_| moved())?),
                Some(Handed::Done) | None => None,
            };
            environment
                .inbox
                .queue(conversation, members.clone(), entry);
            drop(in_hand);
        }
        match entries.last() {
            Some(last) if last.seq < head => range = LogRange::After(last.seq),
            _ => return Ok(()),
        }
    }
}

fn moved() -> store::Error {
    unavailable(&Error::Moved)
}

fn unavailable(error: &dyn std::error::Error) -> store::Error {
    store::Error::Unavailable {
        operation: "repair",
        reason: error.to_string(),
    }
}

type Present = Vec<(UserId, Seq)>;

/// Who is in it now, with the seq at which each joined.
async fn participants(
    store: &dyn Store,
    conversation: ConversationId,
) -> store::Result<Option<(Present, Kind, Option<String>)>> {
    let Some(row) = store.conversation(conversation).await? else {
        return Ok(None);
    };
    let mut present = Present::new();
    let mut after: Option<UserId> = None;
    loop {
        const PAGE: usize = 500;
        let page = store
            .participants(conversation, row.details.kind, after.as_ref(), PAGE)
            .await?;
        after = page.last().map(|r| r.participant.user.clone());
        let full = page.len() == PAGE;
        let inside = page
            .into_iter()
            .map(|r| r.participant)
            .filter(|p| p.is_in());
        present.extend(inside.map(|p| (p.user, p.joined_seq)));
        // Of a channel, one who may read it is enough.
        if !full || (row.details.kind == Kind::Channel && !present.is_empty()) {
            return Ok(Some((present, row.details.kind, row.details.name)));
        }
    }
}
