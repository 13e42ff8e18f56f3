//! What is stored, as values.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::model::{
    ConversationId, Details, Entry, Epoch, GatewayId, Kind, Last, Millis, Participant, Seq, UserId,
};

/// One place in a log, as one owner wrote it. Key: conversation, seq, epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogRow {
    pub entry: Arc<Entry>,
    pub epoch: Epoch,
    /// The owner had settled everything up to here when it wrote this row.
    pub committed: Seq,
}

/// What a takeover reads.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tail {
    pub rows: Vec<LogRow>,
    /// See [`super::Store::set_settled`].
    pub settled: Seq,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendRow {
    pub epoch: Epoch,
    pub seq: Seq,
}

/// Written by each membership or details entry; `seq` is that entry's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConversationRow {
    pub details: Details,
    pub participant_count: u64,
    pub seq: Seq,
}

/// Role, joined and left are of entry `seq`; the watermarks have their own order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParticipantRow {
    pub participant: Participant,
    pub seq: Seq,
}

/// What follows from a committed entry about the conversation itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Applied {
    pub conversation: ConversationRow,
    pub participants: Vec<ParticipantRow>,
    pub inbox: Vec<InboxWrite>,
}

/// Watermarks of one participant. They only go up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mark {
    pub user: UserId,
    pub read_seq: Option<Seq>,
    pub delivered_seq: Option<Seq>,
}

/// What the inbox shows of a conversation; the one with the highest `seq` wins as a whole.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InboxFace {
    pub seq: Seq,
    pub kind: Kind,
    pub name: Option<String>,
    pub joined_seq: Seq,
    /// Absent for channels, whose heads are asked when the inbox is read.
    pub last: Option<Last>,
}

/// An upsert of one inbox row. `read_seq` raises the participant's watermark too.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InboxWrite {
    pub user: UserId,
    pub conversation: ConversationId,
    /// Tells where the participant's row is.
    pub kind: Kind,
    pub face: Option<InboxFace>,
    pub read_seq: Option<Seq>,
    pub left_seq: Option<Seq>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InboxRow {
    pub conversation: ConversationId,
    /// A mark may be stored before the row it marks.
    pub face: Option<InboxFace>,
    pub read_seq: Seq,
    pub left_seq: Option<Seq>,
}

impl InboxRow {
    #[must_use]
    pub fn empty(conversation: ConversationId) -> Self {
        Self {
            conversation,
            face: None,
            read_seq: 0,
            left_seq: None,
        }
    }

    /// Lays a write over the row: the same rules as in the store.
    pub fn merge(&mut self, face: Option<InboxFace>, read_seq: Option<Seq>, left_seq: Option<Seq>) {
        if let Some(face) = face
            && self.face.as_ref().is_none_or(|mine| mine.seq <= face.seq)
        {
            self.face = Some(face);
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

/// Some of the public conversations.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PublicPage {
    pub rows: Vec<PublicRow>,
    /// After which to go on; none at the end.
    pub next: Option<ConversationId>,
}

/// "This gateway wrote to the conversation in this minute": the map of a crash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Activity {
    pub gateway: GatewayId,
    pub minute: u32,
}

/// A gateway's sign of life. Who sees the counter move knows that it lives.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Heartbeat {
    /// Where its peers reach it; empty if it wants none.
    pub address: String,
    pub counter: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RingRow {
    pub version: Epoch,
    pub members: Vec<GatewayId>,
}
