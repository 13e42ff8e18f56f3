//! What a notification shows, as the inbox of the user has it.

use super::Message;
use crate::{
    chat::{Error, GetHistory, LogRange},
    clock,
    cluster::Router,
    model::{EntryKind, Kind, Last, Seq, UserId, limits::PREVIEW_CHARS, text::cut},
    store::InboxRow,
};

/// Entries among which a message to notify of is looked for, if the newest one is deleted.
const LOOKED_AT: usize = 20;
/// Code points of a whole character: the longest emoji have fewer. A preview is shorter than it may be by at most as many
/// if it was cut before a character.
const CLUSTER_CHARS: usize = 32;
/// Code points of the shortest preview that may have been cut.
const CUT_MIN: usize = PREVIEW_CHARS - CLUSTER_CHARS;

/// Returns the newest message for the user: the one that the inbox shows, unless that is deleted or no message of
/// others. `None` if there is none among the entries before it.
pub(super) async fn message(
    router: &Router,
    user: &UserId,
    row: &InboxRow,
    seq: Seq,
) -> Result<Option<Message>, Error> {
    let Some(summary) = &row.summary else {
        return Ok(None);
    };
    let message = |last: &Last, body: String| Message {
        kind: summary.kind,
        // The other participant of a dm is the sender.
        name: summary.name.clone().filter(|_| summary.kind != Kind::Dm),
        seq: last.seq,
        message_id: last.message_id,
        sender: last.sender.clone(),
        body,
        at: last.at,
    };
    let is_shown =
        |last: &&Last| last.kind == EntryKind::Text && !last.deleted && last.sender != *user;
    let newest = summary.last.as_ref().filter(|last| last.seq >= seq);
    let newest = newest.filter(is_shown);
    if let Some(last) = newest
        && let Some(body) = body(&last.preview)
    {
        return Ok(Some(message(last, body)));
    }
    let upto = newest.map_or(seq, |last| last.seq);
    let before = GetHistory {
        range: LogRange::Before(upto + 1),
        limit: LOOKED_AT,
    };
    let asked = router.ask(row.conversation, user.clone(), before);
    let page = match asked.await {
        Ok(page) => page,
        Err(error) if error.is_unavailable() || error == Error::Closed => return Err(error),
        // The user has left, or has joined later.
        Err(_) => return Ok(None),
    };
    let unread = page.entries.iter().filter(|entry| entry.seq > row.read_seq);
    let mut lasts = unread.rev().map(|entry| {
        let state = page.state(entry.seq);
        (entry, state, entry.newest(state).last)
    });
    let found = lasts.find(|(_, _, last)| is_shown(&last));
    Ok(found.map(|(entry, state, last)| {
        let changed = state.map(|state| entry.as_changed(state));
        message(&last, beginning(changed.as_ref().unwrap_or(entry).shown()))
    }))
}

pub(super) fn is_muted(row: &InboxRow) -> bool {
    let until = row.settings.muted_until;
    until.is_some_and(|until| until > clock::wall())
}

/// Returns the number for the app's icon: the unread messages of dms and groups that are not muted.
pub(super) fn badge(rows: &[InboxRow]) -> u64 {
    let unread = rows.iter().filter(|row| !is_muted(row)).map(|row| {
        let Some(summary) = row.summary.as_ref().filter(|s| s.kind != Kind::Channel) else {
            return 0;
        };
        let last_seq = summary.last.as_ref().map_or(0, |last| last.seq);
        row.unread(
            summary.joined_seq,
            last_seq,
            summary.texts,
            &row.deleted.1.highest,
        )
    });
    unread.sum()
}

/// Returns the text that a notification shows, of the preview in the inbox. `None` if nobody can see whether the preview was
/// cut before a long character, or is the whole text.
fn body(preview: &str) -> Option<String> {
    match preview.chars().count() {
        ..CUT_MIN => Some(preview.to_owned()),
        CUT_MIN..PREVIEW_CHARS => None,
        // It may have been cut here.
        _ => Some(dotted(preview)),
    }
}

/// Returns the beginning of a text, with "…" if there is more.
fn beginning(text: &str) -> String {
    if cut(text, PREVIEW_CHARS) == text {
        text.to_owned()
    } else {
        dotted(text)
    }
}

/// Returns the beginning of a text that goes on.
fn dotted(text: &str) -> String {
    format!("{}…", cut(text, PREVIEW_CHARS - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_ends_with_dots_if_there_is_more() {
        let family = "👨\u{200d}👩\u{200d}👧\u{200d}👦";
        let long = "a".repeat(97) + family + " and more";
        assert_eq!(
            body(cut(&long, PREVIEW_CHARS)),
            None,
            "this needs the whole text"
        );
        assert_eq!(beginning(&long), "a".repeat(97) + "…");
        assert_eq!(beginning(&"a".repeat(100)), "a".repeat(100));
        assert_eq!(beginning(&"a".repeat(101)), "a".repeat(99) + "…");
        assert_eq!(body("hello").as_deref(), Some("hello"));
        assert_eq!(body(&"a".repeat(100)), Some("a".repeat(99) + "…"));
    }
}
