//! Tests: conversations are loaded, and are closed because they are idle or evicted.

use std::{sync::atomic::Ordering, time::Duration};

use futures_util::FutureExt as _;
use tokio::time::sleep;
use uuid::Uuid;

use super::{Asked, Fixture, GROUP, IDLE, creation, pending, send, user};
use crate::{
    chat::{EditMessage, Error, Lease, NewContent, Operation, Outcome},
    model::{
        ConversationId, Kind, UserId,
        limits::{LOADS_AGAIN_MAX, LOADS_MAX, OPENING_OF_USER_MAX, USER_OPEN_MIN},
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

async fn seq(asked: Asked<'_>) -> u64 {
    match asked.await {
        Ok(Outcome::Sent(sent)) => sent.seq,
        other => panic!("{other:?}"),
    }
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

#[tokio::test(start_paused = true)]
async fn conversations_that_a_user_catches_up_with_count_for_the_user() {
    let fixture = Fixture::new(Lease::unbounded(1));
    fixture.store.set_faults(UNREADABLE);
    let mut number = 0;
    let mut refused = |actor: UserId| {
        let mut asked = Vec::new();
        for _ in 0..=USER_OPEN_MIN + OPENING_OF_USER_MAX {
            number += 1;
            let ask = fixture
                .conversations
                .ask(unknown(number), actor.clone(), CATCH_UP);
            asked.push(Box::pin(ask));
        }
        let answers = asked.into_iter().map(|ask| ask.now_or_never());
        answers.flatten().count()
    };
    assert_eq!(refused(UserId::gateway()), 0);
    assert!(refused(user("alice")) > 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_to_a_conversation_that_is_closing_is_not_overtaken() {
    for evicted in [false, true] {
        let fixture = Fixture::new(Lease::unbounded(1));
        let made = fixture.ask("alice", creation(Kind::Group, &["bob"])).await;
        made.await.unwrap();
        sleep(MOMENT).await;
        assert!(fixture.conversations.is_open(GROUP));
        // The last write of the owner fails after half a second.
        fixture.store.cut().store(true, Ordering::Relaxed);
        if evicted {
            fixture.conversations.evict_one();
        } else {
            sleep(IDLE).await;
        }
        sleep(MOMENT).await;
        let mut first = fixture.ask("alice", Operation::Send(send("alice"))).await;
        assert!(pending(&mut first));
        fixture.store.cut().store(false, Ordering::Relaxed);
        sleep(10 * MOMENT).await;
        assert_eq!(fixture.conversations.is_open(GROUP), !evicted);
        let second = fixture.ask("alice", Operation::Send(send("alice"))).await;
        assert_eq!((seq(first).await, seq(second).await), (2, 3), "{evicted}");
        sleep(IDLE + MOMENT).await;
        assert!(!fixture.conversations.is_open(GROUP));
        let third = fixture.ask("alice", Operation::Send(send("alice"))).await;
        assert_eq!(seq(third).await, 4);
    }
}

#[tokio::test(start_paused = true)]
async fn a_conversation_that_does_not_exist_is_closed_at_once() {
    let fixture = Fixture::new(Lease::unbounded(1));
    let asked = fixture.ask("alice", Operation::Details).await;
    assert_eq!(asked.await.unwrap_err(), Error::UnknownConversation);
    sleep(MOMENT).await;
    assert!(!fixture.conversations.is_open(GROUP));
}

#[tokio::test(start_paused = true)]
async fn a_conversation_that_cannot_be_read_is_closed() {
    let fixture = Fixture::new(Lease::unbounded(1));
    fixture.store.set_faults(UNREADABLE);
    let asked = fixture.ask("alice", Operation::Details).await;
    assert!(matches!(asked.await, Err(Error::Unavailable { .. })));
    sleep(10 * MOMENT).await;
    assert!(!fixture.conversations.is_open(GROUP));
    assert_eq!(fixture.store.reading(), 0);
}

#[tokio::test(start_paused = true)]
async fn messages_are_refused_while_too_many_inbox_rows_wait() {
    let fixture = Fixture::new(Lease::unbounded(1));
    let ask = async |id, operation| fixture.ask_of(id, "alice", operation).await.await;
    let small = unknown(0);
    ask(small, creation(Kind::Group, &["bob"])).await.unwrap();
    ask(small, Operation::Send(send("alice"))).await.unwrap();
    // The rows of a large group are as many as it has participants.
    let names: Vec<String> = (0..4_000).map(|n| format!("somebody-{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut large = unknown(0);
    for number in 1.. {
        large = unknown(number);
        ask(large, creation(Kind::Group, &names)).await.unwrap();
        if fixture.inbox.is_full() {
            break;
        }
        ask(small, Operation::Send(send("alice"))).await.unwrap();
    }
    let edit = Operation::Edit(EditMessage {
        seq: 2,
        content: NewContent {
            body: "hello".into(),
            attachments: None,
        },
        base_rev: None,
        at: None,
    });
    let sends = [small, large].map(|id| (id, Operation::Send(send("alice"))));
    for (id, operation) in sends.into_iter().chain([(small, edit)]) {
        let refused = ask(id, operation).await;
        assert!(refused.is_err_and(|error| error.is_unavailable()), "{id:?}");
    }
    // What needs no such row goes on.
    ask(small, Operation::Read { seq: 2 }).await.unwrap();
    ask(small, CATCH_UP).await.unwrap();
    assert!(fixture.inbox.flush().await);
    for id in [small, large] {
        ask(id, Operation::Send(send("alice"))).await.unwrap();
    }
}
