"""Uploaded files: uploads by tus, files in messages, downloads, and how they go."""
import asyncio
import io
import json
import socket

import pytest
from PIL import Image
from tusclient.client import TusClient

from changes import delete, edit, entry
from files import TUS, Clamd, Uploader, bytes_with, metadata, names_in, picture, sha256
from support import UNLIMITED, Refused, eventually, uuid4
from test_messages import refused


async def two(start, **settings):
    gateway = start(**UNLIMITED, **settings)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    dm = await alice.create("dm", "bob")
    return gateway, alice, bob, dm


async def closed(*clients):
    for client in clients:
        await client.close()


async def gone(gateway, *files):
    """Waits until nothing is left of some files."""

    async def are_gone():
        return not any(file in name for name in names_in(gateway) for file in files)

    await eventually(are_gone)


async def erased(gateway, count):
    """Waits until so many files are erased. That is recorded after their bytes are gone."""

    async def are_erased():
        return gateway.metrics().get("chat_files_erased_total") == count

    await eventually(are_erased)


async def test_a_picture_is_uploaded_sent_and_seen_by_its_readers_only(start):
    gateway, alice, bob, dm = await two(start)
    up, down, mallory = (Uploader(gateway, name) for name in ("alice", "bob", "mallory"))
    data = picture()
    file = await up.upload(dm, data, "../a\u202ecat.png", alt="a cat")
    # Before a message has it, only its uploader may see it.
    assert (await down.find(file)).status_code == 404
    assert sha256((await up.download(file)).content) == sha256(data)
    sent = await alice.send(dm, "", attachments=[{"id": file}])
    message = await bob.message(dm)
    wanted = {"id": file, "name": "acat.png", "mime": "image/png", "size": len(data), "alt": "a cat", "width": 800, "height": 600}
    assert message["attachments"] == [wanted]
    assert (await entry(bob, dm, sent["seq"]))["attachments"] == [wanted]
    assert (await bob.inbox(dm))["last_message"]["preview"] == "acat.png"
    found = await down.download(file)
    assert found.content == data and found.headers["content-type"] == "image/png"
    assert found.headers["etag"] == f'"o{sha256(data)}"'
    thumbnail = await down.download(file, variant="thumbnail")
    assert Image.open(io.BytesIO(thumbnail.content)).size == (640, 480)
    urls = (await bob.ask("attachment_urls", ids=[file, uuid4()]))["items"]
    assert [item["id"] for item in urls] == [file] and {"url", "thumb", "expires_at"} <= urls[0].keys()
    assert (await down.http.get(urls[0]["thumb"])).content == thumbnail.content
    # Others learn nothing, with or without a message.
    stranger = await gateway.connect("mallory")
    assert (await mallory.find(file)).status_code == 404
    assert (await stranger.ask("attachment_urls", ids=[file]))["items"] == []
    with pytest.raises(Refused):
        await stranger.send(dm, "", attachments=[{"id": file}])
    group = await alice.create("group", "mallory")
    await refused(stranger.send(group, "", attachments=[{"id": file}]), "bad_request")
    # The file belongs to that conversation, and to its uploader.
    await refused(alice.send(group, "", attachments=[{"id": file}]), "bad_request")
    await refused(bob.send(dm, "", attachments=[{"id": file}]), "bad_request")
    changed = urls[0]["url"].replace("s=", "s=0")
    assert (await down.http.get(changed)).status_code == 403
    assert (await down.http.get(urls[0]["url"].replace("original", "thumbnail"))).status_code == 403
    await closed(alice, bob, stranger)


async def test_all_sessions_of_an_uploader_are_told_when_a_file_was_looked_at(start, codec):
    gateway = start(**UNLIMITED)
    here, there, bob = [await gateway.connect(name, codec) for name in ("alice", "alice", "bob")]
    dm = await here.create("dm", "bob")
    up = Uploader(gateway, "alice")
    image, other = await up.upload(dm, picture()), await up.upload(dm, b"some bytes", "data.bin")
    for session in (here, there):
        shown = {"file": image, "state": "ready", "mime": "image/png", "width": 800, "height": 600}
        assert await session.event("attachment") == {"type": "attachment", **shown}
        plain = {"file": other, "state": "ready", "mime": "application/octet-stream"}
        assert await session.event("attachment") == {"type": "attachment", **plain}
    assert not [event for event in await bob.quiet() if event["type"] == "attachment"]
    await closed(here, there, bob)


async def test_uploads_continue_where_they_broke_off(start, tmp_path):
    gateway, alice, bob, dm = await two(start)
    up = Uploader(gateway, "alice")
    data = bytes(range(256)) * 4_096
    file = (await up.begin(dm, len(data), "data.bin")).json()["id"]
    assert (await up.append(file, 0, data[:300_000])).headers["upload-offset"] == "300000"
    # A connection that breaks in the middle of a part.
    host, port = gateway.client.split(":")
    with socket.create_connection((host, int(port))) as broken:
        head = f"PATCH /v1/attachments/{file}/upload HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {up.token}\r\n"
        head += "tus-resumable: 1.0.0\r\nupload-offset: 300000\r\ncontent-type: application/offset+octet-stream\r\n"
        broken.sendall((head + f"content-length: {len(data) - 300_000}\r\n\r\n").encode() + data[300_000:400_000])

        async def arrived():
            return (await up.head(file)).headers["upload-offset"] == "400000"

        await eventually(arrived)
        # Someone else cannot write meanwhile.
        assert (await up.append(file, 400_000, b"x")).status_code == 423

    async def free():
        answer = await up.append(file, 400_000, data[400_000:500_000])
        assert answer.status_code in (204, 423), answer.text
        return answer.status_code == 204

    await eventually(free)
    assert (await up.append(file, 400_000, b"x")).status_code == 409, "a wrong offset"
    gateway.kill()
    gateway.start()
    up = Uploader(gateway, "alice")
    offset = int((await up.head(file)).headers["upload-offset"])
    assert offset == 500_000
    done = await up.append(file, offset, data[offset:])
    assert (done.headers["upload-offset"], done.headers["file-state"]) == (str(len(data)), "ready")
    assert (await up.append(file, len(data), b"x")).status_code == 409
    assert (await up.download(file)).content == data
    # An independent client does the same.
    path = tmp_path / "other.bin"
    path.write_bytes(data)
    client = TusClient(f"http://{gateway.client}/v1/attachments", headers=up.headers())
    uploader = client.uploader(str(path), chunk_size=300_000, metadata={"conversation": dm, "filename": "other.bin"})
    await asyncio.to_thread(uploader.upload)
    other = uploader.url.split("/")[-2]
    assert (await up.download(other)).content == data
    await closed(alice, bob)


async def test_a_file_goes_when_its_message_goes(start):
    gateway, alice, bob, dm = await two(start)
    up = Uploader(gateway, "alice")
    marker = b"the marker of this file"
    one, two_, three, four = [await up.upload(dm, marker + bytes([n]), f"{n}.bin") for n in range(4)]
    both = await alice.send(dm, "two files", attachments=[{"id": one}, {"id": two_}])
    again = await alice.send(dm, "one of them again", attachments=[{"id": two_}])
    edited = await alice.send(dm, "to be edited", attachments=[{"id": three}, {"id": four}])
    urls = {item["id"]: item["url"] for item in (await bob.ask("attachment_urls", ids=[one, two_, three]))["items"]}
    assert len(urls) == 3
    await delete(alice, dm, both["seq"])
    assert "attachments" not in await entry(bob, dm, both["seq"])
    await gone(gateway, one)
    assert (await up.http.get(urls[one])).status_code == 404
    assert (await up.http.get(urls[two_])).status_code == 200, "another message has it"
    await refused(alice.send(dm, "again", attachments=[{"id": one}]), "conflict")
    # An edit keeps files or drops them; it adds none.
    await refused(edit(alice, dm, edited["seq"], "edited", attachments=[{"id": two_}]), "bad_request")
    await edit(alice, dm, edited["seq"], "edited", attachments=[{"id": four, "alt": "the fourth"}])
    shown = (await entry(bob, dm, edited["seq"]))["attachments"]
    assert [(a["id"], a["alt"]) for a in shown] == [(four, "the fourth")]
    await gone(gateway, three)
    await delete(alice, dm, again["seq"], edited["seq"])
    await gone(gateway, two_, four)
    assert bytes_with(gateway, marker) == []
    # An upload that is given up goes too.
    five = await up.upload(dm, marker, "5.bin")
    assert (await up.delete(five)).status_code == 204
    await gone(gateway, five)
    assert names_in(gateway) == []
    await erased(gateway, 5)
    await closed(alice, bob)


async def test_files_survive_kills_and_deletions_are_finished_after_them(start):
    gateway, alice, bob, dm = await two(start)
    up = Uploader(gateway, "alice")
    data = picture()
    kept, dropped = await up.upload(dm, data), await up.upload(dm, data)
    seqs = [(await alice.send(dm, "", attachments=[{"id": file}]))["seq"] for file in (kept, dropped)]
    half = (await up.begin(dm, 100)).json()["id"]
    await delete(alice, dm, seqs[1])
    gateway.kill()
    gateway.start()
    up, down = Uploader(gateway, "alice"), Uploader(gateway, "bob")
    alice = await gateway.connect("alice")
    assert (await down.download(kept)).content == data
    assert (await down.find(dropped)).status_code == 404
    assert (await up.head(half)).headers["upload-offset"] == "0"
    await refused(alice.send(dm, "", attachments=[{"id": half}]), "conflict")
    # A message that was sent before the kill keeps its file when the kill's repair is over.
    assert (await alice.send(dm, "", attachments=[{"id": kept}]))["seq"] == seqs[1] + 1
    await closed(alice)


@pytest.mark.embedded
async def test_limits_and_wrong_requests(start):
    gateway, alice, bob, dm = await two(
        start, attachments__size_max_mib=1, attachments__user_mib_per_day=2, attachments__uploads_per_minute=12)
    up = Uploader(gateway, "alice")

    async def status(answer, code):
        answer = await answer
        return answer.status_code, answer.json()["code"]

    assert await status(up.begin(dm, (1 << 20) + 1), 413) == (413, "too_large")
    assert await status(up.begin(uuid4(), 1), 404) == (404, "not_found")
    assert await status(up.begin(dm, 1, "n" * 3_000), 413) == (413, "too_large")
    assert await status(up.http.post("/v1/attachments", json={}), 401) == (401, "unauthorized")
    mallory = Uploader(gateway, "mallory")
    assert (await mallory.begin(dm, 1)).status_code in (403, 404)
    file = (await up.begin(dm, 10)).json()["id"]
    assert await status(up.append(file, 0, b"x" * 11), 413) == (413, "too_large")
    assert (await mallory.head(file)).status_code == 404
    assert (await mallory.append(file, 0, b"x")).status_code == 404
    assert (await mallory.delete(file)).status_code == 404
    plain = up.headers(**{"upload-offset": "0", "content-type": "application/offset+octet-stream"})
    assert (await up.http.patch(f"/v1/attachments/{file}/upload", content=b"x", headers=plain)).status_code == 412
    other = up.headers(**{"tus-resumable": "0.2.2", "upload-length": "1", "upload-metadata": metadata(conversation=dm, filename="x")})
    answer = await up.http.post("/v1/attachments", headers=other)
    assert (answer.status_code, answer.headers["tus-version"]) == (412, "1.0.0")
    wrong = up.headers(**TUS, **{"upload-offset": "0", "content-type": "text/plain"})
    assert (await up.http.patch(f"/v1/attachments/{file}/upload", content=b"x", headers=wrong)).status_code == 415
    options = await up.http.options("/v1/attachments")
    assert (options.status_code, options.headers["tus-max-size"]) == (204, str(1 << 20))
    for sent in ("conversation !", metadata(filename="x"), metadata(conversation="x", filename="x")):
        headers = up.headers(**TUS, **{"upload-length": "1", "upload-metadata": sent})
        assert (await up.http.post("/v1/attachments", headers=headers)).status_code == 400, sent
    # What may be uploaded in a day.
    assert (await up.begin(dm, 1 << 20)).status_code == 201
    assert await status(up.begin(dm, 1 << 20), 413) == (413, "too_large")
    for _ in range(20):
        answer = await up.begin(dm, 1)
        if answer.status_code != 201:
            break
    assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
    await refused(alice.send(dm, "", attachments=[{"id": file, "url": "https://example.org"}]), "bad_request")
    await refused(alice.send(dm, "", attachments=[{"name": "nothing"}]), "bad_request")
    with pytest.raises(Refused):
        await alice.ask("attachment_urls", ids=[file] * 51)
    await closed(alice, bob)


HOSTILE = {
    "page.html": b"<html><script>alert(1)</script></html>",
    "picture.svg": b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>',
    "picture.png": b"\x89PNG\r\n\x1a\n<script>alert(1)</script>",
    "cat.gif": b"GIF89a=1;alert(1)//" + b"\0" * 100,
    "paper.pdf": b"%PDF-1.7\n" + b"x" * 100,
    "archive.zip": b"PK\x03\x04" + b"\0" * 100,
    "bomb.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\xff\xff\xff\0\xff\xff\xff\x08\x06\0\0\0" + b"\0" * 100,
    "empty.jpg": b"\xff\xd8\xff",
}


@pytest.mark.embedded
async def test_nothing_hostile_is_shown(start):
    gateway, alice, bob, dm = await two(start)
    up = Uploader(gateway, "alice")
    for name, data in HOSTILE.items():
        file = await up.upload(dm, data, name)
        await alice.send(dm, "", attachments=[{"id": file}])
        found = await up.download(file)
        assert found.content == data
        headers = found.headers
        assert headers["content-type"] == "application/octet-stream", name
        assert headers["content-disposition"].startswith(f"attachment; filename=\"{name}\"; filename*=UTF-8''")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"] == "sandbox; default-src 'none'"
        assert (await up.find(file, variant="thumbnail")).status_code == 404
    await closed(alice, bob)


@pytest.mark.embedded
async def test_pictures_lose_what_they_say_about_people(start):
    gateway, alice, bob, dm = await two(start)
    up = Uploader(gateway, "alice")
    exif = Image.Exif()
    exif[0x010E], exif[0x0112], exif[0x8825] = "SECRETPLACE", 6, {1: "N", 2: (48.0, 1.0, 2.0)}
    for format, options in (("JPEG", {"exif": exif, "comment": b"SECRETPLACE"}), ("PNG", {"exif": exif}), ("WEBP", {"exif": exif})):
        data = picture(format=format, **options)
        assert b"SECRETPLACE" in data
        file = await up.upload(dm, data + b"SECRETPLACE after the end" * (format != "WEBP"), f"a.{format.lower()}")
        found = (await up.download(file)).content
        assert b"SECRETPLACE" not in found and len(found) < len(data)
        after = Image.open(io.BytesIO(found))
        assert after.getexif().get(0x0112) == 6 and not after.getexif().get_ifd(0x8825)
        assert after.convert("RGB").tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()
        sent = await alice.send(dm, "", attachments=[{"id": file}])
        shown = (await entry(bob, dm, sent["seq"]))["attachments"][0]
        assert (shown["width"], shown["height"]) == (600, 800), "as it is shown, turned"
    await closed(alice, bob)


@pytest.mark.embedded
async def test_ranges_and_caching(start):
    gateway, alice, bob, dm = await two(start)
    up = Uploader(gateway, "alice")
    data = bytes(range(256)) * 1_000
    file = await up.upload(dm, data, "data.bin")
    url = (await up.find(file)).headers["location"]

    async def part(range, **headers):
        answer = await up.http.get(url, headers={"range": range, **headers})
        return answer.status_code, answer.headers.get("content-range"), answer.content

    assert await part("bytes=0-9") == (206, f"bytes 0-9/{len(data)}", data[:10])
    assert await part("bytes=200000-") == (206, f"bytes 200000-{len(data) - 1}/{len(data)}", data[200_000:])
    assert await part("bytes=-5") == (206, f"bytes {len(data) - 5}-{len(data) - 1}/{len(data)}", data[-5:])
    status, told, _ = await part(f"bytes={len(data)}-")
    assert (status, told) == (416, f"bytes */{len(data)}")
    assert await part("bytes=0-9", **{"if-range": '"other"'}) == (200, None, data)
    etag = (await up.http.get(url)).headers["etag"]
    assert (await part("bytes=0-9", **{"if-range": etag}))[0] == 206
    assert (await part("bytes=0-9", **{"if-range": f"W/{etag}"}))[0] == 200, "a weak tag does not say that the bytes are the same"
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        for headers in ({}, {"range": "bytes=0-9"}, {"range": "bytes=0-9", "if-range": etag}):
            answer = await up.http.get(url, headers={"if-none-match": known, **headers})
            assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag), (known, headers)
            assert answer.headers["cache-control"] == "private, max-age=300, immutable" and "content-type" not in answer.headers
    assert (await up.http.get(url, headers={"if-none-match": '"other"'})).content == data
    assert (await part("bytes=0-9", **{"if-none-match": '"other"'}))[0] == 206
    # Not without a valid address.
    assert (await up.http.get(url.replace("e=", "e=1"), headers={"if-none-match": "*"})).status_code == 403
    assert (await up.find(file)).headers["location"] == url, "the address stays the same for some minutes"
    await closed(alice, bob)


@pytest.mark.embedded
async def test_names_are_kept_as_far_as_they_can_be(start):
    gateway, alice, bob, dm = await two(start)
    up = Uploader(gateway, "alice")
    for given, name in (("n" * 276 + ".pdf", "n" * 251 + ".pdf"), ("é" * 138 + ".pdf", "é" * 125 + ".pdf"), ("n" * 300, "n" * 255)):
        file = await up.upload(dm, b"some bytes", given)
        sent = await alice.send(dm, "", attachments=[{"id": file}])
        assert (await entry(bob, dm, sent["seq"]))["attachments"][0]["name"] == name
        told = (await up.download(file)).headers["content-disposition"]
        assert told.startswith('attachment; filename="' + name.replace("é", "_") + '"; filename*=UTF-8\'\'')
        assert told.endswith(".pdf".replace(".", "%2E") if name.endswith(".pdf") else "n")
    await closed(alice, bob)


@pytest.mark.embedded
async def test_a_file_without_bytes_is_ready_at_once(start):
    gateway, alice, bob, dm = await two(start)
    up = Uploader(gateway, "alice")
    begun = await up.begin(dm, 0, "empty.txt")
    assert (begun.status_code, begun.headers["file-state"]) == (201, "ready")
    file = begun.json()["id"]
    assert (await alice.event("attachment"))["state"] == "ready"
    await alice.send(dm, "", attachments=[{"id": file}])
    [shown] = (await bob.message(dm))["attachments"]
    assert (shown["name"], shown["size"]) == ("empty.txt", 0)
    found = await Uploader(gateway, "bob").download(file)
    assert (found.status_code, found.content) == (200, b"")
    url = (await up.find(file)).headers["location"]
    assert (await up.http.get(url, headers={"range": "bytes=0-"})).status_code == 416
    await closed(alice, bob)


@pytest.mark.embedded
async def test_a_removed_uploader_gets_no_more_addresses(start):
    gateway = start(**UNLIMITED)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    group = await alice.create("group", "bob", name="G")
    up = Uploader(gateway, "bob")
    sent, unsent = await up.upload(group, b"sent", "a.txt"), await up.upload(group, b"not sent", "b.txt")
    await bob.send(group, "", attachments=[{"id": sent}])
    assert (await up.download(sent)).content == b"sent"
    await alice.ask("remove", conversation=group, user="bob")
    assert (await up.find(sent)).status_code == 404
    urls = (await bob.ask("attachment_urls", ids=[sent, unsent]))["items"]
    assert [item["id"] for item in urls] == [unsent], "what nobody else has stays the uploader's"
    assert (await Uploader(gateway, "alice").download(sent)).content == b"sent"
    await closed(alice, bob)


@pytest.mark.embedded
async def test_pictures_are_downloads_if_none_is_looked_at(start):
    gateway, alice, bob, dm = await two(start, attachments__image_threads=0)
    up = Uploader(gateway, "alice")
    file = await up.upload(dm, picture(format="JPEG"))
    found = await up.download(file)
    assert found.headers["content-type"] == "application/octet-stream"
    assert (await up.find(file, variant="thumbnail")).status_code == 404
    await closed(alice, bob)


@pytest.mark.embedded
async def test_a_complete_upload_that_nobody_looked_at_becomes_ready(start):
    """The connection broke off just before the end of its last part: the client sees the whole length."""
    gateway, alice, bob, dm = await two(start)
    up = Uploader(gateway, "alice")
    file = (await up.begin(dm, 10, "data.bin")).json()["id"]
    assert (await up.append(file, 0, b"01234")).status_code == 204
    gateway.kill()
    with open(f"{gateway.directory}/attachments/incoming/{file}", "ab") as rest:
        rest.write(b"56789")
    gateway.start()
    up = Uploader(gateway, "alice")

    async def ready():
        head = await up.head(file)
        assert head.headers["upload-offset"] == "10"
        return head.headers["file-state"] == "ready"

    await eventually(ready)
    assert (await up.download(file)).content == b"0123456789"
    await closed(alice, bob)


@pytest.mark.embedded
async def test_a_full_disk_refuses_uploads_and_not_messages(start):
    gateway, alice, bob, dm = await two(start, attachments__min_free_mib=1 << 30)
    up = Uploader(gateway, "alice")
    answer = await up.begin(dm, 10)
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    assert (await alice.send(dm, "still"))["seq"] == 1
    await closed(alice, bob)


@pytest.fixture
def clamd():
    scanner = Clamd()
    yield scanner
    scanner.stop()


async def uploaded(up, dm, data, name="data.bin"):
    """Uploads a file. Returns its id and the state that the last part is answered with."""
    file = (await up.begin(dm, len(data), name)).json()["id"]
    done = await up.append(file, 0, data)
    assert done.status_code == 204, done.text
    return file, done.headers["file-state"]


@pytest.mark.embedded
async def test_a_scanner_blocks_what_it_finds(start, clamd):
    clamd.start()
    gateway, alice, bob, dm = await two(start, attachments__scanner=clamd.address)
    up = Uploader(gateway, "alice")
    harmless, state = await uploaded(up, dm, picture(), "cat.png")
    assert state == "ready"
    await alice.send(dm, "", attachments=[{"id": harmless}])
    # Found in the middle of a file, and in a file that clamd does not take.
    for data in [b"x" * 70_000 + clamd.MARKER + b"x" * 70_000, b"x" * (2 << 20)]:
        file, state = await uploaded(up, dm, data)
        assert state == "blocked"
        told = await alice.event("attachment", lambda event: event["file"] == file)
        assert told == {"type": "attachment", "file": file, "state": "blocked"}
        assert not any(file in name for name in names_in(gateway)), "its bytes go at once"
        assert (await up.head(file)).headers["file-state"] == "blocked"
        assert (await up.find(file)).status_code == 404
        await refused(alice.send(dm, "", attachments=[{"id": file}]), "conflict")
    assert gateway.metrics()["chat_files_blocked_total"] == 2
    await closed(alice, bob)


@pytest.mark.embedded
async def test_nothing_is_served_unscanned(start, clamd):
    gateway, alice, bob, dm = await two(start, attachments__scanner=clamd.address)
    up = Uploader(gateway, "alice")
    file, state = await uploaded(up, dm, picture(), "cat.png")
    assert state == "scanning"
    await refused(alice.send(dm, "", attachments=[{"id": file}]), "conflict")
    assert (await up.find(file)).status_code == 404
    # The gateway has it scanned when the scanner is back, and says so.
    clamd.start()
    assert (await alice.event("attachment"))["state"] == "ready"
    await alice.send(dm, "", attachments=[{"id": file}])
    clamd.stop()
    file, state = await uploaded(up, dm, picture(), "cat.png")
    assert state == "scanning"
    # Messages continue, also after a restart, and whoever asks has the file scanned again.
    gateway.kill()
    gateway.start()
    await alice.close()
    alice = await gateway.connect("alice")
    await alice.send(dm, "hello")
    up = Uploader(gateway, "alice")
    assert (await up.head(file)).headers["file-state"] == "scanning"
    clamd.start()

    async def is_ready():
        return (await up.head(file)).headers["file-state"] == "ready"

    await eventually(is_ready)
    await alice.send(dm, "", attachments=[{"id": file}])
    await closed(alice, bob)


async def test_import_keeps_files_of_this_machine(start, tmp_path):
    gateway = start(**UNLIMITED)
    gateway.stop()
    data = picture()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_bytes(data)
    (tmp_path / "notes.html").write_bytes(b"<script>alert(1)</script>")
    (tmp_path / "gone.png").write_bytes(data)
    files = [{"path": "pictures/cat.png", "alt": "a cat"}, {"path": "notes.html", "name": "../notes.html"}]
    lines = [
        {"type": "conversation", "kind": "dm", "participants": ["alice", "bob"]},
        {"type": "message", "dm": ["alice", "bob"], "sender": "alice", "body": "look", "files": files},
        {"type": "message", "dm": ["alice", "bob"], "sender": "alice", "body": "", "files": [{"path": "gone.png"}], "deleted": True},
    ]
    file = tmp_path / "export.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert gateway.command("import", str(file)).stdout.endswith("0 messages were there already, 2 files kept\n")
    assert gateway.command("import", str(file)).stdout.endswith("2 messages were there already\n")
    file.write_text(file.read_text() + json.dumps({**lines[1], "body": "again", "files": [{"path": "missing"}]}) + "\n")
    wrong = gateway.command("import", str(file), check=False)
    assert wrong.returncode != 0 and ":4" in wrong.stderr and "missing" in wrong.stderr
    gateway.start()
    bob = await gateway.connect("bob")
    [message] = [entry for entry in await bob.everything(await bob.create("dm", "alice")) if entry.get("body") == "look"]
    shown = [(of["name"], of["size"], of.get("alt"), of.get("width")) for of in message["attachments"]]
    assert shown == [("cat.png", len(data), "a cat", 800), ("notes.html", 25, None, None)]
    down = Uploader(gateway, "bob")
    assert (await down.download(message["attachments"][0]["id"])).content == data
    assert len([name for name in names_in(gateway) if name.endswith("original")]) == 2
    await closed(bob)
