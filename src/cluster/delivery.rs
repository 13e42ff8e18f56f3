//! Publications outward: from a conversation's owner to the homes of the users concerned, or to the gateways with
//! subscribers of a channel. What a home has not said done to, or what is not with the inbox writer yet, stays in hand,
//! and is given to the new home if a user's home changes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use arc_swap::ArcSwap;
use metrics::gauge;
use tokio::sync::oneshot;

use super::{
    edge::{Edge, users_of},
    home::{Home, restricted},
    interests::Interests,
    link::Token,
    lock,
    message::{Delivered, Message, encode},
    peers::Peers,
    ring::Ring,
};
use crate::{
    chat::{Audience, Handed, InHand, Publication, Publish},
    model::{ConversationId, Entry, GatewayId, Topic, UserId},
};

/// Parts that one publication may be cut into in its life.
const PARTS_BITS: u32 = 16;

pub struct Delivery {
    me: GatewayId,
    ring: Arc<ArcSwap<Ring>>,
    edge: Arc<Edge>,
    home: Arc<Home>,
    interests: Arc<Interests>,
    /// None: this gateway never has any.
    peers: Option<Arc<Peers>>,
    hands: Mutex<Hands>,
    myself: Weak<Self>,
}

#[derive(Default)]
struct Hands {
    next: u64,
    publishing: BTreeMap<u64, Publishing>,
}

/// A publication in hand.
struct Publishing {
    publication: Publication,
    parts: BTreeMap<u64, Part>,
    next_part: u64,
    /// None: it has been told, or nobody waits.
    waiting: Option<oneshot::Sender<InHand>>,
}

/// Given to one home.
struct Part {
    home: GatewayId,
    users: Vec<UserId>,
    done: bool,
    /// It said that it is not their home.
    refused: bool,
}

/// Takes a publication out of hand when it is dropped.
struct Held {
    delivery: Weak<Delivery>,
    id: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(delivery) = self.delivery.upgrade() {
            let out = delivery.hands().publishing.remove(&self.id);
            drop(out);
        }
    }
}

/// What is to be sent once the lock is released.
type ToSend = Vec<(u64, GatewayId, Publication)>;

impl Delivery {
    #[must_use]
    pub(super) fn new(
        me: GatewayId,
        ring: Arc<ArcSwap<Ring>>,
        edge: Arc<Edge>,
        home: Arc<Home>,
        interests: Arc<Interests>,
        peers: Option<Arc<Peers>>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|myself| Self {
            me,
            ring,
            edge,
            home,
            interests,
            peers,
            hands: Mutex::default(),
            myself: myself.clone(),
        })
    }

    /// One frame for each gateway with subscribers, whatever their number there.
    fn to_channel(&self, peers: &Arc<Peers>, publication: &Publication) -> Handed {
        let Publication::Entry {
            conversation,
            entry,
            ..
        } = publication
        else {
            self.edge.publication(publication);
            return Handed::Done;
        };
        self.sent(peers, *conversation, entry);
        let gateways = self.interests.of(&Topic::Channel(*conversation));
        let mut others = gateways.into_iter().filter(|&g| g != self.me).peekable();
        let mut handed = Handed::Done;
        if others.peek().is_some() {
            let deliver = Message::Deliver(Delivered::Publication(publication.clone()));
            let bytes = encode(&deliver);
            // Rule [private]: nobody who is not in the channel gets what follows, on any gateway.
            let token = entry.content.makes_private().then(|| {
                let (done, everywhere) = oneshot::channel();
                handed = Handed::Waiting(everywhere);
                Token::new(move |_| drop(done.send(InHand(Arc::new(())))))
            });
            for gateway in others {
                peers.send(gateway, bytes.clone(), token.clone());
            }
        }
        self.edge.publication(publication);
        handed
    }

    fn sent(&self, peers: &Arc<Peers>, channel: ConversationId, entry: &Entry) {
        let (user, seq) = (entry.sender.clone(), entry.seq);
        match self.ring.load().home(&user) {
            Some(home) if home != self.me => {
                peers.send_if_room(home, encode(&Message::Sent { user, channel, seq }));
            }
            _ => self.home.sent(user, channel, seq),
        }
    }

    /// Gives a publication to the homes of its users, and keeps it in hand.
    fn give(&self, publication: Publication, waiting: oneshot::Sender<InHand>) {
        let to_send = {
            let mut hands = self.hands();
            // Under the lock: a new version is either seen here, or sees this in hand.
            let ring = self.ring.load();
            hands.next += 1;
            let id = hands.next;
            let users = users_of(publication.audience()).cloned().collect();
            let mut publishing = Publishing {
                publication,
                parts: BTreeMap::new(),
                next_part: 0,
                waiting: Some(waiting),
            };
            let mut to_send = ToSend::new();
            publishing.cut(id, users, &ring, &mut to_send);
            hands.publishing.insert(id, publishing);
            gauge!("chat_publications_in_hand").set(hands.publishing.len() as f64);
            to_send
        };
        self.send(to_send);
    }

    fn send(&self, to_send: ToSend) {
        for (part, home, publication) in to_send {
            tracing::trace!(me = %self.me, part, %home, publication = %super::home::named(&publication), "given");
            if home == self.me {
                let myself = self.myself.clone();
                let done = Token::new(move |taken| {
                    if let Some(delivery) = myself.upgrade() {
                        delivery.published(part, home, taken);
                    }
                });
                self.home.publication(publication, done);
            } else if let Some(peers) = &self.peers {
                peers.send(home, encode(&Message::Publish { part, publication }), None);
            }
        }
    }

    /// A home says that a part is done, or that it is not the home.
    pub(super) fn published(&self, part_id: u64, home: GatewayId, taken: bool) {
        tracing::trace!(me = %self.me, part = part_id, %home, taken, "published");
        let mut told = None;
        {
            let mut hands = self.hands();
            let id = part_id >> PARTS_BITS;
            let Some(publishing) = hands.publishing.get_mut(&id) else {
                return;
            };
            // Rule [stale-done]: only the home it was last given to counts.
            let Some(part) = publishing.parts.get_mut(&part_id) else {
                return;
            };
            if part.home != home || part.refused {
                return;
            }
            if !taken {
                part.refused = true;
                return;
            }
            part.done = true;
            if publishing.parts.values().all(|part| part.done) {
                told = publishing.waiting.take().map(|waiting| (waiting, id));
            }
        }
        if let Some((waiting, id)) = told {
            let held = Held {
                delivery: self.myself.clone(),
                id,
            };
            drop(waiting.send(InHand(Arc::new(held))));
        }
    }

    /// Gives everything in hand whose home has changed to the new one: rule [reroute].
    pub(super) fn reroute(&self) {
        let (to_send, over) = {
            let mut hands = self.hands();
            let ring = self.ring.load();
            let mut over = Vec::new();
            hands.publishing.retain(|_, publishing| {
                // The conversation was lost: its next owner publishes this again.
                let lost = publishing
                    .waiting
                    .as_ref()
                    .is_some_and(oneshot::Sender::is_closed);
                if lost {
                    over.push(publishing.waiting.take());
                }
                !lost
            });
            let mut to_send = ToSend::new();
            for (&id, publishing) in &mut hands.publishing {
                let mut moved = Vec::new();
                for part in publishing.parts.values_mut() {
                    let home = part.home;
                    let refused = part.refused;
                    let goes = |user: &mut UserId| refused || ring.home(user) != Some(home);
                    moved.extend(part.users.extract_if(.., goes));
                }
                publishing.parts.retain(|_, part| !part.users.is_empty());
                publishing.cut(id, moved, &ring, &mut to_send);
            }
            (to_send, over)
        };
        drop(over);
        self.send(to_send);
    }

    /// Whether any home has refused something: to be given again after a moment.
    pub(super) fn has_refused(&self) -> bool {
        let hands = self.hands();
        let mut parts = hands.publishing.values().flat_map(|p| p.parts.values());
        parts.any(|part| part.refused)
    }

    fn hands(&self) -> MutexGuard<'_, Hands> {
        lock(&self.hands)
    }
}

impl Publishing {
    /// Makes a part for each home of these users.
    fn cut(&mut self, id: u64, users: Vec<UserId>, ring: &Ring, to_send: &mut ToSend) {
        let mut homes: BTreeMap<GatewayId, Vec<UserId>> = BTreeMap::new();
        for user in users {
            if let Some(home) = ring.home(&user) {
                homes.entry(home).or_default().push(user);
            }
        }
        for (home, users) in homes {
            let part = (id << PARTS_BITS) | self.next_part;
            self.next_part += 1;
            to_send.push((part, home, restricted(&self.publication, &users)));
            self.parts.insert(
                part,
                Part {
                    home,
                    users,
                    done: false,
                    refused: false,
                },
            );
        }
    }
}

impl Publish for Delivery {
    fn publish(&self, publication: Publication) -> Handed {
        let Some(peers) = &self.peers else {
            // Alone: the home of everyone.
            match &publication {
                Publication::Entry {
                    conversation,
                    entry,
                    audience: Audience::Channel,
                } => {
                    self.home
                        .sent(entry.sender.clone(), *conversation, entry.seq);
                    self.edge.publication(&publication);
                }
                _ => self.home.pass_on(publication, None),
            }
            return Handed::Done;
        };
        if matches!(publication.audience(), Audience::Channel) {
            return self.to_channel(peers, &publication);
        }
        match &publication {
            // Nobody is left in it.
            Publication::Entry { .. } | Publication::Place { .. }
                if users_of(publication.audience()).next().is_none() =>
            {
                Handed::Done
            }
            Publication::Entry { .. } | Publication::Place { .. } => {
                let (waiting, delivered) = oneshot::channel();
                self.give(publication, waiting);
                Handed::Waiting(delivered)
            }
            Publication::Receipt { .. } | Publication::Typing { .. } => {
                let mut to_send = ToSend::new();
                let users = users_of(publication.audience()).cloned().collect();
                let mut once = Publishing {
                    publication,
                    parts: BTreeMap::new(),
                    next_part: 0,
                    waiting: None,
                };
                once.cut(0, users, &self.ring.load(), &mut to_send);
                if peers.have_room() {
                    self.send(to_send);
                }
                Handed::Done
            }
        }
    }
}
