use std::io::Cursor;

use image::{
    AnimationDecoder, DynamicImage, ImageDecoder, ImageReader,
    codecs::{gif::GifDecoder, png::PngDecoder, webp::WebPDecoder},
};

use super::*;
use crate::files::{
    ImageLimits,
    fixtures::{
        MARKERS, Random, Sample, exif, jpeg, png, png_chunk, png_chunks, samples, with_metadata,
    },
    process,
};

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

/// Whether a text is among the bytes that no stripped image may contain.
fn has_marker(bytes: &[u8]) -> bool {
    MARKERS.iter().any(|marker| contains(bytes, marker))
}

/// The pixels of each frame, with its delay.
fn frames(bytes: &[u8], format: Format) -> Vec<(Vec<u8>, (u32, u32))> {
    let input = Cursor::new(bytes);
    let frames = match format {
        Format::Gif => GifDecoder::new(input).unwrap().into_frames(),
        Format::Webp if contains(bytes, b"ANMF") => WebPDecoder::new(input).unwrap().into_frames(),
        Format::Png if contains(bytes, b"acTL") => {
            let decoder = PngDecoder::new(input).unwrap();
            decoder.apng().unwrap().into_frames()
        }
        Format::Jpeg | Format::Png | Format::Webp => {
            let image = image::load_from_memory_with_format(bytes, format.into()).unwrap();
            return vec![(image.into_bytes(), (0, 0))];
        }
    };
    frames
        .map(|frame| {
            let frame = frame.unwrap();
            let delay = frame.delay().numer_denom_ms();
            (frame.into_buffer().into_raw(), delay)
        })
        .collect()
}

fn orientation(bytes: &[u8], format: Format) -> Orientation {
    let reader = ImageReader::with_format(Cursor::new(bytes), format.into());
    reader.into_decoder().unwrap().orientation().unwrap()
}

/// Whether the format, and this sample of it, can carry EXIF.
fn has_exif(sample: &Sample) -> bool {
    match sample.format {
        Format::Jpeg | Format::Png => true,
        Format::Gif => false,
        Format::Webp => contains(&sample.bytes, b"VP8X"),
    }
}

#[test]
fn metadata_goes_and_pixels_stay() {
    for sample in samples() {
        for number in 1..=8 {
            let dirty = with_metadata(&sample, number);
            assert!(has_marker(&dirty));
            let clean = strip(&dirty, sample.format).expect(sample.name);
            assert!(!has_marker(&clean), "{}", sample.name);
            assert!(!contains(&clean, b"SEC"), "{}", sample.name);
            assert!(!contains(&clean, b"<html>"), "{}", sample.name);
            let pixels = frames(&sample.bytes, sample.format);
            assert_eq!(frames(&dirty, sample.format), pixels, "{}", sample.name);
            assert_eq!(frames(&clean, sample.format), pixels, "{}", sample.name);
            let expected = Orientation::from_exif(number)
                .filter(|_| has_exif(&sample))
                .unwrap_or(Orientation::NoTransforms);
            assert_eq!(
                orientation(&clean, sample.format),
                expected,
                "{}",
                sample.name
            );
            assert_eq!(strip(&clean, sample.format).unwrap(), clean);
        }
    }
}

#[test]
fn a_clean_file_stays_as_it_is() {
    for sample in samples() {
        let clean = strip(&sample.bytes, sample.format).unwrap();
        assert!(clean == sample.bytes, "{}", sample.name);
    }
}

#[test]
fn colour_profiles_stay_and_upright_files_have_no_exif() {
    for sample in samples() {
        let clean = strip(&with_metadata(&sample, 1), sample.format).unwrap();
        for text in [&b"Exif"[..], b"eXIf", b"EXIF", b"II\x2A\0", b"MM\0\x2A"] {
            assert!(!contains(&clean, text), "{}", sample.name);
        }
        let has_profile = match sample.format {
            Format::Jpeg => contains(&clean, b"ICC_PROFILE\0\x01\x01profile"),
            Format::Png => contains(&clean, b"gAMA\0\0\xB1\x8F"),
            Format::Gif => true,
            Format::Webp => !has_exif(&sample) || contains(&clean, b"ICCP\x07\0\0\0profile\0"),
        };
        assert!(has_profile, "{}", sample.name);
    }
    let profile = png_chunk(b"iCCP", b"icc\0\0profile");
    let mut bytes = png(4, 4);
    bytes.splice(33..33, profile.clone());
    assert!(contains(&strip(&bytes, Format::Png).unwrap(), &profile));
}

#[test]
fn an_animation_repeats_as_before() {
    let sample = samples().remove(6);
    assert_eq!(sample.name, "animated gif");
    for dirty in [sample.bytes.clone(), with_metadata(&sample, 1)] {
        let clean = strip(&dirty, Format::Gif).unwrap();
        let repeats =
            contains(&clean, b"NETSCAPE2.0\x03\x01\0\0\0") || contains(&clean, b"ANIMEXTS1.0");
        assert!(repeats);
        assert_eq!(frames(&clean, Format::Gif).len(), 3);
    }
}

#[test]
fn unknown_extensions_and_second_ends_in_a_gif_go() {
    let sample = samples().remove(6);
    let mut dirty = sample.bytes.clone();
    dirty.pop();
    dirty.extend(b"\x21\x77\x06SECRET\0\x21\x77\0\0\0\x3B");
    assert!(strip(&dirty, Format::Gif).unwrap() == sample.bytes);
    let start = 13 + 6;
    dirty.splice(start..start, *b"\x21\x77\x06SECRET\0");
    assert!(strip(&dirty, Format::Gif).unwrap() == sample.bytes);
    // This decoder refuses such an extension, so a file is stripped first.
    assert!(process(&dirty, Format::Gif, &ImageLimits::default()).is_err());
}

#[test]
fn a_truncated_file_is_an_error_or_lacks_only_its_end() {
    for sample in samples() {
        let dirty = with_metadata(&sample, 6);
        for length in 0..dirty.len() {
            let stripped = strip(&dirty[..length], sample.format);
            if let Ok(clean) = stripped {
                assert!(!has_marker(&clean), "{}", sample.name);
            }
        }
        for length in 0..sample.bytes.len() {
            let bytes = &sample.bytes[..length];
            let stripped = strip(bytes, sample.format);
            let may_lack_end = matches!(sample.format, Format::Jpeg | Format::Gif);
            assert!(
                may_lack_end || stripped.is_err(),
                "{} {length}",
                sample.name
            );
            if let Ok(clean) = stripped {
                let _ = process(&clean, sample.format, &ImageLimits::default());
            }
        }
    }
}

#[test]
fn a_missing_end_marker_is_added() {
    for sample in samples() {
        let end = match sample.format {
            Format::Jpeg => 2,
            Format::Gif => 1,
            Format::Png | Format::Webp => continue,
        };
        let cut = &sample.bytes[..sample.bytes.len() - end];
        assert!(strip(cut, sample.format).unwrap() == sample.bytes);
    }
}

#[test]
fn malformed_files_are_errors() {
    let with_chunk = |kind, data: &[u8]| {
        let mut bytes = png(4, 4);
        bytes.splice(33..33, png_chunk(kind, data));
        bytes
    };
    let webp = |chunks: &[u8]| {
        let size = u32::try_from(chunks.len() + 4).unwrap().to_le_bytes();
        [b"RIFF", &size[..], b"WEBP", chunks].concat()
    };
    let no_pixels: Vec<u8> = png_chunks(&png(4, 4))
        .into_iter()
        .filter(|chunk| &chunk[4..8] != b"IDAT")
        .flatten()
        .collect();
    for (bytes, format) in [
        (Vec::new(), Format::Jpeg),
        (b"\xFF\xD8\xFF\xD9".to_vec(), Format::Jpeg),
        (b"\xFF\xD8\xFF\xD8\xFF\xD9".to_vec(), Format::Jpeg),
        (b"\xFF\xD8\xFF\xFE\0\x01\xFF\xD9".to_vec(), Format::Jpeg),
        (b"\xFF\xD8\xFF\xFE\xFF\xFF\xFF\xD9".to_vec(), Format::Jpeg),
        (jpeg(4, 4), Format::Png),
        (png(4, 4), Format::Jpeg),
        (with_chunk(b"ABCD", b"unknown"), Format::Png),
        (with_chunk(b"IHDR", &[0; 13]), Format::Png),
        (with_chunk(b"PLTE", &[0; 769]), Format::Png),
        (
            [&b"\x89PNG\r\n\x1A\n"[..], &no_pixels].concat(),
            Format::Png,
        ),
        (
            b"\x89PNG\r\n\x1A\n\xFF\xFF\xFF\xFFIHDR".to_vec(),
            Format::Png,
        ),
        (b"GIF89a\x01\0\x01\0\0\0\0\x3B".to_vec(), Format::Gif),
        (b"GIF89a\x01\0\x01\0\x87\0\0\x3B".to_vec(), Format::Gif),
        (
            b"GIF89a\x01\0\x01\0\0\0\0\x21\xF9\x02\0\0\0\x3B".to_vec(),
            Format::Gif,
        ),
        (webp(b""), Format::Webp),
        (webp(b"XMP \x02\0\0\0xx"), Format::Webp),
        (webp(b"VP8X\x0A\0\0\0\0\0\0\0\0\0\0\0\0\0"), Format::Webp),
        (webp(b"VP8 \xFF\xFF\xFF\xFF"), Format::Webp),
        (
            b"RIFF\xFF\xFF\xFF\xFFWEBPVP8 \0\0\0\0".to_vec(),
            Format::Webp,
        ),
    ] {
        assert!(strip(&bytes, format).is_err(), "{bytes:?}");
    }
}

#[test]
fn a_webp_image_has_the_size_of_its_canvas() {
    for sample in samples().into_iter().skip(9) {
        assert_eq!(&sample.bytes[12..16], b"VP8X");
        let at = |text: &[u8]| {
            let mut windows = sample.bytes.windows(text.len());
            windows.position(|window| window == text)
        };
        let changed = |at: usize| {
            let mut bytes = sample.bytes.clone();
            bytes[at] ^= 1;
            bytes
        };
        let image = at(b"VP8 ")
            .map(|at| at + 8 + 6)
            .or(at(b"VP8L").map(|at| at + 9));
        assert!(strip(&changed(image.unwrap()), Format::Webp).is_err());
        if let Some(frame) = at(b"ANMF") {
            assert!(strip(&changed(frame + 8 + 6), Format::Webp).is_err());
            // A canvas may be larger than its frames.
            assert!(strip(&changed(24), Format::Webp).is_ok());
        } else {
            assert!(strip(&changed(24), Format::Webp).is_err());
        }
    }
}

#[test]
fn the_compressed_pixels_of_a_jpeg_end_at_a_real_marker() {
    // A stuffed zero, a restart, and fill bytes before either belong to the pixels.
    let scan = b"\x01\xFF\x00\x02\xFF\xD3\x03\xFF\xFF\x00\x04\xFF\xFF\xD5\x05";
    let mut bytes = b"\xFF\xD8\xFF\xDA\0\x02".to_vec();
    bytes.extend(scan);
    let start = bytes.len();
    bytes.extend(b"\xFF\xFE\0\x08SECRET\xFF\xC4\0\x03\x07\xFF\xDA\0\x02\x09\xFF\xD9SECRET");
    let mut expected = bytes[..start].to_vec();
    expected.extend(b"\xFF\xC4\0\x03\x07\xFF\xDA\0\x02\x09\xFF\xD9");
    assert!(strip(&bytes, Format::Jpeg).unwrap() == expected);
}

#[test]
fn exif_of_any_content_gives_an_orientation_or_nothing() {
    for number in 2..=8 {
        let made = orientation_only(&exif(number)).unwrap();
        assert_eq!(
            Orientation::from_exif_chunk(&made),
            Orientation::from_exif(number)
        );
        assert_eq!(orientation_only(&made), Some(made));
    }
    for number in [0, 1, 9, 255] {
        assert_eq!(orientation_only(&exif(number)), None);
    }
    let mut random = Random::new(2);
    for _ in 0..5000 {
        let mut data = exif(6);
        for _ in 0..4 {
            let at = random.below(data.len());
            data[at] = random.bytes(1)[0];
        }
        data.truncate(random.below(data.len() + 1));
        let _ = orientation_only(&data);
    }
}

#[test]
fn sixteen_bits_and_palettes_stay() {
    let image = DynamicImage::from(crate::files::fixtures::picture(5, 5, true)).into_rgba16();
    let bytes = crate::files::fixtures::encoded(image, image::ImageFormat::Png);
    let sample = Sample {
        name: "16 bits",
        format: Format::Png,
        bytes,
    };
    let clean = strip(&with_metadata(&sample, 1), Format::Png).unwrap();
    assert_eq!(
        frames(&clean, Format::Png),
        frames(&sample.bytes, Format::Png)
    );
}
