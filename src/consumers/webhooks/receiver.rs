//! Sends events to the address of a webhook.

use std::sync::Arc;

use async_trait::async_trait;

use super::{
    Settings,
    dispatcher::Receiver,
    endpoint::Outcome,
    events::{Event, payload},
    signing::{ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, signature},
};
use crate::{
    clock,
    consumers::http::{Client, HeaderMap, HeaderName, HeaderValue, Request},
};

/// Bytes of an answer's body that operators are shown.
const SHOWN_BYTES: usize = 200;

/// A webhook's address, reached with the gateway's one client.
pub struct HttpReceiver {
    pub client: Arc<Client>,
    pub settings: Arc<Settings>,
}

#[async_trait]
impl Receiver for HttpReceiver {
    async fn deliver(&self, events: &[Event]) -> (Outcome, Option<String>) {
        let Some(payload) = payload(events) else {
            return (Outcome::Accepted, None);
        };
        let now_s = u64::try_from(clock::wall() / 1_000).unwrap_or_default();
        let signature = signature(&self.settings.secrets, &payload.id, now_s, &payload.body);
        let mut headers = HeaderMap::new();
        let fields = [
            ("content-type", "application/json".to_owned()),
            (ID_HEADER, payload.id),
            (TIMESTAMP_HEADER, now_s.to_string()),
            (SIGNATURE_HEADER, signature),
        ];
        for (name, value) in fields {
            // Ids, numbers and base64 are always valid.
            if let Ok(value) = HeaderValue::from_str(&value) {
                headers.insert(HeaderName::from_static(name), value);
            }
        }
        let answer = self.client.post(Request {
            url: self.settings.url.clone(),
            class: self.settings.class.clone(),
            headers,
            body: payload.body,
            timeout: self.settings.timeout,
        });
        let answer = answer.await;
        let outcome = Outcome::from(&answer);
        let error = match (&answer, outcome) {
            (_, Outcome::Accepted) => None,
            (Err(failure), _) => Some(failure.to_string()),
            (Ok(answer), _) => {
                let body = &answer.body[..answer.body.len().min(SHOWN_BYTES)];
                let body = String::from_utf8_lossy(body);
                Some(format!("status {}: {}", answer.status, body.trim()))
            }
        };
        (outcome, error)
    }
}
