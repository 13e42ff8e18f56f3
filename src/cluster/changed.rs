//! The items of `changed` events, from what a conversation's owner publishes. Neither `protocol` nor `chat` may name the
//! other one.

use crate::{
    chat::{ChangedItem, ReactedBy},
    model::ContentState,
    protocol::{Deleted, Item, ReactionBy},
};

impl Item {
    /// Returns the item as clients see it.
    #[must_use]
    pub fn of(item: ChangedItem) -> Self {
        let ChangedItem {
            seq,
            rev,
            content,
            reactions,
            by,
            mine,
        } = item;
        let by = by.map(|ReactedBy { user, emoji, on }| ReactionBy { user, emoji, on });
        let mut changed = Self {
            seq,
            rev,
            body: None,
            attachments: None,
            edited_at: None,
            deleted: None,
            reactions,
            by,
            mine,
        };
        if let Some(state) = content {
            changed.change(state);
        }
        changed
    }

    fn change(&mut self, state: ContentState) {
        match state.content {
            None => self.deleted = Some(Deleted::of(&state)),
            Some(edited) => {
                self.body = Some(edited.body);
                self.attachments = Some(edited.attachments);
                self.edited_at = Some(state.at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{EditedContent, UserId};

    fn item(content: Option<EditedContent>) -> serde_json::Value {
        let state = ContentState {
            rev: 7,
            by: UserId::new("bob").unwrap(),
            at: 9,
            content,
            edits: vec![7],
        };
        let item = ChangedItem {
            seq: 4,
            rev: 8,
            content: Some(state),
            reactions: None,
            by: None,
            mine: None,
        };
        serde_json::to_value(Item::of(item)).unwrap()
    }

    #[test]
    fn an_edit_names_its_attachments_even_if_there_are_none() {
        let edited = EditedContent {
            body: "new".into(),
            attachments: Vec::new(),
        };
        let json = serde_json::json!(
            {"seq": 4, "rev": 8, "body": "new", "attachments": [], "edited_at": 9}
        );
        assert_eq!(item(Some(edited)), json);
    }

    #[test]
    fn a_deletion_has_no_body() {
        let json = serde_json::json!({"seq": 4, "rev": 8, "deleted": {"by": "bob", "at": 9}});
        assert_eq!(item(None), json);
    }

    #[test]
    fn reactions_are_named_even_if_none_are_left() {
        let item = ChangedItem {
            seq: 4,
            rev: 8,
            content: None,
            reactions: Some(Default::default()),
            by: Some(ReactedBy {
                user: UserId::new("bob").unwrap(),
                emoji: "👍".into(),
                on: false,
            }),
            mine: Some(Vec::new()),
        };
        let json = serde_json::json!({"seq": 4, "rev": 8, "reactions": {},
            "by": {"user": "bob", "emoji": "👍", "on": false}, "mine": []});
        assert_eq!(serde_json::to_value(Item::of(item)).unwrap(), json);
    }
}
