//! `s3s-fs`, with what it lacks: etags in lists of parts, pages of them, errors for uploads that do not exist, and one
//! request at a time for the parts of an upload.

use std::{fs, io, path::PathBuf};

use md5::{Digest as _, Md5};
use s3s::{S3, S3Request, S3Response, S3Result, dto::*, s3_error};
use s3s_fs::FileSystem;
use tokio::sync::Mutex;

/// Parts in one page. Real storages have 1,000.
const PAGE: usize = 2;

#[derive(Debug)]
pub struct Files {
    root: PathBuf,
    files: FileSystem,
    /// Held while parts are listed or joined: `s3s-fs` joins them file by file, and whoever looks meanwhile would get an error that
    /// no storage gives.
    uploads: Mutex<()>,
}

impl Files {
    pub fn new(root: PathBuf) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let files = FileSystem::new(&root).map_err(|error| format!("{error:?}"))?;
        Ok(Self {
            root,
            files,
            uploads: Mutex::default(),
        })
    }

    fn check(&self, bucket: &str, upload: &str) -> S3Result<()> {
        if !self.root.join(bucket).exists() {
            return Err(s3_error!(NoSuchBucket));
        }
        if !self.root.join(format!(".upload-{upload}.json")).exists() {
            return Err(s3_error!(NoSuchUpload));
        }
        Ok(())
    }

    /// Returns the parts of an upload in their order.
    fn parts(&self, upload: &str) -> io::Result<Vec<Part>> {
        let mut parts = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            let entry = entry?;
            let name = entry.file_name().into_string().unwrap_or_default();
            let number = name.strip_prefix(&format!(".upload_id-{upload}.part-"));
            let Some(number) = number.and_then(|number| number.parse().ok()) else {
                continue;
            };
            let bytes = fs::read(entry.path())?;
            parts.push(Part {
                part_number: Some(number),
                size: i64::try_from(bytes.len()).ok(),
                last_modified: Some(entry.metadata()?.modified()?.into()),
                e_tag: Some(ETag::Strong(hexadecimal(&bytes))),
                ..Part::default()
            });
        }
        parts.sort_unstable_by_key(|part| part.part_number);
        Ok(parts)
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    let digest = Md5::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

type Answer<T> = S3Result<S3Response<T>>;

#[async_trait::async_trait]
impl S3 for Files {
    async fn list_parts(&self, request: S3Request<ListPartsInput>) -> Answer<ListPartsOutput> {
        let _alone = self.uploads.lock().await;
        let asked = request.input;
        self.check(&asked.bucket, &asked.upload_id)?;
        let all = self.parts(&asked.upload_id);
        let mut parts = all.map_err(|error| s3_error!(error, InternalError))?;
        let after = asked.part_number_marker.unwrap_or_default();
        parts.retain(|part| part.part_number > Some(after));
        let is_truncated = parts.len() > PAGE;
        parts.truncate(PAGE);
        let next = parts.last().and_then(|part| part.part_number);
        Ok(S3Response::new(ListPartsOutput {
            bucket: Some(asked.bucket),
            key: Some(asked.key),
            upload_id: Some(asked.upload_id),
            max_parts: i32::try_from(PAGE).ok(),
            is_truncated: Some(is_truncated),
            next_part_number_marker: next.filter(|_| is_truncated),
            parts: Some(parts),
            ..ListPartsOutput::default()
        }))
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> Answer<CreateMultipartUploadOutput> {
        if !self.root.join(&request.input.bucket).exists() {
            return Err(s3_error!(NoSuchBucket));
        }
        self.files.create_multipart_upload(request).await
    }

    async fn upload_part(&self, request: S3Request<UploadPartInput>) -> Answer<UploadPartOutput> {
        self.check(&request.input.bucket, &request.input.upload_id)?;
        self.files.upload_part(request).await
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> Answer<CompleteMultipartUploadOutput> {
        let _alone = self.uploads.lock().await;
        let asked = &request.input;
        self.check(&asked.bucket, &asked.upload_id)?;
        let stored = self.parts(&asked.upload_id);
        let stored = stored.map_err(|error| s3_error!(error, InternalError))?;
        let named = asked.multipart_upload.as_ref();
        for part in named
            .and_then(|named| named.parts.as_ref())
            .into_iter()
            .flatten()
        {
            let is_stored = |stored: &Part| {
                (stored.part_number, &stored.e_tag) == (part.part_number, &part.e_tag)
            };
            if !stored.iter().any(is_stored) {
                return Err(s3_error!(InvalidPart));
            }
        }
        self.files.complete_multipart_upload(request).await
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> Answer<AbortMultipartUploadOutput> {
        let _alone = self.uploads.lock().await;
        self.check(&request.input.bucket, &request.input.upload_id)?;
        self.files.abort_multipart_upload(request).await
    }

    async fn get_object(&self, request: S3Request<GetObjectInput>) -> Answer<GetObjectOutput> {
        if !self.root.join(&request.input.bucket).exists() {
            return Err(s3_error!(NoSuchBucket));
        }
        self.files.get_object(request).await
    }

    async fn head_object(&self, request: S3Request<HeadObjectInput>) -> Answer<HeadObjectOutput> {
        self.files.head_object(request).await
    }

    async fn put_object(&self, request: S3Request<PutObjectInput>) -> Answer<PutObjectOutput> {
        self.files.put_object(request).await
    }

    async fn copy_object(&self, request: S3Request<CopyObjectInput>) -> Answer<CopyObjectOutput> {
        self.files.copy_object(request).await
    }

    async fn delete_object(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> Answer<DeleteObjectOutput> {
        self.files.delete_object(request).await
    }
}
