//! Operations that wait for what the store says: who a channel's user is, or whether a message was sent before. Only
//! their users wait: everyone else's operations go on, however slow the store is.

use std::collections::{HashSet, VecDeque};

use futures_util::future::join_all;

use super::{Command, Done, Owner, takeover::find_sent};
use crate::{
    chat::{error::Error, operation::Operation},
    model::{
        ClientId, Kind, Seq, UserId,
        limits::{MAILBOX_OPERATIONS_MAX, QUESTIONS_IN_FLIGHT_MAX},
    },
    store::{self, ParticipantRow},
};

#[derive(Default)]
pub(super) struct Parked {
    commands: VecDeque<Command>,
    /// Whose commands these are: nothing of them overtakes what they began before.
    actors: HashSet<UserId>,
    /// The store has not answered these yet.
    asked: HashSet<Question>,
}

/// What must be known before an operation can be handled.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Question {
    /// Of a channel, whose participants are not all in memory.
    Participant(UserId),
    /// Rule: a client id older than memory is looked for in `sends`, when the frame says `retry`.
    Sent(UserId, ClientId),
}

/// What the store says.
enum Told {
    Participant(Option<ParticipantRow>),
    Sent(Option<Seq>),
}

/// What the store says to each of some questions.
pub(super) struct AllTold(Vec<(Question, store::Result<Told>)>);

impl Parked {
    pub(super) fn take(&mut self) -> VecDeque<Command> {
        self.actors.clear();
        std::mem::take(&mut self.commands)
    }
}

impl Owner {
    /// Keeps a command that cannot be handled yet; else gives it back.
    pub(super) fn park(&mut self, command: Command) -> Option<Command> {
        let waits = self.parked.actors.contains(&command.actor)
            || self.awaits_commit(&command)
            || !self.questions(&command).is_empty();
        if !waits {
            return Some(command);
        }
        if self.parked.commands.len() >= MAILBOX_OPERATIONS_MAX {
            drop(command.reply.send(Err(Error::BUSY)));
            return None;
        }
        self.parked.actors.insert(command.actor.clone());
        self.parked.commands.push_back(command);
        None
    }

    /// Whether it is about what is in flight: that is told when it is certain, and what it allows is allowed then.
    fn awaits_commit(&self, command: &Command) -> bool {
        let Some(participants) = &self.participants else {
            return false;
        };
        match &command.operation {
            Operation::Create(_) => participants.committed().is_none() || self.awaits_effects(1),
            // Its first message must find a dm that is stored: a crash in between would leave a log of nothing.
            Operation::Send(_) => {
                participants.details.kind == Kind::Dm && participants.committed().is_none()
            }
            Operation::Read { .. } | Operation::Delivered { .. } | Operation::Typing => {
                participants.awaits_commit(&command.actor, true)
            }
            reads if reads.only_reads() => participants.awaits_commit(&command.actor, false),
            _ => false,
        }
    }

    /// Something has become certain: whoever waited for that may go on, before whoever came later.
    pub(super) fn unpark(&mut self) {
        let mut unparked = self.parked.take();
        unparked.append(&mut self.backlog);
        self.backlog = unparked;
    }

    fn questions(&self, command: &Command) -> Vec<Question> {
        let Command {
            actor, operation, ..
        } = command;
        let mut questions = Vec::new();
        let Some(participants) = &self.participants else {
            return questions;
        };
        let committed = participants.committed();
        let details = committed.map_or(&participants.details, |c| c.details);
        let actor = operation.depends_on_actor(details).then_some(actor);
        // An actor who is not in the channel is refused anyway: then the store is not asked about the user they name.
        let is_in =
            |actor: &UserId| !participants.is_channel() || participants.get(actor).is_some();
        let subject = operation.subject().filter(|_| actor.is_none_or(is_in));
        for user in actor.into_iter().chain(subject) {
            if !participants.knows(user) {
                questions.push(Question::Participant(user.clone()));
            }
        }
        if let Operation::Send(draft) = operation
            && draft.retry
            && self
                .client_ids
                .find(&draft.sender, draft.client_id)
                .is_none()
        {
            questions.push(Question::Sent(draft.sender.clone(), draft.client_id));
        }
        questions
    }

    /// Asks the store what is parked needs to know, some of it at once.
    pub(super) fn ask_store(&mut self) {
        let Some(kind) = self.participants.as_ref().map(|p| p.details.kind) else {
            return;
        };
        let mut questions = Vec::new();
        for command in &self.parked.commands {
            let room = QUESTIONS_IN_FLIGHT_MAX.saturating_sub(self.parked.asked.len());
            if room == 0 {
                break;
            }
            for question in self.questions(command).into_iter().take(room) {
                if self.parked.asked.insert(question.clone()) {
                    questions.push(question);
                }
            }
        }
        if questions.is_empty() {
            return;
        }
        let (id, head, store) = (self.id, self.log.head(), self.environment.store.clone());
        self.work.push(Box::pin(async move {
            let answers = questions.into_iter().map(async |question| {
                let told = match &question {
                    Question::Participant(user) => store
                        .participant(id, kind, user)
                        .await
                        .map(Told::Participant),
                    Question::Sent(sender, client) => {
                        let found = find_sent(&*store, id, sender, *client, head).await;
                        found.map(Told::Sent)
                    }
                };
                (question, told)
            });
            Done::Told(AllTold(join_all(answers).await))
        }));
    }

    /// Whoever waited for this may go on, before whoever came later.
    pub(super) fn told(&mut self, AllTold(answers): AllTold) {
        let mut unparked = self.parked.take();
        // What was unparked for another reason may wait for this too.
        unparked.append(&mut self.backlog);
        let mut failed = 0;
        for (question, told) in answers {
            self.parked.asked.remove(&question);
            match (&question, told) {
                (Question::Participant(user), Ok(Told::Participant(row))) => {
                    if let Some(participants) = &mut self.participants {
                        participants.learn(user, row);
                    }
                }
                (Question::Sent(sender, client), Ok(Told::Sent(Some(seq)))) => {
                    self.client_ids.remember_at(sender, *client, seq);
                }
                (Question::Sent(sender, client), Ok(Told::Sent(None))) => {
                    // Nothing of the sender has been handled since it was asked: it is new.
                    for command in &mut unparked {
                        if let Operation::Send(draft) = &mut command.operation
                            && (&draft.sender, draft.client_id) == (sender, *client)
                        {
                            draft.retry = false;
                        }
                    }
                }
                (_, Ok(_)) => debug_assert!(false, "an answer to another question"),
                (_, Err(error)) => {
                    failed += 1;
                    let error = Error::from(error);
                    for command in std::mem::take(&mut unparked) {
                        if self.questions(&command).contains(&question) {
                            drop(command.reply.send(Err(error.clone())));
                        } else {
                            unparked.push_back(command);
                        }
                    }
                }
            }
        }
        if failed > 0 {
            crate::seldom::seldom!(
                WARN,
                "the store did not say who asks, or whether a message was sent before",
                conversation = %self.id,
                failed
            );
        }
        unparked.append(&mut self.backlog);
        self.backlog = unparked;
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use futures_util::FutureExt as _;
    use tokio::select;
    use uuid::Uuid;

    use super::*;
    use crate::{
        chat::{
            Confirmation, Conversations, Creation, InboxWriter, Lease, Outcome, Publication,
            Publish, Settings, operation::fresh_client_id,
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

    /// A channel of alice's, and its store.
    async fn channel(public: bool) -> (Conversations, ConversationId, Arc<Simulated>) {
        let store = Arc::new(Simulated::new(1, Faults::NONE));
        let settings = Settings {
            body_bytes_max: 1000,
            group_participants_max: 100,
            idle: Duration::from_secs(300),
            operation_timeout: Duration::from_secs(60),
            open_max: 10,
            memory: Memory::of_mib(64),
            page_bytes_max: 1 << 20,
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
    async fn only_who_is_asked_about_waits_for_the_store() {
        let (conversations, id, store) = channel(false).await;
        store.set_faults(UNREADABLE);
        let mut stranger = std::pin::pin!(conversations.ask(id, user("mallory"), Operation::Head));
        assert!((&mut stranger).now_or_never().is_none());
        for _ in 0..3 {
            select! {
                biased;
                answer = &mut stranger => panic!("the store has not said who that is: {answer:?}"),
                sent = conversations.send(id, draft("alice")) => drop(sent.unwrap()),
            }
        }
        // A retry waits for what the store says, and so does whatever its sender sends after it.
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
            sent = &mut after => panic!("before what was sent first: {sent:?}"),
        }
        assert_eq!(after.await.unwrap().seq, 5);
        assert!(matches!(stranger.await, Err(Error::Unavailable { .. })));
        store.set_faults(Faults::NONE);
        let answer = conversations.ask(id, user("mallory"), Operation::Head);
        assert_eq!(answer.await.unwrap_err(), Error::UnknownConversation);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_asked_about_what_anyone_may_read() {
        let (conversations, id, store) = channel(true).await;
        store.set_faults(UNREADABLE);
        let answer = conversations.ask(id, user("mallory"), Operation::Head);
        assert!(matches!(answer.await.unwrap(), Outcome::Head(_)));
        let answer = conversations.ask(id, user("mallory"), Operation::Join);
        assert!(matches!(answer.await, Err(Error::Unavailable { .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn too_many_strangers_are_refused_and_participants_are_not() {
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

    /// A stranger who names other users makes the channel load none of them, and strangers are forgotten first.
    #[tokio::test(start_paused = true)]
    async fn strangers_push_nobody_out_of_memory() {
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
            () = tokio::time::sleep(Duration::from_millis(500)) => panic!("alice is not known any more"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn marks_that_cannot_be_stored_do_not_pile_up() {
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
}
