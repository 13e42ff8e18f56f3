//! What the store says of the gateways, for operators and for whoever wants to join.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::sleep;

use crate::{
    model::{Epoch, GatewayId, Level},
    store::{self, Store},
};

/// Whose heart beats has been seen to beat by then: twice the time between two beats, and some more.
pub(super) const BEAT_SEEN: Duration = Duration::from_millis(1_300);

/// The ring as the store has it.
pub struct Status {
    pub version: Epoch,
    pub level: Level,
    pub members: Vec<StatusOf>,
}

pub struct StatusOf {
    pub gateway: GatewayId,
    /// Where its peers reach it.
    pub address: String,
    /// Whether its heart beat while this was read.
    pub beats: bool,
    /// The highest level that it supports. `None` if the store has no heartbeat of it.
    pub supports: Option<Level>,
}

/// Reads the ring, and each member's heartbeat twice.
///
/// # Errors
/// When the store cannot be read.
pub async fn status(store: &dyn Store) -> store::Result<Option<Status>> {
    let Some(ring) = store.ring().await? else {
        return Ok(None);
    };
    let (version, level) = (ring.version, ring.level);
    if ring.members.is_empty() {
        let members = Vec::new();
        return Ok(Some(Status {
            version,
            level,
            members,
        }));
    }
    let beats = || join_all(ring.members.iter().map(|&member| store.heartbeat(member)));
    let before = beats().await;
    sleep(BEAT_SEEN).await;
    let mut members = Vec::new();
    for ((&gateway, before), after) in ring.members.iter().zip(before).zip(beats().await) {
        let (before, after) = (before?, after?);
        members.push(StatusOf {
            gateway,
            beats: before != after,
            supports: after.as_ref().or(before.as_ref()).map(|beat| beat.level),
            address: after.or(before).unwrap_or_default().address,
        });
    }
    Ok(Some(Status {
        version,
        level,
        members,
    }))
}

/// A member whose heart beats, and the address it has.
pub(super) async fn someone_alive(store: &dyn Store) -> store::Result<Option<(GatewayId, String)>> {
    let members = status(store).await?.map(|status| status.members);
    let mut alive = members.unwrap_or_default().into_iter().filter(|m| m.beats);
    Ok(alive.next().map(|member| (member.gateway, member.address)))
}
