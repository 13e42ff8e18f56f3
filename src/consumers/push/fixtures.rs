//! What the tests of several providers need.

use std::{collections::VecDeque, sync::Mutex, time::Duration};

use async_trait::async_trait;
use aws_lc_rs::{
    encoding::{AsDer as _, Pkcs8V1Der},
    rand::SystemRandom,
    rsa,
    signature::{
        ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair,
        EcdsaSigningAlgorithm,
    },
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use uuid::Uuid;

use super::{Failure, Message, Notification, Post, Request, Response};
use crate::{
    clock,
    model::{ConversationId, Kind, MessageId, UserId},
    tasks::lock,
};

pub(super) fn message(name: Option<&str>, body: &str) -> Notification {
    Notification {
        conversation: ConversationId(Uuid::from_u128(5)),
        badge: 3,
        message: Some(Message {
            kind: Kind::Group,
            name: name.map(str::to_owned),
            seq: 7,
            message_id: MessageId(Uuid::from_u128(9)),
            sender: UserId::new("bob").unwrap(),
            body: body.into(),
            at: clock::wall(),
        }),
    }
}

pub(super) fn silent() -> Notification {
    Notification {
        conversation: ConversationId(Uuid::from_u128(5)),
        badge: 2,
        message: None,
    }
}

fn pem(der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    format!("-----BEGIN PRIVATE KEY-----\n{text}\n-----END PRIVATE KEY-----\n")
}

fn ec_pem(algorithm: &'static EcdsaSigningAlgorithm) -> String {
    let der = EcdsaKeyPair::generate_pkcs8(algorithm, &SystemRandom::new()).unwrap();
    pem(der.as_ref())
}

pub(super) fn p256_pem() -> String {
    ec_pem(&ECDSA_P256_SHA256_FIXED_SIGNING)
}

pub(super) fn p384_pem() -> String {
    ec_pem(&ECDSA_P384_SHA384_FIXED_SIGNING)
}

pub(super) fn rsa_pem() -> String {
    let pair = rsa::KeyPair::generate(rsa::KeySize::Rsa2048).unwrap();
    let der: Pkcs8V1Der<'_> = pair.as_der().unwrap();
    pem(der.as_ref())
}

/// The JSON file of a service account.
pub(super) fn account_json(private_key: &str) -> serde_json::Value {
    serde_json::json!({
        "type": "service_account", "project_id": "chat-1", "private_key_id": "k1", "private_key": private_key,
        "client_email": "push@chat-1.iam.gserviceaccount.com", "token_uri": "https://oauth2.googleapis.com/token",
    })
}

/// Keeps the requests, and answers them with prepared responses, and then with 200 and no body.
#[derive(Default)]
pub(super) struct Recorder {
    requests: Mutex<Vec<Request>>,
    responses: Mutex<VecDeque<Result<Response, Failure>>>,
}

impl Recorder {
    pub(super) fn answer(&self, status: u16, body: &str) {
        self.answer_later(status, body, None);
    }

    pub(super) fn answer_later(&self, status: u16, body: &str, retry_after_s: Option<u64>) {
        let response = Response {
            status,
            retry_after: retry_after_s.map(Duration::from_secs),
            body: Bytes::copy_from_slice(body.as_bytes()),
        };
        lock(&self.responses).push_back(Ok(response));
    }

    pub(super) fn fail(&self, failure: Failure) {
        lock(&self.responses).push_back(Err(failure));
    }

    /// Returns the requests since the last call.
    pub(super) fn take(&self) -> Vec<Request> {
        std::mem::take(&mut lock(&self.requests))
    }
}

#[async_trait]
impl Post for Recorder {
    async fn post(&self, request: Request) -> Result<Response, Failure> {
        lock(&self.requests).push(request);
        // Other requests begin meanwhile, as over a network.
        tokio::task::yield_now().await;
        let ok = Response {
            status: 200,
            retry_after: None,
            body: Bytes::new(),
        };
        lock(&self.responses).pop_front().unwrap_or(Ok(ok))
    }
}

impl Request {
    /// Returns the value of a header.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        assert!(self.headers.get_all(name).iter().count() <= 1, "{name}");
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(super) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// Reads a part of a token: 0 is its header, 1 are its claims.
pub(super) fn token_part(token: &str, part: usize) -> serde_json::Value {
    let text = token.split('.').nth(part).unwrap();
    let json = base64::engine::general_purpose::URL_SAFE_NO_PAD
        .decode(text)
        .unwrap();
    serde_json::from_slice(&json).unwrap()
}
