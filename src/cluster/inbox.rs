//! One page of a user's inbox: what the home knows, and of channels what their owners say.

use futures_util::{StreamExt, stream};

use super::router::{HEADS_AT_ONCE, Router};
use crate::{
    chat::{Error, Head, Operation, Outcome},
    model::{ConversationId, Kind, UserId},
    protocol::InboxItem,
    store::InboxRow,
};

/// One page of an inbox, newest first.
pub struct Inbox {
    pub items: Vec<InboxItem>,
    /// Where the next page begins.
    pub next: Option<String>,
}

impl Router {
    /// One page of the inbox, newest first, channels merged in.
    ///
    /// # Errors
    /// `Invalid` when `before` is not a `next` of an earlier page; `Unavailable` when the store or an owner cannot
    /// be reached.
    pub async fn inbox(
        &self,
        user: &UserId,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Inbox, Error> {
        let before = before.map(parse_position).transpose()?;
        let rows = self.inbox_rows(user).await?;
        let items: Vec<Result<Option<InboxItem>, Error>> = stream::iter(rows)
            .map(|row| self.item(user, row))
            .buffered(HEADS_AT_ONCE)
            .collect()
            .await;
        let mut items: Vec<InboxItem> = items
            .into_iter()
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?;
        items.sort_unstable_by_key(|item| std::cmp::Reverse(position(item)));
        if let Some(before) = before {
            items.retain(|item| position(item) < before);
        }
        let next = (items.len() > limit)
            .then(|| items.get(limit.saturating_sub(1)).map(format_position))
            .flatten();
        items.truncate(limit);
        Ok(Inbox { items, next })
    }

    async fn item(&self, user: &UserId, row: InboxRow) -> Result<Option<InboxItem>, Error> {
        let Some(face) = row.face else {
            return Ok(None);
        };
        let conversation = row.conversation;
        let (name, last) = match face.kind {
            Kind::Dm | Kind::Group => (face.name, face.last),
            Kind::Channel => match self.ask(conversation, user.clone(), Operation::Head).await {
                Ok(Outcome::Head(Head { details, last, .. })) => (details.name, last),
                // Left at this moment, or removed.
                Ok(_) | Err(Error::UnknownConversation | Error::Forbidden(_)) => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        let last_seq = last.as_ref().map_or(0, |l| l.seq);
        let read_seq = row.read_seq.max(face.joined_seq);
        Ok(Some(InboxItem {
            conversation,
            kind: face.kind,
            name,
            last_seq,
            rev: 0,
            last_message: last,
            read_seq,
            unread: last_seq.saturating_sub(read_seq),
            joined_seq: face.joined_seq,
        }))
    }
}

/// An inbox is ordered by the time of its newest entries, for people; the id makes it a total order.
type Position = (crate::model::Millis, ConversationId);

fn position(item: &InboxItem) -> Position {
    (
        item.last_message.as_ref().map_or(0, |last| last.at),
        item.conversation,
    )
}

fn format_position(item: &InboxItem) -> String {
    let (at, id) = position(item);
    format!("{at}:{id}")
}

fn parse_position(text: &str) -> Result<Position, Error> {
    text.split_once(':')
        .and_then(|(at, id)| Some((at.parse().ok()?, id.parse().ok()?)))
        .ok_or_else(|| Error::Invalid("before is not the next of an earlier page".into()))
}
