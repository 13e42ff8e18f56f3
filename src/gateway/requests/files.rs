//! The addresses of uploaded files.

use crate::{
    chat::{Error, GetFiles},
    gateway::{Files, Gateway},
    model::{AttachmentId, FileState, UserId, limits::FILES_ASKED_MAX},
    protocol::{Answer, FileUrl},
    store::FileRow,
};

/// Answers a request for addresses.
pub(super) async fn attachment_urls(
    gateway: &Gateway,
    user: UserId,
    ids: Vec<AttachmentId>,
) -> Result<Answer, Error> {
    if ids.len() > FILES_ASKED_MAX {
        return Err(Error::TooLarge {
            what: "files".into(),
            max: FILES_ASKED_MAX,
        });
    }
    let items = urls(gateway, &user, ids).await?;
    Ok(Answer::AttachmentUrls { items })
}

/// Returns the addresses of those files that the user may download: files of messages that the user may read, and own
/// uploads.
pub(in crate::gateway) async fn urls(
    gateway: &Gateway,
    user: &UserId,
    files: Vec<AttachmentId>,
) -> Result<Vec<FileUrl>, Error> {
    let Some(here) = &gateway.files else {
        return Ok(Vec::new());
    };
    let rows = here.store.files(&files).await?;
    let is_there = |row: &FileRow| matches!(row.state, FileState::Ready | FileState::Erasing);
    let rows: Vec<_> = rows.into_iter().filter(|(_, row)| is_there(row)).collect();
    let mut allowed = Vec::new();
    let mut conversations: Vec<_> = rows.iter().map(|(_, row)| row.facts.conversation).collect();
    conversations.sort_unstable();
    conversations.dedup();
    for conversation in conversations {
        let of = |(id, row): &(AttachmentId, FileRow)| {
            (row.facts.conversation == conversation).then_some(*id)
        };
        let asked = GetFiles {
            files: rows.iter().filter_map(of).collect(),
        };
        match gateway.router.ask(conversation, user.clone(), asked).await {
            Ok(files) => allowed.extend(files),
            // A user who may not read the conversation learns nothing.
            Err(Error::Forbidden(_) | Error::UnknownConversation) => {}
            Err(error) => return Err(error),
        }
    }
    let mut urls = Vec::new();
    for (id, row) in rows {
        if allowed.contains(&id) || is_own_unsent(here, (id, &row), user).await? {
            urls.push(here.url(id, &row, user));
        }
    }
    Ok(urls)
}

/// Whether a file was uploaded by this user, and no message has it yet. Who may read a message decides about its files, also
/// for the user who uploaded them.
async fn is_own_unsent(
    files: &Files,
    (id, row): (AttachmentId, &FileRow),
    user: &UserId,
) -> Result<bool, Error> {
    if row.facts.uploader != *user || row.state != FileState::Ready {
        return Ok(false);
    }
    let references = files.store.references(id).await?;
    Ok(!references.iter().any(|reference| reference.on))
}
