"""Pictures that are small to send and large to decode: each is within the limits of pixels and bytes."""
import io
import struct
import zlib

from PIL import Image

MIB = 1 << 20


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, bits, colours, channels, *chunks):
    """A black PNG with these chunks before its pixels."""
    line = b"\0" * (1 + width * channels * bits // 8)
    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(line) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*part) for part in parts)


def png_with_profile(size=200 * MIB):
    """A PNG of 8 x 8 pixels whose colour profile has 200 MiB, and 204 KB in the file."""
    packer = zlib.compressobj(9)
    profile = b"".join(packer.compress(bytes(MIB)) for _ in range(size // MIB)) + packer.flush()
    return png(8, 8, 8, 2, 3, (b"iCCP", b"icc\0\0" + profile))


def png_of_16_bits(width=8_000, height=4_000):
    """A PNG of 32 megapixels that has 8 bytes for each of them."""
    return png(width, height, 16, 6, 4)


def jpeg_of_cmyk(width=8_000, height=5_000):
    """A progressive JPEG of 40 megapixels in four colours, all of whose coefficients are in memory at once."""
    out = io.BytesIO()
    Image.new("CMYK", (width, height), (10, 20, 30, 40)).save(out, "JPEG", progressive=True, quality=50)
    return out.getvalue()


def large_gif(width=8_000, height=5_000):
    """A GIF of 40 megapixels, which are decoded to 160 MB."""
    out = io.BytesIO()
    Image.new("P", (width, height), 1).save(out, "GIF")
    return out.getvalue()


class Bits:
    """A row of bits, each number with its lowest bit first."""

    def __init__(self):
        self.value, self.length = 0, 0

    def add(self, *numbers):
        """Adds pairs of a number and its bits."""
        for number, bits in numbers:
            self.value |= number << self.length
            self.length += bits
        return self


def code_of_one(symbol, bits=None):
    """A prefix code of one symbol, which takes no bits."""
    return [(1, 1), (0, 1), (bits == 8, 1), (symbol, bits or 1)]


def code_of_many(symbols):
    """A prefix code of so many symbols, which have 11 and 12 bits: the second level of its table is large."""
    long = 2 * symbols - 4_096 if symbols > 2_048 else 0
    assert (symbols - long) * 2 + long == 4_096, "the code is complete"
    # The lengths are coded themselves: `repeat` has one bit, 11 and 12 have two. Codes have their highest bit first.
    order = [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 12]
    lengths = {16: 1, 11: 2, 12: 2}
    code = [(0, 1), (len(order) - 4, 4), *((lengths.get(symbol, 0), 3) for symbol in order), (0, 1)]
    coded = {16: (0b0, 1), 11: (0b01, 2), 12: (0b11, 2)}
    for length, count in ((11, symbols - long), (12, long)):
        code.append(coded[length])
        count -= 1
        while count:
            repeated = min(count, 6)
            if repeated < 3:
                code.append(coded[length])
                count -= 1
            else:
                code += [coded[16], (repeated - 3, 2)]
                count -= repeated
    return code


def webp_of_many_codes(groups=65_536):
    """A lossless WebP of 8 x 8 pixels and 10 MB: its only block of pixels uses the last of very many groups of prefix codes."""
    colours_kept = 11
    last = groups - 1
    image = Bits().add((0x2F, 8), (7, 14), (7, 14), (0, 1), (0, 3), (0, 1), (1, 1), (colours_kept, 4))
    # The groups of the blocks of 512 x 512 pixels: an image of one pixel.
    image.add((1, 1), (7, 3), (0, 1), *code_of_one(last & 0xFF, 8), *code_of_one(last >> 8, 8), *code_of_one(0) * 3)
    group = Bits().add(*code_of_many(256 + 24 + (1 << colours_kept)), *code_of_one(0) * 4)
    eight = Bits().add(*[(group.value, group.length)] * 8)
    codes = eight.value.to_bytes(group.length, "little") * (groups // 8)
    image.value |= int.from_bytes(codes, "little") << image.length
    image.length += len(codes) * 8
    data = image.value.to_bytes(image.length // 8 + 1 + 64 * 12 // 8, "little")
    data += b"\0" * (len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(data) + 12) + b"WEBPVP8L" + struct.pack("<I", len(data)) + data
