//! Writing an upload: while a part of it is written and hashed on another thread, the next one comes.

use std::{
    fs,
    io::{self, Write as _},
    mem,
};

use aws_lc_rs::digest;
use tokio::task::{JoinHandle, spawn_blocking};

use super::{signing::hexadecimal, writing::Writing};

/// Bytes of an upload that are written at once, because each write is a change of threads. As many again are on their way
/// to the disk.
const PART_BYTES: usize = 256 << 10;

/// An upload that is being written to.
#[derive(Debug)]
pub struct Upload {
    /// Bytes that have come and are not handed to the writer yet.
    part: Vec<u8>,
    writer: Writer,
    /// Bytes that have come.
    pub len: u64,
}

#[derive(Debug)]
enum Writer {
    Idle(Target),
    Busy(JoinHandle<io::Result<Target>>),
    /// A write failed. Nothing is written after it.
    Failed,
}

/// Where the parts go.
#[derive(Debug)]
struct Target {
    file: fs::File,
    /// The hash of all bytes of the file. `None` if some came before, by another request.
    hash: Option<Hash>,
    /// Empty, for the part after the next.
    spare: Vec<u8>,
    /// A write may go on after its request has ended. So the right to write ends with the write: the next request would
    /// find the file too short otherwise, and its bytes would not be what was hashed.
    _writing: Writing,
}

struct Hash(digest::Context);

impl std::fmt::Debug for Hash {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Hash")
    }
}

impl Target {
    fn write(mut self, mut part: Vec<u8>) -> io::Result<Self> {
        self.file.write_all(&part)?;
        if let Some(Hash(context)) = &mut self.hash {
            context.update(&part);
        }
        part.clear();
        self.spare = part;
        Ok(self)
    }
}

impl Upload {
    /// Continues a file that is open at its end, which is at `len`.
    pub(super) fn new(file: fs::File, len: u64, writing: Writing) -> Self {
        let hash = (len == 0).then(|| Hash(digest::Context::new(&digest::SHA256)));
        Self {
            part: Vec::new(),
            writer: Writer::Idle(Target {
                file,
                hash,
                spare: Vec::new(),
                _writing: writing,
            }),
            len,
        }
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// The error of the file system, maybe of earlier bytes. A part of the bytes may have been written.
    pub async fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let room = PART_BYTES - self.part.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.make_room(self.part.len() + now.len());
            self.part.extend_from_slice(now);
            self.len += now.len() as u64;
            bytes = later;
            if self.part.len() == PART_BYTES {
                self.hand_over().await?;
            }
        }
        Ok(())
    }

    /// Makes the part large enough. It grows with what comes, so that a client that sends little takes little memory.
    fn make_room(&mut self, needed: usize) {
        let now = self.part.capacity();
        if needed > now {
            let wanted = (2 * now).clamp(needed, PART_BYTES);
            self.part.reserve_exact(wanted - self.part.len());
        }
    }

    /// Hands everything to the operating system, so that the length of the file counts it.
    ///
    /// # Errors
    /// The error of the file system.
    pub async fn flush(&mut self) -> io::Result<()> {
        if !self.part.is_empty() {
            self.hand_over().await?;
        }
        let target = self.written().await?;
        self.writer = Writer::Idle(target);
        Ok(())
    }

    /// Makes everything durable. Returns the SHA-256 of the file in hexadecimal, if all of it came by this request.
    pub(super) async fn finish(mut self) -> io::Result<Option<String>> {
        self.flush().await?;
        let target = self.written().await?;
        let synced = spawn_blocking(move || target.file.sync_all().map(|()| target.hash));
        let hash = synced.await.map_err(io::Error::other)??;
        Ok(hash.map(|Hash(context)| hexadecimal(context.finish().as_ref())))
    }

    async fn hand_over(&mut self) -> io::Result<()> {
        let mut target = self.written().await?;
        let part = mem::replace(&mut self.part, mem::take(&mut target.spare));
        self.writer = Writer::Busy(spawn_blocking(move || target.write(part)));
        Ok(())
    }

    /// Waits until what was handed over is written.
    async fn written(&mut self) -> io::Result<Target> {
        match mem::replace(&mut self.writer, Writer::Failed) {
            Writer::Idle(target) => Ok(target),
            Writer::Busy(write) => write.await.map_err(io::Error::other)?,
            Writer::Failed => Err(io::Error::other("an earlier write failed")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use super::*;
    use crate::{files::writing::Writers, model::AttachmentId};

    fn upload(file: &fs::File, len: u64, writers: &Writers) -> Upload {
        let writing = writers.take(AttachmentId(uuid::Uuid::nil())).unwrap();
        Upload::new(file.try_clone().unwrap(), len, writing)
    }

    fn sha256(bytes: &[u8]) -> String {
        hexadecimal(digest::digest(&digest::SHA256, bytes).as_ref())
    }

    #[tokio::test]
    async fn bytes_are_written_in_order_and_hashed() {
        let (mut file, writers) = (tempfile::tempfile().unwrap(), Writers::default());
        let bytes: Vec<u8> = (0..3 * PART_BYTES as u32 + 7)
            .map(|at| (at / 251) as u8)
            .collect();
        let mut whole = upload(&file, 0, &writers);
        let (first, rest) = bytes.split_at(PART_BYTES + 1);
        for part in first.chunks(1_000).chain([rest]) {
            whole.append(part).await.unwrap();
        }
        whole.flush().await.unwrap();
        assert_eq!(file.metadata().unwrap().len(), bytes.len() as u64);
        assert_eq!(whole.len, bytes.len() as u64);
        assert_eq!(whole.finish().await.unwrap(), Some(sha256(&bytes)));
        let mut continued = upload(&file, bytes.len() as u64, &writers);
        continued.append(b"more").await.unwrap();
        // The hash of what came before is not known.
        assert_eq!(continued.finish().await.unwrap(), None);
        let mut read = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut read).unwrap();
        assert_eq!(read, [&bytes[..], b"more"].concat());
    }

    #[tokio::test]
    async fn the_right_to_write_ends_with_the_last_write() {
        let (reader, pipe) = io::pipe().unwrap();
        let (writers, id) = (Writers::default(), AttachmentId(uuid::Uuid::nil()));
        let file = fs::File::from(std::os::fd::OwnedFd::from(pipe));
        let mut given_up = upload(&file, 0, &writers);
        drop(file);
        // More than a pipe holds, so the write waits.
        given_up.append(&vec![1; PART_BYTES]).await.unwrap();
        drop(given_up);
        assert!(writers.take(id).is_none());
        let mut read = Vec::new();
        spawn_blocking(move || (&reader).read_to_end(&mut read).map(|_| read))
            .await
            .unwrap()
            .unwrap();
        while writers.take(id).is_none() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn nothing_is_written_after_a_write_that_failed() {
        let (mut reader, pipe) = io::pipe().unwrap();
        let file = fs::File::from(std::os::fd::OwnedFd::from(pipe));
        rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::NONBLOCK).unwrap();
        let mut failing = upload(&file, 0, &Writers::default());
        // More than a pipe holds, so the write fails.
        failing.append(&vec![1; PART_BYTES]).await.unwrap();
        assert!(failing.flush().await.is_err());
        rustix::fs::fcntl_setfl(&reader, rustix::fs::OFlags::NONBLOCK).unwrap();
        let mut read = Vec::new();
        assert!(reader.read_to_end(&mut read).is_err());
        assert!(!read.is_empty());
        // Now there is room.
        failing.append(b"second").await.unwrap();
        assert!(failing.flush().await.is_err());
        assert!(failing.finish().await.is_err());
        drop(file);
        read.clear();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"");
    }
}
