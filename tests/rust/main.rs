//! Tests that need the types of the gateway: rules, stores, simulations. `tests/blackbox` tests the
//! running program from outside.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod architecture;
mod broken;
mod cluster;
mod golden;
mod lost;
mod panics;
mod paused;
mod push;
mod ring;
mod simulation;
mod stores;

/// A simulation spends a fifth of its time in the allocator of the system, and half as much in this one.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Makes the folder of the project the current one: cargo starts tests in the folder of their package.
fn enter_project() {
    let project = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    std::env::set_current_dir(project).unwrap();
}
