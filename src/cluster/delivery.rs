//! Publications outward: from a conversation's owner to the homes of the users concerned, or to the gateways with
//! subscribers of a channel. A confirmed publication stays outstanding until its homes have acknowledged it and its inbox
//! rows are queued. If a user's home changes before that, the new home gets it too.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard, Weak},
};

use metrics::gauge;
use tokio::sync::oneshot;

use crate::{
    chat::{Audience, Body, Confirmation, Guarantee, Publication, Publish, RedeliveryGuard},
    cluster::{
        home::Home,
        ring::view::View,
        sockets::{events::bounded, interests::Interests, local_sockets::LocalSockets},
        wire::{
            link::Token,
            message::{Delivered, PeerMessage, encode},
            peers::Peers,
        },
    },
    model::{AttachmentId, ConversationId, Entry, GatewayId, Topic, UserId},
    tasks::{lock, read, write},
};

pub struct Delivery {
    me: GatewayId,
    /// Rule [moved-first]. The ring by which homes get publications. Read while one is sent. Written while a version is
    /// adopted, until each new home was sent what it lacks. So no publication overtakes those that are sent again.
    ring: RwLock<View>,
    sockets: Arc<LocalSockets>,
    home: Arc<Home>,
    interests: Arc<Interests>,
    /// The other gateways; `None` if this gateway is always alone.
    peers: Option<Arc<Peers>>,
    outstanding: Mutex<Outstanding>,
    /// What is told of files that messages no longer have.
    dropped: OnceLock<DroppedFile>,
    myself: Weak<Self>,
}

/// A function that is told that a message of a conversation no longer has a file.
pub(super) type DroppedFile = Box<dyn Fn(ConversationId, AttachmentId) + Send + Sync>;

/// The confirmed publications that may have to be sent again.
#[derive(Default)]
struct Outstanding {
    /// The number of the newest publication.
    newest: u64,
    publications: BTreeMap<u64, OutstandingPublication>,
    /// The number of the newest part. Numbers begin at one: see [`BEST_EFFORT`].
    newest_part: u64,
    /// The parts of all these publications.
    parts: BTreeMap<u64, HomePart>,
}

struct OutstandingPublication {
    publication: Publication,
    /// The numbers of its parts.
    parts: Vec<u64>,
    /// Fires when each part is acknowledged; `None` once it has.
    confirm: Option<oneshot::Sender<RedeliveryGuard>>,
}

/// What one home got of a publication.
struct HomePart {
    /// The number of the publication.
    of: u64,
    home: GatewayId,
    users: Vec<UserId>,
    acknowledged: bool,
    /// Whether the gateway said that it is not their home.
    refused: bool,
}

/// Removes a publication from the outstanding ones when it is dropped.
struct OutstandingGuard {
    delivery: Weak<Delivery>,
    id: u64,
}

impl Drop for OutstandingGuard {
    fn drop(&mut self) {
        if let Some(delivery) = self.delivery.upgrade() {
            // Dropped without the lock, because its confirmation may wake somebody.
            let removed = delivery.outstanding().remove(self.id);
            drop(removed);
        }
    }
}

/// What is to be sent once the lock is released: the number of the part, its home, and the publication for its users.
type ToSend = Vec<(u64, GatewayId, Publication)>;

/// The part number of everything that is not outstanding.
const BEST_EFFORT: u64 = 0;

impl Delivery {
    #[must_use]
    pub(super) fn new(
        me: GatewayId,
        ring: View,
        sockets: Arc<LocalSockets>,
        home: Arc<Home>,
        interests: Arc<Interests>,
        peers: Option<Arc<Peers>>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|myself| Self {
            me,
            ring: RwLock::new(ring),
            sockets,
            home,
            interests,
            peers,
            outstanding: Mutex::default(),
            dropped: OnceLock::new(),
            myself: myself.clone(),
        })
    }

    /// Sets what is told of files that messages no longer have.
    pub(super) fn on_dropped_file(&self, tell: DroppedFile) {
        let _ = self.dropped.set(tell);
    }

    /// Sends one frame to each gateway with subscribers, however many subscribers it has.
    fn to_channel(&self, peers: &Arc<Peers>, publication: &Publication) -> Confirmation {
        match &publication.body {
            Body::Entry(_) | Body::Changed(_) => {}
            // The sockets of other gateways learn from the entry that a channel's details changed. Receipts, files, typing
            // and read marks are not published to channels.
            Body::Membership(_)
            | Body::Receipt(_)
            | Body::Reacted(_)
            | Body::File(_)
            | Body::Typing(_)
            | Body::Read(_) => {
                self.sockets.deliver_publication(publication);
                return Confirmation::Immediate;
            }
        }
        if let Body::Entry(entry) = &publication.body {
            self.to_sender(peers, publication.conversation, entry);
        }
        let gateways = self.interests.of(&Topic::Channel(publication.conversation));
        let mut others = gateways.into_iter().filter(|&g| g != self.me).peekable();
        let mut confirmation = Confirmation::Immediate;
        if others.peek().is_some() {
            let deliver = PeerMessage::Deliver(Delivered::Publication(publication.clone()));
            let bytes = encode(&deliver);
            // Rule [private]: nobody who is not in the channel gets what follows, on any gateway.
            let token = (publication.guarantee == Guarantee::Confirmed).then(|| {
                let (done, everywhere) = oneshot::channel();
                confirmation = Confirmation::Pending(everywhere);
                Token::new(move |_| drop(done.send(RedeliveryGuard(Arc::new(())))))
            });
            for gateway in others {
                peers.send(gateway, bytes.clone(), token.clone());
            }
        }
        self.sockets.deliver_publication(publication);
        confirmation
    }

    /// Tells the home of a channel's sender what they have read, if there is room.
    fn to_sender(&self, peers: &Arc<Peers>, channel: ConversationId, entry: &Entry) {
        let user = &entry.sender;
        let home = self.ring().home(user);
        match home {
            Some(home) if home != self.me => {
                let sent = PeerMessage::ReadBySender {
                    user: user.clone(),
                    channel,
                    seq: entry.seq,
                    texts: entry.texts,
                };
                peers.send_if_room(home, encode(&sent));
            }
            _ => self
                .home
                .record_read(channel, user, (entry.seq, entry.texts)),
        }
    }

    /// Sends a publication to the homes of its users, and keeps it outstanding.
    fn send_confirmed(&self, publication: Publication, confirm: oneshot::Sender<RedeliveryGuard>) {
        // Until it is sent: either this sees a new version of the ring, or `adopt` finds the publication.
        let ring = self.ring();
        let to_send = {
            let mut outstanding = self.outstanding();
            outstanding.newest += 1;
            let id = outstanding.newest;
            let users = publication.audience.users().cloned().collect();
            let publication = OutstandingPublication {
                publication,
                parts: Vec::new(),
                confirm: Some(confirm),
            };
            outstanding.publications.insert(id, publication);
            let mut to_send = ToSend::new();
            outstanding.cut(id, users, &ring, &mut to_send);
            outstanding.count();
            to_send
        };
        self.send(to_send);
    }

    /// Sends parts to homes. `ring` is locked, so that they are sent in the order in which they were cut.
    fn send(&self, to_send: ToSend) {
        for (part, home, publication) in to_send {
            tracing::trace!(me = %self.me, part, %home, %publication, "sent to a home");
            if home == self.me {
                let done = (publication.guarantee == Guarantee::Confirmed).then(|| {
                    let myself = self.myself.clone();
                    Token::new(move |taken| {
                        if let Some(delivery) = myself.upgrade() {
                            delivery.acknowledged(part, home, taken);
                        }
                    })
                });
                self.home.deliver(&publication, done.as_ref());
            } else if let Some(peers) = &self.peers {
                peers.send(
                    home,
                    encode(&PeerMessage::Publish { part, publication }),
                    None,
                );
            }
        }
    }

    /// Notes that a home acknowledged a part, or that it refused the part because it is not the home.
    pub(super) fn acknowledged(&self, part_id: u64, home: GatewayId, taken: bool) {
        tracing::trace!(me = %self.me, part = part_id, %home, taken, "acknowledged by a home");
        let mut confirmed = None;
        {
            let mut outstanding = self.outstanding();
            let Outstanding {
                publications,
                parts,
                ..
            } = &mut *outstanding;
            // Rule [stale-done]: only the home that got the part last counts.
            let Some(part) = parts.get_mut(&part_id) else {
                return;
            };
            if part.home != home || part.refused {
                return;
            }
            if !taken {
                part.refused = true;
                return;
            }
            part.acknowledged = true;
            let id = part.of;
            let Some(publication) = publications.get_mut(&id) else {
                return;
            };
            let acknowledged = |part| parts.get(part).is_none_or(|part| part.acknowledged);
            if publication.parts.iter().all(acknowledged) {
                confirmed = publication.confirm.take().map(|confirm| (confirm, id));
            }
        }
        if let Some((confirm, id)) = confirmed {
            let guard = OutstandingGuard {
                delivery: self.myself.clone(),
                id,
            };
            drop(confirm.send(RedeliveryGuard(Arc::new(guard))));
        }
    }

    /// Adopts a new version of the ring.
    pub(super) fn adopt(&self, after: &View) {
        let mut ring = write(&self.ring);
        ring.clone_from(after);
        self.reroute(&ring);
    }

    /// Sends again what a home has refused, if one has. It is ahead: it has adopted a later version, under which somebody
    /// else is the home.
    pub(super) fn send_refused(&self) {
        let has_refused = || self.outstanding().parts.values().any(|part| part.refused);
        if has_refused() {
            let ring = write(&self.ring);
            self.reroute(&ring);
        }
    }

    /// Sends every outstanding publication whose home has changed to the new one: rule [reroute]. `ring` is locked for
    /// writing.
    fn reroute(&self, ring: &View) {
        let (to_send, removed) = {
            let mut outstanding = self.outstanding();
            // If the conversation was lost, its next owner publishes this again.
            let is_lost = |p: &OutstandingPublication| {
                p.confirm.as_ref().is_some_and(oneshot::Sender::is_closed)
            };
            let all = outstanding.publications.iter();
            let (lost, kept): (Vec<_>, Vec<_>) = all.partition(|(_, p)| is_lost(p));
            let ids = |some: Vec<(&u64, &OutstandingPublication)>| -> Vec<u64> {
                some.into_iter().map(|(&id, _)| id).collect()
            };
            let (lost, kept) = (ids(lost), ids(kept));
            let removed: Vec<_> = lost.into_iter().map(|id| outstanding.remove(id)).collect();
            let mut to_send = ToSend::new();
            for id in kept {
                let moved = outstanding.take_moved(id, ring);
                outstanding.cut(id, moved, ring, &mut to_send);
            }
            (to_send, removed)
        };
        drop(removed);
        self.send(to_send);
    }

    fn ring(&self) -> RwLockReadGuard<'_, View> {
        read(&self.ring)
    }

    fn outstanding(&self) -> MutexGuard<'_, Outstanding> {
        lock(&self.outstanding)
    }
}

impl Outstanding {
    /// Makes a part of a publication for each home of these users.
    fn cut(&mut self, id: u64, users: Vec<UserId>, ring: &View, to_send: &mut ToSend) {
        let Some(publication) = self.publications.get_mut(&id) else {
            return;
        };
        for (home, users) in by_home(users, ring) {
            self.newest_part += 1;
            let number = self.newest_part;
            to_send.push((number, home, publication.publication.to(&users)));
            publication.parts.push(number);
            let part = HomePart {
                of: id,
                home,
                users,
                acknowledged: false,
                refused: false,
            };
            self.parts.insert(number, part);
        }
    }

    /// Takes the users out of a publication's parts whose home is another one now, and returns them.
    fn take_moved(&mut self, id: u64, ring: &View) -> Vec<UserId> {
        let mut moved = Vec::new();
        let Some(publication) = self.publications.get_mut(&id) else {
            return moved;
        };
        publication.parts.retain(|number| {
            let Some(part) = self.parts.get_mut(number) else {
                return false;
            };
            let (home, refused) = (part.home, part.refused);
            let goes = |user: &mut UserId| refused || ring.home(user) != Some(home);
            moved.extend(part.users.extract_if(.., goes));
            let stays = !part.users.is_empty();
            if !stays {
                self.parts.remove(number);
            }
            stays
        });
        moved
    }

    /// Tells operators how many there are.
    fn count(&self) {
        gauge!("chat_publications_in_hand").set(self.publications.len() as f64);
    }

    fn remove(&mut self, id: u64) -> Option<OutstandingPublication> {
        let removed = self.publications.remove(&id)?;
        self.count();
        for number in &removed.parts {
            self.parts.remove(number);
        }
        Some(removed)
    }
}

fn by_home(users: Vec<UserId>, ring: &View) -> BTreeMap<GatewayId, Vec<UserId>> {
    let mut homes: BTreeMap<GatewayId, Vec<UserId>> = BTreeMap::new();
    for user in users {
        if let Some(home) = ring.home(&user) {
            homes.entry(home).or_default().push(user);
        }
    }
    homes
}

impl Publish for Delivery {
    fn drop_file(&self, conversation: ConversationId, file: AttachmentId) {
        if let Some(tell) = self.dropped.get() {
            tell(conversation, file);
        }
    }

    fn publish(&self, mut publication: Publication) -> Confirmation {
        if let Body::Changed(changed) = &publication.body {
            let changed = changed.clone();
            publication = bounded(publication, &changed);
        }
        let Some(peers) = &self.peers else {
            // This gateway is everyone's home and has every socket.
            self.home.pass_on(&publication, None);
            return Confirmation::Immediate;
        };
        match (&publication.audience, publication.guarantee) {
            (Audience::Channel, _) => self.to_channel(peers, &publication),
            (Audience::Members(_) | Audience::User(_), Guarantee::Confirmed) => {
                if publication.audience.users().next().is_none() {
                    // The last participant has left.
                    return Confirmation::Immediate;
                }
                let (confirm, confirmed) = oneshot::channel();
                self.send_confirmed(publication, confirm);
                Confirmation::Pending(confirmed)
            }
            (Audience::Members(_) | Audience::User(_), Guarantee::BestEffort) => {
                // A home that lacks a rev would tell returning clients that they have missed nothing.
                if matches!(publication.body, Body::Changed(_)) || peers.have_room() {
                    let users = publication.audience.users().cloned().collect();
                    let ring = self.ring();
                    let homes = by_home(users, &ring).into_iter();
                    let part = |(home, users): (_, Vec<UserId>)| {
                        (BEST_EFFORT, home, publication.to(&users))
                    };
                    self.send(homes.map(part).collect());
                }
                Confirmation::Immediate
            }
        }
    }
}

#[cfg(test)]
mod tests;
