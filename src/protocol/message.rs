//! Messages as clients see them.

use std::collections::BTreeMap;

use serde::Serialize;
use utoipa::ToSchema;

use super::changed::Deleted;
use crate::model::{
    Attachment, ClientId, Content, ContentState, ConversationId, Entry, EntryKind, EntryState,
    MessageId, Millis, Rev, Seq, SystemChange, UserId,
};

/// An entry as clients see it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Message {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    pub seq: Seq,
    #[schema(value_type = String, format = Uuid)]
    pub message_id: MessageId,
    #[schema(value_type = String, format = Uuid)]
    pub client_id: ClientId,
    #[schema(value_type = String)]
    pub sender: UserId,
    pub kind: EntryKind,
    pub body: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<Attachment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reply_to: Option<Seq>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<SystemChange>,
    pub at: Millis,
    /// The time of the newest edit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub edited_at: Option<Millis>,
    /// Who deleted the message, and when. It has no body and no attachments then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deleted: Option<Deleted>,
    /// Each emoji with the number of its users.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub reactions: BTreeMap<String, u64>,
    /// The reactions of the requesting user. It is only in `history`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mine: Option<Vec<String>>,
    /// The rev of the newest change that these fields contain. Absent if nothing changed.
    #[serde(skip_serializing_if = "is_zero")]
    pub rev: Rev,
}

impl Message {
    /// Returns the entry after the changes in `state`. A deleted one has no text, whatever the entry holds. `mine` are
    /// the reactions of the requesting user.
    #[must_use]
    pub fn of(
        conversation: ConversationId,
        entry: Entry,
        state: Option<&EntryState>,
        mine: Option<Vec<String>>,
    ) -> Self {
        let (kind, body, attachments, reply_to, system) = match entry.content {
            Content::Text {
                body,
                attachments,
                reply_to,
            } => (EntryKind::Text, body, attachments, reply_to, None),
            Content::System(change) => (
                EntryKind::System,
                String::new(),
                Vec::new(),
                None,
                Some(change),
            ),
        };
        let mut message = Self {
            conversation,
            seq: entry.seq,
            message_id: entry.message_id,
            client_id: entry.client_id,
            sender: entry.sender,
            kind,
            body,
            attachments,
            reply_to,
            system,
            at: entry.at,
            edited_at: None,
            deleted: None,
            reactions: BTreeMap::new(),
            mine,
            rev: state.map_or(0, EntryState::rev),
        };
        if let Some(content) = state.and_then(|state| state.content.as_ref()) {
            message.change(content);
        }
        if message.deleted.is_some() {
            // A deleted message has no reactions any more.
            message.mine = None;
        } else if let Some(state) = state.and_then(|state| state.reactions.as_ref()) {
            message.reactions.clone_from(&state.reactions);
        }
        message
    }

    fn change(&mut self, state: &ContentState) {
        match &state.content {
            Some(edited) => {
                self.body.clone_from(&edited.body);
                self.attachments.clone_from(&edited.attachments);
                self.edited_at = Some(state.at);
            }
            None => {
                self.body = String::new();
                self.attachments = Vec::new();
                self.deleted = Some(Deleted::of(state));
            }
        }
    }
}

fn is_zero(rev: &Rev) -> bool {
    *rev == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{EditedContent, ReactionState};

    fn entry() -> Entry {
        Entry {
            seq: 4,
            message_id: crate::clock::message_id(1),
            client_id: ClientId(uuid::Uuid::nil()),
            sender: UserId::new("alice").unwrap(),
            at: 1,
            content: Content::Text {
                body: "first".into(),
                attachments: vec![link()],
                reply_to: Some(3),
            },
            texts: 0,
        }
    }

    fn link() -> Attachment {
        serde_json::from_str(r#"{"url": "https://example.org/a"}"#).unwrap()
    }

    fn state(rev: Rev, content: Option<EditedContent>) -> EntryState {
        EntryState {
            content: Some(ContentState {
                rev,
                by: UserId::new("bob").unwrap(),
                at: 9,
                content,
                edits: Vec::new(),
            }),
            reactions: Some(ReactionState {
                rev: 2,
                reactions: [("👍".into(), 3)].into(),
            }),
        }
    }

    #[test]
    fn an_unchanged_message_has_no_further_fields() {
        let message = Message::of(ConversationId::random(), entry(), None, None);
        let json = serde_json::to_value(&message).unwrap();
        for field in ["edited_at", "deleted", "reactions", "mine", "rev"] {
            assert_eq!(json.get(field), None);
        }
        assert_eq!(message.body, "first");
    }

    #[test]
    fn an_edited_message_has_its_newest_content() {
        let content = EditedContent {
            body: "second".into(),
            attachments: Vec::new(),
        };
        let mine = Some(vec!["👍".to_owned()]);
        let state = state(7, Some(content));
        let message = Message::of(
            ConversationId::random(),
            entry(),
            Some(&state),
            mine.clone(),
        );
        assert_eq!(
            (message.body.as_str(), message.edited_at),
            ("second", Some(9))
        );
        assert!(message.attachments.is_empty());
        assert_eq!((message.rev, message.mine), (7, mine));
        assert_eq!(message.reactions, [("👍".to_owned(), 3)].into());
        assert_eq!((message.reply_to, message.at), (Some(3), 1));
    }

    #[test]
    fn a_deleted_message_has_no_text_even_if_the_entry_has() {
        let conversation = ConversationId::random();
        let message = Message::of(conversation, entry(), Some(&state(7, None)), None);
        let json = serde_json::to_string(&message).unwrap();
        assert!(
            !json.contains("first") && !json.contains("example.org"),
            "{json}"
        );
        assert!(json.contains(r#""deleted":{"by":"bob","at":9}"#), "{json}");
        assert_eq!((message.kind, message.edited_at), (EntryKind::Text, None));
    }
}
