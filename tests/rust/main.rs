//! What is tested in Rust: the rules, the stores, and bad input. The front door is tested from outside,
//! in `tests/blackbox`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod architecture;
mod cluster;
mod golden;
mod hostile;
mod panics;
mod ring;
mod simulation;
mod stores;
