//! The checks of the settings, in one function for each section.

mod push;

use std::{net::SocketAddr, ops::RangeInclusive, path::Path};

use reqwest::Url;
use tracing_subscriber::filter::Targets;

use super::{Algorithm, Config, FilesKind, Limits, Loaded, StoreKind};
use crate::{
    files::Scanner,
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

/// The longest time in which a message may be edited, unless that is for ever: ten years.
const EDIT_WINDOW_S_MAX: u64 = 10 * 365 * 86_400;

/// The checks of all settings, and what they found.
pub(super) struct Checks<'a> {
    pub(super) loaded: &'a Loaded,
    wrong: Vec<String>,
}

impl<'a> Checks<'a> {
    /// Returns a text for each wrong setting, with its name and source.
    pub(super) fn wrong(loaded: &'a Loaded) -> Vec<String> {
        let wrong = Vec::new();
        let mut checks = Self { loaded, wrong };
        checks.auth();
        checks.client();
        checks.ports();
        checks.log();
        checks.files();
        checks.keys();
        checks.limits();
        checks.memory();
        checks.session();
        checks.messages();
        checks.store();
        checks.nodes();
        checks.cassandra();
        checks.cluster();
        checks.attachments();
        checks.s3();
        checks.consumers();
        checks.webhooks();
        checks.push();
        checks.web_push();
        checks.fcm_and_apns();
        checks.drain();
        checks.internal();
        checks.wrong
    }

    pub(super) fn check(&mut self, holds: bool, key: &str, text: &str) {
        if !holds {
            let origin = self.loaded.origin(key);
            self.wrong.push(format!("{key} ({origin}): {text}"));
        }
    }

    pub(super) fn within(&mut self, key: &str, value: u64, bounds: RangeInclusive<u64>) {
        let (least, most) = (bounds.start(), bounds.end());
        let text = format!("must be from {least} to {most}");
        self.check(bounds.contains(&value), key, &text);
    }

    fn auth(&mut self) {
        let Config { auth, client, .. } = &self.loaded.config;
        self.check(
            auth.development || !auth.keys.is_empty(),
            "auth.keys",
            "no keys to check tokens with. Set some; or, for development on this machine only, set \
             auth.development = true and client.listen to 127.0.0.1",
        );
        self.check(
            !auth.development || auth.keys.is_empty(),
            "auth.development",
            "anyone on this machine could act as any user: set it to false, or remove auth.keys",
        );
        self.check(
            !auth.development || client.listen.ip().is_loopback(),
            "client.listen",
            "development tokens are for loopback only: set auth.keys and auth.development = false, \
             or listen on 127.0.0.1",
        );
        for (i, kid) in auth.service_keys.iter().enumerate() {
            self.check(
                auth.keys.iter().any(|key| key.kid.as_ref() == Some(kid)),
                &format!("auth.service_keys[{i}]"),
                "must be the kid of a key in auth.keys, not the key itself",
            );
        }
    }

    fn client(&mut self) {
        let Config { client, .. } = &self.loaded.config;
        for (i, origin) in client.origins.iter().enumerate() {
            self.check(
                origin == "*" || is_page_origin(origin),
                &format!("client.origins[{i}]"),
                "must be an origin such as https://chat.example.org, without a path",
            );
        }
    }

    /// Each port is opened alone.
    fn ports(&mut self) {
        let Config {
            client,
            internal,
            cluster,
            ..
        } = &self.loaded.config;
        let mut taken = vec![("client.listen", client.listen)];
        for (key, listen, is_used) in [
            ("internal.listen", internal.listen, true),
            ("cluster.listen", cluster.listen, cluster.enabled),
        ] {
            let same = taken
                .iter()
                .find(|(_, other)| is_used && meet(*other, listen));
            let other = same.map(|(other, _)| *other).unwrap_or_default();
            self.check(same.is_none(), key, &format!("{other} has this port too"));
            taken.push((key, listen));
        }
    }

    fn log(&mut self) {
        self.check(
            self.loaded.config.log.filter.parse::<Targets>().is_ok(),
            "log.filter",
            "must be levels of the log, such as info or info,fjall=warn",
        );
    }

    /// Errors show the paths of files, so a key must not be where its path belongs.
    fn files(&mut self) {
        let Config {
            auth, store, push, ..
        } = &self.loaded.config;
        let of_keys = auth.keys.iter().enumerate();
        let of_keys = of_keys.map(|(i, key)| {
            (
                format!("auth.keys[{i}].public_key_file"),
                &key.public_key_file,
            )
        });
        let cassandra = &store.cassandra;
        let others = [
            (
                "store.cassandra.tls_authority_file",
                &cassandra.tls_authority_file,
            ),
            (
                "store.cassandra.tls_certificate_file",
                &cassandra.tls_certificate_file,
            ),
            ("store.cassandra.tls_key_file", &cassandra.tls_key_file),
            ("push.web.key_file", &push.web.key_file),
            ("push.fcm.key_file", &push.fcm.key_file),
            ("push.apns.key_file", &push.apns.key_file),
        ];
        for (key, path) in of_keys.chain(others.map(|(key, path)| (key.to_owned(), path))) {
            let text = path
                .as_deref()
                .map(Path::to_string_lossy)
                .unwrap_or_default();
            self.check(
                !text.contains("-----BEGIN") && !text.contains(['\n', '{']),
                &key,
                "must be the path of a file, not what is in it",
            );
        }
    }

    fn keys(&mut self) {
        let Config { auth, .. } = &self.loaded.config;
        for (i, key) in auth.keys.iter().enumerate() {
            let symmetric = key.algorithm == Algorithm::HS256;
            let long = key.secret.as_ref().is_none_or(|s| s.len() >= 32);
            let at = format!("auth.keys[{i}]");
            self.check(
                key.secret.is_some() == symmetric && key.public_key_file.is_some() != symmetric,
                &at,
                "HS256 needs a secret; every other algorithm needs a public_key_file",
            );
            self.check(
                long,
                &at,
                "HS256 needs a secret of at least 32 bytes. Generate one with: openssl rand -base64 48",
            );
        }
    }

    fn limits(&mut self) {
        let Config { limits, .. } = &self.loaded.config;
        self.check(
            limits.body_bytes >= 1,
            "limits.body_bytes",
            "must be at least 1",
        );
        self.check(
            limits.frame_bytes >= limits.body_bytes + 1024,
            "limits.frame_bytes",
            "must be at least limits.body_bytes + 1024",
        );
        self.check(
            limits.outbox_bytes >= OUTBOX_BYTES_MIN.max(8 * limits.frame_bytes)
                && limits.outbox_bytes <= OUTBOX_BYTES_MAX,
            "limits.outbox_bytes",
            "must be at least 1048576 and eight times limits.frame_bytes, and at most 1073741824",
        );
        for (key, value) in counts(limits) {
            self.check(value >= 1, key, "must be at least 1");
        }
        self.check(
            limits.invitations_burst as usize >= limits.group_participants,
            "limits.invitations_burst",
            "must be at least limits.group_participants, because one creation may name that many",
        );
        self.check(
            limits.group_participants <= GROUP_PARTICIPANTS_MAX,
            "limits.group_participants",
            "must be at most 10000: use channels for more",
        );
    }

    fn memory(&mut self) {
        self.check(
            self.loaded
                .config
                .memory
                .mib
                .is_none_or(|mib| (MIB_MIN..=MIB_MAX).contains(&mib)),
            "memory.mib",
            "must be at least 16 and at most 1048576",
        );
    }

    fn session(&mut self) {
        let Config { session, .. } = &self.loaded.config;
        self.check(
            session.connect_timeout_ms >= 100,
            "session.connect_timeout_ms",
            "must be at least 100",
        );
        self.check(
            session.ping_interval_ms >= 100,
            "session.ping_interval_ms",
            "must be at least 100",
        );
        self.check(
            session.request_timeout_ms >= 100,
            "session.request_timeout_ms",
            "must be at least 100",
        );
    }

    fn messages(&mut self) {
        let Config { messages, .. } = &self.loaded.config;
        self.check(
            messages.edit_window_s <= EDIT_WINDOW_S_MAX,
            "messages.edit_window_s",
            "must be at most 315360000 (ten years); 0 means for ever",
        );
        self.check(
            (10..=10_000).contains(&messages.reactions_coalesce_ms),
            "messages.reactions_coalesce_ms",
            "must be at least 10 and at most 10000",
        );
    }

    fn store(&mut self) {
        let Config { store, limits, .. } = &self.loaded.config;
        self.check(
            store.embedded.cache_mib >= 8,
            "store.embedded.cache_mib",
            "must be at least 8",
        );
        self.check(
            store.kind != StoreKind::Cassandra || limits.body_bytes <= CASSANDRA_BODY_BYTES_MAX,
            "limits.body_bytes",
            "must be at most 65536 with Cassandra, which refuses writes of more than half a commit log segment",
        );
    }

    fn nodes(&mut self) {
        let nodes = &self.loaded.config.store.cassandra.nodes;
        self.check(
            !nodes.is_empty(),
            "store.cassandra.nodes",
            "must name at least one node, such as 10.0.0.1:9042",
        );
        for (i, node) in nodes.iter().enumerate() {
            self.check(
                !node.is_empty() && node.chars().all(in_hosts),
                &format!("store.cassandra.nodes[{i}]"),
                "must be an address such as 10.0.0.1:9042",
            );
        }
    }

    fn cassandra(&mut self) {
        let Config { store, .. } = &self.loaded.config;
        let cassandra = &store.cassandra;
        let named = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        self.check(
            cassandra.keyspace.len() <= 48
                && cassandra
                    .keyspace
                    .starts_with(|c: char| c.is_ascii_lowercase())
                && cassandra.keyspace.chars().all(named),
            "store.cassandra.keyspace",
            "must begin with a letter, consist of a-z, 0-9 and _, and have at most 48 characters",
        );
        let plain = |name: &String| !name.contains(['\'', '\\']);
        self.check(
            !cassandra.replication.is_empty()
                && cassandra.replication.keys().all(plain)
                && cassandra.replication.values().all(|&copies| copies > 0),
            "store.cassandra.replication",
            "must be replication factors by datacenter, or replication_factor = 3",
        );
        self.check(
            cassandra.username.is_some() == cassandra.password.is_some(),
            "store.cassandra.username",
            "must be set together with store.cassandra.password",
        );
        self.check(
            cassandra.tls_certificate_file.is_some() == cassandra.tls_key_file.is_some(),
            "store.cassandra.tls_certificate_file",
            "must be set together with store.cassandra.tls_key_file",
        );
        self.check(
            cassandra.tls_certificate_file.is_none() || cassandra.tls_authority_file.is_some(),
            "store.cassandra.tls_authority_file",
            "must be set for TLS",
        );
        self.check(
            (100..=60_000).contains(&cassandra.timeout_ms),
            "store.cassandra.timeout_ms",
            "must be at least 100 and at most 60000",
        );
        self.check(
            (1..=1_024).contains(&cassandra.requests_in_flight),
            "store.cassandra.requests_in_flight",
            "must be at least 1 and at most 1024",
        );
    }

    fn cluster(&mut self) {
        let Config { cluster, store, .. } = &self.loaded.config;
        self.check(
            !cluster.enabled || store.kind == StoreKind::Cassandra,
            "cluster.enabled",
            "needs store.kind = \"cassandra\": an embedded store belongs to one gateway alone",
        );
        let reachable = |address: &String| {
            let port = address
                .rsplit_once(':')
                .map(|(host, port)| (host, port.parse::<u16>()));
            port.is_some_and(|(host, port)| {
                !host.is_empty() && host.chars().all(in_hosts) && port.is_ok_and(|port| port > 0)
            })
        };
        self.check(
            !cluster.enabled || cluster.advertise.as_ref().is_some_and(reachable),
            "cluster.advertise",
            "must be the address by which the other gateways reach this one, such as 10.0.0.1:7400",
        );
        // Without a cluster it may still be the key of the addresses of files.
        let is_long = |secret: &String| secret.len() >= 32;
        self.check(
            cluster.secret.as_ref().map_or(!cluster.enabled, is_long),
            "cluster.secret",
            "must have at least 32 bytes, and be the same in all gateways. Generate one with: openssl rand -base64 48",
        );
    }

    fn attachments(&mut self) {
        let of = &self.loaded.config.attachments;
        let bounds = [
            ("size_max_mib", of.size_max_mib, 1, 5_120),
            ("user_mib_per_day", of.user_mib_per_day, 1, 1 << 20),
            (
                "uploads_per_minute",
                of.uploads_per_minute.into(),
                1,
                10_000,
            ),
            ("uploads_at_once", of.uploads_at_once as u64, 1, 64),
            ("min_free_mib", of.min_free_mib, 0, 1 << 30),
            ("orphan_h", of.orphan_h, 1, 168),
            ("url_window_s", of.url_window_s, 60, 3_600),
            ("image_threads", of.image_threads as u64, 0, 4),
            ("image_megapixels", of.image_megapixels, 1, 200),
            ("thumb_px", of.thumb_px.into(), 64, 2_048),
        ];
        for (name, value, least, most) in bounds {
            let key = format!("attachments.{name}");
            let text = format!("must be from {least} to {most}");
            self.check((least..=most).contains(&value), &key, &text);
        }
        self.check(
            of.secret.as_ref().is_none_or(|secret| secret.len() >= 32),
            "attachments.secret",
            "must have at least 32 bytes. Generate one with: openssl rand -base64 48",
        );
        let scanner = of
            .scanner
            .as_ref()
            .map(|address| address.parse::<Scanner>());
        if let Some(Err(text)) = scanner {
            self.check(false, "attachments.scanner", text);
        }
    }

    fn s3(&mut self) {
        let Config { attachments, .. } = &self.loaded.config;
        if attachments.store != FilesKind::S3 {
            return;
        }
        let s3 = &attachments.s3;
        self.check(
            s3.endpoint.as_deref().is_some_and(is_origin),
            "attachments.s3.endpoint",
            "must be the address of the storage without a path, such as https://s3.eu-central-1.amazonaws.com",
        );
        self.check(
            !s3.region.is_empty(),
            "attachments.s3.region",
            "must not be empty. Storages without regions mostly take us-east-1",
        );
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        self.check(
            s3.bucket
                .as_ref()
                .is_some_and(|name| (3..=63).contains(&name.len()) && name.chars().all(plain)),
            "attachments.s3.bucket",
            "must be the name of a bucket: 3 to 63 characters of a-z, 0-9, - and .",
        );
        let in_keys = |c: char| c.is_ascii_alphanumeric() || "-._/".contains(c);
        let is_folder = s3.prefix.ends_with('/') && !s3.prefix.starts_with('/');
        self.check(
            s3.prefix.is_empty()
                || is_folder
                    && s3.prefix.len() <= 512
                    && s3.prefix.chars().all(in_keys)
                    && !s3.prefix.contains("//")
                    && !s3.prefix.split('/').any(|part| part == "." || part == ".."),
            "attachments.s3.prefix",
            "must be empty, or folders such as chat/ that end with / and consist of a-z, A-Z, 0-9, -, ., _ and /",
        );
        let set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        self.check(
            set(&s3.access_key) && set(&s3.secret_key),
            "attachments.s3.access_key",
            "must be set together with attachments.s3.secret_key",
        );
    }

    fn internal(&mut self) {
        let hosts = &self.loaded.config.internal.hosts;
        let are_names = hosts
            .iter()
            .all(|host| !host.is_empty() && !host.contains([':', '/', ' ', '"', '\'']));
        self.check(
            are_names,
            "internal.hosts",
            "must be names such as gateway-1, without scheme and port",
        );
    }

    fn drain(&mut self) {
        let Config { drain, .. } = &self.loaded.config;
        self.check(
            drain.leave_within() <= drain.grace() / 2,
            "drain.grace_ms",
            "must be at least twice drain.delay_ms + drain.spread_ms: the second half is for storing everything",
        );
    }
}

/// Whether a text is the address of a server, without a path.
fn is_origin(text: &str) -> bool {
    let host = text
        .strip_prefix("https://")
        .or_else(|| text.strip_prefix("http://"));
    let host = host.map(|host| host.strip_suffix('/').unwrap_or(host));
    host.is_some_and(|host| !host.is_empty() && host.chars().all(in_hosts))
        && Url::parse(text).is_ok()
}

/// Whether a text is the origin of a page. Those of apps may have schemes of their own.
fn is_page_origin(text: &str) -> bool {
    let in_schemes = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    text.split_once("://").is_some_and(|(scheme, host)| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(in_schemes)
            && !host.is_empty()
            && host.chars().all(in_hosts)
    })
}

/// Whether a character may be in a host with its port.
fn in_hosts(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.:[]".contains(c)
}

/// Whether two addresses cannot be opened at the same time.
fn meet(one: SocketAddr, other: SocketAddr) -> bool {
    let any = one.ip().is_unspecified() || other.ip().is_unspecified();
    let same_ip = one.ip() == other.ip() || any && one.is_ipv4() == other.is_ipv4();
    same_ip && one.port() == other.port() && one.port() != 0
}

/// Returns the limits that must be at least 1, with their names.
fn counts(limits: &Limits) -> impl Iterator<Item = (&'static str, usize)> {
    macro_rules! named {
        ($($limit:ident),* $(,)?) => {
            [$((concat!("limits.", stringify!($limit)), limits.$limit as usize)),*]
        };
    }
    named![
        group_participants,
        conversations_per_user,
        connections,
        connections_per_user,
        connections_per_address,
        unauthenticated_connections,
        service_requests_per_second,
        service_requests_burst,
        open_conversations,
        requests_per_second,
        requests_burst,
        request_bytes_per_second,
        request_bytes_burst,
        creations_per_minute,
        creations_burst,
        invitations_per_minute,
        connects_per_second_per_address,
        connects_burst_per_address,
    ]
    .into_iter()
}
