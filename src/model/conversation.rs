//! What a conversation is, and who is in it.

use serde::{Deserialize, Serialize};

use super::{Millis, Seq, UserId};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Two users (or one with themselves). Nobody joins or leaves.
    Dm,
    /// Up to a configured number of participants; fans out on write.
    Group,
    /// Participants without bound; fans out on read.
    Channel,
}

/// Who may do what: an owner everything, an admin all but make owners, a member post.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Member,
    Admin,
    Owner,
}

/// Who may send messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Posting {
    #[default]
    Everyone,
    Admins,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Details {
    pub kind: Kind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub created_at: Millis,
    #[schema(value_type = String)]
    pub created_by: UserId,
    pub posting: Posting,
    /// Listed, and anyone may join.
    pub public: bool,
}

/// A user in a conversation, or one who was.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Participant {
    pub user: UserId,
    pub role: Role,
    pub joined_seq: Seq,
    /// Set when they left; higher than `joined_seq` means that they are gone.
    pub left_seq: Option<Seq>,
    pub delivered_seq: Seq,
    pub read_seq: Seq,
}

impl Participant {
    /// Who joins starts with everything before read.
    #[must_use]
    pub fn joining(user: UserId, role: Role, seq: Seq) -> Self {
        Self {
            user,
            role,
            joined_seq: seq,
            left_seq: None,
            delivered_seq: seq,
            read_seq: seq,
        }
    }

    #[must_use]
    pub fn is_in(&self) -> bool {
        self.left_seq.is_none_or(|left| left < self.joined_seq)
    }
}
