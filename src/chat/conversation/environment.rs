//! The parts that all owners of a gateway share.

use std::{sync::Arc, time::Duration};

use metrics::{Counter, counter};

use crate::{
    chat::{
        following::Consumers, inbox::InboxWriter, inbox_limits::InboxLimits, lease::Lease,
        publish::Publish, unfinished::Unfinished, versions::Versions,
    },
    clock,
    memory::Memory,
    model::GatewayId,
    store::{Activity, Store},
};

/// The part of the configuration that owners of conversations use.
#[derive(Clone)]
pub struct Settings {
    pub body_bytes_max: usize,
    pub group_participants_max: usize,
    /// Conversations of one user, with those that the user has left. `None` for the import.
    pub conversations_per_user_max: Option<usize>,
    /// The time without operations after which an owner closes its conversation.
    pub idle: Duration,
    /// The time after which an operation is answered with `unavailable`. An entry that it appended may still be committed.
    pub operation_timeout: Duration,
    /// Conversations open at once. Above this, the least recently used one is evicted.
    pub open_max: usize,
    /// The memory that all open conversations and the pages of their history may use.
    pub memory: Memory,
    /// Bytes after which a page of history ends.
    pub page_bytes_max: usize,
    /// The time in which a message may be edited. `None` means for ever.
    pub edit_window: Option<Duration>,
    /// The time for which reactions in channels and large groups are gathered before they are published.
    pub reactions_coalesce: Duration,
    /// The consumers of the log. `None` if there are none.
    pub consumers: Option<Arc<dyn Consumers>>,
}

#[cfg(test)]
impl Settings {
    /// Settings for tests of owners, which change what they are about.
    pub(in crate::chat) fn for_tests() -> Self {
        Self {
            body_bytes_max: 1000,
            group_participants_max: 5000,
            conversations_per_user_max: None,
            idle: Duration::from_secs(300),
            operation_timeout: Duration::from_secs(60),
            open_max: 100,
            memory: Memory::of_mib(64),
            page_bytes_max: 1 << 20,
            edit_window: None,
            reactions_coalesce: Duration::from_millis(250),
            consumers: None,
        }
    }
}

/// The parts that all owners of this gateway share.
pub(in crate::chat) struct Environment {
    pub gateway: GatewayId,
    pub store: Arc<dyn Store>,
    pub publish: Arc<dyn Publish>,
    pub inbox: Arc<InboxWriter>,
    pub inbox_limits: InboxLimits,
    pub lease: Lease,
    pub settings: Settings,
    pub entries_committed: Counter,
    pub changes_committed: Counter,
    pub unfinished: Unfinished,
    /// The versions of rows that have no seq.
    pub versions: Versions,
}

impl Environment {
    pub(in crate::chat) fn new(
        gateway: GatewayId,
        store: Arc<dyn Store>,
        publish: Arc<dyn Publish>,
        inbox: Arc<InboxWriter>,
        lease: Lease,
        settings: Settings,
    ) -> Self {
        let entries_committed = counter!("chat_entries_committed_total");
        Self {
            gateway,
            store,
            publish,
            inbox,
            inbox_limits: InboxLimits::default(),
            lease,
            settings,
            entries_committed,
            changes_committed: counter!("chat_changes_committed_total"),
            unfinished: Unfinished::default(),
            versions: Versions::default(),
        }
    }

    /// The record of the activity in this minute, once a minute.
    pub(super) fn new_activity(&self, last_minute: &mut u32) -> Option<Activity> {
        let activity = self.activity();
        let is_new = activity.minute != *last_minute;
        *last_minute = activity.minute;
        is_new.then_some(activity)
    }

    /// The row that records that this gateway writes to a conversation in the current minute.
    pub(super) fn activity(&self) -> Activity {
        Activity {
            gateway: self.gateway,
            minute: clock::minute(),
        }
    }
}
