//! PNG (ISO/IEC 15948), also animated: chunks of a length, a type, data and a checksum.

use super::{MetadataError, ROOM, Reader, length, orientation_only};

const SIGNATURE: &[u8; 8] = b"\x89PNG\r\n\x1A\n";
const NO_LIMIT: usize = usize::MAX;

/// A type of chunk that stays.
struct Kept {
    kind: &'static [u8; 4],
    /// The largest size that the format allows, in bytes. More could hide something.
    size_max: usize,
    repeats: bool,
}

const fn once(kind: &'static [u8; 4], size_max: usize) -> Kept {
    Kept {
        kind,
        size_max,
        repeats: false,
    }
}

const fn repeated(kind: &'static [u8; 4], size_max: usize) -> Kept {
    Kept {
        kind,
        size_max,
        repeats: true,
    }
}

const KEPT: [Kept; 18] = [
    once(b"IHDR", 13),
    once(b"PLTE", 768),
    repeated(b"IDAT", NO_LIMIT),
    once(b"IEND", 0),
    once(b"tRNS", 256),
    // Colours and size.
    once(b"cHRM", 32),
    once(b"gAMA", 4),
    once(b"iCCP", NO_LIMIT),
    once(b"sBIT", 4),
    once(b"sRGB", 1),
    once(b"cICP", 4),
    once(b"mDCV", 24),
    once(b"cLLI", 8),
    once(b"bKGD", 6),
    once(b"pHYs", 9),
    // Animation.
    once(b"acTL", 8),
    repeated(b"fcTL", 26),
    repeated(b"fdAT", NO_LIMIT),
];

/// The types of chunk that were seen.
#[derive(Default)]
struct Seen {
    /// One for each of [`KEPT`].
    kept: [bool; KEPT.len()],
    exif: bool,
    pixels: bool,
}

pub(super) fn strip(input: &[u8]) -> Result<Vec<u8>, MetadataError> {
    let mut reader = Reader::new(input);
    if reader.array()? != *SIGNATURE {
        return Err(MetadataError::Malformed("no PNG signature"));
    }
    let mut output = Vec::with_capacity(input.len() + ROOM);
    output.extend(SIGNATURE);
    let mut seen = Seen::default();
    loop {
        let size = length(u32::from_be_bytes(reader.array()?))?;
        let kind = reader.array()?;
        let data = reader.take(size)?;
        let checksum = reader.array()?;
        if output.len() == SIGNATURE.len() && kind != *b"IHDR" {
            return Err(MetadataError::Malformed("the header is not first"));
        }
        if &kind == b"eXIf" {
            add_orientation(&mut output, data, &mut seen);
        } else if is_kept(&kind, size, &mut seen)? {
            push(&mut output, kind, data, checksum);
        }
        seen.pixels |= &kind == b"IDAT";
        if &kind == b"IEND" {
            break;
        }
    }
    if seen.pixels {
        Ok(output)
    } else {
        Err(MetadataError::Malformed("no pixels"))
    }
}

fn is_kept(kind: &[u8; 4], size: usize, seen: &mut Seen) -> Result<bool, MetadataError> {
    let found = KEPT
        .iter()
        .zip(&mut seen.kept)
        .find(|(kept, _)| kept.kind == kind);
    // A capital letter says that decoders must know the chunk.
    let is_critical = kind[0].is_ascii_uppercase();
    match found {
        Some((kept, is_seen)) if size <= kept.size_max => {
            let is_first = !std::mem::replace(is_seen, true);
            if is_first || kept.repeats {
                return Ok(true);
            }
            if is_critical {
                return Err(MetadataError::Malformed("a critical chunk twice"));
            }
            Ok(false)
        }
        Some(_) if is_critical => Err(MetadataError::Malformed("a critical chunk is too large")),
        None if is_critical => Err(MetadataError::Malformed("an unknown critical chunk")),
        Some(_) | None => Ok(false),
    }
}

/// Adds the orientation. Decoders differ about a chunk after the pixels, so it is kept only before them.
fn add_orientation(output: &mut Vec<u8>, exif: &[u8], seen: &mut Seen) {
    let is_first = !std::mem::replace(&mut seen.exif, true);
    if is_first
        && !seen.pixels
        && let Some(exif) = orientation_only(exif)
    {
        let checksum = checksum(b"eXIf", &exif).to_be_bytes();
        push(output, *b"eXIf", &exif, checksum);
    }
}

fn push(output: &mut Vec<u8>, kind: [u8; 4], data: &[u8], checksum: [u8; 4]) {
    // The data was read with a length of 32 bits.
    let size = u32::try_from(data.len()).unwrap_or(u32::MAX);
    output.extend(size.to_be_bytes());
    output.extend(kind);
    output.extend_from_slice(data);
    output.extend(checksum);
}

/// Computes the CRC-32 of a small chunk, bit by bit.
pub(in crate::files) fn checksum(kind: &[u8], data: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in kind.iter().chain(data) {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            let polynomial = if crc & 1 == 1 { 0xEDB8_8320 } else { 0 };
            crc = (crc >> 1) ^ polynomial;
        }
    }
    !crc
}
