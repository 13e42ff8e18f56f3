//! What users do with files: they upload, send, drop them from messages, and give them up.

use std::{collections::BTreeSet, sync::Arc};

use chat_gateway::{
    chat::{Conversations, DeleteMessages, EditMessage, Error, NewContent, Operation},
    clock,
    model::{Attachment, AttachmentId, ClientId, Content, Draft, FileFacts, Seq, UserId},
    store::{FileStore as _, simulated::Reach},
};
use rand::{RngExt, seq::IndexedRandom as _};
use uuid::Uuid;

use super::{Sent, WITHOUT_BYTES, World, spawn};

impl World {
    pub(super) async fn uses(self: Arc<Self>, user: UserId) {
        let mut files = Vec::new();
        loop {
            self.pause(if self.lonely { 500..12_000 } else { 5..1_500 })
                .await;
            self.activity().await;
            match self.random(19) {
                0..4 => files.extend(self.upload(&user).await),
                4..14 => self.send(&user, &files).await,
                14..17 => self.alter(&user).await,
                _ => {
                    if let Some(&file) = self.one(&files) {
                        self.give_up(file);
                    }
                }
            }
        }
    }

    fn one<'a, T>(&self, of: &'a [T]) -> Option<&'a T> {
        // Mostly one of the newest.
        let newest = &of[of.len().saturating_sub(3)..];
        let from = if self.random(3) > 0 { newest } else { of };
        from.choose(&mut *self.random.lock().unwrap())
    }

    /// The uploader no longer wants a file, and some gateway is told.
    fn give_up(&self, file: AttachmentId) {
        self.some().eraser.drop_file(self.conversation, file);
    }

    async fn upload(self: &Arc<Self>, user: &UserId) -> Option<AttachmentId> {
        let file = {
            let mut random = self.random.lock().unwrap();
            // Few partitions of work, so that a sweep takes less time here.
            AttachmentId(Uuid::from_u128(random.random::<u128>() & !0xfe))
        };
        let facts = FileFacts {
            uploader: user.clone(),
            conversation: self.conversation,
            name: "file".into(),
            size: 1,
            alt: None,
            created_at: clock::wall(),
            upload: self.bytes.in_bucket.then(|| "upload".into()),
        };
        self.store
            .create_file(file, &facts, clock::today())
            .await
            .ok()?;
        self.uploads.lock().unwrap().push(file);
        self.bytes.begin(file);
        // The uploader asks again, perhaps other gateways, so several may look at a file at the same time.
        for _ in 0..3 {
            let (bytes, store) = (self.bytes.clone(), self.store.clone());
            spawn(async move { bytes.inspect(&store, file).await });
            self.pause(300..700).await;
            if self.bytes.is_ready(file) {
                break;
            }
        }
        Some(file)
    }

    /// Sends a message with files, and repeats it until it is answered or given up.
    async fn send(&self, user: &UserId, files: &[AttachmentId]) {
        let named: BTreeSet<_> = (0..=self.random(1))
            .filter_map(|_| self.one(files).copied())
            .collect();
        if named.is_empty() {
            return;
        }
        let client_id = ClientId(Uuid::from_u128(self.random.lock().unwrap().random()));
        let content = Content::Text {
            body: "text".into(),
            attachments: named.iter().map(|&file| attachment(file)).collect(),
            reply_to: None,
        };
        let mut retry = false;
        loop {
            let draft = Draft {
                sender: user.clone(),
                client_id,
                content: content.clone(),
                at: None,
                retry,
            };
            retry = true;
            let id = self.conversation;
            let request = |owner: Conversations| async move { owner.send(id, draft).await };
            if self.random(if self.lonely { 2 } else { 11 }) == 0 {
                self.troubles_owner();
            }
            match self.on(&self.some(), request).await {
                Some(Ok(ack)) => {
                    // Another device of the user does not know of the message.
                    if self.random(3) == 0 {
                        named.iter().for_each(|&file| self.give_up(file));
                    }
                    return self.acknowledged(client_id, user, ack.seq, named);
                }
                Some(Err(Error::Conflict(_) | Error::Invalid(_) | Error::TooLarge { .. })) => {
                    return;
                }
                _ => {}
            }
            self.pause(5..500).await;
            if self.random(if self.lonely { 2 } else { 9 }) == 0 {
                // A user who gives up a message often cancels its uploads too.
                if self.random(1) == 0 {
                    named.iter().for_each(|&file| self.give_up(file));
                    let rests = if self.lonely { 10..100_000 } else { 1..2 };
                    self.pause(rests).await;
                }
                return;
            }
        }
    }

    /// The owner is about to write for the last time, and not everywhere.
    fn troubles_owner(&self) {
        let reach = [Reach::Late, Reach::One][self.random(1) as usize];
        self.newest().store.set_reach(reach);
        self.sending.notify_waiters();
    }

    fn acknowledged(
        &self,
        client_id: ClientId,
        sender: &UserId,
        seq: Seq,
        required: BTreeSet<AttachmentId>,
    ) {
        for file in &required {
            if !self.bytes.is_complete(*file) {
                self.report(format!(
                    "message {seq} is acknowledged with {file}{WITHOUT_BYTES}"
                ));
            }
        }
        let sender = sender.clone();
        let sent = Sent {
            sender,
            seq,
            required,
        };
        self.sent.lock().unwrap().insert(client_id, sent);
    }

    /// Edits a message, which keeps some of its files, or deletes it.
    async fn alter(&self, user: &UserId) {
        let (seq, keep) = {
            let mut sent = self.sent.lock().unwrap();
            let mut mine: Vec<_> = sent.values_mut().filter(|s| s.sender == *user).collect();
            mine.sort_by_key(|sent| sent.seq);
            if mine.is_empty() {
                return;
            }
            // One of the newest four.
            let from = mine.len().saturating_sub(4);
            let after = self.random((mine.len() - from - 1) as u64) as usize;
            let chosen = &mut mine[from + after];
            for file in &chosen.required {
                if !self.bytes.is_complete(*file) {
                    self.report(format!("message {} has {file}{WITHOUT_BYTES}", chosen.seq));
                }
            }
            let takes_all = self.random(2) < 2;
            chosen
                .required
                .retain(|_| !takes_all && self.random(1) == 0);
            (chosen.seq, chosen.required.clone())
        };
        let operation = if keep.is_empty() && self.random(1) == 0 {
            Operation::Delete(DeleteMessages {
                seqs: vec![seq],
                as_moderator: false,
                at: None,
            })
        } else {
            Operation::Edit(EditMessage {
                seq,
                content: NewContent {
                    body: "changed".into(),
                    attachments: Some(keep.iter().map(|&file| attachment(file)).collect()),
                },
                base_rev: None,
                at: None,
            })
        };
        loop {
            match self
                .ask(&self.some(), user.clone(), operation.clone())
                .await
            {
                Some(Ok(_) | Err(Error::Conflict(_) | Error::Invalid(_))) => return,
                _ => self.pause(5..500).await,
            }
            if self.random(9) == 0 {
                return;
            }
        }
    }
}

fn attachment(file: AttachmentId) -> Attachment {
    Attachment {
        id: Some(file),
        url: String::new(),
        name: None,
        mime: None,
        size: None,
        alt: None,
        width: None,
        height: None,
    }
}
