//! The connections between peers, which carry frames in both directions: WebSocket over TCP, or memory in the simulation.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use arc_swap::ArcSwapOption;
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{FutureExt, Sink, Stream, StreamExt, future};
use tokio::{
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_tungstenite::{
    WebSocketStream, accept_async_with_config, client_async_with_config,
    tungstenite::{
        Error, Message,
        protocol::{Role, WebSocketConfig},
    },
};

use crate::model::limits::PEER_UNPROVEN_FRAME_BYTES_MAX;

/// The bytes of one frame between gateways, which is a batch or one longer message.
pub(super) const FRAME_BYTES_MAX: usize = 16 << 20;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

pub type Frames = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;
pub type ToPeer = Pin<Box<dyn Sink<Bytes, Error = io::Error> + Send>>;

/// A connection. Its frames arrive in order until it breaks.
pub struct Connection {
    pub send: ToPeer,
    pub receive: Frames,
    /// Whether the peer has proved that it knows the secret. Until then its frames have at most
    /// [`PEER_UNPROVEN_FRAME_BYTES_MAX`].
    pub proven: Arc<AtomicBool>,
}

#[async_trait]
pub trait Network: Send + Sync + 'static {
    async fn connect(&self, address: &str) -> io::Result<Connection>;

    /// Returns a future that completes the next connection that a peer made.
    async fn accept(&self) -> io::Result<future::BoxFuture<'static, io::Result<Connection>>>;

    /// Stops accepting, and frees the port.
    fn close(&self);
}

/// WebSocket over TCP, on a port of its own.
pub struct WebSockets {
    listener: ArcSwapOption<TcpListener>,
}

impl WebSockets {
    #[must_use]
    pub fn new(listener: TcpListener) -> Self {
        Self {
            listener: ArcSwapOption::from_pointee(listener),
        }
    }
}

fn config(frame_bytes: usize) -> WebSocketConfig {
    WebSocketConfig::default()
        .max_message_size(Some(frame_bytes))
        .max_frame_size(Some(frame_bytes))
}

/// A WebSocket whose limit rises when the peer has proved that it knows the secret.
struct Socket {
    /// `None` only while the limit rises.
    inner: Option<WebSocketStream<TcpStream>>,
    role: Role,
    proven: Arc<AtomicBool>,
    is_limited: bool,
}

impl Socket {
    fn inner(&mut self) -> io::Result<Pin<&mut WebSocketStream<TcpStream>>> {
        let inner = self.inner.as_mut().map(Pin::new);
        inner.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Raises the limit once the peer is proven. The library takes a new limit only with a new WebSocket. Nothing is lost,
    /// because after a proof the peer waits for an answer before it sends more.
    fn raise_limit(&mut self) {
        if !self.is_limited || !self.proven.load(Ordering::Relaxed) {
            return;
        }
        self.is_limited = false;
        if let Some(inner) = self.inner.take() {
            let config = Some(config(FRAME_BYTES_MAX));
            let raised = WebSocketStream::from_raw_socket(inner.into_inner(), self.role, config);
            self.inner = raised.now_or_never();
        }
    }
}

impl Stream for Socket {
    type Item = io::Result<Message>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.raise_limit();
        let next = self.inner()?.poll_next(context);
        next.map(|next| next.map(|message| message.map_err(broken)))
    }
}

impl Sink<Bytes> for Socket {
    type Error = io::Error;

    fn poll_ready(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner()?.poll_ready(context).map_err(broken)
    }

    fn start_send(mut self: Pin<&mut Self>, bytes: Bytes) -> io::Result<()> {
        let message = Message::Binary(bytes);
        self.inner()?.start_send(message).map_err(broken)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner()?.poll_flush(context).map_err(broken)
    }

    fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner()?.poll_close(context).map_err(broken)
    }
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the peer did not answer in time")
}

#[async_trait]
impl Network for WebSockets {
    async fn connect(&self, address: &str) -> io::Result<Connection> {
        let connect = async {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let url = format!("ws://{address}/peer");
            let limited = Some(config(PEER_UNPROVEN_FRAME_BYTES_MAX));
            let (socket, _) = client_async_with_config(url, stream, limited)
                .await
                .map_err(broken)?;
            Ok(connection(socket, Role::Client))
        };
        timeout(HANDSHAKE_TIMEOUT, connect)
            .await
            .unwrap_or_else(|_| Err(late()))
    }

    async fn accept(&self) -> io::Result<future::BoxFuture<'static, io::Result<Connection>>> {
        let listener = self.listener.load_full();
        let listener = listener.ok_or(io::ErrorKind::NotConnected)?;
        let (stream, _) = listener.accept().await?;
        Ok(Box::pin(async move {
            stream.set_nodelay(true)?;
            let limited = Some(config(PEER_UNPROVEN_FRAME_BYTES_MAX));
            let accepted = accept_async_with_config(stream, limited);
            let socket = timeout(HANDSHAKE_TIMEOUT, accepted)
                .await
                .map_err(|_| late())?;
            Ok(connection(socket.map_err(broken)?, Role::Server))
        }))
    }

    fn close(&self) {
        self.listener.store(None);
    }
}

fn connection(socket: WebSocketStream<TcpStream>, role: Role) -> Connection {
    let proven = Arc::new(AtomicBool::new(false));
    let socket = Socket {
        inner: Some(socket),
        role,
        proven: proven.clone(),
        is_limited: true,
    };
    let (send, receive) = socket.split();
    let receive = receive.filter_map(|message| {
        future::ready(match message {
            Ok(Message::Binary(bytes)) => Some(Ok(bytes)),
            Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_)) => None,
            Ok(Message::Close(_)) => Some(Err(io::ErrorKind::ConnectionAborted.into())),
            Ok(Message::Text(_)) => Some(Err(io::ErrorKind::InvalidData.into())),
            Err(error) => Some(Err(error)),
        })
    });
    Connection {
        send: Box::pin(send),
        receive: Box::pin(receive),
        proven,
    }
}

fn broken(error: Error) -> io::Error {
    match error {
        Error::Io(error) => error,
        other => io::Error::other(other),
    }
}
