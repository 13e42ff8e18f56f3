//! Reads back what was stored, and compares it with what was acknowledged.

use std::collections::{BTreeMap, HashMap, HashSet};

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::{client::Client, report::Report};

/// A message, by its conversation and seq.
pub(crate) type MessageKey = (String, u64);

/// The entries of a conversation by seq.
pub(crate) type Log = BTreeMap<u64, Entry>;

/// What is checked of an entry.
pub(crate) struct Entry {
    pub(crate) client_id: String,
    pub(crate) sender: String,
    /// `None` if the message is deleted.
    pub(crate) body: Option<String>,
    /// The number of users of each emoji.
    pub(crate) reactions: HashMap<String, u64>,
}

impl Entry {
    pub(crate) fn of(message: &Value) -> Self {
        let text = |field: &str| message[field].as_str().unwrap_or_default().to_owned();
        let counts = message["reactions"].as_object().into_iter().flatten();
        Self {
            client_id: text("client_id"),
            sender: text("sender"),
            body: message["deleted"].is_null().then(|| text("body")),
            reactions: counts
                .map(|(emoji, count)| (emoji.clone(), count.as_u64().unwrap_or_default()))
                .collect(),
        }
    }
}

/// Reads the log of a conversation as one of its participants.
pub(crate) fn read_log(address: &str, reader: &str, conversation: &str) -> anyhow::Result<Log> {
    let log = Client::connect(address, reader, 0)?.whole_log(conversation)?;
    Ok(log.iter().map(|(seq, m)| (*seq, Entry::of(m))).collect())
}

/// Checks that each log has no gaps, and no message twice.
pub(crate) fn check_logs(logs: &HashMap<String, Log>, report: &mut Report) {
    for (conversation, log) in logs {
        let gapless = log.keys().copied().eq(1..=log.len() as u64);
        report.must(gapless, format!("{conversation}: the log has gaps"));
        let is_named = log.values().all(|entry| !entry.client_id.is_empty());
        report.must(
            is_named,
            format!("{conversation}: a message has no client_id"),
        );
        let ids: HashSet<&String> = log.values().map(|entry| &entry.client_id).collect();
        report.must(
            ids.len() == log.len(),
            format!("{conversation}: a message is in the log twice"),
        );
    }
}

/// Whether a message is at the seq with which it was acknowledged.
pub(crate) fn is_at(
    logs: &HashMap<String, Log>,
    (group, seq): &MessageKey,
    client_id: &str,
) -> bool {
    let entry = logs.get(group).and_then(|log| log.get(seq));
    entry.is_some_and(|entry| entry.client_id == client_id)
}

/// What an inbox says of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) unread: u64,
    pub(crate) last_seq: u64,
    pub(crate) read_seq: u64,
}

/// Conversations of a page of an inbox, which is the protocol's default.
pub(crate) const INBOX_PAGE: usize = 50;

/// Reads a page of an inbox. Returns it and the cursor of the next one.
pub(crate) fn inbox_page(
    reader: &mut Client,
    before: Option<&Value>,
) -> anyhow::Result<(Value, Option<Value>)> {
    let mut request = json!({"type": "inbox", "limit": INBOX_PAGE});
    if let Some(before) = before {
        request["before"] = before.clone();
    }
    let page = reader.ask(request)?;
    let next = page.get("next").filter(|next| next.is_string()).cloned();
    Ok((page, next))
}

/// Reads a whole inbox, by conversation. Checks that none is in it twice.
pub(crate) fn read_inbox(
    reader: &mut Client,
    report: &mut Report,
) -> anyhow::Result<HashMap<String, Item>> {
    let (mut items, mut before) = (HashMap::new(), None);
    loop {
        let (page, next) = inbox_page(reader, before.as_ref())?;
        for item in page["items"].as_array().context("`inbox` has no items")? {
            let conversation = item["conversation"].as_str();
            let conversation = conversation.context("an inbox item has no conversation")?;
            let number = |field: &str| {
                let number = item[field].as_u64();
                number.with_context(|| format!("an inbox item has no {field}"))
            };
            let known = Item {
                unread: number("unread")?,
                last_seq: number("last_seq")?,
                read_seq: number("read_seq")?,
            };
            let again = items.insert(conversation.to_owned(), known);
            report.must(again.is_none(), format!("{item} is in the inbox twice"));
        }
        before = next;
        if before.is_none() {
            return Ok(items);
        }
    }
}
