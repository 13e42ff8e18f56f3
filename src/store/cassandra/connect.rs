//! The connection to a cluster: nodes, consistency, time-outs, TLS.

use std::{path::PathBuf, sync::Arc, time::Duration};

use scylla::{
    client::{
        execution_profile::ExecutionProfile, session::Session, session_builder::SessionBuilder,
    },
    policies::{
        load_balancing::{DefaultPolicy, LoadBalancingPolicy},
        retry::DefaultRetryPolicy,
    },
    statement::{Consistency, SerialConsistency},
};

use super::{
    super::{Error, Result},
    datacenters,
    schema::Keyspace,
    speculation::Speculation,
};

/// The interval of keep-alives to each node. A node that does not answer in time is not used.
const KEEPALIVE: Duration = Duration::from_secs(1);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval at which nodes are asked whether they agree on the schema. Each new table waits for that once.
const AGREED_EVERY: Duration = Duration::from_millis(20);

/// The settings of a cluster. They contain a password and must not be logged.
#[derive(Clone)]
pub struct Settings {
    pub nodes: Vec<String>,
    pub keyspace: Keyspace,
    /// The datacenter whose nodes are used. Others are not.
    pub datacenter: Option<String>,
    pub consistency: Consistency,
    pub user: Option<(String, String)>,
    pub tls: Option<TlsFiles>,
    pub timeout: Duration,
    /// Concurrent requests: this many reads, and this many writes.
    pub in_flight_max: usize,
    pub create_schema: bool,
}

/// Paths of PEM files.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    pub authority: PathBuf,
    /// A client certificate and its key, if the cluster requires one.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl TlsFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// The path of a file that cannot be used, and why.
    pub fn check(&self) -> std::io::Result<()> {
        tls(self).map(drop)
    }
}

/// Connects to a cluster without selecting a keyspace, and checks its datacenters. Returns the settings with the datacenter
/// in use also if they named none: nodes of another one that joins later have no copies yet, and are not to be asked.
///
/// # Errors
/// [`Error::Unavailable`] if no node can be reached, and [`Error::Unusable`] if a TLS file cannot be used or the settings do
/// not fit the cluster.
pub async fn connect(settings: &Settings) -> Result<(Session, Settings)> {
    let failed = |e: &dyn std::fmt::Display| Error::Unavailable {
        operation: "connect",
        reason: format!("{}: {e}", settings.nodes.join(", ")),
    };
    let tls = match &settings.tls {
        Some(files) => Some(tls(files).map_err(|e| Error::Unusable {
            reason: e.to_string(),
        })?),
        None => None,
    };
    let mut transactions = profile(settings, None).into_handle_with_label("transactions".into());
    let mut builder = SessionBuilder::new()
        .known_nodes(&settings.nodes)
        .tls_context(tls)
        .connection_timeout(settings.timeout)
        .keepalive_interval(KEEPALIVE)
        .keepalive_timeout(KEEPALIVE_TIMEOUT)
        .schema_agreement_interval(AGREED_EVERY)
        // `schema::apply` refreshes the metadata once, when all tables exist.
        .refresh_metadata_on_auto_schema_agreement(false)
        // Where the copies of this keyspace are is all that the driver needs to know. Others may have thousands of tables.
        .keyspaces_to_fetch([&settings.keyspace.name])
        .fetch_full_schema_metadata(false)
        .default_execution_profile_handle(transactions.clone());
    if let Some((user, password)) = &settings.user {
        builder = builder.user(user, password);
    }
    let session = builder.build().await.map_err(|e| failed(&e))?;
    let wanted = datacenters::Wanted {
        keyspace: &settings.keyspace,
        datacenter: settings.datacenter.as_deref(),
        consistency: settings.consistency,
    };
    let settings = Settings {
        datacenter: Some(datacenters::check(&session, &wanted).await?),
        ..settings.clone()
    };
    transactions.map_to_another_profile(profile(&settings, None));
    Ok((session, settings))
}

pub(super) fn profile(
    settings: &Settings,
    speculation: Option<Arc<Speculation>>,
) -> ExecutionProfile {
    ExecutionProfile::builder()
        .consistency(settings.consistency)
        .serial_consistency(Some(serial(settings.consistency)))
        .request_timeout(Some(settings.timeout))
        .load_balancing_policy(nodes(settings))
        .retry_policy(Arc::new(DefaultRetryPolicy::new()))
        .speculative_execution_policy(speculation.map(|policy| policy as _))
        .build()
}

/// Returns the policy that chooses the nodes of a request: first the replicas of what it reads or writes.
pub(super) fn nodes(settings: &Settings) -> Arc<dyn LoadBalancingPolicy> {
    let mut nodes = DefaultPolicy::builder().token_aware(true);
    if let Some(datacenter) = &settings.datacenter {
        nodes = nodes.prefer_datacenter(datacenter.clone());
    }
    nodes.build()
}

pub(super) fn serial(consistency: Consistency) -> SerialConsistency {
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
    if authorities.is_empty() {
        return Err(wrong(&files.authority, &"it has no certificate"));
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
