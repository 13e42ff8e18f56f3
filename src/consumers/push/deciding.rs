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
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::{
    Message, Notification, Sent,
    queue::{Decided, Positions, Queue, SentToSome, Waiting},
    services::{Services, service_of},
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
/// The time after which a message counts as delivered to a session that looks and says nothing: rule [push-present]. A dead
/// session is closed before that. If more messages come, it is twice as long at most.
const PRESENT_MAX: Duration = Duration::from_secs(90);
/// The pause before a decision is repeated that failed, and the longest one.
const AGAIN_AFTER: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));
/// Entries among which a message to notify of is looked for, if the newest one is deleted.
const LOOKED_AT: usize = 20;
/// The time after which a message is forgotten for which nobody asks any more.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(300);
/// Conversations of a user that are sent at once.
const AT_ONCE: usize = 16;
/// Attempts for a device whose push service never answers, while others answer.
const TRIES_MAX: u32 = 10;

/// The way to push services.
#[async_trait]
pub trait Notifier: Send + Sync + 'static {
    /// Sends a notification to a device.
    async fn notify(&self, device: &Device, notification: &Notification) -> Sent;
}

/// Decides for the users whose home this gateway is.
pub struct Decider {
    router: Arc<Router>,
    notifier: Arc<dyn Notifier>,
    /// The time for which a user must not have looked: rule [push-grace].
    grace: Duration,
    state: Mutex<State>,
    is_due: Notify,
}

#[derive(Default)]
struct State {
    queue: Queue,
    /// The newest message about which it is decided.
    decided: Positions,
    /// The newest message that a user has read, or of which a session that looks has said so.
    seen: Positions,
    /// The newest message of which a notification was sent that the user has not read since.
    shown: Positions,
    services: Services,
}

impl State {
    fn is_decided(&self, user: &UserId, conversation: ConversationId, seq: Seq) -> bool {
        let known = [&self.decided, &self.seen];
        let known = known.map(|positions| positions.get(user, conversation));
        known.into_iter().flatten().any(|known| known >= seq)
    }
}

/// What is to be done about one conversation.
enum Verdict {
    /// Nothing. It is read, muted, gone, or nobody's concern any more.
    Done,
    /// A notification of this message, or a silent one.
    Send(Option<Box<Message>>),
    /// It could not be found out.
    Unknown,
}

impl Pushes for Decider {
    fn ask(&self, conversation: ConversationId, users: ToNotify) -> Vec<UserId> {
        let now = Instant::now();
        let mut undecided = Vec::new();
        let mut state = lock(&self.state);
        for (user, seq) in users {
            if state.is_decided(&user, conversation, seq) || self.router.has_no_devices(&user) {
                continue;
            }
            state.queue.add(&user, conversation, seq, now);
            undecided.push(user);
        }
        drop(state);
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
        let state = &mut *lock(&self.state);
        state.seen.raise(user, conversation, upto);
        state.queue.settle(user, conversation, upto);
        let shown = state.shown.get(user, conversation);
        if let Some(seq) = shown.filter(|shown| receipt.read_seq.is_some_and(|read| read >= *shown))
            && state
                .queue
                .add_silent(user, conversation, seq, Instant::now())
        {
            state.shown.remove(user, conversation);
            self.is_due.notify_one();
        }
    }

    fn looked(&self, user: &UserId) {
        lock(&self.state).queue.changed(user, Instant::now());
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
            state: Mutex::default(),
            is_due: Notify::new(),
        })
    }

    /// Makes the decisions that are due. It never returns.
    pub async fn run(self: Arc<Self>) {
        let mut running = FuturesUnordered::new();
        let waiting = gauge!("chat_push_waiting");
        loop {
            let next = loop {
                let queue = &mut lock(&self.state).queue;
                #[expect(clippy::cast_precision_loss, reason = "a gauge")]
                waiting.set(queue.len() as f64);
                if running.len() >= DECISIONS_AT_ONCE {
                    break None;
                }
                let Some((user, taken)) = queue.take(Instant::now()) else {
                    break queue.next();
                };
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
        let state = &mut *lock(&self.state);
        for (conversation, seq) in &decided.done {
            state.decided.raise(&user, *conversation, *seq);
        }
        state.queue.decided(&user, decided, Instant::now());
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
        let mut ready = self.ready(user, waiting, Instant::now(), &mut decided);
        if ready.len() > AT_ONCE {
            ready.truncate(AT_ONCE);
            decided.repeat(Duration::ZERO);
        }
        if ready.is_empty() {
            return decided;
        }
        decided.has_looked = true;
        if self
            .notify(user, &devices, ready, &mut decided)
            .await
            .is_err()
        {
            decided.repeat(AGAIN_AFTER.0);
        }
        decided
    }

    /// Sends what is to be sent. Rule [push-fresh]: it is as the inbox has it now.
    async fn notify(
        &self,
        user: &UserId,
        devices: &[Device],
        ready: Vec<(ConversationId, Waiting)>,
        decided: &mut Decided,
    ) -> Result<(), Error> {
        let ids = ready.iter().map(|(id, _)| *id).collect();
        let rows = self.router.ask_rows(user, Some(ids)).await?;
        let mut to_send = Vec::new();
        for (conversation, waiting) in ready {
            let row = rows.iter().find(|row| row.conversation == conversation);
            match self.verdict(user, row, &waiting).await {
                Verdict::Done => decided.done.push((conversation, waiting.seq)),
                Verdict::Unknown => decided.repeat(AGAIN_AFTER.0),
                Verdict::Send(message) => to_send.push((conversation, waiting, message)),
            }
        }
        if to_send.is_empty() {
            return Ok(());
        }
        let badge = badge(&self.router.inbox_rows(user).await?);
        for (conversation, waiting, message) in to_send {
            let notification = Notification {
                conversation,
                badge,
                message: message.map(|message| *message),
            };
            self.notify_of(user, devices, waiting, notification, decided)
                .await;
        }
        Ok(())
    }

    /// Sends a notification of one conversation.
    async fn notify_of(
        &self,
        user: &UserId,
        devices: &[Device],
        waiting: Waiting,
        notification: Notification,
        decided: &mut Decided,
    ) {
        let conversation = notification.conversation;
        let seq = notification.message.as_ref().map(|message| message.seq);
        let before = lock(&self.state).shown.get(user, conversation);
        if let Some(seq) = seq {
            if waiting.tries == 0 && before >= Some(seq) {
                // What the notification shows was deleted meanwhile, and the one before it is known.
                return decided.done.push((conversation, waiting.seq));
            }
            // First, so that a user who reads it meanwhile gets it cleared.
            lock(&self.state).shown.raise(user, conversation, seq);
        }
        let sent = self.send(user, devices, &waiting, &notification).await;
        if seq.is_some() && !sent.is_any && waiting.sent.is_empty() {
            lock(&self.state).shown.restore(user, conversation, before);
        }
        if let (Some(after), Some(_)) = (sent.again, seq) {
            decided.repeat(after);
            decided.sent.push(SentToSome {
                conversation,
                seq: waiting.seq,
                devices: sent.devices,
                not_before: Instant::now() + after,
            });
        } else {
            let seq = seq.map_or(waiting.seq, |seq| seq.max(waiting.seq));
            decided.done.push((conversation, seq));
        }
    }

    /// Forgets all of this without a decision. Whoever still wants one asks again.
    fn drop_all(&self, user: &UserId, waiting: &[(ConversationId, Waiting)]) {
        let queue = &mut lock(&self.state).queue;
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
            // Rule [push-present]: no session can hold up the offset.
            let delivered_at = (waiting.since + PRESENT_MAX).min(waiting.first + 2 * PRESENT_MAX);
            let at = if waiting.is_silent {
                now
            } else if is_away {
                (now + self.grace.saturating_sub(lasted)).max(waiting.not_before)
            } else if delivered_at <= now {
                decided.done.push((conversation, waiting.seq));
                continue;
            } else {
                delivered_at
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
    async fn verdict(&self, user: &UserId, row: Option<&InboxRow>, waiting: &Waiting) -> Verdict {
        if waiting.is_silent {
            return Verdict::Send(None);
        }
        let Some(row) = row else {
            return Verdict::Done;
        };
        let wants = row.settings.push && !is_muted(row);
        if row.read_seq >= waiting.seq || !wants {
            return Verdict::Done;
        }
        match self.message(user, row, waiting.seq).await {
            Ok(Some(message)) => Verdict::Send(Some(Box::new(message))),
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
                Ok(true) => (device, self.send_to(device, waiting, notification).await),
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

impl Decider {
    /// Sends a notification to a device, unless its push service has not answered lately.
    async fn send_to(
        &self,
        device: &Device,
        waiting: &Waiting,
        notification: &Notification,
    ) -> Sent {
        let service = service_of(device);
        if let Some(pause) = lock(&self.state).services.pause(&service, Instant::now()) {
            return Sent::Later(Some(pause));
        }
        let sent = self.notifier.notify(device, notification).await;
        let services = &mut lock(&self.state).services;
        let failed = sent == Sent::Later(None);
        services.answered(&service, device.provider, failed, Instant::now());
        // Others have got theirs meanwhile, so it is this address that never answers.
        let others = services.succeeded(device.provider);
        if failed && waiting.tries >= TRIES_MAX && others.is_some_and(|at| at > waiting.since) {
            return Sent::Refused("it does not answer".into());
        }
        sent
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
    match preview.char_indices().nth(PREVIEW_CHARS - 1) {
        // It may have been cut here.
        Some((last, _)) => format!("{}…", &preview[..last]),
        None => preview.to_owned(),
    }
}
