"""What pictures still say about people when they leave the gateway, shown or not, and what their uploaders are told."""
import io
import struct

import pytest
from PIL import Image

from files import Bucket, BucketUploader, Uploader, picture
from test_files import closed, two

pytestmark = pytest.mark.embedded

SECRET = b"SECRETPLACE"


@pytest.fixture(params=["directory", "bucket"])
def place(request):
    """Where the files are: the settings of a gateway, and the kind of uploader."""
    if request.param == "directory":
        yield {}, Uploader
        return
    bucket = Bucket().start()
    yield bucket.settings(), BucketUploader
    bucket.kill()


def exif():
    """What a phone says: a place, a camera, and that the picture is turned."""
    made = Image.Exif()
    made[0x010F], made[0x0110], made[0x0112] = "SECRETPLACE maker", "SECRETPLACE model", 6
    made[0x8825] = {1: "N", 2: (48.0, 1.0, 2.0), 3: "E", 4: (11.0, 3.0, 4.0), 29: "SECRETPLACE"}
    return made


def with_secrets(format="JPEG", width=800, height=600):
    options = {"comment": SECRET} if format in ("JPEG", "GIF") else {}
    if format == "TIFF":
        options["description"] = SECRET.decode()
    elif format != "GIF":
        options["exif"] = exif()
    data = picture(width, height, format, **options)
    assert SECRET in data
    return data


def undecodable(data):
    """A JPEG that is in order, but for a precision of 13 bits, which no decoder knows."""
    frame = next(data.index(marker) for marker in (b"\xff\xc0", b"\xff\xc2") if marker in data)
    return data[:frame + 4] + b"\x0d" + data[frame + 5:]


def without_pixels(data):
    """A PNG in order, whose pixels are not compressed as they should be."""
    pixels = data.index(b"IDAT") + 4
    return data[:pixels] + b"\0\0" + data[pixels + 2:]


async def uploaded(up, dm, data, name):
    """Uploads a file. Returns its id, and what its uploader is told of its metadata in the answer and afterwards."""
    file = (await up.begin(dm, len(data), name)).json()["id"]
    if isinstance(up, BucketUploader):
        for part in (await up.parts(file)).json()["parts"]:
            assert (await up.put(part, data)).status_code == 200
        done = (await up.complete(file)).json()
        state, told = done["state"], done.get("metadata")
    else:
        done = await up.append(file, 0, data)
        state, told = done.headers["file-state"], done.headers.get("file-metadata")
    assert state == "ready"
    assert (await up.head(file)).headers.get("file-metadata") == told
    return file, told


NOT_SHOWN = {
    "a phone's": lambda: with_secrets(width=8_064, height=6_048),
    "undecodable": lambda: undecodable(with_secrets()),
    "broken": lambda: without_pixels(with_secrets("PNG")),
}


@pytest.mark.parametrize("name", NOT_SHOWN)
async def test_a_picture_that_is_not_shown_loses_its_metadata(start, place, name):
    settings, kind = place
    gateway, alice, bob, dm = await two(start, **settings)
    up = kind(gateway, "alice")
    up.http.timeout = 300
    data = NOT_SHOWN[name]()
    file, told = await uploaded(up, dm, data, "picture")
    assert told is None
    found = await up.download(file)
    assert found.headers["content-type"] == "application/octet-stream"
    assert (await up.find(file, variant="thumbnail")).status_code == 404
    assert SECRET not in found.content and len(found.content) < len(data)
    if name != "undecodable":
        after = Image.open(io.BytesIO(found.content)).getexif()
        assert not after.get_ifd(0x8825) and after.get(0x0112) == 6
    event = await alice.event("attachment", lambda event: event["file"] == file)
    assert event == {"type": "attachment", "file": file, "state": "ready", "mime": "application/octet-stream"}
    await closed(alice, bob)


async def test_pictures_lose_their_metadata_if_none_is_shown(start, place):
    settings, kind = place
    gateway, alice, bob, dm = await two(start, **settings, attachments__image_threads=0)
    up = kind(gateway, "alice")
    for format in ("JPEG", "PNG", "GIF", "WEBP"):
        file, told = await uploaded(up, dm, with_secrets(format), f"a.{format}")
        found = await up.download(file)
        assert (told, found.headers["content-type"]) == (None, "application/octet-stream")
        assert SECRET not in found.content
        assert Image.open(io.BytesIO(found.content)).size == (800, 600)
    await closed(alice, bob)


def box(kind, data):
    return struct.pack(">I", len(data) + 8) + kind + data


KEPT = {
    "image/tiff": lambda: with_secrets("TIFF"),
    "image/heif": lambda: box(b"ftyp", b"heic\0\0\0\0mif1heic") + box(b"meta", SECRET * 40),
    "image/avif": lambda: box(b"ftyp", b"avif\0\0\0\0mif1avif") + box(b"meta", SECRET * 40),
    "video/mp4": lambda: box(b"ftyp", b"isom\0\0\0\0isommp42") + box(b"moov", SECRET * 40),
    "video/quicktime": lambda: box(b"ftyp", b"qt  \0\0\0\0qt  ") + box(b"moov", SECRET * 40),
    # Malformed, and too large to be looked at.
    "a torn PNG": lambda: with_secrets("PNG")[:-500],
    "a large JPEG": lambda: with_secrets() + bytes(33 << 20),
}


async def test_the_uploader_is_told_of_metadata_that_stays(start, place):
    settings, kind = place
    gateway, alice, bob, dm = await two(start, **settings)
    up = kind(gateway, "alice")
    for name, make in KEPT.items():
        data = make()
        file, told = await uploaded(up, dm, data, "file")
        assert told == "kept", name
        event = await alice.event("attachment", lambda event: event["file"] == file)
        mime = name if "/" in name else "application/octet-stream"
        assert event == {"type": "attachment", "file": file, "state": "ready", "mime": mime, "metadata": "kept"}
        assert (await up.download(file)).content == data
    # The event says nothing of pictures without metadata, nor of other files.
    for data in (with_secrets(), b"a text", b"%PDF-1.7\n" + SECRET):
        file, told = await uploaded(up, dm, data, "file")
        assert told is None
        assert "metadata" not in await alice.event("attachment", lambda event: event["file"] == file)
    await closed(alice, bob)
