//! Files of imported messages.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, anyhow, ensure};
use serde::Deserialize;

use crate::{
    clock,
    gateway::Files,
    model::{Attachment, ConversationId, FileFacts, UserId, limits::ATTACHMENT_BYTES_MAX, text},
};

/// A file of a message.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileLine {
    /// Where it is on this machine. It is relative to the folder of the file that is imported.
    path: PathBuf,
    /// By default the name in `path`.
    name: Option<String>,
    alt: Option<String>,
}

/// The place of the files of imported messages.
pub(super) struct FileKeeper {
    files: Option<Arc<Files>>,
    /// The folder of the file that is imported.
    folder: PathBuf,
}

impl FileKeeper {
    /// Returns the keeper of the files of messages in `imported`.
    pub(super) fn beside(imported: &Path, files: Option<Arc<Files>>) -> Self {
        Self {
            files,
            folder: imported.parent().unwrap_or(Path::new("")).to_owned(),
        }
    }

    /// Keeps the files of a message. Returns its attachments.
    pub(super) async fn keep(
        &self,
        conversation: ConversationId,
        sender: &UserId,
        lines: &[FileLine],
    ) -> anyhow::Result<Vec<Attachment>> {
        let mut attachments = Vec::new();
        for line in lines {
            let attachment = self.keep_one(conversation, sender, line).await;
            attachments.push(attachment.with_context(|| line.path.display().to_string())?);
        }
        Ok(attachments)
    }

    async fn keep_one(
        &self,
        conversation: ConversationId,
        sender: &UserId,
        line: &FileLine,
    ) -> anyhow::Result<Attachment> {
        let files = self.files.as_ref();
        let files = files.context("uploads are off: see attachments.store")?;
        let path = self.folder.join(&line.path);
        let size = tokio::fs::metadata(&path).await?.len();
        let size_max = files.size_max();
        ensure!(
            (1..=size_max).contains(&size),
            "a file has 1 to {size_max} bytes (attachments.size_max_mib)"
        );
        let name = line.name.clone().unwrap_or_else(|| name_of(&path));
        let alt = line.alt.clone().filter(|alt| !alt.is_empty());
        ensure!(
            name.len() + alt.as_ref().map_or(0, String::len) <= ATTACHMENT_BYTES_MAX,
            "name and alt have at most {ATTACHMENT_BYTES_MAX} bytes together"
        );
        text::check_alt(alt.as_deref().unwrap_or_default())
            .map_err(|wrong| anyhow!("alt {wrong}"))?;
        let facts = FileFacts {
            uploader: sender.clone(),
            conversation,
            name: text::file_name(&name),
            size,
            alt,
            created_at: clock::wall(),
            upload: None,
        };
        let id = files.keep(facts, &path).await?;
        Ok(Attachment {
            id: Some(id),
            ..Attachment::default()
        })
    }
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
