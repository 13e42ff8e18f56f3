//! Which gateways have sockets that a topic concerns: kept by a user's home, and by a channel's owner.

use std::collections::BTreeSet;

use dashmap::{DashMap, mapref::entry::Entry};
use foldhash::quality::RandomState;

use crate::model::{Epoch, GatewayId, Topic};

/// With each gateway, the version as of which it said so. A list: nearly always of one.
type Noted = Vec<(GatewayId, Epoch)>;

#[derive(Default)]
pub(super) struct Interests {
    topics: DashMap<Topic, Noted, RandomState>,
}

impl Interests {
    /// True if nobody was interested before.
    pub(super) fn note(&self, topic: &Topic, gateway: GatewayId, version: Epoch) -> bool {
        let mut noted = self.topics.entry(topic.clone()).or_default();
        let first = noted.is_empty();
        match noted.iter_mut().find(|(noted, _)| *noted == gateway) {
            Some((_, known)) => *known = version.max(*known),
            None => {
                if first {
                    noted.reserve_exact(1);
                }
                noted.push((gateway, version));
            }
        }
        first
    }

    /// True if nobody is interested any more.
    pub(super) fn forget(&self, topic: &Topic, gateway: GatewayId) -> bool {
        let Entry::Occupied(mut noted) = self.topics.entry(topic.clone()) else {
            return false;
        };
        noted.get_mut().retain(|(noted, _)| *noted != gateway);
        let empty = noted.get().is_empty();
        if empty {
            noted.remove();
        }
        empty
    }

    pub(super) fn of(&self, topic: &Topic) -> Vec<GatewayId> {
        let noted = self.topics.get(topic);
        noted.map_or_else(Vec::new, |noted| {
            noted.iter().map(|(gateway, _)| *gateway).collect()
        })
    }

    pub(super) fn any(&self, topic: &Topic) -> bool {
        self.topics.contains_key(topic)
    }

    /// Keeps what `keep` says of each gateway's interest; returns the topics in which nobody is interested any more.
    pub(super) fn retain(&self, keep: impl Fn(&Topic, GatewayId, Epoch) -> bool) -> Vec<Topic> {
        let mut empty = Vec::new();
        self.topics.retain(|topic, noted| {
            noted.retain(|&(gateway, version)| keep(topic, gateway, version));
            if noted.is_empty() {
                empty.push(topic.clone());
            }
            !noted.is_empty()
        });
        empty.sort_unstable();
        empty
    }

    pub(super) fn topics(&self, which: impl Fn(&Topic) -> bool) -> BTreeSet<Topic> {
        let topics = self.topics.iter().map(|noted| noted.key().clone());
        topics.filter(|topic| which(topic)).collect()
    }
}
