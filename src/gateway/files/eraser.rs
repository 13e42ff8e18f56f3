//! Erases files that no message has. The owner of the conversation decides that, twice: see docs/attachments.md.

use std::{collections::VecDeque, io, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::{StreamExt as _, stream};
use metrics::counter;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};

use super::{
    Files, inspect,
    storage::{FileBytes, erase_bytes},
    turns::Patience,
};
use crate::{
    chat::{CheckFile, Error, FileUse},
    clock,
    cluster::Router,
    model::{AttachmentId, ConversationId, FileFacts, FileState, Millis, UserId},
    store::{self, FileRow, Store, WorkShard},
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

/// A file that may be unused, with its conversation.
pub type Dropped = (ConversationId, AttachmentId);

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
    pub async fn run(place: impl Erasing, waiting: mpsc::Receiver<Dropped>) {
        futures_util::join!(erase_dropped(&place, waiting), keep_sweeping(&place));
    }
}

/// What the eraser needs: a gateway, or a simulated one.
#[async_trait]
pub trait Erasing: Send + Sync {
    fn store(&self) -> &dyn Store;

    fn bytes(&self) -> &dyn FileBytes;

    /// The age at which a file is erased that no message has.
    fn orphan_ms(&self) -> Millis;

    /// Whether this gateway sweeps a partition of the work.
    fn sweeps(&self, shard: WorkShard) -> bool;

    /// Asks the owner whether a file is unused. If it is, no later message may have it.
    async fn check(&self, (conversation, file): Dropped) -> Result<FileUse, Error>;

    /// Looks at a file again, because the gateway that did so ended.
    async fn inspect(&self, file: AttachmentId, facts: &FileFacts);
}

#[async_trait]
impl Erasing for (Arc<Files>, Arc<Router>) {
    fn store(&self) -> &dyn Store {
        &*self.0.store
    }

    fn bytes(&self) -> &dyn FileBytes {
        &*self.0
    }

    fn orphan_ms(&self) -> Millis {
        self.0.settings.orphan_ms()
    }

    fn sweeps(&self, shard: WorkShard) -> bool {
        self.1.sweeps(shard)
    }

    async fn check(&self, (conversation, file): Dropped) -> Result<FileUse, Error> {
        let asked = CheckFile { file };
        self.1.ask(conversation, UserId::gateway(), asked).await
    }

    async fn inspect(&self, file: AttachmentId, facts: &FileFacts) {
        inspect::again(&self.0, file, facts, Patience::Leaves).await;
    }
}

async fn erase_dropped(place: &impl Erasing, mut waiting: mpsc::Receiver<Dropped>) {
    let mut second: VecDeque<(Instant, Dropped)> = VecDeque::new();
    loop {
        let next = second.front().map(|(at, _)| *at);
        let due = wait_until(next);
        tokio::select! {
            biased;
            () = due => {
                if let Some((_, dropped)) = second.pop_front() {
                    erase_if_unused(place, dropped).await;
                }
            }
            dropped = waiting.recv(), if second.len() < WAITING_MAX => {
                let Some(dropped) = dropped else { return };
                if check(place, dropped).await == FileUse::Unused {
                    second.push_back((Instant::now() + BETWEEN_CHECKS, dropped));
                }
            }
        }
    }
}

async fn keep_sweeping(place: &impl Erasing) {
    // Gateways that start again and again do not begin with the same partition.
    let begin = clock::minute() as usize;
    for number in 0.. {
        sleep(SWEEP_EVERY).await;
        sweep(place, begin + number).await;
    }
}

/// The same. An error counts as busy (rule [busy-later]).
async fn check(place: &impl Erasing, dropped: Dropped) -> FileUse {
    match place.check(dropped).await {
        Ok(found) => found,
        Err(error) => {
            let (_, file) = dropped;
            crate::seldom::seldom!(WARN, "could not find out whether a file is unused; a sweep tries again", %file, %error);
            FileUse::Busy
        }
    }
}

/// Erases a file if it is still unused at the second check (rule [erase-twice]).
async fn erase_if_unused(place: &impl Erasing, dropped: Dropped) {
    let (_, file) = dropped;
    if check(place, dropped).await != FileUse::Unused {
        return;
    }
    if let Err(error) = erase_unused(place, file).await {
        crate::seldom::seldom!(ERROR, "could not erase a file; a sweep tries again", %file, %error);
        return;
    }
    // Rule [bytes-first].
    match place.store().forget_file(file).await {
        Ok(()) => counter!("chat_files_erased_total").increment(1),
        Err(error) => {
            crate::seldom::seldom!(WARN, "could not record that a file is erased; a sweep tries again", %file, %error);
        }
    }
}

/// Removes the bytes of a file that no message has.
async fn erase_unused(place: &impl Erasing, file: AttachmentId) -> io::Result<()> {
    let row = place.store().file(file).await.map_err(io::Error::other)?;
    let Some(row) = row else {
        return place.bytes().erase(file, None).await;
    };
    // Else its bytes would stay, and nobody would look for them any more.
    if row.facts.upload.is_some() != place.bytes().is_bucket() {
        let text = "its bytes are in another storage: attachments.store was changed";
        return Err(io::Error::other(text));
    }
    let upload = row.facts.upload.as_deref();
    erase_bytes(place.store(), place.bytes(), file, upload).await
}

/// Looks at the files that were created or dropped on earlier days, or long enough ago, and erases those that no message
/// has. Each sweep has a number.
async fn sweep(place: &impl Erasing, number: usize) {
    if let Err(error) = place.bytes().remove_old_uploads(INCOMING_MAX).await {
        tracing::warn!(%error, "could not look for old uploads");
    }
    let mut shards = match place.store().work_shards().await {
        Ok(shards) => shards,
        Err(error) => return tracing::warn!(%error, "could not list the files to sweep"),
    };
    if !shards.is_empty() {
        // So that the files of no shard are always the last.
        let first = number % shards.len();
        shards.rotate_left(first);
    }
    let mut to_inspect = Vec::new();
    for shard in shards {
        if !place.sweeps(shard) {
            continue;
        }
        let swept = async {
            // Nothing is written to it any more, also if a write began just before midnight.
            let is_over = shard.day + 1 < clock::today();
            let left = sweep_shard(place, (shard, is_over), &mut to_inspect).await?;
            if is_over {
                // What is left is the work of another day, so that no partition is swept for ever.
                for file in left {
                    place.store().add_work(clock::today(), file).await?;
                }
                place.store().finish_work(shard).await?;
            }
            store::Result::Ok(())
        };
        if let Err(error) = swept.await {
            tracing::warn!(%error, "could not sweep files; trying again");
        }
    }
    // After all that is erased, because a scanner may take minutes.
    stream::iter(to_inspect)
        .for_each_concurrent(INSPECTIONS_MAX, async |(file, facts)| {
            place.inspect(file, &facts).await;
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
    place: &impl Erasing,
    file: AttachmentId,
    row: &FileRow,
    is_over: bool,
) -> store::Result<Next> {
    let age = clock::wall().saturating_sub(row.facts.created_at);
    let is_old = age >= place.orphan_ms();
    Ok(match row.state {
        FileState::Erased if is_over && place.bytes().is_bucket() => Next::EraseAgain,
        FileState::Erased => Next::Done,
        // Its uploader can ask for a day why it is not there.
        FileState::Blocked if is_old => Next::Forget,
        FileState::Blocked => Next::Later,
        // The first check of a file that is being erased is repeated, as is the wait.
        FileState::Erasing => Next::Check,
        FileState::Pending | FileState::Scanning | FileState::Ready if is_old => Next::Check,
        FileState::Ready => {
            let references = place.store().references(file).await?;
            // A message dropped it, and nobody erased it then.
            if references.iter().any(|reference| !reference.on) {
                Next::Check
            } else {
                Next::Later
            }
        }
        FileState::Scanning => Next::Inspect,
        // Its uploader says when it is complete. Asking a bucket for each would take too long.
        FileState::Pending if place.bytes().is_bucket() => Next::Later,
        FileState::Pending => match place.bytes().received(file, &row.facts).await {
            Ok(received) if received.is_none_or(|bytes| bytes == row.facts.size) => Next::Inspect,
            _ => Next::Later,
        },
    })
}

/// Sweeps one partition. Returns the files with which something is left to do.
async fn sweep_shard(
    place: &impl Erasing,
    (shard, is_over): (WorkShard, bool),
    to_inspect: &mut Vec<(AttachmentId, FileFacts)>,
) -> store::Result<Vec<AttachmentId>> {
    let (mut after, mut left) = (None, Vec::new());
    loop {
        let page = place.store().work(shard, after, PAGE).await?;
        let Some(last) = page.last() else {
            return Ok(left);
        };
        after = Some(*last);
        let mut unused = Vec::new();
        for (file, row) in place.store().files(&page).await? {
            let dropped = (row.facts.conversation, file);
            match next(place, file, &row, is_over).await? {
                Next::Done => {}
                Next::Later => left.push(file),
                Next::Inspect => {
                    if to_inspect.len() < PAGE {
                        to_inspect.push((file, row.facts));
                    }
                    left.push(file);
                }
                Next::Forget => {
                    place.store().forget_file(file).await?;
                    left.push(file);
                }
                // Rule [erase-again].
                Next::EraseAgain => {
                    let upload = row.facts.upload.as_deref();
                    if let Err(error) = place.bytes().erase(file, upload).await {
                        crate::seldom::seldom!(ERROR, "could not erase a file again; a sweep tries again", %file, %error);
                        left.push(file);
                    }
                }
                Next::Check => match check(place, dropped).await {
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
            erase_if_unused(place, dropped).await;
            if !is_erased(place, dropped.1).await? {
                left.push(dropped.1);
            }
        }
    }
}

async fn is_erased(place: &impl Erasing, file: AttachmentId) -> store::Result<bool> {
    let row = place.store().file(file).await?;
    Ok(row.is_none_or(|row| row.state == FileState::Erased))
}
