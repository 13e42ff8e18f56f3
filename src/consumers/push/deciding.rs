//! Decides, as the home of users, who is notified of a message. docs/consumers.md has the rules, whose names are in brackets.
//!
//! Nothing is kept in the store: the owner of a conversation asks again until a home has decided.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use metrics::gauge;
use quick_cache::sync::Cache;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::{
    Message, Notification, Sent,
    queue::{Decided, Queue, Waiting},
};
use crate::{
    chat::{Error, GetHistory, LogRange, Receipt},
    clock,
    cluster::{Attention, Pushes, Router, ToNotify},
    model::{ConversationId, Device, EntryKind, Kind, Last, Seq, UserId, limits::PREVIEW_CHARS},
    store::InboxRow,
    tasks::lock,
};

/// Decisions that are made at once. Each may send to all devices of a user.
const DECISIONS_AT_ONCE: usize = 256;
/// The time after which a message counts as delivered to a session that looks and says nothing: rule [push-present].
const PRESENT_MAX: Duration = Duration::from_secs(60);
/// The pause before a decision is repeated that failed, and the longest one.
const AGAIN_AFTER: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));
/// Entries among which a message to notify of is looked for, if the newest one is deleted.
const LOOKED_AT: usize = 20;
/// The time after which a message is forgotten for which nobody asks any more.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(300);
/// Users and conversations of which the newest decision is remembered, and the newest notification: about 10 MiB each.
const REMEMBERED_MAX: usize = 100_000;

/// The way to push services.
#[async_trait]
pub trait Notifier: Send + Sync + 'static {
    /// Sends a notification to a device.
    async fn notify(&self, device: &Device, notification: &Notification) -> Sent;
}

/// The positions of users in conversations.
type Positions = Cache<(UserId, ConversationId), Seq>;

/// Decides for the users whose home this gateway is.
pub struct Decider {
    router: Arc<Router>,
    notifier: Arc<dyn Notifier>,
    /// The time for which a user must not have looked: rule [push-grace].
    grace: Duration,
    queue: Mutex<Queue>,
    is_due: Notify,
    /// The newest message about which it is decided.
    decided: Positions,
    /// The newest message of which a notification was sent that the user has not read since.
    shown: Positions,
}

/// What is to be done about one conversation.
enum Verdict {
    /// Nothing. It is read, muted, gone, or nobody's concern any more.
    Done,
    Send(Box<Notification>),
    /// It could not be found out.
    Unknown,
}

impl Pushes for Decider {
    fn ask(&self, conversation: ConversationId, users: ToNotify) -> Vec<UserId> {
        let now = Instant::now();
        let mut undecided = Vec::new();
        for (user, seq) in users {
            let decided = self.decided.get(&(user.clone(), conversation));
            if decided.is_some_and(|decided| decided >= seq) || self.router.has_no_devices(&user) {
                continue;
            }
            lock(&self.queue).add(&user, conversation, seq, now);
            undecided.push(user);
        }
        if !undecided.is_empty() {
            self.is_due.notify_one();
        }
        undecided
    }

    fn marked(&self, conversation: ConversationId, receipt: &Receipt) {
        let user = &receipt.user;
        // What a session that is away got, nobody has seen.
        let delivered = receipt.delivered_seq.filter(|_| !receipt.away);
        let Some(upto) = receipt.read_seq.max(delivered) else {
            return;
        };
        let key = (user.clone(), conversation);
        let is_read = |shown: &Seq| receipt.read_seq.is_some_and(|read| read >= *shown);
        let cleared = self.shown.get(&key).filter(is_read);
        let mut queue = lock(&self.queue);
        queue.settle(user, conversation, upto);
        if let Some(seq) = cleared {
            self.shown.remove(&key);
            queue.add_silent(user, conversation, seq, Instant::now());
            self.is_due.notify_one();
        }
        drop(queue);
        self.note_decided(key, upto);
    }

    fn looked(&self, user: &UserId) {
        lock(&self.queue).changed(user, Instant::now());
        self.is_due.notify_one();
    }
}

impl Decider {
    #[must_use]
    pub fn new(router: Arc<Router>, notifier: Arc<dyn Notifier>, grace: Duration) -> Arc<Self> {
        Arc::new(Self {
            router,
            notifier,
            grace,
            queue: Mutex::default(),
            is_due: Notify::new(),
            decided: Cache::new(REMEMBERED_MAX),
            shown: Cache::new(REMEMBERED_MAX),
        })
    }

    fn note_decided(&self, key: (UserId, ConversationId), seq: Seq) {
        if self.decided.get(&key).is_none_or(|known| known < seq) {
            self.decided.insert(key, seq);
        }
    }

    /// Makes the decisions that are due. It never returns.
    pub async fn run(self: Arc<Self>) {
        let mut running = FuturesUnordered::new();
        let waiting = gauge!("chat_push_waiting");
        loop {
            let next = loop {
                let mut queue = lock(&self.queue);
                #[expect(clippy::cast_precision_loss, reason = "a gauge")]
                waiting.set(queue.len() as f64);
                if running.len() >= DECISIONS_AT_ONCE {
                    break None;
                }
                let Some((user, taken)) = queue.take(Instant::now()) else {
                    break queue.next();
                };
                drop(queue);
                running.push(self.decide(user, taken));
            };
            tokio::select! {
                biased;
                Some(()) = running.next(), if !running.is_empty() => {}
                () = self.is_due.notified() => {}
                () = until(next) => {}
            }
        }
    }

    async fn decide(&self, user: UserId, waiting: Vec<(ConversationId, Waiting)>) {
        let decided = Box::pin(self.decided_of(&user, waiting)).await;
        for (conversation, seq) in &decided.done {
            self.note_decided((user.clone(), *conversation), *seq);
        }
        lock(&self.queue).decided(&user, decided, Instant::now());
    }

    async fn decided_of(&self, user: &UserId, waiting: Vec<(ConversationId, Waiting)>) -> Decided {
        let mut decided = Decided::default();
        let devices = match self.router.devices_of(user).await {
            Ok(devices) => devices,
            // The owner asks the new home.
            Err(Error::Moved) => {
                self.drop_all(user, &waiting);
                return decided;
            }
            Err(_) => {
                decided.repeat(AGAIN_AFTER.0);
                return decided;
            }
        };
        if devices.is_empty() {
            decided.done = waiting.iter().map(|(id, w)| (*id, w.seq)).collect();
            return decided;
        }
        let now = Instant::now();
        let ready = self.ready(user, waiting, now, &mut decided);
        if ready.is_empty() {
            return decided;
        }
        // Rule [push-fresh]: what is sent is as the inbox has it now.
        let Ok(rows) = self.router.inbox_rows(user).await else {
            decided.repeat(AGAIN_AFTER.0);
            return decided;
        };
        let badge = badge(&rows);
        for (conversation, waiting) in ready {
            let row = rows.iter().find(|row| row.conversation == conversation);
            let verdict = self.verdict(user, row, conversation, &waiting, badge).await;
            match verdict {
                Verdict::Done => decided.done.push((conversation, waiting.seq)),
                Verdict::Unknown => decided.repeat(AGAIN_AFTER.0),
                Verdict::Send(notification) => {
                    let sent = self.send(user, &devices, &waiting, &notification).await;
                    decided.has_sent |= sent.is_any;
                    let message = notification.message.as_ref();
                    if let (Some(after), Some(_)) = (sent.again, message) {
                        decided.repeat(after);
                        decided.sent.push((conversation, sent.devices));
                        continue;
                    }
                    let seq = message.map_or(waiting.seq, |m| m.seq.max(waiting.seq));
                    if sent.is_any && message.is_some() {
                        self.shown.insert((user.clone(), conversation), seq);
                    }
                    decided.done.push((conversation, seq));
                }
            }
        }
        decided
    }

    /// Forgets all of this without a decision. Whoever still wants one asks again.
    fn drop_all(&self, user: &UserId, waiting: &[(ConversationId, Waiting)]) {
        let mut queue = lock(&self.queue);
        for (conversation, waiting) in waiting {
            queue.drop_waiting(user, *conversation, waiting.seq);
        }
    }

    /// Returns what may be sent now, and notes when to look at the rest again. What counts as delivered is done.
    fn ready(
        &self,
        user: &UserId,
        waiting: Vec<(ConversationId, Waiting)>,
        now: Instant,
        decided: &mut Decided,
    ) -> Vec<(ConversationId, Waiting)> {
        let (attention, lasted) = self.router.attention(user);
        let is_away = attention != Attention::Present;
        let mut ready = Vec::new();
        for (conversation, waiting) in waiting {
            if now.duration_since(waiting.asked) > FORGOTTEN_AFTER {
                self.drop_all(user, &[(conversation, waiting)]);
                continue;
            }
            let at = if waiting.is_silent {
                now
            } else if is_away {
                now + self.grace.saturating_sub(lasted)
            } else if waiting.since + PRESENT_MAX <= now {
                // Rule [push-present]: no session can hold up the offset.
                decided.done.push((conversation, waiting.seq));
                continue;
            } else {
                waiting.since + PRESENT_MAX
            };
            if at <= now {
                ready.push((conversation, waiting));
            } else {
                decided.repeat(at - now);
            }
        }
        ready
    }

    /// Decides about one conversation: rule [push-unread].
    async fn verdict(
        &self,
        user: &UserId,
        row: Option<&InboxRow>,
        conversation: ConversationId,
        waiting: &Waiting,
        badge: u64,
    ) -> Verdict {
        if waiting.is_silent {
            return Verdict::Send(Box::new(Notification {
                conversation,
                badge,
                message: None,
            }));
        }
        let Some(row) = row else {
            return Verdict::Done;
        };
        let wants = row.settings.push && !is_muted(row);
        if row.read_seq >= waiting.seq || !wants {
            return Verdict::Done;
        }
        match self.message(user, row, waiting.seq).await {
            Ok(Some(message)) => Verdict::Send(Box::new(Notification {
                conversation,
                badge,
                message: Some(message),
            })),
            Ok(None) => Verdict::Done,
            Err(error) => {
                tracing::debug!(%error, "a message to notify of could not be read");
                Verdict::Unknown
            }
        }
    }

    /// Returns the newest message for the user: the one that the inbox shows, unless that is deleted or no message of
    /// others. `None` if there is none among the entries before it.
    async fn message(
        &self,
        user: &UserId,
        row: &InboxRow,
        seq: Seq,
    ) -> Result<Option<Message>, Error> {
        let Some(summary) = &row.summary else {
            return Ok(None);
        };
        let message = |last: &Last| Message {
            kind: summary.kind,
            // The other participant of a dm is the sender.
            name: summary.name.clone().filter(|_| summary.kind != Kind::Dm),
            seq: last.seq,
            message_id: last.message_id,
            sender: last.sender.clone(),
            body: body(&last.preview),
            at: last.at,
        };
        let is_shown =
            |last: &&Last| last.kind == EntryKind::Text && !last.deleted && last.sender != *user;
        let newest = summary.last.as_ref().filter(|last| last.seq >= seq);
        if let Some(last) = newest.filter(is_shown) {
            return Ok(Some(message(last)));
        }
        let before = GetHistory {
            range: LogRange::Before(seq + 1),
            limit: LOOKED_AT,
        };
        let asked = self.router.ask(row.conversation, user.clone(), before);
        let page = match asked.await {
            Ok(page) => page,
            Err(error) if error.is_unavailable() || error == Error::Closed => return Err(error),
            // The user has left, or has joined later.
            Err(_) => return Ok(None),
        };
        let unread = page.entries.iter().filter(|entry| entry.seq > row.read_seq);
        let lasts = unread.rev().map(|entry| {
            let state = page.states.iter().find(|(seq, _)| *seq == entry.seq);
            entry.newest(state.map(|(_, state)| &**state)).last
        });
        Ok(lasts
            .into_iter()
            .find(|last| is_shown(&last))
            .as_ref()
            .map(message))
    }

    /// Sends a notification to all devices that lack it.
    async fn send(
        &self,
        user: &UserId,
        devices: &[Device],
        waiting: &Waiting,
        notification: &Notification,
    ) -> SentTo {
        let left = devices.iter().filter(|d| !waiting.sent.contains(&d.id));
        let sent = left.map(|device| async move {
            // Rule [push-token]: a token belongs to its last user.
            let hash = device.token_hash();
            match self.router.token_is_of(&hash, user, &device.id).await {
                Ok(true) => (device, self.notifier.notify(device, notification).await),
                Ok(false) => (device, Sent::Gone),
                Err(_) => (device, Sent::Later(None)),
            }
        });
        let mut result = SentTo {
            devices: waiting.sent.clone(),
            is_any: false,
            again: None,
        };
        for (device, sent) in join_all(sent).await {
            match sent {
                Sent::Later(after) => {
                    let after = pause(waiting.tries, after);
                    result.again = result.again.max(Some(after));
                    continue;
                }
                Sent::Gone => {
                    let (id, version) = (&device.id, device.version);
                    if let Err(error) = self.router.forget_device(user, id, version).await {
                        tracing::debug!(%error, "a device that is gone was not removed");
                    }
                }
                Sent::Done => result.is_any = true,
                Sent::Refused(_) => {}
            }
            result.devices.push(device.id.clone());
        }
        result
    }
}

/// What became of a notification.
struct SentTo {
    /// The devices that have it, or never will.
    devices: Vec<String>,
    is_any: bool,
    /// When to try the others again.
    again: Option<Duration>,
}

/// The pause before a notification is sent again that a push service did not take.
fn pause(tries: u32, asked: Option<Duration>) -> Duration {
    let doubled = AGAIN_AFTER.0 * 2_u32.pow(tries.min(5));
    asked.unwrap_or(doubled).clamp(AGAIN_AFTER.0, AGAIN_AFTER.1)
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn is_muted(row: &InboxRow) -> bool {
    let until = row.settings.muted_until;
    until.is_some_and(|until| until > clock::wall())
}

/// Returns the number for the app's icon: the unread messages of dms and groups that are not muted.
fn badge(rows: &[InboxRow]) -> u64 {
    let unread = rows.iter().filter(|row| !is_muted(row)).map(|row| {
        let Some(summary) = row.summary.as_ref().filter(|s| s.kind != Kind::Channel) else {
            return 0;
        };
        let last_seq = summary.last.as_ref().map_or(0, |last| last.seq);
        let texts = summary.texts.unwrap_or(last_seq);
        row.unread(summary.joined_seq, last_seq, texts, &row.deleted.1.highest)
    });
    unread.sum()
}

/// Returns the text that a notification shows. The inbox has its first characters only.
fn body(preview: &str) -> String {
    let is_cut = preview.chars().count() >= PREVIEW_CHARS;
    let end = if is_cut { "…" } else { "" };
    format!("{preview}{end}")
}
