//! Consumers of the log: webhooks and push. Each follows the log and the changes of every conversation with a durable
//! offset, and content is read when it is delivered. docs/consumers.md has the rules.

pub mod address;
mod control;
mod follower;
pub mod http;
pub mod push;
mod reading;
mod replays;
mod runner;
mod scan;
mod states;
pub mod webhooks;

pub use control::{Control, SkippedAfter, Status, Tested};
pub use follower::{Follower, Line, Settings};
pub use runner::{Consumers, Push};
pub use scan::SCAN_EVERY;
pub use states::States;
pub use webhooks::dispatcher::Webhook;
