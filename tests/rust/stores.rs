//! Runs the conformance suite of `Store` on every store.

use std::{collections::BTreeMap, time::Duration};

use chat_gateway::{
    model::UserId,
    store::{
        Store,
        cassandra::{Cassandra, Settings, connect, schema::Keyspace},
        conformance,
        embedded::Embedded,
        simulated::{Faults, Simulated},
    },
    tasks::Tasks,
};
use scylla::statement::Consistency;

const CACHE: u64 = 8 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_store_keeps_its_promises() {
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(directory.path(), CACHE).unwrap();
    conformance::check(&store).await.unwrap();
    store.close().await.unwrap();
    drop(store);
    // The suite must also pass on a store that already has data.
    let store = Embedded::open(directory.path(), CACHE).unwrap();
    let before = store.ring().await.unwrap();
    assert!(before.is_some(), "the ring is lost");
    conformance::check(&store).await.unwrap();
}

#[tokio::test]
async fn the_simulated_store_keeps_its_promises() {
    conformance::check(&Simulated::new(1, Faults::NONE))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_closed_store_refuses_writes() {
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(directory.path(), CACHE).unwrap();
    store.close().await.unwrap();
    let error = store
        .set_last_seen(&[(UserId::new("alice").unwrap(), 1)])
        .await;
    assert!(error.unwrap_err().to_string().contains("closed"));
}

fn cassandra(keyspace: &str, nodes: &[String]) -> Settings {
    Settings {
        nodes: nodes.to_vec(),
        keyspace: Keyspace {
            name: keyspace.into(),
            replication: BTreeMap::from([("replication_factor".into(), 3)]),
        },
        datacenter: None,
        consistency: Consistency::LocalQuorum,
        user: None,
        tls: None,
        timeout: Duration::from_secs(5),
        in_flight_max: 32,
        create_schema: true,
    }
}

/// Three gateways open an empty cluster at once, each through another node.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: run tests/cassandra/cassandra start 3 and set CASSANDRA_NODES=127.0.0.1:9042,…"]
async fn cassandra_keeps_its_promises() {
    let nodes =
        std::env::var("CASSANDRA_NODES").expect("CASSANDRA_NODES must name the nodes of a cluster");
    let mut nodes: Vec<String> = nodes.split(',').map(Into::into).collect();
    let keyspace = format!("conformance_{}", uuid::Uuid::new_v4().simple());
    let tasks = Tasks::default();
    let mut opening = Vec::new();
    for _ in 0..3 {
        let settings = cassandra(&keyspace, &nodes);
        nodes.rotate_left(1);
        let tasks = tasks.clone();
        opening.push(
            tasks
                .clone()
                .spawn(async move { Cassandra::open(&settings, &tasks).await }),
        );
    }
    let mut stores = Vec::new();
    for open in opening {
        stores.push(open.await.unwrap().unwrap());
    }
    for store in &stores {
        conformance::check(store).await.unwrap();
    }
    for store in stores {
        store.close().await.unwrap();
    }
    let session = connect(&cassandra(&keyspace, &nodes)).await.unwrap();
    // A busy cluster may take longer for it than for a request.
    let drop = format!("DROP KEYSPACE IF EXISTS {keyspace}");
    let dropped = async { while session.query_unpaged(drop.as_str(), ()).await.is_err() {} };
    let limit = std::time::Duration::from_secs(60);
    tokio::time::timeout(limit, dropped).await.unwrap();
}
