//! The keys of cells. They sort in the order of reading, and numbers are big endian. This layout is the on-disk format.

use super::Cell;
use crate::model::{ConversationId, Rev, Seq, UserId};

/// The first byte of all keys of the log. All other keys are those of rows.
pub(in crate::store) const LOG: u8 = b'm';
pub(super) const SENDS: u8 = b's';
pub(super) const CONVERSATION: u8 = b'c';
pub(super) const SETTLED: u8 = b'k';
pub(super) const PARTICIPANT: u8 = b'p';
pub(in crate::store) const INBOX: u8 = b'i';
pub(super) const PUBLIC: u8 = b'g';
pub(super) const ACTIVITY: u8 = b'a';
pub(in crate::store) const LAST_SEEN: u8 = b'u';
pub(in crate::store) const RING: u8 = b'v';
pub(super) const HEARTBEAT: u8 = b'h';
pub(in crate::store) const CHANGES: u8 = b'r';
pub(super) const REACTORS: u8 = b'e';
pub(super) const MINE: u8 = b'y';

/// Uploaded files, the messages that have them, the work of sweeps, and the bytes that users have uploaded.
pub(super) const FILE: u8 = b'F';
pub(super) const REFERENCE: u8 = b'R';
pub(super) const WORK: u8 = b'Q';
pub(super) const USAGE: u8 = b'Z';

/// The offsets of consumers, the conversations in which they lag, their states, and the events that they skipped.
pub(super) const OFFSET: u8 = b'O';
pub(super) const LAGGING: u8 = b'L';
pub(super) const CONSUMER: u8 = b'N';
pub(super) const SKIPPED: u8 = b'X';
/// The devices of users, and the owners of device tokens.
pub(super) const DEVICES: u8 = b'D';
pub(super) const TOKEN: u8 = b'T';

/// Columns of the state of an entry.
pub(super) const CONTENT: u8 = b's';
pub(super) const REACTIONS: u8 = b'r';

/// Columns of the marks of a conversation.
pub(super) const CHANGES_SETTLED: u8 = b'r';
/// The deleted seqs, in the marks of a conversation and in an inbox row.
pub(super) const DELETED: u8 = b'x';

pub(super) const MEMBERSHIP: u8 = b'm';
pub(super) const READ: u8 = b'r';
pub(super) const DELIVERED: u8 = b'd';
/// The summary of an inbox row.
pub(super) const SUMMARY: u8 = b'g';
pub(super) const REV: u8 = b'v';
pub(super) const LEFT: u8 = b'l';
/// Until when a user muted the conversation, and whether its messages are pushed.
pub(super) const MUTED: u8 = b'm';
pub(super) const PUSH: u8 = b'p';
/// Columns of an inbox row: `SUMMARY`, `READ`, `LEFT`, `DELETED`, `REV`, `MUTED` and `PUSH`.
pub(super) const INBOX_COLUMNS: usize = 7;

/// The initial capacity of a key, enough for most users.
const KEY_BYTES: usize = 80;

pub(super) struct Key(pub(super) Vec<u8>);

impl Key {
    pub(super) fn new(table: u8) -> Self {
        let mut key = Vec::with_capacity(KEY_BYTES);
        key.push(table);
        Self(key)
    }

    pub(super) fn conversation(self, id: ConversationId) -> Self {
        self.bytes(id.0.as_bytes())
    }

    /// Appends a user id and a zero.
    pub(super) fn user(self, user: &UserId) -> Self {
        self.text(user.as_str())
    }

    /// Appends a user id, an emoji or the name of a consumer, and a zero. They contain no control characters, so the zero ends them.
    pub(super) fn text(self, text: &str) -> Self {
        self.bytes(text.as_bytes()).bytes(&[0])
    }

    pub(super) fn u64(self, number: u64) -> Self {
        self.bytes(&number.to_be_bytes())
    }

    pub(super) fn u32(self, number: u32) -> Self {
        self.bytes(&number.to_be_bytes())
    }

    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn cell(self, timestamp: u64, value: Vec<u8>) -> Cell {
        Cell {
            key: self.0,
            timestamp,
            value,
        }
    }
}

pub(super) fn log_key(conversation: ConversationId, seq: Seq) -> Key {
    Key::new(LOG).conversation(conversation).u64(seq)
}

pub(super) fn change_key(conversation: ConversationId, rev: Rev) -> Key {
    Key::new(CHANGES).conversation(conversation).u64(rev)
}

/// Returns the prefix of the users who reacted to an entry.
pub(super) fn reactors_key(conversation: ConversationId, seq: Seq) -> Key {
    Key::new(REACTORS).conversation(conversation).u64(seq)
}

pub(super) fn reactor_key(
    conversation: ConversationId,
    seq: Seq,
    emoji: &str,
    user: &UserId,
) -> Key {
    reactors_key(conversation, seq).text(emoji).user(user)
}

/// Returns the prefix of a user's reactions in a conversation.
pub(super) fn mine_key(conversation: ConversationId, user: &UserId) -> Key {
    Key::new(MINE).conversation(conversation).user(user)
}

pub(super) fn participant_key(conversation: ConversationId, user: &UserId) -> Key {
    Key::new(PARTICIPANT).conversation(conversation).user(user)
}

pub(super) fn inbox_key(user: &UserId, conversation: ConversationId) -> Key {
    Key::new(INBOX).user(user).conversation(conversation)
}

#[derive(Clone, Debug)]
pub struct Range {
    pub from: Vec<u8>,
    pub to: Vec<u8>,
}

impl Range {
    pub(super) fn prefix(prefix: &Key) -> Self {
        Self {
            from: prefix.0.clone(),
            to: after(&prefix.0),
        }
    }
}

/// Returns the first key that does not start with `prefix`.
pub(super) fn after(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![u8::MAX; 64]
}

/// Bytes of the key of a row of the log: the letter, the conversation, the seq and the epoch.
const LOG_ROW_BYTES: usize = 33;
/// The position of the epoch in the key of a row of the log.
const LOG_EPOCH_AT: usize = 25;

/// Whether cells of this key do not change, so that they are written without reading the stored timestamp. Rows of the
/// log change once, if they are erased: then their timestamp is 1. States of entries, which have epoch 0, do change.
pub(in crate::store) fn immutable(key: &[u8]) -> bool {
    match key.first() {
        Some(&(SENDS | ACTIVITY)) => true,
        Some(&LOG) => key.len() == LOG_ROW_BYTES && key[LOG_EPOCH_AT..] != [0; 8],
        _ => false,
    }
}
