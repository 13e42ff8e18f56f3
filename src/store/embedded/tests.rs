use super::*;
use crate::{
    mutation::{Mutation, break_rule},
    tasks::Tasks,
};

/// Returns a writer that runs on this thread, because a broken rule applies to one thread only.
fn writer(folder: &Path) -> (Writer, Embedded) {
    let store = Embedded::open(folder, 1 << 20).unwrap();
    let database = store.0.database.read().unwrap().clone();
    (store.0.writer(database.unwrap()), store)
}

fn cell(key: &[u8], timestamp: u64) -> Cell {
    Cell {
        key: key.to_vec(),
        timestamp,
        value: Vec::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_keeps_the_promises_of_stores() {
    let folder = tempfile::tempdir().unwrap();
    let store = Embedded::open(folder.path(), 1 << 20).unwrap();
    crate::store::conformance::check(&store).await.unwrap();
    store.0.close().await.unwrap();
}

/// A flush goes on after the last write. It removes journals and begins others.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_during_a_flush_leaves_a_whole_directory() {
    const WRITES: u64 = 80;
    let folder = tempfile::tempdir().unwrap();
    for round in 0..2 {
        let store = Embedded::open(folder.path(), 1 << 20).unwrap();
        for n in 0..WRITES {
            let mut cell = cell(&[b'm', round, n as u8], n);
            cell.value = vec![0; 1 << 20];
            rand::fill(&mut cell.value[..]);
            store.0.write("write", vec![cell], false).await.unwrap();
        }
        store.0.close().await.unwrap();
        let damages = journals::damages(folder.path()).unwrap();
        assert_eq!(damages, Vec::<String>::new());
        // What still runs would change them now.
        drop(store);
        let damages = journals::damages(folder.path()).unwrap();
        assert_eq!(damages, Vec::<String>::new());
    }
}

#[tokio::test]
async fn what_cannot_be_read_fails_its_writes_and_poisons_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (writer, store) = writer(folder.path());
    let write = |cells: Vec<Cell>| {
        let (done, result) = oneshot::channel();
        let durable = true;
        let write = Command::Write {
            cells,
            durable,
            done,
        };
        (write, result)
    };
    let group = || {
        let (one, first) = write(vec![cell(b"m-log", 0), cell(b"c-row", 1)]);
        let (two, second) = write(vec![cell(b"m-other", 0)]);
        (vec![one, two], [first, second])
    };
    break_rule(Some(Mutation::Read));
    let (commands, results) = group();
    writer.commit(commands);
    break_rule(None);
    for result in results {
        let refused = result.await.unwrap();
        assert!(
            matches!(refused, Err(Error::Unavailable { .. })),
            "{refused:?}"
        );
    }
    store.0.healthy().unwrap();
    for key in [&b"m-log"[..], b"c-row", b"m-other"] {
        let there = writer.keyspaces.of(key).get(key).unwrap();
        assert!(there.is_none(), "nothing of the group is written");
    }
    let (commands, results) = group();
    writer.commit(commands);
    for result in results {
        result.await.unwrap().unwrap();
    }
    store.0.close().await.unwrap();
}

/// Rule [atomic]: a read sees all cells of a write or none, however it reads.
#[tokio::test(flavor = "multi_thread")]
async fn a_read_sees_a_write_whole() {
    const WRITES: u64 = 3_000;
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path(), 1 << 20).unwrap());
    let keys = [&b"m-one"[..], b"m-two"];
    let writing = store.clone();
    let write = Tasks::default().spawn(async move {
        for number in 1..=WRITES {
            let cells = keys.map(|key| cell(key, number)).to_vec();
            writing.0.write("write", cells, false).await.unwrap();
        }
    });
    let versions = |cells: Vec<Cell>| cells.iter().map(|cell| cell.timestamp).collect::<Vec<_>>();
    while !write.is_finished() {
        let range = Range {
            from: keys[0].to_vec(),
            to: b"m-x".to_vec(),
        };
        let got = versions(
            store
                .0
                .get(keys.map(<[u8]>::to_vec).to_vec())
                .await
                .unwrap(),
        );
        let scanned = versions(store.0.scan(range, 10, false).await.unwrap());
        for read in [got, scanned] {
            assert!(matches!(read[..], [] | [_, _]), "{read:?}");
            assert!(read.windows(2).all(|both| both[0] == both[1]), "{read:?}");
        }
    }
    write.await.unwrap();
    store.0.close().await.unwrap();
}
