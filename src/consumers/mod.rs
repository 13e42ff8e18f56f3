//! Consumers of the log: webhooks and push. Each follows the log and the changes of every conversation with a durable
//! offset, and content is read when it is delivered. docs/consumers.md has the rules.
mod follower;
mod reading;
mod scan;

pub use follower::{Follower, Line, Settings};
pub use reading::{Happened, Next, read};
pub use scan::{Scan, reload_lost};
