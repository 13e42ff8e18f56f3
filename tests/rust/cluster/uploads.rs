//! Simulates users who begin uploads through several gateways at once: what they may upload in a day holds over all of them,
//! also while the home that counts it changes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use chat_gateway::{
    clock,
    model::{UploadBegun, UploadLimits},
    mutation::{Mutation, break_rule},
    store::{FileStore as _, simulated::Faults},
};
use tokio::time::sleep;

use super::{
    paused, setting,
    world::{Consuming, World, create, spawn, user},
    writers::ask,
};
use crate::broken::{find, require};

/// Bytes of each upload.
const BYTES: u64 = 1 << 20;
/// Uploads that the limit of a day allows: so many that users begin them during most of a run.
const ALLOWED: u64 = 1_000;
const LIMITS: UploadLimits = UploadLimits {
    bytes_per_day: ALLOWED * BYTES,
    per_minute: 1_000_000,
};
/// Clients of the user, each of which begins one upload after the other.
const CLIENTS: usize = 8;
/// Seeds within which the broken rule must be found.
const SEEDS_TO_FIND: u64 = 5;

async fn begin(world: Arc<World>, counted: Arc<AtomicU64>) {
    loop {
        sleep(world.millis(0, 400)).await;
        if !world.sending.load(Ordering::Relaxed) {
            continue;
        }
        let begun = ask(&world, |cluster| async move {
            let users = &cluster.users;
            users.begin_upload(&user(0), BYTES, LIMITS).await
        });
        if begun.await == Some(UploadBegun::Counted) {
            counted.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Runs one seed. Returns the uploads that were allowed, and the bytes that are stored of them.
async fn run(seed: u64, faults: Faults, churns: bool) -> (u64, u64) {
    let world = World::new(seed, faults, false, false, None, Consuming::default());
    for _ in 0..3 {
        world.start();
    }
    create(&world).await;
    // All three have joined.
    sleep(Duration::from_secs(10)).await;
    let counted = Arc::new(AtomicU64::new(0));
    for _ in 0..CLIENTS {
        spawn(begin(world.clone(), counted.clone()));
    }
    spawn(world.clone().churn());
    world.sending.store(true, Ordering::Relaxed);
    world.churning.store(churns, Ordering::Relaxed);
    sleep(Duration::from_secs(60)).await;
    world.churning.store(false, Ordering::Relaxed);
    world.sending.store(false, Ordering::Relaxed);
    // What is on its way is carried out or given up.
    sleep(Duration::from_secs(30)).await;
    let stored = loop {
        match world.store.usage(&user(0), clock::today()).await {
            Ok(bytes) => break bytes,
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    };
    (counted.load(Ordering::Relaxed), stored)
}

#[test]
fn gateways_that_begin_uploads_at_once_allow_as_many_as_one() {
    for seed in 0..setting("CLUSTER_SEEDS", 5) {
        let (counted, stored) = paused(seed, run(seed, Faults::NONE, false));
        assert_eq!((counted, stored), (ALLOWED, ALLOWED * BYTES), "seed {seed}");
    }
}

/// What is wrong with the counts of a run.
fn violation((counted, stored): (u64, u64)) -> Option<String> {
    // An upload may be counted twice, but each one that was allowed is counted.
    (counted > ALLOWED || stored < counted * BYTES)
        .then(|| format!("{counted} uploads, {stored} bytes"))
}

#[test]
fn uploads_are_counted_while_homes_change() {
    let mut all = 0;
    let (from, seeds) = (setting("CLUSTER_FROM", 0), setting("CLUSTER_SEEDS", 30));
    for seed in from..from + seeds {
        let counts = paused(seed, run(seed, Faults::BAD_DAY, true));
        all += counts.0;
        assert_eq!(violation(counts), None, "seed {seed}");
    }
    println!("{seeds} seeds, {all} uploads");
    assert!(all > seeds * 10, "{all}");
}

#[test]
fn gateways_that_count_for_themselves_are_found() {
    let rule = Mutation::UploadHome;
    require([find(
        rule,
        0..SEEDS_TO_FIND,
        &["uploads"],
        |seed, is_broken| {
            break_rule(is_broken.then_some(rule));
            let counts = paused(seed, run(seed, Faults::BAD_DAY, true));
            break_rule(None);
            violation(counts).into_iter().collect()
        },
    )]);
}
