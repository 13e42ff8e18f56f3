//! Pictures that are small to send and large to decode. Each is within the limits of bytes and pixels.

use std::{io::Write as _, sync::OnceLock};

use flate2::{Compression, Crc, write::DeflateEncoder};

/// Lines of pixels that are compressed once and then repeated.
const LINES: usize = 16;

/// All pictures.
pub(crate) fn pictures() -> &'static [Vec<u8>; 3] {
    static PICTURES: OnceLock<[Vec<u8>; 3]> = OnceLock::new();
    PICTURES.get_or_init(|| [profile(), deep(), large()])
}

/// A PNG of 8 x 8 pixels with a colour profile of 200 MiB.
fn profile() -> Vec<u8> {
    const MIB: usize = 1 << 20;
    let profile = [&b"icc\0\0"[..], &zeros(MIB, 200)].concat();
    png([8, 8], 8, &chunk(b"iCCP", &profile), &zeros(8 * 3 + 1, 8))
}

/// A PNG of 32 megapixels with 8 bytes for each.
fn deep() -> Vec<u8> {
    let (width, height) = (8_000, 4_000);
    let pixels = zeros((width * 8 + 1) * LINES, height / LINES);
    png([width, height], 16, &[], &pixels)
}

/// A PNG of 40 megapixels with 3 bytes for each: the largest that is shown.
fn large() -> Vec<u8> {
    let (width, height) = (8_000, 4_992);
    let pixels = zeros((width * 3 + 1) * LINES, height / LINES);
    png([width, height], 8, &[], &pixels)
}

/// A PNG with this chunk before its pixels: red, green and blue, with 16 bits also their opacity.
fn png(size: [usize; 2], bits: u8, before: &[u8], pixels: &[u8]) -> Vec<u8> {
    let colours = if bits == 16 { 6 } else { 2 };
    let mut header = size.map(|side| (side as u32).to_be_bytes()).concat();
    header.extend([bits, colours, 0, 0, 0]);
    [
        b"\x89PNG\r\n\x1a\n",
        chunk(b"IHDR", &header).as_slice(),
        before,
        &chunk(b"IDAT", pixels),
        &chunk(b"IEND", &[]),
    ]
    .concat()
}

/// A chunk of a PNG: length, name, data and checksum.
fn chunk(name: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let mut sum = Crc::new();
    sum.update(name);
    sum.update(data);
    let length = (data.len() as u32).to_be_bytes();
    [&length, name.as_slice(), data, &sum.sum().to_be_bytes()].concat()
}

/// `times` blocks of zeros in the format of zlib. A block is compressed once and repeated: it refers to nothing before itself.
fn zeros(block: usize, times: usize) -> Vec<u8> {
    const HEADER: [u8; 2] = [0x78, 0xda];
    const EMPTY_LAST_BLOCK: [u8; 2] = [0x03, 0x00];
    /// The modulus of the checksum, Adler-32.
    const MODULUS: usize = 65_521;
    let mut packer = DeflateEncoder::new(Vec::new(), Compression::best());
    // Writing to a vector cannot fail.
    let _ = packer.write_all(&vec![0; block]);
    let _ = packer.flush();
    // Its lower half is 1 plus the sum of the bytes; its upper half is the sum of the lower halves.
    let sum = (((block * times % MODULUS) as u32) << 16) | 1;
    [
        HEADER.as_slice(),
        &packer.get_ref().repeat(times),
        &EMPTY_LAST_BLOCK,
        &sum.to_be_bytes(),
    ]
    .concat()
}
