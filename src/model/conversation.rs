//! Conversations and their participants.

use serde::{Deserialize, Serialize};

use super::{Millis, Seq, UserId};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A direct conversation of two users, or of one user with themselves. Nobody joins or leaves it.
    Dm,
    /// A conversation with a configured maximum of participants; it fans out on write.
    Group,
    /// A conversation without a maximum of participants; it fans out on read.
    Channel,
}

/// The rights of a participant: a member posts, an admin does everything but appoint owners, an owner does everything.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Member,
    Admin,
    Owner,
}

/// The participants who may send and edit messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Posting {
    #[default]
    Everyone,
    Admins,
}

impl Posting {
    /// Returns whether participants of a role may send and edit messages.
    #[must_use]
    pub fn allows(self, role: Role) -> bool {
        self == Self::Everyone || role >= Role::Admin
    }
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
    /// Listed for everyone, and open for everyone to join.
    pub public: bool,
}

/// A current or former participant of a conversation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Participant {
    pub user: UserId,
    pub role: Role,
    pub joined_seq: Seq,
    /// The seq at which they last left. They are gone if it is higher than `joined_seq`.
    pub left_seq: Option<Seq>,
    pub delivered_seq: Seq,
    pub read_seq: Seq,
}

impl Participant {
    /// Returns a participant who joins at `seq`. Everything before `seq` counts as read.
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
