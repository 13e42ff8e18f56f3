//! The beginning of a session: reads `connect`, answers it, and sends what the client missed.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use tokio::{
    select,
    time::{sleep, sleep_until, timeout},
};

use super::{End, Live, Session};
use crate::{
    auth::{Identity, TokenError},
    clock,
    cluster::InboxRef,
    fanout::{Closing, Frame, Subscriber},
    gateway::{
        Gateway,
        pages::Shown,
        rates::{BYTES_WAIT_MAX, Connecting, Rates, UserRate, Wait},
        requests,
        resume::{self, Missing},
    },
    model::{ConversationId, Cursor, UserId, limits::CURSORS_MAX},
    protocol::{Answer, CloseCode, Connect, Connected, Cursors, ErrorCode, Reply, Request},
};

/// Bytes of missed messages after which they are written to the socket.
const RESUME_WRITE_BYTES: usize = 64 << 10;
/// WebSocket pings and pongs before `connect`. Clients have no reason for more.
const CONTROL_FRAMES_MAX: usize = 16;
/// Bytes of missed messages that count against the byte rate of their reader. More do not count, because other users
/// may have written them.
const MISSED_COUNTED_MAX: usize = 1 << 20;
/// The time that a `connect` may wait until its user's debt is repaid, in case the user connects elsewhere too.
const DEBT_WAIT_MAX: Duration = BYTES_WAIT_MAX.saturating_mul(2);
/// Frames that the cursors of one `connect` may come in: enough for all of them in the smallest frames.
const CURSOR_PARTS_MAX: usize = 64;

/// A session that other gateways know. They learn of its end when this is dropped.
pub(super) struct Registered {
    gateway: Arc<Gateway>,
    pub subscriber: Arc<Subscriber>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.subscriber.outbox.close(CloseCode::GoingAway);
        self.gateway.users.leave(&self.subscriber);
    }
}

/// A `connect` with a valid token.
struct Accepted {
    id: Option<u64>,
    identity: Identity,
    rate: Arc<UserRate>,
    device: Option<String>,
    cursors: HashMap<ConversationId, Cursor>,
    connecting: Option<Connecting>,
}

impl Session {
    /// Waits for `connect` and answers it.
    pub(super) async fn connect(&mut self) -> Result<Live, End> {
        let gateway = self.gateway.clone();
        let limit = Duration::from_millis(gateway.session.connect_timeout_ms);
        let mut accepted = select! {
            accepted = self.accept(limit) => accepted?,
            () = gateway.tasks.draining() => return Err(CloseCode::Restart),
        };
        let user = accepted.identity.user.clone();
        let outbox_bytes = gateway.limits.outbox_bytes;
        let subscriber = Arc::new(Subscriber::new(self.id, user, self.codec, outbox_bytes));
        let registered = Registered {
            gateway: gateway.clone(),
            subscriber: subscriber.clone(),
        };
        // The session is counted by the hub from here on.
        drop(accepted.connecting.take());
        // Reading may take long. A disconnect, the token's expiry and a drain do not wait for it.
        select! {
            biased;
            Closing(code) = subscriber.outbox.closing() => return Err(code),
            () = sleep_until(accepted.identity.expires()) => return Err(CloseCode::TokenExpired),
            () = gateway.tasks.draining() => return Err(CloseCode::Restart),
            begun = self.register(&accepted, &subscriber) => begun?,
        }
        Ok(Live {
            expires_at: accepted.identity.expires(),
            rate: accepted.rate,
            subscriber,
            _registered: registered,
            replies: FuturesUnordered::new(),
            asked_bytes: 0,
            rests_until: None,
        })
    }

    async fn register(
        &mut self,
        accepted: &Accepted,
        subscriber: &Arc<Subscriber>,
    ) -> Result<(), End> {
        match self.gateway.clone().users.register(subscriber).await {
            Ok(places) => self.begin(accepted, subscriber, places).await,
            Err(error) => {
                tracing::debug!(session = %self.id, %error, "refused a session because its inbox could not be read");
                let (code, text) = (ErrorCode::Unavailable, error.to_string());
                self.refuse(accepted.id, code, &text, CloseCode::GoingAway)
                    .await
            }
        }
    }

    /// Reads `connect` and, if its token is valid, the remaining cursors. `connect` must arrive within `limit`, and all
    /// remaining cursors within another `limit`. The time that the user's debt takes in between does not count.
    async fn accept(&mut self, limit: Duration) -> Result<Accepted, End> {
        let (id, connect) = self.read_connect(limit).await?;
        let Connect {
            token,
            device,
            cursors,
            more,
        } = connect;
        let identity = self.authenticate(id, &token).await?;
        let rate = self.gateway.rates.of(&identity.user);
        let connecting = self.admit(id, &identity.user, &rate).await?;
        self.place.authenticated();
        let cursors = cursors.unwrap_or_default();
        let cursors = in_time(limit, self.more_cursors(id, &rate, cursors, more)).await?;
        Ok(Accepted {
            id,
            identity,
            rate,
            device,
            cursors,
            connecting: Some(connecting),
        })
    }

    /// Reads the first frame, which must be `connect`. Returns it with its id.
    async fn read_connect(&mut self, limit: Duration) -> Result<(Option<u64>, Connect), End> {
        let first = in_time(limit, self.next_frame()).await?;
        // An unauthenticated client may make the gateway decode a `connect`, but only the type of any other frame.
        let begun = self.codec.begin(&first);
        let Some(kind) = &begun.kind else {
            return Err(self.bad_frame(&begun.bad_frame()));
        };
        if kind != "connect" {
            let text = "the first frame must be connect";
            let (code, end) = (ErrorCode::Unauthorized, CloseCode::Unauthorized);
            return self.refuse(begun.id, code, text, end).await;
        }
        let incoming = self.codec.decode(&first);
        let incoming = incoming.map_err(|bad| self.bad_frame(&bad))?;
        let id = incoming.id;
        match incoming.request {
            Ok(Request::Connect(connect)) => Ok((id, connect)),
            Ok(_) => Err(CloseCode::BadFrame),
            Err(text) => {
                let (code, end) = (ErrorCode::BadRequest, CloseCode::BadFrame);
                self.refuse(id, code, &text, end).await
            }
        }
    }

    async fn authenticate(&mut self, id: Option<u64>, token: &str) -> Result<Identity, End> {
        match self.gateway.tokens.check_user(token) {
            Ok(identity) => Ok(identity),
            Err(error) => {
                let end = match error {
                    TokenError::Expired => CloseCode::TokenExpired,
                    TokenError::Rejected(_) => CloseCode::Unauthorized,
                };
                let (code, text) = (ErrorCode::Unauthorized, error.to_string());
                self.refuse(id, code, &text, end).await
            }
        }
    }

    /// Waits until the user owes nothing, and counts the session against the limit of the user's connections.
    async fn admit(
        &mut self,
        id: Option<u64>,
        user: &UserId,
        rate: &Arc<UserRate>,
    ) -> Result<Connecting, End> {
        let repaid = debt_repaid(&self.gateway.rates, rate);
        if timeout(DEBT_WAIT_MAX, repaid).await.is_err() {
            let text = "this user has asked for too much";
            let (code, end) = (ErrorCode::RateLimited, CloseCode::RateLimit);
            return self.refuse(id, code, text, end).await;
        }
        let sessions = self.gateway.hub.sessions_of(user).len();
        let connections_max = self.gateway.limits.connections_per_user;
        match Connecting::begin(rate, sessions, connections_max) {
            Some(connecting) => Ok(connecting),
            None => {
                let text = "this user has too many connections";
                let (code, end) = (ErrorCode::RateLimited, CloseCode::TooManyConnections);
                self.refuse(id, code, text, end).await
            }
        }
    }

    /// Reads the frames with the remaining cursors.
    async fn more_cursors(
        &mut self,
        id: Option<u64>,
        rate: &UserRate,
        mut cursors: HashMap<ConversationId, Cursor>,
        mut more: bool,
    ) -> Result<HashMap<ConversationId, Cursor>, End> {
        let mut parts = 0;
        while more {
            parts += 1;
            let part = self.next_frame().await?;
            self.gateway.rates.charge(rate, part.len());
            let part = self.codec.decode(&part);
            let part = part.map_err(|bad| self.bad_frame(&bad))?;
            let Ok(Request::Cursors(part)) = part.request else {
                let text = "more cursors were announced: cursors must follow connect";
                let (code, end) = (ErrorCode::BadRequest, CloseCode::BadFrame);
                return self.refuse(part.id, code, text, end).await;
            };
            if parts > CURSOR_PARTS_MAX {
                let text = "the cursors of one connect come in at most 64 parts";
                let (code, end) = (ErrorCode::TooLarge, CloseCode::BadFrame);
                return self.refuse(id, code, text, end).await;
            }
            let Cursors {
                cursors: others,
                more: further,
            } = part;
            let room = CURSORS_MAX.saturating_sub(cursors.len());
            cursors.extend(others.into_iter().take(room));
            more = further;
        }
        Ok(cursors)
    }

    /// Answers `connect` and sends the missed messages. Events that arrive meanwhile wait in the outbox.
    async fn begin(
        &mut self,
        accepted: &Accepted,
        subscriber: &Arc<Subscriber>,
        places: Vec<InboxRef>,
    ) -> Result<(), End> {
        let gateway = self.gateway.clone();
        let identity = &accepted.identity;
        tracing::debug!(session = %self.id, user = %identity.user, device = accepted.device, "connected");
        resume::subscribe_own_channels(&gateway, subscriber, &places).await;
        let connected = Connected {
            user: identity.user.clone(),
            session: self.id.to_string(),
            gateway: gateway.router.me().to_string(),
            expires_at: identity.expires_at,
            ping_interval_ms: gateway.session.ping_interval_ms,
            limits: gateway.limits.protocol(&gateway.messages),
            time: clock::wall(),
        };
        let reply = Reply {
            id: accepted.id,
            answer: Answer::Connected(Box::new(connected)),
        };
        self.send(Frame::encode(self.codec, &reply)).await?;
        if accepted.cursors.is_empty() {
            return Ok(());
        }
        self.send_missed(accepted, subscriber, places).await
    }

    /// Sends the messages that the client missed.
    async fn send_missed(
        &mut self,
        accepted: &Accepted,
        subscriber: &Arc<Subscriber>,
        places: Vec<InboxRef>,
    ) -> Result<(), End> {
        let gateway = self.gateway.clone();
        let expires_at = accepted.identity.expires();
        let mut missed = resume::Missed::new(&gateway, subscriber, &accepted.cursors, places);
        let (mut frames, mut bytes) = (VecDeque::new(), 0);
        let mut uncounted = MISSED_COUNTED_MAX;
        // Entries count when they are read, even if the client does not take them.
        let mut charge = |bytes: usize| {
            let counted = bytes.min(uncounted);
            uncounted -= counted;
            gateway.rates.charge(&accepted.rate, counted);
        };
        while let Some((conversation, missing)) = missed.next().await {
            let (entries, others, read) = match missing {
                Missing::Entries(entries) => {
                    let read = entries.iter().map(Shown::encoded_bytes).sum();
                    (entries, Vec::new(), read)
                }
                Missing::Changes(events, read) => (Vec::new(), events, read),
                Missing::Other(event) => (Vec::new(), vec![event], 0),
            };
            charge(read);
            let events = entries
                .into_iter()
                .map(|entry| resume::message(conversation, entry));
            for event in events.chain(others) {
                let frame = Frame::encode(self.codec, &event);
                if read == 0 {
                    charge(frame.bytes().len());
                }
                bytes += frame.bytes().len();
                frames.push_back(frame);
                if bytes > RESUME_WRITE_BYTES {
                    self.write(subscriber, expires_at, &mut frames).await?;
                    bytes = 0;
                }
            }
        }
        self.write(subscriber, expires_at, &mut frames).await
    }

    /// Answers with an error and ends the session.
    async fn refuse<T>(
        &mut self,
        id: Option<u64>,
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

    /// Returns the next text or binary frame.
    async fn next_frame(&mut self) -> Result<bytes::Bytes, End> {
        for _ in 0..=CONTROL_FRAMES_MAX {
            let frame = self.socket.next().await;
            if let Some(frame) = self.incoming(frame)? {
                return Ok(frame);
            }
        }
        Err(CloseCode::RateLimit)
    }
}

/// Waits until the user owes no bytes, so that reconnecting gains nothing. Meanwhile the socket counts as
/// unauthenticated.
async fn debt_repaid(rates: &Rates, rate: &UserRate) {
    while let Err(Wait(wait)) = rates.connect(rate) {
        sleep(wait).await;
    }
}

async fn in_time<T>(limit: Duration, read: impl Future<Output = Result<T, End>>) -> Result<T, End> {
    let read = timeout(limit, read).await;
    read.map_err(|_| CloseCode::ConnectTimeout)?
}
