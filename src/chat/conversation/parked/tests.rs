use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::select;
use uuid::Uuid;

use super::*;
use crate::{
    chat::{
        Confirmation, Conversations, Creation, InboxWriter, Lease, Outcome, Publication, Publish,
        Settings, operation::fresh_client_id,
    },
    memory::Memory,
    model::{
        Content, ConversationId, Draft, GatewayId, Kind, Posting,
        limits::CHANNEL_PARTICIPANTS_KNOWN_MAX,
    },
    store::simulated::{Faults, Simulated},
    tasks::Tasks,
};

struct Nobody;

impl Publish for Nobody {
    fn publish(&self, _: Publication) -> Confirmation {
        Confirmation::Immediate
    }
}

/// A channel that alice created, and its store.
async fn channel(public: bool) -> (Conversations, ConversationId, Arc<Simulated>) {
    let store = Arc::new(Simulated::new(1, Faults::NONE));
    let settings = Settings {
        group_participants_max: 100,
        open_max: 10,
        ..Settings::for_tests()
    };
    let conversations = Conversations::new(
        GatewayId(Uuid::from_u128(1)),
        store.clone(),
        Arc::new(Nobody),
        Arc::new(InboxWriter::new(store.clone(), Memory::of_mib(64))),
        Lease::unbounded(1),
        settings,
        Tasks::default(),
    );
    let id = ConversationId(Uuid::from_u128(2));
    let creation = Creation {
        kind: Kind::Channel,
        participants: Vec::new(),
        name: None,
        public,
        posting: Posting::Everyone,
        at: None,
    };
    let created = conversations.ask(id, user("alice"), Operation::Create(creation));
    created.await.unwrap();
    (conversations, id, store)
}

fn user(name: &str) -> UserId {
    UserId::new(name).unwrap()
}

fn draft(sender: &str) -> Draft {
    Draft {
        sender: user(sender),
        client_id: fresh_client_id(),
        content: Content::text("hi"),
        at: None,
        retry: false,
    }
}

const UNWRITABLE: Faults = Faults {
    lost: 100,
    ..Faults::NONE
};
const UNREADABLE: Faults = Faults {
    unread: 100,
    unread_ms: 1000,
    ..Faults::NONE
};

#[tokio::test(start_paused = true)]
async fn only_users_with_a_lookup_wait_for_the_store() {
    let (conversations, id, store) = channel(false).await;
    store.set_faults(UNREADABLE);
    let mut stranger = std::pin::pin!(conversations.ask(id, user("mallory"), Operation::Head));
    assert!((&mut stranger).now_or_never().is_none());
    for _ in 0..3 {
        select! {
            biased;
            answer = &mut stranger => panic!("the lookup of mallory is not answered: {answer:?}"),
            sent = conversations.send(id, draft("alice")) => drop(sent.unwrap()),
        }
    }
    // A retry waits for its lookup, and so do the later messages of its sender.
    let retry = Draft {
        retry: true,
        ..draft("alice")
    };
    let mut retry = std::pin::pin!(conversations.send(id, retry));
    assert!((&mut retry).now_or_never().is_none());
    let mut after = std::pin::pin!(conversations.send(id, draft("alice")));
    assert!((&mut after).now_or_never().is_none());
    select! {
        biased;
        refused = &mut retry => assert!(matches!(refused, Err(Error::Unavailable { .. }))),
        sent = &mut after => panic!("it overtook the retry: {sent:?}"),
    }
    assert_eq!(after.await.unwrap().seq, 5);
    assert!(matches!(stranger.await, Err(Error::Unavailable { .. })));
    store.set_faults(Faults::NONE);
    let answer = conversations.ask(id, user("mallory"), Operation::Head);
    assert_eq!(answer.await.unwrap_err(), Error::UnknownConversation);
}

#[tokio::test(start_paused = true)]
async fn a_public_channel_is_read_without_a_lookup() {
    let (conversations, id, store) = channel(true).await;
    store.set_faults(UNREADABLE);
    let answer = conversations.ask(id, user("mallory"), Operation::Head);
    assert!(matches!(answer.await.unwrap(), Outcome::Head(_)));
    let answer = conversations.ask(id, user("mallory"), Operation::Join);
    assert!(matches!(answer.await, Err(Error::Unavailable { .. })));
}

#[tokio::test(start_paused = true)]
async fn excess_operations_of_strangers_are_refused_and_those_of_participants_are_not() {
    let (conversations, id, store) = channel(false).await;
    store.set_faults(UNREADABLE);
    let strangers = 2 * MAILBOX_OPERATIONS_MAX;
    let mut waiting = Vec::new();
    for n in 0..strangers {
        let ask = conversations.ask(id, user(&format!("stranger-{n}")), Operation::Head);
        let mut ask = Box::pin(ask);
        match (&mut ask).now_or_never() {
            Some(answer) => assert_eq!(answer.unwrap_err(), Error::BUSY),
            None => waiting.push(ask),
        }
        if n % 500 == 0 {
            conversations.send(id, draft("alice")).await.unwrap();
        }
    }
    conversations.send(id, draft("alice")).await.unwrap();
    let mut busy = 0;
    for answer in join_all(waiting).await {
        busy += usize::from(answer.unwrap_err() == Error::BUSY);
    }
    assert_eq!(busy, strangers - MAILBOX_OPERATIONS_MAX);
}

/// The owner does not look up the users that a stranger names, and it forgets strangers first.
#[tokio::test(start_paused = true)]
async fn strangers_do_not_displace_participants_in_memory() {
    let (conversations, id, store) = channel(false).await;
    for n in 0..=2 * CHANNEL_PARTICIPANTS_KNOWN_MAX {
        let (actor, named) = (format!("stranger-{}", n % 11_000), format!("nobody-{n}"));
        let remove = Operation::Remove { user: user(&named) };
        let refused = conversations.ask(id, user(&actor), remove).await;
        assert_eq!(refused.unwrap_err(), Error::UnknownConversation);
    }
    store.set_faults(UNREADABLE);
    let mut sent = std::pin::pin!(conversations.send(id, draft("alice")));
    select! {
        biased;
        sent = &mut sent => drop(sent.unwrap()),
        () = tokio::time::sleep(Duration::from_millis(500)) => panic!("alice is not in memory any more"),
    }
}

#[tokio::test(start_paused = true)]
async fn marks_that_cannot_be_stored_are_bounded() {
    let (conversations, id, store) = channel(false).await;
    store.set_faults(UNWRITABLE);
    let mut waiting = Vec::new();
    let mut busy = 0;
    for _ in 0..MAILBOX_OPERATIONS_MAX + 10 {
        let read = Operation::Read { seq: 1 };
        let mut ask = Box::pin(conversations.ask(id, user("alice"), read));
        tokio::task::yield_now().await;
        match (&mut ask).now_or_never() {
            Some(answer) => busy += usize::from(answer.unwrap_err() == Error::BUSY),
            None => waiting.push(ask),
        }
        tokio::task::yield_now().await;
    }
    for ask in &mut waiting {
        if let Some(answer) = ask.as_mut().now_or_never() {
            assert_eq!(answer.unwrap_err(), Error::BUSY);
            busy += 1;
        }
    }
    assert_eq!(busy, 10);
}
