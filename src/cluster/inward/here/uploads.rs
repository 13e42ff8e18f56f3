//! How a home counts what its users begin to upload, so that the limits of a user hold over all gateways.

use super::Here;
use crate::{
    chat::Error,
    clock,
    cluster::wire::question::{Answers, BeginUpload},
    model::{UploadBegun, UploadLimits, UserId},
};

impl Answers<BeginUpload> for Here {
    /// If another gateway becomes the home meanwhile, that one is asked to count it again. So an upload may be counted twice,
    /// and is always counted.
    async fn answer(
        &self,
        BeginUpload {
            user,
            bytes,
            limits,
        }: BeginUpload,
    ) -> Result<UploadBegun, Error> {
        let epoch = self.at_home(&user).await?;
        let begun = self.count_upload(&user, bytes, limits).await?;
        if self.is_responsible_still(epoch) {
            Ok(begun)
        } else {
            Err(Error::Moved)
        }
    }
}

impl Here {
    pub(crate) async fn count_upload(
        &self,
        user: &UserId,
        bytes: u64,
        limits: UploadLimits,
    ) -> Result<UploadBegun, Error> {
        let counts = &self.home.uploads;
        let _only = counts.lock_user(user).await;
        if !counts.may_begin(user, limits.per_minute) {
            return Ok(UploadBegun::TooOften);
        }
        let today = clock::today();
        let before = self.store.usage(user, today).await?;
        let after = before.saturating_add(bytes);
        if after > limits.bytes_per_day {
            return Ok(UploadBegun::TooMuch);
        }
        self.store.set_usage(user, today, after).await?;
        Ok(UploadBegun::Counted)
    }
}
