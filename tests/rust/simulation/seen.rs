//! What clients asked for and were told of changes. The log of changes is compared with it at the end.

use std::collections::{BTreeMap, BTreeSet};

use chat_gateway::{
    chat::{ChangedItem, Changes, DeleteMessages, EditMessage, Operation, Page, React, Reacted},
    model::{ContentState, EditedContent, Entry, Reactions, Rev, Seq, UserId},
};

/// A change that a client wants.
#[derive(Clone, Debug)]
pub(crate) enum Wish {
    Edit { seq: Seq, body: String },
    Delete { seqs: Vec<Seq> },
    React { seq: Seq, emoji: String, on: bool },
}

impl Wish {
    /// Returns the operation of a client that has seen all changes up to `base`.
    pub(crate) fn operation(self, base: Rev) -> Operation {
        match self {
            Self::Edit { seq, body } => Operation::Edit(EditMessage {
                seq,
                content: EditedContent {
                    body,
                    attachments: Vec::new(),
                }
                .into(),
                base_rev: Some(base),
                at: None,
            }),
            Self::Delete { seqs } => Operation::Delete(DeleteMessages {
                seqs,
                as_moderator: false,
                at: None,
            }),
            Self::React { seq, emoji, on } => Operation::React(React {
                seq,
                emoji,
                on,
                at: None,
            }),
        }
    }
}

/// A request for a change, with all its repetitions.
#[derive(Debug)]
pub(crate) struct Request {
    pub by: UserId,
    pub wish: Wish,
    /// The newest rev that was acknowledged when the request began. The change comes after it.
    pub floor: Rev,
    pub acknowledged: Option<Rev>,
    /// Repetitions of unknown outcome. Each may be carried out at any later time.
    pub unanswered: usize,
}

impl Request {
    /// How often a reaction may be carried out: once for each repetition of unknown outcome, and for the one that was
    /// acknowledged.
    pub(crate) fn executions_max(&self) -> usize {
        (self.unanswered + usize::from(self.acknowledged.is_some())).max(1)
    }

    /// The rev up to which the request may have made its change.
    pub(crate) fn due(&self) -> Rev {
        let is_reaction = matches!(self.wish, Wish::React { .. });
        let may_be_late = is_reaction && self.unanswered > 0;
        self.acknowledged
            .filter(|_| !may_be_late)
            .unwrap_or(Rev::MAX)
    }
}

/// The changes in (after, rev], as an event or an answer says.
pub(crate) struct Told {
    pub after: Rev,
    pub rev: Rev,
    pub items: Vec<ChangedItem>,
}

#[derive(Default)]
pub(crate) struct Seen {
    pub requests: Vec<Request>,
    /// The newest acknowledged rev.
    pub newest: Rev,
    pub told: Vec<Told>,
    /// The revs of the content and of the reactions of an entry on a page, with the highest rev of such a page.
    pub pages: BTreeMap<(Seq, Rev, Rev), Rev>,
    pub contents: BTreeMap<(Seq, Rev), ContentState>,
    pub reactions: BTreeMap<(Seq, Rev), Reactions>,
    pub reacted: Vec<(UserId, Reacted)>,
    /// The acknowledged read marks.
    pub read: BTreeMap<UserId, Seq>,
    /// For each entry whose deletion was asked for, the cells with its texts that a quorum had before.
    pub landed: BTreeMap<Seq, BTreeSet<Vec<u8>>>,
    pub findings: Vec<String>,
}

impl Seen {
    pub(crate) fn find(&mut self, text: String) {
        self.findings.push(text);
    }

    /// Notes a request that is about to be made. Returns its number, and the rev up to which its client has seen changes.
    pub(crate) fn begin(&mut self, by: &UserId, wish: Wish) -> (usize, Rev) {
        self.requests.push(Request {
            by: by.clone(),
            wish,
            floor: self.newest,
            acknowledged: None,
            unanswered: 0,
        });
        (self.requests.len() - 1, self.newest)
    }

    pub(crate) fn acknowledge(&mut self, number: usize, rev: Rev) {
        let request = &mut self.requests[number];
        request.acknowledged = Some(rev);
        if rev < request.floor {
            let text = format!("{request:?} is older than an acknowledged change");
            self.find(text);
        }
        self.newest = rev.max(self.newest);
    }

    /// Notes the changes that an answer says. `floor` is the newest rev that was acknowledged when it was asked for.
    pub(crate) fn answered(&mut self, floor: Rev, changes: Changes) {
        let Changes {
            after, rev, items, ..
        } = changes;
        if !changes.more && rev < floor {
            self.find(format!("the changes up to {rev} lack those up to {floor}"));
        }
        self.told.push(Told { after, rev, items });
    }

    /// Notes the states on a page. `floor` is the newest rev that was acknowledged when it was asked for.
    pub(crate) fn page(&mut self, floor: Rev, page: &Page) {
        if page.rev < floor {
            let rev = page.rev;
            self.find(format!(
                "a page of rev {rev}, after {floor} was acknowledged"
            ));
        }
        for entry in &page.entries {
            self.state(page, entry);
        }
    }

    fn state(&mut self, page: &Page, entry: &Entry) {
        let seq = entry.seq;
        let state = page.state(seq).cloned().unwrap_or_default();
        let (mut revs, mut twice) = ((0, 0), false);
        if let Some(content) = state.content {
            revs.0 = content.rev;
            let known = self.contents.entry((seq, content.rev));
            twice |= *known.or_insert_with(|| content.clone()) != content;
        }
        if let Some(state) = state.reactions {
            revs.1 = state.rev;
            let known = self.reactions.entry((seq, state.rev));
            twice |= *known.or_insert_with(|| state.reactions.clone()) != state.reactions;
        }
        if twice {
            self.find(format!("two states of {seq} with the revs {revs:?}"));
        }
        let upto = self.pages.entry((seq, revs.0, revs.1)).or_default();
        *upto = page.rev.max(*upto);
    }

    /// Returns the texts that an entry with this first text had, or may have had.
    pub(crate) fn texts(&self, seq: Seq, first: &str) -> BTreeSet<String> {
        let edited = self.requests.iter().filter_map(|r| match &r.wish {
            Wish::Edit { seq: of, body } if *of == seq => Some(body.clone()),
            _ => None,
        });
        edited.chain([first.to_owned()]).collect()
    }
}
