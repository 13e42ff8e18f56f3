//! The store's view of the gateways, for operators and for gateways that join.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::sleep;

use crate::{
    model::{Epoch, GatewayId, Level},
    store::{self, Store},
};

/// The time in which a living gateway's heartbeat certainly changes: twice the interval, and some more.
pub(crate) const BEAT_SEEN: Duration = Duration::from_millis(1_300);

/// The ring in the store.
pub struct Status {
    pub version: Epoch,
    pub level: Level,
    pub members: Vec<StatusOf>,
}

/// A member of the ring.
pub struct StatusOf {
    pub gateway: GatewayId,
    /// The address at which its peers reach it.
    pub address: String,
    /// Whether its heartbeat changed meanwhile.
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

/// Returns a living member and its address.
pub(super) async fn someone_alive(store: &dyn Store) -> store::Result<Option<(GatewayId, String)>> {
    let members = status(store).await?.map(|status| status.members);
    let mut alive = members.unwrap_or_default().into_iter().filter(|m| m.beats);
    Ok(alive.next().map(|member| (member.gateway, member.address)))
}
