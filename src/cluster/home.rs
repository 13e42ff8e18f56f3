//! A user's home: where their inbox is read. Rows are written some time after an entry is published, so the
//! publications of the last moments are laid over the stored rows (rule [overlay] of docs/cluster.md).

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use metrics::{counter, gauge};

use super::{
    edge::Edge,
    interests::Interests,
    link::Token,
    lock,
    membership::Learned,
    message::{Delivered, Interest, Message, encode},
    overlay::Overlay,
    peers::Peers,
    places::{InboxIndex, InboxRef},
    presence::Presence,
    ring::Ring,
};
use crate::{
    chat::{InboxWriter, Publication},
    memory::Memory,
    model::{Epoch, GatewayId, Topic, UserId},
    mutation::{Mutation, broken},
    store::{self, InboxRow, Store},
};

pub struct Home {
    me: GatewayId,
    store: Arc<dyn Store>,
    edge: Arc<Edge>,
    peers: Option<Arc<Peers>>,
    interests: Arc<Interests>,
    pub(super) presence: Presence,
    rings: Mutex<Rings>,
    /// Every member has announced its interests for the version that this gateway has adopted.
    complete: AtomicBool,
    held: Mutex<Vec<Held>>,
    overlay: Overlay,
    index: InboxIndex,
}

/// Of whom this gateway is the home, and whether it knows where they are.
struct Rings {
    now: Ring,
    /// Since every member had announced, that version first: who was at home here in all of these is known.
    since: Vec<Ring>,
    announced: BTreeMap<GatewayId, Epoch>,
}

impl Rings {
    /// Whether it is known where this user was, at home here, in every version since.
    fn stayed(&self, user: &UserId, me: GatewayId) -> bool {
        !self.since.is_empty() && self.since.iter().all(|ring| ring.home(user) == Some(me))
    }
}

/// A publication for users of whom this gateway has just become the home.
struct Held {
    publication: Publication,
    done: Option<Arc<Token>>,
}

/// Whether this gateway speaks for a user.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AtHome {
    Yes,
    /// Not every member has said yet what it is interested in.
    NotYet,
    No,
}

impl Home {
    pub(super) fn new(
        me: GatewayId,
        store: Arc<dyn Store>,
        edge: Arc<Edge>,
        peers: Option<Arc<Peers>>,
        interests: Arc<Interests>,
        ring: Ring,
        memory: Memory,
    ) -> Self {
        let presence = Presence::new(
            me,
            store.clone(),
            edge.clone(),
            peers.clone(),
            interests.clone(),
        );
        Self {
            me,
            store,
            edge,
            peers,
            interests,
            presence,
            rings: Mutex::new(Rings {
                now: ring,
                since: Vec::new(),
                announced: BTreeMap::new(),
            }),
            complete: AtomicBool::new(false),
            held: Mutex::default(),
            overlay: Overlay::new(memory.overlays()),
            index: InboxIndex::new(memory.places()),
        }
    }

    // Of whom this gateway is the home.

    /// A new version of the ring.
    pub(super) fn adopt(&self, after: &Ring, learned: Learned) {
        let mut rings = lock(&self.rings);
        let before = std::mem::replace(&mut rings.now, after.clone());
        if self.complete.swap(false, Ordering::AcqRel) {
            rings.since = vec![before.clone()];
        }
        // A version was missed, or nobody was known before either: then nobody is known.
        if learned == Learned::Next && !rings.since.is_empty() {
            rings.since.push(after.clone());
        } else {
            rings.since.clear();
        }
        // Rule [remember]: whoever was at home elsewhere meanwhile is not known.
        if !broken(Mutation::Remember) {
            self.index.retain(|user| rings.stayed(user, self.me));
        }
        let version = after.version();
        let gone =
            |gateway| before.members().contains(&gateway) && !after.members().contains(&gateway);
        // Who is ahead of this gateway has told it already; who was a member and is none any more is gone.
        let empty = self.interests.retain(|topic, gateway, noted| {
            noted > version || (self.is_mine(after, topic) && !gone(gateway))
        });
        for topic in empty {
            if let Topic::User(user) = &topic
                && self.is_mine(after, &topic)
            {
                self.presence.vanished(user);
            }
        }
        self.presence.count();
    }

    fn is_mine(&self, ring: &Ring, topic: &Topic) -> bool {
        ring.place(topic) == Some(self.me)
    }

    fn complete_if_announced(&self, rings: &mut Rings) {
        let Rings { now, announced, .. } = rings;
        // Rule [exact]: for exactly this version. A member that is ahead told its interests to another home. This gateway
        // too: it says so when its own inbox writer has written everything.
        let said = |member: &GatewayId| announced.get(member) == Some(&now.version());
        if now.members().contains(&self.me)
            && now.members().iter().all(said)
            && !self.complete.load(Ordering::Acquire)
        {
            self.complete.store(true, Ordering::Release);
            let watched = self
                .interests
                .topics(|topic| matches!(topic, Topic::Presence(_)) && self.is_mine(now, topic));
            for topic in watched {
                if let Topic::Presence(user) = topic {
                    self.presence.tell_again(&user);
                }
            }
        }
    }

    /// A member, maybe this gateway itself, has told everything that its sockets are interested in.
    pub(super) fn announced(&self, member: GatewayId, version: Epoch) {
        {
            let mut rings = lock(&self.rings);
            rings.announced.insert(member, version);
            let members = rings.now.members().to_vec();
            let now = rings.now.version();
            rings
                .announced
                .retain(|gateway, said| members.contains(gateway) || *said > now);
            // What it did not say again is over.
            let empty = self
                .interests
                .retain(|_, gateway, noted| gateway != member || noted >= version);
            for topic in empty {
                if let Topic::User(user) = &topic {
                    self.presence.vanished(user);
                }
            }
            self.complete_if_announced(&mut rings);
        }
        self.release();
    }

    /// Gives away what was held.
    fn release(&self) {
        if !self.complete.load(Ordering::Acquire) {
            return;
        }
        let held = std::mem::take(&mut *lock(&self.held));
        gauge!("chat_publications_held").set(0.0);
        for Held { publication, done } in held {
            self.publication(publication, done);
        }
    }

    /// Whether this gateway speaks for the user: rules [hold] and [confirm].
    pub(super) fn at_home(&self, user: &UserId) -> AtHome {
        let rings = lock(&self.rings);
        if rings.now.home(user) != Some(self.me) {
            return AtHome::No;
        }
        if self.complete.load(Ordering::Acquire)
            || rings.stayed(user, self.me)
            || broken(Mutation::Hold)
        {
            AtHome::Yes
        } else {
            AtHome::NotYet
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Acquire)
    }

    /// A gateway says what some of its sockets are interested in.
    pub(super) fn interested(&self, gateway: GatewayId, interest: &Interest, version: Epoch) {
        match &interest.topic {
            Topic::User(user) => self.presence.came(user, gateway, version),
            topic @ (Topic::Presence(_) | Topic::Channel(_)) => {
                self.interests.note(topic, gateway, version);
            }
        }
    }

    pub(super) fn uninterested(&self, gateway: GatewayId, topic: &Topic) {
        match topic {
            Topic::User(user) => self.presence.went(user, gateway),
            Topic::Presence(_) | Topic::Channel(_) => {
                self.interests.forget(topic, gateway);
            }
        }
    }

    // What goes out.

    /// Brings a publication to the sockets of the users it names, wherever they are. The token is dropped when it has
    /// arrived; refused, if this is not the home of all of them.
    pub(super) fn publication(&self, publication: Publication, done: Option<Arc<Token>>) {
        let mut hold = false;
        for user in publication.audience.users() {
            match self.at_home(user) {
                AtHome::Yes => {}
                AtHome::NotYet => hold = true,
                AtHome::No => return done.iter().for_each(|done| done.refuse()),
            }
        }
        if hold {
            tracing::trace!(me = %self.me, publication = %publication, "held");
            counter!("chat_publications_held_total").increment(1);
            let mut held = lock(&self.held);
            held.push(Held { publication, done });
            gauge!("chat_publications_held").set(held.len() as f64);
            drop(held);
            // The last announcement may have come in between.
            self.release();
            return;
        }
        self.pass_on(publication, done.as_ref());
    }

    /// As `publication`, for users who are all at home here.
    pub(super) fn pass_on(&self, publication: Publication, done: Option<&Arc<Token>>) {
        // Rule [overlay]: noted first, then delivered. Whoever registers in between is told twice, never not at all.
        tracing::trace!(me = %self.me, publication = %publication, gateways = ?self.by_gateway(&publication).keys(), "passed on");
        self.record(&publication);
        if let Some(peers) = &self.peers {
            for (gateway, publication) in self.by_gateway(&publication) {
                let deliver = Message::Deliver(Delivered::Publication(publication));
                let done = done.filter(|_| !broken(Mutation::EndToEnd)).cloned();
                peers.send(gateway, encode(&deliver), done);
            }
        }
        self.edge.publication(&publication);
    }

    /// The part of a publication for each other gateway.
    fn by_gateway(&self, publication: &Publication) -> BTreeMap<GatewayId, Publication> {
        let mut parts: BTreeMap<GatewayId, Vec<UserId>> = BTreeMap::new();
        for user in publication.audience.users() {
            for gateway in self.interests.of(&Topic::User(user.clone())) {
                if gateway != self.me {
                    parts.entry(gateway).or_default().push(user.clone());
                }
            }
        }
        let part = |(gateway, users): (_, Vec<UserId>)| (gateway, publication.to(&users));
        parts.into_iter().map(part).collect()
    }

    // The inbox.

    /// Records what a publication means for the inboxes of its users, before they can hear of it. A user who registers
    /// now sees it in the inbox or gets it.
    pub(super) fn record(&self, publication: &Publication) {
        self.overlay.record(publication, &self.index);
    }

    /// All of a user's conversations as they are now.
    pub(super) async fn inbox(&self, user: &UserId) -> store::Result<Vec<InboxRow>> {
        let mut rows = self.rows(user).await?;
        rows.retain(is_in);
        Ok(rows)
    }

    /// Which these are; from memory, if this gateway remembers them, and `may` believe that.
    pub(super) async fn inbox_refs(
        &self,
        user: &UserId,
        may: bool,
    ) -> store::Result<Vec<InboxRef>> {
        if may && let Some(places) = self.index.of(user) {
            counter!("chat_places_remembered_total").increment(1);
            return Ok(places);
        }
        let known = self.index.begin(user);
        let rows = self.rows(user).await?;
        Ok(self.index.learn(user, &known, &rows))
    }

    /// As stored and as published since; those that the user is no longer in too.
    async fn rows(&self, user: &UserId) -> store::Result<Vec<InboxRow>> {
        let mut rows = self.store.inbox(user).await?;
        self.overlay.lay_over(user, &mut rows);
        Ok(rows)
    }

    /// Drops publications when they are old enough to be stored; for a task.
    pub async fn turn_overlays(&self, inbox: &InboxWriter) {
        self.overlay.keep(inbox, self.peers.is_none()).await;
    }
}

fn is_in(row: &InboxRow) -> bool {
    let Some(face) = &row.face else { return false };
    row.left_seq.is_none_or(|left| left < face.joined_seq)
}
