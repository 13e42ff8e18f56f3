//! Keeps the links to the other members, and removes members that have none.

use std::time::Duration;

use tokio::time::Instant;

use super::Exchange;
use crate::{model::GatewayId, tasks::lock};

/// The time without a link after which a younger member is removed. An older one gets twice that time.
const CUT_OFF_MAX: Duration = Duration::from_secs(4);

impl Exchange {
    /// Opens links to new members, and forgets gateways that have left.
    pub(super) fn know_peers(&self) {
        let (concerned, addresses) = (self.members.concerned(), self.members.addresses());
        self.peers.know(&concerned, &addresses);
        self.forget_left(|gateway| self.members.is_over(gateway));
    }

    /// Removes members that are alive but have no link, because they hold up everything that goes through them. Of the two
    /// gateways the one that reaches most of the ring stays, and between equals the older one. The removed one joins again
    /// when it reaches every member.
    pub(super) async fn remove_unreachable(&self) {
        let ring = self.members.ring().load_full();
        let members = ring.members();
        let unreachable = {
            let mut cut_off = lock(&self.cut_off);
            let now = Instant::now();
            let since = |&peer: &GatewayId| (peer, cut_off.get(&peer).copied().unwrap_or(now));
            let unconnected = members.iter();
            let unconnected = unconnected.filter(|&&peer| !self.peers.are_connected(&[peer]));
            let unconnected = unconnected.map(since).collect();
            *cut_off = unconnected;
            let reached = 2 * (members.len() - cut_off.len());
            let oldest = members.iter().min() == Some(&self.me);
            if reached < members.len() || (reached == members.len() && !oldest) {
                return;
            }
            let patience = |peer| CUT_OFF_MAX * if self.me < peer { 1 } else { 2 };
            let unreachable = cut_off
                .iter()
                .filter(|(peer, since)| now - **since > patience(**peer));
            unreachable.map(|(&peer, _)| peer).collect::<Vec<_>>()
        };
        if !unreachable.is_empty() {
            self.members
                .remove(&unreachable, "it cannot be reached")
                .await;
        }
    }
}
