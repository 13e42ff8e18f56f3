//! The memory that values use, in bytes. Estimates are high: every holder of a shared value counts all of it.

use super::{
    Attachment, AttachmentId, Change, ChangeOp, Content, ContentState, DeletedSeqs, EditedContent,
    Entry, EntryState, Last, Participant, Reactions, Rev, Seq, SystemChange, UserId,
};

/// The overhead of one allocation: the counters of an `Arc`, rounding, and the allocator's own records.
pub const ALLOCATION_BYTES: usize = 32;

fn text(text: &str) -> usize {
    ALLOCATION_BYTES + text.len()
}

fn optional(value: Option<&String>) -> usize {
    value.map_or(0, |value| text(value))
}

impl UserId {
    /// Returns the bytes used in addition to the value itself.
    #[must_use]
    pub fn weight(&self) -> usize {
        text(self.as_str())
    }
}

impl Attachment {
    fn weight(&self) -> usize {
        let Self {
            id: _,
            url,
            name,
            mime,
            size: _,
            alt,
            width: _,
            height: _,
        } = self;
        let optional: usize = [name, mime, alt].map(|t| optional(t.as_ref())).iter().sum();
        size_of::<Self>() + text(url) + optional
    }
}

impl SystemChange {
    fn weight(&self) -> usize {
        match self {
            Self::Created {
                name, participants, ..
            } => {
                let users = participants.iter();
                let users = users.map(|user| size_of::<UserId>() + user.weight());
                optional(name.as_ref()) + ALLOCATION_BYTES + users.sum::<usize>()
            }
            Self::Added { user } | Self::Removed { user } | Self::RoleSet { user, .. } => {
                user.weight()
            }
            Self::Updated { name, .. } => optional(name.as_ref()),
            Self::Joined | Self::Left => 0,
        }
    }
}

impl Content {
    /// Returns the bytes used in addition to the value itself.
    #[must_use]
    pub fn weight(&self) -> usize {
        match self {
            Self::Text {
                body,
                attachments,
                reply_to: _,
            } => {
                let links: usize = attachments.iter().map(Attachment::weight).sum();
                text(body) + links
            }
            Self::System(change) => change.weight(),
        }
    }
}

impl Entry {
    /// Returns the bytes that an entry in an `Arc` uses.
    #[must_use]
    pub fn weight(&self) -> usize {
        ALLOCATION_BYTES + size_of::<Self>() + self.sender.weight() + self.content.weight()
    }
}

impl Last {
    /// Returns the bytes that a `Last` in an `Arc` uses.
    #[must_use]
    pub fn weight(&self) -> usize {
        ALLOCATION_BYTES + size_of::<Self>() + self.sender.weight() + text(&self.preview)
    }
}

impl EditedContent {
    fn weight(&self) -> usize {
        text(&self.body)
            + self
                .attachments
                .iter()
                .map(Attachment::weight)
                .sum::<usize>()
    }
}

impl ContentState {
    /// Returns the bytes used in addition to the value itself.
    #[must_use]
    pub fn weight(&self) -> usize {
        let content = self.content.as_ref().map_or(0, EditedContent::weight);
        self.by.weight() + content + self.edits.len() * size_of::<Rev>()
    }
}

fn reactions(reactions: &Reactions) -> usize {
    let each = reactions
        .keys()
        .map(|emoji| text(emoji) + 2 * size_of::<String>());
    each.sum()
}

impl EntryState {
    /// Returns the bytes that a state in an `Arc` uses.
    #[must_use]
    pub fn weight(&self) -> usize {
        let content = self.content.as_ref().map_or(0, ContentState::weight);
        let reacted = self.reactions.as_ref();
        let reacted = reacted.map_or(0, |state| reactions(&state.reactions));
        ALLOCATION_BYTES + size_of::<Self>() + content + reacted
    }
}

impl DeletedSeqs {
    /// Returns the bytes used in addition to the value itself.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.highest.len() * size_of::<Seq>()
    }
}

impl Change {
    /// Returns the bytes that a change in an `Arc` uses.
    #[must_use]
    pub fn weight(&self) -> usize {
        let op = match &self.op {
            ChangeOp::Edit {
                content,
                edits,
                dropped,
                ..
            } => {
                let content = content.as_ref().map_or(0, EditedContent::weight);
                let dropped = dropped.len() * size_of::<AttachmentId>();
                content + edits.len() * size_of::<Rev>() + dropped
            }
            ChangeOp::Delete { entries, deleted } => {
                let edits = entries.iter().map(|entry| {
                    let files = entry.files.len() * size_of::<AttachmentId>();
                    let edits = entry.edits.len() * size_of::<Rev>();
                    size_of_val(entry) + ALLOCATION_BYTES + edits + files
                });
                edits.sum::<usize>() + deleted.weight()
            }
            ChangeOp::React {
                emoji,
                reactions: after,
                ..
            } => text(emoji) + reactions(after),
        };
        ALLOCATION_BYTES + size_of::<Self>() + self.by.weight() + op
    }
}

impl Participant {
    /// Returns the bytes that a participant uses in a map keyed by user.
    #[must_use]
    pub fn weight(&self) -> usize {
        size_of::<(UserId, Self)>() + self.user.weight()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ClientId, Kind, MessageId, Posting};

    fn weight(content: Content) -> usize {
        let id = uuid::Uuid::nil();
        let entry = Entry {
            seq: 1,
            message_id: MessageId(id),
            client_id: ClientId(id),
            sender: UserId::new("alice").unwrap(),
            at: 1,
            content,
            texts: 0,
        };
        entry.weight()
    }

    #[test]
    fn an_entry_weighs_all_that_it_holds() {
        let empty = weight(Content::text(""));
        assert!((150..400).contains(&empty), "{empty}");
        assert_eq!(weight(Content::text("x".repeat(5_000))), empty + 5_000);
        let link = |bytes| Attachment {
            url: "u".repeat(bytes),
            name: Some("n".repeat(bytes)),
            mime: Some("m".repeat(bytes)),
            ..Attachment::default()
        };
        let links = |bytes| {
            weight(Content::Text {
                body: String::new(),
                attachments: vec![link(bytes); 10],
                reply_to: None,
            })
        };
        assert_eq!(links(1_000), links(0) + 30_000);
        let created = |users| {
            let user = |n| UserId::new(&format!("{n:064}")).unwrap();
            weight(Content::System(SystemChange::Created {
                kind: Kind::Group,
                name: Some("name".into()),
                posting: Posting::Everyone,
                public: false,
                participants: (0..users).map(user).collect(),
            }))
        };
        assert!(created(1_000) >= created(0) + 1_000 * (64 + 32));
    }
}
