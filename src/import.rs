//! `chat-gateway import FILE`: imports conversations and messages from JSON lines, through the same owners and rules as
//! all other writes. It is idempotent: importing a file again, or a longer file that begins with it, adds only what is
//! new.

mod files;
mod lines;
mod times;

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

use anyhow::{Context, anyhow, bail};
use futures_util::future::BoxFuture;
use indicatif::{ProgressBar, ProgressStyle};
use uuid::Uuid;

use crate::{
    alone::Alone,
    chat::{
        self, Conversations, Creation, DeleteMessages, EditMessage, GetHistory, LogRange, React,
    },
    clock,
    config::Config,
    gateway::Files,
    model::{
        ClientId, Content, ConversationId, Draft, EditedContent, Kind, Millis, Seq, UserId,
        limits::{APPENDS_IN_FLIGHT_MAX, PAGE_ENTRIES_MAX},
        text,
    },
    node::open_store,
    tasks::Tasks,
};
use files::FileKeeper;
use lines::{ConversationLine, DeletedLine, Deletion, Line, MessageLine, ReactionLine};

/// Messages that are in progress at once.
const IN_FLIGHT_MAX: usize = 4 * APPENDS_IN_FLIGHT_MAX;
/// Some programs begin a text file with it.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The changes of an imported message.
struct Changes {
    sender: UserId,
    /// The newest edit: its time, and the content after it.
    edited: Option<(Millis, EditedContent)>,
    reactions: Vec<ReactionLine>,
    deleted: Option<Deletion>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub conversations: u64,
    pub messages: u64,
    pub files: u64,
    /// Names of links that were left out, because they show another address.
    pub names: u64,
    /// Messages that were stored before.
    pub skipped: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            conversations,
            messages,
            files,
            names,
            skipped,
        } = self;
        write!(
            f,
            "{conversations} conversations and {messages} messages imported, {skipped} messages were there already"
        )?;
        if *files > 0 {
            write!(f, ", {files} files kept")?;
        }
        if *names > 0 {
            write!(f, ", {names} names of links left out")?;
        }
        Ok(())
    }
}

impl MessageLine {
    /// Removes the names of links that show another address than the link's, and returns how many they were. The links
    /// remain, and show where they lead.
    fn remove_misleading_names(&mut self) -> u64 {
        let mut removed = 0;
        for link in self.attachments.iter_mut().filter(|a| a.id.is_none()) {
            let name = link.name.as_deref().unwrap_or_default();
            if text::link_name(name, &link.url) == Err(text::Wrong::OtherAddress) {
                link.name = None;
                removed += 1;
            }
        }
        removed
    }

    /// Returns the message as it is sent, and its changes if it has any.
    fn parts(self, client_id: ClientId) -> anyhow::Result<(Draft, Option<Changes>)> {
        let Self {
            sender,
            mut body,
            mut attachments,
            ..
        } = self;
        if let Some(wrong) = self
            .reactions
            .iter()
            .find(|r| text::emoji(&r.emoji).is_err())
        {
            bail!("{:?} is not an emoji", wrong.emoji);
        }
        let deleted = match self.deleted {
            DeletedLine::BySender(false) => None,
            DeletedLine::BySender(true) => Some(Deletion {
                by: sender.clone(),
                at: None,
            }),
            DeletedLine::By(deletion) => Some(deletion),
        };
        if deleted.is_some() {
            // The deleted text is not stored even for a moment. A message must have some text.
            (body, attachments) = ("…".into(), Vec::new());
        }
        let content = || EditedContent {
            body: body.clone(),
            attachments: attachments.clone(),
        };
        let edited_at = self.edited_at.filter(|_| deleted.is_none());
        let changes = Changes {
            sender: sender.clone(),
            edited: edited_at.map(|at| (at, content())),
            reactions: self.reactions,
            deleted,
        };
        let draft = Draft {
            sender,
            client_id,
            content: Content::Text {
                body,
                attachments,
                reply_to: self.reply_to,
            },
            at: self.at,
            retry: false,
        };
        Ok((draft, changes.any().then_some(changes)))
    }
}

impl Changes {
    fn any(&self) -> bool {
        self.edited.is_some() || self.deleted.is_some() || !self.reactions.is_empty()
    }

    /// Applies the changes to a message. With `again`, an earlier import may have applied some of them: what conflicts
    /// with the state of the message is then left out.
    async fn apply(
        self,
        conversations: &Conversations,
        conversation: ConversationId,
        seq: Seq,
        again: bool,
    ) -> Result<(), chat::Error> {
        let applied = |result: Result<u64, chat::Error>| match result {
            Err(chat::Error::Conflict(_)) if again => Ok(()),
            result => result.map(drop),
        };
        if let Some((at, content)) = self.edited {
            let edit = EditMessage {
                seq,
                content: content.into(),
                // So an edit that was imported before, or made since, is not repeated or undone.
                base_rev: Some(0),
                at: Some(at),
            };
            applied(
                conversations
                    .ask(conversation, self.sender.clone(), edit)
                    .await,
            )?;
        }
        for ReactionLine { user, emoji, at } in self.reactions {
            let react = React {
                seq,
                emoji,
                on: true,
                // Reactions with a time are imported ones, to which fewer limits apply.
                at: at.or_else(|| Some(clock::wall())),
            };
            applied(conversations.ask(conversation, user, react).await)?;
        }
        if let Some(Deletion { by, at }) = self.deleted {
            let delete = DeleteMessages {
                seqs: vec![seq],
                as_moderator: by != self.sender,
                at,
            };
            applied(conversations.ask(conversation, by, delete).await)?;
        }
        Ok(())
    }
}

/// Imports `file` into the configured store. No gateway may be using the store.
///
/// # Errors
/// The first wrong line, with its number. The lines before it are imported.
pub async fn import(config: &Config, file: &Path) -> anyhow::Result<Report> {
    let upkeep = Tasks::default();
    let store = open_store(config, &upkeep).await?;
    let alone = Alone::open(config, store, &upkeep).await?;
    alone.repair().await?;
    let pictures = Tasks::default();
    let (publish, core) = (alone.publish.clone(), alone.core.clone());
    let files = Files::open(config, alone.store.clone(), publish, core, pictures)?;
    let keeper = FileKeeper::beside(file, files);
    let mut importer = Importer {
        conversations: alone.conversations.clone(),
        keeper,
        seen: HashMap::new(),
        in_flight: VecDeque::new(),
        report: Report::default(),
        name: file.display().to_string(),
    };
    let imported = importer.file(file).await;
    let drained = importer.wait(0).await;
    alone.close(true).await?;
    imported.and(drained)?;
    Ok(importer.report)
}

struct Importer {
    conversations: Conversations,
    keeper: FileKeeper,
    /// The messages of each conversation that occurred in the file.
    seen: HashMap<ConversationId, Seen>,
    /// Lines in progress, with their numbers. Each returns whether its message was stored before.
    in_flight: VecDeque<(usize, BoxFuture<'static, Result<bool, chat::Error>>)>,
    report: Report,
    /// The name of the file.
    name: String,
}

#[derive(Default)]
struct Seen {
    messages: u64,
    before: HashMap<ClientId, Seq>,
}

impl Importer {
    async fn file(&mut self, path: &Path) -> anyhow::Result<()> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let progress = ProgressBar::new(file.metadata()?.len());
        let style = "{bar:40} {percent}% {bytes} of {total_bytes}, {eta} left, {msg}";
        progress.set_style(ProgressStyle::with_template(style)?);
        for (index, line) in BufReader::new(file).split(b'\n').enumerate() {
            let number = index + 1;
            let at = || format!("{}:{number}", path.display());
            let mut line = line.with_context(at)?;
            if number == 1 && line.starts_with(BYTE_ORDER_MARK) {
                line.drain(..BYTE_ORDER_MARK.len());
            }
            progress.inc(line.len() as u64 + 1);
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let read = Line::read(&line).map_err(anyhow::Error::msg);
            let line = read.with_context(at)?;
            times::check(&line, clock::wall()).with_context(at)?;
            let imported = match line {
                Line::Conversation(line) => self.conversation(line).await,
                Line::Message(line) => self.message(number, line).await,
            };
            imported.with_context(at)?;
            self.wait(IN_FLIGHT_MAX).await?;
            if index % 1024 == 0 {
                progress.set_message(format!("{} messages", self.report.messages));
            }
        }
        progress.finish_and_clear();
        Ok(())
    }

    async fn conversation(&mut self, line: ConversationLine) -> anyhow::Result<()> {
        let [owner, others @ ..] = &line.participants[..] else {
            bail!("a conversation needs participants");
        };
        let conversation = match (line.kind, line.id, others) {
            (Kind::Dm, None, []) => ConversationId::dm(owner, owner),
            (Kind::Dm, None, [other]) => ConversationId::dm(owner, other),
            (Kind::Dm, ..) => {
                bail!("a dm has one or two participants and no id")
            }
            (_, Some(id), _) if id.may_be_chosen() => id,
            _ => bail!("a group or channel has an id: a UUID of version 4 or 7"),
        };
        let creation = Creation {
            kind: line.kind,
            participants: others.to_vec(),
            name: line.name,
            public: line.public,
            posting: line.posting,
            at: line.at,
        };
        let created = self
            .conversations
            .ask(conversation, owner.clone(), creation)
            .await?;
        self.report.conversations += u64::from(!created.existed);
        self.meet(conversation, owner).await
    }

    async fn message(&mut self, number: usize, mut line: MessageLine) -> anyhow::Result<()> {
        let conversation = match (line.conversation, &line.dm) {
            (Some(id), None) => id,
            (None, Some((one, other))) => ConversationId::dm(one, other),
            _ => bail!("a message has either a conversation or a dm"),
        };
        if !self.seen.contains_key(&conversation) {
            self.meet(conversation, &line.sender).await?;
        }
        let seen = self.seen.entry(conversation).or_default();
        seen.messages += 1;
        let computed = || {
            let name = format!("import {} {} {}", seen.messages, line.sender, line.body);
            ClientId(Uuid::new_v5(&conversation.0, name.as_bytes()))
        };
        let client_id = line.client_id.unwrap_or_else(computed);
        let before = seen.before.get(&client_id).copied();
        let removed = line.remove_misleading_names();
        if before.is_none() && !line.deleted.is_any() {
            self.report.names += removed;
            let (keeper, sender) = (&self.keeper, &line.sender);
            let kept = keeper.keep(conversation, sender, &line.files).await?;
            self.report.files += kept.len() as u64;
            line.attachments.extend(kept);
        }
        let (draft, changes) = line.parts(client_id)?;
        if before.is_some() && changes.is_none() {
            self.report.skipped += 1;
            return Ok(());
        }
        let conversations = self.conversations.clone();
        let mut sent: BoxFuture<'static, _> = Box::pin(async move {
            let (seq, duplicate) = match before {
                Some(seq) => (seq, true),
                None => {
                    let sent = conversations.send(conversation, draft).await?;
                    (sent.seq, sent.duplicate)
                }
            };
            if let Some(changes) = changes {
                let applied = changes.apply(&conversations, conversation, seq, duplicate);
                applied.await?;
            }
            Ok(duplicate)
        });
        // Polled here once, so that messages arrive in the order of the file.
        match futures_util::poll!(&mut sent) {
            std::task::Poll::Ready(result) => self.count(result?),
            std::task::Poll::Pending => self.in_flight.push_back((number, sent)),
        }
        Ok(())
    }

    /// Waits until at most `most` messages are in progress.
    async fn wait(&mut self, most: usize) -> anyhow::Result<()> {
        while self.in_flight.len() > most
            && let Some((number, sent)) = self.in_flight.pop_front()
        {
            let duplicate = sent
                .await
                .map_err(|e| anyhow!("{}:{number}: {e}", self.name))?;
            self.count(duplicate);
        }
        Ok(())
    }

    fn count(&mut self, duplicate: bool) {
        if duplicate {
            self.report.skipped += 1;
        } else {
            self.report.messages += 1;
        }
    }

    /// Reads the client ids of the messages that a conversation already has.
    async fn meet(&mut self, conversation: ConversationId, reader: &UserId) -> anyhow::Result<()> {
        let mut seen = Seen::default();
        let mut after = 0;
        loop {
            let history = GetHistory {
                range: LogRange::After(after),
                limit: PAGE_ENTRIES_MAX,
            };
            let asked = self
                .conversations
                .ask(conversation, reader.clone(), history);
            let page = asked.await?;
            let entries = page.entries.iter();
            seen.before.extend(entries.map(|e| (e.client_id, e.seq)));
            match page.entries.last() {
                Some(last) if last.seq < page.head => after = last.seq,
                _ => break,
            }
        }
        let known = self.seen.entry(conversation).or_default();
        known.before.extend(seen.before);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(fields: &str) -> anyhow::Result<(Draft, Option<Changes>)> {
        let text = format!(r#"{{"type": "message", "sender": "alice", "body": "hi"{fields}}}"#);
        match Line::read(text.as_bytes()).map_err(anyhow::Error::msg)? {
            Line::Message(line) => line.parts(ClientId(Uuid::nil())),
            Line::Conversation(_) => bail!("a conversation"),
        }
    }

    fn body(draft: &Draft) -> &str {
        match &draft.content {
            Content::Text { body, .. } => body,
            Content::System(_) => "",
        }
    }

    #[test]
    fn a_plain_message_has_no_changes() {
        for fields in ["", r#", "deleted": false, "reactions": []"#] {
            let (draft, changes) = parts(fields).unwrap();
            assert!(changes.is_none(), "{fields}");
            assert_eq!(body(&draft), "hi");
        }
    }

    #[test]
    fn an_edited_message_is_sent_with_its_newest_text() {
        let (draft, changes) = parts(r#", "edited_at": 7"#).unwrap();
        let (at, content) = changes.unwrap().edited.unwrap();
        assert_eq!((at, content.body.as_str(), body(&draft)), (7, "hi", "hi"));
    }

    #[test]
    fn the_text_of_a_deleted_message_is_never_sent() {
        let links = r#", "attachments": [{"url": "https://example.org/a"}], "edited_at": 7"#;
        for (deleted, by, at) in [
            ("true", "alice", None),
            (r#"{"by": "bob"}"#, "bob", None),
            (r#"{"by": "bob", "at": 9}"#, "bob", Some(9)),
        ] {
            let (draft, changes) = parts(&format!(r#"{links}, "deleted": {deleted}"#)).unwrap();
            let changes = changes.unwrap();
            let text = format!("{:?}", draft.content);
            assert!(!text.contains("hi") && !text.contains("example"), "{text}");
            assert!(changes.edited.is_none());
            let deletion = changes.deleted.unwrap();
            assert_eq!((deletion.by.as_str(), deletion.at), (by, at));
        }
    }

    #[test]
    fn reactions_are_checked() {
        let line = |emoji: &str| {
            parts(&format!(
                r#", "reactions": [{{"user": "bob", "emoji": "{emoji}"}}]"#
            ))
        };
        assert_eq!(line("👍").unwrap().1.unwrap().reactions.len(), 1);
        assert!(line("").is_err() && line("a b").is_err());
        assert!(parts(r#", "deleted": {"when": 1}"#).is_err());
    }
}
