//! How the owner of a conversation asks the homes of its participants to notify them.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::future::join_all;

use tokio::time::timeout;

use super::{
    home::AtHome,
    message::{PeerRequest, PeerResponse},
    pushes::{Pushes, ToNotify},
    router::Router,
};
use crate::model::{ConversationId, GatewayId, Seq, UserId};

/// The time within which a home answers. It is asked again in any case.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);

impl Router {
    /// Sets who decides, as the home of users, whether they are notified.
    pub fn on_push(&self, pushes: &Arc<dyn Pushes>) {
        self.home.presence.on_push(pushes);
    }

    /// Asks the homes of these users to notify them. Returns those for whom nothing is decided yet. Nothing is repeated here.
    pub async fn ask_push(&self, conversation: ConversationId, users: ToNotify) -> Vec<UserId> {
        let Some(others) = &self.others else {
            return self.push_here(conversation, users);
        };
        let mut undecided = Vec::new();
        let mut homes: BTreeMap<GatewayId, ToNotify> = BTreeMap::new();
        let ring = self.ring.load_full();
        for (user, seq) in users {
            match ring.home(&user) {
                Some(home) => homes.entry(home).or_default().push((user, seq)),
                None => undecided.push(user),
            }
        }
        let asked = homes.into_iter().map(|(home, users)| async move {
            if home == self.me {
                return self.push_here(conversation, users);
            }
            let all = users.iter().map(|(user, _)| user.clone()).collect();
            let ask = PeerRequest::Push {
                conversation,
                users,
            };
            let asked = others.peers.ask(home, ask);
            match timeout(ANSWERED_WITHIN, asked).await {
                Ok(Ok(PeerResponse::Push(undecided))) => undecided,
                _ => all,
            }
        });
        undecided.extend(join_all(asked).await.into_iter().flatten());
        undecided
    }

    /// Decides as the home of these users. Those whose home is elsewhere, or who are not known yet, are undecided.
    pub(super) fn push_here(&self, conversation: ConversationId, users: ToNotify) -> Vec<UserId> {
        let is_here = |(user, _): &(UserId, Seq)| {
            self.others.is_none() || self.home.at_home(user) == AtHome::Yes
        };
        let (here, elsewhere): (ToNotify, ToNotify) = users.into_iter().partition(is_here);
        let mut undecided: Vec<UserId> = elsewhere.into_iter().map(|(user, _)| user).collect();
        undecided.extend(match self.home.presence.pushes() {
            Some(pushes) => pushes.ask(conversation, here),
            None => here.into_iter().map(|(user, _)| user).collect(),
        });
        undecided
    }

    /// Returns whether it is known, without a read, that a user has no devices.
    #[must_use]
    pub fn has_no_devices(&self, user: &UserId) -> bool {
        self.remembered(user)
            .is_some_and(|devices| devices.is_empty())
    }
}
