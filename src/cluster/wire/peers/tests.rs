use std::net::SocketAddr;

use bytes::BufMut as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_tungstenite::client_async;

use super::*;
use crate::{
    cluster::wire::network::WebSockets,
    model::{
        UserId,
        limits::{PEER_UNPROVEN_FRAME_BYTES_MAX, PEERS_UNPROVEN_MAX},
    },
};

const SECRET: &str = "a secret that all gateways know";
const PATIENCE: Duration = Duration::from_secs(60);

/// Passes on what peers announce.
struct Receiver(mpsc::Sender<usize>);

impl Receive for Receiver {
    fn receive(&self, _: GatewayId, message: PeerMessage) -> Option<Asked> {
        if let PeerMessage::Interests { topics, .. } = message {
            self.0.try_send(topics.len()).unwrap();
        }
        None
    }
}

struct Running {
    peers: Arc<Peers>,
    address: SocketAddr,
    received: mpsc::Receiver<usize>,
    _receiver: Arc<Receiver>,
    tasks: Tasks,
}

async fn running(me: u128, secret: &str) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (tasks, network) = (Tasks::default(), Arc::new(WebSockets::new(listener)));
    let me = GatewayId(uuid::Uuid::from_u128(me));
    let peers = Peers::new(me, secret, network, RankClock::default(), tasks.clone());
    let (tell, received) = mpsc::channel(8);
    let receiver = Arc::new(Receiver(tell));
    let weak: Weak<Receiver> = Arc::downgrade(&receiver);
    peers.start(weak);
    Running {
        peers,
        address,
        received,
        _receiver: receiver,
        tasks,
    }
}

impl Running {
    fn knows(&self, other: &Self) {
        let addresses = BTreeMap::from([(other.peers.me, other.address.to_string())]);
        self.peers.know(&[other.peers.me], &addresses);
    }

    fn announces(&self, other: &Self, count: usize) {
        let user = |n| UserId::new(&format!("{n:0>60}")).unwrap();
        let topics = (0..count).map(|n| Interest {
            topic: Topic::User(user(n)),
            passed: None,
            away: false,
        });
        self.peers.announce(other.peers.me, 1, topics.collect());
    }
}

/// A connection to the peer port by someone who does not know the secret.
async fn stranger(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).await.unwrap();
    let url = format!("ws://{address}/peer");
    let (socket, _) = client_async(url, stream).await.unwrap();
    socket.into_inner()
}

/// Waits until the other side closes. Returns false if it has not.
async fn closes(stream: &mut TcpStream, within: Duration) -> bool {
    let mut rest = [0; 1024];
    let closed = async { while stream.read(&mut rest).await.is_ok_and(|count| count > 0) {} };
    timeout(within, closed).await.is_ok()
}

#[tokio::test]
async fn a_peer_that_proved_the_secret_may_send_long_frames_both_ways() {
    let (mut first, mut second) = (running(1, SECRET).await, running(2, SECRET).await);
    first.knows(&second);
    second.knows(&first);
    first.announces(&second, 700);
    second.announces(&first, 900);
    let got = timeout(PATIENCE, second.received.recv()).await.unwrap();
    assert_eq!(got, Some(700));
    let got = timeout(PATIENCE, first.received.recv()).await.unwrap();
    assert_eq!(got, Some(900));
    for running in [first, second] {
        running.tasks.drain();
    }
}

#[tokio::test]
async fn a_stranger_may_send_little_and_stay_briefly() {
    let mut first = running(1, SECRET).await;
    // A frame that is too long is refused when it is announced, long before the time for a proof is over.
    let mut hasty = stranger(first.address).await;
    let mut frame = vec![0x82, 0xff];
    frame.put_u64(PEER_UNPROVEN_FRAME_BYTES_MAX as u64 + 1);
    frame.put_slice(b"maskxxx");
    hasty.write_all(&frame).await.unwrap();
    assert!(closes(&mut hasty, HANDSHAKE_TIMEOUT / 2).await);
    // One more than there may be closes the oldest, and a gateway gets in.
    let mut oldest = stranger(first.address).await;
    let mut others = Vec::new();
    for _ in 0..PEERS_UNPROVEN_MAX {
        others.push(stranger(first.address).await);
    }
    assert!(closes(&mut oldest, HANDSHAKE_TIMEOUT / 2).await);
    let second = running(2, SECRET).await;
    first.knows(&second);
    second.knows(&first);
    second.announces(&first, 1);
    let got = timeout(PATIENCE, first.received.recv()).await.unwrap();
    assert_eq!(got, Some(1));
    for other in &mut others {
        assert!(closes(other, PATIENCE).await);
    }
    for running in [first, second] {
        running.tasks.drain();
    }
}

#[tokio::test]
async fn a_peer_with_another_secret_gets_nothing() {
    let (mut first, second) = (running(1, SECRET).await, running(2, "another secret").await);
    first.knows(&second);
    second.knows(&first);
    second.announces(&first, 1);
    let got = timeout(Duration::from_millis(500), first.received.recv()).await;
    assert!(got.is_err());
    assert!(!first.peers.are_connected(&[second.peers.me]));
    for running in [first, second] {
        running.tasks.drain();
    }
}
