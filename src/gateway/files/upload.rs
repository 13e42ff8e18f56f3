//! Uploads by the protocol tus 1.0.0 (<https://tus.io/protocols/resumable-upload>): core, creation, termination,
//! expiration. A client whose connection breaks asks for the offset and continues from there.

use std::{collections::HashSet, sync::Arc};

use axum::{
    Json,
    extract::{FromRequest as _, Request, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde::{Deserialize, Serialize};
use tokio::time::Duration;

use super::{
    Files, disk_failed, inspect, no_such_file, parts,
    places::NoPlace,
    refused_by,
    rights::check_participant,
    storage::{FileBytes as _, Storage},
    store_failed,
    turns::Patience,
};
use crate::{
    chat::GetDetails,
    clock,
    files::Directory,
    gateway::{
        Gateway, rates,
        reply::{Body, Path, refused, refused_with, respond},
        service::{MessagesWrite, Person},
    },
    model::{
        AttachmentId, ConversationId, FileFacts, FileState, Metadata, UploadBegun, UserId,
        limits::ATTACHMENT_BYTES_MAX, text,
    },
    protocol::ErrorCode,
    store::FileRow,
};

const VERSION: &str = "1.0.0";
const EXTENSIONS: &str = "creation,termination,expiration";
/// What pages of other origins may use.
pub(super) const METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE";
pub(super) const REQUEST_HEADERS: &str = "authorization, content-type, range, if-range, chat-user, tus-resumable, upload-length, \
    upload-offset, upload-metadata, x-http-method-override";
pub(super) const RESPONSE_HEADERS: &str = "location, content-range, etag, tus-resumable, tus-version, tus-extension, tus-max-size, \
    upload-offset, upload-length, upload-metadata, upload-expires, file-state, \
    file-metadata, retry-after";
/// Bytes that an upload costs at least in what its user may upload in a day.
const UPLOAD_COST_MIN: u64 = 64 << 10;

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

/// An upload that began.
#[derive(Serialize, utoipa::ToSchema)]
pub(in crate::gateway) struct NewUpload {
    #[schema(value_type = String, format = Uuid)]
    id: AttachmentId,
    upload: parts::Destination,
}

pub(super) fn with_tus(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert("tus-resumable", HeaderValue::from_static(VERSION));
    response
}

pub(super) fn number(value: u64) -> HeaderValue {
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
    responses((status = 201, body = NewUpload), (status = "default", body = crate::protocol::Refusal)))]
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
pub(super) fn no_tus() -> Response {
    let text = "files are uploaded to a bucket, not by tus: begin with a body in JSON, and send the parts to the \
        addresses from POST /v1/attachments/{id}/parts";
    refused(ErrorCode::BadRequest, text)
}

/// Refuses another version of tus.
#[expect(clippy::result_large_err, reason = "a response either way")]
pub(super) fn check_version(headers: &HeaderMap) -> Result<(), Response> {
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

/// Reads a number of tus: digits only.
pub(super) fn digits(headers: &HeaderMap, name: &str) -> Option<u64> {
    let text = headers.get(name)?.to_str().ok()?;
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok())?
}

/// Reads the headers of tus: pairs of a name and a value in Base64.
fn asked_by_tus(headers: &HeaderMap) -> Result<NewFile, &'static str> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let size = digits(headers, "upload-length");
    let size = size.ok_or("upload-length is missing or no number")?;
    let (mut conversation, mut name, mut alt) = (None, None, None);
    let mut keys = HashSet::new();
    for pair in text("upload-metadata").unwrap_or_default().split(',') {
        let (key, value) = pair.trim().split_once(' ').unwrap_or((pair.trim(), ""));
        if !keys.insert(key) {
            return Err("upload-metadata has a key twice");
        }
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

/// Returns the metadata of a file as tus has it: what the gateway keeps of the client's.
fn metadata(facts: &FileFacts) -> HeaderValue {
    let conversation = facts.conversation.to_string();
    let alt = facts.alt.as_deref().map(|alt| ("alt", alt));
    let pairs = [("conversation", &*conversation), ("filename", &*facts.name)];
    let pairs = pairs.into_iter().chain(alt);
    let encoded = pairs.map(|(key, value)| format!("{key} {}", BASE64_STANDARD.encode(value)));
    let text = encoded.collect::<Vec<_>>().join(",");
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static(""))
}

/// Checks whether a user may upload such a file.
async fn may_begin(
    gateway: &Gateway,
    files: &Files,
    user: &UserId,
    asked: &NewFile,
) -> Result<(), Response> {
    let size_max = files.settings.size_max();
    if asked.size > size_max {
        let text = format!("a file has at most {size_max} bytes");
        return Err(refused(ErrorCode::TooLarge, text));
    }
    if asked.alt.as_ref().map_or(0, String::len) + asked.name.len() > ATTACHMENT_BYTES_MAX {
        let text = format!("name and alt have at most {ATTACHMENT_BYTES_MAX} bytes together");
        return Err(refused(ErrorCode::TooLarge, text));
    }
    if let Err(wrong) = text::check_alt(asked.alt.as_deref().unwrap_or_default()) {
        return Err(refused(ErrorCode::BadRequest, format!("alt {wrong}")));
    }
    check_rate(files, user)?;
    let details = gateway
        .router
        .ask(asked.conversation, user.clone(), GetDetails)
        .await;
    let view = details.map_err(|error| refused_by(&error))?;
    check_participant(&view)?;
    if let Some(directory) = files.storage.directory() {
        check_room(directory, asked.size)?;
    }
    // Each upload has rows and a file, however small it is.
    let bytes = asked.size.max(UPLOAD_COST_MIN);
    let limits = files.settings.upload_limits();
    let begun = gateway.users.begin_upload(user, bytes, limits).await;
    match begun.map_err(|error| refused_by(&error))? {
        UploadBegun::Counted => Ok(()),
        UploadBegun::TooOften => Err(too_many("uploads in a minute")),
        UploadBegun::TooMuch => {
            let text = format!("at most {} MiB in a day", files.settings.user_mib_per_day);
            Err(refused(ErrorCode::TooLarge, text))
        }
    }
}

async fn create(gateway: &Gateway, files: &Arc<Files>, user: UserId, asked: NewFile) -> Response {
    if let Err(response) = may_begin(gateway, files, &user, &asked).await {
        return with_tus(response);
    }
    let id = AttachmentId(uuid::Uuid::new_v4());
    let upload = match files.storage.begin(id, asked.size).await {
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
    let state = match facts.size {
        0 => files.complete_empty(id, &facts).await,
        _ => Ok(FileState::Pending),
    };
    let state = match state {
        Ok(state) => state,
        Err(response) => return with_tus(response),
    };
    let place = format!("/v1/attachments/{id}/upload");
    let location = HeaderValue::from_str(&place).unwrap_or(HeaderValue::from_static(""));
    let headers = [
        (header::LOCATION, location),
        (
            header::HeaderName::from_static("upload-expires"),
            files.expires(&facts),
        ),
        (
            header::HeaderName::from_static("file-state"),
            state_name(state),
        ),
    ];
    let upload = match files.storage {
        Storage::Directory(_) => parts::Destination::Directory { tus: place },
        Storage::Bucket(_) => parts::described(id),
    };
    let body = Json(NewUpload { id, upload });
    with_tus((StatusCode::CREATED, headers, body).into_response())
}

/// Counts an upload that a user begins or gives up.
#[expect(clippy::result_large_err, reason = "a response either way")]
fn check_rate(files: &Files, user: &UserId) -> Result<(), Response> {
    let checked = files.begins.check_key(user);
    checked.map_err(|e| {
        with_tus(respond(
            rates::wait(&e).refuse("too many uploads in a minute"),
        ))
    })
}

pub(super) fn too_many(what: &str) -> Response {
    let text = format!("too many {what}");
    with_tus(refused(ErrorCode::RateLimited, text))
}

/// Refuses an upload or a download that has no place.
pub(super) fn no_place(why: &NoPlace, what: &str) -> Response {
    match why {
        NoPlace::OfOne => too_many(&format!("{what} at once")),
        NoPlace::OfAll => {
            let text = format!("too many {what}: try again");
            refused(ErrorCode::Unavailable, text)
        }
    }
}

/// Checks whether the disk has room for so many bytes more.
#[expect(clippy::result_large_err, reason = "a response either way")]
pub(super) fn check_room(directory: &Directory, bytes: u64) -> Result<(), Response> {
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
    /// Completes a file without bytes, for which nothing is sent. Returns its state.
    async fn complete_empty(
        self: &Arc<Self>,
        file: AttachmentId,
        facts: &FileFacts,
    ) -> Result<FileState, Response> {
        let (here, facts) = (self.clone(), facts.clone());
        self.finish(async move {
            match &here.storage {
                Storage::Directory(directory) => {
                    let writing = directory.take(file).ok_or_else(no_such_file)?;
                    let patience = Patience::Waits;
                    inspect::complete(&here, directory, file, &facts, &writing, None, patience)
                        .await
                }
                Storage::Bucket(bucket) => super::bucket::empty(&here, bucket, file).await,
            }
        })
        .await
    }

    /// Returns when an upload is given up if it is not complete and no message has it.
    pub(super) fn expires(&self, facts: &FileFacts) -> HeaderValue {
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

pub(super) fn state_name(state: FileState) -> HeaderValue {
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
pub(super) fn metadata_header(
    metadata: Option<Metadata>,
) -> Option<[(&'static str, &'static str); 1]> {
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
        ("upload-metadata", metadata(&row.facts)),
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
    if let Err(response) = check_rate(&files, &person.acting) {
        return response;
    }
    match files.mine(file, &person.acting).await {
        Ok(row) => gateway.eraser.drop_file(row.facts.conversation, file),
        Err(response) => return with_tus(response),
    }
    with_tus(StatusCode::NO_CONTENT.into_response())
}
