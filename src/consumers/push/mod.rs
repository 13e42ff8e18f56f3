//! The providers of push notifications: Web Push, Firebase Cloud Messaging and the Apple Push Notification service.
//!
//! [`Providers::send`] sends one notification to one device and says what became of it. Who is notified, and when, is
//! decided elsewhere. docs/consumers.md has the rules.

mod apns;
pub(super) mod asking;
mod content;
mod deciding;
mod fcm;
#[cfg(test)]
mod fixtures;
mod keys;
mod payload;
mod post;
mod queue;
mod services;
mod showing;
mod web;

use std::{fmt, sync::Arc, time::Duration};

pub use apns::ApnsSettings;
use async_trait::async_trait;
pub use content::Content;
pub use deciding::{Decider, Notifier};
pub use fcm::FcmSettings;
pub use keys::{KeyError, Keys};
use metrics::counter;
pub use post::{Failure, Https, Post, Request, Response};
pub use web::{InvalidSubscription, Subscription, SubscriptionKeys, WebSettings, is_host_pattern};

use self::{apns::Apns, fcm::Fcm, payload::Payload, web::Web};
use crate::{
    clock,
    model::{
        self, ConversationId, Kind, MessageId, Millis, PushContent, PushProvider, Seq, UserId,
    },
    seldom::seldom,
};

/// The longest pause before a push service or a device is tried again, unless the service asks for more.
pub const PAUSE_MAX: Duration = Duration::from_secs(60);
/// The time limit of one request to a push service.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes of a token of FCM. Those of today have about 160.
const FCM_TOKEN_BYTES_MAX: usize = 4_096;
/// Hexadecimal digits of a device token of APNs. Those of today have 64; Apple says that the length may change.
const APNS_TOKEN_DIGITS_MAX: usize = 200;

/// The settings of all providers. One without settings is not used.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The time for which push services keep a notification for a device that is not connected, from the sending of
    /// the message.
    pub ttl: Duration,
    /// The most that notifications say. A device may want less.
    pub content: Content,
    pub web: Option<WebSettings>,
    pub fcm: Option<FcmSettings>,
    pub apns: Option<ApnsSettings>,
}

/// A device that gets notifications of its user.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// The id that the device has chosen for itself.
    pub id: String,
    pub address: Address,
    /// The most that notifications to this device say.
    pub content: Content,
}

/// The address of a device at its push service. Whoever knows it may be able to notify the device, so it is not logged.
#[derive(Clone, PartialEq, Eq)]
pub enum Address {
    Web(Subscription),
    Fcm(String),
    Apns(String),
}

impl Address {
    /// Returns the name of the provider.
    #[must_use]
    pub fn provider(&self) -> &'static str {
        match self {
            Self::Web(_) => "web",
            Self::Fcm(_) => "fcm",
            Self::Apns(_) => "apns",
        }
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.provider())
    }
}

/// The reason why an address is not accepted.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum InvalidAddress {
    #[error("this gateway has no settings for provider {0:?}")]
    NotConfigured(&'static str),
    #[error("{0}")]
    Subscription(#[from] InvalidSubscription),
    #[error("a token of fcm has 1 to 4096 characters of A-Z, a-z, 0-9, -, _, : and .")]
    FcmToken,
    #[error("a token of apns has 64 to 200 hexadecimal digits")]
    ApnsToken,
}

/// What a device is told about one conversation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Notification {
    pub conversation: ConversationId,
    /// The number to show on the app's icon.
    pub badge: u64,
    /// The newest message. `None` is silent: everything was read elsewhere, and the notification of the conversation
    /// is to disappear.
    pub message: Option<Message>,
}

/// The message that a notification shows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    pub kind: Kind,
    /// The name of the conversation.
    pub name: Option<String>,
    pub seq: Seq,
    pub message_id: MessageId,
    pub sender: UserId,
    pub body: String,
    pub at: Millis,
}

/// What became of a notification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Sent {
    /// The push service has it, or the provider has no such notifications.
    Done,
    /// The push service cannot take it now. It may have said when to try again.
    Later(Option<Duration>),
    /// The device no longer exists and is to be removed.
    Gone,
    /// The push service will never take it. The reason is for the log.
    Refused(String),
}

impl Sent {
    fn name(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Later(_) => "later",
            Self::Gone => "gone",
            Self::Refused(_) => "refused",
        }
    }
}

/// The configured providers.
pub struct Providers {
    ttl: Duration,
    content: Content,
    post: Arc<dyn Post>,
    web: Option<Web>,
    fcm: Option<Fcm>,
    apns: Option<Apns>,
}

impl fmt::Debug for Providers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Providers")
            .field("web", &self.web.is_some())
            .field("fcm", &self.fcm.is_some())
            .field("apns", &self.apns.is_some())
            .finish_non_exhaustive()
    }
}

impl Providers {
    /// Makes the providers that have settings, with the keys that were read for these settings.
    #[must_use]
    pub fn new(settings: Settings, keys: Keys, post: Arc<dyn Post>) -> Self {
        let web = settings.web.zip(keys.web);
        let fcm = settings.fcm.zip(keys.fcm);
        let apns = settings.apns.zip(keys.apns);
        let used = [
            ("web", web.is_some()),
            ("fcm", fcm.is_some()),
            ("apns", apns.is_some()),
        ];
        for (provider, _) in used.into_iter().filter(|(_, is_used)| *is_used) {
            for result in ["done", "later", "gone", "refused"] {
                counter!("chat_push_total", "provider" => provider, "result" => result)
                    .increment(0);
            }
        }
        Self {
            ttl: settings.ttl,
            content: settings.content,
            post,
            web: web.map(|(settings, key)| Web::new(settings, key)),
            fcm: fcm.map(|(settings, account)| Fcm::new(settings, account)),
            apns: apns.map(|(settings, key)| Apns::new(settings, key)),
        }
    }

    /// Returns whether there is any provider. Without one, no device can be registered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.web.is_none() && self.fcm.is_none() && self.apns.is_none()
    }

    /// Returns the `applicationServerKey` with which browsers subscribe, as base64url text.
    #[must_use]
    pub fn web_key(&self) -> Option<&str> {
        self.web.as_ref().map(Web::key)
    }

    /// Checks the address of a device that registers.
    ///
    /// # Errors
    /// [`InvalidAddress`] if its provider is not configured or the address cannot be one of that provider.
    pub fn check(&self, address: &Address) -> Result<(), InvalidAddress> {
        match address {
            Address::Web(subscription) => match &self.web {
                Some(web) => Ok(web.check(subscription)?),
                None => Err(InvalidAddress::NotConfigured("web")),
            },
            Address::Fcm(_) if self.fcm.is_none() => Err(InvalidAddress::NotConfigured("fcm")),
            Address::Apns(_) if self.apns.is_none() => Err(InvalidAddress::NotConfigured("apns")),
            Address::Fcm(token) => is_fcm_token(token)
                .then_some(())
                .ok_or(InvalidAddress::FcmToken),
            Address::Apns(token) => is_apns_token(token)
                .then_some(())
                .ok_or(InvalidAddress::ApnsToken),
        }
    }

    /// Checks a device that registers, as it will be stored.
    ///
    /// # Errors
    /// [`InvalidAddress`] if its provider is not configured or nothing can be sent to it.
    pub fn check_device(&self, device: &model::Device) -> Result<(), InvalidAddress> {
        match addressed(device) {
            Some(device) => self.check(&device.address),
            None => Err(InvalidSubscription::Endpoint.into()),
        }
    }

    /// Sends a notification to a device.
    pub async fn send(&self, device: &Device, notification: &Notification) -> Sent {
        let sent = self.send_to(device, notification).await;
        let provider = device.address.provider();
        counter!("chat_push_total", "provider" => provider, "result" => sent.name()).increment(1);
        if let Sent::Refused(reason) = &sent {
            seldom!(WARN, "a push service refused a notification", provider, %reason);
        }
        sent
    }

    async fn send_to(&self, device: &Device, notification: &Notification) -> Sent {
        // The checks of the registration were those of other settings, perhaps.
        if let Err(invalid) = self.check(&device.address) {
            return Sent::Refused(invalid.to_string());
        }
        let content = self.content.min(device.content);
        let expires_at = self.expires_at(notification);
        let payload = Payload::new(notification, content, expires_at);
        let post = &*self.post;
        match (&device.address, &self.web, &self.fcm, &self.apns) {
            (Address::Web(subscription), Some(web), ..) => {
                web.send(post, subscription, &payload).await
            }
            (Address::Fcm(token), _, Some(fcm), _) => fcm.send(post, token, &payload).await,
            (Address::Apns(token), .., Some(apns)) => apns.send(post, token, &payload).await,
            _ => Sent::Refused("its provider is not configured".into()),
        }
    }

    /// Returns the time after which push services drop a notification, in seconds since 1970.
    fn expires_at(&self, notification: &Notification) -> u64 {
        let now = clock::wall();
        // A message from the future is one of a gateway whose clock is ahead.
        let from = notification.message.as_ref().map_or(now, |m| m.at.min(now));
        u64::try_from(from / 1_000).unwrap_or_default() + self.ttl.as_secs()
    }
}

#[async_trait]
impl Notifier for Providers {
    async fn notify(&self, device: &model::Device, notification: &Notification) -> Sent {
        match addressed(device) {
            Some(device) => self.send(&device, notification).await,
            None => Sent::Refused("its subscription is damaged".into()),
        }
    }
}

/// Returns a device as providers need it. `None` if its subscription cannot be read.
fn addressed(device: &model::Device) -> Option<Device> {
    let token = || device.token.clone();
    let address = match device.provider {
        PushProvider::Web => Address::Web(serde_json::from_str(&device.token).ok()?),
        PushProvider::Fcm => Address::Fcm(token()),
        PushProvider::Apns => Address::Apns(token()),
    };
    Some(Device {
        id: device.id.clone(),
        address,
        content: match device.content {
            PushContent::Full => Content::Full,
            PushContent::None => Content::None,
        },
    })
}

fn is_fcm_token(token: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"-_:.".contains(&b);
    (1..=FCM_TOKEN_BYTES_MAX).contains(&token.len()) && token.bytes().all(fits)
}

/// Whether a text can be a device token. It becomes part of a path, so no other characters are accepted.
fn is_apns_token(token: &str) -> bool {
    (64..=APNS_TOKEN_DIGITS_MAX).contains(&token.len())
        && token.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Returns the seconds since 1970.
fn now_s() -> u64 {
    u64::try_from(clock::wall() / 1_000).unwrap_or_default()
}
