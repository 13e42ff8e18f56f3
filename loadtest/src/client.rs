//! A minimal WebSocket client, so that the load tester's own work does not hide the server's. It shares no code with
//! the library that the gateway uses, so the two check each other.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    sync::LazyLock,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use memchr::memmem::{self, Finder};
use serde::Serialize;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::server::token;

/// Time within which a server must answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time until a rate-limited request is repeated.
const BREATH: Duration = Duration::from_millis(100);
/// How long a request is repeated while the store or the owner is unavailable.
const UNAVAILABLE_MAX: Duration = Duration::from_secs(60);
/// Connections from one source address. Further ones use the next address.
const PORTS_PER_ADDRESS: usize = 20_000;

/// Text in the reply that acknowledges a message.
pub(crate) const SENT: &[u8] = br#""type":"sent""#;
/// Text before the seq in a frame.
const SEQ: &[u8] = br#""seq":"#;
/// Messages of the largest page.
pub(crate) const PAGE: usize = 200;

/// The end of an HTTP head.
const HEAD_END: &[u8] = b"\r\n\r\n";

/// Bytes of the longest header of a client's frame.
const HEADER_MAX: usize = 14;
/// Initial capacity for a request: enough unless its body is long.
const REQUEST_BYTES: usize = 512;

const TEXT: u8 = 0x81;
const BINARY: u8 = 0x82;
const CLOSE: u8 = 0x88;
const PING: u8 = 0x89;

/// Cuts frames out of a stream of bytes.
#[derive(Default)]
pub(crate) struct Frames {
    rest: Vec<u8>,
}

/// A frame and its payload.
pub(crate) enum Frame<'a> {
    Content(&'a [u8]),
    Ping,
    /// The close code.
    Close(u16),
    Other,
}

impl Frames {
    /// Takes received bytes and calls `each` for every complete frame. Keeps the rest for later. The mask of masked
    /// frames must be zero, as in `text_frame`.
    pub(crate) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(Frame<'_>)) {
        if self.rest.is_empty() {
            let used = cut(bytes, &mut each);
            self.rest.extend_from_slice(&bytes[used..]);
        } else {
            self.rest.extend_from_slice(bytes);
            let whole = std::mem::take(&mut self.rest);
            let used = cut(&whole, &mut each);
            self.rest = whole;
            self.rest.drain(..used);
        }
        if self.rest.is_empty() {
            self.rest = Vec::new();
        }
    }
}

/// Calls `each` for every complete frame. Returns the number of bytes used.
fn cut(bytes: &[u8], each: &mut impl FnMut(Frame<'_>)) -> usize {
    let mut at = 0;
    while let Some((kind, from, to)) = frame_at(bytes, at) {
        let payload = &bytes[from..to];
        each(match kind {
            TEXT | BINARY => Frame::Content(payload),
            PING => Frame::Ping,
            CLOSE => Frame::Close(
                payload
                    .get(..2)
                    .map_or(1005, |b| u16::from_be_bytes([b[0], b[1]])),
            ),
            _ => Frame::Other,
        });
        at = to;
    }
    at
}

/// The complete frame at this place: its first byte, and where its payload begins and ends.
fn frame_at(bytes: &[u8], at: usize) -> Option<(u8, usize, usize)> {
    let header = bytes.get(at..at + 2)?;
    let (from, length) = match header[1] & 0x7f {
        126 => (
            at + 4,
            usize::from(u16::from_be_bytes(
                bytes.get(at + 2..at + 4)?.try_into().ok()?,
            )),
        ),
        127 => {
            let length = u64::from_be_bytes(bytes.get(at + 2..at + 10)?.try_into().ok()?);
            (at + 10, usize::try_from(length).ok()?)
        }
        short => (at + 2, usize::from(short)),
    };
    let from = if header[1] & 0x80 == 0 {
        from
    } else {
        from + 4
    };
    (bytes.len() >= from + length).then_some((header[0], from, from + length))
}

/// A client's text frame.
pub(crate) fn text_frame(text: &str) -> Vec<u8> {
    frame(TEXT, text.as_bytes())
}

/// The id of requests whose replies are only counted.
const COUNTED: u32 = 1;
/// Text that such a reply contains and no event does.
static COUNTED_REPLY: LazyLock<Finder> = LazyLock::new(|| Finder::new(b"\"id\":1"));
static REFUSAL: LazyLock<Finder> = LazyLock::new(|| Finder::new(b"\"type\":\"error\""));

/// The request to send a message. Its reply is only counted.
pub(crate) fn send_frame(conversation: &str, body: &str) -> Vec<u8> {
    send_frame_with(COUNTED, conversation, body)
}

/// The request to send a message, with this id.
pub(crate) fn send_frame_with(id: u32, conversation: &str, body: &str) -> Vec<u8> {
    #[derive(Serialize)]
    struct Send<'a> {
        r#type: &'a str,
        id: u32,
        conversation: &'a str,
        client_id: Uuid,
        body: &'a str,
    }
    json_frame(&Send {
        r#type: "send",
        id,
        conversation,
        client_id: client_id(),
        body,
    })
}

/// Any request. Its reply is only counted.
pub(crate) fn request_frame(mut request: Value) -> Vec<u8> {
    request["id"] = COUNTED.into();
    json_frame(&request)
}

/// A random UUID, without a system call.
pub(crate) fn client_id() -> Uuid {
    uuid::Builder::from_random_bytes(rand::random()).into_uuid()
}

/// Whether the frame is a reply that is only counted. An error if it is an error frame. It does not parse the frame, so
/// that the load tester's work does not hide the server's.
pub(crate) fn is_reply(frame: &[u8]) -> anyhow::Result<bool> {
    if REFUSAL.find(frame).is_some() {
        bail!(
            "the server refused a request: {}",
            String::from_utf8_lossy(frame)
        );
    }
    Ok(COUNTED_REPLY.find(frame).is_some())
}

/// The request to read a page of messages after this seq.
pub(crate) fn history_frame(conversation: &str, after: u64) -> Vec<u8> {
    json_frame(
        &json!({"type": "history", "id": 2, "conversation": conversation, "after": after, "limit": PAGE}),
    )
}

fn json_frame(request: &impl Serialize) -> Vec<u8> {
    let mut payload = Vec::with_capacity(REQUEST_BYTES);
    // Every request of this program can be written as JSON.
    let _ = serde_json::to_writer(&mut payload, request);
    frame(TEXT, &payload)
}

/// A client's binary frame.
pub(crate) fn binary_frame(payload: &[u8]) -> Vec<u8> {
    frame(BINARY, payload)
}

/// A client's frame. Its mask is zero, which leaves the payload as it is.
fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEADER_MAX + payload.len());
    frame.push(kind);
    match payload.len() {
        short @ 0..126 => frame.push(0x80 | short as u8),
        middle @ 126..65_536 => {
            frame.push(0x80 | 126);
            frame.extend_from_slice(&(middle as u16).to_be_bytes());
        }
        long => {
            frame.push(0x80 | 127);
            frame.extend_from_slice(&(long as u64).to_be_bytes());
        }
    }
    frame.extend_from_slice(&[0; 4]);
    frame.extend_from_slice(payload);
    frame
}

pub(crate) fn pong_frame() -> &'static [u8] {
    &[0x8a, 0x80, 0, 0, 0, 0]
}

/// The HTTP request for a WebSocket, with these additional headers.
pub(crate) fn upgrade_head(path: &str, server: SocketAddr, headers: &str) -> Vec<u8> {
    format!(
        "GET {path} HTTP/1.1\r\nhost: {server}\r\nupgrade: websocket\r\nconnection: upgrade\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: bG9hZHRlc3Rsb2FkdGVzdA==\r\n{headers}\r\n"
    )
    .into_bytes()
}

/// A blocking connection.
pub(crate) struct Client {
    stream: TcpStream,
    frames: Frames,
    received: std::collections::VecDeque<Vec<u8>>,
    next_id: u32,
}

/// Returns the id in the reply to a `create`.
fn created(reply: &Value) -> anyhow::Result<String> {
    let id = reply["conversation"].as_str();
    Ok(id.context("the reply has no conversation id")?.to_owned())
}

impl Client {
    /// Opens connection `number` of a run. The source address changes before its ports run out.
    pub(crate) fn open(server: &str, path: &str, number: usize) -> anyhow::Result<Self> {
        let server: SocketAddr = server.parse()?;
        let stream = if number < PORTS_PER_ADDRESS {
            TcpStream::connect_timeout(&server, PATIENCE)?
        } else {
            let last =
                u8::try_from(1 + number / PORTS_PER_ADDRESS).context("too many connections")?;
            connect_from(IpAddr::V4(Ipv4Addr::new(127, 0, 0, last)), server)?
        };
        Self::upgrade(stream, path, server)
    }

    fn upgrade(stream: TcpStream, path: &str, server: SocketAddr) -> anyhow::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut client = Self {
            stream,
            frames: Frames::default(),
            received: Default::default(),
            next_id: 1,
        };
        client.stream.write_all(&upgrade_head(path, server, ""))?;
        let mut head = Vec::new();
        let end = loop {
            let mut buffer = [0; 1024];
            let count = client.stream.read(&mut buffer)?;
            head.extend_from_slice(&buffer[..count]);
            if let Some(end) = memmem::find(&head, HEAD_END) {
                break end + HEAD_END.len();
            }
            anyhow::ensure!(
                count > 0,
                "the server closed the connection instead of upgrading it"
            );
        };
        if !head.starts_with(b"HTTP/1.1 101") {
            bail!(
                "the server refused the upgrade: {}",
                String::from_utf8_lossy(&head)
            );
        }
        // Some servers send frames at once.
        client.take(&head[end..])?;
        Ok(client)
    }

    /// Connects to the raw loop, which subscribes every connection.
    pub(crate) fn connect_raw(server: &str, number: usize) -> anyhow::Result<Self> {
        let mut client = Self::open(server, "/", number)?;
        client.ask(json!({"type": "connect"}))?;
        Ok(client)
    }

    /// Connects as `user`.
    pub(crate) fn connect(server: &str, user: &str, number: usize) -> anyhow::Result<Self> {
        Self::connect_with(server, &token(user)?, number)
    }

    /// Connects as `user` from this source address.
    pub(crate) fn connect_as(server: &str, user: &str, source: IpAddr) -> anyhow::Result<Self> {
        let server = server.parse()?;
        let mut client = Self::upgrade(connect_from(source, server)?, "/v1/ws", server)?;
        client.ask(json!({"type": "connect", "token": token(user)?}))?;
        Ok(client)
    }

    /// Connects with this token.
    pub(crate) fn connect_with(server: &str, token: &str, number: usize) -> anyhow::Result<Self> {
        let mut client = Self::open(server, "/v1/ws", number)?;
        client.ask(json!({"type": "connect", "token": token}))?;
        Ok(client)
    }

    /// Sends a request and returns its reply, or an error if it was refused. Events before it are dropped.
    pub(crate) fn ask(&mut self, request: Value) -> anyhow::Result<Value> {
        let id = self.begin(request)?;
        loop {
            let frame = self.next()?;
            if frame["id"] == id {
                if frame["type"] == "error" {
                    bail!("{frame}");
                }
                return Ok(frame);
            }
        }
    }

    /// Creates a conversation and returns its id.
    pub(crate) fn create(&mut self, request: Value) -> anyhow::Result<String> {
        created(&self.ask(request)?)
    }

    /// Creates a conversation and returns its id. Repeats the request like `ask_patiently`, so there may be one more that
    /// is not used.
    pub(crate) fn create_patiently(&mut self, request: Value) -> anyhow::Result<String> {
        created(&self.ask_patiently(&request)?)
    }

    /// Sends a request and returns its reply. Repeats the request while it is rate-limited, and for some time if the
    /// store or the owner is unavailable.
    pub(crate) fn ask_patiently(&mut self, request: &Value) -> anyhow::Result<Value> {
        let begin = Instant::now();
        let is_temporary = |error: &anyhow::Error| {
            let text = error.to_string();
            let is_unavailable = text.contains("\"unavailable\"");
            text.contains("rate_limited") || is_unavailable && begin.elapsed() < UNAVAILABLE_MAX
        };
        loop {
            match self.ask(request.clone()) {
                Err(error) if is_temporary(&error) => sleep(BREATH),
                reply => return reply,
            }
        }
    }

    /// Reads all messages of a conversation, by seq.
    pub(crate) fn whole_log(&mut self, conversation: &str) -> anyhow::Result<BTreeMap<u64, Value>> {
        let mut log = BTreeMap::new();
        loop {
            let after = log.last_key_value().map_or(0, |(seq, _)| *seq);
            let mut page = self.ask(
                json!({"type": "history", "conversation": conversation, "after": after, "limit": PAGE}),
            )?;
            let messages = std::mem::take(
                page["messages"]
                    .as_array_mut()
                    .context("`history` has no messages")?,
            );
            let none = messages.is_empty();
            for message in messages {
                log.insert(
                    message["seq"].as_u64().context("a message has no seq")?,
                    message,
                );
            }
            if none || page["head"].as_u64() == log.last_key_value().map(|(seq, _)| *seq) {
                return Ok(log);
            }
        }
    }

    /// Sends a request and returns its id, which its reply will have.
    pub(crate) fn begin(&mut self, mut request: Value) -> anyhow::Result<u32> {
        let id = self.next_id;
        self.next_id += 1;
        request["id"] = id.into();
        self.stream.write_all(&json_frame(&request))?;
        Ok(id)
    }

    /// The next frame with content, as JSON. `None` if none comes within `wait`.
    pub(crate) fn next_within(&mut self, wait: Duration) -> anyhow::Result<Option<Value>> {
        self.stream.set_read_timeout(Some(wait))?;
        let next = self.next();
        self.stream.set_read_timeout(Some(PATIENCE))?;
        match next {
            Err(error) if error.downcast_ref().is_some_and(is_timeout) => Ok(None),
            next => next.map(Some),
        }
    }

    /// The next frame with content, as JSON.
    pub(crate) fn next(&mut self) -> anyhow::Result<Value> {
        Ok(serde_json::from_slice(&self.hear()?)?)
    }

    /// Sends a frame as it is.
    pub(crate) fn say(&mut self, frame: &[u8]) -> anyhow::Result<()> {
        Ok(self.stream.write_all(frame)?)
    }

    /// The content of the next frame that has any.
    pub(crate) fn hear(&mut self) -> anyhow::Result<Vec<u8>> {
        loop {
            if let Some(frame) = self.received.pop_front() {
                return Ok(frame);
            }
            let mut buffer = [0; 16 << 10];
            let count = match self.stream.read(&mut buffer) {
                Ok(0) => bail!("the server closed the connection"),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                count => count?,
            };
            self.take(&buffer[..count])?;
        }
    }

    /// Takes received bytes and answers pings. An error if there is a close frame.
    fn take(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        let (mut pings, mut closed, received) = (0, None, &mut self.received);
        self.frames.feed(bytes, |frame| match frame {
            Frame::Content(payload) => received.push_back(payload.to_vec()),
            Frame::Ping => pings += 1,
            Frame::Close(code) => closed = Some(code),
            Frame::Other => {}
        });
        for _ in 0..pings {
            self.stream.write_all(pong_frame())?;
        }
        match closed {
            Some(code) => bail!("the server closed the connection with {code}"),
            None => Ok(()),
        }
    }

    pub(crate) fn into_stream(self) -> TcpStream {
        self.stream
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn connect_from(source: IpAddr, server: SocketAddr) -> anyhow::Result<TcpStream> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(source, 0).into())?;
    socket.connect_timeout(&server.into(), PATIENCE)?;
    Ok(socket.into())
}

/// The seq of a frame.
pub(crate) fn seq(frame: &[u8]) -> Option<u64> {
    let rest = &frame[memmem::find(frame, SEQ)? + SEQ.len()..];
    let end = rest.iter().position(|b| !b.is_ascii_digit())?;
    digits(&rest[..end])
}

/// The number that these bytes spell in digits.
pub(crate) fn digits(bytes: &[u8]) -> Option<u64> {
    bytes.iter().try_fold(0, |n, b| {
        b.is_ascii_digit().then(|| n * 10 + u64::from(b - b'0'))
    })
}
