//! A user's home: the gateway that knows where the user's sockets are and brings publications to them, and through which
//! the user's inbox is read.

pub(super) mod attention;
pub(super) mod devices;
pub(super) mod memberships;
mod overlay;
mod presence;
pub(super) mod pushes;
mod upload_counts;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use devices::Devices;
use memberships::{InboxIndex, Rows};
use metrics::{counter, gauge};
use overlay::Overlay;
use presence::Presence;
use upload_counts::UploadCounts;

use crate::{
    chat::{Audience, Body, InboxWriter, Publication, Receipt},
    cluster::{
        ring::{membership::Learned, view::View},
        sockets::{interests::Interests, local_sockets::LocalSockets},
        wire::{
            link::Token,
            message::{Delivered, Interest, PeerMessage, encode},
            peers::Peers,
        },
    },
    memory::Memory,
    model::{Content, ConversationId, Device, Epoch, GatewayId, Seq, Topic, UserId},
    mutation::{Mutation, broken},
    store::{self, InboxKey, InboxRow, InboxSettings, Store},
    tasks::{lock, read, write},
};

pub struct Home {
    me: GatewayId,
    store: Arc<dyn Store>,
    sockets: Arc<LocalSockets>,
    peers: Option<Arc<Peers>>,
    interests: Arc<Interests>,
    pub(super) presence: Presence,
    pub(super) devices: Devices,
    pub(crate) uploads: UploadCounts,
    rings: Mutex<Rings>,
    /// Rule [held-first]. Read while a publication is delivered. Written while a version is adopted, and from when the last
    /// member has announced until everything held is passed on. So no publication overtakes those that were held.
    passing: RwLock<()>,
    /// Whether every member has announced its interests for the version that this gateway has adopted.
    complete: AtomicBool,
    held: Mutex<Vec<HeldPublication>>,
    overlay: Overlay,
    index: InboxIndex,
}

/// The versions of the ring that decide for whom this gateway is the home, and whether it knows where they are.
struct Rings {
    now: View,
    /// The version for which every member announced its interests last, and all later ones. A user who had their home here
    /// in all of them is known.
    since: Vec<View>,
    /// The version for which each member announced its interests last.
    announced: BTreeMap<GatewayId, Epoch>,
}

impl Rings {
    /// Whether the user's home was here in every version since all members announced their interests.
    fn stayed(&self, user: &UserId, me: GatewayId) -> bool {
        self.named(|ring| ring.home(user), me)
    }

    /// Whether the ring named this gateway by `pick` in all these versions.
    fn named(&self, pick: impl Fn(&View) -> Option<GatewayId>, me: GatewayId) -> bool {
        !self.since.is_empty() && self.since.iter().all(|ring| pick(ring) == Some(me))
    }
}

/// A publication for users whose home this gateway has just become. It waits for all announcements.
struct HeldPublication {
    publication: Publication,
    /// `None` if its sender waits for no acknowledgement.
    done: Option<Arc<Token>>,
}

/// Whether this gateway is a user's home, and knows where the user's sockets are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum AtHome {
    Yes,
    /// It is their home, but not every member has announced its interests.
    NotYet,
    No,
}

impl Home {
    pub(super) fn new(
        me: GatewayId,
        store: Arc<dyn Store>,
        sockets: Arc<LocalSockets>,
        peers: Option<Arc<Peers>>,
        interests: Arc<Interests>,
        ring: View,
        memory: Memory,
    ) -> Self {
        let presence = Presence::new(
            me,
            store.clone(),
            sockets.clone(),
            peers.clone(),
            interests.clone(),
        );
        Self {
            me,
            store,
            sockets,
            peers,
            interests,
            presence,
            devices: Devices::new(memory.devices()),
            uploads: UploadCounts::default(),
            rings: Mutex::new(Rings {
                now: ring,
                since: Vec::new(),
                announced: BTreeMap::new(),
            }),
            passing: RwLock::default(),
            complete: AtomicBool::new(false),
            held: Mutex::default(),
            overlay: Overlay::new(memory.overlays()),
            index: InboxIndex::new(memory.memberships()),
        }
    }

    // The ring.

    /// Adopts a new version of the ring.
    pub(super) fn adopt(&self, after: &View, learned: Learned) {
        let _alone = write(&self.passing);
        let mut rings = lock(&self.rings);
        let before = std::mem::replace(&mut rings.now, after.clone());
        if self.complete.swap(false, Ordering::AcqRel) {
            rings.since = vec![before.clone()];
        }
        // If a version was missed, or nobody was known before, nobody is known.
        if learned == Learned::Next && !rings.since.is_empty() {
            rings.since.push(after.clone());
        } else {
            rings.since.clear();
        }
        // Rule [remember]: users who had another home meanwhile are not known.
        if !broken(Mutation::Remember) {
            self.index.retain(|user| rings.stayed(user, self.me));
            self.devices.retain(|user| rings.stayed(user, self.me));
        }
        let version = after.version();
        let gone =
            |gateway| before.members().contains(&gateway) && !after.members().contains(&gateway);
        // A gateway that is ahead has announced interests for a later version already. One that is no member any more is
        // gone.
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
        self.presence.adopted(|user| rings.stayed(user, self.me));
    }

    fn is_mine(&self, ring: &View, topic: &Topic) -> bool {
        ring.responsible(topic) == Some(self.me)
    }

    fn complete_if_announced(&self, rings: &mut Rings) {
        let Rings {
            now,
            announced: versions,
            ..
        } = rings;
        // Rule [exact]: for exactly this version, because a member that is ahead announced its interests to another home.
        // This gateway announces too, once its own inbox writer has written everything.
        let announced = |member: &GatewayId| versions.get(member) == Some(&now.version());
        if now.members().contains(&self.me)
            && now.members().iter().all(announced)
            && !self.complete.load(Ordering::Acquire)
        {
            self.complete.store(true, Ordering::Release);
            self.presence.complete();
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

    /// Notes that a member, maybe this gateway itself, has announced everything that its sockets are interested in.
    pub(super) fn announced(&self, member: GatewayId, version: Epoch) {
        let _alone = write(&self.passing);
        {
            let mut rings = lock(&self.rings);
            rings.announced.insert(member, version);
            let members = rings.now.members().to_vec();
            let now = rings.now.version();
            rings
                .announced
                .retain(|gateway, version| members.contains(gateway) || *version > now);
            // Interests that it did not announce again have ended.
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

    /// Passes on what was held, once every member has announced. `passing` is locked.
    fn release(&self) {
        if !self.complete.load(Ordering::Acquire) {
            return;
        }
        let held = std::mem::take(&mut *lock(&self.held));
        gauge!("chat_publications_held").set(0.0);
        for HeldPublication { publication, done } in held {
            self.pass_on_or_hold(&publication, done.as_ref());
        }
    }

    /// Returns whether this gateway speaks for the user: rules [hold] and [confirm].
    pub(super) fn at_home(&self, user: &UserId) -> AtHome {
        self.is_responsible(&|ring: &View| ring.home(user)).0
    }

    /// Returns whether this gateway may act as the one that the ring names by `pick`, and the version of the ring.
    pub(super) fn is_responsible(
        &self,
        pick: &impl Fn(&View) -> Option<GatewayId>,
    ) -> (AtHome, Epoch) {
        let rings = lock(&self.rings);
        let version = rings.now.version();
        if pick(&rings.now) != Some(self.me) {
            return (AtHome::No, version);
        }
        if self.complete.load(Ordering::Acquire)
            || rings.named(pick, self.me)
            || broken(Mutation::Hold)
        {
            (AtHome::Yes, version)
        } else {
            (AtHome::NotYet, version)
        }
    }

    /// Returns the version of the ring that this gateway has adopted.
    pub(super) fn version(&self) -> Epoch {
        lock(&self.rings).now.version()
    }

    /// Remembers the devices of a user, which were read or written under this version of the ring. If it is another one by
    /// now, they may be somebody else's to write.
    pub(super) fn remember_devices(&self, user: &UserId, version: Epoch, devices: Arc<[Device]>) {
        // The lock is held, so that `adopt` comes before or after this.
        let rings = lock(&self.rings);
        if rings.now.version() == version {
            self.devices.remember(user, devices);
        }
    }

    /// Notes that a user has set something for a conversation, so that it is read.
    pub(super) fn has_settings(&self, user: &UserId, conversation: ConversationId) {
        self.index.has_settings(user, conversation);
    }

    /// Sends what a user has set for a conversation to all sessions of the user.
    pub(super) fn tell_settings(
        &self,
        user: &UserId,
        conversation: ConversationId,
        settings: InboxSettings,
    ) {
        let told = Delivered::Settings {
            user: user.clone(),
            conversation,
            settings,
        };
        if let Some(peers) = &self.peers {
            let bytes = encode(&PeerMessage::Deliver(told.clone()));
            for gateway in self.interests.of(&Topic::User(user.clone())) {
                if gateway != self.me {
                    peers.send(gateway, bytes.clone(), None);
                }
            }
        }
        self.sockets.deliver(told);
    }

    pub(super) fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Acquire)
    }

    /// Notes that some sockets of a gateway are interested in a topic.
    pub(super) fn interested(&self, gateway: GatewayId, interest: &Interest, version: Epoch) {
        match &interest.topic {
            Topic::User(user) => self.presence.came(user, gateway, version, interest.away),
            topic @ (Topic::Presence(_) | Topic::Channel(_)) => {
                self.interests.note(topic, gateway, version);
            }
        }
    }

    /// Notes that no socket of a gateway is interested in a topic any more.
    pub(super) fn uninterested(&self, gateway: GatewayId, topic: &Topic) {
        match topic {
            Topic::User(user) => self.presence.went(user, gateway),
            Topic::Presence(_) | Topic::Channel(_) => {
                self.interests.forget(topic, gateway);
            }
        }
    }

    // Publications.

    /// Brings a publication to the sockets of the users it names, wherever they are. The token is dropped when every
    /// gateway concerned has it, and refused if this is not the home of all of these users.
    pub(super) fn deliver(&self, publication: &Publication, done: Option<&Arc<Token>>) {
        let _passing = read(&self.passing);
        self.pass_on_or_hold(publication, done);
    }

    /// Rule [each-user]: whatever is so for the other users, a publication is held only for those whose sessions are not
    /// known yet, and passed on to all others whose home this is. So they get it before the next one. `passing` is locked.
    fn pass_on_or_hold(&self, publication: &Publication, done: Option<&Arc<Token>>) {
        let users = || publication.audience.users();
        if users().all(|user| self.at_home(user) == AtHome::Yes) {
            return self.pass_on(publication, done);
        }
        let mut by_place: BTreeMap<AtHome, Vec<UserId>> = BTreeMap::new();
        for user in users() {
            let place = self.at_home(user);
            by_place.entry(place).or_default().push(user.clone());
        }
        let is_refused = by_place.contains_key(&AtHome::No);
        if is_refused {
            done.iter().for_each(|done| done.refuse());
        }
        // What is refused comes again as a whole, with another token. The refusal does not wait for the others.
        let done = done.filter(|_| !is_refused);
        if let Some(unknown) = by_place.get(&AtHome::NotYet) {
            tracing::trace!(me = %self.me, publication = %publication, "held");
            counter!("chat_publications_held_total").increment(1);
            let mut held = lock(&self.held);
            held.push(HeldPublication {
                publication: publication.to(unknown),
                done: done.cloned(),
            });
            gauge!("chat_publications_held").set(held.len() as f64);
        }
        if let Some(known) = by_place.get(&AtHome::Yes) {
            self.pass_on(&publication.to(known), done);
        }
    }

    /// Records a publication and sends it to the sockets of its users: the second half of `deliver`, without the check that
    /// this is their home.
    pub(super) fn pass_on(&self, publication: &Publication, done: Option<&Arc<Token>>) {
        // Rule [overlay]: recorded first, then delivered. A user who registers in between gets it twice, but never misses
        // it.
        tracing::trace!(me = %self.me, publication = %publication, gateways = ?self.by_gateway(publication).keys(), "passed on");
        self.record(publication);
        self.note_receipt(publication);
        if let Some(peers) = &self.peers {
            for (gateway, publication) in self.by_gateway(publication) {
                let deliver = PeerMessage::Deliver(Delivered::Publication(publication));
                let done = done.filter(|_| !broken(Mutation::EndToEnd)).cloned();
                peers.send(gateway, encode(&deliver), done);
            }
        }
        self.sockets.deliver_publication(publication);
    }

    /// Tells who decides about pushes what a user has read or got, if this is the user's home.
    fn note_receipt(&self, publication: &Publication) {
        let Audience::Members(_) = &publication.audience else {
            return;
        };
        let Some(pushes) = self.presence.pushes() else {
            return;
        };
        let marked = |receipt: &Receipt| {
            if self.peers.is_none() || self.at_home(&receipt.user) == AtHome::Yes {
                pushes.marked(publication.conversation, receipt);
            }
        };
        match &publication.body {
            Body::Receipt(receipt) => marked(receipt),
            // The sender of a message has read the conversation up to it.
            Body::Entry(entry) if matches!(entry.content, Content::Text { .. }) => {
                marked(&Receipt {
                    user: entry.sender.clone(),
                    read_seq: Some(entry.seq),
                    delivered_seq: None,
                    away: false,
                });
            }
            _ => {}
        }
    }

    /// Returns the part of a publication for each other gateway with sockets of its users.
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

    /// Records that a user has read a channel up to an entry, because they sent it: its seq and its `texts`.
    pub(super) fn record_read(&self, channel: ConversationId, user: &UserId, read: (Seq, u64)) {
        self.overlay.record_read(channel, user, read);
    }

    /// Returns the rows of all conversations that a user is in.
    pub(super) async fn inbox(&self, user: &UserId) -> store::Result<Vec<InboxRow>> {
        let mut rows = self.rows(user).await?;
        rows.retain(is_in);
        Ok(rows)
    }

    /// Returns the rows of some conversations of a user, without those that the user is not in. Cells that are not there are
    /// not read if this gateway remembers the user and `may_serve`: one that is written meanwhile is not published yet, or
    /// is in the overlay.
    pub(super) async fn inbox_rows(
        &self,
        user: &UserId,
        may_serve: bool,
        conversations: &[ConversationId],
    ) -> store::Result<Vec<InboxRow>> {
        let known = self.index.of(user, |rows| rows.keys(conversations));
        let keys = known.filter(|_| may_serve).unwrap_or_else(|| {
            let ids = conversations.iter().copied();
            ids.map(InboxKey::unknown).collect()
        });
        let mut rows = self.store.inbox_rows(user, &keys).await?;
        self.overlay.lay_over(user, Some(conversations), &mut rows);
        rows.retain(is_in);
        Ok(rows)
    }

    /// Takes something of the conversations that a user is in. They come from memory if this gateway remembers them and
    /// `may_serve`, which is so while its lease holds. Returns also whether they did.
    pub(super) async fn conversations<T>(
        &self,
        user: &UserId,
        may_serve: bool,
        take: impl Fn(&Rows) -> T,
    ) -> store::Result<(T, bool)> {
        if may_serve && let Some(taken) = self.index.of(user, &take) {
            return Ok((taken, true));
        }
        let known = self.index.begin(user);
        let rows = self.rows(user).await?;
        Ok((self.index.learn(user, &known, &rows, take), false))
    }

    /// Returns the rows as stored and as published since, also those of conversations that the user has left.
    async fn rows(&self, user: &UserId) -> store::Result<Vec<InboxRow>> {
        let mut rows = self.store.inbox(user).await?;
        self.overlay.lay_over(user, None, &mut rows);
        Ok(rows)
    }

    /// Drops recorded publications when they are old enough to be stored. Never returns: it is for a task.
    pub async fn rotate_overlay(&self, inbox: &InboxWriter) {
        self.overlay.keep(inbox, self.peers.is_none()).await;
    }
}

fn is_in(row: &InboxRow) -> bool {
    let Some(summary) = &row.summary else {
        return false;
    };
    row.left_seq.is_none_or(|left| left < summary.joined_seq)
}
