//! The settings in the form in which other modules use them.

use std::{path::PathBuf, time::Duration};

use super::{Attachments, Cassandra, Config, Consistency, FilesKind, Limits, Messages, Push};
use crate::{
    chat,
    consumers::push,
    files::{BucketSettings, ImageLimits, Scanner},
    memory,
    model::{
        UploadLimits,
        limits::{
            ATTACHMENTS_MAX, CONNECT_BYTES, CURSORS_MAX, DELETE_SEQS_MAX, EMOJI_MAX,
            PAGE_ENTRIES_MAX, WATCHED_MAX,
        },
    },
    protocol, store,
};

impl Limits {
    /// Returns the approximate bytes of a page of history. Other frames must fit into the same outbox.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.outbox_bytes / 4
    }

    /// Returns the bytes that a user may request at once: the setting, but at least a connect and one page.
    #[must_use]
    pub fn bytes_burst(&self) -> u32 {
        let least = CONNECT_BYTES + self.page_bytes();
        let least = u32::try_from(least).unwrap_or(u32::MAX);
        self.request_bytes_burst.max(least)
    }

    #[must_use]
    pub fn protocol(&self, messages: &Messages) -> protocol::Limits {
        protocol::Limits {
            frame_bytes: self.frame_bytes,
            body_bytes: self.body_bytes,
            attachments: ATTACHMENTS_MAX,
            group_participants: self.group_participants,
            page_entries: PAGE_ENTRIES_MAX,
            requests_per_second: self.requests_per_second,
            requests_burst: self.requests_burst,
            watched_users: WATCHED_MAX,
            cursors: CURSORS_MAX,
            edit_window_s: messages.edit_window_s,
            reactions: EMOJI_MAX,
            delete_seqs: DELETE_SEQS_MAX,
        }
    }
}

impl Messages {
    /// Returns the time in which a message may be edited. `None` means for ever.
    #[must_use]
    pub fn edit_window(&self) -> Option<Duration> {
        (self.edit_window_s > 0).then(|| Duration::from_secs(self.edit_window_s))
    }
}

impl Cassandra {
    #[must_use]
    pub fn settings(&self) -> store::cassandra::Settings {
        use store::cassandra::{Settings, TlsFiles, schema::Keyspace};
        let identity = self
            .tls_certificate_file
            .clone()
            .zip(self.tls_key_file.clone());
        let tls = self.tls_authority_file.clone().map(|authority| TlsFiles {
            authority,
            identity,
        });
        Settings {
            nodes: self.nodes.clone(),
            keyspace: Keyspace {
                name: self.keyspace.clone(),
                replication: self.replication.clone(),
            },
            datacenter: self.datacenter.clone(),
            consistency: match self.consistency {
                Consistency::LocalQuorum => scylla::statement::Consistency::LocalQuorum,
                Consistency::Quorum => scylla::statement::Consistency::Quorum,
            },
            user: self.username.clone().zip(self.password.clone()),
            tls,
            timeout: Duration::from_millis(self.timeout_ms),
            in_flight_max: self.requests_in_flight,
            create_schema: self.create_schema,
        }
    }
}

impl Attachments {
    #[must_use]
    pub fn size_max(&self) -> u64 {
        self.size_max_mib << 20
    }

    /// Returns what a user may begin to upload.
    #[must_use]
    pub fn upload_limits(&self) -> UploadLimits {
        UploadLimits {
            bytes_per_day: self.user_mib_per_day << 20,
            per_minute: self.uploads_per_minute,
        }
    }

    /// Returns the time after which a file that no message has is erased.
    #[must_use]
    pub fn orphan_ms(&self) -> i64 {
        i64::try_from(self.orphan_h * 3_600_000).unwrap_or(i64::MAX)
    }

    /// Returns the scanner of files. `None` if they are not scanned.
    #[must_use]
    pub fn scanner(&self) -> Option<Scanner> {
        // An address that is none was refused at the start.
        self.scanner
            .as_ref()
            .and_then(|address| address.parse().ok())
    }

    /// Returns what an image may have that is shown. `None` if images are not shown.
    #[must_use]
    pub fn image_limits(&self) -> Option<ImageLimits> {
        (self.image_threads > 0).then(|| ImageLimits {
            pixels: self.image_megapixels * 1_000_000,
            thumbnail_side: self.thumb_px,
            ..ImageLimits::default()
        })
    }
}

impl Push {
    /// Returns the settings of the providers. One without a key file is not used.
    #[must_use]
    pub fn settings(&self) -> push::Settings {
        let Self { web, fcm, apns, .. } = self;
        // Addresses and contacts were checked at the start.
        let url = |url: &Option<String>, default: &str| {
            url.as_deref()
                .unwrap_or(default)
                .parse::<reqwest::Url>()
                .ok()
        };
        let apple = if apns.sandbox {
            "https://api.sandbox.push.apple.com"
        } else {
            "https://api.push.apple.com"
        };
        let fcm_url = url(&fcm.url, "https://fcm.googleapis.com");
        let apns_url = url(&apns.url, apple);
        push::Settings {
            ttl: Duration::from_secs(self.ttl_s),
            content: self.content,
            web: web.key_file.clone().map(|key_file| push::WebSettings {
                key_file,
                contact: web.contact.clone().unwrap_or_default(),
                hosts: web.hosts.clone(),
            }),
            fcm: fcm
                .key_file
                .clone()
                .zip(fcm_url)
                .map(|(key_file, url)| push::FcmSettings { key_file, url }),
            apns: apns
                .key_file
                .clone()
                .zip(apns_url)
                .map(|(key_file, url)| push::ApnsSettings {
                    key_file,
                    key_id: apns.key_id.clone().unwrap_or_default(),
                    team_id: apns.team_id.clone().unwrap_or_default(),
                    topic: apns.topic.clone().unwrap_or_default(),
                    url,
                }),
        }
    }
}

impl Config {
    /// Returns the directory of uploaded files. `None` if there are none: they are turned off, or there are other
    /// gateways, which could not read it.
    #[must_use]
    pub fn attachments_path(&self) -> Option<PathBuf> {
        let beside = || self.store.embedded.path.join("attachments");
        let is_local = self.attachments.store == FilesKind::Local && !self.cluster.enabled;
        is_local.then(|| self.attachments.path.clone().unwrap_or_else(beside))
    }

    /// Returns the bucket of uploaded files. `None` if they are not in a bucket.
    #[must_use]
    pub fn bucket(&self) -> Option<BucketSettings> {
        let s3 = self.attachments.s3.clone();
        let is_used = self.attachments.store == FilesKind::S3;
        is_used.then(|| BucketSettings {
            endpoint: s3.endpoint.unwrap_or_default(),
            region: s3.region,
            name: s3.bucket.unwrap_or_default(),
            prefix: s3.prefix,
            path_style: s3.path_style,
            access_key: s3.access_key.unwrap_or_default(),
            secret_key: s3.secret_key.unwrap_or_default(),
        })
    }

    /// Returns the memory for conversations, homes and caches.
    #[must_use]
    pub fn memory(&self) -> memory::Memory {
        memory::Memory::of_mib(self.memory.mib.unwrap_or_else(memory::default_mib))
    }

    /// Returns the settings of conversations.
    #[must_use]
    pub fn conversations(&self) -> chat::Settings {
        chat::Settings {
            body_bytes_max: self.limits.body_bytes,
            group_participants_max: self.limits.group_participants,
            conversations_per_user_max: Some(self.limits.conversations_per_user),
            idle: Duration::from_secs(self.conversation.idle_s),
            operation_timeout: Duration::from_millis(self.session.request_timeout_ms),
            open_max: self.limits.open_conversations,
            memory: self.memory(),
            page_bytes_max: self.limits.page_bytes(),
            edit_window: self.messages.edit_window(),
            reactions_coalesce: Duration::from_millis(self.messages.reactions_coalesce_ms),
            consumers: None,
        }
    }
}
