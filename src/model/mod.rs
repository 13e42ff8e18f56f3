//! The words of the domain: plain values, no I/O, no clock. Every room speaks them; this one imports nothing.

mod conversation;
mod ids;
pub mod limits;
mod log;
pub mod weight;

pub use conversation::{Details, Kind, Participant, Posting, Role};
pub use ids::{
    ClientId, ConversationId, GatewayId, InvalidId, MessageId, SessionId, Topic, UserId,
};
pub use log::{
    Attachment, Content, Cursor, Draft, Entry, EntryKind, Epoch, Last, Millis, Rev, Seq,
    SystemChange,
};
