//! Firebase Cloud Messaging, by its HTTP v1 interface.

mod access;

use std::{path::PathBuf, time::Duration};

use reqwest::Url;
use serde::Deserialize;
use serde_json::{Value, json};

use self::access::AccessTokens;
use super::{
    Failure, Post, Request, Response, Sent, TIMEOUT, keys::ServiceAccount, now_s, payload::Payload,
    post::headers,
};
use crate::seldom::seldom;

#[derive(Clone, Debug)]
pub struct FcmSettings {
    /// The JSON file of a service account.
    pub key_file: PathBuf,
    /// The address of FCM, without a path.
    pub url: Url,
}

/// The provider of FCM.
pub(super) struct Fcm {
    /// The address for all messages of the project.
    url: Url,
    tokens: AccessTokens,
}

impl Fcm {
    pub(super) fn new(settings: FcmSettings, account: ServiceAccount) -> Self {
        let mut url = settings.url;
        url.set_path(&format!("/v1/projects/{}/messages:send", account.project));
        Self {
            url,
            tokens: AccessTokens::new(account),
        }
    }

    pub(super) async fn send(&self, post: &dyn Post, device: &str, payload: &Payload) -> Sent {
        let body = message(device, payload).to_string();
        let mut refused = None;
        // FCM may refuse an access token before its time. Then a new one is tried, once.
        for _ in 0..2 {
            let token = match self.tokens.get(post, refused.as_deref()).await {
                Ok(token) => token,
                Err(pause) => return Sent::Later(pause),
            };
            let authorization = format!("Bearer {token}");
            let request = Request {
                url: self.url.clone(),
                headers: headers([
                    ("authorization", &authorization),
                    ("content-type", "application/json"),
                ]),
                body: body.clone().into(),
                timeout: TIMEOUT,
            };
            match post.post(request).await {
                Ok(response) if is_unauthenticated(&response) => refused = Some(token),
                Ok(response) => return result(&response),
                Err(failure) => return failed(&failure),
            }
        }
        seldom!(ERROR, "FCM refuses the access token of push.fcm.key_file");
        Sent::Later(None)
    }
}

/// Returns a message for the library of Firebase in an app. With texts, the system shows it if the app is in the
/// background; otherwise the app gets only the data.
fn message(device: &str, payload: &Payload) -> Value {
    let conversation = payload.conversation.to_string();
    let ttl = payload.expires_at.saturating_sub(now_s());
    let mut android = json!({
        "collapse_key": conversation,
        "priority": if payload.clear { "NORMAL" } else { "HIGH" },
        "ttl": format!("{ttl}s"),
    });
    // Values of data are texts, and some names are reserved, so all is one value.
    let mut message = json!({"token": device, "data": {"chat": payload.json()}});
    if let Some(alert) = payload.alert() {
        let body = match alert.subtitle {
            Some(sender) => format!("{sender}: {}", alert.body),
            None => alert.body.to_owned(),
        };
        message["notification"] = json!({"title": alert.title, "body": body});
        android["notification"] = json!({"tag": conversation});
    }
    message["android"] = android;
    json!({ "message": message })
}

/// The error in a response.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Error {
    /// The general code, such as `NOT_FOUND`.
    status: String,
    details: Vec<Detail>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Detail {
    /// The code of FCM, such as `UNREGISTERED`.
    #[serde(rename = "errorCode")]
    code: Option<String>,
}

impl Error {
    fn of(response: &Response) -> Self {
        #[derive(Deserialize)]
        struct Body {
            error: Error,
        }
        // A proxy may answer with something else. Then the status says all.
        serde_json::from_slice(&response.body)
            .map_or_else(|_| Self::default(), |body: Body| body.error)
    }

    /// Returns the code of FCM, or else the general one.
    fn code(&self) -> &str {
        let code = self
            .details
            .iter()
            .find_map(|detail| detail.code.as_deref());
        code.unwrap_or(&self.status)
    }
}

/// Whether the access token was refused. Other errors have this status too.
fn is_unauthenticated(response: &Response) -> bool {
    response.status == 401 && ["UNAUTHENTICATED", ""].contains(&Error::of(response).code())
}

fn result(response: &Response) -> Sent {
    if response.status < 300 {
        return Sent::Done;
    }
    let error = Error::of(response);
    match (response.status, error.code()) {
        (_, "UNREGISTERED" | "SENDER_ID_MISMATCH") => Sent::Gone,
        (429 | 500..=599, _) | (_, "UNAVAILABLE" | "INTERNAL" | "QUOTA_EXCEEDED") => {
            Sent::Later(response.retry_after)
        }
        // The operator has to do something, and the message is not lost until then.
        (401 | 403, code) => {
            seldom!(ERROR, "FCM does not let this gateway send", code);
            Sent::Later(response.retry_after)
        }
        (status, code) => Sent::Refused(format!("status {status} {code}")),
    }
}

fn failed(failure: &Failure) -> Sent {
    if let Failure::Refused(reason) = failure {
        seldom!(ERROR, "push.fcm.url cannot be used", %reason);
    }
    Sent::Later(None)
}

/// The pause after a failure that may last.
const PAUSE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
