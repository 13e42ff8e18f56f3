//! Creates the keyspace and its tables exactly once, even if several gateways start at the same moment.

use std::{collections::BTreeMap, time::Duration};

use metrics::counter;
use scylla::{
    client::session::Session,
    response::query_result::QueryRowsResult,
    serialize::row::SerializeRow,
    statement::unprepared::Statement,
    value::{CqlValue, Row},
};
use tokio::time::sleep;
use uuid::Uuid;

use super::super::{Error, Result};

/// The definitions of all tables. There are no others.
const SCHEMA: &str = include_str!("schema.cql");
/// Seconds after which the lock of a process that died while creating tables expires. The holder renews it before each
/// statement. It is longer than that statement ([`STATEMENT_MAX`]) and the agreement of all nodes (a minute).
const LOCK_TTL: i32 = 180;
/// Seconds for which the lock stays when a statement has failed.
const FAILED_TTL: i32 = 30;
/// How often the lock is tried for while the outcome is unknown.
const HOLD_ATTEMPTS: usize = 3;
/// Creating a table may take a cluster several seconds.
const STATEMENT_MAX: Duration = Duration::from_secs(30);
/// The interval at which a process checks whether another one has finished.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Failed attempts to take the lock before the error is returned.
const LOCK_ERRORS_MAX: usize = 5;
const OPERATION: &str = "schema";

/// The definition of a keyspace.
#[derive(Debug, Clone)]
pub struct Keyspace {
    pub name: String,
    /// The options of `NetworkTopologyStrategy`: replication factors by datacenter, or `replication_factor`.
    pub replication: BTreeMap<String, u32>,
}

/// The key of a keyspace's replication that is for all datacenters.
pub(super) const EVERYWHERE: &str = "replication_factor";

impl Keyspace {
    /// Returns the copies that a datacenter should have.
    pub(super) fn copies(&self, datacenter: &str) -> Option<u32> {
        let copies = &self.replication;
        let mine = copies.get(datacenter).or_else(|| copies.get(EVERYWHERE));
        mine.copied()
    }

    /// `tablets`: whether the database has ScyllaDB's tablets. Up to version 2025.3 a keyspace that has them refuses lightweight
    /// transactions, which the ring needs.
    fn create(&self, tablets: bool) -> String {
        let without = if tablets {
            " AND tablets = {'enabled': false}"
        } else {
            ""
        };
        let copies: String = self
            .replication
            .iter()
            .map(|(datacenter, copies)| format!(", '{datacenter}': {copies}"))
            .collect();
        let name = &self.name;
        format!(
            "CREATE KEYSPACE IF NOT EXISTS {name} WITH replication = {{'class': 'NetworkTopologyStrategy'{copies}}}{without}"
        )
    }

    /// Returns the statement that creates the table with the applied version and the lock. The table's id is computed
    /// from its name, so that two processes that create it at once create the same table. Otherwise Cassandra gives
    /// each its own id, and the nodes disagree permanently.
    fn create_state(&self) -> String {
        let name = &self.name;
        let id = Uuid::new_v5(
            &Uuid::NAMESPACE_OID,
            format!("{name}.schema_state").as_bytes(),
        );
        format!(
            "CREATE TABLE IF NOT EXISTS {name}.schema_state (name text PRIMARY KEY, version int, holder uuid) WITH id = {id}"
        )
    }

    /// Returns the whole schema as text for cqlsh.
    #[must_use]
    pub fn print(&self) -> String {
        let Self { name, .. } = self;
        format!("{};\n\nUSE {name};\n\n{SCHEMA}", self.create(false))
    }
}

/// A version of the schema with its additional statements.
struct Version {
    number: i32,
    statements: Vec<String>,
}

/// Returns the versions of `schema.cql`, oldest first.
fn versions() -> Vec<Version> {
    let parts = SCHEMA.split("\n-- version ").skip(1);
    parts
        .filter_map(|part| {
            let (number, text) = part.split_once('\n')?;
            let code: Vec<&str> = text
                .lines()
                .map(|line| line.split("--").next().unwrap_or(line).trim_end())
                .filter(|line| !line.is_empty())
                .collect();
            let statements = code.join("\n");
            let statements = statements.split(';').map(str::trim);
            Some(Version {
                number: number.trim().parse().ok()?,
                statements: statements
                    .filter(|s| !s.is_empty())
                    .map(Into::into)
                    .collect(),
            })
        })
        .collect()
}

/// Returns the version that this program needs.
#[must_use]
pub fn wanted() -> i32 {
    versions().last().map_or(0, |version| version.number)
}

/// Returns the table and the column that a statement adds, if it adds one.
fn added_column(statement: &str) -> Option<(&str, &str)> {
    let (table, added) = statement
        .strip_prefix("ALTER TABLE ")?
        .split_once(" ADD IF NOT EXISTS ")?;
    Some((table, added.split(' ').next()?))
}

/// Adapts a statement to ScyllaDB. It has no setting for blocking read repair, because it always repairs before it
/// answers; it names the compression class differently; and it cannot add a column only if that is missing.
fn for_scylla(statement: &str) -> String {
    statement
        .replace("AND read_repair = 'BLOCKING'", "")
        .replace(" ADD IF NOT EXISTS ", " ADD ")
        .replace(
            "{'class': 'LZ4Compressor'",
            "{'sstable_compression': 'LZ4Compressor'",
        )
}

pub(super) fn failed(error: impl std::fmt::Display) -> Error {
    Error::Unavailable {
        operation: OPERATION,
        reason: error.to_string(),
    }
}

/// Returns a statement with the consistency of the settings, which is that of the session: with a quorum over all datacenters
/// no gateway would start while another one is away.
fn statement(text: impl Into<String>) -> Statement {
    let mut statement = Statement::new(text);
    statement.set_request_timeout(Some(STATEMENT_MAX));
    statement
}

/// Updates the keyspace to the version that this program needs. Returns whether anything changed. Idempotent.
///
/// # Errors
/// [`Error::Unavailable`] if the cluster refuses or does not answer in time. The caller may retry.
pub async fn apply(session: &Session, keyspace: &Keyspace) -> Result<bool> {
    let before = applied(session, keyspace).await?;
    if before >= wanted() {
        return Ok(false);
    }
    let first = versions().first().map_or(0, |version| version.number);
    if (1..first).contains(&before) {
        return Err(failed(format!(
            "the keyspace {} has version {before} of the tables, of a build that was never released; make a new one",
            keyspace.name
        )));
    }
    tracing::info!(
        keyspace = keyspace.name,
        "updating the schema; all nodes must agree"
    );
    let changed = bring_up_to_date(session, keyspace).await?;
    session.refresh_metadata().await.map_err(failed)?;
    Ok(changed)
}

async fn bring_up_to_date(session: &Session, keyspace: &Keyspace) -> Result<bool> {
    let of_tablets = ("scylla_keyspaces", "initial_tablets");
    let tablets = has_column(session, "system_schema", of_tablets).await?;
    run(session, &keyspace.create(tablets)).await?;
    run(session, &keyspace.create_state()).await?;
    let me = Uuid::new_v4();
    let mut patience = LOCK_ERRORS_MAX;
    loop {
        if applied(session, keyspace).await? >= wanted() {
            return Ok(false); // Another process was faster.
        }
        match lock(session, keyspace, me).await {
            Ok(true) => {
                // What the holder before it began may still be under way.
                session.await_schema_agreement().await.map_err(failed)?;
                // Another process may have finished between the look and the lock.
                let done = match applied(session, keyspace).await {
                    Ok(before) if before >= wanted() => Ok(Some(false)),
                    Ok(before) => migrate(session, keyspace, me, before)
                        .await
                        .map(|done| done.then_some(true)),
                    Err(error) => Err(error),
                };
                if let Err(error) = done {
                    // Its statement may still be under way.
                    drop(renew(session, keyspace, me, FAILED_TTL).await);
                    return Err(error);
                }
                unlock(session, keyspace, me).await;
                if let Some(changed) = done? {
                    return Ok(changed);
                }
            }
            // Processes that compete for the lock sometimes disturb each other.
            Err(error) if patience == 0 => return Err(error),
            Err(_) => patience -= 1,
            Ok(false) => {}
        }
        sleep(LOOK_EVERY).await;
    }
}

/// Returns the version of the existing schema; 0 if there is none.
pub(super) async fn applied(session: &Session, keyspace: &Keyspace) -> Result<i32> {
    let name = &keyspace.name;
    if !has_table(session, name, "schema_state").await? {
        return Ok(0);
    }
    let version = statement(format!(
        "SELECT version FROM {name}.schema_state WHERE name = 'version'"
    ));
    let rows = match rows(session, version.clone(), ()).await {
        Ok(rows) => rows,
        // Another process may be creating the table now, and the node asked may not know it yet.
        Err(_) => {
            session.await_schema_agreement().await.map_err(failed)?;
            rows(session, version, ()).await?
        }
    };
    let row = rows.maybe_first_row::<(Option<i32>,)>().map_err(failed)?;
    Ok(row.and_then(|(version,)| version).unwrap_or(0))
}

async fn has_table(session: &Session, keyspace: &str, table: &str) -> Result<bool> {
    let text =
        "SELECT table_name FROM system_schema.tables WHERE keyspace_name = ? AND table_name = ?";
    let found = rows(session, Statement::new(text), (keyspace, table)).await?;
    Ok(found.rows_num() > 0)
}

/// Whether a column that a statement adds exists. A process that died while it updated the schema may have added it.
async fn has_column(session: &Session, keyspace: &str, added: (&str, &str)) -> Result<bool> {
    let text = "SELECT column_name FROM system_schema.columns \
        WHERE keyspace_name = ? AND table_name = ? AND column_name = ?";
    let (table, column) = added;
    let found = rows(session, Statement::new(text), (keyspace, table, column)).await?;
    Ok(found.rows_num() > 0)
}

pub(super) async fn rows(
    session: &Session,
    statement: Statement,
    values: impl SerializeRow,
) -> Result<QueryRowsResult> {
    let result = session.query_unpaged(statement, values).await;
    result.map_err(failed)?.into_rows_result().map_err(failed)
}

/// Runs the statements of all versions after `before`. Returns false if it lost the lock. Two processes that create one
/// table at once would give it two ids, so none runs a statement without the lock.
async fn migrate(session: &Session, keyspace: &Keyspace, me: Uuid, before: i32) -> Result<bool> {
    let name = &keyspace.name;
    session.use_keyspace(name, false).await.map_err(failed)?;
    let scylla = has_table(session, "system_schema", "scylla_tables").await?;
    for version in versions().into_iter().filter(|v| v.number > before) {
        for text in &version.statements {
            if let Some(added) = added_column(text)
                && has_column(session, name, added).await?
            {
                continue;
            }
            let text = if scylla {
                for_scylla(text)
            } else {
                text.clone()
            };
            if !renew(session, keyspace, me, LOCK_TTL).await? {
                tracing::warn!(keyspace = %name, "another process took the schema lock; waiting for it");
                return Ok(false);
            }
            run(session, &text).await?;
        }
        let number = version.number;
        let text =
            format!("INSERT INTO {name}.schema_state (name, version) VALUES ('version', {number})");
        session
            .query_unpaged(statement(text), ())
            .await
            .map_err(failed)?;
        tracing::info!(keyspace = %name, version = number, "schema applied");
    }
    Ok(true)
}

/// Runs a statement that changes the schema, and waits until all nodes agree. It also waits if nothing changed, because
/// another process may have made the change a moment ago.
async fn run(session: &Session, text: &str) -> Result<()> {
    counter!("chat_store_schema_changes_total").increment(1);
    session
        .query_unpaged(statement(text), ())
        .await
        .map_err(failed)?;
    session.await_schema_agreement().await.map_err(failed)?;
    Ok(())
}

/// Takes the lock. Returns false if another process has it.
async fn lock(session: &Session, keyspace: &Keyspace, me: Uuid) -> Result<bool> {
    hold(session, keyspace, me, "null", LOCK_TTL).await
}

/// Holds the lock for so many seconds more. Returns false if the process does not have it any more.
async fn renew(session: &Session, keyspace: &Keyspace, me: Uuid, seconds: i32) -> Result<bool> {
    hold(session, keyspace, me, &me.to_string(), seconds).await
}

/// Sets the holder of the lock with a lightweight transaction, if it is still the one before, and returns whether this process
/// holds the lock then. It repeats what has an unknown outcome, which changes nothing more.
async fn hold(
    session: &Session,
    keyspace: &Keyspace,
    me: Uuid,
    before: &str,
    seconds: i32,
) -> Result<bool> {
    let name = &keyspace.name;
    let text = format!(
        "UPDATE {name}.schema_state USING TTL {seconds} SET holder = ? WHERE name = 'lock' IF holder = {before}"
    );
    let mut attempts = HOLD_ATTEMPTS;
    let result = loop {
        match session.query_unpaged(statement(text.as_str()), (me,)).await {
            Ok(result) => break result,
            Err(error) if attempts == 1 => return Err(failed(error)),
            Err(error) => tracing::debug!(%error, "whether the schema lock is held is unknown"),
        }
        attempts -= 1;
    };
    let rows = result.into_rows_result().map_err(failed)?;
    let row: Row = rows.first_row().map_err(failed)?;
    let holder = row.columns.get(1).and_then(Option::as_ref);
    Ok(was_applied(&row) || holder.and_then(CqlValue::as_uuid) == Some(me))
}

/// Whether a lightweight transaction was applied, from its first column, `[applied]`.
pub(super) fn was_applied(row: &Row) -> bool {
    let first = row.columns.first().and_then(Option::as_ref);
    first.and_then(CqlValue::as_boolean) == Some(true)
}

async fn unlock(session: &Session, keyspace: &Keyspace, me: Uuid) {
    let name = &keyspace.name;
    let text = format!("DELETE FROM {name}.schema_state WHERE name = 'lock' IF holder = ?");
    if let Err(error) = session.query_unpaged(statement(text), (me,)).await {
        tracing::warn!(%error, "could not release the schema lock; it expires within three minutes");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_is_cut_into_statements() {
        let versions = versions();
        assert_eq!(versions[0].number, 6);
        assert_eq!(versions[0].statements.len(), 25);
        for statement in versions.iter().flat_map(|v| &v.statements) {
            assert!(
                statement.starts_with("CREATE TABLE IF NOT EXISTS")
                    || added_column(statement).is_some(),
                "{statement}"
            );
            assert!(!for_scylla(statement).contains("read_repair"));
        }
        let added = "ALTER TABLE ring ADD IF NOT EXISTS level int";
        assert_eq!(added_column(added), Some(("ring", "level")));
        assert_eq!(for_scylla(added), "ALTER TABLE ring ADD level int");
    }

    #[test]
    fn the_printed_schema_begins_with_its_keyspace() {
        let keyspace = Keyspace {
            name: "chat".into(),
            replication: BTreeMap::from([("dc1".into(), 3), ("dc2".into(), 2)]),
        };
        assert!(keyspace.print().starts_with(
            "CREATE KEYSPACE IF NOT EXISTS chat WITH replication = {'class': 'NetworkTopologyStrategy', 'dc1': 3, 'dc2': 2};"
        ));
        let with_tablets = keyspace.create(true);
        assert!(with_tablets.ends_with("'dc2': 2} AND tablets = {'enabled': false}"));
    }
}
