//! Checks that a session that panics is cleaned up for all other sessions.

use std::time::Duration;

use chat_gateway::{
    auth::Tokens,
    config::Config,
    model::UserId,
    mutation::{Mutation, break_rule},
    node::Node,
};
use futures_util::{SinkExt, StreamExt};
use metrics_exporter_prometheus::PrometheusBuilder;
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, tungstenite::Message};

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

const PATIENCE: Duration = Duration::from_secs(20);

/// Sends a request.
async fn ask(socket: &mut Socket, frame: Value) {
    let text = Message::Text(frame.to_string().into());
    socket.send(text).await.unwrap();
}

/// Waits for the next frame of this type. `None` if the connection ends first.
async fn next(socket: &mut Socket, kind: &str) -> Option<Value> {
    timeout(PATIENCE, async {
        while let Some(Ok(message)) = socket.next().await {
            if let Message::Text(text) = message {
                let frame: Value = serde_json::from_str(&text).unwrap();
                if frame["type"] == kind {
                    return Some(frame);
                }
            }
        }
        None
    })
    .await
    .unwrap()
}

/// Runs on one thread, because a rule is broken for one thread only.
#[tokio::test]
async fn a_session_that_panics_goes_offline_for_everyone() {
    let data = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.client.listen = ([127, 0, 0, 1], 0).into();
    config.internal.listen = ([127, 0, 0, 1], 0).into();
    config.store.embedded.path = data.path().into();
    config.auth.development = true;
    let tokens = Tokens::new(&config).unwrap();
    let metrics = PrometheusBuilder::new().build_recorder().handle();
    let node = Node::start(&config, metrics).await.unwrap();
    let url = format!("ws://{}/v1/ws", node.client_address);
    let connect = async |name: &str| {
        let (mut socket, _) = tokio_tungstenite::connect_async(&url).await.unwrap();
        let user = UserId::new(name).unwrap();
        let token = tokens.sign(&user, None, 60).unwrap();
        ask(
            &mut socket,
            json!({"type": "connect", "id": 1, "token": token}),
        )
        .await;
        assert!(next(&mut socket, "connected").await.is_some());
        socket
    };
    let mut alice = connect("alice").await;
    let mut mallory = connect("mallory").await;
    ask(
        &mut alice,
        json!({"type": "watch", "id": 2, "users": ["mallory"]}),
    )
    .await;
    let presence = next(&mut alice, "presence").await.unwrap();
    assert_eq!(presence["items"][0]["online"], true);
    break_rule(Some(Mutation::SessionPanic));
    ask(
        &mut mallory,
        json!({"type": "refresh", "id": 2, "token": "any"}),
    )
    .await;
    assert!(next(&mut mallory, "refreshed").await.is_none());
    break_rule(None);
    let event = next(&mut alice, "presence").await.unwrap();
    assert_eq!(
        (&event["user"], &event["online"]),
        (&json!("mallory"), &json!(false))
    );
    ask(&mut alice, json!({"type": "ping", "id": 3})).await;
    assert!(next(&mut alice, "pong").await.is_some());
    let mut again = connect("mallory").await;
    ask(&mut again, json!({"type": "ping", "id": 3})).await;
    assert!(next(&mut again, "pong").await.is_some());
    drop((alice, mallory, again));
    assert!(node.stop().await);
}
