//! The error and close codes: when each is used, and what the client may do. No other file contains a number that
//! clients see.

use serde::Serialize;

/// The reason why a request failed, as text in `error` frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The frame is not valid, or requests something unsupported. A retry is pointless.
    BadRequest,
    /// There was no `connect` yet, or the token was rejected.
    Unauthorized,
    /// The user is not a participant, or the role does not allow the request.
    Forbidden,
    /// There is no such conversation, or the user may not know of it.
    NotFound,
    /// The id is already used for something else.
    Conflict,
    /// A limit in bytes or in number is exceeded. The message names it.
    TooLarge,
    /// There were too many requests. `retry_after_ms` says when the next one is allowed.
    RateLimited,
    /// The outcome is unknown. Retry with the same `client_id` and `retry: true`.
    Unavailable,
    /// The gateway has a bug. Its log has the details.
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

/// The reason why a WebSocket was closed. Up to 4499, reconnect with back-off and cursors. From 4500 on, reconnecting
/// is pointless until something has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseCode {
    /// The client closed, or its connection broke.
    GoingAway = 1001,
    /// This gateway drains. Reconnect, to any gateway.
    Restart = 1012,
    /// The token has expired. Fetch a new one, then reconnect.
    TokenExpired = 4002,
    /// The client read too slowly: its queue of events was full, it took nothing for three ping intervals while something
    /// was being written, or it did not take the reply to `connect` in time.
    TooSlow = 4003,
    /// The client continued to send far above its rate limit.
    RateLimit = 4004,
    /// The user has too many connections. The newest one is refused.
    TooManyConnections = 4005,
    /// No `connect` frame came in time.
    ConnectTimeout = 4006,
    /// The client gave no sign of life for two ping intervals.
    Silent = 4007,
    /// The client sent something that is not a frame of this protocol, or a frame that is too large.
    BadFrame = 4500,
    /// The token was rejected, or the first frame was not `connect`.
    Unauthorized = 4501,
    /// An administrator closed this user's connections.
    Disconnected = 4502,
}

impl CloseCode {
    pub const ALL: [Self; 11] = [
        Self::GoingAway,
        Self::Restart,
        Self::TokenExpired,
        Self::TooSlow,
        Self::RateLimit,
        Self::TooManyConnections,
        Self::ConnectTimeout,
        Self::Silent,
        Self::BadFrame,
        Self::Unauthorized,
        Self::Disconnected,
    ];

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
            Self::ConnectTimeout => "no connect in time",
            Self::Silent => "no sign of life",
            Self::BadFrame => "bad frame",
            Self::Unauthorized => "unauthorized",
            Self::Disconnected => "disconnected by an administrator",
        }
    }
}
