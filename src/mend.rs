//! `chat-gateway store check` and `store mend`: what a log has lost, and how its conversation goes on.

use std::{fmt, time::Duration};

use anyhow::{Context, bail};
use tokio::time::{Instant, sleep};

use crate::{
    alone::Alone,
    chat::{self, CheckedLog, CheckedLogs, DeleteMessages, check_logs, fill_holes, undeleted},
    config::Config,
    model::{ConversationId, Seq, UserId},
    node::open_store,
    store,
    tasks::Tasks,
};

/// The time in which a request is tried again, and the pause before that.
const PATIENCE: Duration = Duration::from_secs(60);
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// What the check of a conversation found, for an operator.
pub struct Report {
    conversation: ConversationId,
    found: CheckedLogs,
}

impl Report {
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.found.are_whole()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedLogs {
            entries,
            changes,
            undeleted,
            have_more,
        } = &self.found;
        writeln!(f, "conversation {}", self.conversation)?;
        if *have_more {
            writeln!(
                f,
                "there are rows beyond the recorded end of a log: the row in the table conversations is older than the log"
            )?;
        }
        log(f, "entries", entries)?;
        log(f, "changes", changes)?;
        if undeleted.is_some() {
            writeln!(f, "some filled entries are not deleted yet")?;
        }
        Ok(())
    }
}

/// Writes what was found in one log.
fn log(f: &mut fmt::Formatter<'_>, name: &str, log: &CheckedLog) -> fmt::Result {
    let CheckedLog {
        certain,
        newest,
        holes,
        further_holes,
        lost,
        filled,
        unsettled,
        is_refused,
    } = log;
    match (holes.first(), certain) {
        (None, 0) => write!(f, "{name}: none must be there")?,
        (None, certain) => write!(f, "{name}: 1 to {certain} must be there, and are")?,
        (Some(first), certain) => {
            let whole = first.start() - 1;
            write!(
                f,
                "{name}: 1 to {certain} must be there; whole up to {whole}, and {lost} missing after that"
            )?;
        }
    }
    if *filled > 0 {
        write!(f, "; lost before and filled: {filled}")?;
    }
    writeln!(f)?;
    for hole in holes {
        let (from, to) = (hole.start(), hole.end());
        writeln!(f, "  missing: {from} to {to}")?;
    }
    if *further_holes > 0 {
        writeln!(f, "  and {further_holes} more holes")?;
    }
    if let [first, .., last] | [first @ last] = unsettled[..] {
        writeln!(
            f,
            "  {} rows of a takeover between {first} and {last} are lost; those of the owner before are there",
            unsettled.len()
        )?;
    }
    if *is_refused {
        writeln!(f, "  an owner would refuse this log")?;
    }
    if newest > certain {
        let after = certain + 1;
        writeln!(
            f,
            "  after that there are rows up to {newest}; the next owner decides which of {after} to {newest} count"
        )?;
    }
    Ok(())
}

/// Reads the logs of a conversation, and says what is missing. It writes nothing to them.
///
/// # Errors
/// The store cannot be opened or read.
pub async fn check(config: &Config, conversation: ConversationId) -> anyhow::Result<Report> {
    let tasks = Tasks::default();
    let store = open_store(config, &tasks).await?;
    let found = check_logs(&*store, conversation).await;
    store.close().await?;
    let found = found?;
    known(conversation, &found)?;
    Ok(Report {
        conversation,
        found,
    })
}

/// # Errors
/// The store has nothing of the conversation: its id is probably a mistake.
fn known(conversation: ConversationId, found: &CheckedLogs) -> anyhow::Result<()> {
    if *found == CheckedLogs::default() {
        bail!("the store has no entry of conversation {conversation}");
    }
    Ok(())
}

/// Fills the holes in the logs of a conversation, and deletes the entries that fill them, so that everybody sees deleted
/// messages. No gateway may be using the store. Returns what was found before.
///
/// # Errors
/// A gateway is using the store, the store does not answer, or it does not keep what is written.
pub async fn mend(config: &Config, conversation: ConversationId) -> anyhow::Result<Report> {
    let tasks = Tasks::default();
    let store = open_store(config, &tasks).await?;
    let checked = check_logs(&*store, conversation).await;
    if checked.as_ref().map_or(true, CheckedLogs::are_whole) {
        store.close().await?;
        let found = checked?;
        known(conversation, &found)?;
        return Ok(Report {
            conversation,
            found,
        });
    }
    let alone = Alone::open(config, store, &tasks).await?;
    let mended = fill_and_delete(&alone, conversation).await;
    // The next gateway does the crash repair of the other conversations.
    let closed = alone.close(false).await;
    let found = mended?;
    closed?;
    Ok(Report {
        conversation,
        found,
    })
}

async fn fill_and_delete(
    alone: &Alone,
    conversation: ConversationId,
) -> anyhow::Result<CheckedLogs> {
    let store = &*alone.store;
    // What was found is read before anything is filled, because filling may be tried again.
    let have_more = patiently(alone, || store.find_ends(conversation, true)).await?;
    let found = patiently(alone, || check_logs(store, conversation)).await?;
    let found = CheckedLogs { have_more, ..found };
    patiently(alone, || fill_holes(store, conversation)).await?;
    let left = patiently(alone, || check_logs(store, conversation)).await?;
    if left.entries.is_refused || left.changes.is_refused {
        bail!(
            "nothing is missing any more, but an owner would refuse the log all the same. Restore a backup"
        );
    }
    if !left.entries.is_whole() || !left.changes.is_whole() || left.have_more {
        bail!(
            "the store does not show the rows that fill the holes: their places were probably deleted by hand, with a time as \
             timestamp, and that deletion hides everything there. Restore a backup"
        );
    }
    // Crash repair left it out, and may not look at it again.
    patiently(alone, || alone.conversations.repair_one(conversation))
        .await
        .context("the holes are filled, but inboxes may lack something. Run this command again")?;
    let Some((mut from, to)) = left.undeleted else {
        return Ok(found);
    };
    while from <= to {
        let read = patiently(alone, || undeleted(store, conversation, from, to));
        let (seqs, read) = read.await?;
        if !seqs.is_empty() {
            delete(alone, conversation, &seqs).await?;
        }
        from = read + 1;
    }
    Ok(found)
}

async fn delete(alone: &Alone, conversation: ConversationId, seqs: &[Seq]) -> anyhow::Result<()> {
    let deleted = patiently(alone, || {
        let deletion = DeleteMessages {
            seqs: seqs.to_vec(),
            as_moderator: true,
            at: None,
        };
        let gateway = UserId::gateway();
        alone.conversations.ask(conversation, gateway, deletion)
    });
    deleted.await.context(
        "the holes are filled, but their entries could not be deleted. Run this command again",
    )?;
    Ok(())
}

/// An error that may not come again.
trait MayPass: fmt::Display {
    fn may_pass(&self) -> bool;
}

impl MayPass for chat::Error {
    fn may_pass(&self) -> bool {
        self.is_unavailable() && !self.is_lasting()
    }
}

impl MayPass for store::Error {
    fn may_pass(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }
}

/// Tries again what may be repeated: a lease ends when the store is slow for two seconds, and the next one begins soon.
async fn patiently<T, E, F>(alone: &Alone, ask: impl Fn() -> F) -> Result<T, E>
where
    E: MayPass,
    F: Future<Output = Result<T, E>>,
{
    let ends = Instant::now() + PATIENCE;
    loop {
        let error = match ask().await {
            Err(error) if error.may_pass() => error,
            answer => return answer,
        };
        if Instant::now() >= ends || alone.is_taken_over() {
            return Err(error);
        }
        tracing::warn!(%error, "trying again");
        sleep(RETRY_AFTER).await;
    }
}
