//! What a client missed. Rule [register]: its session is registered first, and only then is read what it
//! lacks; so an entry is either read here or delivered as an event, or both, never neither.

use std::{collections::HashMap, sync::Arc};

use super::{Gateway, requests};
use crate::{
    chat::{self, LogRange, Operation, Outcome},
    fanout::{Encoded, Subscriber},
    model::{
        ConversationId, Cursor, Entry, Kind, Seq, UserId,
        limits::{CURSORS_MAX, RESUME_ENTRIES_MAX, RESUME_ENTRIES_TOTAL_MAX},
    },
    protocol::{Answer, ConversationChange, ConversationEvent, Event, Message, Okay, Subscribe},
    store::InboxRow,
};

/// Subscribes a session to the channels its user is in.
pub(super) fn follow_channels(gateway: &Gateway, session: &Arc<Subscriber>, rows: &[InboxRow]) {
    for row in rows {
        if row.face.as_ref().is_some_and(|f| f.kind == Kind::Channel) {
            gateway.router.follow(session, row.conversation);
        }
    }
}

/// The entries after each cursor, one conversation at a time.
pub(super) struct Missed<'a> {
    gateway: &'a Gateway,
    user: UserId,
    cursors: std::vec::IntoIter<(ConversationId, Cursor)>,
    rows: HashMap<ConversationId, InboxRow>,
    left: u64,
}

impl<'a> Missed<'a> {
    pub(super) fn new(
        gateway: &'a Gateway,
        user: UserId,
        cursors: HashMap<ConversationId, Cursor>,
        rows: Vec<InboxRow>,
    ) -> Self {
        let cursors: Vec<_> = cursors.into_iter().take(CURSORS_MAX).collect();
        let rows = rows
            .into_iter()
            .map(|row| (row.conversation, row))
            .collect();
        let cursors = cursors.into_iter();
        Self {
            gateway,
            user,
            cursors,
            rows,
            left: RESUME_ENTRIES_TOTAL_MAX,
        }
    }

    /// The events for the next conversation in which something was missed; `None` at the end.
    pub(super) async fn next(&mut self) -> Option<Vec<Event>> {
        loop {
            let (conversation, Cursor(seq, _)) = self.cursors.next()?;
            let events = self.events(conversation, seq).await;
            if !events.is_empty() {
                return Some(events);
            }
        }
    }

    async fn events(&mut self, conversation: ConversationId, after: Seq) -> Vec<Event> {
        // The inbox, read through the user's home, knows the newest entry of every dm and group: most
        // cursors are up to date, and cost nothing more.
        let last = self
            .rows
            .get(&conversation)
            .and_then(|r| r.face.as_ref()?.last.as_ref());
        if last.is_some_and(|last| last.seq <= after) {
            return Vec::new();
        }
        let limit = RESUME_ENTRIES_MAX.min(self.left);
        match read_after(self.gateway, &self.user, conversation, after, limit).await {
            Ok(Missing::Nothing) => Vec::new(),
            Ok(Missing::Entries(entries)) => {
                self.left -= entries.len() as u64;
                let events = entries.iter().map(|e| message(conversation, e));
                events.collect()
            }
            Ok(Missing::TooMuch { head }) => vec![Event::Resync { conversation, head }],
            Err(chat::Error::UnknownConversation | chat::Error::Forbidden(_)) => {
                let change = ConversationChange::Removed;
                vec![Event::Conversation(ConversationEvent {
                    conversation,
                    change,
                    details: None,
                })]
            }
            // Not known what is missing: the client must ask again.
            Err(_) => vec![Event::Resync {
                conversation,
                head: last.map_or(after, |l| l.seq),
            }],
        }
    }
}

enum Missing {
    Nothing,
    Entries(Vec<Arc<Entry>>),
    TooMuch { head: Seq },
}

async fn read_after(
    gateway: &Gateway,
    user: &UserId,
    conversation: ConversationId,
    after: Seq,
    limit: u64,
) -> Result<Missing, chat::Error> {
    let limit_read = usize::try_from(limit).unwrap_or_default().max(1);
    let operation = Operation::History {
        range: LogRange::After(after),
        limit: limit_read,
    };
    match gateway
        .router
        .ask(conversation, user.clone(), operation)
        .await?
    {
        Outcome::History(page) if page.head <= after => Ok(Missing::Nothing),
        Outcome::History(page) if page.head - after > limit => {
            Ok(Missing::TooMuch { head: page.head })
        }
        Outcome::History(page) => Ok(Missing::Entries(page.entries)),
        _ => Ok(Missing::Nothing),
    }
}

/// Answers `subscribe`: what came after `after` is queued as events before the reply says the head.
pub(super) async fn subscribe(
    gateway: &Gateway,
    session: &Arc<Subscriber>,
    request: &Subscribe,
) -> Answer {
    let Subscribe {
        conversation,
        after,
    } = *request;
    let head = match gateway.router.subscribe(session, conversation).await {
        Ok(head) => head.head,
        Err(error) => return requests::refused(&error),
    };
    if let Some(after) = after {
        let missing = read_after(
            gateway,
            &session.user,
            conversation,
            after,
            RESUME_ENTRIES_MAX,
        )
        .await;
        let events = match missing {
            Ok(Missing::Nothing) => Vec::new(),
            Ok(Missing::Entries(entries)) => {
                entries.iter().map(|e| message(conversation, e)).collect()
            }
            Ok(Missing::TooMuch { head }) => vec![Event::Resync { conversation, head }],
            Err(error) => return requests::refused(&error),
        };
        for event in events {
            session
                .outbox
                .push(Encoded::new(event).frame(session.outbox.codec()));
        }
    }
    Answer::Ok(Okay {
        seq: None,
        head: Some(head),
    })
}

fn message(conversation: ConversationId, entry: &Arc<Entry>) -> Event {
    Event::Message(Box::new(Message::of(conversation, entry.as_ref().clone())))
}
