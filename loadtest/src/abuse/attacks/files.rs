//! Misuse of uploads and downloads.

use super::{Attack, Hostile, Opening, Piece, SILENT};
use crate::abuse::bombs;

/// The size of the file that hostile sessions say they upload, and of the one that they download. The latter does not fit into
/// the buffers of a socket.
pub(crate) const UPLOAD_BYTES: usize = 64 << 20;
pub(crate) const DOWNLOAD_BYTES: usize = 16 << 20;
/// Pictures that a hostile session sends in one piece of a run. More would still wait for their turn in the next piece, which is
/// without hostile sessions.
pub(crate) const BOMBS_AT_ONCE: usize = 2;

/// The head of a request that uploads so many bytes to a file.
fn upload_head(who: &Hostile, file: &str, bytes: usize) -> String {
    format!(
        "PATCH /v1/attachments/{file}/upload HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\ntus-resumable: 1.0.0\r\n\
         upload-offset: 0\r\ncontent-type: application/offset+octet-stream\r\ncontent-length: {bytes}\r\n\r\n",
        who.server, who.token
    )
}

/// The head of a request for the upload that has begun. Without uploads it is answered at once.
fn begun_head(who: &Hostile) -> String {
    let file = who.upload.as_deref().unwrap_or(&who.group);
    upload_head(who, file, UPLOAD_BYTES)
}

fn kept(bytes: Vec<u8>) -> Attack {
    Attack::kept(Opening::Socket, vec![Piece::plain(bytes)], 50, SILENT)
}

/// Uploads that stop after a byte. The first one holds a place; the others are refused, because it has the file.
pub(super) fn slow_uploads(who: &Hostile) -> Attack {
    kept((begun_head(who) + "x").into_bytes())
}

/// Uploads of which only the head comes.
pub(super) fn half_uploads(who: &Hostile) -> Attack {
    kept(begun_head(who).into_bytes())
}

/// Uploads of which half of the head comes.
pub(super) fn half_heads(who: &Hostile) -> Attack {
    let mut head = begun_head(who).into_bytes();
    head.truncate(head.len() / 2);
    kept(head)
}

/// Downloads of which nothing is read.
pub(super) fn unread_downloads(who: &Hostile) -> Attack {
    let path = who.download.as_deref().unwrap_or("/v1/files/none");
    let head = format!("GET {path} HTTP/1.1\r\nhost: {}\r\n\r\n", who.server);
    kept(head.into_bytes())
}

/// Uploads the next picture that takes much memory or time to decode. Once all of this piece are sent, it asks for the state of
/// the last one.
pub(super) fn picture_bombs(who: &Hostile) -> Attack {
    const KEPT: usize = 4;
    let bytes = match who.bombs.last() {
        Some((picture, file)) if who.bombs_left > 0 => {
            let picture = &bombs::pictures()[*picture];
            let head = upload_head(who, file, picture.len());
            [head.as_bytes(), picture].concat()
        }
        last => {
            let file = last.map_or(&who.group, |(_, file)| file);
            let head = format!(
                "HEAD /v1/attachments/{file}/upload HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\ntus-resumable: 1.0.0\r\n\r\n",
                who.server, who.token
            );
            head.into_bytes()
        }
    };
    Attack::kept(Opening::Socket, vec![Piece::plain(bytes)], 250, KEPT)
}
