//! The bytes of files in a bucket of a storage that is compatible with S3. All gateways of a cluster use the same one:
//!
//! | key after the prefix | content |
//! |---|---|
//! | `incoming/<id>` | an upload: its parts, then one object |
//! | `files/<id>/original` | a complete file |
//! | `files/<id>/thumbnail` | its thumbnail |
//!
//! Clients send and fetch the bytes themselves, by signed addresses. Those of uploads are for `incoming/` only, so an
//! upload cannot change a complete file.

mod requests;

use std::{fmt, io, time::Duration};

use jiff::Timestamp;
use reqwest::{Client, Url};
use rusty_s3::{Credentials, S3Action, UrlStyle, actions};

use super::{
    directory::{FILES, INCOMING},
    parts::Part,
    signing::Variant,
    writing::{Writers, Writing},
};
use crate::{
    clock,
    model::{AttachmentId, Millis},
    mutation::{Mutation, broken},
};

/// The time for which the address of a part is valid.
const PART_VALID: Duration = Duration::from_secs(3_600);
/// The time for which a gateway's own requests are valid. Clocks may differ by some minutes.
const REQUEST_VALID: Duration = Duration::from_secs(900);
/// The time from the beginning of an inspection in which it may write objects (rule [write-window]).
const INSPECTION_MAX: Duration = Duration::from_secs(3_600);

/// Where a bucket is, and who may use it.
#[derive(Clone)]
pub struct BucketSettings {
    pub endpoint: String,
    pub region: String,
    pub name: String,
    /// The begin of all keys.
    pub prefix: String,
    pub path_style: bool,
    pub access_key: String,
    pub secret_key: String,
}

/// A bucket for the bytes of files.
pub struct Bucket {
    bucket: rusty_s3::Bucket,
    credentials: Credentials,
    prefix: String,
    http: Client,
    slow: Client,
    writers: Writers,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bucket").field(&self.bucket.name()).finish()
    }
}

/// An object of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Object {
    Incoming,
    Complete(Variant),
}

impl Object {
    pub const ORIGINAL: Self = Self::Complete(Variant::Original);
    pub const THUMBNAIL: Self = Self::Complete(Variant::Thumbnail);
}

/// The begin of an inspection, which bounds when it may write.
#[derive(Clone, Copy, Debug)]
pub struct Inspection(Timestamp);

impl Inspection {
    /// Begins an inspection.
    #[must_use]
    pub fn begin() -> Self {
        Self(now())
    }

    /// Returns the time as of which its writes are signed (rule [write-window]), and for how long they are valid.
    fn signed(self) -> (Timestamp, Duration) {
        let is_broken = broken(Mutation::WriteWindow);
        (if is_broken { now() } else { self.0 }, INSPECTION_MAX)
    }

    /// Returns the time after which the storage refuses a write that is sent now.
    #[must_use]
    pub fn writes_until(self) -> Millis {
        let (signed, valid) = self.signed();
        signed.as_millisecond() + Millis::try_from(valid.as_millis()).unwrap_or(Millis::MAX)
    }
}

/// How a browser is to treat a download.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Treatment {
    pub content_type: String,
    pub disposition: String,
    pub caching: &'static str,
}

impl Bucket {
    /// Prepares requests to a bucket. It does not connect.
    ///
    /// # Errors
    /// The reason why these settings cannot be used.
    pub fn open(settings: BucketSettings) -> io::Result<Self> {
        let endpoint: Url = settings.endpoint.parse().map_err(io::Error::other)?;
        let is_encrypted = endpoint.scheme() == "https";
        let style = if settings.path_style {
            UrlStyle::Path
        } else {
            UrlStyle::VirtualHost
        };
        let bucket = rusty_s3::Bucket::new(endpoint, style, settings.name, settings.region);
        Ok(Self {
            bucket: bucket.map_err(io::Error::other)?,
            credentials: Credentials::new(settings.access_key, settings.secret_key),
            prefix: settings.prefix,
            http: requests::client(is_encrypted)?,
            slow: requests::slow_client(is_encrypted)?,
            writers: Writers::default(),
        })
    }

    /// Returns how all addresses of the bucket begin, such as `https://chat.s3.example.org/`.
    #[must_use]
    pub fn place(&self) -> String {
        let mut place = self.bucket.base_url().to_string();
        if !place.ends_with('/') {
            place.push('/');
        }
        place
    }

    /// Returns the right to complete an upload, unless someone else on this gateway has it.
    #[must_use]
    pub fn take(&self, id: AttachmentId) -> Option<Writing> {
        self.writers.take(id)
    }

    fn key(&self, id: AttachmentId, object: Object) -> String {
        let prefix = &self.prefix;
        match object {
            Object::Incoming => format!("{prefix}{INCOMING}/{id}"),
            Object::Complete(variant) => format!("{prefix}{FILES}/{id}/{}", variant.name()),
        }
    }

    /// Signs a request of this gateway.
    fn sign<'a>(&self, action: &impl S3Action<'a>) -> Url {
        action.sign_with_time(REQUEST_VALID, &now())
    }

    /// Returns the address to which a client sends a part, and nothing of another size.
    #[must_use]
    pub fn part_url(&self, id: AttachmentId, upload: &str, part: Part) -> String {
        let key = self.key(id, Object::Incoming);
        let credentials = Some(&self.credentials);
        let mut action =
            actions::UploadPart::new(&self.bucket, credentials, &key, part.number, upload);
        let headers = action.headers_mut();
        headers.insert("content-length", part.size.to_string());
        action.sign_with_time(PART_VALID, &now()).into()
    }

    /// Returns when an address from [`Self::part_url`] expires, in milliseconds since 1970.
    #[must_use]
    pub fn parts_expire_at(&self) -> i64 {
        let valid = i64::try_from(PART_VALID.as_millis()).unwrap_or(i64::MAX);
        clock::wall().saturating_add(valid)
    }

    /// Returns the address of a download, and when it expires, in seconds since 1970. It is valid for one to two windows.
    /// All addresses of one window are equal, so that browsers can cache the file.
    #[must_use]
    pub fn url(
        &self,
        id: AttachmentId,
        variant: Variant,
        treatment: &Treatment,
        (now_s, window_s): (u64, u64),
    ) -> (String, u64) {
        let key = self.key(id, Object::Complete(variant));
        let mut action = actions::GetObject::new(&self.bucket, Some(&self.credentials), &key);
        let query = action.query_mut();
        query.insert("response-cache-control", treatment.caching);
        query.insert("response-content-disposition", &treatment.disposition[..]);
        query.insert("response-content-type", &treatment.content_type[..]);
        let since_s = now_s / window_s * window_s;
        let since = Timestamp::from_second(i64::try_from(since_s).unwrap_or_default());
        let since = since.unwrap_or(Timestamp::UNIX_EPOCH);
        let url = action.sign_with_time(Duration::from_secs(2 * window_s), &since);
        (url.into(), since_s + 2 * window_s)
    }
}

fn now() -> Timestamp {
    Timestamp::from_millisecond(clock::wall()).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(path_style: bool) -> Bucket {
        Bucket::open(BucketSettings {
            endpoint: "http://storage.example.org:9000".into(),
            region: "us-east-1".into(),
            name: "files-of-chat".into(),
            prefix: "chat/".into(),
            path_style,
            access_key: "access".into(),
            secret_key: "a secret".into(),
        })
        .unwrap()
    }

    #[test]
    fn an_address_stays_the_same_for_a_window() {
        let bucket = bucket(true);
        let id = AttachmentId(uuid::Uuid::new_v4());
        let treatment = Treatment {
            content_type: "image/png".into(),
            disposition: "inline; filename*=UTF-8''a%20cat.png".into(),
            caching: "private",
        };
        let url = |now_s| bucket.url(id, Variant::Original, &treatment, (now_s, 300));
        let (first, expires_s) = url(1_000_000_200);
        assert_eq!(first, url(1_000_000_499).0);
        assert_ne!(first, url(1_000_000_500).0);
        assert_eq!(expires_s, 1_000_000_800);
        assert!(first.contains("X-Amz-Date=20010909T015000Z"), "{first}");
        assert!(first.contains("X-Amz-Expires=600"), "{first}");
        let place =
            format!("http://storage.example.org:9000/files-of-chat/chat/files/{id}/original?");
        assert!(first.starts_with(&place), "{first}");
    }

    #[test]
    fn an_address_of_a_part_is_for_its_size() {
        let part = Part {
            number: 2,
            offset: 0,
            size: 7,
        };
        let id = AttachmentId(uuid::Uuid::new_v4());
        let url = bucket(false).part_url(id, "upload", part);
        let place = format!("http://files-of-chat.storage.example.org:9000/chat/incoming/{id}?");
        assert!(url.starts_with(&place), "{url}");
        assert!(
            url.contains("X-Amz-SignedHeaders=content-length%3Bhost"),
            "{url}"
        );
        assert_eq!(
            bucket(false).place(),
            "http://files-of-chat.storage.example.org:9000/"
        );
    }

    #[test]
    fn nothing_shows_the_secret() {
        assert_eq!(format!("{:?}", bucket(true)), "Bucket(\"files-of-chat\")");
    }
}
