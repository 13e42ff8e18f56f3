//! Catching up with missed entries and changes. Rule [register]: a session is registered before what it missed is read. So
//! each entry and each change is read here, delivered as an event, or both.

mod changes;

use std::{collections::HashMap, sync::Arc};

use self::changes::{MissedChanges, Next, Pushed};
use super::{
    Gateway,
    pages::{Shown, item_bytes},
    requests,
};
use crate::{
    chat::{
        self, CatchUp, CatchUpChanges, Changes, GetChanges, GetHead, GetHistory, LogRange, Page,
    },
    cluster::{InboxRef, state_of},
    fanout::{Frame, Subscriber},
    model::{
        ConversationId, Cursor, Entry, Kind, Rev, Seq, Topic,
        limits::{
            CURSORS_MAX, PAGE_ENTRIES_MAX, RESUME_BYTES_MAX, RESUME_ENTRIES_MAX,
            RESUME_ENTRIES_TOTAL_MAX, UNKNOWN_CURSORS_MAX,
        },
    },
    protocol::{Answer, ConversationChange, ConversationEvent, Event, Okay, Subscribe},
};

/// Subscribes a session to the channels of its user.
pub(super) async fn subscribe_own_channels(
    gateway: &Gateway,
    session: &Arc<Subscriber>,
    places: &[InboxRef],
) {
    let channels = places.iter().filter(|place| place.kind == Kind::Channel);
    let channels: Vec<ConversationId> = channels.map(|place| place.conversation).collect();
    gateway.channels.subscribe_own(session, &channels).await;
}

/// The reader of what follows each cursor. It reads one conversation at a time, page by page, so that a slow client never
/// causes more than a page to be kept.
pub(super) struct Missed<'a> {
    gateway: &'a Gateway,
    session: &'a Subscriber,
    cursors: std::vec::IntoIter<(ConversationId, Cursor)>,
    places: HashMap<ConversationId, InboxRef>,
    /// The positions of the channels that come here without a gap, read after the session was subscribed.
    positions: HashMap<ConversationId, Cursor>,
    /// The conversation that is being read.
    replay: Option<Replay>,
    /// Entries and changed items of all conversations that may still be pushed.
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
        let places: HashMap<_, _> = places.map(|place| (place.conversation, place)).collect();
        let is_channel = |id: &ConversationId| {
            let place = places.get(id);
            place.is_some_and(|place| place.kind == Kind::Channel)
        };
        let channels = cursors.iter().map(|(id, _)| *id).filter(is_channel);
        let positions = gateway.channels.positions(channels.collect());
        let cursors = cursors.into_iter();
        Self {
            gateway,
            session,
            cursors,
            places,
            positions,
            replay: None,
            left: RESUME_ENTRIES_TOTAL_MAX,
            unknown: 0,
        }
    }

    /// Returns the next part of what was missed, in order within a conversation. `None` at the end.
    pub(super) async fn next(&mut self) -> Option<(ConversationId, Missing)> {
        loop {
            let mut replay = match self.replay.take() {
                Some(replay) => replay,
                None => {
                    let (conversation, cursor) = self.cursors.next()?;
                    match self.begin(conversation, cursor) {
                        Some(replay) => replay,
                        None => continue,
                    }
                }
            };
            let conversation = replay.conversation;
            let before = replay.pushed.count;
            let step = replay.step(self.gateway, self.session, self.left).await;
            self.left = self.left.saturating_sub(replay.pushed.count - before);
            let missing = match step {
                Ok(None) => continue,
                Ok(Some(missing)) => missing,
                Err(error) => Missing::Other(replay.fail(&error)),
            };
            self.replay = Some(replay);
            return Some((conversation, missing));
        }
    }

    /// Starts with the next conversation. `None` if its cursor is ignored.
    fn begin(
        &mut self,
        conversation: ConversationId,
        Cursor(after, rev): Cursor,
    ) -> Option<Replay> {
        let place = self.places.get(&conversation);
        let last = place.and_then(|place| place.last_seq);
        if place.is_none() {
            // The conversation is not in the inbox: an empty dm, one that the user left, or an id the client invented.
            self.unknown += 1;
            if self.unknown > UNKNOWN_CURSORS_MAX {
                return None;
            }
        }
        // The user's home says which channels the user is in, so the owner need not query the store.
        let reader = match place {
            Some(place) if place.kind == Kind::Channel => Reader::Gateway,
            _ => Reader::User,
        };
        let rev_known = last.and(place).map(|place| place.rev);
        let position = self.positions.get(&conversation);
        let (last, rev_known) = match position {
            Some(&Cursor(head, rev)) => (Some(head), Some(rev)),
            None => (last, rev_known),
        };
        Some(Replay {
            conversation,
            reader,
            after,
            head: last.unwrap_or(after),
            is_head_current: last.is_none() || position.is_some(),
            changes: MissedChanges::new(conversation, Some(rev), rev_known),
            pushed: Pushed::default(),
            // The home knows the position of each dm and group, so most cursors need no further request.
            stage: if last.is_none() {
                Stage::Head
            } else {
                Stage::Entries
            },
        })
    }
}

/// A part of what a client misses of one conversation.
pub(super) enum Missing {
    /// The next page of entries.
    Entries(Vec<Shown>),
    /// The events of the next page of changes, and the bytes that were read for them.
    Changes(Vec<Event>, usize),
    /// The event instead of entries or changes: they are too many, or the user may no longer read them.
    Other(Event),
}

/// The party that checks whether the user may read: the owner of the conversation, or this gateway.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    User,
    Gateway,
}

/// A conversation of which the missed entries and changes are being pushed.
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
    changes: MissedChanges,
    pushed: Pushed,
    stage: Stage,
}

/// The next step of a [`Replay`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The owner is asked for its position.
    Head,
    Entries,
    Changes,
    /// The owner could not be asked, so the client asks for the changes that it may lack.
    UnreadChanges,
    End,
}

impl Replay {
    /// Returns the next part of what was missed. `None` at the end. The caller charges it to the user.
    ///
    /// # Errors
    /// The reason why the user may not read the conversation, or why it cannot be read at all.
    async fn step(
        &mut self,
        gateway: &Gateway,
        session: &Subscriber,
        left: u64,
    ) -> Result<Option<Missing>, chat::Error> {
        loop {
            let stage = self.stage;
            let missing = match stage {
                Stage::Head => {
                    self.stage = Stage::Entries;
                    let asked = self.ask_head(gateway, session).await;
                    asked.map(|()| None)
                }
                Stage::Entries => {
                    let page = self.next_entries(gateway, session, left).await;
                    page.map(|page| (!page.is_empty()).then_some(Missing::Entries(page)))
                }
                Stage::Changes => self.next_changes(gateway, session, left).await,
                Stage::UnreadChanges => {
                    let gap = self.changes.give_up();
                    Ok(gap.map(Missing::Other))
                }
                Stage::End => return Ok(None),
            };
            match missing {
                Ok(Some(missing)) => return Ok(Some(missing)),
                Ok(None) if stage == Stage::Head => {}
                Ok(None) if stage == Stage::Entries => self.stage = Stage::Changes,
                Ok(None) => self.stage = Stage::End,
                Err(NotPushed::Failed(error)) if !error.is_unavailable() => return Err(error),
                Err(not_pushed) => return Ok(self.give_up(&not_pushed)),
            }
        }
    }

    /// Returns the event that replaces the rest of this stage.
    fn give_up(&mut self, not_pushed: &NotPushed) -> Option<Missing> {
        let event = match (self.stage, not_pushed) {
            (Stage::Changes, _) => {
                self.stage = Stage::End;
                self.changes.give_up()
            }
            (_, NotPushed::TooMuch) => Some(self.resync(Stage::Changes)),
            (_, NotPushed::Failed(_)) => Some(self.resync(Stage::UnreadChanges)),
        };
        event.map(Missing::Other)
    }

    /// Returns the event after which the client requests the entries.
    fn resync(&mut self, next: Stage) -> Event {
        self.stage = next;
        let (conversation, head) = (self.conversation, self.head);
        Event::Resync { conversation, head }
    }

    /// Returns the event that says that the conversation cannot be read.
    fn fail(&mut self, error: &chat::Error) -> Event {
        match error {
            chat::Error::UnknownConversation | chat::Error::Forbidden(_) => {
                self.stage = Stage::End;
                Event::Conversation(ConversationEvent {
                    conversation: self.conversation,
                    change: ConversationChange::Removed,
                    details: None,
                })
            }
            // The number of missing entries is unknown: the client must request them.
            _ => self.resync(Stage::UnreadChanges),
        }
    }

    /// Reads the next page of entries, which is empty at the end.
    ///
    /// # Errors
    /// [`NotPushed::TooMuch`] if more entries are missing than may be pushed, of which `left` is one limit. Nothing is
    /// read then.
    async fn next_entries(
        &mut self,
        gateway: &Gateway,
        session: &Subscriber,
        left: u64,
    ) -> Result<Vec<Shown>, NotPushed> {
        let lacks = self.head.saturating_sub(self.after);
        if lacks == 0 {
            return Ok(Vec::new());
        }
        let may_push = self.pushed.room(left);
        if lacks > may_push || self.pushed.is_full() {
            return Err(NotPushed::TooMuch);
        }
        let limit = if self.is_head_current {
            lacks
        } else {
            may_push
        };
        let limit = usize::try_from(limit).map_or(PAGE_ENTRIES_MAX, |n| n.min(PAGE_ENTRIES_MAX));
        let page = self.read(gateway, session, self.after, limit).await?;
        if !self.is_head_current {
            (self.head, self.is_head_current) = (page.head, true);
        }
        let mut entries = shown(page);
        keep_first(&mut entries, gateway.limits.page_bytes());
        match entries.last() {
            Some(last) => self.after = last.entry.seq,
            None if self.head > self.after => return Err(NotPushed::TooMuch),
            None => {}
        }
        self.pushed.count += entries.len() as u64;
        self.pushed.bytes += entries.iter().map(Shown::weight).sum::<usize>();
        Ok(entries)
    }

    /// Reads the next page of changes. `None` at the end.
    async fn next_changes(
        &mut self,
        gateway: &Gateway,
        session: &Subscriber,
        left: u64,
    ) -> Result<Option<Missing>, NotPushed> {
        let (after, limit) = match self.changes.next(&self.pushed, left) {
            Next::End => return Ok(None),
            Next::Gap => return Err(NotPushed::TooMuch),
            Next::Ask { after, limit } => (after, limit),
        };
        let changes = self.read_changes(gateway, session, after, limit).await?;
        let bytes = changes.items.iter().map(item_bytes).sum();
        // Each change was read.
        self.pushed.count += changes.rev.saturating_sub(after);
        self.pushed.bytes += bytes;
        let events = self.changes.take(changes);
        if bytes > gateway.limits.page_bytes() {
            return Ok(Some(Missing::Other(self.changes.skip())));
        }
        Ok(Some(Missing::Changes(events, bytes)))
    }

    /// Asks the owner for its position, without reading entries.
    async fn ask_head(&mut self, gateway: &Gateway, session: &Subscriber) -> Result<(), NotPushed> {
        self.head = match self.reader {
            Reader::Gateway => self.read(gateway, session, Seq::MAX, 1).await?.head,
            Reader::User => {
                let user = session.user.clone();
                let head = gateway.router.ask(self.conversation, user, GetHead).await?;
                self.changes.learn(head.rev);
                head.head
            }
        };
        Ok(())
    }

    async fn read(
        &mut self,
        gateway: &Gateway,
        session: &Subscriber,
        after: Seq,
        limit: usize,
    ) -> Result<Page, NotPushed> {
        let (router, user) = (&gateway.router, session.user.clone());
        let page = match self.reader {
            Reader::User => {
                let range = LogRange::After(after);
                let asked = router.ask(self.conversation, user, GetHistory { range, limit });
                asked.await?
            }
            Reader::Gateway => {
                let asked = router.ask(self.conversation, user, CatchUp { after, limit });
                let page = asked.await?;
                self.check_subscribed(gateway, session)?;
                page
            }
        };
        self.changes.learn(page.rev);
        Ok(page)
    }

    async fn read_changes(
        &self,
        gateway: &Gateway,
        session: &Subscriber,
        after: Rev,
        limit: usize,
    ) -> Result<Changes, NotPushed> {
        let (router, user) = (&gateway.router, session.user.clone());
        match self.reader {
            Reader::User => {
                let asked = router.ask(self.conversation, user, GetChanges { after, limit });
                Ok(asked.await?)
            }
            Reader::Gateway => {
                let asked = router.ask(self.conversation, user, CatchUpChanges { after, limit });
                let changes = asked.await?;
                self.check_subscribed(gateway, session)?;
                Ok(changes)
            }
        }
    }

    /// Checks that the user was not removed since. What was read may be from after the removal.
    fn check_subscribed(&self, gateway: &Gateway, session: &Subscriber) -> Result<(), chat::Error> {
        let topic = Topic::Channel(self.conversation);
        if gateway.hub.is_subscribed(&topic, session.session) {
            return Ok(());
        }
        Err(chat::Error::UnknownConversation)
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

/// Returns the entries of a page with their changes and the user's own reactions.
fn shown(page: Page) -> Vec<Shown> {
    let Page {
        entries,
        states,
        mine,
        ..
    } = page;
    let mut mine: HashMap<Seq, Vec<String>> = mine.into_iter().collect();
    let shown = |entry: Arc<Entry>| Shown {
        state: state_of(&states, entry.seq).cloned(),
        mine: mine.remove(&entry.seq),
        entry,
    };
    entries.into_iter().map(shown).collect()
}

/// Keeps the first entries of a page, as many as may be in memory at once, but at least one. A page from the owner's
/// memory may weigh more than one read from the store.
fn keep_first(entries: &mut Vec<Shown>, bytes_max: usize) {
    let mut bytes = 0;
    let fits = |shown: &Shown| {
        bytes += shown.weight();
        bytes <= bytes_max
    };
    let fitting = entries.iter().map(fits).take_while(|fits| *fits).count();
    entries.truncate(fitting.max(1));
}

/// Answers `subscribe`. The entries after `after` and the changes after `rev` are queued as events before the reply, which
/// contains the channel's position. Also returns the number of bytes read.
pub(super) async fn subscribe(
    gateway: &Gateway,
    session: &Arc<Subscriber>,
    request: &Subscribe,
) -> (Answer, usize) {
    let Subscribe {
        conversation,
        after,
        rev,
    } = *request;
    let head = match gateway.channels.subscribe(session, conversation).await {
        Ok(head) => head,
        Err(error) => return (requests::refused(&error), 0),
    };
    let mut replay = Replay {
        conversation,
        reader: Reader::User,
        after: after.unwrap_or(head.head),
        head: head.head,
        is_head_current: true,
        changes: MissedChanges::new(conversation, rev, Some(head.rev)),
        pushed: Pushed::default(),
        stage: Stage::Entries,
    };
    let mut bytes = 0;
    let pushed = match push_after(gateway, session, &mut replay, &mut bytes).await {
        Ok(events) => events,
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
    let answer = Answer::Ok(Okay {
        head: Some(head.head),
        rev: Some(head.rev),
        ..Okay::default()
    });
    (answer, bytes)
}

/// Returns the events for a new subscriber: the entries and changes that follow. Instead of entries that exceed a page or
/// cannot be read now it is a `resync`, and instead of changes a gap. Adds the bytes read to `bytes`.
async fn push_after(
    gateway: &Gateway,
    session: &Subscriber,
    replay: &mut Replay,
    bytes: &mut usize,
) -> Result<Vec<Event>, chat::Error> {
    let mut events = Vec::new();
    while let Some(missing) = replay.step(gateway, session, RESUME_ENTRIES_MAX).await? {
        match missing {
            Missing::Entries(entries) => {
                *bytes += entries.iter().map(Shown::encoded_bytes).sum::<usize>();
                if *bytes > gateway.limits.page_bytes() {
                    events = vec![replay.resync(Stage::Changes)];
                    // There is no room for changes either.
                    replay.pushed.bytes = RESUME_BYTES_MAX;
                    continue;
                }
                let entries = entries.into_iter();
                events.extend(entries.map(|shown| message(replay.conversation, shown)));
            }
            Missing::Changes(changes, read) => {
                *bytes += read;
                if *bytes > gateway.limits.page_bytes() {
                    events.push(replay.changes.skip());
                } else {
                    events.extend(changes);
                }
            }
            // It replaces the entries that were read before.
            Missing::Other(resync @ Event::Resync { .. }) => events = vec![resync],
            Missing::Other(event) => events.push(event),
        }
    }
    Ok(events)
}

pub(super) fn message(conversation: ConversationId, shown: Shown) -> Event {
    Event::Message(Box::new(shown.message(conversation)))
}

#[cfg(test)]
mod tests;
