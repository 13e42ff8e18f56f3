//! Describes changes to clients and gateways: from the changes alone, because each is complete.

use std::collections::BTreeMap;

use super::publish::{ChangedItem, ReactedBy};
use crate::model::{Change, ChangeOp, Seq, reactions_bytes};

/// Bytes of an item's other fields, about.
const ITEM_BYTES: usize = 200;

/// Returns the entries that these changes changed, by seq, with the fields as they are after the newest of the changes. An
/// edit whose content was erased leaves out the content, because the deletion follows.
pub(super) fn items<'a>(changes: impl IntoIterator<Item = &'a Change>) -> Vec<ChangedItem> {
    let mut items: BTreeMap<Seq, (ChangedItem, u32)> = BTreeMap::new();
    for change in changes {
        for seq in change.seqs() {
            let (item, _) = items.entry(seq).or_insert_with(|| (empty(seq), 0));
            item.rev = change.rev;
        }
        for (seq, state) in change.states() {
            let Some((item, reactions)) = items.get_mut(&seq) else {
                continue;
            };
            if let Some(mut content) = state.content {
                // Clients need no revs of earlier edits.
                content.edits = Vec::new();
                item.content = Some(content);
            }
            if let Some(newer) = state.reactions {
                item.reactions = Some(newer.reactions);
                *reactions += 1;
                item.by = by(change).filter(|_| *reactions == 1);
            }
        }
    }
    items.into_values().map(|(item, _)| item).collect()
}

fn empty(seq: Seq) -> ChangedItem {
    ChangedItem {
        seq,
        rev: 0,
        content: None,
        reactions: None,
        by: None,
        mine: None,
    }
}

fn by(change: &Change) -> Option<ReactedBy> {
    match &change.op {
        ChangeOp::React { emoji, on, .. } => Some(ReactedBy {
            user: change.by.clone(),
            emoji: emoji.clone(),
            on: *on,
        }),
        ChangeOp::Edit { .. } | ChangeOp::Delete { .. } => None,
    }
}

/// Returns the number of changes, from the first one on, whose items fit into a page of `bytes_max`, but at least one. A
/// reaction replaces an earlier one to the same entry, so a thousand of them are as large as one. Each edit counts, because
/// the text of each is in memory until the page is made.
pub(super) fn fitting<'a>(
    changes: impl IntoIterator<Item = &'a Change>,
    bytes_max: usize,
) -> usize {
    let mut reactions: BTreeMap<Seq, usize> = BTreeMap::new();
    let mut bytes = 0;
    let fits = |change: &&Change| {
        for item in items([*change]) {
            bytes += content_bytes(&item);
            let of_entry = reactions.entry(item.seq).or_insert_with(|| {
                bytes += ITEM_BYTES;
                0
            });
            if let Some(reactions) = &item.reactions {
                bytes -= std::mem::replace(of_entry, reactions_bytes(reactions));
                bytes += *of_entry;
            }
        }
        bytes <= bytes_max
    };
    changes.into_iter().take_while(fits).count().max(1)
}

/// Returns the approximate bytes of an item in an event. Escapes of JSON do not count.
pub(super) fn encoded_bytes(item: &ChangedItem) -> usize {
    ITEM_BYTES + content_bytes(item) + item.reactions.as_ref().map_or(0, reactions_bytes)
}

fn content_bytes(item: &ChangedItem) -> usize {
    item.content.as_ref().map_or(0, |state| state.weight())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{EditedContent, Reactions, Rev, UserId};

    fn change(rev: Rev, op: ChangeOp) -> Change {
        let by = UserId::new("alice").unwrap();
        Change { rev, by, at: 1, op }
    }

    fn edit(rev: Rev, seq: Seq, body: Option<&str>) -> Change {
        let content = body.map(|body| EditedContent {
            body: body.into(),
            attachments: Vec::new(),
        });
        let edits = vec![rev];
        change(
            rev,
            ChangeOp::Edit {
                seq,
                content,
                edits,
                dropped: Vec::new(),
            },
        )
    }

    fn react(rev: Rev, seq: Seq, count: u64) -> Change {
        let (emoji, on) = ("+".to_owned(), true);
        let reactions = Reactions::from([(emoji.clone(), count)]);
        let op = ChangeOp::React {
            seq,
            emoji,
            on,
            reactions,
        };
        change(rev, op)
    }

    #[test]
    fn an_item_has_the_newest_of_each_field() {
        let changes = [edit(1, 5, Some("a")), react(2, 5, 1), edit(3, 5, Some("b"))];
        let [item] = &items(&changes)[..] else {
            panic!("one entry changed");
        };
        assert_eq!((item.seq, item.rev), (5, 3));
        let content = item.content.as_ref().and_then(|c| c.content.as_ref());
        assert_eq!(content.map(|c| c.body.as_str()), Some("b"));
        assert_eq!(item.reactions.as_ref().map(|r| r["+"]), Some(1));
        assert!(item.by.is_some(), "it was one reaction");
    }

    #[test]
    fn several_reactions_name_nobody() {
        let items = items(&[react(1, 5, 1), react(2, 6, 1), react(3, 5, 2)]);
        assert_eq!(items.len(), 2);
        assert!(items[0].by.is_none() && items[1].by.is_some());
    }

    #[test]
    fn many_reactions_to_one_entry_fit_like_one() {
        let to_one: Vec<_> = (1..=1000).map(|rev| react(rev, 5, rev)).collect();
        assert_eq!(fitting(&to_one, 300), 1000);
        let to_many: Vec<_> = (1..=1000).map(|rev| react(rev, rev, 1)).collect();
        assert_eq!(fitting(&to_many, 3 * (ITEM_BYTES + 25)), 3);
        let long = "x".repeat(300);
        let edits = [
            edit(1, 5, Some("hi")),
            edit(2, 5, Some(&long)),
            react(3, 5, 1),
        ];
        assert_eq!(fitting(&edits, ITEM_BYTES + 200), 1);
        assert_eq!(fitting(&edits[1..], 1), 1);
        let of_one: Vec<_> = (1..=100).map(|rev| edit(rev, 5, Some(&long))).collect();
        assert!(fitting(&of_one, 3_000) < 10);
    }

    #[test]
    fn an_erased_edit_has_no_content() {
        let [item] = &items(&[edit(7, 5, None)])[..] else {
            panic!("one entry changed");
        };
        assert_eq!((item.rev, &item.content), (7, &None));
    }
}
