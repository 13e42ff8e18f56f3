//! Changes of messages as clients see them.

use std::collections::BTreeMap;

use serde::Serialize;
use utoipa::ToSchema;

use crate::model::{Attachment, ContentState, ConversationId, Millis, Rev, Seq, UserId};

/// The messages that changed in (after, rev].
#[derive(Debug, Clone, Serialize)]
pub struct ChangedEvent {
    pub conversation: ConversationId,
    pub after: Rev,
    pub rev: Rev,
    /// Empty if the client must request `changes`; then `after` equals `rev`.
    pub items: Vec<Item>,
}

impl ChangedEvent {
    /// Returns an event without items: a client whose cursor is below `rev` requests `changes`.
    #[must_use]
    pub fn gap(conversation: ConversationId, rev: Rev) -> Self {
        Self {
            conversation,
            after: rev,
            rev,
            items: Vec::new(),
        }
    }
}

/// The fields of a message that changed.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Item {
    pub seq: Seq,
    /// The rev of the newest change of this message up to the `rev` of the list.
    pub rev: Rev,
    /// The new body of an edited message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// All attachments of an edited message, also if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attachments: Option<Vec<Attachment>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub edited_at: Option<Millis>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deleted: Option<Deleted>,
    /// Each emoji with the number of its users, if the reactions changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reactions: Option<BTreeMap<String, u64>>,
    /// The change of the reactions, if it was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<ReactionBy>,
    /// The reactions of the requesting user, if the reactions changed. It is only in replies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mine: Option<Vec<String>>,
}

/// Who deleted a message, and when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Deleted {
    #[schema(value_type = String)]
    pub by: UserId,
    pub at: Millis,
}

impl Deleted {
    /// Returns the author and time of the content's newest change, which is a deletion.
    pub(crate) fn of(state: &ContentState) -> Self {
        Self {
            by: state.by.clone(),
            at: state.at,
        }
    }
}

/// A reaction that a user added or removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct ReactionBy {
    #[schema(value_type = String)]
    pub user: UserId,
    pub emoji: String,
    /// Whether it was added.
    pub on: bool,
}

/// The reply to `changes`.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Changes {
    pub after: Rev,
    /// The rev up to which the items are complete.
    pub rev: Rev,
    pub items: Vec<Item>,
    /// Whether there are later changes.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
    /// Whether too many changes are missing: the client drops what it knows of changes, and reads its pages again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub reset: bool,
}

/// A user who reacted to a message.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ReactorItem {
    #[schema(value_type = String)]
    pub user: UserId,
    pub emoji: String,
    pub at: Millis,
}
