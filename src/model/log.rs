//! A conversation is a log of entries, numbered without gaps; its seq is the only clock.

use serde::{Deserialize, Serialize};

use super::{ClientId, Kind, MessageId, Posting, Role, UserId, limits::PREVIEW_CHARS};

/// An entry's place in its conversation: 1, 2, 3 … without gaps.
pub type Seq = u64;

/// A change's place in the log of edits, deletions and reactions of its conversation.
pub type Rev = u64;

/// The ring version under which an owner wrote.
pub type Epoch = u64;

/// Milliseconds since 1970, UTC. For people; nothing is ordered by it.
pub type Millis = i64;

/// How far a client has got in one conversation. On the wire: `[seq, rev]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Cursor(pub Seq, pub Rev);

/// A link to something stored elsewhere.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Attachment {
    /// Where it is: `https://…` or `http://…`.
    pub url: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its media type, such as `image/png`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mime: Option<String>,
    /// Its size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// What an entry says.
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
    /// Text, and nothing else.
    pub fn text(body: impl Into<String>) -> Self {
        Self::Text {
            body: body.into(),
            attachments: Vec::new(),
            reply_to: None,
        }
    }

    /// Whether the conversation is not public once this has happened, whatever it was before.
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

/// Something that happened to the conversation itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum SystemChange {
    Created {
        kind: Kind,
        name: Option<String>,
        posting: Posting,
        public: bool,
        /// Everyone who is in it from the start, the creator first.
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

/// Not yet accepted: it has no place in the log.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Draft {
    pub sender: UserId,
    pub client_id: ClientId,
    pub content: Content,
    /// When it was written, if that is not now: an imported message.
    pub at: Option<Millis>,
    /// The sender may have sent it before: look further back than memory goes.
    pub retry: bool,
}

/// It has its place.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Entry {
    pub seq: Seq,
    pub message_id: MessageId,
    pub client_id: ClientId,
    pub sender: UserId,
    pub at: Millis,
    pub content: Content,
}

impl Entry {
    /// What the inbox shows of it.
    #[must_use]
    pub fn preview(&self) -> String {
        let whole = match &self.content {
            Content::Text {
                body, attachments, ..
            } if body.is_empty() => attachments
                .first()
                .map_or("", |a| a.name.as_ref().unwrap_or(&a.url)),
            Content::Text { body, .. } => body,
            Content::System(_) => "",
        };
        let first = match whole.as_bytes().first_chunk::<PREVIEW_CHARS>() {
            // No more characters than bytes.
            None => whole,
            Some(bytes) if bytes.is_ascii() => &whole[..PREVIEW_CHARS],
            Some(_) => {
                let end = whole.char_indices().nth(PREVIEW_CHARS);
                end.map_or(whole, |(end, _)| &whole[..end])
            }
        };
        first.to_owned()
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
    /// The first 100 characters of the body.
    pub preview: String,
}
