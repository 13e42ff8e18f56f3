//! Every setting: its meaning, its default, its check. `config/gateway.toml` shows them all.
//!
//! The file is overlaid by the environment: `CHAT__CLIENT__LISTEN`, `CHAT__STORE__EMBEDDED__PATH`, and so on.

use std::{fmt, net::SocketAddr, path::PathBuf, time::Duration};

use figment::{
    Figment,
    providers::{Env, Format, Serialized, Toml},
};
use serde::{Deserialize, Serialize};

use crate::chat;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub client: Client,
    pub internal: Internal,
    pub store: Store,
    pub auth: Auth,
    pub limits: Limits,
    pub session: Session,
    pub conversation: Conversation,
    pub drain: Drain,
    pub log: Log,
}

/// What strangers can reach.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Client {
    pub listen: SocketAddr,
    /// Origins of pages that may connect, as `https://chat.example.org`; `*` for all. The gateway's own is always allowed.
    pub origins: Vec<String>,
}

/// Health and metrics; never to be reachable from outside.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Internal {
    pub listen: SocketAddr,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Store {
    pub kind: StoreKind,
    pub embedded: Embedded,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreKind {
    #[default]
    Embedded,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Embedded {
    pub path: PathBuf,
    pub cache_mib: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Auth {
    /// Tokens are checked with any of these; which one, the token's algorithm and `kid` say. Empty: development tokens.
    pub keys: Vec<Key>,
    /// If set, `iss` must be this.
    pub issuer: Option<String>,
    /// If set, `aud` must contain this.
    pub audience: Option<String>,
    /// Clocks may differ by this much.
    pub leeway_s: u64,
}

#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    pub algorithm: Algorithm,
    #[serde(default)]
    pub kid: Option<String>,
    /// HS256 only: at least 32 bytes.
    #[serde(default)]
    pub secret: Option<String>,
    /// The others: a PEM file.
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

/// `none` is not among them, and a token cannot choose.
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
    pub requests_per_second: u32,
    pub requests_burst: u32,
    pub connections: usize,
    pub connections_per_user: usize,
    pub connects_per_second_per_address: u32,
    pub connects_burst_per_address: u32,
    pub outbox_bytes: usize,
    pub open_conversations: usize,
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

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Drain {
    pub delay_ms: u64,
    pub spread_ms: u64,
    pub grace_ms: u64,
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
        }
    }
}

impl Default for Internal {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 9090)),
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

impl Default for Auth {
    fn default() -> Self {
        Self {
            keys: Vec::new(),
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
            requests_per_second: 100,
            requests_burst: 500,
            connections: 1_000_000,
            connections_per_user: 20,
            connects_per_second_per_address: 500,
            connects_burst_per_address: 2_000,
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
            // The store's library tells of each of its tables at `info`.
            filter: "info,fjall=warn,lsm_tree=warn".into(),
        }
    }
}

/// A setting is wrong: which, where, and why.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Source(Box<figment::Error>),
    #[error("{0} does not exist or cannot be read")]
    File(PathBuf),
    #[error("wrong settings:\n{}", .0.join("\n"))]
    Checks(Vec<String>),
}

/// The settings with the places they come from.
pub struct Loaded {
    pub config: Config,
    figment: Figment,
}

impl Config {
    /// Reads the settings: defaults, then `file`, then the environment.
    ///
    /// # Errors
    /// Every setting that is wrong, by its name and where it was set.
    pub fn load(file: Option<PathBuf>) -> Result<Loaded, Error> {
        let mut figment = Figment::from(Serialized::defaults(Self::default()));
        if let Some(file) = file {
            if std::fs::File::open(&file).is_err() {
                return Err(Error::File(file));
            }
            figment = figment.merge(Toml::file_exact(file));
        }
        let figment = figment.merge(Env::prefixed("CHAT__").split("__"));
        let config: Self = figment.extract().map_err(|e| Error::Source(Box::new(e)))?;
        let loaded = Loaded { config, figment };
        let wrong = loaded.wrong();
        if wrong.is_empty() {
            Ok(loaded)
        } else {
            Err(Error::Checks(wrong))
        }
    }

    /// Without keys, tokens are signed with a random key of this gateway's data directory: for development.
    #[must_use]
    pub fn development(&self) -> bool {
        self.auth.keys.is_empty()
    }
}

impl Loaded {
    fn wrong(&self) -> Vec<String> {
        let Config {
            client,
            auth,
            limits,
            session,
            store,
            drain,
            ..
        } = &self.config;
        let mut wrong = Vec::new();
        let mut check = |holds: bool, key: &str, text: &str| {
            if !holds {
                wrong.push(format!("{key} ({}): {text}", self.origin(key)));
            }
        };
        check(
            !self.config.development() || client.listen.ip().is_loopback(),
            "client.listen",
            "development tokens are for loopback only: set auth.keys, or listen on 127.0.0.1",
        );
        for origin in &client.origins {
            let like = origin == "*" || (origin.contains("://") && !origin.ends_with('/'));
            check(
                like,
                "client.origins",
                &format!("{origin:?} is not like https://chat.example.org"),
            );
        }
        for (i, key) in auth.keys.iter().enumerate() {
            let symmetric = key.algorithm == Algorithm::HS256;
            let long = key.secret.as_ref().is_none_or(|s| s.len() >= 32);
            let at = format!("auth.keys[{i}]");
            check(
                key.secret.is_some() == symmetric && key.public_key_file.is_some() != symmetric,
                &at,
                "HS256 takes a secret, every other algorithm a public_key_file",
            );
            check(long, &at, "a secret has at least 32 bytes");
        }
        check(
            limits.body_bytes >= 1,
            "limits.body_bytes",
            "must be at least 1",
        );
        check(
            limits.frame_bytes >= limits.body_bytes + 1024,
            "limits.frame_bytes",
            "must be at least limits.body_bytes + 1024",
        );
        check(
            limits.outbox_bytes >= OUTBOX_BYTES_MIN.max(8 * limits.frame_bytes),
            "limits.outbox_bytes",
            "must be at least 1048576 and eight times limits.frame_bytes",
        );
        for (key, value) in [
            ("limits.group_participants", limits.group_participants),
            ("limits.connections", limits.connections),
            ("limits.connections_per_user", limits.connections_per_user),
            ("limits.open_conversations", limits.open_conversations),
            (
                "limits.requests_per_second",
                limits.requests_per_second as usize,
            ),
            ("limits.requests_burst", limits.requests_burst as usize),
            (
                "limits.connects_per_second_per_address",
                limits.connects_per_second_per_address as usize,
            ),
            (
                "limits.connects_burst_per_address",
                limits.connects_burst_per_address as usize,
            ),
        ] {
            check(value >= 1, key, "must be at least 1");
        }
        check(
            limits.group_participants <= 10_000,
            "limits.group_participants",
            "may be at most 10000: larger ones are channels",
        );
        check(
            session.connect_timeout_ms >= 100,
            "session.connect_timeout_ms",
            "must be at least 100",
        );
        check(
            session.ping_interval_ms >= 100,
            "session.ping_interval_ms",
            "must be at least 100",
        );
        check(
            session.request_timeout_ms >= 100,
            "session.request_timeout_ms",
            "must be at least 100",
        );
        check(
            store.embedded.cache_mib >= 8,
            "store.embedded.cache_mib",
            "must be at least 8",
        );
        check(
            drain.grace_ms >= drain.spread_ms,
            "drain.grace_ms",
            "must be at least drain.spread_ms",
        );
        wrong
    }

    /// Where a setting comes from: the file, the environment, or the defaults.
    fn origin(&self, key: &str) -> String {
        let key = key.split('[').next().unwrap_or(key);
        let Some(metadata) = self.figment.find_metadata(key) else {
            return "default".into();
        };
        match &metadata.source {
            Some(figment::Source::File(path)) => path.display().to_string(),
            _ if metadata.name.contains("environment") => {
                format!(
                    "environment CHAT__{}",
                    key.to_uppercase().replace('.', "__")
                )
            }
            _ => "default".into(),
        }
    }

    /// Every setting, its value and its origin, secrets hidden.
    #[must_use]
    pub fn show(&self) -> String {
        let value = figment::value::Value::serialize(&self.config);
        let mut lines = Vec::new();
        if let Ok(value) = value {
            self.show_value("", &value, &mut lines);
        }
        lines.join("\n")
    }

    fn show_value(&self, key: &str, value: &figment::value::Value, lines: &mut Vec<String>) {
        use figment::value::Value;
        match value {
            Value::Dict(_, dict) => {
                for (name, value) in dict {
                    let key = if key.is_empty() {
                        name.clone()
                    } else {
                        format!("{key}.{name}")
                    };
                    self.show_value(&key, value, lines);
                }
            }
            Value::Array(_, items) if items.iter().any(|v| matches!(v, Value::Dict(..))) => {
                for (i, item) in items.iter().enumerate() {
                    self.show_value(&format!("{key}[{i}]"), item, lines);
                }
            }
            Value::Empty(..) => {}
            value => {
                let text = match value {
                    _ if key.ends_with("secret") => "\"***\"".to_owned(),
                    other => serde_json::to_string(other).unwrap_or_default(),
                };
                lines.push(format!("{key} = {text}    # {}", self.origin(key)));
            }
        }
    }
}

/// A page of 500 inbox items with the longest names and previews must fit. And as JSON, with every character
/// escaped, a frame may become six times as large.
const OUTBOX_BYTES_MIN: usize = 1 << 20;

impl Limits {
    /// Bytes of a page of history, about. Other things must fit into the same outbox.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.outbox_bytes / 4
    }

    #[must_use]
    pub fn protocol(&self) -> crate::protocol::Limits {
        use crate::model::limits::{ATTACHMENTS_MAX, PAGE_ENTRIES_MAX, WATCHED_MAX};
        crate::protocol::Limits {
            frame_bytes: self.frame_bytes,
            body_bytes: self.body_bytes,
            attachments: ATTACHMENTS_MAX,
            group_participants: self.group_participants,
            page_entries: PAGE_ENTRIES_MAX,
            requests_per_second: self.requests_per_second,
            requests_burst: self.requests_burst,
            watched_users: WATCHED_MAX,
        }
    }
}

impl Config {
    /// What conversations must know.
    #[must_use]
    pub fn conversations(&self) -> chat::Settings {
        chat::Settings {
            body_bytes_max: self.limits.body_bytes,
            group_participants_max: self.limits.group_participants,
            idle: Duration::from_secs(self.conversation.idle_s),
            operation_timeout: Duration::from_millis(self.session.request_timeout_ms),
            open_max: self.limits.open_conversations,
        }
    }
}
