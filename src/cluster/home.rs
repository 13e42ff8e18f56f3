//! A user's home: where their inbox is read. Rows are written some time after an entry is published, so the
//! publications of the last moments are laid over the stored rows (rule [overlay] of docs/cluster.md).

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use metrics::{counter, gauge};

use super::{
    edge::{Edge, users_of},
    interests::Interests,
    link::Token,
    lock,
    membership::Learned,
    message::{Delivered, Interest, Message, encode},
    overlay::Overlays,
    peers::Peers,
    places::{Face, InboxPlace, Places},
    presence::Presence,
    view::View,
};
use crate::{
    chat::{Audience, InboxWriter, Members, Place, Publication},
    memory::Memory,
    model::{ConversationId, Details, Entry, Epoch, GatewayId, Kind, Seq, Topic, UserId},
    mutation::{Mutation, broken},
    store::{self, InboxFace, InboxRow, InboxWrite, Store},
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
    overlays: Overlays,
    places: Places,
}

/// Of whom this gateway is the home, and whether it knows where they are.
struct Rings {
    now: View,
    /// Since every member had announced, that version first: who was at home here in all of these is known.
    since: Vec<View>,
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
    done: Arc<Token>,
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
        ring: View,
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
            overlays: Overlays::new(memory.overlays()),
            places: Places::new(memory.places()),
        }
    }

    // Of whom this gateway is the home.

    /// A new version of the ring.
    pub(super) fn adopt(&self, after: &View, learned: Learned) {
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
            self.places.retain(|user| rings.stayed(user, self.me));
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

    fn is_mine(&self, ring: &View, topic: &Topic) -> bool {
        ring.responsible(topic) == Some(self.me)
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
    pub(super) fn publication(&self, publication: Publication, done: Arc<Token>) {
        let audience = publication.audience();
        let mut hold = false;
        for user in users_of(audience) {
            match self.at_home(user) {
                AtHome::Yes => {}
                AtHome::NotYet => hold = true,
                AtHome::No => return done.refuse(),
            }
        }
        if hold {
            tracing::trace!(me = %self.me, publication = %named(&publication), "held");
            counter!("chat_publications_held_total").increment(1);
            let mut held = lock(&self.held);
            held.push(Held { publication, done });
            gauge!("chat_publications_held").set(held.len() as f64);
            drop(held);
            // The last announcement may have come in between.
            self.release();
            return;
        }
        self.pass_on(publication, Some(&done));
    }

    /// As `publication`, for users who are all at home here.
    pub(super) fn pass_on(&self, publication: Publication, done: Option<&Arc<Token>>) {
        // Rule [overlay]: noted first, then delivered. Whoever registers in between is told twice, never not at all.
        tracing::trace!(me = %self.me, publication = %named(&publication), gateways = ?self.by_gateway(&publication).keys(), "passed on");
        self.note(&publication);
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
        for user in users_of(publication.audience()) {
            for gateway in self.interests.of(&Topic::User(user.clone())) {
                if gateway != self.me {
                    parts.entry(gateway).or_default().push(user.clone());
                }
            }
        }
        let part = |(gateway, users): (_, Vec<UserId>)| (gateway, restricted(publication, &users));
        parts.into_iter().map(part).collect()
    }

    fn note(&self, publication: &Publication) {
        match publication {
            Publication::Entry {
                conversation,
                entry,
                audience: Audience::Members(members),
            } => self.published(*conversation, members, entry),
            Publication::Place {
                conversation,
                seq,
                place,
                details,
                audience,
            } => {
                for user in users_of(audience) {
                    self.place(*conversation, *seq, *place, details, user);
                }
            }
            Publication::Entry { .. }
            | Publication::Receipt { .. }
            | Publication::Typing { .. } => {}
        }
    }

    /// Who sends to a channel has read what came before.
    pub(super) fn sent(&self, user: UserId, channel: ConversationId, seq: Seq) {
        self.placed(&InboxWrite {
            user,
            conversation: channel,
            kind: Kind::Channel,
            face: None,
            read_seq: Some(seq),
            left_seq: None,
        });
    }

    fn place(
        &self,
        conversation: ConversationId,
        seq: Seq,
        place: Place,
        details: &Details,
        user: &UserId,
    ) {
        let write = InboxWrite {
            user: user.clone(),
            conversation,
            kind: details.kind,
            face: None,
            read_seq: None,
            left_seq: None,
        };
        match (place, details.kind) {
            (Place::Added, Kind::Channel) => self.placed(&InboxWrite {
                face: Some(InboxFace {
                    seq,
                    kind: details.kind,
                    name: details.name.clone(),
                    joined_seq: seq,
                    last: None,
                }),
                read_seq: Some(seq),
                ..write
            }),
            (Place::Removed, _) => self.placed(&InboxWrite {
                left_seq: Some(seq),
                ..write
            }),
            // An entry published to its members says it all.
            (Place::Added, Kind::Dm | Kind::Group) | (Place::Updated, _) => {}
        }
    }

    // The inbox.

    /// Notes an entry, before it is delivered: a user who registers now sees it in the inbox or gets it.
    fn published(&self, conversation: ConversationId, members: &Arc<Members>, entry: &Entry) {
        let last = Arc::new(entry.last());
        self.overlays.published(conversation, members, &last);
        for (user, joined_seq) in &members.users {
            let face = Face {
                seq: last.seq,
                kind: members.kind,
                joined_seq: *joined_seq,
                last_seq: Some(last.seq),
            };
            self.places.note(user, conversation, Some(face), None);
        }
    }

    /// Notes a user's joining or leaving.
    fn placed(&self, write: &InboxWrite) {
        self.overlays.placed(write);
        let face = write.face.as_ref().map(Face::of);
        if face.is_some() || write.left_seq.is_some() {
            self.places
                .note(&write.user, write.conversation, face, write.left_seq);
        }
    }

    /// All of a user's conversations as they are now.
    pub(super) async fn inbox(&self, user: &UserId) -> store::Result<Vec<InboxRow>> {
        let mut rows = self.rows(user).await?;
        rows.retain(is_in);
        Ok(rows)
    }

    /// Which these are; from memory, if this gateway remembers them, and `may` believe that.
    pub(super) async fn places(&self, user: &UserId, may: bool) -> store::Result<Vec<InboxPlace>> {
        if may && let Some(places) = self.places.of(user) {
            counter!("chat_places_remembered_total").increment(1);
            return Ok(places);
        }
        let known = self.places.begin(user);
        let rows = self.rows(user).await?;
        Ok(self.places.learn(user, &known, &rows))
    }

    /// As stored and as published since; those that the user is no longer in too.
    async fn rows(&self, user: &UserId) -> store::Result<Vec<InboxRow>> {
        let mut rows = self.store.inbox(user).await?;
        self.overlays.lay_over(user, &mut rows);
        Ok(rows)
    }

    /// Drops publications when they are old enough to be stored; for a task.
    pub async fn turn_overlays(&self, inbox: &InboxWriter) {
        self.overlays.keep(inbox, self.peers.is_none()).await;
    }
}

fn is_in(row: &InboxRow) -> bool {
    let Some(face) = &row.face else { return false };
    row.left_seq.is_none_or(|left| left < face.joined_seq)
}

/// For the log.
pub(super) fn named(publication: &Publication) -> String {
    let users: Vec<&UserId> = users_of(publication.audience()).collect();
    match publication {
        Publication::Entry {
            conversation,
            entry,
            ..
        } => format!("{conversation} {} {users:?}", entry.seq),
        Publication::Receipt { .. } => "receipt".into(),
        Publication::Typing { .. } => "typing".into(),
        Publication::Place {
            conversation, seq, ..
        } => format!("{conversation} place {seq} {users:?}"),
    }
}

/// The same for some of its users.
pub(super) fn restricted(publication: &Publication, users: &[UserId]) -> Publication {
    let mut publication = publication.clone();
    let (Publication::Entry { audience, .. }
    | Publication::Receipt { audience, .. }
    | Publication::Typing { audience, .. }
    | Publication::Place { audience, .. }) = &mut publication;
    if let Audience::Members(members) = audience
        && members.users.len() != users.len()
    {
        let users: HashSet<&UserId> = users.iter().collect();
        let some = members
            .users
            .iter()
            .filter(|(user, _)| users.contains(user));
        let some: Vec<_> = some.cloned().collect();
        // A dm is named after the other one, who may be in another part.
        let name = match (members.kind, some.first()) {
            (Kind::Dm, Some((user, _))) => members.name_for(user),
            _ => members.name.clone(),
        };
        *audience = Audience::Members(Arc::new(Members {
            kind: members.kind,
            name,
            users: some,
        }));
    }
    publication
}
