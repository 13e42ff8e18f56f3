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
    let message = |last: &Last| Message {
        kind: summary.kind,
        // The other participant of a dm is the sender.
        name: summary.name.clone().filter(|_| summary.kind != Kind::Dm),
        seq: last.seq,
        message_id: last.message_id,
        sender: last.sender.clone(),
        body: body(&last.preview),
        at: last.at,
    };
    let is_shown =
        |last: &&Last| last.kind == EntryKind::Text && !last.deleted && last.sender != *user;
    let newest = summary.last.as_ref().filter(|last| last.seq >= seq);
    if let Some(last) = newest.filter(is_shown) {
        return Ok(Some(message(last)));
    }
    let before = GetHistory {
        range: LogRange::Before(seq + 1),
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
    let mut lasts = unread
        .rev()
        .map(|entry| entry.newest(page.state(entry.seq)).last);
    Ok(lasts.find(|last| is_shown(&last)).as_ref().map(message))
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
        let texts = summary.texts.unwrap_or(last_seq);
        row.unread(summary.joined_seq, last_seq, texts, &row.deleted.1.highest)
    });
    unread.sum()
}

/// Returns the text that a notification shows. The inbox has its first characters only.
fn body(preview: &str) -> String {
    if preview.chars().count() < PREVIEW_CHARS {
        return preview.to_owned();
    }
    // It may have been cut here.
    format!("{}…", cut(preview, PREVIEW_CHARS - 1))
}
