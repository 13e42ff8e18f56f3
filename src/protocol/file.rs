//! The addresses of uploaded files, as clients see them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::list::at_most;
use crate::model::{AttachmentId, Millis, limits::FILES_ASKED_MAX};

/// A request for the addresses of uploaded files.
#[derive(Debug, Deserialize)]
pub struct AttachmentUrls {
    #[serde(deserialize_with = "at_most::<_, _, FILES_ASKED_MAX>")]
    pub ids: Vec<AttachmentId>,
}

/// The addresses of an uploaded file. They are valid without a token until they expire.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct FileUrl {
    #[schema(value_type = String, format = Uuid)]
    pub id: AttachmentId,
    pub url: String,
    /// The address of a smaller picture, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thumb: Option<String>,
    /// Milliseconds since 1970.
    pub expires_at: Millis,
}
