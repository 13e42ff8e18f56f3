//! Downloads: an address with a signature for whoever may read a message with the file, and the bytes for whoever has
//! the address.

use std::{io::SeekFrom, path::PathBuf, sync::Arc};

use axum::{
    Extension,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, HeaderValue, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_util::{StreamExt as _, stream};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use tokio::{
    fs::File,
    io::{AsyncReadExt as _, AsyncSeekExt as _},
    sync::Semaphore,
    time::Instant,
};

use super::{
    Files, no_such_file, not_read, now_s, places::Downloading, refused_by, storage::Storage,
    store_failed, upload::no_place,
};
use crate::{
    files::{DOWNLOAD, Signature, Treatment, Variant, is_inline},
    gateway::{
        Gateway,
        admission::SharedPlace,
        conditions,
        listener::GivesWay,
        reply::{Path, Query, refused, refused_with},
        requests,
        service::{MessagesRead, Person},
    },
    model::{AttachmentId, FileState, UserId, limits::DOWNLOAD_REQUEST_MAX},
    protocol::{ErrorCode, FileUrl},
    store::FileRow,
};

/// Bytes that are read from the disk at once.
const PART_BYTES: usize = 128 << 10;

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::gateway) struct VariantQuery {
    /// `original` or `thumbnail`.
    variant: Option<String>,
}

/// Leads to the address of a file, which is valid for some minutes.
#[utoipa::path(get, path = "/v1/attachments/{file}", params(("file" = uuid::Uuid, Path), VariantQuery),
    security(("user" = []), ("service" = ["messages:read"])),
    responses((status = 302), (status = "default", body = crate::protocol::Refusal)))]
pub(in crate::gateway) async fn redirect(
    State(gateway): State<Arc<Gateway>>,
    person: Person<MessagesRead>,
    Path(file): Path<AttachmentId>,
    Query(VariantQuery { variant }): Query<VariantQuery>,
) -> Response {
    let variant = variant.as_deref().unwrap_or("original");
    let Some(variant) = Variant::named(variant) else {
        return refused(ErrorCode::BadRequest, "variant is original or thumbnail");
    };
    let urls = match requests::urls(&gateway, &person.acting, vec![file]).await {
        Ok(urls) => urls,
        Err(error) => return refused_by(&error),
    };
    let url = urls.into_iter().next().and_then(|urls| match variant {
        Variant::Original => Some(urls.url),
        Variant::Thumbnail => urls.thumb,
    });
    let Some(location) = url.and_then(|url| HeaderValue::from_str(&url).ok()) else {
        return no_such_file();
    };
    let headers = [
        (header::LOCATION, location),
        (
            header::CACHE_CONTROL,
            HeaderValue::from_static("private, no-store"),
        ),
    ];
    (StatusCode::FOUND, headers).into_response()
}

impl Files {
    /// Returns the addresses of a file for a user who may read it.
    pub(in crate::gateway) fn url(
        &self,
        file: AttachmentId,
        row: &FileRow,
        user: &UserId,
    ) -> FileUrl {
        let reader = self.signer.reader(user.as_str());
        let address = |variant: Variant| match &self.storage {
            Storage::Directory(_) => {
                let signed = self.signer.sign(file, variant, &reader, now_s());
                let Signature {
                    expires_s, text, ..
                } = signed;
                let (name, e, r, s) = (variant.name(), expires_s, &reader, text);
                (format!("/v1/files/{file}/{name}?e={e}&r={r}&s={s}"), e)
            }
            Storage::Bucket(bucket) => {
                let window = (now_s(), self.settings.url_window_s);
                bucket.url(file, variant, &treatment(row, variant), window)
            }
        };
        let (url, expires_s) = address(Variant::Original);
        let has_thumbnail = row.result.as_ref().is_some_and(|r| r.thumbnail.is_some());
        FileUrl {
            id: file,
            url,
            thumb: has_thumbnail.then(|| address(Variant::Thumbnail).0),
            expires_at: i64::try_from(expires_s * 1_000).unwrap_or(i64::MAX),
        }
    }
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::gateway) struct SignatureQuery {
    /// When the address expires, in seconds since 1970.
    e: u64,
    /// The reader for whom the address was made. Without it the signature is wrong.
    #[serde(default)]
    r: String,
    /// The signature.
    s: String,
}

/// Returns the bytes of a file, or a range of them.
#[utoipa::path(get, path = "/v1/files/{file}/{variant}",
    params(("file" = uuid::Uuid, Path), ("variant" = String, Path), SignatureQuery), security(()),
    responses((status = 200), (status = 206), (status = "default", body = crate::protocol::Refusal)))]
pub(in crate::gateway) async fn file(
    State(gateway): State<Arc<Gateway>>,
    Path((file, variant)): Path<(AttachmentId, String)>,
    Query(SignatureQuery { e, r, s }): Query<SignatureQuery>,
    place: Option<Extension<SharedPlace>>,
    gives_way: Option<Extension<GivesWay>>,
    method: Method,
    headers: HeaderMap,
) -> Response {
    let (Some(files), Some(variant)) = (&gateway.files, Variant::named(&variant)) else {
        return no_such_file();
    };
    // Before the signature: with a bucket the storage signs, and the key of the gateway is no secret.
    let Some(directory) = files.storage.directory() else {
        return no_such_file();
    };
    let signature = Signature {
        expires_s: e,
        reader: r,
        text: s,
    };
    if !files.signer.is_valid(file, variant, &signature, now_s()) {
        return refused(
            ErrorCode::Forbidden,
            "the address has expired, or was changed",
        );
    }
    // Connections of browsers for pictures are no strangers.
    if let Some(Extension(place)) = place {
        place.authenticated();
    }
    let row = match files.row(file).await {
        Ok(row) => row,
        Err(error) => return store_failed(error),
    };
    let Some(row) = row.filter(|row| matches!(row.state, FileState::Ready | FileState::Erasing))
    else {
        return no_such_file();
    };
    let path = directory.path(file, variant);
    let len = match tokio::fs::metadata(&path).await {
        Ok(metadata) => metadata.len(),
        Err(error) => return not_read(&error),
    };
    let found = Found {
        path,
        len,
        etag: etag(&row, variant),
        treatment: treatment(&row, variant),
    };
    match conditions::unmet(&headers, &found.etag) {
        None => {}
        Some(StatusCode::NOT_MODIFIED) => return unchanged(found),
        Some(_) => return conditions::failed(),
    }
    let gives_way = gives_way.map(|Extension(GivesWay(notify))| notify);
    let taken = files
        .downloads
        .take(&signature.reader, gives_way.unwrap_or_default());
    match taken.await {
        Ok(place) => serve(files, found, place, (&method, &headers)).await,
        Err(why) => no_place(&why, "downloads"),
    }
}

/// A file that is there, and how it is served.
struct Found {
    path: PathBuf,
    len: u64,
    etag: String,
    treatment: Treatment,
}

fn etag(row: &FileRow, variant: Variant) -> String {
    let result = row.result.as_ref();
    let digest = result.map_or("", |result| result.sha256.as_str());
    format!("\"{}{digest}\"", &variant.name()[..1])
}

/// Says that a client has this version of a file already.
fn unchanged(found: Found) -> Response {
    let mut response = StatusCode::NOT_MODIFIED.into_response();
    describe(response.headers_mut(), found.treatment, found.etag);
    // They are about a body, and there is none.
    for name in [header::CONTENT_TYPE, header::CONTENT_DISPOSITION] {
        response.headers_mut().remove(name);
    }
    response
}

/// A part of a file that a client wants.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    All,
    Part { from: u64, to: u64 },
    Nothing,
}

/// Reads a `Range` of one part (RFC 9110, section 14). Anything else means the whole file.
fn wanted(method: &Method, headers: &HeaderMap, etag: &str, len: u64) -> Wanted {
    if method != Method::GET {
        return Wanted::All;
    }
    let text = |name| {
        headers
            .get(name)
            .and_then(|v: &HeaderValue| v.to_str().ok())
    };
    if text(header::IF_RANGE).is_some_and(|known| known != etag) {
        return Wanted::All;
    }
    let range = text(header::RANGE).and_then(|range| range.strip_prefix("bytes="));
    let Some((from, to)) = range.and_then(|range| range.split_once('-')) else {
        return Wanted::All;
    };
    let (from, to) = (from.trim(), to.trim());
    let (from, to) = match (from.parse::<u64>(), to.parse::<u64>()) {
        (Ok(from), Ok(to)) => (from, to.min(len.saturating_sub(1))),
        (Ok(from), Err(_)) if to.is_empty() => (from, len.saturating_sub(1)),
        (Err(_), Ok(last)) if from.is_empty() => (len.saturating_sub(last), len.saturating_sub(1)),
        _ => return Wanted::All,
    };
    if from > to || from >= len {
        Wanted::Nothing
    } else {
        Wanted::Part { from, to }
    }
}

async fn serve(
    files: &Files,
    found: Found,
    place: Downloading,
    (method, headers): (&Method, &HeaderMap),
) -> Response {
    let Found {
        path,
        len,
        etag,
        treatment,
    } = found;
    let (status, from, to) = match wanted(method, headers, &etag, len) {
        Wanted::All => (StatusCode::OK, 0, len),
        Wanted::Part { from, to } => (StatusCode::PARTIAL_CONTENT, from, to + 1),
        Wanted::Nothing => {
            let range = format!("bytes */{len}");
            let status = StatusCode::RANGE_NOT_SATISFIABLE;
            let refusal = "the file has no such bytes".to_owned();
            let response = refused_with(status, ErrorCode::BadRequest, refusal);
            return ([(header::CONTENT_RANGE, range)], response).into_response();
        }
    };
    let mut reading = Reading {
        reads: files.reads.clone(),
        path,
        at: from,
        to,
        ends: Instant::now() + DOWNLOAD_REQUEST_MAX,
        _place: place,
    };
    // Before the answer begins: the file may have been erased since it was found.
    let first = if method == Method::HEAD {
        None
    } else {
        match reading.next().await {
            Ok(first) => first,
            Err(error) => return not_read(&error),
        }
    };
    let mut response = Response::new(reading.body(first));
    *response.status_mut() = status;
    let given = response.headers_mut();
    describe(given, treatment, etag);
    given.insert(header::CONTENT_LENGTH, HeaderValue::from(to - from));
    if status == StatusCode::PARTIAL_CONTENT {
        let range = HeaderValue::from_str(&format!("bytes {from}-{}/{len}", to - 1));
        given.extend(range.map(|range| (header::CONTENT_RANGE, range)));
    }
    response
}

/// Returns how browsers are to treat a file. Without a media type that they may show it is a download.
fn treatment(row: &FileRow, variant: Variant) -> Treatment {
    let result = row.result.as_ref();
    let mime = result.and_then(|result| match variant {
        Variant::Original => is_inline(&result.mime).then_some(result.mime.as_str()),
        Variant::Thumbnail => result.thumbnail.as_deref(),
    });
    let disposition = if mime.is_some() {
        "inline"
    } else {
        "attachment"
    };
    Treatment {
        content_type: mime.unwrap_or(DOWNLOAD).to_owned(),
        disposition: format!("{disposition}; {}", filenames(&row.facts.name)),
        caching: "private, max-age=300, immutable",
    }
}

/// Returns a name as a header has it: in ASCII for old programs, and whole (RFC 6266, section 4.3 and appendix D).
fn filenames(name: &str) -> String {
    let is_plain = |c: char| (c.is_ascii_graphic() || c == ' ') && !matches!(c, '"' | '\\' | '%');
    let plain: String = name
        .chars()
        .map(|c| if is_plain(c) { c } else { '_' })
        .collect();
    let whole = utf8_percent_encode(name, NON_ALPHANUMERIC);
    format!("filename=\"{plain}\"; filename*=UTF-8''{whole}")
}

/// Adds the headers of a file. Nothing of it is executed, whatever it contains.
fn describe(headers: &mut HeaderMap, treatment: Treatment, etag: String) {
    let fixed = |text: &str| text.to_owned();
    let texts = [
        (header::CONTENT_TYPE, treatment.content_type),
        (header::CONTENT_DISPOSITION, treatment.disposition),
        (header::ETAG, etag),
        (header::ACCEPT_RANGES, fixed("bytes")),
        (header::CACHE_CONTROL, fixed(treatment.caching)),
        (header::X_CONTENT_TYPE_OPTIONS, fixed("nosniff")),
        (
            header::CONTENT_SECURITY_POLICY,
            fixed("sandbox; default-src 'none'"),
        ),
        (header::REFERRER_POLICY, fixed("no-referrer")),
        (
            header::HeaderName::from_static("cross-origin-resource-policy"),
            fixed("cross-origin"),
        ),
    ];
    for (name, text) in texts {
        headers.extend(HeaderValue::from_str(&text).map(|value| (name, value)));
    }
}

/// The bytes of a file from `at` up to `to`, read in parts as the client takes them. The file is open only while a part is
/// read, so slow clients hold no open files. The connection ends if a client does not take a part for some time, and the
/// body ends after [`DOWNLOAD_REQUEST_MAX`].
struct Reading {
    reads: Arc<Semaphore>,
    path: PathBuf,
    at: u64,
    to: u64,
    ends: Instant,
    /// It is free when the body is sent or dropped.
    _place: Downloading,
}

impl Reading {
    /// Reads the next part, if any is left.
    async fn next(&mut self) -> std::io::Result<Option<Bytes>> {
        if self.at >= self.to {
            return Ok(None);
        }
        if Instant::now() >= self.ends {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        let place = self.reads.clone().acquire_owned().await;
        let left = usize::try_from(self.to - self.at).unwrap_or(PART_BYTES);
        let mut part = vec![0; left.min(PART_BYTES)];
        let mut opened = File::open(&self.path).await?;
        opened.seek(SeekFrom::Start(self.at)).await?;
        opened.read_exact(&mut part).await?;
        drop(place);
        self.at += part.len() as u64;
        Ok(Some(part.into()))
    }

    /// Returns a body that begins with this part.
    fn body(self, first: Option<Bytes>) -> Body {
        let others = stream::try_unfold(self, |mut reading| async move {
            let part = reading.next().await?;
            std::io::Result::Ok(part.map(|part| (part, reading)))
        });
        Body::from_stream(stream::iter(first.map(Ok)).chain(others))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_within_the_file() {
        let ask = |range: &str| {
            let headers =
                HeaderMap::from_iter([(header::RANGE, HeaderValue::from_str(range).unwrap())]);
            wanted(&Method::GET, &headers, "\"x\"", 100)
        };
        let part = |from, to| Wanted::Part { from, to };
        assert_eq!(ask("bytes=0-9"), part(0, 9));
        assert_eq!(ask("bytes=90-"), part(90, 99));
        assert_eq!(ask("bytes=90-1000"), part(90, 99));
        assert_eq!(ask("bytes=-10"), part(90, 99));
        assert_eq!(ask("bytes=-1000"), part(0, 99));
        for nothing in ["bytes=100-", "bytes=9-8", "bytes=-0"] {
            assert_eq!(ask(nothing), Wanted::Nothing, "{nothing}");
        }
        for all in ["bytes=0-1,3-4", "lines=1-2", "bytes=a-b", "bytes=-", ""] {
            assert_eq!(ask(all), Wanted::All, "{all}");
        }
        let mut headers = HeaderMap::new();
        headers.insert(header::RANGE, HeaderValue::from_static("bytes=0-9"));
        headers.insert(header::IF_RANGE, HeaderValue::from_static("\"y\""));
        let ask = |method, headers: &HeaderMap| wanted(method, headers, "\"x\"", 100);
        assert_eq!(ask(&Method::GET, &headers), Wanted::All);
        headers.insert(header::IF_RANGE, HeaderValue::from_static("\"x\""));
        assert_eq!(ask(&Method::GET, &headers), part(0, 9));
        assert_eq!(ask(&Method::HEAD, &headers), Wanted::All);
        // A weak tag does not say that the bytes are the same.
        headers.insert(header::IF_RANGE, HeaderValue::from_static("W/\"x\""));
        assert_eq!(ask(&Method::GET, &headers), Wanted::All);
    }

    #[test]
    fn names_are_in_ascii_and_whole() {
        let plain = filenames("a cat.png");
        assert_eq!(
            plain,
            "filename=\"a cat.png\"; filename*=UTF-8''a%20cat%2Epng"
        );
        let hostile = filenames("a\"\\\r\n%41é.png");
        assert!(hostile.starts_with(
            "filename=\"a_____41_.png\"; filename*=UTF-8''a%22%5C%0D%0A%2541%C3%A9%2Epng"
        ));
    }
}
