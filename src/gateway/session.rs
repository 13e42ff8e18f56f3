//! One client connection: one task with one loop. Frames that arrive become requests; all queued replies and events are
//! written in one flush.

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
    connecting::Registered,
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
    fanout::{Admitted, Closing, Frame, FrameWriter, Subscriber},
    model::{
        SessionId, Topic,
        limits::{CHANNELS_JOINED_MAX, REQUESTS_IN_FLIGHT_MAX, WATCHED_MAX},
    },
    mutation::{Mutation, broken},
    protocol::{Answer, Away, CloseCode, Codec, ErrorCode, Event, Named, Reply, Request, Users},
};

/// Steps of a session's loop between two checks of the timer and of draining. The checks run even if there is always
/// something to read or write.
const STEPS_AT_ONCE: u32 = 64;
/// Pings without an answer after which the connection is closed.
const SILENT_PINGS_MAX: u32 = 2;
/// Writes in a row after which the client is read from.
const WRITES_IN_A_ROW: u32 = 4;
/// The pause in reading after a refused request.
const REFUSED_REST: Duration = Duration::from_millis(5);
/// The size up to which frames and replies count by their number only.
const SMALL_BYTES: usize = 1 << 10;

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
    /// The socket, for writing past the WebSocket library.
    writer: Arc<FrameWriter>,
    /// Requests and control frames that the rate limit refused, minus those accepted since.
    refused: u32,
    /// What was wrong with a frame, for the reason of the close code.
    bad_frame: Option<String>,
    place: Place,
    _counted: Admitted,
}

/// The state of a session after `connect`.
struct Live {
    rate: Arc<UserRate>,
    subscriber: Arc<Subscriber>,
    _registered: Registered,
    expires_at: Instant,
    replies: FuturesUnordered<BoxFuture<'static, Finished>>,
    /// The bytes that all requests in progress may use.
    asked_bytes: usize,
    /// The end of a pause in reading: the client, or its user on another socket, has requested too much.
    rests_until: Option<Instant>,
}

/// A completed request.
struct Finished {
    reply: Option<Reply>,
    /// The bytes that were counted at its start.
    asked_bytes: usize,
}

/// The next step of a session's loop.
enum Step {
    Finished(Finished),
    Next(Next),
    /// The timer has fired.
    Time,
    /// The gateway begins to drain.
    Draining,
}

/// The part of a step that may wait.
enum Then {
    Goes(Result<(), End>),
    Writes,
    Looks,
}

/// The state of the loop between two steps.
#[derive(Default)]
struct LoopState {
    steps: u32,
    silent_pings: u32,
    /// The time to close, set when the gateway drains.
    leave_at: Option<Instant>,
    /// The number of consecutive steps that wrote.
    writes: u32,
}

type End = CloseCode;

impl Session {
    pub(super) fn new(
        id: SessionId,
        gateway: Arc<Gateway>,
        socket: WebSocket,
        codec: Codec,
        writer: Arc<FrameWriter>,
        place: Place,
    ) -> Self {
        let counted = gateway.hub.admit();
        let session = Self {
            id,
            gateway,
            socket,
            codec,
            writer,
            refused: 0,
            bad_frame: None,
            place,
            _counted: counted,
        };
        session.await_message();
        session
    }

    /// Runs until the client leaves, is too slow, or the gateway drains.
    pub(super) async fn run(&mut self) {
        let gateway = self.gateway.clone();
        gateway.sent.opened.increment(1);
        gauge!("chat_sessions").set(gateway.hub.sessions() as f64);
        let code = match Box::pin(self.connect()).await {
            Err(code) => code,
            Ok(mut live) => {
                live.subscriber.outbox.attach(self.writer.clone());
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

    /// Serves a connected client until the session ends: one loop, one branch for each event that wakes it.
    async fn live(&mut self, live: &mut Live) -> End {
        let gateway = self.gateway.clone();
        let ping_interval = Duration::from_millis(gateway.session.ping_interval_ms);
        let first = next_wake(Instant::now() + ping_interval, live, None);
        let mut timer = Box::pin(sleep_until(first));
        let mut draining = std::pin::pin!(gateway.tasks.draining());
        let mut frames = VecDeque::new();
        let mut state = LoopState::default();
        loop {
            let (takes_replies, reads) = (self.takes_replies(live), self.reads(live, &state));
            let rests_until = live.rests_until;
            let reads_first = state.reads_first();
            let step = match state.overdue(timer.deadline(), &gateway) {
                Some(step) => step,
                None => select! {
                    biased;
                    // All replies that are ready come before any write, so that one flush sends them.
                    Some(finished) = live.replies.next(), if takes_replies => Step::Finished(finished),
                    next = next(&mut self.socket, &live.subscriber, &mut frames, reads.then_some(rests_until), reads_first) => Step::Next(next),
                    () = timer.as_mut() => Step::Time,
                    () = draining.as_mut(), if state.leave_at.is_none() => Step::Draining,
                },
            };
            // The step ends before the write begins: otherwise each session's future would reserve room for both.
            let then = self.act(live, &mut state, step);
            state.count(&then);
            let ended = match then {
                Then::Goes(ended) => ended,
                Then::Writes => {
                    let written = self.write(&live.subscriber, live.expires_at, &mut frames);
                    written.await
                }
                Then::Looks => {
                    let ended = self.time_passed(live, &mut state).await;
                    let next = Instant::now() + ping_interval;
                    timer.as_mut().reset(next_wake(next, live, state.leave_at));
                    ended
                }
            };
            match ended {
                Ok(()) => {}
                Err(CloseCode::Restart) => return self.finish_requests(live).await,
                Err(code) => return code,
            }
            let latest = next_wake(live.expires_at, live, state.leave_at);
            if timer.deadline() > latest {
                timer.as_mut().reset(latest);
            }
        }
    }

    /// Handles the part of a step that needs no wait. Returns the part that may wait.
    fn act(&mut self, live: &mut Live, state: &mut LoopState, step: Step) -> Then {
        let ended = match step {
            Step::Next(Next::Queued(Ok(()))) => return Then::Writes,
            Step::Time => return Then::Looks,
            Step::Next(Next::Queued(Err(Closing(code)))) => Err(code),
            Step::Next(Next::Came(frame)) => self.came(live, state, frame),
            Step::Finished(finished) => {
                self.finished(live, finished);
                Ok(())
            }
            Step::Draining => {
                state.leave_at = Some(self.announce_leaving(live));
                Ok(())
            }
        };
        Then::Goes(ended)
    }

    /// Returns whether the loop takes more replies. It does not while too many wait to be written.
    fn takes_replies(&self, live: &Live) -> bool {
        !live.replies.is_empty() && live.subscriber.outbox.reply_bytes() <= self.reply_bytes_max()
    }

    /// Returns whether the loop reads from the client. It does not while the requests in progress may use too many
    /// bytes.
    fn reads(&self, live: &Live, state: &LoopState) -> bool {
        live.replies.len() < REQUESTS_IN_FLIGHT_MAX
            && live.asked_bytes <= self.reply_bytes_max()
            && state.leave_at.is_none()
    }

    /// Returns the bytes of queued replies above which further requests wait.
    fn reply_bytes_max(&self) -> usize {
        self.gateway.limits.outbox_bytes / 2
    }

    /// Handles the timer: ends the session if the token expired or the time to leave has come; otherwise pings the
    /// client.
    async fn time_passed(&mut self, live: &mut Live, state: &mut LoopState) -> Result<(), End> {
        let now = Instant::now();
        if now >= live.expires_at {
            return Err(CloseCode::TokenExpired);
        }
        if state.leave_at.is_some_and(|at| now >= at) {
            return Err(CloseCode::Restart);
        }
        if state.silent_pings >= SILENT_PINGS_MAX {
            return Err(CloseCode::Silent);
        }
        // A client that is not read from cannot show that it is alive.
        let rests = live.rests_until.is_some_and(|until| until > now);
        if self.reads(live, state) && !rests {
            state.silent_pings += 1;
        }
        self.ping(&live.subscriber, live.expires_at).await
    }

    /// Tells the client when its session will end, because the gateway drains. Returns that time.
    fn announce_leaving(&self, live: &Live) -> Instant {
        let drain = &self.gateway.drain;
        let spread = Duration::from_millis(drain.spread_ms);
        let after = Duration::from_millis(drain.delay_ms) + spread.mul_f64(rand::random::<f64>());
        let after_ms = u64::try_from(after.as_millis()).unwrap_or_default();
        let event = Frame::encode(self.codec, &Event::Reconnect { after_ms });
        live.subscriber.outbox.push_reply(event);
        self.gateway.tasks.drain_began() + after
    }

    /// Handles a frame from the client.
    fn came(&mut self, live: &mut Live, state: &mut LoopState, frame: Came) -> Result<(), End> {
        state.silent_pings = 0;
        live.rests_until = None;
        match self.incoming(frame)? {
            Some(frame) => self.receive(live, &frame),
            // A ping or pong costs as much as a request.
            None => match self.gateway.rates.request(&live.rate) {
                Ok(()) => Ok(()),
                Err(wait) => self.refuse_one(live, wait),
            },
        }
    }

    /// Counts a refused request. The next one is read only after a pause, so that refusals cost little. A client that
    /// continues is closed.
    fn refuse_one(&mut self, live: &mut Live, Wait(wait): Wait) -> Result<(), End> {
        self.refused += 1;
        if self.refused > self.gateway.limits.requests_burst {
            return Err(CloseCode::RateLimit);
        }
        live.rest(wait.min(REFUSED_REST));
        Ok(())
    }

    /// Counts the bytes of a request or reply. If the user exceeds the byte rate, reading pauses.
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
            let answer = wait.refuse("too many requests");
            let id = self.codec.id(bytes);
            self.reply(live, Some(Reply { id, answer }));
            return Ok(());
        }
        self.refused = self.refused.saturating_sub(1);
        let incoming = match self.codec.decode(bytes) {
            Ok(incoming) => incoming,
            Err(bad) => return Err(self.bad_frame(&bad)),
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
            Ok(Request::Away(Away { away })) => {
                self.gateway.users.set_away(&live.subscriber, away);
                Answer::Ok(Default::default())
            }
            Ok(Request::Delivered(mut mark)) => {
                mark.away = live.subscriber.is_away();
                self.begin_request(live, id, Request::Delivered(mark), bytes.len());
                return Ok(());
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

    /// Checks the sizes of lists before they are used, and the rates of requests that affect other users.
    fn check(&self, live: &Live, request: &Request) -> Result<(), Answer> {
        let user = &live.subscriber.user;
        let rates = &self.gateway.rates;
        let checked = match request {
            Request::Watch(Users { users }) if users.len() > WATCHED_MAX => {
                return Err(too_many_users());
            }
            // A list that is too long is refused later. It must not count as invitations.
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
        checked.map_err(|wait| wait.refuse("too many conversations or invitations"))
    }

    /// Starts a request that takes time. The requests of one session begin in the order in which they arrived.
    fn begin_request(
        &mut self,
        live: &mut Live,
        id: Option<u64>,
        request: Request,
        frame_bytes: usize,
    ) {
        let gateway = self.gateway.clone();
        let subscriber = live.subscriber.clone();
        let is_page = request.asks_for_a_page();
        if is_page {
            self.rest_if_owing(live);
        }
        let holds_places = is_page || matches!(request, Request::Watch(_));
        self.charge(live, request.work_bytes());
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
        // Polled here once, so that requests reach their owners in order.
        match (&mut replied).now_or_never() {
            Some(done) => self.finished(live, done),
            // A request that may hold places others wait for must complete even if this client takes no replies.
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
        match self.gateway.tokens.check_user(token) {
            Ok(identity) if identity.user == live.subscriber.user => {
                live.expires_at = identity.expires();
                let expires_at = identity.expires_at;
                Answer::Refreshed { expires_at }
            }
            Ok(_) => requests::refusal(ErrorCode::Unauthorized, "another user's token".into()),
            Err(error) => requests::refusal(ErrorCode::Unauthorized, error.to_string()),
        }
    }

    /// Queues a reply. It goes through the outbox, so that everything that is ready is written together.
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

impl LoopState {
    /// Returns whether the client is read from before more is written.
    fn reads_first(&self) -> bool {
        self.writes == WRITES_IN_A_ROW
    }

    /// Counts the writes in a row.
    fn count(&mut self, then: &Then) {
        self.writes = match then {
            Then::Writes if self.reads_first() => 1,
            Then::Writes => self.writes + 1,
            _ => 0,
        };
    }

    /// Returns a due step from time to time, so that no client can delay it by always having something to read or
    /// write.
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

fn too_many_users() -> Answer {
    let text = format!("one request may name at most {WATCHED_MAX} users");
    requests::refusal(ErrorCode::TooLarge, text)
}

fn next_wake(ping: Instant, live: &Live, leave_at: Option<Instant>) -> Instant {
    ping.min(live.expires_at).min(leave_at.unwrap_or(ping))
}
