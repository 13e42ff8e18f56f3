//! GIF89a: a canvas, then images and extensions, whose data is in sub-blocks of up to 255 bytes.

use super::{MetadataError, ROOM, Reader};

const EXTENSION: u8 = 0x21;
const IMAGE: u8 = 0x2C;
const TRAILER: u8 = 0x3B;

const GRAPHIC_CONTROL: u8 = 0xF9;
const APPLICATION: u8 = 0xFF;

/// The applications whose extension says how often an animation repeats.
const LOOPS: [&[u8]; 2] = [b"NETSCAPE2.0", b"ANIMEXTS1.0"];

pub(super) fn strip(input: &[u8]) -> Result<Vec<u8>, MetadataError> {
    let mut reader = Reader::new(input);
    let mut output = Vec::with_capacity(input.len() + ROOM);
    let signature = reader.take(6)?;
    if signature != b"GIF87a" && signature != b"GIF89a" {
        return Err(MetadataError::Malformed("no GIF signature"));
    }
    output.extend_from_slice(signature);
    let canvas = reader.array::<7>()?;
    output.extend(canvas);
    output.extend_from_slice(take_colours(&mut reader, canvas[4])?);

    let (mut has_image, mut has_loop) = (false, false);
    while !reader.is_empty() {
        match reader.byte()? {
            IMAGE => {
                add_image(&mut output, &mut reader)?;
                has_image = true;
            }
            EXTENSION => add_extension(&mut output, &mut reader, &mut has_loop)?,
            TRAILER => break,
            // Some encoders end a block twice.
            0 => {}
            _ => return Err(MetadataError::Malformed("an unknown block")),
        }
    }
    if !has_image {
        return Err(MetadataError::Truncated);
    }
    output.push(TRAILER);
    Ok(output)
}

/// Takes the table of colours that these flags announce.
fn take_colours<'a>(reader: &mut Reader<'a>, flags: u8) -> Result<&'a [u8], MetadataError> {
    if flags & 0x80 == 0 {
        return Ok(&[]);
    }
    reader.take(3 << ((flags & 7) + 1))
}

fn add_image(output: &mut Vec<u8>, reader: &mut Reader<'_>) -> Result<(), MetadataError> {
    let descriptor = reader.array::<9>()?;
    output.push(IMAGE);
    output.extend(descriptor);
    output.extend_from_slice(take_colours(reader, descriptor[8])?);
    let code_size = reader.byte()?;
    output.push(code_size);
    while let Some(block) = next_block(reader)? {
        push_block(output, block);
    }
    output.push(0);
    Ok(())
}

fn add_extension(
    output: &mut Vec<u8>,
    reader: &mut Reader<'_>,
    has_loop: &mut bool,
) -> Result<(), MetadataError> {
    let label = reader.byte()?;
    let first = next_block(reader)?;
    match (label, first) {
        (GRAPHIC_CONTROL, Some(control)) if control.len() == 4 => {
            output.extend([EXTENSION, GRAPHIC_CONTROL]);
            push_block(output, control);
            output.push(0);
        }
        (GRAPHIC_CONTROL, _) => return Err(MetadataError::Malformed("a bad graphic control")),
        (APPLICATION, Some(name)) if LOOPS.contains(&name) => {
            let count = next_block(reader)?;
            if let Some(count @ [1, _, _]) = count
                && !std::mem::replace(has_loop, true)
            {
                output.extend([EXTENSION, APPLICATION]);
                push_block(output, name);
                push_block(output, count);
                output.push(0);
            }
            if count.is_none() {
                return Ok(());
            }
        }
        _ => {}
    }
    if first.is_some() {
        while next_block(reader)?.is_some() {}
    }
    Ok(())
}

/// Reads a sub-block. `None` after the last one.
fn next_block<'a>(reader: &mut Reader<'a>) -> Result<Option<&'a [u8]>, MetadataError> {
    match reader.byte()? {
        0 => Ok(None),
        length => reader.take(usize::from(length)).map(Some),
    }
}

/// Adds a sub-block that was read, so it has up to 255 bytes.
fn push_block(output: &mut Vec<u8>, block: &[u8]) {
    output.push(u8::try_from(block.len()).unwrap_or(u8::MAX));
    output.extend_from_slice(block);
}
