//! Sends notifications through the providers to the services of `tests/blackbox/push_fakes.py`, which read them with
//! libraries that the gateway does not use. They are Python packages, so `tests/run` starts these tests apart.

use std::{
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use chat_gateway::{
    clock,
    config::Config,
    consumers::push::{
        Address, Content, Device, Failure, Keys, Message, Notification, Post, Providers, Request,
        Response, Sent, Settings,
    },
    model::{ConversationId, Kind, MessageId, UserId},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use uuid::Uuid;

/// Sends requests with the certificate of the fakes.
struct Client(reqwest::Client);

#[async_trait]
impl Post for Client {
    async fn post(&self, request: Request) -> Result<Response, Failure> {
        let sent = self.0.post(request.url).headers(request.headers);
        let failed = |error: reqwest::Error| Failure::Network(format!("{error:?}"));
        let sent = sent.timeout(request.timeout).body(request.body).send();
        let response = sent.await.map_err(failed)?;
        let after = response.headers().get("retry-after");
        let after = after.and_then(|after| after.to_str().ok()?.parse().ok());
        Ok(Response {
            status: response.status().as_u16(),
            retry_after: after.map(Duration::from_secs),
            body: response.bytes().await.map_err(failed)?,
        })
    }
}

/// The running fakes, and the providers that are set to them.
struct Fakes {
    root: TempDir,
    process: std::process::Child,
    origin: String,
    http: reqwest::Client,
}

impl Drop for Fakes {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Fakes {
    fn start() -> Self {
        use std::io::{BufRead as _, BufReader};
        crate::enter_project();
        let root = TempDir::new().unwrap();
        let python = std::env::var("CHAT_TEST_PYTHON");
        let mut process = Command::new(python.as_deref().unwrap_or("tests/.venv/bin/python"))
            .arg("tests/blackbox/push_fakes.py")
            .arg(root.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("tests/run blackbox installs the packages of tests/requirements.txt");
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let said: Value = serde_json::from_str(&line).unwrap();
        let certificate = std::fs::read(root.path().join("tls.pem")).unwrap();
        let certificate = reqwest::Certificate::from_pem(&certificate).unwrap();
        let http = reqwest::Client::builder()
            .tls_certs_only([certificate])
            .build()
            .unwrap();
        Self {
            origin: said["origin"].as_str().unwrap().to_owned(),
            root,
            process,
            http,
        }
    }

    fn settings(&self) -> Settings {
        let file = |name| Some(self.root.path().join(name));
        let text = |text: &str| Some(text.to_owned());
        let mut push = Config::default().push;
        push.web.key_file = file("push.pem");
        push.web.contact = text("mailto:admin@example.org");
        push.web.hosts = vec![self.origin.trim_start_matches("https://").to_owned()];
        push.fcm.key_file = file("firebase.json");
        push.fcm.url = text(&self.origin);
        push.apns.key_file = file("apns.p8");
        push.apns.key_id = text("KEY1234567");
        push.apns.team_id = text("TEAM123456");
        push.apns.topic = text("org.example.chat");
        push.apns.url = text(&self.origin);
        push.settings()
    }

    fn providers(&self) -> Providers {
        let settings = self.settings();
        let keys = Keys::read(&settings).unwrap();
        Providers::new(settings, keys, Arc::new(Client(self.http.clone())))
    }

    async fn control(&self, what: &str, body: Value) -> Value {
        let asked = self.http.post(format!("{}/control/{what}", self.origin));
        let answer = asked.body(body.to_string()).send().await.unwrap();
        serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap_or_default()
    }

    async fn answer(&self, service: &str, status: u16, body: Value) {
        let headers = json!({"retry_after": 7});
        let body = json!({"service": service, "status": status, "body": body, "headers": headers});
        self.control("answer", body).await;
    }

    async fn last(&self, service: &str) -> Value {
        let received = self.control("received", json!({})).await;
        received[service]
            .as_array()
            .unwrap()
            .last()
            .unwrap()
            .clone()
    }

    async fn browser(&self, name: &str) -> Device {
        let subscription = self.control("subscribe", json!({ "name": name })).await;
        device(Address::Web(serde_json::from_value(subscription).unwrap()))
    }
}

fn device(address: Address) -> Device {
    Device {
        id: "phone".into(),
        address,
        content: Content::Full,
    }
}

fn notification() -> Notification {
    Notification {
        conversation: ConversationId(Uuid::from_u128(5)),
        badge: 3,
        message: Some(Message {
            kind: Kind::Group,
            name: Some("Lunch 🍜".into()),
            seq: 7,
            message_id: MessageId(Uuid::from_u128(9)),
            sender: UserId::new("bob").unwrap(),
            body: "Zoë: \"see\u{1} you\" \\".repeat(200),
            at: clock::wall(),
        }),
    }
}

fn silent() -> Notification {
    Notification {
        message: None,
        ..notification()
    }
}

fn assert_full(payload: &Value) {
    assert_eq!(
        payload["conversation"],
        "00000000-0000-0000-0000-000000000005"
    );
    assert_eq!(payload["name"], "Lunch 🍜");
    assert_eq!(payload["sender"], "bob");
    assert_eq!(payload["badge"], 3);
    let body = payload["body"].as_str().unwrap();
    assert!(
        body.starts_with("Zoë: \"see\u{1} you\" \\Zoë") && body.ends_with('…'),
        "{body}"
    );
}

#[tokio::test]
#[ignore = "needs the packages of tests/requirements.txt"]
async fn browsers_decrypt_notifications() {
    let fakes = Fakes::start();
    let providers = fakes.providers();
    let mut browser = fakes.browser("firefox").await;
    providers.check(&browser.address).unwrap();
    assert_eq!(providers.send(&browser, &notification()).await, Sent::Done);
    let received = fakes.last("web").await;
    assert_eq!(received["ok"], true, "{received}");
    assert_full(&received["payload"]);
    assert_eq!(received["claims"]["aud"], fakes.origin.as_str());
    assert_eq!(received["claims"]["sub"], "mailto:admin@example.org");
    browser.content = Content::None;
    assert_eq!(providers.send(&browser, &notification()).await, Sent::Done);
    let ids = json!({
        "conversation": "00000000-0000-0000-0000-000000000005", "seq": 7,
        "message_id": "00000000-0000-0000-0000-000000000009", "badge": 3,
    });
    assert_eq!(fakes.last("web").await["payload"], ids);

    let later = Sent::Later(Some(Duration::from_secs(7)));
    for (status, expected) in [
        (404, Sent::Gone),
        (410, Sent::Gone),
        (429, later.clone()),
        (503, later),
    ] {
        fakes.answer("web", status, Value::Null).await;
        assert_eq!(providers.send(&browser, &notification()).await, expected);
    }
    // The push service knows the key of the subscription, and refuses others.
    let other = Fakes::start();
    let mut settings = fakes.settings();
    settings.web.as_mut().unwrap().key_file = other.root.path().join("push.pem");
    let keys = Keys::read(&settings).unwrap();
    let client = Client(fakes.http.clone());
    let providers = Providers::new(settings, keys, Arc::new(client));
    let refused = Sent::Refused("status 403".into());
    assert_eq!(providers.send(&browser, &notification()).await, refused);
}

#[tokio::test]
#[ignore = "needs the packages of tests/requirements.txt"]
async fn fcm_accepts_messages_and_its_errors_are_understood() {
    let fakes = Fakes::start();
    let providers = fakes.providers();
    let phone = device(Address::Fcm("token-of-fcm".into()));
    assert_eq!(providers.send(&phone, &notification()).await, Sent::Gone);
    fakes
        .control("device", json!({"device": "token-of-fcm"}))
        .await;
    for notification in [notification(), silent()] {
        assert_eq!(providers.send(&phone, &notification).await, Sent::Done);
    }
    let received = fakes.control("received", json!({})).await;
    assert_eq!(
        received["token"].as_array().unwrap().len(),
        1,
        "one access token for all"
    );
    let message = &received["fcm"][1]["message"];
    assert_full(&serde_json::from_str(message["data"]["chat"].as_str().unwrap()).unwrap());
    assert_eq!(message["notification"]["title"], "Lunch 🍜");
    let clear: Value = serde_json::from_str(
        received["fcm"][2]["message"]["data"]["chat"]
            .as_str()
            .unwrap(),
    )
    .unwrap();
    assert_eq!(clear["clear"], true);

    // The fake forgets no access token, so it is told to refuse one.
    let error = |general: &str, code: &str| json!({"error": {"status": general, "details": [{"errorCode": code}]}});
    fakes
        .answer("fcm", 401, json!({"error": {"status": "UNAUTHENTICATED"}}))
        .await;
    assert_eq!(providers.send(&phone, &notification()).await, Sent::Done);
    let received = fakes.last("fcm").await;
    assert_eq!(received["headers"]["authorization"], "Bearer access-2");
    let later = Sent::Later(Some(Duration::from_secs(7)));
    for (status, code, expected) in [
        (404, "UNREGISTERED", Sent::Gone),
        (403, "SENDER_ID_MISMATCH", Sent::Gone),
        (429, "QUOTA_EXCEEDED", later.clone()),
        (503, "UNAVAILABLE", later.clone()),
        (500, "INTERNAL", later),
    ] {
        fakes.answer("fcm", status, error("ANY", code)).await;
        assert_eq!(
            providers.send(&phone, &notification()).await,
            expected,
            "{code}"
        );
    }
}

#[tokio::test]
#[ignore = "needs the packages of tests/requirements.txt"]
async fn apns_accepts_notifications_and_its_errors_are_understood() {
    let fakes = Fakes::start();
    let providers = fakes.providers();
    let token = "0123456789abcdef".repeat(4);
    let phone = device(Address::Apns(token.clone()));
    assert_eq!(providers.send(&phone, &notification()).await, Sent::Gone);
    fakes.control("device", json!({ "device": token })).await;
    assert_eq!(providers.send(&phone, &notification()).await, Sent::Done);
    let received = fakes.last("apns").await;
    assert_eq!(received["version"], "2");
    assert_full(&received["payload"]["chat"]);
    assert_eq!(received["payload"]["aps"]["alert"]["subtitle"], "bob");
    assert_eq!(providers.send(&phone, &silent()).await, Sent::Done);
    let quiet = Device {
        content: Content::None,
        ..phone.clone()
    };
    assert_eq!(providers.send(&quiet, &notification()).await, Sent::Done);

    fakes
        .answer("apns", 403, json!({"reason": "ExpiredProviderToken"}))
        .await;
    assert_eq!(providers.send(&phone, &notification()).await, Sent::Done);
    let later = Sent::Later(Some(Duration::from_secs(7)));
    for (status, reason, expected) in [
        (410, "Unregistered", Sent::Gone),
        (400, "BadDeviceToken", Sent::Gone),
        (400, "DeviceTokenNotForTopic", Sent::Gone),
        (429, "TooManyProviderTokenUpdates", later.clone()),
        (503, "ServiceUnavailable", later),
    ] {
        fakes
            .answer("apns", status, json!({ "reason": reason }))
            .await;
        assert_eq!(
            providers.send(&phone, &notification()).await,
            expected,
            "{reason}"
        );
    }
}
