//! Uploads to a bucket. The client sends the parts to the storage itself, by signed addresses. A client whose connection
//! breaks asks for the addresses of the missing parts, and continues with them.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use tokio::time::{Duration, Instant, sleep};

use super::{Files, bucket as inspection, no_such_file, storage_failed, turns::Patience};
use crate::{
    files::{Bucket, PART_BYTES, Part, Writing, missing},
    gateway::{
        Gateway,
        reply::{Path, refused},
        service::{MessagesWrite, Person},
    },
    model::{AttachmentId, FileState, Metadata},
    protocol::ErrorCode,
    store::FileRow,
};

/// Addresses of parts in one answer.
const URLS_MAX: usize = 100;
/// The time for which a request waits for another one that completes the same file.
const OTHERS_MAX: Duration = Duration::from_secs(20);
const ASK_EVERY: Duration = Duration::from_millis(100);

#[expect(clippy::result_large_err, reason = "a response either way")]
fn with_bucket(gateway: &Gateway) -> Result<(Arc<Files>, Arc<Bucket>), Response> {
    let files = gateway.files.clone().ok_or_else(no_such_file)?;
    let bucket = files.storage.bucket().cloned().ok_or_else(|| {
        let text = "files are uploaded to this gateway by tus: PATCH /v1/attachments/{id}/upload";
        refused(ErrorCode::BadRequest, text)
    })?;
    Ok((files, bucket))
}

/// Returns the addresses to which the missing parts of an upload are sent, at most 100 at once. None is missing if the
/// list is empty.
#[utoipa::path(post, path = "/v1/attachments/{file}/parts", params(("file" = uuid::Uuid, Path)),
    security(("user" = []), ("service" = ["messages:write"])),
    responses((status = 200, body = Parts), (status = "default", body = crate::protocol::Refusal)))]
pub(in crate::gateway) async fn list(
    State(gateway): State<Arc<Gateway>>,
    person: Person<MessagesWrite>,
    Path(file): Path<AttachmentId>,
) -> Response {
    let found = async {
        let (files, bucket) = with_bucket(&gateway)?;
        let row = files.mine(file, &person.acting).await?;
        needed(&bucket, file, &row).await
    };
    match found.await {
        Ok(parts) => ([(header::CACHE_CONTROL, "no-store")], Json(parts)).into_response(),
        Err(response) => response,
    }
}

/// The addresses of missing parts.
#[derive(serde::Serialize, utoipa::ToSchema)]
pub(in crate::gateway) struct Parts {
    parts: Vec<PartUrl>,
    /// When the addresses expire, in milliseconds since 1970.
    expires_at: i64,
}

/// A part of a file, and the address to which `PUT` sends it.
#[derive(serde::Serialize, utoipa::ToSchema)]
struct PartUrl {
    number: u16,
    /// Where the part begins in the file.
    offset: u64,
    /// Bytes. The storage takes a body of this size only.
    size: u64,
    url: String,
}

async fn needed(bucket: &Bucket, file: AttachmentId, row: &FileRow) -> Result<Parts, Response> {
    let size = row.facts.size;
    let left: Vec<Part> = match (row.state, &row.facts.upload) {
        (FileState::Pending, Some(upload)) => match bucket.parts(file, upload).await {
            Ok(Some(stored)) => missing(size, &stored).take(URLS_MAX).collect(),
            // They were joined.
            Ok(None) => Vec::new(),
            Err(error) => return Err(storage_failed(&error)),
        },
        (FileState::Pending | FileState::Scanning | FileState::Ready, _) => Vec::new(),
        (FileState::Erasing | FileState::Blocked | FileState::Erased, _) => {
            return Err(no_such_file());
        }
    };
    let upload = row.facts.upload.as_deref().unwrap_or_default();
    let urls = left.into_iter().map(|part| PartUrl {
        number: part.number,
        offset: part.offset,
        size: part.size,
        url: bucket.part_url(file, upload, part),
    });
    Ok(Parts {
        parts: urls.collect(),
        expires_at: bucket.parts_expire_at(),
    })
}

/// Where the bytes of an upload go.
#[derive(serde::Serialize, utoipa::ToSchema)]
#[serde(untagged)]
pub(super) enum Destination {
    Directory {
        /// The path that takes them by tus.
        tus: String,
    },
    Bucket {
        /// The path that returns the addresses of the missing parts.
        parts: String,
        /// Bytes of each part but the last.
        part_bytes: u64,
    },
}

/// A file whose parts were joined.
#[derive(serde::Serialize, utoipa::ToSchema)]
pub(in crate::gateway) struct Completed {
    state: FileState,
    /// What the file still says of people.
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Metadata>,
}

/// Completes an upload whose parts are all there. The answer comes when the file was looked at. It may be repeated, on any
/// gateway.
#[utoipa::path(post, path = "/v1/attachments/{file}/complete", params(("file" = uuid::Uuid, Path)),
    security(("user" = []), ("service" = ["messages:write"])),
    responses((status = 200, body = Completed), (status = "default", body = crate::protocol::Refusal)))]
pub(in crate::gateway) async fn complete(
    State(gateway): State<Arc<Gateway>>,
    person: Person<MessagesWrite>,
    Path(file): Path<AttachmentId>,
) -> Response {
    let completed = async {
        let (files, bucket) = with_bucket(&gateway)?;
        // It is the file of this user, before anything waits for it.
        files.mine(file, &person.acting).await?;
        let writing = taken(&bucket, file).await;
        let row = files.mine(file, &person.acting).await?;
        let state = match (row.state, writing) {
            (FileState::Erasing | FileState::Blocked | FileState::Erased, _) => Err(no_such_file()),
            (FileState::Pending | FileState::Scanning, Some(writing)) => {
                let here = files.clone();
                // It goes on if the client's connection breaks.
                let inspected = async move {
                    let done =
                        inspection::complete(&here, &bucket, file, &row.facts, Patience::Waits)
                            .await;
                    drop(writing);
                    done
                };
                files.finish(inspected).await
            }
            (state, _) => Ok(state),
        }?;
        let metadata = files.metadata(file).await?;
        Ok::<_, Response>(Completed { state, metadata })
    };
    match completed.await {
        Ok(completed) => Json(completed).into_response(),
        Err(response) => response,
    }
}

/// Returns the right to complete an upload, and waits a while for someone else who has it.
async fn taken(bucket: &Bucket, file: AttachmentId) -> Option<Writing> {
    let ends = Instant::now() + OTHERS_MAX;
    loop {
        match bucket.take(file) {
            None if Instant::now() < ends => sleep(ASK_EVERY).await,
            writing => return writing,
        }
    }
}

/// Describes a new upload to its client.
pub(super) fn described(file: AttachmentId) -> Destination {
    Destination::Bucket {
        parts: format!("/v1/attachments/{file}/parts"),
        part_bytes: PART_BYTES,
    }
}
