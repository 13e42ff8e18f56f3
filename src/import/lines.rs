//! The lines of an imported file.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor, value::MapAccessDeserializer},
};

use super::files::FileLine;
use crate::{
    model::{
        Attachment, ClientId, ConversationId, Kind, Millis, Posting, Seq, UserId,
        limits::ATTACHMENTS_MAX,
    },
    protocol::{body, objects_at_most},
};

pub(super) enum Line {
    Conversation(ConversationLine),
    Message(MessageLine),
}

#[derive(Deserialize)]
struct Typed {
    #[serde(rename = "type")]
    kind: LineKind,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum LineKind {
    Conversation,
    Message,
}

impl Line {
    /// Reads a line: first its type, because errors in the fields of an enum do not name them.
    pub(super) fn read(line: &[u8]) -> Result<Self, String> {
        Ok(match body::<Typed>(line)?.kind {
            LineKind::Conversation => Self::Conversation(body(line)?),
            LineKind::Message => Self::Message(body(line)?),
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConversationLine {
    #[serde(rename = "type")]
    _kind: IgnoredAny,
    /// The id of a group or channel, a UUID of version 4 or 7. A dm has none.
    pub(super) id: Option<ConversationId>,
    pub(super) kind: Kind,
    /// The participants. The first one is the owner.
    pub(super) participants: Vec<UserId>,
    pub(super) name: Option<String>,
    #[serde(default)]
    pub(super) public: bool,
    #[serde(default)]
    pub(super) posting: Posting,
    pub(super) at: Option<Millis>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MessageLine {
    #[serde(rename = "type")]
    _kind: IgnoredAny,
    pub(super) conversation: Option<ConversationId>,
    /// The two users of a dm, instead of `conversation`.
    pub(super) dm: Option<(UserId, UserId)>,
    pub(super) sender: UserId,
    pub(super) body: String,
    #[serde(default, deserialize_with = "objects_at_most::<_, _, ATTACHMENTS_MAX>")]
    pub(super) attachments: Vec<Attachment>,
    /// Files of this machine. They are attachments after the others.
    #[serde(default, deserialize_with = "objects_at_most::<_, _, ATTACHMENTS_MAX>")]
    pub(super) files: Vec<FileLine>,
    pub(super) reply_to: Option<Seq>,
    pub(super) at: Option<Millis>,
    /// The id of the message. By default it is computed from the message and its number among the
    /// file's messages of its conversation.
    pub(super) client_id: Option<ClientId>,
    /// The time of the newest edit. `body` and `attachments` are those after it.
    pub(super) edited_at: Option<Millis>,
    #[serde(default)]
    pub(super) deleted: DeletedLine,
    #[serde(default)]
    pub(super) reactions: Vec<ReactionLine>,
}

pub(super) enum DeletedLine {
    /// Whether the sender deleted the message. The time of the import is then the time of the deletion.
    BySender(bool),
    By(Deletion),
}

impl<'de> Deserialize<'de> for DeletedLine {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = DeletedLine;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, false, or an object with by and at")
            }

            fn visit_bool<E>(self, deleted: bool) -> Result<DeletedLine, E> {
                Ok(DeletedLine::BySender(deleted))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DeletedLine, A::Error> {
                Deletion::deserialize(MapAccessDeserializer::new(map)).map(DeletedLine::By)
            }
        }

        deserializer.deserialize_any(Either)
    }
}

impl DeletedLine {
    pub(super) fn is_any(&self) -> bool {
        !matches!(self, Self::BySender(false))
    }
}

impl Default for DeletedLine {
    fn default() -> Self {
        Self::BySender(false)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Deletion {
    pub(super) by: UserId,
    pub(super) at: Option<Millis>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReactionLine {
    pub(super) user: UserId,
    pub(super) emoji: String,
    pub(super) at: Option<Millis>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_field() {
        let message = r#"{"type": "message", "sender": "alice", "body": "hi""#;
        let fields = |fields: &str| format!("{message}, {fields}}}");
        for (line, wanted) in [
            (r#"{"sender": "alice"}"#.into(), "type: is missing"),
            (
                r#"{"type": "note"}"#.into(),
                "type: must be one of conversation, message",
            ),
            (
                r#"{"type": "conversation", "kind": "grup"}"#.into(),
                "kind: must be one of dm, group, channel",
            ),
            (
                r#"{"type": "message", "sender": "alice"}"#.into(),
                "body: is missing",
            ),
            (
                fields(r#""reply_to": "1""#),
                "reply_to: must be a whole number",
            ),
            (
                fields(r#""reactions": [{"user": "bob", "emoji": 5}]"#),
                "reactions[0].emoji: must be a text",
            ),
            (
                fields(r#""deleted": 5"#),
                "deleted: must be true, false, or an object with by and at",
            ),
            (
                fields(r#""deleted": {"by": "bob", "when": 3}"#),
                "deleted.when: ",
            ),
        ] {
            let said = Line::read(line.as_bytes()).err().unwrap_or_default();
            assert!(said.starts_with(wanted), "{line}: {said}");
        }
    }
}
