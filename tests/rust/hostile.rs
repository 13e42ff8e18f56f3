//! Sends thousands of malformed, oversized, deeply nested and random frames over real sockets. The gateway must answer
//! each with a reply, an `error` or the right close code. It must never panic, and another session must not notice.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, LazyLock, Mutex},
    time::Duration,
};

use futures_util::{SinkExt, StreamExt};
use proptest::{prelude::*, test_runner::TestRunner};
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream,
    tungstenite::{Message, client::IntoClientRequest},
};

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

const PATIENCE: Duration = Duration::from_secs(20);

struct Gateway {
    process: Child,
    client: String,
    token: String,
    log: Arc<Mutex<String>>,
    _data: tempfile::TempDir,
}

impl Gateway {
    fn start() -> Self {
        let data = tempfile::tempdir().unwrap();
        let command = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_chat-gateway"));
            command
                .env("CHAT__CLIENT__LISTEN", "127.0.0.1:0")
                .env("CHAT__INTERNAL__LISTEN", "127.0.0.1:0")
                .env("CHAT__STORE__EMBEDDED__PATH", data.path())
                .env("CHAT__LIMITS__REQUESTS_PER_SECOND", "1000000")
                .env("CHAT__LIMITS__REQUESTS_BURST", "1000000")
                .env("CHAT__LIMITS__REQUEST_BYTES_PER_SECOND", "1073741824")
                .env("CHAT__LIMITS__REQUEST_BYTES_BURST", "1073741824")
                .env("CHAT__LIMITS__CONNECTS_PER_SECOND_PER_ADDRESS", "1000000")
                .env("CHAT__LOG__FORMAT", "json");
            command
        };
        let mut process = command().stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let client = loop {
            let line = lines
                .next()
                .expect("the gateway ended before it was ready")
                .unwrap();
            let line: Value = serde_json::from_str(&line).unwrap();
            if line["message"] == "ready" {
                break line["clients"].as_str().unwrap().to_owned();
            }
        };
        // The gateway has made its key now.
        let token = command().args(["token", "mallory"]).output();
        let token = token.unwrap().stdout;
        let log = Arc::new(Mutex::new(String::new()));
        let seen = log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                seen.lock().unwrap().push_str(&line);
            }
        });
        let token = String::from_utf8(token).unwrap().trim().to_owned();
        Self {
            process,
            client,
            token,
            log,
            _data: data,
        }
    }

    async fn connect(&self, binary: bool) -> Socket {
        let mut socket = self.open(binary).await;
        let connect = json!({"type": "connect", "id": 1, "token": self.token});
        socket.send(message(binary, &connect)).await.unwrap();
        let reply = socket.next().await.unwrap().unwrap().into_data();
        assert!(reply.windows(9).any(|w| w == b"connected"), "{reply:?}");
        socket
    }

    async fn open(&self, binary: bool) -> Socket {
        let mut request = format!("ws://{}/v1/ws", self.client)
            .into_client_request()
            .unwrap();
        let protocol = if binary {
            "chat.v1.msgpack"
        } else {
            "chat.v1.json"
        };
        request
            .headers_mut()
            .insert("sec-websocket-protocol", protocol.parse().unwrap());
        tokio_tungstenite::connect_async(request).await.unwrap().0
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn message(binary: bool, frame: &Value) -> Message {
    if binary {
        Message::Binary(rmp_serde::to_vec_named(frame).unwrap().into())
    } else {
        Message::Text(frame.to_string().into())
    }
}

/// Sends a ping after a hostile frame. True if it is answered, false if the connection was closed with an allowed code.
/// An error for any other close code, or if nothing comes within `PATIENCE`.
async fn survives(socket: &mut Socket, binary: bool) -> Result<bool, String> {
    let ping = json!({"type": "ping", "id": 4_000_000_000_u32});
    if socket.send(message(binary, &ping)).await.is_err() {
        return Ok(false);
    }
    loop {
        let next = timeout(PATIENCE, socket.next())
            .await
            .map_err(|_| "neither a pong nor a close frame".to_owned())?;
        match next {
            Some(Ok(Message::Close(Some(close)))) => {
                let code = u16::from(close.code);
                let fits = [4500, 4501, 4004, 1000].contains(&code);
                return if fits {
                    Ok(false)
                } else {
                    Err(format!("closed with {code}"))
                };
            }
            // A violation of the WebSocket protocol may end the connection without a close frame.
            None | Some(Err(_) | Ok(Message::Close(None))) => return Ok(false),
            Some(Ok(reply)) => {
                let bytes = reply.into_data();
                if bytes.windows(4).any(|w| w == b"pong") {
                    return Ok(true);
                }
            }
        }
    }
}

#[derive(Debug, Clone)]
struct Hostile {
    binary: bool,
    connected: bool,
    message: Vec<u8>,
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,40}".prop_map(Value::from),
        Just(json!("0199c0de-0000-7000-8000-00000000cafe")),
    ];
    leaf.prop_recursive(6, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::hash_map("[a-z_]{0,12}", inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// A request of each kind, with all its fields: those of the golden frames.
static REQUESTS: LazyLock<Vec<serde_json::Map<String, Value>>> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/frames.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let requests = golden["requests"].as_array().unwrap();
    let frames = requests.iter().map(|request| &request["frame"]);
    frames
        .map(|frame| frame.as_object().unwrap().clone())
        .collect()
});

/// The types of requests.
fn types() -> Vec<String> {
    let types = REQUESTS.iter().map(|frame| frame["type"].as_str().unwrap());
    types.map(str::to_owned).collect()
}

/// The fields that requests have, at any depth.
fn fields() -> Vec<String> {
    fn collect(map: &serde_json::Map<String, Value>, fields: &mut BTreeSet<String>) {
        fields.extend(map.keys().cloned());
        let maps = map.values().filter_map(Value::as_object);
        maps.for_each(|map| collect(map, fields));
    }
    let mut fields = BTreeSet::new();
    REQUESTS.iter().for_each(|map| collect(map, &mut fields));
    fields.into_iter().collect()
}

/// A frame with a valid type and random fields, or a valid frame of which one field has another value. Both come close to a
/// valid one.
fn near_miss() -> impl Strategy<Value = Value> {
    let some = prop::collection::hash_map(prop::sample::select(fields()), value(), 0..8);
    let random = (prop::sample::select(types()), some).prop_map(|(kind, fields)| {
        let mut frame: serde_json::Map<String, Value> = fields.into_iter().collect();
        frame.insert("type".into(), kind.into());
        frame.entry("id").or_insert(7.into());
        Value::Object(frame)
    });
    let request = prop::sample::select(REQUESTS.clone());
    let other = (request, any::<prop::sample::Index>(), value());
    let changed = other.prop_map(|(mut frame, at, value)| {
        let at = at.index(frame.len());
        if let Some(field) = frame.values_mut().nth(at) {
            *field = value;
        }
        Value::Object(frame)
    });
    prop_oneof![random, changed]
}

fn encoded(binary: bool, value: &Value) -> Vec<u8> {
    message(binary, value).into_data().to_vec()
}

fn deep(binary: bool, depth: usize) -> Vec<u8> {
    if binary {
        [
            vec![0x81, 0xa4],
            b"type".to_vec(),
            vec![0x91; depth],
            vec![0xc0],
        ]
        .concat()
    } else {
        format!(
            r#"{{"type":"send","body":{}{}}}"#,
            "[".repeat(depth),
            "]".repeat(depth)
        )
        .into_bytes()
    }
}

fn hostile() -> impl Strategy<Value = Hostile> {
    (any::<bool>(), prop::bool::weighted(0.9)).prop_flat_map(|(binary, connected)| {
        let bytes = prop_oneof![
            2 => prop::collection::vec(any::<u8>(), 0..200),
            2 => value().prop_map(move |v| encoded(binary, &v)),
            6 => near_miss().prop_map(move |v| encoded(binary, &v)),
            // A frame that is cut short, or has one changed byte.
            3 => (near_miss(), any::<prop::sample::Index>(), any::<u8>()).prop_map(move |(v, at, byte)| {
                let mut bytes = encoded(binary, &v);
                let at = at.index(bytes.len());
                if byte < 128 { bytes.truncate(at) } else { bytes[at] = byte }
                bytes
            }),
            1 => (1usize..60_000).prop_map(move |depth| deep(binary, depth)),
            1 => (60_000usize..80_000).prop_map(|size| vec![b'x'; size]),
            1 => (1usize..70_000).prop_map(move |size| encoded(binary, &json!({
                "type": "send", "id": 3, "conversation": "0199c0de-0000-7000-8000-00000000cafe",
                "client_id": "0199c0de-0000-4000-8000-00000000cafe", "body": "y".repeat(size)}))),
        ];
        bytes.prop_map(move |message| Hostile { binary, connected, message })
    })
}

#[test]
fn hostile_frames_affect_no_other_session() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let gateway = Gateway::start();
    let bystander = std::cell::Cell::new(Some(runtime.block_on(gateway.connect(false))));
    // A connection is reused until the gateway closes it, so that hostile frames follow each other.
    let sockets: std::cell::RefCell<[Option<Socket>; 2]> = [None, None].into();
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 3_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let outcome = runner.run(
        &hostile(),
        |Hostile {
             binary,
             connected,
             message,
         }| {
            runtime.block_on(async {
                let kept = sockets.borrow_mut()[usize::from(binary)].take();
                let mut socket = match kept {
                    _ if !connected => gateway.open(binary).await,
                    Some(socket) => socket,
                    None => gateway.connect(binary).await,
                };
                let frame = match String::from_utf8(message) {
                    Ok(text) if !binary => Message::Text(text.into()),
                    Ok(text) => Message::Binary(text.into_bytes().into()),
                    Err(bytes) => Message::Binary(bytes.into_bytes().into()),
                };
                let alive = socket.send(frame).await.is_ok();
                let alive = alive
                    && survives(&mut socket, binary)
                        .await
                        .map_err(TestCaseError::fail)?;
                if alive && connected {
                    sockets.borrow_mut()[usize::from(binary)] = Some(socket);
                }
                let mut quiet = bystander.take().expect("each case puts it back");
                let heard = survives(&mut quiet, false).await;
                bystander.set(Some(quiet));
                prop_assert_eq!(heard, Ok(true), "the bystander's ping was not answered");
                prop_assert!(!gateway.log.lock().unwrap().contains("panicked"));
                Ok(())
            })
        },
    );
    outcome.unwrap();
}
