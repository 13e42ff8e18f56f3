//! The connections to the other gateways. Of two gateways, the one that started later connects. Both prove that they know
//! the cluster's secret.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, OnceLock, Weak, atomic::Ordering},
    time::Duration,
};

use aws_lc_rs::hmac;
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt, future};
use metrics::{counter, gauge};
use tokio::{
    select,
    sync::mpsc,
    time::{Instant, sleep, timeout},
};

use super::{
    answers::{Asked, answer},
    link::{ASKS_MAX, CallError, Link, Stale, Token},
    message::{
        Challenge, Hello, Interest, Numbered, PROTOCOL, PeerMessage, Response, ResumePoint,
        Unknown, Welcome, decode, decode_batch, encode,
    },
    network::{Connection, Network},
    question::Question,
    unproven::Unproven,
};
use crate::{
    chat::{Error, RankClock},
    model::{Epoch, GatewayId, Topic},
    tasks::{Tasks, lock},
};

/// The time without any frame from a peer after which the connection is made anew.
const SILENT_MAX: Duration = Duration::from_secs(3);
/// The interval between frames when there is nothing to send.
const KEEP_ALIVE_EVERY: Duration = Duration::from_millis(500);
/// The pause between attempts to connect.
const RECONNECT_AFTER: Duration = Duration::from_millis(100);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// The time in which a peer that connected must prove that it knows the secret.
const PROVEN_WITHIN: Duration = Duration::from_secs(4);
/// The time for which the link to a gateway outside the ring is kept.
const STRANGER_KEPT: Duration = Duration::from_secs(10);

/// The time for which messages of a peer are taken after it was removed or left.
const LAST_WORD_WITHIN: Duration = Duration::from_secs(3);

/// Receives the messages of peers, one after the other. It must not wait.
pub(crate) trait Receive: Send + Sync {
    fn receive(&self, from: GatewayId, message: PeerMessage) -> Option<Asked>;
}

/// The links to all peers.
pub(crate) struct Peers {
    me: GatewayId,
    key: hmac::Key,
    network: Arc<dyn Network>,
    ranks: RankClock,
    links: Mutex<BTreeMap<GatewayId, Known>>,
    /// Weak, because the receiver refers to the peers.
    receive: OnceLock<Weak<dyn Receive>>,
    tasks: Tasks,
    /// Connections whose peers have not proved that they know the secret.
    unproven: Unproven,
}

/// A known peer.
struct Known {
    link: Arc<Link>,
    /// The queue of requests that are being answered.
    answering: mpsc::Sender<Asked>,
    dialled: bool,
    seen_at: Instant,
}

impl Peers {
    pub(crate) fn new(
        me: GatewayId,
        secret: &str,
        network: Arc<dyn Network>,
        ranks: RankClock,
        tasks: Tasks,
    ) -> Arc<Self> {
        Arc::new(Self {
            me,
            key: hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes()),
            network,
            ranks,
            links: Mutex::default(),
            receive: OnceLock::new(),
            tasks,
            unproven: Unproven::default(),
        })
    }

    /// Begins to accept connections.
    pub(crate) fn start(self: &Arc<Self>, receive: Weak<dyn Receive>) {
        drop(self.receive.set(receive));
        let peers = self.clone();
        self.tasks.spawn(async move {
            peers.tasks.until_drained(peers.listen()).await;
            peers.close();
        });
    }

    async fn listen(self: &Arc<Self>) {
        loop {
            match self.network.accept().await {
                Ok(accepted) => {
                    let accepting = self.clone();
                    self.tasks.spawn_until_drained(async move {
                        if let Err(error) = accepting.accept(accepted).await {
                            tracing::debug!(%error, "a peer's connection ended");
                        }
                    });
                }
                Err(error) => {
                    crate::seldom::seldom!(WARN, "no peer could be accepted", %error);
                    sleep(RECONNECT_AFTER).await;
                }
            }
        }
    }

    /// Frees the port and everything that waits for peers, because some of it refers to this.
    fn close(&self) {
        self.network.close();
        let links: Vec<_> = self.links().values().map(|k| k.link.clone()).collect();
        for link in links {
            link.close();
        }
    }

    /// Keeps links to these gateways, at their addresses. The links to others are closed after a while.
    pub(crate) fn know(
        self: &Arc<Self>,
        concerned: &[GatewayId],
        addresses: &BTreeMap<GatewayId, String>,
    ) {
        for &peer in concerned {
            let link = self.link(peer);
            let mut links = self.links();
            let Some(known) = links.get_mut(&peer) else {
                continue;
            };
            known.seen_at = Instant::now();
            let address = addresses.get(&peer).filter(|address| !address.is_empty());
            if let Some(address) = address
                && peer < self.me
                && !known.dialled
            {
                known.dialled = true;
                drop(links);
                let (peers, address) = (self.clone(), address.clone());
                self.tasks
                    .spawn_until_drained(async move { peers.dial(link, &address).await });
            }
        }
        let strangers: Vec<Arc<Link>> = {
            let mut links = self.links();
            let old: Vec<GatewayId> = links
                .iter()
                .filter(|(_, known)| known.seen_at.elapsed() > STRANGER_KEPT)
                .map(|(&peer, _)| peer)
                .collect();
            old.iter()
                .filter_map(|peer| links.remove(peer))
                .map(|known| known.link)
                .collect()
        };
        for link in strangers {
            link.close();
        }
        self.measure();
    }

    fn measure(&self) {
        let links: Vec<Arc<Link>> = self.links().values().map(|k| k.link.clone()).collect();
        let connected = links.iter().filter(|link| link.is_connected()).count();
        let (messages, bytes) = links
            .iter()
            .map(|link| link.queued())
            .fold((0, 0), |sum, queued| (sum.0 + queued.0, sum.1 + queued.1));
        gauge!("chat_peer_links", "state" => "up").set(connected as f64);
        gauge!("chat_peer_links", "state" => "down").set((links.len() - connected) as f64);
        gauge!("chat_peer_queued_messages").set(messages as f64);
        gauge!("chat_peer_queued_bytes").set(bytes as f64);
    }

    fn link(self: &Arc<Self>, peer: GatewayId) -> Arc<Link> {
        let mut links = self.links();
        if let Some(known) = links.get(&peer) {
            return known.link.clone();
        }
        let link = Arc::new(Link::new(peer).telling(self.ranks.clone()));
        let (answering, work) = mpsc::channel(ASKS_MAX);
        self.tasks.spawn_until_drained(answer(link.clone(), work));
        links.insert(
            peer,
            Known {
                link: link.clone(),
                answering,
                dialled: false,
                seen_at: Instant::now(),
            },
        );
        link
    }

    async fn dial(&self, link: Arc<Link>, address: &str) {
        while !link.is_closed() && !link.is_given_up() {
            let connected = async {
                let connection = self.network.connect(address).await?;
                self.connect(&link, connection).await
            };
            if let Err(error) = connected.await {
                tracing::debug!(peer = %link.peer, address, %error, "the link is down");
            }
            sleep(RECONNECT_AFTER).await;
        }
    }

    /// Returns a proof of the secret. It covers both nonces, so that it is valid in one handshake only, and both names, so
    /// that it cannot be sent back.
    fn proof(
        &self,
        from: GatewayId,
        to: GatewayId,
        hello: &Hello,
        challenge: &[u8; 32],
    ) -> [u8; 32] {
        let mut text = Vec::new();
        text.extend_from_slice(from.0.as_bytes());
        text.extend_from_slice(to.0.as_bytes());
        text.extend_from_slice(&hello.nonce);
        text.extend_from_slice(challenge);
        let tag = hmac::sign(&self.key, &text);
        let mut proof = [0; 32];
        proof.copy_from_slice(tag.as_ref());
        proof
    }

    fn check(&self, proof: &[u8; 32], expected: &[u8; 32]) -> io::Result<()> {
        match aws_lc_rs::constant_time::verify_slices_are_equal(proof, expected) {
            Ok(()) => Ok(()),
            Err(_) => {
                counter!("chat_peer_refused_total").increment(1);
                crate::seldom::seldom!(WARN, "a peer does not know the cluster's secret");
                Err(io::ErrorKind::PermissionDenied.into())
            }
        }
    }

    async fn connect(&self, link: &Arc<Link>, mut connection: Connection) -> io::Result<()> {
        let hello = Hello {
            protocol: PROTOCOL,
            from: self.me,
            to: link.peer,
            nonce: rand::random(),
        };
        connection.send.send(encode(&hello)).await?;
        let challenge: Challenge = next(&mut connection).await?;
        let expected = self.proof(link.peer, self.me, &hello, &challenge.nonce);
        self.check(&challenge.proof, &expected)?;
        connection.proven.store(true, Ordering::Relaxed);
        let _in_use = link.connection.lock().await;
        let response = Response {
            proof: self.proof(self.me, link.peer, &hello, &challenge.nonce),
            resume_point: link.resume_point(),
        };
        connection.send.send(encode(&response)).await?;
        let welcome: Welcome = next(&mut connection).await?;
        self.use_connection(link, connection, welcome.resume_point)
            .await
    }

    async fn accept(
        self: &Arc<Self>,
        accepted: future::BoxFuture<'static, io::Result<Connection>>,
    ) -> io::Result<()> {
        let stranger = self.unproven.admit();
        let (hello, response, mut connection) = select! {
            proven = timeout(PROVEN_WITHIN, self.prove(accepted)) => proven??,
            () = stranger.evicted() => return Err(io::ErrorKind::ConnectionRefused.into()),
        };
        drop(stranger);
        connection.proven.store(true, Ordering::Relaxed);
        let link = self.link(hello.from);
        if link.is_closed() || link.is_given_up() {
            // The peer was removed, or will be.
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let _in_use = timeout(HANDSHAKE_TIMEOUT, link.connection.lock())
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::AddrInUse))?;
        let resume_point = link.resume_point();
        connection
            .send
            .send(encode(&Welcome { resume_point }))
            .await?;
        self.use_connection(&link, connection, response.resume_point)
            .await
    }

    /// Lets the peer that connected prove that it knows the secret.
    async fn prove(
        &self,
        accepted: future::BoxFuture<'static, io::Result<Connection>>,
    ) -> io::Result<(Hello, Response, Connection)> {
        let mut connection = accepted.await?;
        let hello: Hello = next(&mut connection).await?;
        if hello.protocol != PROTOCOL || hello.to != self.me || hello.from == self.me {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let nonce: [u8; 32] = rand::random();
        let proof = self.proof(self.me, hello.from, &hello, &nonce);
        connection
            .send
            .send(encode(&Challenge { nonce, proof }))
            .await?;
        let response: Response = next(&mut connection).await?;
        let expected = self.proof(hello.from, self.me, &hello, &nonce);
        self.check(&response.proof, &expected)?;
        Ok((hello, response, connection))
    }

    async fn use_connection(
        &self,
        link: &Arc<Link>,
        mut connection: Connection,
        theirs: ResumePoint,
    ) -> io::Result<()> {
        if let Err(stale) = link.connected(theirs) {
            tracing::info!(peer = %link.peer, ?stale, "a link begins again");
            if stale == Stale::Mine {
                self.links()
                    .retain(|_, known| !Arc::ptr_eq(&known.link, link));
                link.close();
            }
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        tracing::info!(peer = %link.peer, "a link is up");
        counter!("chat_peer_connections_total").increment(1);
        let writing = async {
            loop {
                let frame = match link.next_batch(false) {
                    Some(frame) => frame,
                    None => {
                        let woken = timeout(KEEP_ALIVE_EVERY, link.wake.notified()).await;
                        match link.next_batch(woken.is_err()) {
                            Some(frame) => frame,
                            None => continue,
                        }
                    }
                };
                counter!("chat_peer_frames_sent_total").increment(1);
                counter!("chat_peer_bytes_sent_total").increment(frame.len() as u64);
                timeout(SILENT_MAX, connection.send.send(frame)).await??;
            }
        };
        let reading = async {
            loop {
                let frame = timeout(SILENT_MAX, connection.receive.next()).await?;
                let frame = frame.ok_or(io::ErrorKind::UnexpectedEof)??;
                self.received(link, &frame)?;
            }
        };
        // A gateway that leaves gracefully still announces that it acts under no older version.
        let closing = async {
            link.closed.cancelled().await;
            sleep(LAST_WORD_WITHIN).await;
        };
        let ended: io::Result<()> = select! {
           biased;
            ended = reading => ended,
            ended = writing => ended,
            () = closing => Err(io::ErrorKind::ConnectionAborted.into()),
            () = link.given_up.cancelled() => Err(io::ErrorKind::ConnectionAborted.into()),
        };
        link.disconnected();
        tracing::info!(peer = %link.peer, "a link is down");
        ended
    }

    fn received(&self, link: &Arc<Link>, frame: &Bytes) -> io::Result<()> {
        let invalid = |e| io::Error::new(io::ErrorKind::InvalidData, e);
        let (batch, messages) = decode_batch(frame).map_err(invalid)?;
        // Before the messages: what they make this gateway append is above what their sender knew.
        self.ranks.observe(batch.rank);
        link.acknowledge(batch.acknowledged);
        if messages.is_empty() {
            return Ok(());
        }
        let new = link
            .new_in(batch.first, messages)
            .ok_or(io::ErrorKind::InvalidData)?;
        let last = new.last().map(|(number, _)| *number);
        for (_, message) in new {
            let message = match message {
                Ok(message) => message,
                Err(unknown) => {
                    pass_over(link, unknown);
                    continue;
                }
            };
            // When a link closes, only these still count: a delivery will be acknowledged, so it must reach the sockets here.
            let last_word = matches!(
                message,
                PeerMessage::Adopted { .. } | PeerMessage::Deliver(_)
            );
            if link.is_closed() && !last_word {
                continue;
            }
            match message {
                PeerMessage::Answer { id, answer } => link.answered(id, answer),
                PeerMessage::AnswerPart { id, bytes, last } => {
                    link.answered_in_part(id, bytes, last)
                }
                message => {
                    let Some(receive) = self.receive.get().and_then(Weak::upgrade) else {
                        continue;
                    };
                    let Some(asked) = receive.receive(link.peer, message) else {
                        continue;
                    };
                    let answering = self.links().get(&link.peer).map(|k| k.answering.clone());
                    if let Some(answering) = answering {
                        asked.begin(link, &answering);
                    }
                }
            }
        }
        if let Some(last) = last {
            link.handled(last);
        }
        Ok(())
    }

    /// Queues a message for a peer. It is dropped with its token if the peer is gone.
    pub(crate) fn send(self: &Arc<Self>, to: GatewayId, bytes: Bytes, token: Option<Arc<Token>>) {
        self.link(to).send(bytes, token);
    }

    /// Queues interests of the sockets here, for a version.
    pub(crate) fn announce(self: &Arc<Self>, to: GatewayId, version: Epoch, topics: Vec<Interest>) {
        self.link(to).announce(version, topics);
    }

    /// Tells a peer that the last subscriber of a topic left.
    pub(crate) fn uninterested(self: &Arc<Self>, to: GatewayId, topic: &Topic) {
        self.link(to).uninterested(topic);
    }

    /// Queues an optional message, unless the queue is full.
    pub(crate) fn send_if_room(self: &Arc<Self>, to: GatewayId, bytes: Bytes) {
        self.link(to).send_if_room(bytes);
    }

    pub(crate) fn broadcast(self: &Arc<Self>, to: &[GatewayId], message: &PeerMessage) {
        let bytes = encode(message);
        for &peer in to.iter().filter(|&&peer| peer != self.me) {
            self.send(peer, bytes.clone(), None);
        }
    }

    /// Asks a peer. The answer may be that it refuses.
    pub(crate) fn ask<Q: Question>(
        self: &Arc<Self>,
        to: GatewayId,
        question: Q,
    ) -> impl Future<Output = Result<Result<Q::Answer, Error>, CallError>> + use<Q> {
        counter!("chat_peer_asks_total").increment(1);
        let asked = self.link(to).ask(question.into());
        async move {
            let answer = asked.await?;
            Ok(answer.and_then(|answer| Q::take(answer).ok_or(Error::Closed)))
        }
    }

    /// Whether no queue is full.
    pub(crate) fn have_room(&self) -> bool {
        !self.links().values().any(|known| known.link.is_full())
    }

    /// Whether the queue of this peer is not full.
    pub(crate) fn has_room(self: &Arc<Self>, peer: GatewayId) -> bool {
        !self.link(peer).is_full()
    }

    /// Closes the link to a gateway that is no longer a member, so that nothing waits for it.
    pub(crate) fn forget(&self, gone: GatewayId) {
        let link = self.links().get(&gone).map(|known| known.link.clone());
        if let Some(link) = link {
            link.close();
        }
    }

    /// Whether everything that was sent to these peers is acknowledged.
    pub(crate) fn are_idle(&self, peers: &[GatewayId]) -> bool {
        let links = self.links();
        let mut known = peers.iter().filter_map(|peer| links.get(peer));
        known.all(|known| known.link.is_idle())
    }

    pub(crate) fn are_connected(&self, peers: &[GatewayId]) -> bool {
        let links = self.links();
        peers.iter().filter(|&&p| p != self.me).all(|peer| {
            let known = links.get(peer);
            known.is_some_and(|known| known.link.is_connected())
        })
    }

    fn links(&self) -> MutexGuard<'_, BTreeMap<GatewayId, Known>> {
        lock(&self.links)
    }
}

/// Skips a message that is not understood, and answers it if it is a request. Its content is lost. A publication that was
/// not understood stays pending at its owner, and is sent again when this gateway is replaced.
fn pass_over(link: &Link, Unknown { error, id }: Unknown) {
    counter!("chat_peer_messages_unknown_total").increment(1);
    crate::seldom::seldom!(WARN, "a message of another version of the program is not understood", peer = %link.peer, %error);
    match id {
        Some(Numbered::Ask { id }) => {
            let answer = Err(Error::NOT_UPGRADED);
            link.send(encode(&PeerMessage::Answer { id, answer }), None);
        }
        Some(Numbered::Answer { id } | Numbered::AnswerPart { id }) => link.unanswered(id),
        None => {}
    }
}

async fn next<T: serde::de::DeserializeOwned>(connection: &mut Connection) -> io::Result<T> {
    let frame = timeout(HANDSHAKE_TIMEOUT, connection.receive.next()).await?;
    let frame = frame.ok_or(io::ErrorKind::UnexpectedEof)??;
    decode(&frame).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

#[cfg(test)]
mod tests;
