//! The devices of users, to which messages are pushed.

use serde::{Deserialize, Serialize};

/// A device of a user, or a browser.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Device {
    /// The id that the client chose.
    pub id: String,
    pub provider: PushProvider,
    /// The token of FCM or APNs, or the subscription of a browser as JSON.
    pub token: String,
    pub content: PushContent,
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
