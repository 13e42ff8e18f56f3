//! JPEG (ITU-T T.81): segments of a marker, a length and data, and scans of compressed pixels between them.

use super::{MetadataError, ROOM, Reader, orientation_only};

const START: u8 = 0xD8;
const END: u8 = 0xD9;
const SCAN: u8 = 0xDA;
const APP0: u8 = 0xE0;
const APP1: u8 = 0xE1;
const APP2: u8 = 0xE2;
const APP14: u8 = 0xEE;

const EXIF: &[u8] = b"Exif\0\0";

/// The parts of a file that were seen. Each is kept once.
#[derive(Default)]
struct Seen {
    jfif: bool,
    exif: bool,
    adobe: bool,
    scan: bool,
}

pub(super) fn strip(input: &[u8]) -> Result<Vec<u8>, MetadataError> {
    let mut reader = Reader::new(input);
    if reader.array()? != [0xFF, START] {
        return Err(MetadataError::Malformed("no start marker"));
    }
    let mut output = Vec::with_capacity(input.len() + ROOM);
    output.extend([0xFF, START]);
    let mut seen = Seen::default();
    while let Some(marker) = next_marker(&mut reader) {
        match marker {
            END => return finish(output, &seen),
            START => return Err(MetadataError::Malformed("a second start marker")),
            // These have no length.
            0x01 | 0xD0..=0xD7 => {}
            _ => {
                let length = usize::from(u16::from_be_bytes(reader.array()?));
                let length = length
                    .checked_sub(2)
                    .ok_or(MetadataError::Malformed("a segment with a bad length"))?;
                let data = reader.take(length)?;
                add_segment(&mut output, marker, data, &mut seen);
                if marker == SCAN {
                    output.extend(take_compressed(&mut reader));
                }
            }
        }
    }
    finish(output, &seen)
}

/// Completes the output at the end marker, or at the end of a file that lacks it.
fn finish(mut output: Vec<u8>, seen: &Seen) -> Result<Vec<u8>, MetadataError> {
    if !seen.scan {
        return Err(MetadataError::Truncated);
    }
    output.extend([0xFF, END]);
    Ok(output)
}

/// Skips to the next marker, as decoders do. `None` at the end of the input.
fn next_marker(reader: &mut Reader<'_>) -> Option<u8> {
    let mut after_fill = false;
    loop {
        match reader.byte().ok()? {
            0xFF => after_fill = true,
            marker if after_fill && marker != 0 => return Some(marker),
            _ => after_fill = false,
        }
    }
}

/// Takes the compressed pixels of a scan, which end before the next marker that is not a restart.
fn take_compressed<'a>(reader: &mut Reader<'a>) -> &'a [u8] {
    let input = reader.rest;
    let mut at = 0;
    let mut end = input.len();
    while let Some(offset) = input[at..].iter().position(|byte| *byte == 0xFF) {
        let marker_start = at + offset;
        let fill = input[marker_start..]
            .iter()
            .take_while(|byte| **byte == 0xFF);
        let code_at = marker_start + fill.count();
        // A zero says that the 0xFF before it belongs to the pixels.
        if !matches!(input.get(code_at), Some(0 | 0xD0..=0xD7)) {
            end = marker_start;
            break;
        }
        at = code_at + 1;
    }
    let (pixels, rest) = input.split_at(end);
    reader.rest = rest;
    pixels
}

/// Adds a segment, or the part of it that stays.
fn add_segment(output: &mut Vec<u8>, marker: u8, data: &[u8], seen: &mut Seen) {
    match marker {
        // Frame headers, tables, and the settings of the scans.
        0xC0..=0xC7 | 0xC9..=0xCF | 0xDB..=0xDF => push(output, marker, &[data]),
        SCAN => {
            seen.scan = true;
            push(output, marker, &[data]);
        }
        APP0 if data.starts_with(b"JFIF\0") && data.len() >= 14 && !seen.jfif => {
            seen.jfif = true;
            // The last two bytes are the size of a thumbnail, which is not kept.
            push(output, marker, &[&data[..12], &[0, 0]]);
        }
        // Decoders read the orientation and the profile before the first scan.
        APP1 if data.starts_with(EXIF) && !seen.scan && !seen.exif => {
            seen.exif = true;
            if let Some(exif) = orientation_only(&data[EXIF.len()..]) {
                push(output, marker, &[EXIF, &exif]);
            }
        }
        APP2 if data.starts_with(b"ICC_PROFILE\0") && !seen.scan => push(output, marker, &[data]),
        // It says how the colours are encoded.
        APP14 if data.starts_with(b"Adobe") && data.len() >= 12 && !seen.adobe => {
            seen.adobe = true;
            push(output, marker, &[&data[..12]]);
        }
        _ => {}
    }
}

/// Adds a segment of these parts, which are not longer together than a segment that was read.
fn push(output: &mut Vec<u8>, marker: u8, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let length = u16::try_from(length + 2).unwrap_or(u16::MAX);
    output.extend([0xFF, marker]);
    output.extend(length.to_be_bytes());
    for part in parts {
        output.extend_from_slice(part);
    }
}
