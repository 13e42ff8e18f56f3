//! The kinds of misuse. Each is a function that encodes everything that a hostile session will send.

mod files;

use std::{fmt::Write as _, net::SocketAddr, time::Duration};

pub(crate) use files::{BOMBS_AT_ONCE, DOWNLOAD_BYTES, UPLOAD_BYTES};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::client::{binary_frame, client_id, text_frame, upgrade_head};

/// A hostile session's user, and the conversations that it can use.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Hostile {
    pub(crate) server: SocketAddr,
    pub(crate) source: std::net::IpAddr,
    pub(crate) user: String,
    pub(crate) token: String,
    /// A group of its own, whose messages have ten long links each.
    pub(crate) group: String,
    /// A public channel with a constant stream of messages.
    pub(crate) busy: String,
    /// Private channels of other users.
    pub(crate) private: Vec<String>,
    /// An upload of [`UPLOAD_BYTES`] that has begun. `None` if the gateways have no uploads.
    pub(crate) upload: Option<String>,
    /// The address of a file of [`DOWNLOAD_BYTES`].
    pub(crate) download: Option<String>,
    /// Uploads that have begun, one for each picture that the session sends, each with the number of the picture.
    pub(crate) bombs: Vec<(usize, String)>,
    /// Pictures that the session may still send in this piece.
    pub(crate) bombs_left: usize,
}

/// How a connection begins.
pub(crate) enum Opening {
    /// A TCP connection.
    Socket,
    /// A WebSocket without `connect`.
    Upgrade,
    /// A session. It is open when the reply to `connect` has arrived.
    Connect(Encoding),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    Json,
    MessagePack,
}

/// How a session reads what it is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    All,
    /// A few bytes at a time.
    Slow,
    Never,
}

/// What a session does after the last piece.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// It sends the first piece again.
    Again,
    /// It closes the connection and opens another one.
    Reconnect,
    /// It opens another connection, and leaves up to this many old ones open and untouched.
    Keep(usize),
}

/// Bytes to write. Numbers in them count up each time they are written.
pub(crate) struct Piece {
    pub(crate) bytes: Vec<u8>,
    counters: Vec<usize>,
}

/// One kind of misuse, encoded.
pub(crate) struct Attack {
    pub(crate) opening: Opening,
    pub(crate) pieces: Vec<Piece>,
    /// Minimum time between two pieces.
    pub(crate) every: Duration,
    pub(crate) reading: Reading,
    pub(crate) then: Then,
}

/// Placeholder for a number that counts up.
const COUNTER: &str = "############";
/// Time between two requests at about the rate allowed to one user, 100 per second.
const ALLOWED: Duration = Duration::from_micros(10_200);
/// Default of `limits.frame_bytes`.
const FRAME_BYTES: usize = 65_536;
const OVERSIZED_BYTES: usize = 70_000;
/// Requests that one session may have in flight.
const WINDOW: usize = 64;
const LONG_LINK_BYTES: usize = 2_000;
const LINKS: usize = 10;

/// The kind of misuse that uploads pictures which are small to send and large to decode.
pub(crate) const PICTURE_BOMBS: &str = "picture bombs";

type Build = fn(&Hostile) -> Attack;

/// All kinds of misuse, with their names.
pub(crate) const KINDS: [(&str, Build); 32] = [
    ("create with 16,000 ids", |_| {
        lists("create", "participants", 16_000)
    }),
    ("history unread, 64 in flight", |who| {
        history(who, Reading::Never)
    }),
    ("pings", |_| pings()),
    ("watch 16,000", |_| lists("watch", "users", 16_000)),
    ("dms with invented users", |_| invented_dms()),
    ("bodies that never come", bodies),
    ("connect with cursors", connect_with_cursors),
    ("fragments", |_| fragments()),
    ("watching at the bound", |_| watching_at_the_bound()),
    ("pages", pages),
    ("oversized frames", |_| oversized()),
    ("unwatch 30,000", |_| lists("unwatch", "users", 15_000)),
    ("inviting", inviting),
    ("far past the rate", |_| past_the_rate()),
    ("chunks without end", chunks),
    ("strangers' channels", strangers),
    ("history read slowly", |who| history(who, Reading::Slow)),
    ("junk", |_| junk()),
    ("deep nesting", |_| deep()),
    ("sends of 16 KiB", large_sends),
    ("heads byte by byte", |who| head_in_bytes(who)),
    ("sockets without connect", |_| silent()),
    ("slow readers of a busy channel", slow_reader),
    ("cursors in parts", cursors_in_parts),
    ("watching the same again", |_| watching_again()),
    ("removing invented users", removing),
    ("what was missed, read slowly", missed_slowly),
    ("uploads that hardly come", files::slow_uploads),
    ("halves of uploads", files::half_uploads),
    ("heads that never end", files::half_heads),
    ("downloads unread", files::unread_downloads),
    (PICTURE_BOMBS, files::picture_bombs),
];

/// Kinds whose connections the gateway must end by its time-outs.
pub(crate) const TIMED_OUT: [&str; 7] = [
    "bodies that never come",
    "chunks without end",
    "sockets without connect",
    "uploads that hardly come",
    "halves of uploads",
    "heads that never end",
    "downloads unread",
];

impl Piece {
    fn new(bytes: Vec<u8>) -> Self {
        let mark = COUNTER.as_bytes();
        let counters = memchr::memmem::find_iter(&bytes, mark).collect();
        Self { bytes, counters }
    }

    /// A piece without counters.
    fn plain(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            counters: Vec::new(),
        }
    }

    fn json(request: &Value) -> Self {
        Self::new(text_frame(&request.to_string()))
    }

    /// Several requests in one write.
    fn together(requests: impl IntoIterator<Item = Value>) -> Self {
        let frames = requests.into_iter().map(|r| text_frame(&r.to_string()));
        Self::new(frames.collect::<Vec<_>>().concat())
    }

    /// Writes this number to the counters.
    pub(crate) fn count(&mut self, number: u64) {
        for &at in &self.counters {
            let mut rest = number;
            for digit in self.bytes[at..at + COUNTER.len()].iter_mut().rev() {
                *digit = b'0' + (rest % 10) as u8;
                rest /= 10;
            }
        }
    }
}

impl Attack {
    /// A session that sends requests one after the other.
    fn requests(pieces: Vec<Piece>) -> Self {
        Self {
            opening: Opening::Connect(Encoding::Json),
            pieces,
            every: ALLOWED,
            reading: Reading::All,
            then: Then::Again,
        }
    }

    /// Connections that are opened and then left untouched.
    fn kept(opening: Opening, pieces: Vec<Piece>, every_ms: u64, count: usize) -> Self {
        Self {
            opening,
            pieces,
            every: Duration::from_millis(every_ms),
            reading: Reading::Never,
            then: Then::Keep(count),
        }
    }
}

/// The first bytes of a connection.
pub(crate) fn opening(who: &Hostile, opening: &Opening) -> Vec<u8> {
    let upgrade = |headers: &str| upgrade_head("/v1/ws", who.server, headers);
    let connect = json!({"type": "connect", "id": 1, "token": who.token});
    match opening {
        Opening::Socket => Vec::new(),
        Opening::Upgrade => upgrade(""),
        Opening::Connect(Encoding::Json) => {
            [upgrade(""), text_frame(&connect.to_string())].concat()
        }
        Opening::Connect(Encoding::MessagePack) => {
            let head = upgrade("sec-websocket-protocol: chat.v1.msgpack\r\n");
            [head, packed(&connect)].concat()
        }
    }
}

fn packed(request: &Value) -> Vec<u8> {
    // Every JSON value can be encoded as MessagePack.
    binary_frame(&rmp_serde::to_vec(request).unwrap_or_default())
}

/// Different ids of three characters.
fn short_ids(count: usize) -> Vec<String> {
    const DIGITS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let digit = |n: usize| char::from(DIGITS[n % 32]);
    let id = |n: usize| [digit(n), digit(n / 32), digit(n / 1024)];
    (0..count).map(|n| id(n).iter().collect()).collect()
}

/// A frame of nearly the largest size, full of ids. In MessagePack an id of three characters has four bytes.
fn lists(kind: &str, field: &str, ids: usize) -> Attack {
    let request = json!({"type": kind, "id": 2, "kind": "group", field: short_ids(ids)});
    Attack {
        opening: Opening::Connect(Encoding::MessagePack),
        ..Attack::requests(vec![Piece::plain(packed(&request))])
    }
}

/// Watches as many users as allowed, one more, others, and none.
fn watching_at_the_bound() -> Attack {
    const WATCHED: usize = 500;
    let ids = short_ids(2 * WATCHED);
    let say =
        |kind: &str, users: &[String]| Piece::json(&json!({"type": kind, "id": 2, "users": users}));
    let (some, others) = ids.split_at(WATCHED);
    Attack::requests(vec![
        say("watch", some),
        say("watch", &ids[..=WATCHED]),
        say("watch", others),
        say("unwatch", some),
        say("watch", others),
        say("unwatch", others),
    ])
}

fn invented_dms() -> Attack {
    let user = format!("invented-{COUNTER}");
    Attack::requests(vec![Piece::json(
        &json!({"type": "create", "id": 2, "kind": "dm", "participants": [user]}),
    )])
}

fn inviting(who: &Hostile) -> Attack {
    let user = format!("invited-{COUNTER}");
    let add = json!({"type": "add", "id": 2, "conversation": who.group, "user": user});
    let remove = json!({"type": "remove", "id": 2, "conversation": who.group, "user": user});
    Attack::requests(vec![Piece::json(&add), Piece::json(&remove)])
}

/// Watches the same 500 users each time. The gateway reads for each of them when they were last seen.
fn watching_again() -> Attack {
    const WATCHED: usize = 500;
    let watch = json!({"type": "watch", "id": 2, "users": short_ids(WATCHED)});
    Attack::requests(vec![Piece::json(&watch)])
}

/// Removes users that do not exist from channels that the session is not in.
fn removing(who: &Hostile) -> Attack {
    let user = format!("nobody-{COUNTER}");
    let remove = |channel: &String| {
        Piece::json(&json!({"type": "remove", "id": 2, "conversation": channel, "user": user}))
    };
    let channels = who.private.iter().chain([&who.busy]);
    Attack::requests(channels.map(remove).collect())
}

fn strangers(who: &Hostile) -> Attack {
    let channels = who.private.iter().chain([&who.busy]);
    let each = channels.flat_map(|channel| {
        ["subscribe", "unsubscribe", "history", "join"]
            .map(|kind| Piece::json(&json!({"type": kind, "id": 2, "conversation": channel})))
    });
    let mut attack = Attack::requests(each.collect());
    attack.pieces.push(Piece::json(
        &json!({"type": "leave", "id": 2, "conversation": who.busy}),
    ));
    attack
}

/// The request to send a message with ten links of nearly the maximum length.
pub(crate) fn linked(conversation: &str, number: u64) -> Value {
    let link = |n: usize| {
        let url = format!(
            "https://example.org/{number}/{n}/{}",
            "x".repeat(LONG_LINK_BYTES - 60)
        );
        json!({"url": url})
    };
    let links: Vec<_> = (0..LINKS).map(link).collect();
    json!({"type": "send", "conversation": conversation, "client_id": client_id(), "body": "links", "attachments": links})
}

/// Number of messages from `linked` for each hostile user.
pub(crate) const LINKED: u64 = 96;

fn history(who: &Hostile, reading: Reading) -> Attack {
    const KEPT: usize = 8;
    let page = |n: usize| {
        let around = 2 + n as u64 * LINKED / WINDOW as u64;
        json!({"type": "history", "id": 2, "conversation": who.group, "around": around, "limit": 200})
    };
    let pieces = vec![Piece::together((0..WINDOW).map(page))];
    let mut attack = Attack::kept(Opening::Connect(Encoding::Json), pieces, 100, KEPT);
    if reading != Reading::Never {
        (attack.reading, attack.then) = (reading, Then::Again);
    }
    attack
}

fn pages(who: &Hostile) -> Attack {
    let requests = [
        json!({"type": "inbox", "id": 2, "limit": 500}),
        json!({"type": "public", "id": 2, "limit": 500}),
        json!({"type": "participants", "id": 2, "conversation": who.group, "limit": 500}),
        json!({"type": "participants", "id": 2, "conversation": who.busy, "limit": 500}),
        json!({"type": "conversation", "id": 2, "conversation": who.busy}),
    ];
    Attack::requests(requests.iter().map(Piece::json).collect())
}

/// A piece of nearly 64 KiB that repeats one frame.
fn flood(frame: &[u8]) -> Piece {
    Piece::plain(frame.repeat(FRAME_BYTES / frame.len()))
}

fn pings() -> Attack {
    const PING: [u8; 6] = [0x89, 0x80, 0, 0, 0, 0];
    Attack::requests(vec![flood(&PING)])
}

/// A message that never ends, in fragments of one byte or none.
fn fragments() -> Attack {
    const FLOODS: usize = 8;
    const BEGIN: [u8; 7] = [0x01, 0x81, 0, 0, 0, 0, b'{'];
    const EMPTY_AND_SPACE: [u8; 13] = [0x00, 0x80, 0, 0, 0, 0, 0x00, 0x81, 0, 0, 0, 0, b' '];
    let mut pieces = vec![Piece::plain(BEGIN.to_vec())];
    pieces.extend((0..FLOODS).map(|_| flood(&EMPTY_AND_SPACE)));
    Attack {
        then: Then::Reconnect,
        ..Attack::requests(pieces)
    }
}

fn oversized() -> Attack {
    let body = "x".repeat(OVERSIZED_BYTES);
    let request = json!({"type": "ping", "id": 2, "body": body});
    // The gateway answers with a close code. The session reconnects by itself only if it gets none.
    Attack {
        every: Duration::from_millis(100),
        then: Then::Reconnect,
        ..Attack::requests(vec![Piece::json(&request)])
    }
}

fn past_the_rate() -> Attack {
    let requests = (0..1_500).map(|_| json!({"type": "ping", "id": 2}));
    Attack::requests(vec![Piece::together(requests)])
}

fn junk() -> Attack {
    let junk = [
        text_frame("this is no frame"),
        text_frame("[]"),
        text_frame("{\"type\":\"nothing of this protocol\",\"id\":2}"),
        text_frame("{\"type\":\"send\",\"id\":2}"),
        // A frame with an unknown opcode.
        vec![0x87, 0x80, 0, 0, 0, 0],
    ];
    Attack {
        then: Then::Reconnect,
        ..Attack::requests(junk.into_iter().map(Piece::plain).collect())
    }
}

fn deep() -> Attack {
    let depth = FRAME_BYTES / 2 - 100;
    let nested = format!(
        "{{\"type\":\"ping\",\"id\":2,\"x\":{}{}}}",
        "[".repeat(depth),
        "]".repeat(depth)
    );
    let unclosed = format!("{{\"type\":\"ping\",\"x\":{}", "{\"x\":".repeat(12_000));
    Attack {
        then: Then::Reconnect,
        ..Attack::requests(vec![
            Piece::plain(text_frame(&nested)),
            Piece::plain(text_frame(&unclosed)),
        ])
    }
}

/// A message with a new client id each time.
fn send(conversation: &str, bytes: usize) -> Piece {
    let body = "x".repeat(bytes);
    let mut id = client_id().to_string();
    id.truncate(id.len() - COUNTER.len());
    id.push_str(COUNTER);
    Piece::json(
        &json!({"type": "send", "id": 2, "conversation": conversation, "client_id": id, "body": body}),
    )
}

fn large_sends(who: &Hostile) -> Attack {
    Attack::requests(vec![send(&who.group, 16 << 10)])
}

/// A session that writes to the busy channel all the time, within the limits. It is not misuse.
pub(crate) fn busy_writer(who: &Hostile) -> Attack {
    Attack {
        every: Duration::from_millis(12),
        ..Attack::requests(vec![send(&who.busy, 8 << 10)])
    }
}

fn slow_reader(who: &Hostile) -> Attack {
    const KEPT: usize = 10;
    let subscribe = json!({"type": "subscribe", "id": 2, "conversation": who.busy});
    let pieces = vec![Piece::json(&subscribe)];
    Attack::kept(Opening::Connect(Encoding::Json), pieces, 50, KEPT)
}

/// Silent sockets of one session, about as many as one address may have.
const SILENT: usize = 32;

fn silent() -> Attack {
    Attack::kept(Opening::Upgrade, Vec::new(), 20, SILENT)
}

fn bodies(who: &Hostile) -> Attack {
    let head = format!(
        "POST /v1/tokens HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n",
        who.server
    );
    let pieces = vec![Piece::plain(head.into_bytes())];
    Attack::kept(Opening::Socket, pieces, 20, SILENT)
}

/// A chunked body whose first bytes come and whose end never comes.
fn chunks(who: &Hostile) -> Attack {
    let head = format!(
        "POST /v1/conversations HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\nchat-user: {}\r\n\
         content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{{\r\n",
        who.server, who.token, who.user
    );
    let pieces = vec![Piece::plain(head.into_bytes())];
    Attack::kept(Opening::Socket, pieces, 20, SILENT)
}

fn head_in_bytes(who: &Hostile) -> Attack {
    let head = upgrade_head("/v1/ws", who.server, "x-slow: and slow\r\n");
    let pieces = head.chunks(1).map(|byte| Piece::plain(byte.to_vec()));
    Attack {
        opening: Opening::Socket,
        pieces: pieces.collect(),
        every: Duration::from_millis(5),
        reading: Reading::All,
        then: Then::Reconnect,
    }
}

fn cursors(who: &Hostile, count: usize) -> String {
    let mut text = format!("{{\"{}\":[1,1]", who.group);
    for _ in 1..count {
        // Writing to a string cannot fail.
        let _ = write!(text, ",\"{}\":[1,1]", client_id());
    }
    text.push('}');
    text
}

/// A `connect` with as many cursors as one frame can hold.
fn connect_with_cursors(who: &Hostile) -> Attack {
    const COUNT: usize = 1_400;
    let (token, cursors) = (&who.token, cursors(who, COUNT));
    let connect =
        format!("{{\"type\":\"connect\",\"id\":1,\"token\":\"{token}\",\"cursors\":{cursors}}}");
    reconnecting(vec![Piece::plain(text_frame(&connect))])
}

/// A `connect` in parts, with as many cursors as are allowed.
fn cursors_in_parts(who: &Hostile) -> Attack {
    const PARTS: usize = 4;
    const COUNT: usize = 5_000 / PARTS;
    let token = &who.token;
    let parts = (0..PARTS).map(|part| {
        let cursors = cursors(who, COUNT);
        let more = part + 1 < PARTS;
        Piece::plain(text_frame(&if part == 0 {
            format!(
                "{{\"type\":\"connect\",\"id\":1,\"token\":\"{token}\",\"cursors\":{cursors},\"more\":{more}}}"
            )
        } else {
            format!("{{\"type\":\"cursors\",\"cursors\":{cursors},\"more\":{more}}}")
        }))
    });
    reconnecting(parts.collect())
}

/// A resume of 2 MB that is read a few bytes at a time.
fn missed_slowly(who: &Hostile) -> Attack {
    const KEPT: usize = 8;
    let (token, group) = (&who.token, &who.group);
    let connect = format!(
        "{{\"type\":\"connect\",\"id\":1,\"token\":\"{token}\",\"cursors\":{{\"{group}\":[1,0]}}}}"
    );
    let pieces = vec![Piece::plain(text_frame(&connect))];
    Attack {
        reading: Reading::Slow,
        ..Attack::kept(Opening::Upgrade, pieces, 100, KEPT)
    }
}

fn reconnecting(pieces: Vec<Piece>) -> Attack {
    Attack {
        opening: Opening::Upgrade,
        every: Duration::from_millis(30),
        then: Then::Reconnect,
        ..Attack::requests(pieces)
    }
}
