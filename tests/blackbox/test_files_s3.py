"""Uploaded files in a bucket: uploads in parts, downloads by presigned addresses, and how they go."""
import asyncio
import io
import json
import shutil
import urllib.request

import pytest
from PIL import Image

from changes import delete, entry
from files import TUS, Bucket, BucketUploader, Clamd, metadata, picture, sha256
from support import UNLIMITED, Three, clean, eventually, uuid4
from test_files import HOSTILE, closed, erased
from test_messages import refused

PART = 16 << 20


@pytest.fixture
def bucket():
    bucket = Bucket().start()
    yield bucket
    bucket.kill()
    shutil.rmtree(bucket.root)


async def two(start, bucket, **settings):
    gateway = start(**UNLIMITED, **bucket.settings(**settings))
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    dm = await alice.create("dm", "bob")
    # Over Cassandra files are not erased before the conversation has an entry.
    await alice.send(dm, "hello")
    return gateway, alice, bob, dm


async def emptied(bucket):
    """Waits until nothing is left in the storage."""

    async def is_empty():
        return bucket.objects() == bucket.parts() == bucket.uploads() == []

    await eventually(is_empty)


async def test_a_picture_is_uploaded_sent_and_seen_by_its_readers_only(start, bucket):
    gateway, alice, bob, dm = await two(start, bucket)
    up, down, mallory = (BucketUploader(gateway, name) for name in ("alice", "bob", "mallory"))
    exif = Image.Exif()
    exif[0x010E] = "SECRETPLACE"
    data = picture(format="JPEG", exif=exif)
    assert b"SECRETPLACE" in data
    file = await up.upload(dm, data, "../a\u202ecat.jpg", alt="a cat")
    assert bucket.objects() == [f"chat/files/{file}/original", f"chat/files/{file}/thumbnail"]
    assert (bucket.parts(), bucket.uploads()) == ([], [])
    # Before a message has it, only its uploader may see it.
    assert (await down.find(file)).status_code == 404
    sent = await alice.send(dm, "", attachments=[{"id": file}])
    found = await down.download(file)
    shown = {"id": file, "name": "acat.jpg", "mime": "image/jpeg", "size": len(found.content), "alt": "a cat", "width": 800, "height": 600}
    assert (await entry(bob, dm, sent["seq"]))["attachments"] == [shown]
    assert b"SECRETPLACE" not in found.content
    before, after = (Image.open(io.BytesIO(bytes)).convert("RGB").tobytes() for bytes in (data, found.content))
    assert before == after
    assert found.headers["content-type"] == "image/jpeg"
    assert found.headers["content-disposition"] == "inline; filename=\"acat.jpg\"; filename*=UTF-8''acat%2Ejpg"
    assert found.headers["cache-control"] == "private, max-age=300, immutable"
    thumbnail = await down.download(file, variant="thumbnail")
    assert thumbnail.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(thumbnail.content)).size == (640, 480)
    [item] = (await bob.ask("attachment_urls", ids=[file, uuid4()]))["items"]
    assert item["id"] == file and item["url"].startswith(f"{bucket.origin}/{bucket.NAME}/chat/files/{file}/original?")
    assert (await down.http.get(item["thumb"])).content == thumbnail.content
    # The address stays the same for a while, so that browsers cache the picture.
    assert item["url"] in ((await down.find(file)).headers["location"], (await down.find(file)).headers["location"])
    part = await down.http.get(item["url"], headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, found.content[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(found.content)}"
    # Nobody can change an address, not even how the file is treated.
    changed = item["url"].replace("image%2Fjpeg", "text%2Fhtml")
    assert changed != item["url"]
    for forged in (changed, item["url"].replace("original", "thumbnail"), item["url"][:-1] + ("0" if item["url"][-1] != "0" else "1")):
        assert (await down.http.get(forged)).status_code == 403, forged
    for method in ("PUT", "DELETE"):
        assert (await down.http.request(method, item["url"], content=b"x")).status_code == 403
    # Others learn nothing.
    stranger = await gateway.connect("mallory")
    assert (await mallory.find(file)).status_code == 404
    assert (await stranger.ask("attachment_urls", ids=[file]))["items"] == []
    await closed(alice, bob, stranger)


async def test_uploads_continue_with_the_parts_that_are_missing(start, bucket):
    gateway, alice, bob, dm = await two(start, bucket)
    up, mallory = BucketUploader(gateway, "alice"), BucketUploader(gateway, "mallory")
    data = bytes(range(256)) * (2 * PART // 256) + b"the end"
    file = (await up.begin(dm, len(data), "data.bin")).json()["id"]
    answer = (await up.parts(file)).json()
    assert [(p["number"], p["offset"], p["size"]) for p in answer["parts"]] == [
        (1, 0, PART), (2, PART, PART), (3, 2 * PART, 7)]
    assert (await up.http.put(answer["parts"][2]["url"], content=b"another size")).status_code == 403
    assert (await up.put(answer["parts"][2], data)).status_code == 200
    assert (await up.put(answer["parts"][0], data)).status_code == 200
    head = await up.head(file)
    assert (head.headers["upload-offset"], head.headers["upload-length"]) == (str(PART + 7), str(len(data)))
    assert head.headers["file-state"] == "pending"
    early = await up.complete(file)
    assert (early.status_code, early.json()["code"]) == (409, "conflict")
    for request in (mallory.parts, mallory.complete, mallory.head, mallory.delete):
        assert (await request(file)).status_code == 404
    gateway.kill()
    gateway.start()
    up = BucketUploader(gateway, "alice")
    [missing] = (await up.parts(file)).json()["parts"]
    assert missing["number"] == 2
    assert (await up.put(missing, data)).status_code == 200
    assert (await up.parts(file)).json()["parts"] == []
    # Between the parts and the completion.
    gateway.kill()
    gateway.start()
    up, alice = BucketUploader(gateway, "alice"), await gateway.connect("alice")
    # Two requests at once, and one later.
    done = await asyncio.gather(up.complete(file), up.complete(file))
    done.append(await up.complete(file))
    assert [(answer.status_code, answer.json()) for answer in done] == [(200, {"state": "ready"})] * 3
    assert (await up.head(file)).headers["file-state"] == "ready"
    assert (await up.parts(file)).json()["parts"] == []
    # Its addresses write nothing any more.
    assert (await up.put(answer["parts"][2], data)).status_code == 404
    assert bucket.objects() == [f"chat/files/{file}/original"]
    found = await up.download(file)
    assert sha256(found.content) == sha256(data)
    await alice.send(dm, "", attachments=[{"id": file}])
    await closed(alice)


async def test_a_complete_upload_that_nobody_looked_at_becomes_ready(start, bucket):
    """The client went away after its last part: its next question for the offset completes the file."""
    gateway, alice, bob, dm = await two(start, bucket)
    up = BucketUploader(gateway, "alice")
    file = (await up.begin(dm, 10, "data.bin")).json()["id"]
    await refused(alice.send(dm, "", attachments=[{"id": file}]), "conflict")
    [part] = (await up.parts(file)).json()["parts"]
    assert (await up.put(part, b"0123456789")).status_code == 200

    async def ready():
        return (await up.head(file)).headers["file-state"] == "ready"

    await eventually(ready)
    assert (await up.download(file)).content == b"0123456789"
    await closed(alice, bob)


@pytest.mark.embedded
async def test_nothing_hostile_is_shown(start, bucket):
    gateway, alice, bob, dm = await two(start, bucket)
    up = BucketUploader(gateway, "alice")
    for name, data in HOSTILE.items():
        found = await up.download(await up.upload(dm, data, name))
        assert found.content == data
        assert found.headers["content-type"] == "application/octet-stream", name
        assert found.headers["content-disposition"].startswith(f"attachment; filename=\"{name}\"; filename*=UTF-8''")
    await closed(alice, bob)


async def test_a_file_goes_when_its_message_goes(start, bucket):
    gateway, alice, bob, dm = await two(start, bucket)
    up = BucketUploader(gateway, "alice")
    marker = b"the marker of this file"
    one, other = await up.upload(dm, picture()), await up.upload(dm, marker, "a.bin")
    both = await alice.send(dm, "two files", attachments=[{"id": one}, {"id": other}])
    again = await alice.send(dm, "one of them again", attachments=[{"id": other}])
    url = (await up.find(one)).headers["location"]
    await delete(alice, dm, both["seq"])

    async def is_gone():
        return not any(one in key for key in bucket.objects())

    await eventually(is_gone)
    assert (await up.http.get(url)).status_code == 404
    assert (await up.download(other)).content == marker, "another message has it"
    await refused(alice.send(dm, "", attachments=[{"id": one}]), "conflict")
    await delete(alice, dm, again["seq"])
    await emptied(bucket)
    # Uploads that are given up: complete, with one of two parts, without any.
    whole = await up.upload(dm, marker, "b.bin")
    half, none = [(await up.begin(dm, PART + 9, "c.bin")).json()["id"] for _ in range(2)]
    parts = (await up.parts(half)).json()["parts"]
    assert (await up.put(parts[1], bytes(PART) + b"123456789")).status_code == 200
    assert (len(bucket.parts()), len(bucket.uploads())) == (1, 2)
    for file in (whole, half, none):
        assert (await up.delete(file)).status_code == 204
    await emptied(bucket)
    assert bucket.bytes_with(marker) == []
    assert (await up.put(parts[1], bytes(PART) + b"123456789")).status_code == 404
    assert (await up.complete(half)).status_code == 404
    assert (await up.parts(half)).status_code == 404
    await erased(gateway, 5)
    await closed(alice, bob)


async def test_messages_continue_without_the_storage(start, bucket):
    gateway, alice, bob, dm = await two(start, bucket)
    up = BucketUploader(gateway, "alice")
    kept = await up.upload(dm, b"kept", "a.bin")
    sent = await alice.send(dm, "", attachments=[{"id": kept}])
    half = (await up.begin(dm, 4, "b.bin")).json()["id"]
    bucket.kill()
    for request in (up.begin(dm, 4), up.parts(half), up.complete(half), up.head(half)):
        answer = await request
        assert answer.status_code == 503
    assert (await up.begin(dm, 4)).json()["code"] == "unavailable"
    assert (await alice.send(dm, "still"))["seq"] == sent["seq"] + 1
    assert len((await bob.ask("attachment_urls", ids=[kept]))["items"]) == 1
    await delete(alice, dm, sent["seq"])

    async def has_failed():
        return any("could not erase a file" in line.get("message", "") for line in gateway.log())

    await eventually(has_failed)
    gateway.kill()
    # It also starts without the storage.
    gateway.start()
    alice = await gateway.connect("alice")
    await alice.send(dm, "again")
    bucket.start()
    up = BucketUploader(gateway, "alice")
    file = await up.upload(dm, b"after", "c.bin")
    assert (await up.download(file)).content == b"after"

    def failures():
        return [line for line in gateway.log() if line["level"] == "ERROR" and "bucket" in line["message"]]

    assert failures() and bucket.SECRET not in json.dumps(failures()) and "X-Amz-Signature" not in json.dumps(failures())
    await closed(alice)


@pytest.mark.embedded
async def test_wrong_keys_and_buckets_are_named_in_the_log(start, bucket):
    for wrong, code, setting in [
        ({"attachments__s3__bucket": "another-bucket"}, "NoSuchBucket", "attachments.s3.bucket"),
        ({"attachments__s3__secret_key": "not this one"}, "SignatureDoesNotMatch", "attachments.s3.secret_key"),
    ]:
        gateway = start(**{**bucket.settings(), **wrong})

        async def named():
            return any(code in text and setting in text for text in map(json.dumps, gateway.log()))

        await eventually(named)
        alice = await gateway.connect("alice")
        dm = await alice.create("dm", "bob")
        answer = await BucketUploader(gateway, "alice").begin(dm, 5)
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        assert (await alice.send(dm, "hello"))["seq"]
        await closed(alice)


@pytest.mark.embedded
async def test_settings_commands_and_other_ways_to_upload(start, bucket):
    gateway, alice, bob, dm = await two(start, bucket, client__origins='["https://chat.example.org"]')
    up = BucketUploader(gateway, "alice")
    # tus is for directories.
    headers = up.headers(**TUS, **{"upload-length": "1", "upload-metadata": metadata(conversation=dm, filename="x")})
    answer = await up.http.post("/v1/attachments", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request") and "tus" in answer.json()["message"]
    file = (await up.begin(dm, 1)).json()["id"]
    answer = await up.append(file, 0, b"x")
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    assert (await up.http.get(f"/v1/files/{file}/original?e=1&s=0")).status_code in (403, 404)
    # The page may show and send files of the bucket.
    page = urllib.request.urlopen(f"http://{gateway.client}/")
    policy = page.headers["content-security-policy"]
    place = f"{bucket.origin}/{bucket.NAME}/"
    for kind in ("img", "media", "connect"):
        assert f"{kind}-src 'self' {place};" in policy
    shown = gateway.command("config", "show").stdout
    assert 'attachments.s3.secret_key = "***"' in shown and bucket.SECRET not in shown
    [rule] = json.loads(gateway.command("attachments", "cors").stdout)["CORSRules"]
    assert (rule["AllowedOrigins"], rule["AllowedMethods"]) == (["https://chat.example.org"], ["GET", "PUT", "HEAD"])
    [rule] = json.loads(gateway.command("attachments", "lifecycle").stdout)["Rules"]
    assert (rule["Filter"], rule["Expiration"]) == ({"Prefix": "chat/incoming/"}, {"Days": 2})
    for setting, value in [
        ("endpoint", "s3.example.org"), ("endpoint", "https://s3.example.org/path"), ("bucket", "No_Bucket"),
        ("prefix", "chat"), ("prefix", "/chat/"), ("prefix", "a/../"), ("region", ""), ("access_key", ""),
    ]:
        gateway.settings[f"attachments__s3__{setting}"] = value
        checked = gateway.command("config", "check", check=False)
        assert checked.returncode != 0 and f"attachments.s3.{setting}" in checked.stderr, (setting, value, checked.stderr)
        gateway.settings |= bucket.settings(attachments__s3__region="us-east-1")
    assert gateway.command("config", "check").returncode == 0
    await closed(alice, bob)


@pytest.mark.cassandra
async def test_every_gateway_of_a_cluster_takes_and_gives_files(bucket):
    cluster = Three(**UNLIMITED, **bucket.settings()).start()
    try:
        alice, bob = await cluster.connect("alice"), await cluster.connect("bob")
        dm = await alice.create("dm", "bob")
        await alice.send(dm, "hello")
        ups = [BucketUploader(node, "alice") for node in cluster.nodes]
        data = bytes(PART) + b"the last part"
        # Begun on one gateway, addresses from another, completed by all three at once.
        file = (await ups[0].begin(dm, len(data), "data.bin")).json()["id"]
        for part in (await ups[1].parts(file)).json()["parts"]:
            assert (await ups[1].put(part, data)).status_code == 200
        done = await asyncio.gather(*(up.complete(file) for up in ups))
        assert [(answer.status_code, answer.json()) for answer in done] == [(200, {"state": "ready"})] * 3
        shown = await ups[2].upload(dm, picture())
        assert sorted(bucket.objects()) == sorted(
            [f"chat/files/{file}/original", f"chat/files/{shown}/original", f"chat/files/{shown}/thumbnail"])
        # Her sessions are told, wherever they are.
        for ready in (file, shown):
            told = await alice.event("attachment", lambda event: event["file"] == ready)
            assert told["state"] == "ready"
        sent = await alice.send(dm, "", attachments=[{"id": file}, {"id": shown}])
        for node in cluster.nodes:
            down = BucketUploader(node, "bob")
            assert sha256((await down.download(file)).content) == sha256(data)
            assert (await down.find(shown, variant="thumbnail")).status_code == 302
            assert (await BucketUploader(node, "mallory").find(file)).status_code == 404
        # One of them dies, also in the middle of an upload.
        half = (await ups[2].begin(dm, 4, "half.bin")).json()["id"]
        [part] = (await ups[2].parts(half)).json()["parts"]
        assert (await ups[2].put(part, b"half")).status_code == 200
        cluster.nodes[2].kill()
        await closed(alice, bob)
        alice = await cluster.nodes[0].connect("alice")
        assert (await ups[0].complete(half)).json() == {"state": "ready"}
        await delete(alice, dm, sent["seq"])
        assert (await ups[1].delete(half)).status_code == 204
        await emptied(bucket)
        await closed(alice)
    finally:
        cluster.close()
        clean(cluster.directory)


@pytest.mark.cassandra
async def test_what_a_user_may_upload_holds_over_all_gateways(bucket):
    limits = {"attachments__user_mib_per_day": 8, "attachments__uploads_per_minute": 20}
    cluster = Three(**UNLIMITED, **bucket.settings(**limits)).start()
    try:
        alice = await cluster.connect("alice")
        dm = await alice.create("dm", "bob")
        ups = [BucketUploader(node, "alice") for node in cluster.nodes]

        async def statuses(size, count):
            begun = await asyncio.gather(*(up.begin(dm, size, "data.bin") for up in ups for _ in range(count)))
            return sorted(answer.status_code for answer in begun)

        assert await statuses(1 << 20, 4) == [201] * 8 + [413] * 4
        refused = await statuses(1 << 20, 6)
        assert set(refused) <= {413, 429} and 429 in refused, refused
        await closed(alice)
    finally:
        cluster.close()
        clean(cluster.directory)


@pytest.mark.embedded
async def test_a_file_without_bytes_is_ready_at_once_in_a_bucket(start, bucket):
    gateway = start(**UNLIMITED, **bucket.settings())
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    up = BucketUploader(gateway, "alice")
    begun = await up.begin(dm, 0, "empty.txt")
    assert (begun.status_code, begun.headers["file-state"]) == (201, "ready")
    file = begun.json()["id"]
    assert bucket.objects() == [f"chat/files/{file}/original"]
    assert bucket.uploads() == [], "nothing would end it"
    assert (await up.parts(file)).json()["parts"] == []
    assert (await up.complete(file)).json() == {"state": "ready"}
    assert (await up.download(file)).content == b""
    await closed(alice)


@pytest.mark.embedded
async def test_a_scanner_blocks_what_it_finds_in_a_bucket(start, bucket):
    clamd = Clamd().start()
    try:
        gateway, alice, bob, dm = await two(start, bucket, attachments__scanner=clamd.address)
        up = BucketUploader(gateway, "alice")
        harmless = await up.upload(dm, picture())
        await alice.send(dm, "", attachments=[{"id": harmless}])
        kept = bucket.objects()
        data = b"x" * 70_000 + clamd.MARKER + b"x" * 70_000
        file = (await up.begin(dm, len(data), "data.bin")).json()["id"]
        for part in (await up.parts(file)).json()["parts"]:
            await up.put(part, data)
        assert (await up.complete(file)).json() == {"state": "blocked"}
        assert (bucket.objects(), bucket.parts(), bucket.uploads()) == (kept, [], []), "its bytes go at once"
        await refused(alice.send(dm, "", attachments=[{"id": file}]), "conflict")
        await closed(alice, bob)
    finally:
        clamd.stop()
