//! The settings of uploaded files.

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

/// Uploaded files.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Attachments {
    pub store: FilesKind,
    /// The directory of the files. By default it is `attachments` in the directory of the embedded store.
    pub path: Option<PathBuf>,
    /// The secret that signs addresses, at least 32 bytes.
    pub secret: Option<String>,
    pub size_max_mib: u64,
    pub user_mib_per_day: u64,
    pub uploads_per_minute: u32,
    pub uploads_at_once: usize,
    /// MiB of the disk that uploads leave free.
    pub min_free_mib: u64,
    /// Hours after which a file that no message has is erased.
    pub orphan_h: u64,
    /// Seconds. An address is valid for one to two times as long.
    pub url_window_s: u64,
    /// Images that are decoded at the same time, each in a process of its own. 0 shows no images: all are downloads.
    pub image_threads: usize,
    pub image_megapixels: u64,
    /// Pixels of the longer side of a thumbnail.
    pub thumb_px: u32,
    /// The address of clamd, which scans each file before messages may have it.
    pub scanner: Option<String>,
    /// The bucket, for `store = "s3"`.
    pub s3: S3,
}

/// A bucket of a storage that is compatible with S3.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct S3 {
    /// The address of the storage, such as `https://s3.eu-central-1.amazonaws.com`. Clients reach it too.
    pub endpoint: Option<String>,
    pub region: String,
    pub bucket: Option<String>,
    /// The begin of the keys of all objects: empty, or a folder such as `chat/`.
    pub prefix: String,
    /// Whether the bucket is in the path of addresses, not in their host.
    pub path_style: bool,
    pub access_key: Option<String>,
    pub secret_key: Option<String>,
}

impl fmt::Debug for S3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3")
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .field("bucket", &self.bucket)
            .field("prefix", &self.prefix)
            .field("path_style", &self.path_style)
            .field("access_key", &self.access_key)
            .field("secret_key", &self.secret_key.as_ref().map(|_| "***"))
            .finish()
    }
}

impl fmt::Debug for Attachments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attachments")
            .field("store", &self.store)
            .field("path", &self.path)
            .field("secret", &self.secret.as_ref().map(|_| "***"))
            .field("s3", &self.s3)
            .finish_non_exhaustive()
    }
}

/// The place of the bytes of uploaded files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesKind {
    /// A directory of this machine.
    Local,
    /// A bucket, which all gateways of a cluster use.
    S3,
    /// There are no uploads.
    Off,
}

impl Default for Attachments {
    fn default() -> Self {
        Self {
            store: FilesKind::Local,
            path: None,
            secret: None,
            size_max_mib: 100,
            user_mib_per_day: 1_024,
            uploads_per_minute: 60,
            uploads_at_once: 4,
            min_free_mib: 1_024,
            orphan_h: 24,
            url_window_s: 300,
            image_threads: 1,
            image_megapixels: 40,
            thumb_px: 640,
            scanner: None,
            s3: S3::default(),
        }
    }
}

impl Default for S3 {
    fn default() -> Self {
        Self {
            endpoint: None,
            region: "us-east-1".into(),
            bucket: None,
            prefix: String::new(),
            path_style: true,
            access_key: None,
            secret_key: None,
        }
    }
}
