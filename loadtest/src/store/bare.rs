//! Writes the rows of messages to Cassandra with the gateway's driver and nothing else. One statement for each row is
//! the baseline for the gateway; batches show what it could reach.

use std::time::Instant;

use futures_util::{StreamExt, TryStreamExt, future::try_join_all, stream};
use scylla::{
    client::session::Session,
    errors::ExecutionError,
    serialize::row::SerializeRow,
    statement::{
        batch::{Batch, BatchType},
        prepared::PreparedStatement,
    },
    value::{CqlTimestamp, CqlTimeuuid},
};
use uuid::Uuid;

use crate::data::Cluster;

/// Statements in flight.
const IN_FLIGHT: usize = 256;

/// Messages in one batch: as many as an owner has in flight.
const BATCH: u64 = 64;
/// Rows of `sends` in one batch. Each has a partition of its own.
const SENDS_BATCH: usize = 10;

/// How the rows are written.
#[derive(Clone, Copy)]
pub(crate) enum Writing {
    OneByOne,
    InBatches,
}

/// Writes a row of `messages` and a row of `sends` for each message. Returns messages per second.
pub(crate) fn messages(
    cluster: &Cluster,
    count: u64,
    writing: Writing,
    body: impl Fn(u64) -> String + Copy,
) -> anyhow::Result<f64> {
    let Cluster {
        runtime,
        session,
        keyspace,
        ..
    } = cluster;
    let (size, sends_size, at_once) = match writing {
        Writing::OneByOne => (1, 1, IN_FLIGHT / 2),
        Writing::InBatches => (BATCH, SENDS_BATCH, IN_FLIGHT / BATCH as usize),
    };
    runtime.block_on(async {
        let message = session
            .prepare(format!(
                "INSERT INTO {keyspace}.messages (conversation_id, bucket, seq, epoch, message_id, sender, client_id, kind, body, \
                 at, settled) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP 0"
            ))
            .await?;
        let send = session
            .prepare(format!(
                "INSERT INTO {keyspace}.sends (conversation_id, sender, client_id, epoch, seq) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP 0"
            ))
            .await?;
        let (message, send) = (&message, &send);
        let conversation = Uuid::new_v4();
        let begin = Instant::now();
        stream::iter((1..=count).step_by(usize::try_from(size)?))
            .map(|first| async move {
                let seqs = first..(first + size).min(count + 1);
                let ids: Vec<(i64, Uuid)> = seqs.map(|seq| (seq as i64, Uuid::new_v4())).collect();
                let rows = ids.iter().map(|&(seq, client_id)| {
                    let message_id = CqlTimeuuid::from(Uuid::now_v1(&[1, 2, 3, 4, 5, 6]));
                    let (at, body) = (CqlTimestamp(1_790_000_000_000), body(seq as u64));
                    (
                        conversation, seq / 4096, seq, 1_i64, message_id, "alice", client_id, "text", body, at, seq - 1,
                    )
                });
                let sends = ids.chunks(sends_size).map(|part| {
                    let rows = part.iter().map(|&(seq, id)| (conversation, "alice", id, 1_i64, seq));
                    write(session, send, rows.collect())
                });
                tokio::try_join!(write(session, message, rows.collect()), try_join_all(sends)).map(|_| ())
            })
            .buffer_unordered(at_once)
            .try_collect::<()>()
            .await?;
        Ok(count as f64 / begin.elapsed().as_secs_f64())
    })
}

async fn write<R: SerializeRow>(
    session: &Session,
    statement: &PreparedStatement,
    rows: Vec<R>,
) -> Result<(), ExecutionError> {
    if let [row] = &rows[..] {
        return session.execute_unpaged(statement, row).await.map(|_| ());
    }
    let mut batch = Batch::new(BatchType::Unlogged);
    for _ in &rows {
        batch.append_statement(statement.clone());
    }
    session.batch(&batch, rows).await.map(|_| ())
}
