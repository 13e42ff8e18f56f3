//! Tests: conversations that are loaded.

use std::time::Duration;

use tokio::time::sleep;
use uuid::Uuid;

use super::told::{Fixture, user};
use crate::{
    chat::{Error, Lease, Operation},
    model::{
        ConversationId,
        limits::{LOADS_AGAIN_MAX, LOADS_MAX},
    },
    store::simulated::Faults,
};

const MOMENT: Duration = Duration::from_millis(100);

/// Each read takes a second, and fails.
const UNREADABLE: Faults = Faults {
    unread: 100,
    unread_ms: 1_000,
    ..Faults::NONE
};

const CATCH_UP: Operation = Operation::CatchUp { after: 0, limit: 1 };

/// The id of a conversation that does not exist.
fn unknown(number: usize) -> ConversationId {
    ConversationId(Uuid::from_u128(1_000 + number as u128))
}

#[tokio::test(start_paused = true)]
async fn few_conversations_are_loaded_at_once() {
    let fixture = Fixture::new(Lease::unbounded(1));
    fixture.store.set_faults(UNREADABLE);
    let ask = |number| {
        let name = user(&format!("user-{number}"));
        let asked = fixture.conversations.ask(unknown(number), name, CATCH_UP);
        Box::pin(asked)
    };
    let asked: Vec<_> = (0..2 * LOADS_MAX).map(ask).collect();
    sleep(MOMENT).await;
    assert_eq!(fixture.store.reading(), LOADS_MAX);
    let mut most = 0;
    for _ in 0..50 {
        sleep(MOMENT).await;
        most = most.max(fixture.store.reading());
    }
    assert!(most > LOADS_AGAIN_MAX && most <= LOADS_MAX + LOADS_AGAIN_MAX);
    fixture.store.set_faults(Faults::NONE);
    for answer in asked {
        assert_eq!(answer.await.unwrap_err(), Error::UnknownConversation);
    }
    assert_eq!(fixture.store.reading(), 0);
}
