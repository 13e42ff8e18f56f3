//! The response bodies of the HTTP interface, for its OpenAPI document.

use serde::Serialize;
use utoipa::ToSchema;

use crate::protocol::{InboxItem, ParticipantItem, PublicItem, ReactorItem};

#[derive(Serialize, ToSchema)]
pub(super) struct InboxPage {
    items: Vec<InboxItem>,
    next: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct PublicPage {
    items: Vec<PublicItem>,
    #[schema(format = Uuid)]
    next: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct ParticipantsPage {
    items: Vec<ParticipantItem>,
    next: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct ReactionsPage {
    items: Vec<ReactorItem>,
    next: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct Created {
    #[schema(format = Uuid)]
    conversation: String,
    existed: bool,
}

#[derive(Serialize, ToSchema)]
pub(super) struct Disconnected {
    closed: usize,
}
