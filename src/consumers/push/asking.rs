//! Asks the homes of users to notify them of new messages, as the owner of conversations: rule [push-asked].
//!
//! A home answers at once for whom it has not decided yet, and is asked again. Nothing is kept but who is undecided since
//! which message, so that the offset stays below it: rule [push-offset]. For each user, only the newest message counts.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use foldhash::quality::RandomState;
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::time::Instant;

use crate::{
    chat::{CatchUp, Conversations, Error, Following},
    clock,
    cluster::{ToNotify, Users},
    consumers::follower::{Follower, Line},
    model::{Content, ConversationId, Cursor, Kind, Millis, Seq, UserId},
    mutation::{Mutation, broken},
    tasks::{contain, wait_until},
};

/// The time for which new messages of a conversation are gathered. Sessions that look have them by then, and say so.
const GATHER: Duration = Duration::from_millis(250);
/// The first and the longest pause before homes are asked again.
const AGAIN_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(8));
/// Conversations whose messages are read, or whose homes are asked, at once.
const STEPS_AT_ONCE: usize = 64;
/// Entries that are read at once.
const PAGE: usize = 256;
/// Users who are undecided, of all conversations together. A conversation with more is left to the scan.
const UNDECIDED_MAX: usize = 200_000;

/// What a conversation's owner asks homes for.
#[derive(Clone)]
pub(crate) struct Asker {
    pub(crate) follower: Arc<Follower>,
    pub(crate) line: Arc<Line>,
    pub(crate) users: Arc<Users>,
    pub(crate) conversations: Conversations,
    /// Older messages are not pushed.
    pub(crate) ttl: Duration,
}

/// The messages of a conversation about which homes have not decided.
struct Asked {
    following: Arc<Following>,
    /// The newest entry that was read.
    read: Seq,
    undecided: BTreeMap<UserId, Undecided>,
    /// When homes are asked next.
    due: Instant,
    pause: Duration,
}

#[derive(Clone, Copy)]
struct Undecided {
    /// No message below it is undecided.
    first: Seq,
    newest: Seq,
    at: Millis,
}

/// The newest message, and the newest one of another sender, for the sender of the first.
#[derive(Default)]
struct Newest([Option<(Seq, Millis, UserId)>; 2]);

impl Newest {
    fn add(&mut self, seq: Seq, at: Millis, sender: &UserId) {
        let [newest, other] = &mut self.0;
        if newest.as_ref().is_some_and(|(.., known)| known != sender) {
            *other = newest.take();
        }
        *newest = Some((seq, at, sender.clone()));
    }

    /// Returns the newest message that others than this user have sent.
    fn of(&self, user: &UserId) -> Option<(Seq, Millis)> {
        let mut messages = self.0.iter().flatten();
        let message = messages.find(|(.., sender)| sender != user)?;
        Some((message.0, message.1))
    }
}

/// The end of a step.
struct Step {
    asked: Asked,
    result: Result<(), Error>,
}

/// The conversations with messages about which homes have not decided.
#[derive(Default)]
struct Agenda {
    known: HashMap<ConversationId, Asked, RandomState>,
    due: BTreeSet<(Instant, ConversationId)>,
    /// Those in whose step something is read or asked, with the new owner's progress if the conversation was opened again.
    busy: BTreeMap<ConversationId, Option<Arc<Following>>>,
    undecided: usize,
}

impl Agenda {
    /// Adds a conversation, unless too many users are undecided. The scan of lagging conversations finds it again.
    fn put(&mut self, asked: Asked) {
        if self.undecided + asked.undecided.len() <= UNDECIDED_MAX {
            let conversation = asked.following.conversation;
            self.undecided += asked.undecided.len();
            self.due.insert((asked.due, conversation));
            self.known.insert(conversation, asked);
        }
    }

    fn remove(&mut self, conversation: ConversationId) -> Option<Asked> {
        let asked = self.known.remove(&conversation)?;
        self.due.remove(&(asked.due, conversation));
        self.undecided -= asked.undecided.len();
        Some(asked)
    }

    /// Takes a conversation that is due. It is busy then.
    fn take(&mut self, now: Instant) -> Option<Asked> {
        let (due, conversation) = *self.due.first()?;
        if due > now {
            return None;
        }
        self.busy.insert(conversation, None);
        self.remove(conversation)
    }
}

impl Asker {
    /// Asks for as long as this gateway runs.
    pub(crate) async fn run(self) {
        // After a panic. At the first start no conversation is open.
        self.follower.tell_again(&self.line).await;
        let mut agenda = Agenda::default();
        let mut steps: FuturesUnordered<BoxFuture<'_, Step>> = FuturesUnordered::new();
        loop {
            self.take_woken(&mut agenda);
            while steps.len() < STEPS_AT_ONCE
                && let Some(asked) = agenda.take(Instant::now())
            {
                steps.push(self.step(asked).boxed());
            }
            let next = agenda.due.first().map(|(at, _)| *at);
            let next = next.filter(|_| steps.len() < STEPS_AT_ONCE);
            tokio::select! {
                biased;
                Some(step) = steps.next(), if !steps.is_empty() => {
                    let before = step.asked.following.clone();
                    let opened = agenda.busy.remove(&before.conversation).flatten();
                    let opened = opened.filter(|opened| !Arc::ptr_eq(opened, &before));
                    match (self.ended(step), opened) {
                        (_, Some(opened)) => agenda.put(self.begin(opened)),
                        (Some(asked), None) => agenda.put(asked),
                        (None, None) => {}
                    }
                }
                () = self.line.woken() => {}
                () = wait_until(next) => {}
            }
        }
    }

    fn take_woken(&self, agenda: &mut Agenda) {
        for following in self.line.take_woken() {
            // It is told of the next message, too.
            following.rest(&self.line.name);
            let conversation = following.conversation;
            // A step looks for new messages at its end.
            if let Some(opened) = agenda.busy.get_mut(&conversation) {
                *opened = Some(following);
                continue;
            }
            let known = agenda.remove(conversation);
            let same = known.filter(|asked| Arc::ptr_eq(&asked.following, &following));
            let new = self.begin(following);
            // Messages in a row do not postpone it.
            agenda.put(match same {
                Some(asked) => Asked {
                    due: asked.due.min(new.due),
                    ..asked
                },
                None => new,
            });
        }
    }

    fn begin(&self, following: Arc<Following>) -> Asked {
        let offset = following.offset(&self.line.name).unwrap_or_default();
        Asked {
            following,
            read: offset.0,
            undecided: BTreeMap::new(),
            due: Instant::now() + GATHER,
            pause: AGAIN_AFTER.0,
        }
    }

    /// Notes the end of a step. Returns the conversation with the time of its next one. `None` if there is none.
    fn ended(&self, Step { mut asked, result }: Step) -> Option<Asked> {
        let consumer = &self.line.name;
        let following = asked.following.clone();
        let has_failed = result.is_err();
        if let Err(error) = result {
            tracing::debug!(conversation = %following.conversation, %error, "messages could not be read to notify of");
            self.line.note_error(Some(error.to_string()));
        }
        // Before the look: what comes after it wakes the conversation again.
        following.rest(consumer);
        let work = following.work(consumer)?;
        if work.heads.0 > asked.read && !has_failed {
            asked.due = Instant::now() + GATHER;
        } else {
            asked.due = Instant::now() + asked.pause;
            asked.pause = (asked.pause * 2).min(AGAIN_AFTER.1);
        }
        Some(asked)
    }

    /// Reads the new messages of a conversation, and asks the homes of those who are undecided.
    async fn step(&self, mut asked: Asked) -> Step {
        let conversation = asked.following.conversation;
        let asking = contain(
            "asking about notifications",
            conversation,
            self.ask(&mut asked),
        );
        let panicked = || Err(Error::unavailable("asking panicked"));
        let result = asking.await.unwrap_or_else(panicked);
        Step { asked, result }
    }

    async fn ask(&self, asked: &mut Asked) -> Result<(), Error> {
        let following = asked.following.clone();
        let Some(work) = following.work(&self.line.name) else {
            return Ok(());
        };
        following.rest(&self.line.name);
        if work.heads.0 > asked.read {
            self.read(asked, work.heads.0).await?;
            asked.pause = AGAIN_AFTER.0;
        }
        let oldest = clock::wall() - i64::try_from(self.ttl.as_millis()).unwrap_or(i64::MAX);
        asked
            .undecided
            .retain(|_, undecided| undecided.at >= oldest);
        if !asked.undecided.is_empty() {
            let users = asked
                .undecided
                .iter()
                .map(|(user, u)| (user.clone(), u.newest));
            let users: ToNotify = users.collect();
            let left = self.users.ask_push(following.conversation, users).await;
            let left: BTreeSet<UserId> = left.into_iter().collect();
            asked.undecided.retain(|user, _| left.contains(user));
        }
        // Rule [push-offset].
        let first = asked
            .undecided
            .values()
            .map(|undecided| undecided.first)
            .min();
        let first = first.filter(|_| !broken(Mutation::PushOffset));
        let upto = first.map_or(asked.read, |first| first - 1);
        let at = asked.undecided.values().map(|undecided| undecided.at).min();
        let upto = Cursor(upto, work.heads.1);
        following.delivered(&self.line.name, upto, at.unwrap_or_else(clock::wall));
        Ok(())
    }

    /// Reads the messages up to `head`. Everybody but its sender is to be notified of the newest.
    async fn read(&self, asked: &mut Asked, head: Seq) -> Result<(), Error> {
        let following = &asked.following;
        let mut newest = Newest::default();
        let mut reached = asked.read;
        while reached < head {
            let page = CatchUp {
                after: reached,
                limit: PAGE,
            };
            let asking = self
                .conversations
                .ask(following.conversation, UserId::gateway(), page);
            let page = asking.await?;
            let before = reached;
            for entry in page.entries.iter().filter(|entry| entry.seq <= head) {
                reached = entry.seq;
                let is_deleted = entry.newest(page.state(entry.seq)).last.deleted;
                if matches!(entry.content, Content::Text { .. }) && !is_deleted {
                    newest.add(entry.seq, entry.at, &entry.sender);
                }
            }
            if reached == before {
                // There should be something: the owner was lost.
                return Err(Error::Closed);
            }
        }
        let recipients = following.recipients().ok_or(Error::Closed)?;
        let first = asked.read + 1;
        for (user, joined) in &recipients.users {
            if let Some((seq, at)) = newest.of(user)
                && seq > *joined
            {
                let undecided = asked.undecided.entry(user.clone());
                let undecided = undecided.or_insert(Undecided {
                    first,
                    newest: seq,
                    at,
                });
                (undecided.newest, undecided.at) = (seq, at);
            }
        }
        debug_assert!(recipients.kind != Kind::Channel, "channels are not pushed");
        asked.read = reached;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(name: &str) -> UserId {
        UserId::new(name).unwrap()
    }

    #[test]
    fn everybody_is_notified_of_the_newest_message_of_others() {
        let (alice, bob, carol) = (user("alice"), user("bob"), user("carol"));
        let mut newest = Newest::default();
        assert_eq!(newest.of(&alice), None);
        newest.add(1, 10, &alice);
        newest.add(2, 20, &alice);
        assert_eq!(newest.of(&alice), None);
        assert_eq!(newest.of(&bob), Some((2, 20)));
        newest.add(3, 30, &bob);
        newest.add(4, 40, &bob);
        assert_eq!(newest.of(&alice), Some((4, 40)));
        assert_eq!(newest.of(&bob), Some((2, 20)));
        assert_eq!(newest.of(&carol), Some((4, 40)));
        newest.add(5, 50, &alice);
        assert_eq!(newest.of(&alice), Some((4, 40)));
        assert_eq!(newest.of(&carol), Some((5, 50)));
    }
}
