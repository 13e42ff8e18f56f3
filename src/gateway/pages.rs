//! The size of a page of messages.

use std::{collections::VecDeque, sync::Arc};

use crate::{
    chat::{ChangedItem, LogRange},
    model::{Attachment, Content, ContentState, ConversationId, Entry, EntryState, Reactions},
    protocol::Message,
};

/// An entry of a page, with its changes and the reactions of the user who reads it.
pub(super) struct Shown {
    pub(super) entry: Arc<Entry>,
    pub(super) state: Option<Arc<EntryState>>,
    pub(super) mine: Option<Vec<String>>,
}

impl Shown {
    pub(super) fn message(self, conversation: ConversationId) -> Message {
        let entry = Entry::clone(&self.entry);
        Message::of(conversation, entry, self.state.as_deref(), self.mine)
    }

    /// Returns the bytes in memory.
    pub(super) fn weight(&self) -> usize {
        let state = self.state.as_deref();
        let content = state.and_then(|state| state.content.as_ref());
        let reactions = state.and_then(|state| state.reactions.as_ref());
        self.entry.weight()
            + content.map_or(0, content_bytes)
            + reactions.map_or(0, |state| reactions_bytes(&state.reactions))
    }

    /// Returns the approximate size in JSON. The text of a changed entry does not count.
    pub(super) fn encoded_bytes(&self) -> usize {
        let Some(state) = &self.state else {
            return encoded_bytes(&self.entry);
        };
        let content = match &state.content {
            None => encoded_bytes(&self.entry),
            Some(content) => FRAME + content_bytes(content),
        };
        let reactions = state.reactions.as_ref();
        content
            + reactions.map_or(0, |state| reactions_bytes(&state.reactions))
            + mine_bytes(self.mine.as_deref())
    }
}

/// Keeps the entries of a page that are nearest to the requested position, up to `bytes_max` of encoded bytes, but at
/// least one. It looks only at these and one more, because many more may have been read.
pub(super) fn cut_to_fit(entries: &mut VecDeque<Shown>, range: LogRange, bytes_max: usize) {
    let begin = match range {
        LogRange::Newest | LogRange::Before(_) => entries.len(),
        LogRange::After(_) => 0,
        LogRange::Around(seq) => entries.partition_point(|shown| shown.entry.seq < seq),
    };
    let distance = |shown: &Shown| match range {
        LogRange::Around(seq) => shown.entry.seq.abs_diff(seq),
        LogRange::Newest | LogRange::Before(_) | LogRange::After(_) => 0,
    };
    let (mut kept, mut bytes) = (begin..begin, 0);
    while kept.len() < entries.len() {
        let before = kept.start.checked_sub(1);
        let before = before.map(|index| distance(&entries[index]));
        let after = entries.get(kept.end).map(distance);
        let takes_after = after.is_some_and(|after| before.is_none_or(|before| after <= before));
        let next = if takes_after {
            kept.end
        } else {
            kept.start - 1
        };
        bytes += entries[next].encoded_bytes();
        if bytes > bytes_max && !kept.is_empty() {
            break;
        }
        if takes_after {
            kept.end += 1;
        } else {
            kept.start = next;
        }
    }
    entries.truncate(kept.end);
    entries.drain(..kept.start);
}

/// Bytes of the field names, ids and numbers of an entry.
const FRAME: usize = 400;
/// Bytes of the field names, ids and numbers of a changed item.
const ITEM: usize = 200;

/// Returns the approximate size of a changed item in JSON.
pub(super) fn item_bytes(item: &ChangedItem) -> usize {
    ITEM + item.content.as_ref().map_or(0, content_bytes)
        + item.reactions.as_ref().map_or(0, reactions_bytes)
        + item.by.as_ref().map_or(0, |by| text_bytes(&by.emoji))
        + mine_bytes(item.mine.as_deref())
}

fn content_bytes(state: &ContentState) -> usize {
    let edited = state.content.as_ref();
    edited.map_or(0, |edited| {
        text_bytes(&edited.body) + links_bytes(&edited.attachments)
    })
}

fn reactions_bytes(reactions: &Reactions) -> usize {
    /// Bytes of a count and of what surrounds an emoji.
    const COUNT: usize = 24;
    reactions
        .keys()
        .map(|emoji| text_bytes(emoji) + COUNT)
        .sum()
}

fn mine_bytes(mine: Option<&[String]>) -> usize {
    let mine = mine.unwrap_or_default().iter();
    mine.map(|emoji| text_bytes(emoji) + 3).sum()
}

fn text_bytes(text: &str) -> usize {
    text.len() + escapes(text)
}

fn links_bytes(attachments: &[Attachment]) -> usize {
    let optional = |t: &Option<String>| t.as_deref().map_or(0, text_bytes);
    let texts = |a: &Attachment| optional(&a.name) + optional(&a.mime) + optional(&a.alt);
    let links = attachments.iter();
    let links = links.map(|a| text_bytes(&a.url) + texts(a) + a.numbers_bytes() + 60);
    links.sum()
}

/// Returns the approximate size of an entry in JSON, the longer of the two encodings.
fn encoded_bytes(entry: &Entry) -> usize {
    match &entry.content {
        Content::Text {
            body, attachments, ..
        } => FRAME + text_bytes(body) + links_bytes(attachments),
        // The creation of a group is the longest one, because it lists all participants.
        Content::System(change) => FRAME + serde_json::to_vec(change).map_or(0, |json| json.len()),
    }
}

/// Returns the bytes by which a text grows in JSON.
fn escapes(text: &str) -> usize {
    // A control character becomes \u00xx, a quotation mark \". Small sums let the compiler use vector instructions.
    let escape = |&byte: &u8| {
        5 * u16::from(byte < 0x20) + u16::from(byte == b'"') + u16::from(byte == b'\\')
    };
    let parts = text.as_bytes().chunks(1 << 12);
    parts
        .map(|part| usize::from(part.iter().map(escape).sum::<u16>()))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        clock,
        model::{ClientId, EditedContent, UserId},
    };

    /// Entries from seq 1 on, with bodies of these lengths.
    fn page(lengths: &[usize]) -> VecDeque<Shown> {
        let entry = |(seq, &length): (u64, &usize)| Shown {
            entry: Arc::new(Entry {
                seq,
                message_id: clock::message_id(1),
                client_id: ClientId(uuid::Uuid::nil()),
                sender: UserId::new("alice").unwrap(),
                at: 1,
                content: Content::text("x".repeat(length)),
                texts: 0,
            }),
            state: None,
            mine: None,
        };
        (1..).zip(lengths).map(entry).collect()
    }

    fn kept(lengths: &[usize], range: LogRange, bytes_max: usize) -> Vec<u64> {
        let mut entries = page(lengths);
        cut_to_fit(&mut entries, range, bytes_max);
        entries.iter().map(|shown| shown.entry.seq).collect()
    }

    /// The state of an entry that was edited by the change `rev`.
    fn edited(rev: u64, length: usize) -> ContentState {
        ContentState {
            rev,
            by: UserId::new("alice").unwrap(),
            at: 1,
            content: Some(EditedContent {
                body: "x".repeat(length),
                attachments: Vec::new(),
            }),
            edits: vec![rev],
        }
    }

    #[test]
    fn the_newest_text_of_an_entry_counts() {
        let mut entries = page(&[10, 10, 9_000]);
        let set = |shown: &mut Shown, content| {
            let reactions = None;
            shown.state = Some(Arc::new(EntryState { content, reactions }));
        };
        set(&mut entries[0], Some(edited(1, 9_000)));
        set(&mut entries[2], Some(edited(2, 10)));
        cut_to_fit(&mut entries, LogRange::Newest, 2_000);
        let kept: Vec<u64> = entries.iter().map(|shown| shown.entry.seq).collect();
        assert_eq!(kept, [2, 3]);
    }

    #[test]
    fn a_page_keeps_the_entries_next_to_its_position() {
        let even = [600; 9];
        assert_eq!(kept(&even, LogRange::Newest, 3_000), [7, 8, 9]);
        assert_eq!(kept(&even, LogRange::Before(10), 3_999), [7, 8, 9]);
        assert_eq!(kept(&even, LogRange::After(0), 3_000), [1, 2, 3]);
        assert_eq!(kept(&even, LogRange::Around(5), 3_000), [4, 5, 6]);
        assert_eq!(kept(&even, LogRange::Around(5), 4_000), [4, 5, 6, 7]);
        assert_eq!(kept(&even, LogRange::Around(1), 3_000), [1, 2, 3]);
        assert_eq!(kept(&even, LogRange::Around(99), 3_000), [7, 8, 9]);
        assert_eq!(kept(&even, LogRange::Newest, 100_000).len(), 9);
    }

    #[test]
    fn a_page_has_at_least_one_entry() {
        assert_eq!(kept(&[10, 9_000], LogRange::Newest, 1_000), [2]);
        assert_eq!(kept(&[9_000, 10], LogRange::After(0), 1_000), [1]);
        assert_eq!(kept(&[10, 9_000, 10], LogRange::Around(2), 1_000), [2]);
        assert!(kept(&[], LogRange::Newest, 1_000).is_empty());
    }

    #[test]
    fn escaped_characters_are_counted() {
        let text = format!("{}\"\\\n", "x".repeat(5_000));
        assert_eq!(escapes(&text), 1 + 1 + 5);
    }
}
