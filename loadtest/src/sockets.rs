//! Many connections that one thread reads.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::TcpStream,
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token, event::Event};

use crate::client::{Frame, Frames, pong_frame};

/// A connection, and what its reader knows.
pub(crate) struct Socket<T> {
    pub(crate) stream: mio::net::TcpStream,
    frames: Frames,
    pub(crate) state: T,
}

/// All connections, by number.
pub(crate) struct Sockets<T> {
    poll: Poll,
    events: Events,
    buffer: Vec<u8>,
    pub(crate) all: Vec<Socket<T>>,
    /// Bytes received.
    pub(crate) bytes: u64,
}

impl<T> Sockets<T> {
    pub(crate) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            poll: Poll::new()?,
            events: Events::with_capacity(1024),
            buffer: vec![0; 256 << 10],
            all: Vec::new(),
            bytes: 0,
        })
    }

    /// Adds a connection.
    pub(crate) fn join(&mut self, stream: TcpStream, state: T) -> anyhow::Result<()> {
        let number = self.all.len();
        let stream = self.registered(number, stream)?;
        self.all.push(Socket {
            stream,
            frames: Frames::default(),
            state,
        });
        Ok(())
    }

    /// Gives connection `number` a new stream.
    pub(crate) fn replace(&mut self, number: usize, stream: TcpStream) -> anyhow::Result<()> {
        self.all[number].stream = self.registered(number, stream)?;
        self.all[number].frames = Frames::default();
        Ok(())
    }

    fn registered(&self, number: usize, stream: TcpStream) -> anyhow::Result<mio::net::TcpStream> {
        stream.set_nonblocking(true)?;
        let mut stream = mio::net::TcpStream::from_std(stream);
        let registry = self.poll.registry();
        registry.register(&mut stream, Token(number), Interest::READABLE)?;
        Ok(stream)
    }

    /// Does not read connection `number` any more.
    pub(crate) fn leave(&mut self, number: usize) {
        // A connection that has ended may have left already.
        let _ = self
            .poll
            .registry()
            .deregister(&mut self.all[number].stream);
    }

    /// Reads what arrives within `wait`, and answers pings. Calls `each` with the time, the number of the connection, its
    /// state and the content of a frame, and sends the frame that it returns. Returns the connections that ended.
    pub(crate) fn read(
        &mut self,
        wait: Duration,
        mut each: impl FnMut(Instant, usize, &mut T, &[u8]) -> Option<Vec<u8>>,
    ) -> anyhow::Result<Vec<usize>> {
        self.poll
            .poll(&mut self.events, Some(wait))
            .or_else(|e| match e.kind() {
                ErrorKind::Interrupted => Ok(()),
                _ => Err(e),
            })?;
        let mut ended = Vec::new();
        for event in &self.events {
            let (now, number) = (Instant::now(), event.token().0);
            let (socket, buffer, bytes) =
                (&mut self.all[number], &mut self.buffer, &mut self.bytes);
            let each = |state: &mut T, text: &[u8]| each(now, number, state, text);
            if socket.read(event, buffer, bytes, each) {
                ended.push(number);
            }
        }
        for &number in &ended {
            self.leave(number);
        }
        Ok(ended)
    }
}

impl<T> Socket<T> {
    /// Reads and answers what has arrived. Returns true if the connection ended.
    fn read(
        &mut self,
        event: &Event,
        buffer: &mut [u8],
        bytes: &mut u64,
        mut each: impl FnMut(&mut T, &[u8]) -> Option<Vec<u8>>,
    ) -> bool {
        let Self {
            stream,
            frames,
            state,
        } = self;
        loop {
            match stream.read(buffer) {
                Ok(0) => return true,
                Ok(count) => {
                    *bytes += count as u64;
                    let mut answers = Vec::new();
                    frames.feed(&buffer[..count], |frame| match frame {
                        Frame::Content(text) => answers.extend(each(state, text)),
                        Frame::Ping => answers.push(pong_frame().to_vec()),
                        Frame::Close(_) | Frame::Other => {}
                    });
                    for answer in answers {
                        // The frames are small, so the socket's buffer has room for them. A failed write means that
                        // the connection ended, which the next read reports.
                        let _ = stream.write(&answer);
                    }
                    // epoll reports later bytes again, but the end of a connection only once.
                    if count < buffer.len() && !event.is_read_closed() {
                        return false;
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return false,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return true,
            }
        }
    }
}
