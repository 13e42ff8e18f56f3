//! Access tokens of Google (OAuth 2.0), which a service account gets for a signed assertion (RFC 7523).

use std::{sync::Arc, time::Duration};

use reqwest::Url;
use serde::{Deserialize, Serialize};
use tokio::{sync::Mutex, time::Instant};

use super::{
    super::{Post, Request, TIMEOUT, keys::ServiceAccount, now_s, post::headers},
    PAUSE,
};
use crate::seldom::seldom;

const SCOPE: &str = "https://www.googleapis.com/auth/firebase.messaging";
const GRANT: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";
/// Seconds for which an assertion is valid. More is refused.
const ASSERTION_S: u64 = 3_600;
/// The time before its end in which a token is no longer used.
const MARGIN: Duration = Duration::from_secs(300);

#[derive(Serialize)]
struct Claims<'a> {
    iss: &'a str,
    scope: &'a str,
    aud: &'a str,
    iat: u64,
    exp: u64,
}

#[derive(Deserialize)]
struct Granted {
    access_token: String,
    expires_in: u64,
}

/// The error code of a refusal. The description could quote the assertion.
#[derive(Deserialize)]
struct Refusal {
    error: String,
}

enum State {
    Valid {
        token: Arc<str>,
        until: Instant,
    },
    /// There is no token, and none is requested before this time.
    None {
        until: Instant,
    },
}

/// Gets tokens and keeps the newest one.
pub(super) struct AccessTokens {
    account: ServiceAccount,
    /// Locked while a token is requested, so that one request is made however many notifications wait.
    state: Mutex<State>,
}

impl AccessTokens {
    pub(super) fn new(account: ServiceAccount) -> Self {
        let state = State::None {
            until: Instant::now(),
        };
        Self {
            account,
            state: Mutex::new(state),
        }
    }

    /// Returns a token, but not the refused one.
    ///
    /// # Errors
    /// The time until another request for a token is made.
    pub(super) async fn get(
        &self,
        post: &dyn Post,
        refused: Option<&str>,
    ) -> Result<Arc<str>, Option<Duration>> {
        let mut state = self.state.lock().await;
        let now = Instant::now();
        match &*state {
            State::Valid { token, until } if now < *until && Some(&**token) != refused => {
                return Ok(token.clone());
            }
            State::None { until } if now < *until => return Err(Some(*until - now)),
            State::Valid { .. } | State::None { .. } => {}
        }
        match self.request(post).await {
            Ok(granted) => {
                let token: Arc<str> = granted.access_token.into();
                // A short-lived token is used at least once.
                let valid = Duration::from_secs(granted.expires_in.min(86_400));
                let until = now + valid.saturating_sub(MARGIN);
                *state = State::Valid {
                    token: token.clone(),
                    until,
                };
                Ok(token)
            }
            Err((reason, retry_after)) => {
                seldom!(ERROR, "there is no access token for FCM", %reason);
                let pause = retry_after.unwrap_or(PAUSE);
                *state = State::None {
                    until: Instant::now() + pause,
                };
                Err(Some(pause))
            }
        }
    }

    async fn request(&self, post: &dyn Post) -> Result<Granted, (String, Option<Duration>)> {
        let failed = |reason: &str| (reason.to_owned(), None);
        let issued = now_s();
        let claims = Claims {
            iss: &self.account.email,
            scope: SCOPE,
            aud: &self.account.token_uri,
            iat: issued,
            exp: issued + ASSERTION_S,
        };
        let assertion = self.account.sign(&claims);
        let assertion = assertion.map_err(|_| failed("the assertion cannot be signed"))?;
        let url = Url::parse(&self.account.token_uri).map_err(|_| failed("token_uri"))?;
        let body = format!(
            "grant_type={}&assertion={assertion}",
            GRANT.replace(':', "%3A")
        );
        let request = Request {
            url,
            headers: headers([("content-type", "application/x-www-form-urlencoded")]),
            body: body.into(),
            timeout: TIMEOUT,
        };
        let response = post
            .post(request)
            .await
            .map_err(|f| failed(&f.to_string()))?;
        if response.status != 200 {
            let refusal = serde_json::from_slice(&response.body);
            let error = refusal.map_or_else(|_| String::new(), |refusal: Refusal| refusal.error);
            let reason = format!("status {} {error}", response.status);
            return Err((reason, response.retry_after));
        }
        serde_json::from_slice(&response.body).map_err(|_| failed("the response has no token"))
    }
}
