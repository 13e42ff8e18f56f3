//! How a home writes what its users set for a conversation (rule [version]).

use std::time::Duration;

use tokio::time::sleep;

use super::Here;
use crate::{
    chat::Error,
    clock,
    cluster::wire::question::{Answers, SetSettings},
    model::{ConversationId, Millis, SettingsChange, UserId},
    store::InboxSettings,
};

/// The time for which settings wait for the summary of a new conversation, which is written after it is published.
const SUMMARY_WAIT: Duration = Duration::from_secs(2);
/// The pause between two attempts.
const RETRY_AFTER: Duration = Duration::from_millis(20);

impl Answers<SetSettings> for Here {
    async fn answer(
        &self,
        SetSettings {
            user,
            conversation,
            change,
        }: SetSettings,
    ) -> Result<InboxSettings, Error> {
        let attempts = SUMMARY_WAIT.as_millis() / RETRY_AFTER.as_millis();
        for _ in 0..attempts {
            if let Some(set) = self.try_settings(&user, conversation, change).await? {
                return Ok(set);
            }
            sleep(RETRY_AFTER).await;
        }
        Err(Error::unavailable("the conversation is still being stored"))
    }
}

impl Here {
    /// Sets what a user wants of a conversation. `None` if the inbox has no summary of it yet.
    async fn try_settings(
        &self,
        user: &UserId,
        conversation: ConversationId,
        change: SettingsChange,
    ) -> Result<Option<InboxSettings>, Error> {
        let only = self.home.devices.lock_user(user).await;
        let epoch = self.at_home(user).await?;
        let rows = self.home.inbox_rows(user, false, &[conversation]).await?;
        let row = rows.first().ok_or(Error::UnknownConversation)?;
        self.conversations
            .check_above(row.settings.version, epoch)?;
        let version = self.next_version(epoch)?;
        let settings = changed(row.settings, change, version, clock::wall());
        let (store, user, home) = (self.store.clone(), user.clone(), self.home.clone());
        let (told, is_written) = tokio::sync::oneshot::channel();
        let written = async move {
            let written = store.set_settings(&user, conversation, &settings).await;
            // Also after an error: it may have been written.
            home.has_settings(&user, conversation);
            let written = written?;
            let _ = told.send(written);
            if written {
                home.tell_settings(&user, conversation, settings);
            }
            // Held until here, so that sessions get the events of two changes in order.
            drop(only);
            Ok(())
        };
        self.written(epoch, written).await?;
        let is_written = is_written.await.unwrap_or_default();
        Ok(is_written.then_some(settings))
    }
}

/// Returns the settings after a change.
fn changed(
    before: InboxSettings,
    change: SettingsChange,
    version: u64,
    now: Millis,
) -> InboxSettings {
    let muted_until = match change.muted_until {
        Some(until) => Some(until).filter(|&until| until > now),
        None => before.muted_until,
    };
    InboxSettings {
        version,
        muted_until,
        push: change.push.unwrap_or(before.push),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_named_stays_and_a_time_that_has_passed_ends_the_muting() {
        let change = |muted_until, push| SettingsChange { muted_until, push };
        let muted = changed(InboxSettings::default(), change(Some(50), None), 7, 10);
        let of = |settings: InboxSettings| (settings.version, settings.muted_until, settings.push);
        assert_eq!(of(muted), (7, Some(50), true));
        let off = changed(muted, change(None, Some(false)), 8, 60);
        assert_eq!(of(off), (8, Some(50), false));
        for past in [0, -1, 60] {
            let ended = changed(off, change(Some(past), None), 9, 60);
            assert_eq!(of(ended), (9, None, false));
        }
    }
}
