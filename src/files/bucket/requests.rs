//! The requests of a gateway to its bucket. Errors are those of a file system: [`io::ErrorKind::NotFound`] if an object or
//! an upload does not exist.

use std::{error::Error as _, io, time::Duration};

use aws_lc_rs::digest;
use bytes::Bytes;
use futures_util::stream;
use reqwest::{
    Client, ClientBuilder, RequestBuilder, Response, StatusCode, Url,
    header::{CONTENT_LENGTH, CONTENT_RANGE, RANGE},
    redirect,
};
use rusty_s3::{S3Action as _, actions};
use tokio::io::AsyncRead;
use tokio_util::io::StreamReader;

use super::{Bucket, Inspection, Object};
use crate::{
    files::{HEAD_BYTES, Part, StoredPart, hexadecimal},
    model::AttachmentId,
};

const CONNECT_MAX: Duration = Duration::from_secs(5);
/// The longest time until the head of a response, and between two reads of its body.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// The longest time of a request without a large body.
const REQUEST_MAX: Duration = Duration::from_secs(30);
/// The longest time in which a storage joins or copies a large file.
const COPY_MAX: Duration = Duration::from_secs(600);
/// The largest answer in XML: a page of 1,000 parts has less than half of it.
const ANSWER_BYTES_MAX: usize = 1 << 20;
const COPY_SOURCE: &str = "x-amz-copy-source";

/// Makes the client of requests that a storage answers soon.
pub(super) fn client(is_encrypted: bool) -> io::Result<Client> {
    let client = builder(is_encrypted).read_timeout(PAUSE_MAX);
    client.build().map_err(io::Error::other)
}

/// Makes the client of requests that a storage answers when it has joined, copied or stored a large file.
pub(super) fn slow_client(is_encrypted: bool) -> io::Result<Client> {
    let client = builder(is_encrypted).timeout(COPY_MAX);
    client.build().map_err(io::Error::other)
}

/// Only an encrypted storage needs the certificates of this machine.
fn builder(is_encrypted: bool) -> ClientBuilder {
    let client = Client::builder()
        .connect_timeout(CONNECT_MAX)
        .redirect(redirect::Policy::none())
        .no_proxy()
        .http1_only()
        .https_only(is_encrypted);
    if is_encrypted {
        client
    } else {
        client.tls_certs_only([])
    }
}

impl Bucket {
    /// Checks whether the bucket exists and accepts the keys.
    ///
    /// # Errors
    /// The reason why the bucket cannot be used.
    pub async fn check(&self) -> io::Result<()> {
        let key = format!("{}check", self.prefix);
        let action = actions::GetObject::new(&self.bucket, Some(&self.credentials), &key);
        let url = self.sign(&action);
        match self
            .ask("the check of the bucket", small(self.http.get(url)))
            .await
        {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            answer => answer.map(drop),
        }
    }

    /// Begins an upload and returns its id.
    ///
    /// # Errors
    /// The storage failed or refused.
    pub async fn begin(&self, id: AttachmentId) -> io::Result<String> {
        let key = self.key(id, Object::Incoming);
        let credentials = Some(&self.credentials);
        let action = actions::CreateMultipartUpload::new(&self.bucket, credentials, &key);
        let request = empty(self.http.post(self.sign(&action)));
        let answer = self.answer("beginning an upload", request).await?;
        let answer = actions::CreateMultipartUpload::parse_response(&answer);
        let answer = answer.map_err(io::Error::other)?;
        Ok(answer.upload_id().to_owned())
    }

    /// Returns the parts that are stored of an upload. `None` if there is no such upload: its parts were joined, or it was
    /// given up.
    ///
    /// # Errors
    /// The storage failed or refused.
    pub async fn parts(
        &self,
        id: AttachmentId,
        upload: &str,
    ) -> io::Result<Option<Vec<StoredPart>>> {
        let key = self.key(id, Object::Incoming);
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let credentials = Some(&self.credentials);
            let mut action = actions::ListParts::new(&self.bucket, credentials, &key, upload);
            if let Some(after) = after {
                action.set_part_number_marker(after);
            }
            let request = small(self.http.get(self.sign(&action)));
            let answer = match self.answer("listing parts", request).await {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                answer => answer?,
            };
            let page = actions::ListParts::parse_response(&answer);
            let page = page.map_err(io::Error::other)?;
            all.extend(page.parts.into_iter().map(|part| StoredPart {
                number: part.number,
                size: part.size,
                etag: part.etag,
            }));
            match page.next_part_number_marker {
                Some(next) if after.is_none_or(|after| next > after) => after = Some(next),
                _ => return Ok(Some(all)),
            }
        }
    }

    /// Sends a part of an upload, as a client does.
    ///
    /// # Errors
    /// The storage failed or refused.
    pub async fn send(
        &self,
        id: AttachmentId,
        upload: &str,
        part: Part,
        bytes: Bytes,
    ) -> io::Result<()> {
        let request = self.slow.put(self.part_url(id, upload, part)).body(bytes);
        self.answer("sending a part", request).await.map(drop)
    }

    /// Joins the parts of an upload to one object.
    ///
    /// # Errors
    /// The storage failed or refused; [`io::ErrorKind::InvalidData`] if a part was replaced meanwhile.
    pub async fn join(
        &self,
        id: AttachmentId,
        upload: &str,
        parts: &[StoredPart],
    ) -> io::Result<()> {
        let key = self.key(id, Object::Incoming);
        let mut parts: Vec<_> = parts.iter().collect();
        parts.sort_unstable_by_key(|part| part.number);
        let action = actions::CompleteMultipartUpload::new(
            &self.bucket,
            Some(&self.credentials),
            &key,
            upload,
            parts.iter().map(|part| part.etag.as_str()),
        );
        let url = self.sign(&action);
        let request = self.slow.post(url).body(action.body());
        let answer = self.answer("joining parts", request);
        confirmed(
            "joining parts",
            &answer.await?,
            "CompleteMultipartUploadResult",
        )
    }

    /// Returns the first bytes of an object and its size. `None` if it does not exist.
    ///
    /// # Errors
    /// The storage failed or refused.
    pub async fn head(&self, id: AttachmentId, object: Object) -> io::Result<Option<(Bytes, u64)>> {
        let range = format!("bytes=0-{}", HEAD_BYTES - 1);
        let request = self.http.get(self.get_url(id, object)).header(RANGE, range);
        let mut response = match self.ask("reading a file", small(request)).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            response => response?,
        };
        let whole = response.headers().get(CONTENT_RANGE);
        let whole = whole.and_then(|range| range.to_str().ok()?.rsplit('/').next()?.parse().ok());
        let size = whole.or(response.content_length());
        let size = size.ok_or_else(|| io::Error::other("the storage did not say the size"))?;
        let head = limited(&mut response, HEAD_BYTES).await?;
        Ok(Some((head, size)))
    }

    /// Reads a whole object into memory.
    ///
    /// # Errors
    /// The storage failed or refused, or the object is larger than `bytes_max`.
    pub async fn read(
        &self,
        id: AttachmentId,
        object: Object,
        bytes_max: usize,
    ) -> io::Result<Bytes> {
        let request = self.http.get(self.get_url(id, object));
        let mut response = self.ask("reading a file", request).await?;
        let bytes = limited(&mut response, bytes_max + 1).await?;
        if bytes.len() > bytes_max {
            return Err(io::Error::other("an object is larger than announced"));
        }
        Ok(bytes)
    }

    /// Opens an object to read all of it.
    ///
    /// # Errors
    /// The storage failed or refused.
    pub async fn stream(
        &self,
        id: AttachmentId,
        object: Object,
    ) -> io::Result<impl AsyncRead + Send + Unpin + use<>> {
        let request = self.http.get(self.get_url(id, object));
        let response = self.ask("reading a file", request).await?;
        let parts = stream::try_unfold(response, async |mut response: Response| {
            let part = response.chunk().await.map_err(broken)?;
            io::Result::Ok(part.map(|part| (part, response)))
        });
        Ok(StreamReader::new(Box::pin(parts)))
    }

    /// Reads a whole object and returns its SHA-256 in hexadecimal, and its size.
    ///
    /// # Errors
    /// The storage failed or refused.
    pub async fn hash(&self, id: AttachmentId, object: Object) -> io::Result<(String, u64)> {
        let request = self.http.get(self.get_url(id, object));
        let mut response = self.ask("reading a file", request).await?;
        let mut context = digest::Context::new(&digest::SHA256);
        let mut size = 0;
        while let Some(part) = response.chunk().await.map_err(broken)? {
            context.update(&part);
            size += part.len() as u64;
        }
        Ok((hexadecimal(context.finish().as_ref()), size))
    }

    fn get_url(&self, id: AttachmentId, object: Object) -> Url {
        let key = self.key(id, object);
        let action = actions::GetObject::new(&self.bucket, Some(&self.credentials), &key);
        self.sign(&action)
    }

    /// Writes an object.
    ///
    /// # Errors
    /// The storage failed or refused.
    pub async fn write(
        &self,
        inspection: Inspection,
        id: AttachmentId,
        object: Object,
        bytes: Bytes,
    ) -> io::Result<()> {
        let key = self.key(id, object);
        let action = actions::PutObject::new(&self.bucket, Some(&self.credentials), &key);
        let (signed, valid) = inspection.signed();
        let url = action.sign_with_time(valid, &signed);
        let request = self.slow.put(url).body(bytes);
        self.answer("writing a file", request).await.map(drop)
    }

    /// Copies an upload to where no upload can change it.
    ///
    /// # Errors
    /// The storage failed or refused.
    pub async fn copy(&self, inspection: Inspection, id: AttachmentId) -> io::Result<()> {
        let (from, to) = (
            self.key(id, Object::Incoming),
            self.key(id, Object::ORIGINAL),
        );
        let source = format!("/{}/{from}", self.bucket.name());
        let mut action = actions::PutObject::new(&self.bucket, Some(&self.credentials), &to);
        // As a header: not every storage takes it from the query.
        let headers = action.headers_mut();
        headers.insert(COPY_SOURCE, source.clone());
        let (signed, valid) = inspection.signed();
        let url = action.sign_with_time(valid, &signed);
        let request = empty(self.slow.put(url)).header(COPY_SOURCE, source);
        let answer = self.answer("copying a file", request.timeout(COPY_MAX));
        confirmed("copying a file", &answer.await?, "CopyObjectResult")
    }

    /// Removes an object. It may be repeated.
    ///
    /// # Errors
    /// The storage failed or refused.
    pub async fn remove(&self, id: AttachmentId, object: Object) -> io::Result<()> {
        let key = self.key(id, object);
        let action = actions::DeleteObject::new(&self.bucket, Some(&self.credentials), &key);
        let request = small(self.http.delete(self.sign(&action)));
        if_there(self.answer("removing a file", request).await)
    }

    /// Removes all bytes of a file, complete or not. It may be repeated.
    ///
    /// # Errors
    /// The storage failed or refused.
    pub async fn erase(&self, id: AttachmentId, upload: Option<&str>) -> io::Result<()> {
        if let Some(upload) = upload {
            let key = self.key(id, Object::Incoming);
            let credentials = Some(&self.credentials);
            let action =
                actions::AbortMultipartUpload::new(&self.bucket, credentials, &key, upload);
            let request = small(self.http.delete(self.sign(&action)));
            if_there(self.answer("giving an upload up", request).await)?;
        }
        // Rule [incoming-first].
        for object in [Object::Incoming, Object::ORIGINAL, Object::THUMBNAIL] {
            self.remove(id, object).await?;
        }
        Ok(())
    }

    /// Sends a request and returns the text of the answer.
    async fn answer(&self, what: &str, request: RequestBuilder) -> io::Result<String> {
        let mut response = self.ask(what, request).await?;
        let bytes = limited(&mut response, ANSWER_BYTES_MAX).await?;
        String::from_utf8(bytes.into()).map_err(io::Error::other)
    }

    /// Sends a request. Anything but success is an error.
    async fn ask(&self, what: &str, request: RequestBuilder) -> io::Result<Response> {
        let mut response = request.send().await.map_err(broken)?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let answer = limited(&mut response, ANSWER_BYTES_MAX).await;
        let answer = String::from_utf8_lossy(&answer.unwrap_or_default()).into_owned();
        Err(refusal(what, status, &answer))
    }
}

/// Limits the time of a request that needs no large body.
fn small(request: RequestBuilder) -> RequestBuilder {
    request.timeout(REQUEST_MAX)
}

/// Some storages want the length of an empty body.
fn empty(request: RequestBuilder) -> RequestBuilder {
    small(request).header(CONTENT_LENGTH, 0)
}

fn if_there(removed: io::Result<String>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map(drop),
    }
}

/// Reads at most so many bytes of a response.
async fn limited(response: &mut Response, bytes_max: usize) -> io::Result<Bytes> {
    let expected = response.content_length().unwrap_or_default();
    let expected = usize::try_from(expected).unwrap_or(bytes_max);
    let mut bytes = Vec::with_capacity(expected.min(bytes_max));
    while bytes.len() < bytes_max {
        let Some(part) = response.chunk().await.map_err(broken)? else {
            break;
        };
        let room = bytes_max - bytes.len();
        bytes.extend_from_slice(&part[..part.len().min(room)]);
    }
    Ok(bytes.into())
}

/// Describes a failure, with its causes and without the address, which is signed.
fn broken(error: reqwest::Error) -> io::Error {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    io::Error::other(text)
}

/// Joining and copying answer before they are done, so that an error can follow a status of success.
fn confirmed(what: &str, answer: &str, result: &str) -> io::Result<()> {
    if answer.contains(result) {
        return Ok(());
    }
    Err(refusal(what, StatusCode::OK, answer))
}

/// Describes a refusal of the storage.
fn refusal(what: &str, status: StatusCode, answer: &str) -> io::Error {
    let code = element(answer, "Code").unwrap_or_default();
    let message = element(answer, "Message").unwrap_or_default();
    let setting = match code {
        "NoSuchBucket" => " (attachments.s3.bucket)",
        "InvalidAccessKeyId" => " (attachments.s3.access_key)",
        "SignatureDoesNotMatch" => " (attachments.s3.secret_key)",
        "AuthorizationHeaderMalformed" | "AuthorizationQueryParametersError" => {
            " (attachments.s3.region)"
        }
        "AccessDenied" => " (the policy of attachments.s3.access_key)",
        _ => "",
    };
    let text = format!("{what} was refused: {status} {code}{setting} {message}");
    let kind = match code {
        "NoSuchKey" | "NoSuchUpload" => io::ErrorKind::NotFound,
        "InvalidPart" | "EntityTooSmall" => io::ErrorKind::InvalidData,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, text)
}

/// Returns the text of an element in XML that has no attributes.
fn element<'a>(xml: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once('<')?;
    Some(text)
}
