//! `chat-gateway import FILE`: imports conversations and messages from JSON lines, through the same owners and rules as
//! all other writes. It is idempotent: importing a file again, or a longer file that begins with it, adds only what is
//! new.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, anyhow, bail};
use futures_util::future::BoxFuture;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Deserialize;
use tokio::time::timeout;
use uuid::Uuid;

use crate::{
    chat::{
        self, Confirmation, Conversations, Creation, GetHistory, InboxWriter, LogRange,
        Publication, Publish,
    },
    cluster::MembershipAgent,
    config::Config,
    model::{
        Attachment, ClientId, Content, ConversationId, Draft, Kind, Millis, Posting, Seq, UserId,
        limits::{APPENDS_IN_FLIGHT_MAX, PAGE_ENTRIES_MAX},
    },
    node::open_store,
    tasks::Tasks,
};

/// Messages that are in progress at once.
const IN_FLIGHT_MAX: usize = 4 * APPENDS_IN_FLIGHT_MAX;
/// The time in which everything must be stored at the end.
const FINISH_TIMEOUT: Duration = Duration::from_secs(600);

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line {
    Conversation(ConversationLine),
    Message(MessageLine),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConversationLine {
    /// The id of a group or channel, a UUID of version 4 or 7. A dm has none.
    id: Option<ConversationId>,
    kind: Kind,
    /// The participants. The first one is the owner.
    participants: Vec<UserId>,
    name: Option<String>,
    #[serde(default)]
    public: bool,
    #[serde(default)]
    posting: Posting,
    at: Option<Millis>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageLine {
    conversation: Option<ConversationId>,
    /// The two users of a dm, instead of `conversation`.
    dm: Option<(UserId, UserId)>,
    sender: UserId,
    body: String,
    #[serde(default)]
    attachments: Vec<Attachment>,
    reply_to: Option<Seq>,
    at: Option<Millis>,
    /// The id of the message. By default it is computed from the message and its number among the
    /// file's messages of its conversation.
    client_id: Option<ClientId>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub conversations: u64,
    pub messages: u64,
    /// Messages that were stored before.
    pub skipped: u64,
}

/// Imports `file` into the configured store. No gateway may be using the store.
///
/// # Errors
/// The first wrong line, with its number. The lines before it are imported.
pub async fn import(config: &Config, file: &Path) -> anyhow::Result<Report> {
    let (core, upkeep) = (Tasks::default(), Tasks::default());
    let store = open_store(config, &upkeep).await?;
    let members = Arc::new(MembershipAgent::alone(store.clone()).await?);
    let inbox = Arc::new(InboxWriter::new(store.clone(), config.memory()));
    let keeping = members.clone();
    let keep = upkeep.spawn(async move {
        keeping.keep().await;
        tracing::error!("another gateway has taken over this store; the import cannot continue");
    });
    let mut settings = config.conversations();
    settings.operation_timeout = FINISH_TIMEOUT;
    settings.level = members.level();
    let conversations = Conversations::new(
        members.me(),
        store.clone(),
        Arc::new(Nobody),
        inbox.clone(),
        members.lease(),
        settings,
        core.clone(),
    );
    for &gone in members.gone() {
        conversations.repair(gone).await?;
    }
    let flushing = inbox.clone();
    let flush = upkeep.spawn(async move { flushing.run().await });
    let mut importer = Importer {
        conversations,
        seen: HashMap::new(),
        in_flight: VecDeque::new(),
        report: Report::default(),
        name: file.display().to_string(),
    };
    let imported = importer.file(file).await;
    let drained = importer.wait(0).await;
    let closed = timeout(FINISH_TIMEOUT, importer.conversations.close()).await;
    if closed.is_err() || !core.finished(FINISH_TIMEOUT).await {
        bail!("the conversations were not stored in time");
    }
    while !inbox.flush().await {
        store.healthy()?;
    }
    flush.abort();
    keep.abort();
    store.forget_activity(members.me()).await?;
    members.leave(std::future::ready(())).await;
    store.close().await?;
    imported.and(drained)?;
    Ok(importer.report)
}

/// A publisher that does nothing, because no sockets are open during an import.
struct Nobody;

impl Publish for Nobody {
    fn publish(&self, _: Publication) -> Confirmation {
        Confirmation::Immediate
    }
}

struct Importer {
    conversations: Conversations,
    /// The messages of each conversation that occurred in the file.
    seen: HashMap<ConversationId, Seen>,
    in_flight: VecDeque<(usize, BoxFuture<'static, Result<bool, chat::Error>>)>,
    report: Report,
    /// The name of the file.
    name: String,
}

#[derive(Default)]
struct Seen {
    messages: u64,
    before: HashSet<ClientId>,
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
            let line = line.with_context(at)?;
            progress.inc(line.len() as u64 + 1);
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let imported = match serde_json::from_slice(&line).with_context(at)? {
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

    async fn message(&mut self, number: usize, line: MessageLine) -> anyhow::Result<()> {
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
        if seen.before.contains(&client_id) {
            self.report.skipped += 1;
            return Ok(());
        }
        let draft = Draft {
            sender: line.sender,
            client_id,
            content: Content::Text {
                body: line.body,
                attachments: line.attachments,
                reply_to: line.reply_to,
            },
            at: line.at,
            retry: false,
        };
        let conversations = self.conversations.clone();
        let mut sent: BoxFuture<'static, _> = Box::pin(async move {
            conversations
                .send(conversation, draft)
                .await
                .map(|sent| sent.duplicate)
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
            seen.before.extend(page.entries.iter().map(|e| e.client_id));
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
