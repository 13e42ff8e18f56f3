//! What a client holds of a conversation's messages and of their changes, by the rules for clients: [gap] and [page-rev].

use std::collections::BTreeMap;

use chat_gateway::{
    chat::{ChangedItem, Changes, Page},
    model::{Content, Entry, EntryState, Rev, Seq},
};
use serde_json::Value;

/// A rule for clients, which a test breaks on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClientRule {
    /// A client that sees a gap asks for the changes that it lacks.
    Gap,
    /// A page that is older than the client's cursor sets the cursor back.
    PageRev,
    /// A client that connects asks for the changes since its cursor.
    Resume,
}

/// A message as a client shows it: the body, or `None` if the message is deleted, and the reactions.
pub(crate) type Shown = (Option<String>, BTreeMap<String, u64>);

/// What a client holds of one conversation.
#[derive(Default)]
pub(crate) struct Held {
    /// The rev up to which the client has all changes.
    pub(crate) cursor: Rev,
    /// The seq up to which it dropped its messages, until it has read them again. Above it, changes that come before
    /// their message are kept.
    dropped: Seq,
    messages: BTreeMap<Seq, Message>,
}

/// A message, or only what changed in it, if the message itself comes later.
#[derive(Default)]
struct Message {
    /// The rev that these fields are at least as new as.
    rev: Rev,
    body: Option<String>,
    edited: Option<Option<String>>,
    reactions: Option<BTreeMap<String, u64>>,
}

/// The fields of a message that changed.
struct Item {
    seq: Seq,
    rev: Rev,
    edited: Option<Option<String>>,
    reactions: Option<BTreeMap<String, u64>>,
}

impl Held {
    /// Drops the messages up to a seq, as a client whose user left the conversation. The cursor stays.
    pub(crate) fn drop_upto(&mut self, seq: Seq) {
        self.dropped = seq;
        self.messages = self.messages.split_off(&(seq + 1));
    }

    /// Whether messages were dropped that were not read again.
    pub(crate) fn lacks_dropped(&self) -> bool {
        self.dropped > 0
    }

    /// Returns how the client shows a message. `None` if it does not have the message.
    pub(crate) fn shown(&self, seq: Seq) -> Option<Shown> {
        let message = self.messages.get(&seq)?;
        let body = match &message.edited {
            Some(edited) => edited.clone(),
            None => Some(message.body.clone()?),
        };
        Some((body, message.reactions.clone().unwrap_or_default()))
    }

    /// Takes over a page. Returns whether the client must ask for changes.
    pub(crate) fn page(&mut self, page: &Page, broken: Option<ClientRule>) -> bool {
        for entry in &page.entries {
            let message = self.messages.entry(entry.seq).or_default();
            message.body.get_or_insert(text(entry).to_owned());
            if message.rev <= page.rev {
                let state = page.state(entry.seq).cloned().unwrap_or_default();
                let content = state.content.map(|c| c.content.map(|edited| edited.body));
                message.rev = page.rev;
                message.edited = content.or(message.edited.take());
                message.reactions = state.reactions.map(|r| r.reactions);
            }
        }
        let (first, last) = (page.entries.first(), page.entries.last());
        if first.is_some_and(|e| e.seq == 1) && last.is_some_and(|e| e.seq >= self.dropped) {
            self.dropped = 0;
        }
        // Rule [page-rev]. If the connection breaks before the answer, the client asks from there when it connects.
        let is_behind = page.rev < self.cursor && broken != Some(ClientRule::PageRev);
        if is_behind {
            self.cursor = page.rev;
        }
        is_behind
    }

    /// Takes over a `message` event.
    pub(crate) fn message(&mut self, event: &Value) {
        let seq = event["seq"].as_u64().unwrap();
        if seq > self.dropped {
            let body = event["body"].as_str().unwrap().to_owned();
            let message = self.messages.entry(seq).or_default();
            message.body.get_or_insert(body);
        }
    }

    /// Takes over a `changed` event. Returns whether the client must ask for changes.
    pub(crate) fn changed(&mut self, event: &Value, broken: Option<ClientRule>) -> bool {
        let number = |name: &str| event[name].as_u64().unwrap();
        let items = event["items"].as_array().unwrap().iter().map(item_of_event);
        self.told(number("after"), number("rev"), items, broken)
    }

    /// Takes over the answer to the question for changes. Returns whether the client must ask for more.
    pub(crate) fn answered(&mut self, changes: Changes) -> bool {
        let items = changes.items.into_iter().map(item_of_answer);
        self.told(changes.after, changes.rev, items, None) || changes.more
    }

    fn told(
        &mut self,
        after: Rev,
        rev: Rev,
        items: impl Iterator<Item = Item>,
        broken: Option<ClientRule>,
    ) -> bool {
        // Rule [gap]
        if self.cursor < after && broken != Some(ClientRule::Gap) {
            return true;
        }
        for item in items {
            if item.seq <= self.dropped {
                continue;
            }
            let message = self.messages.entry(item.seq).or_default();
            if item.rev > message.rev {
                message.rev = item.rev;
                message.edited = item.edited.or(message.edited.take());
                message.reactions = item.reactions.or(message.reactions.take());
            }
        }
        self.cursor = rev.max(self.cursor);
        false
    }
}

fn item_of_answer(item: ChangedItem) -> Item {
    Item {
        seq: item.seq,
        rev: item.rev,
        edited: item.content.map(|c| c.content.map(|edited| edited.body)),
        reactions: item.reactions,
    }
}

fn item_of_event(item: &Value) -> Item {
    let body = item["body"].as_str().map(|body| Some(body.to_owned()));
    let reactions = item["reactions"].as_object().map(|all| {
        let counts = all.iter().map(|(k, v)| (k.clone(), v.as_u64().unwrap()));
        counts.collect()
    });
    Item {
        seq: item["seq"].as_u64().unwrap(),
        rev: item["rev"].as_u64().unwrap(),
        edited: if item["deleted"].is_object() {
            Some(None)
        } else {
            body
        },
        reactions,
    }
}

/// The body of an entry. That of a system entry is empty.
fn text(entry: &Entry) -> &str {
    match &entry.content {
        Content::Text { body, .. } => body,
        Content::System(_) => "",
    }
}

/// How a client shows an entry with this state.
pub(crate) fn expected(entry: &Entry, state: Option<&EntryState>) -> Shown {
    let content = state.and_then(|state| state.content.as_ref());
    let reactions = state.and_then(|state| state.reactions.as_ref());
    let body = match content {
        Some(content) => content.content.as_ref().map(|edited| edited.body.clone()),
        None => Some(text(entry).to_owned()),
    };
    let reactions = reactions.map(|state| state.reactions.clone());
    (body, reactions.unwrap_or_default())
}
