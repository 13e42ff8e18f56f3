//! Removes from an image what people do not see and may not know of: the place and the camera (EXIF), XMP, IPTC,
//! comments, embedded thumbnails, unknown blocks, and bytes after the end of the image, which can be another file.
//!
//! The compressed pixels are copied, not encoded again. The orientation and the colour profile stay, since the image looks
//! different without them. Each format has a list of the parts that stay; all other parts go.

mod gif;
mod jpeg;
mod png;
mod webp;

#[cfg(test)]
mod tests;

use bytes::Bytes;
use image::metadata::Orientation;
use thiserror::Error;

use super::Format;
#[cfg(test)]
pub(in crate::files) use png::checksum;

/// Room for a made EXIF block and an end marker, in bytes.
const ROOM: usize = 64;

/// Why an image cannot be stripped. Such a file is not displayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MetadataError {
    #[error("the image ends too early")]
    Truncated,
    #[error("the image is malformed: {0}")]
    Malformed(&'static str),
}

/// Copies an image without its metadata. The copy takes as many bytes as the image, and some dozens more at most.
///
/// A JPEG or GIF that only lacks its end marker is complete for browsers; the copy gets one.
pub fn strip(bytes: &[u8], format: Format) -> Result<Bytes, MetadataError> {
    let stripped = match format {
        Format::Jpeg => jpeg::strip(bytes),
        Format::Png => png::strip(bytes),
        Format::Gif => gif::strip(bytes),
        Format::Webp => webp::strip(bytes),
    };
    stripped.map(Bytes::from)
}

/// Returns EXIF data (TIFF 6.0, one entry) with the orientation of the given EXIF data. `None` if it says nothing, or
/// that the pixels are upright.
fn orientation_only(exif: &[u8]) -> Option<[u8; 26]> {
    let orientation = Orientation::from_exif_chunk(exif)?;
    if orientation == Orientation::NoTransforms {
        return None;
    }
    let mut made = *b"MM\0\x2A\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\0\0\0\0\0\0\0";
    made[19] = orientation.to_exif();
    Some(made)
}

/// The part of the input that is not read yet.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(rest: &'a [u8]) -> Self {
        Self { rest }
    }

    fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], MetadataError> {
        let (taken, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or(MetadataError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MetadataError> {
        let (taken, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(MetadataError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn byte(&mut self) -> Result<u8, MetadataError> {
        Ok(u8::from_be_bytes(self.array()?))
    }
}

/// Converts a length field. On a machine where it does not fit, so many bytes cannot follow either.
fn length(field: u32) -> Result<usize, MetadataError> {
    usize::try_from(field).map_err(|_| MetadataError::Truncated)
}
