//! Writes the rows of one of the two logs.

use std::future::Future;

use super::{Environment, followed::FirstOffsets, retrying::retry_while_owner};
use crate::{
    chat::lease::Ownership,
    store::{self, Activity},
};

/// Writes rows until they are stored, or the ownership has ended. The offsets of new consumers are stored before.
///
/// Each attempt in another minute than the first one names the activity of its minute, because crash repair reads only the
/// last ones.
pub(super) async fn write_until_stored<F>(
    environment: &Environment,
    ownership: &Ownership,
    first: Option<FirstOffsets>,
    activity: Option<Activity>,
    write: impl Fn(Option<Activity>) -> F,
) -> store::Result<()>
where
    F: Future<Output = store::Result<()>>,
{
    if let Some(first) = first {
        first.store(&*environment.store, ownership).await?;
    }
    let begun = environment.activity().minute;
    let attempt = || {
        let now = environment.activity();
        write((activity.is_some() || now.minute != begun).then_some(now))
    };
    retry_while_owner(ownership, attempt).await
}
