//! Consumers of the log: webhooks and push. Each follows the log and the changes of every conversation with a durable
//! offset, and content is read when it is delivered. docs/consumers.md has the rules.

pub mod push;
