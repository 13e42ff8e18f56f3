//! What a session hears of a channel to which its user was just added, while the owner does not know its gateway yet.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use chat_gateway::{
    chat::{Operation, React},
    fanout::Subscriber,
    model::{ConversationId, Kind, SessionId},
    mutation::{Mutation, break_rule},
    protocol::Codec,
};
use tokio::time::sleep;

use super::{
    gateways,
    ranks::{conversation, create, send},
    world::{events, user},
};
use crate::paused::paused;

/// Channels, so that some have another owner than the gateway of the session.
const CHANNELS: usize = 8;

/// Returns the channels of which the frames of a session tell that they have a change.
async fn changed(subscriber: &Subscriber) -> HashSet<ConversationId> {
    let mut frames = VecDeque::new();
    subscriber.outbox.take(&mut frames).await.unwrap();
    let events = events(&mut frames).into_iter();
    let changed = events.filter(|event| event["type"] == "changed" && event["rev"] == 1);
    changed
        .map(|event| event["conversation"].as_str().unwrap().parse().unwrap())
        .collect()
}

/// Adds a user to channels. At once a message of each gets a reaction, and then nothing more happens. Returns the number of
/// channels in which the user's session is told of the reaction.
async fn reactions_after_an_addition() -> usize {
    let world = gateways(3).await;
    let serving = world.serving();
    let (first, last) = (serving[0].cluster().unwrap(), serving[2].cluster().unwrap());
    let subscriber = Arc::new(Subscriber::new(SessionId(1), user(3), Codec::Json, 1 << 22));
    last.users.register(&subscriber).await.unwrap();
    let mut channels = Vec::new();
    for number in 0..CHANNELS {
        let channel = conversation(number as u128, Kind::Channel);
        create(&world, channel, Kind::Channel).await;
        channels.push((channel, send(&world, channel).await));
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
fn a_session_hears_of_a_change_made_before_the_owner_knew_its_gateway() {
    let told = |rule| {
        break_rule(rule);
        let told = paused(1, reactions_after_an_addition());
        break_rule(None);
        told
    };
    assert_eq!(told(None), CHANNELS);
    assert!(told(Some(Mutation::Subscribe)) < CHANNELS);
}
