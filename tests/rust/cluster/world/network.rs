//! The network between the gateways.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use chat_gateway::cluster::{Connection, Network};
use futures_util::{FutureExt, future::BoxFuture, sink, stream};
use rand::{RngExt, rngs::StdRng};
use tokio::{
    sync::{Notify, mpsc},
    time::{Instant, sleep, sleep_until, timeout},
};

/// Frames in flight in one direction. A connection with more breaks.
pub(super) const FRAMES_MAX: usize = 100_000;
/// Bytes of one frame, as in `network.rs`. A connection breaks at a longer one.
const FRAME_BYTES_MAX: usize = 16 << 20;

/// The network between the gateways, in memory.
#[derive(Default)]
pub(crate) struct Wire {
    pub(super) listeners: BTreeMap<String, mpsc::Sender<Connection>>,
    /// Pairs of addresses between which nothing arrives.
    pub(crate) cut: BTreeSet<(String, String)>,
    /// Notified when a cut ends.
    pub(crate) healed: Arc<Notify>,
    pub(super) random: Option<StdRng>,
    /// Number of connections that broke at a frame that was too long.
    pub(crate) too_long: usize,
}

/// A connection between two gateways.
#[derive(Clone)]
struct Line {
    wire: Arc<Mutex<Wire>>,
    from: String,
    to: String,
}

impl Line {
    fn is_cut(&self) -> bool {
        let wire = self.wire.lock().unwrap();
        wire.cut.contains(&(self.from.clone(), self.to.clone()))
            || wire.cut.contains(&(self.to.clone(), self.from.clone()))
    }

    /// Waits until the two gateways are not cut off from each other.
    async fn whole(&self) {
        loop {
            let healed = self.wire.lock().unwrap().healed.clone();
            let healed = healed.notified();
            if !self.is_cut() {
                return;
            }
            healed.await;
        }
    }

    fn delay(&self) -> Duration {
        let mut wire = self.wire.lock().unwrap();
        let random = wire.random.as_mut().unwrap();
        Duration::from_millis([0, 1, 1, 3, 3, 10, 50, 300][random.random_range(0..8)])
    }

    /// One direction of the connection. It keeps the order and delays each frame.
    fn pipe(
        self,
    ) -> (
        mpsc::Sender<(Instant, Bytes)>,
        chat_gateway::cluster::Frames,
    ) {
        let (send, receive) = mpsc::channel::<(Instant, Bytes)>(FRAMES_MAX);
        let frames = stream::unfold((receive, self), |(mut receive, line)| async move {
            let (at, bytes) = receive.recv().await?;
            sleep_until(at).await;
            line.whole().await;
            if bytes.len() > FRAME_BYTES_MAX {
                line.wire.lock().unwrap().too_long += 1;
                return Some((Err(io::ErrorKind::InvalidData.into()), (receive, line)));
            }
            Some((Ok(bytes), (receive, line)))
        });
        (send, Box::pin(frames))
    }

    /// The two ends of the connection.
    fn ends(self) -> (Connection, Connection) {
        let back = Self {
            from: self.to.clone(),
            to: self.from.clone(),
            wire: self.wire.clone(),
        };
        let (to_there, there) = self.clone().pipe();
        let (to_here, here) = back.clone().pipe();
        let end = |line: Self, send, receive| Connection {
            send: Box::pin(sink::unfold(
                (send, Instant::now(), line),
                |(send, last, line): (mpsc::Sender<(Instant, Bytes)>, Instant, Self), bytes| async move {
                    let at = last.max(Instant::now() + line.delay());
                    send.try_send((at, bytes))
                        .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
                    Ok((send, at, line))
                },
            )),
            receive,
            proven: Arc::default(),
        };
        (end(self, to_there, here), end(back, to_here, there))
    }
}

/// The network as one gateway sees it.
pub(super) struct Port {
    pub(super) wire: Arc<Mutex<Wire>>,
    pub(super) address: String,
    pub(super) accepted: tokio::sync::Mutex<mpsc::Receiver<Connection>>,
}

#[async_trait]
impl Network for Port {
    async fn connect(&self, address: &str) -> io::Result<Connection> {
        let line = Line {
            wire: self.wire.clone(),
            from: self.address.clone(),
            to: address.to_owned(),
        };
        sleep(line.delay()).await;
        timeout(Duration::from_secs(2), line.whole()).await?;
        let listener = self.wire.lock().unwrap().listeners.get(address).cloned();
        let listener = listener.ok_or(io::ErrorKind::ConnectionRefused)?;
        let (here, there) = line.ends();
        listener
            .try_send(there)
            .map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused))?;
        Ok(here)
    }

    async fn accept(&self) -> io::Result<BoxFuture<'static, io::Result<Connection>>> {
        match self.accepted.lock().await.recv().await {
            Some(connection) => Ok(async move { Ok(connection) }.boxed()),
            None => std::future::pending().await,
        }
    }

    fn close(&self) {}
}
