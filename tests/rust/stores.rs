//! Runs the conformance suite of `Store` on every store.

use std::{collections::BTreeMap, time::Duration};

use chat_gateway::{
    model::UserId,
    store::{
        LogRow, Store,
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

/// Three gateways open an empty cluster at once, each through another node. The keyspace is kept: rows that reach a node
/// after it has dropped their table can leave that node unable to announce any schema, and no gateway starts then.
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
}

/// Rule [sweep]: a text that a late hint brings back is erased once more after ten days.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: run tests/cassandra/cassandra start 3 and set CASSANDRA_NODES=127.0.0.1:9042,…"]
async fn cassandra_keeps_texts_erased() {
    let nodes =
        std::env::var("CASSANDRA_NODES").expect("CASSANDRA_NODES must name the nodes of a cluster");
    let nodes: Vec<String> = nodes.split(',').map(Into::into).collect();
    let keyspace = format!("erasures_{}", uuid::Uuid::new_v4().simple());
    let settings = cassandra(&keyspace, &nodes);
    let store = Cassandra::open(&settings, &Tasks::default()).await.unwrap();
    let marked = conformance::write_marked(&store, "marker").await.unwrap();
    let erasures = std::slice::from_ref(&marked.erasure);
    store.erase(marked.id, erasures).await.unwrap();
    // A row of a dead owner, which comes when the seq was already erased.
    let late = LogRow {
        epoch: 9,
        ..marked.rows[0].clone()
    };
    store.append(marked.id, &[late], None).await.unwrap();
    let has_marker = async || {
        let log = store.tail(marked.id, 100).await.unwrap();
        format!("{log:?}").contains("marker")
    };
    store.sweep().await.unwrap();
    assert!(has_marker().await, "it is not due yet");
    // As if ten full days had passed.
    let (session, _) = connect(&settings).await.unwrap();
    session.use_keyspace(&keyspace, false).await.unwrap();
    let columns = "day, shard, conversation_id, place, position, sender, client_id";
    let all = format!("SELECT {columns} FROM erasures");
    type Row = (i32, i32, uuid::Uuid, String, i64, String, uuid::Uuid);
    let records = async || {
        let found = session.query_unpaged(all.as_str(), ()).await.unwrap();
        let rows = found.into_rows_result().unwrap();
        rows.rows::<Row>()
            .unwrap()
            .collect::<Result<Vec<_>, _>>()
            .unwrap()
    };
    let recorded = records().await;
    assert!(recorded.len() > 1);
    let again = format!("INSERT INTO erasures ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)");
    for (day, shard, id, place, position, sender, client_id) in recorded.iter().cloned() {
        let earlier = (day - 11, shard, id, place, position, sender, client_id);
        let inserted = session.query_unpaged(format!("{again} USING TIMESTAMP 0"), earlier);
        inserted.await.unwrap();
    }
    for _ in 0..8 {
        store.sweep().await.unwrap();
    }
    assert!(!has_marker().await);
    assert_eq!(
        records().await,
        recorded,
        "records that are not due, or were not removed"
    );
    store.close().await.unwrap();
}
