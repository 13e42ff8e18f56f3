//! Accepts connections and serves HTTP/1.1 on them until the gateway drains.

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, SocketAddr},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::{Duration, UNIX_EPOCH},
};

use axum::{
    Router,
    body::Body,
    http::{HeaderValue, Response, header},
    response::IntoResponse as _,
    serve::Listener,
};
use futures_util::FutureExt as _;
use hyper::{
    Method, Request, StatusCode, body::Incoming, server::conn::http1, service::HttpService,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
    select,
    sync::Notify,
    task::yield_now,
    time::{sleep, timeout},
};
use tower_service::Service as _;

use super::{
    address,
    admission::{Admission, Full, Place, SharedPlace},
    host,
    reply::{refused, refused_with},
    unread,
};
use crate::{
    clock,
    fanout::{FrameWriter, SharedStream, WriteProgress},
    model::limits::LAST_REQUEST,
    protocol::{Answer, ErrorCode},
    tasks::Tasks,
};

/// The time in which a client must send a request's head, counted from its connection or its last request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for trusted proxies. They keep idle connections for a minute or two, and answer 502 to a request that they send
/// while the gateway closes its connection.
const PROXY_HEAD_TIMEOUT: Duration = Duration::from_secs(130);
/// The interval at which a response must make progress. A client that takes too little for one to two intervals is closed.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a response that are progress, if it is not written whole. A system frees the memory of what was sent in pieces
/// of up to 64 KiB, so a line that carries twice as many is never too slow. A program that reads more slowly than its line
/// may be: once its system's receive buffer is full, Linux announces room only when a sixteenth of the buffer is free.
const RESPONSE_PROGRESS: u32 = 64 << 10;
/// The time before the end of an interval in which the gateway writes what the socket accepts.
const RESPONSE_TRIED: Duration = Duration::from_secs(1);
/// The time in which a proxy must send the PROXY header.
const PROXY_TIMEOUT: Duration = Duration::from_secs(5);
/// The time that a client has to read its answer, if the gateway closes before it has read the whole request.
const LINGER: Duration = Duration::from_secs(1);
/// The time that a refused client has to read the reason.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of a request's head. No request of the gateway needs a long one.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Bytes of the path of a request with its query. It is part of the head.
const TARGET_BYTES_MAX: usize = 8 << 10;
/// The methods that the gateway knows. A route that has not the one of a request answers 405, and 501 to all others.
const METHODS: [Method; 9] = [
    Method::GET,
    Method::HEAD,
    Method::POST,
    Method::PUT,
    Method::PATCH,
    Method::DELETE,
    Method::OPTIONS,
    Method::TRACE,
    Method::CONNECT,
];
/// Connections that the kernel queues until they are accepted.
const BACKLOG: u32 = 4096;

/// The origin of a request.
#[derive(Clone, Copy)]
pub(super) struct Peer {
    /// The address of the other end of the socket.
    pub(super) socket: IpAddr,
    /// The client's address from the PROXY header, or that of the socket.
    pub(super) address: IpAddr,
}

/// Listens on `address`.
///
/// # Errors
/// The error of the system if the address is not available.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// The header that may replace the method of a request for an upload (tus 1.0.0).
pub(super) const METHOD_OVERRIDE: &str = "x-http-method-override";

/// Notified when a connection has to end, because another user needs the place of its download. Its client may take so little
/// that the body of the response is not asked for more.
#[derive(Clone, Default)]
pub(super) struct GivesWay(pub(super) Arc<Notify>);

/// What all connections of a listener share.
#[derive(Clone)]
struct Shared {
    routes: Router,
    tasks: Tasks,
    /// The time after the start of a drain at which responses that can be requested again are cut.
    leave_within: Duration,
}

/// Serves `routes` on `listener` until the gateway drains. A WebSocket ends with its session, a request with its
/// response, and a response that can be requested again at the latest `leave_within` after the start of the drain.
pub async fn serve(
    mut listener: TcpListener,
    routes: Router,
    admission: Arc<Admission>,
    tasks: Tasks,
    leave_within: Duration,
) {
    let shared = Shared {
        routes,
        tasks: tasks.clone(),
        leave_within,
    };
    let begin = |(mut stream, from): (TcpStream, SocketAddr)| match admit(&admission, from.ip()) {
        Ok(Some(place)) => {
            tasks.spawn(connection(stream, from.ip(), place, shared.clone()));
        }
        Ok(None) => {}
        Err(full) => {
            full.count();
            if admission.refuse() {
                let admission = admission.clone();
                tasks.spawn(async move {
                    refuse(&mut stream, full).await;
                    admission.refused();
                });
            }
        }
    };
    loop {
        select! {
            // axum's `accept` waits when there are no more file descriptors.
            accepted = Listener::accept(&mut listener) => begin(accepted),
            () = tasks.draining() => break,
        }
    }
    // Clients that connected before the drain get an answer instead of a reset.
    for _ in 0..BACKLOG {
        let Some(accepted) = Listener::accept(&mut listener).now_or_never() else {
            return;
        };
        begin(accepted);
    }
}

/// Decides whether a connection may begin. `None` means that it is closed without an answer.
fn admit(admission: &Arc<Admission>, peer: IpAddr) -> Result<Option<Place>, Full> {
    if !admission.may_connect(peer) {
        crate::seldom::seldom!(WARN, "closed a connection that is not from client.trusted_proxies", %peer);
        return Ok(None);
    }
    let mut place = admission.admit()?;
    // A proxy's connection counts for the client's address, which is not known yet.
    if !admission.proxy_protocol() && !admission.is_trusted_proxy(peer) {
        place.assign(peer)?;
    }
    Ok(Some(place))
}

/// Answers with the reason before anything is read. It waits briefly until the client has read the answer, because the
/// kernel discards it if the socket is closed with unread bytes.
async fn refuse(stream: &mut TcpStream, full: Full) {
    let refused = async {
        let refusal = full.refusal();
        let status = refusal.code.http_status();
        let body = serde_json::to_string(&Answer::Error(refusal)).unwrap_or_default();
        let now = u64::try_from(clock::wall()).unwrap_or_default();
        let head = format!(
            "HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
             connection: close\r\ncontent-length: {}\r\ndate: {}\r\n\r\n",
            body.len(),
            httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_millis(now)),
        );
        stream.write_all((head + &body).as_bytes()).await?;
        stream.shutdown().await?;
        let mut unread = [0; 1024];
        while stream.read(&mut unread).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = timeout(REFUSAL_TIMEOUT, refused).await;
}

/// How far a connection is. A drain decides by it what to wait for.
#[derive(Default)]
struct Progress(AtomicU8);

impl Progress {
    /// No request has come whole.
    const NO_REQUEST: u8 = 0;
    /// A request is being carried out.
    const WORKING: u8 = 1;
    /// The response is being written. Its request changed something, so the client must learn the outcome.
    const ANSWERING: u8 = 2;
    /// The response is being written. It can be requested again, a download from where it was cut.
    const REPEATABLE: u8 = 3;
    /// The connection is a WebSocket now.
    const UPGRADED: u8 = 4;

    fn set(&self, to: u8) {
        self.0.store(to, Ordering::Relaxed);
    }

    fn is(&self, what: u8) -> bool {
        self.0.load(Ordering::Relaxed) == what
    }
}

/// Serves a connection until it ends or becomes a session.
async fn connection(mut stream: TcpStream, socket: IpAddr, place: Place, shared: Shared) {
    let identified = select! {
        // Mostly it is known at once.
        biased;
        identified = Box::pin(identify(&mut stream, socket, place)) => identified,
        () = shared.tasks.drained_for(LAST_REQUEST) => return,
    };
    let Some((peer, place)) = identified else {
        return;
    };
    // Nagle's algorithm would delay small frames.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%socket, %error, "could not set TCP_NODELAY");
    }
    let stream = SharedStream::new(stream);
    let head_timeout = if place.admission().is_trusted_proxy(socket) {
        PROXY_HEAD_TIMEOUT
    } else {
        HEAD_TIMEOUT
    };
    let client = Client {
        peer,
        place: SharedPlace::new(place),
        writer: stream.writer().clone(),
        progress: Arc::default(),
        gives_way: GivesWay::default(),
    };
    let (answering, routes) = (client.clone(), shared.routes.clone());
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let (client, routes) = (answering.clone(), routes.clone());
        client.progress.set(Progress::WORKING);
        async move { Ok::<_, Infallible>(client.answer(request.map(Body::new), routes).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_timeout)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let progress = &client.progress;
    match until_ended(pin!(connection), &client, &shared).await {
        None => {}
        Some(Err(error)) => {
            tracing::debug!(%socket, %error, "a connection ended with an error");
        }
        // The kernel discards the answer if the socket is closed with unread bytes of the request.
        Some(Ok(())) if progress.is(Progress::ANSWERING) => {
            drop(timeout(LINGER, client.writer.linger()).await);
        }
        Some(Ok(())) => {}
    }
}

/// One connection, as its requests see it.
#[derive(Clone)]
struct Client {
    peer: Peer,
    place: SharedPlace,
    writer: Arc<FrameWriter>,
    progress: Arc<Progress>,
    gives_way: GivesWay,
}

impl Client {
    /// Carries out a request.
    async fn answer(self, mut request: Request<Body>, mut routes: Router) -> Response<Body> {
        let is_safe = is_safe(&request);
        let checked = checked(&mut request);
        let (mut request, is_read) = unread::note(request);
        let mut response = match checked {
            Ok(()) => {
                let extensions = request.extensions_mut();
                extensions.insert(self.peer);
                extensions.insert(self.place);
                extensions.insert(self.writer);
                extensions.insert(self.gives_way);
                let answered = routes.call(request).await;
                answered.unwrap_or_else(|never| match never {})
            }
            Err(refused) => refused,
        };
        if is_read.is_some_and(|is_read| !is_read.load(Ordering::Relaxed)) {
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(header::CONNECTION, close);
        }
        self.progress.set(match response.status() {
            StatusCode::SWITCHING_PROTOCOLS => Progress::UPGRADED,
            _ if is_safe => Progress::REPEATABLE,
            _ => Progress::ANSWERING,
        });
        response
    }
}

type Http<S> = http1::UpgradeableConnection<TokioIo<SharedStream>, S>;

/// Waits until a connection ends by itself. `None` if it is closed: its client stalls, a drain does
/// not wait for it, or its download gives way.
async fn until_ended<S>(
    mut connection: Pin<&mut Http<S>>,
    client: &Client,
    Shared {
        tasks,
        leave_within,
        ..
    }: &Shared,
) -> Option<hyper::Result<()>>
where
    S: HttpService<Incoming, ResBody = Body>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    // A connection waits for one step of a drain at a time: each wait is a place in a list that all connections share.
    let mut step = pin!(tasks.drained_for(LAST_REQUEST));
    let (mut leaving, mut cutting) = (false, false);
    let mut stalled = pin!(stalled(&client.writer));
    loop {
        select! {
            ended = connection.as_mut() => return Some(ended),
            () = step.as_mut(), if !cutting => {
                let ends = if leaving { Progress::REPEATABLE } else { Progress::NO_REQUEST };
                if client.progress.is(ends) {
                    return None;
                }
                cutting = leaving;
                if !leaving {
                    leaving = true;
                    connection.as_mut().graceful_shutdown();
                    step.set(tasks.drained_for(LAST_REQUEST.max(*leave_within)));
                }
            }
            () = stalled.as_mut() => return None,
            () = client.gives_way.0.notified() => {
                // If it ended meanwhile, a request that changes something is not cut for it.
                if client.progress.is(Progress::REPEATABLE) {
                    return None;
                }
            }
            () = tasks.abandoned(), if leaving => return None,
        }
    }
}

/// Whether a request changes nothing, so that its client may repeat it. A header may replace the method.
fn is_safe(request: &Request<Body>) -> bool {
    request.method().is_safe() && !request.headers().contains_key(METHOD_OVERRIDE)
}

/// Checks what holds for requests to any route (RFC 9110 and 9112).
#[expect(clippy::result_large_err, reason = "a response either way")]
fn checked(request: &mut Request<Body>) -> Result<(), Response<Body>> {
    if let Err(text) = host::settle(request) {
        let refused = refused(ErrorCode::BadRequest, text);
        return Err(([(header::CONNECTION, "close")], refused).into_response());
    }
    let path = request.uri().path_and_query();
    if path.is_some_and(|path| path.as_str().len() > TARGET_BYTES_MAX) {
        let text = format!("a path has at most {TARGET_BYTES_MAX} bytes");
        let status = StatusCode::URI_TOO_LONG;
        return Err(refused_with(status, ErrorCode::TooLarge, text));
    }
    if !METHODS.contains(request.method()) {
        let text = "no route has such a method: see /openapi.json".to_owned();
        let status = StatusCode::NOT_IMPLEMENTED;
        return Err(refused_with(status, ErrorCode::BadRequest, text));
    }
    Ok(())
}

/// Finds out the address of the client, from the PROXY header if there must be one, and counts the connection for it.
/// `None` if the connection was closed instead.
async fn identify(
    stream: &mut TcpStream,
    socket: IpAddr,
    mut place: Place,
) -> Option<(Peer, Place)> {
    let mut peer = Peer {
        socket,
        address: socket,
    };
    if !place.admission().proxy_protocol() {
        return Some((peer, place));
    }
    match timeout(PROXY_TIMEOUT, proxied(stream)).await {
        Ok(Ok(source)) => peer.address = source.unwrap_or(socket),
        failed => {
            let reason = failed.map_or_else(|late| late.to_string(), |r| format!("{r:?}"));
            crate::seldom::seldom!(WARN, "closed a connection without a PROXY header", peer = %socket, reason);
            return None;
        }
    }
    if !place.admission().is_trusted_proxy(peer.address)
        && let Err(full) = place.assign(peer.address)
    {
        full.count();
        refuse(stream, full).await;
        return None;
    }
    Some((peer, place))
}

/// Returns when the client took less than [`RESPONSE_PROGRESS`] of a response in [`RESPONSE_TIMEOUT`].
async fn stalled(writer: &FrameWriter) {
    let mut before: Option<WriteProgress> = None;
    loop {
        sleep(RESPONSE_TIMEOUT - RESPONSE_TRIED).await;
        if before.is_some() {
            writer.try_soon();
            // So that the connection, which is part of this task, is polled and writes.
            yield_now().await;
        }
        sleep(RESPONSE_TRIED).await;
        let now = writer.unflushed();
        if let (Some(before), Some(now)) = (before, now)
            && now.flushes == before.flushes
            && now.bytes.wrapping_sub(before.bytes) < RESPONSE_PROGRESS
        {
            return;
        }
        before = now;
    }
}

/// Reads a PROXY protocol header and nothing after it. Returns the client's address, or `None` if the connection is the
/// proxy's own.
async fn proxied(stream: &mut TcpStream) -> io::Result<Option<IpAddr>> {
    let wrong = |text: &'static str| io::Error::new(io::ErrorKind::InvalidData, text);
    let mut head = [0; address::PROXY_HEAD_BYTES];
    stream.read_exact(&mut head).await?;
    let rest = address::proxy_rest(&head).ok_or_else(|| wrong("no PROXY header of version 2"))?;
    let mut rest = vec![0; rest];
    stream.read_exact(&mut rest).await?;
    address::proxy_source(&head, &rest).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_another_method_replaces_is_not_repeated() {
        let request = |method: Method| Request::builder().method(method);
        for (method, safe) in [
            (Method::GET, true),
            (Method::HEAD, true),
            (Method::POST, false),
        ] {
            assert_eq!(is_safe(&request(method).body(Body::empty()).unwrap()), safe);
        }
        let deletes = request(Method::GET).header(METHOD_OVERRIDE, "DELETE");
        assert!(!is_safe(&deletes.body(Body::empty()).unwrap()));
    }
}
