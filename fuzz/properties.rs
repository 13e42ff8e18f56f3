//! What holds for the bytes of any file and for any name. The fuzzing target and the tests of `src/files` check it.

use super::{
    DOWNLOAD, Format, ImageError, ImageLimits, file_name, is_inline, process, sniff, strip,
};

/// The bytes that the copy of an image has more than the image, at most.
const GROWTH_MAX: usize = 64;
/// With these limits the header of an image is read, and nothing is decoded.
const HEADER_ONLY: ImageLimits = ImageLimits {
    pixels: 0,
    side: 1,
    thumbnail_side: 1,
};

/// Looks at bytes as if they were a file of each kind, and a name.
pub(super) fn check(bytes: &[u8]) {
    let kind = sniff(bytes);
    assert!(kind.served_mime() == DOWNLOAD || is_inline(kind.mime()));
    for format in [Format::Jpeg, Format::Png, Format::Gif, Format::Webp] {
        check_image(bytes, format);
    }
    check_name(&String::from_utf8_lossy(bytes));
}

fn check_image(bytes: &[u8], format: Format) {
    check_header(bytes, format);
    let Ok(copy) = strip(bytes, format) else {
        return;
    };
    assert!(copy.len() <= bytes.len() + GROWTH_MAX);
    assert_eq!(sniff(&copy).format(), Some(format));
    assert!(strip(&copy, format).as_ref() == Ok(&copy), "it is stable");
    check_header(&copy, format);
}

fn check_header(bytes: &[u8], format: Format) {
    match process(bytes, format, &HEADER_ONLY) {
        Ok(_) => panic!("every image is above the limits"),
        Err(ImageError::Panicked) => panic!("the decoder panicked"),
        Err(_) => {}
    }
}

fn check_name(given: &str) {
    let name = file_name(given);
    assert!(!name.is_empty() && name.len() <= 255);
    assert!(!name.starts_with('.') && !name.contains(['/', '\\']));
    assert!(!name.contains(char::is_control));
    assert_eq!(file_name(&name), name);
}
