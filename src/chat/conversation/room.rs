//! An owner's place among those that are open here, and what it weighs.

use std::sync::Arc;

use tokio::time::timeout;

use super::{Environment, Owner};
use crate::{
    chat::{
        error::Error,
        lease::Ownership,
        open::{Held, OpenPermit},
        participants::Participants,
    },
    model::ConversationId,
};

/// What an owner holds besides entries, client ids and participants: its task, its mailbox, its place in the table, what
/// is under way. Measured: 25 to 28 KiB for a group with one message.
const OWNER_BYTES: usize = 32 << 10;

pub(super) type Loaded = (OpenPermit, Owner);

/// Loads a conversation as soon as there is room for it.
pub(super) async fn load(
    id: ConversationId,
    environment: &Arc<Environment>,
    held: &Arc<Held>,
    room: Option<OpenPermit>,
    ownership: Arc<Ownership>,
) -> Result<Loaded, Error> {
    // One that has room may wait for its load, and is counted meanwhile: else any number could have room.
    if room.is_some() {
        held.weighs(OWNER_BYTES);
    }
    let patience = environment.settings.operation_timeout;
    let admitted = async {
        let room = match room {
            Some(room) => room,
            None => held.permit().await,
        };
        (room, held.loading(patience).await)
    };
    let (room, mut loading) = timeout(patience, admitted)
        .await
        .map_err(|_| Error::unavailable("too many conversations are open"))?;
    held.weighs(OWNER_BYTES);
    let loaded = Owner::load(
        id,
        environment.clone(),
        held.clone(),
        ownership,
        &mut loading,
    );
    let owner = loaded.await?;
    // Before another one is loaded in its stead.
    owner.weigh();
    held.loaded();
    drop(loading);
    Ok((room, owner))
}

impl Owner {
    /// Lets the table know what is held here. In each round, so it only adds up what is known.
    pub(super) fn weigh(&self) {
        let participants = self.participants.as_ref().map_or(0, Participants::weight);
        let entries = self.log.weight() + self.recent.weight();
        let bytes = OWNER_BYTES + entries + self.client_ids.weight() + participants;
        self.held.weighs(bytes);
    }
}
