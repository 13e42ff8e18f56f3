use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use super::*;
use crate::tasks::Tasks;

/// A server on loopback that answers each request with the same bytes.
struct Server {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    async fn start(answer: impl Into<Bytes>) -> Self {
        let answer = answer.into();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            address: listener.local_addr().unwrap(),
            connections: Arc::default(),
            requests: Arc::default(),
        };
        let (connections, requests) = (server.connections.clone(), server.requests.clone());
        let tasks = Tasks::default();
        tasks.clone().spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                connections.fetch_add(1, SeqCst);
                tasks.spawn(serve(stream, answer.clone(), requests.clone()));
            }
        });
        server
    }

    fn url(&self, host: &str) -> Url {
        let port = self.address.port();
        format!("http://{host}:{port}/hook").parse().unwrap()
    }

    fn connections(&self) -> usize {
        self.connections.load(SeqCst)
    }
}

async fn serve(mut stream: TcpStream, answer: Bytes, requests: Arc<Mutex<Vec<String>>>) {
    let (mut read, mut chunk) = (String::new(), [0; 4096]);
    loop {
        let Ok(count @ 1..) = stream.read(&mut chunk).await else {
            return;
        };
        read.push_str(&String::from_utf8_lossy(&chunk[..count]));
        if !read.ends_with("the body") {
            continue;
        }
        lock(&requests).push(std::mem::take(&mut read));
        if stream.write_all(&answer).await.is_err() || answer.starts_with(b"HTTP/1.1 200 Once") {
            return;
        }
    }
}

/// The addresses of a name: the first answer, then the second for ever.
struct Fixed {
    answers: [Vec<IpAddr>; 2],
    asked: AtomicUsize,
}

impl Fixed {
    fn new(first: &[&str], then: &[&str]) -> Arc<Self> {
        let parse = |list: &[&str]| list.iter().map(|text| text.parse().unwrap()).collect();
        Arc::new(Self {
            answers: [parse(first), parse(then)],
            asked: AtomicUsize::new(0),
        })
    }

    fn asked(&self) -> usize {
        self.asked.load(SeqCst)
    }
}

#[async_trait]
impl Lookup for Fixed {
    async fn lookup(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        assert_eq!(name, "hooks.example.org");
        let asked = self.asked.fetch_add(1, SeqCst);
        Ok(self.answers[asked.min(1)].clone())
    }
}

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
const ONCE: &str = "HTTP/1.1 200 Once\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok";

/// Allows exactly 127.0.0.1, over http.
fn one_address() -> Class {
    Class::Operator {
        allow: vec!["127.0.0.1/32".parse().unwrap()],
        http: true,
        development: false,
    }
}

fn request(url: Url, class: Class) -> Request {
    Request {
        url,
        class: Arc::new(class),
        headers: HeaderMap::from_iter([(
            HeaderName::from_static("webhook-id"),
            HeaderValue::from_static("an id"),
        )]),
        body: Bytes::from_static(b"the body"),
        timeout: Duration::from_secs(5),
    }
}

fn refused<T: fmt::Debug>(answer: Result<T, Failure>) -> String {
    match answer {
        Err(Failure::Refused(text)) => text,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[tokio::test]
async fn a_request_is_sent_and_its_connection_is_kept() {
    let server = Server::start(OK).await;
    let client = Client::default();
    for _ in 0..3 {
        let request = request(server.url("127.0.0.1"), one_address());
        let answer = client.post(request).await.unwrap();
        assert_eq!((answer.status, &answer.body[..]), (200, &b"ok"[..]));
    }
    assert_eq!(server.connections(), 1);
    let requests = lock(&server.requests);
    assert!(requests[0].starts_with("POST /hook HTTP/1.1\r\n"));
    assert!(requests[0].contains("webhook-id: an id\r\n"));
    assert!(requests[0].contains("user-agent: chat-gateway/"));
}

#[tokio::test]
async fn addresses_in_urls_are_checked_in_all_forms() {
    let server = Server::start(OK).await;
    let client = Client::default();
    for host in [
        "127.0.0.1",
        "127.1",
        "0x7f000001",
        "0x7f.0x0.0x0.0x1",
        "2130706433",
        "0177.0.0.1",
        "127.0.0.1.",
        "127.0.0.2",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "１２７.0.0.1",
        "127。0。0。1",
        "169.254.169.254",
    ] {
        let class = Class::Operator {
            allow: Vec::new(),
            http: true,
            development: false,
        };
        let answer = client.post(request(server.url(host), class)).await;
        assert!(!refused(answer).is_empty(), "{host}");
        let mut url = server.url(host);
        url.set_scheme("https").unwrap();
        refused(client.post(request(url, Class::Public)).await);
    }
    assert_eq!(server.connections(), 0);
}

#[tokio::test]
async fn only_https_unless_it_is_allowed() {
    let client = Client::default();
    let url: Url = "http://203.0.114.1:9/".parse().unwrap();
    let class = Class::Operator {
        allow: Vec::new(),
        http: false,
        development: true,
    };
    let text = refused(client.post(request(url.clone(), class)).await);
    assert_eq!(text, "http is not allowed, only https");
    refused(client.post(request(url, Class::Public)).await);
    for url in ["ftp://example.org/", "file:///etc/passwd", "data:,a"] {
        let url = url.parse().unwrap();
        refused(client.post(request(url, one_address())).await);
    }
}

#[tokio::test]
async fn in_development_this_machine_can_be_reached() {
    let server = Server::start(OK).await;
    let client = Client::default();
    let class = Class::Operator {
        allow: Vec::new(),
        http: false,
        development: true,
    };
    for host in ["127.0.0.1", "localhost"] {
        let answer = client.post(request(server.url(host), class.clone())).await;
        assert_eq!(answer.unwrap().status, 200, "{host}");
    }
    assert_eq!(server.connections(), 2);
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let inside = Server::start(OK).await;
    let answer = format!(
        "HTTP/1.1 307 Temporary Redirect\r\nlocation: {}\r\ncontent-length: 0\r\n\r\n",
        inside.url("127.0.0.1")
    );
    let server = Server::start(answer).await;
    let client = Client::default();
    let answer = client
        .post(request(server.url("127.0.0.1"), one_address()))
        .await;
    assert_eq!(answer.unwrap().status, 307);
    assert_eq!(inside.connections(), 0);
}

#[tokio::test]
async fn a_name_with_an_internal_address_is_refused() {
    let server = Server::start(OK).await;
    let lookup = Fixed::new(&["127.0.0.1"], &["127.0.0.1"]);
    let client = Client::resolving(lookup.clone());
    let class = Class::Operator {
        allow: Vec::new(),
        http: true,
        development: false,
    };
    let url = server.url("hooks.example.org");
    let text = refused(client.post(request(url.clone(), class)).await);
    assert_eq!(text, "127.0.0.1 is of this machine");
    let mut encrypted = url;
    encrypted.set_scheme("https").unwrap();
    refused(client.post(request(encrypted, Class::Public)).await);
    assert_eq!((server.connections(), lookup.asked()), (0, 2));
}

#[tokio::test]
async fn only_the_allowed_addresses_of_a_name_are_used() {
    let server = Server::start(OK).await;
    // The first would fail at once, because nothing listens there.
    let lookup = Fixed::new(&["127.0.0.3", "127.0.0.1", "10.0.0.1"], &[]);
    let client = Client::resolving(lookup);
    let url = server.url("hooks.example.org");
    assert!(client.post(request(url, one_address())).await.is_ok());
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn a_name_that_changes_is_checked_for_each_connection() {
    let server = Server::start(ONCE).await;
    let lookup = Fixed::new(&["127.0.0.1"], &["127.0.0.2"]);
    let client = Client::resolving(lookup.clone());
    let url = server.url("hooks.example.org");
    let class = one_address();
    let first = client.post(request(url.clone(), class.clone())).await;
    assert_eq!(first.unwrap().status, 200);
    assert_eq!(lookup.asked(), 1, "it is resolved once for a connection");
    // Any address of 127.0.0.0/8 would reach a listener of all addresses; this one is refused before.
    let text = refused(client.post(request(url, class)).await);
    assert_eq!(text, "127.0.0.2 is of this machine");
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn a_connection_of_one_class_is_not_used_for_another() {
    let server = Server::start(OK).await;
    let lookup = Fixed::new(&["127.0.0.1"], &["127.0.0.1"]);
    let client = Client::resolving(lookup);
    let url = server.url("hooks.example.org");
    assert!(
        client
            .post(request(url.clone(), one_address()))
            .await
            .is_ok()
    );
    let class = Class::Operator {
        allow: Vec::new(),
        http: true,
        development: false,
    };
    refused(client.post(request(url, class)).await);
}

#[tokio::test]
async fn of_a_large_answer_the_begin_is_read() {
    // The rest never arrives, so waiting for it would take until the timeout.
    let length = HTTP_ANSWER_BYTES_MAX * 40;
    let head = format!("HTTP/1.1 500 Oh\r\ncontent-length: {length}\r\n\r\n");
    let mut answer = head.into_bytes();
    answer.resize(answer.len() + HTTP_ANSWER_BYTES_MAX, b'x');
    let server = Server::start(answer).await;
    let client = Client::default();
    let answer = client
        .post(request(server.url("127.0.0.1"), one_address()))
        .await
        .unwrap();
    assert_eq!(
        (answer.status, answer.body.len()),
        (500, HTTP_ANSWER_BYTES_MAX)
    );
}

#[tokio::test]
async fn a_slow_or_broken_receiver_is_told_apart() {
    let slow = Server::start("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nslow").await;
    let client = Client::default();
    let mut request = request(slow.url("127.0.0.1"), one_address());
    request.timeout = Duration::from_millis(200);
    assert_eq!(client.post(request.clone()).await, Err(Failure::Timeout));
    // Port 1 is closed.
    request.url = "http://127.0.0.1:1/secret-path".parse().unwrap();
    let Err(Failure::Network(text)) = client.post(request).await else {
        panic!("nothing listens there");
    };
    assert!(
        text.contains("refused") && !text.contains("secret"),
        "{text}"
    );
}

#[test]
fn retry_after_is_a_number_or_a_date() {
    let read = |text: &str| retry_after(&HeaderValue::from_str(text).unwrap());
    assert_eq!(read("120"), Some(Duration::from_secs(120)));
    assert_eq!(read("999999999999"), Some(RETRY_AFTER_MAX));
    let soon = std::time::UNIX_EPOCH + Duration::from_millis(clock::wall().unsigned_abs());
    let soon = httpdate::fmt_http_date(soon + Duration::from_secs(60));
    let after = read(&soon).unwrap().as_secs();
    assert!((58..=60).contains(&after), "{after}");
    assert_eq!(read("Thu, 01 Jan 1970 00:00:01 GMT"), Some(Duration::ZERO));
    assert_eq!(read("soon"), None);
}
