//! Catching up with missed entries. Rule [register]: a session is registered before the entries it missed are read. So
//! each entry is read here, delivered as an event, or both.

use std::{collections::HashMap, sync::Arc};

use super::{Gateway, pages::encoded_bytes, requests};
use crate::{
    chat::{self, CatchUp, GetHead, GetHistory, LogRange, Page},
    cluster::InboxRef,
    fanout::{Frame, Subscriber},
    model::{
        ConversationId, Cursor, Entry, Kind, Seq, Topic,
        limits::{
            CURSORS_MAX, PAGE_ENTRIES_MAX, RESUME_BYTES_MAX, RESUME_ENTRIES_MAX,
            RESUME_ENTRIES_TOTAL_MAX, UNKNOWN_CURSORS_MAX,
        },
    },
    protocol::{Answer, ConversationChange, ConversationEvent, Event, Message, Okay, Subscribe},
};

/// Subscribes a session to the channels of its user.
pub(super) async fn follow_channels(
    gateway: &Gateway,
    session: &Arc<Subscriber>,
    places: &[InboxRef],
) {
    let channels = places.iter().filter(|place| place.kind == Kind::Channel);
    let channels: Vec<ConversationId> = channels.map(|place| place.conversation).collect();
    gateway.router.follow(session, &channels).await;
}

/// The reader of the entries after each cursor. It reads one conversation at a time, page by page, so that a slow
/// client never causes more than a page to be kept.
pub(super) struct Missed<'a> {
    gateway: &'a Gateway,
    session: &'a Subscriber,
    cursors: std::vec::IntoIter<(ConversationId, Cursor)>,
    places: HashMap<ConversationId, InboxRef>,
    /// The conversation that is being read.
    replay: Option<Replay>,
    /// Entries of all conversations that may still be pushed.
    left: u64,
    unknown: usize,
}

impl<'a> Missed<'a> {
    pub(super) fn new(
        gateway: &'a Gateway,
        session: &'a Subscriber,
        cursors: &HashMap<ConversationId, Cursor>,
        places: Vec<InboxRef>,
    ) -> Self {
        let cursors: Vec<_> = cursors
            .iter()
            .map(|(id, cursor)| (*id, *cursor))
            .take(CURSORS_MAX)
            .collect();
        let places = places.into_iter();
        let places = places.map(|place| (place.conversation, place)).collect();
        let cursors = cursors.into_iter();
        Self {
            gateway,
            session,
            cursors,
            places,
            replay: None,
            left: RESUME_ENTRIES_TOTAL_MAX,
            unknown: 0,
        }
    }

    /// Returns the next page of missed entries, in order within a conversation. `None` at the end.
    pub(super) async fn next(&mut self) -> Option<(ConversationId, Missing)> {
        loop {
            let mut replay = match self.replay.take() {
                Some(replay) => replay,
                None => {
                    let (conversation, Cursor(after, _)) = self.cursors.next()?;
                    match self.begin(conversation, after).await {
                        Ok(Some(replay)) => replay,
                        Ok(None) => continue,
                        Err(event) => return Some((conversation, Missing::Other(event))),
                    }
                }
            };
            let conversation = replay.conversation;
            let page = replay.next(self.gateway, self.session, self.left).await;
            match page {
                Ok(entries) if entries.is_empty() => {}
                Ok(entries) => {
                    self.left -= entries.len() as u64;
                    self.replay = Some(replay);
                    return Some((conversation, Missing::Entries(entries)));
                }
                Err(not_pushed) => {
                    let event = replay.given_up(&not_pushed);
                    return Some((conversation, Missing::Other(event)));
                }
            }
        }
    }

    /// Starts with the next conversation. `None` if the client missed nothing.
    async fn begin(
        &mut self,
        conversation: ConversationId,
        after: Seq,
    ) -> Result<Option<Replay>, Event> {
        let place = self.places.get(&conversation);
        let last = place.and_then(|place| place.last_seq);
        if place.is_none() {
            // The conversation is not in the inbox: an empty dm, one that the user left, or an id the client invented.
            self.unknown += 1;
            if self.unknown > UNKNOWN_CURSORS_MAX {
                return Ok(None);
            }
        }
        // The user's home says which channels the user is in, so the owner need not query the store.
        let reader = match place {
            Some(place) if place.kind == Kind::Channel => Reader::Gateway,
            _ => Reader::User,
        };
        let mut replay = Replay {
            conversation,
            reader,
            after,
            head: last.unwrap_or(after),
            is_head_current: last.is_none(),
            pushed: 0,
            bytes: 0,
        };
        // The home knows the newest entry of each dm and group, so most cursors need no further request.
        if last.is_none() {
            let head = replay.ask_head(self.gateway, self.session);
            replay.head = match head.await {
                Ok(head) => head,
                Err(not_pushed) => return Err(replay.given_up(&not_pushed)),
            };
        }
        Ok((replay.head > after).then_some(replay))
    }
}

/// The data that a client misses of one conversation.
pub(super) enum Missing {
    /// The next page of entries.
    Entries(Vec<Arc<Entry>>),
    /// The event instead of entries: they are too many, or the user may no longer read them.
    Other(Event),
}

/// The party that checks whether the user may read: the owner of the conversation, or this gateway.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    User,
    Gateway,
}

/// A conversation whose missed entries are being pushed.
struct Replay {
    conversation: ConversationId,
    reader: Reader,
    /// The seq up to which the client has everything.
    after: Seq,
    /// The seq at which to stop.
    head: Seq,
    /// Whether `head` is the owner's, read after the session was registered, so that later entries arrive as events. A
    /// head from the home may be older; then the first page brings the owner's.
    is_head_current: bool,
    pushed: u64,
    /// The weight of the entries pushed, in bytes.
    bytes: usize,
}

impl Replay {
    /// Reads the next page, which is empty at the end. The caller charges it to the user.
    ///
    /// # Errors
    /// [`NotPushed::TooMuch`] if more entries are missing than may be pushed, of which `left` is one limit. Nothing is
    /// read then.
    async fn next(
        &mut self,
        gateway: &Gateway,
        session: &Subscriber,
        left: u64,
    ) -> Result<Vec<Arc<Entry>>, NotPushed> {
        let lacks = self.head.saturating_sub(self.after);
        if lacks == 0 {
            return Ok(Vec::new());
        }
        let may_push = left.min(RESUME_ENTRIES_MAX - self.pushed);
        if lacks > may_push || self.bytes >= RESUME_BYTES_MAX {
            return Err(NotPushed::TooMuch);
        }
        let limit = if self.is_head_current {
            lacks
        } else {
            may_push
        };
        let limit = usize::try_from(limit).map_or(PAGE_ENTRIES_MAX, |n| n.min(PAGE_ENTRIES_MAX));
        let mut page = self.read(gateway, session, self.after, limit).await?;
        if !self.is_head_current {
            (self.head, self.is_head_current) = (page.head, true);
        }
        keep_first(&mut page.entries, gateway.limits.page_bytes());
        match page.entries.last() {
            Some(last) => self.after = last.seq,
            None if self.head > self.after => return Err(NotPushed::TooMuch),
            None => {}
        }
        self.pushed += page.entries.len() as u64;
        self.bytes += page.entries.iter().map(|e| e.weight()).sum::<usize>();
        Ok(page.entries)
    }

    /// Asks the owner for the seq of its newest entry, without reading entries.
    async fn ask_head(&self, gateway: &Gateway, session: &Subscriber) -> Result<Seq, NotPushed> {
        if self.reader == Reader::Gateway {
            return Ok(self.read(gateway, session, Seq::MAX, 1).await?.head);
        }
        let user = session.user.clone();
        let asked = gateway.router.ask(self.conversation, user, GetHead);
        Ok(asked.await?.head)
    }

    async fn read(
        &self,
        gateway: &Gateway,
        session: &Subscriber,
        after: Seq,
        limit: usize,
    ) -> Result<Page, NotPushed> {
        let (router, user) = (&gateway.router, session.user.clone());
        match self.reader {
            Reader::User => {
                let range = LogRange::After(after);
                let asked = router.ask(self.conversation, user, GetHistory { range, limit });
                Ok(asked.await?)
            }
            Reader::Gateway => {
                let asked = router.ask(self.conversation, user, CatchUp { after, limit });
                let page = asked.await?;
                let topic = Topic::Channel(self.conversation);
                // The user was removed since. The page may contain entries from after the removal.
                if !gateway.hub.is_subscribed(&topic, session.session) {
                    return Err(chat::Error::UnknownConversation.into());
                }
                Ok(page)
            }
        }
    }

    /// Returns the event that replaces the remaining entries.
    fn given_up(&self, not_pushed: &NotPushed) -> Event {
        let (conversation, head) = (self.conversation, self.head);
        match not_pushed {
            NotPushed::Failed(chat::Error::UnknownConversation | chat::Error::Forbidden(_)) => {
                Event::Conversation(ConversationEvent {
                    conversation,
                    change: ConversationChange::Removed,
                    details: None,
                })
            }
            // Too many entries are missing, or their number is unknown: the client must request them.
            NotPushed::TooMuch | NotPushed::Failed(_) => Event::Resync { conversation, head },
        }
    }
}

/// The reason why missed entries are not pushed.
enum NotPushed {
    TooMuch,
    Failed(chat::Error),
}

impl From<chat::Error> for NotPushed {
    fn from(error: chat::Error) -> Self {
        Self::Failed(error)
    }
}

/// Keeps the first entries of a page, as many as may be in memory at once, but at least one. A page from the owner's
/// memory may weigh more than one read from the store.
fn keep_first(entries: &mut Vec<Arc<Entry>>, bytes_max: usize) {
    let mut bytes = 0;
    let fits = |entry: &Arc<Entry>| {
        bytes += entry.weight();
        bytes <= bytes_max
    };
    let fitting = entries.iter().map(fits).take_while(|fits| *fits).count();
    entries.truncate(fitting.max(1));
}

/// Answers `subscribe`. The entries after `after` are queued as events before the reply, which contains the head. Also
/// returns the number of bytes read.
pub(super) async fn subscribe(
    gateway: &Gateway,
    session: &Arc<Subscriber>,
    request: &Subscribe,
) -> (Answer, usize) {
    let Subscribe {
        conversation,
        after,
        rev: _,
    } = *request;
    let head = match gateway.router.subscribe(session, conversation).await {
        Ok(head) => head.head,
        Err(error) => return (requests::refused(&error), 0),
    };
    let mut bytes = 0;
    if let Some(after) = after {
        let mut replay = Replay {
            conversation,
            reader: Reader::User,
            after,
            head,
            is_head_current: true,
            pushed: 0,
            bytes: 0,
        };
        let pushed = match push_after(gateway, session, &mut replay, &mut bytes).await {
            Ok(entries) => entries,
            // The channel became private or is gone, so the refused session must not stay subscribed.
            Err(error) => {
                let topic = Topic::Channel(conversation);
                let router = &gateway.router;
                router.unsubscribe(session, std::slice::from_ref(&topic));
                return (requests::refused(&error), bytes);
            }
        };
        for event in pushed {
            let frame = Frame::encode(session.outbox.codec(), &event);
            session.outbox.push_reply(frame);
        }
    }
    let answer = Answer::Ok(Okay {
        head: Some(head),
        ..Okay::default()
    });
    (answer, bytes)
}

/// Returns the events for a new subscriber: the entries that follow, or a `resync` if they exceed a page or cannot be
/// read now. Adds the bytes read to `bytes`.
async fn push_after(
    gateway: &Gateway,
    session: &Subscriber,
    replay: &mut Replay,
    bytes: &mut usize,
) -> Result<Vec<Event>, chat::Error> {
    let mut events = Vec::new();
    loop {
        match replay.next(gateway, session, RESUME_ENTRIES_MAX).await {
            Ok(entries) if entries.is_empty() => return Ok(events),
            Ok(entries) => {
                *bytes += entries.iter().map(|e| encoded_bytes(e)).sum::<usize>();
                if *bytes > gateway.limits.page_bytes() {
                    return Ok(vec![replay.given_up(&NotPushed::TooMuch)]);
                }
                let entries = entries.iter();
                events.extend(entries.map(|entry| message(replay.conversation, entry)));
            }
            Err(NotPushed::Failed(error)) if !error.is_unavailable() => return Err(error),
            Err(_) => return Ok(vec![replay.given_up(&NotPushed::TooMuch)]),
        }
    }
}

pub(super) fn message(conversation: ConversationId, entry: &Entry) -> Event {
    Event::Message(Box::new(Message::of(
        conversation,
        entry.clone(),
        None,
        None,
    )))
}

#[cfg(test)]
mod tests;
