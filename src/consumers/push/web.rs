//! Web Push: notifications to browsers (RFC 8030), encrypted for the browser (RFC 8291) and signed by the gateway
//! (RFC 8292).

mod encryption;
mod subscription;
mod vapid;

use std::path::PathBuf;

use aws_lc_rs::hmac;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
pub use subscription::{InvalidSubscription, Subscription, SubscriptionKeys, is_host_pattern};

use self::{subscription::Receiver, vapid::Vapid};
use super::{
    Failure, Post, Request, Sent, TIMEOUT, keys::SigningKey, now_s, payload::Payload, post::headers,
};
use crate::model::ConversationId;

#[derive(Clone, Debug)]
pub struct WebSettings {
    /// A PEM file with a private key on the curve P-256. Browsers subscribe with its public key.
    pub key_file: PathBuf,
    /// `mailto:` or `https:`: where a push service reaches the operator.
    pub contact: String,
    /// The hosts of push services: a name, or `*.` and a name for all names below it. A port may follow.
    pub hosts: Vec<String>,
}

/// The provider of Web Push.
pub(super) struct Web {
    hosts: Vec<String>,
    vapid: Vapid,
}

impl Web {
    pub(super) fn new(settings: WebSettings, key: SigningKey) -> Self {
        Self {
            hosts: settings.hosts,
            vapid: Vapid::new(key, settings.contact),
        }
    }

    /// Returns the public key as base64url text.
    pub(super) fn key(&self) -> &str {
        self.vapid.public()
    }

    pub(super) fn check(&self, subscription: &Subscription) -> Result<(), InvalidSubscription> {
        subscription.receiver(&self.hosts).map(drop)
    }

    pub(super) async fn send(
        &self,
        post: &dyn Post,
        subscription: &Subscription,
        payload: &Payload,
    ) -> Sent {
        if payload.clear {
            // Browsers require that each push shows something.
            return Sent::Done;
        }
        let receiver = match subscription.receiver(&self.hosts) {
            Ok(receiver) => receiver,
            Err(invalid) => return Sent::Refused(invalid.to_string()),
        };
        let Some(request) = self.request(receiver, payload) else {
            return Sent::Refused("the notification cannot be encrypted".into());
        };
        match post.post(request).await {
            Ok(response) => match response.status {
                200..=299 => Sent::Done,
                404 | 410 => Sent::Gone,
                429 | 500..=599 => Sent::Later(response.retry_after),
                status => Sent::Refused(format!("status {status}")),
            },
            Err(Failure::Refused(reason)) => Sent::Refused(reason),
            Err(Failure::Network(_) | Failure::Timeout) => Sent::Later(None),
        }
    }

    fn request(&self, receiver: Receiver, payload: &Payload) -> Option<Request> {
        let body = encryption::encrypt(&receiver.keys, payload.json().as_bytes())?;
        let now = now_s();
        let audience = receiver.endpoint.origin().ascii_serialization();
        let authorization = self.vapid.authorization(&audience, now)?;
        let ttl = payload.expires_at.saturating_sub(now).to_string();
        let topic = topic(&receiver.keys.auth, payload.conversation);
        let headers = headers([
            ("authorization", &authorization),
            ("content-encoding", "aes128gcm"),
            ("content-type", "application/octet-stream"),
            ("topic", &topic),
            ("ttl", &ttl),
            ("urgency", "high"),
        ]);
        Some(Request {
            url: receiver.endpoint,
            headers,
            body: body.into(),
            timeout: TIMEOUT,
        })
    }
}

/// Returns the topic of a conversation: a newer notification replaces one of the same topic that waits for the browser.
/// It is another one for each subscription, so that a push service cannot tell who talks with each other.
fn topic(auth: &[u8], conversation: ConversationId) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, auth);
    let tag = hmac::sign(&key, conversation.0.as_bytes());
    // A topic has at most 32 characters.
    URL_SAFE_NO_PAD.encode(&tag.as_ref()[..24])
}

/// Decodes base64url text with or without padding.
pub(super) fn base64(text: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        consumers::push::{
            Content,
            fixtures::{Recorder, message, p256_pem, silent, token_part},
        },
        model::ConversationId,
    };

    fn web() -> Web {
        let settings = WebSettings {
            key_file: PathBuf::new(),
            contact: "mailto:admin@example.org".into(),
            hosts: vec!["push.example.org".into()],
        };
        Web::new(settings, SigningKey::parse(p256_pem().as_bytes()).unwrap())
    }

    fn payload() -> Payload {
        Payload::new(&message(None, "hello"), Content::Full, now_s() + 100)
    }

    #[tokio::test]
    async fn a_request_has_all_headers_and_no_text_that_others_can_read() {
        let (web, post) = (web(), Recorder::default());
        let subscription = subscription::fixture("https://push.example.org/send/1");
        let sent = web.send(&post, &subscription, &payload()).await;
        assert_eq!(sent, Sent::Done);
        let [request] = &post.take()[..] else {
            panic!("one request")
        };
        assert_eq!(request.url.as_str(), "https://push.example.org/send/1");
        let ttl: u64 = request.header("ttl").unwrap().parse().unwrap();
        assert!((90..=100).contains(&ttl), "{ttl}");
        assert_eq!(request.header("urgency"), Some("high"));
        assert_eq!(request.header("content-encoding"), Some("aes128gcm"));
        let authorization = request.header("authorization").unwrap();
        let (token, key) = authorization
            .strip_prefix("vapid t=")
            .unwrap()
            .split_once(", k=")
            .unwrap();
        assert_eq!(key, web.key());
        let claims = token_part(token, 1);
        assert_eq!(claims["aud"], "https://push.example.org");
        assert_eq!(claims["sub"], "mailto:admin@example.org");
        assert!(!request.body.windows(5).any(|part| part == b"hello"));
        let debug = format!("{request:?}");
        assert!(!debug.contains("vapid") && !debug.contains("send"));
    }

    #[tokio::test]
    async fn each_response_has_its_result() {
        let (web, post) = (web(), Recorder::default());
        let subscription = subscription::fixture("https://push.example.org/send/1");
        let second = Some(Duration::from_secs(1));
        for (status, expected) in [
            (201, Sent::Done),
            (404, Sent::Gone),
            (410, Sent::Gone),
            (429, Sent::Later(second)),
            (500, Sent::Later(second)),
            (503, Sent::Later(second)),
            (301, Sent::Refused("status 301".into())),
            (401, Sent::Refused("status 401".into())),
            (413, Sent::Refused("status 413".into())),
        ] {
            post.answer_later(status, "", Some(1));
            let sent = web.send(&post, &subscription, &payload()).await;
            assert_eq!(sent, expected, "{status}");
        }
        for (failure, expected) in [
            (Failure::Timeout, Sent::Later(None)),
            (Failure::Network("x".into()), Sent::Later(None)),
            (Failure::Refused("x".into()), Sent::Refused("x".into())),
        ] {
            post.fail(failure);
            let sent = web.send(&post, &subscription, &payload()).await;
            assert_eq!(sent, expected);
        }
        post.take();
        let elsewhere = subscription::fixture("https://intranet.example.org/");
        let sent = web.send(&post, &elsewhere, &payload()).await;
        assert!(matches!(sent, Sent::Refused(_)));
        let clear = Payload::new(&silent(), Content::Full, now_s() + 100);
        assert_eq!(web.send(&post, &subscription, &clear).await, Sent::Done);
        assert!(post.take().is_empty());
    }

    #[test]
    fn a_topic_is_that_of_one_conversation_and_one_subscription() {
        let [one, other] = [1, 2].map(|id| ConversationId(uuid::Uuid::from_u128(id)));
        assert_eq!(topic(b"a", one), topic(b"a", one));
        assert_eq!(topic(b"a", one).len(), 32);
        assert_ne!(topic(b"a", one), topic(b"a", other));
        assert_ne!(topic(b"a", one), topic(b"b", one));
    }
}
