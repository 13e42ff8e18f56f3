//! What a client missed. Rule [register]: its session is registered first, and only then is read what it
//! lacks; so an entry is either read here or delivered as an event, or both, never neither.

use std::{collections::HashMap, sync::Arc};

use super::{Gateway, pages::encoded_bytes, requests};
use crate::{
    chat::{self, LogRange, Operation, Outcome, Page},
    cluster::InboxPlace,
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

/// Subscribes a session to the channels its user is in.
pub(super) async fn follow_channels(
    gateway: &Gateway,
    session: &Arc<Subscriber>,
    places: &[InboxPlace],
) {
    let channels = places.iter().filter(|place| place.kind == Kind::Channel);
    let channels: Vec<ConversationId> = channels.map(|place| place.conversation).collect();
    gateway.router.follow(session, &channels).await;
}

/// Reads the entries after each cursor: one conversation at a time, and of each one page at a time, so that a client that
/// takes them slowly holds no more than a page.
pub(super) struct Missed<'a> {
    gateway: &'a Gateway,
    session: &'a Subscriber,
    cursors: std::vec::IntoIter<(ConversationId, Cursor)>,
    places: HashMap<ConversationId, InboxPlace>,
    /// The conversation of which more is to be read.
    replay: Option<Replay>,
    /// Entries that may still be pushed, of all conversations.
    left: u64,
    unknown: usize,
}

impl<'a> Missed<'a> {
    pub(super) fn new(
        gateway: &'a Gateway,
        session: &'a Subscriber,
        cursors: &HashMap<ConversationId, Cursor>,
        places: Vec<InboxPlace>,
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

    /// The next page of what was missed, in order within a conversation; `None` at the end.
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
                Err(unread) => {
                    let event = replay.given_up(&unread);
                    return Some((conversation, Missing::Other(event)));
                }
            }
        }
    }

    /// Begins with the next conversation, unless nothing of it was missed.
    async fn begin(
        &mut self,
        conversation: ConversationId,
        after: Seq,
    ) -> Result<Option<Replay>, Event> {
        let place = self.places.get(&conversation);
        let last = place.and_then(|place| place.last_seq);
        if place.is_none() {
            // An empty dm, a conversation the user left, or an id the client invented.
            self.unknown += 1;
            if self.unknown > UNKNOWN_CURSORS_MAX {
                return Ok(None);
            }
        }
        // The user's home says which channels the user is in, so that the owner need not ask the store.
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
        // The home knows the newest entry of every dm and group, so most cursors cost nothing more.
        if last.is_none() {
            let head = replay.ask_head(self.gateway, self.session);
            replay.head = match head.await {
                Ok(head) => head,
                Err(unread) => return Err(replay.given_up(&unread)),
            };
        }
        Ok((replay.head > after).then_some(replay))
    }
}

/// What a client lacks of one conversation.
pub(super) enum Missing {
    /// The next page.
    Entries(Vec<Arc<Entry>>),
    /// Too much to push, or no longer to be seen.
    Other(Event),
}

/// Says who checks that the user may read: the owner, or this gateway.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    User,
    Gateway,
}

/// One conversation whose entries are being pushed.
struct Replay {
    conversation: ConversationId,
    reader: Reader,
    /// The client has everything up to here.
    after: Seq,
    /// Where to stop.
    head: Seq,
    /// The owner named the head after the session was registered, so that what comes later is delivered as an event. A head
    /// that the home named may be an older one; then the first page brings the owner's.
    is_head_current: bool,
    pushed: u64,
    /// Weight of the entries pushed.
    bytes: usize,
}

impl Replay {
    /// The next page, charged to nobody yet; empty at the end.
    ///
    /// # Errors
    /// [`Unread::TooMuch`] if more is missing than may be pushed, `left` entries at most; nothing is read then.
    async fn next(
        &mut self,
        gateway: &Gateway,
        session: &Subscriber,
        left: u64,
    ) -> Result<Vec<Arc<Entry>>, Unread> {
        let lacks = self.head.saturating_sub(self.after);
        if lacks == 0 {
            return Ok(Vec::new());
        }
        let may_push = left.min(RESUME_ENTRIES_MAX - self.pushed);
        if lacks > may_push || self.bytes >= RESUME_BYTES_MAX {
            return Err(Unread::TooMuch);
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
        shorten(&mut page.entries, gateway.limits.page_bytes());
        match page.entries.last() {
            Some(last) => self.after = last.seq,
            None if self.head > self.after => return Err(Unread::TooMuch),
            None => {}
        }
        self.pushed += page.entries.len() as u64;
        self.bytes += page.entries.iter().map(|e| e.weight()).sum::<usize>();
        Ok(page.entries)
    }

    /// Where the owner says the conversation has got to. Reads nothing.
    async fn ask_head(&self, gateway: &Gateway, session: &Subscriber) -> Result<Seq, Unread> {
        if self.reader == Reader::Gateway {
            return Ok(self.read(gateway, session, Seq::MAX, 1).await?.head);
        }
        let user = session.user.clone();
        let asked = gateway.router.ask(self.conversation, user, Operation::Head);
        match asked.await? {
            Outcome::Head(head) => Ok(head.head),
            _ => Err(Unread::TooMuch),
        }
    }

    async fn read(
        &self,
        gateway: &Gateway,
        session: &Subscriber,
        after: Seq,
        limit: usize,
    ) -> Result<Page, Unread> {
        let (actor, operation) = match self.reader {
            Reader::User => {
                let range = LogRange::After(after);
                (session.user.clone(), Operation::History { range, limit })
            }
            Reader::Gateway => {
                let operation = Operation::CatchUp { after, limit };
                (session.user.clone(), operation)
            }
        };
        let read = gateway
            .router
            .ask(self.conversation, actor, operation)
            .await?;
        let topic = Topic::Channel(self.conversation);
        // Removed since: nothing that was sent after that is shown.
        if self.reader == Reader::Gateway && !gateway.hub.is_subscribed(&topic, session.session) {
            return Err(chat::Error::UnknownConversation.into());
        }
        match read {
            Outcome::History(page) => Ok(page),
            _ => Err(Unread::TooMuch),
        }
    }

    /// What the client is told instead of the entries that follow.
    fn given_up(&self, unread: &Unread) -> Event {
        let (conversation, head) = (self.conversation, self.head);
        match unread {
            Unread::Failed(chat::Error::UnknownConversation | chat::Error::Forbidden(_)) => {
                Event::Conversation(ConversationEvent {
                    conversation,
                    change: ConversationChange::Removed,
                    details: None,
                })
            }
            // Too much, or not known what is missing: the client must ask.
            Unread::TooMuch | Unread::Failed(_) => Event::Resync { conversation, head },
        }
    }
}

/// Why entries are not pushed.
enum Unread {
    TooMuch,
    Failed(chat::Error),
}

impl From<chat::Error> for Unread {
    fn from(error: chat::Error) -> Self {
        Self::Failed(error)
    }
}

/// Keeps the first entries of a page, as many as may be held at once; at least one. A page that was in the owner's memory
/// may weigh more than one that was read from the store.
fn shorten(entries: &mut Vec<Arc<Entry>>, bytes_max: usize) {
    let mut bytes = 0;
    let fits = |entry: &Arc<Entry>| {
        bytes += entry.weight();
        bytes <= bytes_max
    };
    let fitting = entries.iter().map(fits).take_while(|fits| *fits).count();
    entries.truncate(fitting.max(1));
}

/// Answers `subscribe`: what came after `after` is queued as events before the reply says the head. Also returns the bytes
/// that were read for it.
pub(super) async fn subscribe(
    gateway: &Gateway,
    session: &Arc<Subscriber>,
    request: &Subscribe,
) -> (Answer, usize) {
    let Subscribe {
        conversation,
        after,
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
            // The channel was made private or is gone. What is refused does not stay subscribed.
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
        seq: None,
        head: Some(head),
    });
    (answer, bytes)
}

/// What a new subscriber is pushed: the entries that follow, and a `resync` if they are more than a page may hold or
/// cannot be read now. Adds to `bytes` what was read.
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
                    return Ok(vec![replay.given_up(&Unread::TooMuch)]);
                }
                let entries = entries.iter();
                events.extend(entries.map(|entry| message(replay.conversation, entry)));
            }
            Err(Unread::Failed(error)) if !error.is_unavailable() => return Err(error),
            Err(_) => return Ok(vec![replay.given_up(&Unread::TooMuch)]),
        }
    }
}

pub(super) fn message(conversation: ConversationId, entry: &Entry) -> Event {
    Event::Message(Box::new(Message::of(conversation, entry.clone())))
}

#[cfg(test)]
mod tests;
