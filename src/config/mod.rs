//! The settings with their meaning, defaults and checks. `config/gateway.toml` shows all of them.
//!
//! Environment variables override the file: `CHAT__CLIENT__LISTEN`, `CHAT__STORE__EMBEDDED__PATH`, and so on.

mod attachments;
mod checks;
mod consumers;
mod input;
mod loaded;
mod push;
mod settings;
mod sources;

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, time::Duration};

pub use attachments::{Attachments, FilesKind, S3};
use checks::Checks;
pub use consumers::{Consumers, Webhook};
use ipnet::IpNet;
pub use push::{ApnsPush, FcmPush, Push, WebPush};
use serde::{Deserialize, Serialize};
use sources::{Refused, Sources};

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub client: Client,
    pub internal: Internal,
    pub store: Store,
    pub cluster: Cluster,
    pub auth: Auth,
    pub limits: Limits,
    pub memory: Memory,
    pub session: Session,
    pub conversation: Conversation,
    pub messages: Messages,
    pub attachments: Attachments,
    pub consumers: Consumers,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub webhooks: Vec<Webhook>,
    pub push: Push,
    pub drain: Drain,
    pub log: Log,
}

/// The public port.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Client {
    pub listen: SocketAddr,
    /// Origins of pages that may connect, such as `https://chat.example.org`, or `*` for all. The gateway's own origin
    /// is always allowed.
    pub origins: Vec<String>,
    /// Networks of the proxies in front of the gateway, such as `10.0.0.0/8`. Only their `X-Forwarded-For` or
    /// `Forwarded` headers determine a client's address.
    pub trusted_proxies: Vec<IpNet>,
    /// Whether each connection must begin with a PROXY protocol header, version 2.
    pub proxy_protocol: bool,
}

/// The port for health and metrics. It must never be reachable from outside.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Internal {
    pub listen: SocketAddr,
    pub hosts: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Store {
    pub kind: StoreKind,
    pub embedded: Embedded,
    pub cassandra: Cassandra,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreKind {
    #[default]
    Embedded,
    Cassandra,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Embedded {
    pub path: PathBuf,
    pub cache_mib: u64,
}

/// The connection to Apache Cassandra or ScyllaDB.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cassandra {
    /// Some nodes of the cluster. The driver finds the others through them.
    pub nodes: Vec<String>,
    pub keyspace: String,
    /// The datacenter whose nodes are used. Required if there is more than one.
    pub datacenter: Option<String>,
    /// The replication factors of a keyspace that the gateway creates, as options of `NetworkTopologyStrategy`.
    pub replication: BTreeMap<String, u32>,
    pub consistency: Consistency,
    pub create_schema: bool,
    pub username: Option<String>,
    pub password: Option<String>,
    /// A PEM file with the authority that signed the nodes' certificates. If set, TLS is used.
    pub tls_authority_file: Option<PathBuf>,
    pub tls_certificate_file: Option<PathBuf>,
    pub tls_key_file: Option<PathBuf>,
    pub timeout_ms: u64,
    pub requests_in_flight: usize,
}

impl fmt::Debug for Cassandra {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cassandra")
            .field("nodes", &self.nodes)
            .field("keyspace", &self.keyspace)
            .field("username", &self.username)
            .field("password", &self.password.as_ref().map(|_| "***"))
            .finish_non_exhaustive()
    }
}

/// The cluster of gateways that share one store.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    pub enabled: bool,
    /// The address at which the gateway accepts other gateways. It must never be reachable from outside.
    pub listen: SocketAddr,
    /// The address by which other gateways reach this one, such as `10.0.0.1:7400`.
    pub advertise: Option<String>,
    /// The secret that all gateways share, at least 32 bytes.
    pub secret: Option<String>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("enabled", &self.enabled)
            .field("listen", &self.listen)
            .field("advertise", &self.advertise)
            .field("secret", &self.secret.as_ref().map(|_| "***"))
            .finish()
    }
}

/// The consistency of reads and writes. Less than a quorum could lose acknowledged messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Consistency {
    LocalQuorum,
    Quorum,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Auth {
    /// Whether anyone on this machine may get a token for any user. Allowed only without keys and on loopback. Implied
    /// if there is no configuration file, there are no keys, and `client.listen` is loopback.
    pub development: bool,
    /// The keys that verify tokens. The token's algorithm and `kid` select one of them.
    pub keys: Vec<Key>,
    /// The `kid`s of the keys that may sign tokens with `role: service`. If empty, all keys may.
    pub service_keys: Vec<String>,
    /// The required `iss` of tokens, if set.
    pub issuer: Option<String>,
    /// The value that `aud` of tokens must contain, if set.
    pub audience: Option<String>,
    /// The allowed difference between clocks, in seconds.
    pub leeway_s: u64,
}

#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    pub algorithm: Algorithm,
    #[serde(default)]
    pub kid: Option<String>,
    /// The secret for HS256, at least 32 bytes.
    #[serde(default)]
    pub secret: Option<String>,
    /// The PEM file for all other algorithms.
    #[serde(default)]
    pub public_key_file: Option<PathBuf>,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            algorithm,
            kid,
            secret,
            public_key_file,
        } = self;
        f.debug_struct("Key")
            .field("algorithm", algorithm)
            .field("kid", kid)
            .field("secret", &secret.as_ref().map(|_| "***"))
            .field("public_key_file", public_key_file)
            .finish()
    }
}

/// The allowed signature algorithms. `none` is not among them, and a token cannot add one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Algorithm {
    HS256,
    RS256,
    ES256,
    EdDSA,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    pub body_bytes: usize,
    pub frame_bytes: usize,
    pub group_participants: usize,
    /// Conversations of one user, with those that the user has left: each is a row of their inbox. Further ones are refused
    /// with `too_large`.
    ///
    /// default: 20000
    pub conversations_per_user: usize,
    pub requests_per_second: u32,
    pub requests_burst: u32,
    /// Bytes of a user's requests and their replies: average and burst. Above it, requests wait.
    ///
    /// default: 1048576 and 2097152
    pub request_bytes_per_second: u32,
    pub request_bytes_burst: u32,
    /// Conversations that a user may create: average and burst. Above it, requests get `rate_limited`.
    ///
    /// default: 60 and 200
    pub creations_per_minute: u32,
    pub creations_burst: u32,
    /// Other users whom a user may bring into conversations, by creating or adding: average and burst. Above it,
    /// requests get `rate_limited`.
    ///
    /// default: 600 and 2000
    pub invitations_per_minute: u32,
    pub invitations_burst: u32,
    pub connections: usize,
    pub connections_per_user: usize,
    pub connections_per_address: usize,
    pub unauthenticated_connections: usize,
    pub connects_per_second_per_address: u32,
    pub connects_burst_per_address: u32,
    pub service_requests_per_second: u32,
    pub service_requests_burst: u32,
    pub outbox_bytes: usize,
    pub open_conversations: usize,
}

/// The memory of the gateway, without the queues of sockets and the store's block cache.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Memory {
    /// MiB. The default is [`crate::memory::default_mib`].
    pub mib: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Session {
    pub connect_timeout_ms: u64,
    pub ping_interval_ms: u64,
    pub request_timeout_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Conversation {
    pub idle_s: u64,
}

/// Changes of messages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Messages {
    /// Seconds in which a message may be edited. 0 means for ever.
    pub edit_window_s: u64,
    pub reactions_coalesce_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Drain {
    pub delay_ms: u64,
    pub spread_ms: u64,
    pub grace_ms: u64,
}

impl Drain {
    /// Returns the time after which all sockets of clients are closed, counted from the start of the drain.
    #[must_use]
    pub fn leave_within(&self) -> Duration {
        Duration::from_millis(self.delay_ms.saturating_add(self.spread_ms))
    }

    /// Returns the time limit of the whole drain.
    #[must_use]
    pub fn grace(&self) -> Duration {
        Duration::from_millis(self.grace_ms)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    pub format: LogFormat,
    pub filter: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    Text,
    Json,
}

impl Default for Client {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            origins: Vec::new(),
            trusted_proxies: Vec::new(),
            proxy_protocol: false,
        }
    }
}

impl Default for Internal {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 9090)),
            hosts: Vec::new(),
        }
    }
}

impl Default for Embedded {
    fn default() -> Self {
        Self {
            path: "data".into(),
            cache_mib: 64,
        }
    }
}

impl Default for Cassandra {
    fn default() -> Self {
        Self {
            nodes: vec!["127.0.0.1:9042".into()],
            keyspace: "chat".into(),
            datacenter: None,
            replication: BTreeMap::from([("replication_factor".into(), 3)]),
            consistency: Consistency::LocalQuorum,
            create_schema: true,
            username: None,
            password: None,
            tls_authority_file: None,
            tls_certificate_file: None,
            tls_key_file: None,
            timeout_ms: 2_000,
            requests_in_flight: 32,
        }
    }
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            enabled: false,
            listen: SocketAddr::from(([127, 0, 0, 1], 7400)),
            advertise: None,
            secret: None,
        }
    }
}

impl Default for Auth {
    fn default() -> Self {
        Self {
            development: false,
            keys: Vec::new(),
            service_keys: Vec::new(),
            issuer: None,
            audience: None,
            leeway_s: 10,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 16 << 10,
            frame_bytes: 64 << 10,
            group_participants: 1_000,
            conversations_per_user: 20_000,
            requests_per_second: 100,
            requests_burst: 500,
            request_bytes_per_second: 1 << 20,
            request_bytes_burst: 2 << 20,
            creations_per_minute: 60,
            creations_burst: 200,
            invitations_per_minute: 600,
            invitations_burst: 2_000,
            connections: 1_000_000,
            connections_per_user: 20,
            connections_per_address: 20_000,
            unauthenticated_connections: 4_096,
            connects_per_second_per_address: 500,
            connects_burst_per_address: 2_000,
            service_requests_per_second: 1_000,
            service_requests_burst: 5_000,
            outbox_bytes: 1 << 20,
            open_conversations: 200_000,
        }
    }
}

impl Default for Session {
    fn default() -> Self {
        Self {
            connect_timeout_ms: 10_000,
            ping_interval_ms: 25_000,
            request_timeout_ms: 10_000,
        }
    }
}

impl Default for Conversation {
    fn default() -> Self {
        Self { idle_s: 300 }
    }
}

impl Default for Messages {
    fn default() -> Self {
        Self {
            edit_window_s: 0,
            reactions_coalesce_ms: 250,
        }
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self {
            delay_ms: 0,
            spread_ms: 2_000,
            grace_ms: 20_000,
        }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self {
            format: LogFormat::Text,
            // The store's library logs each of its tables at `info`.
            filter: "info,fjall=warn,lsm_tree=warn,scylla=error".into(),
        }
    }
}

/// An error in the settings: which setting, where it is set, and why it is wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: {1}")]
    File(PathBuf, String),
    #[error("wrong settings:\n{}", .0.join("\n"))]
    Checks(Vec<String>),
}

/// The settings with the sources of their values.
pub struct Loaded {
    pub config: Config,
    /// Whether development tokens are on by default, because there is no file, there are no keys, and the address is
    /// loopback.
    pub development_implied: bool,
    sources: Sources,
}

impl Config {
    /// Reads and checks the settings: defaults, then `file`, then the environment.
    ///
    /// # Errors
    /// All wrong settings, each with its name and source.
    pub fn load(file: Option<PathBuf>) -> Result<Loaded, Error> {
        let (loaded, refused) = Self::read_sources(file)?;
        let mut wrong: Vec<_> = refused.iter().map(|refused| refused.text.clone()).collect();
        let found = Checks::wrong(&loaded).into_iter();
        wrong.extend(found.filter(|text| !is_in_doubt(text, &refused)));
        if wrong.is_empty() {
            Ok(loaded)
        } else {
            Err(Error::Checks(wrong))
        }
    }

    /// Reads the settings like [`load`](Self::load), but checks only their types, for a command that serves no clients.
    ///
    /// # Errors
    /// An error if a source cannot be read, or a setting in it is unknown or has another type.
    pub fn read(file: Option<PathBuf>) -> Result<Loaded, Error> {
        let (loaded, refused) = Self::read_sources(file)?;
        if refused.is_empty() {
            return Ok(loaded);
        }
        let texts = refused.into_iter().map(|refused| refused.text);
        Err(Error::Checks(texts.collect()))
    }

    /// Reads the settings. Those that are refused have their defaults.
    fn read_sources(file: Option<PathBuf>) -> Result<(Loaded, Vec<Refused>), Error> {
        let mut sources = Sources::default();
        if let Some(file) = &file {
            sources.read_file(file)?;
        }
        let mut refused = sources.read_environment(std::env::vars_os());
        refused.extend(sources.take_wrong());
        let config = sources
            .config()
            .map_err(|wrong| Error::Checks(vec![wrong.to_string()]))?;
        let mut loaded = Loaded {
            config,
            development_implied: false,
            sources,
        };
        let unsaid = loaded.origin("auth.development") == "default";
        let Self { auth, client, .. } = &mut loaded.config;
        if file.is_none() && unsaid && auth.keys.is_empty() && client.listen.ip().is_loopback() {
            auth.development = true;
            loaded.development_implied = true;
        }
        Ok((loaded, refused))
    }
}

/// Whether what a check found may only follow from a refused setting, which had its default when it was checked.
fn is_in_doubt(text: &str, refused: &[Refused]) -> bool {
    let section = |key: &str| key.split(['.', '[']).next().map(str::to_owned);
    refused
        .iter()
        .any(|refused| text.contains(&refused.key) || section(text) == section(&refused.key))
}
