//! Accepts connections and speaks HTTP/1.1 on them, until the gateway drains.

use std::{convert::Infallible, io, net::SocketAddr, pin::pin, time::Duration};

use axum::{Router, body::Body, extract::ConnectInfo, serve::Listener};
use futures_util::FutureExt as _;
use hyper::{Request, body::Incoming, server::conn::http1};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    select,
    time::sleep,
};
use tower_service::Service as _;

use crate::{fanout::Wire, tasks::Tasks};

/// A client that has not sent its request's head by then is closed.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// A request that is on its way when the gateway drains is answered if it comes by then; an idle connection is
/// closed.
const LAST_REQUEST: Duration = Duration::from_millis(500);
/// Bytes of a request's head; there is nothing long in ours.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Connections that the kernel holds until they are accepted.
const BACKLOG: u32 = 4096;

/// Listens on `address`.
///
/// # Errors
/// When the address cannot be had.
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

/// Serves `routes` on `listener` until the gateway drains. Connections end by themselves: a WebSocket
/// by its session, a request with its response.
pub async fn serve(mut listener: TcpListener, routes: Router, tasks: Tasks) {
    let begin = |(stream, address)| {
        tasks.spawn(connection(stream, address, routes.clone(), tasks.clone()));
    };
    loop {
        select! {
            // axum's, which waits when there are no more file descriptors.
            accepted = Listener::accept(&mut listener) => begin(accepted),
            () = tasks.draining() => break,
        }
    }
    // Who connected before that gets an answer, and not a reset.
    for _ in 0..BACKLOG {
        let Some(accepted) = Listener::accept(&mut listener).now_or_never() else {
            return;
        };
        begin(accepted);
    }
}

async fn connection(stream: TcpStream, address: SocketAddr, routes: Router, tasks: Tasks) {
    // Small frames leave at once: Nagle's algorithm would hold them back.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%address, %error, "nodelay was refused");
    }
    let wire = Wire::new(stream);
    let line = wire.line().clone();
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(ConnectInfo(address));
        request.extensions_mut().insert(line.clone());
        let mut routes = routes.clone();
        async move { Ok::<_, Infallible>(routes.call(request).await.unwrap_or_else(|e| match e {})) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(wire), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let drained = async {
        tasks.draining().await;
        sleep(LAST_REQUEST).await;
    };
    let ended = select! {
        ended = connection.as_mut() => ended,
        () = drained => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%address, %error, "a connection ended badly");
    }
}
