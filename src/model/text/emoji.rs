//! The emoji of reactions: which texts are one, and its one stored form.

use std::iter::Peekable;

use icu_properties::{
    CodePointSetData,
    props::{EmojiModifier, EmojiModifierBase, EmojiPresentation, RegionalIndicator},
};

use super::{
    Wrong,
    characters::{is_emoji, tag_flag},
};
use crate::model::limits::EMOJI_BYTES_MAX;

const JOINER: char = '\u{200d}';
/// Asks for the form of a text.
const AS_TEXT: char = '\u{fe0e}';
/// Asks for the form of an emoji.
const AS_EMOJI: char = '\u{fe0f}';
const KEYCAP: char = '\u{20e3}';

/// Returns the stored form of an emoji: fully qualified, so U+FE0F follows each part that would be shown as text without
/// it, and none else. An emoji is a sequence of UTS #51, which is one grapheme cluster, or a name of one such as `:party:`,
/// for emoji that applications have themselves.
///
/// # Errors
/// [`Wrong::Emoji`] if it is neither.
pub fn emoji(text: &str) -> Result<String, Wrong> {
    if text.len() > EMOJI_BYTES_MAX {
        return Err(Wrong::Emoji);
    }
    if is_custom(text) || tag_flag(text) == Some(text) {
        return Ok(text.to_owned());
    }
    let whole = || {
        flag(text)
            .or_else(|| keycap(text))
            .or_else(|| sequence(text))
    };
    // The selectors may have made it longer.
    let whole = whole().filter(|emoji| emoji.len() <= EMOJI_BYTES_MAX);
    whole.ok_or(Wrong::Emoji)
}

/// Returns whether a text may be the emoji of a stored reaction, in whatever form: it has no white space, which ends the
/// emoji in positions, and no zero, which ends it in keys.
#[must_use]
pub fn is_reaction_key(text: &str) -> bool {
    let separates = |c: char| c.is_whitespace() || c.is_control();
    (1..=EMOJI_BYTES_MAX).contains(&text.len()) && !text.contains(separates)
}

/// Returns whether a text is the name of an emoji. It has only letters that cannot be mistaken for others.
fn is_custom(text: &str) -> bool {
    let name = text
        .strip_prefix(':')
        .and_then(|name| name.strip_suffix(':'));
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"_+-".contains(&c);
    name.is_some_and(|name| !name.is_empty() && name.bytes().all(allowed))
}

/// Reads the flag of a country: two letters.
fn flag(text: &str) -> Option<String> {
    let letters = CodePointSetData::new::<RegionalIndicator>();
    let is_flag = text.chars().count() == 2 && text.chars().all(|c| letters.contains(c));
    is_flag.then(|| text.to_owned())
}

/// Reads a key of a telephone: a digit, `#` or `*`.
fn keycap(text: &str) -> Option<String> {
    let key = text.chars().next()?;
    let rest = text[key.len_utf8()..].trim_start_matches(AS_EMOJI);
    let is_key = key.is_ascii_digit() || key == '#' || key == '*';
    (is_key && rest.chars().eq([KEYCAP])).then(|| format!("{key}{AS_EMOJI}{KEYCAP}"))
}

/// Reads one emoji, or several with joiners between them.
fn sequence(text: &str) -> Option<String> {
    let mut stored = String::new();
    let mut chars = text.chars().peekable();
    loop {
        part(&mut chars, &mut stored)?;
        match chars.next() {
            None => return Some(stored),
            Some(JOINER) => stored.push(JOINER),
            Some(_) => return None,
        }
    }
}

/// Reads one emoji with its colour of skin or its selector.
fn part(chars: &mut Peekable<impl Iterator<Item = char>>, stored: &mut String) -> Option<()> {
    let modifiers = CodePointSetData::new::<EmojiModifier>();
    let base = chars.next()?;
    let is_alone =
        modifiers.contains(base) || CodePointSetData::new::<RegionalIndicator>().contains(base);
    if base.is_ascii() || !is_emoji(base) || is_alone {
        return None;
    }
    stored.push(base);
    let selected = chars.next_if(|c| matches!(*c, AS_TEXT | AS_EMOJI));
    if let Some(modifier) = chars.next_if(|c| modifiers.contains(*c)) {
        // A skin tone belongs to a person or a hand. After another emoji it would be a second emoji.
        let takes = CodePointSetData::new::<EmojiModifierBase>().contains(base);
        stored.push(modifier);
        return takes.then_some(());
    }
    if !CodePointSetData::new::<EmojiPresentation>().contains(base) {
        stored.push(AS_EMOJI);
    }
    // A text form cannot be part of a sequence.
    (selected != Some(AS_TEXT) || chars.peek().is_none()).then_some(())
}
