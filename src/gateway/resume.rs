//! What a client missed. Rule [register]: its session is registered first, and only then is read what it
//! lacks; so an entry is either read here or delivered as an event, or both, never neither.

use std::{collections::HashMap, sync::Arc};

use super::{Gateway, requests};
use crate::{
    chat::{self, LogRange, Operation, Outcome},
    cluster::InboxPlace,
    fanout::{Frame, Subscriber},
    model::{
        Content, ConversationId, Cursor, Entry, Kind, Seq, Topic, UserId,
        limits::{CURSORS_MAX, RESUME_ENTRIES_MAX, RESUME_ENTRIES_TOTAL_MAX, UNKNOWN_CURSORS_MAX},
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

/// The entries after each cursor, one conversation at a time.
pub(super) struct Missed<'a> {
    gateway: &'a Gateway,
    session: &'a Subscriber,
    cursors: std::vec::IntoIter<(ConversationId, Cursor)>,
    places: HashMap<ConversationId, InboxPlace>,
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
            left: RESUME_ENTRIES_TOTAL_MAX,
            unknown: 0,
        }
    }

    /// What was missed in the next conversation in which something was; `None` at the end.
    pub(super) async fn next(&mut self) -> Option<(ConversationId, Missing)> {
        loop {
            let (conversation, Cursor(seq, _)) = self.cursors.next()?;
            match self.after(conversation, seq).await {
                Missing::Nothing => {}
                missing => return Some((conversation, missing)),
            }
        }
    }

    fn follows(&self, channel: ConversationId) -> bool {
        let topic = Topic::Channel(channel);
        self.gateway.hub.is_subscribed(&topic, self.session.session)
    }

    async fn after(&mut self, conversation: ConversationId, after: Seq) -> Missing {
        // The user's home knows the newest entry of every dm and group: most cursors are up to date, and cost nothing
        // more.
        let place = self.places.get(&conversation);
        let last = place.and_then(|place| place.last_seq);
        if last.is_some_and(|last| last <= after) {
            return Missing::Nothing;
        }
        if place.is_none() {
            // An empty dm, or one that the user is no longer in; many of them are made up.
            self.unknown += 1;
            if self.unknown > UNKNOWN_CURSORS_MAX {
                return Missing::Nothing;
            }
        }
        let limit = RESUME_ENTRIES_MAX.min(self.left);
        // A channel's owner need not look in the store who is in it: the user's home has said so. Others know it.
        let is_channel = place.is_some_and(|place| place.kind == Kind::Channel);
        let reader = if is_channel {
            Reader::Gateway(&self.session.user)
        } else {
            Reader::User(&self.session.user)
        };
        let read = read_after(self.gateway, reader, conversation, after, limit).await;
        let read = match read {
            // Removed since: nothing that was sent after that is shown.
            Ok(_) if is_channel && !self.follows(conversation) => {
                Err(chat::Error::UnknownConversation)
            }
            read => read,
        };
        match read {
            Ok(missing) => {
                if let Missing::Entries(entries) = &missing {
                    self.left -= entries.len() as u64;
                }
                missing
            }
            Err(chat::Error::UnknownConversation | chat::Error::Forbidden(_)) => {
                let change = ConversationChange::Removed;
                Missing::Other(Event::Conversation(ConversationEvent {
                    conversation,
                    change,
                    details: None,
                }))
            }
            // Not known what is missing: the client must ask again.
            Err(_) => {
                let head = last.unwrap_or(after);
                Missing::Other(Event::Resync { conversation, head })
            }
        }
    }
}

/// What a client lacks of one conversation.
pub(super) enum Missing {
    Nothing,
    Entries(Vec<Arc<Entry>>),
    /// Too much to push, or no longer to be seen.
    Other(Event),
}

/// Whether the owner is to check that the user may read, or the gateway knows.
enum Reader<'a> {
    User(&'a UserId),
    Gateway(&'a UserId),
}

async fn read_after(
    gateway: &Gateway,
    reader: Reader<'_>,
    conversation: ConversationId,
    after: Seq,
    entries_max: u64,
) -> Result<Missing, chat::Error> {
    let limit = usize::try_from(entries_max).unwrap_or_default().max(1);
    let (actor, operation) = match reader {
        Reader::User(user) => {
            let range = LogRange::After(after);
            (user.clone(), Operation::History { range, limit })
        }
        Reader::Gateway(user) => (user.clone(), Operation::CatchUp { after, limit }),
    };
    match gateway.router.ask(conversation, actor, operation).await? {
        Outcome::History(page) if page.head <= after => Ok(Missing::Nothing),
        Outcome::History(page) if page.head - after > entries_max => {
            let head = page.head;
            Ok(Missing::Other(Event::Resync { conversation, head }))
        }
        // Of large messages not all were read.
        Outcome::History(page) if !page.reaches_head(after) => {
            let head = page.head;
            Ok(Missing::Other(Event::Resync { conversation, head }))
        }
        Outcome::History(page) => Ok(Missing::Entries(page.entries)),
        _ => Ok(Missing::Nothing),
    }
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
        let limit = RESUME_ENTRIES_MAX;
        let reader = Reader::User(&session.user);
        let read = read_after(gateway, reader, conversation, after, limit);
        let events = match read.await {
            Ok(Missing::Nothing) => Vec::new(),
            Ok(Missing::Other(event)) => {
                // As much as fits a page was read, or more.
                bytes = gateway.limits.page_bytes();
                vec![event]
            }
            Ok(Missing::Entries(entries)) => {
                bytes = entries.iter().map(|e| encoded_bytes(e)).sum();
                if bytes > gateway.limits.page_bytes() {
                    vec![Event::Resync { conversation, head }]
                } else {
                    entries.iter().map(|e| message(conversation, e)).collect()
                }
            }
            Err(error) => return (requests::refused(&error), 0),
        };
        for event in events {
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

pub(super) fn message(conversation: ConversationId, entry: &Entry) -> Event {
    Event::Message(Box::new(Message::of(conversation, entry.clone())))
}

/// About how many bytes an entry is in JSON, the longer of the two encodings.
pub(super) fn encoded_bytes(entry: &Entry) -> usize {
    /// Names of fields, ids, numbers.
    const REST: usize = 400;
    let text = |text: &str| {
        // A control character becomes \u00xx, a quotation mark \".
        let escaped = |b: u8| {
            if b < 0x20 {
                5
            } else {
                usize::from(b == b'"' || b == b'\\')
            }
        };
        text.len() + text.bytes().map(escaped).sum::<usize>()
    };
    let optional = |t: &Option<String>| t.as_deref().map_or(0, text);
    match &entry.content {
        Content::Text {
            body, attachments, ..
        } => {
            let links = attachments.iter();
            let links = links.map(|a| text(&a.url) + optional(&a.name) + optional(&a.mime) + 60);
            REST + text(body) + links.sum::<usize>()
        }
        // The longest one is a group's creation, with all its participants.
        Content::System(change) => REST + serde_json::to_vec(change).map_or(0, |json| json.len()),
    }
}
