//! What happens to an entry once it is committed: whoever waits is told, it is applied, and published.

use std::sync::Arc;

use futures_util::FutureExt;
use tokio::sync::oneshot;

use super::{Answer, Applying, Done, Owner, Waiting, insist, sent};
use crate::{
    chat::{
        operation::Outcome,
        participants::Participants,
        publish::{Audience, Handed, InHand, Place, Publication},
    },
    model::{Entry, Seq},
    mutation::{Mutation, broken},
    store::Mark,
};

impl Owner {
    /// Tells whoever waits for an entry, applies it, and publishes it.
    pub(super) fn publish(&mut self, entry: Arc<Entry>, waiting: Waiting) {
        let Waiting {
            replies,
            applied,
            audience,
            place,
        } = waiting;
        match applied {
            None => {
                for (reply, duplicate) in replies {
                    drop(reply.send(Ok(Answer::Ready(Outcome::Sent(sent(&entry, duplicate))))));
                }
            }
            Some(applied) => {
                let replies = replies.into_iter().map(|(reply, _)| reply).collect();
                let applying = Applying { replies, left: 1 };
                self.applying.insert(entry.seq, applying);
                let (id, environment, seq) = (self.id, self.environment.clone(), entry.seq);
                let ownership = self.ownership.clone();
                self.work.push(Box::pin(async move {
                    let store = &environment.store;
                    match insist(&ownership, || store.apply(id, &applied)).await {
                        Ok(()) => Done::Applied(seq),
                        Err(error) => Done::Lost(error),
                    }
                }));
            }
        }
        if let Some(participants) = &mut self.participants {
            participants.raise(&entry.sender, entry.seq, entry.seq);
        }
        if let Some((Place::Added, users)) = &place {
            // Before the entry, so that it is the first that they get.
            self.publish_place(Place::Added, entry.seq, users.clone());
        }
        let publication = Publication::Entry {
            conversation: self.id,
            entry: entry.clone(),
            audience: audience.clone(),
        };
        let entry_seq = entry.seq;
        // Rule [flush]: an inbox row is written only when the entry is published, so that rows never claim
        // more than was delivered.
        match self.environment.publish.publish(publication) {
            Handed::Done => self.queue_inbox(&entry, audience),
            Handed::Waiting(delivered) => {
                // Until then a successor publishes it again.
                self.log.hold(entry_seq);
                // Rule [private]: acknowledged when no gateway sends what follows to those who may not see it.
                if entry.content.makes_private() {
                    self.one_more_to_apply(entry_seq);
                }
                self.work
                    .push(Box::pin(arrived(delivered).map(|handed| Done::Published {
                        entry,
                        audience,
                        handed,
                    })));
            }
        }
        if let Some((place @ (Place::Removed | Place::Updated), users)) = place {
            self.publish_place(place, entry_seq, users);
        }
    }

    pub(super) fn one_more_to_apply(&mut self, seq: Seq) {
        // Also of what a takeover settled, and nobody waits for yet: whoever asks for the same again does.
        let applying = self.applying.entry(seq).or_insert(Applying {
            replies: Vec::new(),
            left: 0,
        });
        applying.left += 1;
    }

    /// Acknowledges a change once nothing is left to be done about it.
    pub(super) fn one_less_to_apply(&mut self, seq: Seq) {
        if let Some(applying) = self.applying.get_mut(&seq) {
            applying.left -= 1;
            if applying.left > 0 {
                return;
            }
        }
        let applied = self.applying.remove(&seq);
        for reply in applied.into_iter().flat_map(|applied| applied.replies) {
            drop(reply.send(Ok(Answer::Ready(Outcome::Changed { seq }))));
        }
    }

    pub(super) fn queue_inbox(&self, entry: &Entry, audience: Audience) {
        let members = match audience {
            Audience::Members(members) => Some(members),
            Audience::Channel | Audience::User(_) => None,
        };
        self.environment.inbox.queue(self.id, members, entry);
    }

    pub(super) fn publish_place(&mut self, place: Place, seq: Seq, audience: Audience) {
        let committed = self.participants.as_ref().and_then(Participants::committed);
        let Some(details) = committed.map(|c| c.details.clone()) else {
            return;
        };
        let publication = Publication::Place {
            conversation: self.id,
            seq,
            place,
            details,
            audience,
        };
        let handed = self.environment.publish.publish(publication);
        if let Handed::Waiting(delivered) = handed
            && !broken(Mutation::Place)
        {
            // Rule [remember]: until then a successor publishes it again.
            self.log.hold(seq);
            // Rule [private]: a removal is acknowledged when none of the user's sockets gets what follows.
            let awaited = place == Place::Removed && !broken(Mutation::Private);
            if awaited {
                self.one_more_to_apply(seq);
            }
            self.work.push(Box::pin(
                arrived(delivered).map(move |_| Done::Placed { seq, awaited }),
            ));
        }
    }

    /// Tells of a watermark that is stored, if that raises it.
    pub(super) fn marked(&mut self, mark: Mark) {
        let Mark {
            user,
            read_seq,
            delivered_seq,
        } = mark;
        let Some(participants) = &mut self.participants else {
            return;
        };
        let (read, delivered) = participants.raise(
            &user,
            read_seq.unwrap_or_default(),
            delivered_seq.unwrap_or_default(),
        );
        let (read_seq, delivered_seq) = (
            read_seq.filter(|_| read),
            delivered_seq.filter(|_| delivered),
        );
        if read_seq.or(delivered_seq).is_none() {
            return;
        }
        let audience = match participants.audience_committed() {
            // A channel's receipts are its users' own business.
            Some(Audience::Channel) => Audience::User(user.clone()),
            Some(audience) => audience,
            None => return,
        };
        drop(self.environment.publish.publish(Publication::Receipt {
            conversation: self.id,
            user,
            read_seq,
            delivered_seq,
            audience,
        }));
    }
}

/// Waits until a publication has arrived. If that is never told it waits for ever, and a successor publishes it again.
async fn arrived(delivered: oneshot::Receiver<InHand>) -> InHand {
    match delivered.await {
        Ok(handed) => handed,
        Err(_) => std::future::pending().await,
    }
}
