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
    view::View,
};
use crate::{
    chat::{Audience, Handed, InHand, Publication, Publish},
    model::{ConversationId, Entry, GatewayId, Topic, UserId},
};

pub struct Delivery {
    me: GatewayId,
    ring: Arc<ArcSwap<View>>,
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
    next_part: u64,
    /// The parts of all publications in hand.
    parts: BTreeMap<u64, Part>,
}

/// A publication in hand.
struct Publishing {
    publication: Publication,
    parts: Vec<u64>,
    /// None: it has been told.
    waiting: Option<oneshot::Sender<InHand>>,
}

/// Given to one home.
struct Part {
    of: u64,
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
            let out = delivery.hands().remove(self.id);
            drop(out);
        }
    }
}

/// What is to be sent once the lock is released.
type ToSend = Vec<(u64, GatewayId, Publication)>;

/// Of what nobody keeps in hand: no part in hand has this number.
const NOT_IN_HAND: u64 = 0;

impl Delivery {
    #[must_use]
    pub(super) fn new(
        me: GatewayId,
        ring: Arc<ArcSwap<View>>,
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
            let publishing = Publishing {
                publication,
                parts: Vec::new(),
                waiting: Some(waiting),
            };
            hands.publishing.insert(id, publishing);
            let mut to_send = ToSend::new();
            hands.cut(id, users, &ring, &mut to_send);
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
            let Hands {
                publishing, parts, ..
            } = &mut *hands;
            // Rule [stale-done]: only the home it was last given to counts.
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
            part.done = true;
            let id = part.of;
            let Some(publishing) = publishing.get_mut(&id) else {
                return;
            };
            let done = |part| parts.get(part).is_none_or(|part| part.done);
            if publishing.parts.iter().all(done) {
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
            // The conversation was lost: its next owner publishes this again.
            let lost = |p: &Publishing| p.waiting.as_ref().is_some_and(oneshot::Sender::is_closed);
            let all = hands.publishing.iter();
            let (lost, kept): (Vec<_>, Vec<_>) = all.partition(|(_, p)| lost(p));
            let ids = |some: Vec<(&u64, &Publishing)>| -> Vec<u64> {
                some.into_iter().map(|(&id, _)| id).collect()
            };
            let (lost, kept) = (ids(lost), ids(kept));
            let over: Vec<_> = lost.into_iter().map(|id| hands.remove(id)).collect();
            let mut to_send = ToSend::new();
            for id in kept {
                let moved = hands.take_moved(id, &ring);
                hands.cut(id, moved, &ring, &mut to_send);
            }
            (to_send, over)
        };
        drop(over);
        self.send(to_send);
    }

    /// Whether any home has refused something: to be given again after a moment.
    pub(super) fn has_refused(&self) -> bool {
        self.hands().parts.values().any(|part| part.refused)
    }

    fn hands(&self) -> MutexGuard<'_, Hands> {
        lock(&self.hands)
    }
}

impl Hands {
    /// Makes a part for each home of these users.
    fn cut(&mut self, id: u64, users: Vec<UserId>, ring: &View, to_send: &mut ToSend) {
        let Some(publishing) = self.publishing.get_mut(&id) else {
            return;
        };
        for (home, users) in by_home(users, ring) {
            self.next_part += 1;
            let number = self.next_part;
            to_send.push((number, home, restricted(&publishing.publication, &users)));
            publishing.parts.push(number);
            let part = Part {
                of: id,
                home,
                users,
                done: false,
                refused: false,
            };
            self.parts.insert(number, part);
        }
    }

    /// The users of a publication who are to be given to another home.
    fn take_moved(&mut self, id: u64, ring: &View) -> Vec<UserId> {
        let mut moved = Vec::new();
        let Some(publishing) = self.publishing.get_mut(&id) else {
            return moved;
        };
        publishing.parts.retain(|number| {
            let Some(part) = self.parts.get_mut(number) else {
                return false;
            };
            let (home, refused) = (part.home, part.refused);
            let goes = |user: &mut UserId| refused || ring.home(user) != Some(home);
            moved.extend(part.users.extract_if(.., goes));
            let left = !part.users.is_empty();
            if !left {
                self.parts.remove(number);
            }
            left
        });
        moved
    }

    fn remove(&mut self, id: u64) -> Option<Publishing> {
        let out = self.publishing.remove(&id)?;
        for number in &out.parts {
            self.parts.remove(number);
        }
        Some(out)
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
                if peers.have_room() {
                    let users = users_of(publication.audience()).cloned().collect();
                    let homes = by_home(users, &self.ring.load()).into_iter();
                    let part = |(home, users): (_, Vec<UserId>)| {
                        (NOT_IN_HAND, home, restricted(&publication, &users))
                    };
                    self.send(homes.map(part).collect());
                }
                Handed::Done
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::model::ConversationId;

    fn ring(of: u128) -> View {
        View::new(1, vec![GatewayId(Uuid::from_u128(of))])
    }

    #[test]
    fn however_often_a_publication_is_cut_no_part_is_mistaken_for_that_of_another() {
        let mut hands = Hands::default();
        let user = UserId::new("alice").unwrap();
        let typing = || Publication::Typing {
            conversation: ConversationId(Uuid::from_u128(1)),
            user: user.clone(),
            audience: Audience::User(user.clone()),
        };
        let mut sent = ToSend::new();
        for id in [1, 2] {
            let publishing = Publishing {
                publication: typing(),
                parts: Vec::new(),
                waiting: None,
            };
            hands.publishing.insert(id, publishing);
            hands.cut(id, vec![user.clone()], &ring(1), &mut sent);
        }
        for turn in 0..70_000 {
            let ring = ring(1 + (turn + 1) % 2);
            let moved = hands.take_moved(1, &ring);
            assert_eq!(moved, std::slice::from_ref(&user));
            sent.clear();
            hands.cut(1, moved, &ring, &mut sent);
        }
        let [(newest, ..)] = sent[..] else {
            panic!("one home, one part")
        };
        assert_eq!(hands.parts[&newest].of, 1);
        assert_eq!(hands.parts.len(), 2);
        drop(hands.remove(1));
        assert_eq!(hands.parts.len(), 1);
        drop(hands.remove(2));
        assert!(hands.parts.is_empty());
    }
}
