//! What clients do to messages: they edit, delete and react, read, and ask for changes.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::Duration,
};

use chat_gateway::{
    chat::{Error, LogRange, Operation, Outcome},
    model::{Rev, Seq, UserId},
    store::simulated::Copies,
};
use rand::RngExt;
use tokio::time::sleep;
use uuid::Uuid;

use super::{CLIENTS, GUESTS, World, seen::Wish, user};

/// The first byte of the keys of two tables.
pub(super) const LOG: u8 = b'm';
const SENDS: u8 = b's';

/// Changes of one device.
const CHANGES_EACH: usize = 16;

/// A device of a user. Each reacts with its own emoji, so it knows which of them are on.
#[derive(Clone)]
pub(super) struct Device {
    pub user: UserId,
    pub number: u64,
    pub is_guest: bool,
}

impl World {
    /// The devices that change messages: two of each client, and one of a guest.
    pub(super) fn devices() -> Vec<Device> {
        let device = |name, number| Device {
            user: user(name),
            number,
            is_guest: name >= CLIENTS,
        };
        let mut devices: Vec<_> = (0..CLIENTS)
            .flat_map(|name| [device(name, 1), device(name, 2)])
            .collect();
        devices.push(device(CLIENTS, 3));
        devices
    }

    /// Changes messages.
    pub(super) async fn change(self: Arc<Self>, device: Device) {
        for _ in 0..CHANGES_EACH {
            sleep(Duration::from_millis(self.random(200))).await;
            if let Some(wish) = self.wish(&device) {
                self.carry_out(&device, wish).await;
            }
        }
    }

    /// Chooses a change. `None` if there is no message for it yet.
    fn wish(&self, device: &Device) -> Option<Wish> {
        let messages = self.messages.lock().unwrap().clone();
        let mine = |own: bool| -> Vec<Seq> {
            let some = messages
                .iter()
                .filter(|(_, _, by)| !own || *by == device.user);
            some.map(|(seq, ..)| *seq).collect()
        };
        let one = |seqs: &[Seq]| -> Option<Seq> {
            let newest = (seqs.len() as u64).checked_sub(1)?;
            // Mostly one of the newest, so that changes meet each other.
            let back = if self.random(1) == 0 {
                newest.min(self.random(2))
            } else {
                self.random(newest)
            };
            Some(seqs[(newest - back) as usize])
        };
        match self.random(99) {
            0..45 if !device.is_guest => Some(Wish::Edit {
                seq: one(&mine(true))?,
                body: self.marker(),
            }),
            45..57 if !device.is_guest => {
                // The first user owns the group, and may delete the messages of others.
                let may = mine(device.user != user(0));
                let seqs: BTreeSet<Seq> = (0..=self.random(2)).filter_map(|_| one(&may)).collect();
                (!seqs.is_empty()).then(|| Wish::Delete {
                    seqs: seqs.into_iter().collect(),
                })
            }
            _ => Some(Wish::React {
                seq: one(&mine(false))?,
                emoji: format!(":{}{}:", device.number, self.random(1)),
                on: self.random(9) < 6,
            }),
        }
    }

    /// A text that is nowhere else.
    pub(super) fn marker(&self) -> String {
        let bytes = self.random.lock().unwrap().random();
        format!("<{}>", Uuid::from_u128(bytes))
    }

    /// Asks for a change until it is acknowledged, refused, or given up.
    pub(super) async fn carry_out(&self, device: &Device, wish: Wish) {
        if let Wish::Delete { seqs } = &wish {
            seqs.iter().for_each(|&seq| self.note_landed(seq));
        }
        let (number, base) = self.seen.lock().unwrap().begin(&device.user, wish.clone());
        let operation = wish.operation(base);
        loop {
            let owner = self.some_owner();
            let asked = owner.ask(self.conversation, device.user.clone(), operation.clone());
            match asked.await {
                Ok(Outcome::Revised { rev }) => {
                    return self.seen.lock().unwrap().acknowledge(number, rev);
                }
                // A message that was changed meanwhile, or deleted.
                Err(Error::Conflict(_)) => return,
                Err(Error::Forbidden(_) | Error::UnknownConversation) if device.is_guest => return,
                Err(Error::Moved | Error::Closed | Error::Unavailable { .. }) => {}
                other => {
                    let text = format!("{operation:?} was answered with {other:?}");
                    return self.seen.lock().unwrap().find(text);
                }
            }
            sleep(Duration::from_millis(5 + self.random(60))).await;
            if self.random(14) == 0 {
                return;
            }
        }
    }

    /// Notes the cells with texts of an entry that is about to be deleted: those that every later quorum sees.
    fn note_landed(&self, seq: Seq) {
        let messages = self.messages.lock().unwrap();
        let Some((_, text, _)) = messages.iter().find(|(of, ..)| *of == seq) else {
            return;
        };
        let mut seen = self.seen.lock().unwrap();
        if seen.landed.contains_key(&seq) {
            return;
        }
        let texts: HashSet<String> = seen.texts(seq, text).into_iter().collect();
        let cells = self.store.copies();
        let named = sends(&cells);
        let with = |(key, copies): (Vec<u8>, Vec<(u64, Vec<u8>)>)| {
            let copies = copies.iter().filter(|(_, v)| holds(v, &texts)).count();
            let (at, epoch) = (number(&key, 17), number(&key, 25));
            let is_found = key[0] != LOG || at == seq || named.contains(&(at, epoch));
            (copies >= 2 && is_found).then_some(key)
        };
        let landed = cells.into_iter().filter_map(with).collect();
        seen.landed.insert(seq, landed);
    }

    /// Reads pages and changes, and marks messages as read.
    pub(super) async fn look(self: Arc<Self>) {
        loop {
            sleep(Duration::from_millis(5 + self.random(70))).await;
            let head = self.checker.lock().unwrap().canon.len() as Seq;
            let floor = self.seen.lock().unwrap().newest;
            match self.random(if self.changing { 2 } else { 0 }) {
                0 => self.ask_changes(floor).await,
                1 => self.ask_page(floor, head).await,
                _ if self.purges => {}
                _ => {
                    let who = user(self.random(CLIENTS as u64 + GUESTS - 1) as usize);
                    self.mark(&who, 1 + self.random(head)).await;
                }
            }
        }
    }

    async fn ask_changes(&self, floor: Rev) {
        let operation = Operation::Changes {
            after: self.random(floor + 2),
            limit: 1 + self.random(60) as usize,
        };
        let owner = self.some_owner();
        let asked = owner.ask(self.conversation, user(0), operation);
        if let Ok(Outcome::Changes(changes)) = asked.await {
            self.seen.lock().unwrap().answered(floor, changes);
        }
    }

    async fn ask_page(&self, floor: Rev, head: Seq) {
        let operation = Operation::History {
            range: LogRange::Around(1 + self.random(head)),
            limit: 1 + self.random(40) as usize,
        };
        let owner = self.some_owner();
        let asked = owner.ask(self.conversation, user(0), operation);
        if let Ok(Outcome::History(page)) = asked.await {
            self.seen.lock().unwrap().page(floor, &page);
        }
    }

    /// Marks messages as read. The owner refuses it for guests who are not there, and beyond the head.
    pub(super) async fn mark(&self, who: &UserId, seq: Seq) {
        let operation = Operation::Read { seq };
        let owner = self.some_owner();
        let asked = owner.ask(self.conversation, who.clone(), operation);
        if asked.await.is_ok() {
            let mut seen = self.seen.lock().unwrap();
            let read = seen.read.entry(who.clone()).or_default();
            *read = seq.max(*read);
        }
    }

    /// Changes the newest message, which inboxes show by now.
    pub(super) async fn change_newest(&self) {
        sleep(Duration::from_millis(200)).await;
        let newest = self.messages.lock().unwrap().last().cloned();
        let Some((seq, ..)) = newest.filter(|(_, _, by)| *by == user(0)) else {
            return;
        };
        let device = Self::devices().swap_remove(0);
        let body = self.marker();
        self.carry_out(&device, Wish::Edit { seq, body }).await;
        if self.random(1) == 0 {
            let seqs = vec![seq];
            self.carry_out(&device, Wish::Delete { seqs }).await;
        }
    }

    /// Deletes most messages, more than unread counts remember.
    pub(super) async fn purge(&self) {
        let messages = self.messages.lock().unwrap().clone();
        let mut seqs: Vec<Seq> = messages.iter().map(|(seq, ..)| *seq).collect();
        seqs.retain(|_| self.random(9) > 0);
        let device = Self::devices().swap_remove(0);
        for seqs in seqs.chunks(40) {
            let seqs = seqs.to_vec();
            self.carry_out(&device, Wish::Delete { seqs }).await;
        }
    }
}

/// The seqs and epochs of the rows of the log that `sends` rows name which a quorum has. A row of the log may be on more
/// replicas than its `sends` row, because reads repair it.
fn sends(cells: &Copies) -> BTreeSet<(Seq, u64)> {
    let sends = cells
        .iter()
        .filter(|(key, copies)| key[0] == SENDS && copies.len() >= 2);
    let place = |(key, copies): (&Vec<u8>, &Vec<(u64, Vec<u8>)>)| {
        (number(&copies[0].1, 0), number(key, key.len() - 8))
    };
    sends.map(place).collect()
}

/// A number in a key or value. 0 if it is shorter.
pub(super) fn number(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes.get(at..at + 8).and_then(|b| b.try_into().ok());
    bytes.map_or(0, u64::from_be_bytes)
}

/// Whether bytes contain one of these markers.
pub(super) fn holds(value: &[u8], texts: &HashSet<String>) -> bool {
    markers(value).any(|text| texts.contains(text))
}

/// The markers in some bytes.
fn markers(value: &[u8]) -> impl Iterator<Item = &str> {
    const BYTES: usize = "<00000000-0000-0000-0000-000000000000>".len();
    let begins = (0..value.len()).filter(|&at| value[at] == b'<');
    begins.filter_map(move |at| std::str::from_utf8(value.get(at..at + BYTES)?).ok())
}

/// What the replicas of each cell converge to.
pub(super) fn merged(copies: Copies) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
    let newest = |(key, copies): (_, Vec<(u64, Vec<u8>)>)| Some((key, copies.into_iter().max()?.1));
    copies.into_iter().filter_map(newest)
}
