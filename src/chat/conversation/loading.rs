//! Waits until a conversation may be loaded, and reports the weight of an owner.

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

/// Bytes that an owner holds besides entries, client ids and participants: its task, its mailbox, its record in the
/// table, its work in progress. Measured: 25 to 28 KiB for a group with one message.
const OWNER_BYTES: usize = 32 << 10;

/// An owner, and the permit to have its conversation open.
pub(super) type Loaded = (OpenPermit, Owner);

/// Loads a conversation when it may be open and it is its turn to be loaded.
///
/// # Errors
/// When the operation timeout ends before that, or the conversation cannot be read.
pub(super) async fn load(
    id: ConversationId,
    environment: &Arc<Environment>,
    held: &Arc<Held>,
    permit: Option<OpenPermit>,
    ownership: Arc<Ownership>,
) -> Result<Loaded, Error> {
    // A conversation with a permit weighs while it waits to be loaded. Otherwise any number could have one.
    if permit.is_some() {
        held.weighs(OWNER_BYTES);
    }
    let patience = environment.settings.operation_timeout;
    let admitted = async {
        let permit = match permit {
            Some(permit) => permit,
            None => held.permit().await,
        };
        (permit, held.loading(patience).await)
    };
    let (permit, mut loading) = timeout(patience, admitted)
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
    // The weight must be known before another conversation is loaded in the same turn.
    owner.weigh();
    held.loaded();
    drop(loading);
    Ok((permit, owner))
}

impl Owner {
    /// Reports the owner's weight to the table. It is called in each round, so it only adds known numbers.
    pub(super) fn weigh(&self) {
        let participants = self.participants.as_ref().map_or(0, Participants::weight);
        let entries = self.log.weight() + self.recent.weight() + self.changes.weight();
        let bytes = OWNER_BYTES + entries + self.client_ids.weight() + participants;
        self.held.weighs(bytes);
    }
}
