//! The gateways whose sockets are interested in each topic. A user's home and a channel's owner keep them.

use std::collections::BTreeSet;

use dashmap::{DashMap, mapref::entry::Entry};
use foldhash::quality::RandomState;

use crate::model::{Epoch, GatewayId, Topic};

/// The interested gateways, each with the version of the ring as of which it said so. Nearly always there is one.
type Noted = Vec<(GatewayId, Epoch)>;

#[derive(Default)]
pub(crate) struct Interests {
    topics: DashMap<Topic, Noted, RandomState>,
}

impl Interests {
    /// Notes a gateway's interest. Returns whether no gateway was interested before.
    pub(crate) fn note(&self, topic: &Topic, gateway: GatewayId, version: Epoch) -> bool {
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

    /// Forgets a gateway's interest. Returns whether that was the last one.
    pub(crate) fn forget(&self, topic: &Topic, gateway: GatewayId) -> bool {
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

    /// Returns the gateways that are interested in a topic.
    pub(crate) fn of(&self, topic: &Topic) -> Vec<GatewayId> {
        let noted = self.topics.get(topic);
        noted.map_or_else(Vec::new, |noted| {
            noted.iter().map(|(gateway, _)| *gateway).collect()
        })
    }

    /// Whether any gateway is interested in a topic.
    pub(crate) fn any(&self, topic: &Topic) -> bool {
        self.topics.contains_key(topic)
    }

    /// Forgets each interest that `keep` does not accept. Returns the topics in which no gateway is interested any more.
    pub(crate) fn retain(&self, keep: impl Fn(&Topic, GatewayId, Epoch) -> bool) -> Vec<Topic> {
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

    /// Returns the topics that `which` accepts.
    pub(crate) fn topics(&self, which: impl Fn(&Topic) -> bool) -> BTreeSet<Topic> {
        let topics = self.topics.iter().map(|noted| noted.key().clone());
        topics.filter(|topic| which(topic)).collect()
    }
}
