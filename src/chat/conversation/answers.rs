//! What the owner does with each operation. None of it waits: whatever must be stored is put to work, and
//! the answer follows when that is done.

use std::time::Duration;

use tokio::time::Instant;

use super::{Answer, Command, Done, Owner, Reply, Waiting, insist, sent};
use crate::{
    chat::{
        error::Error,
        log::Appended,
        operation::{
            Creation, DetailsView, Head, Listed, LogRange, Operation, Outcome, Page,
            ParticipantsPage, fresh_client_id,
        },
        participants::{Committed, Participants, check_creation},
        publish::{Audience, Publication},
    },
    clock,
    model::{
        Attachment, Content, ConversationId, Details, Draft, Kind, Millis, Seq, SystemChange,
        UserId,
        limits::{ATTACHMENT_BYTES_MAX, ATTACHMENTS_MAX, MAILBOX_OPERATIONS_MAX},
    },
    mutation::{Mutation, broken},
    store::{Applied, Mark},
};

/// One typing event of a user in this time is enough.
const TYPING_EVERY: Duration = Duration::from_secs(3);
/// Users whose last typing is remembered; more are forgotten by age.
const TYPING_USERS: usize = 64;

type Answered = Result<Outcome, Error>;

impl Owner {
    pub(super) fn handle(&mut self, command: Command) {
        let Command {
            actor,
            operation,
            reply,
        } = command;
        if reply.is_closed() {
            return; // Whoever asked has given up.
        }
        assert!(!(cfg!(test) && broken(Mutation::Panic)), "it was told to");
        match operation {
            Operation::Create(creation) => self.create(&actor, &creation, reply),
            Operation::Send(draft) => self.send(draft, reply),
            Operation::Add { .. }
            | Operation::Remove { .. }
            | Operation::Join
            | Operation::Leave
            | Operation::SetRole { .. }
            | Operation::Update { .. } => self.change(actor, &operation, reply),
            Operation::Read { seq } => self.mark(actor, Some(seq), None, reply),
            Operation::Delivered { seq } => self.mark(actor, None, Some(seq), reply),
            Operation::Details => drop(reply.send(self.details(&actor).map(Answer::Ready))),
            Operation::Participants { after, limit } => {
                drop(reply.send(self.list(actor, after, limit)));
            }
            Operation::History { range, limit } => {
                drop(reply.send(self.history(&actor, range, limit)));
            }
            Operation::Typing => drop(reply.send(self.typing(actor).map(Answer::Ready))),
            Operation::Head => drop(reply.send(self.head(&actor).map(Answer::Ready))),
            Operation::CatchUp { after, limit } => {
                drop(reply.send(self.catch_up(after, limit)));
            }
            // Goes through many operations: see `Conversations::ask`.
            Operation::Repair => drop(reply.send(Ok(Answer::Ready(Outcome::Done)))),
        }
    }

    fn known(&self) -> Result<&Participants, Error> {
        self.participants.as_ref().ok_or(Error::UnknownConversation)
    }

    /// What may be told of it: what is committed.
    fn view(&self) -> Result<Committed<'_>, Error> {
        let committed = self.known()?.committed();
        committed.ok_or(Error::UnknownConversation)
    }

    /// Creating twice is one conversation, for whoever is in it.
    fn create(&mut self, creator: &UserId, creation: &Creation, reply: Reply) {
        if let Ok(existing) = self.view() {
            let same = existing.details.kind == creation.kind;
            let answer = if same && existing.get(creator).is_some() {
                Ok(Answer::Ready(Outcome::Created { existed: true }))
            } else {
                Err(Error::Conflict(
                    "this id is taken by another conversation".into(),
                ))
            };
            drop(reply.send(answer));
            return;
        }
        if creation.kind == Kind::Dm {
            return self.found_dm(creator, creation, reply);
        }
        let max = self.environment.settings.group_participants_max;
        match check_creation(creator, creation, max) {
            Err(error) => drop(reply.send(Err(error))),
            Ok(change) => self.append_change(creator.clone(), change, creation.at, reply),
        }
    }

    fn found_dm(&mut self, creator: &UserId, creation: &Creation, reply: Reply) {
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
        participants.propose_founding();
        self.store_founded(&participants.founded(), reply);
        self.participants = Some(participants);
    }

    fn store_founded(&mut self, founded: &Applied, reply: Reply) {
        let (id, environment, founded) = (self.id, self.environment.clone(), founded.clone());
        let ownership = self.ownership.clone();
        self.work.push(Box::pin(async move {
            let store = &environment.store;
            match insist(&ownership, || store.apply(id, &founded)).await {
                Ok(()) => Done::Founded(reply),
                Err(error) => Done::Lost(error),
            }
        }));
    }

    fn send(&mut self, draft: Draft, reply: Reply) {
        let checked = self
            .known()
            .and_then(|p| p.check_posting(&draft.sender))
            .and_then(|()| self.check_content(&draft.content));
        if let Err(error) = checked {
            drop(reply.send(Err(error)));
            return;
        }
        let Some(participants) = &mut self.participants else {
            return;
        };
        let at = draft.at.unwrap_or_else(clock::wall);
        match self.log.append(draft, clock::message_id(at), at) {
            Appended::New(row) => {
                let mut waiting = Waiting::of(participants, &row.entry);
                waiting.replies.push((reply, false));
                self.unwritten.push(row);
                self.waiting.push_back(waiting);
            }
            Appended::Repeated(seq) => self.repeated(seq, reply),
            // `accepts` was asked before each operation.
            Appended::Full => drop(reply.send(Err(Error::BUSY))),
        }
    }

    /// The same message again: it gets the first one's answer, when there is one.
    fn repeated(&mut self, seq: Seq, reply: Reply) {
        if let Some(index) = seq.checked_sub(self.log.head() + 1) {
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            if let Some(waiting) = self.waiting.get_mut(index) {
                waiting.replies.push((reply, true));
            }
            return;
        }
        if let Some([entry]) = self.log.recent(seq, seq).as_deref() {
            drop(reply.send(Ok(Answer::Ready(Outcome::Sent(sent(entry, true))))));
            return;
        }
        let head = self.log.head();
        drop(reply.send(Ok(Answer::ReadLog {
            from: seq,
            to: seq,
            head,
        })));
    }

    fn check_content(&self, content: &Content) -> Result<(), Error> {
        let Content::Text {
            body,
            attachments,
            reply_to,
        } = content
        else {
            return Ok(());
        };
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
        if attachments.len() > ATTACHMENTS_MAX {
            return Err(Error::TooLarge {
                what: "attachments of a message".into(),
                max: ATTACHMENTS_MAX,
            });
        }
        attachments.iter().try_for_each(check_attachment)?;
        if reply_to.is_some_and(|seq| seq == 0 || seq >= self.log.next()) {
            return Err(Error::invalid(
                "reply_to is no message of this conversation",
            ));
        }
        Ok(())
    }

    fn change(&mut self, actor: UserId, operation: &Operation, reply: Reply) {
        let max = self.environment.settings.group_participants_max;
        let checked = self
            .known()
            .map_err(Err)
            .and_then(|p| p.check_change(&actor, operation, max));
        match checked {
            Ok(change) => self.append_change(actor, change, None, reply),
            // It was done before, perhaps by this very request on a connection that broke. If that is
            // still under way, wait for it.
            Err(Ok(seq)) => self.changed_before(seq, reply),
            Err(Err(error)) => drop(reply.send(Err(error))),
        }
    }

    fn changed_before(&mut self, seq: Seq, reply: Reply) {
        let in_flight = seq.checked_sub(self.log.head() + 1);
        let waiting = in_flight.and_then(|i| self.waiting.get_mut(usize::try_from(i).ok()?));
        if let Some(waiting) = waiting {
            waiting.replies.push((reply, true));
        } else if let Some(applying) = self.applying.get_mut(&seq) {
            applying.replies.push(reply);
        } else {
            drop(reply.send(Ok(Answer::Ready(Outcome::Changed { seq }))));
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
        let at = at.unwrap_or_else(clock::wall);
        let Appended::New(row) = self.log.append(draft, clock::message_id(at), at) else {
            drop(reply.send(Err(Error::BUSY)));
            return;
        };
        let entry = row.entry.clone();
        let participants = match &mut self.participants {
            Some(participants) => participants,
            none => match Participants::of_first_entry(self.id, &entry) {
                Some(first) => none.insert(first),
                None => return,
            },
        };
        participants.propose(&entry);
        let mut waiting = Waiting::of(participants, &entry);
        waiting.replies.push((reply, false));
        self.unwritten.push(row);
        self.waiting.push_back(waiting);
    }

    fn mark(&mut self, user: UserId, read: Option<Seq>, delivered: Option<Seq>, reply: Reply) {
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
        // Stored even if it raises nothing: an earlier one to the same seq may still be under way. Told to others, and
        // shown, only then.
        let mark = Mark {
            user,
            read_seq: read,
            // What is read has been delivered.
            delivered_seq: read.max(delivered),
        };
        let (id, environment, ownership) =
            (self.id, self.environment.clone(), self.ownership.clone());
        self.work.push(Box::pin(async move {
            let store = &environment.store;
            match insist(&ownership, || store.mark(id, kind, &mark)).await {
                Ok(()) => Done::Marked(mark, reply),
                Err(error) => Done::Lost(error),
            }
        }));
    }

    fn details(&self, actor: &UserId) -> Answered {
        let committed = self.view()?;
        committed.check_reading(actor)?;
        Ok(Outcome::Details(DetailsView {
            details: committed.details.clone(),
            participant_count: committed.count,
            head: self.log.head(),
            role: committed.get(actor).map(|p| p.role),
        }))
    }

    fn list(&self, actor: UserId, after: Option<UserId>, limit: usize) -> Result<Answer, Error> {
        let committed = self.view()?;
        committed.check_reading(&actor)?;
        if committed.details.kind == Kind::Channel {
            return Ok(Answer::ReadParticipants {
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
        Ok(Answer::Ready(Outcome::Participants(ParticipantsPage {
            items,
            next,
        })))
    }

    fn history(&self, actor: &UserId, range: LogRange, limit: usize) -> Result<Answer, Error> {
        self.view()?.check_reading(actor)?;
        self.page(range, limit)
    }

    fn page(&self, range: LogRange, limit: usize) -> Result<Answer, Error> {
        let head = self.log.head();
        let (from, to) = range.within(head, limit);
        Ok(match self.log.recent(from, to) {
            Some(entries) => Answer::Ready(Outcome::History(Page { entries, head })),
            None if from > to => Answer::Ready(Outcome::History(Page {
                entries: Vec::new(),
                head,
            })),
            None => Answer::ReadLog { from, to, head },
        })
    }

    /// For gateways: whoever is subscribed there was allowed to.
    fn catch_up(&self, after: Seq, limit: usize) -> Result<Answer, Error> {
        self.view()?;
        self.page(LogRange::After(after), limit)
    }

    fn head(&self, actor: &UserId) -> Answered {
        let committed = self.view()?;
        committed.check_reading(actor)?;
        Ok(Outcome::Head(Head {
            details: committed.details.clone(),
            head: self.log.head(),
            last: self.log.newest().map(|entry| entry.last()),
        }))
    }

    /// Ephemeral, and only where a few people look: never in channels.
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
            let typing = Publication::Typing {
                conversation: self.id,
                user,
                audience,
            };
            drop(self.environment.publish.publish(typing));
        }
        Ok(Outcome::Done)
    }
}

fn check_attachment(attachment: &Attachment) -> Result<(), Error> {
    let Attachment {
        url,
        name,
        mime,
        size: _,
    } = attachment;
    if !(url.starts_with("https://") || url.starts_with("http://")) {
        return Err(Error::invalid(
            "an attachment's url begins with https:// or http://",
        ));
    }
    let described = name.as_ref().map_or(0, String::len) + mime.as_ref().map_or(0, String::len);
    if url.len().max(described) > ATTACHMENT_BYTES_MAX {
        return Err(Error::TooLarge {
            what: "bytes of an attachment".into(),
            max: ATTACHMENT_BYTES_MAX,
        });
    }
    Ok(())
}
