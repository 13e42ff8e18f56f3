//! The chat gateway. ARCHITECTURE.md is the map. The modules, from the bottom up: `model`, `protocol`, `store`, `chat`,
//! `fanout`, `cluster`, `consumers`, `gateway`. `node` connects them, and `command` is the command line.

pub mod alone;
pub mod auth;
pub mod chat;
pub mod clock;
pub mod cluster;
pub mod command;
pub mod config;
pub mod consumers;
pub mod fanout;
pub mod files;
pub mod gateway;
#[cfg(test)]
mod golden;
pub mod import;
pub mod memory;
pub mod mend;
pub mod model;
mod msgpack;
#[doc(hidden)]
pub mod mutation;
pub mod node;
pub mod private;
pub mod protocol;
pub mod seldom;
pub mod store;
pub mod tasks;
pub mod telemetry;
