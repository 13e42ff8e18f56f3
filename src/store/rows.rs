//! The rows of the store, as values.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::model::{
    ConversationId, Details, Entry, Epoch, GatewayId, Kind, LEVEL_MAX, Last, Level, Millis,
    Participant, Seq, UserId,
};

/// A position of a log as one owner wrote it. The key is conversation, position, epoch.
#[derive(PartialEq, Eq, Debug)]
pub struct Row<T> {
    pub record: Arc<T>,
    pub epoch: Epoch,
    /// The position up to which the owner had settled everything when it wrote this row.
    pub settled: u64,
}

// Derived, it would require that the record can be cloned.
impl<T> Clone for Row<T> {
    fn clone(&self) -> Self {
        Self {
            record: self.record.clone(),
            ..*self
        }
    }
}

/// A row of the log of messages. Its position is the seq.
pub type LogRow = Row<Entry>;

/// The end of a log, which a takeover reads.
#[derive(PartialEq, Eq, Debug)]
pub struct Tail<T> {
    pub rows: Vec<Row<T>>,
    /// The position up to which everything is settled, see [`super::Store::set_settled`].
    pub settled: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendRow {
    pub epoch: Epoch,
    pub seq: Seq,
}

/// A conversation's details. Each membership or details entry writes them; `seq` is that entry's seq.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConversationRow {
    pub details: Details,
    pub participant_count: u64,
    pub seq: Seq,
}

/// A participant. Role, joined and left are as of entry `seq`; the watermarks have their own order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParticipantRow {
    pub participant: Participant,
    pub seq: Seq,
}

/// The effects of a committed entry on the conversation and its participants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Applied {
    pub conversation: ConversationRow,
    pub participants: Vec<ParticipantRow>,
    pub inbox: Vec<InboxWrite>,
}

/// The watermarks of one participant. They only increase.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mark {
    pub user: UserId,
    pub read_seq: Option<Seq>,
    pub delivered_seq: Option<Seq>,
}

/// The inbox's view of a conversation. The one with the highest `seq` replaces the others completely.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InboxSummary {
    pub seq: Seq,
    pub kind: Kind,
    pub name: Option<String>,
    pub joined_seq: Seq,
    /// The newest entry. Absent for channels, whose heads are looked up when the inbox is read.
    pub last: Option<Last>,
}

/// An insert or update of one inbox row. `read_seq` also raises the participant's watermark.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InboxWrite {
    pub user: UserId,
    pub conversation: ConversationId,
    /// The kind of the conversation, from which the place of the participant's row follows.
    pub kind: Kind,
    #[serde(rename = "face")]
    pub summary: Option<InboxSummary>,
    pub read_seq: Option<Seq>,
    pub left_seq: Option<Seq>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InboxRow {
    pub conversation: ConversationId,
    /// Absent if a watermark was stored before the row itself. Earlier builds call it `face`.
    #[serde(rename = "face")]
    pub summary: Option<InboxSummary>,
    pub read_seq: Seq,
    pub left_seq: Option<Seq>,
}

impl InboxRow {
    #[must_use]
    pub fn empty(conversation: ConversationId) -> Self {
        Self {
            conversation,
            summary: None,
            read_seq: 0,
            left_seq: None,
        }
    }

    /// Applies a write to the row, by the rules of the store.
    pub fn merge(
        &mut self,
        summary: Option<InboxSummary>,
        read_seq: Option<Seq>,
        left_seq: Option<Seq>,
    ) {
        if let Some(summary) = summary
            && self
                .summary
                .as_ref()
                .is_none_or(|mine| mine.seq <= summary.seq)
        {
            self.summary = Some(summary);
        }
        self.read_seq = self.read_seq.max(read_seq.unwrap_or_default());
        self.left_seq = self.left_seq.max(left_seq);
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PublicRow {
    pub conversation: ConversationId,
    pub kind: Kind,
    pub name: Option<String>,
    pub created_at: Millis,
}

/// A page of the public conversations.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PublicPage {
    pub rows: Vec<PublicRow>,
    /// The id after which the next page begins. `None` at the end.
    pub next: Option<ConversationId>,
}

/// A record that a gateway wrote to a conversation in this minute. The repair after a crash reads these.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Activity {
    pub gateway: GatewayId,
    pub minute: u32,
}

/// A gateway's heartbeat. The gateway is alive if its counter increases.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Heartbeat {
    /// The address for its peers, or empty if it does not take connections.
    pub address: String,
    pub counter: u64,
    /// The highest level that the gateway supports. A heartbeat of a build that states none has level 0.
    pub level: Level,
}

/// A version of the ring.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RingRow {
    pub version: Epoch,
    pub members: Vec<GatewayId>,
    /// The level of the stored format and of the messages. It never falls. Builds that state no level do not send it.
    #[serde(default)]
    pub level: Level,
}

impl RingRow {
    /// Returns the first version of a store on which no gateway has run. There is no earlier build to wait for, so it
    /// begins with the highest level.
    #[must_use]
    pub fn first(members: Vec<GatewayId>) -> Self {
        Self {
            version: 1,
            members,
            level: LEVEL_MAX,
        }
    }

    /// Returns the next version, with these members and the same level.
    #[must_use]
    pub fn next(&self, members: Vec<GatewayId>) -> Self {
        Self {
            version: self.version + 1,
            members,
            level: self.level,
        }
    }
}
