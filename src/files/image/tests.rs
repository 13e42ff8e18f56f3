use super::*;
use crate::files::{
    fixtures::{
        Random, encoded, exif, gif, jpeg, picture, png, png_chunk, png_chunks, samples,
        with_metadata,
    },
    strip,
};

const LIMITS: ImageLimits = ImageLimits {
    pixels: 40_000_000,
    side: 32_768,
    thumbnail_side: 64,
};

fn decoded(thumbnail: &Thumbnail) -> DynamicImage {
    let format = image::ImageFormat::from(thumbnail.format);
    image::load_from_memory_with_format(&thumbnail.bytes, format).unwrap()
}

/// Whether two colours are the same, apart from what JPEG loses.
fn is_close(one: [u8; 4], other: [u8; 4]) -> bool {
    one.iter()
        .zip(other)
        .all(|(one, other)| one.abs_diff(other) < 40)
}

#[test]
fn every_format_has_a_thumbnail() {
    for sample in samples() {
        let processed = process(&sample.bytes, sample.format, &LIMITS).expect(sample.name);
        let thumbnail = &processed.thumbnail;
        assert_eq!(
            (thumbnail.width, thumbnail.height),
            (processed.width, processed.height),
            "a small image is not enlarged"
        );
        let image = decoded(thumbnail);
        assert_eq!(
            (image.width(), image.height()),
            (thumbnail.width, thumbnail.height)
        );
        let is_transparent = thumbnail.format == Format::Png;
        assert_eq!(image.color().has_alpha(), is_transparent);
    }
}

#[test]
fn thumbnails_fit_in_the_square() {
    for (width, height, expected) in [
        (64, 64, (64, 64)),
        (65, 64, (64, 63)),
        (640, 320, (64, 32)),
        (100, 1000, (6, 64)),
        (3000, 1, (64, 1)),
        (1, 3000, (1, 64)),
        (1, 1, (1, 1)),
    ] {
        for (bytes, format) in [
            (png(width, height), Format::Png),
            (jpeg(width, height), Format::Jpeg),
        ] {
            let processed = process(&bytes, format, &LIMITS).unwrap();
            assert_eq!((processed.width, processed.height), (width, height));
            let thumbnail = processed.thumbnail;
            assert_eq!((thumbnail.width, thumbnail.height), expected);
        }
    }
}

#[test]
fn the_orientation_is_applied() {
    let [red, green, blue, white] = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]
        .map(|[red, green, blue]: [u8; 3]| [red, green, blue, 255]);
    // The corners from the top left, in reading order.
    let corners = [
        [red, green, blue, white],
        [green, red, white, blue],
        [white, blue, green, red],
        [blue, white, red, green],
        [red, blue, green, white],
        [blue, red, white, green],
        [white, green, blue, red],
        [green, white, red, blue],
    ];
    let clean = jpeg(200, 100);
    for (number, corners) in (1..).zip(corners) {
        let exif = exif(number);
        let length = u8::try_from(exif.len() + 8).unwrap();
        let header = [&[0xFF, 0xE1, 0, length], &b"Exif\0\0"[..], &exif].concat();
        let mut bytes = clean.clone();
        bytes.splice(2..2, header);
        for bytes in [bytes.clone(), strip(&bytes, Format::Jpeg).unwrap().into()] {
            let processed = process(&bytes, Format::Jpeg, &LIMITS).unwrap();
            let (width, height) = if number < 5 { (200, 100) } else { (100, 200) };
            assert_eq!((processed.width, processed.height), (width, height));
            let small = decoded(&processed.thumbnail).into_rgba8();
            let (width, height) = small.dimensions();
            let at = [
                (0, 0),
                (width - 1, 0),
                (0, height - 1),
                (width - 1, height - 1),
            ];
            for ((x, y), corner) in at.into_iter().zip(corners) {
                let pixel = small.get_pixel(x, y).0;
                assert!(is_close(pixel, corner), "{number} {x} {y}: {pixel:?}");
            }
        }
    }
}

#[test]
fn only_transparent_thumbnails_are_png() {
    let opaque = encoded(picture(100, 100, false), image::ImageFormat::Png);
    let processed = process(&opaque, Format::Png, &LIMITS).unwrap();
    assert_eq!(processed.thumbnail.format, Format::Jpeg);
    let processed = process(&png(100, 100), Format::Png, &LIMITS).unwrap();
    assert_eq!(processed.thumbnail.format, Format::Png);
    assert_eq!(
        process(&gif(2), Format::Gif, &LIMITS)
            .unwrap()
            .thumbnail
            .format,
        Format::Png
    );
}

#[test]
fn transparent_pixels_do_not_colour_their_neighbours() {
    let image = image::RgbaImage::from_fn(300, 300, |x, y| {
        if (x + y) % 2 == 0 {
            image::Rgba([200, 100, 50, 255])
        } else {
            image::Rgba([0, 0, 0, 0])
        }
    });
    let bytes = encoded(image, image::ImageFormat::Png);
    let processed = process(&bytes, Format::Png, &LIMITS).unwrap();
    for pixel in decoded(&processed.thumbnail).into_rgba8().pixels() {
        let [red, green, blue, alpha] = pixel.0;
        assert!((90..170).contains(&alpha), "{pixel:?}");
        assert!(
            is_close([red, green, blue, 0], [200, 100, 50, 0]),
            "{pixel:?}"
        );
    }
}

#[test]
fn a_thumbnail_has_the_profile_of_its_colours_and_no_other_metadata() {
    let profile = |space: &[u8; 4]| {
        let mut profile = vec![0; 128];
        profile[16..20].copy_from_slice(space);
        profile
    };
    let with_profile = |profile: Vec<u8>| {
        let mut bytes = Vec::new();
        let mut encoder = JpegEncoder::new(&mut bytes);
        encoder.set_icc_profile(profile).unwrap();
        let image = DynamicImage::from(picture(80, 80, false)).into_rgb8();
        DynamicImage::from(image)
            .write_with_encoder(encoder)
            .unwrap();
        process(&bytes, Format::Jpeg, &LIMITS)
            .unwrap()
            .thumbnail
            .bytes
    };
    let contains = |bytes: &[u8], text: &[u8]| bytes.windows(text.len()).any(|at| at == text);
    assert!(contains(&with_profile(profile(b"RGB ")), b"ICC_PROFILE"));
    assert!(!contains(&with_profile(profile(b"CMYK")), b"ICC_PROFILE"));
    let mut large = profile(b"RGB ");
    large.resize(PROFILE_MAX + 1, 0);
    assert!(!contains(&with_profile(large), b"ICC_PROFILE"));
    for sample in samples() {
        let dirty = with_metadata(&sample, 6);
        let thumbnail = process(&dirty, sample.format, &LIMITS).unwrap().thumbnail;
        assert!(!contains(&thumbnail.bytes, b"SECRET"), "{}", sample.name);
    }
}

/// Changes the size in the header of a PNG.
fn png_of_size(width: u32, height: u32) -> Vec<u8> {
    let clean = png(4, 4);
    let mut header = [width.to_be_bytes(), height.to_be_bytes()].concat();
    header.extend([8, 6, 0, 0, 0]);
    let mut bytes = clean[..8].to_vec();
    bytes.extend(png_chunk(b"IHDR", &header));
    bytes.extend(png_chunks(&clean).into_iter().skip(1).flatten());
    bytes
}

/// The header of a WebP of 16383 x 16383 pixels.
fn lossless_webp() -> Vec<u8> {
    b"RIFF\x16\0\0\0WEBPVP8L\x0A\0\0\0\x2F\xFE\xBF\xFF\x0F\0\0\0\0\0".to_vec()
}

#[test]
fn bombs_are_refused_by_their_header() {
    let mut canvas = gif(1);
    canvas[6..10].copy_from_slice(&[0xFF; 4]);
    let frame_header = jpeg(4, 4)
        .windows(2)
        .position(|window| window == b"\xFF\xC0")
        .unwrap();
    let mut wide = jpeg(4, 4);
    wide[frame_header + 5..frame_header + 9].copy_from_slice(&[0xFF; 4]);
    let mut extended = samples().remove(9).bytes;
    assert_eq!(&extended[12..16], b"VP8X");
    extended[24..30].copy_from_slice(&[0x3F, 0x9C, 0, 0x3F, 0x9C, 0]);
    for (bytes, format) in [
        (png_of_size(60_000, 60_000), Format::Png),
        (png_of_size(6_325, 6_325), Format::Png),
        (png_of_size(32_769, 1), Format::Png),
        (canvas, Format::Gif),
        (wide, Format::Jpeg),
        (lossless_webp(), Format::Webp),
        (extended, Format::Webp),
    ] {
        let result = process(&bytes, format, &LIMITS);
        let is_refused = matches!(result, Err(ImageError::TooManyPixels { .. }));
        assert!(is_refused, "{result:?}");
    }
    // 16384 pixels are 0 in the header that the decoder shows.
    let mut zero = lossless_webp();
    zero[21..25].copy_from_slice(&[0xFF, 0xFF, 0xFF, 0x0F]);
    assert!(process(&zero, Format::Webp, &LIMITS).is_err());
    // The size of the image is right, but that of the only frame is not.
    let mut frame = gif(1);
    let descriptor = frame.iter().position(|byte| *byte == 0x2C).unwrap();
    frame[descriptor + 5..descriptor + 9].copy_from_slice(&[0xFF; 4]);
    let result = process(&frame, Format::Gif, &LIMITS);
    assert!(
        matches!(result, Err(ImageError::TooMuchMemory)),
        "{result:?}"
    );
}

#[test]
fn an_image_that_needs_too_much_memory_is_refused() {
    let mut limits = LIMITS;
    limits.pixels = u64::MAX;
    limits.side = u32::MAX;
    let result = process(&png_of_size(60_000, 60_000), Format::Png, &limits);
    assert!(
        matches!(result, Err(ImageError::TooMuchMemory)),
        "{result:?}"
    );
}

#[test]
fn no_file_makes_the_gateway_panic() {
    let mut random = Random::new(5);
    let mut panics = 0;
    let mut check = |bytes: &[u8], format| {
        if matches!(process(bytes, format, &LIMITS), Err(ImageError::Panicked)) {
            panics += 1;
        }
    };
    for sample in samples() {
        let dirty = with_metadata(&sample, 6);
        for length in 0..dirty.len() {
            check(&dirty[..length], sample.format);
        }
        for _ in 0..400 {
            let mut bytes = sample.bytes.clone();
            for _ in 0..=random.below(4) {
                let at = random.below(bytes.len());
                bytes[at] = random.bytes(1)[0];
            }
            check(&bytes, sample.format);
            let length = random.below(300);
            check(&random.bytes(length), sample.format);
        }
    }
    // A panic of a decoder is an error here; today none of these files causes one.
    assert_eq!(panics, 0);
}

#[test]
fn one_format_is_not_decoded_as_another() {
    assert!(process(&png(4, 4), Format::Jpeg, &LIMITS).is_err());
    assert!(process(&jpeg(4, 4), Format::Png, &LIMITS).is_err());
    assert!(process(b"", Format::Gif, &LIMITS).is_err());
}
