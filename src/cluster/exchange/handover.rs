//! The handover between two versions of the ring: what this gateway tells the others when it adopts a version or leaves.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::sleep;

use super::{Exchange, RETRY_AFTER, TOPICS_AT_ONCE};
use crate::{
    cluster::{
        ring::{members::Adopt, membership::Learned, view::View},
        wire::message::{Interest, PeerMessage, encode},
    },
    model::{Epoch, GatewayId, Topic},
    mutation::{Mutation, broken},
    tasks::lock,
};

impl Exchange {
    /// Tells the others that this gateway is leaving.
    pub(in crate::cluster) fn leaving(&self) {
        let others = self.members.concerned();
        self.peers.broadcast(&others, &PeerMessage::Leaving);
    }

    /// Forgets the leaving gateways that have left by now, or whose lease has ended.
    pub(super) fn forget_left(&self, has_left: impl Fn(GatewayId) -> bool) {
        let left: Vec<_> = lock(&self.leaving)
            .extract_if(.., |g| has_left(*g))
            .collect();
        for gateway in left {
            self.peers.forget(gateway);
        }
    }

    /// Waits until the others have acknowledged every message. To be called after leaving.
    pub(in crate::cluster) async fn said(&self) {
        let version = self.members.ring().load().version();
        while self.told.load(Ordering::Acquire) < version
            || !self.peers.are_idle(&self.members.concerned())
        {
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Whether another member is connected, which takes over what this gateway leaves.
    pub(in crate::cluster) fn has_successor(&self) -> bool {
        let mut others = self.members.others().into_iter();
        others.any(|other| self.peers.are_connected(&[other]))
    }

    /// Tells the others of each version that this gateway adopts.
    pub(super) async fn tell_versions(self: Arc<Self>) {
        let mut changes = self.members.view_changes();
        loop {
            let version = changes.version();
            if version > self.told.load(Ordering::Acquire) {
                self.tell_adopted(version).await;
                if self.members.ring().load().version() == version {
                    self.told.store(version, Ordering::Release);
                }
                continue;
            }
            changes.changed().await;
        }
    }

    /// Tells the others which version there is.
    fn tell_ring(&self) {
        let ring = PeerMessage::Ring(self.members.row());
        self.peers.broadcast(&self.members.concerned(), &ring);
    }

    /// Tells the others that this gateway has adopted a version, in the order that the rules need.
    async fn tell_adopted(&self, version: Epoch) {
        let concerned = self.members.concerned();
        self.know_peers();
        // Again, because the first version is not adopted by `adopt`.
        self.tell_ring();
        self.members.let_go().await;
        self.peers
            .broadcast(&concerned, &PeerMessage::Adopted { version });
        // Rule [flush]: what was published to an old home is in the rows before a new home speaks for its users.
        let is_outdated = || self.members.ring().load().version() > version;
        while !self.inbox.flush().await {
            if is_outdated() {
                return;
            }
            sleep(RETRY_AFTER).await;
        }
        self.announce(version);
    }

    /// Tells each topic's home or owner that sockets here are interested in it.
    fn announce(&self, version: Epoch) {
        let ring = self.members.ring().load_full();
        if ring.version() != version {
            return;
        }
        let sockets = &self.here.sockets;
        sockets.in_interest_order(|| {
            let mut by_member: BTreeMap<GatewayId, Vec<Interest>> =
                ring.members().iter().map(|&m| (m, Vec::new())).collect();
            for interest in sockets.interests() {
                let place = ring.responsible(&interest.topic);
                if let (Topic::Channel(channel), None) = (&interest.topic, interest.passed) {
                    sockets.tell_later(*channel, None);
                }
                if let Some(interests) = place.and_then(|place| by_member.get_mut(&place)) {
                    interests.push(interest);
                }
            }
            for (gateway, topics) in by_member {
                if gateway == self.me {
                    self.interested(gateway, &topics, version);
                    continue;
                }
                for topics in topics.chunks(TOPICS_AT_ONCE) {
                    self.peers.announce(gateway, version, topics.to_vec());
                }
                let announced = encode(&PeerMessage::Announced { version });
                self.peers.send(gateway, announced, None);
            }
        });
        self.announced(self.me, version);
    }
}

impl Adopt for Exchange {
    fn adopt(&self, before: &View, after: &View, learned: Learned) {
        self.home.adopt(after, learned);
        // Rule [ring-first]: told before, a new home does not refuse what it is sent, and so takes it in order.
        if !broken(Mutation::RingFirst) {
            self.tell_ring();
        }
        self.delivery.adopt(after);
        let gone = before
            .members()
            .iter()
            .filter(|g| !after.members().contains(g));
        let leaving = lock(&self.leaving).clone();
        for &gateway in gone.filter(|&&g| g != self.me && !leaving.contains(&g)) {
            self.peers.forget(gateway);
        }
    }
}
