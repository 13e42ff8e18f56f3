//! One client connection: one task, one loop. Frames come in and become requests; replies and events go
//! out, all that is queued in one flush.

mod connecting;
mod reading;
mod writing;

use std::{collections::VecDeque, sync::Arc, time::Duration};

use axum::extract::ws::WebSocket;
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use metrics::{Counter, counter, gauge};
use tokio::{
    select,
    time::{Instant, sleep_until},
};

use self::{
    connecting::{Registered, expiry},
    reading::{Came, Next, next},
};
use super::{
    Gateway,
    admission::Place,
    rates::{UserRate, Wait},
    requests, resume,
};
use crate::{
    clock,
    fanout::{Admitted, Closing, Frame, Line, Subscriber},
    model::{
        SessionId, Topic,
        limits::{CHANNELS_JOINED_MAX, REQUESTS_IN_FLIGHT_MAX, WATCHED_MAX},
    },
    mutation::{Mutation, broken},
    protocol::{Answer, CloseCode, Codec, ErrorCode, Event, Named, Refusal, Reply, Request, Users},
};

/// Steps of a session's loop between two looks at the time, however much its client sends or is sent.
const STEPS_AT_ONCE: u32 = 64;
/// Ping intervals without a sign of life before the connection is given up.
const SILENT_PINGS_MAX: u32 = 2;
/// After so many writes in a row it is the client's turn.
const WRITES_IN_A_ROW: u32 = 4;
/// Nothing is read for so long after a request that was too much.
const REFUSED_REST: Duration = Duration::from_millis(5);
/// Smaller frames and replies count by their number only.
const SMALL_BYTES: usize = 1 << 10;
/// What is read for each user who is watched: when they were last seen.
const WATCH_BYTES: usize = 512;
/// What is read for a page of an inbox: all of it.
const INBOX_BYTES: usize = 64 << 10;
/// What is read for a page of public channels or of participants, also if few of them are answered.
const LISTING_BYTES: usize = 16 << 10;

#[derive(Clone)]
pub(super) struct Counters {
    frames: Counter,
    opened: Counter,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            frames: counter!("chat_frames_sent_total"),
            opened: counter!("chat_sessions_opened_total"),
        }
    }
}

pub(super) struct Session {
    id: SessionId,
    gateway: Arc<Gateway>,
    socket: WebSocket,
    codec: Codec,
    /// To the socket, past the WebSocket library.
    line: Arc<Line>,
    /// Requests and control frames refused because of the rate limit, less those that were accepted since.
    refused: u32,
    place: Place,
    _counted: Admitted,
}

/// After `connect`.
struct Live {
    rate: Arc<UserRate>,
    subscriber: Arc<Subscriber>,
    _registered: Registered,
    expires_at: Instant,
    replies: FuturesUnordered<BoxFuture<'static, Finished>>,
    /// What the requests under way may hold, all together.
    asked_bytes: usize,
    /// Nothing is read until then: the client, or its user on another socket, has asked for too much.
    rests_until: Option<Instant>,
}

/// A request that has come to its end.
struct Finished {
    reply: Option<Reply>,
    /// As counted when it began.
    asked_bytes: usize,
}

/// What the loop of a session does next.
enum Step {
    Finished(Finished),
    Next(Next),
    /// The timer has fired.
    Time,
    /// The gateway begins to drain.
    Draining,
}

/// What a step waits for.
enum Then {
    Goes(Result<(), End>),
    Writes,
    Looks,
}

/// What the loop remembers between two steps.
struct Pace {
    steps: u32,
    silent_pings: u32,
    /// Once the gateway drains: when to close.
    leave_at: Option<Instant>,
    /// Steps in a row that wrote.
    writes: u32,
}

type End = CloseCode;

impl Session {
    pub(super) fn new(
        id: SessionId,
        gateway: Arc<Gateway>,
        socket: WebSocket,
        codec: Codec,
        line: Arc<Line>,
        place: Place,
    ) -> Self {
        let counted = gateway.hub.admit();
        let session = Self {
            id,
            gateway,
            socket,
            codec,
            line,
            refused: 0,
            place,
            _counted: counted,
        };
        session.await_message();
        session
    }

    /// Runs until the client leaves, falls too far behind, or the gateway drains.
    pub(super) async fn run(&mut self) {
        let gateway = self.gateway.clone();
        gateway.sent.opened.increment(1);
        gauge!("chat_sessions").set(gateway.hub.sessions() as f64);
        let code = match Box::pin(self.connect()).await {
            Err(code) => code,
            Ok(mut live) => {
                live.subscriber.outbox.attach(self.line.clone());
                let code = self.live(&mut live).await;
                live.subscriber.outbox.close(code);
                code
            }
        };
        tracing::debug!(session = %self.id, reason = code.reason(), "session ended");
        counter!("chat_sessions_closed_total", "reason" => code.reason()).increment(1);
        Box::pin(self.close(code)).await;
        gauge!("chat_sessions").set(gateway.hub.sessions().saturating_sub(1) as f64);
    }

    async fn live(&mut self, live: &mut Live) -> End {
        let gateway = self.gateway.clone();
        let ping_interval = Duration::from_millis(gateway.session.ping_interval_ms);
        let first = next_wake(Instant::now() + ping_interval, live, None);
        let mut timer = Box::pin(sleep_until(first));
        let mut draining = std::pin::pin!(gateway.tasks.draining());
        let mut frames = VecDeque::new();
        let mut pace = Pace {
            steps: 0,
            silent_pings: 0,
            leave_at: None,
            writes: 0,
        };
        loop {
            let (takes_replies, reads) = (self.takes_replies(live), self.reads(live, &pace));
            let rests_until = live.rests_until;
            let reads_first = pace.writes == WRITES_IN_A_ROW;
            let step = match pace.overdue(timer.deadline(), &gateway) {
                Some(step) => step,
                None => select! {
                    biased;
                    // All replies that are ready, before anything is written: they go out in one flush.
                    Some(finished) = live.replies.next(), if takes_replies => Step::Finished(finished),
                    next = next(&mut self.socket, &live.subscriber, &mut frames, reads.then_some(rests_until), reads_first) => Step::Next(next),
                    () = timer.as_mut() => Step::Time,
                    () = draining.as_mut(), if pace.leave_at.is_none() => Step::Draining,
                },
            };
            // Nothing of the step is kept while something is written: each session would hold room for it.
            let then = match step {
                Step::Next(Next::Queued(Ok(()))) => Then::Writes,
                Step::Time => Then::Looks,
                step => Then::Goes(self.act(live, &mut pace, step)),
            };
            pace.writes = match then {
                Then::Writes if reads_first => 1,
                Then::Writes => pace.writes + 1,
                _ => 0,
            };
            let ended = match then {
                Then::Goes(ended) => ended,
                Then::Writes => {
                    let written = self.write(&live.subscriber, live.expires_at, &mut frames);
                    written.await
                }
                Then::Looks => {
                    let ended = self.time_passed(live, &mut pace).await;
                    let next = Instant::now() + ping_interval;
                    timer.as_mut().reset(next_wake(next, live, pace.leave_at));
                    ended
                }
            };
            if let Err(code) = ended {
                if code == CloseCode::Restart {
                    return self.finish_requests(live).await;
                }
                return code;
            }
            let latest = live
                .expires_at
                .min(pace.leave_at.unwrap_or(live.expires_at));
            if timer.deadline() > latest {
                timer.as_mut().reset(latest);
            }
        }
    }

    /// Does what is done at once.
    fn act(&mut self, live: &mut Live, pace: &mut Pace, step: Step) -> Result<(), End> {
        match step {
            Step::Finished(finished) => self.finished(live, finished),
            Step::Next(Next::Came(frame)) => return self.came(live, pace, frame),
            Step::Next(Next::Queued(Err(Closing(code)))) => return Err(code),
            Step::Draining => pace.leave_at = Some(self.announce_leaving(live)),
            Step::Next(Next::Queued(Ok(()))) | Step::Time => {}
        }
        Ok(())
    }

    /// Whether the loop takes further replies: those that it took must be written first.
    fn takes_replies(&self, live: &Live) -> bool {
        !live.replies.is_empty() && live.subscriber.outbox.reply_bytes() <= self.reply_bytes_max()
    }

    /// Whether the loop reads from its client: not while the requests under way may ask for more than is to be held.
    fn reads(&self, live: &Live, pace: &Pace) -> bool {
        live.replies.len() < REQUESTS_IN_FLIGHT_MAX
            && live.asked_bytes <= self.reply_bytes_max()
            && pace.leave_at.is_none()
    }

    /// Replies that may be queued before further requests wait.
    fn reply_bytes_max(&self) -> usize {
        self.gateway.limits.outbox_bytes / 2
    }

    /// The token may have expired, the time to leave may have come; else the client is pinged.
    async fn time_passed(&mut self, live: &mut Live, pace: &mut Pace) -> Result<(), End> {
        let now = Instant::now();
        if now >= live.expires_at {
            return Err(CloseCode::TokenExpired);
        }
        if pace.leave_at.is_some_and(|at| now >= at) {
            return Err(CloseCode::Restart);
        }
        if pace.silent_pings >= SILENT_PINGS_MAX {
            return Err(CloseCode::ConnectTimeout);
        }
        // A client that is not read from can give no sign of life.
        let rests = live.rests_until.is_some_and(|until| until > now);
        if self.reads(live, pace) && !rests {
            pace.silent_pings += 1;
        }
        self.ping(&live.subscriber, live.expires_at).await
    }

    /// The gateway drains: the client is told when it will be closed.
    fn announce_leaving(&self, live: &Live) -> Instant {
        let drain = &self.gateway.drain;
        let spread = Duration::from_millis(drain.spread_ms);
        let after = Duration::from_millis(drain.delay_ms) + spread.mul_f64(rand::random::<f64>());
        let after_ms = u64::try_from(after.as_millis()).unwrap_or_default();
        let event = Frame::encode(self.codec, &Event::Reconnect { after_ms });
        live.subscriber.outbox.push_reply(event);
        Instant::now() + after
    }

    /// What the gateway has begun for this client it finishes, before it lets go.
    async fn finish_requests(&mut self, live: &mut Live) -> End {
        let mut frames = VecDeque::new();
        loop {
            let finished = live.replies.next().await;
            let none_left = finished.is_none();
            if let Some(finished) = finished {
                self.finished(live, finished);
            }
            if none_left || !self.takes_replies(live) {
                while let Some(Ok(())) = live.subscriber.outbox.take(&mut frames).now_or_never() {
                    let written = self.write(&live.subscriber, live.expires_at, &mut frames);
                    if let Err(code) = written.await {
                        return code;
                    }
                }
            }
            if none_left {
                return CloseCode::Restart;
            }
        }
    }

    /// Something came from the client.
    fn came(&mut self, live: &mut Live, pace: &mut Pace, frame: Came) -> Result<(), End> {
        pace.silent_pings = 0;
        live.rests_until = None;
        match self.incoming(frame)? {
            Some(frame) => self.receive(live, &frame),
            // A ping or a pong. They cost as much as a request.
            None => match self.gateway.rates.request(&live.rate) {
                Ok(()) => Ok(()),
                Err(wait) => self.refuse_one(live, wait),
            },
        }
    }

    /// One more was too much: the next is read after a rest only, so that refusing costs little. Who goes on and on is
    /// closed.
    fn refuse_one(&mut self, live: &mut Live, Wait(wait): Wait) -> Result<(), End> {
        self.refused += 1;
        if self.refused > self.gateway.limits.requests_burst {
            return Err(CloseCode::RateLimit);
        }
        live.rest(wait.min(REFUSED_REST));
        Ok(())
    }

    /// Counts what was asked, or answered. Above what its user may ask for, this session rests.
    fn charge(&self, live: &mut Live, bytes: usize) {
        if bytes <= SMALL_BYTES {
            return;
        }
        self.gateway.rates.charge(&live.rate, bytes);
        self.rest_if_owing(live);
    }

    fn rest_if_owing(&self, live: &mut Live) {
        if let Some(wait) = self.gateway.rates.bytes_wait(&live.rate) {
            live.rest(wait);
        }
    }

    fn receive(&mut self, live: &mut Live, bytes: &[u8]) -> Result<(), End> {
        self.charge(live, bytes.len());
        if let Err(wait) = self.gateway.rates.request(&live.rate) {
            self.refuse_one(live, wait)?;
            let answer = rate_limited("too many requests", wait);
            let id = self.codec.id(bytes);
            self.reply(live, Some(Reply { id, answer }));
            return Ok(());
        }
        self.refused = self.refused.saturating_sub(1);
        let Ok(incoming) = self.codec.decode(bytes) else {
            return Err(CloseCode::BadFrame);
        };
        let id = incoming.id;
        let answer = match incoming.request {
            Err(text) => requests::refusal(ErrorCode::BadRequest, text),
            Ok(Request::Ping) => Answer::Pong {
                time: clock::wall(),
            },
            Ok(Request::Connect(_) | Request::Cursors(_)) => {
                requests::refusal(ErrorCode::BadRequest, "already connected".into())
            }
            Ok(Request::Refresh(refresh)) => self.refresh(live, &refresh.token),
            Ok(Request::Unwatch(Users { users })) => self.unwatch(live, users),
            Ok(Request::Unsubscribe(Named { conversation })) => {
                let topic = Topic::Channel(conversation);
                let router = &self.gateway.router;
                router.unsubscribe(&live.subscriber, std::slice::from_ref(&topic));
                Answer::Ok(Default::default())
            }
            Ok(request) => match self.check(live, &request) {
                Err(answer) => answer,
                Ok(()) => {
                    self.begin_request(live, id, request, bytes.len());
                    return Ok(());
                }
            },
        };
        self.reply(live, Some(Reply { id, answer }));
        Ok(())
    }

    fn unwatch(&self, live: &Live, users: Vec<crate::model::UserId>) -> Answer {
        if users.len() > WATCHED_MAX {
            return too_many_users();
        }
        let topics: Vec<_> = users.into_iter().map(Topic::Presence).collect();
        self.gateway.router.unsubscribe(&live.subscriber, &topics);
        Answer::Presence { items: Vec::new() }
    }

    /// Bounds of lists, before anything is done with them, and rates of what costs others most.
    fn check(&self, live: &Live, request: &Request) -> Result<(), Answer> {
        let user = &live.subscriber.user;
        let rates = &self.gateway.rates;
        let checked = match request {
            Request::Watch(Users { users }) if users.len() > WATCHED_MAX => {
                return Err(too_many_users());
            }
            // More than can be are refused before anyone looks at them.
            Request::Create(create)
                if create.participants.len() <= self.gateway.limits.group_participants =>
            {
                let others = create.participants.iter().filter(|u| *u != user);
                let others = others.count();
                rates.create(user).and_then(|()| rates.invite(user, others))
            }
            Request::Add(_) => rates.invite(user, 1),
            Request::Join(_) if live.subscriber.channels() >= CHANNELS_JOINED_MAX => {
                let text = format!("you may be in at most {CHANNELS_JOINED_MAX} channels");
                return Err(requests::refusal(ErrorCode::TooLarge, text));
            }
            _ => Ok(()),
        };
        checked.map_err(|wait| rate_limited("too many conversations or invitations", wait))
    }

    /// Starts a request that takes time. Requests of one session begin in the order in which they came.
    fn begin_request(
        &mut self,
        live: &mut Live,
        id: Option<u32>,
        request: Request,
        frame_bytes: usize,
    ) {
        let gateway = self.gateway.clone();
        let subscriber = live.subscriber.clone();
        let is_page = requests::asks_for_a_page(&request);
        if is_page {
            self.rest_if_owing(live);
        }
        let holds_places = is_page || matches!(request, Request::Watch(_));
        self.charge(live, read_for(&request));
        let asked_bytes = if is_page {
            gateway.limits.page_bytes()
        } else {
            frame_bytes
        };
        live.asked_bytes += asked_bytes;
        let finished = move |answer: Option<Answer>| Finished {
            reply: answer.map(|answer| Reply { id, answer }),
            asked_bytes,
        };
        let mut replied: BoxFuture<'static, Finished> = match request {
            Request::Watch(Users { users }) => Box::pin(async move {
                finished(Some(requests::watch(&gateway, &subscriber, &users).await))
            }),
            Request::Subscribe(subscribe) => {
                let rate = live.rate.clone();
                Box::pin(async move {
                    let subscribed = resume::subscribe(&gateway, &subscriber, &subscribe);
                    let (answer, bytes) = subscribed.await;
                    gateway.rates.charge(&rate, bytes);
                    finished(Some(answer))
                })
            }
            request => Box::pin(async move {
                let user = subscriber.user.clone();
                finished(requests::handle(&gateway, user, request).await)
            }),
        };
        // Begun here and now, so that requests reach their owners in order.
        match (&mut replied).now_or_never() {
            Some(done) => self.finished(live, done),
            // What may hold places that others wait for goes on, also while this client takes no reply.
            None if holds_places => {
                let ended = self.gateway.tasks.spawn(replied);
                live.replies.push(Box::pin(async move {
                    let panicked = Finished {
                        reply: None,
                        asked_bytes,
                    };
                    ended.await.unwrap_or(panicked)
                }));
            }
            None => live.replies.push(replied),
        }
    }

    fn finished(&self, live: &mut Live, finished: Finished) {
        live.asked_bytes -= finished.asked_bytes;
        self.reply(live, finished.reply);
    }

    fn refresh(&self, live: &mut Live, token: &str) -> Answer {
        assert!(!broken(Mutation::SessionPanic), "as a test wants it");
        match self.gateway.tokens.check(token) {
            Ok(identity) if identity.user == live.subscriber.user => {
                live.expires_at = expiry(&identity);
                let expires_at = identity.expires_at;
                Answer::Refreshed { expires_at }
            }
            Ok(_) => requests::refusal(ErrorCode::Unauthorized, "another user's token".into()),
            Err(error) => requests::refusal(ErrorCode::Unauthorized, error.to_string()),
        }
    }

    /// Replies go through the outbox too: whatever is ready together is written together.
    fn reply(&self, live: &mut Live, reply: Option<Reply>) {
        if let Some(reply) = reply {
            let frame = Frame::encode(self.codec, &reply);
            self.charge(live, frame.bytes().len());
            live.subscriber.outbox.push_reply(frame);
        }
    }
}

impl Live {
    fn rest(&mut self, wait: Duration) {
        let until = Instant::now() + wait;
        self.rests_until = self.rests_until.max(Some(until));
    }
}

impl Pace {
    /// Now and then, what no client may hold up, even if there is always something to read or to write.
    fn overdue(&mut self, deadline: Instant, gateway: &Gateway) -> Option<Step> {
        self.steps = self.steps.wrapping_add(1);
        if !self.steps.is_multiple_of(STEPS_AT_ONCE) {
            return None;
        }
        if Instant::now() >= deadline {
            return Some(Step::Time);
        }
        let begins = self.leave_at.is_none() && gateway.tasks.is_draining();
        begins.then_some(Step::Draining)
    }
}

/// What the store reads for a request beyond what is answered, in bytes.
fn read_for(request: &Request) -> usize {
    match request {
        Request::Watch(Users { users }) => users.len() * WATCH_BYTES,
        Request::Inbox(_) => INBOX_BYTES,
        Request::Public(_) | Request::Participants(_) => LISTING_BYTES,
        _ => 0,
    }
}

fn too_many_users() -> Answer {
    let text = format!("one request may name at most {WATCHED_MAX} users");
    requests::refusal(ErrorCode::TooLarge, text)
}

fn rate_limited(what: &str, Wait(wait): Wait) -> Answer {
    Answer::Error(Refusal {
        code: ErrorCode::RateLimited,
        message: what.into(),
        retry_after_ms: Some(u64::try_from(wait.as_millis()).unwrap_or_default() + 1),
    })
}

fn next_wake(ping: Instant, live: &Live, leave_at: Option<Instant>) -> Instant {
    ping.min(live.expires_at).min(leave_at.unwrap_or(ping))
}
