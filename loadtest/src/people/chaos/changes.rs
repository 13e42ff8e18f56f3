//! What people changed, which must hold in the end: edits, deletions, reactions and read marks.

use std::collections::{HashMap, HashSet};

use crate::verify::{Log, MessageKey};

/// A change of a message.
#[derive(Clone)]
pub(super) enum Change {
    Edit(String),
    Delete,
    React(&'static str),
    Unreact(&'static str),
}

/// The acknowledged changes of one person.
#[derive(Default)]
pub(super) struct Changes {
    /// The body after the last edit of each changed message, `None` if it was deleted.
    bodies: HashMap<MessageKey, Option<String>>,
    /// The person's emoji on each message to which the person reacted.
    reactions: HashMap<MessageKey, HashSet<&'static str>>,
    /// Messages with a change in progress, or with one whose outcome is unknown. They are not checked.
    uncertain: HashSet<MessageKey>,
    /// Highest acknowledged read mark, by conversation.
    pub(super) read: HashMap<String, u64>,
    /// Changes, and other requests that store something, that were acknowledged.
    pub(super) stored: u64,
}

impl Changes {
    /// Notes that a change is requested. False if the message may not be changed now.
    pub(super) fn begin(&mut self, key: &MessageKey) -> bool {
        self.bodies.get(key) != Some(&None) && self.uncertain.insert(key.clone())
    }

    /// Whether the person has this emoji on a message.
    pub(super) fn has(&self, key: &MessageKey, emoji: &str) -> bool {
        let emojis = self.reactions.get(key);
        emojis.is_some_and(|emojis| emojis.contains(emoji))
    }

    /// Notes that a change was acknowledged.
    pub(super) fn acknowledge(&mut self, key: MessageKey, change: Change) {
        self.stored += 1;
        self.uncertain.remove(&key);
        match change {
            Change::Edit(body) => drop(self.bodies.insert(key, Some(body))),
            Change::Delete => drop(self.bodies.insert(key, None)),
            Change::React(emoji) => drop(self.reactions.entry(key).or_default().insert(emoji)),
            Change::Unreact(emoji) => drop(self.reactions.entry(key).or_default().remove(emoji)),
        }
    }
}

/// Returns the number of changed messages that were checked, and of those that are not as they must be.
pub(super) fn check<'a>(
    people: impl Iterator<Item = &'a Changes> + Clone,
    logs: &HashMap<String, Log>,
) -> (usize, usize) {
    let (mut checked, mut wrong) = (0, 0);
    let uncertain: HashSet<&MessageKey> = people.clone().flat_map(|one| &one.uncertain).collect();
    let entry = |(conversation, seq): &MessageKey| logs.get(conversation)?.get(seq);
    let mut counts: HashMap<&MessageKey, HashMap<String, u64>> = HashMap::new();
    for changes in people {
        for (key, body) in &changes.bodies {
            if uncertain.contains(key) {
                continue;
            }
            checked += 1;
            wrong += usize::from(entry(key).is_none_or(|entry| entry.body != *body));
        }
        for (key, emojis) in &changes.reactions {
            if uncertain.contains(key) {
                continue;
            }
            let counts = counts.entry(key).or_default();
            for &emoji in emojis {
                *counts.entry(emoji.to_owned()).or_default() += 1;
            }
        }
    }
    checked += counts.len();
    let differs = |(key, counts): &(&&MessageKey, &HashMap<String, u64>)| {
        entry(key).is_none_or(|entry| entry.reactions != **counts)
    };
    wrong += counts.iter().filter(differs).count();
    (checked, wrong)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::verify::Entry;

    #[test]
    fn lost_changes_are_found_and_uncertain_ones_are_not_checked() {
        let key = |seq| ("group".to_owned(), seq);
        let mut changes = Changes::default();
        let all = [
            (1, Change::Edit("new".to_owned())),
            (2, Change::React("👍")),
            (3, Change::Delete),
        ];
        for (seq, change) in all {
            assert!(changes.begin(&key(seq)));
            changes.acknowledge(key(seq), change);
        }
        let wrong = |changes: &Changes, messages: [serde_json::Value; 3]| {
            let entries = messages.iter().map(Entry::of);
            let logs = [("group".to_owned(), (1..).zip(entries).collect())].into();
            check(std::iter::once(changes), &logs)
        };
        let right = [
            json!({"body": "new"}),
            json!({"body": "", "reactions": {"👍": 1}}),
            json!({"body": "", "deleted": {"by": "bob"}}),
        ];
        assert_eq!(wrong(&changes, right), (3, 0));
        let old = || [(); 3].map(|()| json!({"body": "old"}));
        assert_eq!(wrong(&changes, old()), (3, 3));
        assert!(changes.begin(&key(1)) && !changes.begin(&key(1)));
        assert_eq!(wrong(&changes, old()), (2, 2));
        assert!(!changes.begin(&key(3)));
    }
}
