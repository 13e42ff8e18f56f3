//! Carries out the effects of a committed entry: stores its rows, publishes it, and acknowledges it.

use futures_util::FutureExt;
use tokio::sync::oneshot;

use super::{Done, Owner, Reply, effects::Effects, retry_while_owner};
use crate::{
    chat::publish::{
        Audience, Body, Confirmation, MembershipChange, Publication, Receipt, RedeliveryGuard,
    },
    model::{Content, Entry, Seq, SystemChange, UserId},
    mutation::{Mutation, broken},
    store::{Applied, Mark},
};

impl Owner {
    /// Carries out the effects of a committed entry, and releases the hold that the commit gave it.
    pub(super) fn carry_out(&mut self, seq: Seq) {
        let Some(pending) = self.log.get_mut(seq) else {
            debug_assert!(
                false,
                "entry {seq} was settled before its effects were carried out"
            );
            return;
        };
        let Effects { rows, publications } = std::mem::take(&mut pending.effects);
        let sender = pending.entry.sender.clone();
        let joined = joined(&pending.entry).cloned();
        match rows {
            None => pending.answer(),
            Some(rows) => self.store_rows(seq, *rows),
        }
        if let Some(participants) = &mut self.participants {
            participants.raise(&sender, seq, seq);
        }
        for publication in publications.into_iter().flatten() {
            self.publish(seq, publication);
        }
        if let Some(joined) = joined {
            self.tell_rev(&joined);
        }
        self.log.release(seq);
    }

    /// Starts to store the rows that follow from an entry. The entry is acknowledged when they are stored.
    fn store_rows(&mut self, seq: Seq, rows: Applied) {
        self.log.hold(seq);
        self.one_more_awaited(seq);
        let (id, environment, ownership) =
            (self.id, self.environment.clone(), self.ownership.clone());
        self.work.push(Box::pin(async move {
            let store = &environment.store;
            match retry_while_owner(&ownership, || store.apply(id, &rows)).await {
                Ok(()) => Done::RowsStored(seq),
                Err(error) => Done::Lost(error),
            }
        }));
    }

    /// Publishes an entry, or its notice of a membership.
    fn publish(&mut self, seq: Seq, publication: Publication) {
        let (is_entry, is_awaited) = match &publication.body {
            // Rule [private]: the entry is acknowledged when no gateway sends later events to users who may not see them.
            Body::Entry(entry) => (true, entry.content.makes_private()),
            // Rule [private]: a removal is acknowledged when none of the user's sockets gets later events.
            Body::Membership(notice) => {
                let is_removal = notice.change == MembershipChange::Removed;
                (false, is_removal && !broken(Mutation::Private))
            }
            Body::Receipt(_)
            | Body::Changed(_)
            | Body::Reacted(_)
            | Body::File(_)
            | Body::Typing(_)
            | Body::Read(_) => (false, false),
        };
        match self.environment.publish.publish(publication) {
            // Rule [flush]: an inbox row is written only when its entry was delivered, so no row is ahead of the
            // delivery.
            Confirmation::Immediate if is_entry => self.queue_inbox(seq),
            Confirmation::Immediate => {}
            Confirmation::Pending(_) if !is_entry && broken(Mutation::Place) => {}
            Confirmation::Pending(delivered) => {
                // Rule [remember]: a successor publishes it again until it was delivered.
                self.log.hold(seq);
                if is_awaited {
                    self.one_more_awaited(seq);
                }
                let delivered = arrived(delivered).map(move |guard| Done::Delivered {
                    seq,
                    is_entry,
                    is_awaited,
                    guard,
                });
                self.work.push(Box::pin(delivered));
            }
        }
    }

    /// Handles the delivery of a publication to every gateway concerned.
    pub(super) fn delivered(
        &mut self,
        seq: Seq,
        is_entry: bool,
        is_awaited: bool,
        guard: RedeliveryGuard,
    ) {
        if is_entry {
            self.queue_inbox(seq);
        }
        // The inbox row is queued by now.
        drop(guard);
        if is_awaited {
            self.one_less_awaited(seq);
        }
        self.log.release(seq);
    }

    /// Queues the inbox rows of an entry.
    fn queue_inbox(&mut self, seq: Seq) {
        self.queued = self.queued.max(seq);
        if let Some(pending) = self.log.get(seq) {
            let recipients = pending.recipients.clone();
            let newest = self.shown_in_round(&pending.entry);
            let sender = Some(&pending.entry.sender);
            self.environment
                .inbox
                .queue(self.id, recipients, sender, newest);
        }
    }

    fn one_more_awaited(&mut self, seq: Seq) {
        if let Some(pending) = self.log.get_mut(seq) {
            pending.awaited += 1;
        }
    }

    /// Notes that an effect is done. The last one acknowledges the entry.
    pub(super) fn one_less_awaited(&mut self, seq: Seq) {
        if let Some(pending) = self.log.get_mut(seq) {
            pending.awaited -= 1;
            if pending.awaited == 0 {
                pending.answer();
            }
        }
    }

    /// Whether a committed entry is not acknowledged yet, because of what follows from it.
    pub(super) fn awaits_effects(&self, seq: Seq) -> bool {
        self.log.get(seq).is_some_and(|pending| pending.awaited > 0)
    }

    /// Whether an entry is appended and not acknowledged yet.
    pub(super) fn is_unanswered(&self, seq: Seq) -> bool {
        let pending = self.log.get(seq);
        pending.is_some_and(|pending| seq > self.log.head() || pending.awaited > 0)
    }

    /// Adds a reply to an entry that is not acknowledged yet.
    ///
    /// # Errors
    /// The reply, if there is no such entry.
    pub(super) fn answer_with(&mut self, seq: Seq, reply: Reply) -> Result<(), Reply> {
        if self.is_unanswered(seq)
            && let Some(pending) = self.log.get_mut(seq)
        {
            pending.replies.push(reply);
            return Ok(());
        }
        Err(reply)
    }

    /// Applies a mark that is stored, and publishes a receipt if it raises a watermark.
    pub(super) fn apply_mark(&mut self, mark: Mark, away: bool) {
        let Mark {
            user,
            read_seq,
            delivered_seq,
            ..
        } = mark;
        let Some(participants) = &mut self.participants else {
            return;
        };
        let delivered = delivered_seq;
        let (read_rose, delivered_rose) = participants.raise(
            &user,
            read_seq.unwrap_or_default(),
            delivered_seq.unwrap_or_default(),
        );
        let (read_seq, delivered_seq) = (
            read_seq.filter(|_| read_rose),
            delivered_seq.filter(|_| delivered_rose),
        );
        let has_risen = read_seq.or(delivered_seq).is_some();
        // Another session has said it before. If that one was away, only this one tells that somebody has seen it.
        let seen = delivered.filter(|_| !away && !participants.is_channel());
        let followed = self.followed.as_ref().zip(seen);
        let is_seen = followed.is_some_and(|(followed, seq)| followed.0.has_seen(&user, seq));
        if !has_risen && !is_seen {
            return;
        }
        let audience = match participants.audience_committed() {
            // In a channel, users get only their own receipts.
            Some(Audience::Channel) => Audience::User(user.clone()),
            Some(audience) => audience,
            None => return,
        };
        let receipt = Receipt {
            user: user.clone(),
            read_seq,
            delivered_seq: if has_risen { delivered_seq } else { delivered },
            away,
        };
        let mut publication = Publication::receipt(self.id, receipt, audience);
        if !has_risen {
            publication = publication.to(std::slice::from_ref(&user));
        }
        drop(self.environment.publish.publish(publication));
    }
}

/// The user who joins a group by this entry.
fn joined(entry: &Entry) -> Option<&UserId> {
    match &entry.content {
        Content::System(SystemChange::Added { user }) => Some(user),
        Content::System(SystemChange::Joined) => Some(&entry.sender),
        Content::System(_) | Content::Text { .. } => None,
    }
}

/// Waits until a publication was delivered. If the delivery is never confirmed, this waits for ever, and a successor
/// publishes it again.
pub(super) async fn arrived(delivered: oneshot::Receiver<RedeliveryGuard>) -> RedeliveryGuard {
    match delivered.await {
        Ok(guard) => guard,
        Err(_) => std::future::pending().await,
    }
}
