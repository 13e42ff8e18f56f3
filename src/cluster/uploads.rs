//! What users begin to upload. The home of a user counts it, so that the limits of a user hold over all gateways.

use super::{
    message::{PeerRequest, PeerResponse},
    router::Router,
};
use crate::{
    chat::Error,
    clock,
    model::{UploadBegun, UploadLimits, UserId},
    mutation::{Mutation, broken},
};

impl Router {
    /// Counts an upload of so many bytes that a user begins.
    ///
    /// # Errors
    /// `Unavailable` if the user's home does not answer in time. The upload may be counted.
    pub async fn begin_upload(
        &self,
        user: &UserId,
        bytes: u64,
        limits: UploadLimits,
    ) -> Result<UploadBegun, Error> {
        if broken(Mutation::UploadHome) {
            return self.count_upload(user, bytes, limits).await;
        }
        let ask = |_| PeerRequest::BeginUpload {
            user: user.clone(),
            bytes,
            limits,
        };
        match self.ask_home(user, ask).await? {
            PeerResponse::Upload(begun) => begun,
            // The home is a gateway of an earlier build, which counts its own uploads only. Until it is upgraded, so does
            // this one.
            _ => self.count_upload(user, bytes, limits).await,
        }
    }

    /// Counts an upload as the home of its user.
    ///
    /// If another gateway becomes the home meanwhile, that one is asked to count it again. So an upload may be counted twice,
    /// and is always counted.
    pub(super) async fn begin_upload_here(
        &self,
        user: &UserId,
        bytes: u64,
        limits: UploadLimits,
    ) -> Result<UploadBegun, Error> {
        let epoch = self.at_home_since(user).await?;
        let begun = self.count_upload(user, bytes, limits).await?;
        if self.may_serve() && self.home.version() == epoch {
            Ok(begun)
        } else {
            Err(Error::Moved)
        }
    }

    async fn count_upload(
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
        let before = self.store().usage(user, today).await?;
        let after = before.saturating_add(bytes);
        if after > limits.bytes_per_day {
            return Ok(UploadBegun::TooMuch);
        }
        self.store().set_usage(user, today, after).await?;
        Ok(UploadBegun::Counted)
    }
}
