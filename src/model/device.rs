//! The devices of users, to which messages are pushed, and what users set for a conversation.

use aws_lc_rs::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use super::Millis;

/// A device of a user, or a browser.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Device {
    /// The id that the client chose.
    pub id: String,
    pub provider: PushProvider,
    /// The token of FCM or APNs, or the subscription of a browser as JSON.
    pub token: String,
    pub content: PushContent,
    /// The version of the user's devices with which it was registered. A newer registration has a higher one.
    #[serde(default)]
    pub version: u64,
}

impl Device {
    /// Returns the hash by which the store finds the owner of the token. It is part of the stored format.
    #[must_use]
    pub fn token_hash(&self) -> [u8; 32] {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, self.token.as_bytes()).as_ref());
        hash
    }
}

/// A service that delivers to devices.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PushProvider {
    Web,
    Fcm,
    Apns,
}

/// What a push says of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PushContent {
    /// The sender and the text.
    #[default]
    Full,
    /// Ids and the badge only.
    None,
}

/// What a user changes of their settings for a conversation. `None` leaves a setting as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SettingsChange {
    /// A time that has passed, such as 0, ends the muting.
    pub muted_until: Option<Millis>,
    pub push: Option<bool>,
}
