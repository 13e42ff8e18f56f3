//! One client connection: one task, one loop. Frames come in and become requests; replies and events go
//! out, all that is queued in one flush.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use axum::extract::ws::{CloseFrame, Message, WebSocket};
use futures_util::{FutureExt, SinkExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use governor::{
    RateLimiter,
    clock::{Clock, MonotonicClock},
    middleware::NoOpMiddleware,
    state::{InMemoryState, NotKeyed},
};
use metrics::{Counter, counter, gauge};
use tokio::{
    select,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    Gateway,
    admission::Place,
    quota, requests,
    resume::{self, Missing},
};
use crate::{
    auth::{Identity, TokenError},
    clock,
    cluster::InboxPlace,
    fanout::{Admitted, Closing, Frame, Line, Subscriber},
    model::{
        ConversationId, SessionId,
        limits::{REQUESTS_IN_FLIGHT_MAX, SUBSCRIPTIONS_MAX, WATCHED_MAX},
    },
    protocol::{
        Answer, CloseCode, Codec, Connect, Connected, ErrorCode, Event, Named, Refusal, Reply,
        Request, Users,
    },
};

/// A close frame that cannot be sent by then is given up.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Frames that an idle session's queue has room for.
const FRAMES_KEPT: usize = 8;
/// What was missed is written whenever it is more than this.
const RESUME_WRITE_BYTES: usize = 64 << 10;
/// Ping intervals without a sign of life before the connection is given up.
const SILENT_PINGS_MAX: u32 = 2;

type Limiter =
    RateLimiter<NotKeyed, InMemoryState, MonotonicClock, NoOpMiddleware<std::time::Instant>>;

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
    limiter: Limiter,
    /// To the socket, past the WebSocket library.
    line: Arc<Line>,
    /// Requests refused in a row because of the rate limit.
    refused: u32,
    place: Place,
    _counted: Admitted,
}

/// After `connect`.
struct Live {
    identity: Identity,
    subscriber: Arc<Subscriber>,
    expires_at: Instant,
    watched: HashSet<crate::model::UserId>,
    /// Channels looked into without having joined.
    looking_into: HashSet<ConversationId>,
    replies: FuturesUnordered<BoxFuture<'static, Option<Reply>>>,
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
        let limits = &gateway.limits;
        let quota = quota(limits.requests_per_second, limits.requests_burst);
        let limiter = RateLimiter::direct_with_clock(quota, MonotonicClock);
        let counted = gateway.hub.admit();
        Self {
            id,
            gateway,
            socket,
            codec,
            limiter,
            line,
            refused: 0,
            place,
            _counted: counted,
        }
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
                gateway.router.leave(&live.subscriber);
                code
            }
        };
        tracing::debug!(session = %self.id, reason = code.reason(), "session ended");
        counter!("chat_sessions_closed_total", "reason" => code.reason()).increment(1);
        Box::pin(self.close(code)).await;
        gauge!("chat_sessions").set(gateway.hub.sessions().saturating_sub(1) as f64);
    }

    /// Waits for the first frame, which must be `connect`, and answers it.
    async fn connect(&mut self) -> Result<Live, End> {
        let gateway = self.gateway.clone();
        let limit = Duration::from_millis(gateway.session.connect_timeout_ms);
        let first = select! {
            first = timeout(limit, self.next_frame()) => first.map_err(|_| CloseCode::ConnectTimeout)??,
            () = gateway.tasks.draining() => return Err(CloseCode::Restart),
        };
        let incoming = self.codec.decode(&first).map_err(|_| CloseCode::BadFrame)?;
        let id = incoming.id;
        let connect = match incoming.request {
            Ok(Request::Connect(connect)) => connect,
            Ok(_) => {
                let text = "the first frame must be connect";
                return self
                    .refuse(id, ErrorCode::Unauthorized, text, CloseCode::Unauthorized)
                    .await;
            }
            Err(text) => {
                return self
                    .refuse(id, ErrorCode::BadRequest, &text, CloseCode::BadFrame)
                    .await;
            }
        };
        let identity = match gateway.tokens.check(&connect.token) {
            Ok(identity) => identity,
            Err(error) => {
                let code = match error {
                    TokenError::Expired => CloseCode::TokenExpired,
                    TokenError::Rejected(_) => CloseCode::Unauthorized,
                };
                return self
                    .refuse(id, ErrorCode::Unauthorized, &error.to_string(), code)
                    .await;
            }
        };
        self.place.authenticated();
        let user = identity.user.clone();
        if gateway.hub.sessions_of(&user).len() >= gateway.limits.connections_per_user {
            let text = "this user has too many connections";
            return self
                .refuse(
                    id,
                    ErrorCode::RateLimited,
                    text,
                    CloseCode::TooManyConnections,
                )
                .await;
        }
        let outbox_bytes = gateway.limits.outbox_bytes;
        let subscriber = Arc::new(Subscriber::new(self.id, user, self.codec, outbox_bytes));
        let begun = match gateway.router.register(&subscriber).await {
            Ok(places) => {
                self.begin(&identity, &subscriber, id, connect, places)
                    .await
            }
            Err(error) => {
                tracing::debug!(session = %self.id, %error, "refused: the inbox could not be read");
                let (code, text) = (ErrorCode::Unavailable, error.to_string());
                self.refuse(id, code, &text, CloseCode::GoingAway).await
            }
        };
        match begun {
            Ok(()) => Ok(Live {
                expires_at: expiry(&identity),
                identity,
                subscriber,
                watched: HashSet::new(),
                looking_into: HashSet::new(),
                replies: FuturesUnordered::new(),
            }),
            Err(code) => {
                gateway.router.leave(&subscriber);
                Err(code)
            }
        }
    }

    /// Answers `connect`, and sends what was missed. Events that come meanwhile wait in the outbox.
    async fn begin(
        &mut self,
        identity: &Identity,
        subscriber: &Arc<Subscriber>,
        id: Option<u32>,
        connect: Connect,
        places: Vec<InboxPlace>,
    ) -> Result<(), End> {
        let gateway = self.gateway.clone();
        let Connect {
            device, cursors, ..
        } = connect;
        tracing::debug!(session = %self.id, user = %identity.user, device, "connected");
        resume::follow_channels(&gateway, subscriber, &places).await;
        let connected = Connected {
            user: identity.user.clone(),
            session: self.id.to_string(),
            gateway: gateway.router.me().to_string(),
            expires_at: identity.expires_at,
            ping_interval_ms: gateway.session.ping_interval_ms,
            limits: gateway.limits.protocol(),
            time: clock::wall(),
        };
        let reply = Reply {
            id,
            answer: Answer::Connected(Box::new(connected)),
        };
        self.send(Frame::encode(self.codec, &reply)).await?;
        let Some(cursors) = cursors.filter(|c| !c.is_empty()) else {
            return Ok(());
        };
        let mut missed = resume::Missed::new(&gateway, identity.user.clone(), cursors, places);
        let (mut frames, mut bytes) = (VecDeque::new(), 0);
        while let Some((conversation, missing)) = missed.next().await {
            let (entries, other) = match missing {
                Missing::Entries(entries) => (entries, None),
                Missing::Other(event) => (Vec::new(), Some(event)),
                Missing::Nothing => continue,
            };
            let events = entries
                .iter()
                .map(|entry| resume::message(conversation, entry));
            for event in events.chain(other) {
                let frame = Frame::encode(self.codec, &event);
                bytes += frame.bytes().len();
                frames.push_back(frame);
                if bytes > RESUME_WRITE_BYTES {
                    self.write(subscriber, &mut frames).await?;
                    bytes = 0;
                }
            }
        }
        self.write(subscriber, &mut frames).await
    }

    async fn live(&mut self, live: &mut Live) -> End {
        let gateway = self.gateway.clone();
        let ping_interval = Duration::from_millis(gateway.session.ping_interval_ms);
        let first = next_wake(Instant::now() + ping_interval, live, None);
        let mut timer = Box::pin(sleep_until(first));
        let mut silent_pings = 0;
        let mut draining = std::pin::pin!(gateway.tasks.draining());
        let mut frames = VecDeque::new();
        // Once the gateway drains: when to close.
        let mut leave_at: Option<Instant> = None;
        loop {
            let reading = live.replies.len() < REQUESTS_IN_FLIGHT_MAX && leave_at.is_none();
            let step = select! {
                biased;
                // All replies that are ready, before anything is written: they go out in one flush.
                Some(reply) = live.replies.next(), if !live.replies.is_empty() => {
                    self.reply(live, reply);
                    Ok(())
                }
                queued = live.subscriber.outbox.take(&mut frames) => match queued {
                    Ok(()) => self.write(&live.subscriber, &mut frames).await,
                    Err(Closing(code)) => Err(code),
                },
                frame = self.socket.next(), if reading => {
                    silent_pings = 0;
                    match self.incoming(frame) {
                        Ok(Some(frame)) => self.receive(live, &frame),
                        Ok(None) => Ok(()),
                        Err(code) => Err(code),
                    }
                }
                () = timer.as_mut() => {
                    let now = Instant::now();
                    if now >= live.expires_at {
                        Err(CloseCode::TokenExpired)
                    } else if leave_at.is_some_and(|at| now >= at) {
                        Err(CloseCode::Restart)
                    } else if silent_pings >= SILENT_PINGS_MAX {
                        Err(CloseCode::ConnectTimeout)
                    } else {
                        silent_pings += 1;
                        let ping = self.ping(&live.subscriber).await;
                        timer.as_mut().reset(next_wake(now + ping_interval, live, leave_at));
                        ping
                    }
                }
                () = draining.as_mut(), if leave_at.is_none() => {
                    let spread = Duration::from_millis(gateway.drain.spread_ms);
                    let delay = Duration::from_millis(gateway.drain.delay_ms);
                    let after = delay + spread.mul_f64(rand::random::<f64>());
                    let at = Instant::now() + after;
                    leave_at = Some(at);
                    timer.as_mut().reset(at);
                    let after_ms = u64::try_from(after.as_millis()).unwrap_or_default();
                    let event = Frame::encode(self.codec, &Event::Reconnect { after_ms });
                    live.subscriber.outbox.push_own(event);
                    Ok(())
                }
            };
            if let Err(code) = step {
                if code == CloseCode::Restart {
                    return self.finish_requests(live).await;
                }
                return code;
            }
            if leave_at.is_none() && timer.deadline() > live.expires_at {
                timer.as_mut().reset(live.expires_at);
            }
        }
    }

    /// What the gateway has begun for this client it finishes, before it lets go.
    async fn finish_requests(&mut self, live: &mut Live) -> End {
        while let Some(reply) = live.replies.next().await {
            self.reply(live, reply);
        }
        let mut frames = VecDeque::new();
        while let Some(Ok(())) = live.subscriber.outbox.take(&mut frames).now_or_never() {
            if let Err(code) = self.write(&live.subscriber, &mut frames).await {
                return code;
            }
        }
        CloseCode::Restart
    }

    fn receive(&mut self, live: &mut Live, bytes: &[u8]) -> Result<(), End> {
        let Ok(incoming) = self.codec.decode(bytes) else {
            return Err(CloseCode::BadFrame);
        };
        let id = incoming.id;
        if let Err(not_until) = self.limiter.check() {
            self.refused += 1;
            if self.refused > self.gateway.limits.requests_burst {
                return Err(CloseCode::RateLimit);
            }
            let wait = not_until.wait_time_from(MonotonicClock.now());
            let refusal = Refusal {
                code: ErrorCode::RateLimited,
                message: "too many requests".into(),
                retry_after_ms: Some(u64::try_from(wait.as_millis()).unwrap_or_default() + 1),
            };
            self.reply(
                live,
                Some(Reply {
                    id,
                    answer: Answer::Error(refusal),
                }),
            );
            return Ok(());
        }
        self.refused = 0;
        let answer = match incoming.request {
            Err(text) => requests::refusal(ErrorCode::BadRequest, text),
            Ok(Request::Ping) => Answer::Pong {
                time: clock::wall(),
            },
            Ok(Request::Connect(_)) => {
                requests::refusal(ErrorCode::BadRequest, "already connected".into())
            }
            Ok(Request::Refresh(refresh)) => self.refresh(live, &refresh.token),
            Ok(Request::Unwatch(users)) => {
                for user in &users.users {
                    live.watched.remove(user);
                }
                self.gateway.router.unwatch(&live.subscriber, &users.users);
                Answer::Presence { items: Vec::new() }
            }
            Ok(request) => {
                self.begin_request(live, id, request);
                return Ok(());
            }
        };
        self.reply(live, Some(Reply { id, answer }));
        Ok(())
    }

    /// Starts a request that takes time. Requests of one session begin in the order in which they came.
    fn begin_request(&mut self, live: &mut Live, id: Option<u32>, request: Request) {
        let gateway = self.gateway.clone();
        let subscriber = live.subscriber.clone();
        let reply = move |answer| Some(Reply { id, answer });
        let mut replied: BoxFuture<'static, Option<Reply>> = match request {
            Request::Watch(Users { users }) => {
                live.watched.extend(users.iter().cloned());
                if live.watched.len() > WATCHED_MAX {
                    live.watched.retain(|user| !users.contains(user));
                    let text = format!("a session watches at most {WATCHED_MAX} users");
                    return self.reply(live, reply(requests::refusal(ErrorCode::TooLarge, text)));
                }
                Box::pin(async move { reply(requests::watch(&gateway, &subscriber, &users).await) })
            }
            Request::Subscribe(subscribe) => {
                live.looking_into.insert(subscribe.conversation);
                if live.looking_into.len() > SUBSCRIPTIONS_MAX {
                    live.looking_into.remove(&subscribe.conversation);
                    let text = format!("a session looks into at most {SUBSCRIPTIONS_MAX} channels");
                    return self.reply(live, reply(requests::refusal(ErrorCode::TooLarge, text)));
                }
                Box::pin(async move {
                    reply(resume::subscribe(&gateway, &subscriber, &subscribe).await)
                })
            }
            Request::Unsubscribe(Named { conversation }) => {
                live.looking_into.remove(&conversation);
                Box::pin(async move {
                    reply(resume::unsubscribe(&gateway, &subscriber, conversation).await)
                })
            }
            request => Box::pin(async move {
                let user = subscriber.user.clone();
                requests::handle(&gateway, user, request)
                    .await
                    .and_then(reply)
            }),
        };
        // Begun here and now, so that requests reach their owners in order.
        match (&mut replied).now_or_never() {
            Some(reply) => self.reply(live, reply),
            None => live.replies.push(replied),
        }
    }

    fn refresh(&self, live: &mut Live, token: &str) -> Answer {
        match self.gateway.tokens.check(token) {
            Ok(identity) if identity.user == live.identity.user => {
                live.expires_at = expiry(&identity);
                let expires_at = identity.expires_at;
                live.identity = identity;
                Answer::Refreshed { expires_at }
            }
            Ok(_) => requests::refusal(ErrorCode::Unauthorized, "another user's token".into()),
            Err(error) => requests::refusal(ErrorCode::Unauthorized, error.to_string()),
        }
    }

    /// Replies go through the outbox too: whatever is ready together is written together.
    fn reply(&self, live: &Live, reply: Option<Reply>) {
        if let Some(reply) = reply {
            let frame = Frame::encode(self.codec, &reply);
            live.subscriber.outbox.push_own(frame);
        }
    }

    async fn write(
        &mut self,
        subscriber: &Subscriber,
        frames: &mut VecDeque<Frame>,
    ) -> Result<(), End> {
        let count = frames.iter().map(Frame::count).sum();
        self.gateway.sent.frames.increment(count);
        let writing = write_all(&mut self.socket, &self.line, frames);
        let written = patiently(&self.gateway, subscriber, writing).await;
        // A burst's queue is not kept for ever.
        frames.shrink_to(FRAMES_KEPT);
        subscriber.outbox.flushed();
        written
    }

    /// For the time before there is an outbox.
    async fn send(&mut self, frame: Frame) -> Result<(), End> {
        self.gateway.sent.frames.increment(1);
        let mut frames = VecDeque::from([frame]);
        let written = write_all(&mut self.socket, &self.line, &mut frames).await;
        written.map_err(|_| CloseCode::GoingAway)
    }

    async fn ping(&mut self, subscriber: &Subscriber) -> Result<(), End> {
        let ping = self.socket.send(Message::Ping(Default::default()));
        patiently(&self.gateway, subscriber, ping).await
    }

    /// The next frame with content, for the time before `connect`.
    async fn next_frame(&mut self) -> Result<bytes::Bytes, End> {
        loop {
            let frame = self.socket.next().await;
            if let Some(frame) = self.incoming(frame)? {
                return Ok(frame);
            }
        }
    }

    /// The bytes of a frame of this codec; `None` for what the WebSocket layer sees to itself.
    fn incoming(
        &self,
        frame: Option<Result<Message, axum::Error>>,
    ) -> Result<Option<bytes::Bytes>, End> {
        match frame {
            None | Some(Ok(Message::Close(_))) => Err(CloseCode::GoingAway),
            Some(Err(error)) => Err(ended_by(&error)),
            Some(Ok(Message::Text(text))) if self.codec == Codec::Json => Ok(Some(text.into())),
            Some(Ok(Message::Binary(bytes))) if self.codec == Codec::MessagePack => Ok(Some(bytes)),
            Some(Ok(Message::Text(_) | Message::Binary(_))) => Err(CloseCode::BadFrame),
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(None),
        }
    }

    /// Answers with an error, and ends the session.
    async fn refuse<T>(
        &mut self,
        id: Option<u32>,
        code: ErrorCode,
        text: &str,
        end: CloseCode,
    ) -> Result<T, End> {
        let reply = Reply {
            id,
            answer: requests::refusal(code, text.to_owned()),
        };
        self.send(Frame::encode(self.codec, &reply)).await?;
        Err(end)
    }

    async fn close(&mut self, code: CloseCode) {
        if code == CloseCode::GoingAway {
            // The client closed, or is gone: complete the closing handshake if there is one.
            let _ = timeout(CLOSE_TIMEOUT, self.socket.close()).await;
            return;
        }
        let frame = CloseFrame {
            code: code.number(),
            reason: code.reason().into(),
        };
        let closed = async {
            self.socket.send(Message::Close(Some(frame))).await?;
            // Until the client has answered: closing at once could cost it the close code.
            while let Some(Ok(_)) = self.socket.next().await {}
            Ok::<_, axum::Error>(())
        };
        let _ = timeout(CLOSE_TIMEOUT, closed).await;
    }
}

/// Past the WebSocket library, once that has written what it has begun: a pong.
async fn write_all(
    socket: &mut WebSocket,
    line: &Line,
    frames: &mut VecDeque<Frame>,
) -> Result<(), axum::Error> {
    if line.busy() {
        socket.flush().await?;
    }
    line.write_all(frames).await.map_err(axum::Error::new)
}

/// Waits for a write. A socket that takes nothing must not keep the session from noticing that its queue is
/// full, that the gateway drains, or that its client is gone. What it waits for besides takes memory only when
/// the write is not done at once, as most are.
async fn patiently(
    gateway: &Gateway,
    subscriber: &Subscriber,
    write: impl Future<Output = Result<(), axum::Error>>,
) -> Result<(), End> {
    let mut write = std::pin::pin!(write);
    match (&mut write).now_or_never() {
        Some(written) => written.map_err(|_| CloseCode::GoingAway),
        None => Box::pin(wait_for(gateway, subscriber, write)).await,
    }
}

async fn wait_for(
    gateway: &Gateway,
    subscriber: &Subscriber,
    write: impl Future<Output = Result<(), axum::Error>>,
) -> Result<(), End> {
    let patience = Duration::from_millis(gateway.session.ping_interval_ms) * (1 + SILENT_PINGS_MAX);
    select! {
        biased;
        written = write => written.map_err(|_| CloseCode::GoingAway),
        Closing(code) = subscriber.outbox.closing() => Err(code),
        () = leave_time(gateway) => Err(CloseCode::Restart),
        () = sleep(patience) => Err(CloseCode::TooSlow),
    }
}

/// Fires when the gateway drains and all clients should have left.
async fn leave_time(gateway: &Gateway) {
    gateway.tasks.draining().await;
    sleep(Duration::from_millis(
        gateway.drain.delay_ms + gateway.drain.spread_ms,
    ))
    .await;
}

/// When the token expires, on the monotonic clock.
fn expiry(identity: &Identity) -> Instant {
    const FAR: u64 = 365 * 86_400_000;
    let left_ms = u64::try_from(identity.expires_at - clock::wall()).unwrap_or_default();
    Instant::now() + Duration::from_millis(left_ms.min(FAR))
}

fn next_wake(ping: Instant, live: &Live, leave_at: Option<Instant>) -> Instant {
    ping.min(live.expires_at).min(leave_at.unwrap_or(ping))
}

/// Broken pipes and resets are ends like any other; what breaks the WebSocket protocol or its limits
/// is the client's mistake.
fn ended_by(error: &axum::Error) -> CloseCode {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if cause.is::<std::io::Error>() {
            return CloseCode::GoingAway;
        }
        source = cause.source();
    }
    if error.to_string().contains("without closing handshake") {
        return CloseCode::GoingAway;
    }
    CloseCode::BadFrame
}
