//! What is tested in Rust: the rules, the stores, and bad input. The front door is tested from outside,
//! in `tests/blackbox`.

mod architecture;
mod hostile;
mod simulation;
mod stores;
