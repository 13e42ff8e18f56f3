//! The changes that a client missed of one conversation. They follow its missed entries, within the same budgets, and are
//! read page by page too. No I/O.

use crate::{
    chat::Changes,
    cluster::{changed_event, missed},
    model::{
        ConversationId, Rev,
        limits::{CHANGES_PAGE_MAX, RESUME_BYTES_MAX, RESUME_ENTRIES_MAX},
    },
    protocol::{ChangedEvent, Event},
};

/// How far a client has come with the changes of a conversation, and how far the conversation has.
pub(super) struct MissedChanges {
    conversation: ConversationId,
    /// The rev up to which the client has everything. `None` if it asks for no changes.
    after: Option<Rev>,
    /// The newest known rev of the conversation.
    known: Rev,
    /// Whether the home or the owner has said what the newest rev is.
    is_known: bool,
}

/// What is pushed to one client of one conversation. Entries and changed items count alike.
#[derive(Default)]
pub(super) struct Pushed {
    pub(super) count: u64,
    /// The weight of what was pushed, in bytes.
    pub(super) bytes: usize,
}

impl Pushed {
    /// Returns how many more may be pushed, if not more than `left` of all conversations together.
    pub(super) fn room(&self, left: u64) -> u64 {
        left.min(RESUME_ENTRIES_MAX.saturating_sub(self.count))
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes >= RESUME_BYTES_MAX
    }
}

/// What happens next with the missed changes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The client lacks none.
    End,
    /// They are too many, so the client must ask for them.
    Gap,
    /// The owner is asked for them.
    Ask { after: Rev, limit: usize },
}

impl MissedChanges {
    pub(super) fn new(
        conversation: ConversationId,
        after: Option<Rev>,
        known: Option<Rev>,
    ) -> Self {
        Self {
            conversation,
            after,
            known: known.unwrap_or_default(),
            is_known: known.is_some(),
        }
    }

    /// Notes that the conversation has reached a rev.
    pub(super) fn learn(&mut self, rev: Rev) {
        self.known = rev.max(self.known);
        self.is_known = true;
    }

    pub(super) fn next(&self, pushed: &Pushed, left: u64) -> Next {
        let Some(after) = self.after.filter(|after| *after < self.known) else {
            return Next::End;
        };
        let lacks = self.known - after;
        // Each change is read, also of an entry that changed several times.
        if lacks > pushed.room(left) || pushed.is_full() {
            return Next::Gap;
        }
        let limit = usize::try_from(lacks).map_or(CHANGES_PAGE_MAX, |n| n.min(CHANGES_PAGE_MAX));
        Next::Ask { after, limit }
    }

    /// Takes an answer of the owner. Returns its events.
    pub(super) fn take(&mut self, changes: Changes) -> Vec<Event> {
        let rev = changes.rev;
        if changes.reset || self.after.is_none_or(|after| rev <= after) {
            self.learn(rev);
            return self.give_up().into_iter().collect();
        }
        self.after = Some(rev);
        if !changes.more {
            self.known = rev;
        }
        let (rev, changed) = missed(changes);
        vec![changed_event(self.conversation, rev, changed)]
    }

    /// Returns the event after which the client asks for the changes itself, if it lacks some, or if nobody knows whether
    /// it does.
    pub(super) fn give_up(&mut self) -> Option<Event> {
        let after = self.after.take()?;
        if !self.is_known {
            self.known = after.saturating_add(1);
        }
        (after < self.known).then(|| self.skip())
    }

    /// Returns the event after which the client asks for all changes that were taken but not pushed, and for later ones.
    pub(super) fn skip(&mut self) -> Event {
        self.after = None;
        Event::Changed(ChangedEvent::gap(self.conversation, self.known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{chat::ChangedItem, model::Seq};

    fn missed(after: Rev, known: Rev) -> MissedChanges {
        MissedChanges::new(ConversationId(uuid::Uuid::nil()), Some(after), Some(known))
    }

    fn answer(after: Rev, rev: Rev, items: Vec<ChangedItem>) -> Changes {
        Changes {
            after,
            rev,
            items,
            more: false,
            reset: false,
        }
    }

    /// Returns `after`, `rev` and the seqs of each event.
    fn events(events: impl IntoIterator<Item = Event>) -> Vec<(Rev, Rev, Vec<Seq>)> {
        let read = |event| match event {
            Event::Changed(ChangedEvent {
                after, rev, items, ..
            }) => (after, rev, items.iter().map(|item| item.seq).collect()),
            other => panic!("{other:?}"),
        };
        events.into_iter().map(read).collect()
    }

    #[test]
    fn who_lacks_nothing_costs_no_question() {
        let pushed = Pushed::default();
        assert_eq!(missed(7, 7).next(&pushed, 500), Next::End);
        assert_eq!(missed(8, 7).next(&pushed, 500), Next::End);
        let no_rev = MissedChanges::new(ConversationId(uuid::Uuid::nil()), None, Some(7));
        assert_eq!(no_rev.next(&pushed, 500), Next::End);
        let (after, limit) = (6, 1);
        assert_eq!(missed(6, 7).next(&pushed, 500), Next::Ask { after, limit });
    }

    #[test]
    fn the_budgets_are_those_of_entries() {
        let lacks =
            |lacks, count, bytes, left| missed(10, 10 + lacks).next(&Pushed { count, bytes }, left);
        let all = RESUME_ENTRIES_MAX;
        let ask = |limit| Next::Ask { after: 10, limit };
        assert_eq!(lacks(all, 0, 0, all), ask(CHANGES_PAGE_MAX));
        assert_eq!(lacks(all + 1, 0, 0, 2 * all), Next::Gap);
        assert_eq!(lacks(3, all - 3, 0, all), ask(3));
        assert_eq!(lacks(3, all - 2, 0, all), Next::Gap, "entries count too");
        assert_eq!(lacks(3, 0, 0, 2), Next::Gap, "other conversations too");
        assert_eq!(lacks(3, 0, RESUME_BYTES_MAX, all), Next::Gap);
    }

    #[test]
    fn pages_follow_each_other_up_to_the_newest_rev() {
        let mut missed = missed(2, 9);
        let mut first = answer(2, 5, vec![ChangedItem::edited(4, 5, 1)]);
        first.more = true;
        assert_eq!(events(missed.take(first)), [(2, 5, vec![4])]);
        let (after, limit) = (5, 4);
        assert_eq!(
            missed.next(&Pushed::default(), 500),
            Next::Ask { after, limit }
        );
        assert_eq!(
            events(missed.take(answer(5, 11, vec![ChangedItem::edited(1, 11, 1)]))),
            [(5, 11, vec![1])]
        );
        assert_eq!(missed.next(&Pushed::default(), 500), Next::End);
        assert_eq!(events(missed.give_up()), [], "it lacks nothing any more");
    }

    #[test]
    fn who_is_too_far_behind_asks_for_the_newest_rev() {
        let mut behind = missed(2, 9);
        let mut reset = answer(2, 12, Vec::new());
        reset.reset = true;
        assert_eq!(events(behind.take(reset)), [(12, 12, vec![])]);
        assert_eq!(behind.next(&Pushed::default(), 500), Next::End);
        assert_eq!(events(missed(2, 9).give_up()), [(9, 9, vec![])]);
        // An owner that answers nothing new does not hold up the client.
        let mut again = missed(2, 9);
        let nothing = answer(2, 2, Vec::new());
        assert_eq!(events(again.take(nothing)), [(9, 9, vec![])]);
        assert_eq!(again.next(&Pushed::default(), 500), Next::End);
    }

    #[test]
    fn who_may_lack_something_asks() {
        assert_eq!(events(missed(7, 7).give_up()), []);
        assert_eq!(events(missed(7, 9).give_up()), [(9, 9, vec![])]);
        let conversation = ConversationId(uuid::Uuid::nil());
        let unknown = |after| MissedChanges::new(conversation, after, None);
        assert_eq!(events(unknown(Some(7)).give_up()), [(8, 8, vec![])]);
        assert_eq!(events(unknown(None).give_up()), []);
        let mut answered = unknown(Some(7));
        answered.learn(7);
        assert_eq!(events(answered.give_up()), []);
    }
}
