//! The rows of messages, one statement each, with the same driver and nothing else: what the gateway is measured
//! beside.

use std::time::Instant;

use futures_util::{StreamExt, TryStreamExt, stream};
use scylla::value::{CqlTimestamp, CqlTimeuuid};
use uuid::Uuid;

use crate::data::Cluster;

const IN_FLIGHT: usize = 256;

/// Writes a row of `messages` and of `sends` for each message; messages per second.
pub(crate) fn messages(
    cluster: &Cluster,
    count: u64,
    body: impl Fn(u64) -> String,
) -> anyhow::Result<f64> {
    let Cluster {
        runtime,
        session,
        keyspace,
        ..
    } = cluster;
    runtime.block_on(async {
        let message = session
            .prepare(format!(
                "INSERT INTO {keyspace}.messages (conversation_id, bucket, seq, epoch, message_id, sender, client_id, kind, body, \
                 at, committed) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP 0"
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
        stream::iter(1..=count)
            .map(|number| {
                let (seq, body) = (number as i64, body(number));
                async move {
                    let client_id = Uuid::new_v4();
                    let message_id = CqlTimeuuid::from(Uuid::now_v1(&[1, 2, 3, 4, 5, 6]));
                    let at = CqlTimestamp(1_790_000_000_000);
                    let values = (
                        conversation, seq / 4096, seq, 1_i64, message_id, "alice", client_id, "text", body, at, seq - 1,
                    );
                    let written = session.execute_unpaged(message, values);
                    let sent = session.execute_unpaged(send, (conversation, "alice", client_id, 1_i64, seq));
                    tokio::try_join!(written, sent).map(|_| ())
                }
            })
            .buffer_unordered(IN_FLIGHT / 2)
            .try_collect::<()>()
            .await?;
        Ok(count as f64 / begin.elapsed().as_secs_f64())
    })
}
