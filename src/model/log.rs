//! The log of a conversation: entries numbered without gaps. The seq is its only clock.

use serde::{Deserialize, Serialize};

use super::{
    Attachment, ClientId, Kind, MessageId, Millis, Posting, Role, Seq, UserId,
    limits::PREVIEW_CHARS, text::cut,
};

/// The content of an entry: a message or a change of the conversation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Content {
    Text {
        body: String,
        attachments: Vec<Attachment>,
        reply_to: Option<Seq>,
    },
    System(SystemChange),
}

impl Content {
    /// Returns a message of text only, without attachments.
    pub fn text(body: impl Into<String>) -> Self {
        Self::Text {
            body: body.into(),
            attachments: Vec::new(),
            reply_to: None,
        }
    }

    /// Returns the attachments. System entries have none.
    #[must_use]
    pub fn attachments(&self) -> &[Attachment] {
        match self {
            Self::Text { attachments, .. } => attachments,
            Self::System(_) => &[],
        }
    }

    /// Returns whether this entry makes the conversation private, whatever it was before.
    #[must_use]
    pub fn makes_private(&self) -> bool {
        matches!(
            self,
            Self::System(SystemChange::Updated {
                public: Some(false),
                ..
            })
        )
    }
}

/// A change of the conversation or of its participants.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum SystemChange {
    Created {
        kind: Kind,
        name: Option<String>,
        posting: Posting,
        public: bool,
        /// All initial participants, the creator first.
        #[schema(value_type = Vec<String>)]
        participants: Vec<UserId>,
    },
    Added {
        #[schema(value_type = String)]
        user: UserId,
    },
    Removed {
        #[schema(value_type = String)]
        user: UserId,
    },
    Joined,
    Left,
    RoleSet {
        #[schema(value_type = String)]
        user: UserId,
        role: Role,
    },
    Updated {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        posting: Option<Posting>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        public: Option<bool>,
    },
}

/// A message that is not accepted yet and so has no position in the log.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Draft {
    pub sender: UserId,
    pub client_id: ClientId,
    pub content: Content,
    /// The time at which an imported message was written. `None` means now.
    pub at: Option<Millis>,
    /// Whether the sender may have sent the message before. The owner then also searches stored client ids.
    pub retry: bool,
}

/// A message or system change with its position in the log.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Entry {
    pub seq: Seq,
    pub message_id: MessageId,
    pub client_id: ClientId,
    pub sender: UserId,
    pub at: Millis,
    pub content: Content,
    /// The number of people's messages in the log up to this entry.
    pub texts: u64,
}

impl Entry {
    /// Returns the text that the inbox shows for this entry: at most [`PREVIEW_CHARS`] code points,
    /// and whole grapheme clusters.
    #[must_use]
    pub fn preview(&self) -> String {
        cut(self.shown(), PREVIEW_CHARS).to_owned()
    }

    /// Returns the text that shows this entry: its body, or the name of its first attachment.
    #[must_use]
    pub fn shown(&self) -> &str {
        match &self.content {
            Content::Text {
                body, attachments, ..
            } if body.is_empty() => attachments
                .first()
                .map_or("", |a| a.name.as_ref().unwrap_or(&a.url)),
            Content::Text { body, .. } => body,
            Content::System(_) => "",
        }
    }

    #[must_use]
    pub fn last(&self) -> Last {
        Last {
            seq: self.seq,
            message_id: self.message_id,
            at: self.at,
            sender: self.sender.clone(),
            kind: match self.content {
                Content::Text { .. } => EntryKind::Text,
                Content::System(_) => EntryKind::System,
            },
            preview: self.preview(),
            deleted: false,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    Text,
    System,
}

/// The newest entry of a conversation, as the inbox shows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Last {
    pub seq: Seq,
    #[schema(value_type = String, format = Uuid)]
    pub message_id: MessageId,
    pub at: Millis,
    #[schema(value_type = String)]
    pub sender: UserId,
    pub kind: EntryKind,
    /// The beginning of the body: at most 100 code points, and whole grapheme clusters.
    pub preview: String,
    /// Whether the entry was deleted. Its preview is empty then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deleted: bool,
}

/// The newest entry of a conversation, with the rest of what inbox rows keep of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Newest {
    pub last: Last,
    /// How often the entry's content changed.
    pub changes: u32,
    /// See [`Entry::texts`].
    pub texts: u64,
}

impl Newest {
    /// Returns the version of what inboxes show. The highest one replaces the others.
    #[must_use]
    pub fn version(&self) -> (Seq, u32) {
        (self.last.seq, self.changes)
    }
}
