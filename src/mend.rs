//! `chat-gateway store check` and `store mend`: what a log has lost, and how its conversation goes on.

use std::fmt;

use anyhow::{Context, bail};

use crate::{
    alone::Alone,
    chat::{CheckedLog, CheckedLogs, DeleteMessages, check_logs, fill_holes, undeleted},
    config::Config,
    model::{ConversationId, LEVEL_CHANGES, Seq, UserId},
    node::open_store,
    tasks::Tasks,
};

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
    let level = alone.level();
    if level < LEVEL_CHANGES {
        bail!(
            "the ring has level {level}, and lost entries are deleted from level {LEVEL_CHANGES} on. Run chat-gateway cluster \
             finalize first"
        );
    }
    let found = fill_holes(&*alone.store, conversation).await?;
    let left = check_logs(&*alone.store, conversation).await?;
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
    let repaired = alone.conversations.repair_one(conversation).await;
    repaired
        .context("the holes are filled, but inboxes may lack something. Run this command again")?;
    let Some((mut from, to)) = left.undeleted else {
        return Ok(found);
    };
    while from <= to {
        let (seqs, read) = undeleted(&*alone.store, conversation, from, to).await?;
        if !seqs.is_empty() {
            delete(alone, conversation, seqs).await?;
        }
        from = read + 1;
    }
    Ok(found)
}

async fn delete(alone: &Alone, conversation: ConversationId, seqs: Vec<Seq>) -> anyhow::Result<()> {
    let deletion = DeleteMessages {
        seqs,
        as_moderator: true,
        at: None,
    };
    let asked = alone
        .conversations
        .ask(conversation, UserId::gateway(), deletion);
    asked.await.context(
        "the holes are filled, but their entries could not be deleted. Run this command again",
    )?;
    Ok(())
}
