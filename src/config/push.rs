//! The settings of push notifications. Keys are in files, never in a setting.

use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::consumers::push::Content;

/// Push notifications. A provider is used if it has a key file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Push {
    /// Seconds for which a user must not have looked before devices are notified.
    pub grace_s: u64,
    /// Seconds for which push services keep a notification.
    pub ttl_s: u64,
    /// The most that notifications say.
    pub content: Content,
    /// Networks that the addresses of push services may be in, besides public addresses.
    pub allow: Vec<IpNet>,
    pub web: WebPush,
    pub fcm: FcmPush,
    pub apns: ApnsPush,
}

/// Web Push, for browsers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WebPush {
    /// A PEM file with a private key on the curve P-256.
    pub key_file: Option<PathBuf>,
    /// Where push services reach the operator: `mailto:` or `https:`.
    pub contact: Option<String>,
    /// The hosts of push services: names, or `*.` and a name for all names below it. A port may follow.
    pub hosts: Vec<String>,
}

/// Firebase Cloud Messaging.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FcmPush {
    /// The JSON file of a service account.
    pub key_file: Option<PathBuf>,
    /// The address of FCM, if it is another one than Google's.
    pub url: Option<String>,
}

/// The Apple Push Notification service.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ApnsPush {
    /// The `.p8` file of a key for APNs.
    pub key_file: Option<PathBuf>,
    pub key_id: Option<String>,
    pub team_id: Option<String>,
    /// The bundle id of the app.
    pub topic: Option<String>,
    /// Whether the devices are those of developers.
    pub sandbox: bool,
    /// The address of APNs, if it is another one than Apple's.
    pub url: Option<String>,
}

impl Default for Push {
    fn default() -> Self {
        Self {
            grace_s: 5,
            ttl_s: 86_400,
            content: Content::Full,
            allow: Vec::new(),
            web: WebPush::default(),
            fcm: FcmPush::default(),
            apns: ApnsPush::default(),
        }
    }
}

impl Default for WebPush {
    fn default() -> Self {
        let hosts = [
            "fcm.googleapis.com",
            "updates.push.services.mozilla.com",
            "*.push.apple.com",
            "*.notify.windows.com",
        ];
        Self {
            key_file: None,
            contact: None,
            hosts: hosts.map(Into::into).to_vec(),
        }
    }
}
