//! Maps keys to gateways, for one version of the ring, by highest random weight ("rendezvous") hashing: Thaler and
//! Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998. A change of one member moves only the keys of
//! that member.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::{
    model::{ConsumerName, ConversationId, Epoch, GatewayId, Topic, UserId},
    store::WorkShard,
};

/// The view of the ring at one version: its members. The version is also the epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    version: Epoch,
    members: Vec<GatewayId>,
}

impl View {
    #[must_use]
    pub fn new(version: Epoch, members: Vec<GatewayId>) -> Self {
        Self { version, members }
    }

    /// Returns the version of the ring.
    #[must_use]
    pub fn version(&self) -> Epoch {
        self.version
    }

    #[must_use]
    pub fn members(&self) -> &[GatewayId] {
        &self.members
    }

    /// Returns the owner of a conversation. `None` if there are no members.
    #[must_use]
    pub fn owner(&self, conversation: ConversationId) -> Option<GatewayId> {
        self.pick(conversation.0.as_bytes())
    }

    /// Returns the home of a user.
    #[must_use]
    pub fn home(&self, user: &UserId) -> Option<GatewayId> {
        self.pick(user.as_str().as_bytes())
    }

    /// Returns the only gateway that writes the owner of a device token, given the hash of the token.
    #[must_use]
    pub fn token(&self, hash: &[u8; 32]) -> Option<GatewayId> {
        self.pick(hash)
    }

    /// Returns the gateway that is responsible for a topic, and so must know who is interested in it.
    #[must_use]
    pub fn responsible(&self, topic: &Topic) -> Option<GatewayId> {
        match topic {
            Topic::User(user) | Topic::Presence(user) => self.home(user),
            Topic::Channel(channel) => self.owner(*channel),
        }
    }

    /// Returns the gateway that sweeps a partition of the files.
    #[must_use]
    pub fn sweeper(&self, WorkShard { day, shard }: WorkShard) -> Option<GatewayId> {
        let [a, b, c, d] = day.to_be_bytes();
        self.pick(&[a, b, c, d, shard])
    }

    /// Returns the gateway that scans a shard of a consumer's lagging conversations.
    #[must_use]
    pub fn scanner(&self, consumer: &ConsumerName, shard: u8) -> Option<GatewayId> {
        let mut key = consumer.as_str().as_bytes().to_vec();
        key.extend([0, shard]);
        self.pick(&key)
    }

    /// Returns the gateway of a key. It must never change, because builds of several versions share a ring during an
    /// upgrade.
    fn pick(&self, key: &[u8]) -> Option<GatewayId> {
        let key = xxh3_64_with_seed(key, 0);
        let weight = |member: &GatewayId| xxh3_64_with_seed(member.0.as_bytes(), key);
        self.members
            .iter()
            .copied()
            .max_by_key(|member| (weight(member), *member))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gateways(n: u128) -> Vec<GatewayId> {
        (1..=n)
            .map(|i| GatewayId(uuid::Uuid::from_u128(i)))
            .collect()
    }

    fn users() -> impl Iterator<Item = UserId> {
        (0..3000).map(|i| UserId::new(&format!("user-{i}")).unwrap())
    }

    #[test]
    fn a_new_member_takes_its_share_and_nothing_else_moves() {
        let (three, four) = (View::new(1, gateways(3)), View::new(2, gateways(4)));
        let new = gateways(4)[3];
        let moved: Vec<_> = users().filter(|u| three.home(u) != four.home(u)).collect();
        assert!(moved.iter().all(|u| four.home(u) == Some(new)));
        assert!((600..900).contains(&moved.len()), "{}", moved.len());
    }

    #[test]
    fn placement_is_the_same_in_every_version() {
        let ring = View::new(1, gateways(5));
        let homes: Vec<u128> = users()
            .take(8)
            .map(|u| ring.home(&u).unwrap().0.as_u128())
            .collect();
        assert_eq!(homes, GOLDEN);
    }

    const GOLDEN: [u128; 8] = [4, 4, 3, 2, 3, 2, 3, 1];
}
