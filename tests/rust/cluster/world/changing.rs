//! What users do to messages: they edit, delete and react through the router, and mark messages as read.

use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering},
};

use chat_gateway::{
    chat::{Error, Operation, Outcome},
    model::{Kind, Seq, UserId},
};
use rand::RngExt;
use tokio::time::sleep;
use uuid::Uuid;

use super::{KINDS, World, user};
use crate::simulation::seen::Wish;

impl World {
    /// Asks the owner of a conversation through some gateway. `None` if nobody answered.
    pub(crate) async fn ask(
        &self,
        conversation: usize,
        actor: UserId,
        operation: Operation,
    ) -> Option<Result<Outcome, Error>> {
        let gateway = self.some_gateway()?;
        let (cluster, id) = (gateway.cluster()?, self.conversations[conversation]);
        let asked = async move { cluster.router.ask(id, actor, operation).await };
        gateway.ask(asked).await
    }

    /// Changes messages, and reads.
    pub(crate) async fn change(self: Arc<Self>, by: usize) {
        loop {
            sleep(self.millis(5, 600)).await;
            if !self.sending.load(Ordering::Relaxed) {
                continue;
            }
            let conversation = match self.below(6) {
                0..3 => 0,
                3..5 if by < 2 => 1,
                _ => 2,
            };
            if self.below(5) == 0 {
                self.mark(conversation, by).await;
            } else if let Some(wish) = self.wish(conversation, by) {
                *self.waiting.lock().unwrap() += 1;
                self.carry_out(conversation, by, wish).await;
                *self.waiting.lock().unwrap() -= 1;
            }
        }
    }

    /// Marks messages as read.
    async fn mark(&self, conversation: usize, by: usize) {
        let last = self.texts.lock().unwrap()[conversation]
            .last()
            .map(|(seq, _)| *seq);
        if let Some(last) = last {
            let seq = 1 + self.below(usize::try_from(last).unwrap()) as Seq;
            self.ask(conversation, user(by), Operation::Read { seq })
                .await;
        }
    }

    /// Chooses a change. `None` if there is no message for it yet.
    fn wish(&self, conversation: usize, by: usize) -> Option<Wish> {
        let messages = self.texts.lock().unwrap()[conversation].clone();
        let some = |own: bool| -> Option<Seq> {
            let some = messages.iter().filter(|(_, of)| !own || *of == by);
            let some: Vec<Seq> = some.map(|(seq, _)| *seq).collect();
            let many = if self.below(2) == 0 { 3 } else { usize::MAX };
            let back = self.below(some.len().clamp(1, many));
            some.get(some.len().checked_sub(1 + back)?).copied()
        };
        Some(match self.below(10) {
            0..4 => Wish::Edit {
                seq: some(true)?,
                body: format!(
                    "<{}>",
                    Uuid::from_u128(self.random.lock().unwrap().random())
                ),
            },
            4 => {
                // The first user may delete the messages of others, but not in a dm.
                let own = by > 0 || KINDS[conversation] == Kind::Dm;
                let seqs: BTreeSet<Seq> = [some(own)?, some(own)?].into();
                let seqs = seqs.into_iter().collect();
                Wish::Delete { seqs }
            }
            _ => Wish::React {
                seq: some(false)?,
                emoji: [":a:", ":b:"][self.below(2)].into(),
                on: self.below(10) < 6,
            },
        })
    }

    /// Asks for a change until it is acknowledged, refused, or given up.
    async fn carry_out(&self, conversation: usize, by: usize, wish: Wish) {
        let begin = |wish| self.seen.lock().unwrap()[conversation].begin(&user(by), wish);
        let (number, base) = begin(wish.clone());
        let operation = wish.operation(base);
        loop {
            let asked = self.ask(conversation, user(by), operation.clone()).await;
            if self.is_over(conversation, number, asked) {
                return;
            }
            sleep(self.millis(10, 300)).await;
            if self.below(20) == 0 {
                return;
            }
        }
    }

    /// Notes the answer to a request. Returns false if it must be repeated.
    fn is_over(
        &self,
        conversation: usize,
        number: usize,
        answer: Option<Result<Outcome, Error>>,
    ) -> bool {
        let seen = &mut self.seen.lock().unwrap()[conversation];
        // A gateway, or the owner that it asked, may carry out the request later.
        let error = answer.as_ref().map(|answer| answer.as_ref().err());
        if error.is_none_or(|error| error == Some(&Error::TOO_LATE)) {
            seen.requests[number].unanswered += 1;
        }
        match answer {
            Some(Ok(Outcome::Revised { rev })) => {
                seen.acknowledge(number, rev);
                *self.changes.lock().unwrap() += 1;
            }
            // The message was changed meanwhile, or is deleted.
            Some(Err(Error::Conflict(_))) => {}
            None | Some(Err(Error::Moved | Error::Closed | Error::Unavailable { .. })) => {
                return false;
            }
            other => {
                let text = format!("{:?} was answered with {other:?}", seen.requests[number]);
                seen.find(text);
            }
        }
        true
    }
}
