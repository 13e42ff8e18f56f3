//! Images for the tests, clean ones and ones with metadata in every place that the formats have for it.

use std::io::Cursor;

use image::{
    Delay, DynamicImage, Frame, ImageFormat, Rgba, RgbaImage,
    codecs::gif::{GifEncoder, Repeat},
};

use super::Format;

/// Texts that no stripped image may contain.
pub(super) const MARKERS: [&[u8]; 2] = [b"SECRET", b"GPSMARKER"];

const WEBP_LOSSY: &[u8] =
    b"RIFF\x22\x00\x00\x00WEBPVP8 \x16\x00\x00\x000\x01\x00\x9D\x01*\x01\x00\x01\x00\x0E\
\xC0\xFE%\xA4\x00\x03p\x00\x00\x00\x00";
const WEBP_ALPHA: &[u8] = b"RIFFJ\x00\x00\x00WEBPVP8X\x0A\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00ALPH\
\x0C\x00\x00\x00\x11\x07\x10\x11\xFD\x0FDD\xFF\x03\x00\x00VP8 \x18\x00\x00\x00\x14\x01\x00\x9D\x01*\x01\x00\x01\x00\
\x00\x00\xFE\x00\x00\x0D\xC0\x00\xFE\xE6\xB5\x00\x00\x00";
const WEBP_ANIMATED: &[u8] = b"RIFFR\x00\x00\x00WEBPVP8X\x0A\x00\x00\x00\x12\x00\x00\x00\x00\x00\x00\x00\x00\x00ANIM\
\x06\x00\x00\x00\xFF\xFF\xFF\xFF\x00\x00ANMF&\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00d\x00\x00\
\x00VP8L\x0D\x00\x00\x00/\x00\x00\x00\x10\x07\x10\x11\x11\x88\x88\xFE\x07\x00";

pub(super) struct Sample {
    pub name: &'static str,
    pub format: Format,
    pub bytes: Vec<u8>,
}

/// Numbers that look random and are the same in each run (xorshift).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 16) as usize % bound.max(1)
    }

    pub(super) fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| (self.next() >> 24) as u8).collect()
    }
}

/// An image with different corners, so that a wrong orientation shows. The right half is transparent if asked for.
pub(super) fn picture(width: u32, height: u32, transparent: bool) -> RgbaImage {
    RgbaImage::from_fn(width, height, |x, y| {
        let colour = match (x < width / 2, y < height / 2) {
            (true, true) => [255, 0, 0],
            (false, true) => [0, 255, 0],
            (true, false) => [0, 0, 255],
            (false, false) => [255, 255, 255],
        };
        let alpha = if transparent && x >= width / 2 {
            0
        } else {
            255
        };
        Rgba([colour[0], colour[1], colour[2], alpha])
    })
}

pub(super) fn encoded(image: impl Into<DynamicImage>, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.into().write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

pub(super) fn jpeg(width: u32, height: u32) -> Vec<u8> {
    let image: DynamicImage = picture(width, height, false).into();
    encoded(image.into_rgb8(), ImageFormat::Jpeg)
}

pub(super) fn png(width: u32, height: u32) -> Vec<u8> {
    encoded(picture(width, height, true), ImageFormat::Png)
}

pub(super) fn gif(frames: u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = GifEncoder::new(&mut bytes);
    encoder.set_repeat(Repeat::Infinite).unwrap();
    for i in 0..frames {
        let mut image = picture(12, 8, true);
        image.put_pixel(0, 0, Rgba([i, i, i, 255]));
        let delay = Delay::from_numer_denom_ms(100, 1);
        encoder
            .encode_frame(Frame::from_parts(image, 0, 0, delay))
            .unwrap();
    }
    drop(encoder);
    bytes
}

/// A PNG whose second frame is the first one again.
pub(super) fn animated_png() -> Vec<u8> {
    let still = png(6, 4);
    let pixels = png_chunks(&still)
        .into_iter()
        .find(|chunk| &chunk[4..8] == b"IDAT")
        .unwrap();
    let pixels = &pixels[8..pixels.len() - 4];
    let control = |sequence: u8| {
        let mut data = vec![0, 0, 0, sequence, 0, 0, 0, 6, 0, 0, 0, 4];
        data.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 10, 0, 0]);
        png_chunk(b"fcTL", &data)
    };
    let mut bytes = still[..8].to_vec();
    for chunk in png_chunks(&still) {
        match &chunk[4..8] {
            b"IDAT" => {
                bytes.extend(png_chunk(b"acTL", &[0, 0, 0, 2, 0, 0, 0, 0]));
                bytes.extend(control(0));
                bytes.extend(chunk);
                bytes.extend(control(1));
                bytes.extend(png_chunk(b"fdAT", &[&[0, 0, 0, 2], pixels].concat()));
            }
            _ => bytes.extend(chunk),
        }
    }
    bytes
}

/// Images without metadata.
pub(super) fn samples() -> Vec<Sample> {
    let sample = |name, format, bytes| Sample {
        name,
        format,
        bytes,
    };
    let grey = DynamicImage::from(picture(9, 7, false)).into_luma8();
    let webp = encoded(picture(10, 6, true), ImageFormat::WebP);
    vec![
        sample("jpeg", Format::Jpeg, jpeg(16, 10)),
        sample(
            "grey jpeg",
            Format::Jpeg,
            encoded(grey.clone(), ImageFormat::Jpeg),
        ),
        sample("png", Format::Png, png(16, 10)),
        sample("grey png", Format::Png, encoded(grey, ImageFormat::Png)),
        sample("animated png", Format::Png, animated_png()),
        sample("gif", Format::Gif, gif(1)),
        sample("animated gif", Format::Gif, gif(3)),
        sample("webp", Format::Webp, webp),
        sample("lossy webp", Format::Webp, WEBP_LOSSY.to_vec()),
        sample("transparent webp", Format::Webp, WEBP_ALPHA.to_vec()),
        sample("animated webp", Format::Webp, WEBP_ANIMATED.to_vec()),
    ]
}

/// EXIF data with an orientation, a description and a place.
pub(super) fn exif(orientation: u8) -> Vec<u8> {
    let mut data = b"II\x2A\0\x08\0\0\0\x03\0".to_vec();
    data.extend(b"\x0E\x01\x02\0\x08\0\0\0\x32\0\0\0");
    data.extend([0x12, 1, 3, 0, 1, 0, 0, 0, orientation, 0, 0, 0]);
    data.extend(b"\x25\x88\x04\0\x01\0\0\0\x3A\0\0\0");
    data.extend(b"\0\0\0\0SECRET\0\0GPSMARKER");
    data
}

/// Adds metadata, comments, unknown parts, and another file behind the end.
pub(super) fn with_metadata(sample: &Sample, orientation: u8) -> Vec<u8> {
    let mut bytes = match sample.format {
        Format::Jpeg => jpeg_with_metadata(&sample.bytes, orientation),
        Format::Png => png_with_metadata(&sample.bytes, orientation),
        Format::Gif => gif_with_metadata(&sample.bytes),
        Format::Webp => webp_with_metadata(&sample.bytes, orientation),
    };
    bytes.extend(b"<html><script>SECRET</script>PK\x03\x04SECRET");
    bytes
}

fn jpeg_segment(marker: u8, data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(data.len() + 2).unwrap().to_be_bytes();
    [&[0xFF, marker], &length[..], data].concat()
}

fn jpeg_with_metadata(clean: &[u8], orientation: u8) -> Vec<u8> {
    let mut bytes = clean[..2].to_vec();
    bytes.extend(jpeg_segment(
        0xE0,
        b"JFIF\0\x01\x01\0\0\x01\0\x01\x02\x01SECRET",
    ));
    bytes.extend(jpeg_segment(0xE0, b"JFXX\0SECRET"));
    let exif = exif(orientation);
    bytes.extend(jpeg_segment(0xE1, &[b"Exif\0\0", &exif[..]].concat()));
    bytes.extend(jpeg_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0SECRET"));
    bytes.extend(jpeg_segment(0xE2, b"ICC_PROFILE\0\x01\x01profile"));
    bytes.extend(jpeg_segment(0xE2, b"MPF\0SECRET"));
    bytes.extend(jpeg_segment(0xED, b"Photoshop 3.0\0SECRET"));
    bytes.extend(jpeg_segment(0xEC, b"Ducky SECRET"));
    bytes.extend(jpeg_segment(0xFE, b"SECRET GPSMARKER"));
    // Bytes that decoders skip.
    bytes.extend(b"SECRET\xFF\xFF");
    let end = clean.len() - 2;
    // The clean file begins with its own JFIF segment, which is the second one here.
    bytes.extend(&clean[2..end]);
    bytes.extend(jpeg_segment(0xFE, b"SECRET"));
    bytes.extend(jpeg_segment(0xE1, b"Exif\0\0SECRET"));
    bytes.extend(&clean[end..]);
    bytes
}

pub(super) fn png_chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap().to_be_bytes();
    let checksum = super::metadata::checksum(kind, data).to_be_bytes();
    [&length[..], kind, data, &checksum].concat()
}

pub(super) fn png_chunks(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut chunks = Vec::new();
    let mut rest = &bytes[8..];
    while let Some(length) = rest.first_chunk::<4>() {
        let (chunk, after) = rest.split_at(u32::from_be_bytes(*length) as usize + 12);
        chunks.push(chunk.to_vec());
        rest = after;
    }
    chunks
}

fn png_with_metadata(clean: &[u8], orientation: u8) -> Vec<u8> {
    let mut bytes = clean[..8].to_vec();
    for chunk in png_chunks(clean) {
        let kind = chunk[4..8].to_vec();
        if kind == b"IEND" {
            bytes.extend(png_chunk(b"tEXt", b"Comment\0SECRET"));
            bytes.extend(png_chunk(b"eXIf", &exif(3)));
        }
        bytes.extend(chunk);
        if kind == b"IHDR" {
            bytes.extend(png_chunk(b"gAMA", &[0, 0, 0xB1, 0x8F]));
            bytes.extend(png_chunk(b"gAMA", b"SECRET"));
            bytes.extend(png_chunk(b"sRGB", b"\0SECRET"));
            bytes.extend(png_chunk(b"eXIf", &exif(orientation)));
            bytes.extend(png_chunk(b"tEXt", b"Author\0SECRET"));
            bytes.extend(png_chunk(b"zTXt", b"Author\0\0SECRET"));
            bytes.extend(png_chunk(
                b"iTXt",
                b"XML:com.adobe.xmp\0\0\0\0\0SECRET GPSMARKER",
            ));
            bytes.extend(png_chunk(b"tIME", &[7, 234, 1, 1, 1, 1, 1]));
            bytes.extend(png_chunk(b"prVt", b"SECRET"));
        }
    }
    bytes
}

fn gif_with_metadata(clean: &[u8]) -> Vec<u8> {
    assert_eq!(clean[10] & 0x80, 0x80);
    let start = 13 + (3 << ((clean[10] & 7) + 1));
    let mut bytes = clean[..start].to_vec();
    bytes.extend(b"\x21\xFE\x06SECRET\x09GPSMARKER\0");
    bytes.extend(b"\x21\xFF\x0BXMP DataXMP\x06SECRET\0");
    bytes.extend(b"\x21\xFF\x0BANIMEXTS1.0\x03\x01\0\0\x06SECRET\0");
    bytes.extend(b"\x21\xFF\x0BNETSCAPE2.0\x07\x02SECRET\0");
    bytes.extend(b"\x21\x01\x0C............\x06SECRET\0");
    let end = clean.len() - 1;
    bytes.extend(&clean[start..end]);
    bytes.extend(b"\x21\xFE\x06SECRET\0\x3B");
    bytes
}

fn webp_chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap().to_le_bytes();
    let mut chunk = [kind, &length[..], data].concat();
    if data.len() % 2 == 1 {
        // Decoders do not read it.
        chunk.push(b'S');
    }
    chunk
}

fn webp_with_metadata(clean: &[u8], orientation: u8) -> Vec<u8> {
    let mut chunks = clean[12..].to_vec();
    if chunks.starts_with(b"VP8X") {
        chunks[8] |= 0x2C;
        chunks[9..12].copy_from_slice(b"SEC");
        let profile = webp_chunk(b"ICCP", b"profile");
        chunks.splice(18..18, profile);
        let at = chunks.windows(4).position(|window| window == b"ANMF");
        if let Some(at) = at {
            let unknown = webp_chunk(b"what", b"SECRET");
            let length = u32::from_le_bytes(*chunks[at + 4..].first_chunk().unwrap());
            let longer = length + u32::try_from(unknown.len()).unwrap();
            chunks[at + 4..at + 8].copy_from_slice(&longer.to_le_bytes());
            chunks.extend(unknown);
        }
    }
    chunks.extend(webp_chunk(b"EXIF", &exif(orientation)));
    chunks.extend(webp_chunk(b"XMP ", b"SECRET GPSMARKER"));
    chunks.extend(webp_chunk(b"what", b"SECRET!"));
    let size = u32::try_from(chunks.len() + 4).unwrap().to_le_bytes();
    [b"RIFF", &size[..], b"WEBP", &chunks].concat()
}
