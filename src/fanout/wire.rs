//! The socket below the WebSocket library. Whoever publishes writes a frame to an idle socket itself: waking the
//! session's task to do the same costs as much again as the kernel's part. What cannot be written at once is the
//! session's to write.

use std::{
    io,
    mem::MaybeUninit,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

/// Of one read.
const READ_BYTES: usize = 8 << 10;

/// A connection as HTTP and the WebSocket library see it.
#[derive(Debug)]
pub struct Wire {
    reading: OwnedReadHalf,
    /// Read already: more than was asked for.
    ahead: Bytes,
    line: Arc<Line>,
}

/// The writing side of a [`Wire`], to write whole frames past the WebSocket library.
#[derive(Debug)]
pub struct Line(Mutex<Writing>);

#[derive(Debug)]
struct Writing {
    half: OwnedWriteHalf,
    /// What is left of a frame that went past the library: goes out before anything else does.
    rest: Bytes,
    /// The library has begun to write, and not said yet that it is done: it may be within a frame.
    busy: bool,
}

/// How far a frame came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Written {
    Whole,
    /// So many bytes are left, which go out with the next flush.
    Part(usize),
    /// Nothing: the socket takes nothing now, or is being written to.
    Nothing,
}

impl Wire {
    #[must_use]
    pub fn new(stream: TcpStream) -> Self {
        let (reading, half) = stream.into_split();
        let writing = Writing {
            half,
            rest: Bytes::new(),
            busy: false,
        };
        let line = Arc::new(Line(Mutex::new(writing)));
        Self {
            reading,
            ahead: Bytes::new(),
            line,
        }
    }

    #[must_use]
    pub fn line(&self) -> &Arc<Line> {
        &self.line
    }
}

impl Line {
    /// Never waits. A broken connection is the session's to notice.
    pub(super) fn write(&self, frame: &Bytes) -> Written {
        let mut writing = self.writing();
        if writing.busy || !writing.rest.is_empty() {
            return Written::Nothing;
        }
        // Asked of the kernel directly: whether the runtime believes it to be writable is one more thing to look at.
        match SockRef::from(writing.half.as_ref()).send(frame) {
            Err(_) | Ok(0) => Written::Nothing,
            Ok(count) if count == frame.len() => Written::Whole,
            Ok(count) => {
                writing.rest = frame.slice(count..);
                Written::Part(writing.rest.len())
            }
        }
    }

    fn writing(&self) -> MutexGuard<'_, Writing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writing {
    fn poll_rest(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.rest.is_empty() {
            let count = ready!(Pin::new(&mut self.half).poll_write(context, &self.rest))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.rest.advance(count);
        }
        Poll::Ready(Ok(()))
    }
}

/// The WebSocket library reads little at a time, because each connection keeps that much memory. What a client sends in one
/// go is read in one go all the same; only what is left over is kept, and only until it is asked for.
impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.ahead.is_empty() {
            let mut bytes = [const { MaybeUninit::uninit() }; READ_BYTES];
            let mut read = ReadBuf::uninit(&mut bytes);
            ready!(Pin::new(&mut self.reading).poll_read(context, &mut read))?;
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

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut writing = self.line.writing();
        writing.busy = true;
        ready!(writing.poll_rest(context))?;
        Pin::new(&mut writing.half).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut writing = self.line.writing();
        ready!(writing.poll_rest(context))?;
        writing.busy = false;
        Pin::new(&mut writing.half).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut writing = self.line.writing();
        ready!(writing.poll_rest(context))?;
        Pin::new(&mut writing.half).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    async fn pair() -> (Wire, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (client, accepted) = tokio::join!(client, listener.accept());
        let (stream, _) = accepted.unwrap();
        (Wire::new(stream), client.unwrap())
    }

    #[tokio::test]
    async fn a_frame_goes_past_the_library_unless_that_is_writing() {
        let (mut wire, mut client) = pair().await;
        let line = wire.line().clone();
        assert_eq!(line.write(&Bytes::from_static(b"one ")), Written::Whole);
        wire.write_all(b"two ").await.unwrap();
        let between = Bytes::from_static(b"never ");
        assert_eq!(line.write(&between), Written::Nothing);
        wire.flush().await.unwrap();
        assert_eq!(line.write(&Bytes::from_static(b"three")), Written::Whole);
        let mut all = [0; 13];
        client.read_exact(&mut all).await.unwrap();
        assert_eq!(&all, b"one two three");
    }

    #[tokio::test]
    async fn whatever_is_read_at_once_is_given_bit_by_bit() {
        let (mut wire, mut client) = pair().await;
        let sent: Vec<u8> = (0..3 * READ_BYTES).map(|n| (n % 251) as u8).collect();
        client.write_all(&sent).await.unwrap();
        client.shutdown().await.unwrap();
        let (mut all, mut some) = (Vec::new(), [0; 500]);
        loop {
            match wire.read(&mut some).await.unwrap() {
                0 => break,
                count => all.extend_from_slice(&some[..count]),
            }
        }
        assert_eq!(all, sent);
    }

    #[tokio::test]
    async fn what_is_left_of_a_frame_goes_out_before_anything_else() {
        let (mut wire, mut client) = pair().await;
        let line = wire.line().clone();
        let frame = Bytes::from((0..8 << 20).map(|n| (n % 251) as u8).collect::<Vec<_>>());
        let Written::Part(left) = line.write(&frame) else {
            panic!("a socket takes 8 MiB at once");
        };
        assert!(left > 0 && left < frame.len());
        assert_eq!(line.write(&frame), Written::Nothing);
        let reading = async {
            let mut all = Vec::new();
            client.read_to_end(&mut all).await.unwrap();
            all
        };
        let writing = async {
            wire.write_all(b"after").await.unwrap();
            wire.flush().await.unwrap();
            wire.shutdown().await.unwrap();
        };
        let (all, ()) = tokio::join!(reading, writing);
        assert_eq!(all, [&frame[..], b"after"].concat());
    }
}
