//! Uploaded files of messages: which a message may have, and which no message has any more.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use super::{FileCheck, Owner, OwnerReply};
use crate::{
    chat::error::Error,
    model::{
        Attachment, AttachmentId, ChangeOp, Entry, EntryState, FileState, Rev, Seq, UserId,
        file_ids, limits::FILES_ASKED_MAX,
    },
    store::{self, FileRow, LogRow, Reference, Store},
};

/// The time for which what was read of a file counts for other messages of its sender.
const FRESH: Duration = Duration::from_secs(1);
/// Messages that may have one file. Later references would not be read any more.
const MESSAGES_OF_FILE_MAX: usize = 32;

/// A file as the store had it a moment ago.
#[derive(Debug)]
struct Looked {
    since: Instant,
    found: Option<FoundFile>,
}

/// A file with the number of its references.
#[derive(Debug)]
pub(super) struct FoundFile {
    pub row: FileRow,
    pub references: usize,
}

/// The files that were looked up for messages that are being sent.
#[derive(Debug, Default)]
pub(super) struct LookedUp(HashMap<AttachmentId, Looked>);

impl LookedUp {
    /// Notes the answer to a lookup that began at `since`, and forgets old ones. So there are never more than lookups of
    /// one moment.
    pub(super) fn learn(&mut self, file: AttachmentId, since: Instant, found: Option<FoundFile>) {
        let mut found = found;
        // Messages that are not stored yet count too.
        let before = self.0.get(&file).and_then(|looked| looked.found.as_ref());
        if let (Some(before), Some(found)) = (before, &mut found) {
            found.references = found.references.max(before.references);
        }
        self.0.retain(|_, looked| looked.since.elapsed() < FRESH);
        self.0.insert(file, Looked { since, found });
    }

    fn get(&self, file: AttachmentId) -> Option<&Looked> {
        self.0
            .get(&file)
            .filter(|looked| looked.since.elapsed() < FRESH)
    }

    pub(super) fn has(&self, file: AttachmentId) -> bool {
        self.get(file).is_some()
    }
}

impl Owner {
    /// Returns the attachments of a new message with the facts of their files, so that a page of history needs no other
    /// read.
    pub(super) fn with_facts(
        &mut self,
        sender: &UserId,
        attachments: &[Attachment],
    ) -> Result<Vec<Attachment>, Error> {
        let complete = |given: &Attachment| match given.id {
            None => Ok(given.clone()),
            Some(file) => {
                let found = self.usable(sender, file)?;
                Ok(described(found, given))
            }
        };
        once_each(attachments)?;
        attachments.iter().map(complete).collect()
    }

    /// Returns a file as an attachment, if this sender may put it into a message.
    fn usable(&mut self, sender: &UserId, file: AttachmentId) -> Result<Attachment, Error> {
        let id = self.id;
        let looked = self.parked.files.0.get_mut(&file);
        let looked = looked.filter(|looked| looked.since.elapsed() < FRESH);
        let looked = looked.ok_or(Error::BUSY)?;
        let usable = looked.found.as_mut().filter(|found| {
            let facts = &found.row.facts;
            facts.conversation == id && facts.uploader == *sender
        });
        let none = || Error::invalid("you have uploaded no such file to this conversation");
        let FoundFile { row, references } = usable.ok_or_else(none)?;
        let result = match (row.state, &row.result) {
            (FileState::Ready, Some(result)) => result,
            (FileState::Pending | FileState::Scanning | FileState::Ready, _) => {
                return Err(Error::Conflict("the file is not ready".into()));
            }
            (FileState::Blocked, _) => {
                return Err(Error::Conflict("the file is not safe".into()));
            }
            // Rule [refuse-erasing].
            (FileState::Erasing | FileState::Erased, _) => {
                return Err(Error::Conflict("the file is gone".into()));
            }
        };
        if *references >= MESSAGES_OF_FILE_MAX {
            return Err(Error::TooLarge {
                what: "messages with one file".into(),
                max: MESSAGES_OF_FILE_MAX,
            });
        }
        *references += 1;
        Ok(Attachment {
            id: Some(file),
            url: String::new(),
            name: Some(row.facts.name.clone()),
            mime: Some(result.mime.clone()),
            size: Some(result.size),
            alt: row.facts.alt.clone(),
            width: result.pixels.map(|(width, _)| width),
            height: result.pixels.map(|(_, height)| height),
        })
    }

    /// Answers which of these files messages have. The caller reads it.
    pub(super) fn files(
        &self,
        actor: &UserId,
        files: Vec<AttachmentId>,
    ) -> Result<OwnerReply, Error> {
        self.view()?.check_reading(actor)?;
        if files.len() > FILES_ASKED_MAX {
            return Err(Error::TooLarge {
                what: "files".into(),
                max: FILES_ASKED_MAX,
            });
        }
        Ok(OwnerReply::ReadFiles {
            files,
            head: self.log.head(),
        })
    }

    /// Answers whether a message has a file. While a message with it is being sent, nobody knows (rule [naming]).
    pub(super) fn check_file(&self, file: AttachmentId) -> OwnerReply {
        let is_appended = (self.log.settled() + 1..self.log.next())
            .filter_map(|seq| self.log.get(seq))
            .any(|pending| includes(pending.entry.content.attachments(), file));
        let is_shared = self.environment.store.is_shared();
        let newest = self.recent.newest();
        // Without an entry there can be no fence.
        let has_no_fence = is_shared && newest.is_none();
        let inherited = newest.filter(|entry| is_shared && entry.seq <= self.inherited);
        let fence = inherited.map(|entry| LogRow {
            record: entry.clone(),
            epoch: self.ownership.epoch(),
            settled: 0,
            settle_end: 0,
        });
        OwnerReply::CheckFile(FileCheck {
            file,
            is_busy: is_appended || self.awaits_file(file) || has_no_fence,
            newest: self.log.next() - 1,
            fence,
        })
    }
}

/// Returns an edit's attachments with the facts of the files that the message has. An edit adds no file: only the log of
/// messages is fenced.
pub(super) fn kept(
    attachments: &[Attachment],
    before: &[Attachment],
) -> Result<Vec<Attachment>, Error> {
    let complete = |given: &Attachment| {
        let same = |before: &&Attachment| before.id == given.id;
        match (given.id, before.iter().find(same)) {
            (None, _) => Ok(given.clone()),
            (Some(_), Some(before)) => Ok(described(before.clone(), given)),
            (Some(_), None) => Err(Error::invalid("an edit adds no uploaded file")),
        }
    };
    once_each(attachments)?;
    attachments.iter().map(complete).collect()
}

fn once_each(attachments: &[Attachment]) -> Result<(), Error> {
    for (at, file) in file_ids(attachments).enumerate() {
        if file_ids(attachments)
            .skip(at + 1)
            .any(|other| other == file)
        {
            return Err(Error::invalid("a message has each file once"));
        }
    }
    Ok(())
}

/// Returns a file with the description that its sender gives now, if any.
fn described(file: Attachment, given: &Attachment) -> Attachment {
    Attachment {
        alt: given.alt.clone().or(file.alt),
        ..file
    }
}

/// Whether a file is among attachments.
pub(super) fn includes(attachments: &[Attachment], file: AttachmentId) -> bool {
    file_ids(attachments).any(|id| id == file)
}

/// Reads a file and the number of its references. The state may be as old as the beginning of the read.
pub(super) async fn find(
    store: &dyn Store,
    file: AttachmentId,
) -> store::Result<(Instant, Option<FoundFile>)> {
    let since = Instant::now();
    let Some(row) = store.file(file).await? else {
        return Ok((since, None));
    };
    let references = store.references(file).await?.len();
    Ok((since, Some(FoundFile { row, references })))
}

/// Whether an entry, as it is now, has a file. Rule [refs-log]: this decides, and a reference only says where to look.
pub(in crate::chat) fn has_file(
    entry: &Entry,
    state: Option<&EntryState>,
    file: AttachmentId,
) -> bool {
    includes(entry.attachments(state), file)
}

/// Returns the references that follow from a change.
pub(super) fn references(op: &ChangeOp, rev: Rev) -> Vec<Reference> {
    let reference = |seq: Seq, on| move |file| Reference { file, seq, rev, on };
    match op {
        ChangeOp::Edit {
            seq,
            content,
            dropped,
            ..
        } => {
            let now = content
                .iter()
                .flat_map(|content| file_ids(&content.attachments));
            let gone = dropped.iter().copied().map(reference(*seq, false));
            now.map(reference(*seq, true)).chain(gone).collect()
        }
        // Rule [refs-off].
        ChangeOp::Delete { entries, .. } => entries
            .iter()
            .flat_map(|entry| entry.files.iter().copied().map(reference(entry.seq, false)))
            .collect(),
        ChangeOp::React { .. } => Vec::new(),
    }
}
