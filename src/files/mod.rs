//! The bytes of uploaded files: where they are, what they are, what of them others may see, and who may fetch them for a
//! while.
//!
//! The order for an image is: [`sniff`], [`strip`], then [`decode`] with the stripped bytes, so that the size and the
//! thumbnail show the file that is served. If either of the two fails, the file is a download: [`Kind::as_download`].

mod bucket;
mod decoder;
mod directory;
mod image;
mod kind;
mod metadata;
mod pace;
mod parts;
mod scanner;
mod signing;
mod upload;
mod writing;

#[cfg(test)]
use crate::model::text::file_name;

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod hostile;
#[cfg(test)]
#[path = "../../fuzz/properties.rs"]
mod properties;

pub use self::{
    bucket::{Bucket, BucketSettings, Inspection, Object, Treatment},
    decoder::{DECODER_ARGUMENT, DecoderError, decode, decoder_main},
    directory::Directory,
    image::{ALLOCATION_MAX, ImageError, ImageLimits, Processed, Thumbnail, process},
    kind::{DOWNLOAD, Format, HEAD_BYTES, Kind, is_inline, sniff},
    metadata::{MetadataError, strip},
    pace::Pace,
    parts::{PART_BYTES, Part, StoredPart, missing, parts},
    scanner::{NotScanned, Scanner, Verdict},
    signing::{Signature, Signer, Variant, hexadecimal},
    upload::Upload,
    writing::Writing,
};
