//! The one place that decides what a text that people see may be: the body of a message, the name of a conversation, a
//! user id, the name and description of a file, an emoji, a link. Pure: it has only the data of Unicode.
//!
//! A body is kept as its writer typed it, as long as it shows something. The short texts, which stand beside others in
//! lists and titles, have no character that hides or turns the text around. Characters that join or separate letters
//! are kept where a script needs them.

mod characters;
mod cut;
mod emoji;
mod file_name;
mod link;
mod top_level;

use characters::{Stray, shows_something, strays};
use icu_normalizer::ComposingNormalizerBorrowed;

pub use self::{
    characters::is_plain,
    cut::{cut, cut_before},
    emoji::{emoji, is_reaction_key},
    file_name::file_name,
    link::{link_name, link_url},
};

/// The reason why a text is refused. It continues a sentence that names the text: "a name …".
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    #[error("shows nothing: it has only blank or invisible characters")]
    Blank,
    #[error("has a control character")]
    Control,
    #[error("has a character that turns the direction of text around")]
    Direction,
    #[error("has an invisible character where its script needs none")]
    Invisible,
    #[error("is no emoji: send one emoji, or a name such as :party: of a-z, 0-9, _, + and -")]
    Emoji,
    #[error(
        "is no address: it begins with https:// or http://, and has a host, no user name, and no white space"
    )]
    Address,
    #[error("shows another address than its url")]
    OtherAddress,
}

impl From<Stray> for Wrong {
    fn from(stray: Stray) -> Self {
        match stray {
            Stray::Control => Self::Control,
            Stray::Direction => Self::Direction,
            Stray::Invisible => Self::Invisible,
        }
    }
}

/// Checks the body of a message. An empty one is allowed, because a message may have only attachments.
///
/// # Errors
/// [`Wrong::Blank`] if it is not empty and shows nothing.
pub fn check_body(body: &str) -> Result<(), Wrong> {
    if body.is_empty() || shows_something(body) {
        Ok(())
    } else {
        Err(Wrong::Blank)
    }
}

/// Returns the name of a conversation in its stored form, which is normalized (NFC).
///
/// # Errors
/// If it shows nothing, or has a character that is not allowed in a short text.
pub fn name(name: &str) -> Result<String, Wrong> {
    check_short(name)?;
    Ok(normalized(name))
}

/// Checks the description of a file. It may have several lines. An empty one is allowed.
///
/// # Errors
/// If it is not empty and shows nothing, or has a character that is not allowed in a short text.
pub fn check_alt(alt: &str) -> Result<(), Wrong> {
    check_body(alt)?;
    let is_layout = |c| matches!(c, '\n' | '\r' | '\t');
    let stray = strays(alt).find(|(_, c, _)| !is_layout(*c));
    stray.map_or(Ok(()), |(_, _, stray)| Err(stray.into()))
}

/// Checks a text of one line that stands beside others.
fn check_short(text: &str) -> Result<(), Wrong> {
    if let Some((_, _, stray)) = strays(text).next() {
        return Err(stray.into());
    }
    if shows_something(text) {
        Ok(())
    } else {
        Err(Wrong::Blank)
    }
}

/// Returns a text in the form NFC, so that two texts that look the same because of it are the same.
fn normalized(text: &str) -> String {
    ComposingNormalizerBorrowed::new_nfc()
        .normalize(text)
        .into_owned()
}

#[cfg(test)]
mod tests;
