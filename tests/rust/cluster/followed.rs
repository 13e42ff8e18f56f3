//! What a session hears of a channel to which its user was just added, while the owner does not know its gateway yet.

use std::{
    collections::{HashSet, VecDeque},
    io::Cursor,
    sync::Arc,
    time::Duration,
};

use chat_gateway::{
    chat::{Creation, Operation, React},
    fanout::Subscriber,
    model::{ClientId, Content, ConversationId, Draft, Kind, Posting, SessionId},
    mutation::{Mutation, break_rule},
    protocol::Codec,
};
use rand::RngExt;
use serde_json::Value;
use tokio::time::sleep;
use tokio_tungstenite::tungstenite::protocol::frame::FrameSocket;
use uuid::Uuid;

use super::{
    gateways,
    world::{World, user},
};
use crate::paused::paused;

/// Channels, so that some have another owner than the gateway of the session.
const CHANNELS: usize = 8;

fn draft(world: &World) -> Draft {
    Draft {
        sender: user(0),
        client_id: ClientId(Uuid::from_u128(world.random.lock().unwrap().random())),
        content: Content::text("hello"),
        at: None,
        retry: false,
    }
}

/// Returns the channels of which the frames of a session tell that they have a change.
async fn changed(subscriber: &Subscriber) -> HashSet<ConversationId> {
    let mut frames = VecDeque::new();
    subscriber.outbox.take(&mut frames).await.unwrap();
    let bytes = frames.drain(..).flat_map(|frame| frame.bytes().to_vec());
    let mut wire = FrameSocket::new(Cursor::new(bytes.collect::<Vec<_>>()));
    let mut changed = HashSet::new();
    while let Some(read) = wire.read(None).unwrap() {
        let event: Value = serde_json::from_slice(read.payload()).unwrap();
        if event["type"] == "changed" && event["rev"] == 1 {
            changed.insert(event["conversation"].as_str().unwrap().parse().unwrap());
        }
    }
    changed
}

/// Adds a user to channels. At once a message of each gets a reaction, and then nothing more happens. Returns the number of
/// channels in which the user's session is told of the reaction.
async fn reactions_after_an_addition() -> usize {
    let world = gateways(3).await;
    let serving = world.serving();
    let (first, last) = (serving[0].cluster().unwrap(), serving[2].cluster().unwrap());
    let subscriber = Arc::new(Subscriber::new(SessionId(1), user(3), Codec::Json, 1 << 22));
    last.router.register(&subscriber).await.unwrap();
    let mut channels = Vec::new();
    for _ in 0..CHANNELS {
        let bytes = world.random.lock().unwrap().random();
        let id = uuid::Builder::from_u128(bytes).with_version(uuid::Version::Random);
        let channel = ConversationId(id.into_uuid());
        let creation = Creation {
            kind: Kind::Channel,
            participants: Vec::new(),
            name: None,
            public: false,
            posting: Posting::Everyone,
            at: None,
        };
        let create = Operation::Create(creation);
        first.router.ask(channel, user(0), create).await.unwrap();
        let seq = first.router.send(channel, draft(&world)).await.unwrap().seq;
        channels.push((channel, seq));
    }
    for &(channel, seq) in &channels {
        let add = Operation::Add { user: user(3) };
        let react = Operation::React(React {
            seq,
            emoji: "👍".into(),
            on: true,
            at: None,
        });
        let ask = |operation| first.router.ask(channel, user(0), operation);
        let (added, reacted) = tokio::join!(ask(add), ask(react));
        added.and(reacted).unwrap();
    }
    sleep(Duration::from_secs(5)).await;
    let told = changed(&subscriber).await;
    channels.iter().filter(|(id, _)| told.contains(id)).count()
}

#[test]
fn a_session_hears_of_a_change_made_before_its_gateway_followed() {
    let told = |rule| {
        break_rule(rule);
        let told = paused(1, reactions_after_an_addition());
        break_rule(None);
        told
    };
    assert_eq!(told(None), CHANNELS);
    assert!(told(Some(Mutation::Subscribe)) < CHANNELS);
}
