//! Every way to be refused or closed: when it is issued, and what the client may do. No other file
//! names a number that a client sees.

use serde::Serialize;

/// Why a request failed. In `error` frames as text.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The frame makes no sense, or asks for something not supported. Sending it again is pointless.
    BadRequest,
    /// No `connect` yet, or the token is not accepted.
    Unauthorized,
    /// Not a participant, or the role does not allow it.
    Forbidden,
    /// No such conversation, or none that this user may know of.
    NotFound,
    /// The id is taken by something else.
    Conflict,
    /// A limit in bytes or in number; the message says which.
    TooLarge,
    /// Too many requests; `retry_after_ms` says when there is room again.
    RateLimited,
    /// Outcome unknown: send again, with the same `client_id` and `retry: true`.
    Unavailable,
    /// A bug here. The gateway's log has more.
    Internal,
}

impl ErrorCode {
    #[must_use]
    pub fn http_status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::Unauthorized => 401,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::TooLarge => 413,
            Self::RateLimited => 429,
            Self::Unavailable => 503,
            Self::Internal => 500,
        }
    }
}

/// Why a WebSocket was closed. Up to 4499: reconnect, with back-off and cursors.
/// From 4500: pointless until something has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseCode {
    /// The client closed, or its connection broke.
    GoingAway = 1001,
    /// This gateway is draining: reconnect, to any other one.
    Restart = 1012,
    /// The token has expired: fetch a new one, then reconnect.
    TokenExpired = 4002,
    /// The client read too slowly and its queue was full.
    TooSlow = 4003,
    /// It went on sending far past its rate limit.
    RateLimit = 4004,
    /// This user has too many connections; the newest is refused.
    TooManyConnections = 4005,
    /// No `connect` frame in time, or no sign of life for two ping intervals.
    ConnectTimeout = 4006,
    /// What came is not a frame of this protocol, or is larger than a frame may be.
    BadFrame = 4500,
    /// The token is not accepted, or the first frame was not `connect`.
    Unauthorized = 4501,
    /// An administrator closed this user's connections.
    Disconnected = 4502,
}

impl CloseCode {
    #[must_use]
    pub fn number(self) -> u16 {
        self as u16
    }

    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::GoingAway => "going away",
            Self::Restart => "restart",
            Self::TokenExpired => "token expired",
            Self::TooSlow => "too slow",
            Self::RateLimit => "rate limit",
            Self::TooManyConnections => "too many connections",
            Self::ConnectTimeout => "connect timeout",
            Self::BadFrame => "bad frame",
            Self::Unauthorized => "unauthorized",
            Self::Disconnected => "disconnected by an administrator",
        }
    }
}
