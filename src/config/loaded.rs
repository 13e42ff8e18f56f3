//! The checks of the settings, and the sources of their values.

use super::{Algorithm, Config, Loaded, StoreKind};
use crate::{
    memory::{MIB_MAX, MIB_MIN},
    model::limits::GROUP_PARTICIPANTS_MAX,
};

/// The largest body with Cassandra: 64 of them with attachments must fit into half of a commit log segment of 32 MiB.
const CASSANDRA_BODY_BYTES_MAX: usize = 64 << 10;

/// The smallest outbox: a page of 500 inbox items with the longest names and previews must fit. In JSON, with every
/// character escaped, a frame may be six times as large.
const OUTBOX_BYTES_MIN: usize = 1 << 20;
/// The largest outbox. Its bytes are counted in 32 bits, with room for replies.
const OUTBOX_BYTES_MAX: usize = 1 << 30;

impl Loaded {
    pub(super) fn wrong(&self) -> Vec<String> {
        let Config {
            client,
            auth,
            limits,
            session,
            fanout,
            store,
            cluster,
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
            auth.development || !auth.keys.is_empty(),
            "auth.keys",
            "no keys to check tokens with. Set some; or, for development on this machine only, set \
             auth.development = true and client.listen to 127.0.0.1",
        );
        check(
            !auth.development || auth.keys.is_empty(),
            "auth.development",
            "anyone on this machine could act as any user: set it to false, or remove auth.keys",
        );
        check(
            !auth.development || client.listen.ip().is_loopback(),
            "client.listen",
            "development tokens are for loopback only: set auth.keys and auth.development = false, \
             or listen on 127.0.0.1",
        );
        for kid in &auth.service_keys {
            check(
                auth.keys.iter().any(|key| key.kid.as_ref() == Some(kid)),
                "auth.service_keys",
                &format!("{kid:?} is not the kid of any key in auth.keys"),
            );
        }
        for origin in &client.origins {
            let like = origin == "*" || (origin.contains("://") && !origin.ends_with('/'));
            check(
                like,
                "client.origins",
                &format!("{origin:?} is not an origin such as https://chat.example.org"),
            );
        }
        for (i, key) in auth.keys.iter().enumerate() {
            let symmetric = key.algorithm == Algorithm::HS256;
            let long = key.secret.as_ref().is_none_or(|s| s.len() >= 32);
            let at = format!("auth.keys[{i}]");
            check(
                key.secret.is_some() == symmetric && key.public_key_file.is_some() != symmetric,
                &at,
                "HS256 needs a secret; every other algorithm needs a public_key_file",
            );
            check(
                long,
                &at,
                "HS256 needs a secret of at least 32 bytes. Generate one with: openssl rand -base64 48",
            );
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
            limits.outbox_bytes >= OUTBOX_BYTES_MIN.max(8 * limits.frame_bytes)
                && limits.outbox_bytes <= OUTBOX_BYTES_MAX,
            "limits.outbox_bytes",
            "must be at least 1048576 and eight times limits.frame_bytes, and at most 1073741824",
        );
        for (key, value) in [
            ("limits.group_participants", limits.group_participants),
            ("limits.connections", limits.connections),
            ("limits.connections_per_user", limits.connections_per_user),
            (
                "limits.connections_per_address",
                limits.connections_per_address,
            ),
            (
                "limits.unauthenticated_connections",
                limits.unauthenticated_connections,
            ),
            (
                "limits.service_requests_per_second",
                limits.service_requests_per_second as usize,
            ),
            (
                "limits.service_requests_burst",
                limits.service_requests_burst as usize,
            ),
            ("limits.open_conversations", limits.open_conversations),
            (
                "limits.requests_per_second",
                limits.requests_per_second as usize,
            ),
            ("limits.requests_burst", limits.requests_burst as usize),
            (
                "limits.request_bytes_per_second",
                limits.request_bytes_per_second as usize,
            ),
            (
                "limits.request_bytes_burst",
                limits.request_bytes_burst as usize,
            ),
            (
                "limits.creations_per_minute",
                limits.creations_per_minute as usize,
            ),
            ("limits.creations_burst", limits.creations_burst as usize),
            (
                "limits.invitations_per_minute",
                limits.invitations_per_minute as usize,
            ),
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
            limits.invitations_burst as usize >= limits.group_participants,
            "limits.invitations_burst",
            "must be at least limits.group_participants, because one creation may name that many",
        );
        check(
            limits.group_participants <= GROUP_PARTICIPANTS_MAX,
            "limits.group_participants",
            "must be at most 10000: use channels for more",
        );
        check(
            self.config
                .memory
                .mib
                .is_none_or(|mib| (MIB_MIN..=MIB_MAX).contains(&mib)),
            "memory.mib",
            "must be at least 16 and at most 1048576",
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
            fanout.coalesce_ms_max <= 1_000,
            "fanout.coalesce_ms_max",
            "must be at most 1000",
        );
        check(
            store.embedded.cache_mib >= 8,
            "store.embedded.cache_mib",
            "must be at least 8",
        );
        let cassandra = &store.cassandra;
        let named = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        check(
            !cassandra.nodes.is_empty(),
            "store.cassandra.nodes",
            "must name at least one node, such as 10.0.0.1:9042",
        );
        check(
            cassandra.keyspace.len() <= 48
                && cassandra
                    .keyspace
                    .starts_with(|c: char| c.is_ascii_lowercase())
                && cassandra.keyspace.chars().all(named),
            "store.cassandra.keyspace",
            "must begin with a letter, consist of a-z, 0-9 and _, and have at most 48 characters",
        );
        let plain = |name: &String| !name.contains(['\'', '\\']);
        check(
            !cassandra.replication.is_empty()
                && cassandra.replication.keys().all(plain)
                && cassandra.replication.values().all(|&copies| copies > 0),
            "store.cassandra.replication",
            "must be replication factors by datacenter, or replication_factor = 3",
        );
        check(
            cassandra.username.is_some() == cassandra.password.is_some(),
            "store.cassandra.username",
            "goes with a password",
        );
        check(
            cassandra.tls_certificate_file.is_some() == cassandra.tls_key_file.is_some(),
            "store.cassandra.tls_certificate_file",
            "goes with tls_key_file",
        );
        check(
            cassandra.tls_certificate_file.is_none() || cassandra.tls_authority_file.is_some(),
            "store.cassandra.tls_authority_file",
            "is needed for TLS",
        );
        check(
            (100..=60_000).contains(&cassandra.timeout_ms),
            "store.cassandra.timeout_ms",
            "must be at least 100 and at most 60000",
        );
        check(
            (1..=1_024).contains(&cassandra.requests_in_flight),
            "store.cassandra.requests_in_flight",
            "must be at least 1 and at most 1024",
        );
        check(
            store.kind != StoreKind::Cassandra || limits.body_bytes <= CASSANDRA_BODY_BYTES_MAX,
            "limits.body_bytes",
            "must be at most 65536 with Cassandra, which refuses writes of more than half a commit log segment",
        );
        check(
            !cluster.enabled || store.kind == StoreKind::Cassandra,
            "cluster.enabled",
            "needs store.kind = \"cassandra\": an embedded store belongs to one gateway alone",
        );
        let reachable = |address: &String| {
            let port = address
                .rsplit_once(':')
                .map(|(host, port)| (host, port.parse::<u16>()));
            port.is_some_and(|(host, port)| !host.is_empty() && port.is_ok_and(|port| port > 0))
        };
        check(
            !cluster.enabled || cluster.advertise.as_ref().is_some_and(reachable),
            "cluster.advertise",
            "must be the address by which the other gateways reach this one, such as 10.0.0.1:7400",
        );
        check(
            !cluster.enabled || cluster.secret.as_ref().is_some_and(|s| s.len() >= 32),
            "cluster.secret",
            "must have at least 32 bytes, and be the same in all gateways. Generate one with: openssl rand -base64 48",
        );
        check(
            drain.grace_ms >= drain.spread_ms,
            "drain.grace_ms",
            "must be at least drain.spread_ms",
        );
        wrong
    }

    /// Returns the source of a setting: the file, the environment, or the defaults.
    pub(super) fn origin(&self, key: &str) -> String {
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

    /// Returns all settings with their values and sources. Secrets are hidden.
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
                    _ if key.ends_with("secret") || key.ends_with("password") => {
                        "\"***\"".to_owned()
                    }
                    other => serde_json::to_string(other).unwrap_or_default(),
                };
                lines.push(format!("{key} = {text}    # {}", self.origin(key)));
            }
        }
    }
}
