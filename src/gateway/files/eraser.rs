//! Erases files that no message has. The owner of the conversation decides that, twice: see docs/attachments.md.

use std::{collections::VecDeque, io, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream};
use metrics::counter;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};

use super::{Files, inspect, turns::Patience};
use crate::{
    chat::{CheckFile, FileUse},
    clock,
    cluster::Router,
    model::{AttachmentId, ConversationId, FileFacts, FileState, UserId},
    store::{FileRow, WorkShard},
    tasks::wait_until,
};

/// The time between the two checks of a file (rule [erase-twice]).
const BETWEEN_CHECKS: Duration = Duration::from_millis(2_200);
/// Files that wait to be erased. What does not fit is left to a sweep.
const WAITING_MAX: usize = 4_096;
/// The time between two sweeps.
const SWEEP_EVERY: Duration = Duration::from_secs(300);
/// The age at which an upload is removed that is not complete, whatever the store says of it (rule [incoming-age]).
/// Longer than the longest `attachments.orphan_h`, and a day more.
const INCOMING_MAX: Duration = Duration::from_secs(8 * 86_400);
/// Files of a partition that a sweep reads at once.
const PAGE: usize = 100;
/// Files that a sweep has looked at at the same time.
const INSPECTIONS_MAX: usize = 2;

type Dropped = (ConversationId, AttachmentId);

/// Tells the gateway that a file may be unused.
#[derive(Clone, Debug)]
pub struct Eraser {
    dropped: mpsc::Sender<Dropped>,
}

impl Eraser {
    /// Returns the sender, and the receiver for [`Self::run`].
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<Dropped>) {
        let (dropped, waiting) = mpsc::channel(WAITING_MAX);
        (Self { dropped }, waiting)
    }

    /// Notes that a file may be unused. It is erased soon if no message has it.
    pub fn drop_file(&self, conversation: ConversationId, file: AttachmentId) {
        if self.dropped.try_send((conversation, file)).is_err() {
            counter!("chat_files_left_to_sweep_total").increment(1);
        }
    }

    /// Erases files as they are dropped, and sweeps. It ends with the gateway.
    pub async fn run(files: Arc<Files>, router: Arc<Router>, waiting: mpsc::Receiver<Dropped>) {
        futures_util::join!(
            erase_dropped(&files, &router, waiting),
            keep_sweeping(&files, &router)
        );
    }
}

async fn erase_dropped(files: &Files, router: &Router, mut waiting: mpsc::Receiver<Dropped>) {
    let mut second: VecDeque<(Instant, Dropped)> = VecDeque::new();
    loop {
        let next = second.front().map(|(at, _)| *at);
        let due = wait_until(next);
        tokio::select! {
            dropped = waiting.recv(), if second.len() < WAITING_MAX => {
                let Some(dropped) = dropped else { return };
                if check(router, dropped).await == FileUse::Unused {
                    second.push_back((Instant::now() + BETWEEN_CHECKS, dropped));
                }
            }
            () = due => {
                if let Some((_, dropped)) = second.pop_front() {
                    erase_if_unused(files, router, dropped).await;
                }
            }
        }
    }
}

async fn keep_sweeping(files: &Arc<Files>, router: &Router) {
    loop {
        sleep(SWEEP_EVERY).await;
        sweep(files, router).await;
    }
}

/// Asks the owner whether a file is unused. If it is, no later message may have it.
async fn check(router: &Router, (conversation, file): Dropped) -> FileUse {
    let asked = CheckFile { file };
    match router.ask(conversation, UserId::gateway(), asked).await {
        Ok(found) => found,
        Err(error) => {
            crate::seldom::seldom!(WARN, "could not find out whether a file is unused; a sweep tries again", %file, %error);
            FileUse::Busy
        }
    }
}

/// Erases a file if it is still unused at the second check (rule [erase-twice]).
async fn erase_if_unused(files: &Files, router: &Router, dropped: Dropped) {
    let (_, file) = dropped;
    if check(router, dropped).await != FileUse::Unused {
        return;
    }
    let erased = {
        let _place = files.finishing.acquire().await;
        erase_unused(files, file).await
    };
    if let Err(error) = erased {
        crate::seldom::seldom!(ERROR, "could not erase a file; a sweep tries again", %file, %error);
        return;
    }
    // Rule [bytes-first].
    match files.store.forget_file(file).await {
        Ok(()) => counter!("chat_files_erased_total").increment(1),
        Err(error) => {
            crate::seldom::seldom!(WARN, "could not record that a file is erased; a sweep tries again", %file, %error);
        }
    }
}

/// Removes the bytes of a file that no message has.
async fn erase_unused(files: &Files, file: AttachmentId) -> io::Result<()> {
    let row = files.row(file).await.map_err(io::Error::other)?;
    let Some(row) = row else {
        return files.storage.erase(file, None).await;
    };
    // Else its bytes would stay, and nobody would look for them any more.
    if row.facts.upload.is_some() != files.storage.bucket().is_some() {
        let text = "its bytes are in another storage: attachments.store was changed";
        return Err(io::Error::other(text));
    }
    files.erase_bytes(file, row.facts.upload.as_deref()).await
}

/// Looks at the files that were created or dropped on earlier days, or long enough ago, and erases those that no message
/// has.
async fn sweep(files: &Arc<Files>, router: &Router) {
    if let Err(error) = files.storage.remove_old_uploads(INCOMING_MAX).await {
        tracing::warn!(%error, "could not look for old uploads");
    }
    let mut shards = match files.store.work_shards().await {
        Ok(shards) => shards,
        Err(error) => return tracing::warn!(%error, "could not list the files to sweep"),
    };
    if !shards.is_empty() {
        // So that the files of no shard are always the last.
        let first = rand::random_range(0..shards.len());
        shards.rotate_left(first);
    }
    let mut to_inspect = Vec::new();
    for shard in shards {
        if !router.sweeps(shard) {
            continue;
        }
        let swept = async {
            // Nothing is written to it any more, also if a write began just before midnight.
            let is_over = shard.day + 1 < clock::today();
            let left = sweep_shard(files, router, (shard, is_over), &mut to_inspect).await?;
            if is_over {
                // What is left is the work of another day, so that no partition is swept for ever.
                for file in left {
                    files.store.add_work(clock::today(), file).await?;
                }
                files.store.finish_work(shard).await?;
            }
            crate::store::Result::Ok(())
        };
        if let Err(error) = swept.await {
            tracing::warn!(%error, "could not sweep files; trying again");
        }
    }
    // After all that is erased, because a scanner may take minutes.
    stream::iter(to_inspect)
        .for_each_concurrent(INSPECTIONS_MAX, async |(file, facts)| {
            inspect::again(files, file, &facts, Patience::Leaves).await;
        })
        .await;
}

/// What a sweep does with a file.
enum Next {
    /// Nothing, and nothing is left to do.
    Done,
    /// Nothing yet.
    Later,
    /// It looks at the file: the gateway ended before it had.
    Inspect,
    /// It asks the owner whether the file is used.
    Check,
    /// It erases the name of the file, whose bytes are gone.
    Forget,
    /// It removes the bytes of an erased file again.
    EraseAgain,
}

/// Decides what a sweep does with a file.
async fn next(
    files: &Files,
    file: AttachmentId,
    row: &FileRow,
    is_over: bool,
) -> crate::store::Result<Next> {
    let age = clock::wall().saturating_sub(row.facts.created_at);
    let is_old = age >= files.settings.orphan_ms();
    Ok(match row.state {
        FileState::Erased if is_over && files.storage.bucket().is_some() => Next::EraseAgain,
        FileState::Erased => Next::Done,
        // Its uploader can ask for a day why it is not there.
        FileState::Blocked if is_old => Next::Forget,
        FileState::Blocked => Next::Later,
        // The first check of a file that is being erased is repeated, as is the wait.
        FileState::Erasing => Next::Check,
        FileState::Pending | FileState::Scanning | FileState::Ready if is_old => Next::Check,
        FileState::Ready => {
            let references = files.store.references(file).await?;
            // A message dropped it, and nobody erased it then.
            if references.iter().any(|reference| !reference.on) {
                Next::Check
            } else {
                Next::Later
            }
        }
        FileState::Scanning => Next::Inspect,
        // Its uploader says when it is complete. Asking a bucket for each would take too long.
        FileState::Pending if files.storage.bucket().is_some() => Next::Later,
        FileState::Pending => match files.storage.received(file, &row.facts).await {
            Ok(received) if received.is_none_or(|bytes| bytes == row.facts.size) => Next::Inspect,
            _ => Next::Later,
        },
    })
}

/// Sweeps one partition. Returns the files with which something is left to do.
async fn sweep_shard(
    files: &Arc<Files>,
    router: &Router,
    (shard, is_over): (WorkShard, bool),
    to_inspect: &mut Vec<(AttachmentId, FileFacts)>,
) -> crate::store::Result<Vec<AttachmentId>> {
    let (mut after, mut left) = (None, Vec::new());
    loop {
        let page = files.store.work(shard, after, PAGE).await?;
        let Some(last) = page.last() else {
            return Ok(left);
        };
        after = Some(*last);
        let mut unused = Vec::new();
        for (file, row) in files.store.files(&page).await? {
            let dropped = (row.facts.conversation, file);
            match next(files, file, &row, is_over).await? {
                Next::Done => {}
                Next::Later => left.push(file),
                Next::Inspect => {
                    if to_inspect.len() < PAGE {
                        to_inspect.push((file, row.facts));
                    }
                    left.push(file);
                }
                Next::Forget => {
                    files.store.forget_file(file).await?;
                    left.push(file);
                }
                // Rule [erase-again].
                Next::EraseAgain => {
                    let upload = row.facts.upload.as_deref();
                    if let Err(error) = files.storage.erase(file, upload).await {
                        crate::seldom::seldom!(ERROR, "could not erase a file again; a sweep tries again", %file, %error);
                        left.push(file);
                    }
                }
                Next::Check => match check(router, dropped).await {
                    FileUse::Unused => unused.push(dropped),
                    FileUse::Used => {}
                    // Rule [busy-later].
                    FileUse::Busy => left.push(file),
                },
            }
        }
        if unused.is_empty() {
            continue;
        }
        sleep(BETWEEN_CHECKS).await;
        for dropped in unused {
            erase_if_unused(files, router, dropped).await;
            if !is_erased(files, dropped.1).await? {
                left.push(dropped.1);
            }
        }
    }
}

async fn is_erased(files: &Files, file: AttachmentId) -> crate::store::Result<bool> {
    let row = files.row(file).await?;
    Ok(row.is_none_or(|row| row.state == FileState::Erased))
}
