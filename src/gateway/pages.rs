//! The size of a page of messages.

use std::{collections::VecDeque, sync::Arc};

use crate::{
    chat::LogRange,
    model::{Content, Entry},
};

/// Removes entries of a page until at most `bytes_max` of encoded bytes, or one entry, are left. Those farthest from the
/// requested position go first.
pub(super) fn cut_to_fit(entries: &mut VecDeque<Arc<Entry>>, range: LogRange, bytes_max: usize) {
    let mut bytes: usize = entries.iter().map(|e| encoded_bytes(e)).sum();
    while bytes > bytes_max
        && entries.len() > 1
        && let (Some(first), Some(last)) = (entries.front(), entries.back())
    {
        let from_the_end = match range {
            LogRange::Newest | LogRange::Before(_) => false,
            LogRange::After(_) => true,
            LogRange::Around(seq) => last.seq.abs_diff(seq) > first.seq.abs_diff(seq),
        };
        let left_out = if from_the_end {
            entries.pop_back()
        } else {
            entries.pop_front()
        };
        bytes -= left_out.map_or(0, |e| encoded_bytes(&e));
    }
}

/// Returns the approximate size of an entry in JSON, the longer of the two encodings.
pub(super) fn encoded_bytes(entry: &Entry) -> usize {
    /// Bytes of field names, ids and numbers.
    const FRAME: usize = 400;
    let text = |text: &str| {
        // A control character becomes \u00xx, a quotation mark \".
        let escaped = |b: u8| {
            if b < 0x20 {
                5
            } else {
                usize::from(b == b'"' || b == b'\\')
            }
        };
        text.len() + text.bytes().map(escaped).sum::<usize>()
    };
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
