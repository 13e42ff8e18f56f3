//! The members that this gateway can speak to, and those that it cannot.

use std::time::Duration;

use tokio::time::Instant;

use super::Exchange;
use crate::{cluster::lock, model::GatewayId};

/// A member without a link for so long, or twice as long if it is the older one, is removed.
const CUT_OFF_MAX: Duration = Duration::from_secs(4);

impl Exchange {
    pub(super) fn know_peers(&self) {
        let (concerned, addresses) = (self.members.concerned(), self.members.addresses());
        self.peers.know(&concerned, &addresses);
        self.forget_left(|gateway| self.members.is_over(gateway));
    }

    /// A member that lives, but cannot be spoken to, holds up all that goes through it. Of the two, the one that reaches
    /// most of the ring goes on; between equals, the older one. Who was removed joins again when it reaches everyone.
    pub(super) async fn remove_unreachable(&self) {
        let ring = self.members.ring().load_full();
        let members = ring.members();
        let unreachable = {
            let mut cut_off = lock(&self.cut_off);
            let now = Instant::now();
            let since = |&peer: &GatewayId| (peer, cut_off.get(&peer).copied().unwrap_or(now));
            let apart = members.iter();
            let apart = apart.filter(|&&peer| !self.peers.are_connected(&[peer]));
            let apart = apart.map(since).collect();
            *cut_off = apart;
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
