//! Devices, and what users set for a conversation, as clients see them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::list::{given_object, object};
use crate::model::{ConversationId, Millis, PushContent, PushProvider};

/// A device that is registered, or registered again.
#[derive(Debug, Deserialize)]
#[serde(from = "DeviceSetFields")]
pub struct DeviceSet {
    pub device: String,
    pub registration: Registration,
}

/// The fields of [`DeviceSet`]. A flattened field would keep all that are unknown, instead of ignoring them.
#[derive(Deserialize)]
struct DeviceSetFields {
    device: String,
    provider: PushProvider,
    #[serde(default)]
    token: Option<String>,
    #[serde(default, deserialize_with = "given_object")]
    subscription: Option<Subscription>,
    #[serde(default)]
    content: PushContent,
}

impl From<DeviceSetFields> for DeviceSet {
    fn from(fields: DeviceSetFields) -> Self {
        Self {
            device: fields.device,
            registration: Registration {
                provider: fields.provider,
                token: fields.token,
                subscription: fields.subscription,
                content: fields.content,
            },
        }
    }
}

/// How a device is reached.
#[derive(Debug, Deserialize, ToSchema)]
pub struct Registration {
    pub provider: PushProvider,
    /// The token of FCM or APNs.
    #[serde(default)]
    pub token: Option<String>,
    /// The subscription of a browser.
    #[serde(default, deserialize_with = "given_object")]
    pub subscription: Option<Subscription>,
    #[serde(default)]
    pub content: PushContent,
}

/// A browser's subscription, as `PushSubscription.toJSON()` returns it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Subscription {
    pub endpoint: String,
    #[serde(deserialize_with = "object")]
    pub keys: SubscriptionKeys,
}

/// The keys of a subscription, in base64url.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SubscriptionKeys {
    pub p256dh: String,
    pub auth: String,
}

#[derive(Debug, Deserialize)]
pub struct NamedDevice {
    pub device: String,
}

/// A device as its user sees it, without its secrets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceItem {
    pub device: String,
    pub provider: PushProvider,
    pub content: PushContent,
}

/// The devices of a user.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct DeviceList {
    pub items: Vec<DeviceItem>,
    /// The key with which a browser subscribes (`applicationServerKey`). Absent if browsers get no pushes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub web_key: Option<String>,
}

/// Whether the user of a session does not look at it.
#[derive(Debug, Deserialize)]
pub struct Away {
    pub away: bool,
}

#[derive(Debug, Deserialize)]
pub struct SettingsSet {
    pub conversation: ConversationId,
    /// A time that has passed, such as 0, ends the muting.
    #[serde(default)]
    pub muted_until: Option<Millis>,
    #[serde(default)]
    pub push: Option<Switch>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    On,
    Off,
}

impl Switch {
    #[must_use]
    pub fn of(on: bool) -> Self {
        if on { Self::On } else { Self::Off }
    }

    #[must_use]
    pub fn is_on(self) -> bool {
        self == Self::On
    }
}

/// What a user has set for a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SettingsEvent {
    pub conversation: ConversationId,
    /// Later settings have a higher version.
    pub version: u64,
    pub muted_until: Option<Millis>,
    pub push: Switch,
}
