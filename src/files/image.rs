//! The size of an image as it is displayed, and its thumbnail.

use std::{
    io::Cursor,
    panic::{AssertUnwindSafe, catch_unwind},
};

use bytes::Bytes;
use image::{
    DynamicImage, ImageDecoder, ImageEncoder, ImageReader, Limits,
    codecs::{
        jpeg::JpegEncoder,
        png::{CompressionType, FilterType, PngEncoder},
    },
    metadata::Orientation,
};
use thiserror::Error;

use super::Format;

/// The bytes that a decoded image may take. A decoder takes more beside it, which only the process in which it runs limits.
pub const ALLOCATION_MAX: u64 = 256 * 1024 * 1024;

/// The quality of a JPEG thumbnail, of 100.
const THUMBNAIL_QUALITY: u8 = 80;

/// The largest colour profile that a thumbnail carries. The usual ones have 0.5 to 4 KiB.
const PROFILE_MAX: usize = 16 * 1024;

/// What an image may have at most.
#[derive(Clone, Copy, Debug)]
pub struct ImageLimits {
    /// Pixels of the image or of the canvas of an animation.
    pub pixels: u64,
    /// Pixels of the longer side.
    pub side: u32,
    /// Pixels of the longer side of the thumbnail.
    pub thumbnail_side: u32,
}

impl Default for ImageLimits {
    fn default() -> Self {
        Self {
            pixels: 40_000_000,
            side: 32_768,
            thumbnail_side: 640,
        }
    }
}

/// What the gateway stores about an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Processed {
    /// The width in pixels as browsers display it, with the orientation applied.
    pub width: u32,
    /// The height in pixels as browsers display it, with the orientation applied.
    pub height: u32,
    pub thumbnail: Thumbnail,
}

/// A small copy of an image, of an animation its first frame. The orientation is applied and the metadata is gone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Thumbnail {
    pub width: u32,
    pub height: u32,
    /// JPEG, or PNG if pixels are transparent.
    pub format: Format,
    pub bytes: Bytes,
}

/// Why there is no thumbnail.
#[derive(Debug, Error)]
pub enum ImageError {
    #[error("the image has {width} x {height} pixels, which is above the limit")]
    TooManyPixels { width: u32, height: u32 },
    #[error("decoding the image needs more than {} MiB", ALLOCATION_MAX >> 20)]
    TooMuchMemory,
    #[error("the image cannot be decoded: {0}")]
    Undecodable(String),
    #[error("the image decoder panicked")]
    Panicked,
}

impl From<image::ImageError> for ImageError {
    fn from(error: image::ImageError) -> Self {
        if matches!(error, image::ImageError::Limits(_)) {
            Self::TooMuchMemory
        } else {
            Self::Undecodable(error.to_string())
        }
    }
}

/// Decodes an image and makes its thumbnail. The pixels are checked in the header, before memory for them is allocated.
///
/// The bytes of an image decide how much memory its decoder takes, and a process without memory ends. So a gateway calls
/// this in a process of its own: [`super::decode`].
pub fn process(
    bytes: &[u8],
    format: Format,
    limits: &ImageLimits,
) -> Result<Processed, ImageError> {
    // The closure owns everything that it changes, so a panic leaves nothing half done.
    catch_unwind(AssertUnwindSafe(|| decode(bytes, format, limits)))
        .unwrap_or(Err(ImageError::Panicked))
}

fn decode(bytes: &[u8], format: Format, limits: &ImageLimits) -> Result<Processed, ImageError> {
    let mut decoder_limits = Limits::no_limits();
    decoder_limits.max_alloc = Some(ALLOCATION_MAX);
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format.into());
    reader.limits(decoder_limits.clone());
    let mut decoder = reader.into_decoder()?;

    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 {
        return Err(ImageError::Undecodable("it has no pixels".to_owned()));
    }
    let pixels = u64::from(width) * u64::from(height);
    if pixels > limits.pixels || width.max(height) > limits.side {
        return Err(ImageError::TooManyPixels { width, height });
    }
    // The decoders count what they need beside the image, and do not check the image itself.
    decoder_limits.reserve(decoder.total_bytes())?;
    decoder.set_limits(decoder_limits)?;

    // A file with bad metadata can still be a good image.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let profile = decoder.icc_profile().ok().flatten();
    let image = DynamicImage::from_decoder(decoder)?;
    let thumbnail = Thumbnail::new(image, orientation, profile, limits.thumbnail_side)?;
    let (width, height) = if swaps_sides(orientation) {
        (height, width)
    } else {
        (width, height)
    };
    Ok(Processed {
        width,
        height,
        thumbnail,
    })
}

impl From<Format> for image::ImageFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Jpeg => Self::Jpeg,
            Format::Png => Self::Png,
            Format::Gif => Self::Gif,
            Format::Webp => Self::WebP,
        }
    }
}

fn swaps_sides(orientation: Orientation) -> bool {
    match orientation {
        Orientation::Rotate90
        | Orientation::Rotate270
        | Orientation::Rotate90FlipH
        | Orientation::Rotate270FlipH => true,
        Orientation::NoTransforms
        | Orientation::Rotate180
        | Orientation::FlipHorizontal
        | Orientation::FlipVertical => false,
    }
}

impl Thumbnail {
    fn new(
        image: DynamicImage,
        orientation: Orientation,
        profile: Option<Vec<u8>>,
        side: u32,
    ) -> Result<Self, ImageError> {
        let mut small = shrink(image, side);
        // The thumbnail is square at most, so it fits after rotation too, and needs no second large image.
        small.apply_orientation(orientation);
        let small = simplify(small);
        let (width, height) = (small.width(), small.height());
        let profile = profile.filter(|profile| profile_fits(profile, &small));
        let mut bytes = Vec::new();
        let format = if small.color().has_alpha() {
            let (compression, filter) = (CompressionType::Default, FilterType::Adaptive);
            let encoder = PngEncoder::new_with_quality(&mut bytes, compression, filter);
            encode(&small, encoder, profile)?;
            Format::Png
        } else {
            let encoder = JpegEncoder::new_with_quality(&mut bytes, THUMBNAIL_QUALITY);
            encode(&small, encoder, profile)?;
            Format::Jpeg
        };
        Ok(Self {
            width,
            height,
            format,
            bytes: bytes.into(),
        })
    }
}

fn encode(
    image: &DynamicImage,
    mut encoder: impl ImageEncoder,
    profile: Option<Vec<u8>>,
) -> Result<(), ImageError> {
    if let Some(profile) = profile {
        // An encoder that cannot carry a profile makes a thumbnail without it.
        let _ = encoder.set_icc_profile(profile);
    }
    Ok(image.write_with_encoder(encoder)?)
}

/// Makes the image fit in a square of this side. It is never enlarged.
fn shrink(image: DynamicImage, side: u32) -> DynamicImage {
    if image.width().max(image.height()) <= side {
        return image;
    }
    if !image.color().has_alpha() {
        return image.thumbnail(side, side);
    }
    // The colour of a transparent pixel means nothing, so each pixel counts by its alpha. Else edges get a dark line.
    let mut image = image.into_rgba8();
    for pixel in image.pixels_mut() {
        let [red, green, blue, alpha] = pixel.0;
        let weigh = |colour: u8| scale(colour, alpha, u8::MAX);
        pixel.0 = [weigh(red), weigh(green), weigh(blue), alpha];
    }
    let mut small = DynamicImage::ImageRgba8(image)
        .thumbnail(side, side)
        .into_rgba8();
    for pixel in small.pixels_mut() {
        let [red, green, blue, alpha] = pixel.0;
        let restore = |colour: u8| scale(colour, u8::MAX, alpha.max(1));
        pixel.0 = [restore(red), restore(green), restore(blue), alpha];
    }
    small.into()
}

/// Returns `value` x `numerator` / `denominator`, rounded, and 255 at most.
fn scale(value: u8, numerator: u8, denominator: u8) -> u8 {
    let denominator = u32::from(denominator);
    let scaled = (u32::from(value) * u32::from(numerator) + denominator / 2) / denominator;
    u8::try_from(scaled).unwrap_or(u8::MAX)
}

/// Converts to what the encoders take: RGBA if pixels are transparent, else RGB or grey, with 8 bits.
fn simplify(image: DynamicImage) -> DynamicImage {
    let colour = image.color();
    if colour.has_alpha() {
        let rgba = image.into_rgba8();
        if rgba.pixels().any(|pixel| pixel.0[3] < u8::MAX) {
            return rgba.into();
        }
        return DynamicImage::ImageRgba8(rgba).into_rgb8().into();
    }
    if colour.has_color() {
        image.into_rgb8().into()
    } else {
        image.into_luma8().into()
    }
}

/// Whether the profile is small and for the colours of this image. That of a CMYK file is not: its pixels are RGB now.
fn profile_fits(profile: &[u8], image: &DynamicImage) -> bool {
    let space: &[u8] = if image.color().has_color() {
        b"RGB "
    } else {
        b"GRAY"
    };
    profile.len() <= PROFILE_MAX && profile.get(16..20) == Some(space)
}

#[cfg(test)]
mod tests;
