//! What single characters show, and where invisible ones are needed.

use icu_properties::{
    CodePointMapData, CodePointSetData,
    props::{
        BidiClass, DefaultIgnorableCodePoint, Emoji, GeneralCategory, PrependedConcatenationMark,
        Script, WhiteSpace,
    },
};

/// The flags of England, Scotland and Wales. No other region has one: it would look like a black flag.
const TAG_FLAGS: [&str; 3] = [
    "\u{1f3f4}\u{e0067}\u{e0062}\u{e0065}\u{e006e}\u{e0067}\u{e007f}",
    "\u{1f3f4}\u{e0067}\u{e0062}\u{e0073}\u{e0063}\u{e0074}\u{e007f}",
    "\u{1f3f4}\u{e0067}\u{e0062}\u{e0077}\u{e006c}\u{e0073}\u{e007f}",
];

/// Returns the flag of a region with which a text begins.
pub(super) fn tag_flag(text: &str) -> Option<&'static str> {
    TAG_FLAGS.into_iter().find(|flag| text.starts_with(flag))
}

/// Characters beside a joiner among which its letter is looked for: a letter has fewer marks.
const MARKS_MAX: usize = 16;

/// The reason why a character is not allowed in a short text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stray {
    /// A control character, or a separator of lines or paragraphs.
    Control,
    /// An embedding, override or isolate of a direction, or a mark of direction in a text that has only one direction.
    Direction,
    /// An invisible character that its neighbours do not need.
    Invisible,
}

/// Returns whether a reader sees anything of the text.
pub(super) fn shows_something(text: &str) -> bool {
    text.chars().any(is_visible)
}

/// Returns whether each character of a text is visible and no white space. Ids are such texts.
#[must_use]
pub fn is_plain(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_graphic()) || text.chars().all(is_visible)
}

/// Returns whether a character shows something. White space does not.
fn is_visible(c: char) -> bool {
    if c.is_ascii() {
        return c.is_ascii_graphic();
    }
    // Letters and symbols that are blank.
    let is_empty = matches!(
        c,
        '\u{2800}' | '\u{fffc}' | '\u{13441}' | '\u{13442}' | '\u{16fe4}' | '\u{1d159}'
    );
    let is_hidden = match category(c) {
        GeneralCategory::Control
        | GeneralCategory::LineSeparator
        | GeneralCategory::ParagraphSeparator => true,
        // Some signs of Arabic and Syriac span the digits after them.
        GeneralCategory::Format => {
            !CodePointSetData::new::<PrependedConcatenationMark>().contains(c)
        }
        _ => false,
    };
    let is_space = CodePointSetData::new::<WhiteSpace>().contains(c);
    let is_ignorable = CodePointSetData::new::<DefaultIgnorableCodePoint>().contains(c);
    !(is_empty || is_hidden || is_space || is_ignorable)
}

/// Returns the characters of a text that are not allowed in a short one, with their places.
pub(super) fn strays(text: &str) -> impl Iterator<Item = (usize, char, Stray)> + '_ {
    let turns = text.chars().any(is_right_to_left);
    // The characters up to here are those of a flag.
    let mut flag_end = 0;
    text.char_indices().filter_map(move |(at, c)| {
        if c.is_ascii() {
            return c.is_ascii_control().then_some((at, c, Stray::Control));
        }
        if at < flag_end {
            return None;
        }
        if let Some(flag) = tag_flag(&text[at..]) {
            flag_end = at + flag.len();
            return None;
        }
        let after = at + c.len_utf8();
        stray(&text[..at], c, &text[after..], turns).map(|stray| (at, c, stray))
    })
}

/// Returns the reason why a character between these texts is not allowed. `turns` if the text has letters that are
/// written from right to left.
fn stray(before: &str, c: char, after: &str, turns: bool) -> Option<Stray> {
    let (is_allowed, stray) = match c {
        // Embeddings, overrides and isolates.
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => (false, Stray::Direction),
        // Marks of direction, which sort punctuation and Latin words into Arabic or Hebrew.
        '\u{61c}' | '\u{200e}' | '\u{200f}' => (turns, Stray::Direction),
        '\u{200b}'..='\u{200d}' | '\u{180e}' => (joins(before, c, after), Stray::Invisible),
        '\u{180b}'..='\u{180d}'
        | '\u{180f}'
        | '\u{fe00}'..='\u{fe0f}'
        | '\u{e0100}'..='\u{e01ef}' => (varies(before, c, after), Stray::Invisible),
        '\u{2028}' | '\u{2029}' => (false, Stray::Control),
        c if category(c) == GeneralCategory::Control => (false, Stray::Control),
        c => (
            is_visible(c) || CodePointSetData::new::<WhiteSpace>().contains(c),
            Stray::Invisible,
        ),
    };
    (!is_allowed).then_some(stray)
}

/// Returns whether a joiner, a non-joiner or a space without width has a purpose: beside a letter of a script that is
/// written with it, or between the parts of an emoji.
fn joins(before: &str, c: char, after: &str) -> bool {
    let is_part = |c: char| is_emoji(c) && !c.is_ascii();
    if c == '\u{200d}' && after.chars().next().is_some_and(is_part) {
        let last = before.chars().rev().find(|c| *c != '\u{fe0f}');
        return last.is_some_and(is_part);
    }
    // Two in a row do what one does.
    if before.ends_with(['\u{200b}', '\u{200c}', '\u{200d}', '\u{180e}']) {
        return false;
    }
    let written_before = letter_script(before.chars().rev());
    let is_beside = |is_needed: fn(Script) -> bool| {
        written_before.is_some_and(is_needed) || letter_script(after.chars()).is_some_and(is_needed)
    };
    match c {
        '\u{180e}' => written_before == Some(Script::Mongolian),
        // It separates words, so there is one before it.
        '\u{200b}' => !before.is_empty() && is_beside(has_no_spaces),
        _ => is_beside(is_joined),
    }
}

/// Returns the script of the first letter, sign or space, with all marks between.
fn letter_script(chars: impl Iterator<Item = char>) -> Option<Script> {
    // The line that makes Arabic words longer belongs to several scripts.
    let scripts = chars
        .take(MARKS_MAX)
        .filter(|c| *c != '\u{640}')
        .map(script);
    scripts
        .into_iter()
        .find(|script| *script != Script::Inherited)
}

/// Returns whether the words of a script have no spaces between them.
fn has_no_spaces(script: Script) -> bool {
    matches!(
        script,
        Script::Ahom
            | Script::Balinese
            | Script::Batak
            | Script::Buginese
            | Script::Cham
            | Script::Javanese
            | Script::KayahLi
            | Script::Khmer
            | Script::Lao
            | Script::Makasar
            | Script::Myanmar
            | Script::NewTaiLue
            | Script::Rejang
            | Script::Sundanese
            | Script::TaiLe
            | Script::TaiTham
            | Script::TaiViet
            | Script::Thai
            | Script::Tibetan
    )
}

/// Returns whether the letters of a script have forms that depend on their neighbours.
fn is_joined(script: Script) -> bool {
    matches!(
        script,
        Script::Adlam
            | Script::Arabic
            | Script::Balinese
            | Script::Bengali
            | Script::Chakma
            | Script::Devanagari
            | Script::Gujarati
            | Script::Gurmukhi
            | Script::HanifiRohingya
            | Script::Javanese
            | Script::Kannada
            | Script::Khmer
            | Script::Limbu
            | Script::Malayalam
            | Script::Mandaic
            | Script::Manichaean
            | Script::Mongolian
            | Script::Myanmar
            | Script::Nko
            | Script::Oriya
            | Script::PhagsPa
            | Script::Sinhala
            | Script::Sogdian
            | Script::Syriac
            | Script::TaiTham
            | Script::Tamil
            | Script::Telugu
    )
}

/// Returns whether a variation selector has a purpose: it chooses the form of an emoji, or of a Chinese character or a
/// letter that has several.
fn varies(before: &str, c: char, after: &str) -> bool {
    let Some(base) = before.chars().next_back() else {
        return false;
    };
    match c {
        // A digit is an emoji only as the key of a telephone.
        '\u{fe0e}' | '\u{fe0f}' => {
            is_emoji(base) && (!base.is_ascii() || after.starts_with('\u{20e3}'))
        }
        '\u{fe00}'..='\u{fe0d}' | '\u{e0100}'..='\u{e01ef}' => {
            matches!(
                script(base),
                Script::Han | Script::Myanmar | Script::PhagsPa
            )
        }
        _ => script(base) == Script::Mongolian,
    }
}

fn is_right_to_left(c: char) -> bool {
    let class = CodePointMapData::<BidiClass>::new().get(c);
    // The mark U+200F has this class too, but it alone is no text.
    c > '\u{58f}'
        && !matches!(c, '\u{61c}' | '\u{200f}')
        && matches!(class, BidiClass::RightToLeft | BidiClass::ArabicLetter)
}

/// Returns the places of the marks of direction that turn the parts around a dot, so that `exe.pdf` is shown for what ends
/// with `pdf.exe`. Such a mark and its dot are in one run of signs between two letters or digits.
pub(super) fn dots_turned(text: &str, is_sign: fn(char) -> bool) -> impl Iterator<Item = usize> {
    let is_mark = |c| matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}');
    let turns = move |(at, mark): (usize, &str)| {
        let before = text[..at].trim_end_matches(is_sign);
        let after = text[at + mark.len()..].trim_start_matches(is_sign);
        let signs = &text[before.len()..text.len() - after.len()];
        let is_between =
            before.ends_with(char::is_alphanumeric) && after.starts_with(char::is_alphanumeric);
        (is_between && signs.contains('.')).then_some(at)
    };
    text.match_indices(is_mark).filter_map(turns)
}

/// Returns whether a character is a mark of the letter before it.
pub(super) fn is_mark(c: char) -> bool {
    matches!(
        category(c),
        GeneralCategory::NonspacingMark
            | GeneralCategory::SpacingMark
            | GeneralCategory::EnclosingMark
    )
}

/// Returns whether a character may be in a word of Latin letters.
pub(super) fn is_latin(c: char) -> bool {
    c.is_ascii() || matches!(script(c), Script::Latin | Script::Inherited)
}

pub(super) fn is_emoji(c: char) -> bool {
    CodePointSetData::new::<Emoji>().contains(c)
}

fn script(c: char) -> Script {
    CodePointMapData::<Script>::new().get(c)
}

fn category(c: char) -> GeneralCategory {
    CodePointMapData::<GeneralCategory>::new().get(c)
}
