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
use tokio::{sync::Notify, time::Instant};

use super::{
    Message, Notification, PAUSE_MAX, Sent,
    queue::{Decided, Done, Positions, Queue, SentToSome, Waiting},
    services::{Services, service_of},
    showing::{badge, is_muted, message},
};
use crate::{
    chat::{Error, Receipt},
    cluster::{Attention, Pushes, Router, ToNotify, Users},
    model::{ConversationId, Device, Seq, UserId},
    store::InboxRow,
    tasks::{contain, lock, wait_until},
};

/// Decisions that are made at once. Each may send to all devices of a user.
const DECISIONS_AT_ONCE: usize = 256;
/// The time after which a message counts as delivered to a session that looks and says nothing: rule [push-present]. A dead
/// session is closed before that. If more messages come, it is twice as long at most.
const PRESENT_MAX: Duration = Duration::from_secs(90);
/// The pause before a decision is repeated that failed, and the longest one.
const AGAIN_AFTER: (Duration, Duration) = (Duration::from_secs(2), PAUSE_MAX);
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
    users: Arc<Users>,
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
            if state.is_decided(&user, conversation, seq) || self.users.has_no_devices(&user) {
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
    pub fn new(
        router: Arc<Router>,
        users: Arc<Users>,
        notifier: Arc<dyn Notifier>,
        grace: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            router,
            users,
            notifier,
            grace,
            state: Mutex::default(),
            is_due: Notify::new(),
        })
    }

    /// Makes the decisions that are due. It never returns.
    pub async fn run(self: Arc<Self>) {
        lock(&self.state).queue.give_back(Instant::now());
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
                () = wait_until(next) => {}
            }
        }
    }

    async fn decide(&self, user: UserId, waiting: Vec<(ConversationId, Waiting)>) {
        let mut decided = Decided::default();
        let deciding = Box::pin(self.decide_on(&user, waiting, &mut decided));
        let what = "a decision about notifications";
        if contain(what, &user, deciding).await.is_none() {
            // What was sent counts.
            decided.repeat(Instant::now() + AGAIN_AFTER.1);
        }
        let state = &mut *lock(&self.state);
        for done in &decided.done {
            state.decided.raise(&user, done.conversation, done.seq);
        }
        state.queue.decided(&user, decided, Instant::now());
    }

    async fn decide_on(
        &self,
        user: &UserId,
        waiting: Vec<(ConversationId, Waiting)>,
        decided: &mut Decided,
    ) {
        let devices = match self.users.devices_of(user).await {
            Ok(devices) => devices,
            // The owner asks the new home.
            Err(Error::Moved) => return self.drop_all(user, &waiting),
            Err(_) => return decided.repeat(Instant::now() + AGAIN_AFTER.0),
        };
        if devices.is_empty() {
            decided.done = waiting.iter().map(|(id, w)| done(*id, w)).collect();
            return;
        }
        let mut ready = self.ready(user, waiting, Instant::now(), decided);
        if ready.len() > AT_ONCE {
            ready.truncate(AT_ONCE);
            decided.repeat(Instant::now());
        }
        if ready.is_empty() {
            return;
        }
        decided.has_looked = true;
        if self.notify(user, &devices, ready, decided).await.is_err() {
            decided.repeat(Instant::now() + AGAIN_AFTER.0);
        }
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
        let rows = self.users.ask_rows(user, Some(ids)).await?;
        let mut to_send = Vec::new();
        for (conversation, waiting) in ready {
            let row = rows.iter().find(|row| row.conversation == conversation);
            let verdict = self.verdict(user, row, &waiting);
            let verdict = contain("a decision about notifications", user, verdict).await;
            match verdict.unwrap_or(Verdict::Unknown) {
                Verdict::Done => decided.done.push(done(conversation, &waiting)),
                Verdict::Unknown => decided.repeat(Instant::now() + AGAIN_AFTER.0),
                Verdict::Send(message) => to_send.push((conversation, waiting, message)),
            }
        }
        if to_send.is_empty() {
            return Ok(());
        }
        let badge = badge(&self.users.inbox_rows(user).await?);
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
        let Ok(before) = self.begin_showing(user, conversation, &waiting, seq) else {
            return decided.done.push(done(conversation, &waiting));
        };
        let sent = self.send(user, devices, &waiting, &notification).await;
        if seq.is_some() && !sent.is_any && waiting.sent.is_empty() {
            lock(&self.state).shown.restore(user, conversation, before);
        }
        let again = sent.held.iter().map(|(_, until)| *until).min();
        match (seq, again) {
            (Some(_), Some(again)) => {
                decided.repeat(again);
                decided.sent.push(SentToSome {
                    conversation,
                    seq: waiting.seq,
                    devices: sent.devices,
                    held: sent.held,
                    has_tried: sent.has_tried,
                });
            }
            // A silent notification is sent once.
            _ => decided.done.push(Done {
                seq: seq.map_or(waiting.seq, |seq| seq.max(waiting.seq)),
                ..done(conversation, &waiting)
            }),
        }
    }

    /// Notes what a notification will show, before it is sent: a user who reads it meanwhile gets it cleared. Returns what was
    /// shown before.
    ///
    /// # Errors
    /// Nothing is to be sent: the user has seen the message meanwhile, or it is shown already.
    fn begin_showing(
        &self,
        user: &UserId,
        conversation: ConversationId,
        waiting: &Waiting,
        seq: Option<Seq>,
    ) -> Result<Option<Seq>, ()> {
        let mut state = lock(&self.state);
        let before = state.shown.get(user, conversation);
        let Some(seq) = seq else {
            return Ok(before);
        };
        // The newest message was deleted, and the one before it is shown.
        let is_shown = before >= Some(seq) && state.decided.get(user, conversation) >= Some(seq);
        let is_seen = state.seen.get(user, conversation) >= Some(waiting.seq);
        if is_shown || is_seen {
            return Err(());
        }
        state.shown.raise(user, conversation, seq);
        Ok(before)
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
        let (attention, lasted) = self.users.attention(user);
        let is_away = attention != Attention::Present;
        let mut ready = Vec::new();
        for (conversation, waiting) in waiting {
            if now.duration_since(waiting.asked) > FORGOTTEN_AFTER {
                self.drop_all(user, &[(conversation, waiting)]);
                continue;
            }
            // Rule [push-present]: no session can hold up the offset. One that has just come may say soon that it is away.
            let settled_at = now + self.grace.saturating_sub(lasted);
            let delivered_at = (waiting.since + PRESENT_MAX).min(waiting.first + 2 * PRESENT_MAX);
            let delivered_at = delivered_at.max(settled_at);
            let at = if waiting.is_silent {
                now
            } else if is_away {
                settled_at
            } else if delivered_at <= now {
                decided.done.push(done(conversation, &waiting));
                continue;
            } else {
                delivered_at
            };
            if at <= now {
                ready.push((conversation, waiting));
            } else {
                decided.repeat(at);
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
        match message(&self.router, user, row, waiting.seq).await {
            Ok(Some(message)) => Verdict::Send(Some(Box::new(message))),
            Ok(None) => Verdict::Done,
            Err(error) => {
                tracing::debug!(%error, "a message to notify of could not be read");
                Verdict::Unknown
            }
        }
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
            match self.users.token_is_of(&hash, user, &device.id).await {
                Ok(true) => {
                    let sending = self.send_to(device, waiting, notification);
                    let sent = contain("a notification", user, sending).await;
                    // The other devices' notifications count.
                    let later = Tried::Sent(Sent::Later(Some(AGAIN_AFTER.1)));
                    (device, sent.unwrap_or(later))
                }
                Ok(false) => (device, Tried::Sent(Sent::Gone)),
                Err(_) => (device, Tried::NotNow(AGAIN_AFTER.0)),
            }
        });
        let sent = join_all(sent).await;
        let mut result = SentTo {
            devices: waiting.sent.clone(),
            held: Vec::new(),
            is_any: sent
                .iter()
                .any(|(_, sent)| *sent == Tried::Sent(Sent::Done)),
            has_tried: false,
        };
        for (device, sent) in sent {
            let after = match sent {
                Tried::NotNow(after) => Some(after),
                Tried::Sent(Sent::Later(after)) => {
                    result.has_tried = true;
                    let after = pause(waiting.tries, after);
                    (!self.is_given_up(device, waiting, result.is_any)).then_some(after)
                }
                Tried::Sent(Sent::Gone) => {
                    let (id, version) = (&device.id, device.version);
                    if let Err(error) = self.users.forget_device(user, id, version).await {
                        tracing::debug!(%error, "a device that is gone was not removed");
                    }
                    None
                }
                Tried::Sent(Sent::Done | Sent::Refused(_)) => None,
            };
            match after {
                Some(after) => result
                    .held
                    .push((device.id.clone(), Instant::now() + after)),
                None => result.devices.push(device.id.clone()),
            }
        }
        result
    }

    /// Whether a device is not tried again for a message: it was tried often, while others of its provider got something, or
    /// another device of the user has it.
    fn is_given_up(&self, device: &Device, waiting: &Waiting, is_any: bool) -> bool {
        let others = lock(&self.state).services.succeeded(device.provider);
        let has_another = is_any || !waiting.sent.is_empty();
        waiting.tries >= TRIES_MAX && (has_another || others.is_some_and(|at| at > waiting.since))
    }

    /// Sends a notification to a device, unless its push service does not take it now.
    async fn send_to(
        &self,
        device: &Device,
        waiting: &Waiting,
        notification: &Notification,
    ) -> Tried {
        let now = Instant::now();
        let held = waiting
            .held
            .iter()
            .find(|(id, until)| *id == device.id && *until > now);
        if let Some((_, until)) = held {
            return Tried::NotNow(*until - now);
        }
        let service = service_of(device);
        if let Some(pause) = lock(&self.state).services.pause(&service, now) {
            return Tried::NotNow(pause);
        }
        let sent = self.notifier.notify(device, notification).await;
        let services = &mut lock(&self.state).services;
        match &sent {
            Sent::Later(None) => services.failed(&service, Instant::now()),
            Sent::Done | Sent::Gone => {
                services.succeeded_now(&service, device.provider, Instant::now());
            }
            Sent::Later(Some(_)) | Sent::Refused(_) => services.answered(&service),
        }
        Tried::Sent(sent)
    }
}

/// The end of what waited in a conversation.
fn done(conversation: ConversationId, waiting: &Waiting) -> Done {
    Done {
        conversation,
        seq: waiting.seq,
        is_silent: waiting.is_silent,
    }
}

/// What became of a notification to one device.
#[derive(PartialEq, Eq)]
enum Tried {
    Sent(Sent),
    /// Nothing was sent, and is to be tried after this time.
    NotNow(Duration),
}

/// What became of a notification.
struct SentTo {
    /// The devices that have it, or never will.
    devices: Vec<String>,
    /// The others, with the time of the next attempt.
    held: Vec<(String, Instant)>,
    is_any: bool,
    has_tried: bool,
}

/// The pause before a notification is sent again that a push service did not take.
fn pause(tries: u32, asked: Option<Duration>) -> Duration {
    let doubled = AGAIN_AFTER.0 * 2_u32.pow(tries.min(5));
    asked.unwrap_or(doubled).clamp(AGAIN_AFTER.0, AGAIN_AFTER.1)
}
