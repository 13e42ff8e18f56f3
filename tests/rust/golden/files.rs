//! The frames of uploaded files.

use chat_gateway::{
    model::{FileNotice, FileState, Metadata},
    protocol::{Event, FileUrl},
};

pub(super) fn file_url() -> FileUrl {
    let id = "0199c0de-0000-4000-8000-000000000004";
    let address = |variant: &str| format!("/v1/files/{id}/{variant}?e=1795000600&s=00");
    FileUrl {
        id: id.parse().unwrap(),
        url: address("original"),
        thumb: Some(address("thumbnail")),
        expires_at: 1_795_000_600_000,
    }
}

pub(super) fn file_notices() -> [Event; 3] {
    let file = file_url().id;
    let ready = FileNotice {
        file,
        state: FileState::Ready,
        mime: Some("image/png".into()),
        width: Some(800),
        height: Some(600),
        metadata: None,
    };
    let kept = FileNotice {
        mime: Some("image/heic".into()),
        width: None,
        height: None,
        metadata: Some(Metadata::Kept),
        ..ready.clone()
    };
    [ready, kept, FileNotice::blocked(file)].map(Event::Attachment)
}
