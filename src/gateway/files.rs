//! Uploaded files: who may upload and download them, over HTTP (docs/attachments.md).

pub(super) mod append;
mod bucket;
pub(super) mod download;
mod eraser;
mod inspect;
mod local;
pub(super) mod parts;
mod picture;
mod places;
mod rights;
mod scan;
mod storage;
mod turns;
mod tus;
pub(super) mod upload;

use std::{
    collections::BTreeSet,
    io,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderValue, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::{any, get, post},
};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use tokio::sync::Semaphore;

use super::{
    Gateway,
    reply::{refused, respond},
    requests, upgrade,
};
use crate::{
    chat::{Error, Publication, Publish},
    clock, config,
    files::{Scanner, Signer},
    model::{AttachmentId, FileFacts, FileNotice, Metadata, UserId},
    protocol::ErrorCode,
    store::{self, FileRow, Store},
    tasks::Tasks,
};

pub use eraser::{Dropped, Eraser, Erasing};
pub use picture::PICTURE_OUTCOMES;
pub use storage::FileBytes;
use storage::Storage;
use turns::Turns;

/// Parts of files that are read at the same time. Reads of the embedded store use the same threads.
const READS_MAX: usize = 32;
/// Files that are made durable or erased at the same time.
const FINISHING_MAX: usize = 4;
/// Files that are scanned at the same time. clamd has ten threads by default, and other gateways ask it too.
const SCANS_MAX: usize = 4;

/// The uploads and downloads of this gateway.
pub struct Files {
    storage: Storage,
    pub(super) store: Arc<dyn Store>,
    publish: Arc<dyn Publish>,
    /// It signs the addresses of files in a directory.
    signer: Signer,
    settings: config::Attachments,
    /// How often users may ask this gateway to begin an upload, or to give one up. Their home counts what they begin.
    begins: DefaultKeyedRateLimiter<UserId>,
    uploads: places::Uploads,
    downloads: places::Downloads,
    reads: Arc<Semaphore>,
    finishing: Semaphore,
    scanner: Option<Scanner>,
    scans: Turns,
    /// Files that were not scanned because the scanner was away.
    unscanned: Mutex<BTreeSet<AttachmentId>>,
    pictures: Turns,
    /// Files of a bucket that are read to compute their hash.
    hashes: Turns,
    /// Files that were not looked at because too many were waiting.
    unlooked: Mutex<BTreeSet<AttachmentId>>,
    /// Pictures that are decoded again, because the machine had no room for their decoder.
    undecoded: Mutex<BTreeSet<AttachmentId>>,
    tasks: Tasks,
    /// The tasks of connections. When they end, pictures are not decoded any more.
    edge: Tasks,
}

impl Files {
    /// Opens the storage of the settings. `None` if they turn uploads off. What was begun is finished in `tasks`, but no
    /// picture is decoded while `edge` drains.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn open(
        config: &config::Config,
        store: Arc<dyn Store>,
        publish: Arc<dyn Publish>,
        tasks: Tasks,
        edge: Tasks,
    ) -> io::Result<Option<Arc<Self>>> {
        let settings = config.attachments.clone();
        let Some(storage) = Storage::open(config)? else {
            return Ok(None);
        };
        let secret = match (&settings.secret, &config.cluster.secret, &storage) {
            (Some(secret), ..) | (None, Some(secret), _) => secret.clone().into_bytes(),
            (None, None, Storage::Directory(directory)) => directory.secret()?,
            // The storage signs with its own key.
            (None, None, Storage::Bucket(_)) => Vec::new(),
        };
        let per_minute = std::num::NonZeroU32::new(settings.uploads_per_minute);
        let per_minute = per_minute.unwrap_or(std::num::NonZeroU32::MIN);
        let pictures = settings.image_threads.max(1);
        Ok(Some(Arc::new(Self {
            storage,
            store,
            publish,
            signer: Signer::new(&secret, settings.url_window_s),
            begins: RateLimiter::keyed(Quota::per_minute(per_minute)),
            uploads: places::Uploads::new(settings.uploads_at_once),
            downloads: places::Downloads::new(),
            scanner: settings.scanner(),
            scans: Turns::new("scan", SCANS_MAX),
            unscanned: Mutex::default(),
            pictures: Turns::new("picture", pictures),
            hashes: Turns::new("hash", FINISHING_MAX),
            unlooked: Mutex::default(),
            undecoded: Mutex::default(),
            reads: Arc::new(Semaphore::new(READS_MAX)),
            finishing: Semaphore::new(FINISHING_MAX),
            tasks,
            edge,
            settings,
        })))
    }

    /// Returns how the addresses of the bucket of the files begin. `None` if they are in a directory.
    pub(super) fn place(&self) -> Option<String> {
        self.storage.bucket().map(|bucket| bucket.place())
    }

    /// Says in the log why the bucket cannot be used, if so. The gateway runs without it.
    pub async fn check(&self) {
        let Some(bucket) = self.storage.bucket() else {
            return;
        };
        match bucket.check().await {
            Ok(()) => tracing::info!(bucket = ?bucket, "the bucket of uploaded files answers"),
            Err(error) => {
                tracing::error!(%error, "the bucket of uploaded files cannot be used: uploads and downloads fail until it can");
            }
        }
    }

    /// Drops the rates of users who were not active recently, and looks at files again. It is called every few seconds.
    pub(super) fn keep_up(self: &Arc<Self>) {
        self.begins.retain_recent();
        self.begins.shrink_to_fit();
        self.scan_again();
        self.look_again();
    }

    /// Tells the sessions of a file's uploader that the gateway has looked at it.
    fn tell(&self, facts: &FileFacts, notice: FileNotice) {
        let uploader = facts.uploader.clone();
        let told = Publication::file(facts.conversation, notice, uploader);
        // It is best effort: whoever misses it asks.
        let _ = self.publish.publish(told);
    }

    /// Returns what a file that was looked at still says of people.
    async fn metadata(&self, file: AttachmentId) -> Result<Option<Metadata>, Response> {
        let row = self.row(file).await.map_err(store_failed)?;
        Ok(row.and_then(|row| row.metadata()))
    }

    async fn row(&self, file: AttachmentId) -> store::Result<Option<FileRow>> {
        self.store.file(file).await
    }
}

fn now_s() -> u64 {
    u64::try_from(clock::wall() / 1_000).unwrap_or_default()
}

/// Returns the answer to a request for a file that does not exist, or that the user may not know of.
fn no_such_file() -> Response {
    refused(ErrorCode::NotFound, "there is no such file")
}

fn refused_by(error: &Error) -> Response {
    respond(requests::refused(error))
}

fn store_failed(error: store::Error) -> Response {
    refused_by(&Error::from(error))
}

fn disk_failed(error: &io::Error) -> Response {
    crate::seldom::seldom!(ERROR, "the directory of uploaded files failed", %error);
    refused(
        ErrorCode::Unavailable,
        "the file could not be stored or read: try again",
    )
}

/// Returns the answer to a request whose file could not be read. It may have been erased meanwhile.
fn not_read(error: &io::Error) -> Response {
    match error.kind() {
        io::ErrorKind::NotFound => no_such_file(),
        _ => disk_failed(error),
    }
}

fn storage_failed(error: &io::Error) -> Response {
    crate::seldom::seldom!(ERROR, "the bucket of uploaded files failed", %error);
    refused(
        ErrorCode::Unavailable,
        "the storage of files does not answer as it should: try again",
    )
}

/// Returns the routes of files. Pages of other origins may use them as they may use the WebSocket.
pub(super) fn routes(gateway: &Arc<Gateway>) -> Router<Arc<Gateway>> {
    Router::new()
        .route(
            "/v1/attachments",
            post(upload::begin).options(upload::options),
        )
        .route("/v1/attachments/{file}", get(download::redirect))
        .route("/v1/attachments/{file}/upload", any(tus::one))
        .route(
            "/v1/attachments/{file}/parts",
            post(parts::list).options(upload::options),
        )
        .route(
            "/v1/attachments/{file}/complete",
            post(parts::complete).options(upload::options),
        )
        .route("/v1/files/{file}/{variant}", get(download::file))
        .layer(middleware::from_fn_with_state(gateway.clone(), share))
}

/// Lets pages of the origins in `client.origins` use a route (<https://fetch.spec.whatwg.org/#http-cors-protocol>).
pub(super) async fn share(
    State(gateway): State<Arc<Gateway>>,
    request: Request,
    next: Next,
) -> Response {
    let headers = request.headers();
    let origin = headers.get(header::ORIGIN).cloned();
    let origin = origin.filter(|_| upgrade::allowed(&gateway.origins, headers).is_ok());
    let is_asking = request.method() == Method::OPTIONS
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = if is_asking {
        StatusCode::NO_CONTENT.into_response()
    } else {
        next.run(request).await
    };
    let told = response.headers_mut();
    told.append(header::VARY, HeaderValue::from_static("origin"));
    let Some(origin) = origin else {
        return response;
    };
    told.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    let fixed = if is_asking {
        &[
            (header::ACCESS_CONTROL_ALLOW_METHODS, upload::METHODS),
            (
                header::ACCESS_CONTROL_ALLOW_HEADERS,
                upload::REQUEST_HEADERS,
            ),
            (header::ACCESS_CONTROL_MAX_AGE, "3600"),
        ][..]
    } else {
        &[(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            upload::RESPONSE_HEADERS,
        )][..]
    };
    for (name, text) in fixed {
        told.insert(name, HeaderValue::from_static(text));
    }
    response
}
