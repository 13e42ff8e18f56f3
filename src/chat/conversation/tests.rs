//! Tests of an owner with a simulated store. This file has what they share.

mod changes;
mod lifetime;
mod older_rules;
mod visibility;

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::time::sleep;
use uuid::Uuid;

use crate::{
    chat::{
        Body, Confirmation, Conversations, Creation, Error, InboxWriter, Lease, Operation, Outcome,
        Publication, Publish, Settings, operation::fresh_client_id,
    },
    memory::Memory,
    model::{Content, ConversationId, Draft, GatewayId, Kind, Posting, UserId},
    store::simulated::{Faults, Simulated},
    tasks::{Tasks, lock},
};

#[derive(Default)]
struct Receipts(Mutex<Vec<UserId>>);

impl Publish for Receipts {
    fn publish(&self, publication: Publication) -> Confirmation {
        if let Body::Receipt(receipt) = publication.body {
            lock(&self.0).push(receipt.user.clone());
        }
        Confirmation::Immediate
    }
}

struct Fixture {
    conversations: Conversations,
    store: Arc<Simulated>,
    receipts: Arc<Receipts>,
    /// Nothing writes its rows but the test.
    inbox: Arc<InboxWriter>,
}

type Asked<'a> = Pin<Box<dyn Future<Output = Result<Outcome, Error>> + 'a>>;

impl Fixture {
    fn new(lease: Lease) -> Self {
        let store = Arc::new(Simulated::new(1, Faults::NONE));
        let receipts = Arc::new(Receipts::default());
        let inbox = Arc::new(InboxWriter::new(store.clone(), Memory::of_mib(1)));
        let settings = Settings {
            idle: IDLE,
            ..Settings::for_tests()
        };
        let conversations = Conversations::new(
            GatewayId(Uuid::from_u128(1)),
            store.clone(),
            receipts.clone(),
            inbox.clone(),
            lease,
            settings,
            Tasks::default(),
        );
        Self {
            conversations,
            store,
            receipts,
            inbox,
        }
    }

    /// Asks about the group, and gives the owner time to answer if it does not need the store.
    async fn ask(&self, who: &str, operation: Operation) -> Asked<'_> {
        self.ask_of(GROUP, who, operation).await
    }

    /// As [`Self::ask`], about any conversation.
    async fn ask_of(&self, id: ConversationId, who: &str, operation: Operation) -> Asked<'_> {
        let mut asked: Asked<'_> = Box::pin(self.conversations.ask(id, user(who), operation));
        match (&mut asked).now_or_never() {
            Some(answer) => Box::pin(std::future::ready(answer)),
            None => {
                sleep(Duration::from_millis(20)).await;
                asked
            }
        }
    }
}

const IDLE: Duration = Duration::from_secs(300);
const GROUP: ConversationId = ConversationId(Uuid::from_u128(2));

fn user(name: &str) -> UserId {
    UserId::new(name).unwrap()
}

fn creation(kind: Kind, participants: &[&str]) -> Operation {
    Operation::Create(Creation {
        kind,
        participants: participants.iter().map(|name| user(name)).collect(),
        name: None,
        public: false,
        posting: Posting::Everyone,
        at: None,
    })
}

fn send(sender: &str) -> Draft {
    Draft {
        sender: user(sender),
        client_id: fresh_client_id(),
        content: Content::text("hi"),
        at: None,
        retry: false,
    }
}

fn pending(asked: &mut Asked<'_>) -> bool {
    asked.now_or_never().is_none()
}
