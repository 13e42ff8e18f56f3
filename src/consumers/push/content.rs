//! How much notifications say.

use serde::{Deserialize, Serialize};

/// How much a notification says. Less is lower, so that the lower of two wishes is kept.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// Only ids and the badge. The app asks the gateway for the rest.
    None,
    /// Also the sender, the conversation's name, and the beginning of the text.
    #[default]
    Full,
}
