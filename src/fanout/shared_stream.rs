//! The socket below the WebSocket library. The library reads, and writes only its own frames: pings, pongs and the
//! close. All other frames are encoded already and bypass it. Publishing writes a frame to an idle socket directly,
//! because waking the session's task for it costs as much again as the kernel's work. The session writes the rest of a
//! frame that the socket did not accept at once.

use std::{
    collections::VecDeque,
    future::poll_fn,
    io::{self, IoSlice},
    mem::MaybeUninit,
    net::Shutdown,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::TcpStream,
};

use super::{encoded::Frame, lock};

/// Bytes of one read.
const READ_BYTES: usize = 8 << 10;
/// No limit: the maximal size of a message is not known yet.
const UNBOUNDED: u32 = u32::MAX;
/// Frames of one write.
const WRITE_FRAMES: usize = 64;

/// A connection as HTTP and the WebSocket library use it.
#[derive(Debug)]
pub struct SharedStream {
    /// Bytes that were read but not requested yet.
    ahead: Bytes,
    writer: Arc<FrameWriter>,
}

/// The socket of a [`SharedStream`], for writing whole frames past the WebSocket library.
#[derive(Debug)]
pub struct FrameWriter {
    stream: TcpStream,
    writing: Mutex<Writing>,
    /// The number of writes that waited for the socket. A waiting session sees from it whether the client still reads.
    writes: AtomicU32,
    /// Bytes that may still arrive before the WebSocket library must return a whole message; [`UNBOUNDED`] for no
    /// limit.
    message_left: AtomicU32,
    /// Whether the next write that would wait tries the socket nevertheless.
    tries: AtomicBool,
}

#[derive(Debug, Default)]
struct Writing {
    /// The rest of a frame that bypassed the library. It is written before anything else.
    rest: Bytes,
    /// Whether the library has begun to write and has not flushed. It may then be within a frame.
    busy: bool,
    /// What the library has written.
    progress: WriteProgress,
}

/// How far the library is with writing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteProgress {
    /// The number of its flushes. A different number is a different write.
    pub flushes: u32,
    /// Bytes that the socket has accepted, modulo 2^32.
    pub bytes: u32,
}

/// The result of writing a frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Written {
    Whole,
    /// This many bytes are left, for the next flush to write.
    Part(usize),
    /// Nothing was written: the socket accepts no bytes now, or another write is in progress.
    Nothing,
}

impl SharedStream {
    #[must_use]
    pub fn new(stream: TcpStream) -> Self {
        Self {
            ahead: Bytes::new(),
            writer: Arc::new(FrameWriter {
                stream,
                writing: Mutex::default(),
                writes: AtomicU32::new(0),
                message_left: AtomicU32::new(UNBOUNDED),
                tries: AtomicBool::new(false),
            }),
        }
    }

    #[must_use]
    pub fn writer(&self) -> &Arc<FrameWriter> {
        &self.writer
    }
}

impl FrameWriter {
    /// Writes a frame without waiting. It does not report a broken connection; the session notices that itself.
    pub(super) fn write(&self, frame: &Bytes) -> Written {
        let mut writing = self.writing();
        if writing.busy || !writing.rest.is_empty() {
            return Written::Nothing;
        }
        // This bypasses the runtime, whose record of whether the socket is writable would be one more check.
        match SockRef::from(&self.stream).send(frame) {
            Err(_) | Ok(0) => Written::Nothing,
            Ok(count) if count == frame.len() => Written::Whole,
            Ok(count) => {
                writing.rest = frame.slice(count..);
                Written::Part(writing.rest.len())
            }
        }
    }

    /// Limits the bytes that may arrive before the next whole message. The library collects the fragments of a message,
    /// and a tiny fragment costs as much as a message.
    pub fn limit_message(&self, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(UNBOUNDED);
        self.message_left.store(bytes, Ordering::Relaxed);
    }

    /// Allows the bytes of a ping or pong in addition, because they are not part of a message. If it was read together
    /// with the end of the last message, the next message may be longer by one read.
    pub fn control_frame_came(&self, bytes: usize) {
        /// Bytes of the header of a client's control frame (RFC 6455, 5.2).
        const HEADER_BYTES: usize = 6;
        let ordering = Ordering::Relaxed;
        let more = |left: u32| Some(left.saturating_add((bytes + HEADER_BYTES) as u32));
        let _ = self.message_left.fetch_update(ordering, ordering, more);
    }

    /// Returns the number of writes that waited for the socket. It grows while the client reads.
    pub fn writes(&self) -> u32 {
        self.writes.load(Ordering::Relaxed)
    }

    /// Ends the connection so that the client can still read everything written: shuts down the writing side, then
    /// reads and discards until the client closes. The kernel resets a socket that is dropped with unread bytes, and
    /// its last writes may be lost.
    pub async fn linger(&self) {
        drop(SockRef::from(&self.stream).shutdown(Shutdown::Write));
        let mut unseen = [0; READ_BYTES];
        while self.stream.readable().await.is_ok() {
            match self.stream.try_read(&mut unseen) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }

    /// Returns whether the library may be within a frame. It must flush before anything bypasses it.
    pub fn busy(&self) -> bool {
        self.writing().busy
    }

    /// Returns how far the write is that the library has not flushed yet.
    pub fn unflushed(&self) -> Option<WriteProgress> {
        let writing = self.writing();
        writing.busy.then_some(writing.progress)
    }

    /// Lets a write that waits try the socket when it is polled next. The system reports a socket as writable only when a
    /// third of its buffer is free, which may be more than a megabyte, but accepts bytes before.
    pub fn try_soon(&self) {
        self.tries.store(true, Ordering::Relaxed);
    }

    /// Writes all frames, many in one call. It is cancel-safe: the next call writes the rest of a frame first. It may
    /// be called only while the library is not [`busy`](Self::busy).
    ///
    /// # Errors
    /// The error of a broken connection.
    pub async fn write_all(&self, frames: &mut VecDeque<Frame>) -> io::Result<()> {
        poll_fn(|context| self.poll_write_all(context, frames)).await
    }

    fn poll_write_all(
        &self,
        context: &mut Context<'_>,
        frames: &mut VecDeque<Frame>,
    ) -> Poll<io::Result<()>> {
        let mut writing = self.writing();
        loop {
            ready!(self.poll_rest(&mut writing, context))?;
            if frames.is_empty() {
                return Poll::Ready(Ok(()));
            }
            let mut slices = [IoSlice::new(&[]); WRITE_FRAMES];
            let slices = &mut slices[..frames.len().min(WRITE_FRAMES)];
            for (slice, frame) in slices.iter_mut().zip(&*frames) {
                *slice = IoSlice::new(frame.bytes());
            }
            let mut count = ready!(self.poll_write(context, slices))?;
            while let Some(frame) = frames.pop_front_if(|_| count > 0) {
                let written = count.min(frame.bytes().len());
                writing.rest = frame.bytes().slice(written..);
                count -= written;
            }
        }
    }

    fn writing(&self) -> MutexGuard<'_, Writing> {
        lock(&self.writing)
    }

    /// Writes at least one byte, unless the slices are empty.
    fn poll_write(
        &self,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            let written = match self.stream.poll_write_ready(context)? {
                Poll::Ready(()) => self.stream.try_write_vectored(slices),
                // This bypasses the runtime, which knows the socket as not writable.
                Poll::Pending if self.tries.swap(false, Ordering::Relaxed) => {
                    match SockRef::from(&self.stream).send_vectored(slices) {
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            return Poll::Pending;
                        }
                        written => written,
                    }
                }
                Poll::Pending => return Poll::Pending,
            };
            match written {
                Ok(0) if slices.iter().any(|slice| !slice.is_empty()) => {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => {
                    self.writes.fetch_add(1, Ordering::Relaxed);
                    return Poll::Ready(written);
                }
            }
        }
    }

    fn count(&self, bytes: usize) -> io::Result<()> {
        let ordering = Ordering::Relaxed;
        let less = |left: u32| match left {
            UNBOUNDED => Some(left),
            left => left.checked_sub(bytes as u32),
        };
        let counted = self.message_left.fetch_update(ordering, ordering, less);
        counted.map_or(Err(io::ErrorKind::InvalidData.into()), |_| Ok(()))
    }

    fn poll_rest(&self, writing: &mut Writing, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !writing.rest.is_empty() {
            let count = ready!(self.poll_write(context, &[IoSlice::new(&writing.rest)]))?;
            writing.rest = writing.rest.slice(count..);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_read(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            let (room, mut count) = (buffer.remaining(), 0);
            let read = self.stream.try_io(Interest::READABLE, || {
                count = self.stream.try_read_buf(buffer)?;
                // A short read took everything there was, and the runtime reports new bytes. A further read would be
                // wasted.
                if 0 < count && count < room {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                Ok(())
            });
            match read {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                    return Poll::Ready(Err(error));
                }
                Err(_) if count == 0 => {}
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}

/// The WebSocket library reads in small pieces, because each connection keeps a buffer of that size. One read here
/// takes what a client sent in one go; the surplus is kept until the library requests it.
impl AsyncRead for SharedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.ahead.is_empty() {
            let mut bytes = [const { MaybeUninit::uninit() }; READ_BYTES];
            let mut read = ReadBuf::uninit(&mut bytes);
            ready!(self.writer.poll_read(context, &mut read))?;
            self.writer.count(read.filled().len())?;
            let (now, later) = read
                .filled()
                .split_at(buffer.remaining().min(read.filled().len()));
            buffer.put_slice(now);
            if !later.is_empty() {
                self.ahead = Bytes::copy_from_slice(later);
            }
        } else {
            let count = buffer.remaining().min(self.ahead.len());
            buffer.put_slice(&self.ahead.split_to(count));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for SharedStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut writing = self.writer.writing();
        writing.busy = true;
        ready!(self.writer.poll_rest(&mut writing, context))?;
        let count = ready!(self.writer.poll_write(context, &[IoSlice::new(bytes)]))?;
        let written = &mut writing.progress.bytes;
        *written = written.wrapping_add(count as u32);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut writing = self.writer.writing();
        ready!(self.writer.poll_rest(&mut writing, context))?;
        if writing.busy {
            writing.busy = false;
            let flushes = &mut writing.progress.flushes;
            *flushes = flushes.wrapping_add(1);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut writing = self.writer.writing();
        ready!(self.writer.poll_rest(&mut writing, context))?;
        match SockRef::from(&self.writer.stream).shutdown(Shutdown::Write) {
            // A client that is already gone is no error.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
            shut => Poll::Ready(shut),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;
    use crate::protocol::Codec;

    async fn pair() -> (SharedStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (client, accepted) = tokio::join!(client, listener.accept());
        let (stream, _) = accepted.unwrap();
        (SharedStream::new(stream), client.unwrap())
    }

    #[tokio::test]
    async fn a_frame_goes_past_the_library_unless_that_is_writing() {
        let (mut stream, mut client) = pair().await;
        let writer = stream.writer().clone();
        assert_eq!(writer.write(&Bytes::from_static(b"one ")), Written::Whole);
        stream.write_all(b"two ").await.unwrap();
        let between = Bytes::from_static(b"never ");
        assert_eq!(writer.write(&between), Written::Nothing);
        assert!(writer.busy());
        stream.flush().await.unwrap();
        assert!(!writer.busy());
        assert_eq!(writer.write(&Bytes::from_static(b"three")), Written::Whole);
        let mut all = [0; 13];
        client.read_exact(&mut all).await.unwrap();
        assert_eq!(&all, b"one two three");
    }

    #[tokio::test]
    async fn whatever_is_read_at_once_is_given_bit_by_bit() {
        let (mut stream, mut client) = pair().await;
        let sent: Vec<u8> = (0..3 * READ_BYTES).map(|n| (n % 251) as u8).collect();
        client.write_all(&sent).await.unwrap();
        client.shutdown().await.unwrap();
        let (mut all, mut some) = (Vec::new(), [0; 500]);
        loop {
            match stream.read(&mut some).await.unwrap() {
                0 => break,
                count => all.extend_from_slice(&some[..count]),
            }
        }
        assert_eq!(all, sent);
    }

    #[tokio::test]
    async fn what_is_left_of_a_frame_goes_out_before_anything_else() {
        let (mut stream, mut client) = pair().await;
        let writer = stream.writer().clone();
        let frame = Bytes::from((0..8 << 20).map(|n| (n % 251) as u8).collect::<Vec<_>>());
        let Written::Part(left) = writer.write(&frame) else {
            panic!("a socket takes 8 MiB at once");
        };
        assert!(left > 0 && left < frame.len());
        assert_eq!(writer.write(&frame), Written::Nothing);
        let reading = async {
            let mut all = Vec::new();
            client.read_to_end(&mut all).await.unwrap();
            all
        };
        let writing = async {
            stream.write_all(b"after").await.unwrap();
            stream.flush().await.unwrap();
            stream.shutdown().await.unwrap();
        };
        let (all, ()) = tokio::join!(reading, writing);
        assert_eq!(all, [&frame[..], b"after"].concat());
    }

    #[tokio::test]
    async fn a_write_that_waits_goes_on_before_the_system_says_so() {
        const BUFFER: usize = 1 << 20;
        let (stream, mut client) = pair().await;
        let writer = stream.writer().clone();
        let socket = SockRef::from(&writer.stream);
        socket.set_send_buffer_size(BUFFER).unwrap();
        let text = "x".repeat(16 * BUFFER);
        let mut frames = VecDeque::from([Frame::encode(Codec::Json, &text)]);
        assert!(writer.write_all(&mut frames).now_or_never().is_none());
        let (before, mut some, mut taken) = (writer.writes(), vec![0; 16 << 10], 0);
        while writer.writes() == before {
            taken += client.read_exact(&mut some).await.unwrap();
            writer.try_soon();
            assert!(writer.write_all(&mut frames).now_or_never().is_none());
        }
        // Linux has twice the buffer that it was asked for, and reports a third of that.
        assert!(taken < socket.send_buffer_size().unwrap() / 3, "{taken}");
    }

    #[tokio::test]
    async fn many_frames_arrive_whole_and_in_order_however_little_is_taken_at_once() {
        let (mut stream, mut client) = pair().await;
        let writer = stream.writer().clone();
        let text = |n: usize| "x".repeat(n * 131 % 40_000);
        let frame = |n| Frame::encode(Codec::Json, &text(n));
        let mut frames: VecDeque<Frame> = (0..10 * WRITE_FRAMES).map(frame).collect();
        let expected: Vec<Bytes> = frames.iter().map(|f| f.bytes().clone()).collect();
        // Nobody reads yet, so the write is cancelled in the middle. The next one continues it.
        assert!(writer.write_all(&mut frames).now_or_never().is_none());
        let left = frames.len();
        assert!(left > 0 && left < expected.len());
        let reading = async {
            let mut all = Vec::new();
            client.read_to_end(&mut all).await.unwrap();
            all
        };
        let writing = async {
            writer.write_all(&mut frames).await.unwrap();
            stream.write_all(b"after").await.unwrap();
            stream.shutdown().await.unwrap();
        };
        let (all, ()) = tokio::join!(reading, writing);
        assert!(frames.is_empty());
        assert!(all == [&expected.concat()[..], b"after"].concat());
    }
}
