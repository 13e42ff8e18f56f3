//! Handles each operation of an owner. Nothing here waits: writes are started as work of the owner, and the answer
//! follows when the work is done.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Command, Done, Owner, OwnerReply, ReadLog, Reply, effects::PendingEntry, retry_while_owner,
};
use crate::{
    chat::{
        error::Error,
        operation::{
            Creation, DetailsView, Head, Listed, LogRange, MarkDelivered, Operation, Outcome, Page,
            ParticipantsPage, SendAck, fresh_client_id,
        },
        participants::{CheckedChange, Committed, Participants, check_creation},
        publish::{Audience, Publication},
    },
    clock,
    model::{
        Attachment, Content, ConversationId, Details, Draft, Entry, Kind, Millis, Newest, Seq,
        SystemChange, UserId, file_ids,
        limits::{ATTACHMENT_BYTES_MAX, ATTACHMENTS_MAX, MAILBOX_OPERATIONS_MAX},
        text,
    },
    mutation::{Mutation, broken},
    store::{Applied, Mark},
};

/// The time in which at most one typing event of a user is published.
const TYPING_EVERY: Duration = Duration::from_secs(3);
/// Users whose last typing event is remembered. Above this, those older than [`TYPING_EVERY`] are forgotten.
const TYPING_USERS: usize = 64;

type Answered = Result<Outcome, Error>;

impl Owner {
    /// Handles one operation. Its reply is sent now or when its work is done.
    pub(super) fn handle(&mut self, command: Command) {
        let (actor, operation, reply) = (command.actor, command.operation, command.reply);
        if reply.is_closed() {
            return; // The caller does not wait any more.
        }
        assert!(
            !(cfg!(test) && broken(Mutation::Panic)),
            "the mutation `Panic`"
        );
        match operation {
            Operation::Create(creation) => self.create(&actor, &creation, reply),
            Operation::Send(draft) => self.send(draft, reply),
            Operation::Add { .. }
            | Operation::Remove { .. }
            | Operation::Join
            | Operation::Leave
            | Operation::SetRole { .. }
            | Operation::Update { .. } => self.change(actor, &operation, reply),
            Operation::Read { seq } => self.mark(actor, Some(seq), None, false, reply),
            Operation::Delivered(MarkDelivered { seq, away }) => {
                self.mark(actor, None, Some(seq), away, reply);
            }
            Operation::Details => drop(reply.send(self.details(&actor).map(OwnerReply::Ready))),
            Operation::Participants { after, limit } => {
                drop(reply.send(self.list(actor, after, limit)));
            }
            Operation::History { range, limit } => {
                drop(reply.send(self.history(actor, range, limit)));
            }
            Operation::Typing => drop(reply.send(self.typing(actor).map(OwnerReply::Ready))),
            Operation::Head => drop(reply.send(self.head(&actor).map(OwnerReply::Ready))),
            Operation::CatchUp { after, limit } => {
                drop(reply.send(self.catch_up(actor, after, limit)));
            }
            Operation::Edit(edit) => self.edit(actor, &edit, reply),
            Operation::Delete(delete) => self.delete(actor, &delete, reply),
            Operation::React(react) => self.react(actor, &react, reply),
            Operation::Reactors(asked) => drop(reply.send(self.reactors(&actor, asked))),
            Operation::Changes { after, limit } => {
                let may = self.view().and_then(|view| view.check_reading(&actor));
                drop(reply.send(may.and_then(|()| self.changes_after(actor, after, limit))));
            }
            Operation::CatchUpChanges { after, limit } => {
                drop(reply.send(self.changes_after(actor, after, limit)));
            }
            Operation::Files { files } => drop(reply.send(self.files(&actor, files))),
            Operation::CheckFile { file } => drop(reply.send(Ok(self.check_file(file)))),
            Operation::SetConsumer {
                consumer,
                enabled,
                reason,
            } => {
                let state = self.consumer_state(enabled, reason);
                drop(reply.send(state.map(|state| OwnerReply::SetConsumer(consumer, state))));
            }
            Operation::Load => {
                // A gateway also asks when a scan found that the conversation lags.
                self.asked_by_scan();
                drop(reply.send(Ok(OwnerReply::Ready(Outcome::Done))));
            }
            // A repair is many operations: see `Conversations::repair_one`.
            Operation::Repair => drop(reply.send(Ok(OwnerReply::Ready(Outcome::Done)))),
        }
    }

    /// The participants as of the newest appended entry.
    pub(super) fn known(&self) -> Result<&Participants, Error> {
        self.participants.as_ref().ok_or(Error::UnknownConversation)
    }

    /// The committed state, which replies may contain.
    pub(super) fn view(&self) -> Result<Committed<'_>, Error> {
        let committed = self.known()?.committed();
        committed.ok_or(Error::UnknownConversation)
    }

    /// Creates the conversation. A participant who creates it again gets the existing one.
    fn create(&mut self, creator: &UserId, creation: &Creation, reply: Reply) {
        if let Ok(existing) = self.view() {
            let same = existing.details.kind == creation.kind;
            let answer = if same && existing.get(creator).is_some() {
                Ok(OwnerReply::Ready(Outcome::Created { existed: true }))
            } else {
                Err(Error::Conflict(
                    "this id is taken by another conversation".into(),
                ))
            };
            drop(reply.send(answer));
            return;
        }
        if creation.kind == Kind::Dm {
            return self.create_dm(creator, creation, reply);
        }
        let max = self.environment.settings.group_participants_max;
        match check_creation(creator, creation, max) {
            Err(error) => drop(reply.send(Err(error))),
            Ok(change) => self.append_change(creator.clone(), change, creation.at, reply),
        }
    }

    fn create_dm(&mut self, creator: &UserId, creation: &Creation, reply: Reply) {
        let other = creation
            .participants
            .iter()
            .find(|u| *u != creator)
            .unwrap_or(creator);
        if ConversationId::dm(creator, other) != self.id {
            drop(reply.send(Err(Error::invalid("this is not the id of that dm"))));
            return;
        }
        let details = Details {
            kind: Kind::Dm,
            name: None,
            created_at: creation.at.unwrap_or_else(clock::wall),
            created_by: creator.clone(),
            posting: crate::model::Posting::Everyone,
            public: false,
        };
        let users = [creator.clone(), other.clone()];
        let mut participants = Participants::dm(self.id, details, &users);
        participants.propose_dm();
        self.store_dm(&participants.dm_rows(), reply);
        self.participants = Some(participants);
    }

    fn store_dm(&mut self, rows: &Applied, reply: Reply) {
        let (id, environment, rows) = (self.id, self.environment.clone(), rows.clone());
        let ownership = self.ownership.clone();
        self.work.push(Box::pin(async move {
            let store = &environment.store;
            match retry_while_owner(&ownership, || store.apply(id, &rows)).await {
                Ok(()) => Done::DmCreated(reply),
                Err(error) => Done::Lost(error),
            }
        }));
    }

    fn send(&mut self, mut draft: Draft, reply: Reply) {
        let checked = self
            .known()
            .and_then(|p| p.check_posting(&draft.sender))
            .and_then(|()| self.check_content(&draft.content));
        if let Err(error) = checked {
            drop(reply.send(Err(error)));
            return;
        }
        if let Some(seq) = self.client_ids.find(&draft.sender, draft.client_id) {
            return self.repeated(seq, reply);
        }
        if let Content::Text { attachments, .. } = &mut draft.content
            && file_ids(attachments).next().is_some()
        {
            match self.with_facts(&draft.sender, attachments) {
                Ok(complete) => *attachments = complete,
                Err(error) => return drop(reply.send(Err(error))),
            }
        }
        self.append(draft, reply);
    }

    /// Appends a draft as the next entry. Its row is written at the end of this round.
    fn append(&mut self, draft: Draft, reply: Reply) {
        let now = clock::wall();
        let at = draft.at.unwrap_or(now);
        // An imported entry has the rank of its time, unless it is ahead of all others.
        let rank = self.environment.inbox.ranks().next(now);
        let rank = draft.at.map_or(rank, |at| rank.min(clock::rank(at)));
        let is_text = matches!(draft.content, Content::Text { .. });
        let texts = self.texts + u64::from(is_text);
        let (id, participants) = (self.id, &mut self.participants);
        let appended = self.log.append(|seq| {
            let entry = Arc::new(Entry {
                seq,
                message_id: clock::message_id_at(rank),
                client_id: draft.client_id,
                sender: draft.sender,
                at,
                content: draft.content,
                texts,
            });
            if participants.is_none() {
                *participants = Participants::of_first_entry(id, &entry);
            }
            match participants {
                Some(participants) => {
                    participants.propose(&entry);
                    PendingEntry::new(id, participants, entry)
                }
                None => PendingEntry::without_effects(entry),
            }
        });
        let Some(row) = appended else {
            // It does not happen, because `accepts` is checked before each operation.
            return drop(reply.send(Err(Error::BUSY)));
        };
        self.client_ids.remember(&row.record);
        self.texts = row.record.texts;
        if let Some(pending) = self.log.get_mut(row.record.seq) {
            pending.replies.push(reply);
        }
        self.unwritten.push(row);
    }

    /// Answers a repeated message like the first one, as soon as the first one is acknowledged.
    fn repeated(&mut self, seq: Seq, reply: Reply) {
        let Err(reply) = self.answer_with(seq, reply) else {
            return;
        };
        let answer = match self.recent.range(seq, seq).as_deref() {
            Some([entry]) => OwnerReply::Ready(Outcome::Sent(SendAck::of(entry, true))),
            _ => OwnerReply::ReadSent { seq },
        };
        drop(reply.send(Ok(answer)));
    }

    pub(super) fn check_content(&self, content: &Content) -> Result<(), Error> {
        let Content::Text {
            body,
            attachments,
            reply_to,
        } = content
        else {
            return Ok(());
        };
        self.check_body(body, attachments)?;
        self.check_attachments(attachments, &[])?;
        if reply_to.is_some_and(|seq| seq == 0 || seq >= self.log.next()) {
            return Err(Error::invalid(
                "reply_to is no message of this conversation",
            ));
        }
        Ok(())
    }

    /// Checks the text of a message with these attachments.
    pub(super) fn check_body(&self, body: &str, attachments: &[Attachment]) -> Result<(), Error> {
        if self.environment.inbox.is_full() {
            return Err(Error::BUSY);
        }
        let max = self.environment.settings.body_bytes_max;
        if body.len() > max {
            return Err(Error::TooLarge {
                what: "bytes of a body".into(),
                max,
            });
        }
        if body.is_empty() && attachments.is_empty() {
            return Err(Error::invalid("a message has a body or an attachment"));
        }
        text::check_body(body).map_err(|wrong| Error::invalid(format!("the body {wrong}")))
    }

    /// Checks the attachments that a request names, without those that the message had before, maybe under other rules.
    pub(super) fn check_attachments(
        &self,
        attachments: &[Attachment],
        before: &[Attachment],
    ) -> Result<(), Error> {
        if attachments.len() > ATTACHMENTS_MAX {
            return Err(Error::TooLarge {
                what: "attachments of a message".into(),
                max: ATTACHMENTS_MAX,
            });
        }
        let mut new = attachments.iter().filter(|given| !before.contains(given));
        new.try_for_each(check_attachment)
    }

    fn change(&mut self, actor: UserId, operation: &Operation, reply: Reply) {
        let max = self.environment.settings.group_participants_max;
        let checked = self
            .known()
            .and_then(|p| p.check_change(&actor, operation, max));
        match checked {
            Ok(CheckedChange::New(change)) => self.append_change(actor, change, None, reply),
            Ok(CheckedChange::DoneBefore(seq)) => self.repeated_change(seq, reply),
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    /// Answers a change that an earlier entry made, as soon as that entry is acknowledged. Perhaps the client repeats the
    /// request because its connection broke.
    fn repeated_change(&mut self, seq: Seq, reply: Reply) {
        if let Err(reply) = self.answer_with(seq, reply) {
            drop(reply.send(Ok(OwnerReply::Ready(Outcome::Changed { seq }))));
        }
    }

    fn append_change(
        &mut self,
        actor: UserId,
        change: SystemChange,
        at: Option<Millis>,
        reply: Reply,
    ) {
        let draft = Draft {
            sender: actor,
            client_id: fresh_client_id(),
            content: Content::System(change),
            at,
            retry: false,
        };
        self.append(draft, reply);
    }

    fn mark(
        &mut self,
        user: UserId,
        read: Option<Seq>,
        delivered: Option<Seq>,
        away: bool,
        reply: Reply,
    ) {
        let head = self.log.head();
        let checked = self.view().and_then(|committed| {
            committed.check_in(&user)?;
            if read.max(delivered).is_some_and(|seq| seq > head) {
                return Err(Error::invalid("that seq is beyond the newest message"));
            }
            Ok(committed.details.kind)
        });
        let kind = match checked {
            Ok(kind) => kind,
            Err(error) => return drop(reply.send(Err(error))),
        };
        if self.marks >= MAILBOX_OPERATIONS_MAX {
            return drop(reply.send(Err(Error::BUSY)));
        }
        self.marks += 1;
        // A mark is stored even if it raises nothing: an earlier one may not be stored yet, or a dead owner may have stored
        // a higher one in the participant's row only, which then gets into the inbox row. It is published and shown only
        // when it is stored.
        let known = self.known().ok().and_then(|known| known.get(&user));
        let known = known.map_or(0, |participant| participant.read_seq);
        let read = read.map(|seq| seq.max(known));
        let mark = Mark {
            user,
            read_seq: read,
            read_texts: read.map_or(0, |seq| self.texts_at(seq)),
            // A message that was read has been delivered.
            delivered_seq: read.max(delivered),
        };
        let (id, environment, ownership) =
            (self.id, self.environment.clone(), self.ownership.clone());
        self.work.push(Box::pin(async move {
            let store = &environment.store;
            match retry_while_owner(&ownership, || store.mark(id, kind, &mark)).await {
                Ok(()) => Done::Marked { mark, away, reply },
                Err(error) => Done::Lost(error),
            }
        }));
    }

    /// The number of people's messages up to an entry, which is known by now.
    fn texts_at(&self, seq: Seq) -> u64 {
        if broken(Mutation::ReadTexts) {
            return self.texts_at_head();
        }
        let recent = self.recent.range(seq, seq);
        let recent = recent.and_then(|entries| entries.first().map(|entry| entry.texts));
        let known = || {
            self.changes
                .states
                .entry(seq)
                .map(|known| known.entry.texts)
        };
        recent.or_else(known).unwrap_or(seq)
    }

    fn details(&self, actor: &UserId) -> Answered {
        let committed = self.view()?;
        committed.check_reading(actor)?;
        Ok(Outcome::Details(DetailsView {
            details: committed.details.clone(),
            participant_count: committed.count,
            head: self.log.head(),
            rev: self.changes.applied,
            message_count: self
                .texts_at_head()
                .saturating_sub(self.changes.deleted_applied.1.count),
            role: committed.get(actor).map(|p| p.role),
        }))
    }

    fn list(
        &self,
        actor: UserId,
        after: Option<UserId>,
        limit: usize,
    ) -> Result<OwnerReply, Error> {
        let committed = self.view()?;
        committed.check_reading(&actor)?;
        if committed.details.kind == Kind::Channel {
            return Ok(OwnerReply::ReadParticipants {
                actor,
                after,
                limit,
            });
        }
        let some = committed.after(after.as_ref()).take(limit + 1);
        let mut items: Vec<_> = some.map(|p| Listed::of(p, true)).collect();
        let more = items.len() > limit;
        items.truncate(limit);
        let next = if more {
            items.last().map(|p| p.user.clone())
        } else {
            None
        };
        Ok(OwnerReply::Ready(Outcome::Participants(ParticipantsPage {
            items,
            next,
        })))
    }

    fn history(&self, actor: UserId, range: LogRange, limit: usize) -> Result<OwnerReply, Error> {
        self.view()?.check_reading(&actor)?;
        self.page(actor, range, limit)
    }

    fn page(&self, actor: UserId, range: LogRange, limit: usize) -> Result<OwnerReply, Error> {
        let (head, rev) = (self.log.head(), self.changes.applied);
        let (from, to) = range.within(head, limit);
        let Some(entries) = self.recent.range(from, to) else {
            return Ok(OwnerReply::ReadLog(Box::new(ReadLog {
                actor,
                from,
                to,
                head,
                rev,
                touched: self.changes.touched(from, to),
            })));
        };
        let states = if from > to {
            Vec::new()
        } else {
            self.changes.states.applied(from, to)
        };
        let page = Page {
            entries,
            head,
            rev,
            states,
            mine: Vec::new(),
        };
        Ok(OwnerReply::Page { actor, page })
    }

    /// Answers a gateway. It needs no check of a user, because the gateway checked each subscription.
    fn catch_up(&self, actor: UserId, after: Seq, limit: usize) -> Result<OwnerReply, Error> {
        self.view()?;
        self.page(actor, LogRange::After(after), limit)
    }

    fn head(&self, actor: &UserId) -> Answered {
        let committed = self.view()?;
        committed.check_reading(actor)?;
        Ok(Outcome::Head(Box::new(Head {
            details: committed.details.clone(),
            head: self.log.head(),
            last: self.recent.newest().map(|entry| self.shown(entry).last),
            rev: self.changes.applied,
            texts: self.texts_at_head(),
            deleted: self.changes.deleted_applied.1.clone(),
        })))
    }

    /// An entry with its applied state.
    pub(super) fn shown(&self, entry: &Entry) -> Newest {
        let known = self.changes.states.entry(entry.seq);
        entry.newest(known.map(|known| known.applied.as_ref()))
    }

    /// The number of people's messages in the committed log.
    fn texts_at_head(&self) -> u64 {
        self.recent.newest().map_or(0, |newest| newest.texts)
    }

    /// Publishes a typing event, except in channels. It is stored nowhere.
    fn typing(&mut self, user: UserId) -> Answered {
        self.view()?.check_in(&user)?;
        self.known()?.check_posting(&user)?;
        let now = Instant::now();
        if self
            .typing
            .get(&user)
            .is_some_and(|&last| now < last + TYPING_EVERY)
        {
            return Ok(Outcome::Done);
        }
        if self.typing.len() >= TYPING_USERS {
            self.typing.retain(|_, last| now < *last + TYPING_EVERY);
        }
        self.typing.insert(user.clone(), now);
        let Some(participants) = &mut self.participants else {
            return Ok(Outcome::Done);
        };
        if let Some(audience @ Audience::Members(_)) = participants.audience_committed() {
            let typing = Publication::typing(self.id, user, audience);
            drop(self.environment.publish.publish(typing));
        }
        Ok(Outcome::Done)
    }
}

fn check_attachment(attachment: &Attachment) -> Result<(), Error> {
    let Attachment {
        id,
        url,
        name,
        mime,
        size: _,
        alt,
        width: _,
        height: _,
    } = attachment;
    if id.is_some() && !url.is_empty() {
        return Err(Error::invalid("an attachment has an id or a url, not both"));
    }
    let texts = [name, mime, alt].into_iter().flatten();
    let described: usize = texts.map(String::len).sum();
    if url.len().max(described) > ATTACHMENT_BYTES_MAX {
        return Err(Error::TooLarge {
            what: "bytes of an attachment".into(),
            max: ATTACHMENT_BYTES_MAX,
        });
    }
    let wrong =
        |what: &str, wrong: text::Wrong| Error::invalid(format!("an attachment's {what} {wrong}"));
    if id.is_none() {
        text::link_url(url).map_err(|fault| wrong("url", fault))?;
        // The name of an uploaded file is the one that the gateway keeps.
        let named = name.as_deref().filter(|name| !name.is_empty());
        let checked = named.map_or(Ok(()), |name| text::link_name(name, url));
        checked.map_err(|fault| wrong("name", fault))?;
    }
    text::check_alt(alt.as_deref().unwrap_or_default()).map_err(|fault| wrong("alt", fault))?;
    let mut mime = mime.iter().flat_map(|mime| mime.bytes());
    if !mime.all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        return Err(Error::invalid(
            "an attachment's mime has letters of ASCII only",
        ));
    }
    Ok(())
}
