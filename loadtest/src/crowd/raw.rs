//! The baseline for fan-out: one thread, one epoll, one pre-encoded frame, one write() per delivery. It checks nothing
//! and stores nothing.

use std::{
    collections::{BTreeSet, VecDeque},
    io::{ErrorKind, Read, Write},
};

use mio::{Events, Interest, Poll, Token, net::TcpListener, net::TcpStream};

use crate::client::{Frame, Frames};

const LISTENER: Token = Token(usize::MAX);
const UPGRADED: &[u8] =
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n";

struct Connection {
    stream: TcpStream,
    /// The head of the request, until it is complete.
    head: Option<Vec<u8>>,
    frames: Frames,
    publishes: bool,
    unsent: VecDeque<u8>,
}

/// Serves until the process is killed. The first line of output is the address.
pub(crate) fn serve() -> anyhow::Result<()> {
    let poll = Poll::new()?;
    let mut listener = TcpListener::bind("127.0.0.1:0".parse()?)?;
    poll.registry()
        .register(&mut listener, LISTENER, Interest::READABLE)?;
    println!("{}", listener.local_addr()?);
    let mut events = Events::with_capacity(1024);
    let mut raw = Raw {
        poll,
        connections: Vec::new(),
        subscribers: BTreeSet::new(),
        buffer: vec![0; 64 << 10],
    };
    loop {
        raw.poll.poll(&mut events, None)?;
        for event in events.iter() {
            if event.token() == LISTENER {
                while let Ok((stream, _)) = listener.accept() {
                    raw.accept(stream)?;
                }
                continue;
            }
            let index = event.token().0;
            if event.is_writable()
                && let Some(connection) = &mut raw.connections[index]
            {
                connection.send_unsent();
            }
            if event.is_readable() {
                raw.read(index);
            }
        }
    }
}

struct Raw {
    poll: Poll,
    connections: Vec<Option<Connection>>,
    subscribers: BTreeSet<usize>,
    buffer: Vec<u8>,
}

impl Raw {
    fn accept(&mut self, mut stream: TcpStream) -> anyhow::Result<()> {
        stream.set_nodelay(true)?;
        let token = Token(self.connections.len());
        let interest = Interest::READABLE | Interest::WRITABLE;
        let registry = self.poll.registry();
        registry.register(&mut stream, token, interest)?;
        self.connections.push(Some(Connection {
            stream,
            head: Some(Vec::new()),
            frames: Frames::default(),
            publishes: false,
            unsent: VecDeque::new(),
        }));
        Ok(())
    }

    /// Reads what arrived on a connection, and writes its publications to all subscribers.
    fn read(&mut self, index: usize) {
        let mut publications: Vec<Vec<u8>> = Vec::new();
        let gone = loop {
            let Some(connection) = &mut self.connections[index] else {
                break false;
            };
            match connection.stream.read(&mut self.buffer) {
                Ok(0) => break true,
                Ok(count) => connection.receive(
                    &self.buffer[..count],
                    index,
                    &mut self.subscribers,
                    &mut publications,
                ),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break false,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => break true,
            }
        };
        for frame in publications {
            for &subscriber in &self.subscribers {
                if let Some(connection) = &mut self.connections[subscriber] {
                    connection.send(&frame);
                }
            }
        }
        if gone {
            self.subscribers.remove(&index);
            self.connections[index] = None;
        }
    }
}

impl Connection {
    fn receive(
        &mut self,
        bytes: &[u8],
        index: usize,
        subscribers: &mut BTreeSet<usize>,
        publications: &mut Vec<Vec<u8>>,
    ) {
        if let Some(head) = &mut self.head {
            head.extend_from_slice(bytes);
            if head.ends_with(b"\r\n\r\n") {
                self.publishes = head.starts_with(b"GET /publish");
                self.head = None;
                self.send(UPGRADED);
                if !self.publishes {
                    subscribers.insert(index);
                }
            }
            return;
        }
        let mut frames = std::mem::take(&mut self.frames);
        let mut answer = false;
        frames.feed(bytes, |frame| {
            if let Frame::Content(text) = frame {
                if self.publishes {
                    publications.push(server_frame(text));
                } else {
                    answer = true;
                }
            }
        });
        self.frames = frames;
        if answer {
            self.send(&server_frame(br#"{"id":1,"type":"connected"}"#));
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        if self.unsent.is_empty() {
            match self.stream.write(bytes) {
                Ok(count) if count == bytes.len() => {}
                Ok(count) => self.unsent.extend(&bytes[count..]),
                Err(_) => self.unsent.extend(bytes),
            }
        } else {
            self.unsent.extend(bytes);
        }
    }

    fn send_unsent(&mut self) {
        while !self.unsent.is_empty() {
            let (front, _) = self.unsent.as_slices();
            match self.stream.write(front) {
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(_) => return,
            }
        }
    }
}

fn server_frame(payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x81];
    match payload.len() {
        short @ 0..126 => frame.push(short as u8),
        long => {
            frame.push(126);
            frame.extend_from_slice(&(long as u16).to_be_bytes());
        }
    }
    frame.extend_from_slice(payload);
    frame
}
