//! Positions in the log of a conversation, and times.

use serde::{Deserialize, Serialize};

/// The position of an entry in its conversation: 1, 2, 3 … without gaps.
pub type Seq = u64;

/// The position of a change in its conversation's log of edits, deletions and reactions.
pub type Rev = u64;

/// The ring version under which an owner wrote a row.
pub type Epoch = u64;

/// Milliseconds since 1970, UTC. It is shown to people; nothing is ordered by it.
pub type Millis = i64;

/// The position that a client has reached in one conversation. On the wire: `[seq, rev]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Cursor(pub Seq, pub Rev);
