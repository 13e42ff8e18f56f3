#!/usr/bin/env python3
"""Writes small pictures of every format to fuzz/corpus/pixels, for the fuzz target `pixels` to begin with."""
import io
import pathlib
import random
import struct
import sys
import zlib

from PIL import Image, ImageCms

ROOT = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT.parent / "tests/blackbox"))
import bombs  # noqa: E402

CORPUS = ROOT / "corpus/pixels"
SIZES = [(1, 1), (8, 8), (17, 13), (64, 33)]
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
EXIF = Image.Exif()
EXIF[0x0112] = 6  # the orientation


def put(name, data):
    (CORPUS / name).write_bytes(data)


def noise(size, mode):
    """A picture whose pixels differ."""
    width, height = size
    chance = random.Random(width * height)
    channels = len(Image.new(mode, (1, 1)).tobytes())
    pixels = ((x * y * 7 + chance.randrange(9)) % 256 for y in range(height) for x in range(width) for _ in range(channels))
    return Image.frombytes(mode, size, bytes(pixels))


def save(name, image, format, **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    put(f"{name}-{image.width}x{image.height}", out.getvalue())


def jpegs(size):
    for mode in ("RGB", "L", "CMYK"):
        for progressive in (False, True):
            save(f"jpeg-{mode}-{progressive}", noise(size, mode), "JPEG", quality=60, progressive=progressive)
    save("jpeg-sampled", noise(size, "RGB"), "JPEG", subsampling=2)
    save("jpeg-profile", noise(size, "RGB"), "JPEG", exif=EXIF, icc_profile=PROFILE)
    save("jpeg-restarts", noise(size, "RGB"), "JPEG", restart_marker_blocks=1)


def pngs(size):
    for mode in ("RGB", "RGBA", "L", "LA"):
        save(f"png-{mode}", noise(size, mode), "PNG")
    save("png-bit", noise(size, "RGB").convert("1"), "PNG")
    save("png-16", Image.frombytes("I;16", size, noise(size, "LA").tobytes()), "PNG")
    save("png-palette", noise(size, "RGB").quantize(8), "PNG", bits=4, transparency=2)
    save("png-profile", noise(size, "RGB"), "PNG", exif=EXIF, icc_profile=PROFILE)
    moving = noise(size, "RGBA")
    save("png-moving", moving, "PNG", save_all=True, append_images=[moving.transpose(Image.Transpose.ROTATE_180)])


def gifs(size):
    still = noise(size, "RGB").quantize(16)
    save("gif", still, "GIF")
    save("gif-interlaced", still, "GIF", transparency=3, interlace=1)
    save("gif-moving", still, "GIF", save_all=True, append_images=[still.rotate(180)], loop=0, duration=10)


def webps(size):
    for mode in ("RGB", "RGBA"):
        save(f"webp-{mode}", noise(size, mode), "WEBP", quality=50)
        save(f"webp-lossless-{mode}", noise(size, mode), "WEBP", lossless=True, exact=True)
    save("webp-palette", noise(size, "RGB").quantize(16).convert("RGB"), "WEBP", lossless=True)
    save("webp-profile", noise(size, "RGBA"), "WEBP", exif=EXIF, icc_profile=PROFILE, xmp=b"<x/>")
    moving = noise(size, "RGBA")
    save("webp-moving", moving, "WEBP", save_all=True, append_images=[moving.transpose(Image.Transpose.ROTATE_180)])


def interlaced_png(side=16):
    """A PNG in the seven passes of Adam7, which Pillow does not write."""
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    lines = []
    for left, top, across, down in passes:
        width, height = -(-(side - left) // across), -(-(side - top) // down)
        lines += [bytes([y % 5]) + bytes(range(width * 3)) for y in range(height)]
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 1)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"".join(lines))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(bombs.png_chunk(*part) for part in parts)


CORPUS.mkdir(parents=True, exist_ok=True)
for size in SIZES:
    for write in (jpegs, pngs, gifs, webps):
        write(size)
put("png-interlaced", interlaced_png())
put("png-bomb", bombs.png_with_profile(1 << 20))
put("png-wide", bombs.png(4096, 4, 8, 2, 3))
put("webp-bomb", bombs.webp_of_many_codes(8))
print(f"{len(list(CORPUS.iterdir()))} pictures in {CORPUS}")
