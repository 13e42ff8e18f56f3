"""Settings of uploads, pictures and addresses, and what is refused beyond them."""
import asyncio
import io
import time

import pytest
from PIL import Image

from clock import Clock
from files import Uploader, picture
from support import PATIENCE, eventually
from test_files import closed, two
from test_uploads import MANY, Patch, begun

pytestmark = pytest.mark.embedded


@pytest.mark.parametrize("settings, places", [({}, 4), ({"attachments__uploads_at_once": 2}, 2)])
async def test_a_user_writes_to_some_uploads_at_once(start, settings, places):
    gateway, alice, bob, dm = await two(start, limits__connections_per_address=1_000, **settings)
    hers, his = Uploader(gateway, "alice"), Uploader(gateway, "bob")
    files = await begun(hers, dm, 4, places + 1)
    writing = [await Patch(hers, file, 4).open(b"fo") for file in files[:places]]

    async def are_open():
        return (await asyncio.to_thread(gateway.metrics)).get("chat_uploads") == places

    await eventually(are_open)
    refused = await hers.append(files[places], 0, b"four")
    assert refused.status_code == 429 and refused.json()["code"] == "rate_limited"
    await his.upload(dm, b"another user has places too", "data.bin")
    # An upload that ends gives its place back, and the refused one has lost nothing.
    writing[0].writer.write(b"ur")
    assert (await writing[0].end())[0] == 204
    done = await hers.append(files[places], 0, b"four")
    assert (done.status_code, done.headers["file-state"]) == (204, "ready")
    for patch in writing[1:]:
        patch.cut()
    await closed(alice, bob)


async def shown(client, dm, up, data):
    """Uploads and sends a picture. Returns what the message says of it, and the size of its thumbnail."""
    file = await up.upload(dm, data)
    sent = await client.send(dm, "", attachments=[{"id": file}])
    message = (await client.history(dm, after=sent["seq"] - 1, limit=1))["messages"][0]
    [item] = (await client.ask("attachment_urls", ids=[file]))["items"]
    size = Image.open(io.BytesIO((await up.http.get(item["thumb"])).content)).size if "thumb" in item else None
    return message["attachments"][0], size


async def test_a_picture_with_more_pixels_is_a_download(start):
    gateway, alice, bob, dm = await two(start, attachments__image_megapixels=1)
    up = Uploader(gateway, "alice")
    largest, thumbnail = await shown(alice, dm, up, picture(1_250, 800))
    assert (largest["mime"], largest["width"], largest["height"], thumbnail) == ("image/png", 1_250, 800, (640, 410))
    for data in (picture(1_250, 801), picture(1_250, 801, "JPEG")):
        larger, thumbnail = await shown(alice, dm, up, data)
        assert not {"width", "height"} & larger.keys() and thumbnail is None
        # Readers get it as it is, and no browser shows it.
        answer = await up.download(larger["id"])
        assert Image.open(io.BytesIO(answer.content)).size == (1_250, 801)
        assert answer.headers["content-disposition"].startswith("attachment")
    await closed(alice, bob)


@pytest.mark.parametrize("settings, side", [({}, 640), ({"attachments__thumb_px": 64}, 64)])
async def test_thumbnails_have_a_size(start, settings, side):
    gateway, alice, bob, dm = await two(start, **settings)
    up = Uploader(gateway, "alice")
    for width, height in ((2 * side, side), (side, 2 * side), (side, side), (side // 2, side // 4)):
        facts, thumbnail = await shown(alice, dm, up, picture(width, height))
        assert (facts["width"], facts["height"]) == (width, height)
        share = min(1, side / max(width, height))
        assert thumbnail == (width * share, height * share), "it is as long as it may be, and never enlarged"
    await closed(alice, bob)


@pytest.mark.parametrize("settings, window", [({}, 300), ({"attachments__url_window_s": 60}, 60)])
async def test_an_address_expires(start, tmp_path, settings, window):
    clock = Clock(tmp_path)
    gateway = start(prefix=clock.prefix, **MANY, **settings)
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    up = Uploader(gateway, "alice")
    file = await up.upload(dm, picture())

    async def addresses():
        [item] = (await alice.ask("attachment_urls", ids=[file]))["items"]
        expires_s, left = item["expires_at"] // 1_000, item["expires_at"] / 1_000 - (time.time() + clock.ahead)
        assert 0 < left <= 2 * window and expires_s % window == 0 and f"e={expires_s}" in item["url"]
        return item, left

    async def statuses(item):
        return {(await up.http.get(item[name])).status_code for name in ("url", "thumb")}

    first, left = await addresses()
    if left <= window + 20:  # The next window is about to begin.
        clock.forward(20)
        first, left = await addresses()
    assert left > window
    assert (await up.find(file)).headers["location"] == first["url"], "the address stays the same within a window"
    clock.forward(int(left) - window)
    clock.forward(window - 20)
    assert await statuses(first) == {200}, "an address is valid for at least one window"
    clock.forward(21)
    assert await statuses(first) == {403}
    refused = await up.http.get(first["url"], headers={"if-none-match": "*", "range": "bytes=0-9"})
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    # A later end does not fit the signature. Whoever may read the file gets another address.
    later, _ = await addresses()
    longer = {name: first[name].replace(f"e={first['expires_at'] // 1_000}", f"e={later['expires_at'] // 1_000}") for name in ("url", "thumb")}
    assert await statuses(longer) == {403} and await statuses(later) == {200}
    await alice.close()
