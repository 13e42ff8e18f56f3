//! The data of a gateway under test: a directory, or a keyspace of an existing cluster. Dropping it deletes both,
//! unless keyspaces are kept.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use scylla::{
    client::{
        execution_profile::ExecutionProfile, session::Session, session_builder::SessionBuilder,
    },
    policies::load_balancing::{NodeIdentifier, SingleTargetLoadBalancingPolicy},
    statement::{Consistency, unprepared::Statement},
};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::{Common, ending};

/// The data of one gateway, or of several on one store.
pub(crate) struct Data {
    directory: Arc<TempDir>,
    pub(crate) cluster: Option<Cluster>,
    /// Whether gateways over this data keep their default limits.
    pub(crate) default_limits: bool,
    /// Further settings of gateways over this data.
    pub(crate) more_settings: String,
}

/// A keyspace, and a session besides the gateway's.
pub(crate) struct Cluster {
    pub(crate) runtime: Runtime,
    pub(crate) session: Session,
    pub(crate) keyspace: String,
    pub(crate) nodes: Vec<String>,
    /// Whether the keyspace stays when this is dropped.
    keep: bool,
}

impl Data {
    pub(crate) fn new(common: &Common) -> anyhow::Result<Self> {
        let directory = ending::directory()?;
        let cluster = match &common.cassandra[..] {
            [] => None,
            nodes => Some(Cluster::connect(nodes, common.keep_keyspaces)?),
        };
        Ok(Self {
            directory,
            cluster,
            default_limits: false,
            more_settings: String::new(),
        })
    }

    /// A directory without a keyspace.
    pub(crate) fn directory() -> anyhow::Result<Self> {
        Ok(Self {
            directory: ending::directory()?,
            cluster: None,
            default_limits: false,
            more_settings: String::new(),
        })
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The settings with which a gateway keeps its data here.
    pub(crate) fn settings(&self) -> String {
        let path = self.file("store");
        let mut text = format!("store.embedded.path = \"{}\"\n", path.display());
        if let Some(Cluster {
            keyspace, nodes, ..
        }) = &self.cluster
        {
            text += &format!(
                "store.kind = \"cassandra\"\nstore.cassandra.keyspace = \"{keyspace}\"\nstore.cassandra.nodes = {nodes:?}\n"
            );
        }
        text
    }

    /// MiB on disk: of the embedded store, or of the tables on all nodes of the cluster, without what they have not
    /// flushed. `None` if the cluster does not say.
    pub(crate) fn disk_mib(&self) -> Option<f64> {
        match &self.cluster {
            None => Some(disk_mib(&self.file("store"))),
            Some(cluster) => cluster.disk_mib().ok(),
        }
    }

    /// MiB on disk of the embedded store's tables, without its journals.
    pub(crate) fn tables_mib(&self) -> f64 {
        disk_mib(&self.file("store/keyspaces"))
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> anyhow::Result<PathBuf> {
        let path = self.file(name);
        fs::write(&path, text)?;
        Ok(path)
    }
}

impl Cluster {
    fn connect(nodes: &[String], keep: bool) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        let profile = ExecutionProfile::builder()
            .consistency(Consistency::LocalQuorum)
            .request_timeout(Some(Duration::from_secs(30)))
            .build();
        let keyspace = format!("loadtest_{}", uuid::Uuid::new_v4().simple());
        let session = runtime
            .block_on(
                SessionBuilder::new()
                    .known_nodes(nodes)
                    .default_execution_profile_handle(profile.into_handle())
                    .keyspaces_to_fetch([&keyspace])
                    .fetch_full_schema_metadata(false)
                    .build(),
            )
            .with_context(|| format!("--cassandra: no cluster answers at {}", nodes.join(", ")))?;
        Ok(Self {
            runtime,
            session,
            keyspace,
            nodes: nodes.to_vec(),
            keep,
        })
    }

    pub(crate) fn execute(&self, text: String) -> anyhow::Result<()> {
        self.runtime
            .block_on(self.session.query_unpaged(text, ()))?;
        Ok(())
    }

    /// Writes to each table, counted by each node in its virtual tables (Cassandra 4 or newer).
    pub(crate) fn local_writes(&self) -> anyhow::Result<Vec<(String, f64)>> {
        self.of_each_node(
            "SELECT table_name, count FROM system_views.local_write_latency WHERE keyspace_name = ? ALLOW FILTERING",
        )
    }

    /// Disk space of the tables on all nodes together.
    fn disk_mib(&self) -> anyhow::Result<f64> {
        let tables = self.of_each_node(
            "SELECT table_name, mebibytes FROM system_views.disk_usage WHERE keyspace_name = ?",
        )?;
        Ok(tables.iter().map(|(_, mib)| mib).sum())
    }

    /// Asks each node for a number of each table of the keyspace.
    fn of_each_node(&self, question: &str) -> anyhow::Result<Vec<(String, f64)>> {
        let mut found = Vec::new();
        let nodes = self.session.get_cluster_state();
        for node in nodes.get_nodes_info() {
            let mut statement = Statement::new(question);
            statement.set_consistency(Consistency::One);
            statement.set_load_balancing_policy(Some(SingleTargetLoadBalancingPolicy::new(
                NodeIdentifier::Node(node.clone()),
                None,
            )));
            let rows = self
                .runtime
                .block_on(self.session.query_unpaged(statement, (&self.keyspace,)))?
                .into_rows_result()?;
            for row in rows.rows::<(String, i64)>()? {
                let (table, count) = row?;
                found.push((table, count as f64));
            }
        }
        Ok(found)
    }
}

/// MiB on disk of all files in a directory. Files that disappear meanwhile do not count.
fn disk_mib(directory: &Path) -> f64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let of = |entry: fs::DirEntry| match entry.metadata() {
        Ok(about) if about.is_dir() => disk_mib(&entry.path()),
        // A journal is longer than what it uses on disk.
        Ok(about) => (about.blocks() * 512) as f64 / f64::from(1 << 20),
        Err(_) => 0.0,
    };
    entries.map(of).sum()
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        if let Err(error) = self.execute(format!("DROP KEYSPACE IF EXISTS {}", self.keyspace)) {
            eprintln!(
                "keyspace {} could not be dropped: {error:#}. Drop it by hand",
                self.keyspace
            );
        }
    }
}
