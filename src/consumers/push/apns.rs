//! The Apple Push Notification service.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use reqwest::Url;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    Failure, Post, Request, Response, Sent, TIMEOUT, keys::SigningKey, now_s, payload::Payload,
    post::headers,
};
use crate::{seldom::seldom, tasks::lock};

/// Seconds after which a new token is signed. Apple refuses tokens older than an hour, and new ones that come within 20
/// minutes.
const RENEW_S: u64 = 40 * 60;
/// The time in which one refused token is replaced. If others are refused too, the clock or the key is wrong.
const REPLACE_EVERY: Duration = Duration::from_secs(20 * 60);

#[derive(Clone, Debug)]
pub struct ApnsSettings {
    /// The `.p8` file of a key for APNs.
    pub key_file: PathBuf,
    pub key_id: String,
    pub team_id: String,
    /// The bundle id of the app.
    pub topic: String,
    /// The address of APNs, without a path.
    pub url: Url,
}

/// The provider of APNs.
pub(super) struct Apns {
    url: Url,
    topic: String,
    tokens: Tokens,
}

impl Apns {
    pub(super) fn new(settings: ApnsSettings, key: SigningKey) -> Self {
        Self {
            url: settings.url,
            topic: settings.topic,
            tokens: Tokens {
                key,
                key_id: settings.key_id,
                team_id: settings.team_id,
                state: Mutex::default(),
            },
        }
    }

    pub(super) async fn send(&self, post: &dyn Post, device: &str, payload: &Payload) -> Sent {
        let mut refused = None;
        for _ in 0..2 {
            let Some(token) = self.tokens.get(refused.as_deref(), now_s()) else {
                break;
            };
            let request = self.request(device, payload, &token);
            let response = match post.post(request).await {
                Ok(response) => response,
                Err(failure) => return failed(&failure),
            };
            match (response.status, reason(&response).as_str()) {
                (200, _) => return Sent::Done,
                (403, "ExpiredProviderToken") => refused = Some(token),
                (status, reason) => return result(status, reason, response.retry_after),
            }
        }
        seldom!(
            ERROR,
            "APNs refuses new tokens as expired: is the clock of this machine right?"
        );
        Sent::Later(None)
    }

    fn request(&self, device: &str, payload: &Payload, token: &str) -> Request {
        let mut url = self.url.clone();
        url.set_path(&format!("/3/device/{device}"));
        let conversation = payload.conversation.to_string();
        let expiration = payload.expires_at.to_string();
        let authorization = format!("bearer {token}");
        let headers = headers([
            ("authorization", &authorization),
            ("apns-topic", &self.topic),
            // A silent notification changes the badge, so it is no background notification for Apple.
            ("apns-push-type", "alert"),
            ("apns-collapse-id", &conversation),
            ("apns-expiration", &expiration),
            ("apns-priority", if payload.clear { "5" } else { "10" }),
            ("content-type", "application/json"),
        ]);
        Request {
            url,
            headers,
            body: body(payload).to_string().into(),
            timeout: TIMEOUT,
        }
    }
}

/// Returns what the system shows (`aps`), and what the app gets (`chat`).
fn body(payload: &Payload) -> Value {
    let mut aps = json!({"badge": payload.badge});
    if payload.clear {
        // The app is woken to remove what it shows of the conversation.
        aps["content-available"] = 1.into();
    } else {
        aps["thread-id"] = payload.conversation.to_string().into();
        aps["sound"] = "default".into();
        // An extension of the app may change the texts before they are shown.
        aps["mutable-content"] = 1.into();
        aps["alert"] = match payload.alert() {
            None => json!({"loc-key": "NEW_MESSAGE"}),
            Some(alert) => match alert.subtitle {
                Some(sender) => {
                    json!({"title": alert.title, "subtitle": sender, "body": alert.body})
                }
                None => json!({"title": alert.title, "body": alert.body}),
            },
        };
    }
    json!({"aps": aps, "chat": payload})
}

/// Returns the reason that APNs gives for an error.
fn reason(response: &Response) -> String {
    #[derive(Deserialize)]
    struct Body {
        reason: String,
    }
    let body = serde_json::from_slice(&response.body);
    body.map_or_else(|_| String::new(), |body: Body| body.reason)
}

fn result(status: u16, reason: &str, retry_after: Option<Duration>) -> Sent {
    match (status, reason) {
        (410, _) | (400, "BadDeviceToken" | "DeviceTokenNotForTopic") => Sent::Gone,
        (429 | 500..=599, _) => Sent::Later(retry_after),
        // The operator has to do something, and the message is not lost until then.
        (403, reason) => {
            seldom!(ERROR, "APNs does not let this gateway send", reason);
            Sent::Later(retry_after)
        }
        (status, reason) => Sent::Refused(format!("status {status} {reason}")),
    }
}

fn failed(failure: &Failure) -> Sent {
    if let Failure::Refused(reason) = failure {
        seldom!(ERROR, "push.apns.url cannot be used", %reason);
    }
    Sent::Later(None)
}

#[derive(Serialize)]
struct Claims<'a> {
    iss: &'a str,
    iat: u64,
}

/// Signs tokens and keeps the newest one.
struct Tokens {
    key: SigningKey,
    key_id: String,
    team_id: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The newest token, and when it was signed, in seconds since 1970.
    newest: Option<(Arc<str>, u64)>,
    /// The time at which a refused token was replaced.
    replaced: Option<Instant>,
}

impl Tokens {
    /// Returns a token, but not the refused one. `None` if another one was refused a short time ago.
    fn get(&self, refused: Option<&str>, now_s: u64) -> Option<Arc<str>> {
        let mut state = lock(&self.state);
        if let Some((token, issued_s)) = &state.newest {
            let age_s = now_s.checked_sub(*issued_s);
            if refused == Some(&**token) {
                let replaced = state
                    .replaced
                    .is_some_and(|at| at.elapsed() < REPLACE_EVERY);
                if replaced {
                    return None;
                }
                state.replaced = Some(Instant::now());
            } else if age_s.is_some_and(|age_s| age_s < RENEW_S) {
                return Some(token.clone());
            }
        }
        let claims = Claims {
            iss: &self.team_id,
            iat: now_s,
        };
        let token: Arc<str> = self.key.sign(Some(&self.key_id), &claims).ok()?.into();
        state.newest = Some((token.clone(), now_s));
        Some(token)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::{
        super::{
            Content, Notification,
            fixtures::{Recorder, message, p256_pem, silent, token_part},
        },
        *,
    };

    fn apns() -> Apns {
        let settings = ApnsSettings {
            key_file: PathBuf::new(),
            key_id: "KEY1234567".into(),
            team_id: "TEAM123456".into(),
            topic: "org.example.chat".into(),
            url: "https://apns.example.org".parse().unwrap(),
        };
        Apns::new(settings, SigningKey::parse(p256_pem().as_bytes()).unwrap())
    }

    fn payload(notification: &Notification, content: Content) -> Payload {
        Payload::new(notification, content, 1_900_000_000)
    }

    fn error(reason: &str) -> String {
        json!({ "reason": reason }).to_string()
    }

    #[tokio::test]
    async fn a_request_has_all_headers() {
        let (apns, post) = (apns(), Recorder::default());
        let group = message(Some("Lunch"), "See you");
        let conversation = group.conversation.to_string();
        let sent = apns
            .send(&post, "ab12", &payload(&group, Content::Full))
            .await;
        assert_eq!(sent, Sent::Done);
        let clear = payload(&silent(), Content::Full);
        assert_eq!(apns.send(&post, "ab12", &clear).await, Sent::Done);
        let [request, clear] = &post.take()[..] else {
            panic!("two requests")
        };
        let address = "https://apns.example.org/3/device/ab12";
        assert_eq!(request.url.as_str(), address);
        for (name, value) in [
            ("apns-topic", "org.example.chat"),
            ("apns-push-type", "alert"),
            ("apns-collapse-id", &conversation),
            ("apns-expiration", "1900000000"),
        ] {
            assert_eq!(request.header(name), Some(value));
            assert_eq!(clear.header(name), Some(value));
        }
        assert_eq!(request.header("apns-priority"), Some("10"));
        assert_eq!(clear.header("apns-priority"), Some("5"));
        let token = request.header("authorization").unwrap();
        let token = token.strip_prefix("bearer ").unwrap();
        let header = json!({"alg": "ES256", "kid": "KEY1234567", "typ": "JWT"});
        assert_eq!(token_part(token, 0), header);
        assert_eq!(token_part(token, 1)["iss"], "TEAM123456");
        assert!(token_part(token, 1).get("exp").is_none());
        let aps = json!({
            "badge": 3, "thread-id": conversation, "sound": "default", "mutable-content": 1,
            "alert": {"title": "Lunch", "subtitle": "bob", "body": "See you"},
        });
        assert_eq!(request.json()["aps"], aps);
        assert_eq!(request.json()["chat"]["seq"], 7);
        assert_eq!(
            clear.json()["aps"],
            json!({"badge": 2, "content-available": 1})
        );
        assert_eq!(clear.json()["chat"]["clear"], true);
    }

    #[test]
    fn without_content_the_app_has_the_text() {
        let body = body(&payload(&message(Some("Lunch"), "See you"), Content::None));
        assert_eq!(body["aps"]["alert"], json!({"loc-key": "NEW_MESSAGE"}));
        for secret in ["Lunch", "bob", "See you"] {
            assert!(!body.to_string().contains(secret));
        }
        let dm = super::body(&payload(&message(None, "See you"), Content::Full));
        let alert = json!({"title": "bob", "body": "See you"});
        assert_eq!(dm["aps"]["alert"], alert);
    }

    #[tokio::test]
    async fn each_error_has_its_result() {
        let (apns, post) = (apns(), Recorder::default());
        let payload = payload(&message(None, "hello"), Content::Full);
        let wait = Sent::Later(Some(Duration::from_secs(7)));
        for (status, reason, expected) in [
            (410, "Unregistered", Sent::Gone),
            (410, "ExpiredToken", Sent::Gone),
            (400, "BadDeviceToken", Sent::Gone),
            (400, "DeviceTokenNotForTopic", Sent::Gone),
            (429, "TooManyProviderTokenUpdates", wait.clone()),
            (429, "TooManyRequests", wait.clone()),
            (500, "InternalServerError", wait.clone()),
            (503, "ServiceUnavailable", wait.clone()),
            (403, "InvalidProviderToken", wait.clone()),
            (
                413,
                "PayloadTooLarge",
                Sent::Refused("status 413 PayloadTooLarge".into()),
            ),
            (400, "BadTopic", Sent::Refused("status 400 BadTopic".into())),
        ] {
            post.answer_later(status, &error(reason), Some(7));
            assert_eq!(
                apns.send(&post, "ab12", &payload).await,
                expected,
                "{reason}"
            );
        }
        post.answer(302, "<html>");
        let refused = Sent::Refused("status 302 ".into());
        assert_eq!(apns.send(&post, "ab12", &payload).await, refused);
        for failure in [
            Failure::Timeout,
            Failure::Network("x".into()),
            Failure::Refused("x".into()),
        ] {
            post.fail(failure);
            assert_eq!(apns.send(&post, "ab12", &payload).await, Sent::Later(None));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_expired_token_is_replaced_once() {
        let (apns, post) = (apns(), Recorder::default());
        let payload = payload(&message(None, "hello"), Content::Full);
        let expired = error("ExpiredProviderToken");
        post.answer(403, &expired);
        assert_eq!(apns.send(&post, "ab12", &payload).await, Sent::Done);
        let [first, second] = &post.take()[..] else {
            panic!("two requests")
        };
        assert_ne!(
            first.header("authorization"),
            second.header("authorization")
        );
        // Apple would refuse so many new tokens.
        post.answer(403, &expired);
        assert_eq!(apns.send(&post, "ab12", &payload).await, Sent::Later(None));
        assert_eq!(post.take().len(), 1);
        advance(REPLACE_EVERY).await;
        post.answer(403, &expired);
        assert_eq!(apns.send(&post, "ab12", &payload).await, Sent::Done);
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_is_replaced_after_forty_minutes() {
        let apns = apns();
        let now = 1_800_000_000;
        let first = apns.tokens.get(None, now).unwrap();
        assert_eq!(apns.tokens.get(None, now + RENEW_S - 1).unwrap(), first);
        let second = apns.tokens.get(None, now + RENEW_S).unwrap();
        assert_ne!(second, first);
        // Another request had the old token, which was replaced meanwhile.
        assert_eq!(
            apns.tokens.get(Some(&first), now + RENEW_S).unwrap(),
            second
        );
        assert_ne!(
            apns.tokens.get(None, now).unwrap(),
            second,
            "the clock was set back"
        );
    }
}
