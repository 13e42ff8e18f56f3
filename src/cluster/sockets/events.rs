//! `changed` events, from what a conversation's owner publishes. Neither `protocol` nor `chat` may name the other one.

use std::sync::Arc;

use crate::{
    chat::{Audience, Body, Changed, ChangedItem, Changes, Page, Publication, ReactedBy},
    model::{
        Attachment, ContentState, ConversationId, Cursor, Entry, EntryState, Reactions, Rev, Seq,
        limits::CHANGED_BYTES_MAX,
    },
    protocol::{ChangedEvent, Deleted, Event, Item, ReactionBy},
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

/// Returns the event of changes up to `rev`.
#[must_use]
pub fn changed_event(conversation: ConversationId, rev: Rev, changed: Changed) -> Event {
    Event::Changed(ChangedEvent {
        conversation,
        after: changed.after,
        rev,
        items: changed.items.into_iter().map(Item::of).collect(),
    })
}

/// Returns changes without items: a client that has not reached `rev` asks for what it lacks.
pub(crate) fn gap(rev: Rev) -> Changed {
    Changed {
        after: rev,
        items: Vec::new(),
        newest: None,
        deleted: None,
    }
}

/// Returns the publication, or a gap instead of its items if they are too many for one event.
pub(crate) fn bounded(publication: Publication, changed: &Changed) -> Publication {
    if changed.items.iter().map(bytes).sum::<usize>() <= CHANGED_BYTES_MAX {
        return publication;
    }
    let changed = Changed {
        newest: changed.newest.clone(),
        deleted: changed.deleted.clone(),
        ..gap(publication.at.1)
    };
    Publication {
        body: Body::Changed(Arc::new(changed)),
        ..publication
    }
}

/// Returns the changes that somebody missed. The owner's page bounds them.
#[must_use]
pub fn missed(changes: Changes) -> (Rev, Changed) {
    let Changes {
        after, rev, items, ..
    } = changes;
    let changed = Changed {
        after,
        items,
        newest: None,
        deleted: None,
    };
    (rev, changed)
}

/// Returns the publication of changes that a channel's subscribers missed.
pub(crate) fn missed_changes(
    channel: ConversationId,
    (rev, changed): (Rev, Changed),
) -> Publication {
    let at = Cursor(0, rev);
    Publication::changed(channel, at, Arc::new(changed), Audience::Channel, false)
}

/// Returns the publications of entries that a channel's subscribers missed. An entry never has more text than its state
/// says. The rest of the states follows as changes.
pub(crate) fn missed_entries(channel: ConversationId, page: Page) -> Vec<Publication> {
    let Page {
        entries, states, ..
    } = page;
    let shown = entries.into_iter().map(|entry| {
        let entry = match state_of(&states, entry.seq) {
            None => entry,
            Some(state) => changed_entry(&entry, state),
        };
        Publication::entry(channel, entry, Audience::Channel)
    });
    shown.collect()
}

/// Returns the state of an entry of a page, if it changed.
#[must_use]
pub fn state_of(states: &[(Seq, Arc<EntryState>)], seq: Seq) -> Option<&Arc<EntryState>> {
    let place = states.binary_search_by_key(&seq, |(seq, _)| *seq).ok()?;
    Some(&states[place].1)
}

fn changed_entry(entry: &Arc<Entry>, state: &EntryState) -> Arc<Entry> {
    match state.content {
        Some(_) => Arc::new(entry.as_changed(state)),
        None => entry.clone(),
    }
}

/// Returns the approximate bytes of an item in an event. Escapes of JSON do not count.
fn bytes(item: &ChangedItem) -> usize {
    /// The names of the fields, the numbers, and a user's name.
    const ITEM: usize = 160;
    /// A number, and what surrounds a text.
    const TEXT: usize = 16;
    let optional = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let link =
        |link: &Attachment| ITEM + link.url.len() + optional(&link.name) + optional(&link.mime);
    let content = |state: &ContentState| {
        let edited = state.content.as_ref();
        let edited = edited.map_or(0, |edited| {
            let links = edited.attachments.iter().map(link);
            edited.body.len() + links.sum::<usize>()
        });
        edited + state.edits.len() * size_of::<Rev>()
    };
    let reactions = |reactions: &Reactions| {
        let emoji = reactions.keys();
        emoji.map(|emoji| emoji.len() + TEXT).sum::<usize>()
    };
    ITEM + item.content.as_ref().map_or(0, content) + item.reactions.as_ref().map_or(0, reactions)
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

    fn channel() -> ConversationId {
        ConversationId(uuid::Uuid::nil())
    }

    fn published(items: Vec<ChangedItem>) -> Arc<Changed> {
        let changed = Arc::new(Changed {
            after: 3,
            items,
            newest: None,
            deleted: Some(Arc::default()),
        });
        let at = Cursor(9, 7);
        let publication =
            Publication::changed(channel(), at, changed.clone(), Audience::Channel, false);
        match bounded(publication, &changed).body {
            Body::Changed(changed) => changed,
            body => panic!("{body:?}"),
        }
    }

    #[test]
    fn an_event_that_is_too_large_becomes_a_gap() {
        let half = CHANGED_BYTES_MAX / 2;
        let fits = published(vec![
            ChangedItem::edited(1, 4, half),
            ChangedItem::edited(2, 5, half - 1_000),
        ]);
        assert_eq!((fits.after, fits.items.len()), (3, 2));
        let gap = published(vec![
            ChangedItem::edited(1, 4, half),
            ChangedItem::edited(2, 5, half),
        ]);
        assert_eq!((gap.after, gap.items.len()), (7, 0));
        assert!(gap.deleted.is_some(), "inboxes need it all the same");
    }

    fn entry(seq: Seq) -> Arc<Entry> {
        Arc::new(Entry {
            seq,
            message_id: crate::clock::message_id(1),
            client_id: crate::model::ClientId(uuid::Uuid::nil()),
            sender: UserId::new("alice").unwrap(),
            at: 1,
            content: crate::model::Content::text("secret"),
            texts: 0,
        })
    }

    /// The store may still hold the text of an entry that is deleted.
    #[test]
    fn a_missed_entry_has_no_more_text_than_its_state_says() {
        let state = |content| {
            let state = ContentState {
                rev: 6,
                by: UserId::new("bob").unwrap(),
                at: 9,
                content,
                edits: vec![5, 6],
            };
            Arc::new(EntryState {
                content: Some(state),
                reactions: None,
            })
        };
        let edited = EditedContent {
            body: "public".into(),
            attachments: Vec::new(),
        };
        let page = Page {
            entries: vec![entry(3), entry(4), entry(5)],
            head: 5,
            rev: 6,
            states: vec![(3, state(None)), (5, state(Some(edited)))],
            mine: Vec::new(),
        };
        let missed = missed_entries(channel(), page);
        let texts = missed.iter().map(|publication| match &publication.body {
            Body::Entry(entry) => entry.preview(),
            _ => String::new(),
        });
        assert_eq!(texts.collect::<Vec<_>>(), ["", "secret", "public"]);
    }
}
