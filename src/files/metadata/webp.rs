//! WebP (RFC 9649): a RIFF file of chunks, each of a type, a length, data, and a zero if the length is odd.

use super::{MetadataError, ROOM, Reader, length, orientation_only};

/// The bytes before the first chunk: `RIFF`, the size, `WEBP`.
const HEADER: usize = 12;
/// Where the flags of an extended file are, which begins with the chunk `VP8X`.
const FLAGS: usize = HEADER + 8;

const FLAG_PROFILE: u8 = 0x20;
const FLAG_ALPHA: u8 = 0x10;
const FLAG_EXIF: u8 = 0x08;
const FLAG_ANIMATION: u8 = 0x02;

struct Chunk<'a> {
    kind: &'a [u8],
    data: &'a [u8],
}

/// The pixels of a canvas, a frame or an image.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Size {
    width: u32,
    height: u32,
}

impl Size {
    /// Reads two fields of 24 bits, each of which is less by one than what it says.
    fn of_fields(bytes: &[u8]) -> Result<Self, MetadataError> {
        let mut reader = Reader::new(bytes);
        let mut field = || {
            let [low, middle, high] = reader.array()?;
            Ok(u32::from_le_bytes([low, middle, high, 0]) + 1)
        };
        let (width, height) = (field()?, field()?);
        Ok(Self { width, height })
    }

    /// Reads the size in compressed pixels.
    fn of_image(kind: &[u8], data: &[u8]) -> Result<Self, MetadataError> {
        let mut reader = Reader::new(data);
        if kind == b"VP8L" {
            reader.take(1)?;
            let bits = u32::from_le_bytes(reader.array()?);
            return Ok(Self {
                width: (bits & 0x3FFF) + 1,
                height: ((bits >> 14) & 0x3FFF) + 1,
            });
        }
        reader.take(6)?;
        let mut field = || Ok(u32::from(u16::from_le_bytes(reader.array()?) & 0x3FFF));
        let (width, height) = (field()?, field()?);
        Ok(Self { width, height })
    }

    /// Checks that an image has this size. The decoder allocates memory for it before it compares the two.
    fn check_image(self, kind: &[u8], data: &[u8]) -> Result<(), MetadataError> {
        if Self::of_image(kind, data)? == self {
            Ok(())
        } else {
            Err(MetadataError::Malformed(
                "an image of another size than its canvas",
            ))
        }
    }
}

/// The parts of an extended file that were seen. Each is kept once, except frames.
#[derive(Default)]
struct Seen {
    profile: bool,
    animation: bool,
    alpha: bool,
    image: bool,
    frame: bool,
    exif: bool,
}

pub(super) fn strip(input: &[u8]) -> Result<Vec<u8>, MetadataError> {
    let mut reader = Reader::new(input);
    let magic = reader.array::<4>()?;
    let size = length(u32::from_le_bytes(reader.array()?))?;
    // Bytes after this size are another file's.
    let mut reader = Reader::new(reader.take(size)?);
    if &magic != b"RIFF" || reader.array::<4>()? != *b"WEBP" {
        return Err(MetadataError::Malformed("no WebP signature"));
    }
    let mut output = Vec::with_capacity(input.len() + ROOM);
    output.extend(b"RIFF\0\0\0\0WEBP");
    let first = next_chunk(&mut reader)?.ok_or(MetadataError::Truncated)?;
    match first.kind {
        // A simple file is one image.
        b"VP8 " | b"VP8L" => push(&mut output, first.kind, first.data),
        b"VP8X" if first.data.len() == 10 => {
            let canvas = Size::of_fields(&first.data[4..])?;
            push(&mut output, first.kind, first.data);
            add_extended(&mut output, &mut reader, canvas)?;
        }
        _ => return Err(MetadataError::Malformed("the first chunk is no image")),
    }
    let size = u32::try_from(output.len() - 8)
        .map_err(|_| MetadataError::Malformed("the image is too large"))?;
    output[4..8].copy_from_slice(&size.to_le_bytes());
    Ok(output)
}

/// Adds the chunks after `VP8X` and corrects its flags.
fn add_extended(
    output: &mut Vec<u8>,
    reader: &mut Reader<'_>,
    canvas: Size,
) -> Result<(), MetadataError> {
    let mut seen = Seen::default();
    let mut has_orientation = false;
    while let Some(Chunk { kind, data }) = next_chunk(reader)? {
        let is_kept = match kind {
            b"ICCP" => !std::mem::replace(&mut seen.profile, true),
            b"ANIM" if data.len() == 6 => !std::mem::replace(&mut seen.animation, true),
            b"ALPH" => !std::mem::replace(&mut seen.alpha, true),
            b"VP8 " | b"VP8L" if !seen.image => {
                seen.image = true;
                canvas.check_image(kind, data)?;
                true
            }
            b"ANMF" => {
                seen.frame = true;
                push(output, kind, &strip_frame(data, canvas)?);
                false
            }
            b"EXIF" if !std::mem::replace(&mut seen.exif, true) => {
                if let Some(exif) = orientation_only(data) {
                    push(output, kind, &exif);
                    has_orientation = true;
                }
                false
            }
            _ => false,
        };
        if is_kept {
            push(output, kind, data);
        }
    }
    if !seen.image && !seen.frame {
        return Err(MetadataError::Malformed("no image"));
    }
    let mut flags = output[FLAGS] & (FLAG_ALPHA | FLAG_ANIMATION);
    if seen.profile {
        flags |= FLAG_PROFILE;
    }
    if has_orientation {
        flags |= FLAG_EXIF;
    }
    // The three bytes after the flags are reserved, and zero.
    output[FLAGS..FLAGS + 4].copy_from_slice(&[flags, 0, 0, 0]);
    Ok(())
}

/// Copies a frame of an animation: its place and duration, and the chunks of its image.
fn strip_frame(data: &[u8], canvas: Size) -> Result<Vec<u8>, MetadataError> {
    let mut reader = Reader::new(data);
    let mut output = Vec::with_capacity(data.len() + 1);
    let header = reader.array::<16>()?;
    let frame = Size::of_fields(&header[6..])?;
    if frame.width > canvas.width || frame.height > canvas.height {
        return Err(MetadataError::Malformed("a frame larger than the canvas"));
    }
    output.extend(header);
    let (mut has_alpha, mut has_image) = (false, false);
    while let Some(chunk) = next_chunk(&mut reader)? {
        let is_kept = match chunk.kind {
            b"ALPH" => !std::mem::replace(&mut has_alpha, true),
            b"VP8 " | b"VP8L" if !has_image => {
                has_image = true;
                frame.check_image(chunk.kind, chunk.data)?;
                true
            }
            _ => false,
        };
        if is_kept {
            push(&mut output, chunk.kind, chunk.data);
        }
    }
    if has_image {
        Ok(output)
    } else {
        Err(MetadataError::Malformed("a frame without an image"))
    }
}

/// Reads a chunk. `None` at the end. The zero after the last chunk may be missing.
fn next_chunk<'a>(reader: &mut Reader<'a>) -> Result<Option<Chunk<'a>>, MetadataError> {
    if reader.is_empty() {
        return Ok(None);
    }
    let kind = reader.take(4)?;
    let size = length(u32::from_le_bytes(reader.array()?))?;
    let data = reader.take(size)?;
    if size % 2 == 1 && !reader.is_empty() {
        reader.byte()?;
    }
    Ok(Some(Chunk { kind, data }))
}

fn push(output: &mut Vec<u8>, kind: &[u8], data: &[u8]) {
    // The data was read with a length of 32 bits.
    let size = u32::try_from(data.len()).unwrap_or(u32::MAX);
    output.extend_from_slice(kind);
    output.extend(size.to_le_bytes());
    output.extend_from_slice(data);
    if data.len() % 2 == 1 {
        output.push(0);
    }
}
