//! The keys of cells. They sort in the order of reading, and numbers are big endian. This layout is the on-disk format.

use super::Cell;
use crate::model::{ConversationId, Seq, UserId};

/// The first byte of all keys of the log. All other keys are those of rows.
pub(in crate::store) const LOG: u8 = b'm';
pub(super) const SENDS: u8 = b's';
pub(super) const CONVERSATION: u8 = b'c';
pub(super) const SETTLED: u8 = b'k';
pub(super) const PARTICIPANT: u8 = b'p';
pub(super) const INBOX: u8 = b'i';
pub(super) const PUBLIC: u8 = b'g';
pub(super) const ACTIVITY: u8 = b'a';
pub(super) const LAST_SEEN: u8 = b'u';
pub(super) const RING: u8 = b'v';
pub(super) const HEARTBEAT: u8 = b'h';

pub(super) const MEMBERSHIP: u8 = b'm';
pub(super) const READ: u8 = b'r';
pub(super) const DELIVERED: u8 = b'd';
pub(super) const SUMMARY: u8 = b'f';
pub(super) const LEFT: u8 = b'l';

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

    /// Appends a user id and a zero. User ids contain no control characters, so the zero ends them.
    pub(super) fn user(self, user: &UserId) -> Self {
        self.bytes(user.as_str().as_bytes()).bytes(&[0])
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

/// Whether cells of this key never change, so that they are written without reading the stored timestamp.
pub(in crate::store) fn immutable(key: &[u8]) -> bool {
    matches!(key.first(), Some(&(LOG | SENDS | ACTIVITY)))
}
