//! The bytes of an upload by tus: the body of a `PATCH` is written as it comes, while its user may upload, and as long as it
//! comes fast enough.

use std::{
    pin::{Pin, pin},
    sync::Arc,
};

use axum::{
    body::{Body, BodyDataStream, Bytes},
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use futures_util::StreamExt as _;
use tokio::{
    sync::Notify,
    time::{Duration, Instant, sleep, sleep_until, timeout},
};

use super::{
    Files, disk_failed, inspect, no_such_file, not_read,
    rights::{Rights, given_up, late},
    turns::Patience,
    upload::{
        check_room, check_version, digits, metadata_header, no_place, no_tus, number, state_name,
    },
};
use crate::{
    files::{Directory, Pace, Upload, Writing},
    gateway::{
        Gateway,
        reply::{Path, refused, refused_with, stopping},
        service::{MessagesWrite, Person},
    },
    model::{
        AttachmentId, FileState, UserId,
        limits::{UPLOAD_BEGIN_MAX, UPLOAD_END_MAX},
    },
    protocol::ErrorCode,
    store::FileRow,
    tasks::Tasks,
};

/// Bytes of a body after which the room of the disk is checked again.
const ROOM_CHECKED_EVERY: usize = 4 << 20;
/// The pause of a body after which what has come is written.
const FLUSHED_AFTER: Duration = Duration::from_millis(100);
/// The media type of a part.
const CONTENT_TYPE: &str = "application/offset+octet-stream";

type Chunk = Option<Result<Bytes, axum::Error>>;

/// Why a body is not read to its end.
enum Stop {
    /// It broke off, which does not matter after its last byte.
    Broken(Response),
    /// The gateway drains, which does not matter after the last byte either.
    Draining,
    /// All bytes of the file have come, and nothing after them: neither more bytes nor the end of the body.
    Silent,
    Refused(Response),
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
        return no_tus();
    };
    let (head, body) = request.into_parts();
    let appended = async {
        let row = may_append(&files, &person.acting, file, &head.headers).await?;
        let rights = Rights {
            request: gateway.hub.begin_request(&person.acting),
            gateway,
            files: files.clone(),
            user: person.acting,
            file,
            conversation: row.facts.conversation,
            expires_at: person.expires_at,
        };
        // It goes on if the client's connection breaks: the bytes that have come are written.
        let received = async move { receive(&directory, &row, &rights, &head.headers, body).await };
        files.run(received).await
    };
    appended.await.unwrap_or_else(|response| response)
}

/// Checks whether a body may be appended, before anything is taken for it.
async fn may_append(
    files: &Files,
    user: &UserId,
    file: AttachmentId,
    headers: &HeaderMap,
) -> Result<FileRow, Response> {
    check_version(headers)?;
    let given = headers.get(header::CONTENT_TYPE);
    if given.is_none_or(|given| given != CONTENT_TYPE) {
        let refusal = format!("the content-type of a part is {CONTENT_TYPE}");
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return Err(refused_with(status, ErrorCode::BadRequest, refusal));
    }
    let row = files.mine(file, user).await?;
    if row.state == FileState::Pending {
        Ok(row)
    } else {
        Err(given_up())
    }
}

/// Takes a place and the right to write.
async fn begin(
    files: &Files,
    directory: &Directory,
    row: &FileRow,
    (user, file): (&UserId, AttachmentId),
    headers: &HeaderMap,
) -> Result<(Writing, Upload, Arc<Notify>), Response> {
    let counted = files.uploads.count(user).await;
    let counted = counted.map_err(|why| no_place(&why, "uploads"))?;
    let gives_way = counted.gives_way();
    let writing = directory.take(file).ok_or_else(|| {
        let refusal = "something else writes to this upload".to_owned();
        refused_with(StatusCode::LOCKED, ErrorCode::Conflict, refusal)
    })?;
    writing.keep(counted);
    let upload = directory.resume(&writing).await;
    let upload = upload.map_err(|error| not_read(&error))?;
    let Some(offset) = digits(headers, "upload-offset") else {
        let text = "upload-offset is missing or no number";
        return Err(refused(ErrorCode::BadRequest, text));
    };
    if offset != upload.len {
        let refusal = format!("upload-offset is not {}, which has come", upload.len);
        return Err(refused(ErrorCode::Conflict, refusal));
    }
    check_room(directory, row.facts.size.saturating_sub(upload.len))?;
    Ok((writing, upload, gives_way))
}

/// Writes the body as it comes. What has come counts, even if the rest does not.
async fn receive(
    directory: &Arc<Directory>,
    row: &FileRow,
    rights: &Rights,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, Response> {
    let (files, file) = (&rights.files, rights.file);
    let mut body = body.into_data_stream();
    let mut ended = pin!(rights.ended());
    // A head without a body holds no place and no file.
    let first = tokio::select! {
        biased;
        // Nothing has come, so there is no offset to tell.
        () = rights.gateway.tasks.draining() => return Err(stopping()),
        response = ended.as_mut() => return Err(response),
        first = timeout(UPLOAD_BEGIN_MAX, body.next()) => first.map_err(|_| late("no bytes came"))?,
    };
    let of = (&rights.user, file);
    let (writing, upload, gives_way) = begin(files, directory, row, of, headers).await?;
    let mut receiving = Receiving {
        upload,
        size: row.facts.size,
        directory,
        tasks: &rights.gateway.tasks,
        unchecked: 0,
        is_flushed: true,
        pace: Pace::new(Instant::now()),
        gives_way,
    };
    let stopped = receiving.read(first, &mut body, ended).await.err();
    let mut upload = receiving.upload;
    let flushed = upload.flush().await;
    let offset = upload.len;
    match stopped {
        Some(Stop::Refused(response)) => return Err(response),
        Some(Stop::Broken(response)) if offset < row.facts.size => return Err(response),
        Some(Stop::Broken(_) | Stop::Draining | Stop::Silent) | None => {
            flushed.map_err(|error| disk_failed(&error))?;
        }
    }
    if offset < row.facts.size && matches!(stopped, Some(Stop::Draining)) {
        // What came before it is kept.
        return Err(([("upload-offset", number(offset))], stopping()).into_response());
    }
    complete(directory, row, rights, writing, upload).await
}

/// Completes the file if all of it has come. Returns the answer to a body that was written.
async fn complete(
    directory: &Arc<Directory>,
    row: &FileRow,
    rights: &Rights,
    writing: Writing,
    upload: Upload,
) -> Result<Response, Response> {
    let (files, file, offset) = (&rights.files, rights.file, upload.len);
    let (mut state, mut metadata) = (row.state, None);
    if offset == row.facts.size {
        // It goes on if the answer does not wait for it.
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

/// An upload whose bytes come.
struct Receiving<'a> {
    upload: Upload,
    /// The announced size of the file.
    size: u64,
    directory: &'a Directory,
    tasks: &'a Tasks,
    /// Bytes since the room of the disk was checked.
    unchecked: usize,
    is_flushed: bool,
    pace: Pace,
    /// Notified when another user needs the place.
    gives_way: Arc<Notify>,
}

impl Receiving<'_> {
    /// Reads a body to its end.
    async fn read(
        &mut self,
        first: Chunk,
        body: &mut BodyDataStream,
        mut ended: Pin<&mut impl Future<Output = Response>>,
    ) -> Result<(), Stop> {
        let mut part = first;
        loop {
            match part {
                Some(Ok(bytes)) => self.take(&bytes).await?,
                None => return Ok(()),
                Some(Err(_)) => {
                    let text = "the body broke off";
                    return Err(Stop::Broken(refused(ErrorCode::BadRequest, text)));
                }
            }
            part = self.next(body, ended.as_mut()).await?;
        }
    }

    /// Waits for the next bytes, as long as the user may upload and enough came before. After the last byte of the file it
    /// waits a while for the end of the body.
    async fn next(
        &mut self,
        body: &mut BodyDataStream,
        mut ended: Pin<&mut impl Future<Output = Response>>,
    ) -> Result<Chunk, Stop> {
        let is_whole = self.upload.len == self.size;
        let ends_by = is_whole.then(|| Instant::now() + UPLOAD_END_MAX);
        loop {
            tokio::select! {
                biased;
                // A drain does not wait for the rest.
                () = self.tasks.draining() => return Err(Stop::Draining),
                response = ended.as_mut() => return Err(Stop::Refused(response)),
                () = self.gives_way.notified() => return Err(Stop::Broken(late("others wait for a place"))),
                part = body.next() => return Ok(part),
                // Each of these moves the time, or ends the loop.
                () = sleep_until(ends_by.unwrap_or_else(|| self.pace.ends())) => match ends_by {
                    Some(_) => return Err(Stop::Silent),
                    None => self.keep_pace()?,
                },
                // What has come counts, also when the client pauses.
                () = sleep(FLUSHED_AFTER), if !self.is_flushed => {
                    let flushed = self.upload.flush().await;
                    flushed.map_err(|error| Stop::Refused(disk_failed(&error)))?;
                    self.is_flushed = true;
                }
            }
        }
    }

    async fn take(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        if self.upload.len + bytes.len() as u64 > self.size {
            let text = format!("there are more than the announced {} bytes", self.size);
            return Err(Stop::Refused(refused(ErrorCode::TooLarge, text)));
        }
        // Nothing is written after what could not be written.
        let appended = self.upload.append(bytes).await;
        appended.map_err(|error| Stop::Refused(disk_failed(&error)))?;
        self.is_flushed = false;
        // Others write too.
        self.unchecked += bytes.len();
        if self.unchecked >= ROOM_CHECKED_EVERY {
            self.unchecked = 0;
            check_room(self.directory, 0).map_err(Stop::Refused)?;
        }
        self.pace.add(bytes.len());
        self.keep_pace()
    }

    #[expect(clippy::result_large_err, reason = "a response either way")]
    fn keep_pace(&mut self) -> Result<(), Stop> {
        // Nothing more has to come after the last byte.
        if self.upload.len == self.size || self.pace.is_kept(Instant::now()) {
            Ok(())
        } else {
            Err(Stop::Broken(late("the bytes came too slowly")))
        }
    }
}
