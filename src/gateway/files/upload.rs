//! Uploads by the protocol tus 1.0.0 (<https://tus.io/protocols/resumable-upload>): core, creation, termination,
//! expiration. A client whose connection breaks asks for the offset and continues from there.

use std::{pin::pin, sync::Arc};

use axum::{
    Json,
    body::Body as Bytes,
    extract::{FromRequest as _, Request, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::json;
use tokio::time::{Duration, timeout};

use super::{
    Files, disk_failed, inspect, no_such_file, parts, refused_by, storage::Storage, store_failed,
    turns::Patience,
};
use crate::{
    chat::GetDetails,
    clock,
    files::{Directory, Upload, Writing},
    gateway::{
        Gateway,
        reply::{Body, Path, refused, refused_with, stopping},
        service::{MessagesWrite, Person},
    },
    model::{
        AttachmentId, ConversationId, FileFacts, FileState, Metadata, UserId,
        limits::ATTACHMENT_BYTES_MAX, text,
    },
    protocol::ErrorCode,
    store::FileRow,
    tasks::Tasks,
};

const VERSION: &str = "1.0.0";
const EXTENSIONS: &str = "creation,termination,expiration";
/// What pages of other origins may use.
pub(super) const METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE";
pub(super) const REQUEST_HEADERS: &str = "authorization, content-type, range, if-range, chat-user, tus-resumable, upload-length, \
    upload-offset, upload-metadata";
pub(super) const RESPONSE_HEADERS: &str = "location, content-range, etag, tus-resumable, tus-version, tus-extension, tus-max-size, \
    upload-offset, upload-length, upload-expires, file-state, file-metadata";
/// Bytes that an upload costs at least in what its user may upload in a day.
const UPLOAD_COST_MIN: u64 = 64 << 10;
/// Bytes of a body after which the room of the disk is checked again.
const ROOM_CHECKED_EVERY: u64 = 4 << 20;
/// The pause of a body after which what has come is written.
const FLUSHED_AFTER: Duration = Duration::from_millis(100);
/// The longest pause between two parts of a body.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// The media type of a part.
const CONTENT_TYPE: &str = "application/offset+octet-stream";

/// A file to upload.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(in crate::gateway) struct NewFile {
    /// The conversation whose messages may have the file.
    #[schema(value_type = String, format = Uuid)]
    conversation: ConversationId,
    name: String,
    /// Bytes.
    size: u64,
    /// A description for people who cannot see the file.
    alt: Option<String>,
}

fn with_tus(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert("tus-resumable", HeaderValue::from_static(VERSION));
    response
}

fn number(value: u64) -> HeaderValue {
    HeaderValue::from(value)
}

/// Says what the server supports (tus 1.0.0).
#[utoipa::path(options, path = "/v1/attachments", security(()), responses((status = 204)))]
pub(in crate::gateway) async fn options(State(gateway): State<Arc<Gateway>>) -> Response {
    if gateway
        .files
        .as_ref()
        .is_some_and(|files| files.storage.bucket().is_some())
    {
        return StatusCode::NO_CONTENT.into_response();
    }
    let size_max = gateway
        .files
        .as_ref()
        .map_or(0, |files| files.settings.size_max());
    let headers = [
        ("tus-version", HeaderValue::from_static(VERSION)),
        ("tus-extension", HeaderValue::from_static(EXTENSIONS)),
        ("tus-max-size", number(size_max)),
    ];
    with_tus((StatusCode::NO_CONTENT, headers).into_response())
}

/// Begins an upload: with a body in JSON, or by `Upload-Length` and `Upload-Metadata` of tus.
#[utoipa::path(post, path = "/v1/attachments", request_body = NewFile, security(("user" = []), ("service" = ["messages:write"])),
    responses((status = 201), (status = "default", body = crate::protocol::Refusal)))]
pub(in crate::gateway) async fn begin(
    State(gateway): State<Arc<Gateway>>,
    person: Person<MessagesWrite>,
    request: Request,
) -> Response {
    let Some(files) = gateway.files.clone() else {
        return refused(
            ErrorCode::NotFound,
            "uploads are off: see attachments.store",
        );
    };
    let is_tus = request.headers().contains_key("tus-resumable");
    if is_tus && files.storage.bucket().is_some() {
        return no_tus();
    }
    let asked = if is_tus {
        if let Err(response) = check_version(request.headers()) {
            return with_tus(response);
        }
        asked_by_tus(request.headers())
    } else {
        match Body::<NewFile>::from_request(request, &gateway).await {
            Ok(Body(asked)) => Ok(asked),
            Err(response) => return response,
        }
    };
    match asked {
        Ok(asked) => create(&gateway, &files, person.acting, asked).await,
        Err(text) => with_tus(refused(ErrorCode::BadRequest, text)),
    }
}

/// Refuses a request of tus: the bytes do not come to the gateway.
fn no_tus() -> Response {
    let text = "files are uploaded to a bucket, not by tus: begin with a body in JSON, and send the parts to the \
        addresses from POST /v1/attachments/{id}/parts";
    refused(ErrorCode::BadRequest, text)
}

/// Refuses another version of tus.
#[expect(clippy::result_large_err, reason = "a response either way")]
fn check_version(headers: &HeaderMap) -> Result<(), Response> {
    if headers
        .get("tus-resumable")
        .is_some_and(|version| version == VERSION)
    {
        return Ok(());
    }
    let refusal = "only tus 1.0.0 is supported".to_owned();
    let refused = refused_with(
        StatusCode::PRECONDITION_FAILED,
        ErrorCode::BadRequest,
        refusal,
    );
    Err(([("tus-version", VERSION)], refused).into_response())
}

/// Reads the headers of tus: pairs of a name and a value in Base64.
fn asked_by_tus(headers: &HeaderMap) -> Result<NewFile, &'static str> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let size = text("upload-length").and_then(|length| length.parse().ok());
    let size = size.ok_or("upload-length is missing or no number")?;
    let (mut conversation, mut name, mut alt) = (None, None, None);
    for pair in text("upload-metadata").unwrap_or_default().split(',') {
        let (key, value) = pair.trim().split_once(' ').unwrap_or((pair.trim(), ""));
        let value = BASE64_STANDARD.decode(value.trim());
        let value = value.map_err(|_| "upload-metadata has a value that is not Base64")?;
        let value = String::from_utf8(value);
        let value = value.map_err(|_| "upload-metadata has a value that is not UTF-8")?;
        match key {
            "conversation" => conversation = value.parse().ok(),
            "filename" | "name" => name = Some(value),
            "alt" => alt = Some(value),
            // Other programs send more.
            _ => {}
        }
    }
    Ok(NewFile {
        conversation: conversation
            .ok_or("upload-metadata lacks `conversation` with the id of a conversation")?,
        name: name.ok_or("upload-metadata lacks `filename`")?,
        size,
        alt,
    })
}

/// Checks whether a user may upload such a file.
async fn may_begin(
    gateway: &Gateway,
    files: &Files,
    user: &UserId,
    asked: &NewFile,
) -> Result<(), Response> {
    let size_max = files.settings.size_max();
    if asked.size == 0 || asked.size > size_max {
        let text = format!("a file has 1 to {size_max} bytes");
        return Err(refused(ErrorCode::TooLarge, text));
    }
    if asked.alt.as_ref().map_or(0, String::len) + asked.name.len() > ATTACHMENT_BYTES_MAX {
        let text = format!("name and alt have at most {ATTACHMENT_BYTES_MAX} bytes together");
        return Err(refused(ErrorCode::TooLarge, text));
    }
    if let Err(wrong) = text::check_alt(asked.alt.as_deref().unwrap_or_default()) {
        return Err(refused(ErrorCode::BadRequest, format!("alt {wrong}")));
    }
    if files.begins.check_key(user).is_err() {
        return Err(too_many("uploads in a minute"));
    }
    if !gateway.router.has_files() {
        let text = "not before all gateways are upgraded";
        return Err(refused(ErrorCode::Unavailable, text));
    }
    let details = gateway
        .router
        .ask(asked.conversation, user.clone(), GetDetails)
        .await;
    let view = details.map_err(|error| refused_by(&error))?;
    let Some(role) = view.role else {
        let text = "only participants may upload";
        return Err(refused(ErrorCode::Forbidden, text));
    };
    if !view.details.posting.allows(role) {
        let text = "only admins may post here";
        return Err(refused(ErrorCode::Forbidden, text));
    }
    if let Some(directory) = files.storage.directory() {
        check_room(directory, asked.size)?;
    }
    // Each upload has rows and a file, however small it is.
    match files
        .take_quota(user, asked.size.max(UPLOAD_COST_MIN))
        .await
    {
        Ok(true) => Ok(()),
        Ok(false) => {
            let text = format!("at most {} MiB in a day", files.settings.user_mib_per_day);
            Err(refused(ErrorCode::TooLarge, text))
        }
        Err(error) => Err(store_failed(error)),
    }
}

async fn create(gateway: &Gateway, files: &Files, user: UserId, asked: NewFile) -> Response {
    if let Err(response) = may_begin(gateway, files, &user, &asked).await {
        return with_tus(response);
    }
    let id = AttachmentId(uuid::Uuid::new_v4());
    let upload = match files.storage.begin(id).await {
        Ok(upload) => upload,
        Err(error) => return with_tus(files.storage.failed(&error)),
    };
    let facts = FileFacts {
        uploader: user,
        conversation: asked.conversation,
        name: text::file_name(&asked.name),
        size: asked.size,
        alt: asked.alt.filter(|alt| !alt.is_empty()),
        created_at: clock::wall(),
        upload,
    };
    // Rule [upload-work]: with the work, so that a sweep knows the file.
    if let Err(error) = files.store.create_file(id, &facts, clock::today()).await {
        return with_tus(store_failed(error));
    }
    let place = format!("/v1/attachments/{id}/upload");
    let location = HeaderValue::from_str(&place).unwrap_or(HeaderValue::from_static(""));
    let headers = [
        (header::LOCATION, location),
        (
            header::HeaderName::from_static("upload-expires"),
            files.expires(&facts),
        ),
    ];
    let upload = match files.storage {
        Storage::Directory(_) => json!({"tus": place}),
        Storage::Bucket(_) => parts::described(id),
    };
    let body = Json(json!({"id": id, "upload": upload}));
    with_tus((StatusCode::CREATED, headers, body).into_response())
}

fn too_many(what: &str) -> Response {
    let text = format!("too many {what}");
    with_tus(refused(ErrorCode::RateLimited, text))
}

/// Checks whether the disk has room for so many bytes more.
#[expect(clippy::result_large_err, reason = "a response either way")]
fn check_room(directory: &Directory, bytes: u64) -> Result<(), Response> {
    match directory.has_room(bytes) {
        Ok(true) => Ok(()),
        Ok(false) => {
            crate::seldom::seldom!(
                WARN,
                "an upload was refused: the disk is almost full (attachments.min_free_mib)"
            );
            Err(refused(ErrorCode::Unavailable, "the disk is almost full"))
        }
        Err(error) => Err(disk_failed(&error)),
    }
}

impl Files {
    /// Counts bytes that a user is going to upload. Returns whether that is within the limit of the day.
    async fn take_quota(&self, user: &UserId, bytes: u64) -> crate::store::Result<bool> {
        let hash = xxhash_rust::xxh3::xxh3_64(user.as_str().as_bytes());
        let at = usize::try_from(hash).unwrap_or_default() % self.usage.len();
        let _one_at_a_time = self.usage[at].lock().await;
        let today = clock::today();
        let after = self.store.usage(user, today).await?.saturating_add(bytes);
        if after > self.settings.user_mib_per_day << 20 {
            return Ok(false);
        }
        self.store.set_usage(user, today, after).await?;
        Ok(true)
    }

    /// Returns when an upload is given up if it is not complete and no message has it.
    fn expires(&self, facts: &FileFacts) -> HeaderValue {
        let at = u64::try_from(facts.created_at / 1_000).unwrap_or_default();
        let at = at + self.settings.orphan_h * 3_600;
        let at = std::time::UNIX_EPOCH + Duration::from_secs(at);
        HeaderValue::from_str(&httpdate::fmt_http_date(at)).unwrap_or(HeaderValue::from_static(""))
    }

    /// Returns the file if the user is its uploader.
    pub(super) async fn mine(
        &self,
        file: AttachmentId,
        user: &UserId,
    ) -> Result<FileRow, Response> {
        let row = self.row(file).await.map_err(store_failed)?;
        row.filter(|row| row.facts.uploader == *user)
            .ok_or_else(no_such_file)
    }
}

fn state_name(state: FileState) -> HeaderValue {
    HeaderValue::from_static(match state {
        FileState::Pending => "pending",
        FileState::Scanning => "scanning",
        FileState::Ready => "ready",
        FileState::Erasing => "erasing",
        FileState::Blocked => "blocked",
        FileState::Erased => "erased",
    })
}

/// Tells the uploader what a file still says of people.
fn metadata_header(metadata: Option<Metadata>) -> Option<[(&'static str, &'static str); 1]> {
    metadata.map(|metadata| [("file-metadata", metadata.name())])
}

/// Says how many bytes have come (tus 1.0.0).
#[utoipa::path(head, path = "/v1/attachments/{file}/upload", params(("file" = uuid::Uuid, Path)),
    security(("user" = []), ("service" = ["messages:write"])),
    responses((status = 200), (status = "default", body = crate::protocol::Refusal)))]
pub(in crate::gateway) async fn offset(
    State(gateway): State<Arc<Gateway>>,
    person: Person<MessagesWrite>,
    Path(file): Path<AttachmentId>,
) -> Response {
    let Some(files) = &gateway.files else {
        return no_such_file();
    };
    let row = match files.mine(file, &person.acting).await {
        Ok(row) => row,
        Err(response) => return with_tus(response),
    };
    let is_waiting = matches!(row.state, FileState::Pending | FileState::Scanning);
    let received = match row.state {
        FileState::Erased => return with_tus(no_such_file()),
        _ if is_waiting => files.storage.received(file, &row.facts).await,
        _ => Ok(None),
    };
    let received = match received {
        Ok(Some(received)) => received,
        // It is complete, and was moved.
        Ok(None) => row.facts.size,
        Err(error) => return with_tus(files.storage.failed(&error)),
    };
    // If nobody looks at a complete file, the gateway ended meanwhile, or the last part broke off.
    if is_waiting && received == row.facts.size {
        let (inspected, facts) = (files.clone(), row.facts.clone());
        files.tasks.spawn_until_drained(async move {
            inspect::again(&inspected, file, &facts, Patience::Waits).await;
        });
    }
    let headers = [
        ("upload-offset", number(received)),
        ("upload-length", number(row.facts.size)),
        ("upload-expires", files.expires(&row.facts)),
        ("file-state", state_name(row.state)),
        ("cache-control", HeaderValue::from_static("no-store")),
    ];
    let kept = metadata_header(row.metadata());
    with_tus((StatusCode::OK, kept, headers).into_response())
}

/// Gives an upload up, or a complete file that no message has.
#[utoipa::path(delete, path = "/v1/attachments/{file}/upload", params(("file" = uuid::Uuid, Path)),
    security(("user" = []), ("service" = ["messages:write"])),
    responses((status = 204), (status = "default", body = crate::protocol::Refusal)))]
pub(in crate::gateway) async fn give_up(
    State(gateway): State<Arc<Gateway>>,
    person: Person<MessagesWrite>,
    Path(file): Path<AttachmentId>,
) -> Response {
    let Some(files) = gateway.files.clone() else {
        return no_such_file();
    };
    if files.begins.check_key(&person.acting).is_err() {
        return too_many("uploads in a minute");
    }
    match files.mine(file, &person.acting).await {
        Ok(row) => gateway.eraser.drop_file(row.facts.conversation, file),
        Err(response) => return with_tus(response),
    }
    with_tus(StatusCode::NO_CONTENT.into_response())
}

/// Appends the body to an upload (tus 1.0.0).
#[utoipa::path(patch, path = "/v1/attachments/{file}/upload", params(("file" = uuid::Uuid, Path), ("upload-offset" = u64, Header), ("tus-resumable" = String, Header)),
    request_body(content = Vec<u8>, content_type = "application/offset+octet-stream"),
    security(("user" = []), ("service" = ["messages:write"])),
    responses((status = 204), (status = "default", body = crate::protocol::Refusal)))]
pub(in crate::gateway) async fn append(
    State(gateway): State<Arc<Gateway>>,
    person: Person<MessagesWrite>,
    Path(file): Path<AttachmentId>,
    request: Request,
) -> Response {
    let Some(files) = gateway.files.clone() else {
        return no_such_file();
    };
    let Some(directory) = files.storage.directory().cloned() else {
        return ([(header::CONNECTION, "close")], no_tus()).into_response();
    };
    let user = person.acting;
    let headers = request.headers();
    let appended = match may_append(&files, &directory, &user, file, headers).await {
        Ok((row, writing, upload)) => {
            let body = request.into_body();
            let tasks = &gateway.tasks;
            received(
                &files,
                &directory,
                (file, &row),
                writing,
                upload,
                body,
                tasks,
            )
            .await
        }
        Err(response) => Err(response),
    };
    with_tus(match appended {
        Ok(response) => response,
        // What is left of the body is not read.
        Err(response) => ([(header::CONNECTION, "close")], response).into_response(),
    })
}

/// Checks whether a body may be appended, and takes the right to write.
async fn may_append(
    files: &Files,
    directory: &Directory,
    user: &UserId,
    file: AttachmentId,
    headers: &HeaderMap,
) -> Result<(FileRow, Writing, Upload), Response> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    check_version(headers)?;
    if text("content-type") != Some(CONTENT_TYPE) {
        let refusal = format!("the content-type of a part is {CONTENT_TYPE}");
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return Err(refused_with(status, ErrorCode::BadRequest, refusal));
    }
    let row = files.mine(file, user).await?;
    if row.state != FileState::Pending {
        return Err(refused(
            ErrorCode::Conflict,
            "the upload is complete or given up",
        ));
    }
    let counted = files.count(user);
    let counted = counted.ok_or_else(|| too_many("uploads at once"))?;
    let writing = directory.take(file).ok_or_else(|| {
        let refusal = "something else writes to this upload".to_owned();
        refused_with(StatusCode::LOCKED, ErrorCode::Conflict, refusal)
    })?;
    writing.keep(counted);
    let upload = directory.resume(&writing).await;
    let upload = upload.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => no_such_file(),
        _ => disk_failed(&error),
    })?;
    if text("upload-offset").and_then(|offset| offset.parse().ok()) != Some(upload.len) {
        let refusal = format!("upload-offset is not {}, which has come", upload.len);
        return Err(refused(ErrorCode::Conflict, refusal));
    }
    check_room(directory, row.facts.size.saturating_sub(upload.len))?;
    Ok((row, writing, upload))
}

/// Refuses the rest of a body if the gateway drains. What came before `offset` is kept.
fn stopped(tasks: &Tasks, offset: u64) -> Option<Response> {
    let refused = || ([("upload-offset", number(offset))], stopping()).into_response();
    tasks.is_draining().then(refused)
}

/// Writes the body as it comes. What has come counts, even if the rest does not.
async fn received(
    files: &Arc<Files>,
    directory: &Arc<Directory>,
    (file, row): (AttachmentId, &FileRow),
    writing: Writing,
    mut upload: Upload,
    body: Bytes,
    tasks: &Tasks,
) -> Result<Response, Response> {
    let size = row.facts.size;
    // A drain does not wait for the rest.
    let mut parts = pin!(body.into_data_stream().take_until(tasks.draining_owned()));
    let mut unchecked = 0;
    let broken = loop {
        let mut next = parts.next();
        // What has come counts, also when the client pauses.
        let part = match timeout(FLUSHED_AFTER, &mut next).await {
            Ok(part) => Ok(part),
            Err(_) => {
                upload.flush().await.map_err(|error| disk_failed(&error))?;
                timeout(PAUSE_MAX, next).await
            }
        };
        match part {
            Ok(Some(Ok(part))) => {
                if upload.len + part.len() as u64 > size {
                    let text = format!("there are more than the announced {size} bytes");
                    return Err(refused(ErrorCode::TooLarge, text));
                }
                // Nothing is written after what could not be written.
                let appended = upload.append(&part).await;
                appended.map_err(|error| disk_failed(&error))?;
                // Others write too.
                unchecked += part.len() as u64;
                if unchecked >= ROOM_CHECKED_EVERY {
                    unchecked = 0;
                    if let Err(response) = check_room(directory, 0) {
                        break Some(response);
                    }
                }
            }
            Ok(None) => break None,
            Ok(Some(Err(_))) | Err(_) => {
                break Some(refused(ErrorCode::BadRequest, "the body broke off"));
            }
        }
    };
    upload.flush().await.map_err(|error| disk_failed(&error))?;
    let offset = upload.len;
    let broken = stopped(tasks, offset).or(broken);
    // Nothing is missing if the body broke off after its last byte.
    if let Some(response) = broken.filter(|_| offset < size) {
        return Err(response);
    }
    let (mut state, mut metadata) = (row.state, None);
    if offset == size {
        // It goes on if the client's connection breaks.
        let (here, facts) = (files.clone(), row.facts.clone());
        let directory = directory.clone();
        let inspected = async move {
            let upload = Some(upload);
            let patience = Patience::Waits;
            inspect::complete(&here, &directory, file, &facts, &writing, upload, patience).await
        };
        state = files.finish(inspected).await?;
        metadata = files.metadata(file).await?;
    }
    let headers = [
        ("upload-offset", number(offset)),
        ("upload-expires", files.expires(&row.facts)),
        ("file-state", state_name(state)),
    ];
    let kept = metadata_header(metadata);
    Ok((StatusCode::NO_CONTENT, kept, headers).into_response())
}
