//! One suite for every store.

use chat_gateway::{
    model::UserId,
    store::{
        Store, conformance,
        embedded::Embedded,
        simulated::{Faults, Simulated},
    },
};

const CACHE: u64 = 8 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_store_keeps_its_promises() {
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(directory.path(), CACHE).unwrap();
    conformance::check(&store).await.unwrap();
    store.close().await.unwrap();
    drop(store);
    // And again over what is there by now.
    let store = Embedded::open(directory.path(), CACHE).unwrap();
    let before = store.ring().await.unwrap();
    assert!(before.is_some(), "the ring is still there");
    conformance::check(&store).await.unwrap();
}

#[tokio::test]
async fn the_simulated_store_keeps_its_promises() {
    conformance::check(&Simulated::new(1, Faults::NONE))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_closed_store_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(directory.path(), CACHE).unwrap();
    store.close().await.unwrap();
    let error = store
        .set_last_seen(&[(UserId::new("alice").unwrap(), 1)])
        .await;
    assert!(error.unwrap_err().to_string().contains("closed"));
}
