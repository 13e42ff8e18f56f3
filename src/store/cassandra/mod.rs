//! Apache Cassandra (4.1 or newer) or ScyllaDB, by crate `scylla`. The tables are in `schema.cql`.
//!
//! Every write may be repeated and reordered: rows of the log never change, all others carry their seq as write
//! timestamp. So a request with an unknown outcome is simply made again, by whoever needs it.

mod batches;
mod columns;
pub mod schema;
mod statements;

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use futures_util::{StreamExt, TryStreamExt, future::try_join_all, stream};
use metrics::{Histogram, counter, gauge, histogram};
use scylla::{
    client::{
        execution_profile::ExecutionProfile, session::Session, session_builder::SessionBuilder,
    },
    deserialize::row::DeserializeRow,
    errors::ExecutionError,
    policies::{
        load_balancing::DefaultPolicy, retry::DefaultRetryPolicy,
        speculative_execution::SimpleSpeculativeExecutionPolicy,
    },
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

use self::{
    batches::{Batches, Unit},
    columns::{
        ConversationColumns, InboxColumns, MessageColumns, PUBLIC_SHARDS, ParticipantColumns,
        PublicColumns, big, bucket_of, corrupt, first_of, opens_bucket, public_shard_of, shard_of,
        shards_of, unsigned,
    },
    schema::Keyspace,
    statements::{Profiles, Statements},
};
use super::{
    Activity, Applied, ConversationRow, Error, Heartbeat, InboxRow, InboxWrite, LogRow, Mark,
    ParticipantRow, PublicRow, Result, RingRow, SendRow, Store, Tail,
};
use crate::{
    model::{ClientId, ConversationId, Epoch, GatewayId, Kind, Millis, Seq, UserId},
    tasks::Tasks,
};

/// A read that has not been answered by then is asked of another node too, twice at most.
const READ_SPECULATION: SimpleSpeculativeExecutionPolicy = SimpleSpeculativeExecutionPolicy {
    max_retry_count: 2,
    retry_interval: Duration::from_millis(100),
};
/// The same for writes, all of which may be repeated. Rarer, so that a cluster that is merely busy does not get
/// its load twice.
const WRITE_SPECULATION: SimpleSpeculativeExecutionPolicy = SimpleSpeculativeExecutionPolicy {
    max_retry_count: 1,
    retry_interval: Duration::from_millis(700),
};
/// A node that answers no keep-alive for so long is not asked any more.
const KEEPALIVE: Duration = Duration::from_secs(1);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);
/// For a read of the ring: a lease depends on it, and readiness on its outcome.
const RING_TIMEOUT: Duration = Duration::from_millis(1_500);
/// Between two tries to reach the cluster at start.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Pages of one partition that are read one after the other.
const PAGE_ROWS: i32 = 1_000;
/// Partitions of one listing that are read at once.
const SHARDS_AT_ONCE: usize = 16;
/// Minutes of activity before a gateway's last one that crash repair looks at. Inbox rows are written within
/// seconds.
const ACTIVITY_MINUTES: usize = 3;

/// How to reach a cluster, and what is expected of it. Not to be printed: it holds a password.
#[derive(Clone)]
pub struct Settings {
    pub nodes: Vec<String>,
    pub keyspace: Keyspace,
    /// Whose nodes are asked, and no others.
    pub datacenter: Option<String>,
    pub consistency: Consistency,
    pub user: Option<(String, String)>,
    pub tls: Option<TlsFiles>,
    pub timeout: Duration,
    /// Requests under way at once: as many reads, and as many writes.
    pub in_flight_max: usize,
    pub create_schema: bool,
}

/// PEM files.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    pub authority: PathBuf,
    /// A certificate and its key, if the cluster asks for one.
    pub identity: Option<(PathBuf, PathBuf)>,
}

pub struct Cassandra {
    session: Arc<Session>,
    statements: Statements,
    batches: Batches,
    reads: Semaphore,
    timeout: Duration,
    seconds: Histogram,
    closing: CancellationToken,
    written: CancellationToken,
    /// Why the ring could not be read the last time.
    unreachable: Mutex<Option<String>>,
}

/// Connects, without a keyspace.
///
/// # Errors
/// When no node can be reached, or a file of TLS cannot be used.
pub async fn connect(settings: &Settings) -> Result<Session> {
    let failed = |e: &dyn std::fmt::Display| Error::Unavailable {
        operation: "connect",
        reason: format!("{}: {e}", settings.nodes.join(", ")),
    };
    let tls = match &settings.tls {
        Some(files) => Some(tls(files).map_err(|e| failed(&e))?),
        None => None,
    };
    let mut builder = SessionBuilder::new()
        .known_nodes(&settings.nodes)
        .tls_context(tls)
        .connection_timeout(settings.timeout)
        .keepalive_interval(KEEPALIVE)
        .keepalive_timeout(KEEPALIVE_TIMEOUT)
        .default_execution_profile_handle(
            profile(settings, None).into_handle_with_label("transactions".into()),
        );
    if let Some((user, password)) = &settings.user {
        builder = builder.user(user, password);
    }
    builder.build().await.map_err(|e| failed(&e))
}

fn profile(
    settings: &Settings,
    speculation: Option<SimpleSpeculativeExecutionPolicy>,
) -> ExecutionProfile {
    let mut nodes = DefaultPolicy::builder().token_aware(true);
    if let Some(datacenter) = &settings.datacenter {
        nodes = nodes.prefer_datacenter(datacenter.clone());
    }
    ExecutionProfile::builder()
        .consistency(settings.consistency)
        .serial_consistency(Some(serial(settings.consistency)))
        .request_timeout(Some(settings.timeout))
        .load_balancing_policy(nodes.build())
        .retry_policy(Arc::new(DefaultRetryPolicy::new()))
        .speculative_execution_policy(speculation.map(|policy| Arc::new(policy) as _))
        .build()
}

fn serial(consistency: Consistency) -> SerialConsistency {
    match consistency {
        Consistency::LocalQuorum => SerialConsistency::LocalSerial,
        _ => SerialConsistency::Serial,
    }
}

fn tls(files: &TlsFiles) -> std::io::Result<Arc<rustls::ClientConfig>> {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
    let wrong = |path: &PathBuf, e: &dyn std::fmt::Display| {
        std::io::Error::other(format!("{}: {e}", path.display()))
    };
    let certificates = |path: &PathBuf| -> std::io::Result<Vec<CertificateDer<'static>>> {
        CertificateDer::pem_file_iter(path)
            .and_then(Iterator::collect)
            .map_err(|e| wrong(path, &e))
    };
    let mut authorities = rustls::RootCertStore::empty();
    for certificate in certificates(&files.authority)? {
        authorities
            .add(certificate)
            .map_err(|e| wrong(&files.authority, &e))?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(std::io::Error::other)?
        .with_root_certificates(authorities);
    let config = match &files.identity {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let private = PrivateKeyDer::from_pem_file(key).map_err(|e| wrong(key, &e))?;
            builder
                .with_client_auth_cert(certificates(certificate)?, private)
                .map_err(|e| wrong(certificate, &e))?
        }
    };
    Ok(Arc::new(config))
}

impl Cassandra {
    /// Connects to the cluster, and waits until it can be reached and has its tables: until then, nothing can
    /// be served. Its one task runs in `tasks`, until [`Store::close`].
    ///
    /// # Errors
    /// When something is wrong that does not mend by itself.
    pub async fn open(settings: &Settings, tasks: &Tasks) -> Result<Self> {
        let (session, statements) = loop {
            match Self::try_open(settings).await {
                Ok(opened) => break opened,
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
            profile: profile(settings, Some(WRITE_SPECULATION)).into_handle(),
            in_flight_max: settings.in_flight_max,
            copies: settings
                .keyspace
                .replication
                .values()
                .copied()
                .max()
                .unwrap_or(3) as usize,
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

    async fn try_open(settings: &Settings) -> Result<(Arc<Session>, Statements)> {
        let session = connect(settings).await?;
        let keyspace = &settings.keyspace;
        if settings.create_schema {
            schema::apply(&session, keyspace).await?;
        } else {
            let there = schema::applied(&session, keyspace).await?;
            let wanted = schema::wanted();
            if there < wanted {
                let reason = format!(
                    "keyspace {} has version {there} of the tables, and {wanted} is needed: chat-gateway schema apply",
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
        let profiles = Profiles {
            reads: profile(settings, Some(READ_SPECULATION)).into_handle(),
            writes: profile(settings, Some(WRITE_SPECULATION)).into_handle(),
            serial: serial(settings.consistency),
        };
        let mut statements = Statements::prepare(&session, &profiles)
            .await
            .map_err(|e| failed(&e))?;
        let short = settings.timeout.min(RING_TIMEOUT);
        statements.ring.set_request_timeout(Some(short));
        Ok((Arc::new(session), statements))
    }

    /// All rows of a small read.
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
        let result = self.session.execute_unpaged(statement, values).await;
        self.seconds.record(began.elapsed());
        let rows = result
            .map_err(|e| unavailable(operation, "read", &e))?
            .into_rows_result()
            .map_err(|e| corrupt(operation, e))?;
        let rows = rows.rows::<R>().map_err(|e| corrupt(operation, e))?;
        rows.collect::<std::result::Result<_, _>>()
            .map_err(|e| corrupt(operation, e))
    }

    /// All rows of a read without bound, page by page.
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
        let mut statement = statement.clone();
        statement.set_page_size(PAGE_ROWS);
        let failed = |e: &dyn std::fmt::Display| {
            counter!("chat_store_requests_failed_total", "kind" => "read").increment(1);
            Error::Unavailable {
                operation,
                reason: e.to_string(),
            }
        };
        let pages = self
            .session
            .execute_iter(statement, values)
            .await
            .map_err(|e| failed(&e))?;
        let rows = pages
            .rows_stream::<R>()
            .map_err(|e| corrupt(operation, e))?;
        rows.try_collect().await.map_err(|e| failed(&e))
    }

    async fn permit(&self, operation: &'static str) -> Result<tokio::sync::SemaphorePermit<'_>> {
        match timeout(self.timeout, self.reads.acquire()).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(Error::Unavailable {
                operation,
                reason: "too many reads are under way".into(),
            }),
        }
    }

    /// Rows of one bucket, newest first.
    async fn bucket(
        &self,
        operation: &'static str,
        conversation: ConversationId,
        bucket: u64,
        from: Seq,
        to: Seq,
    ) -> Result<Vec<LogRow>> {
        let values = (conversation.0, big(bucket), big(from), big(to));
        let rows: Vec<MessageColumns> = self
            .read(operation, &self.statements.messages, values)
            .await?;
        rows.into_iter().map(|r| r.row(operation)).collect()
    }

    /// Rows of every epoch from `from` to `to`, newest first.
    async fn range(
        &self,
        operation: &'static str,
        conversation: ConversationId,
        from: Seq,
        to: Seq,
    ) -> Result<Vec<LogRow>> {
        let buckets = (bucket_of(from)..=bucket_of(to)).rev();
        let parts = buckets.map(|bucket| self.bucket(operation, conversation, bucket, from, to));
        Ok(try_join_all(parts).await?.concat())
    }

    /// Notes each bucket that `rows` open, before a row is in it.
    async fn open_buckets(
        &self,
        operation: &'static str,
        conversation: ConversationId,
        rows: &[LogRow],
    ) -> Result<()> {
        for row in rows.iter().filter(|row| opens_bucket(row.entry.seq)) {
            let unit = self
                .statements
                .head_bucket(conversation, bucket_of(row.entry.seq));
            self.batches.write(operation, vec![unit]).await?;
        }
        Ok(())
    }

    /// Whether a proposal whose outcome is not known was made. A serial read finishes or refuses whatever is
    /// under way, so what it sees stays.
    async fn proposal_made(&self, proposal: Uuid) -> Result<bool> {
        const OPERATION: &str = "propose_ring";
        let mut statement = self.statements.ring.clone();
        statement.set_consistency(match self.statements.update_ring.get_serial_consistency() {
            Some(SerialConsistency::Serial) => Consistency::Serial,
            _ => Consistency::LocalSerial,
        });
        let rows: Vec<RingColumns> = self.read(OPERATION, &statement, ()).await?;
        Ok(rows.first().is_some_and(|(_, _, made)| *made == proposal))
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

fn unavailable(operation: &'static str, kind: &'static str, error: &ExecutionError) -> Error {
    counter!("chat_store_requests_failed_total", "kind" => kind).increment(1);
    Error::Unavailable {
        operation,
        reason: error.to_string(),
    }
}

type RingColumns = (i64, Option<Vec<Uuid>>, Uuid);

fn ring_row((version, members, _): RingColumns) -> RingRow {
    RingRow {
        version: unsigned(version),
        members: members.into_iter().flatten().map(GatewayId).collect(),
    }
}

fn small(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

#[async_trait]
impl Store for Cassandra {
    async fn append(
        &self,
        conversation: ConversationId,
        rows: &[LogRow],
        activity: Option<Activity>,
    ) -> Result<()> {
        const OPERATION: &str = "append";
        self.open_buckets(OPERATION, conversation, rows).await?;
        let s = &self.statements;
        let mut units = s.messages(conversation, rows);
        units.extend(rows.iter().map(|row| s.send(conversation, row)));
        if let Some(Activity { gateway, minute }) = activity {
            let minute = i32::try_from(minute).unwrap_or(i32::MAX);
            let values = Box::new((gateway.0, minute, conversation.0));
            units.push(Unit::one(&s.insert_activity, values, 100));
            let values = Box::new((gateway.0, minute));
            units.push(Unit::one(&s.insert_activity_minute, values, 50));
        }
        self.batches.write(OPERATION, units).await
    }

    async fn settle(&self, conversation: ConversationId, rows: &[LogRow]) -> Result<()> {
        const OPERATION: &str = "settle";
        self.open_buckets(OPERATION, conversation, rows).await?;
        let s = &self.statements;
        let sends = rows.iter().map(|row| s.send(conversation, row)).collect();
        self.batches.write(OPERATION, sends).await?;
        // One unit, one batch, one partition: all or nothing. The newer bucket first.
        for unit in s.messages(conversation, rows) {
            self.batches.write(OPERATION, vec![unit]).await?;
        }
        Ok(())
    }

    async fn tail(&self, conversation: ConversationId, seqs: u64) -> Result<Tail> {
        const OPERATION: &str = "tail";
        let s = &self.statements;
        let head: Vec<(Option<i64>, Option<i64>)> =
            self.read(OPERATION, &s.head, (conversation.0,)).await?;
        let (bucket, settled) = head.into_iter().next().unwrap_or_default();
        let bucket = bucket.map_or(0, unsigned);
        let settled = settled.map_or(0, unsigned);
        let newest: Vec<(i64,)> = self
            .read(OPERATION, &s.newest_seq, (conversation.0, big(bucket)))
            .await?;
        // A bucket is noted before its first row is written.
        let newest = match newest.first() {
            Some(&(seq,)) => unsigned(seq),
            None => first_of(bucket).saturating_sub(1),
        };
        let first = (newest + 1).saturating_sub(seqs);
        let mut rows = if newest == 0 {
            Vec::new()
        } else {
            self.range(OPERATION, conversation, first, newest).await?
        };
        rows.reverse();
        Ok(Tail { rows, settled })
    }

    async fn log(&self, conversation: ConversationId, from: Seq, to: Seq) -> Result<Vec<LogRow>> {
        let mut rows = self.range("log", conversation, from, to).await?;
        // Newest first, the highest epoch first.
        rows.dedup_by_key(|row| row.entry.seq);
        rows.reverse();
        Ok(rows)
    }

    async fn set_settled(&self, conversation: ConversationId, seq: Seq) -> Result<()> {
        let values = Box::new((big(seq), big(seq), conversation.0));
        let unit = Unit::one(&self.statements.set_settled, values, 50);
        self.batches.write("set_settled", vec![unit]).await
    }

    async fn sends(
        &self,
        conversation: ConversationId,
        sender: &UserId,
        client_id: ClientId,
    ) -> Result<Vec<SendRow>> {
        let values = (conversation.0, sender.as_str(), client_id.0);
        let rows: Vec<(i64, i64)> = self.read("sends", &self.statements.sends, values).await?;
        let send = |(epoch, seq)| SendRow {
            epoch: unsigned(epoch),
            seq: unsigned(seq),
        };
        Ok(rows.into_iter().map(send).collect())
    }

    async fn conversation(&self, conversation: ConversationId) -> Result<Option<ConversationRow>> {
        const OPERATION: &str = "conversation";
        let rows: Vec<ConversationColumns> = self
            .read(OPERATION, &self.statements.conversation, (conversation.0,))
            .await?;
        match rows.into_iter().next() {
            Some(row) => row.row(OPERATION),
            None => Ok(None),
        }
    }

    async fn apply(&self, conversation: ConversationId, applied: &Applied) -> Result<()> {
        const OPERATION: &str = "apply";
        let Applied {
            conversation: row,
            participants,
            inbox,
        } = applied;
        let kind = row.details.kind;
        let s = &self.statements;
        let mut units: Vec<Unit> = participants
            .iter()
            .map(|p| s.participant_row(conversation, kind, p))
            .collect();
        units.extend(inbox.iter().flat_map(|write| s.inbox_write(write)));
        self.batches.write(OPERATION, units).await?;
        // Last: a conversation that is there is there with its participants.
        self.batches
            .write(OPERATION, s.details(conversation, row))
            .await
    }

    async fn participants(
        &self,
        conversation: ConversationId,
        kind: Kind,
        after: Option<&UserId>,
        limit: usize,
    ) -> Result<Vec<ParticipantRow>> {
        const OPERATION: &str = "participants";
        let first = after.map_or(0, |user| shard_of(kind, user));
        let shard = async |shard: i32| -> Result<Vec<ParticipantRow>> {
            let mut after = match after {
                Some(user) if shard == first => user.as_str().to_owned(),
                _ => String::new(),
            };
            let mut found = Vec::new();
            loop {
                let values = (conversation.0, shard, after.as_str(), small(limit));
                let rows: Vec<ParticipantColumns> = self
                    .read(OPERATION, &self.statements.participants, values)
                    .await?;
                let full = rows.len() == limit;
                after = rows.last().map(|r| r.user_id.clone()).unwrap_or_default();
                for row in rows {
                    found.extend(row.row(OPERATION)?);
                }
                // Marks of nobody may have taken the place of rows.
                if !full || found.len() >= limit {
                    return Ok(found);
                }
            }
        };
        let mut shards = stream::iter((first..shards_of(kind)).map(shard)).buffered(SHARDS_AT_ONCE);
        let mut page = Vec::new();
        while page.len() < limit
            && let Some(rows) = shards.next().await
        {
            page.extend(rows?);
        }
        page.truncate(limit);
        Ok(page)
    }

    async fn participant(
        &self,
        conversation: ConversationId,
        kind: Kind,
        user: &UserId,
    ) -> Result<Option<ParticipantRow>> {
        const OPERATION: &str = "participant";
        let values = (conversation.0, shard_of(kind, user), user.as_str());
        let rows: Vec<ParticipantColumns> = self
            .read(OPERATION, &self.statements.participant, values)
            .await?;
        match rows.into_iter().next() {
            Some(row) => row.row(OPERATION),
            None => Ok(None),
        }
    }

    async fn mark(&self, conversation: ConversationId, kind: Kind, mark: &Mark) -> Result<()> {
        let Mark {
            user,
            read_seq,
            delivered_seq,
        } = mark;
        let s = &self.statements;
        let mut units = Vec::with_capacity(2);
        units.extend(s.marks(conversation, kind, user, *read_seq, *delivered_seq));
        if let &Some(seq) = read_seq {
            let values = Box::new((big(seq), big(seq), user.as_str().to_owned(), conversation.0));
            units.push(Unit::one(&s.set_inbox_read, values, 100));
        }
        self.batches.write("mark", units).await
    }

    async fn inbox(&self, user: &UserId) -> Result<Vec<InboxRow>> {
        const OPERATION: &str = "inbox";
        let rows: Vec<InboxColumns> = self
            .read_pages(
                OPERATION,
                &self.statements.inbox,
                (user.as_str().to_owned(),),
            )
            .await?;
        rows.into_iter().map(|r| r.row(OPERATION)).collect()
    }

    async fn write_inbox(&self, writes: Vec<InboxWrite>) -> Result<()> {
        let units: Vec<Unit> = writes
            .iter()
            .flat_map(|write| self.statements.inbox_write(write))
            .collect();
        self.batches.write("write_inbox", units).await
    }

    async fn public_conversations(
        &self,
        after: Option<ConversationId>,
        limit: usize,
    ) -> Result<Vec<PublicRow>> {
        const OPERATION: &str = "public_conversations";
        let s = &self.statements;
        let mut page = Vec::new();
        let mut after = after;
        let mut shard = after.map_or(0, public_shard_of);
        while shard < PUBLIC_SHARDS && page.len() < limit {
            let rows: Vec<PublicColumns> = match after {
                None => {
                    let values = (shard, small(limit));
                    self.read(OPERATION, &s.public_first, values).await?
                }
                Some(id) => {
                    let values = (shard, id.0, small(limit));
                    self.read(OPERATION, &s.public, values).await?
                }
            };
            after = match rows.last() {
                Some(last) if rows.len() == limit => Some(ConversationId(last.conversation_id)),
                _ => {
                    shard += 1;
                    None
                }
            };
            for row in rows {
                page.extend(row.row(OPERATION)?);
            }
        }
        page.truncate(limit);
        Ok(page)
    }

    async fn activity(&self, gateway: GatewayId) -> Result<Vec<ConversationId>> {
        const OPERATION: &str = "activity";
        let minutes: Vec<(i32,)> = self
            .read_pages(OPERATION, &self.statements.activity_minutes, (gateway.0,))
            .await?;
        let mut found = BTreeSet::new();
        // Newest first.
        for (minute,) in minutes.into_iter().take(ACTIVITY_MINUTES) {
            let rows: Vec<(Uuid,)> = self
                .read_pages(OPERATION, &self.statements.activity, (gateway.0, minute))
                .await?;
            found.extend(rows.into_iter().map(|(id,)| ConversationId(id)));
        }
        Ok(found.into_iter().collect())
    }

    async fn forget_activity(&self, gateway: GatewayId) -> Result<()> {
        const OPERATION: &str = "forget_activity";
        let s = &self.statements;
        let minutes: Vec<(i32,)> = self
            .read_pages(OPERATION, &s.activity_minutes, (gateway.0,))
            .await?;
        if minutes.is_empty() {
            return Ok(());
        }
        let minutes = minutes
            .into_iter()
            .map(|(minute,)| Unit::one(&s.delete_activity, Box::new((gateway.0, minute)), 50))
            .collect();
        self.batches.write(OPERATION, minutes).await?;
        let all = Unit::one(&s.delete_activity_minutes, Box::new((gateway.0,)), 50);
        self.batches.write(OPERATION, vec![all]).await
    }

    async fn last_seen(&self, user: &UserId) -> Result<Option<Millis>> {
        let rows: Vec<(Option<i64>,)> = self
            .read("last_seen", &self.statements.last_seen, (user.as_str(),))
            .await?;
        Ok(rows.into_iter().next().and_then(|(at,)| at))
    }

    async fn set_last_seen(&self, seen: &[(UserId, Millis)]) -> Result<()> {
        let unit = |(user, at): &(UserId, Millis)| {
            let values = Box::new((*at, *at, user.as_str().to_owned()));
            Unit::one(&self.statements.set_last_seen, values, 100)
        };
        self.batches
            .write("set_last_seen", seen.iter().map(unit).collect())
            .await
    }

    async fn ring(&self) -> Result<Option<RingRow>> {
        // Not behind other reads: a gateway's lease depends on it.
        let read = async {
            let result = self
                .session
                .execute_unpaged(&self.statements.ring, ())
                .await
                .map_err(|e| unavailable("ring", "read", &e))?;
            let rows = result.into_rows_result().map_err(|e| corrupt("ring", e))?;
            let row = rows
                .maybe_first_row::<RingColumns>()
                .map_err(|e| corrupt("ring", e))?;
            Ok(row.map(ring_row))
        };
        let ring = read.await;
        let mut unreachable = self
            .unreachable
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *unreachable = ring.as_ref().err().map(Error::to_string);
        ring
    }

    async fn propose_ring(&self, expected: Option<Epoch>, next: &RingRow) -> Result<bool> {
        let s = &self.statements;
        let members: Vec<Uuid> = next.members.iter().map(|m| m.0).collect();
        let proposal = Uuid::new_v4();
        let proposed = match expected {
            None => {
                let values = (big(next.version), members, proposal);
                self.transaction(&s.insert_ring, values).await
            }
            Some(version) => {
                let values = (big(next.version), members, proposal, big(version));
                self.transaction(&s.update_ring, values).await
            }
        };
        match proposed {
            Ok(applied) => Ok(applied),
            Err(error) => {
                tracing::info!(%error, "a proposal's outcome is not known; reading it back");
                self.proposal_made(proposal).await
            }
        }
    }

    async fn beat(&self, gateway: GatewayId, beat: &Heartbeat) -> Result<()> {
        let counter = big(beat.counter);
        let values = (counter, beat.address.as_str(), counter, gateway.0);
        // Not behind other writes.
        let written = self
            .session
            .execute_unpaged(&self.statements.set_heartbeat.prepared, values);
        written
            .await
            .map(|_| ())
            .map_err(|e| unavailable("beat", "write", &e))
    }

    async fn heartbeat(&self, gateway: GatewayId) -> Result<Option<Heartbeat>> {
        let rows: Vec<(String, i64)> = self
            .read("heartbeat", &self.statements.heartbeat, (gateway.0,))
            .await?;
        let beat = |(address, counter)| Heartbeat {
            address,
            counter: unsigned(counter),
        };
        Ok(rows.into_iter().next().map(beat))
    }

    async fn sweep(&self) -> Result<()> {
        Ok(()) // Rows that outlive their time have a time to live.
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn measure(&self) {
        let driver = self.session.get_metrics();
        let requests =
            driver.get_requests_unpaged_num() + driver.get_requests_automatically_paged_num();
        let errors = driver.get_errors_unpaged_num() + driver.get_errors_automatically_paged_num();
        counter!("chat_store_driver_requests_total").absolute(requests);
        counter!("chat_store_driver_errors_total").absolute(errors);
        counter!("chat_store_driver_retries_total").absolute(driver.get_retries_num());
        counter!("chat_store_driver_timeouts_total").absolute(driver.get_request_timeouts());
        gauge!("chat_store_driver_connections").set(driver.get_total_connections() as f64);
        let nodes = self.session.get_cluster_state();
        let (up, down): (Vec<_>, Vec<_>) = nodes
            .get_nodes_info()
            .iter()
            .partition(|node| node.is_connected());
        gauge!("chat_store_nodes", "state" => "up").set(up.len() as f64);
        gauge!("chat_store_nodes", "state" => "down").set(down.len() as f64);
    }

    fn healthy(&self) -> Result<()> {
        let unreachable = self
            .unreachable
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match &*unreachable {
            None => Ok(()),
            Some(reason) => Err(Error::Unavailable {
                operation: "ring",
                reason: reason.clone(),
            }),
        }
    }

    async fn close(&self) -> Result<()> {
        self.closing.cancel();
        self.written.cancelled().await;
        Ok(())
    }
}
