//! Pages of inboxes: the rows that the user's home knows, with the newest entries of channels, which this gateway has
//! delivered or asks their owners for.

use std::{cmp::Reverse, sync::Arc};

use futures_util::{StreamExt, stream};

use super::users::Users;
use crate::{
    chat::{Error, GetHead, Head},
    cluster::{sockets::channel_progress::Heads, wire::question::Position},
    model::{ConversationId, Cursor, Kind, UserId, limits::HEADS_AT_ONCE},
    protocol::{InboxItem, Switch},
    store::InboxRow,
};

/// One page of an inbox, newest entry first.
pub struct Inbox {
    pub items: Vec<InboxItem>,
    /// The position at which the next page begins.
    pub next: Option<String>,
}

impl Users {
    /// Reads one page of a user's inbox, including channels.
    ///
    /// # Errors
    /// `Invalid` if `before` is not the `next` of an earlier page; `Unavailable` if the store or an owner cannot be
    /// reached.
    pub async fn inbox(
        &self,
        user: &UserId,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Inbox, Error> {
        let before = before.map(parse_position).transpose()?;
        let order = self.ask_order(user, before, limit).await?;
        let heads = self.heads(user, order.channels, before, limit).await?;
        let (page, next) = choose(order.newest, &heads, before, limit);
        let chosen = page.into_iter().map(|(_, conversation)| conversation);
        let mut chosen: Vec<_> = chosen.collect();
        chosen.sort_unstable();
        let rows = self.ask_rows(user, Some(chosen.clone())).await?;
        let rows = rows
            .iter()
            .filter(|row| chosen.binary_search(&row.conversation).is_ok());
        let mut items: Vec<_> = rows.filter_map(|row| item(row, &heads)).collect();
        items.sort_unstable_by_key(|item| Reverse(position(item)));
        Ok(Inbox { items, next })
    }

    /// Returns the heads of the channels that may be on a page. Those that come here without a gap are known. The owners of all
    /// others are asked.
    async fn heads(
        &self,
        user: &UserId,
        channels: Vec<ConversationId>,
        before: Option<Position>,
        limit: usize,
    ) -> Result<Heads, Error> {
        // A gateway that was paused or cut off may have missed anything.
        let (mut known, unknown) = if self.router.may_serve() {
            self.here().sockets.heads(channels, before, limit)
        } else {
            (Heads::default(), channels)
        };
        let asked: Vec<_> = stream::iter(unknown)
            .map(async |channel| (channel, self.ask_head(user, channel).await))
            .buffer_unordered(HEADS_AT_ONCE)
            .collect()
            .await;
        for (channel, head) in asked {
            if let Some(head) = head? {
                known.insert(channel, head);
            }
        }
        Ok(known)
    }

    /// Asks the owner of a channel for its head. `None` if the user may not read it any more.
    async fn ask_head(
        &self,
        user: &UserId,
        channel: ConversationId,
    ) -> Result<Option<Arc<Head>>, Error> {
        let subscription = self.here().sockets.subscription(channel);
        match self.router.ask(channel, user.clone(), GetHead).await {
            Ok(head) => {
                let head = Arc::new(head);
                if let Some(subscription) = subscription {
                    // A gateway without others is the owner, so everything that follows is published here.
                    if self.gateways().others.is_none() {
                        let position = Cursor(head.head, head.rev);
                        self.here()
                            .sockets
                            .confirmed(channel, subscription, position);
                    }
                    self.here().sockets.learned(channel, subscription, &head);
                }
                Ok(Some(head))
            }
            Err(Error::UnknownConversation | Error::Forbidden(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Makes the item of one conversation. `None` if the inbox does not show the conversation.
fn item(row: &InboxRow, heads: &Heads) -> Option<InboxItem> {
    let summary = row.summary.as_ref()?;
    let (name, last, texts, rev, deleted) = match summary.kind {
        Kind::Dm | Kind::Group => {
            let (name, last) = (&summary.name, &summary.last);
            (name, last, summary.texts, row.newest_rev(), &row.deleted.1)
        }
        Kind::Channel => {
            let head = heads.get(&row.conversation)?;
            let (name, last) = (&head.details.name, &head.last);
            (name, last, head.texts, head.rev, &head.deleted)
        }
    };
    let (joined_seq, last_seq) = (summary.joined_seq, last.as_ref().map_or(0, |l| l.seq));
    let settings = Some(row.settings).filter(|settings| !settings.is_unset());
    Some(InboxItem {
        conversation: row.conversation,
        kind: summary.kind,
        name: name.clone(),
        last_seq,
        rev,
        last_message: last.clone(),
        read_seq: row.read_seq.max(joined_seq),
        unread: row.unread(joined_seq, last_seq, texts, &deleted.highest),
        joined_seq,
        settings_version: settings.map(|settings| settings.version),
        muted_until: settings.and_then(|settings| settings.muted_until),
        push: settings.map(|settings| Switch::of(settings.push)),
    })
}

/// Chooses a page: the newest of these dms and groups and of the channels, which are all of the user's. Returns also the
/// position at which the next page begins.
fn choose(
    newest: Vec<Position>,
    heads: &Heads,
    before: Option<Position>,
    limit: usize,
) -> (Vec<Position>, Option<String>) {
    let mut page = newest;
    let channels = heads.iter().map(|(&channel, head)| (head.rank(), channel));
    page.extend(channels.filter(|position| before.is_none_or(|before| *position < before)));
    let is_last = page.len() <= limit;
    if !is_last {
        page.select_nth_unstable_by_key(limit, |position| Reverse(*position));
        page.truncate(limit);
    }
    let last = page.iter().min().filter(|_| !is_last);
    let next = last.map(|(rank, id)| format!("{rank}:{id}"));
    (page, next)
}

fn position(item: &InboxItem) -> Position {
    let last = item.last_message.as_ref();
    (
        last.map_or(0, |last| last.message_id.rank()),
        item.conversation,
    )
}

fn parse_position(text: &str) -> Result<Position, Error> {
    text.split_once(':')
        .and_then(|(rank, id)| Some((rank.parse().ok()?, id.parse().ok()?)))
        .ok_or_else(|| Error::Invalid("before is not the next of an earlier page".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        clock,
        model::{DeletedSeqs, Details, EntryKind, Last, Posting, Rev, Seq},
        store::InboxSummary,
    };

    fn user() -> UserId {
        UserId::new("alice").unwrap()
    }

    fn last(seq: Seq, deleted: bool) -> Last {
        Last {
            seq,
            message_id: clock::message_id(1),
            at: 1,
            sender: user(),
            kind: EntryKind::Text,
            preview: String::new(),
            deleted,
        }
    }

    fn deleted(seqs: &[Seq]) -> DeletedSeqs {
        DeletedSeqs {
            highest: seqs.to_vec(),
            count: seqs.len() as u64,
        }
    }

    /// The row of a user who joined at 2 and has read up to 4, which is the third message.
    fn row(kind: Kind, last: Option<Last>, rev: Rev) -> InboxRow {
        let mut row = InboxRow::empty(ConversationId(uuid::Uuid::nil()));
        row.summary = Some(InboxSummary {
            seq: 9,
            kind,
            name: None,
            joined_seq: 2,
            last,
            changes: 0,
            texts: 7,
        });
        (row.read_seq, row.read_texts, row.rev) = (4, 3, rev);
        row
    }

    fn head(head: Seq, last: Option<Last>) -> Head {
        Head {
            details: Details {
                kind: Kind::Channel,
                name: Some("news".into()),
                created_at: 1,
                created_by: user(),
                posting: Posting::Everyone,
                public: false,
            },
            head,
            last,
            rev: 8,
            texts: 9,
            deleted: deleted(&[5, 11]),
        }
    }

    fn id(number: u128) -> ConversationId {
        ConversationId(uuid::Uuid::from_u128(number))
    }

    /// Groups and channels together are in one order, and each is on one page.
    #[test]
    fn pages_have_everything_once_in_order() {
        let groups: Vec<Position> = (0..20).rev().map(|n| (n / 2 * 10, id(n as u128))).collect();
        let mut heads = Heads::default();
        for n in 0..15 {
            let mut last = last(1, false);
            last.message_id = clock::message_id_at(n / 2 * 13);
            heads.insert(id(100 + n as u128), Arc::new(head(1, Some(last))));
        }
        heads.insert(id(200), Arc::new(head(0, None)));
        for limit in [1, 2, 7, 36, 50] {
            let (mut read, mut before) = (Vec::new(), None);
            loop {
                let newest = groups.iter().copied();
                let newest = newest.filter(|group| before.is_none_or(|before| *group < before));
                let newest = newest.take(limit + 1).collect();
                let (mut page, next) = choose(newest, &heads, before, limit);
                assert!(page.len() <= limit);
                page.sort_unstable_by_key(|position| Reverse(*position));
                read.append(&mut page);
                let Some(next) = next else { break };
                before = Some(parse_position(&next).unwrap());
            }
            assert_eq!(read.len(), 36, "pages of {limit}");
            assert!(read.is_sorted_by(|a, b| a > b), "pages of {limit}");
        }
    }

    /// Of the entries 5 to 9, one is a system entry and two are deleted, of which one is the newest.
    #[test]
    fn unread_are_messages_that_are_not_deleted() {
        let mut row = row(Kind::Group, Some(last(9, true)), 6);
        row.deleted = (6, deleted(&[3, 7, 9]));
        let item = item(&row, &Heads::default()).unwrap();
        assert_eq!((item.unread, item.read_seq, item.last_seq), (2, 4, 9));
        assert_eq!(item.rev, 6);
        assert!(item.last_message.unwrap().deleted);
    }

    #[test]
    fn a_channel_takes_its_newest_state_from_its_head() {
        let row = row(Kind::Channel, None, 0);
        let head = head(12, Some(last(12, false)));
        let mut heads = Heads::default();
        heads.insert(row.conversation, Arc::new(head));
        let shown = item(&row, &heads).unwrap();
        assert_eq!((shown.unread, shown.rev), (9 - 3 - 2, 8));
    }
}
