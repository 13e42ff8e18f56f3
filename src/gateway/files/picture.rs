//! What is shown of a picture, wherever its bytes are.

use bytes::Bytes;

use crate::files::{DOWNLOAD, ImageLimits, Kind, Processed, is_inline, process, strip};

/// The largest image that is looked at. A larger one is a download.
pub(super) const IMAGE_BYTES_MAX: u64 = 32 << 20;

/// Returns the media type that messages name. Of a broken image it is that of a download.
pub(super) fn named(kind: Kind) -> &'static str {
    if !kind.is_inline() && is_inline(kind.mime()) {
        DOWNLOAD
    } else {
        kind.mime()
    }
}

/// An image without metadata, and what is shown of it.
pub(super) struct Picture {
    pub(super) clean: Bytes,
    pub(super) processed: Processed,
}

/// Removes the metadata of an image, and makes its thumbnail. `None` if it is no image that can be decoded.
pub(super) fn picture(
    bytes: impl AsRef<[u8]>,
    kind: &Kind,
    limits: &ImageLimits,
) -> Option<Picture> {
    let format = kind.format()?;
    let clean = strip(bytes.as_ref(), format).ok()?;
    // They may be large, and decoding takes more.
    drop(bytes);
    let processed = process(&clean, format, limits).ok()?;
    Some(Picture { clean, processed })
}
