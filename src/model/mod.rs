//! The domain's values: plain types without I/O or a clock. Every module may use them; they use no other module.

mod change;
mod conversation;
mod ids;
mod level;
pub mod limits;
mod log;
pub mod weight;

pub use change::{
    Change, ChangeOp, ContentState, DeletedEntry, DeletedSeqs, EditedContent, EntryState,
    ReactionState, Reactions, is_emoji, reactions_bytes,
};
pub use conversation::{Details, Kind, Participant, Posting, Role};
pub use ids::{
    ClientId, ConversationId, GatewayId, InvalidId, MessageId, SessionId, Topic, UserId,
};
pub use level::{CurrentLevel, LEVEL_CHANGES, LEVEL_MAX, LEVEL_STATED, Level};
pub use log::{
    Attachment, Content, Cursor, Draft, Entry, EntryKind, Epoch, Last, Millis, Newest, Rev, Seq,
    SystemChange,
};
