//! The domain's values: plain types without I/O or a clock. Every module may use them; they use no other module.

mod attachment;
mod change;
mod consumer;
mod conversation;
mod device;
mod ids;
mod level;
pub mod limits;
mod log;
mod position;
pub mod text;
pub mod weight;

pub use attachment::{
    Attachment, FileFacts, FileNotice, FileResult, FileState, Metadata, UploadBegun, UploadLimits,
    file_ids,
};
pub use change::{
    Change, ChangeOp, ContentState, DeletedEntry, DeletedSeqs, EditedContent, EntryState,
    ReactionState, Reactions, reactions_bytes,
};
pub use consumer::ConsumerName;
pub use conversation::{Details, Kind, Participant, Posting, Role};
pub use device::{Device, PushContent, PushProvider, SettingsChange};
pub use ids::{
    AttachmentId, ClientId, ConversationId, GatewayId, InvalidId, MessageId, Rank, SessionId,
    Topic, UserId,
};
pub use level::{CurrentLevel, LEVEL_MAX, Level};
pub use log::{Content, Draft, Entry, EntryKind, Last, Newest, SystemChange};
pub use position::{Cursor, Epoch, Millis, Rev, Seq};
