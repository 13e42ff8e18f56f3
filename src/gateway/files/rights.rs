//! The right to upload, which may end while the bytes come: the token expires, the sessions of the user are closed, the
//! user leaves the conversation, or gives the file up.

use std::sync::Arc;

use axum::response::Response;
use tokio::time::{Instant, sleep, sleep_until};

use super::Files;
use crate::{
    chat::{DetailsView, Error, GetDetails},
    fanout::LongRequest,
    gateway::{Gateway, reply::refused},
    model::{
        AttachmentId, ConversationId, FileState, UserId,
        limits::{UPLOAD_CHECKED_EVERY, UPLOAD_REQUEST_MAX},
    },
    protocol::ErrorCode,
};

/// The right of one request to upload.
pub(super) struct Rights {
    pub gateway: Arc<Gateway>,
    pub files: Arc<Files>,
    pub user: UserId,
    pub file: AttachmentId,
    pub conversation: ConversationId,
    /// When the token expires.
    pub expires_at: Instant,
    /// It ends when the sessions of the user are closed.
    pub request: LongRequest,
}

impl Rights {
    /// Waits until the right has ended, and returns the answer to the request.
    pub(super) async fn ended(&self) -> Response {
        let unauthorized = |text| refused(ErrorCode::Unauthorized, text);
        tokio::select! {
            biased;
            () = self.request.closed() => unauthorized("the sessions of this user were closed"),
            () = sleep_until(self.expires_at) => unauthorized("the token has expired"),
            () = sleep(UPLOAD_REQUEST_MAX) => late("the request took too long"),
            response = self.lost() => response,
        }
    }

    async fn lost(&self) -> Response {
        loop {
            sleep(UPLOAD_CHECKED_EVERY).await;
            if let Some(response) = self.refusal().await {
                return response;
            }
        }
    }

    /// Returns the refusal if the user may not upload this file any more. What cannot be found out now is asked again.
    async fn refusal(&self) -> Option<Response> {
        match self.files.row(self.file).await {
            Ok(Some(row)) if row.state == FileState::Pending => {}
            Ok(_) => return Some(given_up()),
            Err(_) => return None,
        }
        let details = self
            .gateway
            .router
            .ask(self.conversation, self.user.clone(), GetDetails);
        match details.await {
            Ok(view) => check_participant(&view).err(),
            Err(Error::Forbidden(_) | Error::UnknownConversation) => Some(no_participant()),
            Err(_) => None,
        }
    }
}

/// Refuses to write to a file that is complete, or that nobody wants any more.
pub(super) fn given_up() -> Response {
    refused(ErrorCode::Conflict, "the upload is complete or given up")
}

/// Refuses a user who may not post in the conversation.
#[expect(clippy::result_large_err, reason = "a response either way")]
pub(super) fn check_participant(view: &DetailsView) -> Result<(), Response> {
    let Some(role) = view.role else {
        return Err(no_participant());
    };
    if !view.details.posting.allows(role) {
        let text = "only admins may post here";
        return Err(refused(ErrorCode::Forbidden, text));
    }
    Ok(())
}

fn no_participant() -> Response {
    refused(ErrorCode::Forbidden, "only participants may upload")
}

/// Refuses a body that does not come fast enough. It is 503, and not 408, because clients of tus continue after that.
pub(super) fn late(text: &str) -> Response {
    let text = format!("{text}: ask for the offset, and continue from there");
    refused(ErrorCode::Unavailable, text)
}
