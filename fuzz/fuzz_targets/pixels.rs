#![no_main]
//! Decodes arbitrary bytes as a picture of each format, as the process does that a gateway starts for it: after the
//! metadata is removed, and under limits. libFuzzer limits the memory (`-rss_limit_mb`) instead of the system.

use chat_gateway::files::{Format, ImageError, ImageLimits, process, strip};
use libfuzzer_sys::fuzz_target;

/// Small ones, so that a run is short: 250,000 pixels took three seconds of CPU.
const LIMITS: ImageLimits = ImageLimits {
    pixels: 20_000,
    side: 4_096,
    thumbnail_side: 64,
};

fuzz_target!(|bytes: &[u8]| {
    for format in [Format::Jpeg, Format::Png, Format::Gif, Format::Webp] {
        decode(bytes, format);
        if let Ok(clean) = strip(bytes, format) {
            decode(&clean, format);
        }
    }
});

fn decode(bytes: &[u8], format: Format) {
    let processed = match process(bytes, format, &LIMITS) {
        Ok(processed) => processed,
        Err(ImageError::Panicked) => panic!("the decoder panicked"),
        Err(_) => return,
    };
    let (width, height) = (processed.width, processed.height);
    assert!(width > 0 && height > 0);
    assert!(u64::from(width) * u64::from(height) <= LIMITS.pixels);
    let thumbnail = processed.thumbnail;
    assert!(thumbnail.width > 0 && thumbnail.width <= LIMITS.thumbnail_side.min(width));
    assert!(thumbnail.height > 0 && thumbnail.height <= LIMITS.thumbnail_side.min(height));
    let again = process(&thumbnail.bytes, thumbnail.format, &LIMITS);
    let again = again.expect("a thumbnail can be decoded");
    assert_eq!(
        (again.width, again.height),
        (thumbnail.width, thumbnail.height)
    );
}
