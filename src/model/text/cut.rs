//! Cuts texts between grapheme clusters, which are what readers see as characters.

use unicode_segmentation::GraphemeCursor;

/// Returns the beginning of a text with at most so many code points. No grapheme cluster is cut, unless the first one
/// alone is longer.
#[must_use]
pub fn cut(text: &str, chars_max: usize) -> &str {
    // Text of fewer bytes also has fewer characters.
    if text.len() <= chars_max {
        return text;
    }
    let first = &text.as_bytes()[..=chars_max];
    if first.is_ascii() && !first.ends_with(b"\r\n") {
        return &text[..chars_max];
    }
    let end = text.char_indices().nth(chars_max);
    end.map_or(text, |(end, _)| cut_before(text, end))
}

/// Returns the beginning of a text up to the last boundary of grapheme clusters that is not after `end`, which is a
/// boundary of characters. If the first cluster is longer, it is cut there: then nothing is better.
#[must_use]
pub fn cut_before(text: &str, end: usize) -> &str {
    let mut cursor = GraphemeCursor::new(end, text.len(), true);
    let boundary = match cursor.is_boundary(text, 0) {
        Ok(true) => Some(end),
        _ => cursor.prev_boundary(text, 0).ok().flatten(),
    };
    let end = boundary.filter(|boundary| *boundary > 0).unwrap_or(end);
    &text[..end]
}
