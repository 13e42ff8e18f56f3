//! What is known of each operation.

use super::Operation;
use crate::model::{Details, Draft, UserId};

impl Operation {
    /// Returns whether the operation changes nothing and publishes nothing.
    pub(in crate::chat) fn only_reads(&self) -> bool {
        matches!(
            self,
            Self::Details
                | Self::Participants { .. }
                | Self::History { .. }
                | Self::Head
                | Self::CatchUp { .. }
                | Self::Reactors(_)
                | Self::Changes { .. }
                | Self::CatchUpChanges { .. }
                | Self::Files { .. }
        )
    }

    /// Returns whether the answer depends on the user who asks. It does not where anyone may read, and for gateways,
    /// which are not participants.
    pub(in crate::chat) fn depends_on_actor(&self, details: &Details) -> bool {
        match self {
            Self::History { .. }
            | Self::Head
            | Self::Reactors(_)
            | Self::Changes { .. }
            | Self::Files { .. } => !details.public,
            Self::CatchUp { .. }
            | Self::CatchUpChanges { .. }
            | Self::CheckFile { .. }
            | Self::SetConsumer { .. }
            | Self::Repair => false,
            Self::Create(_)
            | Self::Details
            | Self::Participants { .. }
            | Self::Add { .. }
            | Self::Remove { .. }
            | Self::Join
            | Self::Leave
            | Self::SetRole { .. }
            | Self::Update { .. }
            | Self::Send(_)
            | Self::Read { .. }
            | Self::Delivered { .. }
            | Self::Typing
            | Self::Edit(_)
            | Self::Delete(_)
            | Self::React(_) => true,
        }
    }

    /// Returns the user whom the operation changes, if that is not the one who asks.
    pub(in crate::chat) fn subject(&self) -> Option<&UserId> {
        match self {
            Self::Add { user } | Self::Remove { user } | Self::SetRole { user, .. } => Some(user),
            Self::Create(_)
            | Self::Details
            | Self::Participants { .. }
            | Self::Join
            | Self::Leave
            | Self::Update { .. }
            | Self::Send(_)
            | Self::History { .. }
            | Self::Read { .. }
            | Self::Delivered { .. }
            | Self::Typing
            | Self::Head
            | Self::CatchUp { .. }
            | Self::Edit(_)
            | Self::Delete(_)
            | Self::React(_)
            | Self::Reactors(_)
            | Self::Changes { .. }
            | Self::CatchUpChanges { .. }
            | Self::Files { .. }
            | Self::CheckFile { .. }
            | Self::SetConsumer { .. }
            | Self::Repair => None,
        }
    }

    /// Returns the operation to retry with after an unknown outcome. `None` if a retry could apply it twice.
    #[must_use]
    pub fn again(&self) -> Option<Self> {
        match self {
            Self::Send(draft) => Some(Self::Send(Draft {
                retry: true,
                ..draft.clone()
            })),
            Self::Details
            | Self::Participants { .. }
            | Self::History { .. }
            | Self::Read { .. }
            | Self::Delivered { .. }
            | Self::Typing
            | Self::Head
            | Self::CatchUp { .. }
            | Self::Delete(_)
            | Self::React(_)
            | Self::Reactors(_)
            | Self::Changes { .. }
            | Self::CatchUpChanges { .. }
            | Self::Files { .. }
            | Self::CheckFile { .. }
            | Self::SetConsumer { .. }
            | Self::Repair => Some(self.clone()),
            // A repeated edit without `base_rev` could undo a newer one.
            Self::Edit(edit) => edit.base_rev.is_some().then(|| self.clone()),
            Self::Create(_)
            | Self::Add { .. }
            | Self::Remove { .. }
            | Self::Join
            | Self::Leave
            | Self::SetRole { .. }
            | Self::Update { .. } => None,
        }
    }
}
