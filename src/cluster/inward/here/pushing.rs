//! A home hands its users who are to be notified to [`Pushes`](crate::cluster::Pushes), which decides.

use super::Here;
use crate::{
    chat::Error,
    cluster::{
        home::AtHome,
        wire::question::{Answers, Push, ToNotify},
    },
    model::{ConversationId, Seq, UserId},
};

impl Answers<Push> for Here {
    async fn answer(
        &self,
        Push {
            conversation,
            users,
        }: Push,
    ) -> Result<Vec<UserId>, Error> {
        Ok(self.decide(conversation, users))
    }
}

impl Here {
    /// Has it decided which of these users are notified. Returns those for whom nothing is decided yet, among them those
    /// whose home is elsewhere, or who are not known yet.
    pub(crate) fn decide(&self, conversation: ConversationId, users: ToNotify) -> Vec<UserId> {
        let is_here = |(user, _): &(UserId, Seq)| {
            self.gateways.others.is_none() || self.home.at_home(user) == AtHome::Yes
        };
        let (here, elsewhere): (ToNotify, ToNotify) = users.into_iter().partition(is_here);
        let mut undecided: Vec<UserId> = elsewhere.into_iter().map(|(user, _)| user).collect();
        undecided.extend(match self.home.presence.pushes() {
            Some(pushes) => pushes.ask(conversation, here),
            None => here.into_iter().map(|(user, _)| user).collect(),
        });
        undecided
    }
}
