//! Apache Cassandra (4.1 or newer) or ScyllaDB, by crate `scylla`. The tables are in `schema.cql`.
//!
//! Every write is idempotent and may be reordered: log rows never change, and all other rows have their seq as write
//! timestamp. So a caller simply retries a request with an unknown outcome.

mod batches;
mod changes;
mod columns;
mod connect;
mod consumers;
mod datacenters;
mod ends;
mod erase;
mod files;
mod grouping;
mod inbox;
mod operations;
mod reads;
mod ring;
pub mod schema;
mod speculation;
mod statements;

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures_util::TryStreamExt;
use metrics::{Histogram, counter, histogram};
use scylla::{
    client::session::Session,
    deserialize::row::DeserializeRow,
    errors::ExecutionError,
    serialize::row::SerializeRow,
    statement::{Consistency, SerialConsistency, prepared::PreparedStatement},
    value::Row,
};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub use self::connect::{Settings, TlsFiles, connect};
use self::{
    batches::Batches,
    changes::ChangeColumns,
    columns::{MessageColumns, big, bucket_of, corrupt, opens_bucket},
    connect::{profile, serial},
    grouping::Datacenter,
    ring::RingColumns,
    speculation::{Profile, Speculation},
    statements::{Profiles, Statements},
};
use super::{ChangeRow, Error, LogPage, LogRow, Result};
use crate::{
    model::{ConversationId, Rev, Seq},
    tasks::{Tasks, lock},
};

/// The time-out for reading the ring. The lease depends on this read, and readiness on its result.
const RING_TIMEOUT: Duration = Duration::from_millis(1_500);
/// The pause between two attempts to reach the cluster at start.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Rows of one page. The pages of a partition are read one after the other.
const PAGE_ROWS: i32 = 1_000;

/// A keyspace of a cluster.
pub struct Cassandra {
    session: Arc<Session>,
    statements: Statements,
    batches: Batches,
    reads: Semaphore,
    timeout: Duration,
    seconds: Histogram,
    closing: CancellationToken,
    written: CancellationToken,
    /// The error of the latest heartbeat or read of the ring, if it failed.
    unreachable: Mutex<Option<String>>,
}

impl Profiles {
    fn of(settings: &Settings) -> Self {
        Self {
            reads: with_speculation(settings, Speculation::reads()),
            writes: with_speculation(settings, Speculation::writes()),
            lease_reads: with_speculation(settings, Speculation::reads().without_limit()),
            lease_writes: with_speculation(settings, Speculation::writes().without_limit()),
            serial: serial(settings.consistency),
        }
    }
}

fn with_speculation(settings: &Settings, speculation: Speculation) -> Profile {
    let speculation = Arc::new(speculation);
    Profile {
        handle: profile(settings, Some(speculation.clone())).into_handle(),
        speculation,
    }
}

impl Cassandra {
    /// Records the result of a request that gateways make regularly, for the health check.
    fn noted<T>(&self, answer: Result<T>) -> Result<T> {
        *self.unreachable() = answer.as_ref().err().map(Error::to_string);
        answer
    }

    fn unreachable(&self) -> MutexGuard<'_, Option<String>> {
        lock(&self.unreachable)
    }

    /// Connects to the cluster. It waits until the cluster is reachable and has its tables, because nothing can be
    /// served before that. Its task runs in `tasks` until [`super::Store::close`].
    ///
    /// # Errors
    /// The last error, if the gateway drains before the cluster is ready.
    pub async fn open(settings: &Settings, tasks: &Tasks) -> Result<Self> {
        let (session, settings, profiles, statements) = loop {
            match Box::pin(Self::try_open(settings)).await {
                Ok(opened) => break opened,
                Err(error @ Error::Unusable { .. }) => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, "the cluster is not ready; trying again");
                    tokio::select! {
                        () = tokio::time::sleep(RETRY_AFTER) => {}
                        () = tasks.draining() => return Err(error),
                    }
                }
            }
        };
        let (batches, queue) = Batches::new();
        let (closing, written) = (CancellationToken::new(), CancellationToken::new());
        let sending = batches::Sending {
            session: session.clone(),
            profile: profiles.writes,
            in_flight_max: settings.in_flight_max,
            nodes: connect::nodes(&settings),
            datacenter: Datacenter::of(&settings),
        };
        let (stop, done) = (closing.clone(), written.clone());
        tasks.spawn(async move {
            batches::run(sending, queue, stop.cancelled_owned()).await;
            done.cancel();
        });
        Ok(Self {
            session,
            statements,
            batches,
            reads: Semaphore::new(settings.in_flight_max),
            timeout: settings.timeout,
            seconds: histogram!("chat_store_request_seconds", "kind" => "read"),
            closing,
            written,
            unreachable: Mutex::new(None),
        })
    }

    async fn try_open(
        settings: &Settings,
    ) -> Result<(Arc<Session>, Settings, Profiles, Statements)> {
        let (session, settings) = connect(settings).await?;
        let keyspace = &settings.keyspace;
        if settings.create_schema {
            schema::apply(&session, keyspace).await?;
        } else {
            let there = schema::applied(&session, keyspace).await?;
            let wanted = schema::wanted();
            if there < wanted {
                let reason = format!(
                    "keyspace {} has schema version {there}, but {wanted} is needed. Run: chat-gateway schema apply",
                    keyspace.name
                );
                return Err(Error::Unavailable {
                    operation: "schema",
                    reason,
                });
            }
        }
        let failed = |e: &dyn std::fmt::Display| Error::Unavailable {
            operation: "prepare",
            reason: e.to_string(),
        };
        session
            .use_keyspace(&keyspace.name, false)
            .await
            .map_err(|e| failed(&e))?;
        // Boxed, because the future of so many statements is large.
        let profiles = Profiles::of(&settings);
        let prepared = Box::pin(Statements::prepare(&session, &profiles));
        let mut statements = prepared.await.map_err(|e| failed(&e))?;
        let short = settings.timeout.min(RING_TIMEOUT);
        statements.ring.set_request_timeout(Some(short));
        datacenters::tell_of_loss(&session).await;
        Ok((Arc::new(session), settings, profiles, statements))
    }

    /// Returns all rows of a small read.
    async fn read<R>(
        &self,
        operation: &'static str,
        statement: &PreparedStatement,
        values: impl SerializeRow + Send,
    ) -> Result<Vec<R>>
    where
        R: for<'frame, 'metadata> DeserializeRow<'frame, 'metadata>,
    {
        let _permit = self.permit(operation).await?;
        let began = Instant::now();
        let rows = self.rows(operation, statement, values).await;
        self.seconds.record(began.elapsed());
        rows
    }

    /// Returns the first row, if any.
    async fn read_one<R>(
        &self,
        operation: &'static str,
        statement: &PreparedStatement,
        values: impl SerializeRow + Send,
    ) -> Result<Option<R>>
    where
        R: for<'frame, 'metadata> DeserializeRow<'frame, 'metadata>,
    {
        let rows = self.read(operation, statement, values).await?;
        Ok(rows.into_iter().next())
    }

    /// Reads like `read`, but without waiting for a place among the concurrent reads.
    async fn rows<R>(
        &self,
        operation: &'static str,
        statement: &PreparedStatement,
        values: impl SerializeRow + Send,
    ) -> Result<Vec<R>>
    where
        R: for<'frame, 'metadata> DeserializeRow<'frame, 'metadata>,
    {
        let result = self.session.execute_unpaged(statement, values).await;
        let rows = result
            .map_err(|e| unavailable(operation, "read", e))?
            .into_rows_result()
            .map_err(|e| corrupt(operation, e))?;
        let rows = rows.rows::<R>().map_err(|e| corrupt(operation, e))?;
        rows.collect::<std::result::Result<_, _>>()
            .map_err(|e| corrupt(operation, e))
    }

    /// Returns all rows of an unbounded read, page by page.
    async fn read_pages<R>(
        &self,
        operation: &'static str,
        statement: &PreparedStatement,
        values: impl SerializeRow + Send,
    ) -> Result<Vec<R>>
    where
        R: for<'frame, 'metadata> DeserializeRow<'frame, 'metadata> + Send + 'static,
    {
        let _permit = self.permit(operation).await?;
        let began = Instant::now();
        let mut statement = statement.clone();
        statement.set_page_size(PAGE_ROWS);
        let pages = self
            .session
            .execute_iter(statement, values)
            .await
            .map_err(|e| unavailable(operation, "read", e))?;
        let rows = pages
            .rows_stream::<R>()
            .map_err(|e| corrupt(operation, e))?;
        let rows = rows.try_collect().await;
        self.seconds.record(began.elapsed());
        rows.map_err(|e| unavailable(operation, "read", e))
    }

    async fn permit(&self, operation: &'static str) -> Result<tokio::sync::SemaphorePermit<'_>> {
        match timeout(self.timeout, self.reads.acquire()).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(Error::Unavailable {
                operation,
                reason: "too many concurrent reads".into(),
            }),
        }
    }

    /// Returns the rows of all epochs from `from` to `to`, newest first, with the states of the entries, oldest first.
    async fn range(
        &self,
        operation: &'static str,
        conversation: ConversationId,
        from: Seq,
        to: Seq,
    ) -> Result<LogPage> {
        let statement = &self.statements.messages;
        let all = self.buckets(operation, statement, conversation, from, to);
        let all: Vec<MessageColumns> = all.await?;
        let mut page = LogPage::default();
        for columns in all {
            page.states.extend(columns.state(operation)?);
            page.rows.extend(columns.row(operation)?);
        }
        page.states.reverse();
        Ok(page)
    }

    /// Returns the changes of all epochs from `from` to `to`, newest first.
    async fn change_range(
        &self,
        operation: &'static str,
        conversation: ConversationId,
        from: Rev,
        to: Rev,
    ) -> Result<Vec<ChangeRow>> {
        let statement = &self.statements.changes;
        let all = self.buckets(operation, statement, conversation, from, to);
        let all: Vec<ChangeColumns> = all.await?;
        all.into_iter()
            .filter_map(|c| c.row(operation).transpose())
            .collect()
    }

    /// Reads the rows of a log from `from` to `to`, of all buckets between, newest first.
    async fn buckets<R>(
        &self,
        operation: &'static str,
        statement: &PreparedStatement,
        conversation: ConversationId,
        from: u64,
        to: u64,
    ) -> Result<Vec<R>>
    where
        R: for<'frame, 'metadata> DeserializeRow<'frame, 'metadata> + Send + 'static,
    {
        let mut buckets = Vec::new();
        for bucket in bucket_of(from)..=bucket_of(to) {
            let values = (conversation.0, big(bucket), big(from), big(to));
            let rows: Vec<R> = self.read(operation, statement, values).await?;
            buckets.push(rows);
        }
        Ok(buckets.into_iter().rev().flatten().collect())
    }

    /// Records each bucket that rows of changes open, before its first row is written.
    async fn open_change_buckets(
        &self,
        operation: &'static str,
        conversation: ConversationId,
        rows: &[ChangeRow],
    ) -> Result<()> {
        let revs = rows.iter().map(|row| row.record.rev);
        for rev in revs.filter(|rev| changes::opens_bucket(*rev)) {
            let bucket = bucket_of(rev);
            let unit = self.statements.changes_bucket(conversation, bucket);
            self.batches.write(operation, vec![unit]).await?;
        }
        Ok(())
    }

    /// Records each bucket that `rows` open, before its first row is written.
    async fn open_buckets(
        &self,
        operation: &'static str,
        conversation: ConversationId,
        rows: &[LogRow],
    ) -> Result<()> {
        for row in rows.iter().filter(|row| opens_bucket(row.record.seq)) {
            let unit = self
                .statements
                .head_bucket(conversation, bucket_of(row.record.seq));
            self.batches.write(operation, vec![unit]).await?;
        }
        Ok(())
    }

    /// Whether a proposal with an unknown outcome was made. The serial read completes or rejects transactions in
    /// progress, so the result is final.
    async fn proposal_made(&self, change: Uuid) -> Result<bool> {
        const OPERATION: &str = "propose_ring";
        let mut statement = self.statements.ring.clone();
        statement.set_consistency(match self.statements.update_ring.get_serial_consistency() {
            Some(SerialConsistency::Serial) => Consistency::Serial,
            _ => Consistency::LocalSerial,
        });
        let ring: Option<RingColumns> = self.read_one(OPERATION, &statement, ()).await?;
        Ok(ring.is_some_and(|ring| ring.change == Some(change)))
    }

    async fn transaction(
        &self,
        statement: &PreparedStatement,
        values: impl SerializeRow,
    ) -> std::result::Result<bool, ExecutionError> {
        let result = self.session.execute_unpaged(statement, values).await?;
        let row = result.into_rows_result().ok();
        let row = row.as_ref().and_then(|rows| rows.first_row::<Row>().ok());
        Ok(row.is_some_and(|row| schema::was_applied(&row)))
    }
}

fn unavailable(operation: &'static str, kind: &'static str, error: impl ToString) -> Error {
    counter!("chat_store_requests_failed_total", "kind" => kind).increment(1);
    Error::Unavailable {
        operation,
        reason: error.to_string(),
    }
}
