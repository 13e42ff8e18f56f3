//! The size of a page of messages.

use std::{collections::VecDeque, sync::Arc};

use crate::{
    chat::LogRange,
    model::{Content, Entry},
};

/// Keeps the entries of a page that are nearest to the requested position, up to `bytes_max` of encoded bytes, but at
/// least one. It looks only at these and one more, because many more may have been read.
pub(super) fn cut_to_fit(entries: &mut VecDeque<Arc<Entry>>, range: LogRange, bytes_max: usize) {
    let begin = match range {
        LogRange::Newest | LogRange::Before(_) => entries.len(),
        LogRange::After(_) => 0,
        LogRange::Around(seq) => entries.partition_point(|entry| entry.seq < seq),
    };
    let distance = |entry: &Arc<Entry>| match range {
        LogRange::Around(seq) => entry.seq.abs_diff(seq),
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
        bytes += encoded_bytes(&entries[next]);
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

/// Returns the approximate size of an entry in JSON, the longer of the two encodings.
pub(super) fn encoded_bytes(entry: &Entry) -> usize {
    /// Bytes of field names, ids and numbers.
    const FRAME: usize = 400;
    let text = |text: &str| text.len() + escapes(text);
    let optional = |t: &Option<String>| t.as_deref().map_or(0, text);
    match &entry.content {
        Content::Text {
            body, attachments, ..
        } => {
            let links = attachments.iter();
            let links = links.map(|a| text(&a.url) + optional(&a.name) + optional(&a.mime) + 60);
            FRAME + text(body) + links.sum::<usize>()
        }
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
        model::{ClientId, UserId},
    };

    /// Entries from seq 1 on, with bodies of these lengths.
    fn page(lengths: &[usize]) -> VecDeque<Arc<Entry>> {
        let entry = |(seq, &length): (u64, &usize)| {
            Arc::new(Entry {
                seq,
                message_id: clock::message_id(1),
                client_id: ClientId(uuid::Uuid::nil()),
                sender: UserId::new("alice").unwrap(),
                at: 1,
                content: Content::text("x".repeat(length)),
                texts: None,
            })
        };
        (1..).zip(lengths).map(entry).collect()
    }

    fn kept(lengths: &[usize], range: LogRange, bytes_max: usize) -> Vec<u64> {
        let mut entries = page(lengths);
        cut_to_fit(&mut entries, range, bytes_max);
        entries.iter().map(|entry| entry.seq).collect()
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
