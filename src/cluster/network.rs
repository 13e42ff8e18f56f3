//! The connections between peers, which carry frames in both directions: WebSocket over TCP, or memory in the simulation.

use std::{io, pin::Pin, time::Duration};

use arc_swap::ArcSwapOption;
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{Sink, SinkExt, Stream, StreamExt, future};
use tokio::{
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_tungstenite::{
    WebSocketStream, accept_async_with_config, client_async_with_config,
    tungstenite::{Error, Message, protocol::WebSocketConfig},
};

/// The bytes of one frame between gateways, which is a batch or one longer message.
pub(super) const FRAME_BYTES_MAX: usize = 16 << 20;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

pub type Frames = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;
pub type ToPeer = Pin<Box<dyn Sink<Bytes, Error = io::Error> + Send>>;

/// A connection. Its frames arrive in order until it breaks.
pub struct Connection {
    pub send: ToPeer,
    pub receive: Frames,
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

fn config() -> WebSocketConfig {
    WebSocketConfig::default()
        .max_message_size(Some(FRAME_BYTES_MAX))
        .max_frame_size(Some(FRAME_BYTES_MAX))
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
            let (socket, _) = client_async_with_config(url, stream, Some(config()))
                .await
                .map_err(broken)?;
            Ok(connection(socket))
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
            let accepted = accept_async_with_config(stream, Some(config()));
            let socket = timeout(HANDSHAKE_TIMEOUT, accepted)
                .await
                .map_err(|_| late())?;
            Ok(connection(socket.map_err(broken)?))
        }))
    }

    fn close(&self) {
        self.listener.store(None);
    }
}

fn connection(socket: WebSocketStream<TcpStream>) -> Connection {
    let (send, receive) = socket.split();
    let send = send
        .sink_map_err(broken)
        .with(|bytes: Bytes| future::ready(Ok::<_, io::Error>(Message::Binary(bytes))));
    let receive = receive.filter_map(|message| {
        future::ready(match message {
            Ok(Message::Binary(bytes)) => Some(Ok(bytes)),
            Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_)) => None,
            Ok(Message::Close(_)) => Some(Err(io::ErrorKind::ConnectionAborted.into())),
            Ok(Message::Text(_)) => Some(Err(io::ErrorKind::InvalidData.into())),
            Err(error) => Some(Err(broken(error))),
        })
    });
    Connection {
        send: Box::pin(send),
        receive: Box::pin(receive),
    }
}

fn broken(error: Error) -> io::Error {
    match error {
        Error::Io(error) => error,
        other => io::Error::other(other),
    }
}
