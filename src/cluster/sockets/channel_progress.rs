//! How far a channel has been delivered to the sockets of this gateway, and the channel's head as of then.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use foldhash::quality::RandomState;

use crate::{
    chat::{Changed, Head},
    model::{Content, ConversationId, Cursor, Entry, Rev, Seq, SystemChange},
};

/// The entries of a channel that are remembered beyond a gap.
const AHEAD_MAX: usize = 1_024;

/// The heads of channels.
pub(crate) type Heads = HashMap<ConversationId, Arc<Head>, RandomState>;

/// How far a channel has been delivered to the sockets here. It exists from the moment when the owner is first asked to
/// send its entries until nobody here is subscribed any more.
#[derive(Default)]
pub(super) struct ChannelProgress {
    /// The number of this stretch of time. An answer to a question of an earlier one says nothing.
    pub(crate) subscription: u64,
    /// The position up to which nothing is missing; `None` until the owner has confirmed. Its rev is the newest one that
    /// was delivered: who lacks earlier changes was told so by the event itself.
    contiguous: Option<Cursor>,
    /// Entries that were delivered beyond a gap.
    ahead: BTreeSet<Seq>,
    /// The newest rev that was delivered, also before the owner confirmed.
    delivered_rev: Rev,
    /// The channel's head, for inboxes. It counts while it is as new as `contiguous`, because then it is what the owner
    /// would answer.
    head: Option<Arc<Head>>,
}

impl ChannelProgress {
    pub(crate) fn new(subscription: u64) -> Self {
        Self {
            subscription,
            ..Self::default()
        }
    }

    /// Returns the position up to which nothing is missing. `None` until the owner has confirmed.
    pub(super) fn contiguous(&self) -> Option<Cursor> {
        self.contiguous
    }

    pub(super) fn delivered_entry(&mut self, entry: &Entry) {
        self.head = self.head.take().and_then(|head| head_after(head, entry));
        if self
            .contiguous
            .is_none_or(|Cursor(upto, _)| entry.seq > upto)
        {
            self.ahead.insert(entry.seq);
        }
        self.advance();
        while self.ahead.len() > AHEAD_MAX {
            self.ahead.pop_first();
        }
    }

    pub(super) fn delivered_changes(&mut self, rev: Rev, changed: &Changed) {
        self.delivered_rev = rev.max(self.delivered_rev);
        let head = self.head.take();
        self.head = head.and_then(|head| head_after_changes(head, rev, changed));
        if let Some(Cursor(_, known)) = &mut self.contiguous {
            *known = rev.max(*known);
        }
    }

    /// Notes that the owner publishes here what follows this position, or that the subscribers were told to read up to it.
    pub(crate) fn confirmed(&mut self, Cursor(head, head_rev): Cursor) {
        let Cursor(seq, rev) = self.contiguous.unwrap_or_default();
        self.contiguous = Some(Cursor(seq.max(head), rev.max(head_rev)));
        self.advance();
    }

    /// Remembers the head that the owner has answered.
    pub(crate) fn learned(&mut self, head: Arc<Head>) {
        self.head = Some(head);
    }

    /// Returns the channel's head. `None` if the owner might answer another one.
    pub(crate) fn head(&self) -> Option<&Arc<Head>> {
        let Cursor(upto, rev) = self.contiguous?;
        let head = self.head.as_ref()?;
        let newest_rev = rev.max(self.delivered_rev);
        (upto == head.head && newest_rev <= head.rev).then_some(head)
    }

    fn advance(&mut self) {
        let Some(Cursor(upto, _)) = &mut self.contiguous else {
            return;
        };
        while let Some(&seq) = self.ahead.first()
            && seq <= *upto + 1
        {
            *upto = seq.max(*upto);
            self.ahead.pop_first();
        }
    }
}

/// Returns a channel's head once this entry has followed, if that can be told.
fn head_after(mut head: Arc<Head>, entry: &Entry) -> Option<Arc<Head>> {
    let changes_details = matches!(entry.content, Content::System(SystemChange::Updated { .. }));
    if entry.seq != head.head + 1 || changes_details {
        return None;
    }
    let known = Arc::make_mut(&mut head);
    known.head = entry.seq;
    known.last = Some(entry.last());
    known.texts = entry.texts;
    Some(head)
}

/// Returns a channel's head once these changes have followed, if that can be told. Reactions change nothing of it, and
/// neither do edits of earlier entries.
fn head_after_changes(mut head: Arc<Head>, rev: Rev, changed: &Changed) -> Option<Arc<Head>> {
    let is_new = rev > head.rev;
    let follows = changed.after <= head.rev && !changed.items.is_empty();
    let shows = changed.items.iter().any(|item| {
        let content = item.content.as_ref();
        content.is_some_and(|content| item.seq >= head.head || (is_new && content.is_deleted()))
    });
    if shows || (is_new && !follows) {
        return None;
    }
    if is_new {
        Arc::make_mut(&mut head).rev = rev;
    }
    Some(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chat::ChangedItem,
        model::{ClientId, ContentState, Details, EditedContent, Kind, Posting, UserId},
    };

    fn user() -> UserId {
        UserId::new("alice").unwrap()
    }

    fn entry(seq: Seq) -> Entry {
        Entry {
            seq,
            message_id: crate::clock::message_id(1),
            client_id: ClientId(uuid::Uuid::nil()),
            sender: user(),
            at: 1,
            content: Content::text("hi"),
            texts: seq - 1,
        }
    }

    /// The change of one entry's reactions, or of its content to this one.
    fn changed(after: Rev, seq: Seq, content: Option<Option<EditedContent>>) -> Changed {
        let content = content.map(|content| ContentState {
            rev: after + 1,
            by: user(),
            at: 1,
            content,
            edits: Vec::new(),
        });
        let item = ChangedItem {
            seq,
            rev: after + 1,
            reactions: content.is_none().then(Default::default),
            content,
            by: None,
            mine: None,
        };
        Changed {
            after,
            items: vec![item],
            newest: None,
            deleted: None,
        }
    }

    fn known_head(head: Seq, rev: Rev) -> ChannelProgress {
        let mut progress = ChannelProgress::new(1);
        progress.confirmed(Cursor(head, rev));
        progress.learned(Arc::new(Head {
            details: Details {
                kind: Kind::Channel,
                name: None,
                created_at: 1,
                created_by: user(),
                posting: Posting::Everyone,
                public: false,
            },
            head,
            last: None,
            rev,
            texts: head - 1,
            deleted: Default::default(),
        }));
        progress
    }

    #[test]
    fn what_was_delivered_has_no_gaps() {
        let mut progress = ChannelProgress::default();
        let contiguous = |progress: &ChannelProgress| progress.contiguous.map(|Cursor(seq, _)| seq);
        progress.delivered_entry(&entry(11));
        assert_eq!(contiguous(&progress), None);
        progress.confirmed(Cursor(10, 0));
        assert_eq!(contiguous(&progress), Some(11), "what came early counts");
        progress.delivered_entry(&entry(13));
        assert_eq!(contiguous(&progress), Some(11));
        progress.delivered_entry(&entry(12));
        assert_eq!(contiguous(&progress), Some(13));
        progress.delivered_entry(&entry(5));
        progress.confirmed(Cursor(9, 0));
        assert_eq!(contiguous(&progress), Some(13), "nothing goes back");
    }

    /// Rule [subscribe]: a gateway tells an owner again with the rev that its subscribers have reached.
    #[test]
    fn the_rev_rises_with_what_is_delivered_and_confirmed() {
        let mut progress = ChannelProgress::default();
        progress.delivered_changes(4, &changed(3, 1, None));
        assert_eq!(
            progress.contiguous(),
            None,
            "the owner has not confirmed yet"
        );
        progress.confirmed(Cursor(10, 5));
        progress.delivered_changes(7, &changed(6, 1, None));
        assert_eq!(progress.contiguous(), Some(Cursor(10, 7)));
        progress.delivered_changes(6, &changed(5, 1, None));
        progress.confirmed(Cursor(11, 6));
        assert_eq!(progress.contiguous(), Some(Cursor(11, 7)));
        progress.delivered_entry(&entry(12));
        assert_eq!(progress.contiguous(), Some(Cursor(12, 7)));
    }

    /// A change that is delivered before the owner's older answer is not forgotten.
    #[test]
    fn a_head_older_than_a_delivered_change_does_not_count() {
        let answer = known_head(6, 3).head.unwrap();
        let mut progress = ChannelProgress::new(1);
        progress.delivered_changes(4, &changed(3, 2, None));
        progress.confirmed(Cursor(6, 3));
        progress.learned(answer.clone());
        assert!(progress.head().is_none());
        let rev = 4;
        progress.learned(Arc::new(Head {
            rev,
            ..answer.as_ref().clone()
        }));
        assert!(progress.head().is_some());
    }

    #[test]
    fn a_head_counts_the_messages_that_follow() {
        let mut progress = known_head(10, 0);
        progress.delivered_entry(&entry(11));
        let head = progress.head().unwrap();
        assert_eq!((head.head, head.texts), (11, 10));
    }

    #[test]
    fn a_head_survives_only_changes_that_do_not_show_in_it() {
        let mut progress = known_head(10, 5);
        progress.delivered_changes(6, &changed(5, 10, None));
        assert_eq!(progress.head().map(|head| head.rev), Some(6), "a reaction");
        let edited = Some(Some(EditedContent::default()));
        progress.delivered_changes(7, &changed(6, 9, edited.clone()));
        assert_eq!(progress.head().map(|head| head.rev), Some(7));
        progress.delivered_changes(7, &changed(6, 9, Some(None)));
        assert!(progress.head().is_some(), "the head contains that change");
        progress.delivered_changes(8, &changed(7, 10, edited));
        assert!(progress.head().is_none(), "the newest entry is another one");
        for (after, seq, content) in [(5, 9, Some(None)), (6, 9, None)] {
            let mut progress = known_head(10, 5);
            progress.delivered_changes(after + 1, &changed(after, seq, content));
            assert!(progress.head().is_none(), "a deletion, or a change before");
        }
        let mut progress = known_head(10, 5);
        progress.delivered_changes(9, &crate::cluster::sockets::events::gap(9));
        assert!(progress.head().is_none(), "a gap");
    }

    /// An owner answers a question about the head, and a change is delivered before the answer is.
    #[test]
    fn a_head_that_is_older_than_a_change_is_not_known() {
        let mut progress = known_head(10, 5);
        let asked = progress.head().unwrap().clone();
        progress.delivered_changes(6, &changed(5, 9, Some(None)));
        progress.learned(asked);
        assert!(progress.head().is_none());
    }
}
